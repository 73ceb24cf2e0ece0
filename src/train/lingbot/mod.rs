//! LingBot-VA's part of the training loop: whole episodes, packed; chunks predicted from clean history.

pub mod batches;
pub mod flow;
mod store;
mod validation;

pub use store::EpisodeStore;
pub use validation::{ChunkId, measured_chunks};

use self::batches::{Batch, build, places};
use self::flow::Schedules;
use self::validation::Validator;
use super::engine::{Engine, MicroStep, Part};
use super::loader::Loader;
use super::profile::{MicroStepProfile, milliseconds};
use super::task::{Done, GoOn, Point, StepParts, Task, scalar, unbound};
use crate::Result;
use crate::config::LingbotRecipe;
use crate::data::episodes::EpisodeId;
use crate::data::{Progress, sha256_hex};
use crate::model::{LingbotModel, Parameters, TrunkShape, lingbot_parameter_specs};
use crate::runlog::PackingStep;
use crate::weights::{self, Provenance};
use candle_core::Tensor;
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

/// What a run on published latents is told.
pub const UNDECODED: &str =
    "the Wan2.2 VAE cannot be run by this version: validation measures latents, not pictures, and there is no verdict";

/// One run of this family.
pub(super) struct LingbotTask {
    recipe: LingbotRecipe,
    store: Arc<EpisodeStore>,
    /// Chunks measured at a validation point.
    measured: Vec<ChunkId>,
    model: Option<LingbotModel>,
    validator: Option<Validator>,
    /// Started at the first step of the attempt.
    loader: Option<Loader<Batch>>,
    /// Lengths of the sequences of this attempt.
    shapes: BTreeSet<usize>,
}

impl LingbotTask {
    pub fn new(recipe: &LingbotRecipe, store: EpisodeStore) -> Result<Self> {
        batches::admit(&store.set, recipe)?;
        let measured = measured_chunks(&store.set, recipe)?;
        let (recipe, store) = (recipe.clone(), Arc::new(store));
        Ok(Self { recipe, store, measured, model: None, validator: None, loader: None, shapes: BTreeSet::new() })
    }

    fn episode(&self, sample: usize) -> EpisodeId {
        let held_out = self.store.set.validation();
        if sample < held_out.len() { held_out[sample] } else { self.store.set.train()[sample - held_out.len()] }
    }

    fn started_loader(&mut self, step: u64) -> Result<&mut Loader<Batch>> {
        match self.loader {
            Some(ref mut loader) => Ok(loader),
            None => {
                let (store, recipe) = (Arc::clone(&self.store), self.recipe.clone());
                let schedules = Schedules::new(&recipe.flow);
                let places = places(&store, &recipe, step);
                let build = move |place: Result<_>| build(&store, &recipe, &schedules, place?);
                Ok(self.loader.insert(Loader::start(places, build)?))
            }
        }
    }
}

impl Task for LingbotTask {
    fn initialise(&self, progress: Progress<'_>) -> Result<(Parameters, Option<Provenance>)> {
        let model = &self.recipe.model;
        let specs = lingbot_parameter_specs(model);
        let (parameters, provenance) =
            weights::start(&self.recipe.weights, &specs, model, self.recipe.train.seed, progress)?;
        Ok((parameters, Some(provenance)))
    }

    fn restore(&self, weights: BTreeMap<String, Tensor>) -> Result<Parameters> {
        Parameters::from_tensors(&lingbot_parameter_specs(&self.recipe.model), weights)
    }

    fn identity(&self, progress: Progress<'_>) -> Result<Map<String, Value>> {
        let set = &self.store.set;
        let names = |list: &[EpisodeId]| list.iter().map(|id| format!("{id}\n")).collect::<String>();
        let chunks: String = self.measured.iter().map(|chunk| format!("{chunk}\n")).collect();
        Ok(Map::from_iter([
            ("data".to_owned(), set.identity(progress)?.into()),
            ("training_episodes".to_owned(), sha256_hex(names(set.train()).as_bytes()).into()),
            ("validation_chunks".to_owned(), sha256_hex(chunks.as_bytes()).into()),
            ("codec".to_owned(), self.store.codec.as_ref().map_or("none", |codec| codec.hash()).into()),
            ("text".to_owned(), set.text().hash().into()),
            ("lpips".to_owned(), json!(self.validation_pictures()?)),
        ]))
    }

    fn samples(&self) -> usize {
        self.store.set.validation().len() + self.store.set.train().len()
    }

