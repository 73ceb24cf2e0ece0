//! GELU in its tanh form: 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))).

use super::{Element, dispatch, in_float, on_cpu, reference, slice, storage, values};
use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor};
use rayon::prelude::*;

/// GELU-tanh of every element.
pub fn gelu_tanh(x: &Tensor) -> Result<Tensor> {
    in_float(x, |x| on_cpu(x, |x| x.apply_op1(Gelu), reference::gelu_tanh))
}

struct Gelu;

const CUBIC: f64 = 0.044715;
/// Elements a rayon task works on: long enough to amortise the hand-over.
const CHUNK: usize = 8192;

fn scale<T: Element>() -> T {
    T::from_f64((2.0 / std::f64::consts::PI).sqrt())
}

/// tanh through one exponential; exact limits at both ends.
fn tanh<T: Element>(u: T) -> T {
    let two = T::from_f64(2.0);
    T::one() - two / ((two * u).exp() + T::one())
}

impl CustomOp1 for Gelu {
    fn name(&self) -> &'static str {
        "gelu_tanh"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        fn kernel<T: Element>(x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
            let (x, scale, cubic, half) = (slice::<T>(x, layout)?, scale::<T>(), T::from_f64(CUBIC), T::from_f64(0.5));
            let mut y = vec![T::zero(); x.len()];
            y.par_chunks_mut(CHUNK).zip(x.par_chunks(CHUNK)).for_each(|(y, x)| {
                for (y, &x) in y.iter_mut().zip(x) {
                    *y = half * x * (T::one() + tanh(scale * (x + cubic * x * x * x)));
                }
            });
            Ok(storage(y, layout.shape()))
        }
        dispatch!(candle_core::backend::BackendStorage::dtype(x), "gelu_tanh", kernel(x, layout))
    }

    fn bwd(&self, x: &Tensor, _y: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        fn kernel<T: Element>(x: &Tensor, grad: &Tensor) -> Result<Tensor> {
            let (scale, cubic, half) = (scale::<T>(), T::from_f64(CUBIC), T::from_f64(0.5));
            let three = T::from_f64(3.0);
            let x_values = values::<T>(x)?;
            let mut dx = values::<T>(grad)?;
            dx.par_chunks_mut(CHUNK).zip(x_values.par_chunks(CHUNK)).for_each(|(dx, x)| {
                for (dx, &x) in dx.iter_mut().zip(x) {
                    let t = tanh(scale * (x + cubic * x * x * x));
                    let slope = scale * (T::one() + three * cubic * x * x);
                    *dx = *dx * half * (T::one() + t + x * (T::one() - t * t) * slope);
                }
            });
            Tensor::from_vec(dx, x.shape(), x.device())
        }
        Ok(Some(dispatch!(x.dtype(), "gelu_tanh backward", kernel(x, grad))?))
    }
}
