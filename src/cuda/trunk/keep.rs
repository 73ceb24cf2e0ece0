//! What the forward pass keeps for the backward pass, chosen from a memory budget.
//!
//! Every block's input is kept; each of eight further tensors saves its recomputation. They are bought in order of the
//! time saved a byte, block by block, until the budget is spent: with none a block's whole forward runs again, with
//! all nothing but element-wise work does.

use super::Size;
use crate::Result;
use crate::cuda::arena::Arena;
use crate::cuda::launch::{Operand, Slice};

/// A tensor that a block may keep, the most saved a byte first. With D = 3072 and F = 14336 a token's share of a
/// forward's products is 30 % for two bytes x D (`Down`), 6.5 % for as many (`Out`, `CrossOut`, `CrossQuery`), 20 % for
/// thrice as many (`Qkv`), and 30 % for 4.7 times as many (`Up`); attention outputs save no product but the attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Item {
    Down,
    Attended,
    Out,
    CrossOut,
    Qkv,
    CrossQuery,
    Up,
    CrossAttended,
}

impl Item {
    pub const BY_VALUE: [Self; 8] = [
        Self::Down,
        Self::Attended,
        Self::Out,
        Self::CrossOut,
        Self::Qkv,
        Self::CrossQuery,
        Self::Up,
        Self::CrossAttended,
    ];

    /// Bytes of this tensor for one block.
    fn bytes(self, size: &Size) -> u64 {
        let mut arena = Arena::counting(size.operand_bytes);
        // A counting arena has no end.
        let _ = Kept::default().take(self, size, &mut arena);
        arena.peak()
    }
}

/// Which items each block keeps: for every item, how many blocks from the last on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct KeepPolicy {
    blocks: [usize; 8],
}

impl KeepPolicy {
    /// Nothing but the blocks' inputs.
    pub const NOTHING: Self = Self { blocks: [0; 8] };

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
            true => write!(f, "block inputs only"),
            false => write!(f, "block inputs, {}", kept.join(", ")),
        }
    }
}

/// One block's kept tensors.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Kept {
    /// [N, 3 D]
    pub qkv: Option<Slice<Operand>>,
    /// [N, D] and its log-sum-exp [heads, N]
    pub attended: Option<(Slice<Operand>, Slice<f32>)>,
    /// [N, D]
    pub out: Option<Slice<Operand>>,
    pub cross_q: Option<Slice<Operand>>,
    pub cross_attended: Option<(Slice<Operand>, Slice<f32>)>,
    pub cross_out: Option<Slice<Operand>>,
    /// [N, F]
    pub up: Option<Slice<Operand>>,
    pub down: Option<Slice<Operand>>,
}

impl Kept {
    /// Room for what the policy keeps of a block.
    pub fn allocate(policy: &KeepPolicy, layer: usize, depth: usize, size: &Size, arena: &mut Arena) -> Result<Self> {
        let mut kept = Self::default();
        for item in Item::BY_VALUE {
            if policy.keeps(item, layer, depth) {
                kept.take(item, size, arena)?;
            }
        }
        Ok(kept)
    }

    fn take(&mut self, item: Item, size: &Size, arena: &mut Arena) -> Result<()> {
        let stream = size.tokens * size.width;
        let statistics = size.heads * size.tokens;
        match item {
            Item::Qkv => self.qkv = Some(arena.take(3 * stream)?),
            Item::Attended => self.attended = Some((arena.take(stream)?, arena.take(statistics)?)),
            Item::Out => self.out = Some(arena.take(stream)?),
            Item::CrossQuery => self.cross_q = Some(arena.take(stream)?),
            Item::CrossAttended => self.cross_attended = Some((arena.take(stream)?, arena.take(statistics)?)),
            Item::CrossOut => self.cross_out = Some(arena.take(stream)?),
            Item::Up => self.up = Some(arena.take(size.tokens * size.ffn)?),
            Item::Down => self.down = Some(arena.take(stream)?),
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
        let some = KeepPolicy::within(4 * stream, &size, 3);
        assert!(some.keeps(Item::Down, 0, 3) && !some.keeps(Item::Attended, 2, 3) && some.bytes(&size) == 4 * stream);
        assert!(some.keeps(Item::Out, 2, 3) && !some.keeps(Item::Out, 1, 3), "the last blocks first");
        let all = KeepPolicy::within(u64::MAX, &size, 3);
        assert!(Item::BY_VALUE.iter().all(|item| all.keeps(*item, 0, 3)));
        for budget in (0..40 * stream).step_by(77_777) {
            assert!(KeepPolicy::within(budget, &size, 3).bytes(&size) <= budget);
        }
        assert_eq!(KeepPolicy::NOTHING.to_string(), "block inputs only");
        assert_eq!(some.to_string(), "block inputs, down of 3, out of 1");
    }
}
