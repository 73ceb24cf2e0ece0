//! `verify golden`: recompute a golden file on the reference path and compare everything in it.
//!
//! A golden file is one training step of the public reference code in f32: weights, inputs, draws, outputs, losses and
//! every gradient. Sizes come from the file alone. Tolerances are those published with the files; they sit a few times
//! above what two independent f32 programs differ by, and far below what any known mistake causes.

use super::flow::{CleanBatch, Level, Losses, Noise, losses, noised};
use super::gradients::forward_backward;
use crate::config::{GeometryConfig, ModelConfig};
use crate::model::{Parameters, XwamModel, parameter_specs};
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
        Some("xwam") => verify_xwam(&file),
        None if !file.metadata.get("cfg").is_some_and(|cfg| cfg.contains("num_attention_heads")) => {
            Err(Error::data("golden_broken", "the file's metadata names no model family: it is no golden file")
                .at(path))
        }
        family => Err(Error::refused(
            "unknown_family",
            format!("golden files of family {} are not supported", family.unwrap_or("LingBot-VA")),
        )
        .at(path)
        .hint("this version recomputes X-WAM files (metadata family = xwam)")),
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

    fn values(&self, name: &str) -> Result<Vec<f64>> {
        numbers(self.tensor(name)?)
    }
}

#[derive(serde::Deserialize)]
struct XwamConfig {
    dim: usize,
    num_heads: usize,
    num_layers: usize,
    ffn_dim: usize,
    freq_dim: usize,
    text_dim: usize,
    text_len: usize,
    in_dim: usize,
    out_dim: usize,
    patch_size: [usize; 3],
    num_views: usize,
    action_dim: usize,
    action_num: usize,
    proprio_dim: usize,
    eps: f64,
    num_modalities: usize,
}

#[derive(serde::Deserialize)]
struct LossWeights {
    video: f64,
    action: f64,
    proprio: f64,
}

fn verify_xwam(file: &GoldenFile) -> Result<Report> {
    let refuse = |what: String| Error::data("golden_broken", what).at(&file.path);
    let config: XwamConfig = file.meta("cfg")?;
    let weights: LossWeights = file.meta("loss_weights")?;
    let (shift, train_timesteps): (f64, usize) = (file.meta("time_shifting")?, file.meta("train_timesteps")?);
    if config.num_modalities != 1 {
        return Err(refuse("the file has a depth branch, which is not part of this model".into()));
    }
    if weights.video != 1.0 {
        return Err(refuse(format!("video loss weight {} where the objective fixes 1", weights.video)));
    }
    let model_config = ModelConfig {
        dim: config.dim,
        ffn_dim: config.ffn_dim,
        num_heads: config.num_heads,
        num_layers: config.num_layers,
        in_dim: config.in_dim,
        out_dim: config.out_dim,
        patch_size: config.patch_size,
        num_views: config.num_views,
        action_dim: config.action_dim,
        action_num: config.action_num,
        proprio_dim: config.proprio_dim,
        freq_dim: config.freq_dim,
        text_dim: config.text_dim,
        text_len: config.text_len,
        eps: config.eps,
        geometry: GeometryConfig {
            enabled: false,
            layers: vec![],
            token_dim: 1,
            grid: [1, 1],
            source_views: 1,
            seed: 0,
        },
    };
    if let Some(what) = bad_size(&model_config) {
        return Err(Error::data("golden_sizes", format!("the file's cfg describes no model: {what}")).at(&file.path));
    }
    let given: BTreeMap<String, Tensor> =
        file.tensors.iter().filter_map(|(name, t)| Some((name.strip_prefix("w.")?.to_owned(), t.clone()))).collect();
    let parameters = Parameters::from_tensors(&parameter_specs(&model_config), given).map_err(|error| Error {
        exit: crate::Exit::BadData,
        place: format!("{}, w.{}", file.path.display(), error.place),
        ..error
    })?;
    let model = XwamModel::new(&model_config, &parameters)?;

    let shape_error = |error: candle_core::Error| {
        refuse(format!("tensors do not fit each other: {}", crate::error::tensor_words(&error)))
    };
    let (t_video, t_action) = (f32s(file, "in.t_video")?, f32s(file, "in.t_action")?);
    let (u_video, u_action) = (f32s(file, "in.u_video")?, f32s(file, "in.u_action")?);
    let clean = f32s(file, "in.clean_action")?;
    let input = |name: &str| file.tensor(&format!("in.{name}")).cloned();
    let samples = input("latent")?.dims().first().copied().unwrap_or(0);
    let draws = [t_video.len(), t_action.len(), u_video.len(), u_action.len(), clean.len()];
    if samples == 0 || draws.iter().any(|count| *count != samples) {
        return Err(refuse(format!("{samples} samples, but {draws:?} draws of levels")));
    }
    let levels: Vec<Level> = (0..samples)
        .map(|b| Level { t_video: t_video[b], t_action: t_action[b], clean_action: clean[b] != 0.0 })
        .collect();
    let batch = CleanBatch {
        latent: input("latent")?,
        action: input("action")?,
        action_mask: input("action_mask")?,
        proprio: input("proprio")?,
        proprio_mask: input("proprio_mask")?,
        text: input("text")?,
        geometry: None,
    };
    let noise =
        Noise { latent: input("latent_noise")?, action: input("action_noise")?, proprio: input("proprio_noise")? };
    let (model_input, targets) = noised(&batch, &noise, &levels, train_timesteps).map_err(shape_error)?;

    let mut comparisons = Comparisons { file, list: Vec::new() };
    let shifted = |u: &[f32]| u.iter().map(|&u| super::flow::shifted(u, shift as f32) as f64).collect::<Vec<_>>();
    // In clean-action mode the action level is 0 whatever u was drawn.
    let t_of_action: Vec<f64> = shifted(&u_action)
        .into_iter()
        .zip(&levels)
        .map(|(t, level)| if level.clean_action { 0.0 } else { t })
        .collect();
    const INPUT: f64 = 5e-7;
    comparisons.values("in.t_video", &shifted(&u_video), INPUT)?;
    comparisons.values("in.t_action", &t_of_action, INPUT)?;
    comparisons.values("in.timesteps_video", &model_input.t_video.concat(), INPUT)?;
    comparisons.values("in.timesteps_action", &model_input.t_action.concat(), INPUT)?;
    comparisons.values("in.timesteps_proprio", &model_input.t_proprio.concat(), INPUT)?;
    comparisons.tensor("in.noisy_latent", &model_input.latent, INPUT)?;
    comparisons.tensor("in.noisy_action", &model_input.action, INPUT)?;
    comparisons.tensor("in.noisy_proprio", &model_input.proprio, INPUT)?;
    comparisons.tensor("target.video", &targets.video, INPUT)?;
    comparisons.tensor("target.action", &targets.action, INPUT)?;
    comparisons.tensor("target.proprio", &targets.proprio, INPUT)?;

    let loss =
        |output: &_| -> candle_core::Result<Losses> { losses(output, &targets, weights.action, weights.proprio) };
    let (output, losses, gradients) =
        forward_backward(&model, &parameters, &model_input, false, loss).map_err(shape_error)?;
    comparisons.tensor("out.video_velocity", &output.video, 5e-6)?;
    comparisons.tensor("out.action_velocity", &output.action, 5e-6)?;
    comparisons.tensor("out.proprio_velocity", &output.proprio, 5e-6)?;
    comparisons.tensor("loss.video", &losses.video, 1e-6)?;
    comparisons.tensor("loss.action", &losses.action, 1e-6)?;
    comparisons.tensor("loss.proprio", &losses.proprio, 1e-6)?;
    comparisons.tensor("loss.total", &losses.total, 1e-6)?;
    comparisons.gradients(&gradients, 2e-5, 1e-6)?;
    Ok(Report {
        file: file.path.clone(),
        family: "xwam".into(),
        parameters: parameters.count(),
        comparisons: comparisons.list,
    })
}

