//! The project's own kernels: machine code embedded by the build, loaded once a device.

use super::launch::device_error;
use crate::{Error, Result};
use cudarc::driver::{CudaContext, CudaFunction, CudaModule, sys};
use cudarc::nvrtc::Ptx;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

mod images {
    include!(concat!(env!("OUT_DIR"), "/kernels.rs"));
}

pub(super) use images::{NORM_MODULATE_PTX, WEIGHTED_MSE_PTX};

/// Loaded modules, and the functions found in them so far.
#[derive(Debug)]
pub(crate) struct Kernels {
    modules: Vec<Arc<CudaModule>>,
    functions: Mutex<BTreeMap<String, Option<CudaFunction>>>,
}

impl Kernels {
    /// Loads every image for the context's device.
    ///
    /// # Errors
    /// If the device is older than the kernels, or the driver than the compiler.
    pub fn load(context: &Arc<CudaContext>) -> Result<Self> {
        let modules = images::IMAGES
            .iter()
            .map(|(name, image)| {
                context
                    .load_module(Ptx::from_binary(image.to_vec()))
                    .map_err(|error| device_error(error, format!("loading kernels/{name}.cu")))
            })
            .collect::<Result<_>>()?;
        Ok(Self { modules, functions: Mutex::default() })
    }

    /// Whether this device has a kernel: some are for Hopper alone.
    pub fn has(&self, name: &str) -> bool {
        self.find(name).is_some()
    }

    pub fn function(&self, name: &str) -> Result<CudaFunction> {
        self.find(name).ok_or_else(|| Error::crash(format!("no kernel named {name} for this device")))
    }

    fn find(&self, name: &str) -> Option<CudaFunction> {
        let mut functions = self.functions.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = functions.get(name) {
            return known.clone();
        }
        let found = self.modules.iter().find_map(|module| module.load_function(name).ok());
        if let Some(function) = &found {
            allow_shared_memory(function);
        }
        functions.insert(name.to_owned(), found.clone());
        found
    }
}

/// A block gets more than 48 KB of dynamic shared memory only if the function asks for it. A kernel that needs more than
/// the device has fails at its launch, with its name.
fn allow_shared_memory(function: &CudaFunction) {
    const LARGEST: i32 = 227 * 1024;
    let attribute = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    let fixed =
        function.get_attribute(sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES).unwrap_or_default();
    for bytes in [LARGEST - fixed, 163 * 1024 - fixed, 99 * 1024 - fixed] {
        if function.set_attribute(attribute, bytes).is_ok() {
            break;
        }
    }
}
