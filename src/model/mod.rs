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
use block::stream_dtype;
use candle_core::{Result, Tensor, bail};

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

    /// Embedders: rows of the token sequence in parts [., D], and what the blocks read beside them.
    fn front(&self, input: &Self::Input, layout: &Self::Layout) -> Result<(Vec<Tensor>, Conditioning)>;

    /// The residual stream [B, L, D] of the embedders' rows, in the order of the sequence.
    fn sequence(&self, rows: &[Tensor], layout: &Self::Layout) -> Result<Tensor> {
        let Placement { sources, rows: modulation, .. } = self.placement(layout);
        let mut rows = rows.to_vec();
        let Some(Ok(width)) = rows.first().map(|part| part.dim(1)) else { bail!("no rows for a sequence") };
        if let (Some(_), Some(part)) = (sources, rows.first()) {
            rows.push(Tensor::zeros((1, width), part.dtype(), part.device())?);
        }
        let mut x = Tensor::cat(&rows, 0)?;
        if let Some(sources) = sources {
            x = take_rows(&x, sources, Some(x.dim(0)? as u32 - 1))?;
        }
        x.reshape(((), modulation.of_token.len(), width))?.to_dtype(stream_dtype(x.dtype()))
    }

    /// One trunk block, x [B, L, D] -> [B, L, D].
    fn block(&self, layer: usize, x: &Tensor, conditioning: &Conditioning, layout: &Self::Layout) -> Result<Tensor>;

    /// What each head reads of x [B, L, D] after the last block.
    fn read(&self, x: &Tensor, layout: &Self::Layout) -> Result<Vec<Tensor>> {
        match &self.placement(layout).read {
            None => Ok(vec![x.clone()]),
            Some(heads) => heads.iter().map(|tokens| take_rows(&x.squeeze(0)?, tokens, None)?.unsqueeze(0)).collect(),
        }
    }

    /// Heads, on what [`Self::read`] gives.
    fn back(&self, read: &[Tensor], conditioning: &Conditioning, layout: &Self::Layout) -> Result<Self::Output>;

    /// The same numbers without the graph behind them.
    fn detach(output: &Self::Output) -> Self::Output;

    /// The whole forward pass.
    fn forward(&self, input: &Self::Input) -> Result<Self::Output> {
        let layout = self.layout(input)?;
        let (rows, conditioning) = self.front(input, &layout)?;
        let mut x = self.sequence(&rows, &layout)?;
        for layer in 0..self.depth() {
            x = self.block(layer, &x, &conditioning, &layout)?;
        }
        self.back(&self.read(&x, &layout)?, &conditioning, &layout)
    }
}
