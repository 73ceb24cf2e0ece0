//! Device memory as plain addresses, and the one place that launches kernels.
//!
//! The trunk names each tensor once and then is one call a line, so its tensors are addresses with a length and an
//! element type, cut from an arena, and not owners. A launcher without a device counts what would be allocated and
//! launches nothing: the same program that computes also predicts its memory.

use super::kernels::Kernels;
use super::timeline::Timeline;
use crate::{Error, Exit, Result};
use cudarc::driver::{CudaStream, DriverError, LaunchConfig, sys};
use std::marker::PhantomData;
use std::sync::Arc;

/// What the elements of a device tensor are.
pub(crate) trait Element: Copy {
    /// Bytes of one, given the bytes of an operand.
    fn bytes(operand: usize) -> usize;
}

/// An element in the dtype of the parameters, bf16 or f32: what matrix products read and write.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Operand {}

impl Element for Operand {
    fn bytes(operand: usize) -> usize {
        operand
    }
}

impl Element for f32 {
    fn bytes(_: usize) -> usize {
        4
    }
}

impl Element for f64 {
    fn bytes(_: usize) -> usize {
        8
    }
}

impl Element for i32 {
    fn bytes(_: usize) -> usize {
        4
    }
}

impl Element for u64 {
    fn bytes(_: usize) -> usize {
        8
    }
}

/// `len` elements in device memory. Owns nothing: the arena or buffer it was cut from must outlive its use.
#[derive(Debug)]
pub(crate) struct Slice<E> {
    address: u64,
    len: usize,
    element: PhantomData<E>,
}

impl<E> Clone for Slice<E> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<E> Copy for Slice<E> {}

impl<E> Slice<E> {
    pub const fn new(address: u64, len: usize) -> Self {
        Self { address, len, element: PhantomData }
    }

    /// What a kernel takes for "not wanted".
    pub const fn null() -> Self {
        Self::new(0, 0)
    }

    pub fn address(&self) -> u64 {
        self.address
    }

    pub fn len(&self) -> usize {
        self.len
    }
}

impl<E: Element> Slice<E> {
    /// `len` elements from `offset` on; `operand` is the bytes of an operand.
    pub fn part(&self, offset: usize, len: usize, operand: usize) -> Self {
        debug_assert!(self.address == 0 || offset + len <= self.len);
        Self::new(self.address + (offset * E::bytes(operand)) as u64, len)
    }
}

/// How the bulk copy engine reads a tensor; passed to a kernel by value.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
pub(crate) struct TensorMap(pub sys::CUtensorMap);

// SAFETY: a plain 128-byte descriptor that the driver made for device code.
unsafe impl cudarc::driver::DeviceRepr for TensorMap {}

/// One argument of a kernel, by value.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Argument {
    Map(TensorMap),
    Address(u64),
    Int(i32),
    Long(i64),
    Float(f32),
}

impl<E> From<Slice<E>> for Argument {
    fn from(slice: Slice<E>) -> Self {
        Self::Address(slice.address)
    }
}

impl From<i32> for Argument {
    fn from(value: i32) -> Self {
        Self::Int(value)
    }
}

impl From<i64> for Argument {
    fn from(value: i64) -> Self {
        Self::Long(value)
    }
}

impl From<f32> for Argument {
    fn from(value: f32) -> Self {
        Self::Float(value)
    }
}

/// `int` of a size; sizes of one dimension stay far below 2^31.
pub(crate) fn int(value: usize) -> Result<Argument> {
    i32::try_from(value)
        .map(Argument::Int)
        .map_err(|_| Error::crash(format!("a dimension of {value} does not fit a kernel's int")))
}

/// `long long` of a count.
pub(crate) fn long(value: usize) -> Argument {
    Argument::Long(value as i64)
}

/// Grid and block of a launch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grid {
    pub blocks: [usize; 2],
    pub threads: u32,
    pub shared_bytes: u32,
}

impl Grid {
    pub fn new(blocks: usize, threads: u32) -> Self {
        Self { blocks: [blocks, 1], threads, shared_bytes: 0 }
    }

    /// Blocks in two dimensions.
    pub fn plane(x: usize, y: usize, threads: u32) -> Self {
        Self { blocks: [x, y], threads, shared_bytes: 0 }
    }

    pub fn shared(self, shared_bytes: u32) -> Self {
        Self { shared_bytes, ..self }
    }
}

/// Launches kernels on one stream, or pretends to.
#[derive(Clone, Debug)]
pub(crate) struct Launcher {
    device: Option<(Arc<CudaStream>, Arc<Kernels>, Arc<Timeline>)>,
}

impl Launcher {
    pub fn new(stream: Arc<CudaStream>, kernels: Arc<Kernels>, timeline: Arc<Timeline>) -> Self {
        Self { device: Some((stream, kernels, timeline)) }
    }

    /// Launches nothing: for counting memory.
    pub fn counting() -> Self {
        Self { device: None }
    }

