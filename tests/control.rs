//! Run control on real processes: this test program plays the worker.

use lbva_tui::control::local::{kill, request_stop};
use lbva_tui::control::machine::State;
use lbva_tui::control::*;
use lbva_tui::files::write_file;
use lbva_tui::runlog::*;
use lbva_tui::{Exit, Result};
use serde_json::json;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};
use tempfile::TempDir;

const STEPS: u64 = 40;

/// An experiment folder, and a `worker` in it that starts this program as a fake worker.
struct Stage {
    folder: TempDir,
}

impl Stage {
    /// `mode`: what the fake worker does, see [`fake_worker`].
    fn new(mode: &str) -> Self {
        let folder = TempDir::new().unwrap();
        let script = format!(
            "#!/bin/sh\n[ \"$1 $2 $4\" = '--no-ui run --arm' ] || exit 2\n\
             FAKE_RUN=\"$3/runs/$5\" FAKE_MODE='{mode}' exec '{}' fake_worker --exact --ignored --nocapture\n",
            std::env::current_exe().unwrap().display()
        );
        let path = folder.path().join("worker");
        fs::write(&path, script).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        Self { folder }
    }

    fn path(&self) -> &Path {
        self.folder.path()
    }

    fn run(&self, arm: &str) -> RunDir {
        ExperimentRuns::new(self.path()).run(arm)
    }

    fn command(&self) -> WorkerCommand {
        WorkerCommand {
            executable: self.path().join("worker"),
            experiment: self.path().to_owned(),
            arguments: vec![],
            arms: vec!["arm".to_owned()],
        }
    }

    fn options(&self) -> SuperviseOptions {
        SuperviseOptions {
            executable: self.path().join("worker"),
            worker_arguments: vec![],
            stop_after: None,
            stop: Arc::new(AtomicUsize::new(0)),
        }
    }
}

/// Not a test: the worker that the tests start. Steps every 10 ms; resumes from its checkpoint.
#[test]
#[ignore = "the worker process of the other tests"]
fn fake_worker() {
    let Ok(run) = std::env::var("FAKE_RUN") else { return };
    let mode = std::env::var("FAKE_MODE").unwrap_or_default();
    let exit = work(RunDir::new(PathBuf::from(run)), &mode).unwrap_or_else(|error| {
        println!("error: {error}");
        error.exit
    });
    std::process::exit(i32::from(exit.code()));
}

fn work(run: RunDir, mode: &str) -> Result<Exit> {
    let stop = Arc::new(AtomicBool::new(false));
    signal_hook::flag::register(15, Arc::clone(&stop)).unwrap();
    if mode == "refuse" {
        return Err(lbva_tui::Error::refused("identity_differs", "the clip index differs"));
    }
    let lock = RunLock::acquire(run)?;
    let store = CheckpointStore::new(lock.run());
    let start_step = store.latest_complete(Check::Hashes)?.checkpoint.map_or(0, |checkpoint| checkpoint.step);
    let mut writer = RunWriter::begin_locked(
        lock,
        NewAttempt {
            arm: "arm".to_owned(),
            start_step,
            total_steps: STEPS,
            save_every: 1000,
            validate_every: 0,
            parameters: 1,
            device: "cpu".to_owned(),
            threads: std::env::var("RAYON_NUM_THREADS").unwrap().parse().unwrap(),
            job: None,
            command_line: vec![],
            code_version: "test".to_owned(),
            arm_yaml: "a: 1\n".to_owned(),
            known_identity: serde_json::Map::new(),
            accepted: vec![],
        },
    )?;
    if mode == "fail" {
        writer.finish(Outcome::Failed, start_step, Exit::BadData, "the dataset is not there")?;
        return Ok(Exit::BadData);
    }
    if std::env::var_os(DETACHED_WORKER_VARIABLE).is_some() {
        writer.capture_output()?;
    }
    let slow = mode != "quick";
    for step in start_step + 1..=STEPS {
        std::thread::sleep(Duration::from_millis(if slow { 100 } else { 5 }));
        writer.emit(Event::Step(step_event(step)))?;
        if mode == "die" && step == 3 {
            println!("the last words");
            println!("note: run with RUST_BACKTRACE=1");
            std::process::abort();
        }
        if mode == "lie" && step == 3 {
            return Ok(Exit::Done);
        }
        let asked = writer.stop_requested().map(|request| request.by);
        let asked = asked.or_else(|| stop.load(Ordering::Relaxed).then(|| "SIGTERM".to_owned()));
        if let Some(by) = asked.filter(|_| mode != "deaf") {
            writer.emit(Event::StopRequested { by: by.clone() })?;
            writer.emit(Event::Phase { phase: Phase::Saving, done: 0, total: 1 })?;
            std::thread::sleep(Duration::from_millis(300));
            let saved = store.publish(step, json!({}), |at| write_file(&at.join("weights"), b"weights"))?;
            writer.emit(Event::Checkpoint { step, bytes: saved.bytes(), ms: 1.0, blocked_ms: None })?;
            writer.finish(Outcome::Stopped, step, Exit::Stopped, &format!("stopped by {by} at step {step}"))?;
            return Ok(Exit::Stopped);
        }
    }
    writer.finish(Outcome::Finished, STEPS, Exit::Done, "all steps done")?;
    Ok(Exit::Done)
}

