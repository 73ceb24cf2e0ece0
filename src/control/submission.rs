//! Handing an arm to Slurm: the script that is shown is the script that is submitted, and two jobs never train one run.

use super::local::WorkerCommand;
use crate::config::SlurmSettings;
use crate::data::sha256_hex;
use crate::files::{create_folder, io_error, write_whole};
use crate::runlog::{ExperimentRuns, Liveness, RunDir, RunReader, RunState, RunView, now_ms};
use crate::slurm::{
    BatchScript, JobId, JobRecord, JobState, QueuedJob, Scheduler, comment_of, job_name, lint_wrapper, record_job,
    signal_lead_s, submitted_jobs,
};
use crate::{Error, Exit, Result};
use std::fs::{File, TryLockError};
use std::path::Path;
use std::time::{Duration, Instant};

/// A job that was told to end may take Slurm's time between SIGTERM and SIGKILL.
const END_PATIENCE: Duration = Duration::from_secs(45);
const END_POLL: Duration = Duration::from_secs(3);

/// How the arms of an experiment are submitted.
#[derive(Clone, Debug, PartialEq)]
pub struct SubmitCommand {
    pub worker: WorkerCommand,
    /// The experiment's name.
    pub name: String,
    pub settings: SlurmSettings,
}

impl SubmitCommand {
    /// The script that the next submission of `arm` would be.
    pub fn script(&self, arm: &str) -> Result<BatchScript> {
        self.script_of(arm, &read(&self.run(arm))?)
    }

    fn run(&self, arm: &str) -> RunDir {
        ExperimentRuns::new(&self.worker.experiment).run(arm)
    }

    fn script_of(&self, arm: &str, view: &RunView) -> Result<BatchScript> {
        let run = self.run(arm);
        let free = (1..).find(|number| !run.batch_script(*number).exists()).unwrap_or(1);
        let path = run.batch_script(free);
        let path =
            std::path::absolute(&path).map_err(|error| io_error("cannot name the batch script", &path, &error))?;
        let experiment = self.worker.experiment.to_string_lossy().into_owned();
        let mut arguments: Vec<String> = ["--no-ui", "run", &experiment, "--arm", arm].map(str::to_owned).into();
        arguments.extend(self.worker.arguments.iter().cloned());
        Ok(BatchScript {
            settings: self.settings.clone(),
            job_name: job_name(&run, &self.name),
            comment: comment_of(&run),
            path,
            program: self.worker.executable.clone(),
            arguments,
            lead_s: signal_lead_s(view.save_p95_ms(), view.median_step_ms()),
        })
    }

    /// What the site's wrapper does to exit codes and signals, and what a compute node may not see; a line each.
    pub fn warnings(&self) -> Result<Vec<String>> {
        let mut found = Vec::new();
        if let Some(wrapper) = &self.settings.wrapper {
            let text = std::fs::read_to_string(wrapper).map_err(|error| {
                Error::refused("file_missing", format!("slurm.wrapper cannot be read: {error}")).at(wrapper)
            })?;
            found.extend(lint_wrapper(&text).into_iter().map(|line| format!("{}, {line}", wrapper.display())));
        }
        let own = ["/tmp", "/var/tmp", "/dev/shm", "/run"];
        if let Some(folder) = own.iter().find(|folder| self.worker.experiment.starts_with(folder)) {
            found.push(format!(
                "the experiment lies in {folder}, which each machine has of its own: will the node see it?"
            ));
        }
        Ok(found)
    }

    /// Writes the script, submits it and remembers the job.
    ///
    /// # Errors
    /// `run_busy`, `run_finished` (exit 78); disk errors (74), as for whoever may read the run but not write to it; Slurm's own words (78); no answer (69), after which the job may be in the
    /// queue all the same, and is then found there.
    pub fn submit(&self, arm: &str, scheduler: &dyn Scheduler, by: &str) -> Result<JobId> {
        let run = self.run(arm);
        create_folder(&run.slurm())?;
        let _alone = lock_submission(arm, &run)?;
        let view = read(&run)?;
        let comment = comment_of(&run);
        let queue = settled_queue(scheduler, &comment)?;
        refuse_others_job(arm, &run, &queue, scheduler)?;
        refuse_busy(arm, &view, live_job(&queue, &comment))?;
        let script = self.script_of(arm, &view)?;
        write_whole(&script.path, script.to_string().as_bytes())?;
        let submitted = scheduler.submit(&script.path);
        let job = match submitted {
            Ok(job) => job,
            // Never a second time: it may have arrived.
            Err(error) if error.exit == Exit::Unavailable => {
                let arrived = scheduler.queue().ok().and_then(|queue| live_job(&queue, &comment).map(|job| job.id));
                arrived.ok_or(error)?
            }
            Err(error) => {
                let _ = std::fs::remove_file(&script.path);
                return Err(error);
            }
        };
        let name = script.path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        let program_sha256 = hash_file(&script.program)?;
        record_job(&run, &JobRecord { job, time_ms: now_ms(), by: by.to_owned(), script: name, program_sha256 })?;
        Ok(job)
    }
}

