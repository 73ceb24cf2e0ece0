//! The trunk on a GPU: every block's forward and backward by hand, over one arena.
//!
//! Candle's autograd would keep every intermediate and move about five times the bytes, so it is left to embedders and
//! heads, and to the oracle that this must agree with. Here each tensor of a block is named once, kept or recomputed
//! by a policy, and each operation is one line, forward (`forward.rs`) and backward (`backward.rs`) in the same order.
//! Weight gradients are added to flat f32 buffers. Nothing here waits for the device.
//!
//! Shapes: N tokens, S text rows, D width, F width of the FFN, R modulation rows. The batch is one sequence; samples
//! see each other as little as the plan says.

mod backward;
mod forward;
mod keep;
mod weights;

use super::arena::{Arena, Mark};
use super::attention::{Attention, AttentionTables};
use super::batch::{BatchTables, upload};
use super::flat::FlatLayout;
use super::gemm::Gemm;
use super::launch::{Launcher, Operand, Slice};
use super::ops::{Modulation, Ops, Segments, Turns};
use crate::Result;
use crate::model::TrunkShape;
use keep::Kept;
use std::sync::Arc;
use weights::BlockTensors;

pub(crate) use keep::KeepPolicy;
pub(crate) use weights::adjacent;

/// A batch's sizes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Size {
    pub tokens: usize,
    pub text: usize,
    pub rows: usize,
    pub segments: usize,
    pub width: usize,
    pub ffn: usize,
    pub heads: usize,
    pub operand_bytes: usize,
}

/// The blocks over flat parameters and gradients.
#[derive(Debug)]
pub(crate) struct Trunk {
    shape: TrunkShape,
    ops: Ops,
    gemm: Arc<Gemm>,
    attention: Attention,
    parameters: Vec<BlockTensors<Operand>>,
    gradients: Vec<BlockTensors<f32>>,
}

/// What the blocks read beside x, on the device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Condition {
    /// [R, 6, D]
    pub e0: Slice<Operand>,
    /// [S, D]
    pub text: Slice<Operand>,
}

/// Tables of a batch, on the device.
#[derive(Clone, Copy, Debug)]
struct Tables {
    rows: Slice<i32>,
    segments: Segments,
    turns: Turns,
    tokens: AttentionTables,
    text: AttentionTables,
}

/// One micro-step through the trunk.
#[derive(Debug)]
pub(crate) struct Pass<'t> {
    trunk: &'t Trunk,
    /// What one block works on; free between forward and backward.
    scratch: Arena,
    size: Size,
    tables: Tables,
    condition: Condition,
    /// Input of each block, and the last one's output: [N, D].
    boundaries: Vec<Slice<f32>>,
    kept: Vec<Kept>,
    /// Gradient of the boundary that the backward pass has come to, [N, D]; in the last boundary's place.
    pub dx: Slice<f32>,
    /// Gradient of the modulation rows, [R, 6, D], summed over blocks.
    pub e0_gradient: Slice<f32>,
    /// Gradient of the text, [S, D], summed over blocks.
    pub text_gradient: Slice<f32>,
}

impl Trunk {
    /// Blocks over flat buffers at these addresses, in the order of `flat`.
    pub fn new(
        shape: TrunkShape,
        launcher: Launcher,
        gemm: Arc<Gemm>,
        half: bool,
        flat: &FlatLayout,
        parameters: u64,
        gradients: u64,
    ) -> Result<Self> {
        let ops = Ops { launcher, half, eps: shape.eps as f32 };
        let operand = ops.operand_bytes();
        let TrunkShape { names, depth, width, .. } = shape;
        let attention = Attention::new(&ops, width / shape.heads);
        Ok(Self {
            shape,
            ops,
            gemm,
            attention,
            parameters: (0..depth)
                .map(|layer| BlockTensors::at(flat, &names, layer, width, parameters, operand))
                .collect::<Result<_>>()?,
            gradients: (0..depth)
                .map(|layer| BlockTensors::at(flat, &names, layer, width, gradients, operand))
                .collect::<Result<_>>()?,
        })
    }

    pub fn depth(&self) -> usize {
        self.shape.depth
    }

    pub fn attention(&self) -> &Attention {
        &self.attention
    }

    /// The sizes of a batch.
    pub fn size(&self, tables: &BatchTables) -> Size {
        Size {
            tokens: tables.tokens(),
            text: tables.text(),
            rows: tables.rows(),
            segments: tables.segments(),
            width: self.shape.width,
            ffn: self.shape.ffn,
            heads: self.shape.heads,
            operand_bytes: self.ops.operand_bytes(),
        }
    }

    /// FLOP of a batch's forward pass, a multiply-add counting 2: matrix products and visible pairs.
    pub fn forward_flop(&self, tables: &BatchTables) -> f64 {
        let TrunkShape { depth, width, ffn, .. } = self.shape;
        let [depth, width, ffn] = [depth, width, ffn].map(|size| size as f64);
        let linears = tables.tokens() as f64 * 2.0 * (6.0 * width * width + 2.0 * width * ffn)
            + tables.text() as f64 * 4.0 * width * width;
        let pairs = (tables.attention.pairs + tables.text_attention.pairs) as f64;
        depth * (linears + 4.0 * width * pairs)
    }

