//! LingBot-VA: packed episodes, each as noisy and clean copies of its video and action tokens, on the shared trunk.
//!
//! Copies share embedders, positions and blocks, and differ in timestep and in what they see. Tokens are embedded in the
//! public order (four segments, see [`Sequence`]), put into the plan's order for the trunk, and only the noisy ones are
//! taken out again for the heads. Modulation rows: one a latent frame, copy and stream.

mod chunk;

use super::block::{AttentionNames, BlockNames, Linear, Mlp, MlpNames, Placement, Sight, stream_dtype};
use super::timestep::sinusoid_f32;
use super::{Block, Conditioning, GeometryInsertion, Parameters, Transformer, TrunkShape};
use crate::config::LingbotModelConfig;
use crate::ops::{RopeTable, Rows, norm_modulate};
use crate::pack::sequence::{FrameTokens, PackedEpisode, Sequence};
use candle_core::{Result, Tensor};
use std::sync::Arc;

pub use chunk::{ChunkHistory, CleanHistory, EpisodeHistory};

const TEXT: MlpNames = MlpNames { up: "linear_1", down: "linear_2" };
const BLOCK: BlockNames = BlockNames {
    modulation: "scale_shift_table",
    self_attention: "attn1",
    cross_attention: "attn2",
    cross_norm: "norm2",
    attention: AttentionNames { q: "to_q", k: "to_k", v: "to_v", o: "to_out.0" },
    ffn: MlpNames { up: "net.0.proj", down: "net.2" },
};

/// One episode as it enters the model. F latent frames, n action tokens a frame.
#[derive(Clone, Debug)]
pub struct EpisodeInput {
    /// [C, F, H, W]
    pub noisy_video: Tensor,
    /// [C, F, H, W], the history; noised too in some steps.
    pub clean_video: Tensor,
    /// [A, F, n]
    pub noisy_action: Tensor,
    pub clean_action: Tensor,
    /// Timestep of each frame on the scale 0..1000, [F] each; the clean actions' is 0.
    pub t_video: Vec<f64>,
    pub t_history: Vec<f64>,
    pub t_action: Vec<f64>,
    /// Frames from here on are padding: computed, seen by nothing.
    pub valid_frames: usize,
    /// Latent frames of an attention chunk.
    pub chunk: usize,
    /// Reach of attention into the past, in half-chunks.
    pub window: usize,
    /// Index into [`LingbotInput::prompts`].
    pub prompt: usize,
}

/// Episodes of equal grid and n that share one sequence.
#[derive(Clone, Debug)]
pub struct LingbotInput {
    pub episodes: Vec<EpisodeInput>,
    /// Text embeddings [r, text_dim] without the zero rows that fill the text slots.
    pub prompts: Vec<Tensor>,
    /// The sequence is padded to a multiple of this many tokens.
    pub alignment: usize,
}

