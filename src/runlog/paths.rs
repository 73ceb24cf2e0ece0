//! Names of everything in a run directory, in one place: no other module spells a file name of it.

use crate::Result;
use crate::files::{create_folder, io_error};
use std::io;
use std::path::{Path, PathBuf};

/// One run: `experiments/<name>/runs/<arm>/`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunDir {
    root: PathBuf,
}

impl RunDir {
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The folder's name.
    pub fn arm(&self) -> String {
        self.root.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
    }

    /// Resolved configuration, created once.
    pub fn arm_yaml(&self) -> PathBuf {
        self.root.join("arm.yaml")
    }

    /// What the run is bound to, created once.
    pub fn identity(&self) -> PathBuf {
        self.root.join("identity.json")
    }

    /// Held exclusively by the worker; says who holds it.
    pub fn lock(&self) -> PathBuf {
        self.root.join("lock")
    }

    /// Output of workers until their attempt has a `worker.log`.
    pub fn start_log(&self) -> PathBuf {
        self.root.join("worker-start.log")
    }

    pub fn outcome(&self) -> PathBuf {
        self.root.join("outcome.json")
    }

    pub fn attempts(&self) -> PathBuf {
        self.root.join("attempts")
    }

    pub fn attempt(&self, number: u32) -> AttemptDir {
        AttemptDir { root: self.attempts().join(format!("{number:04}")), number }
    }

    /// Numbers of the attempts on disk, ascending; empty if there is none yet.
    pub fn attempt_numbers(&self) -> Result<Vec<u32>> {
        let mut numbers: Vec<u32> = folder_names(&self.attempts())?
            .iter()
            .filter(|name| name.len() >= 4 && name.bytes().all(|byte| byte.is_ascii_digit()))
            .filter_map(|name| name.parse().ok())
            .collect();
        numbers.sort_unstable();
        Ok(numbers)
    }

    pub fn newest_attempt(&self) -> Result<Option<AttemptDir>> {
        Ok(self.attempt_numbers()?.last().map(|&number| self.attempt(number)))
    }

    pub fn checkpoints(&self) -> PathBuf {
        self.root.join("checkpoints")
    }

    pub fn checkpoint(&self, step: u64) -> PathBuf {
        self.checkpoints().join(step_name(step))
    }

    pub fn validation(&self) -> PathBuf {
        self.root.join("validation")
    }

    pub fn validation_point(&self, step: u64) -> PathBuf {
        self.validation().join(step_name(step))
    }

    /// One [`ClipMetrics`](super::ClipMetrics) a line.
    pub fn validation_metrics(&self, step: u64) -> PathBuf {
        self.validation_point(step).join("metrics.jsonl")
    }

    /// Pictures, ground truth over prediction.
    pub fn strips(&self, step: u64) -> PathBuf {
        self.validation_point(step).join("strips")
    }

    pub fn control(&self) -> PathBuf {
        self.root.join("control")
    }

    /// A wish to stop with a checkpoint.
    pub fn stop_request(&self) -> PathBuf {
        self.control().join("stop")
    }

    /// Written before a worker is killed on request, so that its silent end has a cause.
    pub fn kill_record(&self) -> PathBuf {
        self.control().join("kill")
    }

    /// Batch scripts, what became of them, and the output of the jobs.
    pub fn slurm(&self) -> PathBuf {
        self.root.join("slurm")
    }

    /// One submitted job a line.
    pub fn submitted_jobs(&self) -> PathBuf {
        self.slurm().join("jobs.jsonl")
    }

    /// The batch script of the `number`-th submission.
    pub fn batch_script(&self, number: usize) -> PathBuf {
        self.slurm().join(format!("job-{number:04}.sh"))
    }
}

/// One attempt: `attempts/NNNN/`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AttemptDir {
    root: PathBuf,
    number: u32,
}

impl AttemptDir {
    pub fn root(&self) -> &Path {
        &self.root
    }

    pub fn number(&self) -> u32 {
        self.number
    }

    pub fn events(&self) -> PathBuf {
        self.root.join("events.jsonl")
    }

    pub fn worker_log(&self) -> PathBuf {
        self.root.join("worker.log")
    }

    /// Where this attempt keeps the run's record (`arm.yaml`, `identity.json`) that it replaced by another.
    pub fn replaced(&self, record: &Path) -> PathBuf {
        let name = record.file_name().unwrap_or_default().to_string_lossy();
        self.root.join(format!("replaced-{name}"))
    }

    /// [`AttemptRecord`](super::AttemptRecord).
    pub fn record(&self) -> PathBuf {
        self.root.join("attempt.json")
    }

    /// Copy of the batch script that it was started by, under Slurm.
    pub fn batch_script(&self) -> PathBuf {
        self.root.join("job.sh")
    }
}

/// The runs of one experiment: `experiments/<name>/runs/`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExperimentRuns {
    experiment: PathBuf,
}

impl ExperimentRuns {
    /// `experiment` is the folder of `experiment.yaml`.
    pub fn new(experiment: impl Into<PathBuf>) -> Self {
        Self { experiment: experiment.into() }
    }

    pub fn experiment(&self) -> &Path {
        &self.experiment
    }

    pub fn root(&self) -> PathBuf {
        self.experiment.join("runs")
    }

    pub fn run(&self, arm: &str) -> RunDir {
        RunDir::new(self.root().join(arm))
    }

    /// Moves a run aside, whole, to `.old/<arm>-1` (or the next free number), so that the arm can begin anew.
    /// Returns where it went; `None` if there is no run. Only for the holder of the run's lock.
    pub fn set_aside(&self, arm: &str) -> Result<Option<PathBuf>> {
        let run = self.run(arm);
        if !run.root().exists() {
            return Ok(None);
        }
        let old = self.root().join(".old");
        create_folder(&old)?;
        let free = (1u32..).map(|number| old.join(format!("{arm}-{number}"))).find(|path| !path.exists());
        let Some(aside) = free else { return Ok(None) };
        std::fs::rename(run.root(), &aside)
            .map_err(|error| io_error("cannot move the run aside", run.root(), &error))?;
        Ok(Some(aside))
    }

    /// Runs on disk, by name; empty before the first start.
    pub fn list(&self) -> Result<Vec<RunDir>> {
        let mut names = folder_names(&self.root())?;
        names.retain(|name| !name.starts_with('.'));
        names.sort();
        Ok(names.iter().map(|name| self.run(name)).collect())
    }
}

/// `step-00000500`.
pub fn step_name(step: u64) -> String {
    format!("step-{step:08}")
}

/// Reverse of [`step_name`].
pub fn parse_step_name(name: &str) -> Option<u64> {
    let digits = name.strip_prefix("step-")?;
    (digits.len() >= 8 && digits.bytes().all(|byte| byte.is_ascii_digit())).then(|| digits.parse().ok())?
}

/// Names of the folders inside `folder`; empty if it does not exist.
pub(super) fn folder_names(folder: &Path) -> Result<Vec<String>> {
    let entries = match std::fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(io_error("cannot list the folder", folder, &error)),
    };
    let mut names = Vec::new();
    for entry in entries {
        let entry = entry.map_err(|error| io_error("cannot list the folder", folder, &error))?;
        // A symbolic link to a folder counts: people move runs to larger disks.
        if entry.path().is_dir() {
            names.push(entry.file_name().to_string_lossy().into_owned());
        }
    }
    Ok(names)
}
