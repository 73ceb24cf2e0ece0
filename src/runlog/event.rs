//! The typed events of `attempts/NNNN/events.jsonl`: what a worker says while it trains, one JSON object a line.
//!
//! This is the only channel from the trainer to anything that shows it. A line is `{"v":1,"time_ms":...,"event":"step",...}`;
//! readers skip kinds and fields they do not know, so an older console can watch a newer worker.

use super::job::JobId;
use serde::{Deserialize, Deserializer, Serialize};

/// Version of the line format.
pub const EVENT_VERSION: u32 = 1;

/// One line of the event log.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EventLine {
    pub v: u32,
    /// Unix time in milliseconds, by the writer's clock.
    pub time_ms: u64,
    #[serde(flatten)]
    pub event: Event,
}

/// What happened.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// First line of every attempt.
    AttemptStarted(AttemptStarted),
    /// Work before, between and after the steps, with its progress.
    Phase { phase: Phase, done: u64, total: u64 },
    /// One optimizer step is complete.
    Step(StepEvent),
    /// One validation point is complete; its clips are in `validation/step-NNNNNNNN/metrics.jsonl`.
    Validation(ValidationEvent),
    /// A checkpoint is durable.
    Checkpoint {
        step: u64,
        bytes: u64,
        /// Writing it, beside training.
        #[serde(deserialize_with = "nan_if_null")]
        ms: f64,
        /// How long training stood still for it; absent in logs of a time when it did for all of `ms`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        blocked_ms: Option<f64>,
    },
    /// A note for people: a finding, a warning, a setting.
    Message { level: Level, text: String },
    /// The run is bound to something else from here on: a difference that whoever started the attempt accepted.
    ChangeAccepted {
        /// As a refusal names it: `train.lr`, `data`, `code`.
        field: String,
        /// Absent where the field is.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        recorded: Option<serde_json::Value>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        now: Option<serde_json::Value>,
    },
    /// A signal or a stop file was seen; the worker will save and leave.
    StopRequested { by: String },
    /// Last line of an attempt that ended by itself.
    AttemptEnded { outcome: Outcome, step: u64, exit_code: u8, reason: String },
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct AttemptStarted {
    pub attempt: u32,
    pub arm: String,
    pub pid: u32,
    pub host: String,
    /// Completed optimizer steps at the start: 0, or those of the checkpoint resumed from.
    pub start_step: u64,
    pub total_steps: u64,
    pub save_every: u64,
    pub validate_every: u64,
    pub parameters: u64,
    /// `cpu`, `cuda:0`, ...
    pub device: String,
    pub threads: usize,
    /// The job that the worker is part of; absent outside Slurm.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub job: Option<JobIdentity>,
}

/// Which start of which job an attempt is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobIdentity {
    /// It stays the same when a job is requeued.
    pub id: JobId,
    /// How often it was requeued before.
    pub restart: u32,
    /// Slurm's name of the node.
    pub node: String,
    /// Attempts of it in a row that may leave no checkpoint; `None` for a job that does not restart itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_idle_attempts: Option<u32>,
}

/// What a worker does when it is not stepping.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    LoadingData,
    FittingCodec,
    CachingLatents,
    BuildingModel,
    Resuming,
    Training,
    Validating,
    Saving,
}

