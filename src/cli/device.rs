//! Which device a run computes on, in the words of `check` and of errors.

use crate::config::DeviceChoice;
use crate::train::engine;
use serde::Serialize;

/// A device and the ground for choosing it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Device {
    /// `cpu` or `cuda:N`.
    pub name: String,
    pub reason: String,
}

impl Device {
    fn new(name: impl Into<String>, reason: impl Into<String>) -> Self {
        Self { name: name.into(), reason: reason.into() }
    }
}

/// The device that `choice` comes to on this machine. Never fails: a GPU that is asked for by number and not here may be
/// on the node that runs the job.
pub fn describe(choice: &DeviceChoice) -> Device {
    match (choice, engine::find_gpu(choice)) {
        (DeviceChoice::Cpu, _) => Device::new("cpu", "asked for"),
        (DeviceChoice::Auto, Ok(name)) => Device::new("cuda:0", name),
        (DeviceChoice::Auto, Err(error)) => Device::new("cpu", format!("no CUDA device: {}", error.what)),
        (DeviceChoice::Cuda(number), Ok(name)) => Device::new(format!("cuda:{number}"), name),
        (DeviceChoice::Cuda(number), Err(error)) => {
            Device::new(format!("cuda:{number}"), format!("not on this machine: {}", error.what))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_always_named_with_its_reason() {
        assert_eq!(describe(&DeviceChoice::Cpu), Device::new("cpu", "asked for"));
        let automatic = describe(&DeviceChoice::Auto);
        match automatic.name.as_str() {
            "cpu" => assert!(automatic.reason.starts_with("no CUDA device: "), "{automatic:?}"),
            name => assert_eq!(name, "cuda:0"),
        }
        let far = describe(&DeviceChoice::Cuda(4000));
        assert_eq!(far.name, "cuda:4000");
        assert!(far.reason.starts_with("not on this machine: "), "{far:?}");
    }
}