fn step_event(step: u64) -> StepEvent {
    StepEvent {
        step,
        loss: 1.0,
        loss_video: 1.0,
        loss_action: 0.0,
        loss_proprio: 0.0,
        grad_norm: 1.0,
        lr: 1e-3,
        step_ms: 10.0,
        data_ms: 0.0,
        padding_waste: 0.0,
        tokens: 1,
        memory: Memory { kind: MemoryKind::Rss, bytes: 1, peak_bytes: 1, total_bytes: 1, parts: None },
        branch_norm: None,
        packing: None,
        times: None,
        work: None,
    }
}

/// Controller and reader of one run, driven as the console drives them.
struct Desk {
    controller: Controller,
    reader: RunReader,
    reports: Vec<Report>,
}

impl Desk {
    fn new(stage: &Stage, read_only: bool) -> Self {
        let controller = Controller::new(LocalDriver::new(stage.command(), "test"), read_only);
        Self { controller, reader: RunReader::open(stage.run("arm").root()), reports: vec![] }
    }

    fn until(&mut self, what: &str, mut done: impl FnMut(&Self) -> bool) {
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            let ended = self.controller.reap();
            self.reader.poll(now_ms()).unwrap();
            self.controller.view_changed(self.reader.view(), now_ms());
            self.controller.tick(&ended);
            self.reports.extend(self.controller.take_reports());
            if done(self) {
                return;
            }
            let (state, view) = (self.controller.state("arm"), self.reader.view().state(now_ms()));
            assert!(Instant::now() < deadline, "{what}: {state:?}, {view:?}, {:?}", self.reports);
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn steps(&self, least: usize) -> bool {
        self.reader.view().series.len() >= least && self.controller.state("arm") == State::Running
    }

    fn worker(&self) -> WorkerRef {
        WorkerRef::of(self.reader.view()).unwrap()
    }

    fn last_report(&self) -> &str {
        &self.reports.last().unwrap().text
    }
}

#[test]
fn start_stop_with_a_checkpoint_and_resume() {
    let stage = Stage::new("slow");
    let mut desk = Desk::new(&stage, false);
    desk.controller.ask("arm", Request::Start { stop_after: None });
    assert!(matches!(desk.controller.state("arm"), State::Launching { .. }));
    desk.until("it runs", |desk| desk.steps(3));
    let worker = desk.worker();
    let group = rustix::process::getpgid(rustix::process::Pid::from_raw(worker.pid as i32)).unwrap();
    assert_eq!(group.as_raw_nonzero().get() as u32, worker.pid, "a process group of its own");
    desk.controller.ask("arm", Request::Stop(worker.clone()));
    desk.until("it saves", |desk| matches!(desk.controller.state("arm"), State::Checkpointing { .. }));
    desk.until("it stops", |desk| desk.controller.state("arm") == State::Stopped);
    let saved = desk.reader.view().last_save.unwrap().step;
    assert!(desk.last_report().starts_with("stopped: stopped by test"), "{:?}", desk.reports);
    desk.until("the child is collected", |desk| desk.controller.own_workers().count() == 0);
    // The old request must not stop the new attempt, nor may the old reference.
    desk.controller.ask("arm", Request::Start { stop_after: None });
    desk.until("it runs again", |desk| desk.reader.view().attempts.len() == 2 && desk.steps(saved as usize + 2));
    assert_eq!(desk.reader.view().attempts[1].started.start_step, saved);
    desk.controller.ask("arm", Request::Kill(worker));
    desk.until("the refusal", |desk| desk.reports.last().unwrap().text.contains("was meant, but"));
    desk.until("the end", |desk| desk.controller.state("arm") == State::Finished);
    assert_eq!(desk.reader.view().series.step, (1..=STEPS).collect::<Vec<_>>());
}

#[test]
fn a_kill_is_recorded_as_one() {
    let stage = Stage::new("deaf");
    let mut desk = Desk::new(&stage, false);
    desk.controller.ask("arm", Request::Start { stop_after: None });
    desk.until("it runs", |desk| desk.steps(2));
    desk.controller.ask("arm", Request::Kill(desk.worker()));
    desk.until("it is dead", |desk| desk.controller.state("arm") == State::Failed);
    let (state, reason) = desk.reader.view().state(now_ms());
    assert_eq!(state, RunState::Failed);
    assert!(reason.starts_with("killed on request by test at step"), "{reason}");
    assert!(desk.last_report().starts_with("killed: killed on request"), "{:?}", desk.reports);
    let worker = desk.worker();
    let run = stage.run("arm");
    for error in [request_stop(&run, &worker, "test").unwrap_err(), kill(&run, &worker, "test").unwrap_err()] {
        assert_eq!((error.code, error.exit), ("worker_gone", Exit::Refused));
    }
    let other = WorkerRef { attempt: 7, ..worker };
    assert_eq!(request_stop(&run, &other, "test").unwrap_err().code, "attempt_changed");
    assert!(!run.stop_request().exists());
}

#[test]
fn a_worker_that_refuses_to_start_is_reported_in_its_own_words() {
    let stage = Stage::new("refuse");
    let mut desk = Desk::new(&stage, false);
    desk.controller.ask("arm", Request::Start { stop_after: None });
    desk.until("the report", |desk| desk.reports.iter().any(|report| report.level == Level::Error));
    assert!(desk.last_report().ends_with("exited with code 78: error: the clip index differs"), "{:?}", desk.reports);
    assert_eq!(desk.controller.state("arm"), State::Waiting);
    let mut command = stage.command();
    command.executable = stage.path().join("absent");
    let mut controller = Controller::new(LocalDriver::new(command, "test"), false);
    controller.ask("arm", Request::Start { stop_after: None });
    assert!(controller.take_reports()[0].text.starts_with("not started: cannot start a worker"));
}

#[test]
fn a_worker_that_fails_in_its_attempt_was_started() {
    let stage = Stage::new("fail");
    let (outcome, texts, _) = supervised(&stage, &["m1", "m2"], &stage.options());
    assert_eq!(outcome.exit_code(), Exit::BadData.code());
    assert!(texts.iter().any(|text| text.contains("m1: attempt 1 starts at step 0")), "{texts:?}");
    assert!(!texts.iter().any(|text| text.contains("not started")), "{texts:?}");
}

#[test]
fn a_worker_shares_the_machine_with_every_arm_that_is_alive() {
    let stage = Stage::new("slow");
    let threads = |desk: &Desk| desk.reader.view().attempts.last().unwrap().started.threads;
    let cores = std::thread::available_parallelism().unwrap().get();
    let mut first = Desk::new(&stage, false);
    first.controller.ask("arm", Request::Start { stop_after: None });
    first.until("it runs", |desk| desk.steps(1));
    assert_eq!(threads(&first), cores, "alone");
    // Another session, which knows only its own arm.
    let command = WorkerCommand { arms: vec!["other".to_owned()], ..stage.command() };
    let mut driver = LocalDriver::new(command, "test");
    driver.start("other", None).unwrap();
    let mut reader = RunReader::open(stage.run("other").root());
    let deadline = Instant::now() + Duration::from_secs(60);
    // Its folder is there a moment before its first event.
    while reader.view().attempts.first().is_none_or(|attempt| attempt.started.pid == 0) {
        assert!(Instant::now() < deadline);
        std::thread::sleep(Duration::from_millis(10));
        reader.poll(now_ms()).unwrap();
    }
    assert_eq!(reader.view().attempts[0].started.threads, (cores / 2).max(1));
    for arm in ["arm", "other"] {
        let mut reader = RunReader::open(stage.run(arm).root());
        reader.poll(now_ms()).unwrap();
        kill(&stage.run(arm), &WorkerRef::of(reader.view()).unwrap(), "test").unwrap();
    }
}

#[test]
fn read_only_does_nothing() {
    let stage = Stage::new("quick");
    let mut desk = Desk::new(&stage, true);
    desk.controller.ask("arm", Request::Start { stop_after: None });
    desk.until("the report", |desk| !desk.reports.is_empty());
    assert!(desk.last_report().starts_with("read-only"));
    assert!(!stage.run("arm").root().exists());
}

fn supervised(
    stage: &Stage,
    arms: &[&str],
    options: &SuperviseOptions,
) -> (SupervisorOutcome, Vec<String>, Vec<String>) {
    let arms: Vec<String> = arms.iter().map(ToString::to_string).collect();
    let (mut texts, mut events) = (vec![], vec![]);
    let outcome = supervise(stage.path(), &arms, options, &mut |progress| match progress {
        Progress::Log { arm, line } => texts.push(format!("{arm}: {}", line.text)),
        Progress::Control { arm, text, .. } => texts.push(format!("{arm}: {text}")),
        Progress::Event { arm, json } => events.push(format!("{arm}: {json}")),
    });
    (outcome.unwrap(), texts, events)
}

#[test]
fn supervised_arms_finish_side_by_side() {
    let stage = Stage::new("quick");
    let (outcome, texts, events) = supervised(&stage, &["m1", "m2"], &stage.options());
    assert_eq!(outcome.exit_code(), 0, "{outcome:?}");
    let arms: Vec<_> = outcome.arms.iter().map(|arm| (arm.arm.as_str(), arm.outcome.outcome)).collect();
    assert_eq!(arms, [("m1", Outcome::Finished), ("m2", Outcome::Finished)]);
    assert!(texts.iter().any(|text| text.contains("m2: attempt 1 starts at step 0")), "{texts:?}");
    let steps = |arm: &str| events.iter().filter(|e| e.starts_with(arm) && e.contains("\"event\":\"step\"")).count();
    assert_eq!((steps("m1"), steps("m2")), (STEPS as usize, STEPS as usize));
    let reader = RunReader::open(stage.run("m1").root());
    let threads = |mut reader: RunReader| {
        reader.poll(now_ms()).unwrap();
        reader.view().attempts[0].started.threads
    };
    let cores = std::thread::available_parallelism().unwrap().get();
    assert_eq!(threads(reader), (cores / 2).max(1));

    // Again: nothing is left to do, and nothing is done.
    let (outcome, texts, _) = supervised(&stage, &["m1"], &stage.options());
    assert_eq!(outcome.exit_code(), 0, "{outcome:?}");
    assert_eq!(texts, Vec::<String>::new(), "history is no news");
    assert_eq!(stage.run("m1").attempt_numbers().unwrap(), [1]);
}

#[test]
fn a_signal_becomes_a_stop_of_every_arm() {
    let stage = Stage::new("slow");
    let options = stage.options();
    let stop = Arc::clone(&options.stop);
    std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(1000));
        stop.store(12, Ordering::Relaxed);
    });
    let (outcome, texts, _) = supervised(&stage, &["m1", "m2"], &options);
    assert_eq!(outcome.exit_code(), Exit::Stopped.code(), "{outcome:?} {texts:?}");
    for arm in ["m1", "m2"] {
        let latest = CheckpointStore::new(&stage.run(arm)).latest_complete(Check::Hashes).unwrap();
        assert!(latest.checkpoint.is_some());
    }
}

#[test]
fn only_a_success_record_counts_as_success() {
    for (mode, exit, words) in [
        ("die", 70, "was killed by signal 6: the last words at step 3"),
        ("lie", 70, "exited with code 0"),
        ("refuse", 78, "exited with code 78: error: the clip index differs"),
    ] {
        let stage = Stage::new(mode);
        let (outcome, ..) = supervised(&stage, &["m1"], &stage.options());
        assert_eq!(outcome.exit_code(), exit, "{outcome:?}");
        assert_eq!(outcome.arms[0].outcome.outcome, Outcome::Failed);
        assert!(outcome.arms[0].outcome.reason.contains(words), "{outcome:?}");
    }
    let stage = Stage::new("quick");
    fs::write(stage.path().join("runs"), "a file where the folder should be").unwrap();
    let arms = ["m1".to_owned()];
    let ended = supervise(stage.path(), &arms, &stage.options(), &mut |_| {});
    let exit = ended.map_or_else(|error| error.exit.code(), |outcome| outcome.exit_code());
    assert_eq!(exit, Exit::Disk.code());
}
