//! The machines of all arms of an experiment, joined to the driver: what the console and `--no-ui` both hold.

use super::local::{LocalDriver, WorkerExit};
use super::machine::{Effect, Event, Facts, RunControl, State, Token, WorkerRef};
use crate::runlog::{Level, RunView};
use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

/// What a person asks of one run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Request {
    /// Start it, or resume it from its newest checkpoint; with `stop_after`, it leaves again after that step.
    Start { stop_after: Option<u64> },
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
    machines: BTreeMap<String, RunControl>,
    timeouts: Vec<(Instant, String, Token)>,
    reports: Vec<Report>,
    read_only: bool,
}

impl Controller {
    /// `read_only` refuses every request, with a report.
    pub fn new(driver: LocalDriver, read_only: bool) -> Self {
        Self { driver, machines: BTreeMap::new(), timeouts: Vec::new(), reports: Vec::new(), read_only }
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
            Request::Stop(worker) => Event::AskStop(worker),
            Request::Kill(worker) => Event::AskKill(worker),
        };
        self.feed(arm, event);
    }

    /// Call it for each run after its reader was polled, and about once a second: states also change by silence.
    pub fn view_changed(&mut self, view: &RunView, now_ms: u64) {
        self.feed(&view.arm, Event::View(Facts::of(view, now_ms)));
    }

    /// The children that ended since the last call. Read their runs again and pass them to
    /// [`view_changed`](Self::view_changed), then hand them to [`tick`](Self::tick): whether a worker opened its
    /// attempt before it ended can only be told from what it wrote until then.
    pub fn reap(&mut self) -> Vec<WorkerExit> {
        self.driver.reap()
    }

    /// Judges the children that [`reap`](Self::reap) found ended, and expired timeouts; call both a few times a second.
    pub fn tick(&mut self, ended: &[WorkerExit]) {
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
                    effect => events.extend(self.driver.perform(arm, &effect)),
                }
            }
        }
    }
}
