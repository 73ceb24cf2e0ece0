//! One validation point: predict held-out chunks from their clean history, decode the wrist view, measure it.
//!
//! Teacher-forced: the history is the true latents and the true actions of every frame before the chunk, so a chunk says
//! what the model knows, not how errors of earlier chunks add up. The list of chunks is fixed by the recipe and noise is
//! keyed by the chunk, so every point of every arm measures the same chunks from the same noise.

use super::EpisodeStore;
use crate::codec::{CHANNELS, Extent, LatentCodec, TIME_STRIDE};
use crate::config::LingbotRecipe;
use crate::data::episodes::{EpisodeId, EpisodeSet, tile::Region};
use crate::eval::chunk::{sample_chunk, starting_noise};
use crate::eval::lpips::Features;
use crate::eval::{Lpips, psnr, ssim, write_strip};
use crate::model::{CleanHistory, LingbotModel};
use crate::runlog::ClipMetrics;
use crate::train::measure::{averages, mean, signed, spread, unit_range};
use crate::train::task::{GoOn, Point, scalar};
use crate::{Error, Result};
use candle_core::{Device, Tensor};
use std::fmt;
use std::path::Path;
use std::time::Instant;

/// One chunk of a held-out sample, `episode_000012#3`: the sample, and which chunk of `validation.chunk` latent frames
/// it is, from 0. Also the name of its strip.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkId {
    pub episode: EpisodeId,
    pub chunk: usize,
}

impl fmt::Display for ChunkId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}#{}", self.episode, self.chunk)
    }
}

/// `validation.clips` chunks spread evenly over those of the held-out samples: whole chunks, and none that begins its
/// sample, since that one has no history.
///
/// # Errors
/// `validation_too_short` if there is none.
pub fn measured_chunks(set: &EpisodeSet, recipe: &LingbotRecipe) -> Result<Vec<ChunkId>> {
    let frames = recipe.validation.chunk;
    let chunks_of =
        |&episode: &EpisodeId| (1..set.frames(episode) / frames.max(1)).map(move |chunk| ChunkId { episode, chunk });
    let all: Vec<ChunkId> = set.validation().iter().flat_map(chunks_of).collect();
    if all.is_empty() {
        let lengths: Vec<String> =
            set.validation().iter().take(3).map(|id| format!("{id} has {}", set.frames(*id))).collect();
        let what = format!(
            "no held-out sample has two whole chunks of {frames} latent frames: {}{}",
            lengths.join(", "),
            if set.validation().len() > lengths.len() { ", ..." } else { "" }
        );
        return Err(Error::refused("validation_too_short", what)
            .in_place("validation.chunk")
            .hint("lower it, or hold out longer episodes in data.validation_episodes"));
    }
    Ok(spread(&all, recipe.validation.clips))
}

/// What is true of one chunk.
struct Truth {
    id: ChunkId,
    /// Absent if the latents cannot be decoded.
    pictures: Option<Pictures>,
}

/// What predicted frames are compared with.
struct Pictures {
    /// Wrist frames of the chunk, [4K, 3, H, W] in [0, 1].
    frames: Tensor,
    features: Features,
    /// LPIPS and PSNR of the decoded true latents; NaN if these are what is compared with.
    ceiling: (f64, f64),
}

/// A held-out sample up to its last measured chunk.
struct Episode {
    /// [C, F, H, W]
    video: Tensor,
    /// [A, F, n]
    action: Tensor,
    /// [r, text_dim]
    prompt: Tensor,
    chunks: Vec<Truth>,
}

/// Measures a model on held-out chunks.
pub struct Validator {
    lpips: Lpips,
    episodes: Vec<Episode>,
    chunks: u64,
    /// The wrist view in the tile.
    wrist: Region,
    /// Latent frames K of a chunk.
    frames: usize,
}

