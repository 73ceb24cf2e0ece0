//! Processes of this machine: starts workers that outlive whoever started them, and signals only the one that is meant.

use super::machine::{Effect, Event, WorkerRef, WorkerSignal};
use crate::files::{create_folder, io_error, remove_file, write_whole};
use crate::runlog::{
    AttemptRecord, DETACHED_WORKER_VARIABLE, ExperimentRuns, KillRecord, Liveness, RunDir, StopRequest, now_ms,
};
use crate::{Error, Result};
use rustix::process::Signal;
use std::collections::BTreeSet;
use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};

/// Set for every worker: rayon's threads, an equal share of the machine.
const THREADS_VARIABLE: &str = "RAYON_NUM_THREADS";
/// The end of a log in which last words are looked for.
const LAST_WORDS_BYTES: u64 = 8 << 10;

/// How to start a worker: `<executable> --no-ui run <experiment> --arm <arm> <arguments>`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerCommand {
    pub executable: PathBuf,
    /// Folder of `experiment.yaml`.
    pub experiment: PathBuf,
    /// Further arguments of `run`: `--steps 20`, `--set train.seed=3`.
    pub arguments: Vec<String>,
    /// Arms that are to train on this machine at a time; each worker gets its part of the threads. Other arms of the
    /// experiment that are alive here when a worker starts count as well.
    pub arms: Vec<String>,
}

impl WorkerCommand {
    fn build(&self, arm: &str, stop_after: Option<u64>, sharing: usize, output: File) -> Result<Command> {
        let errors = output.try_clone().map_err(|error| io_error("cannot share the log", Path::new(arm), &error))?;
        let mut command = Command::new(&self.executable);
        command.args(["--no-ui", "run"]).arg(&self.experiment).args(["--arm", arm]).args(&self.arguments);
        if let Some(step) = stop_after {
            command.args(["--stop-after", &step.to_string()]);
        }
        command.env(THREADS_VARIABLE, threads_each(sharing).to_string()).env(DETACHED_WORKER_VARIABLE, "1");
        command.stdin(Stdio::null()).stdout(output).stderr(errors);
        // Its own process group: neither Ctrl-C in our terminal nor the hang-up when that closes reaches it, since the
        // kernel sends both to the foreground group only. (A session of its own would need code between fork and exec.)
        command.process_group(0);
        Ok(command)
    }
}

/// How many arms the machine is shared by when `arm` starts: those planned, and those alive beside them.
fn sharing(runs: &ExperimentRuns, planned: &[String], arm: &str) -> usize {
    let is_alive = |run: &RunDir| {
        let record = run.newest_attempt().ok().flatten().and_then(|attempt| std::fs::read(attempt.record()).ok());
        let record = record.and_then(|text| serde_json::from_slice::<AttemptRecord>(&text).ok());
        record.is_some_and(|record| record.process.liveness() == Liveness::Alive)
    };
    // A folder that cannot be listed must not keep a run from starting.
    let on_disk = runs.list().unwrap_or_default();
    let alive = on_disk.iter().filter(|run| is_alive(run)).map(RunDir::arm);
    let arms: BTreeSet<String> = alive.chain(planned.iter().cloned()).chain([arm.to_owned()]).collect();
    arms.len()
}

/// An equal share of the threads that this process may use, at least one.
fn threads_each(sharing: usize) -> usize {
    let asked =
        std::env::var(THREADS_VARIABLE).ok().and_then(|text| text.parse::<usize>().ok()).filter(|&threads| threads > 0);
    let available = asked.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, std::num::NonZero::get));
    (available / sharing.max(1)).max(1)
}

/// A worker started from here that has ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerExit {
    pub arm: String,
    pub pid: u32,
    pub status: ExitStatus,
    /// Last line that it wrote to its log, if any.
    pub last_line: Option<String>,
}

