//! X-WAM: the token layout [video | actions | proprios], its embedders (front) and heads (back) around the trunk.
//!
//! Sequence length L = N + Ta + Tp with N = T V h w video tokens in the order (t, v, y, x). Views share RoPE positions
//! and are told apart by a learned embedding. Modulation rows R = T + Ta + Tp: one a latent frame, action, proprio.

use super::block::{AttentionNames, BlockNames, Linear, Mlp, MlpNames, Placement, Sight};
use super::geometry::{GeometryAdapter, GeometryInsertion};
use super::timestep::sinusoid;
use super::{Block, Conditioning, Parameters, Transformer, TrunkShape};
use crate::config::ModelConfig;
use crate::ops::{RopeTable, Rows, linear, norm_modulate};
use candle_core::{Result, Tensor};

const MLP: MlpNames = MlpNames { up: "0", down: "2" };
const BLOCK: BlockNames = BlockNames {
    modulation: "modulation",
    self_attention: "self_attn",
    cross_attention: "cross_attn",
    cross_norm: "norm3",
    attention: AttentionNames::WAN,
    ffn: MLP,
};

/// What enters the model: noisy (or clean) quantities and the timestep of each frame and step on the scale 0..1000.
#[derive(Clone, Debug)]
pub struct XwamInput {
    /// [B, C, T, V, H, W]
    pub latent: Tensor,
    /// [B, Ta, action_dim]
    pub action: Tensor,
    /// [B, Tp, proprio_dim]
    pub proprio: Tensor,
    /// [B, S, text_dim]; rows after the prompt are zeros and are attended like any other.
    pub text: Tensor,
    /// [B][T], [B][Ta], [B][Tp]
    pub t_video: Vec<Vec<f64>>,
    pub t_action: Vec<Vec<f64>>,
    pub t_proprio: Vec<Vec<f64>>,
    /// [B, N_g, D_g]; needed exactly if the branch is built.
    pub geometry: Option<Tensor>,
}

/// Predicted velocities (noise - data), in the layout of the inputs.
#[derive(Clone, Debug)]
pub struct XwamOutput {
    /// [B, C, T, V, H, W]
    pub video: Tensor,
    /// [B, Ta, action_dim]
    pub action: Tensor,
    /// [B, Tp, proprio_dim]
    pub proprio: Tensor,
}

/// Latent extents of a batch, and the tables that follow from them.
#[derive(Clone, Debug)]
pub struct Layout {
    frames: usize,
    views: usize,
    /// Token grid of one view and frame.
    grid: [usize; 2],
    actions: usize,
    proprios: usize,
    placement: Placement,
}

impl Layout {
    fn new(config: &ModelConfig, input: &XwamInput) -> Result<Self> {
        let (frames, views, height, width) = match input.latent.dims() {
            &[_, _, frames, views, height, width] => (frames, views, height, width),
            other => candle_core::bail!("latent must be [B, C, T, V, H, W], not {other:?}"),
        };
        let [patch_t, patch_h, patch_w] = config.patch_size;
        if patch_t != 1 || height % patch_h != 0 || width % patch_w != 0 {
            candle_core::bail!("patches of {:?} do not tile latents of {height} x {width}", config.patch_size);
        }
        let grid = [height / patch_h, width / patch_w];
        let (actions, proprios) = (input.action.dim(1)?, input.proprio.dim(1)?);
        let per_frame = views * grid[0] * grid[1];
        let mut positions = Vec::with_capacity(frames * per_frame + actions + proprios);
        let mut row_of_token = Vec::with_capacity(positions.capacity());
        for frame in 0..frames {
            for cell in 0..per_frame {
                let (y, x) = (cell / grid[1] % grid[0], cell % grid[1]);
                positions.push([frame as f64, y as f64, x as f64]);
                row_of_token.push(frame);
            }
        }
        for action in 0..actions {
            positions.push([action as f64 / (4 * config.action_num) as f64, 0.0, 0.0]);
            row_of_token.push(frames + action);
        }
        for proprio in 0..proprios {
            positions.push([proprio as f64 / 4.0, 0.0, 0.0]);
            row_of_token.push(frames + actions + proprio);
        }
        let table = RopeTable::new(&positions, RopeTable::xwam_axes(config.dim / config.num_heads));
        let rows = Rows::new(row_of_token, frames + actions + proprios);
        let placement = Placement {
            table,
            rows,
            sight: Sight::Everything,
            video_tokens: frames * per_frame,
            sources: None,
            read: None,
        };
        Ok(Self { frames, views, grid, actions, proprios, placement })
    }

    /// N, the number of video tokens.
    pub fn video_tokens(&self) -> usize {
        self.placement.video_tokens
    }

