//! Ops of candle's side of the seam that its own composition is too slow or too large for.
//!
//! They are candle's custom ops, loaded by candle from PTX, because an op knows its tensors' device and nothing else.

use super::launch::{Grid, device_error};
use crate::Result;
use candle_core::backend::BackendStorage;
use candle_core::op::BackpropOp;
use candle_core::{
    CpuStorage, CudaDevice, CudaStorage, CustomOp1, CustomOp3, DType, Layout, Shape, Storage, Tensor, bail,
};
use cudarc::driver::{CudaSlice, CudaView, LaunchConfig, PushKernelArg};

const PTX: &str = super::kernels::NORM_MODULATE_PTX;
/// Widest row that the kernels hold.
const WIDEST: usize = 6144;

/// LN(x) (1 + scale[row]) + shift[row] for x [B, L, D], shift and scale [B, R, D], all f32, where row r is read by
/// tokens r L / R .. (r + 1) L / R. `None` if the kernels do not take these.
pub(crate) fn norm_modulate(
    x: &Tensor,
    shift: &Tensor,
    scale: &Tensor,
    eps: f64,
) -> candle_core::Result<Option<Tensor>> {
    let ((batch, tokens, width), (_, rows, _)) = (x.dims3()?, shift.dims3()?);
    let fits = x.dtype() == DType::F32 && width % 4 == 0 && width <= WIDEST && rows > 0 && tokens % rows == 0;
    if !fits || batch * tokens == 0 {
        return Ok(None);
    }
    let op = NormModulate { run: tokens / rows, eps: eps as f32 };
    x.contiguous()?.apply_op3(&shift.contiguous()?, &scale.contiguous()?, op).map(Some)
}

struct NormModulate {
    /// Tokens of a row.
    run: usize,
    eps: f32,
}

/// A scalar whose backward pass gives `y` the gradient `cotangent`, of y's shape and dtype: how a gradient that was
/// computed elsewhere enters candle's graph. The sum of products that would do the same takes eight times the memory.
pub(super) fn pull(y: &Tensor, cotangent: Tensor) -> candle_core::Result<Tensor> {
    if y.dims() != cotangent.dims() || y.dtype() != cotangent.dtype() {
        bail!(
            "a cotangent {:?} {:?} is not like its tensor {:?} {:?}",
            cotangent.dims(),
            cotangent.dtype(),
            y.dims(),
            y.dtype()
        );
    }
    y.contiguous()?.apply_op1(Pull { cotangent })
}

struct Pull {
    cotangent: Tensor,
}

impl CustomOp1 for Pull {
    fn name(&self) -> &'static str {
        "pull"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        bail!("pull: this form is for a GPU")
    }

    fn cuda_fwd(&self, y: &CudaStorage, _: &Layout) -> candle_core::Result<(CudaStorage, Shape)> {
        let device = y.device().clone();
        let zero = device.alloc_zeros::<f32>(1)?;
        Ok((CudaStorage::wrap_cuda_slice(zero, device), Shape::from(())))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, _: &Tensor) -> candle_core::Result<Option<Tensor>> {
        Ok(Some(self.cotangent.clone()))
    }
}

/// The elements of a contiguous f32 tensor.
fn view<'a>(storage: &'a CudaStorage, layout: &Layout) -> candle_core::Result<CudaView<'a, f32>> {
    let Some((start, end)) = layout.contiguous_offsets() else { bail!("norm_modulate: an argument is not contiguous") };
    Ok(storage.as_cuda_slice::<f32>()?.slice(start..end))
}

fn tensor(slice: CudaSlice<f32>, shape: &Shape, device: &CudaDevice) -> Tensor {
    let storage = CudaStorage::wrap_cuda_slice(slice, device.clone());
    Tensor::from_storage(Storage::Cuda(storage), shape, BackpropOp::none(), false)
}

fn config(grid: Grid) -> LaunchConfig {
    LaunchConfig {
        grid_dim: (grid.blocks[0] as u32, 1, 1),
        block_dim: (grid.threads, 1, 1),
        shared_mem_bytes: grid.shared_bytes,
    }
}

