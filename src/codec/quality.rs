//! How well a codec codes held-out pictures: the ceiling of everything that is decoded with it, and what
//! `data fit-codec` reports.

use rayon::prelude::*;
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use super::{FitSettings, LatentCodec, LinearCodec, PictureSource, Side};
use crate::Result;
use crate::data::{Progress, ViewFrames};

/// Held-out clips measured at most.
const MAX_CLIPS: usize = 64;

/// A codec that was fitted and saved.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FitSummary {
    pub path: PathBuf,
    pub hash: String,
    pub bytes: u64,
    /// Training clips of the dataset, of which a fit reads some hundreds.
    pub train_clips: usize,
    /// Held-out clips that were measured.
    pub measured_clips: usize,
    /// One a view of the recipe.
    pub views: Vec<ViewQuality>,
}

/// How close decoded frames come to the source frames.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ViewQuality {
    pub view: String,
    /// Mean PSNR of the frames after the first, dB; decoded frames are rounded to 8 bits.
    pub psnr_db: f64,
}

/// Fits the linear codec to a dataset, saves it and measures it on held-out clips; waits while another process fits it.
///
/// # Errors
/// Those of [`LinearCodec::fit`], [`LinearCodec::save`] and [`PictureSource::clip`]; an error of `progress`.
pub fn fit_and_save(
    source: &dyn PictureSource,
    settings: FitSettings,
    path: &Path,
    progress: Progress<'_>,
) -> Result<FitSummary> {
    let _lock = super::lock::acquire(path, progress)?;
    let clips = held_out(source);
    let measured = clips.len() as u64;
    // Fitting and measuring are one bar.
    let fitted = AtomicU64::new(0);
    let codec = LinearCodec::fit(source, settings, &|done, total| {
        fitted.store(total, Ordering::Relaxed);
        progress(done, total + measured)
    })?;
    codec.save(path)?;
    let fitted = fitted.into_inner();
    let views = measure(&codec, source, &clips, &|done, total| progress(fitted + done, fitted + total))?;
    Ok(FitSummary {
        path: path.to_owned(),
        hash: codec.hash().to_owned(),
        bytes: std::fs::metadata(path).map_or(0, |metadata| metadata.len()),
        train_clips: source.clips(Side::Training),
        measured_clips: clips.len(),
        views,
    })
}

/// Codes held-out clips, evenly spread over the list, and compares them with their source frames.
///
/// # Errors
/// Those of [`PictureSource::clip`] and of the codec.
pub fn held_out_quality(codec: &dyn LatentCodec, source: &dyn PictureSource) -> Result<Vec<ViewQuality>> {
    measure(codec, source, &held_out(source), &|_, _| Ok(()))
}

fn held_out(source: &dyn PictureSource) -> Vec<usize> {
    super::linear::spread(source.clips(Side::HeldOut), MAX_CLIPS)
}

fn measure(
    codec: &dyn LatentCodec,
    source: &dyn PictureSource,
    clips: &[usize],
    progress: Progress<'_>,
) -> Result<Vec<ViewQuality>> {
    let (begun, total) = (AtomicU64::new(0), clips.len() as u64);
    let measured: Vec<Result<Vec<f64>>> = clips
        .par_iter()
        .map(|clip| {
            progress(begun.fetch_add(1, Ordering::Relaxed), total)?;
            source.clip(Side::HeldOut, *clip)?.iter().map(|view| view_psnr(codec, view)).collect()
        })
        .collect();
    let measured = measured.into_iter().collect::<Result<Vec<_>>>()?;
    let views = source.views().iter().enumerate();
    Ok(views
        .map(|(view, name)| ViewQuality {
            view: name.clone(),
            psnr_db: measured.iter().map(|clip| clip[view]).sum::<f64>() / measured.len().max(1) as f64,
        })
        .collect())
}

/// Mean PSNR of the frames after the first, dB.
fn view_psnr(codec: &dyn LatentCodec, view: &ViewFrames) -> Result<f64> {
    let extent = view.extent;
    let latents = codec.encode(&view.video(), extent)?;
    let decoded = codec.decode(&latents, extent.latent()?)?;
    let plane = extent.height * extent.width;
    let mut sum = 0.0;
    for frame in 1..extent.frames {
        let mut squares = 0.0;
        for channel in 0..3 {
            let decoded = &decoded[(channel * extent.frames + frame) * plane..][..plane];
            let source = &view.rgb[(frame * 3 + channel) * plane..][..plane];
            for (decoded, source) in decoded.iter().zip(source) {
                let level = ((decoded.clamp(-1.0, 1.0) + 1.0) * 127.5).round();
                squares += f64::from(level - f32::from(*source)).powi(2);
            }
        }
        // Rounding alone leaves 1/12 of a squared level: better than that is luck, and no error at all infinite.
        let mean = (squares / (3 * plane) as f64).max(1.0 / 12.0);
        sum += 10.0 * (255.0_f64.powi(2) / mean).log10();
    }
    Ok(sum / (extent.frames - 1).max(1) as f64)
}
