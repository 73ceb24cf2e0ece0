//! When Slurm is asked, and what it told: the pace of the looks of one program, and what they saw.

use super::pace::Pace;
use super::scheduler::Scheduler;
use super::watch::{JobWatch, Look};
use crate::runlog::{JobId, RunDir};
use std::time::{Duration, Instant};

/// The looks of one program at the jobs of its runs.
#[derive(Debug)]
pub struct Looks {
    watch: JobWatch,
    pace: Pace,
    known: Vec<JobId>,
}

impl Looks {
    /// `seconds` between looks in steady state, at least 30; 60 without it.
    pub fn new(seconds: Option<u64>) -> Self {
        Self { watch: JobWatch::default(), pace: Pace::new(seconds), known: Vec::new() }
    }

    /// Something was submitted, signalled or asked for.
    pub fn stir(&mut self, now: Instant) {
        self.pace.stir(now);
    }

    /// Time until the next look at these runs; `None` when there is nothing to look for. A job that somebody else submitted
    /// for one of them is looked at soon.
    pub fn wait(&mut self, now: Instant, runs: &[RunDir]) -> Option<Duration> {
        let jobs: Vec<JobId> = JobWatch::recorded(runs).iter().map(|(_, job)| *job).collect();
        if jobs != self.known {
            self.known = jobs;
            self.pace.stir(now);
        }
        self.pace.wait(now).filter(|_| !self.known.is_empty())
    }

    /// Asks for all runs at once.
    pub fn look(&mut self, now: Instant, scheduler: &dyn Scheduler, runs: &[RunDir]) -> Look {
        let look = self.watch.look(scheduler, runs, self.pace.tolerance(now)).clone();
        match look.error {
            None => self.pace.looked(now, self.watch.is_alive(&JobWatch::recorded(runs))),
            Some(_) => self.pace.failed(now),
        }
        look
    }
}

#[cfg(test)]
mod tests {
    use super::super::command::{Answer, Call, Commands};
    use super::super::jobs::{comment_of, submitted_run};
    use super::super::scheduler::Slurm;
    use super::super::shared::SharedQueue;
    use super::*;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::sync::{Arc, Mutex};

    static NOW_MS: AtomicU64 = AtomicU64::new(0);

    /// Commands that answer always, and count.
    #[derive(Debug, Default)]
    struct Counted {
        queue: String,
        accounts: String,
        /// Second and program.
        calls: Mutex<Vec<(u64, &'static str)>>,
    }

    impl Commands for Counted {
        fn run(&self, call: &Call) -> crate::Result<Answer> {
            self.calls.lock().unwrap().push((NOW_MS.load(Ordering::Relaxed) / 1000, call.program));
            let stdout = if call.program == "squeue" { self.queue.clone() } else { self.accounts.clone() };
            Ok(Answer { stdout, ..Answer::default() })
        }
    }

    /// Twenty runs: twelve in the queue, five of another user (at work by accounting alone), three over.
    fn runs(folder: &std::path::Path, commands: &mut Counted) -> Vec<RunDir> {
        let run = |job: u64| submitted_run(folder, &format!("m{job}"), job.into());
        let runs: Vec<RunDir> = (1..=20).map(run).collect();
        for (job, run) in (1..=20).zip(&runs) {
            match job {
                1..=12 => {
                    let comment = comment_of(run);
                    commands.queue +=
                        &format!("{job}|RUNNING|None|0|1|2|3|4:00:00|1:00|extra|q|cpu=1|gpu1|n|{comment}|\n");
                }
                13..=17 => commands.accounts += &format!("{job}|RUNNING|0:0|0:0|1|2|Unknown|60|gpu1\n"),
                _ => commands.accounts += &format!("{job}|COMPLETED|0:0|0:0|1|2|3|60|gpu1\n"),
            }
        }
        runs
    }

    /// Calls of `consoles` in an hour, each second of which every one of them asks whether it is time.
    fn an_hour(consoles: u64) -> Vec<(u64, &'static str)> {
        let folder = tempfile::tempdir().unwrap();
        let mut commands = Counted::default();
        let runs = runs(folder.path(), &mut commands);
        let commands = Arc::new(commands);
        let shared = SharedQueue::at(folder.path().join("queue"), || NOW_MS.load(Ordering::Relaxed));
        let slurm = Slurm::new(Arc::clone(&commands) as Arc<dyn Commands>).sharing(shared);
        let mut looks: Vec<Looks> = (0..consoles).map(|_| Looks::new(None)).collect();
        let start = Instant::now();
        for second in (0..3600).step_by(3) {
            NOW_MS.store(1_000_000_000 + second * 1000, Ordering::Relaxed);
            let now = start + Duration::from_secs(second);
            // They were opened seven seconds after each other.
            for (index, looks) in (0..).zip(&mut looks) {
                if second >= index * 7 && looks.wait(now, &runs) == Some(Duration::ZERO) {
                    let look = looks.look(now, &slurm, &runs);
                    assert_eq!((look.jobs.len(), look.error), (20, None));
                }
            }
        }
        let calls = commands.calls.lock().unwrap();
        calls.iter().map(|(second, program)| (second - 1_000_000, *program)).collect()
    }

    #[test]
    fn commands_are_few_however_many_runs_and_consoles_there_are() {
        let most_in_a_minute = |calls: &[(u64, &str)], program: &str, from: u64| {
            let counts = (from..3540).map(|minute| {
                calls.iter().filter(|(at, name)| (minute..minute + 60).contains(at) && *name == program).count()
            });
            counts.max().unwrap()
        };
        let calls = an_hour(1);
        assert_eq!((most_in_a_minute(&calls, "squeue", 180), most_in_a_minute(&calls, "sacct", 180)), (1, 1));
        assert!(most_in_a_minute(&calls, "squeue", 0) <= 5, "while they are young");
        assert!(calls.iter().all(|(_, program)| ["squeue", "sacct"].contains(program)), "no scontrol");
        // Ten consoles in steady state are hardly more than one.
        let calls = an_hour(10);
        let steady = calls.iter().filter(|(at, name)| *at >= 600 && *name == "squeue").count();
        assert!(most_in_a_minute(&calls, "squeue", 300) <= 2 && steady <= 70, "{steady} in 50 minutes");
    }
}
