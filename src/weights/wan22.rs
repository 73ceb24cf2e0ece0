//! Wan2.2-TI2V-5B's original weights as a start: the trunk and the video's embedders and head are this model's.
//!
//! Names are those of Wan2.2's `WanModel`; the pairs are those by which diffusers converts that model. Actions have no
//! source there: their projections and their embedder keep the values drawn for them.

use super::fit::{Wanted, take};
use super::model_config::{self, wan_fields};
use super::shards::WeightFiles;
use crate::Result;
use crate::config::LingbotModelConfig;
use crate::data::Progress;
use crate::model::{ParameterSpec, Parameters};
use candle_core::{Device, Var};
use std::path::Path;

/// Starts of names outside the blocks: ours, Wan's.
const OUTSIDE: [(&str, &str); 8] = [
    ("patch_embedding_mlp.", "patch_embedding."),
    ("condition_embedder.time_embedder.linear_1.", "time_embedding.0."),
    ("condition_embedder.time_embedder.linear_2.", "time_embedding.2."),
    ("condition_embedder.time_proj.", "time_projection.1."),
    ("condition_embedder.text_embedder.linear_1.", "text_embedding.0."),
    ("condition_embedder.text_embedder.linear_2.", "text_embedding.2."),
    ("proj_out.", "head.head."),
    ("scale_shift_table", "head.modulation"),
];

/// Starts of names inside a block. Wan numbers its norms by their age and not by their place: its third is the second.
const INSIDE: [(&str, &str); 14] = [
    ("scale_shift_table", "modulation"),
    ("attn1.to_q.", "self_attn.q."),
    ("attn1.to_k.", "self_attn.k."),
    ("attn1.to_v.", "self_attn.v."),
    ("attn1.to_out.0.", "self_attn.o."),
    ("attn1.norm_", "self_attn.norm_"),
    ("attn2.to_q.", "cross_attn.q."),
    ("attn2.to_k.", "cross_attn.k."),
    ("attn2.to_v.", "cross_attn.v."),
    ("attn2.to_out.0.", "cross_attn.o."),
    ("attn2.norm_", "cross_attn.norm_"),
    ("norm2.", "norm3."),
    ("ffn.net.0.proj.", "ffn.0."),
    ("ffn.net.2.", "ffn.2."),
];

/// All parameters, what they were read from in words, and the names of those that were drawn.
pub(super) fn read(
    path: &Path,
    specs: &[ParameterSpec],
    config: &LingbotModelConfig,
    seed: u64,
    progress: Progress<'_>,
) -> Result<(Parameters, String, Vec<String>)> {
    let files = WeightFiles::open(path)?;
    model_config::check(&files.folder, &wan_fields(config))?;
    let mut tensors = take(&files, &wanted(specs, config), &[], progress)?;
    let taken = tensors.len();
    let mut drawn = Vec::new();
    for spec in specs.iter().filter(|spec| source_of(&spec.name).is_none()) {
        let variable = Var::from_vec(spec.initial_values(seed), spec.shape.as_slice(), &Device::Cpu)?;
        tensors.insert(spec.name.clone(), variable.into_inner());
        drawn.push(spec.name.clone());
    }
    let description = format!("{taken} tensors, {}; {} drawn from seed {seed}", files.describe(), drawn.len());
    Ok((Parameters::from_tensors(specs, tensors)?, description, drawn))
}

pub(super) fn wanted(specs: &[ParameterSpec], config: &LingbotModelConfig) -> Vec<Wanted> {
    let [time, height, width] = config.patch_size;
    let from = |spec: &ParameterSpec| {
        let source = source_of(&spec.name)?;
        // A convolution whose stride is its size is a Linear over a patch, its columns in the same order.
        let stored = match source.as_str() {
            "patch_embedding.weight" => vec![config.dim, config.in_dim, time, height, width],
            _ => spec.shape.clone(),
        };
        Some(Wanted { source, stored, parameter: spec.name.clone(), shape: spec.shape.clone() })
    };
    specs.iter().filter_map(from).collect()
}

/// Wan's name of our parameter; `None` for what it has not.
fn source_of(name: &str) -> Option<String> {
    let renamed = |name: &str, pairs: &[(&str, &str)]| {
        pairs.iter().find_map(|(ours, theirs)| name.strip_prefix(ours).map(|rest| format!("{theirs}{rest}")))
    };
    match name.strip_prefix("blocks.").and_then(|rest| rest.split_once('.')) {
        Some((layer, rest)) => renamed(rest, &INSIDE).map(|rest| format!("blocks.{layer}.{rest}")),
        None => renamed(name, &OUTSIDE),
    }
}
