//! The typed recipe: what one YAML file in `configs/` says, field by field.
//!
//! Every struct refuses unknown keys. Paths are absolute once loaded (resolved against the file that names them).
//! Nothing here has behaviour beyond derived facts; loading and validation live in the sibling modules.

use super::lingbot::LingbotRecipe;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// One resolved configuration: all that a run depends on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "family", rename_all = "snake_case")]
pub enum Recipe {
    /// X-WAM: one clip a sample, bidirectional attention over [video | actions | proprio].
    Xwam(XwamRecipe),
    /// LingBot-VA: whole episodes, chunk-causal attention over noisy and clean copies of video and actions.
    Lingbot(LingbotRecipe),
}

impl Recipe {
    /// Which token layout and objective.
    pub fn family(&self) -> Family {
        match self {
            Self::Xwam(_) => Family::Xwam,
            Self::Lingbot(_) => Family::Lingbot,
        }
    }

    pub fn train(&self) -> &TrainConfig {
        match self {
            Self::Xwam(recipe) => &recipe.train,
            Self::Lingbot(recipe) => &recipe.train,
        }
    }

    /// Root of what is trained on.
    pub fn dataset(&self) -> &Path {
        match self {
            Self::Xwam(recipe) => &recipe.data.dataset,
            Self::Lingbot(recipe) => &recipe.data.dataset,
        }
    }

    pub fn precision(&self) -> PrecisionConfig {
        match self {
            Self::Xwam(recipe) => recipe.precision,
            Self::Lingbot(recipe) => recipe.precision,
        }
    }

    pub fn codec(&self) -> &CodecConfig {
        match self {
            Self::Xwam(recipe) => &recipe.codec,
            Self::Lingbot(recipe) => &recipe.codec,
        }
    }

    pub fn device(&self) -> &DeviceChoice {
        match self {
            Self::Xwam(recipe) => &recipe.device,
            Self::Lingbot(recipe) => &recipe.device,
        }
    }

    /// Clips or episodes of an optimizer step, over all ranks.
    pub fn samples_per_step(&self) -> usize {
        let ranks = match self {
            Self::Xwam(_) => 1,
            Self::Lingbot(recipe) => recipe.packing.ranks,
        };
        ranks * self.train().batch_size * self.train().accumulate
    }

    /// Optimizer steps between two validations.
    pub fn validate_every(&self) -> u64 {
        match self {
            Self::Xwam(recipe) => recipe.validation.every,
            Self::Lingbot(recipe) => recipe.validation.every,
        }
    }

    /// The recipe if it is of this family; else an error that names what `wanted` it.
    pub fn xwam(&self, wanted: &str) -> crate::Result<&XwamRecipe> {
        match self {
            Self::Xwam(recipe) => Ok(recipe),
            other => Err(other.of_other_family(wanted, Family::Xwam)),
        }
    }

    /// The recipe if it is of this family; else an error that names what `wanted` it.
    pub fn lingbot(&self, wanted: &str) -> crate::Result<&LingbotRecipe> {
        match self {
            Self::Lingbot(recipe) => Ok(recipe),
            other => Err(other.of_other_family(wanted, Family::Lingbot)),
        }
    }

    fn of_other_family(&self, wanted: &str, needed: Family) -> crate::Error {
        let what = format!("{wanted} is for recipes of family {}, this one is {}", needed.name(), self.family().name());
        crate::Error::refused("other_family", what).in_place("family")
    }
}

/// One resolved configuration of X-WAM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct XwamRecipe {
    pub data: DataConfig,
    pub codec: CodecConfig,
    pub text: TextConfig,
    pub model: ModelConfig,
    pub flow: FlowConfig,
    pub precision: PrecisionConfig,
    pub train: TrainConfig,
    pub validation: ValidationConfig,
    /// Where to compute.
    #[serde(default)]
    pub device: DeviceChoice,
}

/// The model families on the shared trunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Family {
    Xwam,
    Lingbot,
}

impl Family {
    /// As recipes and golden files name it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Xwam => "xwam",
            Self::Lingbot => "lingbot",
        }
    }
}

/// Where to compute: `auto`, `cpu` or `cuda:N`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum DeviceChoice {
    /// The first GPU if there is one and the program was built for it, the CPU otherwise.
    #[default]
    Auto,
    Cpu,
    /// The GPU of this number, of those that `CUDA_VISIBLE_DEVICES` leaves; its absence is an error.
    Cuda(usize),
}

impl TryFrom<String> for DeviceChoice {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        match text.as_str() {
            "auto" => Ok(Self::Auto),
            "cpu" => Ok(Self::Cpu),
            "cuda" => Ok(Self::Cuda(0)),
            other => other
                .strip_prefix("cuda:")
                .and_then(|number| number.parse().ok())
                .map(Self::Cuda)
                .ok_or_else(|| format!("`{other}` is no device: auto, cpu, or cuda:N as in cuda:0")),
        }
    }
}

