//! The tolerant reader: follows a run directory that somebody else writes, at any moment of its life.
//!
//! It keeps a byte offset for each event log and moves it only past a newline, so a line that is still being written is
//! read again next time. Lines inside that are no events are counted and shown. A file that shrank or was replaced makes
//! it read everything again. Nothing is ever written here.

use super::assemble::Assembler;
use super::checkpoints::{Check, CheckpointStore};
use super::clock::WorkerClock;
use super::event::{AttemptStarted, Event, Level, Outcome};
use super::parse::{Line, any_line, step_line};
use super::paths::{AttemptDir, RunDir};
use super::process::ProcessIdentity;
use super::view::{Liveness, OutcomeView, RunView, SaveView};
use super::writer::{AttemptRecord, KillRecord, OutcomeRecord, StopWatch};
use crate::Result;
use crate::files::io_error;
use rayon::prelude::*;
use serde::de::DeserializeOwned;
use std::fs::{File, Metadata};
use std::io::{self, ErrorKind, Read, Seek, SeekFrom};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

const READ_BYTES: usize = 1 << 20;
/// A longer line is garbage (zeros after a crash of the machine, say) and is not kept in memory.
const LONGEST_LINE: usize = 1 << 20;
/// Steps this close to the end of a log get log lines; nobody scrolls through the others.
const LOGGED_TAIL_BYTES: u64 = 64 << 10;

/// Follows one run.
#[derive(Debug)]
pub struct RunReader {
    run: RunDir,
    assembler: Assembler,
    tails: Vec<Tail>,
    newest_record: Option<(u32, AttemptRecord)>,
    clock: WorkerClock,
    outcome_stamp: Option<Stamp>,
    outcome: Option<OutcomeRecord>,
    /// The folder as last looked at, and how many saves the log had reported then.
    checkpoints_stamp: (Option<Stamp>, usize),
    keep_lines: bool,
    lines: Vec<String>,
}

/// Position in one event log.
#[derive(Debug)]
struct Tail {
    attempt: u32,
    /// Bytes consumed: just past a newline, or inside an over-long line.
    offset: u64,
    lines: u64,
    inode: u64,
    /// Inside an over-long line that was already counted.
    skipping: bool,
}

/// Tells whether a small file or a folder changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stamp {
    inode: u64,
    bytes: u64,
    modified: (i64, i64),
}

impl Stamp {
    fn of(metadata: &Metadata) -> Self {
        Self { inode: metadata.ino(), bytes: metadata.len(), modified: (metadata.mtime(), metadata.mtime_nsec()) }
    }

    fn at(path: &Path) -> Option<Self> {
        std::fs::metadata(path).ok().map(|metadata| Self::of(&metadata))
    }
}

impl RunReader {
    /// A reader of `directory`, which need not exist yet. Reads nothing before the first [`poll`](Self::poll).
    pub fn open(directory: &Path) -> Self {
        let mut reader = Self {
            run: RunDir::new(directory),
            assembler: Assembler::default(),
            tails: Vec::new(),
            newest_record: None,
            clock: WorkerClock::default(),
            outcome_stamp: None,
            outcome: None,
            checkpoints_stamp: (None, 0),
            keep_lines: false,
            lines: Vec::new(),
        };
        reader.reset();
        reader
    }

    pub fn run(&self) -> &RunDir {
        &self.run
    }

    pub fn view(&self) -> &RunView {
        &self.assembler.view
    }

    /// Log lines ever added to the view; with it, a caller finds those it has not seen.
    pub fn lines_logged(&self) -> u64 {
        self.assembler.logged
    }

    /// Also keep every valid line from now on as it was written, for [`take_lines`](Self::take_lines).
    pub fn keep_lines(&mut self) {
        self.keep_lines = true;
    }

    /// Valid lines read since the last call, as JSON text.
    pub fn take_lines(&mut self) -> Vec<String> {
        std::mem::take(&mut self.lines)
    }

