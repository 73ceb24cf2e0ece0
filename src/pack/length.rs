//! An episode's length in latent frames, from its metadata alone: no video is opened to plan a run.

use crate::{Error, Result};

/// Video frames behind a latent frame, but for the first, which is one video frame alone.
const VIDEO_FRAMES: usize = 4;

/// Latent frames F = (n - 1) div 4 + 1 of a sample that keeps every `frame_stride`-th of its `rows` source frames,
/// where n = (rows - 1) div `frame_stride` + 1 video frames remain.
///
/// # Errors
/// `empty_episode` without a row; `frame_stride_zero`.
pub fn latent_frames(rows: usize, frame_stride: usize) -> Result<usize> {
    if frame_stride == 0 {
        return Err(Error::refused("frame_stride_zero", "every 0th frame is no frame").in_place("data.frame_stride"));
    }
    let last_row = rows.checked_sub(1).ok_or_else(|| {
        Error::data("empty_episode", "the sample has no frame, and a latent frame needs one")
            .hint("leave the episode out, or correct its length in meta/episodes.jsonl")
    })?;
    Ok(last_row / frame_stride / VIDEO_FRAMES + 1)
}
