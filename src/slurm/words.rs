//! Slurm's words in plain ones: why a job waits, on which axis, and how one ended.

use super::parse::{AccountedJob, JobState, QueuedJob};
use crate::words::duration;

/// Why `job` waits, for people; `queue` holds the other jobs of the same user, whose use may be the reason.
pub fn reason_words(job: &QueuedJob, queue: &[QueuedJob]) -> String {
    let plain = match job.reason.split(',').next().unwrap_or_default().trim() {
        "Resources" => "not enough is free now; it is next in line".to_owned(),
        "Priority" => "jobs of higher priority go first".to_owned(),
        "BeginTime" if job.restarts > 0 => "requeued; Slurm lets it start again in about two minutes".to_owned(),
        "BeginTime" => "its begin time has not come".to_owned(),
        "Dependency" => "the job of this run before it is not over".to_owned(),
        "DependencyNeverSatisfied" => "it waits for a job that can never end as asked; cancel it".to_owned(),
        "PartitionTimeLimit" => "it asks for more time than the partition allows; it will never start so".to_owned(),
        "PartitionNodeLimit" | "PartitionConfig" => "the partition has not what it asks for".to_owned(),
        "PartitionDown" | "PartitionInactive" => "the partition is closed".to_owned(),
        "ReqNodeNotAvail" | "Reserved for maintenance" | "Reservation" => {
            "its time limit reaches into a maintenance or reservation; a shorter time may start now".to_owned()
        }
        "JobHeldUser" => "held by its user; release it".to_owned(),
        "JobHeldAdmin" => "held by an administrator".to_owned(),
        "job_requeued_in_held_state" | "launch_failed_requeued_held" => "requeued and held; release it".to_owned(),
        "Licenses" => "no licence is free".to_owned(),
        "NodeDown" => "its node is down".to_owned(),
        "InvalidAccount" | "InvalidQOS" => "its account or QOS is no longer valid".to_owned(),
        "None" | "" if job.restarts > 0 => "it was requeued a moment ago".to_owned(),
        "None" | "" => "it was submitted a moment ago".to_owned(),
        other => match limit_words(other, job, queue) {
            Some(words) => words,
            // A word that is not known is shown as it is, never as something else.
            None => return format!("Slurm says {}", job.reason),
        },
    };
    match job.reason.as_str() {
        "None" | "" => plain,
        reason => format!("{plain} ({reason})"),
    }
}

/// `QOSMaxCpuPerUserLimit`, `AssocGrpGRES`, ...: whose limit, on what.
fn limit_words(reason: &str, job: &QueuedJob, queue: &[QueuedJob]) -> Option<String> {
    let (place, rest) = if let Some(rest) = reason.strip_prefix("QOS") {
        ("QOS", rest)
    } else {
        ("account", reason.strip_prefix("Assoc")?)
    };
    let lower = rest.to_lowercase();
    if lower.contains("wall") {
        return Some(format!("it asks for more time than its {place} allows"));
    }
    let (what, resource) = match lower.as_str() {
        text if text.contains("cpu") => ("CPUs", Some("cpu")),
        text if text.contains("gres") || text.contains("gpu") => ("GPUs", Some("gres/gpu")),
        text if text.contains("mem") => ("memory", None),
        text if text.contains("node") => ("nodes", Some("node")),
        text if text.contains("job") || text.contains("submit") => ("jobs", None),
        text if text.contains("billing") || text.contains("tres") => ("resources", None),
        _ => return None,
    };
    if lower.contains("perjob") {
        return Some(format!("it asks for more {what} than one job may have in its {place}"));
    }
    let whose = match lower.contains("peruser") {
        true => format!("your {what} in its {place} are used up"),
        false if rest.starts_with("Grp") => format!("the {what} of all users of its {place} are used up"),
        false if lower.contains("peraccount") => format!("the {what} of your account are used up"),
        false => format!("the {what} that its {place} allows are used up"),
    };
    let Some(resource) = resource else { return Some(whose) };
    let running = || queue.iter().filter(|other| other.state == JobState::Running && other.qos == job.qos);
    let used: u64 = running().filter_map(|other| other.resource(resource)).sum();
    let asked = job.resource(resource);
    let jobs: Vec<String> = running().take(3).map(|other| other.id.to_string()).collect();
    Some(match (asked, jobs.is_empty()) {
        (Some(asked), false) => {
            format!("{whose}: {used} in use by your job {}, this one asks for {asked}", jobs.join(", "))
        }
        (Some(asked), true) => format!("{whose}: this one asks for {asked}"),
        (None, _) => whose,
    })
}

