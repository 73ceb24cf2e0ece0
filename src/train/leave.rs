//! How an attempt leaves when it is told to: with a checkpoint if there is time for one, back into the queue if the
//! scheduler took its machine, and never back if a person cancelled it.

use super::attempts::{IDLE_WARNING, Past};
use super::stop::StopFlag;
use crate::runlog::{RunWriter, percentile_95};
use crate::slurm::InsideJob;
use crate::words::duration;
use crate::{Error, Exit, Result};
use std::time::{Duration, Instant};

/// How long a worker that requeued itself waits for the SIGTERM that follows.
const TERM_PATIENCE: Duration = Duration::from_secs(30);
/// How long whoever asked for a stop has to cancel the job, before the worker does.
const CANCEL_PATIENCE: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(100);

/// What surrounds an attempt: its job, the signals, and the attempts before it.
pub(super) struct Surroundings<'a> {
    pub job: Option<&'a InsideJob>,
    pub stop: &'a StopFlag,
    pub past: Past,
}

/// What to do after the outcome is on disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Then {
    #[default]
    Leave,
    /// Put the job back into the queue, and wait for the end that follows.
    Requeue,
    /// The job is to be cancelled.
    Cancel,
}

/// A stop, understood.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Orders {
    /// Why, for people and for the state: `preempted by Slurm`, `stopped by console`.
    pub words: String,
    pub then: Then,
    save: Save,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Save {
    Take,
    /// The process is gone at this moment.
    Until(Instant),
    Never,
}

impl Surroundings<'_> {
    /// Refuses to begin where too many attempts of this job got nowhere; `Some` is a warning.
    pub fn check_progress(&self, start_step: u64) -> Result<Option<String>> {
        let Some(job) = self.job.filter(|job| job.managed) else { return Ok(None) };
        let idle = self.past.idle;
        let what = format!(
            "{idle} attempts of job {} in a row have left no checkpoint after step {start_step}",
            job.identity.id
        );
        if idle >= job.max_idle_attempts {
            return Err(Error::refused("no_progress", what)
                .hint("look at how they ended; lower train.save_every or ask for more time, then submit again"));
        }
        Ok((idle >= IDLE_WARNING).then_some(what))
    }

    /// What this stop, asked for by a signal or a file, means.
    pub fn orders(&self, by: &str, writer: &RunWriter) -> Orders {
        if let Some(by) = writer.kill_requested() {
            return Orders { words: format!("killed on request by {by}"), then: Then::Leave, save: Save::Never };
        }
        if let Some(request) = writer.stop_requested() {
            let then = if request.cancel_job && self.job.is_some() { Then::Cancel } else { Then::Leave };
            return Orders { words: format!("stopped by {}", request.by), then, save: Save::Take };
        }
        let (Some(job), Some(signal)) = (self.job, self.stop.requested()) else {
            return Orders { words: format!("stopped by {by}"), then: Then::Leave, save: Save::Take };
        };
        let notice = job.notice(signal, self.stop.since().unwrap_or_default());
        Orders {
            words: notice.words(by),
            then: if notice.requeue { Then::Requeue } else { Then::Leave },
            save: notice.left.map_or(Save::Take, |left| Save::Until(Instant::now() + left)),
        }
    }

    /// May a save begin now? `Err` says why not. Where none was measured yet, it is tried: a save that is cut off does no
    /// harm.
    pub fn may_save(&self, orders: &Orders) -> Result<(), String> {
        let Save::Until(end) = orders.save else {
            return if orders.save == Save::Take { Ok(()) } else { Err("none was wanted".to_owned()) };
        };
        let left = end.saturating_duration_since(Instant::now());
        match percentile_95(self.past.save_ms.iter().copied()) {
            Some(save_ms) if save_ms >= left.as_secs_f64() * 1e3 => Err(format!(
                "a save takes {}, and {} are left",
                duration(save_ms as u64),
                duration(left.as_millis() as u64)
            )),
            _ => Ok(()),
        }
    }

    /// Puts the job back into the queue, if that is to be done. Returns what came of it, as the end of a sentence.
    pub fn requeue(&self, then: &mut Then) -> String {
        let (Some(job), Then::Requeue) = (self.job, *then) else { return String::new() };
        match job.requeue() {
            Ok(()) => "; requeued".to_owned(),
            Err(error) => {
                *then = Then::Leave;
                format!("; not requeued: {}", error.what)
            }
        }
    }

    /// What a failure means for the job: the error to end with, and whether to try again.
    pub fn failed(&self, error: Error) -> (Error, Then) {
        let repeatable = matches!(error.exit, Exit::Crash | Exit::Unavailable);
        if !repeatable || !self.job.is_some_and(|job| job.managed) {
            return (error, Then::Leave);
        }
        if self.past.may_repeat(error.exit) {
            return (error, Then::Requeue);
        }
        let what = format!("failed {} times in a row without a new checkpoint: {}", self.past.crashes + 1, error.what);
        (Error { exit: Exit::Refused, what, ..error }, Then::Leave)
    }

    /// Waits for the end that the job was promised; exit codes no longer matter then.
    pub fn linger(&self, then: Then) {
        let before = self.stop.count();
        let told = |patience: Duration| {
            let from = Instant::now();
            while from.elapsed() < patience {
                if self.stop.count() > before {
                    return true;
                }
                std::thread::sleep(POLL);
            }
            false
        };
        match (then, self.job) {
            (Then::Requeue, _) => drop(told(TERM_PATIENCE)),
            // Whoever asked may be gone by now.
            (Then::Cancel, Some(job)) if !told(CANCEL_PATIENCE) && job.cancel().is_ok() => drop(told(TERM_PATIENCE)),
            _ => {}
        }
    }
}
