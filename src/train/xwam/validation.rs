//! One validation point: sample the held-out clips, decode the wrist view, measure it against the source frames.
//!
//! Nothing here draws from training's streams, and the clip list is fixed by the recipe, so every point of every arm
//! measures the same clips from the same noise.

use super::batches::{ClipStore, EncodedClip};
use crate::codec;
use crate::config::XwamRecipe;
use crate::data::ClipId;
use crate::eval::lpips::Features;
use crate::eval::sample::{Condition, Prediction, sample};
use crate::eval::{Lpips, pose_error, psnr, ssim, write_strip};
use crate::model::XwamModel;
use crate::runlog::ClipMetrics;
use crate::train::measure::{averages, mean, signed, unit_range};
use crate::train::task::{GoOn, Point};
use crate::{Error, Result};
use candle_core::Tensor;
use std::path::Path;
use std::time::Instant;

/// Clips sampled together: enough for the matrix products, little enough to stop between two batches.
const BATCH: usize = 4;

/// What is true of one held-out clip, read once.
struct Truth {
    clip: ClipId,
    encoded: EncodedClip,
    /// Wrist frames 1.., [T-1, 3, H, W] in [0, 1].
    frames: Tensor,
    features: Features,
    /// LPIPS and PSNR of the codec's own reconstruction.
    ceiling: (f64, f64),
}

/// Measures a model on the held-out clips.
pub struct Validator {
    lpips: Lpips,
    truths: Vec<Truth>,
    position_scale_m: [f64; 3],
}

impl Validator {
    /// Reads the truth of the clips and measures the codec's ceiling; `progress(done, total)` after each.
    pub fn new(store: &ClipStore, clips: &[ClipId], progress: &mut dyn FnMut(u64, u64) -> Result<()>) -> Result<Self> {
        let lpips = Lpips::new()?;
        let wrist = store.dataset.wrist_view();
        let mut truths = Vec::with_capacity(clips.len());
        for (done, clip) in clips.iter().enumerate() {
            progress(done as u64, clips.len() as u64)?;
            let sample = store.dataset.load(clip)?;
            // Frame 0 is given to the model.
            let frames = unit_range(&sample.video(wrist), store.extent.video(), 1)?;
            let encoded = store.encoded(clip)?;
            let rebuilt = wrist_frames(store, &encoded.latent)?;
            let features = lpips.features(&signed(&frames)?)?;
            let ceiling = lpips.distance(&lpips.features(&signed(&rebuilt)?)?, &features)?;
            let ceiling = (mean(&ceiling), mean(&psnr(&rebuilt, &frames)?));
            truths.push(Truth { clip: *clip, encoded, frames, features, ceiling });
        }
        let statistics = store.dataset.statistics();
        let (origin, one) = (statistics.position_metres([0.0; 3]), statistics.position_metres([1.0; 3]));
        Ok(Self { lpips, truths, position_scale_m: [0, 1, 2].map(|axis| one[axis] - origin[axis]) })
    }

    /// Samples and measures all clips. `go_on(done, total)` is asked before each batch.
    pub fn measure(
        &self,
        store: &ClipStore,
        model: &XwamModel,
        recipe: &XwamRecipe,
        step: u64,
        strips: &Path,
        go_on: GoOn<'_>,
    ) -> Result<Option<Point>> {
        let started = Instant::now();
        let mut clips = Vec::with_capacity(self.truths.len());
        for batch in self.truths.chunks(BATCH) {
            if !go_on(clips.len() as u64, self.truths.len() as u64)? {
                return Ok(None);
            }
            let encoded: Vec<EncodedClip> = batch.iter().map(|truth| truth.encoded.clone()).collect();
            let clean = store.stack(&encoded, &vec![false; batch.len()], recipe)?;
            let condition = Condition {
                latent: clean.latent,
                proprio: clean.proprio.clone(),
                action: clean.action,
                text: clean.text,
                geometry: clean.geometry,
                clips: batch.iter().map(|truth| truth.clip.to_string()).collect(),
            };
            let prediction = sample(model, &condition, &recipe.flow, &recipe.validation)?;
            for (index, truth) in batch.iter().enumerate() {
                let strip =
                    (clips.len() < recipe.validation.strips).then(|| strips.join(format!("{}.png", truth.clip)));
                let metrics = self.measure_clip(store, truth, &prediction, &clean.proprio, index, strip.as_deref());
                clips.push(metrics.map_err(|error| Error {
                    what: format!("validation of {} at step {step}: {}", truth.clip, error.what),
                    ..error
                })?);
            }
        }
        let mean = averages(step, &clips, started.elapsed().as_secs_f64() * 1e3);
        Ok(Some(Point { clips, mean }))
    }

    fn measure_clip(
        &self,
        store: &ClipStore,
        truth: &Truth,
        prediction: &Prediction,
        true_proprio: &Tensor,
        index: usize,
        strip: Option<&Path>,
    ) -> Result<ClipMetrics> {
        let latent: Vec<f32> = prediction.latent.get(index)?.flatten_all()?.to_vec1()?;
        if latent.iter().any(|value| !value.is_finite()) {
            return Err(Error::crash("the model predicted latents that are not finite"));
        }
        let frames = wrist_frames(store, &latent)?;
        let distances = self.lpips.distance(&self.lpips.features(&signed(&frames)?)?, &truth.features)?;
        let pose = pose_error(&prediction.proprio.get(index)?, &true_proprio.get(index)?, self.position_scale_m)?;
        if let Some(path) = strip {
            write_strip(path, &truth.frames, &frames)?;
        }
        Ok(ClipMetrics {
            clip: truth.clip.to_string(),
            wrist_lpips: mean(&distances),
            wrist_psnr: mean(&psnr(&frames, &truth.frames)?),
            wrist_ssim: mean(&ssim(&frames, &truth.frames)?),
            trans_l2_norm: pose.trans_l2_norm,
            trans_l2_m: pose.trans_l2_m,
            rot_deg: pose.rot_deg,
            ceiling_lpips: truth.ceiling.0,
            ceiling_psnr: truth.ceiling.1,
            wrist_latent_mse: None,
        })
    }
}

/// Decoded wrist frames 1.. of latents [C, T, V, H, W], clamped to [0, 1].
fn wrist_frames(store: &ClipStore, latent: &[f32]) -> Result<Tensor> {
    let (views, wrist) = (store.dataset.config().views.len(), store.dataset.wrist_view());
    let video = codec::decode_view(store.codec.as_ref(), latent, store.extent, views, wrist)?;
    unit_range(&video, store.extent.video(), 1)
}
