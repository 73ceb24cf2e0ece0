//! LingBot-VA's published weights: every parameter under its own name.

use super::fit::{Wanted, take};
use super::model_config::{self, lingbot_fields};
use super::shards::WeightFiles;
use crate::Result;
use crate::config::LingbotModelConfig;
use crate::data::Progress;
use crate::model::{ParameterSpec, Parameters};
use std::path::Path;

/// The patch embedding as the convolution that it once was; published files still carry it beside the one in use.
pub(super) const OBSOLETE: [&str; 2] = ["patch_embedding.weight", "patch_embedding.bias"];

/// All parameters, and what they were read from, in words.
pub(super) fn read(
    path: &Path,
    specs: &[ParameterSpec],
    config: &LingbotModelConfig,
    progress: Progress<'_>,
) -> Result<(Parameters, String)> {
    let files = WeightFiles::open(path)?;
    model_config::check(&files.folder, &lingbot_fields(config))?;
    let tensors = take(&files, &wanted(specs), &OBSOLETE, progress)?;
    let description = format!("{} tensors, {}", tensors.len(), files.describe());
    Ok((Parameters::from_tensors(specs, tensors)?, description))
}

pub(super) fn wanted(specs: &[ParameterSpec]) -> Vec<Wanted> {
    let same = |spec: &ParameterSpec| Wanted {
        source: spec.name.clone(),
        stored: spec.shape.clone(),
        parameter: spec.name.clone(),
        shape: spec.shape.clone(),
    };
    specs.iter().map(same).collect()
}
