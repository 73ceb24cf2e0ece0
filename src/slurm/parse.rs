//! Slurm's fixed text formats -> values. `--json` is not used: in 22.05 it reports success for every failed job, and its
//! layout changes with the version.

use crate::runlog::JobId;
use crate::{Error, Exit, Result};
use serde::{Deserialize, Serialize};
use std::fmt;

/// Fields of one line of [`QUEUE_FORMAT`], the last two free text.
const QUEUE_FIELDS: usize = 15;
/// `squeue -O`: the two fields of free text last, since a name may hold the separator.
pub(super) const QUEUE_FORMAT: &str = "JobArrayID:|,State:|,Reason:|,RestartCnt:|,SubmitTime:|,StartTime:|,EndTime:|,\
    TimeLimit:|,TimeUsed:|,Partition:|,QOS:|,tres-alloc:|,NodeList:|,Name:|,Comment:|";
/// `sacct -o`.
pub(super) const ACCOUNT_FORMAT: &str = "JobID,State,ExitCode,DerivedExitCode,Submit,Start,End,ElapsedRaw,NodeList";
const ACCOUNT_FIELDS: usize = 9;
/// The exit code that Slurm gives a step which the kernel killed for memory, as accounting writes it.
const OUT_OF_MEMORY_CODE: &str = "0:125";

/// What Slurm calls the state of a job. A word that is not known stays a word, and is never a success.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum JobState {
    Pending,
    Configuring,
    Running,
    Suspended,
    Completing,
    Completed,
    Failed,
    Timeout,
    OutOfMemory,
    NodeFail,
    Preempted,
    Requeued,
    Cancelled,
    Other(String),
}

impl JobState {
    /// The first word counts: `CANCELLED by 0`.
    pub fn parse(text: &str) -> Self {
        match text.split_whitespace().next().unwrap_or_default().trim_end_matches('+') {
            "PENDING" | "REQUEUE_HOLD" | "SPECIAL_EXIT" | "REQUEUE_FED" => Self::Pending,
            "CONFIGURING" => Self::Configuring,
            "RUNNING" | "RESIZING" | "SIGNALING" => Self::Running,
            "SUSPENDED" | "STOPPED" => Self::Suspended,
            "COMPLETING" | "STAGE_OUT" => Self::Completing,
            "COMPLETED" => Self::Completed,
            "FAILED" | "BOOT_FAIL" => Self::Failed,
            "TIMEOUT" | "DEADLINE" => Self::Timeout,
            "OUT_OF_MEMORY" => Self::OutOfMemory,
            "NODE_FAIL" => Self::NodeFail,
            "PREEMPTED" => Self::Preempted,
            "REQUEUED" => Self::Requeued,
            "CANCELLED" | "REVOKED" => Self::Cancelled,
            other => Self::Other(other.to_owned()),
        }
    }

    /// Slurm's own word.
    pub fn word(&self) -> &str {
        match self {
            Self::Pending => "PENDING",
            Self::Configuring => "CONFIGURING",
            Self::Running => "RUNNING",
            Self::Suspended => "SUSPENDED",
            Self::Completing => "COMPLETING",
            Self::Completed => "COMPLETED",
            Self::Failed => "FAILED",
            Self::Timeout => "TIMEOUT",
            Self::OutOfMemory => "OUT_OF_MEMORY",
            Self::NodeFail => "NODE_FAIL",
            Self::Preempted => "PREEMPTED",
            Self::Requeued => "REQUEUED",
            Self::Cancelled => "CANCELLED",
            Self::Other(word) => word,
        }
    }

    /// The job will run no more under this number, unless somebody requeues it.
    pub fn is_over(&self) -> bool {
        matches!(
            self,
            Self::Completed
                | Self::Failed
                | Self::Timeout
                | Self::OutOfMemory
                | Self::NodeFail
                | Self::Preempted
                | Self::Cancelled
        )
    }
}

impl fmt::Display for JobState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.word())
    }
}

/// A job as the queue shows it. Times are Unix seconds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueuedJob {
    pub id: JobId,
    pub state: JobState,
    /// Slurm's word for why it waits, or `None`.
    pub reason: String,
    pub restarts: u32,
    pub submitted_s: Option<u64>,
    /// Of a job that waits: Slurm's estimate, if it has one.
    pub start_s: Option<u64>,
    pub end_s: Option<u64>,
    /// `None` for one without a limit.
    pub limit_s: Option<u64>,
    pub used_s: u64,
    pub partition: String,
    pub qos: String,
    /// `cpu=8,mem=64G,node=1,gres/gpu=8`.
    pub resources: String,
    pub nodes: String,
    pub name: String,
    pub comment: String,
}

