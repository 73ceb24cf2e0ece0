//! Which episodes share a sequence, where each token stands and what it sees.
//!
//! Pure functions of lengths and draws: nothing here reads a tensor, a file or a device.

pub mod bucket;
pub mod budget;
pub mod cost;
pub mod draw;
pub mod length;
pub mod sequence;
pub mod statistics;
pub mod step;
pub mod stream;
pub mod tiles;
