//! What the program asks of a scheduler, and Slurm's answers to it.

use super::command::{Answer, Call, Commands, SystemCommands};
use super::parse::{self, ACCOUNT_FORMAT, AccountedJob, JobDetails, QUEUE_FORMAT, QueuedJob};
use super::shared::SharedQueue;
use crate::runlog::JobId;
use crate::{Error, Exit, Result};
use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// Limits in seconds. `squeue` gives up by itself after 18 when the controller is down.
const QUERY_S: u64 = 25;
const SUBMIT_S: u64 = 30;
const HISTORY_S: u64 = 120;
/// A job that is being ended has no time to wait for an answer.
const OWN_QUERY_S: u64 = 2;
const HISTORY_FORMAT: &str = "JobIDRaw,User,QOS,State,ExitCode,Start,End,ElapsedRaw,ReqTRES,TimelimitRaw";
/// Slurm's own default.
const KILL_WAIT: Duration = Duration::from_secs(30);

/// A scheduler of jobs. Every call may take seconds: none belongs on a thread that draws.
pub trait Scheduler: fmt::Debug + Send + Sync {
    /// Hands a batch script in, in its own folder. Errors: Slurm's own words (exit 78), or no answer (exit 69).
    fn submit(&self, script: &Path) -> Result<JobId>;
    /// All jobs of this user, those that ended lately included.
    fn queue(&self) -> Result<Vec<QueuedJob>>;
    /// What is known of one job that the controller still remembers.
    fn show(&self, job: JobId) -> Result<JobDetails>;
    /// The same, or what another program of this user was told at most `age` ago; and how old it is.
    fn recent_queue(&self, age: Duration) -> Result<(Vec<QueuedJob>, Duration)>;
    /// All attempts of these jobs, of each oldest first; none of a job that accounting does not know. One call for all.
    fn account(&self, jobs: &[JobId]) -> Result<Vec<AccountedJob>>;
    /// Rows of all attempts in a partition, of all users where the site shows them; see [`crate::plan::from_rows`]. One
    /// heavy call.
    fn history(&self, partition: &str, days: u32) -> Result<String>;
    /// Takes the job out of the queue, or ends it with SIGTERM and, `kill_wait` later, SIGKILL.
    fn cancel(&self, job: JobId) -> Result<()>;
    /// Sends SIGUSR2 to the job's steps: save and leave.
    fn signal(&self, job: JobId) -> Result<()>;
    /// Puts a job back into the queue.
    fn requeue(&self, job: JobId) -> Result<()>;
    /// Lets a held job go on.
    fn release(&self, job: JobId) -> Result<()>;
    /// Time between SIGTERM and SIGKILL.
    fn kill_wait(&self) -> Duration;
    /// The command line of an act, as it will be run.
    fn command(&self, act: Act, job: JobId) -> String;
}

/// What is done to a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Act {
    Cancel,
    Signal,
    Requeue,
    Release,
}

/// Slurm through its commands.
#[derive(Clone, Debug)]
pub struct Slurm {
    commands: Arc<dyn Commands>,
    shared: Option<SharedQueue>,
}

impl Default for Slurm {
    fn default() -> Self {
        Self { shared: SharedQueue::of_user(), ..Self::new(Arc::new(SystemCommands)) }
    }
}

impl Slurm {
    pub fn new(commands: Arc<dyn Commands>) -> Self {
        Self { commands, shared: None }
    }

    /// Its answers are shared with other programs.
    #[cfg(test)]
    pub(super) fn sharing(self, shared: SharedQueue) -> Self {
        Self { shared: Some(shared), ..self }
    }

    /// What was told of the queue is no longer so.
    fn forget_queue(&self) {
        self.shared.iter().for_each(SharedQueue::forget);
    }

    /// Runs a command that must succeed.
    fn ask(&self, call: &Call) -> Result<String> {
        let Answer { stdout, stderr, code } = self.commands.run(call)?;
        if code == 0 {
            return Ok(stdout);
        }
        Err(refusal(call, &stderr, code))
    }

    fn act(act: Act, job: JobId) -> Call {
        let job = job.to_string();
        match act {
            Act::Cancel => Call::new("scancel", &[&job], QUERY_S),
            Act::Signal => Call::new("scancel", &["--signal=USR2", &job], QUERY_S),
            Act::Requeue => Call::new("scontrol", &["requeue", &job], QUERY_S),
            Act::Release => Call::new("scontrol", &["release", &job], QUERY_S),
        }
    }

    fn perform(&self, act: Act, job: JobId) -> Result<()> {
        let done = self.ask(&Self::act(act, job)).map(drop);
        self.forget_queue();
        done
    }
}

/// Slurm's own words, and who has to act: a controller that does not answer is no refusal.
fn refusal(call: &Call, stderr: &str, code: i32) -> Error {
    let said: Vec<&str> = stderr.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    let said = if said.is_empty() { format!("exit code {code}, without a word") } else { said.join("; ") };
    let unreachable = ["Unable to contact", "Socket timed out", "Connection refused", "connect failure"];
    if unreachable.iter().any(|words| said.contains(words)) {
        return Error::new(Exit::Unavailable, "slurm_unreachable", format!("Slurm does not answer: {said}"))
            .in_place(call);
    }
    Error::refused("slurm_refused", format!("Slurm says: {said}")).in_place(call)
}

impl Scheduler for Slurm {
    fn submit(&self, script: &Path) -> Result<JobId> {
        let script = script.to_string_lossy();
        let answer = self.ask(&Call::new("sbatch", &["--parsable", &script], SUBMIT_S));
        self.forget_queue();
        parse::submitted(&answer?)
    }

