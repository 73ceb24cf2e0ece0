//! The safetensors files behind a path, and one tensor at a time out of them.
//!
//! Only headers are read at first: 5B parameters are judged in milliseconds, before any of their 10 or 20 GB is moved.

use super::CHUNK;
use super::dtype::WeightDtype;
use crate::{Error, Result};
use safetensors::Dtype;
use safetensors::tensor::Metadata;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Name of an unsharded file, as diffusers writes it.
pub(super) const SINGLE: &str = "diffusion_pytorch_model.safetensors";
/// Name of the list that says which shard holds a tensor.
pub(super) const INDEX: &str = "diffusion_pytorch_model.safetensors.index.json";
/// Folder of the transformer inside a model's repository.
pub(super) const TRANSFORMER: &str = "transformer";

/// Bytes of a header at most, by the format's reference.
const LONGEST_HEADER: u64 = 100_000_000;

/// All tensors of a file, or of the shards of an index, each of which stands in exactly one of them.
#[derive(Debug)]
pub(super) struct WeightFiles {
    /// Where `config.json` would lie.
    pub folder: PathBuf,
    pub shards: Vec<Shard>,
    pub tensors: BTreeMap<String, Stored>,
}

#[derive(Debug)]
pub(super) struct Shard {
    pub path: PathBuf,
    pub bytes: u64,
    file: File,
}

