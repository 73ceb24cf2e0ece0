//! The ablated branch (arm M2): zero-initialised cross-attention from video tokens to cached geometry tokens.
//!
//! The stream is normalised in f32, only Linear operands are cast, the result is cast back and added in f32; with the
//! output projection at zero the branch adds exactly 0. A non-finite token would turn that into NaN (0 x inf), so the
//! data room refuses such tokens. The insertion lives inside its block's call, hence inside the recomputed segment.

use super::Parameters;
use super::block::{Attention, AttentionNames, Linear};
use crate::config::ModelConfig;
use crate::ops::{layer_norm, layer_norm_affine};
use candle_core::{Result, Tensor};

/// Cached tokens [B, N_g, D_g] -> [B, N_g, D], once a forward, shared by all insertion points.
#[derive(Clone, Debug)]
pub(super) struct GeometryAdapter {
    norm: (Tensor, Tensor),
    projection: Linear,
    view_embedding: Tensor,
    grid: [usize; 2],
    eps: f64,
}

impl GeometryAdapter {
    pub fn load(parameters: &Parameters, config: &ModelConfig) -> Result<Self> {
        let tensor = |name: &str| parameters.get(&format!("geometry.adapter.{name}")).cloned();
        Ok(Self {
            norm: (tensor("norm.weight")?, tensor("norm.bias")?),
            projection: Linear::load(parameters, "geometry.adapter.proj")?,
            view_embedding: tensor("view_embedding.weight")?,
            grid: config.geometry.grid,
            eps: config.eps,
        })
    }

    pub fn forward(&self, tokens: &Tensor) -> Result<Tensor> {
        let (batch, count, _) = tokens.dims3()?;
        let (views, width) = self.view_embedding.dims2()?;
        let per_view = self.grid[0] * self.grid[1];
        if count != views * per_view {
            candle_core::bail!("{count} geometry tokens where {views} views of {:?} were announced", self.grid);
        }
        let projected = self.projection.forward(&layer_norm_affine(tokens, &self.norm.0, &self.norm.1, self.eps)?)?;
        let position = grid_sinusoid(self.grid, width, projected.dtype(), tokens.device())?;
        projected
            .reshape((batch, views, per_view, width))?
            .broadcast_add(&self.view_embedding.to_dtype(projected.dtype())?.reshape((1, views, 1, width))?)?
            .broadcast_add(&position.reshape((1, 1, per_view, width))?)?
            .reshape((batch, count, width))
    }
}

/// Fixed 2-D sinusoid [rows * columns, D] on cell centres in [0, 1]^2, so that encoders of different grids share one
/// frame: first half of the width for the row, second for the column, each [cos | sin] of geometric frequencies.
fn grid_sinusoid(
    grid: [usize; 2],
    width: usize,
    dtype: candle_core::DType,
    device: &candle_core::Device,
) -> Result<Tensor> {
    let [rows, columns] = grid;
    let quarter = (width / 4).max(1);
    let mut values = Vec::with_capacity(rows * columns * width);
    for row in 0..rows {
        for column in 0..columns {
            let centre = [(row as f64 + 0.5) / rows as f64, (column as f64 + 0.5) / columns as f64];
            for i in 0..width {
                let axis = (i / (2 * quarter)).min(1);
                let frequency = std::f64::consts::PI * 64f64.powf((i % quarter) as f64 / quarter as f64);
                let angle = frequency * centre[axis];
                values.push(if (i / quarter).is_multiple_of(2) { angle.cos() } else { angle.sin() });
            }
        }
    }
    Tensor::from_vec(values, (rows * columns, width), device)?.to_dtype(dtype)
}

/// x <- x + float(Wo attention(LN(x) -> tokens)) on the video tokens, at the input of one block.
#[derive(Clone, Debug)]
pub struct GeometryInsertion {
    attention: Attention,
    eps: f64,
}

impl GeometryInsertion {
    pub(super) fn load(parameters: &Parameters, layer: usize, config: &ModelConfig) -> Result<Self> {
        let name = format!("geometry.layers.{layer}");
        Ok(Self {
            attention: Attention::load(parameters, &name, AttentionNames::WAN, config.num_heads, config.eps)?,
            eps: config.eps,
        })
    }

    /// Actions and proprio pass untouched; they see the branch through the self-attention that follows.
    pub fn forward(&self, x: &Tensor, tokens: &Tensor, video_tokens: usize) -> Result<Tensor> {
        let video = x.narrow(1, 0, video_tokens)?;
        let added = self.attention.forward(&layer_norm(&video, self.eps)?, tokens, None, None)?.to_dtype(x.dtype())?;
        let rest = x.narrow(1, video_tokens, x.dim(1)? - video_tokens)?;
        Tensor::cat(&[&(video + added)?, &rest], 1)
    }
}
