//! What the forward pass keeps for the backward pass, and where, chosen from memory budgets.
//!
//! A block that keeps what it added to the residual stream (`Outputs`) needs no copy of its input: the backward pass takes
//! those additions back from the stream, one by one, and so comes to the input. Any other block keeps its input and runs
//! forward again. Each further item saves its recomputation. Items are bought in order of the time saved a byte, block by
//! block, until the budget is spent: with none a block's whole forward runs again, with all nothing but element-wise work.
//!
//! Some items of some blocks may lie in the host's memory between their forward and backward pass (`offload.rs`): that costs
//! no time as long as the link is faster than the blocks, and on the device two blocks' room.

use super::Size;
use crate::Result;
use crate::cuda::arena::Arena;
use crate::cuda::host::HostRoom;
use crate::cuda::launch::{Operand, Slice};

/// What a block may keep, the most saved a byte first. With D = 3072 and F = 14336 a token's share of a forward's products
/// is 43 % for `Outputs`, which in place of the input take two bytes x D more; 6.5 % for as many (`CrossQuery`), 20 % for
/// thrice as many (`Qkv`), and 30 % for 4.7 times as many (`Up`); attention outputs save no product but the attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Item {
    Outputs,
    Attended,
    Qkv,
    CrossQuery,
    Up,
    CrossAttended,
}

/// A yes or no for each item.
type Items = [bool; 6];

impl Item {
    pub const BY_VALUE: [Self; 6] =
        [Self::Outputs, Self::Attended, Self::Qkv, Self::CrossQuery, Self::Up, Self::CrossAttended];

    fn place(self) -> usize {
        self as usize
    }

    /// Bytes of it in a block, at most.
    pub fn bytes(self, size: &Size) -> u64 {
        let mut arena = Arena::counting(size.operand_bytes);
        // A counting arena has no end.
        let _ = Kept::default().take(self, size, size.tokens, &mut arena);
        arena.peak()
    }

    /// Bytes that a block takes more on the device for keeping it there: one with outputs keeps no input.
    fn bytes_more(self, size: &Size) -> u64 {
        let spared = if self == Self::Outputs { 4 * (size.tokens * size.width) as u64 } else { 0 };
        self.bytes(size).saturating_sub(spared)
    }

    /// Time that keeping it saves in a block's backward pass, in that of a product of [N, D] with [D, D]. Attention is put down
    /// as in a long window; of `Up` goes the kernel that computes GELU again, which its product would do on the way.
    fn saves(self, size: &Size) -> f64 {
        let ffn = size.ffn as f64 / size.width as f64;
        match self {
            Self::Outputs => 2.0 + ffn,
            Self::Attended | Self::CrossQuery => 1.0,
            Self::Qkv => 3.0,
            Self::Up => 0.9 * ffn,
            Self::CrossAttended => 0.4,
        }
    }
}

/// Which items each block keeps, and where.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct KeepPolicy {
    /// For every item, how many blocks keep it on the device: the last of those that do not have it in the host's memory.
    blocks: [usize; 6],
    hosted: Hosted,
}

/// Items that some blocks keep in the host's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Hosted {
    items: Items,
    /// How many blocks; they lie evenly among all but the last, so that each has the time of those around it for its copies.
    blocks: usize,
}

/// Blocks whose hosted items are on the device at once.
pub(super) const SLOTS: usize = 2;

impl Hosted {
    /// Hosting blocks before block `layer`.
    fn before(&self, layer: usize, depth: usize) -> usize {
        match depth {
            0 | 1 => 0,
            _ => layer.min(depth - 1) * self.blocks / (depth - 1),
        }
    }

    /// Which of the hosting blocks block `layer` is, if it is one.
    fn place(&self, layer: usize, depth: usize) -> Option<usize> {
        let place = self.before(layer, depth);
        (self.before(layer + 1, depth) > place).then_some(place)
    }

    /// Bytes of a block's hosted items.
    fn block_bytes(&self, size: &Size) -> u64 {
        let items = Item::BY_VALUE.iter().filter(|item| self.items[item.place()]);
        items.map(|item| item.bytes(size)).sum()
    }
}

impl KeepPolicy {
    /// Nothing but the blocks' inputs.
    pub const NOTHING: Self = Self { blocks: [0; 6], hosted: Hosted { items: [false; 6], blocks: 0 } };

