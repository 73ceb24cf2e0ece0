//! The worker's side of the run directory: one writer a run, one attempt a process.

use super::checkpoints::CheckpointStore;
use super::event::{AttemptStarted, ClipMetrics, EVENT_VERSION, Event, EventLine, JobIdentity, Level, Outcome};
use super::identity::{Difference, Recorded, check_binding, compare_identity, put_record, retire};
use super::paths::{AttemptDir, RunDir};
use super::process::ProcessIdentity;
use super::view::Liveness;
use crate::files::{LineFile, create_folder, io_error, remove_file, sync_folder, write_whole};
use crate::{Error, Exit, Result};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// Set by whoever starts a worker detached: its output then belongs in the attempt's `worker.log`
/// ([`RunWriter::capture_output`]).
pub const DETACHED_WORKER_VARIABLE: &str = "LBVA_TUI_DETACHED_WORKER";

/// What the trainer knows about the attempt it begins.
#[derive(Clone, Debug, PartialEq)]
pub struct NewAttempt {
    pub arm: String,
    /// Completed optimizer steps of the checkpoint resumed from; 0 for a fresh start.
    pub start_step: u64,
    pub total_steps: u64,
    pub save_every: u64,
    pub validate_every: u64,
    pub parameters: u64,
    pub device: String,
    pub threads: usize,
    /// The job that this process is part of, under Slurm.
    pub job: Option<JobIdentity>,
    pub command_line: Vec<String>,
    /// Version and commit of the program.
    pub code_version: String,
    /// The resolved recipe, as text; created once, compared by value later.
    pub arm_yaml: String,
    /// What is known of the identity before data are opened; [`RunWriter::bind_identity`] has the whole.
    pub known_identity: Map<String, Value>,
    /// Fields that may differ from the run's record; the difference becomes part of it.
    pub accepted: Vec<String>,
}

/// `attempts/NNNN/attempt.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AttemptRecord {
    pub v: u32,
    pub attempt: u32,
    #[serde(flatten)]
    pub process: ProcessIdentity,
    /// Unix ms.
    pub started_ms: u64,
    pub command_line: Vec<String>,
    pub code_version: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub job: Option<JobIdentity>,
}

/// `outcome.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OutcomeRecord {
    pub v: u32,
    pub attempt: u32,
    pub outcome: Outcome,
    /// Completed optimizer steps at the end.
    pub step: u64,
    pub exit_code: u8,
    pub reason: String,
    pub time_ms: u64,
}

/// `control/stop`: a wish to stop with a checkpoint. An empty file (`touch`) is a valid one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StopRequest {
    /// Who asks: `console`, `lbva-tui stop`, ...
    pub by: String,
    /// The attempt that is meant; any if absent.
    #[serde(default)]
    pub attempt: Option<u32>,
    #[serde(default)]
    pub time_ms: u64,
    /// The job is to be cancelled once the checkpoint is written: whoever asks does it, or the worker itself.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub cancel_job: bool,
}

/// `control/kill`: this attempt was killed on request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KillRecord {
    pub by: String,
    pub attempt: u32,
    pub pid: u32,
    pub time_ms: u64,
}

/// Unix time in milliseconds.
pub fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_millis().try_into().unwrap_or(u64::MAX))
}

/// The exclusive right to write in a run directory, until dropped (or until the process dies in whatever way).
#[derive(Debug)]
pub struct RunLock {
    file: File,
    run: RunDir,
}

impl RunLock {
    /// Takes the lock, or refuses with `run_busy` (exit 78) and the holder's pid and host.
    pub fn acquire(run: RunDir) -> Result<Self> {
        create_folder(run.root())?;
        let path = run.lock();
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path);
        let mut file = file.map_err(|error| io_error("cannot open the run's lock", &path, &error))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(busy(&path)),
            Err(TryLockError::Error(error)) => without_lock_support(&path, &error)?,
        }
        let holder = serde_json::to_string(&ProcessIdentity::current()).unwrap_or_default();
        let written = file.set_len(0).and_then(|()| file.write_all(holder.as_bytes()));
        written.map_err(|error| io_error("cannot write the run's lock", &path, &error))?;
        Ok(Self { file, run })
    }

    pub fn run(&self) -> &RunDir {
        &self.run
    }
}