impl From<DeviceChoice> for String {
    fn from(choice: DeviceChoice) -> Self {
        match choice {
            DeviceChoice::Auto => "auto".into(),
            DeviceChoice::Cpu => "cpu".into(),
            DeviceChoice::Cuda(number) => format!("cuda:{number}"),
        }
    }
}

/// The dataset and how clips are cut from it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DataConfig {
    /// Root of a LeRobot v2.1 dataset.
    pub dataset: PathBuf,
    /// Video feature keys, in the order of the model's view embedding.
    pub views: Vec<String>,
    /// The view that decides the experiment; one of `views`.
    pub wrist_view: String,
    /// Frames a clip has (9: one latent frame alone, then groups of four).
    pub frames: usize,
    /// Source frames between two frames of a clip.
    pub frame_skip: usize,
    /// Clips start at multiples of this many source frames.
    pub clip_stride: usize,
    /// Episodes held out for validation; all others train.
    pub validation_episodes: Vec<usize>,
    /// How state and action columns fill the first arm of the 16 proprio and 14 action dims.
    pub robot: RobotLayout,
}

/// Columns of `observation.state` and `action` for a one-arm robot (x-wam proprio: xyz, quaternion wxyz, gripper).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RobotLayout {
    /// First of the three position columns (metres) in `observation.state`.
    pub state_position: usize,
    /// First of the four quaternion columns, order xyzw.
    pub state_quaternion_xyzw: usize,
    /// One column, or two whose difference (first - second) is the opening in metres.
    pub state_gripper: Vec<usize>,
    /// First of the seven action columns: delta xyz, delta axis-angle, gripper.
    pub action: usize,
}

/// Pixels <-> latents.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, tag = "kind", rename_all = "snake_case")]
pub enum CodecConfig {
    /// PCA of space-time patches with the geometry of the Wan2.2 VAE. `path` is fitted at first use if absent.
    Linear { path: PathBuf },
    /// The Wan2.2 VAE; its weights come from disk.
    WanVae { path: PathBuf },
}

/// Prompts -> [text_len, text_dim].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, tag = "kind", rename_all = "snake_case")]
pub enum TextConfig {
    /// A fixed pseudo-random vector a word, by the word's hash: enough to tell a handful of prompts apart.
    HashedWords,
    /// UMT5 embeddings computed beforehand: safetensors, one tensor [tokens, text_dim] a prompt, named by the prompt.
    Embeddings { path: PathBuf },
    /// The embeddings inside LingBot-VA's official latent files, and the empty prompt's `empty_emb.pt` beside them.
    LatentFiles,
}

/// Sizes of the diffusion transformer. Names follow Wan2.2's config.json.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelConfig {
    /// Width D of the residual stream.
    pub dim: usize,
    pub ffn_dim: usize,
    pub num_heads: usize,
    pub num_layers: usize,
    /// Latent channels in (48 for the Wan2.2 VAE and the linear codec).
    pub in_dim: usize,
    pub out_dim: usize,
    /// (time, height, width) of a patch in latent cells.
    pub patch_size: [usize; 3],
    pub num_views: usize,
    pub action_dim: usize,
    /// Actions for each interval between two frames of a clip.
    pub action_num: usize,
    pub proprio_dim: usize,
    /// Width of the timestep sinusoid.
    pub freq_dim: usize,
    pub text_dim: usize,
    pub text_len: usize,
    pub eps: f64,
    /// The ablated branch.
    pub geometry: GeometryConfig,
}

/// The zero-initialised cross-attention to cached geometry tokens.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GeometryConfig {
    /// Off: the branch is not built and the checkpoint has no keys of it.
    pub enabled: bool,
    /// Blocks whose input gets the branch.
    pub layers: Vec<usize>,
    /// Width D_g of a cached token.
    pub token_dim: usize,
    /// Token grid (rows, columns) of one source view.
    pub grid: [usize; 2],
    /// Source views in the cache, jointly encoded.
    pub source_views: usize,
    /// Seed of the branch's own initial weights.
    pub seed: u64,
}

/// Flow matching (rectified flow, velocity target).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FlowConfig {
    /// s in t = s u / (1 + (s - 1) u).
    pub time_shifting: f64,
    pub train_timesteps: usize,
    /// Probability that a sample gets its actions and proprio clean (no loss on them).
    pub clean_action_ratio: f64,
    pub action_loss_weight: f64,
    pub proprio_loss_weight: f64,
    /// Probability that a sample's prompt is replaced by the empty one.
    pub text_dropout: f64,
}

/// Which numbers are kept in which format: the regime that a check must pass in to mean anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PrecisionConfig {
    /// Parameters as forward and backward see them, and the operands of every Linear.
    pub params: ParameterFormat,
    /// Residual stream, norms, modulation, predictions.
    pub residual: FullFormat,
    /// Gradients as they are summed, losses, metrics.
    pub reduce: FullFormat,
    /// Weights as the optimizer keeps them, and its moments.
    pub master: FullFormat,
}