    /// Reads what is new; `true` if the view changed. `now_ms` stamps findings that carry no time of their own.
    ///
    /// A run directory that does not exist (yet) is no error; one that cannot be read is.
    pub fn poll(&mut self, now_ms: u64) -> Result<bool> {
        let numbers = self.run.attempt_numbers()?;
        let mut changed = false;
        if self.tails.iter().any(|tail| !numbers.contains(&tail.attempt)) {
            self.reset();
            self.assembler.log(now_ms, Level::Warning, "an attempt's folder was removed; everything is read again");
            changed = true;
        }
        // A new attempt begins only after the one before it is over, so earlier logs are read to their end once.
        let newest_known = self.tails.last().map(|tail| tail.attempt);
        let mut read = false;
        for &number in numbers.iter().filter(|&&number| newest_known.is_none_or(|known| number >= known)) {
            match self.read_attempt(number, numbers.last() == Some(&number)) {
                Ok(grown) => read |= grown,
                Err(ReadFailure::Replaced) => {
                    self.reset();
                    let text = format!("the event log of attempt {number} was replaced; everything is read again");
                    self.assembler.log(now_ms, Level::Warning, text);
                    self.poll(now_ms)?;
                    return Ok(true);
                }
                Err(ReadFailure::Io(error)) => {
                    return Err(io_error("cannot read the event log", &self.run.attempt(number).events(), &error));
                }
            }
        }
        self.compare_clocks(read, now_ms);
        changed |= self.refresh_evidence()?;
        Ok(changed | read)
    }

    /// Whether lines came since the last look tells how far the worker's clock is from this machine's.
    fn compare_clocks(&mut self, read: bool, now_ms: u64) {
        let (Some(newest_ms), Some(tail)) = (self.assembler.view.last_event_ms, self.tails.last()) else { return };
        let written = || {
            let modified = std::fs::metadata(self.run.attempt(tail.attempt).events()).ok()?.modified().ok()?;
            modified.duration_since(std::time::UNIX_EPOCH).ok()?.as_millis().try_into().ok()
        };
        let modified_ms = read.then(written).flatten().unwrap_or(newest_ms);
        let view = &mut self.assembler.view;
        view.clock_offset_ms = self.clock.offset_ms(view.clock_offset_ms, newest_ms, modified_ms, read, now_ms);
        let host = view.attempt().map(|attempt| attempt.started.host.clone()).unwrap_or_default();
        if let Some(words) = self.clock.words(view.clock_offset_ms, &host) {
            self.assembler.log(now_ms, Level::Warning, words);
        }
    }

    fn reset(&mut self) {
        self.assembler = Assembler::default();
        self.assembler.view.arm = self.run.arm();
        self.assembler.view.directory = self.run.root().to_owned();
        self.tails.clear();
        self.newest_record = None;
        self.clock = WorkerClock::default();
        self.outcome_stamp = None;
        self.outcome = None;
        self.checkpoints_stamp = (None, 0);
    }

    fn read_attempt(&mut self, number: u32, newest: bool) -> Result<bool, ReadFailure> {
        let attempt = self.run.attempt(number);
        let mut entered = false;
        if self.tails.last().is_none_or(|tail| tail.attempt < number) {
            self.tails.push(Tail { attempt: number, offset: 0, lines: 0, inode: 0, skipping: false });
            self.assembler.enter_attempt(number);
            entered = true;
        }
        let grown = match std::fs::metadata(attempt.events()) {
            Ok(metadata) => self.read_log(&attempt, &metadata)?,
            Err(error) if error.kind() == ErrorKind::NotFound => false,
            Err(error) => return Err(ReadFailure::Io(error)),
        };
        if newest && self.newest_record.as_ref().is_none_or(|(known, _)| *known != number) {
            self.newest_record = read_json::<AttemptRecord>(&attempt.record()).map(|record| (number, record));
            if let Some((_, record)) = &self.newest_record {
                let assumed =
                    assumed_start(record, self.assembler.view.attempts.last().map(|last| &last.started), &self.run);
                self.assembler.assume_attempt(assumed, record.started_ms);
                entered = true;
            }
        }
        Ok(grown || entered)
    }

    /// Reads a log from its offset to its present end.
    fn read_log(&mut self, attempt: &AttemptDir, metadata: &Metadata) -> Result<bool, ReadFailure> {
        let Some(tail) = self.tails.last_mut() else { return Ok(false) };
        let replaced = tail.inode != 0 && tail.inode != metadata.ino();
        if replaced || metadata.len() < tail.offset {
            return Err(ReadFailure::Replaced);
        }
        tail.inode = metadata.ino();
        if metadata.len() == tail.offset {
            return Ok(false);
        }
        let mut file = File::open(attempt.events()).map_err(ReadFailure::Io)?;
        file.seek(SeekFrom::Start(tail.offset)).map_err(ReadFailure::Io)?;
        let end = metadata.len();
        let name = format!("attempts/{:04}/events.jsonl", attempt.number());
        let mut sink = LineSink {
            assembler: &mut self.assembler,
            kept: self.keep_lines.then_some(&mut self.lines),
            name: &name,
            last_step: Vec::new(),
        };
        let mut changed = false;
        let mut buffer = vec![0u8; READ_BYTES.min((end - tail.offset) as usize + 1)];
        // Bytes at the start of the buffer that belong to a line whose end has not been read.
        let mut held = 0;
        loop {
            if held == buffer.len() {
                buffer.resize(buffer.len() * 2, 0);
            }
            let read = match file.read(buffer.get_mut(held..).unwrap_or_default()) {
                Ok(0) => break,
                Ok(read) => read,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => return Err(ReadFailure::Io(error)),
            };
            let filled = held + read;
            let bytes = buffer.get(..filled).unwrap_or_default();
            let used = sink.take(bytes, held, tail, end.saturating_sub(LOGGED_TAIL_BYTES));
            changed |= used > 0;
            buffer.copy_within(used..filled, 0);
            held = filled - used;
        }
        sink.finish();
        Ok(changed)
    }