impl Drop for RunLock {
    fn drop(&mut self) {
        // Best effort: the kernel releases the lock anyway; an empty file only says so to file systems without locks.
        let _ = self.file.set_len(0);
        // Closing is not enough: a child between fork and exec may hold a copy of the descriptor for a moment.
        let _ = self.file.unlock();
    }
}

fn read_holder(lock: &Path) -> Option<ProcessIdentity> {
    serde_json::from_slice(&std::fs::read(lock).ok()?).ok()
}

fn busy(lock: &Path) -> Error {
    let holder = read_holder(lock)
        .map_or_else(|| "another worker".to_owned(), |holder| format!("worker {} on host {}", holder.pid, holder.host));
    Error::refused("run_busy", format!("{holder} is already training this run"))
        .at(lock)
        .hint("watch it in the console, or stop it first")
}

/// Some cluster file systems have no locks. Then only evidence about the recorded holder can tell.
fn without_lock_support(lock: &Path, error: &std::io::Error) -> Result<()> {
    match read_holder(lock).map(|holder| holder.liveness()) {
        None | Some(Liveness::Dead | Liveness::None) => Ok(()),
        Some(Liveness::Alive) => Err(busy(lock)),
        Some(Liveness::Unknown) => Err(Error::refused(
            "run_perhaps_busy",
            format!("this file system has no locks ({error}), and the last worker ran on another host"),
        )
        .at(lock)
        .hint("make sure that it is gone, then remove this file")),
    }
}

/// Looks for a stop request that means one attempt.
#[derive(Clone, Debug)]
pub struct StopWatch {
    path: PathBuf,
    attempt: u32,
}

impl StopWatch {
    pub fn of(run: &RunDir, attempt: u32) -> Self {
        Self { path: run.stop_request(), attempt }
    }

    /// The request, if one is there. One failed `open` where there is none.
    pub fn requested(&self) -> Option<StopRequest> {
        let text = std::fs::read(&self.path).ok()?;
        let request = serde_json::from_slice::<StopRequest>(&text).unwrap_or_else(|_| StopRequest {
            by: "stop file".to_owned(),
            attempt: None,
            time_ms: 0,
            cancel_job: false,
        });
        request.attempt.is_none_or(|attempt| attempt == self.attempt).then_some(request)
    }
}

/// Writes one attempt. Every failure to write is returned: an event that could not be recorded is no event.
#[derive(Debug)]
pub struct RunWriter {
    lock: RunLock,
    attempt: AttemptDir,
    events: LineFile,
    accepted: Vec<String>,
}

impl RunWriter {
    /// Locks the run and begins its next attempt: binds configuration and identity (exit 78 with every difference
    /// named), clears the previous attempt's outcome and requests, and writes the first event.
    pub fn begin(run: RunDir, new: NewAttempt) -> Result<Self> {
        Self::begin_locked(RunLock::acquire(run)?, new)
    }

