//! Writing LingBot-VA's published layout: `transformer/` with weights, their index if there is more than one file, and
//! `config.json`.
//!
//! The bytes are a function of the parameters alone. Tensors are converted and written piece by piece, so the only copy
//! in memory is the model itself.

use super::dtype::WeightDtype;
use super::model_config::{CONFIG, to_text};
use super::shards::{INDEX, SINGLE, TRANSFORMER, in_file};
use super::{CHUNK, with_values};
use crate::config::LingbotModelConfig;
use crate::files::{create_folder, io_error, sync_folder, write_file};
use crate::model::{Parameters, lingbot_parameter_specs};
use crate::{Error, Result};
use candle_core::Tensor;
use safetensors::tensor::{Metadata, TensorInfo};
use serde_json::{Map, Value, json};
use std::collections::HashMap;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

/// Largest shard that diffusers writes unless told otherwise.
pub const SHARD_BYTES: u64 = 10_000_000_000;

/// Writes `folder/transformer/`, whole or not at all, and returns its path. A file holds at most `shard_bytes` of
/// numbers, or one tensor that is larger.
///
/// # Errors
/// `weights_exist` if there is one already; `weights_mismatch` if the parameters are not those of `config`;
/// `tensor_not_finite` for a value that `dtype` does not hold; the disk errors of [`crate::files`] (exit 74).
pub fn write_official(
    folder: &Path,
    parameters: &Parameters,
    config: &LingbotModelConfig,
    dtype: WeightDtype,
    shard_bytes: u64,
) -> Result<PathBuf> {
    let mut given = parameters.iter().map(|(name, variable)| (name.to_owned(), variable.dims().to_vec()));
    let mut specs = lingbot_parameter_specs(config);
    specs.sort_by(|a, b| a.name.cmp(&b.name));
    if !specs.into_iter().map(|spec| (spec.name, spec.shape)).eq(given.by_ref()) {
        return Err(Error::refused("weights_mismatch", "the parameters are not those of the configuration"));
    }
    let target = folder.join(TRANSFORMER);
    if target.symlink_metadata().is_ok() {
        return Err(Error::refused("weights_exist", "there are weights already")
            .at(target)
            .hint("name another folder"));
    }
    create_folder(folder)?;
    let staged = folder.join(format!(".tmp-{TRANSFORMER}-{}", std::process::id()));
    let written = stage(&staged, parameters, config, dtype, shard_bytes).and_then(|()| {
        std::fs::rename(&staged, &target).map_err(|error| io_error("cannot publish the weights", &target, &error))
    });
    if let Err(error) = written {
        let _ = std::fs::remove_dir_all(&staged);
        return Err(error);
    }
    sync_folder(folder)?;
    Ok(target)
}

fn stage(
    staged: &Path,
    parameters: &Parameters,
    config: &LingbotModelConfig,
    dtype: WeightDtype,
    shard_bytes: u64,
) -> Result<()> {
    create_folder(staged)?;
    let shards = divide(parameters, dtype, shard_bytes);
    let name = |shard: usize| match shards.len() {
        1 => SINGLE.to_owned(),
        count => format!("diffusion_pytorch_model-{:05}-of-{count:05}.safetensors", shard + 1),
    };
    for (shard, tensors) in shards.iter().enumerate() {
        write_shard(&staged.join(name(shard)), tensors, dtype)?;
    }
    if shards.len() > 1 {
        // Shards are filled in name order, so the map comes out sorted, as diffusers writes it.
        let map: Map<String, Value> = shards
            .iter()
            .enumerate()
            .flat_map(|(shard, tensors)| tensors.iter().map(move |(tensor, _)| (shard, *tensor)))
            .map(|(shard, tensor)| (tensor.to_owned(), json!(name(shard))))
            .collect();
        let index = json!({"metadata": {"total_size": parameters.count() * dtype.bytes()}, "weight_map": map});
        let text = serde_json::to_string_pretty(&index).map_err(|error| Error::crash(format!("index: {error}")))?;
        write_file(&staged.join(INDEX), (text + "\n").as_bytes())?;
    }
    write_file(&staged.join(CONFIG), to_text(config)?.as_bytes())?;
    sync_folder(staged)
}

/// Tensors in name order, as many in a shard as it holds.
fn divide(parameters: &Parameters, dtype: WeightDtype, shard_bytes: u64) -> Vec<Vec<(&str, &Tensor)>> {
    let mut shards: Vec<Vec<(&str, &Tensor)>> = vec![Vec::new()];
    let mut filled = 0;
    for (name, variable) in parameters.iter() {
        let bytes = (variable.elem_count() * dtype.bytes()) as u64;
        if filled > 0 && filled + bytes > shard_bytes {
            shards.push(Vec::new());
            filled = 0;
        }
        filled += bytes;
        if let Some(shard) = shards.last_mut() {
            shard.push((name, variable.as_tensor()));
        }
    }
    shards
}

/// One safetensors file: length of the header, header, numbers.
fn write_shard(path: &Path, tensors: &[(&str, &Tensor)], dtype: WeightDtype) -> Result<()> {
    let mut end = 0;
    let infos = tensors.iter().map(|(name, tensor)| {
        let start = end;
        end += tensor.elem_count() * dtype.bytes();
        let info = TensorInfo { dtype: dtype.stored(), shape: tensor.dims().to_vec(), data_offsets: (start, end) };
        ((*name).to_owned(), info)
    });
    // PyTorch's loaders look for this entry. One entry: the order of several would change from run to run.
    let about = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    let crash = |error: &dyn std::fmt::Display| Error::crash(format!("cannot serialise {}: {error}", path.display()));
    let metadata = Metadata::new(Some(about), infos.collect()).map_err(|error| crash(&error))?;
    let mut header = serde_json::to_vec(&metadata).map_err(|error| crash(&error))?;
    header.resize(header.len().next_multiple_of(8), b' ');

    let failed = |error: &std::io::Error| io_error("cannot write the weights", path, error);
    let file = File::create(path).map_err(|error| failed(&error))?;
    let mut writer = BufWriter::new(&file);
    let mut put = |bytes: &[u8]| writer.write_all(bytes).map_err(|error| failed(&error));
    put(&(header.len() as u64).to_le_bytes())?;
    put(&header)?;
    let mut bytes = Vec::with_capacity(dtype.bytes() * CHUNK);
    for (name, tensor) in tensors {
        with_values(tensor, |values| {
            values.chunks(CHUNK).try_for_each(|chunk| {
                bytes.clear();
                if !dtype.encode(chunk, &mut bytes) {
                    let what = format!("a weight has a value that is not finite in {dtype}");
                    return Err(Error::refused("tensor_not_finite", what).in_place(in_file(name, path)));
                }
                put(&bytes)
            })
        })??;
    }
    writer.flush().and_then(|()| file.sync_all()).map_err(|error| failed(&error))
}