    /// What the last `count` blocks add to the stream.
    pub fn outputs_of(count: usize) -> Self {
        let mut policy = Self::NOTHING;
        policy.blocks[0] = count;
        policy
    }

    /// Everything, on the device.
    pub fn everything(depth: usize) -> Self {
        Self { blocks: [depth; 6], hosted: Hosted::default() }
    }

    /// Everything, in the host's memory wherever that may be.
    pub fn all_in_host(depth: usize) -> Self {
        Self { blocks: [depth; 6], hosted: Hosted { items: [true; 6], blocks: depth.saturating_sub(1) } }
    }

    /// Buys for at most `budget` bytes of the device, and for at most `host.bytes` of the host if its link carries them while the
    /// blocks of a forward pass of `forward_s` seconds run, the first and last but one: whatever saves most.
    pub fn within(budget: u64, host: HostRoom, forward_s: f64, size: &Size, depth: usize) -> Self {
        let window_s = forward_s * depth.saturating_sub(SLOTS) as f64 / depth.max(1) as f64;
        let copied = (host.bytes_per_second * window_s) as u64;
        let mut best = Self::on_device(budget, Hosted::default(), size, depth);
        for set in 1u32..1 << 5 {
            // `CrossAttended` saves too little to be carried.
            let mut hosted = Hosted::default();
            for item in Item::BY_VALUE {
                hosted.items[item.place()] = set >> item.place() & 1 == 1;
            }
            let bytes = hosted.block_bytes(size).max(1);
            let most = (host.bytes.min(copied) / bytes) as usize;
            hosted.blocks = (SLOTS + most).min(depth.saturating_sub(1));
            if most == 0 || hosted.blocks <= SLOTS || SLOTS as u64 * bytes > budget {
                continue;
            }
            let policy = Self::on_device(budget - SLOTS as u64 * bytes, hosted, size, depth);
            // What is carried takes power and bandwidth from the products beside it: it must be worth something.
            let worth = |policy: &Self| policy.saves(size, depth) - 0.1 * policy.hosted.blocks as f64;
            if policy.is_sound(depth) && worth(&policy) > worth(&best) {
                best = policy;
            }
        }
        best
    }

    /// What `budget` bytes of the device buy beside what is hosted.
    fn on_device(budget: u64, hosted: Hosted, size: &Size, depth: usize) -> Self {
        let mut policy = Self { blocks: [0; 6], hosted };
        // Each block that hosts its outputs spares its input.
        let mut left = match hosted.items[Item::Outputs.place()] {
            true => budget + 4 * (hosted.blocks * size.tokens * size.width) as u64,
            false => budget,
        };
        let mut with_outputs = 0;
        for item in Item::BY_VALUE {
            let blocks = if hosted.items[item.place()] { depth - hosted.blocks } else { depth };
            let bytes = item.bytes_more(size).max(1);
            // A block without outputs runs forward again, whatever it keeps.
            let useful = if item == Item::Outputs { depth } else { with_outputs };
            let count = blocks.min(useful).min((left / bytes) as usize);
            policy.blocks[item.place()] = count;
            left -= count as u64 * bytes;
            if item == Item::Outputs {
                with_outputs = count + if hosted.items[item.place()] { hosted.blocks } else { 0 };
            }
        }
        policy
    }

    /// Whether every block that hosts something keeps its outputs, since one that does not runs forward again, whatever it kept;
    /// and whether the last block keeps them if any does: of its tokens that heads do not read it leaves no stream to take
    /// anything back from.
    fn is_sound(&self, depth: usize) -> bool {
        let outputs = |layer: usize| self.keeps(Item::Outputs, layer, depth);
        (0..depth).all(|layer| self.hosted.place(layer, depth).is_none() || outputs(layer))
            && ((0..depth).all(|layer| !outputs(layer)) || outputs(depth - 1))
    }

    /// Time saved, as [`Item::saves`] counts it.
    fn saves(&self, size: &Size, depth: usize) -> f64 {
        let with_outputs = (0..depth).filter(|layer| self.keeps(Item::Outputs, *layer, depth));
        with_outputs
            .flat_map(|layer| Item::BY_VALUE.into_iter().filter(move |item| self.keeps(*item, layer, depth)))
            .map(|item| item.saves(size))
            .sum()
    }

