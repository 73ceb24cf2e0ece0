//! Training: batch -> loss -> gradients -> update, and the worker process around it.
//!
//! [`worker`] is the loop; `task` is what it asks of a model family, answered by [`xwam`] and [`lingbot`].

mod attempts;
mod checkpoint;
pub mod engine;
pub mod forecast;
pub mod golden;
pub mod gradient_check;
pub mod gradients;
mod leave;
pub mod lingbot;
mod loader;
mod losses;
mod measure;
pub(crate) mod memory;
pub mod noop;
mod open;
pub mod optimizer;
pub mod packing_check;
mod peers;
pub mod profile;
mod saver;
pub mod schedule;
pub mod stop;
mod task;
pub mod worker;
pub mod xwam;

pub use losses::Losses;
pub use open::Opening;