    /// What a batch takes under a policy: the program itself, run without a device.
    pub fn predict(&self, tables: &BatchTables, policy: &KeepPolicy) -> Result<Needed> {
        let counting = Self {
            ops: Ops { launcher: Launcher::counting(), ..self.ops.clone() },
            gemm: Arc::new(Gemm::counting()),
            attention: self.attention.clone(),
            parameters: self.parameters.clone(),
            gradients: self.gradients.clone(),
            shape: self.shape,
        };
        let mut arena = Arena::counting(self.ops.operand_bytes());
        let condition = Condition { e0: Slice::null(), text: Slice::null() };
        let mut pass = Pass::begin(&counting, &mut arena, tables, condition, policy)?;
        pass.work_in(Arena::counting(self.ops.operand_bytes()));
        for layer in 0..self.shape.depth {
            pass.forward(layer)?;
        }
        for layer in (0..self.shape.depth).rev() {
            pass.backward(layer)?;
        }
        let scratch = pass.scratch.peak();
        Ok(Needed { kept: arena.peak(), scratch })
    }

    /// The policy that keeps as much as fits into `bytes`, and what it takes.
    pub fn policy_within(&self, tables: &BatchTables, bytes: u64) -> Result<(KeepPolicy, Needed)> {
        let size = self.size(tables);
        let least = self.predict(tables, &KeepPolicy::NOTHING)?.bytes();
        let mut left = bytes.saturating_sub(least);
        let mut policy = KeepPolicy::within(left, &size, self.shape.depth);
        let mut needed = self.predict(tables, &policy)?;
        // Alignment of each tensor is not in a policy's own account.
        while needed.bytes() > bytes && policy != KeepPolicy::NOTHING {
            left -= (needed.bytes() - bytes).min(left);
            policy = KeepPolicy::within(left, &size, self.shape.depth);
            needed = self.predict(tables, &policy)?;
        }
        Ok((policy, needed))
    }
}

/// Bytes of a pass through the trunk.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Needed {
    /// From its beginning to its end.
    pub kept: u64,
    /// While a block runs.
    pub scratch: u64,
}

impl Needed {
    /// Of both.
    pub fn bytes(&self) -> u64 {
        self.kept + self.scratch
    }
}

impl<'t> Pass<'t> {
    /// Lays out what lives through the pass and copies the tables to the device. The caller fills `input()`.
    pub fn begin(
        trunk: &'t Trunk,
        arena: &mut Arena,
        tables: &BatchTables,
        condition: Condition,
        policy: &KeepPolicy,
    ) -> Result<Self> {
        let size = trunk.size(tables);
        let depth = trunk.shape.depth;
        let stream = size.tokens * size.width;
        let boundaries: Vec<Slice<f32>> = (0..=depth).map(|_| arena.take(stream)).collect::<Result<_>>()?;
        let kept = (0..depth).map(|layer| Kept::allocate(policy, layer, depth, &size, arena)).collect::<Result<_>>()?;
        // Once heads have read the last output, nobody does again.
        let dx = boundaries[depth];
        let e0_gradient = arena.take(size.rows * 6 * size.width)?;
        let text_gradient = arena.take(size.text * size.width)?;
        let ops = &trunk.ops;
        ops.launcher.zero(e0_gradient, size.operand_bytes)?;
        ops.launcher.zero(text_gradient, size.operand_bytes)?;
        let uploaded = Tables {
            rows: upload(&ops.launcher, arena, &tables.row_of_token)?,
            segments: Segments {
                tokens_by_row: upload(&ops.launcher, arena, &tables.tokens_by_row)?,
                start: upload(&ops.launcher, arena, &tables.segment_start)?,
                of_row: upload(&ops.launcher, arena, &tables.row_segment_start)?,
                count: size.segments,
                rows: size.rows,
            },
            turns: tables.turns(ops, arena)?,
            tokens: AttentionTables::upload(&tables.attention, &ops.launcher, arena)?,
            text: AttentionTables::upload(&tables.text_attention, &ops.launcher, arena)?,
        };
        Ok(Self {
            trunk,
            scratch: Arena::new(0, 0, size.operand_bytes),
            size,
            tables: uploaded,
            condition,
            boundaries,
            kept,
            dx,
            e0_gradient,
            text_gradient,
        })
    }

    /// Gives blocks a place to work in. It may change between blocks, and must be there while they run.
    pub fn work_in(&mut self, scratch: Arena) {
        self.scratch = scratch;
    }

    /// Input of block `layer`, or the last block's output for `layer` = depth; [N, D].
    pub fn boundary(&self, layer: usize) -> Slice<f32> {
        self.boundaries[layer]
    }

    fn modulation(&self, layer: usize) -> Modulation {
        Modulation { e0: self.condition.e0, table: self.trunk.parameters[layer].table, rows: self.tables.rows }
    }

    /// Runs `work` and gives back what it took from the arena.
    fn scope<T>(&mut self, work: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        let mark: Mark = self.scratch.mark();
        let result = work(self);
        self.scratch.release(mark);
        result
    }
}
