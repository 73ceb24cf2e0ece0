//! The losses of one forward pass, whatever the family.

use candle_core::Tensor;

/// The parts and their weighted sum, scalars with gradient.
#[derive(Clone, Debug)]
pub struct Losses {
    pub video: Tensor,
    pub action: Tensor,
    /// Only X-WAM predicts proprioception.
    pub proprio: Option<Tensor>,
    pub total: Tensor,
}

impl Losses {
    /// The same numbers without the graph behind them.
    pub fn detach(&self) -> Self {
        Self {
            video: self.video.detach(),
            action: self.action.detach(),
            proprio: self.proprio.as_ref().map(Tensor::detach),
            total: self.total.detach(),
        }
    }
}