    /// Everything that is not in an event log: outcome, requests, checkpoints on disk, the process itself.
    fn refresh_evidence(&mut self) -> Result<bool> {
        let before = self.evidence();
        let newest_attempt = self.tails.last().map(|tail| tail.attempt);

        let stamp = Stamp::at(&self.run.outcome());
        if stamp != self.outcome_stamp {
            self.outcome = read_json(&self.run.outcome());
            // A file that does not parse (yet) is tried again.
            self.outcome_stamp = if self.outcome.is_some() { stamp } else { None };
        }
        let stamp = (Stamp::at(&self.run.checkpoints()), self.assembler.view.saves.len());
        if stamp != self.checkpoints_stamp {
            self.checkpoints_stamp = stamp;
            self.assembler.view.last_save = None;
            if let Some(checkpoint) = CheckpointStore::new(&self.run).latest_complete(Check::Sizes)?.checkpoint {
                let manifest_ms = std::fs::metadata(&checkpoint.path).map_or(0, |metadata| {
                    metadata.mtime().unsigned_abs() * 1000 + metadata.mtime_nsec().unsigned_abs() / 1_000_000
                });
                self.assembler.view.last_save = Some(SaveView {
                    step: checkpoint.step,
                    bytes: checkpoint.bytes(),
                    ms: f64::NAN,
                    blocked_ms: f64::NAN,
                    attempt: 0,
                    time_ms: manifest_ms,
                });
            }
        }
        // The folder says that it is there; how long it took is only in the log, which may tell a moment later.
        let RunView { last_save, saves, .. } = &mut self.assembler.view;
        if let Some(save) = last_save
            && let Some(reported) = saves.iter().rev().find(|reported| reported.step == save.step)
        {
            *save = *reported;
        }

        let view = &mut self.assembler.view;
        let recorded = self.newest_record.as_ref().map(|(_, record)| record.process.liveness());
        view.liveness = match (recorded, view.attempts.last()) {
            (Some(liveness), _) => liveness,
            (None, Some(attempt)) => ProcessIdentity {
                pid: attempt.started.pid,
                host: attempt.started.host.clone(),
                start_ticks: None,
                boot_id: None,
                pid_namespace: None,
            }
            .liveness(),
            (None, None) => Liveness::None,
        };
        // An outcome of an earlier attempt says nothing about this one.
        let outcome = self.outcome.as_ref().filter(|outcome| Some(outcome.attempt) >= newest_attempt);
        view.outcome = outcome.map(|record| OutcomeView {
            outcome: record.outcome,
            reason: record.reason.clone(),
            exit_code: record.exit_code,
            step: record.step,
        });
        if view.outcome.is_none() && view.liveness == Liveness::Dead {
            let killed = self.killed_outcome(newest_attempt);
            self.assembler.view.outcome = killed;
        }
        let view = &mut self.assembler.view;
        let over = view.outcome.is_some() || view.liveness == Liveness::Dead;
        view.stop_requested = !over
            && (self.assembler.stop_announced
                || newest_attempt.is_some_and(|attempt| StopWatch::of(&self.run, attempt).requested().is_some()));
        Ok(before != self.evidence())
    }

    /// A silent end that was asked for.
    fn killed_outcome(&self, newest_attempt: Option<u32>) -> Option<OutcomeView> {
        let record = read_json::<KillRecord>(&self.run.kill_record())?;
        if Some(record.attempt) != newest_attempt {
            return None;
        }
        let step = self.assembler.view.series.step.last().copied().unwrap_or_default();
        let reason = format!("killed on request by {} at step {step}", record.by);
        Some(OutcomeView { outcome: Outcome::Failed, reason, exit_code: crate::Exit::Crash.code(), step })
    }

    fn evidence(&self) -> Evidence {
        let view = &self.assembler.view;
        let save = view.last_save.map(|save| (save.step, save.time_ms, save.ms.to_bits()));
        Evidence { outcome: view.outcome.clone(), liveness: view.liveness, stop_requested: view.stop_requested, save }
    }
}

