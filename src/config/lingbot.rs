//! The typed recipe of the LingBot-VA family: whole episodes, packed; video and action tokens on one trunk.
//!
//! Field names follow the public training configs where they have one (`snr_shift` is `video_shift` here, since the
//! action stream has a shift of its own).

use super::types::{CodecConfig, DeviceChoice, PrecisionConfig, TextConfig, TrainConfig};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// One resolved configuration of this family.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LingbotRecipe {
    pub data: EpisodeDataConfig,
    pub codec: CodecConfig,
    pub text: TextConfig,
    pub model: LingbotModelConfig,
    pub weights: WeightsConfig,
    pub flow: LingbotFlowConfig,
    pub packing: PackingConfig,
    pub precision: PrecisionConfig,
    /// The effective batch is `packing.ranks` x `batch_size` x `accumulate` episodes, however they are packed.
    pub train: TrainConfig,
    pub validation: LingbotValidationConfig,
    #[serde(default)]
    pub device: DeviceChoice,
}

/// Where episodes come from and how a row of actions becomes channels.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EpisodeDataConfig {
    /// A LeRobot v2.1 dataset, or a folder of them at any depth; they are taken in the order of their paths.
    pub dataset: PathBuf,
    /// Video feature keys, in the order of the tile.
    pub views: Vec<String>,
    /// The view that decides; one of `views`.
    pub wrist_view: String,
    /// How the views of a frame form one latent picture.
    pub tile: Tile,
    /// Where latents come from.
    pub latents: LatentSource,
    /// Source frames between two frames of the video. Official latent files state their own, which must be this one.
    pub frame_stride: usize,
    /// What one sample is.
    pub sample: SampleUnit,
    /// Episode indices held out for validation in every dataset; all others train.
    pub validation_episodes: Vec<usize>,
    pub actions: ActionConfig,
}

/// Arrangement of the views' latents in one picture.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Tile {
    /// Side by side along the width, in the order of `views` (env_type none).
    Row,
    /// [second view | third view] side by side above the first, whose sides are twice theirs; actions become relative
    /// to the first row of the sample (env_type robotwin_tshape).
    RobotwinTshape,
}

/// Where latents come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LatentSource {
    /// `latents/chunk-*/<view>/episode_*_<start>_<end>.pth`, as published with the datasets; text comes with them.
    Official,
    /// The videos, through the recipe's codec.
    Videos,
}

/// What one sample is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SampleUnit {
    /// Each entry of an episode's `action_config`: its frames and its text.
    Segment,
    /// The whole episode under its task's text.
    Episode,
}

/// Action rows -> `model.action_dim` channels.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ActionConfig {
    /// Channel of each element of an action row, in row order (0-6 left pose, 7-13 right pose, 14-27 joints, 28 and 29
    /// grippers).
    pub channels: Vec<usize>,
    /// 1 % and 99 % quantiles of each element, in row order; of the relative poses if the tile makes them relative.
    pub q01: Vec<f64>,
    pub q99: Vec<f64>,
}

/// Sizes of the diffusion transformer. `dim` is num_attention_heads x attention_head_dim of the public config.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LingbotModelConfig {
    pub dim: usize,
    pub ffn_dim: usize,
    pub num_heads: usize,
    pub num_layers: usize,
    /// Latent channels in (48).
    pub in_dim: usize,
    pub out_dim: usize,
    /// (time, height, width) of a patch in latent cells.
    pub patch_size: [usize; 3],
    pub action_dim: usize,
    /// Width of the timestep sinusoid.
    pub freq_dim: usize,
    pub text_dim: usize,
    /// Text slots of an episode; those after the prompt are zeros, and attended.
    pub text_len: usize,
    pub eps: f64,
}

/// What the weights start from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, tag = "init", rename_all = "snake_case")]
pub enum WeightsConfig {
    /// Drawn from `train.seed`.
    Random,
    /// A `transformer/` folder or file in the published layout.
    Official { path: PathBuf },
    /// The original Wan2.2-TI2V-5B weights; what they lack is drawn from `train.seed`.
    Wan22 { path: PathBuf },
}

/// Flow matching with a noise level for each latent frame, and chunk-causal attention.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LingbotFlowConfig {
    /// Shift of the video's noise schedule.
    pub video_shift: f64,
    /// Shift of the actions' noise schedule.
    pub action_shift: f64,
    /// Noise levels of a schedule.
    pub train_timesteps: usize,
    /// Probability that the clean video copy is noised.
    pub history_noise: f64,
    /// Smallest and largest chunk, in latent frames.
    pub chunk: [usize; 2],
    /// Smallest and largest attention window, in half-chunks.
    pub window: [usize; 2],
    /// Over what the loss is averaged.
    pub loss_mean: LossMean,
    /// Probability that an episode's prompt is replaced by the empty one.
    pub text_dropout: f64,
}

/// Over what the loss is averaged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LossMean {
    /// Frames within an episode, then episodes of the step: gradients do not depend on the packing.
    Episodes,
    /// All valid frames of a micro-batch, then micro-batches: what packed training first did.
    Frames,
}

/// How episodes share a sequence.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PackingConfig {
    pub kind: PackingKind,
    /// Ranks that share a step. In this version one process does the work of all, one after another.
    pub ranks: usize,
    /// `bucket`: frames are padded to a multiple of this many latent frames; `LINGBOT_PAD_MULTIPLE` wins over
    /// the file and is part of the run: resume with the same one.
    pub pad_multiple: usize,
    /// `bucket`: batches whose episodes are sorted by length together.
    pub pool_factor: usize,
    /// `budget`: tokens of a micro-batch at most (noisy and clean copies, alignment included).
    pub token_budget: usize,
    /// Sequences are padded to a multiple of this many tokens.
    pub alignment: usize,
}

/// Which episodes share a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PackingKind {
    /// One episode a micro-batch.
    Unpacked,
    /// `train.batch_size` episodes of like length, padded to one length; one draw of levels, chunk and window for all.
    Bucket,
    /// As many as the token budget holds, none padded; draws for each episode.
    Budget,
}

/// When and how held-out chunks are predicted and measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LingbotValidationConfig {
    /// Optimizer steps between two validations; step 0 and the last step are always validated.
    pub every: u64,
    /// Chunks measured, spread evenly over those of the held-out episodes.
    pub clips: usize,
    /// Latent frames of a chunk (`frame_chunk_size`).
    pub chunk: usize,
    /// Attention window in half-chunks.
    pub window: usize,
    /// Sampler steps of the video.
    pub sample_steps: usize,
    /// Pictures kept for the console and the strips.
    pub strips: usize,
}
