//! The trunk on a GPU: every block's forward and backward by hand, over one arena.
//!
//! Candle's autograd would keep every intermediate and move about five times the bytes, so it is left to embedders and
//! heads, and to the oracle that this must agree with. Here each tensor of a block is named once, kept or recomputed
//! by a policy, and each operation is one line, forward (`forward.rs`) and backward (`backward.rs`) in the same order.
//! Weight gradients are added to flat f32 buffers. Nothing here waits for the device.
//!
//! The residual stream is one tensor that blocks change in place, forward by adding and backward by taking back. Of the
//! last block the tokens that heads do not read give keys and values, and nothing else.
//!
//! Shapes: N tokens, M of them that heads read, S text rows, D width, F width of the FFN, R modulation rows. The batch is
//! one sequence; samples see each other as little as the plan says.

mod backward;
mod forward;
mod keep;
mod offload;
mod weights;

use super::arena::{Arena, Mark};
use super::attention::{Attention, AttentionTables};
use super::batch::{BatchTables, TokenTables, upload};
use super::flat::{FlatLayout, Span};
use super::gemm::Gemm;
use super::host::{HostLink, HostRoom};
use super::launch::{Launcher, Operand, Slice};
use super::ops::{Added, Modulation, Ops, Segments, Turns};
use crate::Result;
use crate::model::TrunkShape;
use keep::Kept;
use offload::Offload;
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
    /// All of a block's gradients, block after block.
    gradients_of_block: Vec<Slice<f32>>,
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
    all: Tokens,
    /// What heads read, if that is less.
    read: Option<Read>,
    turns: Turns,
    /// Rows of the text by prompt, [P, 2].
    prompts: Slice<i32>,
    /// The token of each of the embedders' rows; null: they are in order.
    place_of_row: Slice<i32>,
    has_padding: bool,
}

/// Tokens that half a block runs over, and what is looked up by them.
#[derive(Clone, Copy, Debug)]
struct Tokens {
    count: usize,
    rows: Slice<i32>,
    segments: Segments,
    attention: AttentionTables,
    text: AttentionTables,
}

/// The tokens that heads read.
#[derive(Clone, Copy, Debug)]
struct Read {
    tokens: Tokens,
    /// Where they stand among all, [M].
    places: Slice<i32>,
    /// Their residual stream from the last block's self-attention on, and its gradient, [M, D].
    x: Slice<f32>,
    dx: Slice<f32>,
}