impl QueuedJob {
    /// `gres/gpu=8` of its resources, or `cpu=8`.
    pub fn resource(&self, name: &str) -> Option<u64> {
        let value = self.resources.split(',').find_map(|part| part.strip_prefix(name)?.strip_prefix('='));
        value.and_then(|value| value.parse().ok())
    }
}

/// Lines of `squeue -h -O` in [`QUEUE_FORMAT`].
pub(super) fn queue(text: &str) -> Result<Vec<QueuedJob>> {
    text.lines().filter(|line| !line.trim().is_empty()).map(queued_job).collect()
}

fn queued_job(line: &str) -> Result<QueuedJob> {
    let fields: Vec<&str> = line.splitn(QUEUE_FIELDS - 1, '|').map(str::trim).collect();
    let [id, state, reason, restarts, submitted, start, end, limit, used, partition, qos, resources, nodes, rest] =
        fields[..]
    else {
        return Err(foreign("squeue", QUEUE_FIELDS, line));
    };
    // Name and comment may both hold the separator; a comment of ours begins with a word that no name has.
    let rest = rest.strip_suffix('|').unwrap_or(rest);
    let (name, comment) = rest.split_once(&format!("|{}", super::jobs::COMMENT)).map_or_else(
        || rest.rsplit_once('|').map_or((rest, String::new()), |(name, comment)| (name, comment.to_owned())),
        |(name, run)| (name, format!("{}{run}", super::jobs::COMMENT)),
    );
    let id = id.parse().map_err(|_| foreign("squeue", QUEUE_FIELDS, line))?;
    Ok(QueuedJob {
        id,
        state: JobState::parse(state),
        reason: reason.to_owned(),
        restarts: restarts.parse().unwrap_or(0),
        submitted_s: time(submitted),
        start_s: time(start),
        end_s: time(end),
        limit_s: span(limit),
        used_s: span(used).unwrap_or(0),
        partition: partition.to_owned(),
        qos: qos.to_owned(),
        resources: resources.to_owned(),
        nodes: if nodes == "(null)" { String::new() } else { nodes.to_owned() },
        name: name.to_owned(),
        comment,
    })
}

/// The fields of `scontrol -o show job` that mean something to us. Times are Unix seconds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobDetails {
    pub id: JobId,
    pub state: JobState,
    pub reason: String,
    pub restarts: u32,
    pub requeue: bool,
    pub start_s: Option<u64>,
    pub end_s: Option<u64>,
    /// It was told to make room.
    pub preempt_s: Option<u64>,
    /// `3:0`.
    pub exit_code: String,
    /// Of its steps, the worst.
    pub derived_exit_code: String,
}

/// One line of `scontrol -o show job`: `Key=value` words, of which some values hold blanks.
pub(super) fn details(text: &str) -> Result<JobDetails> {
    let find = |key: &str| {
        let key = format!(" {key}=");
        // From the end for none of these: JobName and Comment, which are free text, could hold any of them, so the first
        // place after the fixed words wins.
        let text = text.split_once(" JobState=").map_or(text, |(_, rest)| rest);
        text.split_once(&key).and_then(|(_, rest)| rest.split_whitespace().next()).unwrap_or_default().to_owned()
    };
    let id = text.trim().strip_prefix("JobId=").and_then(|rest| rest.split_whitespace().next());
    let id = id.and_then(|id| id.parse().ok()).map(|id| array_task(text).unwrap_or(id));
    let state = text.split_once(" JobState=").and_then(|(_, rest)| rest.split_whitespace().next());
    let (Some(id), Some(state)) = (id, state) else {
        return Err(Error::new(Exit::Unavailable, "slurm_format", "scontrol show job names no JobId and JobState")
            .in_place(first_words(text)));
    };
    Ok(JobDetails {
        id,
        state: JobState::parse(state),
        reason: find("Reason"),
        restarts: find("Restarts").parse().unwrap_or(0),
        requeue: find("Requeue") == "1",
        start_s: time(&find("StartTime")),
        end_s: time(&find("EndTime")),
        preempt_s: time(&find("PreemptTime")),
        exit_code: find("ExitCode"),
        derived_exit_code: find("DerivedExitCode"),
    })
}