impl WorkerExit {
    /// `exited with code 78: ...`, `was killed by signal 9`.
    pub fn words(&self) -> String {
        let end = match (self.status.code(), self.status.signal()) {
            (Some(code), _) => format!("exited with code {code}"),
            (None, Some(signal)) => format!("was killed by signal {signal}"),
            (None, None) => "ended".to_owned(),
        };
        match &self.last_line {
            Some(line) => format!("{end}: {line}"),
            None => end,
        }
    }
}

#[derive(Debug)]
struct OwnWorker {
    arm: String,
    child: Child,
    /// Length of `worker-start.log` when it was started.
    log_start: u64,
}

/// Performs effects on this machine, and keeps the children it started from becoming zombies.
#[derive(Debug)]
pub struct LocalDriver {
    command: WorkerCommand,
    runs: ExperimentRuns,
    /// Who asks, for the records: `console`, `lbva-tui stop`, ...
    by: String,
    workers: Vec<OwnWorker>,
}

impl LocalDriver {
    pub fn new(command: WorkerCommand, by: impl Into<String>) -> Self {
        let runs = ExperimentRuns::new(&command.experiment);
        Self { command, runs, by: by.into(), workers: Vec::new() }
    }

    pub fn runs(&self) -> &ExperimentRuns {
        &self.runs
    }

    /// Performs one effect for `arm`; what came of it goes back into the machine. Timeouts and reports are not the
    /// driver's and give nothing.
    pub fn perform(&mut self, arm: &str, effect: &Effect) -> Option<Event> {
        let run = self.runs.run(arm);
        let done = match effect {
            Effect::StartWorker { stop_after } => {
                self.start(arm, *stop_after).map(|pid| Some(Event::WorkerStarted { pid }))
            }
            Effect::WriteStopFile(worker) => write_stop_file(&run, worker, &self.by).map(|()| None),
            Effect::Signal { worker, signal } => signal_worker(&run, worker, *signal, &self.by).map(|()| None),
            Effect::Submit | Effect::CancelJob { .. } => {
                Err(Error::refused("no_slurm", "the experiment has no slurm: block"))
            }
            Effect::ScheduleTimeout { .. } | Effect::Report { .. } => Ok(None),
        };
        done.unwrap_or_else(|error| Some(Event::EffectFailed { effect: effect.clone(), words: error.to_string() }))
    }

    /// Starts a detached worker and returns its pid. Its output goes to the run's `worker-start.log` until it opens
    /// its attempt; with `stop_after`, it leaves again after that step. Errors: exit 74 if the run folder cannot be written, 70 if the executable cannot be started.
    pub fn start(&mut self, arm: &str, stop_after: Option<u64>) -> Result<u32> {
        let log = open_start_log(&self.runs.run(arm))?;
        let log_start = log.metadata().map_or(0, |metadata| metadata.len());
        let sharing = sharing(&self.runs, &self.command.arms, arm);
        let child =
            self.command.build(arm, stop_after, sharing, log)?.spawn().map_err(|error| {
                Error::crash(format!("cannot start a worker: {error}")).at(&self.command.executable)
            })?;
        let pid = child.id();
        self.workers.push(OwnWorker { arm: arm.to_owned(), child, log_start });
        Ok(pid)
    }

    /// Workers started from here that have ended since the last call. Call it regularly: until then they are zombies.
    pub fn reap(&mut self) -> Vec<WorkerExit> {
        let mut exits = Vec::new();
        let runs = &self.runs;
        self.workers.retain_mut(|worker| match worker.child.try_wait() {
            Ok(Some(status)) => {
                let pid = worker.child.id();
                let last_line = last_words(&runs.run(&worker.arm), pid, worker.log_start);
                exits.push(WorkerExit { arm: worker.arm.clone(), pid, status, last_line });
                false
            }
            // An error means that somebody else has waited for it: nothing more will be known here.
            Ok(None) => true,
            Err(_) => false,
        });
        exits
    }