    /// L, the length of the joint sequence.
    pub fn tokens(&self) -> usize {
        self.video_tokens() + self.actions + self.proprios
    }
}

/// The X-WAM diffusion transformer without depth branch, with or without the geometry branch.
#[derive(Clone, Debug)]
pub struct XwamModel {
    config: ModelConfig,
    patch: (Tensor, Tensor),
    view_embedding: Tensor,
    text_embedding: Mlp,
    time_embedding: [Linear; 2],
    time_projection: Linear,
    action_encoder: Mlp,
    proprio_encoder: Mlp,
    geometry: Option<GeometryAdapter>,
    blocks: Vec<Block>,
    head_modulation: Tensor,
    head: Linear,
    action_decoder: Mlp,
    proprio_decoder: Mlp,
}

impl XwamModel {
    /// What the trunk of such a model is.
    pub fn shape(config: &ModelConfig) -> TrunkShape {
        TrunkShape {
            names: BLOCK,
            depth: config.num_layers,
            width: config.dim,
            ffn: config.ffn_dim,
            heads: config.num_heads,
            eps: config.eps,
        }
    }

    /// Binds the parameters by name; later updates of a variable are seen.
    pub fn new(config: &ModelConfig, parameters: &Parameters) -> Result<Self> {
        Ok(Self {
            config: config.clone(),
            patch: (parameters.get("patch_embedding.weight")?.clone(), parameters.get("patch_embedding.bias")?.clone()),
            view_embedding: parameters.get("view_embedding.weight")?.clone(),
            text_embedding: Mlp::load(parameters, "text_embedding", MLP)?,
            time_embedding: [
                Linear::load(parameters, "time_embedding.0")?,
                Linear::load(parameters, "time_embedding.2")?,
            ],
            time_projection: Linear::load(parameters, "time_projection.1")?,
            action_encoder: Mlp::load(parameters, "action_encoder", MLP)?,
            proprio_encoder: Mlp::load(parameters, "proprio_encoder", MLP)?,
            geometry: match config.geometry.enabled {
                true => Some(GeometryAdapter::load(parameters, config)?),
                false => None,
            },
            blocks: (0..config.num_layers).map(|i| block(parameters, i, config)).collect::<Result<_>>()?,
            head_modulation: parameters.get("head.modulation")?.clone(),
            head: Linear::load(parameters, "head.head")?,
            action_decoder: Mlp::load(parameters, "action_decoder", MLP)?,
            proprio_decoder: Mlp::load(parameters, "proprio_decoder", MLP)?,
        })
    }
}

/// The block of a layer, with the geometry branch on its input if this layer carries one.
fn block(parameters: &Parameters, layer: usize, config: &ModelConfig) -> Result<Block> {
    let branch = config.geometry.enabled && config.geometry.layers.contains(&layer);
    let geometry = if branch { Some(GeometryInsertion::load(parameters, layer, config)?) } else { None };
    Block::load(parameters, layer, &BLOCK, geometry, config.num_heads, config.eps)
}

impl Transformer for XwamModel {
    type Input = XwamInput;
    type Layout = Layout;
    type Output = XwamOutput;

    /// Positions and row map of this batch.
    fn layout(&self, input: &XwamInput) -> Result<Layout> {
        Layout::new(&self.config, input)
    }

    fn trunk(&self) -> TrunkShape {
        Self::shape(&self.config)
    }

