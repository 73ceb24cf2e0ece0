//! The chunk and the window that shape an episode's mask.

use crate::config::LingbotFlowConfig;
use crate::random::{Draw, Purpose};
use serde::Serialize;

/// How far an episode's frames see.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct ChunkWindow {
    /// Latent frames that see each other whole.
    pub chunk: usize,
    /// Half-chunks of history.
    pub window: usize,
}

impl ChunkWindow {
    /// Uniform in `flow.chunk` and, independently, in `flow.window`, both ends included.
    ///
    /// `key` is the number of what shares the draw, counted from the start of the run: the slot of an episode where
    /// each has its own, the micro-batch where all of it share one ([`PlannedEpisode::draw`](super::step::PlannedEpisode)).
    /// The planner weighs an episode by the same draw that the trainer masks it with.
    pub fn draw(seed: u64, key: u64, flow: &LingbotFlowConfig) -> Self {
        let mut draw = Draw::new(seed, Purpose::ChunkWindow, key, "");
        let mut within =
            |[smallest, largest]: [usize; 2]| smallest + draw.below(largest.saturating_sub(smallest).saturating_add(1));
        Self { chunk: within(flow.chunk), window: within(flow.window) }
    }
}
