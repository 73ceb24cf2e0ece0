//! One block forward: AdaLN self-attention, text cross-attention, FFN (Wan2.2 `model.py`), as `model::Block` computes it.
//!
//! The same lines run again in the backward pass, where what was kept is skipped.

use super::keep::Kept;
use super::weights::Linear;
use super::{Pass, Size};
use crate::Result;
use crate::cuda::arena::Arena;
use crate::cuda::launch::{Operand, Slice};
use crate::cuda::ops::{Added, Moments, Norm, Rows};

/// Everything a block computes on the way, in this order.
#[derive(Clone, Copy, Debug)]
pub(super) struct Values {
    /// LN of the input, modulated, [N, D]
    pub h1: Slice<Operand>,
    pub moments1: Moments,
    /// [N, 3 D], before the norms
    pub qkv: Slice<Operand>,
    /// Normed and turned, [N, D] each
    pub q: Slice<Operand>,
    pub k: Slice<Operand>,
    pub rstd_q: Slice<f32>,
    pub rstd_k: Slice<f32>,
    /// [N, D] and [heads, N]
    pub attended: (Slice<Operand>, Slice<f32>),
    pub out: Slice<Operand>,
    /// The stream after self-attention, [N, D]
    pub x1: Slice<f32>,
    pub h2: Slice<Operand>,
    pub moments2: Moments,
    pub cross_q: Slice<Operand>,
    pub cross_q_normed: Slice<Operand>,
    pub rstd_cross_q: Slice<f32>,
    /// [S, 2 D]
    pub cross_kv: Slice<Operand>,
    /// [S, D]
    pub cross_k_normed: Slice<Operand>,
    pub rstd_cross_k: Slice<f32>,
    pub cross_attended: (Slice<Operand>, Slice<f32>),
    pub cross_out: Slice<Operand>,
    /// The stream after cross-attention, [N, D]
    pub x2: Slice<f32>,
    pub h3: Slice<Operand>,
    pub moments3: Moments,
    /// [N, F], before and after GELU
    pub up: Slice<Operand>,
    pub activated: Slice<Operand>,
    pub down: Slice<Operand>,
}

impl Values {
    /// Room for what is not kept. The two wide ones also hold the gradients of q, k and v later.
    fn take(kept: &Kept, size: &Size, arena: &mut Arena) -> Result<Self> {
        let &Size { tokens, text, width, ffn, heads, .. } = size;
        let stream = tokens * width;
        let moments = |arena: &mut Arena| -> Result<Moments> {
            Ok(Moments { mean: arena.take(tokens)?, rstd: arena.take(tokens)? })
        };
        let attended =
            |kept: Option<(Slice<Operand>, Slice<f32>)>, arena: &mut Arena| -> Result<(Slice<Operand>, Slice<f32>)> {
                kept.map_or_else(|| Ok((arena.take(stream)?, arena.take(heads * tokens)?)), Ok)
            };
        let or_take = |kept: Option<Slice<Operand>>, len: usize, arena: &mut Arena| -> Result<Slice<Operand>> {
            kept.map_or_else(|| arena.take(len), Ok)
        };
        Ok(Self {
            h1: arena.take(stream)?,
            moments1: moments(arena)?,
            qkv: or_take(kept.qkv, 3 * stream, arena)?,
            q: arena.take(stream)?,
            k: arena.take(stream)?,
            rstd_q: arena.take(tokens)?,
            rstd_k: arena.take(tokens)?,
            attended: attended(kept.attended, arena)?,
            out: or_take(kept.out, stream, arena)?,
            x1: arena.take(stream)?,
            h2: arena.take(stream)?,
            moments2: moments(arena)?,
            cross_q: or_take(kept.cross_q, stream, arena)?,
            cross_q_normed: arena.take(stream)?,
            rstd_cross_q: arena.take(tokens)?,
            cross_kv: arena.take(2 * text * width)?,
            cross_k_normed: arena.take(text * width)?,
            rstd_cross_k: arena.take(text)?,
            cross_attended: attended(kept.cross_attended, arena)?,
            cross_out: or_take(kept.cross_out, stream, arena)?,
            x2: arena.take(stream)?,
            h3: arena.take(stream)?,
            moments3: moments(arena)?,
            up: or_take(kept.up, tokens * ffn, arena)?,
            activated: arena.take(tokens * ffn)?,
            down: or_take(kept.down, stream, arena)?,
        })
    }
}

