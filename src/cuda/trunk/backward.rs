//! One block backward: the forward's lines mirrored, last first.
//!
//! `dx` is the gradient of the residual stream and passes through in place. So does the stream itself: what a third of
//! the block added is taken back, and what that third computed of the stream is computed again where it was not kept. A
//! Linear layer adds its weight's and bias's gradients to the flat buffers as soon as its output's gradient is there,
//! because that tensor's room is used again.

use super::forward::{Finish, GATES, Run};
use super::keep::{Kept, Outputs};
use super::weights::Linear;
use super::{Pass, Tokens};
use crate::cuda::attention::Gradients;
use crate::cuda::launch::{Operand, Slice};
use crate::cuda::ops::{Added, Change, Moments, Norm, Ops, Partials, Rows};
use crate::{Error, Result};

/// Where in the trunk a half of a block is.
#[derive(Clone, Copy, Debug)]
struct At {
    layer: usize,
    tokens: Tokens,
}

/// Room that all of a block's backward pass uses.
#[derive(Clone, Copy, Debug)]
struct Scratch {
    /// Sums over the tokens of a segment.
    partials: Partials,
    /// Partial sums of an RMSNorm weight, [ceil(max(N, S) / 32), D]
    norm: Slice<f32>,
    columns: Slice<f32>,
    /// [N, D] each: gradients that pass from one line to the next.
    first: Slice<Operand>,
    second: Slice<Operand>,
}

const NO_MOMENTS: Moments = Moments { mean: Slice::null(), rstd: Slice::null() };

