//! Run control as a pure state machine: an event in, effects out, for one run.
//!
//! Requests are bound to an attempt and its pid, not to a place on a screen: if the run has moved on since the question
//! was asked, nothing happens and the report says so. A state changes on evidence (the run's view), never on the hope
//! that an effect worked.

use crate::runlog::{Level, Liveness, Phase, RunState, RunView};
use crate::slurm::{JobId, JobView, judge};

/// How long a started worker may take to open its attempt before somebody is told.
pub const LAUNCH_TIMEOUT_MS: u64 = 60_000;
/// How long a stop request may go without any sign before somebody is told (and again after as long).
pub const STOP_TIMEOUT_MS: u64 = 60_000;
/// How long a killed worker may take to vanish.
pub const KILL_TIMEOUT_MS: u64 = 10_000;

/// The process that a request means.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerRef {
    pub attempt: u32,
    pub pid: u32,
    pub host: String,
    /// The job that it is part of, under Slurm.
    pub job: Option<JobId>,
}

impl WorkerRef {
    /// The worker of the newest attempt.
    pub fn of(view: &RunView) -> Option<Self> {
        let started = &view.attempt()?.started;
        let job = started.job.as_ref().map(|job| job.id);
        Some(Self { attempt: started.attempt, pid: started.pid, host: started.host.clone(), job })
    }
}

impl std::fmt::Display for WorkerRef {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.job {
            Some(job) => write!(f, "attempt {} (job {job} on {})", self.attempt, self.host),
            None => write!(f, "attempt {} (pid {} on {})", self.attempt, self.pid, self.host),
        }
    }
}

/// What the machine needs to know of a run at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Facts {
    pub state: RunState,
    pub reason: String,
    pub worker: Option<WorkerRef>,
    pub liveness: Liveness,
    /// The worker says that it is writing a checkpoint.
    pub saving: bool,
    /// The run's job that waits for a machine or has one.
    pub job: Option<JobId>,
}

impl Facts {
    /// `job` is the newest of the run, as far as Slurm was asked.
    pub fn of(view: &RunView, now_ms: u64, job: Option<&JobView>) -> Self {
        let (state, reason) = judge(view, now_ms, job);
        let job = job.filter(|job| job.is_live()).map(|job| job.id);
        let saving = view.phase.is_some_and(|phase| phase.phase == Phase::Saving);
        Self { state, reason, worker: WorkerRef::of(view), liveness: view.liveness, saving, job }
    }

    fn attempt(&self) -> u32 {
        self.worker.as_ref().map_or(0, |worker| worker.attempt)
    }

    fn is_live(&self) -> bool {
        matches!(self.state, RunState::Starting | RunState::Running | RunState::Stalled | RunState::Stopping)
    }
}

/// Names one timeout; one that belongs to a state already left is ignored.
pub type Token = u64;

/// Where the run is, as far as control is concerned.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// No attempt has started.
    Waiting,
    /// A job was asked for; Slurm has not answered.
    Submitting {
        token: Token,
    },
    /// A job waits for a machine: for the first time, or again after it was preempted.
    Queued,
    /// A worker was started from here; its attempt (later than `after`) has not appeared.
    Launching {
        after: u32,
        token: Token,
    },
    /// An attempt before its first step.
    Starting,
    /// Stepping, or stalled.
    Running,
    /// Asked to stop; no checkpoint is being written yet.
    StopRequested {
        worker: WorkerRef,
        token: Token,
    },
    /// Asked to stop, and writing the checkpoint.
    Checkpointing {
        worker: WorkerRef,
        token: Token,
    },
    /// Asked to die at once.
    Killing {
        worker: WorkerRef,
        token: Token,
    },
    Stopped,
    Preempted,
    Failed,
    Finished,
}

/// What can happen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// Start the run, or resume it from its newest checkpoint; with `stop_after`, leave again after that step.
    AskStart {
        stop_after: Option<u64>,
    },
    /// Hand the run to Slurm, to begin or to go on from its newest checkpoint.
    AskSubmit,
    /// Take the run's job out of the queue, before it has a worker.
    AskCancel {
        job: JobId,
    },
    /// Stop with a checkpoint.
    AskStop(WorkerRef),
    /// Stop without one.
    AskKill(WorkerRef),
    /// The run directory was read again.
    View(Facts),
    Timeout(Token),
    /// Slurm took the job.
    Submitted {
        job: JobId,
    },
    JobCancelled {
        job: JobId,
    },
    /// A command of the scheduler was run and worked.
    Done {
        words: String,
    },
    /// The process exists (its attempt may not yet).
    WorkerStarted {
        pid: u32,
    },
    /// A process started from here has ended; `words` say how, in its own last words if it had any. The view that goes
    /// before must have been read after that end: what it does not show then, the worker never recorded.
    WorkerExited {
        pid: u32,
        words: String,
    },
    /// An effect could not be performed.
    EffectFailed {
        effect: Effect,
        words: String,
    },
}