impl EpisodeInput {
    /// The same with each tensor replaced.
    ///
    /// # Errors
    /// The first of `replace`.
    pub fn map(&self, replace: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Self> {
        Ok(Self {
            noisy_video: replace(&self.noisy_video)?,
            clean_video: replace(&self.clean_video)?,
            noisy_action: replace(&self.noisy_action)?,
            clean_action: replace(&self.clean_action)?,
            ..self.clone()
        })
    }
}

impl LingbotInput {
    /// The same with each tensor replaced: in another dtype, on another device.
    ///
    /// # Errors
    /// The first of `replace`.
    pub fn map(&self, replace: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Self> {
        Ok(Self {
            episodes: self.episodes.iter().map(|episode| episode.map(&replace)).collect::<Result<_>>()?,
            prompts: self.prompts.iter().map(&replace).collect::<Result<_>>()?,
            alignment: self.alignment,
        })
    }
}

/// Predicted velocities (noise - data) of one episode's noisy copies.
#[derive(Clone, Debug)]
pub struct EpisodeOutput {
    /// [C, F, H, W]
    pub video: Tensor,
    /// [A, F, n]
    pub action: Tensor,
}

/// The packed sequence of a batch and the tables that follow from it.
#[derive(Clone, Debug)]
pub struct Layout {
    sequence: Arc<Sequence>,
    /// Latent frames of each episode.
    frames: Vec<usize>,
    tokens: FrameTokens,
    placement: Placement,
}

impl Layout {
    fn new(config: &LingbotModelConfig, input: &LingbotInput) -> Result<Self> {
        let Some(first) = input.episodes.first() else { candle_core::bail!("a packed batch needs an episode") };
        let (_, _, height, width) = first.noisy_video.dims4()?;
        let actions = first.noisy_action.dim(2)?;
        let [patch_t, patch_h, patch_w] = config.patch_size;
        if patch_t != 1 || height % patch_h != 0 || width % patch_w != 0 {
            candle_core::bail!("patches of {:?} do not tile latents of {height} x {width}", config.patch_size);
        }
        let tokens = FrameTokens { grid: [height / patch_h, width / patch_w], actions };
        let mut frames = Vec::with_capacity(input.episodes.len());
        let mut packed = Vec::with_capacity(input.episodes.len());
        for episode in &input.episodes {
            let count = episode.check(config, [height, width], actions, input.prompts.len())?;
            frames.push(count);
            packed.push(PackedEpisode {
                frames: count,
                valid_frames: episode.valid_frames,
                chunk: episode.chunk,
                window: episode.window,
            });
        }
        let sequence = Sequence::new(&packed, tokens, input.alignment)?;
        let prompt_of_episode: Vec<usize> = input.episodes.iter().map(|episode| episode.prompt).collect();
        let real_tokens = input.prompts.iter().map(|prompt| prompt.dim(0)).collect::<Result<Vec<_>>>()?;
        let text = sequence.cross_attention(&prompt_of_episode, &real_tokens, config.text_len)?;
        let axes = RopeTable::lingbot_axes(config.dim / config.num_heads);
        let placement = Placement {
            table: RopeTable::new(&sequence.positions(), axes),
            rows: Rows::new(sequence.row_of_token().to_vec(), sequence.rows()),
            sight: Sight::Planned { tokens: Arc::clone(sequence.attention()), text },
            video_tokens: 0,
            sources: Some(sequence.source_of_token().to_vec()),
            read: Some(vec![sequence.noisy_video().to_vec(), sequence.noisy_action().to_vec()]),
        };
        Ok(Self { sequence: Arc::new(sequence), frames, tokens, placement })
    }

    /// L, alignment included.
    pub fn tokens(&self) -> usize {
        self.sequence.len()
    }
}

impl EpisodeInput {
    /// Latent frames, if all parts agree.
    fn check(&self, config: &LingbotModelConfig, size: [usize; 2], actions: usize, prompts: usize) -> Result<usize> {
        let frames = self.noisy_video.dim(1)?;
        let video = [config.in_dim, frames, size[0], size[1]];
        let action = [config.action_dim, frames, actions];
        if self.noisy_video.dims() != video || self.clean_video.dims() != video {
            candle_core::bail!(
                "video {:?} and history {:?} are not both {video:?}",
                self.noisy_video.dims(),
                self.clean_video.dims()
            );
        }
        if self.noisy_action.dims() != action || self.clean_action.dims() != action {
            candle_core::bail!(
                "actions {:?} and their clean copy {:?} are not both {action:?}",
                self.noisy_action.dims(),
                self.clean_action.dims()
            );
        }
        let levels = [self.t_video.len(), self.t_history.len(), self.t_action.len()];
        if levels != [frames; 3] || self.valid_frames > frames || self.prompt >= prompts {
            candle_core::bail!(
                "{levels:?} timesteps, {} valid frames and prompt {} do not fit {frames} frames and {prompts} prompts",
                self.valid_frames,
                self.prompt
            );
        }
        Ok(frames)
    }
}

/// Linear, SiLU, Linear on the sinusoid, then SiLU, Linear: one stream's time embedding.
#[derive(Clone, Debug)]
struct TimeEmbedder {
    embedding: [Linear; 2],
    projection: Linear,
}

impl TimeEmbedder {
    fn load(parameters: &Parameters, name: &str) -> Result<Self> {
        let part = |part: &str| Linear::load(parameters, &format!("{name}.{part}"));
        Ok(Self {
            embedding: [part("time_embedder.linear_1")?, part("time_embedder.linear_2")?],
            projection: part("time_proj")?,
        })
    }

    /// Sinusoids [R, freq_dim] -> e [R, D] and its projection e0 [R, 6 D].
    fn forward(&self, sinusoids: &Tensor) -> Result<(Tensor, Tensor)> {
        let e = self.embedding[1].forward(&self.embedding[0].forward(sinusoids)?.silu()?)?;
        let e0 = self.projection.forward(&e.silu()?)?;
        Ok((e, e0))
    }
}

/// The LingBot-VA diffusion transformer with its shared video and action backbone.
#[derive(Clone, Debug)]
pub struct LingbotModel {
    config: LingbotModelConfig,
    patch_embedding: Linear,
    action_embedder: Linear,
    text_embedder: Mlp,
    video_time: TimeEmbedder,
    action_time: TimeEmbedder,
    blocks: Vec<Block>,
    head_modulation: Tensor,
    video_head: Linear,
    action_head: Linear,
}

impl LingbotModel {
    /// What the trunk of such a model is.
    pub fn shape(config: &LingbotModelConfig) -> TrunkShape {
        TrunkShape {
            names: BLOCK,
            depth: config.num_layers,
            width: config.dim,
            ffn: config.ffn_dim,
            heads: config.num_heads,
            eps: config.eps,
        }
    }

