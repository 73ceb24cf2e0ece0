//! The true pictures behind the latents: what a codec is fitted to, and what predictions are compared with.

use std::ops::Range;

use super::index::Sample;
use super::load::{to_video, video_frames};
use super::{EpisodeId, EpisodeSet};
use crate::codec::{Extent, PictureSource, SPACE_STRIDE, Side};
use crate::config::LatentSource;
use crate::data::{Progress, ViewFrames};
use crate::{Error, Result};

/// Frames of a clip that a codec is fitted to: one alone and two groups of four. Clips of an episode overlap by one
/// frame, so that every group of four is in exactly one of them.
const CLIP: usize = 9;

impl EpisodeSet {
    /// Frames of the wrist view, [3, T, height, width] in [-1, 1], counted in the sample's video (every
    /// `frame_stride`-th source frame from its first; latent frame f > 0 stands for frames 4f - 3 to 4f). `None` for
    /// published latents whose video is not there or has another size than was encoded.
    ///
    /// # Errors
    /// `unknown_episode`; those of the video.
    pub fn wrist_frames(&self, id: EpisodeId, frames: Range<usize>) -> Result<Option<Vec<f32>>> {
        let sample = self.index.sample(id)?;
        match self.pictures(sample, self.wrist_view(), frames) {
            Ok((pictures, extent)) => Ok(Some(to_video(&pictures, extent))),
            Err(error)
                if self.config.latents == LatentSource::Official
                    && matches!(error.code, "no_videos" | "file_missing" | "wrong_size") =>
            {
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// # Errors
    /// `codec_without_videos`.
    pub(super) fn videos_needed(&self) -> Result<()> {
        match self.config.latents {
            LatentSource::Videos => Ok(()),
            LatentSource::Official => Err(Error::refused(
                "codec_without_videos",
                "a codec is fitted to videos, and the latents are published",
            )
            .in_place("data.latents")
            .hint("name the codec that the latents were made with in codec.kind")),
        }
    }

    fn side(&self, side: Side) -> impl Iterator<Item = &Sample> {
        let ids = match side {
            Side::Training => &self.train,
            Side::HeldOut => &self.validation,
        };
        ids.iter().filter_map(|id| self.index.sample(*id).ok())
    }
}

/// Clips in a sample.
fn clip_count(sample: &Sample) -> usize {
    (video_frames(sample.frames) - 1).div_ceil(CLIP - 1).max(1)
}

impl PictureSource for EpisodeSet {
    fn views(&self) -> &[String] {
        &self.config.views
    }

    fn wrist_view(&self) -> usize {
        self.wrist_view()
    }

    fn wrist_extent(&self) -> Extent {
        let cells = self.region(self.wrist_view()).map_or((0, 0), |region| (region.height, region.width));
        Extent { frames: CLIP, height: cells.0 * SPACE_STRIDE, width: cells.1 * SPACE_STRIDE }
    }

    fn training_key(&self, progress: Progress<'_>) -> Result<String> {
        self.training_key(progress)
    }

    fn clips(&self, side: Side) -> usize {
        self.side(side).map(clip_count).sum()
    }

    fn clip(&self, side: Side, index: usize) -> Result<Vec<ViewFrames>> {
        self.videos_needed()?;
        let mut before = index;
        for sample in self.side(side) {
            let count = clip_count(sample);
            if before >= count {
                before -= count;
                continue;
            }
            let first = before * (CLIP - 1);
            let frames = first..(first + CLIP).min(video_frames(sample.frames));
            return (0..self.config.views.len())
                .map(|view| {
                    let (pictures, extent) = self.pictures(sample, view, frames.clone())?;
                    let mut rgb = Vec::new();
                    for picture in &pictures {
                        picture.append_rgb_planes(&mut rgb);
                    }
                    Ok(ViewFrames { extent, rgb })
                })
                .collect();
        }
        Err(Error::data("unknown_clip", format!("the dataset has no clip {index}")).at(&self.config.dataset))
    }
}
