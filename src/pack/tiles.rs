//! Tiles of self-attention that are not all masked, counted without the groups of a plan.
//!
//! A plan of a hundred thousand episodes has a hundred million groups, and statistics only want a number. In the order of
//! a packed sequence neighbouring frame ids see overlapping intervals, so what the queries of one tile see of one copy of
//! an episode is an interval again, known from the first and the last of them.

use super::sequence::{FrameTokens, PackedEpisode, plan};
use candle_core::Result;
use std::ops::Range;

/// The same number as [`plan`]'s `computed_pairs(tile, tile)`.
///
/// # Errors
/// As [`plan`], in the degenerate cases that need one: a window of 0, frames without video or without actions.
pub fn computed_pairs(episodes: &[PackedEpisode], frame: FrameTokens, tile: usize) -> Result<u64> {
    let tile = tile.max(1);
    if frame.video() == 0 || frame.actions == 0 || episodes.iter().any(|episode| episode.window * episode.chunk == 0) {
        return Ok(plan(episodes, frame)?.computed_pairs(tile, tile));
    }
    let mut count = Count { tile, row: 0, covered: Vec::new(), tiles: 0 };
    let mut clean = 0;
    for episode in episodes {
        let copy = Copy::of(episode, frame);
        let noisy = clean + copy.tokens;
        count.rows(clean, &copy, |first, last| [clean + copy.oldest(first)..clean + copy.end(last), 0..0]);
        count.rows(noisy, &copy, |first, last| {
            let history = clean + copy.oldest(first)..clean + copy.start(last);
            [history, noisy + copy.start(first)..noisy + copy.end(last)]
        });
        clean = noisy + copy.tokens;
    }
    count.finish_row();
    Ok(count.tiles * (tile * tile) as u64)
}

/// One copy of an episode, its tokens counted from its own start.
struct Copy {
    /// Latent frames.
    chunk: usize,
    frames: usize,
    window: usize,
    frame: FrameTokens,
    tokens: usize,
}

/// The tokens of one frame id.
#[derive(Clone, Copy)]
struct Id(usize);

impl Copy {
    fn of(episode: &PackedEpisode, frame: FrameTokens) -> Self {
        let frames = episode.valid_frames;
        let chunk = episode.chunk.min(frames.max(1));
        Self { chunk, frames, window: episode.window, frame, tokens: frames * frame.both() }
    }

    /// The frame id of a token.
    fn id(&self, token: usize) -> Id {
        let index = token / (self.chunk * self.frame.both());
        let is_action = token >= self.start(Id(2 * index + 1));
        Id(2 * index + usize::from(is_action))
    }

    /// First token of an id; video of chunk k has id 2 k, its actions 2 k + 1.
    fn start(&self, id: Id) -> usize {
        let first = (id.0 / 2 * self.chunk).min(self.frames);
        let video = (id.0 % 2) * (self.frames - first).min(self.chunk) * self.frame.video();
        first * self.frame.both() + video
    }

    fn end(&self, id: Id) -> usize {
        self.start(Id(id.0 + 1))
    }

    /// First token that an id sees.
    fn oldest(&self, id: Id) -> usize {
        self.start(Id(id.0.saturating_sub(self.window)))
    }
}

/// Tiles counted row by row.
struct Count {
    tile: usize,
    /// The row of tiles that is not finished.
    row: usize,
    /// Key tiles of that row, in any order.
    covered: Vec<Range<usize>>,
    tiles: u64,
}

impl Count {
    /// A copy whose queries start at `start`; `keys` tells what those from the first to the last id see.
    fn rows(&mut self, start: usize, copy: &Copy, keys: impl Fn(Id, Id) -> [Range<usize>; 2]) {
        let end = start + copy.tokens;
        let mut query = start;
        while query < end {
            let row = query / self.tile;
            if row != self.row {
                self.finish_row();
                self.row = row;
            }
            let next = end.min((row + 1) * self.tile);
            let seen = keys(copy.id(query - start), copy.id(next - 1 - start));
            let seen = seen.into_iter().filter(|keys| !keys.is_empty());
            self.covered.extend(seen.map(|keys| keys.start / self.tile..keys.end.div_ceil(self.tile)));
            query = next;
        }
    }

    fn finish_row(&mut self) {
        self.covered.sort_unstable_by_key(|keys| keys.start);
        let mut end = 0;
        for keys in self.covered.drain(..) {
            self.tiles += keys.end.saturating_sub(end.max(keys.start)) as u64;
            end = end.max(keys.end);
        }
    }
}
