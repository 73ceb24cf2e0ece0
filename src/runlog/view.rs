//! What a run directory says, as plain values: the read side of the run log, and all that the console knows of a run.
//!
//! Pure data. `reader` fills it from files; tests and benchmarks build it by hand.

use super::event::{AttemptStarted, Level, Memory, Outcome, Phase, StepEvent, ValidationEvent};
use std::path::PathBuf;

/// One run (an arm being trained, over any number of attempts).
#[derive(Debug, Default, PartialEq)]
pub struct RunView {
    /// Arm name: the folder's name.
    pub arm: String,
    pub directory: PathBuf,
    pub attempts: Vec<AttemptView>,
    pub series: Series,
    pub validations: Vec<ValidationPoint>,
    /// Latest checkpoint that is complete.
    pub last_save: Option<SaveView>,
    /// Every save that was reported, whether or not it is still on disk, in order.
    pub saves: Vec<SaveView>,
    /// Where the run went on although it was bound to something else, oldest first.
    pub changes: Vec<ChangeView>,
    /// Newest last, bounded.
    pub log: Vec<LogLine>,
    /// Work between steps: the latest phase and its progress, until the next step.
    pub phase: Option<PhaseView>,
    pub last_step: Option<StepEvent>,
    /// Unix ms of the newest event of any kind.
    pub last_event_ms: Option<u64>,
    /// What is to be added to the worker's times to have them by the clock of this machine, ms.
    pub clock_offset_ms: i64,
    /// Lines inside the log (not its torn tail) that were no valid events.
    pub bad_lines: u64,
    /// Written by the program at its end.
    pub outcome: Option<OutcomeView>,
    /// Is the worker of the newest attempt alive, as far as this machine can tell.
    pub liveness: Liveness,
    /// The newest attempt is asked to stop: by a request in `control/` that means it, or by its own word.
    pub stop_requested: bool,
}

/// By hand for `clone_from`, as for [`Series`].
impl Clone for RunView {
    fn clone(&self) -> Self {
        let mut copy = Self::default();
        copy.clone_from(self);
        copy
    }

