//! What a checkpoint holds: weights under diffusers' layout, optimizer state, position.
//!
//! A checkpoint is taken first, as a copy of the state that training goes on changing, and written later by whoever
//! holds the copy. The bytes are a function of the training state alone (no times, no host), so two equal runs write
//! equal files.

use crate::files::{create_folder, io_error};
use crate::model::Parameters;
use crate::runlog::{Checkpoint, Work};
use crate::{Error, Result};
use candle_core::{DType, Device, Tensor};
use safetensors::View;
use safetensors::tensor::{Metadata, TensorInfo};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::path::Path;

const FOLDER: &str = "transformer";
const WEIGHTS: &str = "transformer/diffusion_pytorch_model.safetensors";
const OPTIMIZER: &str = "optimizer.safetensors";
const TRAINER: &str = "trainer.json";

/// `trainer.json`: where the run stands. Everything else follows from the seed and the step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TrainerState {
    /// Completed optimizer steps.
    pub step: u64,
    /// Clips or episodes seen, repeats counted.
    pub samples_seen: u64,
    /// Step after which the moments began, at zero: 0 but for a run that went on from weights alone.
    pub moments_from: u64,
    #[serde(flatten)]
    pub work: Work,
}

/// The whole state of training at one step, in host memory that nothing else writes to.
#[derive(Debug)]
pub struct Snapshot {
    weights: BTreeMap<String, Tensor>,
    moments: BTreeMap<String, Tensor>,
    state: TrainerState,
}

impl Snapshot {
    /// Copies the weights and takes over the optimizer's tensors, which must be copies already.
    pub fn take(parameters: &Parameters, moments: BTreeMap<String, Tensor>, state: TrainerState) -> Result<Self> {
        // An update writes into the storage that a plain clone would share.
        let copy = |tensor: &Tensor| tensor.copy()?.to_device(&Device::Cpu);
        let weights = parameters
            .iter()
            .map(|(name, variable)| Ok((name.to_owned(), copy(variable.as_tensor())?)))
            .collect::<Result<_>>()?;
        Ok(Self { weights, moments, state })
    }

    /// Writes the state into a checkpoint folder that is being staged.
    pub fn write(&self, folder: &Path) -> Result<()> {
        create_folder(&folder.join(FOLDER))?;
        write_tensors(&folder.join(WEIGHTS), &self.weights)?;
        write_tensors(&folder.join(OPTIMIZER), &self.moments)?;
        let path = folder.join(TRAINER);
        let text =
            serde_json::to_vec_pretty(&self.state).map_err(|error| Error::crash(format!("trainer state: {error}")))?;
        std::fs::write(&path, text).map_err(|error| cannot_write(&path, &error))
    }
}

/// Bytes of a checkpoint of this model, known before there is one; at most some KB more than it will have.
pub fn expected_bytes(parameters: &Parameters) -> u64 {
    // An entry of a header: name, dtype, shape and offsets, about 100 bytes beside the name.
    let header = |name: &str| name.len() + 128;
    let weights: usize =
        parameters.iter().map(|(name, v)| v.elem_count() * v.dtype().size_in_bytes() + header(name)).sum();
    let moments: usize = parameters
        .trained()
        .map(|(name, v)| {
            let parts = if v.dtype() == DType::F32 { 2 } else { 3 };
            parts * (v.elem_count() * DType::F32.size_in_bytes() + header(name))
        })
        .sum();
    (weights + moments + 4096) as u64
}

/// Reads a complete checkpoint back: parameters, the optimizer's tensors and position. `bind` turns its weights into the
/// model's parameters. Where it holds weights alone there are no such tensors: moments begin at zero, and the position
/// says so.
pub fn read(
    checkpoint: &Checkpoint,
    bind: impl FnOnce(BTreeMap<String, Tensor>) -> Result<Parameters>,
) -> Result<(Parameters, Option<BTreeMap<String, Tensor>>, TrainerState)> {
    let parameters = bind(load(&checkpoint.path.join(WEIGHTS))?)?;
    let path = checkpoint.path.join(TRAINER);
    let text = std::fs::read(&path).map_err(|error| unreadable(&path, &error))?;
    let mut state: TrainerState = serde_json::from_slice(&text).map_err(|error| unreadable(&path, &error))?;
    if state.step != checkpoint.step {
        let what = format!("the checkpoint is of step {}, its folder says {}", state.step, checkpoint.step);
        return Err(Error::refused("checkpoint_mismatch", what).at(&path));
    }
    // By its manifest: a file that is listed and lost makes the checkpoint incomplete, and never gets here.
    let optimizer = if checkpoint.manifest.files.iter().any(|file| file.name == OPTIMIZER) {
        Some(load(&checkpoint.path.join(OPTIMIZER))?)
    } else {
        state.moments_from = state.step;
        None
    };
    Ok((parameters, optimizer, state))
}