    /// Whether block `layer` of `depth` keeps an item.
    pub fn keeps(&self, item: Item, layer: usize, depth: usize) -> bool {
        if self.hosts(item, layer, depth) {
            return true;
        }
        // Blocks from this on that keep it on the device, if they keep it.
        let hosting =
            if self.hosted.items[item.place()] { self.hosted.blocks - self.hosted.before(layer, depth) } else { 0 };
        depth - layer - hosting <= self.blocks[item.place()]
    }

    /// Whether block `layer` has an item in the host's memory between its forward and its backward pass.
    pub fn hosts(&self, item: Item, layer: usize, depth: usize) -> bool {
        self.hosted.items[item.place()] && self.hosted.place(layer, depth).is_some()
    }

    /// What block `layer` keeps, and not by way of the host.
    pub fn on_device_of(&self, layer: usize, depth: usize) -> Vec<Item> {
        let items = Item::BY_VALUE.into_iter();
        items.filter(|item| self.keeps(*item, layer, depth) && !self.hosts(*item, layer, depth)).collect()
    }

    /// Which of the hosting blocks block `layer` is, if it is one.
    pub fn hosting_place(&self, layer: usize, depth: usize) -> Option<usize> {
        self.hosted.place(layer, depth)
    }

    /// How many blocks host, and the bytes of one.
    pub fn hosting(&self, size: &Size) -> (usize, u64) {
        (self.hosted.blocks, self.hosted.block_bytes(size))
    }

    /// Bytes of the host's memory that it takes: the last hosting blocks' items never leave the device.
    pub fn host_bytes(&self, size: &Size) -> u64 {
        self.hosted.blocks.saturating_sub(SLOTS) as u64 * self.hosted.block_bytes(size)
    }

    /// Bytes of everything kept on the device beside the inputs of all blocks, alignment not counted.
    #[cfg(test)]
    pub fn bytes(&self, size: &Size) -> u64 {
        let kept: u64 =
            self.blocks.iter().zip(Item::BY_VALUE).map(|(count, item)| *count as u64 * item.bytes_more(size)).sum();
        let slots = if self.hosted.blocks > 0 { SLOTS as u64 * self.hosted.block_bytes(size) } else { 0 };
        let inputs = 4 * (self.hosted.blocks * size.tokens * size.width) as u64;
        kept + slots - if self.hosted.items[Item::Outputs.place()] { inputs } else { 0 }
    }
}

impl std::fmt::Display for KeepPolicy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let name = |item: Item| format!("{item:?}").to_lowercase();
        let mut kept: Vec<String> = Item::BY_VALUE
            .iter()
            .zip(self.blocks)
            .filter(|(_, count)| *count > 0)
            .map(|(item, count)| format!("{} of {count}", name(*item)))
            .collect();
        if self.hosted.blocks > 0 {
            let items = Item::BY_VALUE.into_iter().filter(|item| self.hosted.items[item.place()]).map(name);
            kept.push(format!(
                "{} of {} by way of the host",
                items.collect::<Vec<_>>().join(" and "),
                self.hosted.blocks
            ));
        }
        match kept.is_empty() {
            true => write!(f, "block inputs"),
            false => write!(f, "{}", kept.join(", ")),
        }
    }
}

/// One block's kept tensors, over N tokens and the M of them that it asks for more than keys and values.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Kept {
    /// [N, D], of a block without outputs.
    pub input: Option<Slice<f32>>,
    pub outputs: Option<Outputs>,
    /// [N, 3 D]
    pub qkv: Option<Slice<Operand>>,
    /// [M, D] and its log-sum-exp [heads, M]
    pub attended: Option<(Slice<Operand>, Slice<f32>)>,
    /// [M, D]
    pub cross_q: Option<Slice<Operand>>,
    /// [M, D] and [heads, M]
    pub cross_attended: Option<(Slice<Operand>, Slice<f32>)>,
    /// [M, F]
    pub up: Option<Slice<Operand>>,
}

/// What a block adds to the residual stream, before gates, [M, D] each.
#[derive(Clone, Copy, Debug)]
pub(super) struct Outputs {
    /// Of self-attention.
    pub out: Slice<Operand>,
    /// Of cross-attention.
    pub cross_out: Slice<Operand>,
    /// Of the FFN.
    pub down: Slice<Operand>,
}