/// Two that are submitted at once would both find the queue empty. The kernel releases the lock however this process ends.
fn lock_submission(arm: &str, run: &RunDir) -> Result<File> {
    let path = run.slurm().join("submit.lock");
    let file = File::options().write(true).create(true).truncate(false).open(&path);
    let file = file.map_err(|error| io_error("cannot open the lock of submissions", &path, &error))?;
    match file.try_lock() {
        Err(TryLockError::WouldBlock) => {
            Err(Error::refused("run_busy", format!("{arm}: somebody else is submitting it at this moment")))
        }
        // A file system without locks: the jobs' name and the run's own lock keep two apart later.
        Ok(()) | Err(TryLockError::Error(_)) => Ok(file),
    }
}

/// The queue shows the jobs of one user; a run that several may write to can have another's.
fn refuse_others_job(arm: &str, run: &RunDir, queue: &[QueuedJob], scheduler: &dyn Scheduler) -> Result<()> {
    let Some(newest) = submitted_jobs(run)?.pop().map(|record| record.job) else { return Ok(()) };
    if queue.iter().any(|job| job.id == newest) {
        return Ok(());
    }
    match scheduler.show(newest) {
        Ok(details) if !details.state.is_over() => {
            Err(Error::refused("run_busy", format!("{arm}: job {newest} of this run is {}", details.state))
                .hint("it is another user's: ask them to stop it"))
        }
        Err(error) if error.exit == Exit::Unavailable => Err(error),
        // Over, or so long ago that the controller has forgotten it.
        _ => Ok(()),
    }
}

/// The queue, once no job of this run is on its way out any more: only then it is known whether it comes back.
fn settled_queue(scheduler: &dyn Scheduler, comment: &str) -> Result<Vec<QueuedJob>> {
    let asked = Instant::now();
    loop {
        let queue = scheduler.queue()?;
        let ending = live_job(&queue, comment).is_some_and(|job| job.state == JobState::Completing);
        if !ending || asked.elapsed() > END_PATIENCE {
            return Ok(queue);
        }
        std::thread::sleep(END_POLL);
    }
}

/// The job of this run that is queued or running.
fn live_job<'q>(queue: &'q [QueuedJob], comment: &str) -> Option<&'q QueuedJob> {
    queue.iter().find(|job| job.comment == comment && !job.state.is_over())
}

fn refuse_busy(arm: &str, view: &RunView, job: Option<&QueuedJob>) -> Result<()> {
    let busy = |what: String, hint: &str| Err(Error::refused("run_busy", format!("{arm}: {what}")).hint(hint));
    if let Some(job) = job {
        return busy(format!("job {} of this run is {}", job.id, job.state), "watch it, or stop it first");
    }
    let (state, reason) = view.state(now_ms());
    if state == RunState::Finished {
        return Err(Error::refused("run_finished", format!("{arm}: {reason}; there is nothing to submit")));
    }
    let over = matches!(state, RunState::Waiting | RunState::Stopped | RunState::Preempted | RunState::Failed);
    let Some(started) = view.attempt().map(|attempt| &attempt.started).filter(|_| !over) else { return Ok(()) };
    match (view.liveness, &started.job) {
        // Its job is no longer in the queue: it died without a word.
        (Liveness::Unknown, Some(_)) => Ok(()),
        (Liveness::Unknown, None) => {
            let what =
                format!("whether attempt {} on {} is over cannot be seen from here", started.attempt, started.host);
            busy(what, "stop it there first")
        }
        _ => busy(
            format!("attempt {} (pid {} on {}) is alive", started.attempt, started.pid, started.host),
            "stop it first",
        ),
    }
}

fn read(run: &RunDir) -> Result<RunView> {
    let mut reader = RunReader::open(run.root());
    reader.poll(now_ms())?;
    Ok(reader.view().clone())
}

/// SHA-256 of a program's file.
pub fn hash_file(program: &Path) -> Result<String> {
    let bytes = std::fs::read(program).map_err(|error| io_error("cannot read the program", program, &error))?;
    Ok(sha256_hex(&bytes))
}
