//! Training arms and watching them: what `demo`, `run` and `resume` come down to, with a screen and without.

use super::arguments::{ColorWhen, Global};
use super::lines::Printer;
use super::verdict::{self, VerdictSummary};
use super::{code_version, has_screen, output, plan, run};
use crate::config::{Arm, Experiment};
use crate::console::{self, ConsoleOptions};
use crate::control::{SubmitCommand, SuperviseOptions, WorkerCommand, supervise};
use crate::runlog::{ExperimentRuns, Outcome, RunLock, check_binding};
use crate::train::worker::known_identity;
use crate::{Error, Exit, Result};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;

/// What to train.
pub struct Session {
    pub experiment: Experiment,
    /// Names of the arms, in the experiment's order.
    pub arms: Vec<String>,
    /// Arguments of `run` that made the experiment what it is, handed on to the workers.
    pub worker_arguments: Vec<String>,
    /// Stop with a checkpoint after this step: the attempts that this session begins with, not those resumed later.
    pub stop_after: Option<u64>,
    /// Fields in which the runs may differ from their record.
    pub accepted: Vec<String>,
}

impl Session {
    /// Of the named arms, or all.
    pub fn new(
        experiment: Experiment,
        arms: &[String],
        worker_arguments: Vec<String>,
        stop_after: Option<u64>,
    ) -> Result<Self> {
        for name in arms {
            experiment.arm(name)?;
        }
        let chosen = |arm: &&Arm| arms.is_empty() || arms.contains(&arm.name);
        let arms = experiment.arms.iter().filter(chosen).map(|arm| arm.name.clone()).collect();
        Ok(Self { experiment, arms, worker_arguments, stop_after, accepted: Vec::new() })
    }

    /// Lets the runs differ from their record in these fields. Workers hear of it too.
    pub fn accepting(mut self, accepted: Vec<String>) -> Self {
        let arguments = accepted.iter().flat_map(|field| ["--accept-change".to_owned(), field.clone()]);
        self.worker_arguments.extend(arguments);
        self.accepted = accepted;
        self
    }

    /// Moves the present runs of these arms aside, so that they begin anew. Refuses while one of them is at work.
    pub fn set_runs_aside(&self) -> Result<()> {
        let runs = ExperimentRuns::new(&self.experiment.directory);
        // All locks first: either every arm begins anew or none does.
        let present = self.arms.iter().filter(|arm| runs.run(arm).root().exists());
        let locks = present.map(|arm| RunLock::acquire(runs.run(arm))).collect::<Result<Vec<_>>>()?;
        for lock in locks {
            let arm = lock.run().arm();
            if let Some(aside) = runs.set_aside(&arm)? {
                output::note(format!("{arm}: the present run now lies in {}", aside.display()));
            }
        }
        Ok(())
    }

    /// Trains until every arm has ended (without a screen) or somebody leaves the console.
    ///
    /// Without a screen a single arm trains in this very process, so that a signal or a scheduler's limit meets the
    /// trainer itself; several get a process each.
    pub fn train(self, global: &Global) -> Result<Exit> {
        // Asked before anything starts, and also of runs that are complete: those would otherwise be shown as the
        // result of a configuration that they never had.
        let runs = ExperimentRuns::new(&self.experiment.directory);
        for name in &self.arms {
            let run = runs.run(name);
            let known = known_identity(&self.experiment.name, name, &code_version());
            check_binding(&run, &self.experiment.arm(name)?.recipe.to_yaml(), &known, &self.accepted)?;
        }
        if has_screen(global) {
            return self.watch(global, true, Vec::new());
        }
        match &self.arms[..] {
            [arm] => run::train_here(&self, self.experiment.arm(arm)?, global),
            _ => self.supervise(global),
        }
    }

