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

use super::kernels::{NORM_MODULATE_PTX, WEIGHTED_MSE_PTX};

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

/// [`crate::ops::weighted_mse`] of f32 tensors on the GPU.
pub(crate) fn weighted_mse(
    prediction: &Tensor,
    target: &Tensor,
    weight: &Tensor,
    mask: Option<&Tensor>,
) -> candle_core::Result<Tensor> {
    let (_, frames, _) = prediction.dims3()?;
    let mask = mask.map(Tensor::contiguous).transpose()?;
    let same = |tensor: &Tensor| tensor.dims() == prediction.dims() && tensor.dtype() == DType::F32;
    if ![Some(prediction), Some(target), mask.as_ref()].into_iter().flatten().all(same) || weight.dims() != [frames] {
        bail!(
            "weighted_mse: {:?} {:?} against {:?} {:?}, weights {:?}",
            prediction.dims(),
            prediction.dtype(),
            target.dims(),
            target.dtype(),
            weight.dims()
        );
    }
    let weight = weight.to_dtype(DType::F32)?.contiguous()?;
    prediction.contiguous()?.apply_op3(&target.contiguous()?, &weight, WeightedMse { mask })
}

struct WeightedMse {
    /// As the prediction.
    mask: Option<Tensor>,
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
    checked.map(|_| ()).map_err(|error| candle_core::Error::Cuda(Box::new(error)))
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
        let function = device.get_or_load_custom_func("norm_modulate_forward", "norm_modulate", NORM_MODULATE_PTX)?;
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
        let function = device.get_or_load_custom_func("norm_modulate_backward", "norm_modulate", NORM_MODULATE_PTX)?;
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

impl WeightedMse {
    /// Calls `launch` with the mask's elements, if there is one.
    fn with_mask<T>(
        &self,
        launch: impl FnOnce(Option<&CudaView<'_, f32>>) -> candle_core::Result<T>,
    ) -> candle_core::Result<T> {
        let Some(mask) = &self.mask else { return launch(None) };
        let (storage, layout) = mask.storage_and_layout();
        let Storage::Cuda(storage) = &*storage else { bail!("weighted_mse: the mask is not on the GPU") };
        launch(Some(&view(storage, layout)?))
    }
}

impl CustomOp3 for WeightedMse {
    fn name(&self) -> &'static str {
        "weighted_mse"
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
        bail!("weighted_mse: this form is for a GPU")
    }

    fn cuda_fwd(
        &self,
        p: &CudaStorage,
        p_layout: &Layout,
        t: &CudaStorage,
        t_layout: &Layout,
        weight: &CudaStorage,
        weight_layout: &Layout,
    ) -> candle_core::Result<(CudaStorage, Shape)> {
        let device = p.device().clone();
        let (_, frames, cells) = p_layout.shape().dims3()?;
        let count = p_layout.shape().elem_count();
        let blocks = count.div_ceil(4096).max(1);
        let forward = device.get_or_load_custom_func("weighted_mse_forward", "weighted_mse", WEIGHTED_MSE_PTX)?;
        let finish = device.get_or_load_custom_func("weighted_mse_finish", "weighted_mse", WEIGHTED_MSE_PTX)?;
        // SAFETY: each block writes its sum, and the second kernel the loss.
        let (partial, loss) = unsafe { (device.alloc::<f64>(blocks)?, device.alloc::<f32>(1)?) };
        let (p, t, weight) = (view(p, p_layout)?, view(t, t_layout)?, view(weight, weight_layout)?);
        let (frames, cells, count) = (frames as i32, cells.max(1) as i32, count as i64);
        self.with_mask(|mask| {
            let mut launch = forward.builder();
            launch.arg(&p).arg(&t).arg(&weight);
            match mask {
                Some(mask) => launch.arg(mask),
                None => launch.arg(&0u64),
            };
            launch.arg(&partial).arg(&frames).arg(&cells).arg(&count);
            // SAFETY: arguments in the order and of the types that the kernel declares; sizes were checked when the op was made.
            launched(unsafe { launch.launch(config(Grid::new(blocks, 256))) }, "kernel weighted_mse_forward")
        })?;
        let blocks = blocks as i32;
        let mut launch = finish.builder();
        launch.arg(&partial).arg(&loss).arg(&blocks);
        // SAFETY: as above.
        launched(unsafe { launch.launch(config(Grid::new(1, 256))) }, "kernel weighted_mse_finish")?;
        Ok((CudaStorage::wrap_cuda_slice(loss, device), Shape::from(())))
    }

    fn bwd(
        &self,
        p: &Tensor,
        t: &Tensor,
        weight: &Tensor,
        _: &Tensor,
        gradient: &Tensor,
    ) -> candle_core::Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let device = p.device().as_cuda_device()?.clone();
        let (_, frames, cells) = p.dims3()?;
        let count = p.elem_count();
        let function = device.get_or_load_custom_func("weighted_mse_backward", "weighted_mse", WEIGHTED_MSE_PTX)?;
        // SAFETY: the kernel writes every element.
        let dp = unsafe { device.alloc::<f32>(count) }?;
        let gradient = gradient.contiguous()?;
        let arguments = [p, t, weight, &gradient].map(Tensor::storage_and_layout);
        let mut views = Vec::new();
        for (storage, layout) in &arguments {
            let Storage::Cuda(storage) = &**storage else { bail!("weighted_mse: an argument is not on the GPU") };
            views.push(view(storage, layout)?);
        }
        let [p_view, t_view, weight_view, gradient_view] = &views[..] else { bail!("weighted_mse: four arguments") };
        let (frames, cells, elements) = (frames as i32, cells.max(1) as i32, count as i64);
        self.with_mask(|mask| {
            let mut launch = function.builder();
            launch.arg(p_view).arg(t_view).arg(weight_view);
            match mask {
                Some(mask) => launch.arg(mask),
                None => launch.arg(&0u64),
            };
            launch.arg(gradient_view).arg(&dp).arg(&frames).arg(&cells).arg(&elements);
            let grid = Grid::new(count.div_ceil(256).max(1), 256);
            // SAFETY: as in the forward.
            launched(unsafe { launch.launch(config(grid)) }, "kernel weighted_mse_backward")
        })?;
        Ok((Some(tensor(dp, p.shape(), &device)), None, None))
    }
}