impl Validator {
    /// Reads the truth of the chunks, those of a sample side by side, and measures the codec's ceiling;
    /// `progress(done, total)` before each.
    pub fn new(
        store: &EpisodeStore,
        recipe: &LingbotRecipe,
        measured: &[ChunkId],
        progress: &mut dyn FnMut(u64, u64) -> Result<()>,
    ) -> Result<Self> {
        let view = store.set.wrist_view();
        let wrist = store.set.region(view).ok_or_else(|| Error::crash(format!("there is no view {view}")))?;
        let (chunks, frames) = (measured.len() as u64, recipe.validation.chunk);
        let mut validator = Self { lpips: Lpips::new()?, episodes: Vec::new(), chunks, wrist, frames };
        let mut done = 0;
        for chunks in measured.chunk_by(|a, b| a.episode == b.episode) {
            let mut episode = validator.load(store, recipe, chunks)?;
            for &id in chunks {
                progress(done, validator.chunks)?;
                done += 1;
                let pictures = match &store.codec {
                    Some(codec) => Some(validator.pictures(store, codec.as_ref(), &episode.video, id)?),
                    None => None,
                };
                episode.chunks.push(Truth { id, pictures });
            }
            validator.episodes.push(episode);
        }
        Ok(validator)
    }

    /// The sample of these chunks, up to the end of the last.
    fn load(&self, store: &EpisodeStore, recipe: &LingbotRecipe, chunks: &[ChunkId]) -> Result<Episode> {
        let Some(last) = chunks.iter().max_by_key(|id| id.chunk) else {
            return Err(Error::crash("a sample without a chunk"));
        };
        let sample = store.load(last.episode)?;
        let (height, width) = store.set.grid();
        let (model, actions) = (&recipe.model, store.set.actions_per_frame());
        let until = (last.chunk + 1) * self.frames;
        let first =
            |values: Vec<f32>, shape: &[usize]| Tensor::from_vec(values, shape, &Device::Cpu)?.narrow(1, 0, until);
        let text = sample.text.to_vec();
        Ok(Episode {
            video: first(sample.latent, &[CHANNELS, sample.frames, height, width])?,
            action: first(sample.actions, &[model.action_dim, sample.frames, actions])?,
            prompt: Tensor::from_vec(text, (sample.text.len() / model.text_dim, model.text_dim), &Device::Cpu)?,
            chunks: Vec::with_capacity(chunks.len()),
        })
    }

    /// The true frames of a chunk: the source's if there are videos, else those of the true latents.
    fn pictures(&self, store: &EpisodeStore, codec: &dyn LatentCodec, video: &Tensor, id: ChunkId) -> Result<Pictures> {
        let rebuilt = self.decoded(codec, video, id.chunk, &self.true_chunk(video, id.chunk)?)?;
        let first = id.chunk * self.frames;
        // Latent frame f > 0 stands for the four frames up to 4 f.
        let source = TIME_STRIDE * (first - 1) + 1..TIME_STRIDE * (first + self.frames - 1) + 1;
        let (count, Region { height, width, .. }) = (source.len(), self.wrist);
        let Some(source) = store.set.wrist_frames(id.episode, source)? else {
            let features = self.lpips.features(&signed(&rebuilt)?)?;
            return Ok(Pictures { frames: rebuilt, features, ceiling: (f64::NAN, f64::NAN) });
        };
        let extent = Extent { frames: count, ..Extent { frames: 1, height, width }.video() };
        let frames = unit_range(&source, extent, 0)?;
        let features = self.lpips.features(&signed(&frames)?)?;
        let ceiling = self.lpips.distance(&self.lpips.features(&signed(&rebuilt)?)?, &features)?;
        let ceiling = (mean(&ceiling), mean(&psnr(&rebuilt, &frames)?));
        Ok(Pictures { frames, features, ceiling })
    }

    /// Predicts and measures all chunks, with guidance 1. `go_on(done, total)` is asked before each.
    pub fn measure(
        &self,
        store: &EpisodeStore,
        model: &LingbotModel,
        recipe: &LingbotRecipe,
        step: u64,
        strips: &Path,
        go_on: GoOn<'_>,
    ) -> Result<Option<Point>> {
        let started = Instant::now();
        let settings = &recipe.validation;
        let mut clips = Vec::new();
        for episode in &self.episodes {
            if !go_on(clips.len() as u64, self.chunks)? {
                return Ok(None);
            }
            let before_last = episode.video.dim(1)? - self.frames;
            let history = model.prefill(&CleanHistory {
                video: episode.video.narrow(1, 0, before_last)?,
                action: episode.action.narrow(1, 0, before_last)?,
                prompt: episode.prompt.clone(),
                chunk: settings.chunk,
                window: settings.window,
            })?;
            for truth in &episode.chunks {
                if !go_on(clips.len() as u64, self.chunks)? {
                    return Ok(None);
                }
                let (channels, _, height, width) = episode.video.dims4()?;
                let noise = starting_noise(&truth.id.to_string(), [channels, self.frames, height, width])?;
                let history = history.before(truth.id.chunk)?;
                let predicted = sample_chunk(model, &history, noise, settings.sample_steps, recipe.flow.video_shift)?;
                let strip = (clips.len() < settings.strips).then(|| strips.join(format!("{}.png", truth.id)));
                let metrics = self.measure_chunk(store.codec.as_deref(), episode, truth, &predicted, strip.as_deref());
                clips.push(metrics.map_err(|error| Error {
                    what: format!("validation of {} at step {step}: {}", truth.id, error.what),
                    ..error
                })?);
            }
        }
        let mean = averages(step, &clips, started.elapsed().as_secs_f64() * 1e3);
        Ok(Some(Point { clips, mean }))
    }

