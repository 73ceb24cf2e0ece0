//! Everything that speaks to Slurm, and everything that is known of it: commands with a time limit, their fixed text
//! formats, the batch script, a job's own end, and what queue states mean in plain words.
//!
//! [`Scheduler`] is what the rest of the program asks; [`Slurm`] answers through [`Commands`], which are processes, or
//! recorded output in tests. Progress never comes from here: that is the run directory's to tell.

mod command;
mod inside;
mod jobs;
mod judge;
mod lint;
mod looks;
mod pace;
mod parse;
mod scheduler;
mod script;
mod shared;
mod watch;
mod words;

pub use crate::runlog::JobId;
pub use command::{Answer, Call, Commands, RecordedCommands, SystemCommands};
pub use inside::{Cause, InsideJob, Notice};
pub use jobs::{JobRecord, comment_of, job_name, record_job, submitted_jobs};
pub use judge::{job_words, judge, restart_words, used_words};
pub use lint::lint_wrapper;
pub use looks::Looks;
pub use parse::{AccountedJob, JobDetails, JobState, QueuedJob};
pub use scheduler::{Act, Scheduler, Slurm};
pub use script::{BatchScript, SIGNAL_LEAD_VARIABLE, signal_lead_s};
pub use watch::{JobView, JobWatch, Look};
