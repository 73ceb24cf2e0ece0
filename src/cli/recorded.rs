//! The overrides that a run was started with, from the command line that its newest attempt recorded.

use super::arguments::{Arguments, Command, Overrides};
use crate::Result;
use crate::runlog::{AttemptRecord, ExperimentRuns};
use clap::Parser;
use std::path::Path;

/// The overrides of the newest attempt of any of these arms; `None` if no attempt has started. Arms of one session
/// share their overrides; if these do not, the arm that differs is refused by its own identity check.
pub fn recorded_overrides(experiment: &Path, arms: &[String]) -> Result<Option<Overrides>> {
    let runs = ExperimentRuns::new(experiment);
    let mut newest: Option<AttemptRecord> = None;
    for arm in arms {
        let run = runs.run(arm);
        // An attempt killed before its record was whole says nothing; the one before it does.
        let readable = |number: &u32| -> Option<AttemptRecord> {
            serde_json::from_slice(&std::fs::read(run.attempt(*number).record()).ok()?).ok()
        };
        let Some(record) = run.attempt_numbers()?.iter().rev().find_map(readable) else { continue };
        if newest.as_ref().is_none_or(|other| other.started_ms < record.started_ms) {
            newest = Some(record);
        }
    }
    Ok(newest.map(|record| overrides_of(&record.command_line)))
}

/// A command line that is none of ours (a test's, an older version's) has no overrides that could be repeated.
fn overrides_of(command_line: &[String]) -> Overrides {
    match Arguments::try_parse_from(command_line).ok().and_then(|arguments| arguments.command) {
        Some(Command::Run(run)) => run.overrides,
        Some(Command::Demo(demo)) => demo.overrides,
        _ => Overrides::default(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overrides_come_back_from_a_recorded_command_line() {
        let line = ["/x/lbva-tui", "--no-ui", "run", "e", "--arm", "a", "--steps", "20", "--set", "train.seed=3"];
        let overrides = overrides_of(&line.map(str::to_owned));
        assert_eq!(overrides.texts(), ["train.seed=3", "train.steps=20"]);
        assert_eq!(overrides.arguments(), ["--set", "train.seed=3", "--steps", "20"]);
        assert_eq!(overrides_of(&["something", "else"].map(str::to_owned)).texts(), Vec::<String>::new());
    }
}