    fn clone_from(&mut self, source: &Self) {
        let Self {
            arm,
            directory,
            attempts,
            series,
            validations,
            last_save,
            saves,
            changes,
            log,
            phase,
            last_step,
            last_event_ms,
            clock_offset_ms,
            bad_lines,
            outcome,
            liveness,
            stop_requested,
        } = source;
        self.arm.clone_from(arm);
        self.directory.clone_from(directory);
        self.attempts.clone_from(attempts);
        self.series.clone_from(series);
        self.validations.clone_from(validations);
        self.last_save = *last_save;
        self.saves.clone_from(saves);
        self.changes.clone_from(changes);
        self.log.clone_from(log);
        self.phase = *phase;
        self.last_step.clone_from(last_step);
        self.last_event_ms = *last_event_ms;
        self.clock_offset_ms = *clock_offset_ms;
        self.bad_lines = *bad_lines;
        self.outcome.clone_from(outcome);
        self.liveness = *liveness;
        self.stop_requested = *stop_requested;
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct AttemptView {
    pub started: AttemptStarted,
    pub started_ms: u64,
    /// When its first step was done.
    pub first_step_ms: Option<u64>,
    /// How it ended by its own word; `None` while it runs, or if it died without one.
    pub ended: Option<(Outcome, String)>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PhaseView {
    pub phase: Phase,
    pub done: u64,
    pub total: u64,
    /// Unix ms when this phase was first and last reported, for its rate.
    pub since_ms: u64,
    pub time_ms: u64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SaveView {
    pub step: u64,
    pub bytes: u64,
    /// From its beginning until it was durable.
    pub ms: f64,
    /// How long training stood still for it.
    pub blocked_ms: f64,
    /// 0 if no log tells.
    pub attempt: u32,
    pub time_ms: u64,
}

/// A difference from the run's record that was accepted by name.
#[derive(Clone, Debug, PartialEq)]
pub struct ChangeView {
    pub attempt: u32,
    /// Completed steps at which it came in.
    pub step: u64,
    pub field: String,
    /// Both values: `1e-4 -> 2e-4`.
    pub values: String,
}

#[derive(Debug, PartialEq)]
pub struct LogLine {
    pub time_ms: u64,
    pub level: Level,
    pub text: String,
}

/// By hand for `clone_from`, as for [`Series`].
impl Clone for LogLine {
    fn clone(&self) -> Self {
        Self { time_ms: self.time_ms, level: self.level, text: self.text.clone() }
    }

    fn clone_from(&mut self, source: &Self) {
        let Self { time_ms, level, text } = source;
        self.time_ms = *time_ms;
        self.level = *level;
        self.text.clone_from(text);
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct OutcomeView {
    pub outcome: Outcome,
    pub reason: String,
    pub exit_code: u8,
    pub step: u64,
}

#[derive(Clone, Debug, PartialEq)]
pub struct ValidationPoint {
    pub attempt: u32,
    pub event: ValidationEvent,
}

/// Evidence of life of the newest attempt's process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Liveness {
    /// No attempt yet.
    #[default]
    None,
    Alive,
    /// The process is gone (or its number belongs to another process now).
    Dead,
    /// Another host: only the age of the data can tell.
    Unknown,
}

/// Per-step columns, in order of arrival. Steps repeated after a resume appear twice, told apart by attempt;
/// `superseded` marks the earlier copies so that charts draw the line that was continued.
#[derive(Debug, Default, PartialEq)]
pub struct Series {
    pub step: Vec<u64>,
    pub attempt: Vec<u32>,
    pub superseded: Vec<bool>,
    pub loss: Vec<f32>,
    pub step_ms: Vec<f32>,
    pub memory_bytes: Vec<f32>,
    pub padding_waste: Vec<f32>,
}

/// By hand for `clone_from`, which keeps the memory of the copy it replaces: a long run's columns are megabytes, and
/// asking the system for fresh pages at every look would cost more than filling them.
impl Clone for Series {
    fn clone(&self) -> Self {
        let mut copy = Self::default();
        copy.clone_from(self);
        copy
    }

    fn clone_from(&mut self, source: &Self) {
        let Self { step, attempt, superseded, loss, step_ms, memory_bytes, padding_waste } = source;
        self.step.clone_from(step);
        self.attempt.clone_from(attempt);
        self.superseded.clone_from(superseded);
        self.loss.clone_from(loss);
        self.step_ms.clone_from(step_ms);
        self.memory_bytes.clone_from(memory_bytes);
        self.padding_waste.clone_from(padding_waste);
    }
}

impl Series {
    pub fn len(&self) -> usize {
        self.step.len()
    }

    pub fn is_empty(&self) -> bool {
        self.step.is_empty()
    }
}

/// The honest state of a run, derived from evidence, never from one file's word alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RunState {
    /// No attempt has started.
    Waiting,
    /// Its job waits for a machine, for the first time or again.
    Queued,
    /// Alive, before its first step of this attempt.
    Starting,
    Running,
    /// Alive (or on another host) but silent for more than five of its own median steps and at least 30 s.
    Stalled,
    /// Asked to stop, saving.
    Stopping,
    /// Left early with a durable checkpoint, on request.
    Stopped,
    /// Left early with a durable checkpoint, since the system took the machine away.
    Preempted,
    /// Ended with an error, or died without a word.
    Failed,
    Finished,
}

impl RunState {
    /// The state in a word, the same on every screen and in every document.
    pub fn word(self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Queued => "queued",
            Self::Starting => "starting",
            Self::Running => "running",
            Self::Stalled => "stalled",
            Self::Stopping => "stopping",
            Self::Stopped => "stopped",
            Self::Preempted => "preempted",
            Self::Failed => "failed",
            Self::Finished => "finished",
        }
    }
}

impl RunView {
    /// Memory of the latest step.
    pub fn memory(&self) -> Option<Memory> {
        self.last_step.as_ref().map(|step| step.memory)
    }
}
