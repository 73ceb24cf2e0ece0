//! What the training loop asks of a model family: its samples, its model, its batches, its validation.
//!
//! The loop in [`worker`](super::worker) is written once; whatever differs between families stands behind this trait.

use super::engine::Engine;
use super::gradients::DeviceTimes;
use super::profile::{MicroStepProfile, milliseconds};
use crate::data::Progress;
use crate::model::{Parameters, TrunkShape};
use crate::runlog::{ClipMetrics, PackingStep, StepTimes, ValidationEvent};
use crate::weights::Provenance;
use crate::{Error, Result};
use candle_core::Tensor;
use serde_json::{Map, Value};
use std::path::Path;

/// Asked between two pieces of work; `false` ends it. (done, total) say how far it has come.
pub(super) type GoOn<'a> = &'a mut dyn FnMut(u64, u64) -> Result<bool>;

/// Hears of a micro-step that is done.
pub(super) type Done<'a> = &'a mut dyn FnMut(MicroStepProfile) -> Result<()>;

/// One family's part of a run. Opened before the model exists; [`Task::bind`] comes before steps and measurements.
pub(super) trait Task: Sync {
    /// Weights of step 0 in f32, and where they come from if the family can start from files.
    fn initialise(&self, progress: Progress<'_>) -> Result<(Parameters, Option<Provenance>)>;

    /// The parameters of a checkpoint, whose names and shapes must be those that the recipe asks for.
    fn restore(&self, weights: std::collections::BTreeMap<String, Tensor>) -> Result<Parameters>;

    /// What a later attempt must share with this run, beside what all families share.
    fn identity(&self, progress: Progress<'_>) -> Result<Map<String, Value>>;

    /// Samples whose latents may have to be encoded, the held-out ones first.
    fn samples(&self) -> usize;

    fn is_cached(&self, sample: usize) -> Result<bool>;

    /// Encodes a sample and stores its latents.
    fn cache(&self, sample: usize) -> Result<()>;

    /// Builds the model over these variables; later updates of them are seen.
    fn bind(&mut self, parameters: &Parameters) -> Result<()>;

    /// Reads the truth of the held-out samples.
    fn prepare_validation(&mut self, progress: &mut dyn FnMut(u64, u64) -> Result<()>) -> Result<()>;

    /// Samples of the first `micro_steps` micro-steps of the run, as [`Task::cache`] numbers them; one may come twice.
    fn first_samples(&self, micro_steps: usize) -> Result<Vec<usize>>;

    /// What the trunk of the model is.
    fn trunk(&self) -> TrunkShape;

    /// Runs the micro-steps of optimizer step `step` (the first is 1), telling `done` of each; their gradients gather in
    /// the engine. `None` if `interrupted`, which is asked before each.
    fn gradients(
        &mut self,
        engine: &mut Engine,
        step: u64,
        interrupted: &dyn Fn() -> bool,
        done: Done<'_>,
    ) -> Result<Option<StepParts>>;

    /// Measures the model on the held-out samples, leaving strips in the folder. `None` if it was told not to go on.
    fn measure(&mut self, step: u64, strips: &Path, go_on: GoOn<'_>) -> Result<Option<Point>>;
}

/// What the micro-steps of one optimizer step gave.
#[derive(Debug, Default)]
pub(super) struct StepParts {
    /// Means over the step; NaN for a part that the family lacks.
    pub loss: f64,
    pub loss_video: f64,
    pub loss_action: f64,
    pub loss_proprio: f64,
    /// Waiting for data.
    pub data_ms: f64,
    /// Tokens through the trunk, and text rows beside it.
    pub tokens: u64,
    pub text_rows: u64,
    /// How many of both are padding.
    pub padding: u64,
    pub packing: Option<PackingStep>,
    /// By the device's clock, if it has one.
    pub times: Option<StepTimes>,
    /// FLOP of the passes, and what the device could have done in their time.
    pub flop: [f64; 2],
}

impl StepParts {
    /// Adds a pass's time on its device.
    pub fn add_times(&mut self, device: Option<&DeviceTimes>) {
        let Some(device) = device else { return };
        let times = self.times.get_or_insert_default();
        let passes = [device.front + device.front_backward, device.trunk_forward + device.trunk_backward, device.back];
        let [front, trunk, back] = passes.map(milliseconds);
        times.front_ms += front;
        times.trunk_ms += trunk;
        times.back_ms += back;
        self.flop[0] += device.flop;
        self.flop[1] += device.peak.unwrap_or(f64::NAN) * (front + trunk + back) / 1e3;
        let mfu = self.flop[0] / self.flop[1];
        times.mfu = mfu.is_finite().then_some(mfu);
    }
}

/// A finished validation point.
pub(super) struct Point {
    pub clips: Vec<ClipMetrics>,
    pub mean: ValidationEvent,
}

/// A scalar tensor's value.
pub(super) fn scalar(tensor: &Tensor) -> Result<f64> {
    Ok(tensor.to_dtype(candle_core::DType::F64)?.to_scalar()?)
}

/// The model is built before it is used; anything else is a slip of the loop.
pub(super) fn unbound() -> Error {
    Error::crash("the model was used before it was built")
}
