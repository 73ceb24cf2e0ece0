//! Which jobs belong to a run: the record of what was submitted for it, and the marks that a job carries.
//!
//! A job is found in the queue by its comment, which names the run's folder. Its name is the same for every job of a run
//! and for no other run, so that `--dependency=singleton` keeps two of them apart.

use crate::files::{LineFile, create_folder, io_error};
use crate::runlog::{JobId, RunDir};
use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use std::io::ErrorKind;
use std::path::Path;

/// How a comment of ours begins.
pub(super) const COMMENT: &str = "lbva:";

/// One line of `slurm/jobs.jsonl`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobRecord {
    pub job: JobId,
    /// Unix ms.
    pub time_ms: u64,
    /// Who submitted: `lbva-tui submit`, `console`.
    pub by: String,
    /// File name of the batch script, beside the record.
    pub script: String,
    /// SHA-256 of the program that the script starts.
    pub program_sha256: String,
}

/// The comment of every job of this run: `lbva:/abs/experiments/demo/runs/m1`.
pub fn comment_of(run: &RunDir) -> String {
    let path = std::path::absolute(run.root()).unwrap_or_else(|_| run.root().to_owned());
    let path = std::fs::canonicalize(&path).unwrap_or(path);
    format!("{COMMENT}{}", path.display())
}

/// The name of every job of this run: `lbva-demo-m1_baseline-3fa09c`.
pub fn job_name(run: &RunDir, experiment: &str) -> String {
    let plain = |text: &str| -> String {
        text.chars().map(|c| if c.is_ascii_alphanumeric() || "._-".contains(c) { c } else { '_' }).collect()
    };
    let digest = crate::data::sha256_hex(comment_of(run).as_bytes());
    format!("lbva-{}-{}-{}", plain(experiment), plain(&run.arm()), digest.get(..6).unwrap_or_default())
}

/// Remembers a job that was submitted for this run.
pub fn record_job(run: &RunDir, record: &JobRecord) -> Result<()> {
    create_folder(&run.slurm())?;
    let text = serde_json::to_string(record).map_err(|error| Error::crash(format!("job record: {error}")))?;
    let mut file = LineFile::append_to(&run.submitted_jobs())?;
    file.append(&text)?;
    file.sync()
}

/// Every job that was submitted for this run, oldest first. A line that cannot be read is left out.
pub fn submitted_jobs(run: &RunDir) -> Result<Vec<JobRecord>> {
    read_records(&run.submitted_jobs())
}

fn read_records(path: &Path) -> Result<Vec<JobRecord>> {
    match std::fs::read_to_string(path) {
        Ok(text) => Ok(text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()),
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => Ok(Vec::new()),
        Err(error) => Err(io_error("cannot read the record of jobs", path, &error)),
    }
}

/// A run of this arm that was submitted as this job.
#[cfg(test)]
pub(super) fn submitted_run(folder: &Path, arm: &str, job: JobId) -> RunDir {
    let run = RunDir::new(folder.join(arm));
    let record = JobRecord {
        job,
        time_ms: 1,
        by: "test".to_owned(),
        script: "job-0001.sh".to_owned(),
        program_sha256: String::new(),
    };
    record_job(&run, &record).expect("recorded");
    run
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_keeps_its_jobs_and_its_marks() {
        let folder = tempfile::tempdir().unwrap();
        let run = RunDir::new(folder.path().join("m 1"));
        assert_eq!(submitted_jobs(&run), Ok(vec![]));
        let record = |job: u64| JobRecord {
            job: job.into(),
            time_ms: 5,
            by: "test".to_owned(),
            script: "job-0001.sh".to_owned(),
            program_sha256: "ab".to_owned(),
        };
        record_job(&run, &record(7)).unwrap();
        let mut torn = std::fs::OpenOptions::new().append(true).open(run.submitted_jobs()).unwrap();
        std::io::Write::write_all(&mut torn, b"{\"job\":8\n").unwrap();
        record_job(&run, &record(9)).unwrap();
        assert_eq!(
            submitted_jobs(&run).unwrap().iter().map(|record| record.job).collect::<Vec<_>>(),
            [7, 9].map(JobId::from)
        );
        let name = job_name(&run, "a demo");
        assert!(name.starts_with("lbva-a_demo-m_1-") && name.len() == "lbva-a_demo-m_1-".len() + 6, "{name}");
        assert_ne!(name, job_name(&RunDir::new(folder.path().join("other/m 1")), "a demo"));
        // The same folder by another way is the same run.
        let detour = RunDir::new(folder.path().join("m 1/../m 1"));
        assert_eq!(comment_of(&detour), comment_of(&run));
    }
}
