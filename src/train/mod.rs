//! Training: batch -> loss -> gradients -> update, and the worker process around it.

pub mod batches;
mod checkpoint;
pub mod flow;
pub mod golden;
pub mod gradients;
mod memory;
pub mod optimizer;
pub mod schedule;
pub mod stop;
mod validation;
pub mod worker;