/// `JobId=125 ArrayJobId=123 ArrayTaskId=4 JobName=...`: of an array's task, the number that commands take.
fn array_task(text: &str) -> Option<JobId> {
    let mut words = text.split_whitespace().skip(1);
    let array = words.next()?.strip_prefix("ArrayJobId=")?.parse().ok()?;
    Some(JobId::task(array, words.next()?.strip_prefix("ArrayTaskId=")?.parse().ok()?))
}

/// One attempt of a job as accounting has it. Times are Unix seconds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AccountedJob {
    pub id: JobId,
    pub state: JobState,
    /// Of `CANCELLED by 1000`: the user's number.
    pub cancelled_by: Option<u32>,
    pub exit_code: String,
    pub derived_exit_code: String,
    pub start_s: Option<u64>,
    pub end_s: Option<u64>,
    pub elapsed_s: u64,
    pub nodes: String,
}

/// Lines of `sacct -n -P -D` in [`ACCOUNT_FORMAT`], oldest first; rows of steps are left out.
pub(super) fn accounts(text: &str) -> Result<Vec<AccountedJob>> {
    let mut rows = Vec::new();
    for line in text.lines().filter(|line| !line.trim().is_empty()) {
        let fields: Vec<&str> = line.split('|').collect();
        let [id, state, exit_code, derived, _, start, end, elapsed, nodes] = fields[..] else {
            return Err(foreign("sacct", ACCOUNT_FIELDS, line));
        };
        let Ok(id) = id.parse() else { continue };
        rows.push(AccountedJob {
            id,
            // srun ends with 1 when the kernel killed its step for memory, and the job with srun: only this field tells.
            state: match JobState::parse(state) {
                JobState::Failed if derived == OUT_OF_MEMORY_CODE => JobState::OutOfMemory,
                state => state,
            },
            cancelled_by: state.strip_prefix("CANCELLED by ").and_then(|user| user.trim().parse().ok()),
            exit_code: exit_code.to_owned(),
            derived_exit_code: derived.to_owned(),
            start_s: time(start),
            end_s: time(end),
            elapsed_s: elapsed.parse().unwrap_or(0),
            nodes: nodes.to_owned(),
        });
    }
    Ok(rows)
}

/// `KillWait                = 30 sec` of `scontrol show config`.
pub(super) fn setting<'t>(config: &'t str, name: &str) -> Option<&'t str> {
    config.lines().find_map(|line| {
        let (key, value) = line.split_once('=')?;
        (key.trim() == name).then(|| value.trim())
    })
}

/// The job of `sbatch --parsable`: `123`, or `123;cluster`.
pub(super) fn submitted(text: &str) -> Result<JobId> {
    let word = text.lines().map(str::trim).rfind(|line| !line.is_empty()).unwrap_or_default();
    let id = word.split(';').next().unwrap_or_default();
    id.parse().map_err(|_| {
        Error::new(Exit::Unavailable, "slurm_format", "sbatch --parsable printed no job number")
            .in_place(first_words(text))
            .hint("the job may be in the queue: look with squeue --me before you submit again")
    })
}

fn foreign(program: &str, fields: usize, line: &str) -> Error {
    let what = format!("{program} printed a line that has not the {fields} fields asked for");
    Error::new(Exit::Unavailable, "slurm_format", what)
        .in_place(first_words(line))
        .hint("is this another version of Slurm than 20.11 to 24.11?")
}

fn first_words(text: &str) -> String {
    text.chars().take(80).collect()
}

/// Unix seconds; `Unknown`, `None` and `N/A` are no times.
fn time(text: &str) -> Option<u64> {
    text.parse().ok().filter(|&seconds| seconds > 0)
}

/// `1-02:03:04`, `02:03:04`, `3:04` -> seconds; `UNLIMITED` and `NOT_SET` are none.
fn span(text: &str) -> Option<u64> {
    let (days, clock) = text.split_once('-').unwrap_or(("0", text));
    let mut seconds = 0u64;
    for part in clock.split(':') {
        seconds = seconds.checked_mul(60)?.checked_add(part.parse().ok()?)?;
    }
    days.parse::<u64>().ok()?.checked_mul(86_400)?.checked_add(seconds)
}

#[cfg(test)]
mod tests {
    use super::*;

    const RUNNING: &str = "1|RUNNING|None|2|1796025000|1796025001|1796028601|1:00:00|0:02|extra|normal|cpu=1,node=1,billing=1,gres/gpu=8|gpu1|x|y|lbva:/a/b|c d|";

