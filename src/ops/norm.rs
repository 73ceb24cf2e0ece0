//! LayerNorm (population variance, eps inside the root), alone or with what always follows it: the AdaLN modulation
//! LN(x) (1 + scale[row]) + shift[row], or an affine LN(x) w + b.

use super::{Element, Rows, dispatch, in_float, on_cpu, reference, slice, storage, sum_by, values};
use candle_core::{CpuStorage, CustomOp1, CustomOp3, Layout, Result, Shape, Tensor};
use rayon::prelude::*;

/// LN(x) over the last dimension, without affine; x of any shape.
pub fn layer_norm(x: &Tensor, eps: f64) -> Result<Tensor> {
    in_float(x, |x| on_cpu(x, |x| x.apply_op1(LayerNorm { eps }), |x| reference::layer_norm(x, eps)))
}

/// LN(x) (1 + scale[row]) + shift[row]: x [B, L, D]; shift, scale [B, R, D].
pub fn norm_modulate(x_bld: &Tensor, shift_brd: &Tensor, scale_brd: &Tensor, rows: &Rows, eps: f64) -> Result<Tensor> {
    in_float(x_bld, |x| {
        let (shift, scale) = (like(shift_brd, x)?, like(scale_brd, x)?);
        on_cpu(
            x,
            |x| x.apply_op3(&shift, &scale, NormModulate { rows: rows.clone(), offset: 1.0, eps }),
            |x| on_gpu(x, &shift, &scale, rows, eps),
        )
    })
}

/// A kernel where there is one for these rows, and the composed form.
fn on_gpu(x: &Tensor, shift: &Tensor, scale: &Tensor, rows: &Rows, eps: f64) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    if rows.are_even()
        && let Some(y) = crate::cuda::norm_modulate(x, shift, scale, eps)?
    {
        return Ok(y);
    }
    reference::norm_modulate(x, shift, scale, rows, eps)
}

/// LN(x) w + b: x [B, L, D]; w, b [D].
pub fn layer_norm_affine(x_bld: &Tensor, weight_d: &Tensor, bias_d: &Tensor, eps: f64) -> Result<Tensor> {
    in_float(x_bld, |x| {
        let (_, tokens, width) = x.dims3()?;
        let bias = like(bias_d, x)?.reshape((1, 1, width))?;
        let weight = like(weight_d, x)?.reshape((1, 1, width))?;
        on_cpu(
            x,
            |x| x.apply_op3(&bias, &weight, NormModulate { rows: Rows::single(tokens), offset: 0.0, eps }),
            |x| reference::layer_norm_affine(x, &weight.flatten_all()?, &bias.flatten_all()?, eps),
        )
    })
}

fn like(tensor: &Tensor, x: &Tensor) -> Result<Tensor> {
    tensor.to_dtype(x.dtype())?.contiguous()
}

/// Mean and 1 / sqrt(variance + eps) of one token.
fn statistics<T: Element>(x_d: &[T], eps: T) -> (T, T) {
    let count = T::from_f64(x_d.len() as f64);
    let mean = sum_by(x_d.len(), |i| x_d[i]) / count;
    let variance = sum_by(x_d.len(), |i| (x_d[i] - mean) * (x_d[i] - mean)) / count;
    (mean, (variance + eps).sqrt().recip())
}

/// d LN(x) / dx applied to `dxhat`.
fn input_gradient<T: Element>(x_d: &[T], dxhat_d: &[T], eps: T, dx_d: &mut [T]) {
    let count = T::from_f64(x_d.len() as f64);
    let (mean, inverse) = statistics(x_d, eps);
    let mean_g = sum_by(x_d.len(), |i| dxhat_d[i]) / count;
    let mean_gx = sum_by(x_d.len(), |i| dxhat_d[i] * (x_d[i] - mean) * inverse) / count;
    for ((dx, &g), &x) in dx_d.iter_mut().zip(dxhat_d).zip(x_d) {
        *dx = inverse * (g - mean_g - (x - mean) * inverse * mean_gx);
    }
}

struct LayerNorm {
    eps: f64,
}

impl CustomOp1 for LayerNorm {
    fn name(&self) -> &'static str {
        "layer_norm"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        fn kernel<T: Element>(x: &CpuStorage, layout: &Layout, eps: f64) -> Result<(CpuStorage, Shape)> {
            let width = layout.shape().dims().last().copied().unwrap_or(1);
            let x = slice::<T>(x, layout)?;
            let mut y = vec![T::zero(); x.len()];
            y.par_chunks_mut(width).zip(x.par_chunks(width)).for_each(|(y_d, x_d)| {
                let (mean, inverse) = statistics(x_d, T::from_f64(eps));
                for (y, &x) in y_d.iter_mut().zip(x_d) {
                    *y = (x - mean) * inverse;
                }
            });
            Ok(storage(y, layout.shape()))
        }
        dispatch!(candle_core::backend::BackendStorage::dtype(x), "layer_norm", kernel(x, layout, self.eps))
    }

    fn bwd(&self, x: &Tensor, _y: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        fn kernel<T: Element>(x: &Tensor, grad: &Tensor, eps: f64) -> Result<Tensor> {
            let width = x.dim(candle_core::D::Minus1)?;
            let (x_values, grad) = (values::<T>(x)?, values::<T>(grad)?);
            let mut dx = vec![T::zero(); x_values.len()];
            dx.par_chunks_mut(width)
                .zip(x_values.par_chunks(width).zip(grad.par_chunks(width)))
                .for_each(|(dx_d, (x_d, g_d))| input_gradient(x_d, g_d, T::from_f64(eps), dx_d));
            Tensor::from_vec(dx, x.shape(), x.device())
        }
        Ok(Some(dispatch!(x.dtype(), "layer_norm backward", kernel(x, grad, self.eps))?))
    }
}

