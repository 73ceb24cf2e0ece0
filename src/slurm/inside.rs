//! A worker that runs in a job: which job it is, why it was told to leave, how long it has, and whether to come back.
//!
//! A signal says nothing about its cause, so the controller is asked once. The rule that matters most: a user's own
//! `scancel` is never turned into a restart, although Slurm would allow it.

use super::parse::{JobDetails, JobState};
use super::scheduler::{Scheduler, Slurm};
use super::script::{BATCH_SCRIPT_VARIABLE, IDLE_ATTEMPTS_VARIABLE, SIGNAL_LEAD_VARIABLE};
use crate::Result;
use crate::runlog::{JobId, JobIdentity};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

const MAX_IDLE_ATTEMPTS: u32 = 10;
/// The warning before the time limit may come this much earlier than asked.
const EARLY: Duration = Duration::from_secs(120);

/// The job that this process is part of.
#[derive(Clone, Debug)]
pub struct InsideJob {
    pub identity: JobIdentity,
    /// Started by a batch script of this program, which may be requeued; else it is somebody's own allocation.
    pub managed: bool,
    pub max_idle_attempts: u32,
    pub batch_script: Option<std::path::PathBuf>,
    scheduler: Arc<dyn Scheduler>,
    kill_wait: Duration,
    /// When this process began, soon after the job did.
    began: Instant,
    /// How long before the time limit the script asked to be warned.
    lead: Duration,
}

/// Why a worker was told to leave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// Another job needs the machine, or the node was lost.
    Preempted,
    TimeLimit,
    /// Somebody's `scancel`.
    Cancelled,
    /// Somebody's signal or stop request: the job itself goes on.
    Asked,
    /// Slurm did not answer.
    Unknown,
}

/// What a signal means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Notice {
    pub cause: Cause,
    /// From now until SIGKILL; `None` if nothing is known to end it.
    pub left: Option<Duration>,
    /// Put back into the queue by Slurm already.
    pub requeued: bool,
    /// To be put back by the worker itself, once it has saved.
    pub requeue: bool,
}

impl Notice {
    /// For people: why the attempt ends. A state is read off its beginning (`preempted`).
    pub fn words(&self, by: &str) -> String {
        match self.cause {
            Cause::Preempted if self.requeued => "preempted, and requeued by Slurm".to_owned(),
            Cause::Preempted => "preempted by Slurm".to_owned(),
            Cause::TimeLimit => "preempted by the job's time limit".to_owned(),
            Cause::Cancelled => "cancelled with scancel".to_owned(),
            Cause::Asked => format!("stopped by {by}"),
            Cause::Unknown => format!("stopped by {by} (Slurm did not say why)"),
        }
    }
}

impl InsideJob {
    /// From the environment that Slurm sets; `None` outside a job.
    pub fn from_environment() -> Option<Self> {
        Self::from_variables(|name| std::env::var(name).ok(), Arc::new(Slurm::default()))
    }

    /// The same with anybody's variables and scheduler.
    pub fn from_variables(variable: impl Fn(&str) -> Option<String>, scheduler: Arc<dyn Scheduler>) -> Option<Self> {
        let number = |name: &str| variable(name).and_then(|text| text.parse::<u64>().ok());
        // An array's task has a number of its own too, but that of one of them is the array's.
        let task = number("SLURM_ARRAY_TASK_ID").and_then(|task| task.try_into().ok());
        let id = match (number("SLURM_ARRAY_JOB_ID"), task) {
            (Some(array), Some(task)) => JobId::task(array, task),
            _ => JobId::from(number("SLURM_JOB_ID")?),
        };
        let restart = number("SLURM_RESTART_COUNT").and_then(|count| count.try_into().ok()).unwrap_or(0);
        let lead = number(SIGNAL_LEAD_VARIABLE);
        let most = number(IDLE_ATTEMPTS_VARIABLE).and_then(|count| count.try_into().ok()).unwrap_or(MAX_IDLE_ATTEMPTS);
        let node = variable("SLURMD_NODENAME").unwrap_or_default();
        Some(Self {
            identity: JobIdentity { id, restart, node, max_idle_attempts: lead.map(|_| most) },
            managed: lead.is_some(),
            max_idle_attempts: most,
            batch_script: variable(BATCH_SCRIPT_VARIABLE).map(Into::into),
            kill_wait: scheduler.kill_wait(),
            began: Instant::now(),
            lead: Duration::from_secs(lead.unwrap_or(0)),
            scheduler,
        })
    }

    /// What a signal that arrived `since` ago means. Asks the controller once, and once more if the question itself was
    /// hit by the signal, which goes to every process of a step.
    pub fn notice(&self, signal: &str, since: Duration) -> Notice {
        let id = self.identity.id;
        let details = self.scheduler.show(id).or_else(|_| self.scheduler.show(id));
        match details {
            Ok(details) => self.judge(&details, signal, since),
            Err(_) => Notice {
                cause: Cause::Unknown,
                left: Some(self.kill_wait.saturating_sub(since)),
                requeued: false,
                requeue: false,
            },
        }
    }

