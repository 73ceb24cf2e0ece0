//! The same ops composed from candle's differentiable primitives: slower, obviously right, the oracle of every fused
//! kernel on any device.

use super::{AttentionPlan, RopeTable, Rows};
use candle_core::{D, Result, Tensor};
use std::sync::Arc;

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

/// softmax(q k^T / sqrt(d) + bias) v, every pair computed and those outside the plan masked.
pub fn planned_attention(
    q_ld: &Tensor,
    k_sd: &Tensor,
    v_sd: &Tensor,
    heads: usize,
    plan: &Arc<AttentionPlan>,
) -> Result<Tensor> {
    let (queries, width) = q_ld.dims2()?;
    let keys = k_sd.dim(0)?;
    // A row of -inf alone would be NaN, so a query that sees nothing sees everything and its output is dropped.
    let (mut mask, mut seeing) = (vec![f32::NEG_INFINITY; queries * keys], vec![0f32; queries]);
    for group in plan.groups().iter().filter(|group| group.key_count() > 0) {
        for query in group.queries.clone() {
            seeing[query as usize] = 1.0;
            for key in group.intervals().flatten() {
                mask[query as usize * keys + key] = plan.key_bias().map_or(0.0, |bias| bias[key]);
            }
        }
    }
    for (query, _) in seeing.iter().enumerate().filter(|(_, seeing)| **seeing == 0.0) {
        mask[query * keys..(query + 1) * keys].fill(0.0);
    }
    let constant = |values, shape: &[usize]| Tensor::from_vec(values, shape, q_ld.device())?.to_dtype(q_ld.dtype());
    let (mask, seeing) = (constant(mask, &[queries, keys])?, constant(seeing, &[queries, 1])?);
    let head_dim = width / heads;
    let split = |x: &Tensor| x.reshape((x.dim(0)?, heads, head_dim))?.transpose(0, 1)?.contiguous();
    let (q, k, v) = (split(&(q_ld / (head_dim as f64).sqrt())?)?, split(k_sd)?, split(v_sd)?);
    let scores = q.matmul(&k.transpose(1, 2)?.contiguous()?)?.broadcast_add(&mask)?;
    let out = softmax_last_dim(&scores)?.matmul(&v)?;
    out.transpose(0, 1)?.contiguous()?.reshape((queries, width))?.broadcast_mul(&seeing)
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
    let (batch, count, width) = rows_brd.dims3()?;
    let tokens = rows.of_token.len();
    // Rows of equally many consecutive tokens are a broadcast, whose gradient is a plain sum; an index's is slow on a GPU.
    if rows.are_even() {
        let run = tokens / count;
        return rows_brd
            .unsqueeze(2)?
            .broadcast_as((batch, count, run, width))?
            .contiguous()?
            .reshape((batch, tokens, width));
    }
    let index: Vec<u32> = rows.of_token.iter().map(|&row| row as u32).collect();
    rows_brd.index_select(&Tensor::new(index, rows_brd.device())?, 1)
}

/// The sum of weighed squared errors, [`super::weighted_mse`].
pub fn weighted_mse(prediction: &Tensor, target: &Tensor, weight: &Tensor, mask: Option<&Tensor>) -> Result<Tensor> {
    let error = (prediction - target.detach())?.sqr()?;
    let error = match mask {
        None => error,
        Some(mask) => (error * mask)?,
    };
    (error.sum((0, 2))? * weight)?.sum_all()
}