impl Phase {
    /// The phase in words, wherever it is shown. A `total` of 0 in fitting says that another process does it.
    pub fn words(self, total: u64) -> &'static str {
        match self {
            Self::LoadingData => "loading data",
            Self::FittingCodec if total == 0 => "waiting for another process to fit the codec",
            Self::FittingCodec => "fitting the codec",
            Self::CachingLatents => "caching latents",
            Self::BuildingModel => "building the model",
            Self::Resuming => "reading the checkpoint",
            Self::Training => "waiting for the first step",
            Self::Validating => "validating",
            Self::Saving => "saving a checkpoint",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepEvent {
    /// Completed optimizer steps, this one included (the first step is 1).
    pub step: u64,
    /// Weighted sum of the parts.
    #[serde(deserialize_with = "nan_if_null")]
    pub loss: f64,
    #[serde(deserialize_with = "nan_if_null")]
    pub loss_video: f64,
    #[serde(deserialize_with = "nan_if_null")]
    pub loss_action: f64,
    #[serde(deserialize_with = "nan_if_null")]
    pub loss_proprio: f64,
    /// Global gradient norm before clipping.
    #[serde(deserialize_with = "nan_if_null")]
    pub grad_norm: f64,
    #[serde(deserialize_with = "nan_if_null")]
    pub lr: f64,
    /// Wall time of the whole step, and the share of it spent waiting for data.
    #[serde(deserialize_with = "nan_if_null")]
    pub step_ms: f64,
    #[serde(deserialize_with = "nan_if_null")]
    pub data_ms: f64,
    /// Share of the tokens computed that are padding, 0..=1.
    #[serde(deserialize_with = "nan_if_null")]
    pub padding_waste: f64,
    /// Tokens through the trunk in this step.
    pub tokens: u64,
    pub memory: Memory,
    /// Norm of the geometry branch's output projections; absent without a branch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub branch_norm: Option<f64>,
    /// How the episodes of the step were packed; absent for clips of one length.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub packing: Option<PackingStep>,
    /// Where the step's time went on a device with a clock of its own; absent on the CPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub times: Option<StepTimes>,
    /// All steps of the run so far, this one included; absent in logs of a time when it was not counted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub work: Option<Work>,
}

/// A step's time on its device, ms, all micro-steps together; waiting for data is in [`StepEvent::data_ms`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StepTimes {
    /// Embedders, forward and backward.
    #[serde(deserialize_with = "nan_if_null")]
    pub front_ms: f64,
    /// Blocks, forward and backward, what they recompute included.
    #[serde(deserialize_with = "nan_if_null")]
    pub trunk_ms: f64,
    /// Heads and losses, forward and backward.
    #[serde(deserialize_with = "nan_if_null")]
    pub back_ms: f64,
    #[serde(deserialize_with = "nan_if_null")]
    pub update_ms: f64,
    /// FLOP of the model, forward and backward without recomputation, over the time of the passes and what the device
    /// could do in bf16 meanwhile, 0..=1; absent where that is not known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mfu: Option<f64>,
}

/// What a run's steps add up to, by their learning rate. A step is at full rate once no warm-up, neither the schedule's
/// nor that after lost moments, holds it down; a decay afterwards is the schedule's own business and counts as full.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Work {
    pub full_lr_steps: u64,
    /// Clips or episodes of those steps, repeats counted.
    pub full_lr_samples: u64,
    pub warmup_steps: u64,
}

impl Work {
    /// Share of the steps that were in warm-up, 0..=1; `None` before the first.
    pub fn warmup_share(self) -> Option<f64> {
        let steps = self.full_lr_steps + self.warmup_steps;
        (steps > 0).then(|| self.warmup_steps as f64 / steps as f64)
    }
}

/// How the episodes of one optimizer step were packed.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct PackingStep {
    /// Sequences of the step, over all ranks.
    pub micro_steps: u64,
    /// Different sequence lengths since the attempt began: each is a shape that a compiler would compile.
    pub distinct_shapes: u64,
    /// Shares of the tokens processed, 0..=1: padded frames, and rows that fill up an alignment.
    #[serde(deserialize_with = "nan_if_null")]
    pub frame_padding: f64,
    #[serde(deserialize_with = "nan_if_null")]
    pub alignment_padding: f64,
    /// Summed over the barriers of the step (one for `budget`, else one a micro-step), the largest estimated cost of a
    /// rank over the mean of all: 1 is perfect balance.
    #[serde(deserialize_with = "nan_if_null")]
    pub rank_imbalance: f64,
}

/// Memory in use, and what was measured.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Memory {
    pub kind: MemoryKind,
    pub bytes: u64,
    pub peak_bytes: u64,
    /// Of the device or the machine.
    pub total_bytes: u64,
    /// Whose a GPU's is, by the program's own account.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parts: Option<MemoryParts>,
}

/// What training on a GPU has allocated, by what it is for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryParts {
    /// Parameters, gradients, masters and moments.
    pub state_bytes: u64,
    /// What the trunk works on and keeps.
    pub arena_bytes: u64,
    /// Embedders and heads, at the last micro-step's peak.
    pub candle_bytes: u64,
    /// Beside the GPU's: pinned memory of the host, where the trunk keeps more.
    pub host_bytes: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum MemoryKind {
    /// This process's share of a GPU's memory.
    Gpu,
    /// Resident set of the process.
    Rss,
}

