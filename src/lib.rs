//! `lbva-tui`: a terminal console over an embedded training engine for video-action world models.
//!
//! Data flows one way: [`config`] -> [`data`] (+ [`codec`]) -> [`model`] over [`ops`] inside [`train`] -> [`eval`]
//! -> [`runlog`] -> [`console`]. [`control`] starts and stops worker processes and reads only the run directory.
//! The trainer and the console meet nowhere else. `docs/architecture.md` has the rooms and their invariants.

pub mod cli;
pub mod codec;
pub mod config;
pub mod console;
pub mod control;
#[cfg(feature = "cuda")]
mod cuda;
pub mod data;
pub mod error;
pub mod eval;
pub mod files;
pub mod hub;
pub mod model;
pub mod ops;
pub mod pack;
pub mod plan;
pub mod random;
pub mod runlog;
pub mod slurm;
pub mod train;
pub mod weights;
pub mod words;

pub use error::{Error, Exit, Result};
