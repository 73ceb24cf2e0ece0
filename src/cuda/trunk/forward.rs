//! One block forward: AdaLN self-attention, text cross-attention, FFN (Wan2.2 `model.py`), as `model::Block` computes it.
//!
//! A block is three times the same: a norm of the residual stream, what is computed of it, and an addition to the stream.
//! The first two are one function each, which the backward pass calls again; there what was kept is skipped.

use super::keep::{Item, Kept, Outputs};
use super::weights::Linear;
use super::{Pass, Read, Tokens};
use crate::Result;
use crate::cuda::launch::{Operand, Slice};
use crate::cuda::ops::{Added, Change, Moments, Norm, Rows};

/// The number of the modulation part that gates what self-attention and FFN add; cross-attention's is not gated.
pub(super) const GATES: [i32; 3] = [2, -1, 5];

/// What self-attention computes of the stream, [N, D] where not said.
#[derive(Clone, Copy, Debug)]
pub(super) struct SelfInputs {
    /// LN of the stream, modulated
    pub h: Slice<Operand>,
    pub moments: Moments,
    /// [N, 3 D], before the norms
    pub qkv: Slice<Operand>,
    /// Normed and turned
    pub q: Slice<Operand>,
    pub k: Slice<Operand>,
    pub rstd_q: Slice<f32>,
    pub rstd_k: Slice<f32>,
}

/// What cross-attention computes of the stream and the text, [M, D] where not said.
#[derive(Clone, Copy, Debug)]
pub(super) struct CrossInputs {
    pub h: Slice<Operand>,
    pub moments: Moments,
    pub q: Slice<Operand>,
    pub q_normed: Slice<Operand>,
    pub rstd_q: Slice<f32>,
    /// [S, 2 D]
    pub kv: Slice<Operand>,
    /// [S, D], less the mean of each prompt
    pub k_normed: Slice<Operand>,
    pub rstd_k: Slice<f32>,
}

/// What the FFN computes of the stream.
#[derive(Clone, Copy, Debug)]
pub(super) struct FfnInputs {
    /// [M, D]
    pub h: Slice<Operand>,
    pub moments: Moments,
    /// [M, F], before and after GELU
    pub up: Slice<Operand>,
    pub activated: Slice<Operand>,
}

/// When a block's last result is added to the stream.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Finish {
    Now,
    /// By the next block's first norm, which reads the stream anyway.
    Later,
}

/// Whether a block runs for the first time, into what it keeps, or what it kept is there.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Run {
    First,
    Again,
}

