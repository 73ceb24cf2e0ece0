//! Opening a GPU: every way it can be absent is told apart, and told.

use super::kernels::Kernels;
use super::launch::{Launcher, device_error};
use super::memory::ProcessMemory;
use super::timeline::Timeline;
use super::warm::Warming;
use crate::{Error, Exit, Result};
use candle_core::Device;
use cudarc::driver::{CudaContext, CudaStream, result, sys};
use std::sync::{Arc, Mutex, PoisonError};

/// The oldest architecture that the kernels are compiled for.
const OLDEST: (i32, i32) = (8, 0);

/// One GPU, opened for computing: candle's device and the project's kernels share its stream, so that everything is
/// in order without a word (but for copies to the host's memory, which `host.rs` puts in order).
#[derive(Debug)]
pub(crate) struct Gpu {
    pub device: Device,
    pub stream: Arc<CudaStream>,
    kernels: Arc<Kernels>,
    pub timeline: Arc<Timeline>,
    /// `NVIDIA H200`
    pub name: String,
    /// Of all its memory.
    pub total_bytes: u64,
    /// FLOP a second of dense bf16 products by the datasheet, if the architecture is known.
    pub peak_flops: Option<f64>,
    process: ProcessMemory,
    warming: Mutex<Warming>,
}

/// A GPU by what the driver says of it.
#[derive(Clone, Debug)]
pub(crate) struct Found {
    pub name: String,
    pub capability: (i32, i32),
    pub total_bytes: u64,
}

fn unavailable(code: &'static str, what: impl std::fmt::Display) -> Error {
    Error::new(Exit::Unavailable, code, what)
}

/// The GPUs of this machine.
///
/// # Errors
/// If there is no driver or no GPU; the sentence is what a user on a login node reads.
pub(crate) fn list() -> Result<Vec<Found>> {
    // SAFETY: the library's initialisation is the driver's own; it is loaded for good.
    if let Err(error) = unsafe { libloading::Library::new("libcuda.so.1") } {
        return Err(unavailable("no_driver", format!("the NVIDIA driver's library is not here: {error}"))
            .hint("ask for a node with a GPU, or set device: cpu"));
    }
    result::init().map_err(|error| device_error(error, "starting the NVIDIA driver"))?;
    let count = CudaContext::device_count().map_err(|error| device_error(error, "counting GPUs"))?;
    (0..count)
        .map(|ordinal| {
            let failed = |error| device_error(error, format!("asking about GPU {ordinal}"));
            let device = result::device::get(ordinal).map_err(failed)?;
            // SAFETY: `device` came from the driver just now.
            let attribute = |attribute| unsafe { result::device::get_attribute(device, attribute) }.map_err(failed);
            use sys::CUdevice_attribute_enum as Attribute;
            Ok(Found {
                name: result::device::get_name(device).map_err(failed)?,
                capability: (
                    attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                    attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
                ),
                // SAFETY: as above.
                total_bytes: unsafe { result::device::total_mem(device) }.map_err(failed)? as u64,
            })
        })
        .collect()
}

/// The GPU of this number, if the kernels can run on it.
pub(crate) fn find(ordinal: usize) -> Result<Found> {
    let found = list()?;
    let count = found.len();
    let Some(gpu) = found.into_iter().nth(ordinal) else {
        return Err(unavailable("no_gpu", format!("there is no GPU {ordinal}: the driver lists {count}"))
            .hint("device: cuda:0 is the first that CUDA_VISIBLE_DEVICES leaves"));
    };
    if gpu.capability < OLDEST {
        let (major, minor) = gpu.capability;
        let what = format!("{} has compute capability {major}.{minor}, the kernels need 8.0 or later", gpu.name);
        return Err(unavailable("gpu_not_supported", what).hint("take an A100, H100 or later, or set device: cpu"));
    }
    Ok(gpu)
}

impl Gpu {
    /// Opens GPU `ordinal` with a stream of its own.
    pub fn open(ordinal: usize) -> Result<Self> {
        let found = find(ordinal)?;
        // First of all: the libraries that candle opens take a second or two, and may as well do so meanwhile.
        let warming = Mutex::new(Warming::begin(ordinal));
        let device = Device::new_cuda_with_stream(ordinal).map_err(|error| {
            unavailable("cuda_error", format!("opening GPU {ordinal} ({}): {error}", found.name)).hint(
                "candle needs the driver, cuBLAS and cuRAND of CUDA 13 (PyPI: nvidia-cublas, nvidia-curand); \
                 CUDA_LAZY_PATH names a folder to look in",
            )
        })?;
        let cuda = device.as_cuda_device()?;
        let stream = cuda.cuda_stream();
        // SAFETY: every buffer of candle's is used on this one stream alone. What `HostLink` copies on another lies in the arena,
        // and is ordered by events of its own.
        unsafe { cuda.disable_event_tracking() };
        let context = Arc::clone(stream.context());
        keep_memory(&context)?;
        let kernels = Arc::new(Kernels::load(&context)?);
        let process = ProcessMemory::open(&context);
        let peak_flops = match found.capability {
            (8, 0) => Some(312e12),
            (9, 0) => Some(989e12),
            (10, 0) => Some(2250e12),
            _ => None,
        };
        Ok(Self {
            device,
            stream,
            kernels,
            timeline: Arc::default(),
            name: found.name,
            total_bytes: found.total_bytes,
            peak_flops,
            process,
            warming,
        })
    }