    /// Binds the parameters by name; later updates of a variable are seen. `condition_embedder_action.text_embedder`
    /// is in every checkpoint and used by nothing.
    pub fn new(config: &LingbotModelConfig, parameters: &Parameters) -> Result<Self> {
        let linear = |name: &str| Linear::load(parameters, name);
        let block = |layer| Block::load(parameters, layer, &BLOCK, None, config.num_heads, config.eps);
        Ok(Self {
            config: config.clone(),
            patch_embedding: linear("patch_embedding_mlp")?,
            action_embedder: linear("action_embedder")?,
            text_embedder: Mlp::load(parameters, "condition_embedder.text_embedder", TEXT)?,
            video_time: TimeEmbedder::load(parameters, "condition_embedder")?,
            action_time: TimeEmbedder::load(parameters, "condition_embedder_action")?,
            blocks: (0..config.num_layers).map(block).collect::<Result<_>>()?,
            head_modulation: parameters.get("scale_shift_table")?.clone(),
            video_head: linear("proj_out")?,
            action_head: linear("action_proj_out")?,
        })
    }

    /// [C, F, H, W] -> [F h w, C ph pw]; a patch enters in the order (channel, dy, dx).
    fn patches(&self, latent: &Tensor) -> Result<Tensor> {
        let (channels, frames, height, width) = latent.dims4()?;
        let [_, patch_h, patch_w] = self.config.patch_size;
        let [h, w] = [height / patch_h, width / patch_w];
        latent
            .contiguous()?
            .reshape(vec![channels, frames, h, patch_h, w, patch_w])?
            .permute(vec![1, 2, 4, 0, 3, 5])?
            .contiguous()?
            .reshape((frames * h * w, channels * patch_h * patch_w))
    }

    /// Prompts [r, text_dim] -> their rows one after another, [1, S, D]; `real < text_len` rows and one for all that are
    /// zeros, which have one key and value: the plan weighs it by their number.
    fn embedded(&self, prompts: &[Tensor]) -> Result<Tensor> {
        let mut text = Vec::with_capacity(2 * prompts.len());
        for prompt in prompts {
            let real = prompt.dim(0)?;
            if real > 0 {
                text.push(prompt.clone());
            }
            if real < self.config.text_len {
                text.push(Tensor::zeros((1, self.config.text_dim), prompt.dtype(), prompt.device())?);
            }
        }
        let text = Tensor::cat(&text, 0)?.to_device(self.head_modulation.device())?;
        self.text_embedder.forward(&text)?.unsqueeze(0)
    }

    /// LN, modulation by `e` [1, R, D], projection: tokens [1, N, D] -> [N, out]. Token i has row i / (N / R).
    fn head(&self, tokens: &Tensor, e: &Tensor, projection: &Linear) -> Result<Tensor> {
        let (count, row_count) = (tokens.dim(1)?, e.dim(1)?);
        let table = self.stream(&self.head_modulation)?.unsqueeze(0)?;
        let modulation = self.stream(e)?.unsqueeze(2)?.broadcast_add(&table)?;
        let part = |i: usize| modulation.narrow(2, i, 1)?.squeeze(2);
        let rows = Rows::new((0..count).map(|token| token * row_count / count).collect(), row_count);
        let normed = norm_modulate(tokens, &part(0)?, &part(1)?, &rows, self.config.eps)?;
        self.stream(&projection.forward(&normed)?.squeeze(0)?)
    }

    /// In the dtype of the residual stream.
    fn stream(&self, tensor: &Tensor) -> Result<Tensor> {
        tensor.to_dtype(stream_dtype(self.head_modulation.dtype()))
    }

    /// Tokens [F h w, ph pw C] in the order (dy, dx, channel) -> [C, F, H, W].
    fn unpatched(&self, tokens: &Tensor, frames: usize, [h, w]: [usize; 2]) -> Result<Tensor> {
        let channels = self.config.out_dim;
        let [_, patch_h, patch_w] = self.config.patch_size;
        tokens
            .reshape(vec![frames, h, w, patch_h, patch_w, channels])?
            .permute(vec![5, 0, 1, 3, 2, 4])?
            .contiguous()?
            .reshape((channels, frames, h * patch_h, w * patch_w))
    }
}

/// [A, F, n] -> [F n, A].
fn action_rows(action: &Tensor) -> Result<Tensor> {
    let (channels, frames, steps) = action.dims3()?;
    action.permute((1, 2, 0))?.contiguous()?.reshape((frames * steps, channels))
}

impl Transformer for LingbotModel {
    type Input = LingbotInput;
    type Layout = Layout;
    type Output = Vec<EpisodeOutput>;