impl Pass<'_> {
    /// Block `layer`: from its output and that's gradient to its input and that's gradient, see [`Pass::between`].
    pub fn backward(&mut self, layer: usize) -> Result<()> {
        self.offload.enter(layer)?;
        self.work_beyond(layer);
        if self.alone {
            self.trunk.ops.launcher.zero(self.trunk.gradients_of_block[layer], self.size.operand_bytes)?;
        }
        self.scope(|pass| {
            let mut kept = pass.kept[layer];
            if let Some(input) = kept.input {
                let second = pass.read_of(layer).map_or(pass.size.tokens, |read| read.tokens.count);
                kept = Kept { input: kept.input, ..Kept::everything(&pass.size, second, &mut pass.scratch)? };
                pass.forward_block(layer, &kept, (input, Change::Nothing), pass.x, Finish::Now)?;
            }
            pass.backward_block(layer, &kept)
        })?;
        self.offload.done(layer)
    }

    fn backward_block(&mut self, layer: usize, kept: &Kept) -> Result<()> {
        let Some(outputs) = kept.outputs else { return Err(Error::crash("a block without outputs")) };
        let size = self.size;
        let (width, most) = (size.width, size.tokens.max(size.text));
        let scratch = Scratch {
            partials: Partials {
                scale: self.scratch.take(size.segments * width)?,
                shift: self.scratch.take(size.segments * width)?,
                gate: self.scratch.take(size.segments * width)?,
            },
            norm: self.scratch.take(most.div_ceil(32) * width)?,
            columns: self.scratch.take(Ops::column_scratch(most, size.ffn.max(3 * width)))?,
            first: self.scratch.take(size.tokens * width)?,
            second: self.scratch.take(size.tokens * width)?,
        };
        let tokens = self.read_of(layer).map_or(self.tables.all, |read| read.tokens);
        let at = At { layer, tokens };
        self.scope(|pass| pass.ffn_backward(&at, kept, &outputs, &scratch))?;
        self.scope(|pass| pass.cross_backward(&at, kept, &outputs, &scratch))?;
        self.scope(|pass| pass.self_backward(&at, kept, &outputs, &scratch))
    }

    /// FFN. In: the gradient of the block's output. Out: that of the stream before, and in `second` that of what
    /// cross-attention added.
    fn ffn_backward(&mut self, at: &At, kept: &Kept, outputs: &Outputs, scratch: &Scratch) -> Result<()> {
        let (trunk, ops) = (self.trunk, &self.trunk.ops);
        let (weights, gradients) = (&trunk.parameters[at.layer], &trunk.gradients[at.layer]);
        let (tokens, ffn) = (at.tokens.count, self.size.ffn);
        let (x, dx) = self.output_of(at.layer);
        let Scratch { partials, first, second, .. } = scratch;

        // x3 = x2 + gate down
        let added = self.added(at.layer, outputs.down, 2);
        let down_gradient = *first;
        self.norm_backward(Slice::null(), (x, dx), NO_MOMENTS, Norm::None, Some((added, down_gradient)), at, partials)?;
        self.rows_gradient(partials.gate, GATES[2], at, scratch)?;
        // Not written before the gradient of the FFN's first layer has read it.
        let h = *second;
        let v = self.ffn_inputs(at.layer, &at.tokens, x, Change::TakeBack(added, x), h, kept, Run::Again)?;
        // down = activated W^T + b; its input's gradient takes the input's room.
        self.weight_gradient(down_gradient, v.activated, &gradients.down, tokens, scratch)?;
        // activated = gelu(up)
        let up_gradient = v.activated;
        if ops.half {
            let Linear { weight, inputs, outputs, .. } = weights.down;
            trunk.gemm.input_gradient_gelu(down_gradient, weight, v.up, up_gradient, tokens, inputs, outputs)?;
        } else {
            self.input_gradient(down_gradient, &weights.down, up_gradient, tokens)?;
            ops.gelu_backward(v.up, up_gradient, tokens * ffn)?;
        }
        self.weight_gradient(up_gradient, v.h, &gradients.up, tokens, scratch)?;
        let h_gradient = *first;
        self.input_gradient(up_gradient, &weights.up, h_gradient, tokens)?;
        // x2 = x1 + cross_out; h = LN(x2) modulated
        let norm = Norm::Modulate { shift: 3, scale: 4 };
        let added = Some((self.added(at.layer, outputs.cross_out, 1), *second));
        self.norm_backward(h_gradient, (x, dx), v.moments, norm, added, at, partials)?;
        self.rows_gradient(partials.shift, 3, at, scratch)?;
        self.rows_gradient(partials.scale, 4, at, scratch)
    }

    /// Cross-attention. In: `second`. Out: the gradient of the stream before, and in `first` that of what self-attention
    /// added.
    fn cross_backward(&mut self, at: &At, kept: &Kept, outputs: &Outputs, scratch: &Scratch) -> Result<()> {
        let (trunk, ops) = (self.trunk, &self.trunk.ops);
        let (weights, gradients) = (&trunk.parameters[at.layer], &trunk.gradients[at.layer]);
        let (tokens, text, width, heads) = (at.tokens.count, self.size.text, self.size.width, self.size.heads);
        let (x, dx) = self.output_of(at.layer);
        let Scratch { partials, first, second, norm: norm_sums, columns } = *scratch;
        let narrow = |slice: Slice<Operand>| Rows::new(slice, width);

        let taken_back = Change::TakeBack(self.added(at.layer, outputs.cross_out, 1), x);
        let v = self.cross_inputs(at.layer, &at.tokens, x, taken_back, kept, Run::Again)?;
        let attended = match kept.cross_attended {
            Some(attended) => attended,
            None => {
                let attended = (self.scratch.take(tokens * width)?, self.scratch.take(heads * tokens)?);
                self.attend_text(&v, attended, &at.tokens)?;
                attended
            }
        };
        let cross_out_gradient = second;
        self.weight_gradient(cross_out_gradient, attended.0, &gradients.cross_out, tokens, scratch)?;
        let attended_gradient = first;
        self.input_gradient(cross_out_gradient, &weights.cross_out, attended_gradient, tokens)?;
        let kv_gradient: Slice<Operand> = self.scratch.take(2 * text * width)?;
        let k_normed_gradient: Slice<Operand> = self.scratch.take(text * width)?;
        let q_normed_gradient = second;
        trunk.attention.backward(
            ops,
            [narrow(v.q_normed), narrow(v.k_normed), self.column(v.kv, 1, 2)],
            (narrow(attended.0), attended.1),
            narrow(attended_gradient),
            Gradients { q: narrow(q_normed_gradient), k: narrow(k_normed_gradient), v: self.column(kv_gradient, 1, 2) },
            &at.tokens.text,
            heads,
            &mut self.scratch,
        )?;
        ops.rms_norm_rope_backward(
            narrow(k_normed_gradient),
            self.column(v.kv, 0, 2),
            weights.cross_norm_k,
            v.rstd_k,
            None,
            self.column(kv_gradient, 0, 2),
            norm_sums,
            text,
            width,
        )?;
        ops.column_sum(norm_sums, columns, gradients.cross_norm_k, text.div_ceil(32), width)?;
        self.weight_gradient(kv_gradient, self.condition.text, &gradients.cross_kv, text, scratch)?;
        trunk.gemm.input_gradient_sum(
            Rows::new(kv_gradient, 2 * width),
            weights.cross_kv.weight,
            crate::cuda::gemm::Rows::new(self.text_gradient, width),
            text,
            width,
            2 * width,
        )?;
        let q_gradient = first;
        ops.rms_norm_rope_backward(
            narrow(q_normed_gradient),
            narrow(v.q),
            weights.cross_norm_q,
            v.rstd_q,
            None,
            narrow(q_gradient),
            norm_sums,
            tokens,
            width,
        )?;
        ops.column_sum(norm_sums, columns, gradients.cross_norm_q, tokens.div_ceil(32), width)?;
        self.weight_gradient(q_gradient, v.h, &gradients.cross_q, tokens, scratch)?;
        let h_gradient = second;
        self.input_gradient(q_gradient, &weights.cross_q, h_gradient, tokens)?;
        // x1 = x + gate out; h = LN(x1) w + b
        let norm = Norm::Affine { weight: weights.cross_norm_weight, bias: weights.cross_norm_bias };
        let added = Some((self.added(at.layer, outputs.out, 0), first));
        self.norm_backward(h_gradient, (x, dx), v.moments, norm, added, at, &partials)?;
        self.rows_gradient(partials.gate, GATES[0], at, scratch)?;
        let segments = at.tokens.segments.count;
        ops.column_sum(partials.scale, columns, gradients.cross_norm_weight, segments, width)?;
        ops.column_sum(partials.shift, columns, gradients.cross_norm_bias, segments, width)
    }

    /// Self-attention. In: `first`. Out: the stream and its gradient before the block, of all tokens.
    fn self_backward(&mut self, at: &At, kept: &Kept, outputs: &Outputs, scratch: &Scratch) -> Result<()> {
        let (trunk, ops) = (self.trunk, &self.trunk.ops);
        let (weights, gradients) = (&trunk.parameters[at.layer], &trunk.gradients[at.layer]);
        let (tokens, width, heads) = (self.size.tokens, self.size.width, self.size.heads);
        let operand = self.size.operand_bytes;
        let Scratch { partials, first, second, norm: norm_sums, columns } = *scratch;
        let read = self.read_of(at.layer);
        let narrow = |slice: Slice<Operand>| Rows::new(slice, width);

        // Where heads read some tokens alone, the stream of all was left as it was.
        let (from, change) = match read {
            None => (self.x, Change::TakeBack(self.added(at.layer, outputs.out, 0), self.x)),
            Some(_) => (kept.input.unwrap_or(self.x), Change::Nothing),
        };
        let v = self.self_inputs(at.layer, from, change, kept, Run::Again)?;
        let (count, tables) = (at.tokens.count, at.tokens.attention);
        let q = self.queries(v.q, read.as_ref())?;
        let attended = match kept.attended {
            Some(attended) => attended,
            None => {
                let attended = (self.scratch.take(count * width)?, self.scratch.take(heads * count)?);
                self.attend(q, &v, attended, &at.tokens)?;
                attended
            }
        };
        let (out_gradient, attended_gradient) = (first, second);
        self.weight_gradient(out_gradient, attended.0, &gradients.out, count, scratch)?;
        self.input_gradient(out_gradient, &weights.out, attended_gradient, count)?;
        let qkv_gradient: Slice<Operand> = self.scratch.take(3 * tokens * width)?;
        let (mut q_gradient, k_gradient) = (self.scratch.take(count * width)?, self.scratch.take(tokens * width)?);
        trunk.attention.backward(
            ops,
            [narrow(q), narrow(v.k), self.column(v.qkv, 2, 3)],
            (narrow(attended.0), attended.1),
            narrow(attended_gradient),
            Gradients { q: narrow(q_gradient), k: narrow(k_gradient), v: self.column(qkv_gradient, 2, 3) },
            &tables,
            heads,
            &mut self.scratch,
        )?;
        if let Some(read) = read {
            let of_read = std::mem::replace(&mut q_gradient, self.scratch.take(tokens * width)?);
            ops.launcher.zero(q_gradient, operand)?;
            ops.put_rows(of_read, read.places, q_gradient, operand * width)?;
            ops.launcher.zero(self.dx, operand)?;
            ops.put_rows(read.dx, read.places, self.dx, 4 * width)?;
        }
        for (gradient, column, weight, rstd, weight_gradient) in [
            (q_gradient, 0, weights.norm_q, v.rstd_q, gradients.norm_q),
            (k_gradient, 1, weights.norm_k, v.rstd_k, gradients.norm_k),
        ] {
            ops.rms_norm_rope_backward(
                narrow(gradient),
                self.column(v.qkv, column, 3),
                weight,
                rstd,
                Some(&self.tables.turns),
                self.column(qkv_gradient, column, 3),
                norm_sums,
                tokens,
                width,
            )?;
            ops.column_sum(norm_sums, columns, weight_gradient, tokens.div_ceil(32), width)?;
        }
        self.weight_gradient(qkv_gradient, v.h, &gradients.qkv, tokens, scratch)?;
        let h_gradient = first;
        self.input_gradient(qkv_gradient, &weights.qkv, h_gradient, tokens)?;
        // h = LN(x) modulated
        let at = At { layer: at.layer, tokens: self.tables.all };
        let norm = Norm::Modulate { shift: 0, scale: 1 };
        self.norm_backward(h_gradient, (from, self.dx), v.moments, norm, None, &at, &partials)?;
        self.rows_gradient(partials.shift, 0, &at, scratch)?;
        self.rows_gradient(partials.scale, 1, &at, scratch)
    }

    /// The stream, and its gradient, that the second half of a block works on.
    fn output_of(&self, layer: usize) -> (Slice<f32>, Slice<f32>) {
        self.read_of(layer).map_or((self.x, self.dx), |read| (read.x, read.dx))
    }

    #[allow(clippy::too_many_arguments)]
    fn norm_backward(
        &self,
        dh: Slice<Operand>,
        (x, dx): (Slice<f32>, Slice<f32>),
        moments: Moments,
        norm: Norm,
        added: Option<(Added, Slice<Operand>)>,
        at: &At,
        partials: &Partials,
    ) -> Result<()> {
        let (modulation, segments) = (self.modulation(at.layer, &at.tokens), &at.tokens.segments);
        let (ops, width) = (&self.trunk.ops, self.size.width);
        ops.residual_norm_backward(dh, dx, x, moments, norm, added, &modulation, partials, segments, width)
    }

    /// Adds sums by segment to a part of the modulation rows' gradient, and their total to the block's table's.
    fn rows_gradient(&self, partial: Slice<f32>, number: i32, at: &At, scratch: &Scratch) -> Result<()> {
        let (ops, width) = (&self.trunk.ops, self.size.width);
        ops.reduce_rows(partial, &at.tokens.segments, self.e0_gradient, number, width)?;
        let table = self.trunk.gradients[at.layer].table.part(number as usize * width, width, self.size.operand_bytes);
        ops.column_sum(partial, scratch.columns, table, at.tokens.segments.count, width)
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
}
