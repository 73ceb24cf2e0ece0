//! One allocation from which a micro-step's tensors are cut, like a stack.
//!
//! Lifetimes in the trunk nest, so a mark and a release are all the bookkeeping there is: no fragmentation, no
//! allocation inside a step, and a peak that is known before the step, because an arena without memory behind it
//! counts the same program.

use super::launch::{Element, Slice};
use crate::{Error, Exit, Result};

/// Every tensor starts at a multiple of this: the widest access of a kernel is 16 bytes, of a bulk copy 128.
const ALIGNMENT: u64 = 256;

/// A stack of device tensors.
#[derive(Debug)]
pub(crate) struct Arena {
    base: u64,
    capacity: u64,
    used: u64,
    peak: u64,
    /// Bytes of an operand.
    operand: usize,
}

/// How far an arena was filled.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Mark(u64);

impl Arena {
    /// Cuts from `capacity` bytes at `base`, which must be aligned and outlive every slice in use.
    pub fn new(base: u64, capacity: u64, operand: usize) -> Self {
        Self { base, capacity, used: 0, peak: 0, operand }
    }

    /// Has no memory and no end: for counting.
    pub fn counting(operand: usize) -> Self {
        Self::new(0, u64::MAX, operand)
    }

    /// Room for `len` elements, with whatever was there before.
    pub fn take<E: Element>(&mut self, len: usize) -> Result<Slice<E>> {
        let bytes = (len * E::bytes(self.operand)) as u64;
        let start = self.used;
        let end = start + bytes.next_multiple_of(ALIGNMENT);
        if end > self.capacity {
            let what = format!(
                "a tensor of {bytes} bytes does not fit the arena: {} of {} bytes are free",
                self.capacity - start,
                self.capacity
            );
            return Err(Error::new(Exit::Unavailable, "gpu_out_of_memory", what)
                .hint("take a smaller batch (train.batch_size, packing.token_budget)"));
        }
        self.used = end;
        self.peak = self.peak.max(end);
        Ok(Slice::new(self.base + start, len))
    }

    /// Bytes that are taken.
    pub fn used(&self) -> u64 {
        self.used
    }

    pub fn mark(&self) -> Mark {
        Mark(self.used)
    }

    /// Goes on from the mark: what was taken since is given back.
    pub fn release(&mut self, mark: Mark) {
        self.used = mark.0;
    }

    /// The most bytes that were in use at once.
    pub fn peak(&self) -> u64 {
        self.peak
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_are_aligned_and_the_peak_is_what_was_in_use_at_once() {
        let mut arena = Arena::new(4096, 2048, 2);
        let first = arena.take::<super::super::launch::Operand>(3).expect("fits");
        let mark = arena.mark();
        let second = arena.take::<f32>(100).expect("fits");
        assert_eq!((first.address(), second.address()), (4096, 4096 + 256));
        arena.release(mark);
        assert_eq!(arena.take::<f32>(1).expect("fits").address(), second.address());
        assert_eq!(arena.peak(), 256 + 512);
        let error = arena.take::<f32>(1000).expect_err("too large");
        assert_eq!(error.code, "gpu_out_of_memory");
        assert!(error.what.contains("4000 bytes") && error.what.contains("1536 of 2048"), "{error}");
    }
}