/// What is to be done about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    StartWorker { stop_after: Option<u64> },
    Submit,
    CancelJob { job: JobId },
    WriteStopFile(WorkerRef),
    Signal { worker: WorkerRef, signal: WorkerSignal },
    ScheduleTimeout { after_ms: u64, token: Token },
    Report { level: Level, text: String },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkerSignal {
    /// SIGTERM: checkpoint, then leave.
    Stop,
    /// SIGKILL.
    Kill,
}

/// The machine of one run.
#[derive(Clone, Debug)]
pub struct RunControl {
    state: State,
    facts: Option<Facts>,
    next_token: Token,
    /// In which the stop that is under way was asked for, and which have not failed.
    ways: usize,
}

impl Default for RunControl {
    fn default() -> Self {
        Self { state: State::Waiting, facts: None, next_token: 1, ways: 0 }
    }
}

impl RunControl {
    pub fn state(&self) -> &State {
        &self.state
    }

    /// Takes one event and says what to do.
    pub fn handle(&mut self, event: Event) -> Vec<Effect> {
        match event {
            Event::AskStart { stop_after } => self.ask_start(stop_after),
            Event::AskSubmit => self.ask_submit(),
            Event::AskCancel { job } => self.ask_cancel(job),
            Event::Submitted { job } => {
                self.state = State::Queued;
                vec![info(format!("submitted as job {job}"))]
            }
            Event::JobCancelled { job } => vec![info(format!("job {job} is cancelled"))],
            Event::Done { words } => vec![info(format!("`{words}` done"))],
            Event::AskStop(worker) => self.ask_stop(worker),
            Event::AskKill(worker) => self.ask_kill(worker),
            Event::View(facts) => self.view(facts),
            Event::Timeout(token) => self.timeout(token),
            Event::WorkerStarted { pid } => vec![info(format!("started worker {pid}"))],
            Event::WorkerExited { pid, words } => self.worker_exited(pid, &words),
            Event::EffectFailed { effect, words } => self.effect_failed(&effect, &words),
        }
    }

    fn ask_start(&mut self, stop_after: Option<u64>) -> Vec<Effect> {
        if let Some(refusal) = self.refuse_start() {
            return vec![refusal];
        }
        let after = self.facts.as_ref().map_or(0, Facts::attempt);
        let token = self.new_token();
        self.state = State::Launching { after, token };
        vec![Effect::StartWorker { stop_after }, Effect::ScheduleTimeout { after_ms: LAUNCH_TIMEOUT_MS, token }]
    }

    fn ask_submit(&mut self) -> Vec<Effect> {
        if let Some(refusal) = self.refuse_start() {
            return vec![refusal];
        }
        let token = self.new_token();
        self.state = State::Submitting { token };
        vec![Effect::Submit, Effect::ScheduleTimeout { after_ms: LAUNCH_TIMEOUT_MS, token }]
    }

    /// Only the job that was meant, and only while nothing of it trains: a worker is asked to save first.
    fn ask_cancel(&mut self, job: JobId) -> Vec<Effect> {
        match &self.facts {
            Some(facts) if facts.job == Some(job) && facts.state == RunState::Queued => vec![Effect::CancelJob { job }],
            Some(facts) if facts.job == Some(job) => {
                vec![warning(format!("not cancelled: job {job} is no longer waiting ({})", facts.reason))]
            }
            _ => vec![warning(format!("not cancelled: job {job} was meant, and is not the run's job now"))],
        }
    }

    fn refuse_start(&self) -> Option<Effect> {
        match self.state {
            State::Launching { .. } => return Some(warning("not started: a worker is already being started")),
            State::Submitting { .. } => return Some(warning("not started: a job is already being submitted")),
            _ => {}
        }
        if let Some(facts) = &self.facts {
            if let Some(job) = facts.job {
                return Some(warning(format!("not started: job {job} of this run is in the queue or at work")));
            }
            let worker = facts.worker.as_ref().map(WorkerRef::to_string).unwrap_or_default();
            if facts.is_live() && facts.liveness == Liveness::Unknown {
                return Some(warning(format!("not started: whether {worker} is over cannot be seen from here")));
            }
            if facts.is_live() {
                return Some(warning(format!("not started: {worker} is still alive")));
            }
            if facts.state == RunState::Finished {
                return Some(warning("not started: all steps are done"));
            }
        }
        None
    }