/// One micro-step through the trunk.
#[derive(Debug)]
pub(crate) struct Pass<'t> {
    trunk: &'t Trunk,
    /// Whether no gradients of blocks are there to be added to.
    alone: bool,
    /// What one block works on. It lies where later blocks keep theirs: forward they have not written it yet, backward they are
    /// done with it.
    scratch: Arena,
    /// Where that begins for each block.
    free_from: Vec<Mark>,
    size: Size,
    tables: Tables,
    condition: Condition,
    kept: Vec<Kept>,
    offload: Offload<'t>,
    /// What the last block that ran forward left for the next to add.
    unsettled: Option<Added>,
    /// The residual stream, [N, D]: forward, the input of the next block unless that keeps its own; backward, the output of
    /// the block that is next.
    x: Slice<f32>,
    /// Gradient of the residual stream where the backward pass has come to, [N, D].
    dx: Slice<f32>,
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
        let gradients_of_block = |layer: usize| {
            let Span { offset, len } = flat.span_of_all(&format!("blocks.{layer}."));
            Slice::new(gradients + 4 * offset as u64, len)
        };
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
            gradients_of_block: (0..depth).map(gradients_of_block).collect(),
        })
    }

    pub fn depth(&self) -> usize {
        self.shape.depth
    }

    /// D
    pub fn width(&self) -> usize {
        self.shape.width
    }

    /// Pairs of a head that rotary positions turn.
    pub fn rotary_pairs(&self) -> usize {
        self.shape.width / self.shape.heads / 2
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

    /// FLOP of a batch's forward pass, a multiply-add counting 2: matrix products and visible pairs, without what nobody
    /// reads.
    pub fn forward_flop(&self, tables: &BatchTables) -> f64 {
        let TrunkShape { depth, width, ffn, .. } = self.shape;
        let [depth, width, ffn] = [depth, width, ffn].map(|size| size as f64);
        let keys_and_values = tables.tokens() as f64 * 4.0 * width * width;
        let rest = |tokens: &TokenTables| {
            let count = tokens.row_of_token.len() as f64;
            count * 2.0 * (4.0 * width * width + 2.0 * width * ffn)
                + tables.text() as f64 * 4.0 * width * width
                + 4.0 * width * (tokens.attention.pairs + tokens.text.pairs) as f64
        };
        let last = tables.read.as_ref().map_or(&tables.all, |(_, tokens)| tokens);
        depth * keys_and_values + (depth - 1.0) * rest(&tables.all) + rest(last)
    }

    /// What a batch takes under a policy: the program itself, run without a device.
    pub fn predict(&self, tables: &BatchTables, policy: &KeepPolicy, alone: bool) -> Result<Needed> {
        let counting = Self {
            ops: Ops { launcher: Launcher::counting(), ..self.ops.clone() },
            gemm: Arc::new(Gemm::counting()),
            attention: self.attention.clone(),
            parameters: self.parameters.clone(),
            gradients: self.gradients.clone(),
            gradients_of_block: self.gradients_of_block.clone(),
            shape: self.shape,
        };
        let arena = Arena::counting(self.ops.operand_bytes());
        let condition = Condition { e0: Slice::null(), text: Slice::null() };
        let mut pass = Pass::begin(&counting, arena, tables, condition, (policy, alone), None)?;
        for layer in 0..self.shape.depth {
            pass.forward(layer)?;
        }
        for layer in (0..self.shape.depth).rev() {
            pass.backward(layer)?;
        }
        Ok(Needed { device: pass.scratch.peak(), host: policy.host_bytes(&self.size(tables)) })
    }

    /// Seconds that a forward pass takes at least on a device of `peak` FLOP a second: products do 56 % of that on an H200,
    /// with all that lies between them. The attention plan, which differs from batch to batch, is left out.
    fn forward_s(&self, size: &Size, peak: f64) -> f64 {
        let TrunkShape { depth, width, ffn, .. } = self.shape;
        let [tokens, depth, width, ffn] = [size.tokens, depth, width, ffn].map(|size| size as f64);
        depth * tokens * 2.0 * (6.0 * width * width + 2.0 * width * ffn) / (0.56 * peak)
    }

    /// The policy that keeps as much as fits into `bytes` of the device and what the host has room for, and what it takes. `peak`
    /// is the device's FLOP a second: where that is not known, nothing goes to the host. `alone`: see [`Pass::begin`].
    pub fn policy_within(
        &self,
        tables: &BatchTables,
        bytes: u64,
        (host, peak): (HostRoom, Option<f64>),
        alone: bool,
    ) -> Result<(KeepPolicy, Needed)> {
        let size = self.size(tables);
        let forward_s = peak.map_or(0.0, |peak| self.forward_s(&size, peak));
        let mut best = (KeepPolicy::NOTHING, self.predict(tables, &KeepPolicy::NOTHING, alone)?);
        // A policy's own account knows neither alignment nor that a block which runs forward again needs more room to work
        // in, so what it may spend is found by trying.
        let lent: u64 = self.gradients_of_block.iter().map(|gradients| 4 * gradients.len() as u64).sum();
        let (mut low, mut high) = (0, bytes + if alone { lent } else { 0 });
        let mut spend = bytes.saturating_sub(best.1.device);
        while high - low > bytes / 256 {
            let policy = KeepPolicy::within(spend, host, forward_s, &size, self.shape.depth);
            let needed = if policy == best.0 { best.1 } else { self.predict(tables, &policy, alone)? };
            if needed.device <= bytes {
                (best, low) = ((policy, needed), spend);
            } else {
                high = spend;
            }
            spend = low + (high - low) / 2;
        }
        Ok(best)
    }
}

/// Bytes of a pass through the trunk.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Needed {
    pub device: u64,
    /// Of the host's memory.
    pub host: u64,
}

