//! `demo`, `run` and `resume`: from arguments to a session.

use super::allow_writing;
use super::arguments::{DemoArguments, Global, Overrides, ResumeArguments, RunArguments};
use super::recorded::recorded_overrides;
use super::session::Session;
use crate::config::{Arm, Experiment};
use crate::{Error, Exit, Result};
use std::path::{Path, PathBuf};

/// Trains the shipped demo.
pub fn demo(arguments: &DemoArguments, global: &Global) -> Result<Exit> {
    train(&demo_folder()?, &arguments.arm, &arguments.overrides, global)
}

/// Trains the arms of an experiment.
pub fn run(arguments: &RunArguments, global: &Global) -> Result<Exit> {
    train(&arguments.experiment, &arguments.arm, &arguments.overrides, global)
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
    train(&arguments.experiment, &arguments.arm, &overrides, global)
}

fn train(path: &Path, arms: &[String], overrides: &Overrides, global: &Global) -> Result<Exit> {
    allow_writing(global, "starting a run")?;
    let experiment = Experiment::load_with(path, &overrides.texts())?;
    Session::new(experiment, arms, overrides.arguments())?.train(global)
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

/// Trains one arm in this process.
pub fn train_here(session: &Session, arm: &Arm, _global: &Global) -> Result<Exit> {
    Err(Error::new(Exit::Unavailable, "not_built", "this build has no trainer")
        .in_place(format!("{} of {}", arm.name, session.experiment.name)))
}
