//! What a run's own evidence and Slurm's word of its job amount to together. The run directory is right about progress,
//! Slurm about the job; where they contradict each other, that is said.

use super::parse::JobState;
use super::watch::JobView;
use crate::runlog::{MOST_CRASHES, RunState, RunView, Tries};
use crate::words::{duration, thousands};

/// State and reason of a run at `now_ms` (Unix time), with its job if it has one.
pub fn judge(view: &RunView, now_ms: u64, job: Option<&JobView>) -> (RunState, String) {
    let (state, reason) = view.state(now_ms);
    let Some(job) = job else { return (state, reason) };
    let started = view.attempt().and_then(|attempt| attempt.started.job.as_ref());
    let is_its_attempt = started.is_some_and(|started| started.id == job.id);
    match &job.state {
        JobState::Pending | JobState::Requeued | JobState::Configuring if state != RunState::Finished => {
            let again = restart_words(view, job);
            let again = if again.is_empty() { again } else { format!(", {again}") };
            (RunState::Queued, format!("job {}{again}: {}{}", job.id, job.words, start_words(job, now_ms)))
        }
        JobState::Suspended => (RunState::Stalled, format!("job {} is suspended by Slurm on {}", job.id, job.nodes)),
        JobState::Running | JobState::Completing => {
            let current = is_its_attempt && started.is_some_and(|started| started.restart >= job.restarts);
            let over =
                !matches!(state, RunState::Starting | RunState::Running | RunState::Stalled | RunState::Stopping);
            match over && !current {
                // The attempt before it has ended, and its own has not begun.
                true => (RunState::Starting, format!("job {} has started on {}", job.id, job.nodes)),
                false => (state, reason),
            }
        }
        ended if ended.is_over() => over(view, state, reason, job, is_its_attempt),
        _ => (state, reason),
    }
}

/// `; start expected in 2 h 10 m`.
fn start_words(job: &JobView, now_ms: u64) -> String {
    let until = job.start_s.and_then(|start_s| (start_s * 1000).checked_sub(now_ms)).filter(|ms| *ms >= 60_000);
    until.map(|ms| format!("; start expected in {}", duration(ms))).unwrap_or_default()
}

fn over(view: &RunView, state: RunState, reason: String, job: &JobView, is_its_attempt: bool) -> (RunState, String) {
    if state == RunState::Finished {
        return (state, reason);
    }
    let said = format!("job {} {}", job.id, job.words);
    if !is_its_attempt {
        return match job.state {
            JobState::Cancelled => (RunState::Stopped, said),
            JobState::OutOfMemory | JobState::NodeFail => {
                (RunState::Failed, format!("{said}; it had opened no attempt"))
            }
            _ => {
                let hint = "no attempt of it is here; does its node see this folder? Its output is in slurm/";
                (RunState::Failed, format!("{said}; {hint}"))
            }
        };
    }
    let step = thousands(view.steps_done());
    let own_word = view.outcome.is_some() || view.attempt().is_some_and(|attempt| attempt.ended.is_some());
    match (&job.state, own_word) {
        // It was to come back, and will not.
        (JobState::Cancelled, true) if state == RunState::Preempted => (RunState::Stopped, format!("{said}; {reason}")),
        (ended, true) if state == RunState::Preempted && *ended != JobState::Preempted => {
            (RunState::Failed, format!("{said}; {reason}"))
        }
        // The run's own word on what it did stands; an exit code that was lost on the way is named.
        (JobState::Completed, true) if state == RunState::Failed => (
            state,
            format!("Slurm says COMPLETED, the run crashed at step {step}: the wrapper hides exit codes; {reason}"),
        ),
        (_, true) => (state, reason),
        (JobState::Completed, false) => {
            let text = format!("Slurm says COMPLETED, the run crashed at step {step}: the wrapper hides exit codes");
            (RunState::Failed, text)
        }
        (JobState::Preempted | JobState::NodeFail | JobState::Timeout, false) => {
            (RunState::Preempted, format!("{said} at step {step}{}", lost(view)))
        }
        (JobState::Cancelled, false) => (RunState::Stopped, format!("{said} at step {step}{}", lost(view))),
        _ => (RunState::Failed, format!("{said} at step {step}{}", lost(view))),
    }
}

fn lost(view: &RunView) -> String {
    match (view.last_save, view.steps_done()) {
        (Some(save), done) if save.step >= done => "; nothing lost".to_owned(),
        (Some(save), done) => {
            format!("; {} steps after the save at {} are lost", thousands(done - save.step), thousands(save.step))
        }
        (None, _) => "; no complete checkpoint is on disk".to_owned(),
    }
}