impl<'t> Pass<'t> {
    /// Lays out what lives through the pass and copies the tables to the device. A pass that is `alone` in its step finds no
    /// gradients to add to: blocks' gradients begin at zero when the backward pass comes to them, and until then the last blocks
    /// keep things there. What the policy has in the host's memory must be reserved in `host`. [`Self::embed`] comes next.
    pub fn begin(
        trunk: &'t Trunk,
        mut arena: Arena,
        tables: &BatchTables,
        condition: Condition,
        (policy, alone): (&KeepPolicy, bool),
        host: Option<&'t HostLink>,
    ) -> Result<Self> {
        let size = trunk.size(tables);
        let depth = trunk.shape.depth;
        let ops = &trunk.ops;
        let (x, dx) = (arena.take(size.tokens * size.width)?, arena.take(size.tokens * size.width)?);
        let e0_gradient = arena.take(size.rows * 6 * size.width)?;
        let text_gradient = arena.take(size.text * size.width)?;
        ops.launcher.zero(e0_gradient, size.operand_bytes)?;
        ops.launcher.zero(text_gradient, size.operand_bytes)?;
        let read = match &tables.read {
            None => None,
            Some((places, tokens)) => Some(Read {
                tokens: Tokens::upload(tokens, size.rows, ops, &mut arena)?,
                places: upload(&ops.launcher, &mut arena, places)?,
                x: arena.take(places.len() * size.width)?,
                dx: arena.take(places.len() * size.width)?,
            }),
        };
        let uploaded = Tables {
            all: Tokens::upload(&tables.all, size.rows, ops, &mut arena)?,
            read,
            turns: tables.turns(ops, &mut arena)?,
            prompts: upload(&ops.launcher, &mut arena, &tables.prompts)?,
            place_of_row: match &tables.place_of_row {
                Some(places) => upload(&ops.launcher, &mut arena, places)?,
                None => Slice::null(),
            },
            has_padding: tables.has_padding,
        };
        let offload = Offload::new(policy, &size, depth, host, ops.launcher.stream(), &mut arena)?;
        let mut kept = (0..depth)
            .map(|layer| Kept::begin(policy, (layer, depth), &size, offload.slot(layer), &mut arena))
            .collect::<Result<Vec<_>>>()?;
        let second = |layer: usize| if layer + 1 == depth { tables.tokens_read() } else { size.tokens };
        let mut items: Vec<_> = (0..depth).map(|layer| policy.on_device_of(layer, depth)).collect();
        // The last blocks keep theirs where the first ones' gradients will be: a block may lie on those of blocks before it,
        // since it is done with when the backward pass comes to them.
        if let Some(gradients) = trunk.gradients_of_block.first().filter(|_| alone) {
            let mut lent = Arena::new(gradients.address(), u64::MAX, size.operand_bytes);
            for layer in (0..depth).rev() {
                let room = trunk.gradients_of_block[layer].address() - gradients.address();
                let mut elsewhere = Vec::new();
                for item in std::mem::take(&mut items[layer]) {
                    match lent.used() + item.bytes(&size) <= room {
                        true => kept[layer].take(item, &size, second(layer), &mut lent)?,
                        false => elsewhere.push(item),
                    }
                }
                items[layer] = elsewhere;
            }
        }
        let mut free_from = Vec::with_capacity(depth);
        for (layer, items) in items.into_iter().enumerate() {
            for item in items {
                kept[layer].take(item, &size, second(layer), &mut arena)?;
            }
            free_from.push(arena.mark());
        }
        Ok(Self {
            trunk,
            alone,
            scratch: arena,
            free_from,
            size,
            tables: uploaded,
            condition,
            kept,
            offload,
            unsettled: None,
            x,
            dx,
            e0_gradient,
            text_gradient,
        })
    }

    /// Makes the first block's input of the embedders' rows, [., D] a part.
    pub fn embed(&self, parts: &[Slice<Operand>]) -> Result<()> {
        let (ops, x) = (&self.trunk.ops, self.input(0));
        if self.tables.has_padding {
            ops.launcher.zero(x, self.size.operand_bytes)?;
        }
        self.each_part(parts, |part, place| ops.embed_rows(part, place, x, self.size.width))
    }

    /// The gradients of the embedders' rows, after the first block's backward pass.
    pub fn embed_backward(&self, parts: &[Slice<Operand>]) -> Result<()> {
        let ops = &self.trunk.ops;
        self.each_part(parts, |part, place| ops.embed_rows_backward(self.dx, place, part, self.size.width))
    }

    /// Each part with the places of its rows.
    fn each_part(
        &self,
        parts: &[Slice<Operand>],
        work: impl Fn(Slice<Operand>, Slice<i32>) -> Result<()>,
    ) -> Result<()> {
        let places = self.tables.place_of_row;
        let mut first = 0;
        for part in parts {
            let rows = part.len() / self.size.width;
            let place = match places.len() {
                0 => Slice::null(),
                _ => places.part(first, rows, self.size.operand_bytes),
            };
            work(*part, place)?;
            first += rows;
        }
        Ok(())
    }

    /// Input of block `layer` until that has run, once it is settled; [N, D].
    pub fn input(&self, layer: usize) -> Slice<f32> {
        self.kept.get(layer).and_then(|kept| kept.input).unwrap_or(self.x)
    }

    /// What heads read, after the last block, and its gradient, which they leave here; [M, D].
    pub fn output(&self) -> (Slice<f32>, Slice<f32>) {
        self.tables.read.map_or((self.x, self.dx), |read| (read.x, read.dx))
    }