    #[test]
    fn a_queue_is_read_whatever_names_and_comments_hold() {
        let text = format!(
            "{RUNNING}\n2|PENDING|Resources|0|1796025000|N/A|N/A|UNLIMITED|0:00|extra|normal|cpu=1||a.sh|(null)|\n"
        );
        let jobs = queue(&text).unwrap();
        assert_eq!((jobs[0].name.as_str(), jobs[0].comment.as_str()), ("x|y", "lbva:/a/b|c d"));
        assert_eq!((jobs[0].restarts, jobs[0].used_s, jobs[0].limit_s), (2, 2, Some(3600)));
        assert_eq!(
            (jobs[0].resource("gres/gpu"), jobs[0].resource("cpu"), jobs[0].resource("gpu")),
            (Some(8), Some(1), None)
        );
        assert_eq!((&jobs[1].state, jobs[1].reason.as_str(), jobs[1].start_s), (&JobState::Pending, "Resources", None));
        assert_eq!((jobs[1].limit_s, jobs[1].nodes.as_str()), (None, ""));
        assert_eq!(queue("\n"), Ok(vec![]));
        let error = queue("1 RUNNING").expect_err("another format");
        assert!(error.code == "slurm_format" && error.to_string().contains("15 fields"), "{error}");
    }

    #[test]
    fn details_are_found_among_words_that_look_like_them() {
        let text = "JobId=1 JobName=a Reason=b JobState=x UserId=root(0) QOS=normal JobState=RUNNING Reason=None Dependency=(null) Requeue=1 Restarts=3 ExitCode=0:0 DerivedExitCode=7:0 EndTime=1796028601 PreemptTime=None SuspendTime=None";
        // A name that holds a whole key spoils only that key.
        let found = details(&text.replace(" JobState=x", "")).unwrap();
        assert_eq!(
            (found.id, found.state, found.reason.as_str(), found.restarts),
            (1.into(), JobState::Running, "None", 3)
        );
        assert_eq!((found.end_s, found.preempt_s, found.requeue), (Some(1_796_028_601), None, true));
        assert_eq!((found.exit_code.as_str(), found.derived_exit_code.as_str()), ("0:0", "7:0"));
        assert_eq!(details("no job").expect_err("no job").code, "slurm_format");
    }

    #[test]
    fn accounting_tells_attempts_and_who_cancelled() {
        let text = "7|PREEMPTED|0:0|0:0|10|20|30|10|gpu1\n7.batch|CANCELLED|0:15||20|20|31|11|gpu1\n\
                    7|CANCELLED by 1000|0:0|0:0|10|40|Unknown|5|gpu1\n8|OUT_OF_ME+|0:125||1|Unknown|Unknown||None assigned\n";
        let rows = accounts(text).unwrap();
        let states: Vec<&str> = rows.iter().map(|row| row.state.word()).collect();
        assert_eq!(states, ["PREEMPTED", "CANCELLED", "OUT_OF_ME"]);
        assert_eq!((rows[1].cancelled_by, rows[1].end_s, rows[0].elapsed_s), (Some(1000), None, 10));
        assert!(!rows[2].state.is_over(), "a word that is not known is no end");
        // As a real one came: the step OUT_OF_MEMORY, srun's 1 for the job.
        let rows = accounts("895|FAILED|1:0|0:125|1|2|3|20|gpu1\n896|FAILED|1:0|1:0|1|2|3|20|gpu1\n").unwrap();
        assert_eq!((&rows[0].state, &rows[1].state), (&JobState::OutOfMemory, &JobState::Failed));
        assert_eq!(accounts("7|X").expect_err("too short").code, "slurm_format");
    }

    #[test]
    fn times_spans_and_job_numbers() {
        assert_eq!(["1-02:03:04", "2:00", "INVALID", "UNLIMITED"].map(span), [Some(93_784), Some(120), None, None]);
        assert_eq!(["5", "0", "N/A", "Unknown"].map(time), [Some(5), None, None, None]);
        assert_eq!(submitted("12\n"), Ok(12.into()));
        assert_eq!(submitted("a note of the site\n12;cluster\n"), Ok(12.into()));
        assert!(submitted("ok").expect_err("none").hint.contains("before you submit again"));
        assert_eq!(setting("A = 1\nKillWait                = 30 sec\n", "KillWait"), Some("30 sec"));
    }
}