/// Means over the validation clips. What a family does not predict, or what could not be looked at, is NaN.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ValidationEvent {
    pub step: u64,
    pub clips: u64,
    /// Lower is better; decides.
    #[serde(deserialize_with = "nan_if_null")]
    pub wrist_lpips: f64,
    /// dB, higher is better.
    #[serde(deserialize_with = "nan_if_null")]
    pub wrist_psnr: f64,
    /// Higher is better.
    #[serde(deserialize_with = "nan_if_null")]
    pub wrist_ssim: f64,
    /// Position error in normalised coordinates, and in metres.
    #[serde(deserialize_with = "nan_if_null")]
    pub trans_l2_norm: f64,
    #[serde(deserialize_with = "nan_if_null")]
    pub trans_l2_m: f64,
    #[serde(deserialize_with = "nan_if_null")]
    pub rot_deg: f64,
    /// The codec's own ceiling on the same frames: encode and decode the truth.
    #[serde(deserialize_with = "nan_if_null")]
    pub ceiling_lpips: f64,
    #[serde(deserialize_with = "nan_if_null")]
    pub ceiling_psnr: f64,
    /// Mean squared error of the wrist view's latents, where it was measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wrist_latent_mse: Option<f64>,
    #[serde(deserialize_with = "nan_if_null")]
    pub ms: f64,
    /// All steps before it; absent in logs of a time when it was not counted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub work: Option<Work>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Level {
    Info,
    Warning,
    Error,
}

/// How a run or an attempt ended, in its own words.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// All steps done.
    Finished,
    /// Left early with a durable checkpoint.
    Stopped,
    Failed,
}

/// One clip of a validation point: a line of `validation/step-NNNNNNNN/metrics.jsonl`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ClipMetrics {
    /// `episode_000012@32`: episode and first source frame; `episode_000012#3`: episode and chunk.
    pub clip: String,
    #[serde(deserialize_with = "nan_if_null")]
    pub wrist_lpips: f64,
    #[serde(deserialize_with = "nan_if_null")]
    pub wrist_psnr: f64,
    #[serde(deserialize_with = "nan_if_null")]
    pub wrist_ssim: f64,
    #[serde(deserialize_with = "nan_if_null")]
    pub trans_l2_norm: f64,
    #[serde(deserialize_with = "nan_if_null")]
    pub trans_l2_m: f64,
    #[serde(deserialize_with = "nan_if_null")]
    pub rot_deg: f64,
    #[serde(deserialize_with = "nan_if_null")]
    pub ceiling_lpips: f64,
    #[serde(deserialize_with = "nan_if_null")]
    pub ceiling_psnr: f64,
    /// Mean squared error of the wrist view's latents, where it was measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wrist_latent_mse: Option<f64>,
}

/// JSON has no NaN and no infinity: they are written as `null`, and come back as NaN.
fn nan_if_null<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    Ok(Option::<f64>::deserialize(deserializer)?.unwrap_or(f64::NAN))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_a_time_without_latent_errors_are_read_and_written_as_they_were() {
        let old = r#"{"clip":"a@0","wrist_lpips":0.5,"wrist_psnr":20.0,"wrist_ssim":0.7,"trans_l2_norm":0.4,"trans_l2_m":0.05,"rot_deg":12.0,"ceiling_lpips":0.1,"ceiling_psnr":27.0}"#;
        let mut metrics: ClipMetrics = serde_json::from_str(old).expect("read");
        assert_eq!(metrics.wrist_latent_mse, None);
        assert_eq!(serde_json::to_string(&metrics).expect("written"), old);
        (metrics.wrist_latent_mse, metrics.rot_deg) = (Some(0.25), f64::NAN);
        let line = serde_json::to_string(&metrics).expect("written");
        let read: ClipMetrics = serde_json::from_str(&line).expect("read");
        assert!(read.wrist_latent_mse == Some(0.25) && read.rot_deg.is_nan(), "{line}");
    }
}
