//! What a codec needs of a dataset, whichever family reads it: clips of pictures to be fitted to and measured on, and a
//! key that says which ones they are.

use super::Extent;
use crate::Result;
use crate::data::{ClipId, Dataset, Progress, ViewFrames};

/// The two sides of a dataset's split.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    Training,
    HeldOut,
}

/// A dataset as a codec sees it.
pub trait PictureSource: Sync {
    /// Names of the views, in the order of [`PictureSource::clip`].
    fn views(&self) -> &[String];

    /// Place of the wrist view among the views.
    fn wrist_view(&self) -> usize;

    /// Extent in pixels of a clip of the wrist view; some clips may have fewer frames.
    fn wrist_extent(&self) -> Extent;

    /// SHA-256 over the training clips and all that their pictures depend on. Whatever was fitted to the training
    /// pictures of one source is fitted to those of another exactly if both have the same key.
    ///
    /// # Errors
    /// Those of reading the videos; an error of `progress`.
    fn training_key(&self, progress: Progress<'_>) -> Result<String>;

    /// Number of clips on a side.
    fn clips(&self, side: Side) -> usize;

    /// The frames of one clip, a view after the other; 1 + 4k of each.
    ///
    /// # Errors
    /// Those of reading the videos; `unknown_clip`.
    fn clip(&self, side: Side, index: usize) -> Result<Vec<ViewFrames>>;
}

impl PictureSource for Dataset {
    fn views(&self) -> &[String] {
        &self.config().views
    }

    fn wrist_view(&self) -> usize {
        self.wrist_view()
    }

    fn wrist_extent(&self) -> Extent {
        let (height, width) = self.picture_size();
        Extent { frames: self.config().frames, height, width }
    }

    fn training_key(&self, progress: Progress<'_>) -> Result<String> {
        self.training_key(progress)
    }

    fn clips(&self, side: Side) -> usize {
        clips(self, side).len()
    }

    fn clip(&self, side: Side, index: usize) -> Result<Vec<ViewFrames>> {
        let clip = clips(self, side).get(index).ok_or_else(|| self.unknown_clip())?;
        let extent = self.wrist_extent();
        Ok(self.load(clip)?.frames.into_iter().map(|rgb| ViewFrames { extent, rgb }).collect())
    }
}

fn clips(dataset: &Dataset, side: Side) -> &[ClipId] {
    match side {
        Side::Training => dataset.train(),
        Side::HeldOut => dataset.validation(),
    }
}
