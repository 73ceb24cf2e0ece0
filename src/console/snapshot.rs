//! What the console is given to show: plain values, replaced whole whenever something on disk changed.

use crate::runlog::RunView;
use std::sync::Arc;

/// All runs of an experiment at one moment.
#[derive(Clone, Debug, Default)]
pub struct ConsoleSnapshot {
    /// The experiment's name or folder.
    pub experiment: String,
    /// What is asked, in one sentence; empty if the folder doesn't say.
    pub question: String,
    /// In the experiment's order; colours follow the position. Unchanged runs are shared with the snapshot before.
    pub runs: Vec<Arc<RunView>>,
    pub verdict: Option<VerdictView>,
    /// Validation points that a complete run has; 0 if unknown.
    pub planned_validations: u64,
    /// Unix ms when the files were read.
    pub loaded_ms: u64,
}

/// The verdict as the console shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VerdictView {
    /// One line: `undecided (6 of 16 points)`.
    pub headline: String,
    pub decision: Decision,
}

/// Which way the experiment has been decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decision {
    /// The rule can't be applied yet.
    Pending,
    Better,
    Worse,
    Undecided,
}

/// Progress of the first reading.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LoadProgress {
    pub done: usize,
    pub total: usize,
}

/// Pictures of one clip: the truth, then each arm's prediction.
#[derive(Clone, Debug)]
pub struct PictureStrip {
    pub step: u64,
    /// File stem: episode and first frame.
    pub clip: String,
    /// Which of how many clips, from 0.
    pub index: usize,
    pub count: usize,
    pub rows: Vec<PictureRow>,
}

/// One row of pictures.
#[derive(Clone, Debug)]
pub struct PictureRow {
    /// `None` for the truth, else the arm's name.
    pub arm: Option<String>,
    /// The picture, or why there is none.
    pub picture: Result<Arc<image::RgbImage>, String>,
}