impl Outputs {
    pub fn take(tokens: usize, width: usize, arena: &mut Arena) -> Result<Self> {
        let stream = tokens * width;
        Ok(Self { out: arena.take(stream)?, cross_out: arena.take(stream)?, down: arena.take(stream)? })
    }
}

impl Kept {
    /// What block `layer` has before anything is taken for it alone: `slot`, if it hosts, and its input, if it keeps that. The
    /// block before writes the input, so it is no part of what a block leaves.
    pub fn begin(
        policy: &KeepPolicy,
        (layer, depth): (usize, usize),
        size: &Size,
        slot: Option<&Self>,
        arena: &mut Arena,
    ) -> Result<Self> {
        let input = match policy.keeps(Item::Outputs, layer, depth) {
            true => None,
            false => Some(arena.take(size.tokens * size.width)?),
        };
        Ok(Self { input, ..slot.copied().unwrap_or_default() })
    }

    /// Room for everything that the backward pass reads, for a block that runs forward again.
    pub fn everything(size: &Size, second: usize, arena: &mut Arena) -> Result<Self> {
        let mut kept = Self::default();
        for item in Item::BY_VALUE {
            kept.take(item, size, second, arena)?;
        }
        Ok(kept)
    }

    /// Room for what a block hosts.
    pub fn hosted(policy: &KeepPolicy, size: &Size, arena: &mut Arena) -> Result<Self> {
        let mut kept = Self::default();
        for item in Item::BY_VALUE.into_iter().filter(|item| policy.hosted.items[item.place()]) {
            kept.take(item, size, size.tokens, arena)?;
        }
        Ok(kept)
    }

    /// Where an item's tensors are on the device: (address, bytes).
    pub fn pieces(&self, item: Item, operand: usize) -> Vec<(u64, u64)> {
        let operands = |slice: Slice<Operand>| (slice.address(), (slice.len() * operand) as u64);
        let floats = |slice: Slice<f32>| (slice.address(), 4 * slice.len() as u64);
        let pair = |(values, statistics)| vec![operands(values), floats(statistics)];
        match item {
            Item::Outputs => self.outputs.map_or_else(Vec::new, |Outputs { out, cross_out, down }| {
                [out, cross_out, down].map(operands).to_vec()
            }),
            Item::Attended => self.attended.map_or_else(Vec::new, pair),
            Item::Qkv => self.qkv.into_iter().map(operands).collect(),
            Item::CrossQuery => self.cross_q.into_iter().map(operands).collect(),
            Item::Up => self.up.into_iter().map(operands).collect(),
            Item::CrossAttended => self.cross_attended.map_or_else(Vec::new, pair),
        }
    }