    fn judge(&self, details: &JobDetails, signal: &str, since: Duration) -> Notice {
        let killed_soon = Some(self.kill_wait.saturating_sub(since));
        let ended = |cause, requeued, requeue| Notice { cause, left: killed_soon, requeued, requeue };
        if details.restarts > self.identity.restart {
            return ended(Cause::Preempted, true, false);
        }
        let warned = |cause, left: Duration| Notice { cause, left: Some(left), requeued: false, requeue: self.managed };
        match (&details.state, details.preempt_s, details.end_s) {
            (JobState::Running | JobState::Suspended | JobState::Configuring, Some(told_s), end_s) => {
                // Both by the controller's clock, so that the node's does not matter.
                let grace = end_s.map_or(0, |end_s| end_s.saturating_sub(told_s));
                warned(Cause::Preempted, Duration::from_secs(grace).saturating_sub(since))
            }
            (JobState::Running | JobState::Suspended | JobState::Configuring, None, end_s) => {
                let left = self.time_left(details.start_s, end_s);
                let near = left.is_some_and(|left| left <= self.lead + EARLY);
                match (signal, left) {
                    ("SIGUSR2", Some(left)) if near && self.managed => warned(Cause::TimeLimit, left),
                    _ => Notice { cause: Cause::Asked, left: None, requeued: false, requeue: false },
                }
            }
            _ if details.reason == "TimeLimit" || details.state == JobState::Timeout => {
                ended(Cause::TimeLimit, false, self.managed)
            }
            _ => ended(Cause::Cancelled, false, false),
        }
    }

    /// Until the job's end: by this node's clock, which may not be the controller's, and no more than the job's whole time
    /// without that of this process, which no clock is needed for. A node that is minutes slow would take the warning
    /// before the limit for somebody's signal, and leave for good.
    fn time_left(&self, start_s: Option<u64>, end_s: Option<u64>) -> Option<Duration> {
        let by_clock = Duration::from_secs(end_s?.saturating_sub(now_s()));
        let whole = start_s.and_then(|start_s| end_s?.checked_sub(start_s)).map(Duration::from_secs);
        Some(whole.map_or(by_clock, |whole| by_clock.min(whole.saturating_sub(self.began.elapsed()))))
    }

    /// Puts this job back into the queue. Slurm ends this process soon afterwards.
    pub fn requeue(&self) -> Result<()> {
        self.scheduler.requeue(self.identity.id)
    }

    /// Ends this job, as `scancel` does.
    pub fn cancel(&self) -> Result<()> {
        self.scheduler.cancel(self.identity.id)
    }
}

fn now_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

#[cfg(test)]
mod tests {
    use super::super::command::RecordedCommands;
    use super::*;

    const KILL_WAIT: Duration = Duration::from_secs(30);

