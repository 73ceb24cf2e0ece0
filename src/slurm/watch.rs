//! The jobs of the runs that are watched: one look at the queue for all of them, and accounting for what has left it.

use super::jobs::{comment_of, submitted_jobs};
use super::parse::{AccountedJob, JobState, QueuedJob};
use super::scheduler::Scheduler;
use super::words::{end_words, reason_words};
use crate::Result;
use crate::runlog::{JobId, RunDir, now_ms};
use std::collections::BTreeMap;
use std::time::Duration;

/// The newest job of a run, as Slurm last told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobView {
    pub id: JobId,
    pub state: JobState,
    /// Why it waits or how it ended, in plain words; empty while it runs.
    pub words: String,
    pub restarts: u32,
    pub used_s: u64,
    pub limit_s: Option<u64>,
    pub nodes: String,
    /// Of a job that waits: when Slurm means to start it, Unix seconds.
    pub start_s: Option<u64>,
}

impl JobView {
    fn queued(job: &QueuedJob, queue: &[QueuedJob]) -> Self {
        let words = if job.state == JobState::Pending { reason_words(job, queue) } else { String::new() };
        Self {
            id: job.id,
            state: job.state.clone(),
            words,
            restarts: job.restarts,
            used_s: job.used_s,
            limit_s: job.limit_s,
            nodes: job.nodes.clone(),
            start_s: job.start_s.filter(|_| job.state == JobState::Pending),
        }
    }

    /// The last attempt that accounting knows. Of one that was requeued and is gone from the queue no more is known.
    fn accounted(rows: &[&AccountedJob]) -> Option<Self> {
        let last = *rows.last()?;
        Some(Self {
            id: last.id,
            state: last.state.clone(),
            words: end_words(last),
            restarts: u32::try_from(rows.len() - 1).unwrap_or(u32::MAX),
            used_s: last.elapsed_s,
            limit_s: None,
            nodes: last.nodes.clone(),
            start_s: None,
        })
    }

    /// It will not run again by itself.
    pub fn is_over(&self) -> bool {
        self.state.is_over()
    }

    /// It has a place in the queue or on a node.
    pub fn is_live(&self) -> bool {
        matches!(
            self.state,
            JobState::Pending
                | JobState::Configuring
                | JobState::Running
                | JobState::Suspended
                | JobState::Completing
                | JobState::Requeued
        )
    }
}

/// What one look at Slurm gave.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Look {
    /// By the run's name.
    pub jobs: BTreeMap<String, JobView>,
    /// Unix ms of the last look that worked; 0 before it.
    pub seen_ms: u64,
    /// Why the newest look did not work.
    pub error: Option<String>,
}

/// Looks, and remembers what is over.
#[derive(Debug, Default)]
pub struct JobWatch {
    look: Look,
    /// Jobs that were over when accounting was last asked.
    over: BTreeMap<JobId, JobView>,
}

impl JobWatch {
    /// What was seen last.
    pub fn last(&self) -> &Look {
        &self.look
    }

    /// The newest recorded job of each run, for those that have one.
    pub fn recorded(runs: &[RunDir]) -> Vec<(RunDir, JobId)> {
        let newest = |run: &RunDir| Some((run.clone(), submitted_jobs(run).ok()?.last()?.job));
        runs.iter().filter_map(newest).collect()
    }

    /// Is any of these jobs not known to be over?
    pub fn is_alive(&self, recorded: &[(RunDir, JobId)]) -> bool {
        recorded.iter().any(|(_, job)| !self.over.contains_key(job))
    }

    /// Asks for all runs at once: the queue, or what another program of this user was told of it at most `age` ago, and
    /// accounting for what is not there. A failure keeps what was known, with its age.
    pub fn look(&mut self, scheduler: &dyn Scheduler, runs: &[RunDir], age: Duration) -> &Look {
        match self.ask(scheduler, runs, age) {
            Ok((jobs, age)) => {
                let age_ms = u64::try_from(age.as_millis()).unwrap_or(u64::MAX);
                self.look = Look { jobs, seen_ms: now_ms().saturating_sub(age_ms), error: None };
            }
            Err(error) => self.look.error = Some(error.what),
        }
        &self.look
    }

