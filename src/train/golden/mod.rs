//! `verify golden`: recompute a golden file on the reference path and compare everything in it.
//!
//! A golden file is one training step of the public reference code in f32: weights, inputs, draws, outputs, losses and
//! every gradient. Sizes come from the file alone. Tolerances are those published with the files; they sit a few times
//! above what two independent f32 programs differ by, and far below what any known mistake causes.

mod lingbot;
mod xwam;

use crate::model::{ParameterSpec, Parameters};
use crate::{Error, Result};
use candle_core::{DType, Device, Tensor};
use serde::Serialize;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// One compared tensor.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Comparison {
    pub name: String,
    /// max |a - b| / max |b|, for gradients / max(max |b|, 1e-3 of the file's largest gradient).
    pub error: f64,
    pub tolerance: f64,
    pub passed: bool,
}

/// All comparisons of one file.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    pub file: PathBuf,
    pub family: String,
    pub parameters: usize,
    pub comparisons: Vec<Comparison>,
}

impl Report {
    pub fn passed(&self) -> bool {
        self.comparisons.iter().all(|comparison| comparison.passed)
    }

    /// Groups with their largest error, then every failure, as lines for a terminal.
    pub fn to_text(&self) -> String {
        let mut lines = vec![format!(
            "{}: {} ({}, {} weights, {} comparisons)",
            self.file.display(),
            if self.passed() { "PASS" } else { "FAIL" },
            self.family,
            self.parameters,
            self.comparisons.len()
        )];
        let mut groups: Vec<(&str, Vec<&Comparison>)> = Vec::new();
        for comparison in &self.comparisons {
            let group = comparison.name.split('.').next().unwrap_or_default();
            match groups.iter_mut().find(|(name, _)| *name == group) {
                Some((_, members)) => members.push(comparison),
                None => groups.push((group, vec![comparison])),
            }
        }
        for (group, members) in groups {
            let ratio = |c: &&&Comparison| if c.error.is_nan() { f64::INFINITY } else { c.error / c.tolerance };
            let Some(worst) = members.iter().max_by(|a, b| ratio(a).total_cmp(&ratio(b))) else { continue };
            lines.push(format!(
                "  {group:<8} {:>4} compared, largest error {:.2e} (accept {:.0e}) at {}",
                members.len(),
                worst.error,
                worst.tolerance,
                worst.name
            ));
        }
        for failure in self.comparisons.iter().filter(|comparison| !comparison.passed) {
            lines.push(format!(
                "  FAIL {}: error {:.3e}, accept {:.0e}",
                failure.name, failure.error, failure.tolerance
            ));
        }
        lines.join("\n")
    }
}

/// Recomputes one golden file. An unreadable or incomplete file is an error; a difference is a failed comparison.
pub fn verify(path: &Path) -> Result<Report> {
    let file = GoldenFile::read(path)?;
    match file.metadata.get("family").map(String::as_str) {
        Some("xwam") => xwam::verify(&file),
        // LingBot-VA's files name no family; their cfg is the public config.json's.
        Some("lingbot") => lingbot::verify(&file),
        None if file.metadata.get("cfg").is_some_and(|cfg| cfg.contains("num_attention_heads")) => {
            lingbot::verify(&file)
        }
        None => {
            Err(Error::data("golden_broken", "the file's metadata names no model family: it is no golden file")
                .at(path))
        }
        Some(family) => {
            Err(Error::refused("unknown_family", format!("golden files of family {family} are not supported"))
                .at(path)
                .hint("families are xwam and lingbot"))
        }
    }
}

struct GoldenFile {
    path: PathBuf,
    metadata: BTreeMap<String, String>,
    tensors: BTreeMap<String, Tensor>,
}

