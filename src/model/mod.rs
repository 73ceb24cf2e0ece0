//! The models: Wan2.2-style diffusion transformer blocks, token layouts, the geometry branch, checkpoint names.
//!
//! Written once over [`crate::ops`]; nothing here knows about devices, optimizers or files.

mod block;
mod count;
mod geometry;
mod lingbot;
mod lingbot_parameters;
mod parameters;
mod timestep;
mod xwam;

use crate::ops::take_rows;
use candle_core::{Result, Tensor};

pub use block::{Block, BlockNames, Conditioning, Placement, Sight};
pub use count::{ParameterCount, Part, count, specs};
pub use geometry::GeometryInsertion;
pub use lingbot::{
    ChunkHistory, CleanHistory, EpisodeHistory, EpisodeInput, EpisodeOutput, LingbotInput, LingbotModel,
};
pub use lingbot_parameters::lingbot_parameter_specs;
pub use parameters::{Initialiser, ParameterSpec, Parameters, parameter_specs};
pub use xwam::{XwamInput, XwamModel, XwamOutput};

/// What the trunk of a model is, for whoever computes it by other means than [`Block`].
#[derive(Clone, Copy, Debug)]
pub struct TrunkShape {
    pub names: BlockNames,
    /// Number of blocks.
    pub depth: usize,
    /// D
    pub width: usize,
    /// F, the FFN's width
    pub ffn: usize,
    pub heads: usize,
    /// Of every norm.
    pub eps: f64,
}

/// A model as training and sampling see it: embedders (front), trunk blocks, heads (back). The seams are where
/// gradients are pulled through piece by piece when blocks are recomputed.
pub trait Transformer {
    type Input;
    /// Where the tokens of a batch stand and what they see.
    type Layout;
    type Output;

    fn layout(&self, input: &Self::Input) -> Result<Self::Layout>;

    fn trunk(&self) -> TrunkShape;

    /// Where tokens stand and what they see, for every block.
    fn placement<'l>(&self, layout: &'l Self::Layout) -> &'l Placement;

    /// The geometry branch on the input of block `layer`, if that block carries one.
    fn insertion(&self, layer: usize) -> Option<&GeometryInsertion>;

    /// Number of trunk blocks.
    fn depth(&self) -> usize {
        self.trunk().depth
    }

    /// Embedders: the token sequence [B, L, D] and what the blocks read beside it.
    fn front(&self, input: &Self::Input, layout: &Self::Layout) -> Result<(Tensor, Conditioning)>;

    /// One trunk block, x [B, L, D] -> [B, L, D].
    fn block(&self, layer: usize, x: &Tensor, conditioning: &Conditioning, layout: &Self::Layout) -> Result<Tensor>;

    /// The tokens that heads read, of x [B, L, D] after the last block, in their order.
    fn read(&self, x: &Tensor, layout: &Self::Layout) -> Result<Tensor> {
        match &self.placement(layout).read {
            None => Ok(x.clone()),
            Some(tokens) => take_rows(&x.squeeze(0)?, tokens, None)?.unsqueeze(0),
        }
    }

    /// Heads, on what [`Self::read`] gives.
    fn back(&self, x: &Tensor, conditioning: &Conditioning, layout: &Self::Layout) -> Result<Self::Output>;

    /// The same numbers without the graph behind them.
    fn detach(output: &Self::Output) -> Self::Output;

    /// The whole forward pass.
    fn forward(&self, input: &Self::Input) -> Result<Self::Output> {
        let layout = self.layout(input)?;
        let (mut x, conditioning) = self.front(input, &layout)?;
        for layer in 0..self.depth() {
            x = self.block(layer, &x, &conditioning, &layout)?;
        }
        self.back(&self.read(&x, &layout)?, &conditioning, &layout)
    }
}
