//! `stop`: asks a run's worker to leave with a checkpoint, or ends it at once, and says what really happened.

use super::arguments::{Global, StopArguments};
use super::{allow_writing, output};
use crate::config::Experiment;
use crate::control::WorkerRef;
use crate::control::jobs::{kill_job, stop_job};
use crate::control::local::{kill, request_stop};
use crate::runlog::{ExperimentRuns, Liveness, RunReader, RunState, now_ms};
use crate::slurm::{JobView, JobWatch, Scheduler, Slurm, judge};
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
        let slurm = Slurm::default();
        let job = self.job(&slurm)?;
        let view = self.reader.view();
        let (state, reason) = judge(view, now_ms(), job.as_ref());
        if let Some(job) = job.as_ref().filter(|_| state == RunState::Queued) {
            slurm.cancel(job.id)?;
            return Ok(("stopped".to_owned(), format!("job {} is taken out of the queue; it was {reason}", job.id)));
        }
        let nothing = |why: String| Error::refused("not_running", format!("{}: nothing to stop, {why}", self.arm));
        if matches!(state, RunState::Finished | RunState::Stopped | RunState::Failed | RunState::Preempted) {
            return Err(nothing(format!("it is {}: {reason}", state.word())));
        }
        let Some(worker) = WorkerRef::of(view) else { return Err(nothing(reason)) };
        let run = self.reader.run().clone();
        let by = "lbva-tui stop";
        let done = match (at_once, worker.job) {
            (false, None) => request_stop(&run, &worker, by)?,
            (true, None) => kill(&run, &worker, by)?,
            (false, Some(_)) => stop_job(&run, &worker, &slurm, by)?,
            (true, Some(_)) => kill_job(&run, &worker, &slurm, by)?,
        };
        if !quiet {
            output::line(format!("{}: {done}", self.arm))?;
        }
        let patience = if at_once && worker.job.is_none() { KILL_PATIENCE } else { STOP_PATIENCE };
        let ended = self.wait(patience, worker.job.is_some())?;
        if let (Some(job), false) = (worker.job, at_once) {
            // The checkpoint is written: only now, and lest Slurm starts it again.
            slurm.cancel(job)?;
        }
        Ok(ended)
    }

    /// The run's job, if one was submitted.
    fn job(&self, slurm: &Slurm) -> Result<Option<JobView>> {
        let runs = [self.reader.run().clone()];
        if JobWatch::recorded(&runs).is_empty() {
            return Ok(None);
        }
        let mut watch = JobWatch::default();
        let look = watch.look(slurm, &runs);
        match &look.error {
            Some(error) => Err(Error::new(Exit::Unavailable, "slurm_unreachable", error)
                .hint("whether its job lives cannot be told; try again")),
            None => Ok(look.jobs.get(&self.arm).cloned()),
        }
    }

    /// A worker in a job stays until its job is cancelled; what it wrote is enough.
    fn wait(&mut self, patience: Duration, in_job: bool) -> Result<(String, String)> {
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
            if !at_work && (in_job || view.liveness != Liveness::Alive) {
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