/// What a view holds besides the event logs, to see whether it changed.
#[derive(PartialEq)]
struct Evidence {
    outcome: Option<OutcomeView>,
    liveness: Liveness,
    stop_requested: bool,
    /// Step, time, and the bits of the duration, which may be NaN.
    save: Option<(u64, u64, u64)>,
}

enum ReadFailure {
    /// Shrank, or is another file now.
    Replaced,
    Io(io::Error),
}

/// Splits bytes into lines and feeds the assembler.
struct LineSink<'r> {
    assembler: &'r mut Assembler,
    kept: Option<&'r mut Vec<String>>,
    name: &'r str,
    /// The newest step line of the fast path; parsed in full once, at the end.
    last_step: Vec<u8>,
}

impl LineSink<'_> {
    /// Consumes complete lines of `bytes` and returns how many bytes that was. The first `searched` bytes hold no newline.
    fn take(&mut self, bytes: &[u8], searched: usize, tail: &mut Tail, logged_from: u64) -> usize {
        let mut used = 0;
        let mut last_step = None;
        loop {
            let rest = bytes.get(used..).unwrap_or_default();
            let logged = tail.offset >= logged_from;
            if !tail.skipping
                && let Some((columns, length)) = step_line(rest)
            {
                self.assembler.step(&columns, logged);
                last_step = Some(used..used + length);
                self.keep(rest.get(..length - 1).unwrap_or_default());
                used += length;
                tail.offset += length as u64;
                tail.lines += 1;
                continue;
            }
            let from = if used == 0 { searched } else { 0 };
            let newline = rest.get(from..).unwrap_or_default().iter().position(|&byte| byte == b'\n');
            let Some(length) = newline.map(|newline| from + newline) else {
                if rest.len() > LONGEST_LINE {
                    if !tail.skipping {
                        self.assembler.bad_line(self.name, tail.lines + 1, "longer than 1 MiB", rest);
                    }
                    tail.skipping = true;
                    tail.offset += rest.len() as u64;
                    used = bytes.len();
                }
                break;
            };
            let line = rest.get(..length).unwrap_or_default();
            used += length + 1;
            tail.offset += length as u64 + 1;
            tail.lines += 1;
            if std::mem::take(&mut tail.skipping) {
                continue;
            }
            match any_line(line) {
                Line::Event(event) => {
                    if matches!(event.event, Event::Step(_)) {
                        last_step = None;
                        self.last_step.clear();
                    }
                    self.assembler.event(*event, logged);
                    self.keep(line);
                }
                Line::Skipped => {}
                Line::Bad(why) => self.assembler.bad_line(self.name, tail.lines, &why, line),
            }
        }
        if let Some(range) = last_step {
            self.last_step.clear();
            self.last_step.extend_from_slice(bytes.get(range).unwrap_or_default());
        }
        used
    }

    fn keep(&mut self, line: &[u8]) {
        if let Some(kept) = &mut self.kept {
            kept.push(String::from_utf8_lossy(line).into_owned());
        }
    }

    fn finish(self) {
        if let Line::Event(line) = any_line(&self.last_step)
            && let Event::Step(step) = line.event
        {
            self.assembler.set_last_step(step);
        }
    }
}

/// Polls all readers at once, over the machine's cores; one result each, in their order.
pub fn poll_all(readers: &mut [RunReader], now_ms: u64) -> Vec<Result<bool>> {
    readers.par_iter_mut().map(|reader| reader.poll(now_ms)).collect()
}

/// `None` if the file is absent or not (yet) valid.
fn read_json<T: DeserializeOwned>(path: &Path) -> Option<T> {
    serde_json::from_slice(&std::fs::read(path).ok()?).ok()
}

/// What an attempt without a first event is taken to be: its own record, and the plan of the attempt before it.
fn assumed_start(record: &AttemptRecord, before: Option<&AttemptStarted>, run: &RunDir) -> AttemptStarted {
    AttemptStarted {
        attempt: record.attempt,
        arm: run.arm(),
        pid: record.process.pid,
        host: record.process.host.clone(),
        start_step: 0,
        total_steps: before.map_or(0, |before| before.total_steps),
        save_every: before.map_or(0, |before| before.save_every),
        validate_every: before.map_or(0, |before| before.validate_every),
        parameters: before.map_or(0, |before| before.parameters),
        device: before.map_or_else(|| "unknown".to_owned(), |before| before.device.clone()),
        threads: before.map_or(0, |before| before.threads),
        job: record.job.clone(),
    }
}
