//! One optimizer step as a value: which rank trains which episodes in which micro-batch, for every kind of packing.
//!
//! A plan is a function of the recipe, the lengths and the number of the step. Ranks compute it alike without a word
//! between them, a resumed run needs no state, and the statistics are of the very plans that are trained.

use super::bucket::{LengthBucketBatchSampler, padded_frames};
use super::budget::{Load, TokenBudget, cut, deal};
use super::cost::{CostModel, visible_pairs};
use super::draw::ChunkWindow;
use super::length::{round_up, trunk_tokens};
use super::sequence::{FrameTokens, PackedEpisode, plan};
use super::stream::{episodes_of_slots, no_episodes};
use super::tiles::computed_pairs;
use crate::config::{LingbotFlowConfig, PackingConfig, PackingKind, TrainConfig};
use crate::ops::AttentionPlan;
use crate::{Error, Result};
use rayon::prelude::*;
use std::ops::Range;

/// No step is near this; larger ones are slips that would fill the memory with plans.
const LARGEST_BATCH: usize = 1_000_000;

/// An episode's place in a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlannedEpisode {
    /// Index among the training episodes.
    pub episode: usize,
    /// Number of this sample in the whole run: the key of what is its own in every packing (noise, text dropout).
    pub slot: u64,
    /// Key of the draws that `bucket` makes once for a batch (chunk and window, noise levels, history coin): the number of
    /// the batch there, else the slot.
    pub draw: u64,
    /// Latent frames in the sequence, padding included.
    pub frames: usize,
    /// Latent frames of the episode.
    pub valid_frames: usize,
    /// Drawn by `draw`.
    pub mask: ChunkWindow,
}

impl PlannedEpisode {
    /// As the sequence is laid out.
    pub fn packed(&self) -> PackedEpisode {
        let ChunkWindow { chunk, window } = self.mask;
        PackedEpisode { frames: self.frames, valid_frames: self.valid_frames, chunk, window }
    }
}

/// Episodes of one sequence: one forward and backward.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MicroBatch {
    pub episodes: Vec<PlannedEpisode>,
    /// Tokens of the sequence, padding frames and alignment included.
    pub tokens: usize,
}

impl MicroBatch {
    fn new(episodes: Vec<PlannedEpisode>, frame: FrameTokens, alignment: usize) -> Self {
        let frames = episodes.iter().map(|episode| episode.frames).sum();
        Self { episodes, tokens: round_up(trunk_tokens(frames, frame), alignment) }
    }

    /// The episodes as the sequence is laid out.
    pub fn packed(&self) -> Vec<PackedEpisode> {
        self.episodes.iter().map(PlannedEpisode::packed).collect()
    }

    /// (query, key) pairs of self-attention.
    pub fn visible_pairs(&self, frame: FrameTokens) -> u64 {
        self.episodes.iter().map(|episode| visible_pairs(episode.valid_frames, episode.mask, frame)).sum()
    }

    /// (query, key) pairs of the `tile` x `tile` tiles that hold a visible pair.
    ///
    /// # Errors
    /// As [`Self::attention`].
    pub fn computed_pairs(&self, frame: FrameTokens, tile: usize) -> Result<u64> {
        Ok(computed_pairs(&self.packed(), frame, tile)?)
    }

    /// The self-attention of the sequence, without its alignment rows.
    ///
    /// # Errors
    /// If the sequence has more than 2^32 - 1 tokens.
    pub fn attention(&self, frame: FrameTokens) -> Result<AttentionPlan> {
        Ok(plan(&self.packed(), frame)?)
    }
}

/// The micro-batches of one optimizer step, in order, of each rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepPlan {
    pub ranks: Vec<Vec<MicroBatch>>,
}

/// Plans the steps of a run.
#[derive(Clone, Debug)]
pub struct Planner<'a> {
    kind: PackingKind,
    lengths: &'a [usize],
    frame: FrameTokens,
    packing: &'a PackingConfig,
    train: &'a TrainConfig,
    flow: &'a LingbotFlowConfig,
    cost: CostModel,
    budget: TokenBudget,
}

