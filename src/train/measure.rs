//! What validation of every family shares: pictures in LPIPS's range, and means over the clips of a point.

use crate::Result;
use crate::codec::Extent;
use crate::runlog::{ClipMetrics, ValidationEvent};
use candle_core::{Device, Tensor};

/// `wanted` of the list, spread evenly over it.
pub(super) fn spread<T: Copy>(all: &[T], wanted: usize) -> Vec<T> {
    let count = wanted.min(all.len());
    (0..count).map(|i| all[i * all.len() / count]).collect()
}

/// Frames from `first` on of a video [3, T, H, W] in [-1, 1], clamped to [0, 1]: [T - first, 3, H, W].
pub(super) fn unit_range(video: &[f32], extent: Extent, first: usize) -> Result<Tensor> {
    let video = Tensor::from_slice(video, (3, extent.frames, extent.height, extent.width), &Device::Cpu)?;
    let frames = video.narrow(1, first, extent.frames - first)?.transpose(0, 1)?.contiguous()?;
    Ok(((frames + 1.0)? * 0.5)?.clamp(0f32, 1f32)?)
}

/// [0, 1] -> [-1, 1], as LPIPS takes pictures.
pub(super) fn signed(frames: &Tensor) -> Result<Tensor> {
    Ok(((frames * 2.0)? - 1.0)?)
}

pub(super) fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len().max(1) as f64
}

/// Means over the clips of a point that took `ms`.
pub(super) fn averages(step: u64, clips: &[ClipMetrics], ms: f64) -> ValidationEvent {
    let over = |pick: fn(&ClipMetrics) -> f64| mean(&clips.iter().map(pick).collect::<Vec<_>>());
    ValidationEvent {
        step,
        clips: clips.len() as u64,
        wrist_lpips: over(|clip| clip.wrist_lpips),
        wrist_psnr: over(|clip| clip.wrist_psnr),
        wrist_ssim: over(|clip| clip.wrist_ssim),
        trans_l2_norm: over(|clip| clip.trans_l2_norm),
        trans_l2_m: over(|clip| clip.trans_l2_m),
        rot_deg: over(|clip| clip.rot_deg),
        ceiling_lpips: over(|clip| clip.ceiling_lpips),
        ceiling_psnr: over(|clip| clip.ceiling_psnr),
        wrist_latent_mse: clips
            .iter()
            .map(|clip| clip.wrist_latent_mse)
            .collect::<Option<Vec<f64>>>()
            .filter(|errors| !errors.is_empty())
            .map(|errors| mean(&errors)),
        ms,
        work: None,
    }
}
