//! Batches of episodes of like length, padded to one length: how packed training began.
//!
//! It is kept for the runs that were trained with it and as what the token budget is measured against.

use super::length::round_up;
use super::stream::no_episodes;
use crate::random::{Draw, Purpose};
use crate::{Error, Result};

/// The batches of one rank, epoch by epoch.
///
/// Nothing moves in it: an epoch is an argument and its batches are a value, so a resumed run finds its place from the
/// number of its micro-step alone ([`Self::place`]).
#[derive(Clone, Copy, Debug)]
pub struct LengthBucketBatchSampler<'a> {
    lengths: &'a [usize],
    batch_size: usize,
    rank: usize,
    ranks: usize,
    seed: u64,
    pool_factor: usize,
}

impl<'a> LengthBucketBatchSampler<'a> {
    /// A sampler over episodes of these latent frames.
    ///
    /// # Errors
    /// `no_episodes`, `no_ranks`, `rank_out_of_range`, `batch_size_zero`, `pool_factor_zero`, and `batch_exceeds_dataset`
    /// for a batch that could only be filled with an episode twice.
    pub fn new(
        lengths: &'a [usize],
        batch_size: usize,
        rank: usize,
        ranks: usize,
        seed: u64,
        pool_factor: usize,
    ) -> Result<Self> {
        let refuse = |code, what: String, field| Err(Error::refused(code, what).in_place(field));
        if lengths.is_empty() {
            return Err(no_episodes());
        }
        if ranks == 0 {
            return refuse("no_ranks", "at least one rank is needed".to_owned(), "packing.ranks");
        }
        if rank >= ranks {
            return refuse("rank_out_of_range", format!("there is no rank {rank} among {ranks}"), "packing.ranks");
        }
        if batch_size == 0 {
            return refuse("batch_size_zero", "a batch needs an episode".to_owned(), "train.batch_size");
        }
        if pool_factor == 0 {
            return refuse("pool_factor_zero", "a pool needs a batch".to_owned(), "packing.pool_factor");
        }
        if batch_size > lengths.len() {
            let what = format!("a batch of {batch_size} cannot be made of {} episodes", lengths.len());
            return refuse("batch_exceeds_dataset", what, "train.batch_size");
        }
        Ok(Self { lengths, batch_size, rank, ranks, seed, pool_factor })
    }

    /// Batches of an epoch, the same number on every rank.
    pub fn batches_per_epoch(&self) -> usize {
        self.lengths.len().div_ceil(self.ranks.saturating_mul(self.batch_size))
    }

    /// Epoch and batch within it of a micro-step; micro-steps are counted from 0 over the whole run.
    pub fn place(&self, micro_step: u64) -> (u64, usize) {
        let batches = self.batches_per_epoch() as u64;
        (micro_step / batches, (micro_step % batches) as usize)
    }

    /// The batches of an epoch, as indices of episodes.
    ///
    /// All ranks shuffle by seed + epoch alike and take every `ranks`-th episode, beginning with their own number; the
    /// tail repeats the shuffled list from its start until every rank has the same number of full batches. A rank sorts
    /// each pool of `batch_size` x `pool_factor` by length (equal ones stay in shuffled order), cuts it into batches, and
    /// shuffles the batches of the epoch by an order of its own.
    pub fn batches(&self, epoch: u64) -> Vec<Vec<usize>> {
        let key = self.seed.wrapping_add(epoch);
        let shuffled = Draw::new(key, Purpose::Order, 0, "").permutation(self.lengths.len());
        let count = self.batches_per_epoch() * self.batch_size;
        let mut dealt: Vec<usize> =
            (0..count).map(|index| shuffled[(index * self.ranks + self.rank) % shuffled.len()]).collect();
        for pool in dealt.chunks_mut(self.batch_size.saturating_mul(self.pool_factor)) {
            pool.sort_by_key(|&episode| self.lengths[episode]);
        }
        let order = Draw::new(key, Purpose::Order, 0, &format!("batches of rank {}", self.rank))
            .permutation(count / self.batch_size);
        order.into_iter().map(|batch| dealt[batch * self.batch_size..][..self.batch_size].to_vec()).collect()
    }
}

