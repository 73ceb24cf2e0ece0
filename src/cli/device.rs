//! Which device a run computes on, for `check`: the CPU, since training on a GPU is not in this version. A GPU that is
//! there is named, so that nobody takes its idleness for a fault.

use crate::config::DeviceChoice;
use serde::Serialize;

/// A device and the ground for choosing it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Device {
    /// `cpu`.
    pub name: String,
    pub reason: String,
}

impl Device {
    fn new(name: &str, reason: impl Into<String>) -> Self {
        Self { name: name.to_owned(), reason: reason.into() }
    }
}

/// The device that `choice` comes to on this machine. Never fails.
pub fn describe(choice: &DeviceChoice) -> Device {
    match choice {
        DeviceChoice::Cpu => Device::new("cpu", "asked for"),
        DeviceChoice::Auto => automatic(),
    }
}

const NO_GPU_TRAINING: &str = "training on a GPU is not in this version";

#[cfg(not(feature = "cuda"))]
fn automatic() -> Device {
    Device::new("cpu", NO_GPU_TRAINING)
}

#[cfg(feature = "cuda")]
fn automatic() -> Device {
    match first_gpu() {
        Ok(name) => Device::new("cpu", format!("{NO_GPU_TRAINING}; there is one: {name}")),
        Err(reason) => Device::new("cpu", format!("{NO_GPU_TRAINING}; there is none: {reason}")),
    }
}

/// Name of the first GPU. The driver's library is opened here, at run time, so that the same binary starts on a login
/// node that has none.
#[cfg(feature = "cuda")]
fn first_gpu() -> Result<String, String> {
    use cudarc::driver::{CudaContext, sys};
    // SAFETY: asks the dynamic loader for the library and nothing else; every other call of cudarc panics where the
    // library is absent, so this has to come first.
    if !unsafe { sys::is_culib_present() } {
        return Err("the CUDA driver's library (libcuda) is not installed".to_owned());
    }
    let count = CudaContext::device_count().map_err(|error| error.to_string())?;
    if count < 1 {
        return Err("the driver lists none".to_owned());
    }
    CudaContext::new(0).and_then(|context| context.name()).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_always_named_with_its_reason() {
        assert_eq!(describe(&DeviceChoice::Cpu), Device::new("cpu", "asked for"));
        let automatic = describe(&DeviceChoice::Auto);
        assert_eq!(automatic.name, "cpu");
        assert!(automatic.reason.starts_with(NO_GPU_TRAINING), "{automatic:?}");
        assert_eq!(automatic.reason.contains("there is "), cfg!(feature = "cuda"), "{automatic:?}");
    }
}