    /// Workers started from here that were alive at the last [`reap`](Self::reap): (arm, pid).
    pub fn workers(&self) -> impl Iterator<Item = (&str, u32)> {
        self.workers.iter().map(|worker| (worker.arm.as_str(), worker.child.id()))
    }
}

/// Creates the run's folder if need be and opens `worker-start.log`. Errors: exit 74, a code for each cause.
pub(super) fn open_start_log(run: &RunDir) -> Result<File> {
    create_folder(run.root())?;
    let path = run.start_log();
    let log = OpenOptions::new().append(true).create(true).open(&path);
    log.map_err(|error| io_error("cannot open the worker's log", &path, &error))
}

/// Asks `worker` to stop with a checkpoint: stop file, and SIGTERM if it runs on this machine. Returns what was done.
///
/// Errors: exit 78 if the run is no longer at this worker or it is gone; 74 if the file cannot be written.
pub fn request_stop(run: &RunDir, worker: &WorkerRef, by: &str) -> Result<String> {
    let record = newest_record(run, worker)?;
    if record.process.liveness() == Liveness::Dead {
        return Err(gone(worker));
    }
    write_stop_file(run, worker, by)?;
    if !record.process.is_local() {
        return Ok(format!(
            "stop file written for {worker}; it is on another host and will see the file after its step"
        ));
    }
    signal_worker(run, worker, WorkerSignal::Stop, by)?;
    Ok(format!("stop file written and SIGTERM sent to {worker}; it saves at the next step and leaves"))
}

/// Kills `worker` at once, without a checkpoint. Returns what was done; the run's state tells when it is gone.
///
/// Errors: exit 78 if the run is no longer at this worker, it is gone, or it is on another host.
pub fn kill(run: &RunDir, worker: &WorkerRef, by: &str) -> Result<String> {
    signal_worker(run, worker, WorkerSignal::Kill, by)?;
    Ok(format!("SIGKILL sent to {worker}"))
}

/// The stop file for this worker. If it is part of a job, that is to be cancelled afterwards.
pub(super) fn write_stop_file(run: &RunDir, worker: &WorkerRef, by: &str) -> Result<()> {
    newest_record(run, worker)?;
    let request = StopRequest {
        by: by.to_owned(),
        attempt: Some(worker.attempt),
        time_ms: now_ms(),
        cancel_job: worker.job.is_some(),
    };
    let text = serde_json::to_vec(&request).map_err(|error| Error::crash(format!("stop request: {error}")))?;
    create_folder(&run.control())?;
    write_whole(&run.stop_request(), &text)
}

/// The newest attempt's record, if it is the worker that is meant.
fn newest_record(run: &RunDir, worker: &WorkerRef) -> Result<AttemptRecord> {
    let moved_on = |what: String| {
        Error::refused("attempt_changed", format!("{worker} was meant, but {what}"))
            .at(run.root())
            .hint("look at the run again and repeat the request if it still applies")
    };
    let Some(attempt) = run.newest_attempt()? else { return Err(moved_on("the run has no attempt".to_owned())) };
    let text = std::fs::read(attempt.record())
        .map_err(|error| io_error("cannot read the attempt", &attempt.record(), &error))?;
    let record: AttemptRecord = serde_json::from_slice(&text)
        .map_err(|error| moved_on(format!("the newest attempt's record is damaged: {error}")))?;
    if record.attempt != worker.attempt || record.process.pid != worker.pid {
        return Err(moved_on(format!("the run is at attempt {} (pid {})", record.attempt, record.process.pid)));
    }
    Ok(record)
}

fn gone(worker: &WorkerRef) -> Error {
    Error::refused("worker_gone", format!("{worker} is no longer there"))
}