    /// The stream, unless nothing is launched.
    pub fn stream(&self) -> Option<&Arc<CudaStream>> {
        self.device.as_ref().map(|(stream, ..)| stream)
    }

    /// Whether the kernels for this device include `name`.
    pub fn has(&self, name: &str) -> bool {
        self.device.as_ref().is_some_and(|(_, kernels, _)| kernels.has(name))
    }

    /// Runs kernel `name`. `shapes` says what it was asked to do, for the error.
    pub fn launch(&self, name: &str, grid: Grid, arguments: &[Argument]) -> Result<()> {
        let Some((stream, kernels, timeline)) = &self.device else { return Ok(()) };
        let [x, y] = grid.blocks;
        if x == 0 || y == 0 {
            return Ok(());
        }
        let function = kernels.function(name)?;
        let config = LaunchConfig {
            grid_dim: (x as u32, y as u32, 1),
            block_dim: (grid.threads, 1, 1),
            shared_mem_bytes: grid.shared_bytes,
        };
        let mut launch = stream.launch_builder(&function);
        for argument in arguments {
            match argument {
                Argument::Map(value) => cudarc::driver::PushKernelArg::arg(&mut launch, value),
                Argument::Address(value) => cudarc::driver::PushKernelArg::arg(&mut launch, value),
                Argument::Int(value) => cudarc::driver::PushKernelArg::arg(&mut launch, value),
                Argument::Long(value) => cudarc::driver::PushKernelArg::arg(&mut launch, value),
                Argument::Float(value) => cudarc::driver::PushKernelArg::arg(&mut launch, value),
            };
        }
        // SAFETY: the launchers in `ops` pass the arguments in the order and types that the kernel declares, and slices
        // cut from live buffers that are as long as the kernel's description says.
        let mut launched = || unsafe { launch.launch(config) };
        timeline.around(
            stream,
            || format!("{name} on {x} x {y} blocks"),
            || {
                launched().map_err(|error| {
                    device_error(
                        error,
                        format!("kernel {name} on {x} x {y} blocks of {} threads, {arguments:?}", grid.threads),
                    )
                })
            },
        )?;
        Ok(())
    }

    /// Sets bytes to zero.
    pub fn zero<E: Element>(&self, slice: Slice<E>, operand: usize) -> Result<()> {
        let Some((stream, ..)) = &self.device else { return Ok(()) };
        let bytes = slice.len() * E::bytes(operand);
        // SAFETY: the slice lies in a live allocation of at least these bytes.
        unsafe { cudarc::driver::result::memset_d8_async(slice.address(), 0, bytes, stream.cu_stream()) }
            .map_err(|error| device_error(error, format!("setting {bytes} bytes to zero")))
    }

    /// Copies between two places on the device.
    pub fn copy<E: Element>(&self, from: Slice<E>, to: Slice<E>, operand: usize) -> Result<()> {
        let Some((stream, ..)) = &self.device else { return Ok(()) };
        if from.len() != to.len() {
            return Err(Error::crash(format!("a copy of {} elements into {}", from.len(), to.len())));
        }
        let bytes = from.len() * E::bytes(operand);
        // SAFETY: both slices lie in live allocations of at least these bytes.
        unsafe { cudarc::driver::result::memcpy_dtod_async(to.address(), from.address(), bytes, stream.cu_stream()) }
            .map_err(|error| device_error(error, format!("copying {bytes} bytes on the device")))
    }
}

/// A failed CUDA call: what was done, and what its kind means to the user.
pub(crate) fn device_error(error: DriverError, what: impl std::fmt::Display) -> Error {
    use sys::cudaError_enum as Code;
    let (code, hint) = match error.0 {
        Code::CUDA_ERROR_OUT_OF_MEMORY => (
            "gpu_out_of_memory",
            "take a smaller batch (train.batch_size, packing.token_budget) or a GPU with more memory; \
             `check` prints what the recipe needs",
        ),
        Code::CUDA_ERROR_NO_DEVICE => ("no_gpu", "ask the scheduler for a GPU, or set device: cpu"),
        Code::CUDA_ERROR_NO_BINARY_FOR_GPU
        | Code::CUDA_ERROR_INVALID_PTX
        | Code::CUDA_ERROR_UNSUPPORTED_PTX_VERSION => {
            ("gpu_not_supported", "the kernels need compute capability 8.0 or later and driver 580 or later")
        }
        Code::CUDA_ERROR_ECC_UNCORRECTABLE
        | Code::CUDA_ERROR_HARDWARE_STACK_ERROR
        | Code::CUDA_ERROR_DEVICE_UNAVAILABLE
        | Code::CUDA_ERROR_UNKNOWN => (
            "gpu_lost",
            "the device failed; the last checkpoint is intact: resume on another node and tell the administrators",
        ),
        _ => ("cuda_error", "the last checkpoint is intact; this is a fault of the program or of the device"),
    };
    Error::new(Exit::Unavailable, code, format!("{what}: {error}")).hint(hint)
}
