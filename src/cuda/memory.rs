//! How much of a GPU this process takes, as the driver's management library says: cuBLAS, the driver and every allocation
//! included, other processes on the same GPU not.

use cudarc::driver::CudaContext;
use nvml_wrapper::Nvml;
use nvml_wrapper::enums::device::UsedGpuMemory;

/// The management library's view of one GPU; absent where there is none, as in some containers.
#[derive(Debug)]
pub(super) struct ProcessMemory {
    nvml: Option<(Nvml, String)>,
}

impl ProcessMemory {
    /// Finds the GPU by its UUID: numbers differ between the two libraries once `CUDA_VISIBLE_DEVICES` is set.
    pub fn open(context: &CudaContext) -> Self {
        let uuid = context.uuid().ok().map(|uuid| {
            let hex: String = uuid.bytes.iter().map(|byte| format!("{:02x}", *byte as u8)).collect();
            let part = |range: std::ops::Range<usize>| hex.get(range).unwrap_or_default().to_owned();
            format!("GPU-{}-{}-{}-{}-{}", part(0..8), part(8..12), part(12..16), part(16..20), part(20..32))
        });
        Self { nvml: uuid.and_then(|uuid| Some((Nvml::init().ok()?, uuid))) }
    }

    /// Bytes that this process takes; `None` if the library does not say, for instance because a container hides
    /// process numbers.
    pub fn bytes(&self) -> Option<u64> {
        let (nvml, uuid) = self.nvml.as_ref()?;
        let device = nvml.device_by_uuid(uuid.as_str()).ok()?;
        let processes = device.running_compute_processes().ok()?;
        let own = std::process::id();
        processes.iter().find(|process| process.pid == own).and_then(|process| match process.used_gpu_memory {
            UsedGpuMemory::Used(bytes) => Some(bytes),
            UsedGpuMemory::Unavailable => None,
        })
    }
}
