//! An episode's length in latent frames and in tokens, from its metadata alone: no video is opened to plan a run.

use super::sequence::FrameTokens;
use crate::{Error, Result};

/// Video frames behind a latent frame, but for the first, which is one video frame alone.
const VIDEO_FRAMES: usize = 4;

/// Latent frames F = (n - 1) div 4 + 1 of a sample that keeps every `frame_stride`-th of its `rows` source frames,
/// where n = (rows - 1) div `frame_stride` + 1 video frames remain.
///
/// Everything that sorts, pads or packs by length asks here. A prefix of latent frames (a human video shown before the
/// episode) is to be added to this number: it goes through the trunk like the episode's own frames, so it belongs to
/// the key of a bucket and to the tokens of a budget.
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

/// Tokens of `frames` latent frames in the trunk: each is there noisy and clean.
pub fn trunk_tokens(frames: usize, frame: FrameTokens) -> usize {
    frames.saturating_mul(2).saturating_mul(frame.both())
}

/// The smallest multiple of `multiple` that is at least `value`. A multiple of 0 is refused before it comes here, and
/// rounds nothing.
pub fn round_up(value: usize, multiple: usize) -> usize {
    match multiple {
        0 => value,
        _ => value.div_ceil(multiple).saturating_mul(multiple),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_latent_frame_is_one_video_frame_and_then_four_each() {
        let frames = |rows, stride| latent_frames(rows, stride).unwrap();
        assert_eq!([1, 2, 4, 5, 8, 9, 409, 1445].map(|rows| frames(rows, 1)), [1, 1, 1, 2, 2, 3, 103, 362]);
        // Of rows 0..=16 every 4th are 0, 4, 8, 12, 16: five video frames, two latent ones; one row less is one less.
        assert_eq!([1, 4, 5, 16, 17, 32, 33].map(|rows| frames(rows, 4)), [1, 1, 1, 1, 2, 2, 3]);
    }

    #[test]
    fn no_row_is_an_error_and_not_a_length() {
        assert_eq!(latent_frames(0, 4).unwrap_err().code, "empty_episode");
        assert_eq!(latent_frames(5, 0).unwrap_err().code, "frame_stride_zero");
    }

    #[test]
    fn both_copies_go_through_the_trunk() {
        // RoboTwin, 10 latent frames: 2 x 10 x (12 x 10 + 16) = 2,720.
        assert_eq!(trunk_tokens(10, FrameTokens { grid: [12, 10], actions: 16 }), 2_720);
        assert_eq!([(0, 8), (1, 8), (8, 8), (9, 8), (9, 1)].map(|(v, m)| round_up(v, m)), [0, 8, 8, 16, 9]);
    }
}
