//! One block backward: the forward's lines mirrored, last first.
//!
//! `dx` is the gradient of the residual stream and passes through in place. A Linear layer adds its weight's and bias's
//! gradients to the flat buffers as soon as its output's gradient is there, because that tensor's room is used again.

use super::Pass;
use super::Size;
use super::weights::Linear;
use crate::Result;
use crate::cuda::attention::Gradients;
use crate::cuda::launch::{Operand, Slice};
use crate::cuda::ops::{Added, Moments, Norm, Ops, Partials, Rows};

/// Room for sums over tokens.
#[derive(Clone, Copy, Debug)]
struct Scratch {
    partials: Partials,
    /// Partial sums of an RMSNorm weight, [ceil(max(N, S) / 32), D]
    norm: Slice<f32>,
    columns: Slice<f32>,
}

impl Pass<'_> {
    /// Block `layer`: from the gradient of its output, in `dx`, to that of its input.
    pub fn backward(&mut self, layer: usize) -> Result<()> {
        self.scope(|pass| pass.backward_block(layer))
    }

    fn backward_block(&mut self, layer: usize) -> Result<()> {
        let done = self.kept[layer];
        let v = self.values(layer, &done, true)?;
        let (trunk, size, tables) = (self.trunk, self.size, self.tables);
        let ops = &trunk.ops;
        let (weights, gradients) = (&trunk.parameters[layer], &trunk.gradients[layer]);
        let Size { tokens, text, width, ffn, segments, .. } = size;
        let scratch = Scratch {
            partials: Partials {
                scale: self.scratch.take(segments * width)?,
                shift: self.scratch.take(segments * width)?,
                gate: self.scratch.take(segments * width)?,
            },
            norm: self.scratch.take(tokens.max(text).div_ceil(32) * width)?,
            columns: self.scratch.take(Ops::column_scratch(tokens.max(text), ffn.max(3 * width)))?,
        };
        let partials = &scratch.partials;
        let first: Slice<Operand> = self.scratch.take(tokens * width)?;
        // Not written before the gradient of the FFN's first layer has read what was there.
        let second = v.h3;
        let narrow = |slice: Slice<Operand>| Rows::new(slice, width);
        let part = |slice: Slice<Operand>, offset: usize| {
            slice.part(offset, slice.len().saturating_sub(offset), size.operand_bytes)
        };
        let no_moments = Moments { mean: Slice::null(), rstd: Slice::null() };
        let turns = Some(&tables.turns);

        // x3 = x2 + gate down
        let down_gradient = first;
        let added = Some((Added { y: v.down, gate: 5 }, down_gradient));
        self.norm_backward(Slice::null(), v.x2, no_moments, Norm::None, added, layer, partials)?;
        self.rows_gradient(partials.gate, 5, layer, &scratch)?;
        // down = activated W^T + b; its input's gradient takes the input's room.
        self.weight_gradient(down_gradient, v.activated, &gradients.down, tokens, &scratch)?;
        // activated = gelu(up)
        let up_gradient = v.activated;
        if ops.half {
            let Linear { weight, inputs, outputs, .. } = weights.down;
            trunk.gemm.input_gradient_gelu(down_gradient, weight, v.up, up_gradient, tokens, inputs, outputs)?;
        } else {
            self.input_gradient(down_gradient, &weights.down, up_gradient, tokens)?;
            ops.gelu_backward(v.up, up_gradient, tokens * ffn)?;
        }
        self.weight_gradient(up_gradient, v.h3, &gradients.up, tokens, &scratch)?;
        let h3_gradient = first;
        self.input_gradient(up_gradient, &weights.up, h3_gradient, tokens)?;

        // x2 = x1 + cross_out; h3 = LN(x2) modulated
        let norm = Norm::Modulate { shift: 3, scale: 4 };
        let cross_out_gradient = second;
        let added = Some((Added { y: v.cross_out, gate: -1 }, cross_out_gradient));
        self.norm_backward(h3_gradient, v.x2, v.moments3, norm, added, layer, partials)?;
        self.rows_gradient(partials.shift, 3, layer, &scratch)?;
        self.rows_gradient(partials.scale, 4, layer, &scratch)?;
        self.weight_gradient(cross_out_gradient, v.cross_attended.0, &gradients.cross_out, tokens, &scratch)?;
        let attended_gradient = first;
        self.input_gradient(cross_out_gradient, &weights.cross_out, attended_gradient, tokens)?;
        // Cross-attention
        let pair = |slice: Slice<Operand>, offset: usize| Rows::new(part(slice, offset), 2 * width);
        let kv_gradient: Slice<Operand> = self.scratch.take(2 * text * width)?;
        let k_normed_gradient: Slice<Operand> = self.scratch.take(text * width)?;
        let q_normed_gradient = second;
        trunk.attention.backward(
            ops,
            [narrow(v.cross_q_normed), narrow(v.cross_k_normed), pair(v.cross_kv, width)],
            (narrow(v.cross_attended.0), v.cross_attended.1),
            narrow(attended_gradient),
            Gradients { q: narrow(q_normed_gradient), k: narrow(k_normed_gradient), v: pair(kv_gradient, width) },
            &tables.text,
            size.heads,
            &mut self.scratch,
        )?;
        ops.rms_norm_rope_backward(
            narrow(k_normed_gradient),
            pair(v.cross_kv, 0),
            weights.cross_norm_k,
            v.rstd_cross_k,
            None,
            pair(kv_gradient, 0),
            scratch.norm,
            text,
            width,
        )?;
        ops.column_sum(scratch.norm, scratch.columns, gradients.cross_norm_k, text.div_ceil(32), width)?;
        self.weight_gradient(kv_gradient, self.condition.text, &gradients.cross_kv, text, &scratch)?;
        trunk.gemm.input_gradient_sum(
            Rows::new(kv_gradient, 2 * width),
            weights.cross_kv.weight,
            super::super::gemm::Rows::new(self.text_gradient, width),
            text,
            width,
            2 * width,
        )?;
        let cross_q_gradient = first;
        ops.rms_norm_rope_backward(
            narrow(q_normed_gradient),
            narrow(v.cross_q),
            weights.cross_norm_q,
            v.rstd_cross_q,
            None,
            narrow(cross_q_gradient),
            scratch.norm,
            tokens,
            width,
        )?;
        ops.column_sum(scratch.norm, scratch.columns, gradients.cross_norm_q, tokens.div_ceil(32), width)?;
        self.weight_gradient(cross_q_gradient, v.h2, &gradients.cross_q, tokens, &scratch)?;
        let h2_gradient = second;
        self.input_gradient(cross_q_gradient, &weights.cross_q, h2_gradient, tokens)?;

        // x1 = x + gate out; h2 = LN(x1) w + b
        let norm = Norm::Affine { weight: weights.cross_norm_weight, bias: weights.cross_norm_bias };
        let out_gradient = first;
        let added = Some((Added { y: v.out, gate: 2 }, out_gradient));
        self.norm_backward(h2_gradient, v.x1, v.moments2, norm, added, layer, partials)?;
        self.rows_gradient(partials.gate, 2, layer, &scratch)?;
        ops.column_sum(partials.scale, scratch.columns, gradients.cross_norm_weight, segments, width)?;
        ops.column_sum(partials.shift, scratch.columns, gradients.cross_norm_bias, segments, width)?;
        self.weight_gradient(out_gradient, v.attended.0, &gradients.out, tokens, &scratch)?;
        let attended_gradient = second;
        self.input_gradient(out_gradient, &weights.out, attended_gradient, tokens)?;
        // Self-attention; the FFN's two wide tensors have room for these gradients.
        let qkv_gradient = self.reuse(v.activated, 3 * tokens * width)?;
        let turned = self.reuse(v.up, 2 * tokens * width)?;
        let (q_gradient, k_gradient) = (part(turned, 0), part(turned, tokens * width));
        let wide = |slice: Slice<Operand>, offset: usize| Rows::new(part(slice, offset), 3 * width);
        trunk.attention.backward(
            ops,
            [narrow(v.q), narrow(v.k), wide(v.qkv, 2 * width)],
            (narrow(v.attended.0), v.attended.1),
            narrow(attended_gradient),
            Gradients { q: narrow(q_gradient), k: narrow(k_gradient), v: wide(qkv_gradient, 2 * width) },
            &tables.tokens,
            size.heads,
            &mut self.scratch,
        )?;
        for (gradient, offset, weight, rstd, weight_gradient) in [
            (q_gradient, 0, weights.norm_q, v.rstd_q, gradients.norm_q),
            (k_gradient, width, weights.norm_k, v.rstd_k, gradients.norm_k),
        ] {
            ops.rms_norm_rope_backward(
                narrow(gradient),
                wide(v.qkv, offset),
                weight,
                rstd,
                turns,
                wide(qkv_gradient, offset),
                scratch.norm,
                tokens,
                width,
            )?;
            ops.column_sum(scratch.norm, scratch.columns, weight_gradient, tokens.div_ceil(32), width)?;
        }
        self.weight_gradient(qkv_gradient, v.h1, &gradients.qkv, tokens, &scratch)?;
        let h1_gradient = first;
        self.input_gradient(qkv_gradient, &weights.qkv, h1_gradient, tokens)?;

        // h1 = LN(x) modulated
        let norm = Norm::Modulate { shift: 0, scale: 1 };
        self.norm_backward(h1_gradient, self.boundaries[layer], v.moments1, norm, None, layer, partials)?;
        self.rows_gradient(partials.shift, 0, layer, &scratch)?;
        self.rows_gradient(partials.scale, 1, layer, &scratch)?;
        Ok(())
    }

    #[allow(clippy::too_many_arguments)]
    fn norm_backward(
        &self,
        dh: Slice<Operand>,
        x: Slice<f32>,
        moments: Moments,
        norm: Norm,
        added: Option<(Added, Slice<Operand>)>,
        layer: usize,
        partials: &Partials,
    ) -> Result<()> {
        let (modulation, segments) = (self.modulation(layer), &self.tables.segments);
        let width = self.size.width;
        let ops = &self.trunk.ops;
        ops.residual_norm_backward(dh, self.dx, x, moments, norm, added, &modulation, partials, segments, width)
    }

    /// Adds sums by segment to a part of the modulation rows' gradient, and their total to the block's table's.
    fn rows_gradient(&self, partial: Slice<f32>, number: i32, layer: usize, scratch: &Scratch) -> Result<()> {
        let (ops, width) = (&self.trunk.ops, self.size.width);
        ops.reduce_rows(partial, &self.tables.segments, self.e0_gradient, number, width)?;
        let table = self.trunk.gradients[layer].table.part(number as usize * width, width, self.size.operand_bytes);
        ops.column_sum(partial, scratch.columns, table, self.size.segments, width)
    }

    /// Gradients of a Linear layer's weight and bias, added to the flat buffer.
    fn weight_gradient(
        &self,
        dy: Slice<Operand>,
        x: Slice<Operand>,
        layer: &Linear<f32>,
        rows: usize,
        scratch: &Scratch,
    ) -> Result<()> {
        let Linear { weight, bias, inputs, outputs } = *layer;
        let (dy, x) = (Rows::new(dy, outputs), Rows::new(x, inputs));
        self.trunk.gemm.weight_gradient(dy, x, weight, rows, inputs, outputs)?;
        self.trunk.ops.bias_gradient(dy, scratch.columns, bias, rows, outputs)
    }

    /// Gradient of a Linear layer's input.
    fn input_gradient(
        &self,
        dy: Slice<Operand>,
        layer: &Linear<Operand>,
        dx: Slice<Operand>,
        rows: usize,
    ) -> Result<()> {
        let (dy, dx) = (Rows::new(dy, layer.outputs), Rows::new(dx, layer.inputs));
        self.trunk.gemm.input_gradient(dy, layer.weight, dx, rows, layer.inputs, layer.outputs)
    }

    /// The room of a tensor that is done with, if it is large enough.
    fn reuse(&mut self, slice: Slice<Operand>, len: usize) -> Result<Slice<Operand>> {
        match slice.len() >= len {
            true => Ok(slice.part(0, len, self.size.operand_bytes)),
            false => self.scratch.take(len),
        }
    }
}
