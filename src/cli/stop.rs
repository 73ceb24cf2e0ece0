//! `stop`: asks a run's worker to leave with a checkpoint, or ends it at once, and says what really happened.

use super::arguments::{Global, StopArguments};
use super::{allow_writing, output};
use crate::config::Experiment;
use crate::control::WorkerRef;
use crate::control::local::{kill, request_stop};
use crate::runlog::{ExperimentRuns, Liveness, RunReader, RunState, now_ms};
use crate::{Error, Exit, Result};
use serde_json::json;
use std::time::{Duration, Instant};

const POLL: Duration = Duration::from_millis(200);
/// A stop waits for the step in progress and the checkpoint.
const STOP_PATIENCE: Duration = Duration::from_secs(120);
const KILL_PATIENCE: Duration = Duration::from_secs(10);

/// Stops each named arm; the first that cannot be stopped gives the exit code, after all were tried.
pub fn stop(arguments: &StopArguments, global: &Global) -> Result<Exit> {
    allow_writing(global, "stopping a run")?;
    let experiment = Experiment::load(&arguments.experiment)?;
    for name in &arguments.arm {
        experiment.arm(name)?;
    }
    let mut first_failure = None;
    let mut results = Vec::new();
    for arm in &arguments.arm {
        let mut run = Target::open(&experiment, arm)?;
        match run.end(arguments.kill, global.json) {
            Ok((state, text)) => {
                if !global.json {
                    output::line(format!("{arm}: {text}"))?;
                }
                results.push(json!({"arm": arm, "state": state, "text": text}));
            }
            Err(error) => {
                output::warn(&error);
                results.push(json!({"arm": arm, "error": output::as_json(&error)}));
                first_failure.get_or_insert(error.exit);
            }
        }
    }
    if global.json {
        output::document(&json!({"arms": results}))?;
    }
    Ok(first_failure.unwrap_or(Exit::Done))
}

struct Target {
    arm: String,
    reader: RunReader,
}

impl Target {
    fn open(experiment: &Experiment, arm: &str) -> Result<Self> {
        let runs = ExperimentRuns::new(&experiment.directory);
        let mut reader = RunReader::open(runs.run(arm).root());
        reader.poll(now_ms())?;
        Ok(Self { arm: arm.to_owned(), reader })
    }

    /// Ends the worker and waits until the run directory shows it. Returns the state's word and the reason.
    fn end(&mut self, at_once: bool, quiet: bool) -> Result<(String, String)> {
        let view = self.reader.view();
        let (state, reason) = view.state(now_ms());
        let nothing = |why: String| Error::refused("not_running", format!("{}: nothing to stop, {why}", self.arm));
        if matches!(state, RunState::Finished | RunState::Stopped | RunState::Failed | RunState::Preempted) {
            return Err(nothing(format!("it is {}: {reason}", state.word())));
        }
        let Some(worker) = WorkerRef::of(view) else { return Err(nothing(reason)) };
        let run = self.reader.run().clone();
        let done =
            if at_once { kill(&run, &worker, "lbva-tui stop")? } else { request_stop(&run, &worker, "lbva-tui stop")? };
        if !quiet {
            output::line(format!("{}: {done}", self.arm))?;
        }
        self.wait(if at_once { KILL_PATIENCE } else { STOP_PATIENCE })
    }

    fn wait(&mut self, patience: Duration) -> Result<(String, String)> {
        let asked = Instant::now();
        loop {
            self.reader.poll(now_ms())?;
            let view = self.reader.view();
            let (state, reason) = view.state(now_ms());
            let at_work = matches!(
                state,
                RunState::Starting | RunState::Running | RunState::Stalled | RunState::Stopping | RunState::Waiting
            );
            // The outcome is written before the process is gone; a resume right after this must not find it busy.
            if !at_work && view.liveness != Liveness::Alive {
                return Ok((
                    state.word().to_owned(),
                    format!("{} at step {}: {reason}", state.word(), view.steps_done()),
                ));
            }
            if asked.elapsed() > patience {
                let what = format!("{} is still {} after {} s: {reason}", self.arm, state.word(), patience.as_secs());
                let hint = "it will stop when its step is done; --kill ends it without a checkpoint";
                return Err(Error::new(Exit::Unavailable, "still_running", what).hint(hint));
            }
            std::thread::sleep(POLL);
        }
    }
}
