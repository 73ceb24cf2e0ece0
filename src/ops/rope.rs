//! Rotary position embedding on adjacent pairs (2i, 2i+1), three axes (time, height, width).
//!
//! A head of d real dims is split d - 4 (d/6) | 2 (d/6) | 2 (d/6) for X-WAM, d - 2 (d/3) | d/3 | d/3 for LingBot-VA; pair i of an axis with n real dims turns by
//! position x 10000^(-2i/n). Angles are computed in f64 and rounded to f32, as the public code does.

use super::{Element, dispatch, in_float, on_cpu, reference, slice, storage, values};
use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor};
use rayon::prelude::*;
use std::sync::{Arc, OnceLock};

/// Turns of each token and pair, shared by all heads, samples and blocks.
#[derive(Clone, Debug)]
pub struct RopeTable {
    /// (time, height, width) of each of the L tokens.
    positions: Arc<Vec<[f64; 3]>>,
    /// Axis and frequency of each of the d/2 pairs.
    frequencies: Arc<Vec<(usize, f64)>>,
    /// [L, d/2] cosines and sines, once somebody asks: a GPU makes its own from positions and frequencies.
    cos_sin: Arc<OnceLock<Vec<(f32, f32)>>>,
}

impl RopeTable {
    /// `positions[l]` = (time, height, width) of token l; `axes` = real dims of each axis, summing to the head size.
    pub fn new(positions: &[[f64; 3]], axes: [usize; 3]) -> Self {
        let frequencies = axes.iter().enumerate().flat_map(|(axis, &dims)| {
            (0..dims / 2).map(move |pair| (axis, 10000f64.powf(-2.0 * pair as f64 / dims as f64)))
        });
        Self {
            positions: Arc::new(positions.to_vec()),
            frequencies: Arc::new(frequencies.collect()),
            cos_sin: Arc::default(),
        }
    }

    /// [L] (time, height, width).
    pub fn positions(&self) -> &[[f64; 3]] {
        &self.positions
    }

    /// [d/2] (axis, frequency).
    pub fn frequencies(&self) -> &[(usize, f64)] {
        &self.frequencies
    }

    fn cos_sin(&self) -> &[(f32, f32)] {
        self.cos_sin.get_or_init(|| {
            let turn = |position: &[f64; 3], &(axis, frequency): &(usize, f64)| {
                let angle = position[axis] * frequency;
                (angle.cos() as f32, angle.sin() as f32)
            };
            self.positions.iter().flat_map(|p| self.frequencies.iter().map(move |f| turn(p, f))).collect()
        })
    }

    /// X-WAM's split of a head of `head_dim` real dims.
    pub fn xwam_axes(head_dim: usize) -> [usize; 3] {
        let plane = 2 * (head_dim / 6);
        [head_dim - 2 * plane, plane, plane]
    }

    /// LingBot-VA's split: two thirds, rounded down each, for the plane.
    pub fn lingbot_axes(head_dim: usize) -> [usize; 3] {
        let plane = head_dim / 3;
        [head_dim - 2 * plane, plane, plane]
    }

    /// (cos, sin) of token `token` and pair `pair`.
    pub fn at(&self, token: usize, pair: usize) -> (f32, f32) {
        self.cos_sin()[token * self.pairs() + pair]
    }

    /// Pairs of one head, d/2.
    pub fn pairs(&self) -> usize {
        self.frequencies.len()
    }

    fn tokens(&self) -> usize {
        self.positions.len()
    }
}

/// Rotates every head of x [B, L, heads * d].
pub fn rope(x_bld: &Tensor, table: &RopeTable) -> Result<Tensor> {
    in_float(x_bld, |x| on_cpu(x, |x| x.apply_op1(Rope { table: table.clone() }), |x| reference::rope(x, table)))
}

struct Rope {
    table: RopeTable,
}

impl Rope {
    /// Rotates in place; the inverse rotation (`direction` -1) is the transpose, i.e. the backward.
    fn rotate<T: Element>(&self, values: &mut [T], width: usize, direction: f64) {
        let (pairs, cos_sin) = (self.table.pairs(), self.table.cos_sin());
        values.par_chunks_mut(width).enumerate().for_each(|(index, x_d)| {
            let token = index % self.table.tokens();
            let table = &cos_sin[token * pairs..(token + 1) * pairs];
            for head in x_d.chunks_mut(2 * pairs) {
                for (pair, &(cos, sin)) in head.chunks_mut(2).zip(table) {
                    let (cos, sin) = (T::from_f64(cos as f64), T::from_f64(direction * sin as f64));
                    let (a, b) = (pair[0], pair[1]);
                    pair[0] = a * cos - b * sin;
                    pair[1] = a * sin + b * cos;
                }
            }
        });
    }
}

impl CustomOp1 for Rope {
    fn name(&self) -> &'static str {
        "rope"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        fn kernel<T: Element>(op: &Rope, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
            let (_, tokens, width) = layout.shape().dims3()?;
            if tokens != op.table.tokens() || width % (2 * op.table.pairs()) != 0 {
                candle_core::bail!("rope: x {:?} does not fit a table of {} tokens", layout.shape(), op.table.tokens());
            }
            let mut y = slice::<T>(x, layout)?.to_vec();
            op.rotate(&mut y, width, 1.0);
            Ok(storage(y, layout.shape()))
        }
        dispatch!(candle_core::backend::BackendStorage::dtype(x), "rope", kernel(self, x, layout))
    }

    fn bwd(&self, x: &Tensor, _y: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        fn kernel<T: Element>(op: &Rope, x: &Tensor, grad: &Tensor) -> Result<Tensor> {
            let mut dx = values::<T>(grad)?;
            op.rotate(&mut dx, x.dim(2)?, -1.0);
            Tensor::from_vec(dx, x.shape(), x.device())
        }
        Ok(Some(dispatch!(x.dtype(), "rope backward", kernel(self, x, grad))?))
    }
}