impl PrecisionConfig {
    /// In one word for reports: `f32`, or `bf16 parameters, f32 elsewhere`.
    pub fn words(self) -> &'static str {
        match self.params {
            ParameterFormat::F32 => "f32",
            ParameterFormat::Bf16 => "bf16 parameters and operands, f32 elsewhere",
        }
    }
}

/// What parameters may be kept in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ParameterFormat {
    F32,
    Bf16,
}

impl ParameterFormat {
    pub fn dtype(self) -> candle_core::DType {
        match self {
            Self::F32 => candle_core::DType::F32,
            Self::Bf16 => candle_core::DType::BF16,
        }
    }
}

/// What is never kept in less: a sum in half precision loses what training adds to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FullFormat {
    F32,
}

/// The optimisation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrainConfig {
    /// Seeds every random draw of the run.
    pub seed: u64,
    /// Optimizer steps.
    pub steps: u64,
    /// Clips (or episodes) a micro-step.
    pub batch_size: usize,
    /// Micro-steps an optimizer step.
    pub accumulate: usize,
    pub lr: f64,
    pub warmup_steps: u64,
    /// Updates over which the rate rises again after a resume from weights without their moments; 0 for none.
    /// `LINGBOT_RESUME_WARMUP` wins over the file.
    pub resume_warmup: u64,
    /// What the rate does after warm-up.
    pub decay: Decay,
    pub weight_decay: f64,
    pub betas: [f64; 2],
    pub adam_eps: f64,
    /// Global gradient norm above which gradients are scaled down.
    pub clip_norm: f64,
    /// Optimizer steps between two checkpoints.
    pub save_every: u64,
    /// Newest complete checkpoints kept.
    pub keep_last: usize,
    /// Checkpoints of multiples of this many steps are kept for good; 0 keeps none.
    pub keep_every: u64,
    /// Recompute each block in the backward pass instead of keeping its intermediates.
    pub recompute: bool,
}

/// The learning rate after warm-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Decay {
    Constant,
    /// Half a cosine from `lr` to zero at the last step (X-WAM's recipe).
    Cosine,
}

/// When and how held-out clips are sampled and measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ValidationConfig {
    /// Optimizer steps between two validations; step 0 and the last step are always validated.
    pub every: u64,
    /// Clips measured, spread evenly over the held-out clip list.
    pub clips: usize,
    /// Sampler steps of the video.
    pub sample_steps: usize,
    /// Sampler steps of action and proprio (they finish first).
    pub action_steps: usize,
    /// Pictures kept for the console and the strips.
    pub strips: usize,
}

/// One experiment: a base recipe, arms that differ in declared fields, one decision rule.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExperimentFile {
    pub name: String,
    /// What is asked, in one sentence.
    pub question: String,
    /// Recipe file, relative to this file.
    pub base: PathBuf,
    /// Dotted fields in which the arms differ, all of them and no other.
    pub ablated: Vec<String>,
    pub decision: DecisionRule,
    pub arms: Vec<ArmFile>,
    /// How `submit` asks a cluster for a job; absent where the experiment is trained on one machine.
    #[serde(default)]
    pub slurm: Option<SlurmSettings>,
}

/// What the batch script of an arm asks Slurm for. What is not given is left to the site's defaults.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SlurmSettings {
    pub partition: Option<String>,
    pub qos: Option<String>,
    pub account: Option<String>,
    /// GPUs of the one node.
    pub gpus: Option<u32>,
    pub cpus: Option<u32>,
    /// As Slurm writes it: `64G`.
    pub mem: Option<String>,
    /// As Slurm writes it: `4:00:00`, `2-00:00:00`.
    pub time: Option<String>,
    /// Further options of sbatch: `--exclude=gpu3`.
    pub extra: Vec<String>,
    /// Shell lines before the program: `module load cuda`.
    pub setup: Vec<String>,
    /// A script of the site that is run in srun's place, with the command as its arguments.
    pub wrapper: Option<PathBuf>,
    /// Attempts of one job that may end in a row without a new checkpoint; 10 if absent.
    pub max_idle_attempts: Option<u32>,
}

/// One arm's overrides.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ArmFile {
    pub name: String,
    /// Dotted field -> value.
    #[serde(default)]
    pub set: serde_yaml::Mapping,
}

/// The rule fixed beforehand.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DecisionRule {
    /// The arm that is the reference, and the arm that must beat it.
    pub baseline: String,
    pub candidate: String,
    /// Only `wrist_lpips` decides.
    pub metric: String,
    /// Two-sided confidence of the bootstrap interval, e.g. 0.95.
    pub confidence: f64,
    /// Bootstrap resamples.
    pub resamples: usize,
}