    /// Refuses a request whose worker is not the one that lives now.
    fn refusal(&self, verb: &str, worker: &WorkerRef) -> Option<Effect> {
        let Some(facts) = &self.facts else {
            return Some(warning(format!("not {verb}: nothing is known of this run yet")));
        };
        if facts.worker.as_ref() != Some(worker) {
            let now = facts.worker.as_ref().map_or_else(|| "no attempt".to_owned(), WorkerRef::to_string);
            return Some(warning(format!("not {verb}: {worker} was meant, but the run is at {now}")));
        }
        (!facts.is_live()).then(|| warning(format!("not {verb}: {worker} is over ({})", facts.reason)))
    }

    fn ask_stop(&mut self, worker: WorkerRef) -> Vec<Effect> {
        if let Some(refusal) = self.refusal("stopped", &worker) {
            return vec![refusal];
        }
        if let State::Killing { .. } = self.state {
            return vec![warning(format!("not stopped: {worker} is being killed"))];
        }
        let token = self.new_token();
        let mut effects = vec![Effect::WriteStopFile(worker.clone())];
        // A process of another host gets no signal from here; it looks for the file after each step.
        // A job is reached from anywhere.
        if worker.job.is_some() || self.facts.as_ref().is_some_and(|facts| facts.liveness == Liveness::Alive) {
            effects.push(Effect::Signal { worker: worker.clone(), signal: WorkerSignal::Stop });
        }
        self.ways = effects.len();
        effects.push(Effect::ScheduleTimeout { after_ms: STOP_TIMEOUT_MS, token });
        self.state = State::StopRequested { worker, token };
        effects
    }

    fn ask_kill(&mut self, worker: WorkerRef) -> Vec<Effect> {
        if let Some(refusal) = self.refusal("killed", &worker) {
            return vec![refusal];
        }
        if worker.job.is_none() && self.facts.as_ref().is_some_and(|facts| facts.liveness != Liveness::Alive) {
            return vec![warning(format!("not killed: {worker} cannot be reached from here"))];
        }
        let token = self.new_token();
        self.state = State::Killing { worker: worker.clone(), token };
        vec![
            Effect::Signal { worker, signal: WorkerSignal::Kill },
            Effect::ScheduleTimeout { after_ms: KILL_TIMEOUT_MS, token },
        ]
    }

    fn view(&mut self, facts: Facts) -> Vec<Effect> {
        let effects = match &self.state {
            // What was true before says nothing about the job or worker that was just asked for.
            State::Submitting { .. } if facts.job.is_none() => Vec::new(),
            State::Queued if facts.job.is_none() && self.facts.as_ref().is_some_and(|before| before.job.is_none()) => {
                Vec::new()
            }
            State::Launching { after, .. } if facts.attempt() <= *after => Vec::new(),
            State::StopRequested { worker, .. }
            | State::Checkpointing { worker, .. }
            | State::Killing { worker, .. } => {
                let worker = worker.clone();
                self.view_while_ending(&worker, &facts)
            }
            _ => {
                self.follow(&facts);
                Vec::new()
            }
        };
        self.facts = Some(facts);
        effects
    }

    fn view_while_ending(&mut self, worker: &WorkerRef, facts: &Facts) -> Vec<Effect> {
        if facts.worker.as_ref() != Some(worker) {
            self.follow(facts);
            let now = facts.worker.as_ref().map_or_else(|| "no attempt".to_owned(), WorkerRef::to_string);
            return vec![warning(format!("{worker} is over; the run is now at {now}"))];
        }
        if facts.is_live() {
            if let (State::StopRequested { worker, token }, true) = (&self.state, facts.saving) {
                self.state = State::Checkpointing { worker: worker.clone(), token: *token };
            }
            return Vec::new();
        }
        let killed = matches!(self.state, State::Killing { .. });
        // A stop of ours (of others it has no token) ends the job too, lest Slurm starts it again.
        let ours =
            matches!(self.state, State::StopRequested { token, .. } | State::Checkpointing { token, .. } if token > 0);
        let cancel = worker.job.filter(|_| ours && facts.state != RunState::Finished);
        self.follow(facts);
        let text = match facts.state {
            RunState::Stopped | RunState::Preempted => format!("stopped: {}", facts.reason),
            RunState::Finished => format!("finished before it could stop: {}", facts.reason),
            _ if killed => format!("killed: {}", facts.reason),
            _ => format!("ended without a clean stop: {}", facts.reason),
        };
        let clean = killed || facts.state != RunState::Failed;
        let report = Effect::Report { level: if clean { Level::Info } else { Level::Error }, text };
        cancel.map(|job| Effect::CancelJob { job }).into_iter().chain([report]).collect()
    }

