//! Batches as a pure function of (seed, step, micro-step).

use super::flow::{CleanBatch, Level, Noise, Targets, noised};
use crate::codec::{self, Extent, LatentCache, LatentCodec};
use crate::config::XwamRecipe;
use crate::data::{ClipId, ClipSample, Dataset, TextTable};
use crate::model::XwamInput;
use crate::random::{Draw, Purpose};
use crate::{Error, Result};
use candle_core::{Device, Tensor};

/// A clip as the model sees it.
#[derive(Clone, Debug)]
pub struct EncodedClip {
    /// Everything but the pictures.
    pub sample: ClipSample,
    /// [C, T, V, H, W]
    pub latent: Vec<f32>,
}

/// Encoded clips, by way of the latent cache.
pub struct ClipStore {
    pub dataset: Dataset,
    pub codec: Box<dyn LatentCodec>,
    pub cache: LatentCache,
    pub text: TextTable,
    /// T, H, W of a clip's latents.
    pub extent: Extent,
}

impl ClipStore {
    /// The clip's numbers and its latents, decoded and encoded only if the cache does not have them.
    pub fn encoded(&self, clip: &ClipId) -> Result<EncodedClip> {
        let latent = self.cache.latents(&self.dataset, self.codec.as_ref(), clip)?;
        Ok(EncodedClip { sample: self.dataset.load_without_frames(clip)?, latent })
    }

    /// Are the clip's latents cached?
    pub fn is_cached(&self, clip: &ClipId) -> Result<bool> {
        self.cache.contains(&self.dataset, self.codec.as_ref(), clip)
    }

    /// [B, C, T, V, H, W] of a batch of clips.
    fn latent_shape(&self, batch: usize) -> Vec<usize> {
        let views = self.dataset.config().views.len();
        vec![batch, codec::CHANNELS, self.extent.frames, views, self.extent.height, self.extent.width]
    }

    /// Stacks encoded clips; the text of clip `i` is replaced by the empty prompt where `drop_text[i]`.
    pub fn stack(&self, clips: &[EncodedClip], drop_text: &[bool], recipe: &XwamRecipe) -> Result<CleanBatch> {
        let model = &recipe.model;
        let batch = clips.len();
        let rows = |pick: fn(&ClipSample) -> &Vec<f32>, width: usize| -> Result<Tensor> {
            let values: Vec<f32> = clips.iter().flat_map(|clip| pick(&clip.sample)).copied().collect();
            let count = values.len() / batch / width;
            Ok(Tensor::from_vec(values, (batch, count, width), &Device::Cpu)?)
        };
        let mut text = Vec::with_capacity(batch * model.text_len * model.text_dim);
        for (clip, &dropped) in clips.iter().zip(drop_text) {
            text.extend(self.text.get(if dropped { "" } else { &clip.sample.prompt })?);
        }
        let geometry = match model.geometry.enabled {
            false => None,
            true => {
                let width = model.geometry.token_dim;
                let mut values = Vec::new();
                for clip in clips {
                    let tokens = clip.sample.geometry.as_ref().ok_or_else(|| {
                        Error::crash(format!("{} came without its geometry tokens", clip.sample.clip))
                    })?;
                    values.extend_from_slice(tokens);
                }
                let count = values.len() / batch / width;
                Some(Tensor::from_vec(values, (batch, count, width), &Device::Cpu)?)
            }
        };
        Ok(CleanBatch {
            latent: Tensor::from_vec(
                clips.iter().flat_map(|clip| &clip.latent).copied().collect::<Vec<f32>>(),
                self.latent_shape(batch),
                &Device::Cpu,
            )?,
            action: rows(|s| &s.action, model.action_dim)?,
            action_mask: rows(|s| &s.action_mask, model.action_dim)?,
            proprio: rows(|s| &s.proprio, model.proprio_dim)?,
            proprio_mask: rows(|s| &s.proprio_mask, model.proprio_dim)?,
            text: Tensor::from_vec(text, (batch, model.text_len, model.text_dim), &Device::Cpu)?,
            geometry,
        })
    }
}

/// One micro-step's worth of work.
#[derive(Clone, Debug)]
pub struct Batch {
    pub input: XwamInput,
    pub targets: Targets,
    /// Text rows after the prompts: the only padding of this family, computed and attended like any other row.
    pub padding_rows: usize,
}

/// Clip of slot `slot` of the whole run: epochs are shuffled by (seed, epoch), every clip once an epoch.
pub fn clip_of_slot(clips: &[ClipId], seed: u64, slot: u64) -> ClipId {
    let count = clips.len() as u64;
    let order = Draw::new(seed, Purpose::Order, slot / count, "").permutation(clips.len());
    clips[order[(slot % count) as usize]]
}

/// Micro-step `micro` of optimizer step `step` (the first is 1).
pub fn build(store: &ClipStore, recipe: &XwamRecipe, step: u64, micro: usize) -> Result<Batch> {
    let train = &recipe.train;
    let first = ((step - 1) * train.accumulate as u64 + micro as u64) * train.batch_size as u64;
    let (mut clips, mut levels, mut drop_text) = (Vec::new(), Vec::new(), Vec::new());
    let (mut latent, mut action, mut proprio) = (Vec::new(), Vec::new(), Vec::new());
    for slot in first..first + train.batch_size as u64 {
        let clip = clip_of_slot(store.dataset.train(), train.seed, slot);
        let encoded = store.encoded(&clip)?;
        // Keyed by the slot, not the clip: a clip that comes twice in a step must not get the same noise.
        let draw = |purpose| Draw::new(train.seed, purpose, slot, &clip.to_string());
        levels.push(Level::sample(&mut draw(Purpose::Timestep), &recipe.flow));
        drop_text.push(draw(Purpose::TextDropout).uniform() < recipe.flow.text_dropout);
        let mut noise = draw(Purpose::Noise);
        latent.extend(noise.normals(encoded.latent.len()));
        action.extend(noise.normals(encoded.sample.action.len()));
        proprio.extend(noise.normals(encoded.sample.proprio.len()));
        clips.push(encoded);
    }
    let clean = store.stack(&clips, &drop_text, recipe)?;
    let noise = Noise {
        latent: Tensor::from_vec(latent, clean.latent.shape(), &Device::Cpu)?,
        action: Tensor::from_vec(action, clean.action.shape(), &Device::Cpu)?,
        proprio: Tensor::from_vec(proprio, clean.proprio.shape(), &Device::Cpu)?,
    };
    let (input, targets) = noised(&clean, &noise, &levels, recipe.flow.train_timesteps)?;
    let rows = recipe.model.text_len * clips.len();
    let used =
        |(clip, &dropped): (&EncodedClip, &bool)| if dropped { 0 } else { store.text.tokens(&clip.sample.prompt) };
    let padding_rows = rows - clips.iter().zip(&drop_text).map(used).sum::<usize>();
    Ok(Batch { input, targets, padding_rows })
}