/// Latent frames that every episode of a batch is padded to.
pub fn padded_frames(lengths: &[usize], batch: &[usize], pad_multiple: usize) -> usize {
    round_up(batch.iter().map(|&episode| lengths[episode]).max().unwrap_or(0), pad_multiple)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn ranks(
        lengths: &[usize],
        batch: usize,
        ranks: usize,
        seed: u64,
        pool: usize,
        epoch: u64,
    ) -> Vec<Vec<Vec<usize>>> {
        (0..ranks)
            .map(|rank| LengthBucketBatchSampler::new(lengths, batch, rank, ranks, seed, pool).unwrap().batches(epoch))
            .collect()
    }

    proptest! {
        #[test]
        fn an_epoch_holds_every_episode_once_and_repeats_only_the_start_of_the_shuffle(
            count in 4usize..90, batch in 1usize..5, world in 1usize..6, seed: u64, pool in 1usize..6, epoch in 0u64..4,
        ) {
            let lengths: Vec<usize> = (0..count).map(|index| 1 + index * 37 % 53).collect();
            let dealt = ranks(&lengths, batch, world, seed, pool, epoch);
            let batches = count.div_ceil(world * batch);
            prop_assert!(dealt.iter().all(|rank| rank.len() == batches && rank.iter().all(|b| b.len() == batch)));

            let mut seen = vec![0usize; count];
            dealt.iter().flatten().flatten().for_each(|&episode| seen[episode] += 1);
            let shuffled = Draw::new(seed.wrapping_add(epoch), Purpose::Order, 0, "").permutation(count);
            let mut expected = vec![0usize; count];
            (0..batches * batch * world).for_each(|index| expected[shuffled[index % count]] += 1);
            prop_assert!(expected.iter().all(|&times| times >= 1));
            prop_assert_eq!(seen, expected);
        }

        #[test]
        fn within_a_pool_no_batch_reaches_into_another(
            count in 8usize..90, batch in 1usize..5, seed: u64, pool in 1usize..6,
        ) {
            let lengths: Vec<usize> = (0..count).map(|index| 1 + index * 37 % 53).collect();
            let sampler = LengthBucketBatchSampler::new(&lengths, batch, 0, 1, seed, pool).unwrap();
            let spans = |batches: &[Vec<usize>]| {
                let mut spans: Vec<(usize, usize)> = batches
                    .iter()
                    .map(|b| b.iter().map(|&e| lengths[e]).fold((usize::MAX, 0), |(l, h), f| (l.min(f), h.max(f))))
                    .collect();
                spans.sort_unstable();
                spans
            };
            // One pool as large as the epoch: sorted batches must follow each other.
            let whole = LengthBucketBatchSampler { pool_factor: count, ..sampler };
            prop_assert!(spans(&whole.batches(0)).windows(2).all(|pair| pair[0].1 <= pair[1].0));
            // Smaller pools pad no less.
            let padded = |s: &LengthBucketBatchSampler| -> usize {
                s.batches(0).iter().map(|b| padded_frames(&lengths, b, 1)).sum()
            };
            prop_assert!(padded(&whole) <= padded(&sampler));
        }
    }

    /// Lengths are given by position in the shuffle, so what follows does not depend on it.
    #[test]
    fn a_small_epoch_is_the_one_worked_out_by_hand() {
        let shuffled = Draw::new(4, Purpose::Order, 0, "").permutation(10);
        let by_position = [50, 20, 40, 30, 10, 60, 90, 80, 70, 100];
        let mut lengths = [0; 10];
        shuffled.iter().zip(by_position).for_each(|(&episode, frames)| lengths[episode] = frames);
        // Two ranks x 2: three batches each, 12 samples, so positions 0 and 1 come again. Rank 0 takes positions
        // 0 2 4 6 8 0 (frames 50 40 10 90 70 50), rank 1 takes 1 3 5 7 9 1 (20 30 60 80 100 20). Pools of two batches,
        // sorted: rank 0 10 40 | 50 90 and 50 70, rank 1 20 30 | 60 80 and 20 100.
        let dealt = ranks(&lengths, 2, 2, 4, 2, 0);
        let frames = |rank: usize| {
            let mut batches: Vec<Vec<usize>> =
                dealt[rank].iter().map(|batch| batch.iter().map(|&episode| lengths[episode]).collect()).collect();
            batches.sort_unstable();
            batches
        };
        assert_eq!(frames(0), [[10, 40], [50, 70], [50, 90]]);
        assert_eq!(frames(1), [[20, 30], [20, 100], [60, 80]]);
        // Padded to 8: 40 72 96 and 32 104 80 frames of two episodes each = 848, of which 550 + 70 are real.
        let padded: usize = dealt.iter().flatten().map(|batch| 2 * padded_frames(&lengths, batch, 8)).sum();
        assert_eq!(padded, 848);
    }

    #[test]
    fn epochs_seeds_and_ranks_differ_and_each_is_repeatable() {
        let lengths: Vec<usize> = (0..64).map(|index| 100 + index * 29 % 64).collect();
        let of = |seed, epoch| ranks(&lengths, 4, 2, seed, 50, epoch);
        assert_eq!(of(1, 3), of(1, 3));
        assert_ne!(of(1, 3), of(1, 4), "an epoch has an order of its own");
        assert_ne!(of(1, 3), of(9, 3));
        let sampler = LengthBucketBatchSampler::new(&lengths, 4, 1, 2, 1, 50).unwrap();
        assert_eq!(sampler.batches_per_epoch(), 8);
        assert_eq!([0, 7, 8, 27].map(|step| sampler.place(step)), [(0, 0), (0, 7), (1, 0), (3, 3)]);
        // The order of batches is no sorted one.
        let firsts: Vec<usize> = sampler.batches(0).iter().map(|batch| lengths[batch[0]]).collect();
        assert!(!firsts.is_sorted(), "{firsts:?}");
    }

    #[test]
    fn bad_input_is_told_apart() {
        let code = |lengths: &[usize], batch, rank, ranks, pool| {
            LengthBucketBatchSampler::new(lengths, batch, rank, ranks, 0, pool).unwrap_err().code
        };
        assert_eq!(code(&[], 1, 0, 1, 1), "no_episodes");
        assert_eq!(code(&[9], 1, 0, 0, 1), "no_ranks");
        assert_eq!(code(&[9], 1, 2, 2, 1), "rank_out_of_range");
        assert_eq!(code(&[9], 0, 0, 1, 1), "batch_size_zero");
        assert_eq!(code(&[9], 1, 0, 1, 0), "pool_factor_zero");
        assert_eq!(code(&[9], 2, 0, 1, 1), "batch_exceeds_dataset");
        // More ranks than episodes is a small dataset, not a mistake: each gets one of them again.
        assert_eq!(ranks(&[9], 1, 3, 0, 1, 0), [[[0]], [[0]], [[0]]]);
    }
}
