//! The ops of a transformer block: shapes and dtypes, no models.
//!
//! Stock candle's fused norms, softmax and rope drop gradients without an error, and its composed forms move about five
//! times the bytes, so each op here is a fused CPU kernel with its backward beside it, one file an op. Every op has a
//! composed candle form of the same signature in [`reference`], the oracle of its tests, and a test that gradient
//! reaches each of its inputs.
//!
//! Kernels are generic over f32 and f64. Half-precision inputs compute in f32 and return in the incoming dtype. Row
//! loops run on rayon's pool; every reduction has a fixed order, so results do not depend on the number of threads.

mod attention_plan;
mod attention_tiles;
mod bias;
mod gated_residual;
mod gelu;
mod norm;
mod planned_attention;
pub mod reference;
mod rms_norm;
mod rope;
mod rows;
mod softmax;
mod take_rows;
mod weighted_mse;

pub use attention_plan::{AttentionPlan, Group};
pub use attention_tiles::TileLists;
pub use bias::linear;
pub use gated_residual::gated_residual;
pub use gelu::gelu_tanh;
pub use norm::{layer_norm, layer_norm_affine, norm_modulate};
pub use planned_attention::planned_attention;
pub use rms_norm::rms_norm;
pub use rope::{RopeTable, rope};
pub use rows::Rows;
pub use softmax::softmax_last_dim;
pub use take_rows::take_rows;
pub use weighted_mse::weighted_mse;

use candle_core::{CpuStorage, DType, Layout, Result, Shape, Tensor, WithDType};

/// What the kernels need of an element type: f32 or f64.
pub(crate) trait Element: WithDType + num_traits::Float + std::iter::Sum + Send + Sync {}
impl Element for f32 {}
impl Element for f64 {}

/// The fused kernel on the CPU, the composed form on any other device: there the trunk has kernels of its own, and only
/// embedders, heads and sampling come this way.
fn on_cpu(
    x: &Tensor,
    fused: impl FnOnce(&Tensor) -> Result<Tensor>,
    composed: impl FnOnce(&Tensor) -> Result<Tensor>,
) -> Result<Tensor> {
    if x.device().is_cpu() { fused(x) } else { composed(x) }
}

/// Runs `op` in f32 if `x` is half precision and returns the result in `x`'s dtype.
fn in_float(x: &Tensor, op: impl FnOnce(&Tensor) -> Result<Tensor>) -> Result<Tensor> {
    match x.dtype() {
        DType::F32 | DType::F64 => op(&x.contiguous()?),
        dtype => op(&x.to_dtype(DType::F32)?.contiguous()?)?.to_dtype(dtype),
    }
}

/// The elements of a contiguous CPU tensor argument.
fn slice<'a, T: Element>(storage: &'a CpuStorage, layout: &Layout) -> Result<&'a [T]> {
    let Some((start, end)) = layout.contiguous_offsets() else { candle_core::bail!("op argument is not contiguous") };
    Ok(&storage.as_slice::<T>()?[start..end])
}

/// Copies a tensor's elements out, row-major: gradients arrive in any layout.
fn values<T: Element>(tensor: &Tensor) -> Result<Vec<T>> {
    tensor.flatten_all()?.to_vec1::<T>()
}

/// Wraps kernel output with the shape it belongs to.
fn storage<T: Element>(values: Vec<T>, shape: &Shape) -> (CpuStorage, Shape) {
    (T::to_cpu_storage_owned(values), shape.clone())
}

/// Sum in eight interleaved lanes: vectorises, and its order is fixed.
fn sum_by<T: Element>(n: usize, value: impl Fn(usize) -> T) -> T {
    let mut lanes = [T::zero(); 8];
    let whole = n / 8 * 8;
    for base in (0..whole).step_by(8) {
        for (lane, total) in lanes.iter_mut().enumerate() {
            *total += value(base + lane);
        }
    }
    let tail: T = (whole..n).map(&value).sum();
    lanes.iter().copied().sum::<T>() + tail
}

/// Calls the f32 or f64 instance of a kernel, by the dtype of a tensor or storage.
macro_rules! dispatch {
    ($dtype:expr, $name:literal, $kernel:ident ( $($arg:expr),* )) => {
        match $dtype {
            candle_core::DType::F32 => $kernel::<f32>($($arg),*),
            candle_core::DType::F64 => $kernel::<f64>($($arg),*),
            other => candle_core::bail!("{}: computes in f32 or f64, not {other:?}", $name),
        }
    };
}
use dispatch;
