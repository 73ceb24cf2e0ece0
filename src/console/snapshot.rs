//! What the console is given to show: plain values, replaced whole whenever something on disk changed.

use crate::runlog::RunView;
use crate::slurm::Look;
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
    /// What Slurm told last of the runs' jobs.
    pub slurm: Look,
    /// The experiment says how to ask Slurm for a job.
    pub submits: bool,
    /// Validation points that a complete run has; 0 if unknown.
    pub planned_validations: u64,
    /// Unix ms when the files were read.
    pub loaded_ms: u64,
}

/// One run as it was last shown, and the copy that was shown before it.
///
/// A live run of 200,000 steps is 6 MB, and looked at five times a second. A snapshot must not change while the screen
/// holds it, so a changed run is copied; the copy goes into the memory of the one shown before, which the screen has
/// let go by then, so that no fresh pages have to be had from the system.
#[derive(Debug, Default)]
pub struct ShownRun {
    current: Arc<RunView>,
    before: Arc<RunView>,
}

impl ShownRun {
    /// Shows `view` from now on.
    pub fn replace(&mut self, view: &RunView) {
        std::mem::swap(&mut self.current, &mut self.before);
        match Arc::get_mut(&mut self.current) {
            Some(free) => free.clone_from(view),
            None => self.current = Arc::new(view.clone()),
        }
    }

    pub fn current(&self) -> &Arc<RunView> {
        &self.current
    }
}

/// The verdict as the console shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VerdictView {
    /// One line: `undecided (6 of 16 points)`.
    pub headline: String,
    /// What the headline does not say of its own reach; empty if there is nothing.
    pub note: String,
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

#[cfg(test)]
mod tests {
    use super::*;

    fn view(steps: u64) -> RunView {
        let mut view = RunView { arm: format!("of {steps}"), ..RunView::default() };
        view.series.step = (0..steps).collect();
        view
    }

    #[test]
    fn what_the_screen_holds_never_changes_and_what_it_let_go_is_used_again() {
        let mut shown = ShownRun::default();
        shown.replace(&view(100));
        let held = Arc::clone(shown.current());
        shown.replace(&view(50));
        shown.replace(&view(60));
        assert_eq!((&*held, &**shown.current()), (&view(100), &view(60)));
        drop(held);
        let memory = shown.current().series.step.as_ptr();
        shown.replace(&view(50));
        shown.replace(&view(55));
        assert_eq!(**shown.current(), view(55));
        assert_eq!(shown.current().series.step.as_ptr(), memory, "the copy shown before gave its memory");
    }
}
