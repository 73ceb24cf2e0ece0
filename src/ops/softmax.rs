//! Softmax over the last dimension, maximum subtracted first.

use super::{Element, dispatch, in_float, on_cpu, reference, slice, storage, sum_by, values};
use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor};
use rayon::prelude::*;

/// softmax(x) over the last dimension, x of any shape.
pub fn softmax_last_dim(x: &Tensor) -> Result<Tensor> {
    in_float(x, |x| on_cpu(x, |x| x.apply_op1(Softmax), reference::softmax_last_dim))
}

struct Softmax;

impl CustomOp1 for Softmax {
    fn name(&self) -> &'static str {
        "softmax_last_dim"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        fn kernel<T: Element>(x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
            let width = layout.shape().dims().last().copied().unwrap_or(1);
            let x = slice::<T>(x, layout)?;
            let mut y = vec![T::zero(); x.len()];
            y.par_chunks_mut(width).zip(x.par_chunks(width)).for_each(|(y_n, x_n)| {
                let maximum = x_n.iter().copied().fold(T::neg_infinity(), <T as num_traits::Float>::max);
                for (y, &x) in y_n.iter_mut().zip(x_n) {
                    *y = (x - maximum).exp();
                }
                let inverse = sum_by(width, |i| y_n[i]).recip();
                for y in y_n.iter_mut() {
                    *y *= inverse;
                }
            });
            Ok(storage(y, layout.shape()))
        }
        dispatch!(candle_core::backend::BackendStorage::dtype(x), "softmax_last_dim", kernel(x, layout))
    }

    fn bwd(&self, x: &Tensor, y: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        fn kernel<T: Element>(x: &Tensor, y: &Tensor, grad: &Tensor) -> Result<Tensor> {
            let width = x.dim(candle_core::D::Minus1)?;
            let y = values::<T>(y)?;
            let mut dx = values::<T>(grad)?;
            dx.par_chunks_mut(width).zip(y.par_chunks(width)).for_each(|(dx_n, y_n)| {
                let inner = sum_by(width, |i| dx_n[i] * y_n[i]);
                for (dx, &y) in dx_n.iter_mut().zip(y_n) {
                    *dx = y * (*dx - inner);
                }
            });
            Tensor::from_vec(dx, x.shape(), x.device())
        }
        Ok(Some(dispatch!(x.dtype(), "softmax_last_dim backward", kernel(x, y, grad))?))
    }
}
