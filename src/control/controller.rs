//! The machines of all arms of an experiment, joined to the driver: what the console and `--no-ui` both hold.

use super::jobs::{Answer, SlurmDriver};
use super::local::{LocalDriver, WorkerExit};
use super::machine::{Effect, Event, Facts, RunControl, State, Token, WorkerRef};
use crate::runlog::{Level, RunView};
use crate::slurm::{JobId, JobView, Look};
use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

/// What a person asks of one run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request {
    /// Start it, or resume it from its newest checkpoint; with `stop_after`, it leaves again after that step.
    Start { stop_after: Option<u64> },
    /// Hand it to Slurm, to begin or to go on.
    Submit,
    /// Take its waiting job out of the queue.
    Cancel(JobId),
    /// Stop with a checkpoint.
    Stop(WorkerRef),
    /// Stop without one.
    Kill(WorkerRef),
}

/// What really happened, for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    pub arm: String,
    pub level: Level,
    pub text: String,
}

/// Run control for every arm.
#[derive(Debug)]
pub struct Controller {
    driver: LocalDriver,
    slurm: Option<SlurmDriver>,
    /// What Slurm told last.
    look: Look,
    machines: BTreeMap<String, RunControl>,
    timeouts: Vec<(Instant, String, Token)>,
    reports: Vec<Report>,
    read_only: bool,
}

impl Controller {
    /// `read_only` refuses every request, with a report.
    pub fn new(driver: LocalDriver, read_only: bool) -> Self {
        Self {
            driver,
            slurm: None,
            look: Look::default(),
            machines: BTreeMap::new(),
            timeouts: Vec::new(),
            reports: Vec::new(),
            read_only,
        }
    }

    /// Jobs are controlled too.
    pub fn with_slurm(mut self, slurm: Option<SlurmDriver>) -> Self {
        self.slurm = slurm;
        self
    }

    /// What Slurm told last.
    pub fn look(&self) -> &Look {
        &self.look
    }

    /// The newest job of this arm, as far as Slurm was asked.
    pub fn job(&self, arm: &str) -> Option<&JobView> {
        self.look.jobs.get(arm)
    }

    /// Somebody wants to see the queue now.
    pub fn look_now(&self) {
        if let Some(slurm) = &self.slurm {
            slurm.look();
        }
    }

    /// Where control stands with this arm.
    pub fn state(&self, arm: &str) -> State {
        self.machines.get(arm).map_or(State::Waiting, |machine| machine.state().clone())
    }

    /// Arms with a worker that was started from here and has not been seen to end.
    pub fn own_workers(&self) -> impl Iterator<Item = (&str, u32)> {
        self.driver.workers()
    }

    pub fn ask(&mut self, arm: &str, request: Request) {
        if self.read_only {
            let text = "read-only: nothing was done".to_owned();
            self.reports.push(Report { arm: arm.to_owned(), level: Level::Warning, text });
            return;
        }
        let event = match request {
            Request::Start { stop_after } => Event::AskStart { stop_after },
            Request::Submit => Event::AskSubmit,
            Request::Cancel(job) => Event::AskCancel { job },
            Request::Stop(worker) => Event::AskStop(worker),
            Request::Kill(worker) => Event::AskKill(worker),
        };
        self.feed(arm, event);
    }

    /// Call it for each run after its reader was polled, and about once a second: states also change by silence.
    pub fn view_changed(&mut self, view: &RunView, now_ms: u64) {
        let facts = Facts::of(view, now_ms, self.job(&view.arm));
        self.feed(&view.arm, Event::View(facts));
    }

    /// The children that ended since the last call. Read their runs again and pass them to
    /// [`view_changed`](Self::view_changed), then hand them to [`tick`](Self::tick): whether a worker opened its
    /// attempt before it ended can only be told from what it wrote until then.
    pub fn reap(&mut self) -> Vec<WorkerExit> {
        self.driver.reap()
    }

    /// Judges the children that [`reap`](Self::reap) found ended, and expired timeouts; call both a few times a second.
    pub fn tick(&mut self, ended: &[WorkerExit]) {
        let answers: Vec<Answer> = self.slurm.iter().flat_map(SlurmDriver::answers).collect();
        for answer in answers {
            match answer {
                Answer::Event(arm, event) => self.feed(&arm, event),
                Answer::Look(look) => self.look = look,
            }
        }
        for exit in ended {
            self.feed(&exit.arm, Event::WorkerExited { pid: exit.pid, words: exit.words() });
        }
        let now = Instant::now();
        let (expired, waiting) = std::mem::take(&mut self.timeouts).into_iter().partition(|(at, ..)| *at <= now);
        self.timeouts = waiting;
        for (_, arm, token) in expired {
            self.feed(&arm, Event::Timeout(token));
        }
    }

    /// Reports since the last call.
    pub fn take_reports(&mut self) -> Vec<Report> {
        std::mem::take(&mut self.reports)
    }

    fn feed(&mut self, arm: &str, event: Event) {
        let mut events = VecDeque::from([event]);
        while let Some(event) = events.pop_front() {
            for effect in self.machines.entry(arm.to_owned()).or_default().handle(event) {
                match effect {
                    Effect::Report { level, text } => self.reports.push(Report { arm: arm.to_owned(), level, text }),
                    Effect::ScheduleTimeout { after_ms, token } => {
                        self.timeouts.push((Instant::now() + Duration::from_millis(after_ms), arm.to_owned(), token));
                    }
                    effect => match self.slurm.as_ref().filter(|_| concerns_a_job(&effect)) {
                        Some(slurm) => slurm.perform(arm, &effect),
                        None => events.extend(self.driver.perform(arm, &effect)),
                    },
                }
            }
        }
    }
}

/// Is this the scheduler's to perform?
fn concerns_a_job(effect: &Effect) -> bool {
    match effect {
        Effect::Submit | Effect::CancelJob { .. } => true,
        Effect::Signal { worker, .. } => worker.job.is_some(),
        _ => false,
    }
}
