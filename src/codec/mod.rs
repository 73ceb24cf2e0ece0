//! Latent codecs: pixels <-> latents with the geometry of the Wan2.2 VAE.
//!
//! Stride 4 in time with the first frame alone, 16 in space, 48 channels, each of about zero mean and unit variance.
//! Everything here is plain f32 slices on the CPU; the shape of a slice stands in its comment, outermost first.

mod cache;
mod linear;
mod lock;
mod principal;
mod quality;
mod source;

pub use cache::LatentCache;
pub use linear::{FitSettings, LinearCodec};
pub use quality::{FitSummary, ViewQuality, fit_and_save, held_out_quality};
pub use source::{PictureSource, Side};

use rayon::prelude::*;
use std::ops::Range;
use std::path::Path;

use crate::config::CodecConfig;
use crate::data::{ClipSample, Progress};
use crate::{Error, Result};

/// Channels of a latent cell.
pub const CHANNELS: usize = 48;
/// Frames in a latent frame, after the first.
pub const TIME_STRIDE: usize = 4;
/// Pixels in a latent cell, each way.
pub const SPACE_STRIDE: usize = 16;

/// (frames, height, width) of a video in pixels, or of a latent in cells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    pub frames: usize,
    pub height: usize,
    pub width: usize,
}

impl Extent {
    /// The latent extent of a video: [1 + (T - 1) / 4, H / 16, W / 16].
    ///
    /// # Errors
    /// `bad_extent` if the frames are not 1 + 4k or a side is no multiple of 16.
    pub fn latent(self) -> Result<Self> {
        let Self { frames, height, width } = self;
        let whole = height.is_multiple_of(SPACE_STRIDE) && width.is_multiple_of(SPACE_STRIDE);
        if frames % TIME_STRIDE != 1 || !whole || height == 0 || width == 0 {
            let what = format!("{frames} frames of {width}x{height} cannot be coded");
            let hint = format!("frames must be 1 + {TIME_STRIDE}k, sides multiples of {SPACE_STRIDE}");
            return Err(Error::refused("bad_extent", what).hint(hint));
        }
        Ok(Self { frames: 1 + (frames - 1) / TIME_STRIDE, height: height / SPACE_STRIDE, width: width / SPACE_STRIDE })
    }

    /// The video extent of a latent; the inverse of [`Extent::latent`].
    pub fn video(self) -> Self {
        Self {
            frames: 1 + self.frames.saturating_sub(1) * TIME_STRIDE,
            height: self.height * SPACE_STRIDE,
            width: self.width * SPACE_STRIDE,
        }
    }

    /// Frames times height times width.
    pub fn cells(self) -> usize {
        self.frames * self.height * self.width
    }
}

/// Pixels <-> latents. One call codes one view.
pub trait LatentCodec: Send + Sync {
    /// Video [3, T, H, W] in [-1, 1] -> latents [48, T', h, w].
    ///
    /// # Errors
    /// `bad_extent` if the video's extent or length does not fit.
    fn encode(&self, video: &[f32], extent: Extent) -> Result<Vec<f32>>;

    /// Latents [48, T', h, w] -> video [3, T, H, W], not clamped. `extent` is the latent's.
    ///
    /// # Errors
    /// `bad_extent` if the length does not fit.
    fn decode(&self, latents: &[f32], extent: Extent) -> Result<Vec<f32>>;

    /// SHA-256 over all numbers that decide the result; part of a run's identity.
    fn hash(&self) -> &str;

    /// Whether the first frame and each group of four after it are coded by themselves, so that a long video may be
    /// coded piece by piece.
    fn codes_groups_alone(&self) -> bool {
        false
    }
}

/// Opens the codec of a recipe; a linear codec that is not there yet is fitted to the dataset and saved, by one process
/// while others that need it wait.
///
/// # Errors
/// Those of [`LinearCodec::load`] and [`LinearCodec::fit`]; `codec_of_other_clips` (exit 78) for a file that was fitted
/// to other training clips: it may have seen what is held out now. `codec_unavailable` for the Wan VAE.
pub fn open(config: &CodecConfig, source: &dyn PictureSource, progress: Progress<'_>) -> Result<Box<dyn LatentCodec>> {
    match config {
        CodecConfig::Linear { path } => {
            let codec = match load_if_there(path)? {
                Some(codec) => codec,
                None => fit_once(path, source, progress)?,
            };
            if codec.fitted_to() != source.training_key(progress)? {
                return Err(Error::refused("codec_of_other_clips", "the codec was fitted to other training clips")
                    .at(path)
                    .hint(
                        "fit it to these with `lbva-tui data fit-codec EXPERIMENT`, or name another file in codec.path",
                    ));
            }
            Ok(Box::new(codec))
        }
        CodecConfig::WanVae { path } => {
            Err(Error::refused("codec_unavailable", "the Wan2.2 VAE cannot be run by this version")
                .at(path)
                .hint("set codec.kind to linear"))
        }
    }
}

