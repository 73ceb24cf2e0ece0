//! What weight files hold, from their headers alone: layout, sizes, and every tensor that does not fit.

use super::fit::Fit;
use super::model_config::{self, lingbot_fields, wan_fields};
use super::shards::{WeightFiles, dtype_name};
use super::{official, wan22};
use crate::Result;
use crate::config::LingbotModelConfig;
use crate::model::lingbot_parameter_specs;
use serde::Serialize;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// Blocks of a model at most: a stray number in a name must not become millions of missing tensors.
const DEEPEST: usize = 1000;

/// Whose names the tensors have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Layout {
    /// LingBot-VA's published checkpoints: `weights.init: official`.
    LingbotVa,
    /// Wan2.2-TI2V's originals: `weights.init: wan22`.
    Wan22,
    Unknown,
}

/// What the files behind a path hold.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Inspection {
    pub files: Vec<FileSummary>,
    pub layout: Layout,
    /// Tensors by dtype.
    pub dtypes: BTreeMap<String, usize>,
    pub tensors: usize,
    pub parameters: u64,
    /// As the shapes tell them; absent if the layout is unknown.
    pub sizes: Option<Sizes>,
    /// Against a model of these sizes.
    pub fit: Option<Fit>,
    /// Fields of `config.json` that the tensors contradict; absent if there is no such file.
    pub config_differences: Option<Vec<String>>,
}

/// One file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FileSummary {
    pub path: PathBuf,
    pub bytes: u64,
    pub tensors: usize,
}

/// Sizes of a model, as in a recipe's `model`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Sizes {
    pub dim: usize,
    pub ffn_dim: usize,
    pub num_layers: usize,
    pub in_dim: usize,
    pub out_dim: usize,
    pub patch_size: [usize; 3],
    /// Absent from Wan2.2's.
    pub action_dim: Option<usize>,
    pub freq_dim: usize,
    pub text_dim: usize,
}

impl Inspection {
    /// Every tensor of the model is there in its shape, nothing else is, and `config.json` agrees.
    pub fn fits(&self) -> bool {
        self.fit.as_ref().is_some_and(Fit::is_exact) && self.config_differences.as_ref().is_none_or(Vec::is_empty)
    }
}

/// Looks at a file, a folder or a model's root. Errors: those of [`super::start`] that concern files.
pub fn inspect(path: &Path) -> Result<Inspection> {
    let files = WeightFiles::open(path)?;
    let config = model_config::read(&files.folder)?;
    let mut dtypes = BTreeMap::new();
    let mut held = vec![0; files.shards.len()];
    for stored in files.tensors.values() {
        *dtypes.entry(dtype_name(stored.dtype)).or_insert(0) += 1;
        held[stored.shard] += 1;
    }
    let count = |shape: &[usize]| shape.iter().map(|&size| size as u64).product::<u64>();
    let mut inspection = Inspection {
        files: files
            .shards
            .iter()
            .zip(held)
            .map(|(shard, tensors)| FileSummary { path: shard.path.clone(), bytes: shard.bytes, tensors })
            .collect(),
        layout: Layout::Unknown,
        dtypes,
        tensors: files.tensors.len(),
        parameters: files.tensors.values().map(|stored| count(&stored.shape)).sum(),
        sizes: None,
        fit: None,
        config_differences: None,
    };
    let stated_patch =
        config.as_ref().and_then(|config| serde_json::from_value(config.get("patch_size")?.clone()).ok());
    let Some((layout, sizes)) = recognise(&files, stated_patch) else { return Ok(inspection) };
    let model = sizes.model(config.as_ref());
    let specs = lingbot_parameter_specs(&model);
    let (fit, fields) = match layout {
        Layout::Wan22 => (Fit::of(&files, &wan22::wanted(&specs, &model), &[]), wan_fields(&model)),
        _ => (Fit::of(&files, &official::wanted(&specs), &official::OBSOLETE), lingbot_fields(&model)),
    };
    inspection.layout = layout;
    inspection.sizes = Some(sizes);
    inspection.fit = Some(fit);
    inspection.config_differences = config.map(|file| model_config::differences(&file, &fields, "the tensors"));
    Ok(inspection)
}

/// Layout, by the form of the patch embedding, and sizes.
fn recognise(files: &WeightFiles, stated_patch: Option<[usize; 3]>) -> Option<(Layout, Sizes)> {
    let shape = |name: &str| files.tensors.get(name).map(|stored| stored.shape.as_slice());
    let matrix = |name: &str| match shape(name) {
        Some(&[rows, columns]) => Some((rows, columns)),
        _ => None,
    };
    // A tensor that is not there says nothing of its size, and is listed as missing.
    let rows = |name: &str| matrix(name).map_or(1, |(rows, _)| rows);
    let columns = |name: &str| matrix(name).map_or(1, |(_, columns)| columns);
    let layer = |name: &String| name.strip_prefix("blocks.")?.split_once('.')?.0.parse().ok();
    let layers: BTreeSet<usize> = files.tensors.keys().filter_map(layer).filter(|&layer| layer < DEEPEST).collect();
    let num_layers = layers.last().map_or(0, |last| last + 1);
    let first = layers.first().copied().unwrap_or(0);
    if let Some((dim, inputs)) = matrix("patch_embedding_mlp.weight") {
        let patch_size = stated_patch.unwrap_or([1, 2, 2]);
        let cells = patch_size.iter().product::<usize>().max(1);
        let sizes = Sizes {
            dim,
            ffn_dim: rows(&format!("blocks.{first}.ffn.net.0.proj.weight")),
            num_layers,
            in_dim: inputs / cells,
            out_dim: rows("proj_out.weight") / cells,
            patch_size,
            action_dim: Some(columns("action_embedder.weight")),
            freq_dim: columns("condition_embedder.time_embedder.linear_1.weight"),
            text_dim: columns("condition_embedder.text_embedder.linear_1.weight"),
        };
        return Some((Layout::LingbotVa, sizes));
    }
    let Some(&[dim, in_dim, time, height, width]) = shape("patch_embedding.weight") else { return None };
    let sizes = Sizes {
        dim,
        ffn_dim: rows(&format!("blocks.{first}.ffn.0.weight")),
        num_layers,
        in_dim,
        out_dim: rows("head.head.weight") / (time * height * width).max(1),
        patch_size: [time, height, width],
        action_dim: None,
        freq_dim: columns("time_embedding.0.weight"),
        text_dim: columns("text_embedding.0.weight"),
    };
    Some((Layout::Wan22, sizes))
}

impl Sizes {
    /// A model of these sizes; what no shape shows is as `config.json` states it.
    fn model(&self, config: Option<&Value>) -> LingbotModelConfig {
        let stated = |key: &str| config.and_then(|config| config.get(key));
        let heads = stated("num_attention_heads").or(stated("num_heads")).and_then(Value::as_u64);
        LingbotModelConfig {
            dim: self.dim,
            ffn_dim: self.ffn_dim,
            num_heads: heads.map_or(1, |heads| heads as usize),
            num_layers: self.num_layers,
            in_dim: self.in_dim,
            out_dim: self.out_dim,
            patch_size: self.patch_size,
            action_dim: self.action_dim.unwrap_or(1),
            freq_dim: self.freq_dim,
            text_dim: self.text_dim,
            text_len: 1,
            eps: stated("eps").and_then(Value::as_f64).unwrap_or(0.0),
        }
    }
}
