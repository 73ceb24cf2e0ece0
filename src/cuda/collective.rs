//! The seam between one GPU and several.
//!
//! Every rank holds all parameters and adds up its own micro-steps; ranks exchange once a step, when the sums are there.
//! Losses are weighted by the whole step's episodes, so the exchange is a plain sum. With one rank nothing happens, on
//! the same path.

use super::launch::Slice;
use crate::Result;

/// What ranks do together, in the order of the engine's stream.
pub(crate) trait Collective: std::fmt::Debug + Send {
    /// Replaces each rank's gradients by their sum over all ranks.
    fn sum_gradients(&self, gradients: Slice<f32>) -> Result<()>;
}

/// One rank.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Alone;

impl Collective for Alone {
    fn sum_gradients(&self, _: Slice<f32>) -> Result<()> {
        Ok(())
    }
}
