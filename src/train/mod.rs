//! Training: batch -> loss -> gradients -> update, and the worker process around it.

pub mod flow;
pub mod golden;
pub mod gradients;
