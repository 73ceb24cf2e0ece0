//! The gated residual add x + gate[row] y: the only way a sub-layer's result enters the residual stream with AdaLN.

use super::{Element, Rows, in_float, on_cpu, reference, slice, storage, values};
use candle_core::{CpuStorage, CustomOp3, Layout, Result, Shape, Tensor};
use rayon::prelude::*;

/// x + gate[row] y: x, y [B, L, D]; gate [B, R, D]. `y` and `gate` are cast to x's dtype: the stream keeps its own.
pub fn gated_residual(x_bld: &Tensor, y_bld: &Tensor, gate_brd: &Tensor, rows: &Rows) -> Result<Tensor> {
    in_float(x_bld, |x| {
        let y = y_bld.to_dtype(x.dtype())?.contiguous()?;
        let gate = gate_brd.to_dtype(x.dtype())?.contiguous()?;
        on_cpu(
            x,
            |x| x.apply_op3(&y, &gate, GatedResidual { rows: rows.clone() }),
            |x| reference::gated_residual(x, &y, &gate, rows),
        )
    })
}

struct GatedResidual {
    rows: Rows,
}

impl GatedResidual {
    fn row_start(&self, index: usize, width: usize) -> usize {
        let tokens = self.rows.of_token.len();
        (index / tokens * self.rows.count + self.rows.of_token[index % tokens]) * width
    }

    fn forward<T: Element>(&self, x: &[T], y: &[T], gate: &[T], width: usize) -> Vec<T> {
        let mut out = vec![T::zero(); x.len()];
        out.par_chunks_mut(width).zip(x.par_chunks(width).zip(y.par_chunks(width))).enumerate().for_each(
            |(index, (out_d, (x_d, y_d)))| {
                let row = self.row_start(index, width);
                let gate_d = &gate[row..row + width];
                for i in 0..width {
                    out_d[i] = x_d[i] + gate_d[i] * y_d[i];
                }
            },
        );
        out
    }

    fn backward<T: Element>(&self, y: &Tensor, gate: &Tensor, grad: &Tensor) -> Result<[Tensor; 2]> {
        let width = y.dim(2)?;
        let (y_values, gate_values, g) = (values::<T>(y)?, values::<T>(gate)?, values::<T>(grad)?);
        let mut dy = vec![T::zero(); y_values.len()];
        let mut dgate = vec![T::zero(); gate_values.len()];
        for (index, (dy_d, (y_d, g_d))) in
            dy.chunks_mut(width).zip(y_values.chunks(width).zip(g.chunks(width))).enumerate()
        {
            let row = self.row_start(index, width);
            let (gate_d, dgate_d) = (&gate_values[row..row + width], &mut dgate[row..row + width]);
            for i in 0..width {
                dy_d[i] = g_d[i] * gate_d[i];
                dgate_d[i] += g_d[i] * y_d[i];
            }
        }
        Ok([Tensor::from_vec(dy, y.shape(), y.device())?, Tensor::from_vec(dgate, gate.shape(), y.device())?])
    }
}

impl CustomOp3 for GatedResidual {
    fn name(&self) -> &'static str {
        "gated_residual"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        y: &CpuStorage,
        y_layout: &Layout,
        gate: &CpuStorage,
        gate_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (batch, tokens, width) = x_layout.shape().dims3()?;
        let rows = (batch, self.rows.count, width);
        if tokens != self.rows.of_token.len()
            || y_layout.shape() != x_layout.shape()
            || gate_layout.shape().dims3()? != rows
        {
            candle_core::bail!("gated_residual: y must be like x and gate {rows:?}");
        }
        macro_rules! run {
            ($t:ty) => {{
                let (x, y) = (slice::<$t>(x, x_layout)?, slice::<$t>(y, y_layout)?);
                Ok(storage(self.forward(x, y, slice::<$t>(gate, gate_layout)?, width), x_layout.shape()))
            }};
        }
        match x {
            CpuStorage::F32(_) => run!(f32),
            CpuStorage::F64(_) => run!(f64),
            _ => candle_core::bail!("gated_residual: computes in f32 or f64"),
        }
    }

    fn bwd(
        &self,
        _x: &Tensor,
        y: &Tensor,
        gate: &Tensor,
        _out: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let [dy, dgate] = match y.dtype() {
            candle_core::DType::F64 => self.backward::<f64>(y, gate, grad)?,
            _ => self.backward::<f32>(y, gate, grad)?,
        };
        Ok((Some(grad.clone()), Some(dy), Some(dgate)))
    }
}
