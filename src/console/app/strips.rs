//! Which pictures the picture panel wants: the selected arm's newest validation, one clip, every drawn arm that has it.

use super::{App, Effect};
use std::path::PathBuf;

/// A question to the picture loader.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StripRequest {
    pub step: u64,
    /// Which clip of the point, from 0.
    pub clip: usize,
    /// Arms in the order shown: name and run directory.
    pub arms: Vec<(String, PathBuf)>,
}

impl App {
    /// The request that the screen needs and hasn't asked yet.
    pub(super) fn wanted_strip(&mut self) -> Option<Effect> {
        let step = self.selected_run()?.validations.last()?.event.step;
        let arms = self
            .arms()
            .into_iter()
            .filter(|arm| arm.drawn || arm.selected)
            .map(|arm| (arm.run.arm.clone(), arm.run.directory.clone(), self.validated(arm.run, step)))
            .filter(|(_, _, validated)| *validated)
            .map(|(arm, directory, _)| (arm, directory))
            .collect();
        let request = StripRequest { step, clip: self.clip, arms };
        if self.requested.as_ref() == Some(&request) {
            return None;
        }
        self.requested = Some(request.clone());
        Some(Effect::LoadStrip(request))
    }

    fn validated(&self, run: &crate::runlog::RunView, step: u64) -> bool {
        run.validations.iter().any(|point| point.event.step == step)
    }

    pub(super) fn next_clip(&mut self) {
        let count = match &self.strip {
            Some(Ok(strip)) => strip.count,
            _ => 0,
        };
        if self.clip + 1 < count {
            self.clip += 1;
        }
    }
}
