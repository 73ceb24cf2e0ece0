//! The thread that knows the runs: reads their directories as they change, drives run control, and sends what it finds
//! as messages. It shares nothing with the screen; unchanged runs pass by reference count.

use super::app::{Msg, Target};
use super::run::ConsoleOptions;
use super::snapshot::{ConsoleSnapshot, LoadProgress, ShownRun};
use super::status;
use crate::control::{Controller, LocalDriver, Request, SlurmDriver, WorkerRef};
use crate::runlog::{ExperimentRuns, Level, RunReader, RunState, RunView, Watcher, now_ms};
use crate::slurm::{JobId, Look, Slurm, judge};
use crossbeam_channel::{Receiver, Sender};
use rayon::prelude::*;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Runs are looked at this often even if nothing reported a change: states also change by silence.
const LOOK: Duration = Duration::from_secs(1);
/// Children and time-outs of run control are looked at this often.
const CONTROL: Duration = Duration::from_millis(250);
/// Two snapshots are at least this far apart.
const PACE: Duration = Duration::from_millis(200);

/// What the screen asks of the feed.
#[derive(Clone, Debug)]
pub enum Command {
    Stop(Target),
    Kill(Target),
    Resume { arm: String },
    Submit { arm: String },
    Cancel { arm: String, job: JobId },
    Refresh,
}

/// Reads, watches and controls until the screen is gone.
pub fn run(
    experiment: ExperimentRuns,
    mut options: ConsoleOptions,
    commands: &Receiver<Command>,
    messages: &Sender<Msg>,
) {
    let submits = options.submit.is_some();
    let slurm = options.submit.take().and_then(|submit| {
        SlurmDriver::start(submit, Arc::new(Slurm::default()), "console")
            .map_err(|error| messages.send(Msg::EffectResult { ok: false, text: error.to_string() }))
            .ok()
    });
    let mut feed = Feed {
        submits,
        shown: Look::default(),
        title: options.title.clone(),
        question: options.question.clone(),
        planned_validations: options.planned_validations,
        controller: options.worker.take().map(|worker| {
            let by = "console";
            Controller::new(LocalDriver::new(worker, by), options.read_only).with_slurm(slurm)
        }),
        verdict: options.verdict.take(),
        judged: 0,
        readers: Vec::new(),
        runs: Vec::new(),
        failed: Vec::new(),
        last_verdict: None,
        experiment,
        arms: options.arms.clone(),
        to_start: (options.start_missing_arms && !options.read_only).then_some(options.stop_after),
    };
    #[cfg(debug_assertions)]
    if std::env::var_os("LBVA_TEST_PANIC").is_some_and(|value| value == "runs") {
        panic!("asked to by LBVA_TEST_PANIC");
    }
    match feed.first_look(messages) {
        Ok(()) => feed.start_missing(),
        Err(error) => drop(messages.send(Msg::LoadFailed(error.to_string()))),
    }
    // Without a watch the slow look remains.
    let watcher = Watcher::new(vec![feed.experiment.root()]).ok();
    let never = crossbeam_channel::never();
    let changes = watcher.as_ref().map_or(&never, Watcher::changes);
    let mut last_look = Instant::now();
    let mut changed = false;
    loop {
        let mut look = false;
        crossbeam_channel::select! {
            recv(commands) -> command => match command {
                Ok(Command::Refresh) => {
                    look = true;
                    feed.controller.iter().for_each(Controller::look_now);
                }
                Ok(command) => feed.obey(command, messages),
                Err(_) => return,
            },
            recv(changes) -> _ => changed = true,
            default(CONTROL) => {}
        }
        look |= last_look.elapsed() >= if changed { PACE } else { LOOK };
        if look {
            last_look = Instant::now();
            changed = false;
            feed.look(messages);
        }
        feed.control(messages);
    }
}

struct Feed {
    submits: bool,
    /// What was last shown of Slurm.
    shown: Look,
    title: String,
    question: String,
    planned_validations: u64,
    controller: Option<Controller>,
    verdict: Option<super::run::VerdictSource>,
    /// Validation points when the verdict was last formed.
    judged: usize,
    last_verdict: Option<super::snapshot::VerdictView>,
    experiment: ExperimentRuns,
    /// The experiment's arms in their order; runs on disk beyond them follow by name.
    arms: Vec<String>,
    readers: Vec<RunReader>,
    runs: Vec<ShownRun>,
    /// Declared arms are to be started, leaving after this step if one is given; once, after the first look that works.
    to_start: Option<Option<u64>>,
    /// What the last look couldn't read.
    failed: Vec<String>,
}