    /// The residual stream and its gradient after the backward pass of a block: its input, rebuilt unless the block kept
    /// it, and that input's gradient; [N, D]. Whoever changes what lies between two blocks sets both.
    pub fn between(&self) -> (Slice<f32>, Slice<f32>) {
        (self.x, self.dx)
    }

    fn modulation(&self, layer: usize, tokens: &Tokens) -> Modulation {
        Modulation { e0: self.condition.e0, table: self.trunk.parameters[layer].table, rows: tokens.rows }
    }

    /// The tokens of block `layer` that heads read, if it is the last and they do not read all.
    fn read_of(&self, layer: usize) -> Option<Read> {
        self.tables.read.filter(|_| layer + 1 == self.trunk.shape.depth)
    }

    /// Has block `layer` work in the room that only later ones keep something in.
    fn work_beyond(&mut self, layer: usize) {
        if let Some(mark) = self.free_from.get(layer) {
            self.scratch.release(*mark);
        }
    }

    /// Runs `work` and gives back what it took from the arena.
    fn scope<T>(&mut self, work: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        let mark: Mark = self.scratch.mark();
        let result = work(self);
        self.scratch.release(mark);
        result
    }
}

impl Tokens {
    fn upload(tables: &TokenTables, rows: usize, ops: &Ops, arena: &mut Arena) -> Result<Self> {
        Ok(Self {
            count: tables.row_of_token.len(),
            rows: upload(&ops.launcher, arena, &tables.row_of_token)?,
            segments: Segments {
                tokens_by_row: upload(&ops.launcher, arena, &tables.tokens_by_row)?,
                start: upload(&ops.launcher, arena, &tables.segment_start)?,
                of_row: upload(&ops.launcher, arena, &tables.row_segment_start)?,
                count: tables.segments(),
                rows,
            },
            attention: AttentionTables::upload(&tables.attention, &ops.launcher, arena)?,
            text: AttentionTables::upload(&tables.text, &ops.launcher, arena)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::keep::Item;
    use super::*;
    use crate::cuda::batch::BatchSize;
    use crate::model::{LingbotModel, lingbot_parameter_specs};

    /// Gradients far away from everything else.
    const GRADIENTS: u64 = 1 << 40;

    fn trunk(depth: usize) -> Trunk {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/configs/furniture_all_e128.yaml");
        let recipe = serde_yaml::from_str(&std::fs::read_to_string(path).expect("read")).expect("a recipe");
        let crate::config::Recipe::Lingbot(mut recipe) = recipe else { panic!("{path} is of LingBot-VA") };
        recipe.model.num_layers = depth;
        let shape = LingbotModel::shape(&recipe.model);
        let specs = lingbot_parameter_specs(&recipe.model);
        let tensors = specs.iter().map(|spec| (spec.name.as_str(), spec.count(), spec.trained));
        let flat = FlatLayout::new(tensors, &adjacent(&shape.names, depth)).expect("a layout");
        Trunk::new(shape, Launcher::counting(), Arc::new(Gemm::counting()), true, &flat, 0, GRADIENTS).expect("a trunk")
    }

    #[test]
    fn the_last_blocks_keep_things_where_gradients_of_blocks_before_them_will_be() {
        const DEPTH: usize = 12;
        let trunk = trunk(DEPTH);
        let size = BatchSize { tokens: 8064, read: 4032, text: 512, rows: 448 };
        let tables = BatchTables::sized(&size, 64, trunk.attention().tiling()).expect("tables");
        let policy = KeepPolicy::everything(DEPTH);
        let condition = Condition { e0: Slice::null(), text: Slice::null() };
        let pass = Pass::begin(&trunk, Arena::counting(2), &tables, condition, (&policy, true), None).expect("a pass");
        let mut taken: Vec<(u64, u64)> = Vec::new();
        let mut lent = 0;
        for (layer, kept) in pass.kept.iter().enumerate() {
            for (address, bytes) in Item::BY_VALUE.iter().flat_map(|item| kept.pieces(*item, 2)) {
                if address >= GRADIENTS {
                    lent += bytes;
                    assert!(address + bytes <= trunk.gradients_of_block[layer].address(), "block {layer}");
                }
                assert!(taken.iter().all(|(at, len)| address + bytes <= *at || at + len <= address), "block {layer}");
                taken.push((address, bytes));
            }
        }
        let needed = |alone| trunk.predict(&tables, &policy, alone).expect("counted").device;
        assert!(lent > 1 << 30, "{lent} bytes");
        assert!(needed(false) >= needed(true) + lent - lent / 10, "{} {} {lent}", needed(false), needed(true));
    }
}
