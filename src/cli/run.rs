//! `demo`, `run` and `resume`: from arguments to a session.

use super::allow_writing;
use super::arguments::{DemoArguments, Global, Overrides, ResumeArguments, RunArguments};
use super::lines::{Follower, Printer};
use super::recorded::recorded_overrides;
use super::session::Session;
use crate::config::{Arm, Experiment};
use crate::runlog::{DETACHED_WORKER_VARIABLE, ExperimentRuns};
use crate::train::stop::StopFlag;
use crate::train::worker::{self, WorkerSpec};
use crate::{Error, Exit, Result};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

const TELL_INTERVAL: Duration = Duration::from_millis(100);

/// Trains the shipped demo.
pub fn demo(arguments: &DemoArguments, global: &Global) -> Result<Exit> {
    train(&demo_folder()?, &arguments.arm, &arguments.overrides, None, global)
}

/// Trains the arms of an experiment.
pub fn run(arguments: &RunArguments, global: &Global) -> Result<Exit> {
    train(&arguments.experiment, &arguments.arm, &arguments.overrides, arguments.stop_after, global)
}

/// Continues arms from their last complete checkpoint, with the overrides that they were started with: without them
/// the configuration would be another, and the worker would refuse.
pub fn resume(arguments: &ResumeArguments, global: &Global) -> Result<Exit> {
    allow_writing(global, "resuming a run")?;
    let experiment = Experiment::load(&arguments.experiment)?;
    for name in &arguments.arm {
        experiment.arm(name)?;
    }
    let overrides = recorded_overrides(&experiment.directory, &arguments.arm)?.ok_or_else(|| {
        Error::refused("never_started", "there is nothing to resume: no attempt has started")
            .in_place(arguments.arm.join(", "))
            .hint(format!("start it: lbva-tui run {}", arguments.experiment.display()))
    })?;
    train(&arguments.experiment, &arguments.arm, &overrides, None, global)
}

fn train(
    path: &Path,
    arms: &[String],
    overrides: &Overrides,
    stop_after: Option<u64>,
    global: &Global,
) -> Result<Exit> {
    allow_writing(global, "starting a run")?;
    let experiment = Experiment::load_with(path, &overrides.texts())?;
    let session = Session::new(experiment, arms, overrides.clone())?;
    Session { stop_after, ..session }.train(global)
}

/// `experiments/demo` in the current folder or the nearest one above it, so that it works anywhere in the repository.
fn demo_folder() -> Result<PathBuf> {
    let current =
        std::env::current_dir().map_err(|error| Error::crash(format!("the current folder cannot be read: {error}")))?;
    let demo = Path::new("experiments/demo");
    let found = current.ancestors().map(|folder| folder.join(demo)).find(|folder| folder.is_dir());
    found.map(|folder| folder.strip_prefix(&current).map_or(folder.clone(), Path::to_owned)).ok_or_else(|| {
        Error::refused("no_experiment", "experiments/demo is not here")
            .at(&current)
            .hint("go to the repository, or name an experiment: lbva-tui run EXPERIMENT")
    })
}

/// Trains one arm in this process, telling its progress unless somebody else reads its run directory.
pub fn train_here(session: &Session, arm: &Arm, global: &Global) -> Result<Exit> {
    let experiment = &session.experiment;
    let place = experiment.arms.iter().position(|other| other.name == arm.name).unwrap_or_default();
    let run = ExperimentRuns::new(&experiment.directory).run(&arm.name);
    let spec = WorkerSpec {
        experiment: experiment.name.clone(),
        arm: arm.name.clone(),
        arm_index: (place, experiment.arms.len()),
        recipe: arm.recipe.clone(),
        recipe_text: arm.recipe.to_yaml(),
        run: run.clone(),
        // A name with a dot is no run.
        cache: experiment.runs_directory().join(".cache"),
        stop_after: session.stop_after,
        detached: std::env::var_os(DETACHED_WORKER_VARIABLE).is_some(),
        command_line: std::env::args().collect(),
        code_version: format!("{} ({})", env!("CARGO_PKG_VERSION"), super::COMMIT),
    };
    let stop = StopFlag::on_signals()?;
    if spec.detached {
        return worker::run(spec, stop, &mut |_| ());
    }
    let mut printer = Printer::new(global.json, &session.arms);
    let mut follower = Follower::new(&arm.name, &run)?;
    let mut told = Instant::now();
    let exit = worker::run(spec, stop, &mut |_| {
        // The log is the only account of a run; telling it must not slow the run down, nor end it.
        if told.elapsed() >= TELL_INTERVAL {
            told = Instant::now();
            let _ = follower.tell(&mut printer);
        }
    });
    follower.tell(&mut printer)?;
    exit
}
