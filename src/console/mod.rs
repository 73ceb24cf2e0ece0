//! The console: what the run directories say, on a terminal, and the few deeds that a person may do to a run.
//!
//! [`app`] is a pure state machine, [`view`] draws it, [`run`] performs its effects and owns terminal, threads and
//! signals. The console trains nothing: workers are processes of their own, and leaving the console leaves them running.

pub mod app;
mod feed;
mod format;
pub mod keys;
pub mod metric;
mod pictures;
mod run;
pub mod series;
pub mod snapshot;
mod status;
mod terminal;
pub mod theme;
pub mod view;
mod widgets;

pub use app::{App, Effect, Leave, Msg};
pub use run::{ConsoleOptions, PlanSource, VerdictSource, run};
pub use snapshot::{ConsoleSnapshot, Decision, VerdictView};
