//! What a checkpoint holds: weights under diffusers' layout, optimizer state, position.
//!
//! A checkpoint is taken first, as a copy of the state that training goes on changing, and written later by whoever
//! holds the copy. The bytes are a function of the training state alone (no times, no host), so two equal runs write
//! equal files.

use crate::files::{create_folder, sync_folder};
use crate::model::Parameters;
use crate::runlog::{Checkpoint, ManifestFile, SealedFile, Work};
use crate::{Error, Exit, Result};
use candle_core::{DType, Device, Tensor};
use safetensors::View;
use safetensors::tensor::{Metadata, TensorInfo};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

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

    /// Writes the state into a checkpoint folder that is being staged, durably; `pause` hears how long each piece took.
    ///
    /// # Errors
    /// `state_nonfinite` (exit 70) with the first tensor that is not finite: such a checkpoint would push out the last
    /// good one. Of the disk: exit 74.
    pub fn write(&self, folder: &Path, pause: &dyn Fn(Duration)) -> Result<Vec<ManifestFile>> {
        create_folder(&folder.join(FOLDER))?;
        let state =
            serde_json::to_vec_pretty(&self.state).map_err(|error| Error::crash(format!("trainer state: {error}")))?;
        let mut trainer = SealedFile::create(&folder.join(TRAINER), pause)?;
        trainer.write(&state)?;
        let files = vec![
            write_tensors(folder, WEIGHTS, &self.weights, pause)?,
            write_tensors(folder, OPTIMIZER, &self.moments, pause)?,
            trainer.seal(TRAINER)?,
        ];
        sync_folder(&folder.join(FOLDER))?;
        sync_folder(folder)?;
        Ok(files)
    }
}

/// The optimizer's tensors by name: `first.<name>`, `second.<name>`, and `master.<name>` of weights that are no f32.
pub type Moments = BTreeMap<String, Tensor>;

/// Reads a complete checkpoint back: parameters, the optimizer's tensors and position. `bind` turns its weights into the
/// model's parameters. Where it holds weights alone there are no such tensors, and the position says that moments begin.
pub fn read(
    checkpoint: &Checkpoint,
    bind: impl FnOnce(BTreeMap<String, Tensor>) -> Result<Parameters>,
) -> Result<(Parameters, Option<Moments>, TrainerState)> {
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
fn write_tensors(
    folder: &Path,
    name: &str,
    tensors: &BTreeMap<String, Tensor>,
    pause: &dyn Fn(Duration),
) -> Result<ManifestFile> {
    let path = &folder.join(name);
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

    let mut file = SealedFile::create(path, pause)?;
    file.write(&(header.len() as u64).to_le_bytes())?;
    file.write(&header)?;
    for (name, tensor) in ordered {
        let looking = Instant::now();
        let bytes = View::data(tensor);
        if !is_finite(tensor.dtype(), &bytes) {
            return Err(Error::new(Exit::Crash, "state_nonfinite", format!("{name} is not finite"))
                .hint("nothing was saved, the checkpoint before is intact; lower train.lr or look at the data"));
        }
        file.worked(looking.elapsed());
        file.write(&bytes)?;
    }
    file.seal(name)
}

/// Are all numbers of these bytes finite? An exponent of ones is none; integers always are.
fn is_finite(dtype: DType, bytes: &[u8]) -> bool {
    let wide = |number: &[u8; 4]| u32::from_le_bytes(*number) & 0x7f80_0000 != 0x7f80_0000;
    let narrow = |number: &[u8; 2]| u16::from_le_bytes(*number) & 0x7f80 != 0x7f80;
    match dtype {
        DType::F32 => bytes.as_chunks().0.iter().all(wide),
        DType::BF16 => bytes.as_chunks().0.iter().all(narrow),
        _ => true,
    }
}

fn load(path: &Path) -> Result<BTreeMap<String, Tensor>> {
    let tensors = candle_core::safetensors::load(path, &Device::Cpu).map_err(|error| unreadable(path, &error))?;
    Ok(tensors.into_iter().collect())
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
        let files = snapshot.write(folder.path(), &|_| ()).expect("written");
        for file in &files {
            assert_eq!(
                crate::runlog::sha256_of(&folder.path().join(&file.name)),
                Ok((file.bytes, file.sha256.clone()))
            );
        }
        let read = |name: &str| std::fs::read(folder.path().join(name)).expect("read");
        assert!(read(WEIGHTS) == before, "as the library writes them, and untouched by a later update");
        assert!(read(OPTIMIZER) == safetensors::serialize(&snapshot.moments, None).expect("bytes"));
        let written = (read(WEIGHTS).len() + read(OPTIMIZER).len() + read(TRAINER).len()) as u64;
        let expected = crate::train::forecast::checkpoint_bytes_of(&specs, DType::F32);
        assert!((written..written + 6000).contains(&expected), "{expected} expected, {written} written");

        for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for dtype in [DType::F32, DType::BF16] {
                let broken = Tensor::new(&[1f32, f32::MAX / 2.0, value], &Device::Cpu).expect("a tensor");
                let broken = BTreeMap::from([("x".to_owned(), broken.to_dtype(dtype).expect("cast"))]);
                let error = write_tensors(folder.path(), "broken", &broken, &|_| ()).expect_err("refused");
                assert_eq!((error.code, error.what.as_str()), ("state_nonfinite", "x is not finite"));
            }
        }
        let mixed = BTreeMap::from([
            ("a".to_owned(), Tensor::new(&[1u8, 2, 3], &Device::Cpu).expect("a tensor")),
            ("b".to_owned(), Tensor::new(&[1f64, 2.0], &Device::Cpu).expect("a tensor")),
        ]);
        write_tensors(folder.path(), "mixed", &mixed, &|_| ()).expect("written");
        assert!(read("mixed") == safetensors::serialize(&mixed, None).expect("bytes"));
    }
}
