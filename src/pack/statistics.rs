//! What a packing wastes and how long ranks wait for each other, over one epoch, from metadata alone.
//!
//! Definitions, the same for every kind. Waste is 1 - real / processed tokens of the trunk, told apart by its cause:
//! frame padding and alignment padding are each the share of all processed tokens. Text padding is the share of text
//! slots beyond the prompts. Tile waste is 1 - visible / computed pairs of self-attention, if tiles that nobody sees are
//! skipped and the others computed whole. Imbalance is max / mean over ranks of the cost between two barriers: ranks
//! that exchange gradients once a step meet there (`budget`), those of the published trainer at every micro-step
//! (`unpacked`, `bucket`). What they wait is the idle share, 1 - 1 / I, with I the costliest rank's sum over barriers
//! against the mean rank's.

use super::cost::CostModel;
use super::length::trunk_tokens;
use super::sequence::FrameTokens;
use super::step::{MicroBatch, Planner, StepPlan};
use crate::config::PackingKind;
use crate::{Error, Result};
use rayon::prelude::*;
use serde::Serialize;
use std::collections::BTreeSet;

/// Rows and columns of the tiles that [`PackingStatistics::tile_waste`] is told for.
pub const TILE: usize = 128;

/// Text of the episodes.
#[derive(Clone, Copy, Debug)]
pub struct TextTokens<'a> {
    /// Slots of an episode, `model.text_len`.
    pub slots: usize,
    /// Tokens of each training episode's prompt; `None` if only the episodes' files say.
    pub real: Option<&'a [usize]>,
}

/// One kind of packing over the steps that begin within the first epoch.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PackingStatistics {
    pub kind: PackingKind,
    pub optimizer_steps: u64,
    /// Of all ranks.
    pub micro_batches: usize,
    /// On average.
    pub micro_batches_per_rank_and_step: f64,
    /// Episodes trained on, repeats included.
    pub samples: usize,
    /// Noisy and clean copies, without any padding.
    pub real_tokens: usize,
    /// With padding.
    pub processed_tokens: usize,
    /// Of the longest sequence.
    pub largest_micro_batch_tokens: usize,
    /// Tokens of padding frames / processed tokens.
    pub frame_padding: f64,
    /// Tokens after the last frame / processed tokens.
    pub alignment_padding: f64,
    /// Text slots without a token / text slots, if the prompts are known.
    pub text_padding: Option<f64>,
    pub visible_pairs: u64,
    /// In tiles of [`TILE`] x [`TILE`].
    pub computed_pairs: u64,
    pub tile_waste: f64,
    /// Shapes that a compiled kernel would be compiled for.
    pub distinct_sequence_lengths: usize,
    /// Numbers of frames that episodes are padded to, for `bucket` alone: the others pad none.
    pub distinct_padded_frames: Option<usize>,
    /// Times that all ranks wait for the slowest.
    pub barriers: usize,
    /// Max / mean over ranks of the cost up to a barrier: mean, 95th percentile (nearest rank) and maximum over barriers.
    pub imbalance_mean: f64,
    pub imbalance_p95: f64,
    pub imbalance_max: f64,
    /// Share of all ranks' time that is waiting.
    pub idle_share: f64,
}

/// Simulates all ranks over one epoch.
///
/// # Errors
/// `text_tokens_missing` if prompts are known, but not of each episode.
pub fn statistics(planner: &Planner<'_>, text: TextTokens<'_>) -> Result<PackingStatistics> {
    let episodes = planner.lengths().len();
    if let Some(prompts) = text.real.map(<[usize]>::len).filter(|&prompts| prompts != episodes) {
        let what = format!("{prompts} prompts are known of {episodes} episodes");
        return Err(Error::data("text_tokens_missing", what));
    }
    let optimizer_steps = planner.steps_per_epoch();
    let plans = planner.steps(1..optimizer_steps + 1)?;
    let tallies = plans.par_iter().map(|plan| Tally::of(plan, planner, text));
    let tally = tallies.try_reduce(Tally::default, |a, b| Ok(a.joined(b)))?;
    Ok(tally.into_statistics(planner, optimizer_steps, plans.first().map_or(0, |plan| plan.ranks.len())))
}

/// Sums over steps.
#[derive(Default)]
struct Tally {
    micro_batches: usize,
    samples: usize,
    real_tokens: usize,
    frame_tokens: usize,
    processed_tokens: usize,
    largest: usize,
    text_slots: usize,
    text_real: usize,
    visible: u64,
    computed: u64,
    sequence_lengths: BTreeSet<usize>,
    padded_frames: BTreeSet<usize>,
    barriers: Vec<Barrier>,
}

/// Cost up to a barrier.
#[derive(Clone, Copy)]
struct Barrier {
    max: f64,
    mean: f64,
}

impl Barrier {
    fn of(costs: &[f64]) -> Self {
        let max = costs.iter().copied().fold(0.0, f64::max);
        Self { max, mean: costs.iter().sum::<f64>() / costs.len().max(1) as f64 }
    }
}

impl Tally {
    fn of(plan: &StepPlan, planner: &Planner<'_>, text: TextTokens<'_>) -> Result<Self> {
        let frame = planner.frame();
        let mut tally = Self::default();
        for micro_batch in plan.ranks.iter().flatten() {
            tally.visible += micro_batch.visible_pairs(frame);
            tally.computed += micro_batch.computed_pairs(frame, TILE)?;
            tally.micro_batches += 1;
            tally.samples += micro_batch.episodes.len();
            tally.processed_tokens += micro_batch.tokens;
            tally.largest = tally.largest.max(micro_batch.tokens);
            tally.sequence_lengths.insert(micro_batch.tokens);
            for episode in &micro_batch.episodes {
                tally.real_tokens += trunk_tokens(episode.valid_frames, frame);
                tally.frame_tokens += trunk_tokens(episode.frames, frame);
                if let Some(real) = text.real {
                    tally.text_slots += text.slots;
                    tally.text_real += real[episode.episode].min(text.slots);
                }
                tally.padded_frames.insert(episode.frames);
            }
        }
        tally.barriers = barriers(plan, planner.kind(), planner.cost(), frame);
        Ok(tally)
    }