impl Feed {
    /// Opens what is on disk, all runs at once, and reports how many are read.
    fn first_look(&mut self, messages: &Sender<Msg>) -> crate::Result<()> {
        self.find_runs()?;
        let total = self.readers.len();
        let done = AtomicUsize::new(0);
        let _ = messages.send(Msg::Loading(LoadProgress { done: 0, total }));
        let now = now_ms();
        let errors: Vec<crate::Error> = self
            .readers
            .par_iter_mut()
            .filter_map(|reader| {
                let error = reader.poll(now).err();
                let done = done.fetch_add(1, Ordering::Relaxed) + 1;
                let _ = messages.send(Msg::Loading(LoadProgress { done, total }));
                error
            })
            .collect();
        self.runs.resize_with(self.readers.len(), ShownRun::default);
        for (run, reader) in self.runs.iter_mut().zip(&self.readers) {
            run.replace(reader.view());
        }
        self.publish(messages);
        self.report_failures(errors.iter().map(ToString::to_string).collect(), messages);
        Ok(())
    }

    /// A reader for each arm and each run on disk, in order. Returns whether there are new ones.
    fn find_runs(&mut self) -> crate::Result<bool> {
        let on_disk: BTreeSet<String> = self.experiment.list()?.iter().map(|run| run.arm()).collect();
        let known: BTreeSet<String> = self.readers.iter().map(|reader| reader.run().arm()).collect();
        let declared = self.arms.iter().filter(|arm| !known.contains(*arm));
        let found = on_disk.iter().filter(|arm| !known.contains(*arm) && !self.arms.contains(arm));
        let new: Vec<String> = declared.chain(found).cloned().collect();
        for arm in &new {
            self.readers.push(RunReader::open(self.experiment.run(arm).root()));
        }
        Ok(!new.is_empty())
    }

    /// Reads what is new, sends a snapshot if anything is, and starts what could not be started before.
    fn look(&mut self, messages: &Sender<Msg>) {
        match self.read(messages) {
            Ok(()) => self.start_missing(),
            Err(error) => self.report_failures(vec![error.to_string()], messages),
        }
    }

    fn read(&mut self, messages: &Sender<Msg>) -> crate::Result<()> {
        let mut changed = self.find_runs()?;
        let now = now_ms();
        let mut failed = Vec::new();
        for (index, reader) in self.readers.iter_mut().enumerate() {
            // One unreadable run must not hide the others.
            let new = reader.poll(now).unwrap_or_else(|error| {
                failed.push(error.to_string());
                false
            });
            let known = index < self.runs.len();
            if known && !new {
                continue;
            }
            if !known {
                self.runs.push(ShownRun::default());
            }
            if let Some(run) = self.runs.get_mut(index) {
                run.replace(reader.view());
            }
            changed = true;
        }
        if let Some(controller) = &mut self.controller {
            for run in &self.runs {
                controller.view_changed(run.current(), now);
            }
        }
        if changed {
            self.publish(messages);
        }
        self.report_failures(failed, messages);
        Ok(())
    }

    /// Says each failure once, not every second.
    fn report_failures(&mut self, failed: Vec<String>, messages: &Sender<Msg>) {
        for text in failed.iter().filter(|text| !self.failed.contains(text)) {
            let _ = messages.send(Msg::EffectResult { ok: false, text: text.clone() });
        }
        self.failed = failed;
    }

    fn publish(&mut self, messages: &Sender<Msg>) {
        let runs: Vec<Arc<RunView>> = self.runs.iter().map(|run| Arc::clone(run.current())).collect();
        let points = runs.iter().map(|run| run.validations.len()).sum();
        if points != self.judged || self.last_verdict.is_none() {
            self.judged = points;
            if let Some(verdict) = &mut self.verdict {
                self.last_verdict = verdict(&runs);
            }
        }
        let snapshot = ConsoleSnapshot {
            experiment: self.title.clone(),
            question: self.question.clone(),
            runs,
            slurm: self.shown.clone(),
            submits: self.submits,
            verdict: self.last_verdict.clone(),
            planned_validations: self.planned_validations,
            loaded_ms: now_ms(),
        };
        let _ = messages.send(Msg::Snapshot(Arc::new(snapshot)));
    }

    /// Starts every declared arm that is neither at work nor finished, if that was asked for and is still to be done.
    fn start_missing(&mut self) {
        let now = now_ms();
        let Some(controller) = &mut self.controller else { return };
        let Some(stop_after) = self.to_start.take() else { return };
        for run in self.runs.iter().map(ShownRun::current) {
            controller.view_changed(run, now);
            let (state, _) = judge(run, now, controller.job(&run.arm));
            if self.arms.contains(&run.arm) && !status::is_active(state) && state != RunState::Finished {
                controller.ask(&run.arm, Request::Start { stop_after });
            }
        }
    }