/// Arguments: x [B, L, D], shift [B or 1, R, D], scale [B or 1, R, D]; y = LN(x) (offset + scale[row]) + shift[row].
struct NormModulate {
    rows: Rows,
    /// 1 for AdaLN, 0 for an affine weight.
    offset: f64,
    eps: f64,
}

impl NormModulate {
    /// Index of the first element of the row that token `index` (of B * L) reads.
    fn row_start(&self, index: usize, batched: bool, width: usize) -> usize {
        let tokens = self.rows.of_token.len();
        let sample = if batched { index / tokens } else { 0 };
        (sample * self.rows.count + self.rows.of_token[index % tokens]) * width
    }

    fn forward<T: Element>(&self, x: &[T], shift: &[T], scale: &[T], width: usize, batched: bool) -> Vec<T> {
        let (offset, eps) = (T::from_f64(self.offset), T::from_f64(self.eps));
        let mut y = vec![T::zero(); x.len()];
        y.par_chunks_mut(width).zip(x.par_chunks(width)).enumerate().for_each(|(index, (y_d, x_d))| {
            let (mean, inverse) = statistics(x_d, eps);
            let row = self.row_start(index, batched, width);
            let (shift_d, scale_d) = (&shift[row..row + width], &scale[row..row + width]);
            for i in 0..width {
                y_d[i] = (x_d[i] - mean) * inverse * (offset + scale_d[i]) + shift_d[i];
            }
        });
        y
    }

    fn backward<T: Element>(&self, x: &Tensor, shift: &Tensor, scale: &Tensor, grad: &Tensor) -> Result<[Tensor; 3]> {
        let (batch, _, width) = x.dims3()?;
        let batched = shift.dim(0)? == batch && batch > 1;
        let (offset, eps) = (T::from_f64(self.offset), T::from_f64(self.eps));
        let (x_values, scale_values, g) = (values::<T>(x)?, values::<T>(scale)?, values::<T>(grad)?);
        let mut dx = vec![T::zero(); x_values.len()];
        dx.par_chunks_mut(width).zip(x_values.par_chunks(width).zip(g.par_chunks(width))).enumerate().for_each_init(
            || vec![T::zero(); width],
            |dxhat_d, (index, (dx_d, (x_d, g_d)))| {
                let row = self.row_start(index, batched, width);
                for ((dxhat, &g), &scale) in dxhat_d.iter_mut().zip(g_d).zip(&scale_values[row..row + width]) {
                    *dxhat = g * (offset + scale);
                }
                input_gradient(x_d, dxhat_d, eps, dx_d);
            },
        );
        // Tokens in order, so the sums of a row do not depend on the number of threads.
        let mut dshift = vec![T::zero(); scale_values.len()];
        let mut dscale = vec![T::zero(); scale_values.len()];
        for (index, (x_d, g_d)) in x_values.chunks(width).zip(g.chunks(width)).enumerate() {
            let (mean, inverse) = statistics(x_d, eps);
            let row = self.row_start(index, batched, width);
            let (dshift_d, dscale_d) = (&mut dshift[row..row + width], &mut dscale[row..row + width]);
            for i in 0..width {
                dshift_d[i] += g_d[i];
                dscale_d[i] += g_d[i] * (x_d[i] - mean) * inverse;
            }
        }
        Ok([
            Tensor::from_vec(dx, x.shape(), x.device())?,
            Tensor::from_vec(dshift, shift.shape(), x.device())?,
            Tensor::from_vec(dscale, scale.shape(), x.device())?,
        ])
    }
}

impl CustomOp3 for NormModulate {
    fn name(&self) -> &'static str {
        "norm_modulate"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        shift: &CpuStorage,
        shift_layout: &Layout,
        scale: &CpuStorage,
        scale_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (batch, tokens, width) = x_layout.shape().dims3()?;
        let row_batch = shift_layout.shape().dims3()?.0;
        let rows = (row_batch, self.rows.count, width);
        if shift_layout.shape().dims3()? != rows || scale_layout.shape().dims3()? != rows {
            candle_core::bail!("norm_modulate: shift and scale must be {rows:?}");
        }
        if tokens != self.rows.of_token.len() || (row_batch != batch && row_batch != 1) {
            candle_core::bail!("norm_modulate: {batch} x {tokens} tokens do not fit the row map");
        }
        let batched = row_batch == batch && batch > 1;
        macro_rules! run {
            ($t:ty) => {{
                let (x, shift, scale) =
                    (slice::<$t>(x, x_layout)?, slice::<$t>(shift, shift_layout)?, slice::<$t>(scale, scale_layout)?);
                Ok(storage(self.forward(x, shift, scale, width, batched), x_layout.shape()))
            }};
        }
        match x {
            CpuStorage::F32(_) => run!(f32),
            CpuStorage::F64(_) => run!(f64),
            _ => candle_core::bail!("norm_modulate: computes in f32 or f64"),
        }
    }

    fn bwd(
        &self,
        x: &Tensor,
        shift: &Tensor,
        scale: &Tensor,
        _y: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let [dx, dshift, dscale] = match x.dtype() {
            candle_core::DType::F64 => self.backward::<f64>(x, shift, scale, grad)?,
            _ => self.backward::<f32>(x, shift, scale, grad)?,
        };
        Ok((Some(dx), Some(dshift), Some(dscale)))
    }
}
