//! What a checkpoint holds: weights under diffusers' layout, optimizer state, position.
//!
//! The bytes are a function of the training state alone (no times, no host), so two equal runs write equal files.

use super::optimizer::AdamW;
use crate::config::TrainConfig;
use crate::model::Parameters;
use crate::runlog::Checkpoint;
use crate::{Error, Result};
use candle_core::{Device, Tensor};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;

const WEIGHTS: &str = "transformer/diffusion_pytorch_model.safetensors";
const OPTIMIZER: &str = "optimizer.safetensors";
const TRAINER: &str = "trainer.json";

/// `trainer.json`: where the run stands. Everything else follows from the seed and the step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TrainerState {
    /// Completed optimizer steps.
    pub step: u64,
    /// Clips seen, repeats counted.
    pub samples_seen: u64,
    pub seed: u64,
}

/// Writes the state into a checkpoint folder that is being staged.
pub fn write(folder: &Path, parameters: &Parameters, optimizer: &AdamW, state: &TrainerState) -> Result<()> {
    let weights: BTreeMap<String, Tensor> =
        parameters.iter().map(|(name, variable)| (name.to_owned(), variable.as_tensor().clone())).collect();
    let transformer = folder.join("transformer");
    std::fs::create_dir_all(&transformer)
        .map_err(|error| crate::files::io_error("cannot make the checkpoint folder", &transformer, &error))?;
    save(&folder.join(WEIGHTS), &weights)?;
    save(&folder.join(OPTIMIZER), &optimizer.to_tensors(parameters)?)?;
    let text = serde_json::to_vec_pretty(state).map_err(|error| Error::crash(format!("trainer state: {error}")))?;
    write_bytes(&folder.join(TRAINER), &text)
}

/// Reads a complete checkpoint back into parameters, optimizer and position. `bind` turns its tensors into the model's
/// parameters.
pub fn read(
    checkpoint: &Checkpoint,
    train: &TrainConfig,
    bind: impl FnOnce(BTreeMap<String, Tensor>) -> Result<Parameters>,
) -> Result<(Parameters, AdamW, TrainerState)> {
    let parameters = bind(load(&checkpoint.path.join(WEIGHTS))?)?;
    let optimizer = AdamW::from_tensors(&parameters, &load(&checkpoint.path.join(OPTIMIZER))?)?;
    let path = checkpoint.path.join(TRAINER);
    let text = std::fs::read(&path).map_err(|error| unreadable(&path, &error))?;
    let state: TrainerState = serde_json::from_slice(&text).map_err(|error| unreadable(&path, &error))?;
    if state.step != checkpoint.step || state.seed != train.seed {
        let what = format!("the checkpoint is of step {}, seed {}", state.step, state.seed);
        return Err(Error::refused("checkpoint_mismatch", what).at(&path));
    }
    Ok((parameters, optimizer, state))
}

fn save(path: &Path, tensors: &BTreeMap<String, Tensor>) -> Result<()> {
    let bytes = safetensors::serialize(tensors.iter(), None)
        .map_err(|error| Error::crash(format!("cannot serialise {}: {error}", path.display())))?;
    write_bytes(path, &bytes)
}

fn write_bytes(path: &Path, bytes: &[u8]) -> Result<()> {
    std::fs::write(path, bytes).map_err(|error| crate::files::io_error("cannot write the checkpoint", path, &error))
}

fn load(path: &Path) -> Result<BTreeMap<String, Tensor>> {
    let tensors = candle_core::safetensors::load(path, &Device::Cpu).map_err(|error| unreadable(path, &error))?;
    Ok(tensors.into_iter().collect())
}

fn unreadable(path: &Path, error: &dyn std::fmt::Display) -> Error {
    Error::data("checkpoint_corrupt", format!("cannot read the checkpoint: {error}")).at(path)
}