    fn obey(&mut self, command: Command, messages: &Sender<Msg>) {
        let worker = |target: &Target| WorkerRef {
            attempt: target.attempt,
            pid: target.pid,
            host: target.host.clone(),
            job: target.job,
        };
        let (arm, request) = match &command {
            Command::Stop(target) => (target.arm.as_str(), Request::Stop(worker(target))),
            Command::Kill(target) => (target.arm.as_str(), Request::Kill(worker(target))),
            Command::Resume { arm } => (arm.as_str(), Request::Start { stop_after: None }),
            Command::Submit { arm } => (arm.as_str(), Request::Submit),
            Command::Cancel { arm, job } => (arm.as_str(), Request::Cancel(*job)),
            Command::Refresh => return,
        };
        let Some(controller) = &mut self.controller else {
            let text = format!("{arm}: this console wasn't told how to control workers; nothing was done");
            let _ = messages.send(Msg::EffectResult { ok: false, text });
            return;
        };
        if let Some(run) = self.runs.iter().map(ShownRun::current).find(|run| run.arm == arm) {
            controller.view_changed(run, now_ms());
        }
        controller.ask(arm, request);
    }

    fn control(&mut self, messages: &Sender<Msg>) {
        let Some(controller) = &mut self.controller else { return };
        let ended = controller.reap();
        if !ended.is_empty() {
            self.look(messages);
        }
        let Some(controller) = &mut self.controller else { return };
        controller.tick(&ended);
        if *controller.look() != self.shown {
            self.shown = controller.look().clone();
            self.publish(messages);
        }
        let Some(controller) = &mut self.controller else { return };
        for report in controller.take_reports() {
            let text = format!("{}: {}", report.arm, report.text);
            let _ = messages.send(Msg::EffectResult { ok: report.level == Level::Info, text });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::WorkerCommand;
    use std::os::unix::fs::PermissionsExt;
    use std::path::Path;

    /// A worker that writes its arguments down and leaves.
    fn recorder(folder: &Path) -> WorkerCommand {
        let executable = folder.join("worker");
        let script = format!("#!/bin/sh\necho \"$@\" >> '{}'\n", folder.join("calls").display());
        std::fs::write(&executable, script).unwrap();
        std::fs::set_permissions(&executable, std::fs::Permissions::from_mode(0o755)).unwrap();
        WorkerCommand { executable, experiment: folder.to_owned(), arguments: vec![], arms: vec!["a".to_owned()] }
    }

    fn wait_for(messages: &Receiver<Msg>, what: &str, wanted: impl Fn(&Msg) -> bool) {
        let deadline = Instant::now() + Duration::from_secs(30);
        loop {
            let message = messages.recv_deadline(deadline).unwrap_or_else(|_| panic!("no {what}"));
            if wanted(&message) {
                return;
            }
        }
    }

    #[test]
    fn arms_are_started_when_the_folder_can_be_read_at_last_and_stop_early_only_then() {
        let folder = tempfile::tempdir().unwrap();
        let runs = folder.path().join("runs");
        std::fs::write(&runs, "a file where the folder should be").unwrap();
        let options = ConsoleOptions {
            arms: vec!["a".to_owned()],
            worker: Some(recorder(folder.path())),
            start_missing_arms: true,
            stop_after: Some(7),
            ..ConsoleOptions::default()
        };
        let experiment = ExperimentRuns::new(folder.path());
        let (commands, commands_in) = crossbeam_channel::unbounded();
        let (out, messages) = crossbeam_channel::unbounded();
        let feed = std::thread::spawn(move || run(experiment, options, &commands_in, &out));
        wait_for(&messages, "failure", |message| matches!(message, Msg::LoadFailed(_)));
        std::fs::remove_file(&runs).unwrap();
        let ended = |message: &Msg| matches!(message, Msg::EffectResult { text, .. } if text.contains("exited with"));
        wait_for(&messages, "end of the first worker", ended);
        commands.send(Command::Resume { arm: "a".to_owned() }).unwrap();
        wait_for(&messages, "end of the second worker", ended);
        drop(commands);
        feed.join().unwrap();
        let calls = std::fs::read_to_string(folder.path().join("calls")).unwrap();
        let calls: Vec<bool> = calls.lines().map(|line| line.ends_with("--arm a --stop-after 7")).collect();
        assert_eq!(calls, [true, false]);
    }
}