    /// Takes the state that the evidence shows.
    fn follow(&mut self, facts: &Facts) {
        self.state = match (facts.state, &facts.worker) {
            (RunState::Waiting, _) => State::Waiting,
            (RunState::Queued, _) => State::Queued,
            (RunState::Starting, _) => State::Starting,
            (RunState::Running | RunState::Stalled, _) => State::Running,
            // Asked by somebody else: no timeout of ours runs.
            (RunState::Stopping, Some(worker)) if facts.saving => {
                State::Checkpointing { worker: worker.clone(), token: 0 }
            }
            (RunState::Stopping, Some(worker)) => State::StopRequested { worker: worker.clone(), token: 0 },
            (RunState::Stopping, None) => State::Waiting,
            (RunState::Stopped, _) => State::Stopped,
            (RunState::Preempted, _) => State::Preempted,
            (RunState::Failed, _) => State::Failed,
            (RunState::Finished, _) => State::Finished,
        };
    }

    fn timeout(&mut self, expired: Token) -> Vec<Effect> {
        match &self.state {
            State::Launching { token, .. } if *token == expired => {
                vec![warning(
                    "the started worker has not opened its attempt yet; see worker-start.log in the run's folder",
                )]
            }
            State::Submitting { token } if *token == expired => {
                vec![warning("Slurm has not answered the submission yet; the job may be in the queue all the same")]
            }
            State::StopRequested { worker, token } if *token == expired => vec![
                warning(format!("{worker} has not answered the stop request for {} s", STOP_TIMEOUT_MS / 1000)),
                Effect::ScheduleTimeout { after_ms: STOP_TIMEOUT_MS, token: expired },
            ],
            State::Killing { worker, token } if *token == expired => {
                let text = format!(
                    "{worker} is still there {} s after SIGKILL (blocked in the kernel?)",
                    KILL_TIMEOUT_MS / 1000
                );
                vec![Effect::Report { level: Level::Error, text }]
            }
            _ => Vec::new(),
        }
    }

    fn worker_exited(&mut self, pid: u32, words: &str) -> Vec<Effect> {
        if let State::Launching { .. } = self.state {
            // It never became an attempt: the run is where it was before.
            match self.facts.clone() {
                Some(facts) => self.follow(&facts),
                None => self.state = State::Waiting,
            }
            return vec![Effect::Report { level: Level::Error, text: format!("not started: worker {pid} {words}") }];
        }
        Vec::new()
    }

    fn effect_failed(&mut self, effect: &Effect, words: &str) -> Vec<Effect> {
        let error = |text: String| vec![Effect::Report { level: Level::Error, text }];
        match effect {
            Effect::StartWorker { .. } => {
                match self.facts.clone() {
                    Some(facts) => self.follow(&facts),
                    None => self.state = State::Waiting,
                }
                error(format!("not started: {words}"))
            }
            Effect::Submit => {
                match self.facts.clone() {
                    Some(facts) => self.follow(&facts),
                    None => self.state = State::Waiting,
                }
                error(format!("not submitted: {words}"))
            }
            Effect::CancelJob { job } => error(format!("job {job} is not cancelled: {words}")),
            Effect::Signal { signal: WorkerSignal::Kill, .. } => {
                if let (State::Killing { .. }, Some(facts)) = (&self.state, self.facts.clone()) {
                    self.follow(&facts);
                }
                error(format!("not killed: {words}"))
            }
            // One of the two ways to ask may fail; the other may still be heard, and the timeout tells.
            Effect::WriteStopFile(worker) => {
                self.unasked(worker);
                error(format!("no stop file written: {words}"))
            }
            Effect::Signal { worker, signal: WorkerSignal::Stop } => {
                self.unasked(worker);
                error(format!("no signal sent: {words}"))
            }
            Effect::ScheduleTimeout { .. } | Effect::Report { .. } => Vec::new(),
        }
    }