    fn job(commands: &Arc<RecordedCommands>, variables: &[(&str, &str)]) -> Option<InsideJob> {
        commands.print("scontrol show config", "KillWait = 30 sec\n");
        let find = |name: &str| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned());
        let commands: Arc<dyn super::super::Commands> = commands.clone();
        InsideJob::from_variables(find, Arc::new(Slurm::new(commands)))
    }

    /// What the worker of the second start makes of this answer, two seconds after the signal.
    fn notice(signal: &str, answer: &str) -> Notice {
        let commands = Arc::new(RecordedCommands::default());
        let variables = [("SLURM_JOB_ID", "7"), ("SLURM_RESTART_COUNT", "1"), (SIGNAL_LEAD_VARIABLE, "180")];
        let job = job(&commands, &variables).unwrap();
        commands.print("scontrol -o show job 7", &format!("JobId=7 JobName=x {answer}\n"));
        job.notice(signal, Duration::from_secs(2))
    }

    fn left(seconds: u64) -> Option<Duration> {
        Some(Duration::from_secs(seconds))
    }

    #[test]
    fn a_job_is_what_its_environment_says() {
        let commands = Arc::new(RecordedCommands::default());
        assert!(job(&commands, &[("PATH", "/bin")]).is_none());
        let own = job(&commands, &[("SLURM_JOB_ID", "7"), ("SLURMD_NODENAME", "gpu1")]).unwrap();
        assert_eq!(
            own.identity,
            JobIdentity { id: JobId::from(7), restart: 0, node: "gpu1".to_owned(), max_idle_attempts: None }
        );
        assert!(!own.managed, "an allocation that somebody made by hand is not requeued");
        assert_eq!((own.kill_wait, own.max_idle_attempts), (KILL_WAIT, 10));
    }

    #[test]
    fn a_task_of_an_array_is_meant_and_not_the_array() {
        let commands = Arc::new(RecordedCommands::default());
        let variables = [("SLURM_JOB_ID", "7"), ("SLURM_ARRAY_JOB_ID", "7"), ("SLURM_ARRAY_TASK_ID", "4")];
        let job = job(&commands, &variables).unwrap();
        assert_eq!(job.identity.id, JobId::task(7, 4));
        let answer = "JobId=9 ArrayJobId=7 ArrayTaskId=4 JobName=x JobState=RUNNING Reason=None Restarts=0\n";
        commands.print("scontrol -o show job 7_4", answer);
        ["scontrol requeue 7_4", "scancel 7_4"].iter().for_each(|line| commands.print(line, ""));
        assert_eq!(job.notice("SIGTERM", Duration::ZERO).cause, Cause::Asked);
        job.requeue().and(job.cancel()).unwrap();
        let calls = commands.calls();
        assert_eq!(calls[1..], ["scontrol -o show job 7_4", "scontrol requeue 7_4", "scancel 7_4"]);
    }

    #[test]
    fn a_users_scancel_never_becomes_a_restart() {
        let seen = notice("SIGTERM", "JobState=COMPLETING Reason=None Restarts=1 EndTime=5 PreemptTime=None");
        assert_eq!(seen, Notice { cause: Cause::Cancelled, left: left(28), requeued: false, requeue: false });
        let seen = notice("SIGTERM", "JobState=CANCELLED Reason=None Restarts=1 PreemptTime=None");
        assert!(seen.cause == Cause::Cancelled && !seen.requeue);
    }

    #[test]
    fn what_slurm_requeued_itself_needs_no_help() {
        let seen = notice("SIGTERM", "JobState=COMPLETING Reason=BeginTime Restarts=2");
        assert_eq!(seen, Notice { cause: Cause::Preempted, left: left(28), requeued: true, requeue: false });
        assert!(seen.words("SIGTERM").starts_with("preempted"));
    }

    #[test]
    fn in_the_grace_time_the_worker_requeues_itself_by_the_controllers_clock() {
        let seen = notice("SIGTERM", "JobState=RUNNING Reason=None Restarts=1 EndTime=1120 PreemptTime=1000");
        assert_eq!(seen, Notice { cause: Cause::Preempted, left: left(118), requeued: false, requeue: true });
    }

    #[test]
    fn a_warning_is_told_from_somebodys_signal_by_the_time_left() {
        let near = format!("JobState=RUNNING Reason=None Restarts=1 EndTime={} PreemptTime=None", now_s() + 200);
        let seen = notice("SIGUSR2", &near);
        assert!(seen.cause == Cause::TimeLimit && seen.requeue, "{seen:?}");
        let left_s = seen.left.unwrap().as_secs();
        assert!((195..=200).contains(&left_s), "from now, however long ago the signal came: {left_s}");
        let far = format!("JobState=RUNNING Reason=None Restarts=1 EndTime={} PreemptTime=None", now_s() + 4000);
        let asked = Notice { cause: Cause::Asked, left: None, requeued: false, requeue: false };
        assert_eq!(notice("SIGUSR2", &far), asked);
        assert_eq!(notice("SIGTERM", &near), asked, "no warning comes as SIGTERM");
        // The node's clock is an hour slow; the job may take 210 s in all.
        let (start_s, end_s) = (now_s() + 3600, now_s() + 3810);
        let slow =
            format!("JobState=RUNNING Reason=None Restarts=1 StartTime={start_s} EndTime={end_s} PreemptTime=None");
        let seen = notice("SIGUSR2", &slow);
        assert!(seen.cause == Cause::TimeLimit && seen.requeue && seen.left <= left(210), "{seen:?}");
        let seen = notice("SIGTERM", "JobState=COMPLETING Reason=TimeLimit Restarts=1");
        assert_eq!(seen, Notice { cause: Cause::TimeLimit, left: left(28), requeued: false, requeue: true });
    }

    #[test]
    fn without_an_answer_a_signal_is_a_plain_one() {
        let commands = Arc::new(RecordedCommands::default());
        let job = job(&commands, &[("SLURM_JOB_ID", "7"), (SIGNAL_LEAD_VARIABLE, "9")]).unwrap();
        let seen = job.notice("SIGTERM", Duration::from_secs(40));
        assert_eq!(seen, Notice { cause: Cause::Unknown, left: left(0), requeued: false, requeue: false });
        // The question died of the same signal: it is asked again.
        commands.refuse("scontrol -o show job", "Terminated");
        commands.print("scontrol -o show job", "JobId=7 JobName=x JobState=COMPLETING Reason=None Restarts=1\n");
        assert_eq!(job.notice("SIGTERM", Duration::ZERO).cause, Cause::Preempted);
    }
}
