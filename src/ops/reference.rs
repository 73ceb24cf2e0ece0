//! The same ops composed from candle's differentiable primitives: slower, obviously right, the oracle of every fused
//! kernel on any device.

use super::{RopeTable, Rows};
use candle_core::{D, Result, Tensor};

/// LN(x) over the last dimension, without affine.
pub fn layer_norm(x: &Tensor, eps: f64) -> Result<Tensor> {
    let centred = x.broadcast_sub(&x.mean_keepdim(D::Minus1)?)?;
    let variance = centred.sqr()?.mean_keepdim(D::Minus1)?;
    centred.broadcast_div(&(variance + eps)?.sqrt()?)
}

/// LN(x) (1 + scale[row]) + shift[row].
pub fn norm_modulate(x_bld: &Tensor, shift_brd: &Tensor, scale_brd: &Tensor, rows: &Rows, eps: f64) -> Result<Tensor> {
    let (shift, scale) = (expand(shift_brd, rows)?, expand(scale_brd, rows)?);
    layer_norm(x_bld, eps)?.broadcast_mul(&(scale + 1.0)?)?.broadcast_add(&shift)
}

/// LN(x) w + b.
pub fn layer_norm_affine(x_bld: &Tensor, weight_d: &Tensor, bias_d: &Tensor, eps: f64) -> Result<Tensor> {
    layer_norm(x_bld, eps)?.broadcast_mul(weight_d)?.broadcast_add(bias_d)
}

/// x + gate[row] y.
pub fn gated_residual(x_bld: &Tensor, y_bld: &Tensor, gate_brd: &Tensor, rows: &Rows) -> Result<Tensor> {
    x_bld + expand(gate_brd, rows)?.broadcast_mul(y_bld)?
}

/// x w / sqrt(mean(x^2) + eps).
pub fn rms_norm(x: &Tensor, weight_d: &Tensor, eps: f64) -> Result<Tensor> {
    let mean_square = x.sqr()?.mean_keepdim(D::Minus1)?;
    x.broadcast_div(&(mean_square + eps)?.sqrt()?)?.broadcast_mul(weight_d)
}

/// GELU-tanh.
pub fn gelu_tanh(x: &Tensor) -> Result<Tensor> {
    let inner = ((x + (x.powf(3.0)? * 0.044715)?)? * (2.0 / std::f64::consts::PI).sqrt())?;
    (x * 0.5)? * (inner.tanh()? + 1.0)?
}

/// Softmax over the last dimension.
pub fn softmax_last_dim(x: &Tensor) -> Result<Tensor> {
    candle_nn::ops::softmax(x, D::Minus1)
}

/// Rotates adjacent pairs of every head.
pub fn rope(x_bld: &Tensor, table: &RopeTable) -> Result<Tensor> {
    let (batch, tokens, width) = x_bld.dims3()?;
    let (pairs, device) = (table.pairs(), x_bld.device());
    let column = |pick: fn((f32, f32)) -> f32| {
        let values: Vec<f32> = (0..tokens * pairs).map(|i| pick(table.at(i / pairs, i % pairs))).collect();
        Tensor::from_vec(values, (1, tokens, 1, pairs), device)?.to_dtype(x_bld.dtype())
    };
    let (cos, sin) = (column(|c| c.0)?, column(|c| c.1)?);
    let x = x_bld.reshape((batch, tokens, width / 2 / pairs, pairs, 2))?;
    let (a, b) = (x.narrow(4, 0, 1)?.squeeze(4)?, x.narrow(4, 1, 1)?.squeeze(4)?);
    let first = (a.broadcast_mul(&cos)? - b.broadcast_mul(&sin)?)?;
    let second = (a.broadcast_mul(&sin)? + b.broadcast_mul(&cos)?)?;
    Tensor::stack(&[first, second], 4)?.reshape((batch, tokens, width))
}

/// x W^T + b.
pub fn linear(x: &Tensor, weight: &Tensor, bias: &Tensor) -> Result<Tensor> {
    x.broadcast_matmul(&weight.t()?)?.broadcast_add(bias)
}

fn expand(rows_brd: &Tensor, rows: &Rows) -> Result<Tensor> {
    let index: Vec<u32> = rows.of_token.iter().map(|&row| row as u32).collect();
    rows_brd.index_select(&Tensor::new(index, rows_brd.device())?, 1)
}