    fn queue(&self) -> Result<Vec<QueuedJob>> {
        let text = self.ask(&Call::new("squeue", &["--me", "-h", "-t", "all", "-O", QUEUE_FORMAT], QUERY_S))?;
        let queue = parse::queue(&text)?;
        self.shared.iter().for_each(|shared| shared.keep(&text));
        Ok(queue)
    }

    fn recent_queue(&self, age: Duration) -> Result<(Vec<QueuedJob>, Duration)> {
        let kept = self.shared.as_ref().and_then(|shared| shared.at_most(age));
        // What does not parse was written by another version.
        let kept = kept.and_then(|(text, age)| Some((parse::queue(&text).ok()?, age)));
        kept.map_or_else(|| Ok((self.queue()?, Duration::ZERO)), Ok)
    }

    fn show(&self, job: JobId) -> Result<JobDetails> {
        let call = Call::new("scontrol", &["-o", "show", "job", &job.to_string()], OWN_QUERY_S);
        parse::details(&self.ask(&call)?)
    }

    fn account(&self, jobs: &[JobId]) -> Result<Vec<AccountedJob>> {
        let jobs = jobs.iter().map(JobId::to_string).collect::<Vec<_>>().join(",");
        let call = Call::new("sacct", &["-n", "-P", "-D", "-X", "-j", &jobs, "-o", ACCOUNT_FORMAT], QUERY_S);
        parse::accounts(&self.ask(&call)?)
    }

    fn history(&self, partition: &str, days: u32) -> Result<String> {
        let from = format!("now-{days}days");
        let arguments = ["-a", "-X", "-D", "-n", "-P", "-S", &from, "-r", partition, "-o", HISTORY_FORMAT];
        self.ask(&Call::new("sacct", &arguments, HISTORY_S))
    }

    fn cancel(&self, job: JobId) -> Result<()> {
        self.perform(Act::Cancel, job)
    }

    fn signal(&self, job: JobId) -> Result<()> {
        self.perform(Act::Signal, job)
    }

    fn requeue(&self, job: JobId) -> Result<()> {
        self.perform(Act::Requeue, job)
    }

    fn release(&self, job: JobId) -> Result<()> {
        self.perform(Act::Release, job)
    }

    fn kill_wait(&self) -> Duration {
        let config = self.ask(&Call::new("scontrol", &["show", "config"], OWN_QUERY_S)).unwrap_or_default();
        let seconds = parse::setting(&config, "KillWait").and_then(|text| text.split_whitespace().next()?.parse().ok());
        seconds.map_or(KILL_WAIT, Duration::from_secs)
    }

    fn command(&self, act: Act, job: JobId) -> String {
        Self::act(act, job).to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::super::command::RecordedCommands;
    use super::*;

    fn recorded() -> (Arc<RecordedCommands>, Slurm) {
        let commands = Arc::new(RecordedCommands::default());
        (Arc::clone(&commands), Slurm::new(commands))
    }

    #[test]
    fn a_refusal_keeps_slurms_words_and_an_outage_is_none() {
        let (commands, slurm) = recorded();
        let words = "sbatch: error: invalid partition specified: nix\nsbatch: error: Batch job submission failed: Invalid partition name specified\n";
        commands.refuse("sbatch", words);
        let error = slurm.submit(Path::new("job.sh")).expect_err("refused");
        assert_eq!((error.exit, error.code), (Exit::Refused, "slurm_refused"));
        assert!(error.to_string().contains("invalid partition specified: nix"), "{error}");
        for words in [
            "Batch job submission failed: Invalid account or account/partition combination specified",
            "Batch job submission failed: Invalid qos specification",
            "Batch job submission failed: Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)",
            "Batch job submission failed: Requested time limit is invalid (missing or exceeds some limit)",
        ] {
            commands.refuse("sbatch", &format!("sbatch: error: {words}\n"));
            let error = slurm.submit(Path::new("job.sh")).expect_err("refused");
            assert!(error.code == "slurm_refused" && error.to_string().contains(words), "{error}");
        }
        commands.refuse("squeue", "slurm_load_jobs error: Unable to contact slurm controller (connect failure)");
        assert_eq!(slurm.queue().expect_err("down").exit, Exit::Unavailable);
        commands.refuse("scontrol", "slurm_load_jobs error: Invalid job id specified");
        let error = slurm.show(7.into()).expect_err("purged");
        assert!(error.to_string().contains("Invalid job id specified (scontrol -o show job 7)"), "{error}");
    }

    #[test]
    fn acts_are_run_as_they_are_shown() {
        let (commands, slurm) = recorded();
        for (act, line) in [
            (Act::Cancel, "scancel 7"),
            (Act::Signal, "scancel --signal=USR2 7"),
            (Act::Requeue, "scontrol requeue 7"),
            (Act::Release, "scontrol release 7"),
        ] {
            assert_eq!(slurm.command(act, 7.into()), line);
            commands.print(line, "");
        }
        let job = JobId::from(7);
        slurm.cancel(job).and(slurm.signal(job)).and(slurm.requeue(job)).and(slurm.release(job)).unwrap();
        assert_eq!(
            commands.calls(),
            ["scancel 7", "scancel --signal=USR2 7", "scontrol requeue 7", "scontrol release 7"]
        );
    }

    #[test]
    fn the_time_to_the_kill_is_the_sites_or_slurms_default() {
        let (commands, slurm) = recorded();
        commands.print("scontrol show config", "KillWait                = 90 sec\n");
        assert_eq!(slurm.kill_wait(), Duration::from_secs(90));
        assert_eq!(slurm.kill_wait(), KILL_WAIT, "no answer");
    }
}
