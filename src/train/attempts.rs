//! What earlier attempts of a run teach the next one: whether they got anywhere, and how long a save takes.
//!
//! A scheduler restarts a job as often as it likes. Two things must not be repeated for ever: an attempt that crashes, and
//! one that is ended before it has saved anything. Preemptions and lost nodes are nobody's fault and never count as crashes.

use crate::Exit;
use crate::runlog::{JobId, MOST_CRASHES, RunView, Tries};

/// Attempts in a row without a new checkpoint that are worth a warning.
pub(super) const IDLE_WARNING: u32 = 3;

/// The past of a run, as far as the next attempt asks for it.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Past {
    /// Attempts of this job, right before the next, that began at the same checkpoint.
    pub idle: u32,
    /// How many of those, right before the next, failed by their own word.
    pub crashes: u32,
    /// Time of each save until it was durable, ms.
    pub save_ms: Vec<f64>,
}

impl Past {
    /// `job` is the next attempt's job, `start_step` where it will begin.
    pub fn of(view: &RunView, job: Option<JobId>, start_step: u64) -> Self {
        let Tries { idle, crashes } = view.tries(job, start_step);
        let save_ms = view.saves.iter().map(|save| save.ms).filter(|ms| ms.is_finite()).collect();
        Self { idle, crashes, save_ms }
    }

    /// Is the attempt that ends so to be tried again by the scheduler? Broken data, a full disk and a refusal need a person.
    pub fn may_repeat(&self, exit: Exit) -> bool {
        matches!(exit, Exit::Crash | Exit::Unavailable) && self.crashes + 1 < MOST_CRASHES
    }

    /// The step of an early first save, `after` steps into the attempt: after attempts that saved nothing the interval is
    /// halved each time, so that a slice of time shorter than the interval gets somewhere.
    pub fn first_save_after(&self, save_every: u64) -> Option<u64> {
        (self.idle > 0).then(|| save_every.checked_shr(self.idle).unwrap_or(0).max(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runlog::{AttemptStarted, AttemptView, JobIdentity, Outcome};

    /// Attempts of (job, first step, failed).
    fn past(attempts: &[(u64, u64, bool)], job: u64, start_step: u64) -> Past {
        let attempt = |&(job, start_step, failed): &(u64, u64, bool)| AttemptView {
            started: AttemptStarted {
                attempt: 1,
                arm: "m1".to_owned(),
                pid: 1,
                host: "node".to_owned(),
                start_step,
                total_steps: 100,
                save_every: 10,
                validate_every: 10,
                parameters: 1,
                device: "cpu".to_owned(),
                threads: 1,
                job: Some(JobIdentity { id: job.into(), restart: 0, node: "gpu1".to_owned(), max_idle_attempts: None }),
            },
            started_ms: 0,
            first_step_ms: None,
            ended: failed.then(|| (Outcome::Failed, "broken".to_owned())),
        };
        let view = RunView { attempts: attempts.iter().map(attempt).collect(), ..RunView::default() };
        Past::of(&view, Some(job.into()), start_step)
    }

    #[test]
    fn only_attempts_of_this_job_that_got_nowhere_count() {
        assert_eq!(past(&[], 7, 0).idle, 0);
        assert_eq!(past(&[(7, 0, false), (7, 0, false), (7, 50, false), (7, 50, false)], 7, 50).idle, 2);
        assert_eq!(past(&[(7, 50, false)], 7, 100).idle, 0, "it saved a later step");
        assert_eq!(past(&[(7, 0, false), (8, 0, false)], 8, 0).idle, 1, "a new job begins anew");
    }

    #[test]
    fn the_second_crash_at_the_same_step_is_the_last() {
        let first = past(&[(7, 0, false), (7, 0, false)], 7, 0);
        assert_eq!((first.idle, first.crashes), (2, 0), "killed without a word is no crash");
        assert!(first.may_repeat(Exit::Crash) && first.may_repeat(Exit::Unavailable));
        assert!(!first.may_repeat(Exit::BadData) && !first.may_repeat(Exit::Disk) && !first.may_repeat(Exit::Refused));
        let second = past(&[(7, 0, false), (7, 0, true)], 7, 0);
        assert_eq!((second.crashes, second.may_repeat(Exit::Crash)), (1, false));
        assert!(past(&[(7, 0, true), (7, 10, false)], 7, 20).may_repeat(Exit::Crash));
    }

    #[test]
    fn a_slice_that_is_too_short_is_saved_in_earlier_each_time() {
        let after = |idle| Past { idle, ..Past::default() }.first_save_after(100);
        assert_eq!([0, 1, 2, 3, 6, 7, 64].map(after), [None, Some(50), Some(25), Some(12), Some(1), Some(1), Some(1)]);
    }
}
