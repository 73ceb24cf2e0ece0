//! Micro-batches as a pure function of the recipe and their place in the run.
//!
//! Everything drawn for an episode is keyed by its slot, noise for its valid frames alone, so that the same episodes give
//! the same gradients however they are packed. Only `bucket` shares levels, history coin, chunk and window in a batch.

use super::flow::{CleanEpisode, EpisodeNoise, EpisodeTargets, Levels, Schedules, Share, noised};
use super::store::EpisodeStore;
use crate::config::{LingbotModelConfig, LingbotRecipe, PackingKind};
use crate::data::episodes::{EpisodeSample, EpisodeSet};
use crate::model::LingbotInput;
use crate::pack::budget::{Load, TokenBudget};
use crate::pack::cost::CostModel;
use crate::pack::length::trunk_tokens;
use crate::pack::sequence::FrameTokens;
use crate::pack::statistics::{StepWaste, step_waste};
use crate::pack::step::{MicroBatch, PlannedEpisode, Planner};
use crate::random::{Draw, Purpose};
use crate::{Error, Result};
use candle_core::{Device, Tensor};
use std::sync::Arc;

/// One micro-batch of a step.
#[derive(Clone, Debug)]
pub struct Place {
    pub step: u64,
    /// Micro-batches of the step, over all ranks: one process trains them in turn.
    pub of: usize,
    pub micro_batch: MicroBatch,
    /// About the whole step.
    pub waste: StepWaste,
}

/// One micro-step's worth of work.
#[derive(Clone, Debug)]
pub struct Batch {
    pub place: Place,
    pub input: LingbotInput,
    pub targets: Vec<EpisodeTargets>,
    pub shares: Vec<Share>,
    /// Text rows that the trunk attends, folded padding included, and how many of them stand for padding.
    pub text_rows: usize,
    pub text_padding: usize,
}

/// Tokens of a latent frame of this set under this model.
pub fn frame_tokens(set: &EpisodeSet, model: &LingbotModelConfig) -> FrameTokens {
    let (height, width) = set.grid();
    let [_, patch_h, patch_w] = model.patch_size;
    FrameTokens { grid: [height / patch_h, width / patch_w], actions: set.actions_per_frame() }
}

/// Latent frames of each training episode, from metadata.
pub fn lengths(set: &EpisodeSet) -> Vec<usize> {
    set.train().iter().map(|id| set.frames(*id)).collect()
}

/// Can every training episode be packed? The planner knows indices alone; here the episode has its name.
///
/// # Errors
/// `over_token_budget` for a packing that no micro-batch of could hold it.
pub fn admit(set: &EpisodeSet, recipe: &LingbotRecipe) -> Result<()> {
    if recipe.packing.kind != PackingKind::Budget {
        return Ok(());
    }
    let budget = TokenBudget::new(recipe.packing.token_budget, recipe.packing.alignment)?;
    let frame = frame_tokens(set, &recipe.model);
    set.train().iter().enumerate().try_for_each(|(episode, id)| {
        let tokens = trunk_tokens(set.frames(*id), frame);
        budget
            .admit(&Load { episode, tokens, cost: 0.0 })
            .map_err(|error| Error { what: format!("{id}: {}", error.what), ..error })
    })
}

/// The places of all steps from `first` on.
pub fn places(
    store: &EpisodeStore,
    recipe: &LingbotRecipe,
    first: u64,
) -> impl Iterator<Item = Result<Place>> + Send + use<> {
    let (lengths, frame, recipe) = (lengths(&store.set), frame_tokens(&store.set, &recipe.model), recipe.clone());
    (first..=recipe.train.steps).flat_map(move |step| match of_step(&lengths, frame, &recipe, step) {
        Ok(places) => places.into_iter().map(Ok).collect(),
        Err(error) => vec![Err(error)],
    })
}

fn of_step(lengths: &[usize], frame: FrameTokens, recipe: &LingbotRecipe, step: u64) -> Result<Vec<Place>> {
    let cost = CostModel::of_model(&recipe.model, recipe.train.recompute);
    let planner =
        Planner::new(recipe.packing.kind, lengths, frame, &recipe.packing, &recipe.train, &recipe.flow, cost)?;
    let plan = planner.step(step)?;
    let waste = step_waste(&plan, &planner);
    let micro_batches: Vec<MicroBatch> = plan.ranks.into_iter().flatten().collect();
    let of = micro_batches.len();
    Ok(micro_batches.into_iter().map(|micro_batch| Place { step, of, micro_batch, waste }).collect())
}