    fn placement<'l>(&self, layout: &'l Layout) -> &'l Placement {
        &layout.placement
    }

    fn insertion(&self, layer: usize) -> Option<&GeometryInsertion> {
        self.blocks[layer].insertion()
    }

    /// Embedders: the joint sequence [B L, D] and what the blocks read beside it.
    fn front(&self, input: &XwamInput, layout: &Layout) -> Result<(Vec<Tensor>, Conditioning)> {
        let dtype = self.view_embedding.dtype();
        let device = self.view_embedding.device();
        let video = self.patchify(&input.latent.to_device(device)?, layout)?;
        let action = self.action_encoder.forward(&input.action.to_device(device)?)?;
        let proprio = self.proprio_encoder.forward(&input.proprio.to_device(device)?)?;
        let x = Tensor::cat(&[video, action, proprio], 1)?.flatten(0, 1)?;

        let batch = input.latent.dim(0)?;
        let timesteps: Vec<f64> = (0..batch)
            .flat_map(|b| [&input.t_video[b], &input.t_action[b], &input.t_proprio[b]])
            .flatten()
            .copied()
            .collect();
        if timesteps.len() != batch * layout.placement.rows.count {
            candle_core::bail!("{} timesteps for {batch} x {} rows", timesteps.len(), layout.placement.rows.count);
        }
        let embedded = sinusoid(&timesteps, self.config.freq_dim, dtype, x.device())?;
        let e = self.time_embedding[1].forward(&self.time_embedding[0].forward(&embedded)?.silu()?)?;
        let e0 = self.time_projection.forward(&e.silu()?)?;
        let (rows, width) = (layout.placement.rows.count, self.config.dim);
        let geometry = match (&self.geometry, &input.geometry) {
            (None, _) => None,
            (Some(adapter), Some(tokens)) => Some(adapter.forward(&tokens.to_device(device)?)?),
            (Some(_), None) => candle_core::bail!("the geometry branch is built but the batch has no geometry tokens"),
        };
        let conditioning = Conditioning {
            e0: e0.reshape((batch, rows, 6 * width))?,
            e: e.reshape((batch, rows, width))?,
            text: self.text_embedding.forward(&input.text.to_device(device)?)?,
            geometry,
        };
        Ok((vec![x], conditioning))
    }

    /// x [B, L, D] -> [B, L, D].
    fn block(&self, layer: usize, x: &Tensor, conditioning: &Conditioning, layout: &Layout) -> Result<Tensor> {
        self.blocks[layer].forward(x, conditioning, &layout.placement)
    }

    /// Heads: video through LN and modulation by `e`; actions and proprios by an MLP on x itself.
    fn back(&self, read: &[Tensor], conditioning: &Conditioning, layout: &Layout) -> Result<XwamOutput> {
        let [x] = read else { candle_core::bail!("{} parts for one head", read.len()) };
        let (batch, _, width) = x.dims3()?;
        let video_tokens = layout.video_tokens();
        let stream = |tensor: &Tensor| tensor.to_dtype(x.dtype());
        let modulation = stream(&conditioning.e.narrow(1, 0, layout.frames)?)?
            .unsqueeze(2)?
            .broadcast_add(&stream(&self.head_modulation)?.reshape((1, 1, 2, width))?)?;
        let part = |i: usize| modulation.narrow(2, i, 1)?.squeeze(2);
        let rows = Rows::new(layout.placement.rows.of_token[..video_tokens].to_vec(), layout.frames);
        let video = x.narrow(1, 0, video_tokens)?.contiguous()?;
        let normed = norm_modulate(&video, &part(0)?, &part(1)?, &rows, self.config.eps)?;
        let action = x.narrow(1, video_tokens, layout.actions)?;
        let proprio = x.narrow(1, video_tokens + layout.actions, layout.proprios)?;
        Ok(XwamOutput {
            video: stream(&self.unpatchify(&self.head.forward(&normed)?, batch, layout)?)?,
            action: stream(&self.action_decoder.forward(&action)?)?,
            proprio: stream(&self.proprio_decoder.forward(&proprio)?)?,
        })
    }

    fn detach(output: &XwamOutput) -> XwamOutput {
        XwamOutput { video: output.video.detach(), action: output.action.detach(), proprio: output.proprio.detach() }
    }
}

impl XwamModel {
    /// [B, C, T, V, H, W] -> tokens [B, N, D]; a patch enters in the order (channel, dy, dx).
    fn patchify(&self, latent: &Tensor, layout: &Layout) -> Result<Tensor> {
        let (batch, channels, width) = (latent.dim(0)?, latent.dim(1)?, self.config.dim);
        let [_, patch_h, patch_w] = self.config.patch_size;
        let [h, w] = layout.grid;
        let cells = latent
            .contiguous()?
            .reshape(vec![batch, channels, layout.frames, layout.views, h, patch_h, w, patch_w])?
            .permute(vec![0, 2, 3, 4, 6, 1, 5, 7])?
            .contiguous()?
            .reshape((batch, layout.video_tokens(), channels * patch_h * patch_w))?;
        let (weight, bias) = &self.patch;
        let tokens = linear(&cells, &weight.reshape((width, channels * patch_h * patch_w))?, bias)?;
        tokens
            .reshape(vec![batch, layout.frames, layout.views, h * w, width])?
            .broadcast_add(&self.view_embedding.reshape((1, 1, layout.views, 1, width))?)?
            .reshape((batch, layout.video_tokens(), width))
    }

    /// Tokens [B, N, 4 C] in the order (dy, dx, channel) -> [B, C, T, V, H, W].
    fn unpatchify(&self, tokens: &Tensor, batch: usize, layout: &Layout) -> Result<Tensor> {
        let channels = self.config.out_dim;
        let [_, patch_h, patch_w] = self.config.patch_size;
        let [h, w] = layout.grid;
        tokens
            .reshape(vec![batch, layout.frames, layout.views, h, w, patch_h, patch_w, channels])?
            .permute(vec![0, 7, 1, 2, 3, 5, 4, 6])?
            .contiguous()?
            .reshape(vec![batch, channels, layout.frames, layout.views, h * patch_h, w * patch_w])
    }
}