/// One safetensors file, written tensor by tensor: in memory whole it would be the state a third time.
fn write_tensors(path: &Path, tensors: &BTreeMap<String, Tensor>) -> Result<()> {
    let crash = |error: &dyn std::fmt::Display| Error::crash(format!("cannot serialise {}: {error}", path.display()));
    // Wide types first, then by name, as the library does it: every tensor is aligned.
    let mut ordered: Vec<(&String, &Tensor)> = tensors.iter().collect();
    ordered.sort_by_key(|(_, tensor)| std::cmp::Reverse(View::dtype(*tensor)));
    let mut end = 0;
    let infos = ordered.iter().map(|(name, tensor)| {
        let start = end;
        end += View::data_len(*tensor);
        let info =
            TensorInfo { dtype: View::dtype(*tensor), shape: tensor.dims().to_vec(), data_offsets: (start, end) };
        ((*name).clone(), info)
    });
    let metadata = Metadata::new(None, infos.collect()).map_err(|error| crash(&error))?;
    let mut header = serde_json::to_vec(&metadata).map_err(|error| crash(&error))?;
    header.resize(header.len().next_multiple_of(8), b' ');

    let mut file = File::create(path).map_err(|error| cannot_write(path, &error))?;
    let mut put = |bytes: &[u8]| file.write_all(bytes).map_err(|error| cannot_write(path, &error));
    put(&(header.len() as u64).to_le_bytes())?;
    put(&header)?;
    ordered.into_iter().try_for_each(|(_, tensor)| put(&View::data(tensor)))
}

fn load(path: &Path) -> Result<BTreeMap<String, Tensor>> {
    let tensors = candle_core::safetensors::load(path, &Device::Cpu).map_err(|error| unreadable(path, &error))?;
    Ok(tensors.into_iter().collect())
}

fn cannot_write(path: &Path, error: &std::io::Error) -> Error {
    io_error("cannot write the checkpoint", path, error)
}

fn unreadable(path: &Path, error: &dyn std::fmt::Display) -> Error {
    Error::data("checkpoint_corrupt", format!("cannot read the checkpoint: {error}")).at(path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{Initialiser, ParameterSpec};
    use crate::train::optimizer::AdamW;

    #[test]
    fn files_are_those_of_the_library_and_of_the_expected_size() {
        let folder = tempfile::tempdir().expect("a folder");
        let spec = |name: &str, shape: &[usize], trained| ParameterSpec {
            name: name.to_owned(),
            shape: shape.to_vec(),
            initialiser: Initialiser::Normal(0.02),
            seed: None,
            trained,
        };
        let specs = [spec("b.weight", &[40, 50], true), spec("a.weight", &[3], true), spec("unused", &[7, 2], false)];
        let tensors = specs.iter().map(|spec| {
            let tensor = Tensor::from_vec(spec.initial_values(1), spec.shape.as_slice(), &Device::Cpu);
            (spec.name.clone(), tensor.expect("a tensor"))
        });
        let parameters = Parameters::from_tensors(&specs, tensors.collect()).expect("parameters");
        let optimizer = AdamW::new(&parameters).expect("an optimizer");
        let state = TrainerState { step: 1, samples_seen: 2, ..TrainerState::default() };
        let moments = optimizer.to_tensors(&parameters).expect("moments");
        let snapshot = Snapshot::take(&parameters, moments, state).expect("a snapshot");
        let before = safetensors::serialize(&snapshot.weights, None).expect("bytes");
        for (_, variable) in parameters.iter() {
            variable.set(&variable.zeros_like().expect("zeros")).expect("set");
        }
        snapshot.write(folder.path()).expect("written");
        let read = |name: &str| std::fs::read(folder.path().join(name)).expect("read");
        assert!(read(WEIGHTS) == before, "as the library writes them, and untouched by a later update");
        assert!(read(OPTIMIZER) == safetensors::serialize(&snapshot.moments, None).expect("bytes"));
        let written = (read(WEIGHTS).len() + read(OPTIMIZER).len() + read(TRAINER).len()) as u64;
        let expected = expected_bytes(&parameters);
        assert!((written..written + 6000).contains(&expected), "{expected} expected, {written} written");

        let mixed = BTreeMap::from([
            ("a".to_owned(), Tensor::new(&[1u8, 2, 3], &Device::Cpu).expect("a tensor")),
            ("b".to_owned(), Tensor::new(&[1f64, 2.0], &Device::Cpu).expect("a tensor")),
        ]);
        write_tensors(&folder.path().join("mixed"), &mixed).expect("written");
        assert!(read("mixed") == safetensors::serialize(&mixed, None).expect("bytes"));
    }
}