    fn joined(mut self, other: Self) -> Self {
        self.micro_batches += other.micro_batches;
        self.samples += other.samples;
        self.real_tokens += other.real_tokens;
        self.frame_tokens += other.frame_tokens;
        self.processed_tokens += other.processed_tokens;
        self.largest = self.largest.max(other.largest);
        self.text_slots += other.text_slots;
        self.text_real += other.text_real;
        self.visible += other.visible;
        self.computed += other.computed;
        self.sequence_lengths.extend(other.sequence_lengths);
        self.padded_frames.extend(other.padded_frames);
        self.barriers.extend(other.barriers);
        self
    }

    fn into_statistics(self, planner: &Planner<'_>, optimizer_steps: u64, ranks: usize) -> PackingStatistics {
        let mut imbalances: Vec<f64> = self.barriers.iter().map(|barrier| ratio(barrier.max, barrier.mean)).collect();
        imbalances.sort_by(f64::total_cmp);
        let p95 = (imbalances.len() * 95).div_ceil(100).saturating_sub(1);
        let sum = |pick: fn(&Barrier) -> f64| self.barriers.iter().map(pick).sum::<f64>();
        let share = |part: usize, whole: usize| part as f64 / whole.max(1) as f64;
        PackingStatistics {
            kind: planner.kind(),
            optimizer_steps,
            micro_batches: self.micro_batches,
            micro_batches_per_rank_and_step: share(self.micro_batches, optimizer_steps as usize * ranks),
            samples: self.samples,
            real_tokens: self.real_tokens,
            processed_tokens: self.processed_tokens,
            largest_micro_batch_tokens: self.largest,
            frame_padding: share(self.frame_tokens - self.real_tokens, self.processed_tokens),
            alignment_padding: share(self.processed_tokens - self.frame_tokens, self.processed_tokens),
            text_padding: (self.text_slots > 0).then(|| share(self.text_slots - self.text_real, self.text_slots)),
            visible_pairs: self.visible,
            computed_pairs: self.computed,
            tile_waste: 1.0 - self.visible as f64 / self.computed.max(1) as f64,
            distinct_sequence_lengths: self.sequence_lengths.len(),
            distinct_padded_frames: (planner.kind() == PackingKind::Bucket).then_some(self.padded_frames.len()),
            barriers: self.barriers.len(),
            imbalance_mean: imbalances.iter().sum::<f64>() / imbalances.len().max(1) as f64,
            imbalance_p95: imbalances.get(p95).copied().unwrap_or(1.0),
            imbalance_max: imbalances.last().copied().unwrap_or(1.0),
            idle_share: 1.0 - 1.0 / ratio(sum(|barrier| barrier.max), sum(|barrier| barrier.mean)),
        }
    }
}

/// What one step wastes, for who trains it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepWaste {
    /// Tokens of padding frames / processed tokens.
    pub frame_padding: f64,
    /// Tokens after the last frame / processed tokens.
    pub alignment_padding: f64,
    /// Summed over the step's barriers, the slowest rank's cost / the ranks' mean cost.
    pub imbalance: f64,
}

/// What a step wastes.
pub fn step_waste(plan: &StepPlan, planner: &Planner<'_>) -> StepWaste {
    let frame = planner.frame();
    let (mut real, mut with_frames, mut processed) = (0, 0, 0);
    for micro_batch in plan.ranks.iter().flatten() {
        processed += micro_batch.tokens;
        for episode in &micro_batch.episodes {
            real += trunk_tokens(episode.valid_frames, frame);
            with_frames += trunk_tokens(episode.frames, frame);
        }
    }
    let share = |part: usize| part as f64 / processed.max(1) as f64;
    let barriers = barriers(plan, planner.kind(), planner.cost(), frame);
    let sum = |pick: fn(&Barrier) -> f64| barriers.iter().map(pick).sum::<f64>();
    StepWaste {
        frame_padding: share(with_frames - real),
        alignment_padding: share(processed - with_frames),
        imbalance: ratio(sum(|barrier| barrier.max), sum(|barrier| barrier.mean)),
    }
}

/// Nothing to do is no imbalance.
fn ratio(max: f64, mean: f64) -> f64 {
    if mean > 0.0 { max / mean } else { 1.0 }
}

/// What each rank does between two barriers: a step for `budget`, else a micro-step.
fn barriers(plan: &StepPlan, kind: PackingKind, cost: CostModel, frame: FrameTokens) -> Vec<Barrier> {
    let of = |micro_batch: &MicroBatch| cost.of(micro_batch.tokens, micro_batch.visible_pairs(frame));
    let costs: Vec<Vec<f64>> = plan.ranks.iter().map(|rank| rank.iter().map(of).collect()).collect();
    if kind == PackingKind::Budget {
        return vec![Barrier::of(&costs.iter().map(|rank| rank.iter().sum()).collect::<Vec<f64>>())];
    }
    let micro_steps = costs.iter().map(Vec::len).max().unwrap_or(0);
    let at =
        |micro_step: usize| costs.iter().map(|rank| rank.get(micro_step).copied().unwrap_or(0.0)).collect::<Vec<f64>>();
    (0..micro_steps).map(|micro_step| Barrier::of(&at(micro_step))).collect()
}