    fn is_cached(&self, sample: usize) -> Result<bool> {
        self.store.is_cached(self.episode(sample))
    }

    fn cache(&self, sample: usize) -> Result<()> {
        self.store.load(self.episode(sample)).map(|_| ())
    }

    fn bind(&mut self, parameters: &Parameters) -> Result<()> {
        self.model = Some(LingbotModel::new(&self.recipe.model, parameters)?);
        Ok(())
    }

    fn prepare_validation(&mut self, progress: &mut dyn FnMut(u64, u64) -> Result<()>) -> Result<()> {
        self.validator = Some(Validator::new(&self.store, &self.recipe, &self.measured, progress)?);
        Ok(())
    }

    fn first_samples(&self, micro_steps: usize) -> Result<Vec<usize>> {
        let mut samples = Vec::new();
        for place in places(&self.store, &self.recipe, 1).take(micro_steps) {
            let episodes = place?.micro_batch.episodes;
            samples.extend(episodes.iter().map(|planned| self.store.set.validation().len() + planned.episode));
        }
        Ok(samples)
    }

    fn trunk(&self) -> TrunkShape {
        LingbotModel::shape(&self.recipe.model)
    }

    fn gradients(
        &mut self,
        engine: &mut Engine,
        step: u64,
        interrupted: &dyn Fn() -> bool,
        done: Done<'_>,
    ) -> Result<Option<StepParts>> {
        let mut parts = StepParts { loss_proprio: f64::NAN, ..StepParts::default() };
        let mut left = None;
        while left != Some(0) {
            if interrupted() {
                return Ok(None);
            }
            let waited = Instant::now();
            let Batch { place, input, targets, shares, text_rows, text_padding } =
                self.started_loader(step)?.next_batch()?;
            let data_ms = milliseconds(waited.elapsed());
            parts.data_ms += data_ms;
            left = Some(left.unwrap_or(place.of) - 1);
            let model = self.model.as_ref().ok_or_else(unbound)?;
            let tokens = place.micro_batch.tokens;
            self.shapes.insert(tokens);
            let valid: usize = place.micro_batch.episodes.iter().map(|episode| episode.valid_frames).sum();
            let frame = batches::frame_tokens(&self.store.set, &self.recipe.model);
            let real = crate::pack::length::trunk_tokens(valid, frame);
            parts.tokens += tokens as u64;
            parts.text_rows += text_rows as u64;
            parts.padding += (tokens - real + text_padding) as u64;

            let loss = |output: &Vec<_>| flow::losses(output, &targets, &shares);
            // Shares already make the sum over micro-batches the mean over the step.
            let MicroStep { losses, timing, device } =
                engine.micro_step(model, &input, Part { weight: 1.0, alone: place.of == 1 }, loss)?;
            parts.add_times(device.as_ref());
            done(MicroStepProfile {
                step,
                micro_step: place.of - left.unwrap_or(0),
                micro_steps: place.of,
                tokens: tokens as u64,
                samples: place.micro_batch.episodes.len(),
                visible_pairs: place.micro_batch.visible_pairs(frame),
                data_ms,
                forward_ms: milliseconds(timing.forward),
                backward_ms: milliseconds(timing.backward),
                update_ms: None,
                memory: engine.memory()?,
            })?;
            parts.loss += scalar(&losses.total)?;
            parts.loss_video += scalar(&losses.video)?;
            parts.loss_action += scalar(&losses.action)?;
            parts.packing = Some(PackingStep {
                micro_steps: place.of as u64,
                distinct_shapes: self.shapes.len() as u64,
                frame_padding: place.waste.frame_padding,
                alignment_padding: place.waste.alignment_padding,
                rank_imbalance: place.waste.imbalance,
            });
        }
        Ok(Some(parts))
    }

    fn measure(&mut self, step: u64, strips: &Path, go_on: GoOn<'_>) -> Result<Option<Point>> {
        let (Some(model), Some(validator)) = (&self.model, &self.validator) else { return Err(unbound()) };
        validator.measure(&self.store, model, &self.recipe, step, strips, go_on)
    }
}

impl LingbotTask {
    /// Identity of the metric on the wrist view's pictures.
    fn validation_pictures(&self) -> Result<crate::eval::lpips::LpipsIdentity> {
        let set = &self.store.set;
        let region = set.region(set.wrist_view());
        let (height, width) = region.map_or((0, 0), |region| (region.height, region.width));
        let stride = crate::codec::SPACE_STRIDE;
        Ok(crate::eval::Lpips::new()?.identity(height * stride, width * stride))
    }
}