fn load_if_there(path: &Path) -> Result<Option<LinearCodec>> {
    match LinearCodec::load(path) {
        Err(error) if error.code == "file_missing" => Ok(None),
        loaded => loaded.map(Some),
    }
}

fn fit_once(path: &Path, source: &dyn PictureSource, progress: Progress<'_>) -> Result<LinearCodec> {
    let _lock = lock::acquire(path, progress)?;
    // Whoever held the lock has probably made it.
    if let Some(codec) = load_if_there(path)? {
        return Ok(codec);
    }
    let codec = LinearCodec::fit(source, FitSettings::default(), progress)?;
    codec.save(path)?;
    Ok(codec)
}

/// Latent frames coded at a time, of a video that may be coded piece by piece.
const PIECE: usize = 8;

/// One view of `extent` pixels -> latents [48, T', h, w]. `read` gives the frames of a range as video [3, T, H, W]; it
/// is asked for a few at a time if the codec allows, so that a long episode is never in memory as f32.
///
/// # Errors
/// Those of [`LatentCodec::encode`] and of `read`.
pub fn encode_pieces(
    codec: &dyn LatentCodec,
    extent: Extent,
    read: impl Fn(Range<usize>) -> Result<Vec<f32>>,
) -> Result<Vec<f32>> {
    let latent = extent.latent()?;
    if !codec.codes_groups_alone() {
        return codec.encode(&read(0..extent.frames)?, extent);
    }
    let cells = latent.height * latent.width;
    let mut latents = vec![0.0; CHANNELS * latent.cells()];
    for first in (0..latent.frames).step_by(PIECE) {
        // A piece needs a frame of its own before its groups: the last of the piece before, whose latent is dropped.
        let (lead, end) = (usize::from(first > 0), (first + PIECE).min(latent.frames));
        let frames = (first - lead) * TIME_STRIDE..(end - 1) * TIME_STRIDE + 1;
        let piece = codec.encode(&read(frames.clone())?, Extent { frames: frames.len(), ..extent })?;
        let count = end - first + lead;
        for (channel, values) in piece.chunks_exact(count * cells).enumerate() {
            let at = (channel * latent.frames + first) * cells;
            latents[at..at + (end - first) * cells].copy_from_slice(&values[lead * cells..]);
        }
    }
    Ok(latents)
}

/// All views of a clip -> latents [48, T', V, h, w], the order in which the model takes them.
pub fn encode_clip(codec: &dyn LatentCodec, sample: &ClipSample) -> Result<Vec<f32>> {
    let extent = Extent { frames: sample.frame_count(), height: sample.height, width: sample.width };
    let latent = extent.latent()?;
    let views: Vec<Result<Vec<f32>>> =
        (0..sample.frames.len()).into_par_iter().map(|view| codec.encode(&sample.video(view), extent)).collect();
    let views = views.into_iter().collect::<Result<Vec<_>>>()?;
    let cells = latent.height * latent.width;
    let mut latents = Vec::with_capacity(CHANNELS * latent.frames * views.len() * cells);
    for channel in 0..CHANNELS {
        for frame in 0..latent.frames {
            let from = (channel * latent.frames + frame) * cells;
            for view in &views {
                latents.extend_from_slice(&view[from..from + cells]);
            }
        }
    }
    Ok(latents)
}

/// One view of latents [48, T', V, h, w] -> video [3, T, H, W], not clamped. `extent` is the latent's.
///
/// # Errors
/// `bad_extent` if the slice has another length or the view does not exist.
pub fn decode_view(
    codec: &dyn LatentCodec,
    latents: &[f32],
    extent: Extent,
    views: usize,
    view: usize,
) -> Result<Vec<f32>> {
    let cells = extent.height * extent.width;
    if view >= views || latents.len() != CHANNELS * extent.frames * views * cells {
        let what = format!("{} numbers are no latents of {views} views, or view {view} is none of them", latents.len());
        return Err(Error::refused("bad_extent", what));
    }
    let mut one = Vec::with_capacity(CHANNELS * extent.frames * cells);
    for row in latents.chunks_exact(views * cells) {
        one.extend_from_slice(&row[view * cells..(view + 1) * cells]);
    }
    codec.decode(&one, extent)
}