    /// Waits until candle's kernels are compiled, if that is still going on.
    pub fn wait_for_kernels(&self) {
        self.warming.lock().unwrap_or_else(PoisonError::into_inner).finish();
    }

    pub fn launcher(&self) -> Launcher {
        Launcher::new(Arc::clone(&self.stream), Arc::clone(&self.kernels), Arc::clone(&self.timeline))
    }

    /// Bytes that nobody uses, and bytes in all.
    pub fn memory(&self) -> Result<(u64, u64)> {
        let failed = |error| device_error(error, "asking for free memory");
        let (free, total) = self.stream.context().mem_get_info().map_err(failed)?;
        Ok((free as u64, total as u64))
    }

    /// Bytes that the allocator holds and nobody uses.
    pub fn unused_bytes(&self) -> Result<u64> {
        use sys::CUmemPool_attribute_enum as Attribute;
        let reserved = self.pool(Attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)?;
        Ok(reserved.saturating_sub(self.used_bytes()?))
    }

    /// Bytes that are allocated.
    pub fn used_bytes(&self) -> Result<u64> {
        self.pool(sys::CUmemPool_attribute_enum::CU_MEMPOOL_ATTR_USED_MEM_CURRENT)
    }

    /// Bytes that this process takes: by the management library, or what the allocator holds where that is silent.
    pub fn process_bytes(&self) -> Result<u64> {
        let reserved = || self.pool(sys::CUmemPool_attribute_enum::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT);
        self.process.bytes().map_or_else(reserved, Ok)
    }

    /// Bytes a second that the link to the host carries by its specification, if that is known.
    pub fn link_bytes_per_second(&self) -> Option<f64> {
        self.process.link_bytes_per_second()
    }

    /// GPUs of this machine, at least those that this process sees.
    pub fn gpus_of_machine(&self) -> u32 {
        let seen = CudaContext::device_count().map_or(1, |count| count.max(1) as u32);
        self.process.gpus_of_machine().max(seen)
    }

    /// The most bytes that were allocated at once since this was last asked.
    pub fn take_peak(&self) -> Result<u64> {
        let attribute = sys::CUmemPool_attribute_enum::CU_MEMPOOL_ATTR_USED_MEM_HIGH;
        let peak = self.pool(attribute)?;
        let mut zero = 0u64;
        // SAFETY: the pool belongs to this device, and the attribute is a u64 that may be set to 0, which starts it anew.
        unsafe {
            let pool = result::device::get_default_mem_pool(self.stream.context().cu_device());
            pool.and_then(|pool| result::mem_pool::set_attribute(pool, attribute, std::ptr::from_mut(&mut zero).cast()))
        }
        .map_err(|error| device_error(error, "asking the allocator"))?;
        Ok(peak)
    }

    /// A number of bytes that the allocator knows.
    fn pool(&self, attribute: sys::CUmemPool_attribute) -> Result<u64> {
        let mut bytes = 0u64;
        // SAFETY: the pool belongs to this device, and the attributes asked for are a u64.
        unsafe {
            let pool = result::device::get_default_mem_pool(self.stream.context().cu_device());
            pool.and_then(|pool| {
                sys::cuMemPoolGetAttribute(pool, attribute, std::ptr::from_mut(&mut bytes).cast()).result()
            })
        }
        .map_err(|error| device_error(error, "asking the allocator"))?;
        Ok(bytes)
    }

    /// Waits until everything asked for is done; an error of any earlier launch comes out here at the latest.
    pub fn synchronize(&self) -> Result<()> {
        self.stream.synchronize().map_err(|error| device_error(error, "waiting for the GPU"))
    }
}

/// Has the allocator keep what is given back: by default it returns memory to the system at each wait, and asking for a
/// gigabyte again takes 30 ms.
fn keep_memory(context: &Arc<CudaContext>) -> Result<()> {
    let mut threshold = u64::MAX;
    // SAFETY: the pool belongs to this device, and the attribute is a u64.
    unsafe {
        let pool = result::device::get_default_mem_pool(context.cu_device());
        pool.and_then(|pool| {
            let attribute = sys::CUmemPool_attribute_enum::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
            result::mem_pool::set_attribute(pool, attribute, std::ptr::from_mut(&mut threshold).cast())
        })
    }
    .map_err(|error| device_error(error, "telling the allocator to keep memory"))
}