    /// Room for an item of a block that asks `second` tokens for more than keys and values.
    pub fn take(&mut self, item: Item, size: &Size, second: usize, arena: &mut Arena) -> Result<()> {
        let &Size { tokens, width, ffn, heads, .. } = size;
        match item {
            Item::Outputs => self.outputs = Some(Outputs::take(second, width, arena)?),
            Item::Attended => self.attended = Some((arena.take(second * width)?, arena.take(heads * second)?)),
            Item::Qkv => self.qkv = Some(arena.take(3 * tokens * width)?),
            Item::CrossQuery => self.cross_q = Some(arena.take(second * width)?),
            Item::Up => self.up = Some(arena.take(second * ffn)?),
            Item::CrossAttended => {
                self.cross_attended = Some((arena.take(second * width)?, arena.take(heads * second)?));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: Size =
        Size { tokens: 1024, text: 8, rows: 4, segments: 32, width: 64, ffn: 256, heads: 2, operand_bytes: 2 };
    const STREAM: u64 = 1024 * 64 * 2;

    fn without_host(budget: u64, depth: usize) -> KeepPolicy {
        KeepPolicy::within(budget, HostRoom::default(), 1.0, &SIZE, depth)
    }

    #[test]
    fn a_budget_buys_the_most_valuable_first_and_is_never_passed() {
        assert_eq!(without_host(0, 3), KeepPolicy::NOTHING);
        // Outputs of three blocks cost one stream each, the output of self-attention one and its statistics.
        let statistics = 2 * 1024 * 4;
        let some = without_host(4 * STREAM + statistics, 3);
        assert!(some.keeps(Item::Outputs, 0, 3) && !some.keeps(Item::Qkv, 2, 3));
        assert!(some.keeps(Item::Attended, 2, 3) && !some.keeps(Item::Attended, 1, 3), "the last blocks first");
        assert_eq!(some.bytes(&SIZE), 4 * STREAM + statistics);
        let all = without_host(u64::MAX / 2, 3);
        assert!(Item::BY_VALUE.iter().all(|item| all.keeps(*item, 0, 3)));
        for budget in (0..40 * STREAM).step_by(77_777) {
            assert!(without_host(budget, 3).bytes(&SIZE) <= budget);
        }
        assert_eq!(KeepPolicy::NOTHING.to_string(), "block inputs");
        assert_eq!(some.to_string(), "outputs of 3, attended of 1");
    }

    #[test]
    fn the_host_holds_what_the_device_cannot_and_the_link_carries() {
        const DEPTH: usize = 12;
        let host =
            |bytes: u64, streams_a_pass: u64| HostRoom { bytes, bytes_per_second: (streams_a_pass * STREAM) as f64 };
        let within = |budget, host| KeepPolicy::within(budget, host, 1.0, &SIZE, DEPTH);
        let all_on_device = without_host(u64::MAX / 2, DEPTH);
        assert_eq!(within(u64::MAX / 2, host(u64::MAX / 4, 1_000)), all_on_device, "nothing is carried for nothing");
        for budget in (0..120 * STREAM).step_by(777_777) {
            for (bytes, streams) in [(0, 1_000), (20 * STREAM, 1_000), (u64::MAX / 4, 30), (u64::MAX / 4, 1_000)] {
                let policy = within(budget, host(bytes, streams));
                assert!(policy.bytes(&SIZE) <= budget, "{policy} in {budget}");
                assert!(policy.host_bytes(&SIZE) <= bytes.min(streams * STREAM), "{policy}");
                assert!(policy.is_sound(DEPTH) && reads_all_it_keeps(&policy), "{policy}");
                let alone = without_host(budget, DEPTH);
                assert!(policy.saves(&SIZE, DEPTH) >= alone.saves(&SIZE, DEPTH), "{policy} instead of {alone}");
            }
        }
        let plenty = within(40 * STREAM, host(u64::MAX / 4, 1_000));
        assert!((0..DEPTH - 1).all(|layer| plenty.hosting_place(layer, DEPTH) == Some(layer)), "{plenty}");
    }

    /// No block keeps anything that only one with outputs would read.
    fn reads_all_it_keeps(policy: &KeepPolicy) -> bool {
        (0..12).all(|layer| {
            policy.keeps(Item::Outputs, layer, 12) || Item::BY_VALUE.iter().all(|item| !policy.keeps(*item, layer, 12))
        })
    }

    #[test]
    fn hosting_blocks_lie_evenly_and_never_last() {
        let hosted = Hosted { items: [true; 6], blocks: 4 };
        let places: Vec<_> = (0..9).map(|layer| hosted.place(layer, 9)).collect();
        assert_eq!(places, [None, Some(0), None, Some(1), None, Some(2), None, Some(3), None]);
        // The last block's stream is needed by those before it.
        let mut headless = KeepPolicy { blocks: [0; 6], hosted };
        assert!(!headless.is_sound(9), "outputs by way of the host, and none of the last block");
        headless.blocks[0] = 1;
        assert!(headless.is_sound(9) && KeepPolicy::NOTHING.is_sound(9) && KeepPolicy::outputs_of(1).is_sound(9));
        assert_eq!(Hosted::default().place(0, 9), None);
        assert_eq!(hosted.place(0, 1), None);
        // A count of blocks on the device passes over those that host.
        let policy = KeepPolicy { blocks: [2; 6], hosted };
        let kept: Vec<_> = (0..9).map(|layer| policy.keeps(Item::Up, layer, 9)).collect();
        assert_eq!(kept, [false, true, false, true, false, true, true, true, true]);
        assert_eq!(
            KeepPolicy::all_in_host(1),
            KeepPolicy { blocks: [1; 6], hosted: Hosted { items: [true; 6], blocks: 0 } }
        );
    }
}
