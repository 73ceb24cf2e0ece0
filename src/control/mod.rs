//! Starting, stopping and resuming workers, for the console and for `--no-ui` alike.
//!
//! [`machine`] decides and touches nothing; [`local`] performs its effects on this machine, [`jobs`] on a cluster;
//! [`Controller`] joins them for all arms of an experiment; [`supervise`] drives a controller without a screen. What a worker is doing is known
//! from its run directory only.

mod controller;
pub mod jobs;
pub mod local;
pub mod machine;
mod submission;
mod supervisor;
mod tail;

pub use controller::{Controller, Report, Request};
pub use jobs::SlurmDriver;
pub use local::{LocalDriver, WorkerCommand, WorkerExit};
pub use machine::WorkerRef;
pub use submission::{SubmitCommand, hash_file};
pub use supervisor::{ArmOutcome, Progress, SuperviseOptions, SupervisorOutcome, supervise};
pub use tail::Tail;