impl<'a> Planner<'a> {
    /// A planner of this kind, whichever the recipe names. `lengths`: latent frames of each training episode.
    ///
    /// # Errors
    /// `no_episodes`, `empty_episode`, `no_ranks`, `batch_size_zero`, `accumulate_zero`, `alignment_zero`, `chunk_zero`,
    /// `batch_too_large`;
    /// for `bucket` also `pool_factor_zero`, `pad_multiple_zero` and `batch_exceeds_dataset`; for `budget`
    /// `over_token_budget`, about the first episode that no micro-batch could hold, before any step is taken.
    pub fn new(
        kind: PackingKind,
        lengths: &'a [usize],
        frame: FrameTokens,
        packing: &'a PackingConfig,
        train: &'a TrainConfig,
        flow: &'a LingbotFlowConfig,
        cost: CostModel,
    ) -> Result<Self> {
        let above_zero = |value: usize, code, field: &str| match value {
            0 => Err(Error::refused(code, format!("{field} must be at least 1")).in_place(field)),
            _ => Ok(()),
        };
        if lengths.is_empty() {
            return Err(no_episodes());
        }
        if let Some(episode) = lengths.iter().position(|&frames| frames == 0) {
            return Err(Error::data("empty_episode", format!("training episode {episode} has no latent frame")));
        }
        above_zero(packing.ranks, "no_ranks", "packing.ranks")?;
        above_zero(train.batch_size, "batch_size_zero", "train.batch_size")?;
        above_zero(train.accumulate, "accumulate_zero", "train.accumulate")?;
        above_zero(flow.chunk[0], "chunk_zero", "flow.chunk")?;
        let batch = packing.ranks.checked_mul(train.batch_size).and_then(|all| all.checked_mul(train.accumulate));
        if batch.is_none_or(|batch| batch > LARGEST_BATCH) {
            let what = "packing.ranks x train.batch_size x train.accumulate is more than a million episodes a step";
            return Err(Error::refused("batch_too_large", what).in_place("train.accumulate"));
        }
        let budget = TokenBudget::new(packing.token_budget, packing.alignment)?;
        let planner = Self { kind, lengths, frame, packing, train, flow, cost, budget };
        match kind {
            PackingKind::Unpacked => {}
            PackingKind::Bucket => {
                above_zero(packing.pad_multiple, "pad_multiple_zero", "packing.pad_multiple")?;
                planner.sampler(0)?;
            }
            PackingKind::Budget => lengths.iter().enumerate().try_for_each(|(episode, &frames)| {
                budget.admit(&Load { episode, tokens: trunk_tokens(frames, frame), cost: 0.0 })
            })?,
        }
        Ok(planner)
    }

    pub fn kind(&self) -> PackingKind {
        self.kind
    }

    /// Tokens of a latent frame.
    pub fn frame(&self) -> FrameTokens {
        self.frame
    }

    /// Latent frames of each training episode.
    pub fn lengths(&self) -> &[usize] {
        self.lengths
    }

    /// What episodes are weighed with.
    pub fn cost(&self) -> CostModel {
        self.cost
    }

    /// Episodes of a step over all ranks: ranks x batch size x accumulation, in every kind.
    pub fn effective_batch(&self) -> usize {
        self.packing.ranks * self.train.batch_size * self.train.accumulate
    }

    /// Optimizer steps that begin within an epoch. The last one takes what it lacks from the next epoch.
    pub fn steps_per_epoch(&self) -> u64 {
        let samples = match self.kind {
            // Its epoch has repeats at the end, until every rank's batches are full.
            PackingKind::Bucket => self.lengths.len().next_multiple_of(self.packing.ranks * self.train.batch_size),
            PackingKind::Unpacked | PackingKind::Budget => self.lengths.len(),
        };
        samples.div_ceil(self.effective_batch()) as u64
    }

    /// The plan of optimizer step `step`; the first is 1.
    ///
    /// # Errors
    /// A step 0.
    pub fn step(&self, step: u64) -> Result<StepPlan> {
        let plan = self.steps(step..step.saturating_add(1))?.pop();
        plan.ok_or_else(|| Error::crash(format!("there is no step {step}")))
    }

    /// The plans of consecutive steps, each the same as [`Self::step`]; an epoch is shuffled once for all of them.
    ///
    /// # Errors
    /// A step 0.
    pub fn steps(&self, steps: Range<u64>) -> Result<Vec<StepPlan>> {
        let Some(first) = steps.start.checked_sub(1) else {
            return Err(Error::crash("optimizer steps are counted from 1"));
        };
        let before = first..steps.end.saturating_sub(1);
        match self.kind {
            PackingKind::Bucket => self.bucket_steps(before),
            PackingKind::Unpacked | PackingKind::Budget => self.stream_steps(before),
        }
    }