    /// One way to ask this worker failed. Once none is left, nobody has asked: the run goes on, and so does its state.
    fn unasked(&mut self, asked: &WorkerRef) {
        let State::StopRequested { worker, .. } = &self.state else { return };
        if worker != asked {
            return;
        }
        self.ways = self.ways.saturating_sub(1);
        if let (0, Some(facts)) = (self.ways, self.facts.clone()) {
            self.follow(&facts);
        }
    }

    fn new_token(&mut self) -> Token {
        self.next_token += 1;
        self.next_token
    }
}

fn info(text: impl Into<String>) -> Effect {
    Effect::Report { level: Level::Info, text: text.into() }
}

fn warning(text: impl Into<String>) -> Effect {
    Effect::Report { level: Level::Warning, text: text.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn worker(attempt: u32) -> WorkerRef {
        WorkerRef { attempt, pid: 4000 + attempt, host: "here".to_owned(), job: None }
    }

    fn facts(state: RunState, attempt: u32) -> Facts {
        Facts {
            state,
            reason: format!("{state:?}"),
            worker: (attempt > 0).then(|| worker(attempt)),
            liveness: match state {
                RunState::Waiting => Liveness::None,
                RunState::Starting | RunState::Running | RunState::Stalled | RunState::Stopping => Liveness::Alive,
                _ => Liveness::Dead,
            },
            saving: false,
            job: None,
        }
    }

    /// The same run in job 7, on a node that cannot be seen from here.
    fn in_job(state: RunState, attempt: u32) -> Facts {
        let mut facts = facts(state, attempt);
        if let Some(worker) = &mut facts.worker {
            worker.job = Some(7.into());
        }
        facts.liveness = if facts.is_live() { Liveness::Unknown } else { facts.liveness };
        facts.job = (facts.is_live() || state == RunState::Queued).then_some(7.into());
        facts
    }

    fn at(state: RunState, attempt: u32) -> RunControl {
        let mut control = RunControl::default();
        assert_eq!(control.handle(Event::View(facts(state, attempt))), []);
        control
    }

    fn token_of(effects: &[Effect]) -> Token {
        let token = |effect: &Effect| match effect {
            Effect::ScheduleTimeout { token, .. } => Some(*token),
            _ => None,
        };
        effects.iter().find_map(token).expect("a timeout is scheduled")
    }

    fn report(effects: &[Effect]) -> (Level, &str) {
        match effects {
            [Effect::Report { level, text }] => (*level, text),
            other => panic!("one report expected, got {other:?}"),
        }
    }

    #[test]
    fn from_waiting_to_finished() {
        let mut control = at(RunState::Waiting, 0);
        let effects = control.handle(Event::AskStart { stop_after: None });
        assert_eq!(effects.first(), Some(&Effect::StartWorker { stop_after: None }));
        assert!(matches!(control.state(), State::Launching { after: 0, .. }));
        control.handle(Event::WorkerStarted { pid: 4001 });
        control.handle(Event::View(facts(RunState::Waiting, 0)));
        assert!(matches!(control.state(), State::Launching { .. }), "an old view does not end the launch");
        for (seen, expected) in [
            (RunState::Starting, State::Starting),
            (RunState::Running, State::Running),
            (RunState::Stalled, State::Running),
            (RunState::Finished, State::Finished),
        ] {
            assert_eq!(control.handle(Event::View(facts(seen, 1))), []);
            assert_eq!(control.state(), &expected);
        }
        assert!(report(&control.handle(Event::AskStart { stop_after: None })).1.contains("all steps are done"));
    }

    #[test]
    fn a_stop_that_nobody_may_ask_for_was_not_asked_for() {
        let mut control = RunControl::default();
        control.handle(Event::View(in_job(RunState::Running, 1)));
        let meant = in_job(RunState::Running, 1).worker.unwrap();
        let effects = control.handle(Event::AskStop(meant));
        let failed =
            |index: usize, words: &str| Event::EffectFailed { effect: effects[index].clone(), words: words.to_owned() };
        let told = control.handle(failed(0, "permission denied"));
        assert_eq!(report(&told).1, "no stop file written: permission denied");
        assert!(matches!(control.state(), State::StopRequested { .. }), "the signal may still be heard");
        let told = control.handle(failed(1, "Slurm says: Access/permission denied"));
        assert_eq!(report(&told).1, "no signal sent: Slurm says: Access/permission denied");
        assert_eq!(control.state(), &State::Running);
        assert_eq!(control.handle(Event::Timeout(token_of(&effects))), [], "nobody waits for an answer");
        control.handle(Event::View(in_job(RunState::Preempted, 1)));
        assert_eq!(control.state(), &State::Preempted);
    }

    #[test]
    fn a_job_is_submitted_waits_runs_is_preempted_and_waits_again() {
        let mut control = at(RunState::Waiting, 0);
        let effects = control.handle(Event::AskSubmit);
        assert_eq!(effects[0], Effect::Submit);
        control.handle(Event::View(facts(RunState::Waiting, 0)));
        assert!(matches!(control.state(), State::Submitting { .. }));
        assert!(report(&control.handle(Event::AskSubmit)).1.contains("already being submitted"));
        assert_eq!(report(&control.handle(Event::Submitted { job: 7.into() })).1, "submitted as job 7");
        control.handle(Event::View(facts(RunState::Waiting, 0)));
        assert_eq!(control.state(), &State::Queued, "Slurm has not been asked since");
        for (seen, expected) in [
            (in_job(RunState::Queued, 0), State::Queued),
            (in_job(RunState::Starting, 1), State::Starting),
            (in_job(RunState::Running, 1), State::Running),
            (in_job(RunState::Preempted, 1), State::Preempted),
            (in_job(RunState::Queued, 1), State::Queued),
            (in_job(RunState::Running, 2), State::Running),
            (in_job(RunState::Finished, 2), State::Finished),
        ] {
            assert_eq!(control.handle(Event::View(seen)), []);
            assert_eq!(control.state(), &expected);
        }
    }

    #[test]
    fn a_stop_of_a_job_signals_its_step_and_cancels_after_the_checkpoint() {
        let mut control = RunControl::default();
        control.handle(Event::View(in_job(RunState::Running, 3)));
        let worker = in_job(RunState::Running, 3).worker.unwrap();
        let effects = control.handle(Event::AskStop(worker.clone()));
        assert_eq!(effects[0], Effect::WriteStopFile(worker.clone()));
        assert_eq!(effects[1], Effect::Signal { worker: worker.clone(), signal: WorkerSignal::Stop });
        assert_eq!(control.handle(Event::View(in_job(RunState::Stopping, 3))), []);
        let effects = control.handle(Event::View(in_job(RunState::Stopped, 3)));
        assert_eq!(effects[0], Effect::CancelJob { job: 7.into() });
        assert_eq!(report(&effects[1..]), (Level::Info, "stopped: Stopped"));
        // A run that finished first needs no cancel, and one that somebody else stopped is his to cancel.
        control.handle(Event::View(in_job(RunState::Running, 4)));
        control.handle(Event::AskStop(WorkerRef { attempt: 4, pid: 4004, ..worker }));
        assert_eq!(control.handle(Event::View(in_job(RunState::Finished, 4))).len(), 1);
        control.handle(Event::View(in_job(RunState::Stopping, 5)));
        assert_eq!(control.handle(Event::View(in_job(RunState::Stopped, 5))).len(), 1);
    }

    #[test]
    fn a_job_is_killed_from_anywhere_and_only_a_waiting_one_is_cancelled_at_once() {
        let mut control = RunControl::default();
        control.handle(Event::View(in_job(RunState::Running, 3)));
        let worker = in_job(RunState::Running, 3).worker.unwrap();
        assert!(report(&control.handle(Event::AskCancel { job: 7.into() })).1.contains("no longer waiting"));
        assert!(report(&control.handle(Event::AskStart { stop_after: None })).1.contains("job 7 of this run"));
        let effects = control.handle(Event::AskKill(worker.clone()));
        assert_eq!(effects[0], Effect::Signal { worker, signal: WorkerSignal::Kill });
        control.handle(Event::View(in_job(RunState::Stopped, 3)));
        control.handle(Event::View(in_job(RunState::Queued, 3)));
        assert!(report(&control.handle(Event::AskCancel { job: 8.into() })).1.contains("not the run's job"));
        assert_eq!(control.handle(Event::AskCancel { job: 7.into() }), [Effect::CancelJob { job: 7.into() }]);
        let failed = Event::EffectFailed { effect: Effect::CancelJob { job: 7.into() }, words: "no".to_owned() };
        assert_eq!(report(&control.handle(failed)), (Level::Error, "job 7 is not cancelled: no"));
    }

    #[test]
    fn a_refused_submission_brings_the_old_state_back() {
        let mut control = at(RunState::Failed, 2);
        let token = token_of(&control.handle(Event::AskSubmit));
        assert!(report(&control.handle(Event::Timeout(token))).1.contains("has not answered"));
        let failed = Event::EffectFailed { effect: Effect::Submit, words: "Slurm says: Invalid qos".to_owned() };
        assert_eq!(report(&control.handle(failed)), (Level::Error, "not submitted: Slurm says: Invalid qos"));
        assert_eq!(control.state(), &State::Failed);
    }

    #[test]
    fn a_stop_passes_through_the_checkpoint_and_reports_the_end() {
        let mut control = at(RunState::Running, 3);
        let effects = control.handle(Event::AskStop(worker(3)));
        assert_eq!(effects[0], Effect::WriteStopFile(worker(3)));
        assert_eq!(effects[1], Effect::Signal { worker: worker(3), signal: WorkerSignal::Stop });
        assert!(matches!(control.state(), State::StopRequested { .. }));
        control.handle(Event::View(facts(RunState::Running, 3)));
        assert!(matches!(control.state(), State::StopRequested { .. }), "a step in between changes nothing");
        control.handle(Event::View(Facts { saving: true, ..facts(RunState::Stopping, 3) }));
        assert!(matches!(control.state(), State::Checkpointing { .. }));
        let effects = control.handle(Event::View(facts(RunState::Stopped, 3)));
        assert_eq!(report(&effects), (Level::Info, "stopped: Stopped"));
        assert_eq!(control.state(), &State::Stopped);
        let effects = control.handle(Event::AskStart { stop_after: None });
        assert_eq!(effects[0], Effect::StartWorker { stop_after: None });
        control.handle(Event::View(facts(RunState::Stopped, 3)));
        assert!(matches!(control.state(), State::Launching { after: 3, .. }));
        control.handle(Event::View(facts(RunState::Starting, 4)));
        assert_eq!(control.state(), &State::Starting);
    }

    #[test]
    fn a_request_for_another_attempt_or_for_a_dead_one_does_nothing() {
        for ask in [Event::AskStop(worker(2)), Event::AskKill(worker(2))] {
            let mut control = at(RunState::Running, 3);
            assert_eq!(report(&control.handle(ask)).0, Level::Warning);
            assert_eq!(control.state(), &State::Running);
        }
        for ask in [Event::AskStop(worker(3)), Event::AskKill(worker(3))] {
            for state in [RunState::Stopped, RunState::Failed, RunState::Finished, RunState::Preempted] {
                let mut control = at(state, 3);
                assert!(report(&control.handle(ask.clone())).1.contains("is over"));
            }
        }
        let mut reused = worker(3);
        reused.pid += 1;
        assert_eq!(report(&at(RunState::Running, 3).handle(Event::AskKill(reused))).0, Level::Warning);
        assert_eq!(report(&RunControl::default().handle(Event::AskStop(worker(1)))).0, Level::Warning);
    }

    #[test]
    fn another_host_gets_the_file_but_no_signal() {
        let mut control = RunControl::default();
        control.handle(Event::View(Facts { liveness: Liveness::Unknown, ..facts(RunState::Running, 3) }));
        let effects = control.handle(Event::AskStop(worker(3)));
        assert!(effects.iter().all(|effect| !matches!(effect, Effect::Signal { .. })), "{effects:?}");
        assert_eq!(effects[0], Effect::WriteStopFile(worker(3)));
        let mut control = RunControl::default();
        control.handle(Event::View(Facts { liveness: Liveness::Unknown, ..facts(RunState::Stalled, 3) }));
        assert!(report(&control.handle(Event::AskKill(worker(3)))).1.contains("cannot be reached"));
        assert!(report(&control.handle(Event::AskStart { stop_after: None })).1.contains("cannot be seen"));
    }

    #[test]
    fn an_unanswered_stop_is_reported_again_and_again_and_a_stale_timeout_never() {
        let mut control = at(RunState::Running, 3);
        let token = token_of(&control.handle(Event::AskStop(worker(3))));
        for _ in 0..2 {
            let effects = control.handle(Event::Timeout(token));
            assert_eq!(effects.len(), 2);
            assert_eq!(token_of(&effects), token);
        }
        let newer = token_of(&control.handle(Event::AskStop(worker(3))));
        assert_ne!(newer, token);
        assert_eq!(control.handle(Event::Timeout(token)), []);
        control.handle(Event::View(facts(RunState::Stopped, 3)));
        assert_eq!(control.handle(Event::Timeout(newer)), []);
    }

    #[test]
    fn a_kill_ends_in_evidence_of_death() {
        let mut control = at(RunState::Stalled, 3);
        let effects = control.handle(Event::AskKill(worker(3)));
        assert_eq!(effects[0], Effect::Signal { worker: worker(3), signal: WorkerSignal::Kill });
        assert!(report(&control.handle(Event::AskStop(worker(3)))).1.contains("being killed"));
        assert_eq!(report(&control.handle(Event::Timeout(token_of(&effects)))).0, Level::Error);
        let effects = control.handle(Event::View(facts(RunState::Failed, 3)));
        assert_eq!(report(&effects), (Level::Info, "killed: Failed"));
        assert_eq!(control.state(), &State::Failed);
    }

    #[test]
    fn a_failed_kill_leaves_the_run_as_it_is() {
        let mut control = at(RunState::Running, 3);
        let effects = control.handle(Event::AskKill(worker(3)));
        let failed = Event::EffectFailed { effect: effects[0].clone(), words: "gone".to_owned() };
        assert_eq!(report(&control.handle(failed)), (Level::Error, "not killed: gone"));
        assert_eq!(control.state(), &State::Running);
    }

    #[test]
    fn a_worker_that_dies_before_its_attempt_brings_the_old_state_back_with_its_last_words() {
        let mut control = at(RunState::Stopped, 3);
        let token = token_of(&control.handle(Event::AskStart { stop_after: None }));
        assert!(report(&control.handle(Event::AskStart { stop_after: None })).1.contains("already being started"));
        assert_eq!(report(&control.handle(Event::Timeout(token))).0, Level::Warning);
        let exited = Event::WorkerExited { pid: 9, words: "exited with code 78: identity differs".to_owned() };
        assert_eq!(
            report(&control.handle(exited)),
            (Level::Error, "not started: worker 9 exited with code 78: identity differs")
        );
        assert_eq!(control.state(), &State::Stopped);
        control.handle(Event::AskStart { stop_after: None });
        let failed =
            Event::EffectFailed { effect: Effect::StartWorker { stop_after: None }, words: "no such file".to_owned() };
        assert_eq!(report(&control.handle(failed)), (Level::Error, "not started: no such file"));
        assert_eq!(control.state(), &State::Stopped);
    }

    #[test]
    fn a_worker_that_opened_its_attempt_was_started_however_soon_it_ended() {
        let mut control = at(RunState::Waiting, 0);
        control.handle(Event::AskStart { stop_after: None });
        assert_eq!(control.handle(Event::View(facts(RunState::Failed, 1))), []);
        let exited = Event::WorkerExited { pid: 4001, words: "exited with code 65".to_owned() };
        assert_eq!(control.handle(exited), [], "the run's own record says how it ended");
        assert_eq!(control.state(), &State::Failed);
    }

    #[test]
    fn only_the_start_that_asked_for_it_ends_early() {
        let mut control = at(RunState::Waiting, 0);
        let effects = control.handle(Event::AskStart { stop_after: Some(50) });
        assert_eq!(effects[0], Effect::StartWorker { stop_after: Some(50) });
        control.handle(Event::View(facts(RunState::Stopped, 1)));
        let effects = control.handle(Event::AskStart { stop_after: None });
        assert_eq!(effects[0], Effect::StartWorker { stop_after: None });
    }

    #[test]
    fn a_stop_that_ends_in_death_is_an_error_and_a_race_with_the_end_is_not() {
        let mut control = at(RunState::Running, 3);
        control.handle(Event::AskStop(worker(3)));
        assert_eq!(report(&control.handle(Event::View(facts(RunState::Failed, 3)))).0, Level::Error);
        let mut control = at(RunState::Running, 3);
        control.handle(Event::AskStop(worker(3)));
        let effects = control.handle(Event::View(facts(RunState::Finished, 3)));
        assert!(report(&effects).1.starts_with("finished before it could stop"));
        let mut control = at(RunState::Running, 3);
        control.handle(Event::AskStop(worker(3)));
        let effects = control.handle(Event::View(facts(RunState::Running, 4)));
        assert!(report(&effects).1.contains("the run is now at attempt 4"));
        assert_eq!(control.state(), &State::Running);
    }

    #[test]
    fn a_stop_asked_elsewhere_is_followed() {
        let mut control = at(RunState::Stopping, 3);
        assert!(matches!(control.state(), State::StopRequested { token: 0, .. }));
        let effects = control.handle(Event::View(facts(RunState::Preempted, 3)));
        assert_eq!(report(&effects), (Level::Info, "stopped: Preempted"));
        assert_eq!(control.state(), &State::Preempted);
    }
}