fn launched<T>(result: std::result::Result<T, cudarc::driver::DriverError>, what: &str) -> candle_core::Result<()> {
    let checked: Result<T> = result.map_err(|error| device_error(error, what));
    checked.map(|_| ()).map_err(candle_core::Error::wrap)
}

impl CustomOp3 for NormModulate {
    fn name(&self) -> &'static str {
        "norm_modulate"
    }

    fn cpu_fwd(
        &self,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        bail!("norm_modulate: this form is for a GPU")
    }

    fn cuda_fwd(
        &self,
        x: &CudaStorage,
        x_layout: &Layout,
        shift: &CudaStorage,
        shift_layout: &Layout,
        scale: &CudaStorage,
        scale_layout: &Layout,
    ) -> candle_core::Result<(CudaStorage, Shape)> {
        let device = x.device().clone();
        let (batch, tokens, width) = x_layout.shape().dims3()?;
        let function = device.get_or_load_custom_func("norm_modulate_forward", "norm_modulate", PTX)?;
        // SAFETY: the kernel writes every element.
        let y = unsafe { device.alloc::<f32>(batch * tokens * width) }?;
        let (x, shift, scale) = (view(x, x_layout)?, view(shift, shift_layout)?, view(scale, scale_layout)?);
        let (run, width) = (self.run as i32, width as i32);
        let mut launch = function.builder();
        launch.arg(&x).arg(&shift).arg(&scale).arg(&y).arg(&run).arg(&width).arg(&self.eps);
        // SAFETY: arguments in the order and of the types that the kernel declares; sizes were checked when the op was made.
        launched(unsafe { launch.launch(config(Grid::new(batch * tokens, 384))) }, "kernel norm_modulate_forward")?;
        Ok((CudaStorage::wrap_cuda_slice(y, device), x_layout.shape().clone()))
    }

    fn bwd(
        &self,
        x: &Tensor,
        shift: &Tensor,
        scale: &Tensor,
        _: &Tensor,
        grad: &Tensor,
    ) -> candle_core::Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let grad = grad.contiguous()?;
        let (batch, rows, width) = shift.dims3()?;
        let device = x.device().as_cuda_device()?.clone();
        let function = device.get_or_load_custom_func("norm_modulate_backward", "norm_modulate", PTX)?;
        // SAFETY: the kernel writes every element of the three.
        let (dx, d_shift, d_scale) = unsafe {
            let row_sums = || device.alloc::<f32>(batch * rows * width);
            (device.alloc::<f32>(x.elem_count())?, row_sums()?, row_sums()?)
        };
        let ((x_storage, x_layout), (scale_storage, scale_layout), (grad_storage, grad_layout)) =
            (x.storage_and_layout(), scale.storage_and_layout(), grad.storage_and_layout());
        let (Storage::Cuda(x_storage), Storage::Cuda(scale_storage), Storage::Cuda(grad_storage)) =
            (&*x_storage, &*scale_storage, &*grad_storage)
        else {
            bail!("norm_modulate: an argument is not on the GPU")
        };
        let views = (view(x_storage, x_layout)?, view(scale_storage, scale_layout)?, view(grad_storage, grad_layout)?);
        let (run, width) = (self.run as i32, width as i32);
        let mut launch = function.builder();
        launch.arg(&views.0).arg(&views.1).arg(&views.2).arg(&dx).arg(&d_shift).arg(&d_scale);
        launch.arg(&run).arg(&width).arg(&self.eps);
        // SAFETY: as in the forward.
        launched(unsafe { launch.launch(config(Grid::new(batch * rows, 384))) }, "kernel norm_modulate_backward")?;
        Ok((
            Some(tensor(dx, x.shape(), &device)),
            Some(tensor(d_shift, shift.shape(), &device)),
            Some(tensor(d_scale, shift.shape(), &device)),
        ))
    }
}
