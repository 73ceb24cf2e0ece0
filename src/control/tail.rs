//! What is new in one run's log since the last look, told in order.

use super::supervisor::Progress;
use crate::Result;
use crate::runlog::{RunReader, RunView, now_ms};
use std::path::Path;

/// Follows one run from now on; what happened before is history, not news.
pub struct Tail {
    arm: String,
    reader: RunReader,
    lines_told: u64,
}

impl Tail {
    /// Reads what is there and remembers where it ends.
    pub fn begin(arm: &str, run: &Path) -> Result<Self> {
        let mut reader = RunReader::open(run);
        reader.poll(now_ms())?;
        reader.keep_lines();
        let lines_told = reader.lines_logged();
        Ok(Self { arm: arm.to_owned(), reader, lines_told })
    }

    pub fn view(&self) -> &RunView {
        self.reader.view()
    }

    /// Reads on and tells what is new: the events as they were written, then the log lines made of them.
    pub fn advance(&mut self, on_progress: &mut dyn FnMut(Progress<'_>)) -> Result<()> {
        self.reader.poll(now_ms())?;
        for json in self.reader.take_lines() {
            on_progress(Progress::Event { arm: &self.arm, json: &json });
        }
        let view = self.reader.view();
        let new = self.reader.lines_logged().saturating_sub(self.lines_told);
        self.lines_told = self.reader.lines_logged();
        let first_new = view.log.len().saturating_sub(usize::try_from(new).unwrap_or(usize::MAX));
        for line in view.log.iter().skip(first_new) {
            on_progress(Progress::Log { arm: &self.arm, line });
        }
        Ok(())
    }
}