impl Pass<'_> {
    /// Block `layer`: its input becomes the next one's, but for what [`Self::settle`] would still add.
    pub fn forward(&mut self, layer: usize) -> Result<()> {
        let (kept, from, to) = (self.kept[layer], self.input(layer), self.input(layer + 1));
        self.offload.enter(layer)?;
        self.work_beyond(layer);
        let change = self.unsettled.take().map_or(Change::Nothing, |added| Change::Add(added, from));
        // What is not kept will be gone when the next block begins, and heads come after the last.
        let finish = match kept.outputs.is_some() && layer + 1 < self.trunk.depth() {
            true => Finish::Later,
            false => Finish::Now,
        };
        self.scope(|pass| pass.forward_block(layer, &kept, (from, change), to, finish))
    }

    /// Adds to the input of block `layer`, which is next, what the one before it left to be added.
    pub fn settle(&mut self, layer: usize) -> Result<()> {
        let Some(added) = self.unsettled.take() else { return Ok(()) };
        let x = self.input(layer);
        self.add_alone(Change::Add(added, x), x, layer, &self.tables.all)
    }

    /// A change of the stream that no norm follows.
    fn add_alone(&self, change: Change, x: Slice<f32>, layer: usize, tokens: &Tokens) -> Result<()> {
        let nothing = Moments { mean: Slice::null(), rstd: Slice::null() };
        let (modulation, ops) = (self.modulation(layer, tokens), &self.trunk.ops);
        ops.residual_norm(x, change, &modulation, Norm::None, Slice::null(), nothing, tokens.count, self.size.width)
    }

    /// What a block adds to the stream, the `number`-th of three.
    pub(super) fn added(&self, layer: usize, y: Slice<Operand>, number: usize) -> Added {
        Added { y, gate: GATES[number], table: self.trunk.parameters[layer].table }
    }

    /// Block `layer` on the stream at `from` after `change`, whose output is left at `to`, or where heads read it; fills what is
    /// kept.
    pub(super) fn forward_block(
        &mut self,
        layer: usize,
        kept: &Kept,
        (from, change): (Slice<f32>, Change),
        to: Slice<f32>,
        finish: Finish,
    ) -> Result<()> {
        let (trunk, size, tables) = (self.trunk, self.size, self.tables);
        let weights = &trunk.parameters[layer];
        let width = size.width;
        let read = self.read_of(layer);
        let tokens = read.map_or(tables.all, |read| read.tokens);
        let outputs = match kept.outputs {
            Some(outputs) => outputs,
            None => Outputs::take(tokens.count, width, &mut self.scratch)?,
        };

        self.scope(|pass| {
            let attended = match kept.attended {
                Some(attended) => attended,
                None => (pass.scratch.take(tokens.count * width)?, pass.scratch.take(size.heads * tokens.count)?),
            };
            let inputs = pass.self_inputs(layer, from, change, kept, Run::First)?;
            pass.offload.written(layer, Item::Qkv)?;
            let q = pass.queries(inputs.q, read.as_ref())?;
            pass.attend(q, &inputs, attended, &tokens)?;
            pass.offload.written(layer, Item::Attended)?;
            if let Some(read) = &read {
                trunk.ops.take_rows(from, read.places, read.x, 4 * width)?;
            }
            pass.linear(attended.0, &weights.out, outputs.out, tokens.count)
        })?;
        // From here on the stream is where the block's output will be.
        let (from, to) = read.map_or((from, to), |read| (read.x, read.x));
        self.scope(|pass| {
            let attended = match kept.cross_attended {
                Some(attended) => attended,
                None => (pass.scratch.take(tokens.count * width)?, pass.scratch.take(size.heads * tokens.count)?),
            };
            let change = Change::Add(pass.added(layer, outputs.out, 0), to);
            let inputs = pass.cross_inputs(layer, &tokens, from, change, kept, Run::First)?;
            pass.offload.written(layer, Item::CrossQuery)?;
            pass.attend_text(&inputs, attended, &tokens)?;
            pass.offload.written(layer, Item::CrossAttended)?;
            pass.linear(attended.0, &weights.cross_out, outputs.cross_out, tokens.count)
        })?;
        self.scope(|pass| {
            let change = Change::Add(pass.added(layer, outputs.cross_out, 1), to);
            let h = pass.scratch.take(tokens.count * width)?;
            let inputs = pass.ffn_inputs(layer, &tokens, to, change, h, kept, Run::First)?;
            pass.offload.written(layer, Item::Up)?;
            pass.linear(inputs.activated, &weights.down, outputs.down, tokens.count)
        })?;
        self.offload.written(layer, Item::Outputs)?;
        let added = self.added(layer, outputs.down, 2);
        match finish {
            Finish::Now => self.add_alone(Change::Add(added, to), to, layer, &tokens),
            Finish::Later => {
                self.unsettled = Some(added);
                Ok(())
            }
        }
    }

    /// From the stream to queries, keys and values of self-attention.
    pub(super) fn self_inputs(
        &mut self,
        layer: usize,
        x: Slice<f32>,
        change: Change,
        kept: &Kept,
        run: Run,
    ) -> Result<SelfInputs> {
        let (trunk, tables) = (self.trunk, self.tables);
        let (ops, weights) = (&trunk.ops, &trunk.parameters[layer]);
        let (tokens, width) = (self.size.tokens, self.size.width);
        let arena = &mut self.scratch;
        let qkv = kept.qkv.map_or_else(|| arena.take(3 * tokens * width), Ok)?;
        let inputs = SelfInputs {
            h: arena.take(tokens * width)?,
            moments: Moments { mean: arena.take(tokens)?, rstd: arena.take(tokens)? },
            qkv,
            q: arena.take(tokens * width)?,
            k: arena.take(tokens * width)?,
            rstd_q: arena.take(tokens)?,
            rstd_k: arena.take(tokens)?,
        };
        let SelfInputs { h, moments, q, k, .. } = inputs;
        let norm = Norm::Modulate { shift: 0, scale: 1 };
        ops.residual_norm(x, change, &self.modulation(layer, &tables.all), norm, h, moments, tokens, width)?;
        if run == Run::First || kept.qkv.is_none() {
            self.linear(h, &weights.qkv, qkv, tokens)?;
        }
        let turns = Some(&tables.turns);
        let part = |number: usize| self.column(qkv, number, 3);
        ops.rms_norm_rope(part(0), weights.norm_q, turns, Rows::new(q, width), inputs.rstd_q, tokens, width)?;
        ops.rms_norm_rope(part(1), weights.norm_k, turns, Rows::new(k, width), inputs.rstd_k, tokens, width)?;
        Ok(inputs)
    }

    /// The rows of q [N, D] that heads read, [M, D].
    pub(super) fn queries(&mut self, q: Slice<Operand>, read: Option<&Read>) -> Result<Slice<Operand>> {
        let Some(read) = read else { return Ok(q) };
        let rows = self.scratch.take(read.tokens.count * self.size.width)?;
        self.trunk.ops.take_rows(q, read.places, rows, self.size.operand_bytes * self.size.width)?;
        Ok(rows)
    }

    /// Self-attention of the queries `q` [M, D]: output [M, D] and log-sum-exp [heads, M].
    pub(super) fn attend(
        &self,
        q: Slice<Operand>,
        inputs: &SelfInputs,
        attended: (Slice<Operand>, Slice<f32>),
        tokens: &Tokens,
    ) -> Result<()> {
        let width = self.size.width;
        let rows = [Rows::new(q, width), Rows::new(inputs.k, width), self.column(inputs.qkv, 2, 3)];
        let (out, statistics) = (Rows::new(attended.0, width), attended.1);
        let trunk = self.trunk;
        trunk.attention.forward(&trunk.ops, rows, out, statistics, &tokens.attention, self.size.heads)
    }

    /// From stream and text to queries, keys and values of cross-attention.
    pub(super) fn cross_inputs(
        &mut self,
        layer: usize,
        tokens: &Tokens,
        x: Slice<f32>,
        change: Change,
        kept: &Kept,
        run: Run,
    ) -> Result<CrossInputs> {
        let trunk = self.trunk;
        let (ops, weights) = (&trunk.ops, &trunk.parameters[layer]);
        let (count, text, width) = (tokens.count, self.size.text, self.size.width);
        let arena = &mut self.scratch;
        let inputs = CrossInputs {
            h: arena.take(count * width)?,
            moments: Moments { mean: arena.take(count)?, rstd: arena.take(count)? },
            q: kept.cross_q.map_or_else(|| arena.take(count * width), Ok)?,
            q_normed: arena.take(count * width)?,
            rstd_q: arena.take(count)?,
            kv: arena.take(2 * text * width)?,
            k_normed: arena.take(text * width)?,
            rstd_k: arena.take(text)?,
        };
        let CrossInputs { h, moments, q, q_normed, rstd_q, kv, k_normed, rstd_k } = inputs;
        let norm = Norm::Affine { weight: weights.cross_norm_weight, bias: weights.cross_norm_bias };
        ops.residual_norm(x, change, &self.modulation(layer, tokens), norm, h, moments, count, width)?;
        if run == Run::First || kept.cross_q.is_none() {
            self.linear(h, &weights.cross_q, q, count)?;
        }
        let narrow = |slice: Slice<Operand>| Rows::new(slice, width);
        ops.rms_norm_rope(narrow(q), weights.cross_norm_q, None, narrow(q_normed), rstd_q, count, width)?;
        self.linear(self.condition.text, &weights.cross_kv, kv, text)?;
        let key = self.column(kv, 0, 2);
        ops.rms_norm_rope(key, weights.cross_norm_k, None, narrow(k_normed), rstd_k, text, width)?;
        // Softmax does not see it, and its gradient sums to zero over keys: backward there is nothing to do.
        ops.center_rows(k_normed, tokens.text.key_bias, self.tables.prompts, width)?;
        Ok(inputs)
    }

    /// Cross-attention: output [M, D] and log-sum-exp [heads, M].
    pub(super) fn attend_text(
        &self,
        inputs: &CrossInputs,
        attended: (Slice<Operand>, Slice<f32>),
        tokens: &Tokens,
    ) -> Result<()> {
        let width = self.size.width;
        let rows = [Rows::new(inputs.q_normed, width), Rows::new(inputs.k_normed, width), self.column(inputs.kv, 1, 2)];
        let (out, statistics) = (Rows::new(attended.0, width), attended.1);
        let trunk = self.trunk;
        trunk.attention.forward(&trunk.ops, rows, out, statistics, &tokens.text, self.size.heads)
    }

    /// From the stream to the FFN's wide activations; `h` [M, D] is room for the norm.
    #[allow(clippy::too_many_arguments)]
    pub(super) fn ffn_inputs(
        &mut self,
        layer: usize,
        tokens: &Tokens,
        x: Slice<f32>,
        change: Change,
        h: Slice<Operand>,
        kept: &Kept,
        run: Run,
    ) -> Result<FfnInputs> {
        let trunk = self.trunk;
        let (ops, weights) = (&trunk.ops, &trunk.parameters[layer]);
        let (count, width, ffn) = (tokens.count, self.size.width, self.size.ffn);
        // A product hands its values over before GELU only to whoever reads them: the backward pass. In f32 GELU is a kernel
        // of its own.
        let with_up = kept.up.is_some() || run == Run::Again || !ops.half;
        let arena = &mut self.scratch;
        let moments = Moments { mean: arena.take(count)?, rstd: arena.take(count)? };
        let up = match kept.up {
            Some(up) => up,
            None if with_up => arena.take(count * ffn)?,
            None => Slice::null(),
        };
        let activated = arena.take(count * ffn)?;
        let norm = Norm::Modulate { shift: 3, scale: 4 };
        ops.residual_norm(x, change, &self.modulation(layer, tokens), norm, h, moments, count, width)?;
        if run == Run::Again && kept.up.is_some() {
            ops.gelu(up, activated, count * ffn)?;
        } else if ops.half {
            let Linear { weight, bias, inputs, outputs } = weights.up;
            let up = with_up.then_some(up);
            trunk.gemm.forward_gelu(h, weight, bias, up, activated, count, inputs, outputs)?;
        } else {
            self.linear(h, &weights.up, up, count)?;
            ops.gelu(up, activated, count * ffn)?;
        }
        Ok(FfnInputs { h, moments, up, activated })
    }

    /// Column `number` of `parts` that lie beside each other in rows of [., parts D].
    pub(super) fn column(&self, slice: Slice<Operand>, number: usize, parts: usize) -> Rows {
        let (width, offset) = (self.size.width, number * self.size.width);
        let column = slice.part(offset, slice.len().saturating_sub(offset), self.size.operand_bytes);
        Rows::new(column, parts * width)
    }

    fn linear(&self, x: Slice<Operand>, layer: &Linear<Operand>, y: Slice<Operand>, rows: usize) -> Result<()> {
        let (x, y) = (Rows::new(x, layer.inputs), Rows::new(y, layer.outputs));
        self.trunk.gemm.forward(x, layer.weight, layer.bias, y, rows, layer.inputs, layer.outputs)
    }
}