/// Sends the signal to exactly the recorded process. The process is pinned before its start time is compared, so that
/// its number cannot pass to another process in between.
fn signal_worker(run: &RunDir, worker: &WorkerRef, signal: WorkerSignal, by: &str) -> Result<()> {
    let record = newest_record(run, worker)?;
    if !record.process.is_local() {
        return Err(Error::refused(
            "other_host",
            format!("{worker} runs on another host; no signal reaches it from here"),
        ));
    }
    let pinned = PinnedProcess::open(record.process.pid).ok_or_else(|| gone(worker))?;
    if record.process.liveness() != Liveness::Alive {
        return Err(gone(worker));
    }
    let number = match signal {
        WorkerSignal::Stop => Signal::TERM,
        WorkerSignal::Kill => {
            // Before the act: afterwards there is nobody left to say why the attempt ended in silence.
            record_kill(run, worker, by)?;
            Signal::KILL
        }
    };
    pinned.send(number).map_err(|errno| {
        // Nothing happened, so nothing may be put down to this request later.
        let _ = remove_file(&run.kill_record());
        match errno {
            rustix::io::Errno::SRCH => gone(worker),
            errno => Error::refused("signal_refused", format!("{worker} cannot be signalled: {errno}")),
        }
    })
}

/// Notes that this worker is killed on request.
pub(super) fn record_kill(run: &RunDir, worker: &WorkerRef, by: &str) -> Result<()> {
    newest_record(run, worker)?;
    let record = KillRecord { by: by.to_owned(), attempt: worker.attempt, pid: worker.pid, time_ms: now_ms() };
    let text = serde_json::to_vec(&record).map_err(|error| Error::crash(format!("kill record: {error}")))?;
    create_folder(&run.control())?;
    write_whole(&run.kill_record(), &text)
}

/// A process that keeps its meaning until it is signalled, where the system has pidfds; a plain pid elsewhere.
enum PinnedProcess {
    #[cfg(target_os = "linux")]
    Descriptor(rustix::fd::OwnedFd),
    Number(rustix::process::Pid),
}

impl PinnedProcess {
    fn open(pid: u32) -> Option<Self> {
        let pid = rustix::process::Pid::from_raw(i32::try_from(pid).ok()?)?;
        #[cfg(target_os = "linux")]
        match rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()) {
            Ok(descriptor) => return Some(Self::Descriptor(descriptor)),
            Err(rustix::io::Errno::SRCH) => return None,
            // An old kernel, or a sandbox that forbids it.
            Err(_) => {}
        }
        Some(Self::Number(pid))
    }

    fn send(&self, signal: Signal) -> rustix::io::Result<()> {
        match self {
            #[cfg(target_os = "linux")]
            Self::Descriptor(descriptor) => rustix::process::pidfd_send_signal(descriptor, signal),
            Self::Number(pid) => rustix::process::kill_process(*pid, signal),
        }
    }
}

/// Last line that worker `pid` wrote: in its attempt's `worker.log` if it got that far, else after `start` in
/// `worker-start.log`.
fn last_words(run: &RunDir, pid: u32, start: u64) -> Option<String> {
    let attempt = run.newest_attempt().ok().flatten();
    let own = attempt.filter(|attempt| {
        let record = std::fs::read(attempt.record()).ok();
        let record = record.and_then(|text| serde_json::from_slice::<AttemptRecord>(&text).ok());
        record.is_some_and(|record| record.process.pid == pid)
    });
    own.and_then(|attempt| last_line(&attempt.worker_log(), 0)).or_else(|| last_line(&run.start_log(), start))
}

fn last_line(path: &Path, start: u64) -> Option<String> {
    let mut file = File::open(path).ok()?;
    let length = file.metadata().ok()?.len();
    file.seek(SeekFrom::Start(start.max(length.saturating_sub(LAST_WORDS_BYTES)))).ok()?;
    let mut bytes = Vec::new();
    file.take(LAST_WORDS_BYTES).read_to_end(&mut bytes).ok()?;
    let text = String::from_utf8_lossy(&bytes);
    // A panic ends with advice; its cause stands before.
    let line = text.lines().rev().map(str::trim).find(|line| !line.is_empty() && !line.starts_with("note:"))?;
    Some(line.chars().map(|c| if c.is_control() { ' ' } else { c }).collect())
}
