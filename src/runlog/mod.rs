//! The run directory: the only truth about a run, append-only or written whole (tmp + fsync + rename).
//!
//! `docs/run-directory.md` describes every file. Trainer and console meet nowhere else.

mod assemble;
mod checkpoints;
mod clock;
mod event;
mod identity;
mod job;
mod parse;
mod paths;
mod process;
mod reader;
mod state;
mod tries;
mod view;
mod watch;
mod writer;

pub use checkpoints::*;
pub use event::*;
pub(crate) use identity::is_location;
pub use identity::{Difference, Recorded, check_binding, differences};
pub use job::JobId;
pub use paths::*;
pub use process::{ProcessIdentity, host_name};
pub use reader::{RunReader, poll_all};
pub use state::{PREEMPTED, SaveCost, percentile_95};
pub use tries::{MOST_CRASHES, Tries};
pub use view::*;
pub use watch::{Changed, Watcher};
pub use writer::*;
