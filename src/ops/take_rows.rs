//! Rows in another order, each at most once: a permutation's gradient is the permutation back.
//!
//! Candle's own index_select adds its gradient row by row in one thread a column, because an index may repeat; at
//! 80,000 tokens that takes a GPU longer than a block of the trunk.

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CudaStorage, CustomOp1, Layout, Result, Shape, Storage, Tensor, bail};

/// y[i] = x[index[i]] for x [S, D]. No row may be taken twice but `padding`, a constant that gets no gradient.
pub fn take_rows(x_sd: &Tensor, index: &[u32], padding: Option<u32>) -> Result<Tensor> {
    let (sources, _) = x_sd.dims2()?;
    // Where each source went; rows that nobody took read the zeros behind the gradient.
    let nowhere = index.len() as u32;
    let mut place = vec![nowhere; sources];
    for (to, &from) in index.iter().enumerate() {
        match place.get_mut(from as usize) {
            None => bail!("take_rows: row {from} of {sources}"),
            Some(_) if padding == Some(from) => {}
            Some(place) if *place != nowhere => bail!("take_rows: row {from} is taken twice"),
            Some(place) => *place = to as u32,
        }
    }
    let device = x_sd.device();
    let op = TakeRows {
        index: Tensor::from_slice(index, index.len(), device)?,
        place: Tensor::from_vec(place, sources, device)?,
    };
    x_sd.contiguous()?.apply_op1(op)
}

struct TakeRows {
    /// [N], rows of x
    index: Tensor,
    /// [S], rows of y, or N
    place: Tensor,
}

impl CustomOp1 for TakeRows {
    fn name(&self) -> &'static str {
        "take_rows"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (index, index_layout) = self.index.storage_and_layout();
        let Storage::Cpu(index) = &*index else { bail!("take_rows: the index is on another device") };
        Ok((x.index_select(index, layout, index_layout, 0)?, self.shape(layout)?))
    }

    fn cuda_fwd(&self, x: &CudaStorage, layout: &Layout) -> Result<(CudaStorage, Shape)> {
        let (index, index_layout) = self.index.storage_and_layout();
        let Storage::Cuda(index) = &*index else { bail!("take_rows: the index is on another device") };
        Ok((x.index_select(index, layout, index_layout, 0)?, self.shape(layout)?))
    }

    fn bwd(&self, _x: &Tensor, _y: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        let zero = Tensor::zeros((1, grad.dim(1)?), grad.dtype(), grad.device())?;
        Ok(Some(Tensor::cat(&[grad, &zero], 0)?.index_select(&self.place, 0)?))
    }
}

impl TakeRows {
    fn shape(&self, layout: &Layout) -> Result<Shape> {
        let (_, width) = layout.shape().dims2()?;
        Ok(Shape::from((self.index.elem_count(), width)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{Device, Var};

    #[test]
    fn rows_go_and_their_gradients_come_back() {
        let x = Var::from_slice(&[1f32, 2., 3., 4., 5., 6., 7., 8., 0., 0.], (5, 2), &Device::Cpu).unwrap();
        let index = [2, 0, 4, 3, 4];
        let y = take_rows(&x, &index, Some(4)).unwrap();
        assert_eq!(y.to_vec2::<f32>().unwrap(), [[5., 6.], [1., 2.], [0., 0.], [7., 8.], [0., 0.]]);
        let weights = Tensor::arange(1f32, 11., &Device::Cpu).unwrap().reshape((5, 2)).unwrap();
        let store = (y * weights).unwrap().sum_all().unwrap().backward().unwrap();
        let gradient = store.get(&x).expect("a gradient").to_vec2::<f32>().unwrap();
        assert_eq!(gradient, [[3., 4.], [0., 0.], [1., 2.], [7., 8.], [0., 0.]]);
        assert!(take_rows(&x, &[4, 4], None).is_err() && take_rows(&x, &[5], None).is_err());
        let last = take_rows(&x, &[4], None).unwrap().sum_all().unwrap().backward().unwrap();
        assert_eq!(last.get(&x).expect("a gradient").to_vec2::<f32>().unwrap()[4], [1., 1.]);
    }
}
