//! Several workers without a screen: starts one an arm, tells what their run logs say, waits for all.

use super::controller::{Controller, Report, Request};
use super::local::{LocalDriver, WorkerCommand, WorkerExit, open_start_log};
use super::machine::WorkerRef;
use super::tail::Tail;
use crate::runlog::{ExperimentRuns, Level, LogLine, Outcome, OutcomeView, RunState, RunView, now_ms};
use crate::{Exit, Result};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

const POLL: Duration = Duration::from_millis(200);

/// How to supervise.
#[derive(Clone, Debug)]
pub struct SuperviseOptions {
    /// This program.
    pub executable: PathBuf,
    /// Passed on to each worker: `--steps 20`.
    pub worker_arguments: Vec<String>,
    /// Each worker leaves with a checkpoint after this step.
    pub stop_after: Option<u64>,
    /// 0 until a signal asks to stop, then its number; as `signal_hook::flag::register_usize` sets it.
    pub stop: Arc<AtomicUsize>,
}

/// Something to print.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Progress<'a> {
    /// A line of the run's log, for people.
    Log { arm: &'a str, line: &'a LogLine },
    /// An event as the worker wrote it, one JSON object, for machines.
    Event { arm: &'a str, json: &'a str },
    /// What run control did.
    Control { arm: &'a str, level: Level, text: &'a str },
}

/// How one arm ended.
#[derive(Clone, Debug, PartialEq)]
pub struct ArmOutcome {
    pub arm: String,
    pub outcome: OutcomeView,
}

/// How all arms ended, in the order asked for.
#[derive(Clone, Debug, PartialEq)]
pub struct SupervisorOutcome {
    pub arms: Vec<ArmOutcome>,
}

impl SupervisorOutcome {
    /// 0 if all are finished; else that of the first that failed; else 75 (stopped, to be resumed).
    pub fn exit_code(&self) -> u8 {
        let of = |outcome: Outcome| self.arms.iter().find(|arm| arm.outcome.outcome == outcome);
        match (of(Outcome::Failed), of(Outcome::Stopped)) {
            (Some(failed), _) => failed.outcome.exit_code,
            (None, Some(_)) => Exit::Stopped.code(),
            (None, None) => Exit::Done.code(),
        }
    }
}

