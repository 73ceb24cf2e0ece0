//! Public weight files: LingBot-VA's published layout, read and written, and Wan2.2's originals as a start.
//!
//! Whoever trains starts from somebody else's file and hands a file on, so the layout is kept to the letter: what a
//! file holds is read whole or refused by name, and what is written is what the reference's loader expects. Files are
//! read tensor by tensor, never whole, since 5B parameters are 20 GB and a machine has to hold them once already.

mod dtype;
mod fit;
mod inspect;
mod model_config;
mod official;
mod shards;
mod wan22;
mod write;

pub use dtype::WeightDtype;
pub use fit::{Fit, OtherShape};
pub use inspect::{FileSummary, Inspection, Layout, Sizes, inspect};
pub use write::{SHARD_BYTES, write_official};

use crate::Result;
use crate::config::{LingbotModelConfig, WeightsConfig};
use crate::data::{Progress, sha256_hex};
use crate::model::{ParameterSpec, Parameters};
use candle_core::{DType, Device, Storage, Tensor};
use rayon::prelude::*;
use serde::Serialize;
use sha2::{Digest, Sha256};

/// Numbers converted at a time: 1 MiB of f32.
const CHUNK: usize = 1 << 18;

/// What a run's weights started from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Provenance {
    /// SHA-256 over name, shape and f32 value of every parameter. The same values give the same hash, whatever their
    /// file's dtype, path and division into shards: this belongs into a run's identity, the rest does not.
    pub hash: String,
    /// In words: `825 tensors (bf16) of /weights/wan, 14 drawn from seed 3`.
    pub description: String,
    /// Parameters that no file gave, in the order of the specs.
    pub drawn: Vec<String>,
}

/// The parameters at step 0, on the CPU in f32. `specs` are the model's, of the same `config`; `progress` counts tensors.
///
/// # Errors
/// Files: `weights_missing`, `weights_ambiguous`, `not_openable`, `weights_corrupt`, `index_broken`, `shard_missing`,
/// `tensor_not_in_shard`, `tensor_not_in_index`, `tensor_twice`, `tensor_dtype`, `tensor_not_finite`, `config_broken`.
/// Files of another model: `tensor_missing`, `tensor_shape`, `tensor_unexpected`, `config_differs`.
/// An error of `progress`.
pub fn start(
    weights: &WeightsConfig,
    specs: &[ParameterSpec],
    config: &LingbotModelConfig,
    seed: u64,
    progress: Progress<'_>,
) -> Result<(Parameters, Provenance)> {
    let (parameters, description, drawn) = match weights {
        WeightsConfig::Random => {
            let drawn = specs.iter().map(|spec| spec.name.clone()).collect();
            (Parameters::initialise(specs, seed, &Device::Cpu)?, format!("drawn from seed {seed}"), drawn)
        }
        WeightsConfig::Official { path } => {
            let (parameters, description) = official::read(path, specs, config, progress)?;
            (parameters, description, Vec::new())
        }
        WeightsConfig::Wan22 { path } => wan22::read(path, specs, config, seed, progress)?,
    };
    let provenance = Provenance { hash: fingerprint(&parameters)?, description, drawn };
    Ok((parameters, provenance))
}

/// See [`Provenance::hash`].
fn fingerprint(parameters: &Parameters) -> Result<String> {
    let parts: Vec<(&str, &Tensor)> = parameters.iter().map(|(name, variable)| (name, variable.as_tensor())).collect();
    let lines: Vec<String> = parts
        .par_iter()
        .map(|(name, tensor)| {
            let digest = with_values(tensor, |values| {
                let mut hash = Sha256::new();
                let mut bytes = Vec::with_capacity(4 * CHUNK.min(values.len()));
                for chunk in values.chunks(CHUNK) {
                    bytes.clear();
                    WeightDtype::F32.encode(chunk, &mut bytes);
                    hash.update(&bytes);
                }
                hash.finalize()
            })?;
            let digest: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
            Ok(format!("{name}\t{:?}\t{digest}\n", tensor.dims()))
        })
        .collect::<Result<_>>()?;
    Ok(sha256_hex(lines.concat().as_bytes()))
}

/// Lends the values of a tensor as f32, row-major; without a copy where it already is that, on the CPU.
fn with_values<T>(tensor: &Tensor, work: impl FnOnce(&[f32]) -> T) -> Result<T> {
    let tensor = tensor.to_device(&Device::Cpu)?.to_dtype(DType::F32)?.contiguous()?;
    let (storage, layout) = tensor.storage_and_layout();
    match (&*storage, layout.contiguous_offsets()) {
        (Storage::Cpu(storage), Some((start, end))) => Ok(work(&storage.as_slice::<f32>()?[start..end])),
        _ => Err(crate::Error::crash("a tensor on the CPU is not there")),
    }
}