    fn layout(&self, input: &LingbotInput) -> Result<Layout> {
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

    /// Rows of video, noisy then clean, and of actions; [., D] each.
    fn front(&self, input: &LingbotInput, layout: &Layout) -> Result<(Vec<Tensor>, Conditioning)> {
        let episodes = &input.episodes;
        let dtype = self.head_modulation.dtype();
        let device = self.head_modulation.device();

        let video = episodes
            .iter()
            .map(|e| self.patches(&e.noisy_video.to_device(device)?))
            .chain(episodes.iter().map(|e| self.patches(&e.clean_video.to_device(device)?)))
            .collect::<Result<Vec<_>>>()?;
        let action = episodes
            .iter()
            .map(|e| action_rows(&e.noisy_action.to_device(device)?))
            .chain(episodes.iter().map(|e| action_rows(&e.clean_action.to_device(device)?)))
            .collect::<Result<Vec<_>>>()?;
        let rows = vec![
            self.patch_embedding.forward(&Tensor::cat(&video, 0)?)?,
            self.action_embedder.forward(&Tensor::cat(&action, 0)?)?,
        ];

        let of = |pick: fn(&EpisodeInput) -> &Vec<f64>| episodes.iter().flat_map(pick).copied();
        let video_rows: Vec<f64> = of(|e| &e.t_video).chain(of(|e| &e.t_history)).collect();
        let clean_actions = std::iter::repeat_n(0.0, layout.frames.iter().sum());
        let action_rows: Vec<f64> = of(|e| &e.t_action).chain(clean_actions).collect();
        let sinusoids = |rows: &[f64]| sinusoid_f32(rows, self.config.freq_dim, dtype, device);
        let (video_e, video_e0) = self.video_time.forward(&sinusoids(&video_rows)?)?;
        let (action_e, action_e0) = self.action_time.forward(&sinusoids(&action_rows)?)?;

        let conditioning = Conditioning {
            e0: Tensor::cat(&[video_e0, action_e0], 0)?.unsqueeze(0)?,
            e: Tensor::cat(&[video_e, action_e], 0)?.unsqueeze(0)?,
            text: self.embedded(&input.prompts)?,
            geometry: None,
        };
        Ok((rows, conditioning))
    }

    /// x [1, L, D] -> [1, L, D].
    fn block(&self, layer: usize, x: &Tensor, conditioning: &Conditioning, layout: &Layout) -> Result<Tensor> {
        self.blocks[layer].forward(x, conditioning, &layout.placement)
    }

    /// Heads of the noisy copies: LN, modulation by `e`, projection.
    fn back(&self, read: &[Tensor], conditioning: &Conditioning, layout: &Layout) -> Result<Vec<EpisodeOutput>> {
        let [video, action] = read else { candle_core::bail!("{} parts for two heads", read.len()) };
        let total: usize = layout.frames.iter().sum();
        let [h, w] = layout.tokens.grid;
        // Rows of the noisy video come first, those of the noisy actions after both video copies.
        let head = |tokens: &Tensor, first_row: usize, projection: &Linear| -> Result<Tensor> {
            self.head(tokens, &conditioning.e.narrow(1, first_row, total)?, projection)
        };
        let video = head(video, 0, &self.video_head)?;
        let action = head(action, 2 * total, &self.action_head)?;
        let mut first = 0;
        let mut outputs = Vec::with_capacity(layout.frames.len());
        for &frames in &layout.frames {
            let steps = layout.tokens.actions;
            let video = video.narrow(0, first * h * w, frames * h * w)?;
            let action = action.narrow(0, first * steps, frames * steps)?;
            outputs.push(EpisodeOutput {
                video: self.unpatched(&video, frames, [h, w])?,
                action: action.reshape((frames, steps, self.config.action_dim))?.permute((2, 0, 1))?.contiguous()?,
            });
            first += frames;
        }
        Ok(outputs)
    }

    fn detach(output: &Vec<EpisodeOutput>) -> Vec<EpisodeOutput> {
        let detached = |o: &EpisodeOutput| EpisodeOutput { video: o.video.detach(), action: o.action.detach() };
        output.iter().map(detached).collect()
    }
}
