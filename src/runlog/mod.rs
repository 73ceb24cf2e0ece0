//! The run directory: the only truth about a run, append-only or written whole (tmp + fsync + rename).
//!
//! `docs/run-directory.md` describes every file. Trainer and console meet nowhere else.

mod event;
mod view;

pub use event::*;
pub use view::*;