    fn sampler(&self, rank: usize) -> Result<LengthBucketBatchSampler<'a>> {
        let (packing, train) = (self.packing, self.train);
        LengthBucketBatchSampler::new(
            self.lengths,
            train.batch_size,
            rank,
            packing.ranks,
            train.seed,
            packing.pool_factor,
        )
    }

    /// `steps` are counted from 0 here and below.
    fn bucket_steps(&self, steps: Range<u64>) -> Result<Vec<StepPlan>> {
        let samplers = (0..self.packing.ranks).map(|rank| self.sampler(rank)).collect::<Result<Vec<_>>>()?;
        let accumulate = self.train.accumulate as u64;
        let mut shuffled: Option<(u64, Vec<Vec<Vec<usize>>>)> = None;
        let mut plans = Vec::new();
        for step in steps {
            let mut ranks = vec![Vec::with_capacity(self.train.accumulate); samplers.len()];
            for micro_step in step * accumulate..(step + 1) * accumulate {
                let (epoch, index) = samplers[0].place(micro_step);
                let batches = match &mut shuffled {
                    Some((current, batches)) if *current == epoch => batches,
                    stale => {
                        let batches = samplers.par_iter().map(|sampler| sampler.batches(epoch)).collect();
                        &mut stale.insert((epoch, batches)).1
                    }
                };
                for (rank, micro_batches) in ranks.iter_mut().enumerate() {
                    let number = micro_step * samplers.len() as u64 + rank as u64;
                    micro_batches.push(self.bucket_batch(&batches[rank][index], number));
                }
            }
            plans.push(StepPlan { ranks });
        }
        Ok(plans)
    }

    fn bucket_batch(&self, batch: &[usize], number: u64) -> MicroBatch {
        let frames = padded_frames(self.lengths, batch, self.packing.pad_multiple);
        let mask = ChunkWindow::draw(self.train.seed, number, self.flow);
        let slots = number * self.train.batch_size as u64..;
        let episodes = batch.iter().zip(slots).map(|(&episode, slot)| PlannedEpisode {
            episode,
            slot,
            draw: number,
            frames,
            valid_frames: self.lengths[episode],
            mask,
        });
        MicroBatch::new(episodes.collect(), self.frame, self.packing.alignment)
    }

    fn stream_steps(&self, steps: Range<u64>) -> Result<Vec<StepPlan>> {
        let batch = self.effective_batch();
        let slots = steps.start * batch as u64..steps.end * batch as u64;
        let first = slots.start;
        let episodes = episodes_of_slots(self.lengths.len(), self.train.seed, slots)?;
        episodes
            .par_chunks(batch)
            .enumerate()
            .map(|(step, episodes)| {
                let slots = first + (step * batch) as u64..;
                let batch: Vec<PlannedEpisode> =
                    episodes.iter().zip(slots).map(|(&episode, slot)| self.own_draws(episode, slot)).collect();
                match self.kind {
                    PackingKind::Budget => self.budget_step(&batch),
                    PackingKind::Unpacked | PackingKind::Bucket => Ok(self.unpacked_step(&batch)),
                }
            })
            .collect()
    }

    fn own_draws(&self, episode: usize, slot: u64) -> PlannedEpisode {
        let frames = self.lengths[episode];
        let mask = ChunkWindow::draw(self.train.seed, slot, self.flow);
        PlannedEpisode { episode, slot, draw: slot, frames, valid_frames: frames, mask }
    }

    /// Slots go round the ranks, as a distributed sampler deals them.
    fn unpacked_step(&self, batch: &[PlannedEpisode]) -> StepPlan {
        let ranks = self.packing.ranks;
        let alone = |episode: &PlannedEpisode| MicroBatch::new(vec![*episode], self.frame, self.packing.alignment);
        let rank = |rank: usize| batch.iter().skip(rank).step_by(ranks).map(alone).collect();
        StepPlan { ranks: (0..ranks).map(rank).collect() }
    }

    fn budget_step(&self, batch: &[PlannedEpisode]) -> Result<StepPlan> {
        let cost = CostModel { per_micro_batch: 0.0, ..self.cost };
        let loads: Vec<Load> = batch
            .iter()
            .map(|episode| {
                let tokens = trunk_tokens(episode.frames, self.frame);
                let cost = cost.of(tokens, visible_pairs(episode.valid_frames, episode.mask, self.frame));
                Load { episode: episode.episode, tokens, cost }
            })
            .collect();
        let rank = |dealt: Vec<usize>| -> Result<Vec<MicroBatch>> {
            let own: Vec<Load> = dealt.iter().map(|&index| loads[index]).collect();
            let micro_batches = cut(&own, self.budget)?;
            let episodes = |indices: Vec<usize>| indices.into_iter().map(|index| batch[dealt[index]]).collect();
            let micro_batch = |indices| MicroBatch::new(episodes(indices), self.frame, self.packing.alignment);
            Ok(micro_batches.into_iter().map(micro_batch).collect())
        };
        let ranks = deal(&loads, self.packing.ranks)?.into_iter().map(rank).collect::<Result<_>>()?;
        Ok(StepPlan { ranks })
    }
}