/// Trains `arms` side by side, each in its own worker process, until all have ended.
///
/// An arm that is finished already counts as finished and starts nothing. A stop signal is passed on as a stop request to every worker, once its attempt is open. If this process is killed,
/// the workers go on: they are detached. Errors are of reading run directories; what happens to an arm is its outcome.
pub fn supervise(
    experiment: &Path,
    arms: &[String],
    options: &SuperviseOptions,
    on_progress: &mut dyn FnMut(Progress<'_>),
) -> Result<SupervisorOutcome> {
    let command = WorkerCommand {
        executable: options.executable.clone(),
        experiment: experiment.to_owned(),
        arguments: options.worker_arguments.clone(),
        arms: arms.to_vec(),
    };
    let runs = ExperimentRuns::new(experiment);
    let mut controller = Controller::new(LocalDriver::new(command, "supervisor"), false);
    let mut followed = Vec::new();
    for arm in arms {
        followed.push(Followed::begin(arm, &runs, &mut controller, options.stop_after)?);
    }
    loop {
        let exits = controller.reap();
        let signal = options.stop.load(Ordering::Relaxed);
        for run in &mut followed {
            run.advance(&mut controller, signal, on_progress)?;
        }
        controller.tick(&exits);
        let mut ended: BTreeMap<String, WorkerExit> = exits.into_iter().map(|exit| (exit.arm.clone(), exit)).collect();
        for run in &mut followed {
            if let Some(exit) = ended.remove(&run.arm) {
                run.outcome = Some(conclude(&exit, run.tail.view(), run.attempts_before));
            }
        }
        for Report { arm, level, text } in controller.take_reports() {
            on_progress(Progress::Control { arm: &arm, level, text: &text });
            // Without a worker there will be no exit to wait for.
            let started = controller.own_workers().any(|(own, _)| own == arm);
            let run = followed.iter_mut().find(|run| run.arm == arm);
            if let Some(run) = run.filter(|run| run.outcome.is_none() && !started) {
                // Run control warns when it refuses, and reports an error when it tried in vain.
                let exit = if level == Level::Warning { Exit::Refused } else { Exit::Crash };
                run.outcome = Some(failed(exit.code(), 0, text));
            }
        }
        if followed.iter().all(|run| run.outcome.is_some()) {
            let outcome = |run: Followed| run.outcome.map(|outcome| ArmOutcome { arm: run.arm, outcome });
            return Ok(SupervisorOutcome { arms: followed.into_iter().filter_map(outcome).collect() });
        }
        std::thread::sleep(POLL);
    }
}

/// One arm on its way.
struct Followed {
    arm: String,
    tail: Tail,
    attempts_before: usize,
    stop_asked: bool,
    outcome: Option<OutcomeView>,
}

impl Followed {
    fn begin(arm: &str, runs: &ExperimentRuns, controller: &mut Controller, stop_after: Option<u64>) -> Result<Self> {
        let tail = Tail::begin(arm, runs.run(arm).root())?;
        let attempts_before = tail.view().attempts.len();
        let mut followed = Self { arm: arm.to_owned(), tail, attempts_before, stop_asked: false, outcome: None };
        // A folder that cannot be written is known before any process is started, with the exit code of its cause.
        let view = followed.tail.view();
        match (open_start_log(&runs.run(arm)), &view.outcome) {
            (Err(error), _) => followed.outcome = Some(failed(error.exit.code(), 0, error.to_string())),
            // Asking for a run that is complete is no failure, and nothing is trained twice.
            (Ok(_), Some(outcome)) if view.state(now_ms()).0 == RunState::Finished => {
                followed.outcome = Some(outcome.clone());
            }
            (Ok(_), _) => {
                controller.view_changed(view, now_ms());
                controller.ask(arm, Request::Start { stop_after });
            }
        }
        Ok(followed)
    }

    /// Reads what is new, tells it, and passes a stop signal on.
    fn advance(
        &mut self,
        controller: &mut Controller,
        signal: usize,
        on_progress: &mut dyn FnMut(Progress<'_>),
    ) -> Result<()> {
        if self.outcome.is_some() {
            return Ok(());
        }
        self.tail.advance(on_progress)?;
        let view = self.tail.view();
        controller.view_changed(view, now_ms());
        if signal != 0
            && !self.stop_asked
            && view.attempts.len() > self.attempts_before
            && let Some(worker) = WorkerRef::of(view)
        {
            self.stop_asked = true;
            controller.ask(&self.arm, Request::Stop(worker));
        }
        Ok(())
    }
}

/// The exit status says how the process ended; the run directory must agree before anything counts as a success.
fn conclude(exit: &WorkerExit, view: &RunView, attempts_before: usize) -> OutcomeView {
    let own = view.attempts.len() > attempts_before;
    let recorded = view.outcome.as_ref().filter(|_| own);
    let step = if own { view.steps_done() } else { 0 };
    let words = || format!("worker {} {}", exit.pid, exit.words());
    match (exit.status.code(), recorded) {
        (Some(code), Some(record))
            if i32::from(record.exit_code) == code && (code == 0) == (record.outcome == Outcome::Finished) =>
        {
            record.clone()
        }
        (Some(0), _) => failed(Exit::Crash.code(), step, format!("{} without a success record", words())),
        (Some(code), _) => {
            let code = u8::try_from(code).ok().filter(|&code| code < 128 && code != Exit::Stopped.code());
            failed(code.unwrap_or(Exit::Crash.code()), step, words())
        }
        (None, _) => failed(Exit::Crash.code(), step, format!("{} at step {step}", words())),
    }
}

fn failed(exit_code: u8, step: u64, reason: String) -> OutcomeView {
    OutcomeView { outcome: Outcome::Failed, reason, exit_code, step }
}