/// How an attempt of a job ended, for people.
pub fn end_words(job: &AccountedJob) -> String {
    match &job.state {
        JobState::Completed => "ended with exit code 0".to_owned(),
        JobState::Failed => format!("failed: {}", exit_words(&job.exit_code)),
        JobState::Timeout => "reached its time limit".to_owned(),
        JobState::OutOfMemory => "ran out of memory: ask for more, or lower the batch size".to_owned(),
        JobState::NodeFail => format!("lost its node {}", job.nodes),
        JobState::Preempted => "was preempted".to_owned(),
        JobState::Requeued => "was requeued".to_owned(),
        JobState::Cancelled => match job.cancelled_by {
            Some(user) => format!("was cancelled by {}", user_name(user)),
            None => "was cancelled".to_owned(),
        },
        other if job.elapsed_s > 0 => format!("is {other} after {}", duration(job.elapsed_s * 1000)),
        other => format!("is {other}"),
    }
}

/// `7:0` -> `exit code 7`; `0:9` -> `killed by signal 9`. Accounting drops the highest bit, so a code of a shell for a
/// signal, 137, comes as 9.
fn exit_words(code: &str) -> String {
    match code.split_once(':') {
        Some(("0", "0")) => "without an exit code".to_owned(),
        Some(("0", signal)) => format!("killed by signal {signal}"),
        Some((code @ ("9" | "15" | "11" | "6"), _)) => {
            format!("exit code {code}, which is how accounting writes signal {code} too")
        }
        Some((code, _)) => format!("exit code {code}"),
        None => format!("exit code {code}"),
    }
}

/// The user's name, from the system's list; the number where it has none.
fn user_name(user: u32) -> String {
    let users = std::fs::read_to_string("/etc/passwd").unwrap_or_default();
    let name = users.lines().find_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        (fields.nth(1)? == user.to_string()).then(|| name.to_owned())
    });
    name.unwrap_or_else(|| format!("user {user}"))
}

#[cfg(test)]
mod tests {
    use super::super::parse::{accounts, queue};
    use super::*;

    fn words(reason: &str) -> String {
        let line = |id, state, reason: &str, cpus| {
            format!("{id}|{state}|{reason}|1|5|N/A|N/A|1:00|0:00|core|core-own|cpu={cpus},gres/gpu=8||n|lbva:/r|")
        };
        let text = [line(7, "RUNNING", "None", 96), line(9, "PENDING", reason, 32)].join("\n");
        let jobs = queue(&text).unwrap();
        reason_words(&jobs[1], &jobs)
    }

    #[test]
    fn a_reason_is_told_on_its_own_axis_with_both_numbers() {
        let cases = [
            (
                "QOSMaxCpuPerUserLimit",
                "your CPUs in its QOS are used up: 96 in use by your job 7, this one asks for 32 (QOSMaxCpuPerUserLimit)",
            ),
            (
                "QOSMaxGRESPerUser",
                "your GPUs in its QOS are used up: 8 in use by your job 7, this one asks for 8 (QOSMaxGRESPerUser)",
            ),
            (
                "AssocGrpGRES",
                "the GPUs of all users of its account are used up: 8 in use by your job 7, this one asks for 8 (AssocGrpGRES)",
            ),
            ("QOSMaxJobsPerUserLimit", "your jobs in its QOS are used up (QOSMaxJobsPerUserLimit)"),
            (
                "QOSMaxWallDurationPerJobLimit",
                "it asks for more time than its QOS allows (QOSMaxWallDurationPerJobLimit)",
            ),
            ("QOSMaxCpuPerJobLimit", "it asks for more CPUs than one job may have in its QOS (QOSMaxCpuPerJobLimit)"),
            ("Priority", "jobs of higher priority go first (Priority)"),
            ("BeginTime", "requeued; Slurm lets it start again in about two minutes (BeginTime)"),
            (
                "ReqNodeNotAvail, Reserved for maintenance",
                "its time limit reaches into a maintenance or reservation; a shorter time may start now (ReqNodeNotAvail, Reserved for maintenance)",
            ),
            ("None", "it was requeued a moment ago"),
            ("SomethingNew", "Slurm says SomethingNew"),
        ];
        for (reason, wanted) in cases {
            assert_eq!(words(reason), wanted);
        }
    }

    #[test]
    fn ends_are_told_apart() {
        let end = |state: &str, code: &str| {
            let rows = accounts(&format!("7|{state}|{code}|0:0|1|2|3|60|gpu1\n")).unwrap();
            end_words(&rows[0])
        };
        let cases = [
            ("FAILED", "75:0", "failed: exit code 75"),
            ("FAILED", "0:9", "failed: killed by signal 9"),
            ("FAILED", "9:0", "failed: exit code 9, which is how accounting writes signal 9 too"),
            ("OUT_OF_MEMORY", "0:125", "ran out of memory: ask for more, or lower the batch size"),
            ("TIMEOUT", "0:0", "reached its time limit"),
            ("NODE_FAIL", "0:0", "lost its node gpu1"),
            ("PREEMPTED", "0:0", "was preempted"),
            ("CANCELLED by 0", "0:0", "was cancelled by root"),
            ("CANCELLED by 4294900000", "0:0", "was cancelled by user 4294900000"),
            ("SOMETHING", "0:0", "is SOMETHING after 1 m 00 s"),
        ];
        for (state, code, wanted) in cases {
            assert_eq!(end(state, code), wanted);
        }
    }
}