/// A line about the job itself: `job 12 RUNNING on gpu1, 1 h 02 m of 4 h 00 m, restart 2 (in vain 0 of 10)`.
pub fn job_words(view: &RunView, job: &JobView) -> String {
    let on = if job.nodes.is_empty() || job.state != JobState::Running { "" } else { " on " };
    let nodes = if on.is_empty() { "" } else { job.nodes.as_str() };
    let facts = [format!("job {} {}{on}{nodes}", job.id, job.state), used_words(job), restart_words(view, job)];
    facts.into_iter().filter(|fact| !fact.is_empty()).collect::<Vec<_>>().join(", ")
}

/// `1 h 02 m of 4 h 00 m`; empty before it has run.
pub fn used_words(job: &JobView) -> String {
    let limit = job.limit_s.map(|limit_s| format!(" of {}", duration(limit_s * 1000))).unwrap_or_default();
    if job.used_s > 0 { format!("{}{limit}", duration(job.used_s * 1000)) } else { String::new() }
}

/// How often it was started again, and how much of what the program allows itself was used, since Slurm knows no limit:
/// `restart 2 (in vain 0 of 10)`; empty before the first time.
pub fn restart_words(view: &RunView, job: &JobView) -> String {
    if job.restarts == 0 {
        return String::new();
    }
    let started = view.attempt().and_then(|attempt| attempt.started.job.as_ref());
    let allowed = started.filter(|started| started.id == job.id).and_then(|started| started.max_idle_attempts);
    let Tries { idle, crashes } = view.tries_before(job.id, job.restarts);
    let mut used: Vec<String> = allowed.map(|allowed| format!("in vain {idle} of {allowed}")).into_iter().collect();
    if crashes > 0 {
        used.push(format!("crashes {crashes} of {MOST_CRASHES}"));
    }
    let used = if used.is_empty() { String::new() } else { format!(" ({})", used.join(", ")) };
    format!("restart {}{used}", job.restarts)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runlog::{AttemptStarted, AttemptView, JobIdentity, Liveness, Outcome, OutcomeView, SaveView};

    const NOW_MS: u64 = 1_000_000;

    /// An attempt on another host, in this start of job 7, of which nothing was heard for two hours.
    fn silent(restart: u32) -> RunView {
        let started = AttemptStarted {
            attempt: 1,
            arm: "m1".to_owned(),
            pid: 4,
            host: "gpu1".to_owned(),
            start_step: 400,
            total_steps: 8000,
            save_every: 100,
            validate_every: 500,
            parameters: 1,
            device: "cuda:0".to_owned(),
            threads: 8,
            job: Some(JobIdentity { id: 7.into(), restart, node: "gpu1".to_owned(), max_idle_attempts: Some(10) }),
        };
        let save = SaveView { step: 300, bytes: 1, ms: 1.0, blocked_ms: 1.0, attempt: 1, time_ms: 0 };
        RunView {
            attempts: vec![AttemptView { started, started_ms: 0, ended: None, first_step_ms: None }],
            liveness: Liveness::Unknown,
            last_save: Some(save),
            ..RunView::default()
        }
    }

    fn job(state: &str, words: &str, restarts: u32) -> JobView {
        JobView {
            id: 7.into(),
            state: JobState::parse(state),
            words: words.to_owned(),
            restarts,
            used_s: 3720,
            limit_s: Some(14_400),
            nodes: "gpu1".to_owned(),
            start_s: None,
        }
    }

    fn judged(view: &RunView, job: &JobView) -> (RunState, String) {
        judge(view, NOW_MS, Some(job))
    }

    #[test]
    fn a_job_that_waits_is_queued_with_its_reason() {
        let mut waiting = job("PENDING", "jobs of higher priority go first (Priority)", 2);
        waiting.start_s = Some(NOW_MS / 1000 + 7800);
        let wanted = "job 7, restart 2 (in vain 0 of 10): jobs of higher priority go first (Priority); start expected in 2 h 10 m";
        assert_eq!(judged(&silent(1), &waiting), (RunState::Queued, wanted.to_owned()));
        assert_eq!(judged(&RunView::default(), &waiting).0, RunState::Queued);
    }

    #[test]
    fn a_job_that_runs_leaves_progress_to_the_run() {
        let running = job("RUNNING", "", 1);
        assert_eq!(judged(&silent(1), &running), silent(1).state(NOW_MS));
        assert_eq!(judged(&RunView::default(), &running), (RunState::Starting, "job 7 has started on gpu1".to_owned()));
        let mut before = silent(0);
        before.outcome =
            Some(OutcomeView { outcome: Outcome::Stopped, reason: "preempted".to_owned(), exit_code: 75, step: 400 });
        assert_eq!(judged(&before, &running).0, RunState::Starting, "the outcome is of the start before");
        before.attempts[0].started.job =
            Some(JobIdentity { id: 7.into(), restart: 1, node: String::new(), max_idle_attempts: None });
        assert_eq!(judged(&before, &running).0, RunState::Preempted, "the outcome is its own; the job is about to end");
        assert_eq!(job_words(&before, &running), "job 7 RUNNING on gpu1, 1 h 02 m of 4 h 00 m, restart 1");
    }

    #[test]
    fn restarts_are_told_with_what_is_allowed() {
        let attempts = |starts: &[(u64, bool)]| {
            let mut view = silent(0);
            let attempt = view.attempts.remove(0);
            for (restart, &(start_step, crashed)) in (0..).zip(starts) {
                let mut attempt = attempt.clone();
                attempt.started.start_step = start_step;
                attempt.started.job.iter_mut().for_each(|job| job.restart = restart);
                let outcome = if crashed { Outcome::Failed } else { Outcome::Stopped };
                attempt.ended = Some((outcome, "over".to_owned()));
                view.attempts.push(attempt);
            }
            view
        };
        let words = |view: &RunView, job: &JobView| restart_words(view, job);
        assert_eq!(words(&silent(0), &job("RUNNING", "", 0)), "");
        // Three were ended in vain, and a fourth waits.
        let mut view = attempts(&[(0, false), (300, false), (300, false), (300, false)]);
        assert_eq!(words(&view, &job("PENDING", "", 4)), "restart 4 (in vain 3 of 10)");
        // The fourth is at work.
        view.attempts.last_mut().unwrap().ended = None;
        assert_eq!(words(&view, &job("RUNNING", "", 3)), "restart 3 (in vain 2 of 10)");
        // It has saved.
        view.last_save = view.last_save.map(|save| SaveView { step: 400, ..save });
        view.attempts.last_mut().unwrap().ended = Some((Outcome::Stopped, "preempted".to_owned()));
        assert_eq!(words(&view, &job("PENDING", "", 4)), "restart 4 (in vain 0 of 10)");
        let crashed = attempts(&[(0, false), (300, true)]);
        assert_eq!(words(&crashed, &job("PENDING", "", 2)), "restart 2 (in vain 1 of 10, crashes 1 of 2)");
    }

    #[test]
    fn the_cause_of_a_silent_end_is_slurms_to_tell() {
        let cases = [
            ("PREEMPTED", "was preempted", RunState::Preempted),
            ("NODE_FAIL", "lost its node gpu1", RunState::Preempted),
            ("TIMEOUT", "reached its time limit", RunState::Preempted),
            ("OUT_OF_MEMORY", "ran out of memory", RunState::Failed),
            ("CANCELLED", "was cancelled by anna", RunState::Stopped),
            ("FAILED", "failed: exit code 1", RunState::Failed),
        ];
        for (state, words, wanted) in cases {
            let text = format!("job 7 {words} at step 400; 100 steps after the save at 300 are lost");
            assert_eq!(judged(&silent(0), &job(state, words, 0)), (wanted, text));
        }
        let (state, text) = judged(&RunView::default(), &job("FAILED", "failed: exit code 78", 0));
        assert!(state == RunState::Failed && text.contains("does its node see this folder?"), "{text}");
    }

    #[test]
    fn a_preempted_run_whose_job_is_over_does_not_wait_for_it() {
        let mut preempted = silent(0);
        let reason = "preempted, and requeued by Slurm with a checkpoint".to_owned();
        preempted.outcome =
            Some(OutcomeView { outcome: Outcome::Stopped, reason: reason.clone(), exit_code: 75, step: 400 });
        let (state, text) = judged(&preempted, &job("CANCELLED", "was cancelled by anna", 1));
        assert_eq!((state, text), (RunState::Stopped, format!("job 7 was cancelled by anna; {reason}")));
        assert_eq!(judged(&preempted, &job("FAILED", "failed: exit code 1", 1)).0, RunState::Failed);
        assert_eq!(judged(&preempted, &job("PREEMPTED", "was preempted", 0)), (RunState::Preempted, reason));
    }

    #[test]
    fn a_wrapper_that_hides_the_exit_code_is_named() {
        let completed = job("COMPLETED", "ended with exit code 0", 0);
        let wanted = "Slurm says COMPLETED, the run crashed at step 400: the wrapper hides exit codes";
        assert_eq!(judged(&silent(0), &completed), (RunState::Failed, wanted.to_owned()));
        let mut failed = silent(0);
        failed.outcome =
            Some(OutcomeView { outcome: Outcome::Failed, reason: "disk full".to_owned(), exit_code: 74, step: 400 });
        assert_eq!(judged(&failed, &completed), (RunState::Failed, format!("{wanted}; disk full")));
        failed.outcome =
            Some(OutcomeView { outcome: Outcome::Finished, reason: "all done".to_owned(), exit_code: 0, step: 8000 });
        assert_eq!(judged(&failed, &completed), (RunState::Finished, "all done".to_owned()));
    }
}
