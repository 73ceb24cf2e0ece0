//! `stop`: asks a run's worker to leave with a checkpoint, or ends it at once, and says what really happened.

use super::arguments::{Global, StopArguments};
use super::{allow_writing, output};
use crate::config::Experiment;
use crate::control::WorkerRef;
use crate::control::jobs::{kill_job, stop_job};
use crate::control::local::{kill, request_stop};
use crate::runlog::{ExperimentRuns, Liveness, RunReader, RunState, now_ms};
use crate::slurm::{JobId, JobView, JobWatch, Scheduler, Slurm, judge};
use crate::{Error, Exit, Result};
use serde_json::json;
use std::time::{Duration, Instant};

const POLL: Duration = Duration::from_millis(200);
/// A stop waits for the step in progress and the checkpoint.
const STOP_PATIENCE: Duration = Duration::from_secs(120);
const KILL_PATIENCE: Duration = Duration::from_secs(10);

/// Stops each named arm, or all that are at work; the first that cannot be stopped gives the exit code, after all were
/// tried. All are asked before any is waited for.
pub fn stop(arguments: &StopArguments, global: &Global) -> Result<Exit> {
    allow_writing(global, "stopping a run")?;
    let experiment = Experiment::load(&arguments.experiment)?;
    for name in &arguments.arm {
        experiment.arm(name)?;
    }
    let mut targets = Vec::new();
    for arm in experiment.arms.iter().map(|arm| &arm.name) {
        if arguments.arm.is_empty() || arguments.arm.contains(arm) {
            targets.push(Target::open(&experiment, arm)?);
        }
    }
    if arguments.arm.is_empty() {
        targets = at_work(targets, arguments.kill)?;
    }
    let asked: Vec<_> =
        targets.into_iter().map(|mut run| (run.arm.clone(), run.ask(arguments.kill, global.json), run)).collect();
    let mut first_failure = None;
    let mut results = Vec::new();
    for (arm, asked, mut run) in asked {
        match asked.and_then(|asked| run.ended(asked)) {
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

/// Those of an experiment that there is something to stop of. What is to be killed must be named where it is not plain.
fn at_work(targets: Vec<Target>, kill: bool) -> Result<Vec<Target>> {
    let mut live = Vec::new();
    for target in targets {
        let (state, _) = target.state(target.job(&Slurm::default())?.as_ref());
        if !matches!(state, RunState::Waiting) && !is_over(state) {
            live.push(target);
        }
    }
    match &live[..] {
        [] => Err(Error::refused("not_running", "no arm is at work or in the queue: there is nothing to stop")),
        [_, _, ..] if kill => {
            let names: Vec<&str> = live.iter().map(|target| target.arm.as_str()).collect();
            Err(Error::usage("arm_missing", format!("--kill needs --arm: {} are at work", names.join(", "))))
        }
        _ => Ok(live),
    }
}

fn is_over(state: RunState) -> bool {
    matches!(state, RunState::Finished | RunState::Stopped | RunState::Failed | RunState::Preempted)
}

/// What was asked of a run.
enum Asked {
    /// It is done: the state's word, and what happened.
    Done(String, String),
    /// The worker is to end. If it saves, its job is cancelled then.
    Leaving { attempt: u32, patience: Duration, job: Option<JobId>, saves: bool },
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

    fn state(&self, job: Option<&JobView>) -> (RunState, String) {
        judge(self.reader.view(), now_ms(), job)
    }

    /// Asks the worker to end, or takes what waits out of the queue.
    fn ask(&mut self, at_once: bool, quiet: bool) -> Result<Asked> {
        let slurm = Slurm::default();
        let job = self.job(&slurm)?;
        let (state, reason) = self.state(job.as_ref());
        if let Some(job) = job.as_ref().filter(|_| state == RunState::Queued) {
            slurm.cancel(job.id)?;
            let text = format!("job {} is taken out of the queue; it was {reason}", job.id);
            return Ok(Asked::Done("stopped".to_owned(), text));
        }
        let nothing = |why: String| Error::refused("not_running", format!("{}: nothing to stop, {why}", self.arm));
        if is_over(state) {
            return Err(nothing(format!("it is {}: {reason}", state.word())));
        }
        let Some(worker) = WorkerRef::of(self.reader.view()) else { return Err(nothing(reason)) };
        let run = self.reader.run();
        let by = "lbva-tui stop";
        let done = match (at_once, worker.job) {
            (false, None) => request_stop(run, &worker, by)?,
            (true, None) => kill(run, &worker, by)?,
            (false, Some(_)) => stop_job(run, &worker, &slurm, by)?,
            (true, Some(_)) => kill_job(run, &worker, &slurm, by)?,
        };
        if !quiet {
            output::line(format!("{}: {done}", self.arm))?;
        }
        let patience = if at_once && worker.job.is_none() { KILL_PATIENCE } else { STOP_PATIENCE };
        Ok(Asked::Leaving { attempt: worker.attempt, patience, job: worker.job, saves: !at_once })
    }

    /// Waits until the run directory shows the end. Returns the state's word and the reason.
    fn ended(&mut self, asked: Asked) -> Result<(String, String)> {
        let (attempt, patience, job, saves) = match asked {
            Asked::Done(state, text) => return Ok((state, text)),
            Asked::Leaving { attempt, patience, job, saves } => (attempt, patience, job, saves),
        };
        let (state, text) = self.wait(attempt, patience, job.is_some())?;
        let Some(job) = job.filter(|_| saves) else { return Ok((state, text)) };
        // The checkpoint is written: only now, and lest Slurm starts it again.
        match Slurm::default().cancel(job) {
            Ok(()) => Ok((state, text)),
            // Another user's job: the worker does it itself a minute later, as the stop file says.
            Err(error) if error.exit == Exit::Refused => {
                Ok((state, format!("{text}; it cancels its job itself within a minute ({})", error.what)))
            }
            Err(error) => Err(error),
        }
    }

    /// The run's job, if one was submitted.
    fn job(&self, slurm: &Slurm) -> Result<Option<JobView>> {
        let runs = [self.reader.run().clone()];
        if JobWatch::recorded(&runs).is_empty() {
            return Ok(None);
        }
        let mut watch = JobWatch::default();
        let look = watch.look(slurm, &runs, Duration::ZERO);
        match &look.error {
            Some(error) => Err(Error::new(Exit::Unavailable, "slurm_unreachable", error)
                .hint("whether its job lives cannot be told; try again")),
            None => Ok(look.jobs.get(&self.arm).cloned()),
        }
    }

    /// A worker in a job stays until its job is cancelled; what it wrote is enough.
    fn wait(&mut self, attempt: u32, patience: Duration, in_job: bool) -> Result<(String, String)> {
        let asked = Instant::now();
        loop {
            self.reader.poll(now_ms())?;
            let view = self.reader.view();
            // The next task of an array may have begun before this one was seen to end.
            if let Some(newest) = view.attempt().map(|it| it.started.attempt).filter(|newest| *newest > attempt) {
                let stopped = RunState::Stopped.word().to_owned();
                return Ok((stopped, format!("attempt {attempt} is over; the run is at attempt {newest} by now")));
            }
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