    /// The same for a caller that took the lock earlier, e.g. to read checkpoints safely.
    pub fn begin_locked(lock: RunLock, new: NewAttempt) -> Result<Self> {
        let run = lock.run();
        let recorded = check_binding(run, &new.arm_yaml, &new.known_identity, &new.accepted)?;
        for folder in [run.attempts(), run.checkpoints(), run.validation(), run.control()] {
            create_folder(&folder)?;
        }
        remove_file(&run.outcome())?;
        remove_file(&run.stop_request())?;
        remove_file(&run.kill_record())?;
        CheckpointStore::new(run).remove_leftovers()?;

        let attempt = next_attempt(run)?;
        let process = ProcessIdentity::current();
        let started_ms = now_ms();
        let record = AttemptRecord {
            v: EVENT_VERSION,
            attempt: attempt.number(),
            process: process.clone(),
            started_ms,
            command_line: new.command_line,
            code_version: new.code_version,
            job: new.job.clone(),
        };
        let text = serde_json::to_vec_pretty(&record).map_err(|error| Error::crash(format!("attempt: {error}")))?;
        write_whole(&attempt.record(), &text)?;
        let events = LineFile::append_to(&attempt.events())?;
        let mut writer = Self { lock, events, attempt, accepted: new.accepted };
        writer.emit(Event::AttemptStarted(AttemptStarted {
            attempt: writer.attempt.number(),
            arm: new.arm,
            pid: process.pid,
            host: process.host,
            start_step: new.start_step,
            total_steps: new.total_steps,
            save_every: new.save_every,
            validate_every: new.validate_every,
            parameters: new.parameters,
            device: new.device,
            threads: new.threads,
            job: new.job,
        }))?;
        writer.bind_arm_yaml(recorded, &new.arm_yaml)?;
        writer.events.sync()?;
        sync_folder(writer.attempt.root())?;
        sync_folder(&writer.run().attempts())?;
        Ok(writer)
    }

    pub fn run(&self) -> &RunDir {
        self.lock.run()
    }

    pub fn attempt(&self) -> &AttemptDir {
        &self.attempt
    }

    /// Binds the run to its configuration, which [`check_binding`] has compared.
    fn bind_arm_yaml(&mut self, recorded: Recorded, text: &str) -> Result<()> {
        let path = self.run().arm_yaml();
        let changed = match recorded {
            Recorded::Fits => false,
            Recorded::Unused => {
                // The configuration last: without it the next attempt would not know that there is nothing to protect.
                for path in [self.run().identity(), path.clone()] {
                    retire(&path, &self.attempt.replaced(&path))?;
                }
                false
            }
            Recorded::Accepted(differences) => {
                self.tell_accepted(differences)?;
                true
            }
        };
        put_record(&path, &self.attempt.replaced(&path), text.as_bytes(), changed)
    }

    /// Binds the run to everything a resume must not change (hashes of data, clip lists, codec, initial weights):
    /// recorded by the first attempt, compared by every later one (exit 78 with every difference named). Apart from
    /// [`Self::begin`] because computing it may take minutes, which the log should show.
    pub fn bind_identity(&mut self, identity: &Value) -> Result<()> {
        let path = self.run().identity();
        let differences = compare_identity(&path, identity, &self.accepted)?;
        let changed = !differences.is_empty();
        self.tell_accepted(differences)?;
        let text = serde_json::to_vec_pretty(identity).map_err(|error| Error::crash(format!("identity: {error}")))?;
        put_record(&path, &self.attempt.replaced(&path), &text, changed)
    }

    /// Before the record changes: killed in between, the next attempt finds the difference again.
    fn tell_accepted(&mut self, differences: Vec<Difference>) -> Result<()> {
        differences.into_iter().try_for_each(|Difference { field, recorded, now }| {
            self.emit(Event::ChangeAccepted { field, recorded, now })
        })
    }

    pub fn checkpoints(&self) -> CheckpointStore {
        CheckpointStore::new(self.run())
    }

    /// Appends an event, stamped with the time. Non-finite numbers become `null`, which readers take as NaN.
    pub fn emit(&mut self, event: Event) -> Result<()> {
        let durable =
            matches!(event, Event::Checkpoint { .. } | Event::AttemptEnded { .. } | Event::ChangeAccepted { .. });
        let line = EventLine { v: EVENT_VERSION, time_ms: now_ms(), event };
        let text = serde_json::to_string(&line).map_err(|error| Error::crash(format!("event: {error}")))?;
        self.events.append(&text)?;
        if durable {
            self.events.sync()?;
        }
        Ok(())
    }

    /// A note for people.
    pub fn message(&mut self, level: Level, text: impl std::fmt::Display) -> Result<()> {
        self.emit(Event::Message { level, text: text.to_string() })
    }