impl GoldenFile {
    fn read(path: &Path) -> Result<Self> {
        let bytes = std::fs::read(path)
            .map_err(|error| Error::data("file_missing", format!("cannot read the golden file: {error}")).at(path))?;
        let broken = |error: &dyn std::fmt::Display| {
            Error::data("golden_broken", format!("not a safetensors golden file: {error}"))
                .at(path)
                .hint("copy the file again")
        };
        let (_, header) = safetensors::SafeTensors::read_metadata(&bytes).map_err(|error| broken(&error))?;
        let metadata = header.metadata().clone().unwrap_or_default().into_iter().collect();
        let tensors = candle_core::safetensors::load_buffer(&bytes, &Device::Cpu).map_err(|error| broken(&error))?;
        Ok(Self { path: path.to_owned(), metadata, tensors: tensors.into_iter().collect() })
    }

    fn tensor(&self, name: &str) -> Result<&Tensor> {
        self.tensors
            .get(name)
            .ok_or_else(|| Error::data("golden_incomplete", format!("tensor {name} is missing")).at(&self.path))
    }

    fn meta<T: serde::de::DeserializeOwned>(&self, name: &str) -> Result<T> {
        let text = self
            .metadata
            .get(name)
            .ok_or_else(|| Error::data("golden_incomplete", format!("metadata {name} is missing")).at(&self.path))?;
        serde_json::from_str(text).map_err(|error| {
            Error::data("golden_broken", format!("metadata {name} is not understood: {error}")).at(&self.path)
        })
    }

    /// The weights of the file as the parameters that its cfg asks for.
    fn parameters(&self, specs: &[ParameterSpec]) -> Result<Parameters> {
        let weights = self.tensors.iter().filter_map(|(name, tensor)| Some((name.strip_prefix("w.")?, tensor)));
        let given = weights.map(|(name, tensor)| (name.to_owned(), tensor.clone())).collect();
        Parameters::from_tensors(specs, given).map_err(|error| Error {
            exit: crate::Exit::BadData,
            place: format!("{}, w.{}", self.path.display(), error.place),
            ..error
        })
    }

    /// The file's own fault.
    fn refuse(&self, what: String) -> Error {
        Error::data("golden_broken", what).at(&self.path)
    }

    /// candle's word on tensors of the file that do not fit each other.
    fn shape_error(&self, error: candle_core::Error) -> Error {
        self.refuse(format!("tensors do not fit each other: {}", crate::error::tensor_words(&error)))
    }

    fn values(&self, name: &str) -> Result<Vec<f64>> {
        numbers(self.tensor(name)?)
    }
}

/// Accepted errors that both families share.
const LOSS: f64 = 1e-6;
const GRADIENT_NORM: f64 = 1e-6;

/// Larger than any size of a model that is recomputed on a CPU, small enough that no product of sizes overflows.
const LARGEST: usize = 1 << 16;

/// What is wrong with the sizes of a trunk, if anything is. The recipe's rules about the codec and the robot do not hold
/// for these small models, but what shapes and tables are computed from must be computable.
fn bad_trunk(
    sizes: &[(&str, usize)],
    (dim, heads): (usize, usize),
    freq_dim: usize,
    patch_size: [usize; 3],
    eps: f64,
) -> Option<String> {
    if let Some((name, size)) = sizes.iter().find(|(_, size)| !(1..=LARGEST).contains(size)) {
        return Some(format!("{name} {size} is not from 1 to {LARGEST}"));
    }
    let head = dim / heads.max(1);
    // Rotary positions turn pairs, and each of the three axes needs one.
    if heads == 0 || !dim.is_multiple_of(heads) || head < 6 || !head.is_multiple_of(2) {
        return Some(format!("dim {dim} is not {heads} heads of an even size from 6"));
    }
    if patch_size[0] != 1 {
        return Some(format!("patch_size spans {} latent frames, not 1", patch_size[0]));
    }
    if !freq_dim.is_multiple_of(2) {
        return Some(format!("freq_dim {freq_dim} is odd"));
    }
    if !(eps > 0.0 && eps.is_finite()) {
        return Some(format!("eps {eps} is not above 0"));
    }
    None
}

