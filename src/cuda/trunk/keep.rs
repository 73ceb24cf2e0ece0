//! What the forward pass keeps for the backward pass, chosen from a memory budget.
//!
//! A block that keeps what it added to the residual stream (`Outputs`) needs no copy of its input: the backward pass takes
//! those additions back from the stream, one by one, and so comes to the input. Any other block keeps its input and runs
//! forward again. Each further item saves its recomputation. Items are bought in order of the time saved a byte, block by
//! block, until the budget is spent: with none a block's whole forward runs again, with all nothing but element-wise work.

use super::Size;
use crate::Result;
use crate::cuda::arena::Arena;
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

impl Item {
    pub const BY_VALUE: [Self; 6] =
        [Self::Outputs, Self::Attended, Self::Qkv, Self::CrossQuery, Self::Up, Self::CrossAttended];

    /// Bytes that a block takes more for keeping this.
    fn bytes(self, size: &Size) -> u64 {
        let mut arena = Arena::counting(size.operand_bytes);
        // A counting arena has no end.
        let _ = Kept::default().take(self, size, size.tokens, &mut arena);
        let spared = if self == Self::Outputs { 4 * (size.tokens * size.width) as u64 } else { 0 };
        arena.peak().saturating_sub(spared)
    }
}

/// Which items each block keeps: for every item, how many blocks from the last on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct KeepPolicy {
    blocks: [usize; 6],
}

impl KeepPolicy {
    /// Nothing but the blocks' inputs.
    pub const NOTHING: Self = Self { blocks: [0; 6] };

    /// Buys for at most `budget` bytes.
    pub fn within(budget: u64, size: &Size, depth: usize) -> Self {
        let mut policy = Self::NOTHING;
        let mut left = budget;
        for (count, item) in policy.blocks.iter_mut().zip(Item::BY_VALUE) {
            let bytes = item.bytes(size).max(1);
            *count = depth.min((left / bytes) as usize);
            left -= *count as u64 * bytes;
        }
        policy
    }

    /// Whether block `layer` of `depth` keeps an item.
    pub fn keeps(&self, item: Item, layer: usize, depth: usize) -> bool {
        let place = Item::BY_VALUE.iter().position(|other| *other == item);
        place.is_some_and(|place| layer + self.blocks[place] >= depth)
    }

    /// Bytes of everything kept, alignment not counted.
    #[cfg(test)]
    pub fn bytes(&self, size: &Size) -> u64 {
        self.blocks.iter().zip(Item::BY_VALUE).map(|(count, item)| *count as u64 * item.bytes(size)).sum()
    }
}

impl std::fmt::Display for KeepPolicy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let kept: Vec<String> = Item::BY_VALUE
            .iter()
            .zip(self.blocks)
            .filter(|(_, count)| *count > 0)
            .map(|(item, count)| format!("{item:?} of {count}").to_lowercase())
            .collect();
        match kept.is_empty() {
            true => write!(f, "block inputs"),
            false => write!(f, "{}", kept.join(", ")),
        }
    }
}

/// One block's kept tensors, over N tokens and the M of them that its second half runs over.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Kept {
    /// [N, D], of a block without outputs.
    pub input: Option<Slice<f32>>,
    pub outputs: Option<Outputs>,
    /// [N, 3 D]
    pub qkv: Option<Slice<Operand>>,
    /// [N, D] and its log-sum-exp [heads, N]
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
    /// Room for what the policy keeps of a block whose second half runs over `second` tokens.
    pub fn allocate(
        policy: &KeepPolicy,
        layer: usize,
        depth: usize,
        size: &Size,
        second: usize,
        arena: &mut Arena,
    ) -> Result<Self> {
        let mut kept = Self::default();
        for item in Item::BY_VALUE {
            if policy.keeps(item, layer, depth) {
                kept.take(item, size, second, arena)?;
            }
        }
        if kept.outputs.is_none() {
            kept.input = Some(arena.take(size.tokens * size.width)?);
        }
        Ok(kept)
    }

    /// Room for everything that the backward pass reads, for a block that runs forward again.
    pub fn everything(size: &Size, second: usize, arena: &mut Arena) -> Result<Self> {
        let mut kept = Self::default();
        for item in Item::BY_VALUE {
            kept.take(item, size, second, arena)?;
        }
        Ok(kept)
    }

    fn take(&mut self, item: Item, size: &Size, second: usize, arena: &mut Arena) -> Result<()> {
        let &Size { tokens, width, ffn, heads, .. } = size;
        match item {
            Item::Outputs => self.outputs = Some(Outputs::take(second, width, arena)?),
            Item::Attended => self.attended = Some((arena.take(tokens * width)?, arena.take(heads * tokens)?)),
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

    #[test]
    fn a_budget_buys_the_most_valuable_first_and_is_never_passed() {
        let size =
            Size { tokens: 1024, text: 8, rows: 4, segments: 32, width: 64, ffn: 256, heads: 2, operand_bytes: 2 };
        let stream = 1024 * 64 * 2;
        assert_eq!(KeepPolicy::within(0, &size, 3), KeepPolicy::NOTHING);
        // Outputs of three blocks cost one stream each, the output of self-attention one and its statistics.
        let statistics = 2 * 1024 * 4;
        let some = KeepPolicy::within(4 * stream + statistics, &size, 3);
        assert!(some.keeps(Item::Outputs, 0, 3) && !some.keeps(Item::Qkv, 2, 3));
        assert!(some.keeps(Item::Attended, 2, 3) && !some.keeps(Item::Attended, 1, 3), "the last blocks first");
        assert_eq!(some.bytes(&size), 4 * stream + statistics);
        let all = KeepPolicy::within(u64::MAX, &size, 3);
        assert!(Item::BY_VALUE.iter().all(|item| all.keeps(*item, 0, 3)));
        for budget in (0..40 * stream).step_by(77_777) {
            assert!(KeepPolicy::within(budget, &size, 3).bytes(&size) <= budget);
        }
        assert_eq!(KeepPolicy::NOTHING.to_string(), "block inputs");
        assert_eq!(some.to_string(), "outputs of 3, attended of 1");
    }
}