/// Where a tensor lies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Stored {
    pub shard: usize,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    /// First byte, from the start of the file.
    offset: u64,
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl WeightFiles {
    /// Opens a safetensors file, a folder with one or with an index, or the model's folder above `transformer/`.
    pub fn open(path: &Path) -> Result<Self> {
        if path.is_file() {
            let folder = path.parent().unwrap_or(Path::new("")).to_owned();
            return Self::single(path, folder);
        }
        for folder in [path.to_owned(), path.join(TRANSFORMER)] {
            let (single, index) = (folder.join(SINGLE), folder.join(INDEX));
            match (single.is_file(), index.is_file()) {
                (true, true) => {
                    let what = format!("the folder holds {SINGLE} and an index of shards");
                    return Err(Error::data("weights_ambiguous", what)
                        .at(&folder)
                        .hint("name the file itself, or remove what is not meant"));
                }
                (true, false) => return Self::single(&single, folder),
                (false, true) => return Self::sharded(&index, folder),
                (false, false) => {}
            }
        }
        let what = if path.exists() { "no weights lie in this folder" } else { "the weights are missing" };
        Err(Error::data("weights_missing", what).at(path).hint(format!("{SINGLE} or {INDEX} is looked for")))
    }

    fn single(path: &Path, folder: PathBuf) -> Result<Self> {
        let mut files = Self { folder, shards: Vec::new(), tensors: BTreeMap::new() };
        files.add(path)?;
        Ok(files)
    }

    fn sharded(index: &Path, folder: PathBuf) -> Result<Self> {
        let text = std::fs::read(index).map_err(|error| not_openable(index, &error))?;
        let broken = |why: &dyn std::fmt::Display| {
            Error::data("index_broken", format!("the index of the shards cannot be read: {why}")).at(index)
        };
        let Index { weight_map } = serde_json::from_slice(&text).map_err(|error| broken(&error))?;
        let mut names: Vec<&String> = weight_map.values().collect();
        names.sort();
        names.dedup();
        let mut files = Self { folder, shards: Vec::new(), tensors: BTreeMap::new() };
        for name in names {
            if name.contains(['/', '\\']) {
                return Err(broken(&format!("{name} is no name of a file beside it")));
            }
            let path = files.folder.join(name);
            if !path.exists() {
                let holds = weight_map.iter().filter(|(_, shard)| *shard == name).count();
                let what = format!("a shard that the index names is missing, with {holds} tensors");
                return Err(Error::data("shard_missing", what).at(path));
            }
            files.add(&path)?;
        }
        for (tensor, shard) in &weight_map {
            let path = files.folder.join(shard);
            if files.tensors.get(tensor).is_none_or(|stored| files.shards[stored.shard].path != path) {
                let what = "the index names a tensor that its shard lacks";
                return Err(Error::data("tensor_not_in_shard", what).in_place(in_file(tensor, &path)));
            }
        }
        match files.tensors.iter().find(|(tensor, _)| !weight_map.contains_key(*tensor)) {
            None => Ok(files),
            Some((tensor, stored)) => Err(Error::data("tensor_not_in_index", "the index lacks a tensor of this shard")
                .in_place(in_file(tensor, files.path_of(stored)))),
        }
    }

    /// Reads a file's header.
    fn add(&mut self, path: &Path) -> Result<()> {
        let corrupt = |why: &dyn std::fmt::Display| {
            Error::data("weights_corrupt", format!("not a whole safetensors file: {why}")).at(path)
        };
        let failed = |error: &std::io::Error| match error.kind() {
            ErrorKind::UnexpectedEof => corrupt(&"it ends within its header"),
            _ => not_openable(path, error),
        };
        let mut file = File::open(path).map_err(|error| failed(&error))?;
        let bytes = file.metadata().map_err(|error| failed(&error))?.len();
        let mut length = [0; 8];
        file.read_exact(&mut length).map_err(|error| failed(&error))?;
        if &length == b"version " {
            return Err(Error::data("not_openable", "file is a Git LFS pointer, not the file itself")
                .at(path)
                .hint("run `git lfs pull`"));
        }
        let start = u64::from_le_bytes(length).saturating_add(8);
        if start > bytes.min(LONGEST_HEADER) {
            return Err(corrupt(&"its header is longer than a header can be"));
        }
        let mut header = vec![0; (start - 8) as usize];
        file.read_exact(&mut header).map_err(|error| failed(&error))?;
        let header: Metadata = serde_json::from_slice(&header).map_err(|error| corrupt(&error))?;
        let announced = start + header.data_len() as u64;
        if announced != bytes {
            return Err(corrupt(&format!("{bytes} bytes where the header announces {announced}")));
        }
        for (name, info) in header.tensors() {
            let offset = start + info.data_offsets.0 as u64;
            let stored = Stored { shard: self.shards.len(), dtype: info.dtype, shape: info.shape.clone(), offset };
            if let Some(earlier) = self.tensors.insert(name.clone(), stored) {
                let what = format!("a tensor stands in two shards, also in {}", self.path_of(&earlier).display());
                return Err(Error::data("tensor_twice", what).in_place(in_file(&name, path)));
            }
        }
        self.shards.push(Shard { path: path.to_owned(), bytes, file });
        Ok(())
    }

    /// The file that holds the tensor.
    pub fn path_of(&self, stored: &Stored) -> &Path {
        &self.shards[stored.shard].path
    }

    /// The numbers of a tensor, as f32, row-major.
    pub fn read(&self, name: &str, stored: &Stored) -> Result<Vec<f32>> {
        let Shard { path, file, .. } = &self.shards[stored.shard];
        let Some(dtype) = WeightDtype::of(stored.dtype) else {
            let what = format!("a weight is stored as {:?}; F32, BF16 and F16 can be read", stored.dtype);
            return Err(Error::data("tensor_dtype", what).in_place(in_file(name, path)));
        };
        let count: usize = stored.shape.iter().product();
        let mut values = Vec::with_capacity(count);
        let mut bytes = vec![0; dtype.bytes() * CHUNK.min(count)];
        while values.len() < count {
            let done = values.len();
            let part = &mut bytes[..dtype.bytes() * CHUNK.min(count - done)];
            let offset = stored.offset + (dtype.bytes() * done) as u64;
            file.read_exact_at(part, offset).map_err(|error| not_openable(path, &error))?;
            dtype.decode(part, &mut values);
            if let Some(at) = values[done..].iter().position(|value| !value.is_finite()) {
                let what = format!("value {} of a weight is {}", done + at, values[done + at]);
                return Err(Error::data("tensor_not_finite", what).in_place(in_file(name, path)));
            }
        }
        Ok(values)
    }

    /// `bf16 and f32 of FOLDER`.
    pub fn describe(&self) -> String {
        let mut dtypes: Vec<String> = self.tensors.values().map(|stored| dtype_name(stored.dtype)).collect();
        dtypes.sort();
        dtypes.dedup();
        format!("{} of {}", dtypes.join(" and "), self.folder.display())
    }
}

/// `bf16`.
pub(super) fn dtype_name(dtype: Dtype) -> String {
    format!("{dtype:?}").to_lowercase()
}

/// The place of an error: a tensor and its file.
pub(super) fn in_file(tensor: &str, path: &Path) -> String {
    format!("{tensor} in {}", path.display())
}

fn not_openable(path: &Path, error: &std::io::Error) -> Error {
    Error::data("not_openable", format!("the weights cannot be read: {error}")).at(path)
}