/// Reads the episodes of a place and draws what belongs to them.
pub fn build(store: &EpisodeStore, recipe: &LingbotRecipe, schedules: &Schedules, place: Place) -> Result<Batch> {
    let planned = &place.micro_batch.episodes;
    let episodes_of_step = recipe.packing.ranks * recipe.train.batch_size * recipe.train.accumulate;
    let valid_frames: usize = planned.iter().map(|episode| episode.valid_frames).sum();
    let mut prompts: Vec<Arc<[f32]>> = Vec::new();
    let (mut episodes, mut targets, mut shares) = (Vec::new(), Vec::new(), Vec::new());
    for episode in planned {
        let sample = store.load(store.set.train()[episode.episode])?;
        let text = match draw(recipe, Purpose::TextDropout, episode.slot, "").uniform() < recipe.flow.text_dropout {
            true => Arc::clone(store.set.text().rows("")?),
            false => Arc::clone(&sample.text),
        };
        let prompt = prompts.iter().position(|known| *known == text).unwrap_or_else(|| {
            prompts.push(text);
            prompts.len() - 1
        });
        let levels =
            Levels::sample(&mut draw(recipe, Purpose::Timestep, episode.draw, ""), episode.frames, &recipe.flow);
        let (clean, noise) = tensors(store, recipe, &sample, episode, prompt, levels.history.is_some())?;
        let (input, target) = noised(&clean, &noise, &levels, schedules)?;
        episodes.push(input);
        targets.push(target);
        shares.push(Share::of_frame(
            recipe.flow.loss_mean,
            episode.valid_frames,
            episodes_of_step,
            valid_frames,
            place.of,
        ));
    }
    let (slots, width) = (recipe.model.text_len, recipe.model.text_dim);
    let (mut text_rows, mut text_padding) = (0, 0);
    let prompts = prompts
        .iter()
        .map(|rows| {
            let real = rows.len() / width;
            text_padding += usize::from(real < slots);
            text_rows += real + usize::from(real < slots);
            Tensor::from_slice(rows, (real, width), &Device::Cpu)
        })
        .collect::<candle_core::Result<_>>()?;
    // What products read of it: a GPU is sent half the bytes of a micro-step's input.
    let dtype = recipe.precision.params.dtype();
    let input = LingbotInput { episodes, prompts, alignment: recipe.packing.alignment };
    let input = input.map(|tensor| tensor.to_dtype(dtype))?;
    Ok(Batch { place, input, targets, shares, text_rows, text_padding })
}

fn draw(recipe: &LingbotRecipe, purpose: Purpose, key: u64, item: &str) -> Draw {
    Draw::new(recipe.train.seed, purpose, key, item)
}

/// Clean tensors and noise of an episode, frames after its own filled with zeros.
fn tensors(
    store: &EpisodeStore,
    recipe: &LingbotRecipe,
    sample: &EpisodeSample,
    planned: &PlannedEpisode,
    prompt: usize,
    noised_history: bool,
) -> Result<(CleanEpisode, EpisodeNoise)> {
    let (height, width) = store.set.grid();
    let (channels, actions, steps) = (recipe.model.in_dim, recipe.model.action_dim, store.set.actions_per_frame());
    let frames = sample.frames;
    let padded = |tensor: Tensor| match planned.frames - frames {
        0 => Ok(tensor),
        padding => tensor.pad_with_zeros(1, 0, padding),
    };
    let video = |values: &[f32]| padded(Tensor::from_slice(values, (channels, frames, height, width), &Device::Cpu)?);
    let action = |values: &[f32]| padded(Tensor::from_slice(values, (actions, frames, steps), &Device::Cpu)?);
    let mut normals = draw(recipe, Purpose::Noise, planned.slot, &sample.id.to_string());
    let video_noise = normals.normals(sample.latent.len());
    let action_noise = normals.normals(sample.actions.len());
    let history_noise = noised_history.then(|| normals.normals(sample.latent.len()));
    let clean = CleanEpisode {
        latent: video(&sample.latent)?,
        action: action(&sample.actions)?,
        action_mask: action(&sample.action_mask)?,
        valid_frames: frames,
        chunk: planned.mask.chunk,
        window: planned.mask.window,
        prompt,
    };
    let noise = EpisodeNoise {
        video: video(&video_noise)?,
        history: history_noise.map(|values| video(&values)).transpose()?,
        action: action(&action_noise)?,
    };
    Ok((clean, noise))
}
