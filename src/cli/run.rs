//! `demo`, `run` and `resume`: from arguments to a session.

use super::allow_writing;
use super::arguments::{DemoArguments, Global, Overrides, ResumeArguments, RunArguments};
use super::lines::Printer;
use super::recorded::recorded_overrides;
use super::session::Session;
use crate::config::{Arm, Experiment};
use crate::control::{Progress, Tail};
use crate::runlog::{DETACHED_WORKER_VARIABLE, ExperimentRuns, Level, RunState, now_ms};
use crate::train::stop::StopFlag;
use crate::train::worker::{self, WorkerSpec};
use crate::{Error, Exit, Result};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How often the log is looked at for new lines.
const POLL: Duration = Duration::from_millis(200);

/// Trains the shipped demo.
pub fn demo(arguments: &DemoArguments, global: &Global) -> Result<Exit> {
    train(&demo_folder()?, &arguments.arm, &arguments.overrides, arguments.stop_after, arguments.fresh, global)
}

/// Trains the arms of an experiment.
pub fn run(arguments: &RunArguments, global: &Global) -> Result<Exit> {
    train(&arguments.experiment, &arguments.arm, &arguments.overrides, arguments.stop_after, arguments.fresh, global)
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
    train(&arguments.experiment, &arguments.arm, &overrides, None, false, global)
}

fn train(
    path: &Path,
    arms: &[String],
    overrides: &Overrides,
    stop_after: Option<u64>,
    fresh: bool,
    global: &Global,
) -> Result<Exit> {
    allow_writing(global, "starting a run")?;
    let experiment = Experiment::load_with(path, &overrides.texts())?;
    let mut worker_arguments = overrides.arguments();
    if let Some(step) = stop_after {
        worker_arguments.extend(["--stop-after".to_owned(), step.to_string()]);
    }
    let session = Session::new(experiment, arms, worker_arguments, stop_after)?;
    if fresh {
        session.set_runs_aside()?;
    }
    session.train(global)
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

/// Trains one arm in this process, printing what its run log says.
pub fn train_here(session: &Session, arm: &Arm, global: &Global) -> Result<Exit> {
    let experiment = &session.experiment;
    let run = ExperimentRuns::new(&experiment.directory).run(&arm.name);
    let names = [arm.name.clone()];
    let mut printer = Printer::new(global.json, &names);
    let mut tail = Tail::begin(&arm.name, run.root())?;
    if let (RunState::Finished, reason) = tail.view().state(now_ms()) {
        printer.progress(Progress::Control { arm: &arm.name, level: Level::Info, text: &reason });
        return Ok(Exit::Done);
    }
    let index = experiment.arms.iter().position(|other| other.name == arm.name).unwrap_or(0);
    let detached = std::env::var_os(DETACHED_WORKER_VARIABLE).is_some();
    let spec = WorkerSpec {
        experiment: experiment.name.clone(),
        arm: arm.name.clone(),
        arm_index: (index, experiment.arms.len()),
        recipe_text: arm.recipe.to_yaml(),
        recipe: arm.recipe.clone(),
        cache: ExperimentRuns::new(&experiment.directory).root().join(".cache"),
        run,
        stop_after: session.stop_after,
        detached,
        // Lossy: `args` panics on an argument that is not UTF-8, and a path may be.
        command_line: std::env::args_os().map(|argument| argument.to_string_lossy().into_owned()).collect(),
        code_version: format!("{} {}", env!("CARGO_PKG_VERSION"), super::COMMIT),
    };
    let stop = StopFlag::on_signals()?;
    let result = std::thread::scope(|scope| {
        let trainer = scope.spawn(move || worker::run(spec, stop, &mut |_| {}));
        // A detached worker's output is its log already.
        while !trainer.is_finished() && !detached {
            tail.advance(&mut |progress| printer.progress(progress))?;
            std::thread::sleep(POLL);
        }
        trainer.join().unwrap_or_else(|_| Err(Error::crash("the trainer panicked at the place named above")))
    });
    if !detached {
        tail.advance(&mut |progress| printer.progress(progress))?;
    }
    result
}