impl Pass<'_> {
    /// Block `layer`: from its boundary to the next.
    pub fn forward(&mut self, layer: usize) -> Result<()> {
        self.scope(|pass| {
            let values = pass.values(layer, &Kept::default(), pass.kept[layer].up.is_some())?;
            let last = Added { y: values.down, gate: 5 };
            let (from, to) = (values.x2, pass.boundaries[layer + 1]);
            pass.add(layer, from, last, to)
        })
    }

    /// Every intermediate of block `layer`. What `done` names is there already and not computed again; `up` itself is left
    /// out where nobody will read it.
    pub(super) fn values(&mut self, layer: usize, done: &Kept, with_up: bool) -> Result<Values> {
        let values = Values::take(&self.kept[layer], &self.size, &mut self.scratch)?;
        let (trunk, size, tables) = (self.trunk, self.size, self.tables);
        let (ops, weights, modulation) = (&trunk.ops, &trunk.parameters[layer], self.modulation(layer));
        let Size { tokens, text, width, ffn, .. } = size;
        let part = |slice: Slice<Operand>, offset: usize| {
            slice.part(offset, slice.len().saturating_sub(offset), size.operand_bytes)
        };
        let v = &values;

        let norm = Norm::Modulate { shift: 0, scale: 1 };
        ops.residual_norm(self.boundaries[layer], None, &modulation, norm, v.h1, v.moments1, tokens, width)?;
        if done.qkv.is_none() {
            self.linear(v.h1, &weights.qkv, v.qkv, tokens)?;
        }
        let wide = |offset: usize| Rows::new(part(v.qkv, offset), 3 * width);
        let narrow = |slice: Slice<Operand>| Rows::new(slice, width);
        let turns = Some(&tables.turns);
        ops.rms_norm_rope(wide(0), weights.norm_q, turns, narrow(v.q), v.rstd_q, tokens, width)?;
        ops.rms_norm_rope(wide(width), weights.norm_k, turns, narrow(v.k), v.rstd_k, tokens, width)?;
        if done.attended.is_none() {
            let (out, statistics) = v.attended;
            trunk.attention.forward(
                ops,
                [narrow(v.q), narrow(v.k), wide(2 * width)],
                narrow(out),
                statistics,
                &tables.tokens,
                size.heads,
            )?;
        }
        if done.out.is_none() {
            self.linear(v.attended.0, &weights.out, v.out, tokens)?;
        }

        let norm = Norm::Affine { weight: weights.cross_norm_weight, bias: weights.cross_norm_bias };
        let added = Some((Added { y: v.out, gate: 2 }, v.x1));
        ops.residual_norm(self.boundaries[layer], added, &modulation, norm, v.h2, v.moments2, tokens, width)?;
        if done.cross_q.is_none() {
            self.linear(v.h2, &weights.cross_q, v.cross_q, tokens)?;
        }
        let normed = narrow(v.cross_q_normed);
        ops.rms_norm_rope(narrow(v.cross_q), weights.cross_norm_q, None, normed, v.rstd_cross_q, tokens, width)?;
        self.linear(self.condition.text, &weights.cross_kv, v.cross_kv, text)?;
        let pair = |offset: usize| Rows::new(part(v.cross_kv, offset), 2 * width);
        let keys = narrow(v.cross_k_normed);
        ops.rms_norm_rope(pair(0), weights.cross_norm_k, None, keys, v.rstd_cross_k, text, width)?;
        if done.cross_attended.is_none() {
            let (out, statistics) = v.cross_attended;
            trunk.attention.forward(
                ops,
                [normed, keys, pair(width)],
                narrow(out),
                statistics,
                &tables.text,
                size.heads,
            )?;
        }
        if done.cross_out.is_none() {
            self.linear(v.cross_attended.0, &weights.cross_out, v.cross_out, tokens)?;
        }

        let norm = Norm::Modulate { shift: 3, scale: 4 };
        let added = Some((Added { y: v.cross_out, gate: -1 }, v.x2));
        ops.residual_norm(v.x1, added, &modulation, norm, v.h3, v.moments3, tokens, width)?;
        if done.up.is_some() {
            ops.gelu(v.up, v.activated, tokens * ffn)?;
        } else if ops.half {
            let up = with_up.then_some(v.up);
            let Linear { weight, bias, inputs, outputs } = weights.up;
            trunk.gemm.forward_gelu(v.h3, weight, bias, up, v.activated, tokens, inputs, outputs)?;
        } else {
            self.linear(v.h3, &weights.up, v.up, tokens)?;
            ops.gelu(v.up, v.activated, tokens * ffn)?;
        }
        if done.down.is_none() {
            self.linear(v.activated, &weights.down, v.down, tokens)?;
        }
        Ok(values)
    }

    fn linear(&self, x: Slice<Operand>, layer: &Linear<Operand>, y: Slice<Operand>, rows: usize) -> Result<()> {
        let (x, y) = (Rows::new(x, layer.inputs), Rows::new(y, layer.outputs));
        self.trunk.gemm.forward(x, layer.weight, layer.bias, y, rows, layer.inputs, layer.outputs)
    }

    /// to = from + gate y.
    fn add(&self, layer: usize, from: Slice<f32>, added: Added, to: Slice<f32>) -> Result<()> {
        let nothing = Moments { mean: Slice::null(), rstd: Slice::null() };
        self.trunk.ops.residual_norm(
            from,
            Some((added, to)),
            &self.modulation(layer),
            Norm::None,
            Slice::null(),
            nothing,
            self.size.tokens,
            self.size.width,
        )
    }
}