struct Comparisons<'a> {
    file: &'a GoldenFile,
    list: Vec<Comparison>,
}

impl Comparisons<'_> {
    fn push(&mut self, name: &str, error: f64, tolerance: f64) {
        // A NaN error fails: no comparison with it is true.
        self.list.push(Comparison { name: name.to_owned(), error, tolerance, passed: error <= tolerance });
    }

    fn values(&mut self, name: &str, ours: &[f64], tolerance: f64) -> Result<()> {
        let theirs = self.file.values(name)?;
        let largest = theirs.iter().fold(0.0, |m: f64, v| m.max(v.abs()));
        self.push(name, relative(ours, &theirs, largest), tolerance);
        Ok(())
    }

    fn tensor(&mut self, name: &str, ours: &Tensor, tolerance: f64) -> Result<()> {
        self.values(name, &numbers(ours)?, tolerance)
    }

    /// Every gradient of the file, none missing and none extra, and the global norm.
    fn gradients(&mut self, ours: &BTreeMap<String, Tensor>, tolerance: impl Fn(&str) -> f64) -> Result<()> {
        let mut theirs = BTreeMap::new();
        for name in self.file.tensors.keys() {
            if let Some(parameter) = name.strip_prefix("grad.") {
                theirs.insert(parameter.to_owned(), self.file.values(name)?);
            }
        }
        if theirs.is_empty() {
            return Err(Error::data("golden_incomplete", "the file has no gradients").at(&self.file.path));
        }
        let peak = |values: &[f64]| values.iter().fold(0.0, |m: f64, v| m.max(v.abs()));
        let largest = theirs.values().map(|values| peak(values)).fold(0.0, f64::max);
        let (mut square_ours, mut square_theirs) = (0.0, 0.0);
        for (name, theirs) in &theirs {
            let (key, tolerance) = (format!("grad.{name}"), tolerance(name));
            square_theirs += theirs.iter().map(|v| v * v).sum::<f64>();
            let Some(ours) = ours.get(name) else {
                self.push(&key, f64::INFINITY, tolerance);
                continue;
            };
            let ours = numbers(ours)?;
            square_ours += ours.iter().map(|v| v * v).sum::<f64>();
            let scale = if peak(theirs) == 0.0 { 0.0 } else { peak(theirs).max(1e-3 * largest) };
            self.push(&key, relative(&ours, theirs, scale), tolerance);
        }
        for name in ours.keys().filter(|name| !theirs.contains_key(*name)) {
            self.push(&format!("grad.{name} (not in the file)"), f64::INFINITY, tolerance(name));
        }
        let (ours, theirs) = (square_ours.sqrt(), square_theirs.sqrt());
        self.push("norm.global_gradient", (ours - theirs).abs() / theirs, GRADIENT_NORM);
        Ok(())
    }
}

/// max |a - b| / scale; 0 / 0 is 0, and a size or finiteness mismatch is infinite.
fn relative(ours: &[f64], theirs: &[f64], scale: f64) -> f64 {
    if ours.len() != theirs.len() || ours.iter().chain(theirs).any(|v| !v.is_finite()) {
        return f64::INFINITY;
    }
    let difference = ours.iter().zip(theirs).fold(0.0, |m: f64, (a, b)| m.max((a - b).abs()));
    if difference == 0.0 { 0.0 } else { difference / scale }
}

fn numbers(tensor: &Tensor) -> Result<Vec<f64>> {
    Ok(tensor.flatten_all()?.to_dtype(DType::F64)?.to_vec1()?)
}

fn f32s(file: &GoldenFile, name: &str) -> Result<Vec<f32>> {
    Ok(file.tensor(name)?.flatten_all()?.to_dtype(DType::F32)?.to_vec1()?)
}
