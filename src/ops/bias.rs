//! A Linear layer: y = x W^T + b, weights [out, in].
//!
//! Here is the only cast of the mixed-precision rule: the operand takes the weight's dtype. The residual stream, norms
//! and adds keep theirs.

use super::{Element, dispatch, slice, storage, values};
use candle_core::{CpuStorage, CustomOp2, DType, Layout, Result, Shape, Tensor};
use rayon::prelude::*;

/// x [.., in] -> [.., out] in the weight's dtype; weight [out, in], bias [out].
pub fn linear(x: &Tensor, weight: &Tensor, bias: &Tensor) -> Result<Tensor> {
    let (outputs, inputs) = weight.dims2()?;
    let mut shape = x.dims().to_vec();
    if shape.pop() != Some(inputs) {
        candle_core::bail!("linear: x {:?} does not end in the {inputs} inputs of the weight", x.dims());
    }
    shape.push(outputs);
    let y = x.to_dtype(weight.dtype())?.contiguous()?.reshape(((), inputs))?.matmul(&weight.t()?)?;
    let y = match weight.dtype() {
        DType::F32 | DType::F64 if x.device().is_cpu() => y.apply_op2(&bias.contiguous()?, AddBias)?,
        _ => y.broadcast_add(bias)?,
    };
    y.reshape(shape)
}

/// x [N, D] + bias [D]; the bias gradient is a column sum in row order.
struct AddBias;

impl CustomOp2 for AddBias {
    fn name(&self) -> &'static str {
        "add_bias"
    }

    fn cpu_fwd(&self, x: &CpuStorage, xl: &Layout, bias: &CpuStorage, bl: &Layout) -> Result<(CpuStorage, Shape)> {
        fn kernel<T: Element>(
            x: &CpuStorage,
            xl: &Layout,
            bias: &CpuStorage,
            bl: &Layout,
        ) -> Result<(CpuStorage, Shape)> {
            let bias_d = slice::<T>(bias, bl)?;
            let mut y = slice::<T>(x, xl)?.to_vec();
            y.par_chunks_mut(bias_d.len()).for_each(|y_d| {
                for (y, &bias) in y_d.iter_mut().zip(bias_d) {
                    *y += bias;
                }
            });
            Ok(storage(y, xl.shape()))
        }
        dispatch!(candle_core::backend::BackendStorage::dtype(x), "add_bias", kernel(x, xl, bias, bl))
    }

    fn bwd(&self, _x: &Tensor, bias: &Tensor, _y: &Tensor, grad: &Tensor) -> Result<(Option<Tensor>, Option<Tensor>)> {
        fn kernel<T: Element>(bias: &Tensor, grad: &Tensor) -> Result<Tensor> {
            let mut dbias = vec![T::zero(); bias.elem_count()];
            for g_d in values::<T>(grad)?.chunks(dbias.len()) {
                for (total, &g) in dbias.iter_mut().zip(g_d) {
                    *total += g;
                }
            }
            Tensor::from_vec(dbias, bias.shape(), bias.device())
        }
        let dbias = dispatch!(bias.dtype(), "add_bias backward", kernel(bias, grad))?;
        Ok((Some(grad.clone()), Some(dbias)))
    }
}