    /// Measures the predicted video latents [C, K, H, W] of a chunk.
    fn measure_chunk(
        &self,
        codec: Option<&dyn LatentCodec>,
        episode: &Episode,
        truth: &Truth,
        predicted: &Tensor,
        strip: Option<&Path>,
    ) -> Result<ClipMetrics> {
        let chunk = truth.id.chunk;
        let predicted = self.wrist_of(predicted)?;
        let error = scalar(&(&predicted - self.true_chunk(&episode.video, chunk)?)?.sqr()?.mean_all()?)?;
        if !error.is_finite() {
            return Err(Error::crash("the model predicted latents that are not finite"));
        }
        let mut metrics = ClipMetrics {
            clip: truth.id.to_string(),
            wrist_lpips: f64::NAN,
            wrist_psnr: f64::NAN,
            wrist_ssim: f64::NAN,
            // This family predicts no pose.
            trans_l2_norm: f64::NAN,
            trans_l2_m: f64::NAN,
            rot_deg: f64::NAN,
            ceiling_lpips: f64::NAN,
            ceiling_psnr: f64::NAN,
            wrist_latent_mse: Some(error),
        };
        if let (Some(codec), Some(truth)) = (codec, &truth.pictures) {
            let frames = self.decoded(codec, &episode.video, chunk, &predicted)?;
            let distances = self.lpips.distance(&self.lpips.features(&signed(&frames)?)?, &truth.features)?;
            metrics.wrist_lpips = mean(&distances);
            metrics.wrist_psnr = mean(&psnr(&frames, &truth.frames)?);
            metrics.wrist_ssim = mean(&ssim(&frames, &truth.frames)?);
            (metrics.ceiling_lpips, metrics.ceiling_psnr) = truth.ceiling;
            if let Some(path) = strip {
                write_strip(path, &truth.frames, &frames)?;
            }
        }
        Ok(metrics)
    }

    /// The wrist view of latents [C, F, H, W], cut out before anything decodes it: [C, F, h, w].
    fn wrist_of(&self, latents: &Tensor) -> Result<Tensor> {
        let Region { top, left, height, width } = self.wrist;
        Ok(latents.narrow(2, top, height)?.narrow(3, left, width)?)
    }

    /// The wrist view of the true latents of a chunk.
    fn true_chunk(&self, video: &Tensor, chunk: usize) -> Result<Tensor> {
        self.wrist_of(&video.narrow(1, chunk * self.frames, self.frames)?)
    }

    /// Frames [4K, 3, H, W] in [0, 1] of a chunk's wrist latents [C, K, h, w], decoded after those of its history.
    fn decoded(&self, codec: &dyn LatentCodec, video: &Tensor, chunk: usize, latents: &Tensor) -> Result<Tensor> {
        let end = chunk * self.frames;
        // A codec that keeps nothing from group to group needs only a first frame to drop.
        let first = if codec.codes_groups_alone() { end - 1 } else { 0 };
        let history = self.wrist_of(&video.narrow(1, first, end - first)?)?;
        let latents = Tensor::cat(&[&history, latents], 1)?;
        let extent = Extent { frames: latents.dim(1)?, height: self.wrist.height, width: self.wrist.width };
        let values: Vec<f32> = latents.flatten_all()?.to_vec1()?;
        unit_range(&codec.decode(&values, extent)?, extent.video(), TIME_STRIDE * (end - first - 1) + 1)
    }
}

#[cfg(test)]
mod tests;
