//! How often a run was started in vain. A scheduler restarts a job as often as it likes; what the program allows itself is
//! counted here, by the worker that obeys it and by whoever shows it.

use super::event::Outcome;
use super::job::JobId;
use super::view::{AttemptView, RunView};

/// Crashes in a row at the same step after which a job is not started again.
pub const MOST_CRASHES: u32 = 2;

/// Attempts of one job in a row that began at the same checkpoint, the newest of the run among them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tries {
    pub idle: u32,
    /// How many of the newest of those failed by their own word.
    pub crashes: u32,
}

impl RunView {
    /// `start_step` is where the next attempt will begin. Attempts of other jobs were started by a person, who has seen how
    /// the ones before ended.
    pub fn tries(&self, job: Option<JobId>, start_step: u64) -> Tries {
        count(&self.attempts, job, start_step)
    }

    /// The same before the newest attempt, if that one is at work as start `restarts` of the job.
    pub fn tries_before(&self, job: JobId, restarts: u32) -> Tries {
        let is_at_work = |attempt: &AttemptView| {
            let own = attempt.started.job.as_ref().filter(|own| own.id == job);
            attempt.ended.is_none() && own.is_some_and(|own| own.restart >= restarts)
        };
        match self.attempts.split_last() {
            Some((newest, before)) if is_at_work(newest) => count(before, Some(job), newest.started.start_step),
            _ => self.tries(Some(job), self.last_save.map_or(0, |save| save.step)),
        }
    }
}

fn count(attempts: &[AttemptView], job: Option<JobId>, start_step: u64) -> Tries {
    let of_this_job = attempts.iter().rev().take_while(|attempt| {
        job.is_some()
            && attempt.started.job.as_ref().map(|job| job.id) == job
            && attempt.started.start_step == start_step
    });
    let crashed = |attempt: &&AttemptView| matches!(attempt.ended, Some((Outcome::Failed, _)));
    let number = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
    Tries { idle: number(of_this_job.clone().count()), crashes: number(of_this_job.take_while(crashed).count()) }
}