/// What is wrong with a file's sizes, if anything is. The recipe's rules about the codec and the robot do not hold for
/// these small models, but what shapes and tables are computed from must be computable.
fn bad_size(config: &ModelConfig) -> Option<String> {
    // Larger than any model that is recomputed on a CPU, small enough that no product of sizes overflows.
    const LARGEST: usize = 1 << 16;
    let [_, patch_height, patch_width] = config.patch_size;
    let sizes = [
        ("dim", config.dim),
        ("ffn_dim", config.ffn_dim),
        ("num_heads", config.num_heads),
        ("num_layers", config.num_layers),
        ("in_dim", config.in_dim),
        ("out_dim", config.out_dim),
        ("patch_size", patch_height),
        ("patch_size", patch_width),
        ("num_views", config.num_views),
        ("action_dim", config.action_dim),
        ("action_num", config.action_num),
        ("proprio_dim", config.proprio_dim),
        ("freq_dim", config.freq_dim),
        ("text_dim", config.text_dim),
        ("text_len", config.text_len),
    ];
    if let Some((name, size)) = sizes.into_iter().find(|(_, size)| !(1..=LARGEST).contains(size)) {
        return Some(format!("{name} {size} is not from 1 to {LARGEST}"));
    }
    let head = config.dim / config.num_heads;
    // Rotary positions turn pairs, and each of the three axes needs one.
    if !config.dim.is_multiple_of(config.num_heads) || head < 6 || !head.is_multiple_of(2) {
        return Some(format!("dim {} is not {} heads of an even size from 6", config.dim, config.num_heads));
    }
    if config.patch_size[0] != 1 {
        return Some(format!("patch_size spans {} latent frames, not 1", config.patch_size[0]));
    }
    if config.out_dim != config.in_dim {
        return Some(format!("out_dim {} is not in_dim {}", config.out_dim, config.in_dim));
    }
    if !config.freq_dim.is_multiple_of(2) {
        return Some(format!("freq_dim {} is odd", config.freq_dim));
    }
    if !(config.eps > 0.0 && config.eps.is_finite()) {
        return Some(format!("eps {} is not above 0", config.eps));
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
    fn gradients(&mut self, ours: &BTreeMap<String, Tensor>, tolerance: f64, norm_tolerance: f64) -> Result<()> {
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
            let key = format!("grad.{name}");
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
            self.push(&format!("grad.{name} (not in the file)"), f64::INFINITY, tolerance);
        }
        let (ours, theirs) = (square_ours.sqrt(), square_theirs.sqrt());
        self.push("norm.global_gradient", (ours - theirs).abs() / theirs, norm_tolerance);
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
