//! Jobs of the cluster: performs the effects that concern them, and looks at the queue, on a thread of its own. A
//! controller that does not answer for a quarter of a minute holds up neither the screen nor the runs of this machine.

use super::local::{record_kill, write_stop_file};
use super::machine::{Effect, Event, WorkerRef, WorkerSignal};
use super::submission::SubmitCommand;
use crate::runlog::{ExperimentRuns, RunDir};
use crate::slurm::{Look, Looks, Scheduler};
use crate::{Error, Exit, Result};
use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, unbounded};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Whether somebody else submitted a job for one of the runs is looked up this often, in their folders.
const RECORDS: Duration = Duration::from_secs(5);
/// Seconds between two looks at the queue in steady state.
const POLL_VARIABLE: &str = "LBVA_TUI_SLURM_POLL";

/// What came back.
#[derive(Clone, Debug, PartialEq)]
pub enum Answer {
    /// Of an arm.
    Event(String, Event),
    Look(Look),
}

#[derive(Debug)]
enum Order {
    Perform(String, Effect),
    Look,
}

/// The cluster's side of run control.
#[derive(Debug)]
pub struct SlurmDriver {
    orders: Sender<Order>,
    answers: Receiver<Answer>,
}

impl SlurmDriver {
    /// Starts the thread. It ends when this value is dropped.
    pub fn start(command: SubmitCommand, scheduler: Arc<dyn Scheduler>, by: &str) -> Result<Self> {
        let (orders, orders_in) = unbounded();
        let (answers_out, answers) = unbounded();
        let seconds = std::env::var(POLL_VARIABLE).ok().and_then(|text| text.parse().ok());
        let work = Work {
            runs: ExperimentRuns::new(&command.worker.experiment),
            command,
            scheduler,
            by: by.to_owned(),
            looks: Looks::new(seconds),
        };
        std::thread::Builder::new()
            .name("slurm".to_owned())
            .spawn(move || work.run(&orders_in, &answers_out))
            .map_err(|error| Error::crash(format!("the thread that asks Slurm cannot be started: {error}")))?;
        Ok(Self { orders, answers })
    }

    /// Has the effect performed; what came of it is among the [`answers`](Self::answers) later.
    pub fn perform(&self, arm: &str, effect: &Effect) {
        // A closed channel means that the thread died of a bug; then nothing comes back, and the time-outs tell.
        let _ = self.orders.send(Order::Perform(arm.to_owned(), effect.clone()));
    }

    /// Somebody wants to see the queue now.
    pub fn look(&self) {
        let _ = self.orders.send(Order::Look);
    }

    /// What has come back since the last call.
    pub fn answers(&self) -> impl Iterator<Item = Answer> {
        self.answers.try_iter()
    }
}

struct Work {
    command: SubmitCommand,
    scheduler: Arc<dyn Scheduler>,
    runs: ExperimentRuns,
    by: String,
    looks: Looks,
}

impl Work {
    fn run(mut self, orders: &Receiver<Order>, answers: &Sender<Answer>) {
        loop {
            let runs = self.runs.list().unwrap_or_default();
            let wait = self.looks.wait(Instant::now(), &runs);
            if wait == Some(Duration::ZERO) {
                let look = self.looks.look(Instant::now(), self.scheduler.as_ref(), &runs);
                if answers.send(Answer::Look(look)).is_err() {
                    return;
                }
                continue;
            }
            match orders.recv_timeout(wait.unwrap_or(RECORDS).min(RECORDS)) {
                Ok(Order::Look) => self.looks.stir(Instant::now()),
                Ok(Order::Perform(arm, effect)) => {
                    let event = match self.perform(&arm, &effect) {
                        Ok(event) => event,
                        Err(error) => Event::EffectFailed { effect, words: error.to_string() },
                    };
                    self.looks.stir(Instant::now());
                    if answers.send(Answer::Event(arm, event)).is_err() {
                        return;
                    }
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    fn perform(&self, arm: &str, effect: &Effect) -> Result<Event> {
        let scheduler = self.scheduler.as_ref();
        match effect {
            Effect::Submit => Ok(Event::Submitted { job: self.command.submit(arm, scheduler, &self.by)? }),
            Effect::CancelJob { job } => scheduler.cancel(*job).map(|()| Event::JobCancelled { job: *job }),
            Effect::Signal { worker, signal } => {
                let words = signal_job(&self.runs.run(arm), worker, *signal, scheduler, &self.by)?;
                Ok(Event::Done { words })
            }
            other => Err(Error::crash(format!("no scheduler can perform {other:?}"))),
        }
    }
}

/// Signals the job of this worker. Returns the command that was run.
fn signal_job(
    run: &RunDir,
    worker: &WorkerRef,
    signal: WorkerSignal,
    scheduler: &dyn Scheduler,
    by: &str,
) -> Result<String> {
    use crate::slurm::Act;
    let Some(job) = worker.job else { return Err(Error::crash(format!("{worker} has no job"))) };
    let act = match signal {
        WorkerSignal::Stop => Act::Signal,
        WorkerSignal::Kill => {
            // It tells the worker that no checkpoint is wanted, and readers why it ended.
            record_kill(run, worker, by)?;
            Act::Cancel
        }
    };
    match act {
        Act::Signal => scheduler.signal(job)?,
        _ => scheduler.cancel(job)?,
    }
    Ok(scheduler.command(act, job))
}

/// Asks the worker of a job to save, after which the job is to be cancelled. Returns what was done.
///
/// # Errors
/// `attempt_changed` if the run has moved on; Slurm's own words. The stop file stays: the worker will see it.
pub fn stop_job(run: &RunDir, worker: &WorkerRef, scheduler: &dyn Scheduler, by: &str) -> Result<String> {
    write_stop_file(run, worker, by)?;
    match signal_job(run, worker, WorkerSignal::Stop, scheduler, by) {
        Ok(command) => {
            Ok(format!("stop file written and `{command}` done; it saves at the next step, then the job is cancelled"))
        }
        // Another user's job. The file is enough for a worker that steps.
        Err(error) if error.exit == Exit::Refused => {
            Ok(format!("stop file written, which it sees after its step; no signal sent: {error}"))
        }
        Err(error) => Err(error),
    }
}

/// Ends the job of this worker without a checkpoint. Returns what was done.
pub fn kill_job(run: &RunDir, worker: &WorkerRef, scheduler: &dyn Scheduler, by: &str) -> Result<String> {
    let command = signal_job(run, worker, WorkerSignal::Kill, scheduler, by)?;
    Ok(format!("`{command}` done"))
}
