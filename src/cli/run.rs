//! `demo`, `run` and `resume`: from arguments to a session.

use super::arguments::{DemoArguments, Global, Overrides, ResumeArguments, RunArguments};
use super::lines::Printer;
use super::recorded::recorded_overrides;
use super::session::{Session, this_program};
use super::{allow_writing, output};
use crate::config::{Arm, Experiment};
use crate::control::{Progress, Tail, hash_file};
use crate::runlog::{DETACHED_WORKER_VARIABLE, ExperimentRuns, Level, RunDir, RunState, now_ms};
use crate::slurm::{InsideJob, submitted_jobs};
use crate::train::stop::StopFlag;
use crate::train::worker::{self, WorkerSpec};
use crate::{Error, Exit, Result};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How often the log is looked at for new lines.
const POLL: Duration = Duration::from_millis(200);

/// Trains the shipped demo.
pub fn demo(arguments: &DemoArguments, global: &Global) -> Result<Exit> {
    let DemoArguments { arm, fresh, stop_after, overrides } = arguments;
    train(&demo_folder()?, arm, overrides, *stop_after, *fresh, &[], global)
}

/// Trains the arms of an experiment.
pub fn run(arguments: &RunArguments, global: &Global) -> Result<Exit> {
    let RunArguments { experiment, arm, fresh, stop_after, acceptance, overrides } = arguments;
    train(experiment, arm, overrides, *stop_after, *fresh, &acceptance.accept_change, global)
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
    let accepted = &arguments.acceptance.accept_change;
    train(&arguments.experiment, &arguments.arm, &overrides, None, false, accepted, global)
}

fn train(
    path: &Path,
    arms: &[String],
    overrides: &Overrides,
    stop_after: Option<u64>,
    fresh: bool,
    accepted: &[String],
    global: &Global,
) -> Result<Exit> {
    allow_writing(global, "starting a run")?;
    let experiment = Experiment::load_with(path, &overrides.texts())?;
    let session = Session::new(experiment, arms, overrides.arguments(), stop_after)?.accepting(accepted.to_vec());
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
    let tail = Tail::begin(&arm.name, run.root())?;
    if let (RunState::Finished, reason) = tail.view().state(now_ms()) {
        printer.progress(Progress::Control { arm: &arm.name, level: Level::Info, text: &reason });
        return Ok(Exit::Done);
    }
    let index = experiment.arms.iter().position(|other| other.name == arm.name).unwrap_or(0);
    let detached = std::env::var_os(DETACHED_WORKER_VARIABLE).is_some();
    let job = InsideJob::from_environment();
    let warnings = job.iter().filter_map(|job| other_program(job, &run)).collect();
    let others = experiment.arms.iter().filter(|other| other.name != arm.name);
    let others = others.map(|other| ExperimentRuns::new(&experiment.directory).run(&other.name));
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
        warnings,
        job,
        // Lossy: `args` panics on an argument that is not UTF-8, and a path may be.
        command_line: std::env::args_os().map(|argument| argument.to_string_lossy().into_owned()).collect(),
        code_version: super::code_version(),
        accepted: session.accepted.clone(),
        peers: if experiment.arms_start_equal() { others.collect() } else { Vec::new() },
    };
    let stop = StopFlag::on_signals()?;
    // A detached worker's output is its log already.
    let mut told = if detached { None } else { Some(Told { tail, printer, failed: false }) };
    let result = std::thread::scope(|scope| {
        let trainer = scope.spawn(move || worker::run(spec, stop, &mut |_| {}));
        while let (Some(told), false) = (&mut told, trainer.is_finished()) {
            told.advance();
            std::thread::sleep(POLL);
        }
        trainer.join().unwrap_or_else(|_| Err(Error::crash("the trainer panicked at the place named above")))
    });
    if let Some(told) = &mut told {
        told.advance();
    }
    result
}

/// A program that was built anew since the job was submitted may train differently; that is told, not hidden.
fn other_program(job: &InsideJob, run: &RunDir) -> Option<String> {
    let records = submitted_jobs(run).ok()?;
    let record = records.iter().rfind(|record| record.job == job.identity.id)?;
    let now = hash_file(&this_program().ok()?).ok()?;
    (now != record.program_sha256).then(|| {
        format!(
            "the program was built anew since job {} was submitted; this attempt trains with the new one",
            record.job
        )
    })
}

/// The log as it is told while the trainer works. A log that cannot be read back is no reason to leave the training,
/// nor may it take the place of the trainer's own end: it is said once, and tried again.
struct Told {
    tail: Tail,
    printer: Printer,
    failed: bool,
}

impl Told {
    fn advance(&mut self) {
        let Self { tail, printer, failed } = self;
        if let (Err(error), false) = (tail.advance(&mut |progress| printer.progress(progress)), *failed) {
            *failed = true;
            output::warn(&error);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_that_cannot_be_read_back_is_said_once_and_read_later() {
        let folder = tempfile::tempdir().unwrap();
        let tail = Tail::begin("a", folder.path()).unwrap();
        let mut told = Told { tail, printer: Printer::new(false, &["a".to_owned()]), failed: false };
        let attempts = folder.path().join("attempts");
        std::fs::write(&attempts, "no folder").unwrap();
        told.advance();
        assert!(told.failed);
        std::fs::remove_file(&attempts).unwrap();
        std::fs::create_dir_all(attempts.join("0001")).unwrap();
        std::fs::write(attempts.join("0001/events.jsonl"), "no event\n").unwrap();
        told.advance();
        assert_eq!(told.tail.view().bad_lines, 1);
    }
}
