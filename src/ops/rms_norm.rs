//! RMSNorm over the full width, before the head split: y = x w / sqrt(mean(x^2) + eps).

use super::{Element, dispatch, in_float, on_cpu, reference, slice, storage, sum_by, values};
use candle_core::{CpuStorage, CustomOp2, Layout, Result, Shape, Tensor};
use rayon::prelude::*;

/// RMSNorm of x [.., D] with weight [D].
pub fn rms_norm(x: &Tensor, weight_d: &Tensor, eps: f64) -> Result<Tensor> {
    in_float(x, |x| {
        let weight = weight_d.to_dtype(x.dtype())?.contiguous()?;
        on_cpu(x, |x| x.apply_op2(&weight, RmsNorm { eps }), |x| reference::rms_norm(x, &weight, eps))
    })
}

struct RmsNorm {
    eps: f64,
}

fn inverse_rms<T: Element>(x_d: &[T], eps: f64) -> T {
    let mean_square = sum_by(x_d.len(), |i| x_d[i] * x_d[i]) / T::from_f64(x_d.len() as f64);
    (mean_square + T::from_f64(eps)).sqrt().recip()
}

impl CustomOp2 for RmsNorm {
    fn name(&self) -> &'static str {
        "rms_norm"
    }

    fn cpu_fwd(&self, x: &CpuStorage, xl: &Layout, weight: &CpuStorage, wl: &Layout) -> Result<(CpuStorage, Shape)> {
        fn kernel<T: Element>(
            x: &CpuStorage,
            xl: &Layout,
            weight: &CpuStorage,
            wl: &Layout,
            eps: f64,
        ) -> Result<(CpuStorage, Shape)> {
            let (x, weight_d) = (slice::<T>(x, xl)?, slice::<T>(weight, wl)?);
            let width = weight_d.len();
            if xl.shape().dims().last() != Some(&width) {
                candle_core::bail!("rms_norm: x {:?} does not end in the weight's width {width}", xl.shape());
            }
            let mut y = vec![T::zero(); x.len()];
            y.par_chunks_mut(width).zip(x.par_chunks(width)).for_each(|(y_d, x_d)| {
                let inverse = inverse_rms(x_d, eps);
                for i in 0..width {
                    y_d[i] = x_d[i] * inverse * weight_d[i];
                }
            });
            Ok(storage(y, xl.shape()))
        }
        dispatch!(candle_core::backend::BackendStorage::dtype(x), "rms_norm", kernel(x, xl, weight, wl, self.eps))
    }

    fn bwd(&self, x: &Tensor, weight: &Tensor, _y: &Tensor, grad: &Tensor) -> Result<(Option<Tensor>, Option<Tensor>)> {
        fn kernel<T: Element>(x: &Tensor, weight: &Tensor, grad: &Tensor, eps: f64) -> Result<[Tensor; 2]> {
            let (x_values, weight_d, g) = (values::<T>(x)?, values::<T>(weight)?, values::<T>(grad)?);
            let width = weight_d.len();
            let mut dx = vec![T::zero(); x_values.len()];
            let mut dweight = vec![T::zero(); width];
            for (dx_d, (x_d, g_d)) in dx.chunks_mut(width).zip(x_values.chunks(width).zip(g.chunks(width))) {
                let inverse = inverse_rms(x_d, eps);
                let projection = sum_by(width, |i| g_d[i] * weight_d[i] * x_d[i]) / T::from_f64(width as f64);
                let correction = projection * inverse * inverse;
                for i in 0..width {
                    dx_d[i] = inverse * (g_d[i] * weight_d[i] - x_d[i] * correction);
                    dweight[i] += g_d[i] * x_d[i] * inverse;
                }
            }
            Ok([Tensor::from_vec(dx, x.shape(), x.device())?, Tensor::from_vec(dweight, weight.shape(), x.device())?])
        }
        let [dx, dweight] = dispatch!(x.dtype(), "rms_norm backward", kernel(x, weight, grad, self.eps))?;
        Ok((Some(dx), Some(dweight)))
    }
}