    /// Writes `validation/step-NNNNNNNN/metrics.jsonl` whole.
    pub fn write_clip_metrics(&self, step: u64, clips: &[ClipMetrics]) -> Result<()> {
        let mut text = String::new();
        for clip in clips {
            text += &serde_json::to_string(clip).map_err(|error| Error::crash(format!("clip metrics: {error}")))?;
            text.push('\n');
        }
        create_folder(&self.run().validation_point(step))?;
        write_whole(&self.run().validation_metrics(step), text.as_bytes())
    }

    /// The clips of a validation point, if it is complete.
    pub fn read_clip_metrics(&self, step: u64) -> Result<Option<Vec<ClipMetrics>>> {
        let path = self.run().validation_metrics(step);
        let text = match std::fs::read_to_string(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            read => read.map_err(|error| io_error("cannot read the validation point", &path, &error))?,
        };
        let clips = text.lines().map(serde_json::from_str).collect::<std::result::Result<_, _>>();
        // Written whole, so a damaged one is no trace of a kill; measuring it anew replaces it.
        Ok(clips.ok())
    }

    /// A stop request for this attempt, if one lies in `control/`.
    pub fn stop_requested(&self) -> Option<StopRequest> {
        self.stop_watch().requested()
    }

    /// Who asked for this attempt's end at once, if anybody did.
    pub fn kill_requested(&self) -> Option<String> {
        let record: KillRecord = serde_json::from_slice(&std::fs::read(self.run().kill_record()).ok()?).ok()?;
        (record.attempt == self.attempt.number()).then_some(record.by)
    }

    /// The same question for code that does not hold the writer.
    pub fn stop_watch(&self) -> StopWatch {
        StopWatch::of(self.run(), self.attempt.number())
    }

    /// Sends this process's stdout and stderr to the attempt's `worker.log` from now on. For workers started
    /// detached ([`DETACHED_WORKER_VARIABLE`]), so that a panic or a library's complaint lies beside its attempt.
    pub fn capture_output(&self) -> Result<()> {
        let path = self.attempt.worker_log();
        let redirected = OpenOptions::new().append(true).create(true).open(&path).and_then(|file| {
            rustix::stdio::dup2_stdout(&file)?;
            rustix::stdio::dup2_stderr(&file)?;
            Ok(())
        });
        redirected.map_err(|error| io_error("cannot redirect the worker's output", &path, &error))
    }

    /// Writes the attempt's last event and `outcome.json`, and clears the request that was obeyed.
    pub fn finish(mut self, outcome: Outcome, step: u64, exit: Exit, reason: &str) -> Result<()> {
        let exit_code = exit.code();
        // outcome.json is tried even if the log cannot take the last line; the first failure is reported.
        let logged = self.emit(Event::AttemptEnded { outcome, step, exit_code, reason: reason.to_owned() });
        let record = OutcomeRecord {
            v: EVENT_VERSION,
            attempt: self.attempt.number(),
            outcome,
            step,
            exit_code,
            reason: reason.to_owned(),
            time_ms: now_ms(),
        };
        let text = serde_json::to_vec_pretty(&record).map_err(|error| Error::crash(format!("outcome: {error}")))?;
        let written = write_whole(&self.run().outcome(), &text);
        let cleared = remove_file(&self.run().stop_request());
        logged.and(written).and(cleared)
    }
}

/// Claims the next number by creating its folder; creation fails if somebody else has it.
fn next_attempt(run: &RunDir) -> Result<AttemptDir> {
    let mut number = run.attempt_numbers()?.last().map_or(1, |last| last + 1);
    loop {
        let attempt = run.attempt(number);
        match std::fs::create_dir(attempt.root()) {
            Ok(()) => return Ok(attempt),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => number += 1,
            Err(error) => return Err(io_error("cannot create the attempt's folder", attempt.root(), &error)),
        }
    }
}
