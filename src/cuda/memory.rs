//! What the driver's management library says of a GPU: how much of it this process takes, with cuBLAS, the driver and every
//! allocation and without other processes on the same GPU, and how fast its link to the host is.

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

    /// Bytes a second that the link to the host carries by its specification, each way; `None` if the library does not say.
    pub fn link_bytes_per_second(&self) -> Option<f64> {
        let (nvml, uuid) = self.nvml.as_ref()?;
        let device = nvml.device_by_uuid(uuid.as_str()).ok()?;
        // The width as it is: a card in a narrow slot; the generation as it can be: an idle link rests at a lower one.
        let lanes = f64::from(device.current_pcie_link_width().ok()?);
        let per_lane = match device.max_pcie_link_gen().ok()? {
            0 => return None,
            1 => 0.25e9,
            2 => 0.5e9,
            // 128 of 130 bits, at 8, 16, 32 and 64 GT/s.
            generation => 0.985e9 * f64::from(1u32 << (generation.min(6) - 3)),
        };
        Some(lanes * per_lane)
    }

    /// GPUs of this machine, whether this process may use them or not; 0 if the library does not say.
    pub fn gpus_of_machine(&self) -> u32 {
        self.nvml.as_ref().and_then(|(nvml, _)| nvml.device_count().ok()).unwrap_or(0)
    }
}