    /// Opens the console, starting what is not at work if `start`. `others` are experiments that could have been meant.
    pub fn watch(self, global: &Global, start: bool, others: Vec<String>) -> Result<Exit> {
        let Self { experiment, arms, worker_arguments, stop_after, .. } = self;
        let worker = WorkerCommand {
            executable: this_program()?,
            experiment: experiment.directory.clone(),
            arguments: worker_arguments,
            arms: arms.clone(),
        };
        let options = ConsoleOptions {
            title: experiment.name.clone(),
            others,
            question: experiment.question.clone(),
            arms,
            planned_validations: verdict::planned_points(&experiment),
            verdict: Some(verdict::source(experiment.clone())),
            plan: Some(plan::source(experiment.clone())),
            submit: experiment.slurm.clone().map(|settings| SubmitCommand {
                worker: worker.clone(),
                name: experiment.name.clone(),
                settings,
            }),
            worker: Some(worker),
            start_missing_arms: start,
            stop_after,
            read_only: global.read_only,
            theme: theme(global),
        };
        let code = console::run(&experiment.directory, options)?;
        Ok(if code == Exit::Done.code() { Exit::Done } else { Exit::Stopped })
    }

    fn supervise(self, global: &Global) -> Result<Exit> {
        let options = SuperviseOptions {
            executable: this_program()?,
            worker_arguments: self.worker_arguments,
            stop_after: self.stop_after,
            stop: stop_on_signals()?,
        };
        let mut printer = Printer::new(global.json, &self.arms);
        let outcome =
            supervise(&self.experiment.directory, &self.arms, &options, &mut |progress| printer.progress(progress))?;
        printer.outcomes(&outcome)?;
        let failed = outcome.arms.iter().filter(|arm| arm.outcome.outcome == Outcome::Failed);
        for arm in failed.clone() {
            let exit = exit_of(arm.outcome.exit_code);
            output::warn(&Error::new(exit, "arm_failed", &arm.outcome.reason).in_place(&arm.arm));
        }
        if failed.count() > 0 {
            return Ok(exit_of(outcome.exit_code()));
        }
        if self.arms.contains(&self.experiment.rule.baseline) && self.arms.contains(&self.experiment.rule.candidate) {
            // How the arms ended is told already; a verdict that cannot be formed must not change the exit code.
            match VerdictSummary::form(&self.experiment) {
                Ok(summary) => printer.verdict(&summary)?,
                Err(error) => super::output::warn(&error),
            }
        }
        Ok(exit_of(outcome.exit_code()))
    }
}

/// The worker's code, as an [`Exit`]; an unknown one is a crash.
fn exit_of(code: u8) -> Exit {
    use Exit::{BadData, Crash, Disk, Done, Refused, Stopped, Unavailable, Usage};
    let known = [Done, Usage, BadData, Unavailable, Crash, Disk, Stopped, Refused];
    known.into_iter().find(|exit| exit.code() == code).unwrap_or(Crash)
}

/// The file of this program, to start workers with.
pub fn this_program() -> Result<PathBuf> {
    std::env::current_exe().map_err(|error| Error::crash(format!("this program's own file cannot be found: {error}")))
}

/// 0 until SIGTERM, SIGINT, SIGHUP or SIGUSR2 arrives, then its number.
fn stop_on_signals() -> Result<Arc<AtomicUsize>> {
    use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR2};
    let stop = Arc::new(AtomicUsize::new(0));
    for signal in [SIGTERM, SIGINT, SIGHUP, SIGUSR2] {
        signal_hook::flag::register_usize(signal, Arc::clone(&stop), signal.unsigned_abs() as usize)
            .map_err(|error| Error::crash(format!("signals cannot be watched: {error}")))?;
    }
    Ok(stop)
}

fn theme(global: &Global) -> console::theme::ThemeChoice {
    let look = global.look;
    let light = if look.light { Some(true) } else { look.dark.then_some(false) };
    let color = match look.color {
        ColorWhen::Auto => None,
        ColorWhen::Always => Some(true),
        ColorWhen::Never => Some(false),
    };
    console::theme::ThemeChoice { light, ascii: look.ascii.then_some(true), color }
}
