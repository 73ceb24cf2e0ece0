//! X-WAM's part of the training loop: clips, bidirectional attention, whole clips sampled from their first frame.

pub mod batches;
pub mod flow;
mod validation;

use self::batches::{Batch, ClipStore};
use self::validation::Validator;
use super::engine::{Engine, MicroStep, Part};
use super::loader::Loader;
use super::measure::spread;
use super::profile::{MicroStepProfile, milliseconds};
use super::task::{Done, GoOn, Point, StepParts, Task, scalar, unbound};
use crate::Result;
use crate::config::XwamRecipe;
use crate::data::{ClipId, Progress, sha256_hex};
use crate::model::{Parameters, Transformer, TrunkShape, XwamModel, parameter_specs};
use crate::weights::Provenance;
use candle_core::{Device, Tensor};
use serde_json::{Map, Value};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

/// One run of this family.
pub(super) struct XwamTask {
    recipe: XwamRecipe,
    store: Arc<ClipStore>,
    /// Clips measured at a validation point.
    measured: Vec<ClipId>,
    model: Option<XwamModel>,
    validator: Option<Validator>,
    /// Started at the first step of the attempt.
    loader: Option<Loader<Batch>>,
}

impl XwamTask {
    pub fn new(recipe: &XwamRecipe, store: ClipStore) -> Self {
        let measured = spread(store.dataset.validation(), recipe.validation.clips);
        let store = Arc::new(store);
        Self { recipe: recipe.clone(), store, measured, model: None, validator: None, loader: None }
    }

    fn clip(&self, sample: usize) -> &ClipId {
        let held_out = self.measured.len();
        if sample < held_out { &self.measured[sample] } else { &self.store.dataset.train()[sample - held_out] }
    }
}

impl Task for XwamTask {
    fn initialise(&self, _: Progress<'_>) -> Result<(Parameters, Option<Provenance>)> {
        let specs = parameter_specs(&self.recipe.model);
        Ok((Parameters::initialise(&specs, self.recipe.train.seed, &Device::Cpu)?, None))
    }

    fn restore(&self, weights: BTreeMap<String, Tensor>) -> Result<Parameters> {
        Parameters::from_tensors(&parameter_specs(&self.recipe.model), weights)
    }

    fn identity(&self, progress: Progress<'_>) -> Result<Map<String, Value>> {
        let names = |list: &[ClipId]| list.iter().map(|clip| format!("{clip}\n")).collect::<String>();
        let (height, width) = self.store.dataset.picture_size();
        Ok(Map::from_iter([
            ("data".to_owned(), self.store.dataset.identity(progress)?.into()),
            ("training_clips".to_owned(), sha256_hex(names(self.store.dataset.train()).as_bytes()).into()),
            ("validation_clips".to_owned(), sha256_hex(names(&self.measured).as_bytes()).into()),
            ("codec".to_owned(), self.store.codec.hash().into()),
            ("text".to_owned(), self.store.text.hash().into()),
            ("lpips".to_owned(), serde_json::json!(crate::eval::Lpips::new()?.identity(height, width))),
        ]))
    }

    fn samples(&self) -> usize {
        self.measured.len() + self.store.dataset.train().len()
    }

    fn is_cached(&self, sample: usize) -> Result<bool> {
        self.store.is_cached(self.clip(sample))
    }

    fn cache(&self, sample: usize) -> Result<()> {
        self.store.encoded(self.clip(sample)).map(|_| ())
    }

    fn bind(&mut self, parameters: &Parameters) -> Result<()> {
        self.model = Some(XwamModel::new(&self.recipe.model, parameters)?);
        Ok(())
    }

    fn prepare_validation(&mut self, progress: &mut dyn FnMut(u64, u64) -> Result<()>) -> Result<()> {
        self.validator = Some(Validator::new(&self.store, &self.measured, progress)?);
        Ok(())
    }

    fn first_samples(&self, micro_steps: usize) -> Result<Vec<usize>> {
        let (train, clips) = (&self.recipe.train, self.store.dataset.train());
        let slots = 0..(micro_steps * train.batch_size) as u64;
        let clips: BTreeSet<ClipId> = slots.map(|slot| batches::clip_of_slot(clips, train.seed, slot)).collect();
        let first = self.measured.len();
        Ok((first..self.samples()).filter(|&sample| clips.contains(self.clip(sample))).collect())
    }

    fn trunk(&self) -> TrunkShape {
        XwamModel::shape(&self.recipe.model)
    }

    fn gradients(
        &mut self,
        engine: &mut Engine,
        step: u64,
        interrupted: &dyn Fn() -> bool,
        done: Done<'_>,
    ) -> Result<Option<StepParts>> {
        let Self { recipe, store, model, loader, .. } = self;
        let model = model.as_ref().ok_or_else(unbound)?;
        let loader = match loader {
            Some(loader) => loader,
            None => {
                let (store, recipe) = (Arc::clone(store), recipe.clone());
                let (last, accumulate) = (recipe.train.steps, recipe.train.accumulate);
                let places = (step..=last).flat_map(move |step| (0..accumulate).map(move |micro| (step, micro)));
                let build = move |(step, micro)| batches::build(&store, &recipe, step, micro);
                loader.insert(Loader::start(places, build)?)
            }
        };
        let (train, flow) = (&recipe.train, &recipe.flow);
        let weight = 1.0 / train.accumulate as f64;
        let part = Part { weight, alone: train.accumulate == 1 };
        let mut parts = StepParts::default();
        for micro_step in 1..=train.accumulate {
            if interrupted() {
                return Ok(None);
            }
            let waited = Instant::now();
            let Batch { input, targets, padding_rows } = loader.next_batch()?;
            let data_ms = milliseconds(waited.elapsed());
            let sequence = model.layout(&input)?.tokens() as u64;
            let tokens = sequence * train.batch_size as u64;
            parts.data_ms += data_ms;
            parts.tokens += tokens;
            parts.text_rows += (recipe.model.text_len * train.batch_size) as u64;
            parts.padding += padding_rows as u64;
            let loss = |output: &_| flow::losses(output, &targets, flow.action_loss_weight, flow.proprio_loss_weight);
            let MicroStep { losses, timing, device } = engine.micro_step(model, &input, part, loss)?;
            parts.add_times(device.as_ref());
            done(MicroStepProfile {
                step,
                micro_step,
                micro_steps: train.accumulate,
                tokens,
                samples: train.batch_size,
                visible_pairs: tokens * sequence,
                data_ms,
                forward_ms: milliseconds(timing.forward),
                backward_ms: milliseconds(timing.backward),
                update_ms: None,
                memory: engine.memory()?,
            })?;
            parts.loss += weight * scalar(&losses.total)?;
            parts.loss_video += weight * scalar(&losses.video)?;
            parts.loss_action += weight * scalar(&losses.action)?;
            parts.loss_proprio += weight * losses.proprio.as_ref().map_or(Ok(f64::NAN), scalar)?;
        }
        Ok(Some(parts))
    }

    fn measure(&mut self, step: u64, strips: &Path, go_on: GoOn<'_>) -> Result<Option<Point>> {
        let (Some(model), Some(validator)) = (&self.model, &self.validator) else { return Err(unbound()) };
        validator.measure(&self.store, model, &self.recipe, step, strips, go_on)
    }
}