    fn ask(
        &mut self,
        scheduler: &dyn Scheduler,
        runs: &[RunDir],
        age: Duration,
    ) -> Result<(BTreeMap<String, JobView>, Duration)> {
        let recorded = Self::recorded(runs);
        let (queue, age) = scheduler.recent_queue(age)?;
        let lives = |job: &JobId| queue.iter().any(|queued| queued.id == *job && !queued.state.is_over());
        let left: Vec<JobId> =
            recorded.iter().map(|(_, job)| *job).filter(|job| !lives(job) && !self.over.contains_key(job)).collect();
        // A site may have no accounting: then the run's own word is all there is.
        let accounts = if left.is_empty() { Vec::new() } else { scheduler.account(&left).unwrap_or_default() };
        let mut jobs = BTreeMap::new();
        for (run, newest) in &recorded {
            let comment = comment_of(run);
            let own = queue.iter().filter(|job| job.id == *newest || job.comment == comment);
            // One that lives wins over one that is over but still remembered; else the newest.
            let queued = own.max_by_key(|job| (!job.state.is_over(), job.id));
            let view = match queued.filter(|job| !job.state.is_over()) {
                Some(job) => Some(JobView::queued(job, &queue)),
                None => self.ended(&accounts, *newest, queued),
            };
            if let Some(view) = view {
                jobs.insert(run.arm(), view);
            }
        }
        Ok((jobs, age))
    }

    /// A job that has left the queue, or is only remembered there: accounting knows how it ended and who cancelled it.
    fn ended(&mut self, accounts: &[AccountedJob], job: JobId, queued: Option<&QueuedJob>) -> Option<JobView> {
        if let Some(over) = self.over.get(&job) {
            return Some(over.clone());
        }
        let rows: Vec<&AccountedJob> = accounts.iter().filter(|row| row.id == job).collect();
        let accounted = JobView::accounted(&rows);
        let words =
            |queued: &QueuedJob| JobView { words: format!("is {}", queued.state), ..JobView::queued(queued, &[]) };
        let over = match (accounted, queued) {
            (Some(view), _) if view.is_over() => view,
            // Rows arrive late: until they agree, what the queue says holds, and they are asked again.
            (Some(_), Some(queued)) => return Some(words(queued)),
            // Another user's job: accounting shows it, the queue of this user does not.
            (Some(view), None) => return Some(view),
            (None, Some(queued)) => words(queued),
            (None, None) => return None,
        };
        self.over.insert(job, over.clone());
        Some(over)
    }
}

#[cfg(test)]
mod tests {
    use super::super::command::RecordedCommands;
    use super::super::jobs::submitted_run;
    use super::super::scheduler::Slurm;
    use super::*;
    use std::sync::Arc;

    #[test]
    fn one_look_serves_all_runs_and_accounting_only_those_that_left() {
        let folder = tempfile::tempdir().unwrap();
        let runs = [
            submitted_run(folder.path(), "a", 7.into()),
            submitted_run(folder.path(), "b", 8.into()),
            RunDir::new(folder.path().join("c")),
        ];
        let commands = Arc::new(RecordedCommands::default());
        let slurm = Slurm::new(Arc::clone(&commands) as Arc<dyn super::super::Commands>);
        let line = format!("7|PENDING|Priority|2|5|N/A|N/A|4:00:00|0:00|extra|q|cpu=1||n|{}|\n", comment_of(&runs[0]));
        commands.print("squeue", &line);
        commands.print("sacct", "8|PREEMPTED|0:0|0:0|1|2|3|60|gpu1\n8|OUT_OF_MEMORY|0:125|0:0|1|2|3|60|gpu1\n");
        let mut watch = JobWatch::default();
        let look = watch.look(&slurm, &runs, Duration::ZERO).clone();
        assert_eq!(look.jobs.keys().collect::<Vec<_>>(), ["a", "b"]);
        assert_eq!(
            (look.jobs["a"].restarts, look.jobs["a"].words.as_str()),
            (2, "jobs of higher priority go first (Priority)")
        );
        assert_eq!((&look.jobs["b"].state, look.jobs["b"].restarts), (&JobState::OutOfMemory, 1));
        // What is over is not asked for again, and an outage keeps what is known.
        commands.print("squeue", &line);
        assert_eq!(watch.look(&slurm, &runs, Duration::ZERO).jobs, look.jobs);
        assert_eq!(commands.calls().len(), 3);
        commands.refuse("squeue", "slurm_load_jobs error: Unable to contact slurm controller (connect failure)");
        let later = watch.look(&slurm, &runs, Duration::ZERO);
        assert_eq!(later.jobs, look.jobs);
        assert!(later.error.as_ref().is_some_and(|error| error.contains("Unable to contact")), "{later:?}");
        assert!(watch.is_alive(&JobWatch::recorded(&runs)));
        assert!(!watch.is_alive(&JobWatch::recorded(&runs[1..])));
    }
}
