//! `weights inspect` and `weights export`.

use super::arguments::{Global, Weights, WeightsArguments};
use super::{allow_writing, output};
use crate::config::{self, WeightsConfig};
use crate::model::lingbot_parameter_specs;
use crate::runlog::{Check, Checkpoint, CheckpointStore, RunDir};
use crate::weights::{Inspection, Layout, SHARD_BYTES, WeightDtype, inspect, start, write_official};
use crate::words::thousands;
use crate::{Error, Exit, Result};
use serde_json::json;
use std::path::Path;

/// Tensors of one kind that are named; how many more there are is said.
const NAMED: usize = 20;

/// One of the weight commands.
pub fn weights(arguments: &WeightsArguments, global: &Global) -> Result<Exit> {
    match &arguments.what {
        Weights::Inspect { path } => {
            let seen = inspect(path)?;
            if global.json {
                let mut document = json!(seen);
                document["fits"] = json!(seen.fits());
                output::document(&document)?;
            } else {
                output::columns(&rows(&seen)).into_iter().try_for_each(output::line)?;
            }
            if seen.fits() {
                return Ok(Exit::Done);
            }
            let what = "these are not whole weights that a model of this program can start from";
            let error = Error::refused("weights_do_not_fit", what).at(path);
            // With --json what was seen is the document.
            if global.json {
                output::warn(&error);
                return Ok(error.exit);
            }
            Err(error)
        }
        Weights::Export { from, out, dtype } => export(from, out, *dtype, global),
    }
}

fn export(from: &Path, out: &Path, dtype: WeightDtype, global: &Global) -> Result<Exit> {
    allow_writing(global, "exporting weights")?;
    let (run, checkpoint) = checkpoint_of(from)?;
    let recipe = config::load(&run.arm_yaml())?;
    let model = &recipe.lingbot("`weights export`")?.model;
    let weights = WeightsConfig::Official { path: checkpoint.path.clone() };
    let (parameters, _) = start(&weights, &lingbot_parameter_specs(model), model, 0, &|_, _| Ok(()))?;
    let written = inspect(&write_official(out, &parameters, model, dtype, SHARD_BYTES)?)?;
    if global.json {
        output::document(&json!({"step": checkpoint.step, "written": written}))?;
    } else {
        let mut rows = rows(&written);
        rows.insert(0, ("step".to_owned(), thousands(checkpoint.step)));
        output::columns(&rows).into_iter().try_for_each(output::line)?;
    }
    Ok(Exit::Done)
}

/// The run and the checkpoint that a path means: a run's newest complete one, or the one named.
fn checkpoint_of(path: &Path) -> Result<(RunDir, Checkpoint)> {
    let run = RunDir::new(path);
    if run.arm_yaml().is_file() {
        let latest = CheckpointStore::new(&run).latest_complete(Check::Hashes)?;
        return match latest.checkpoint {
            Some(checkpoint) => Ok((run, checkpoint)),
            None => Err(Error::data("checkpoint_missing", "the run has no complete checkpoint").at(path)),
        };
    }
    let folder = std::fs::canonicalize(path)
        .map_err(|error| Error::data("file_missing", format!("no run and no checkpoint: {error}")).at(path))?;
    let step = folder.file_name().and_then(|name| name.to_str()?.strip_prefix("step-")?.parse().ok());
    match (step, folder.ancestors().nth(2).map(RunDir::new)) {
        (Some(step), Some(run)) if run.arm_yaml().is_file() => {
            Ok((run, Checkpoint::open(&folder, step, Check::Hashes)?))
        }
        _ => Err(Error::data("not_a_run", "neither a run nor a checkpoint inside one")
            .at(path)
            .hint("as in: lbva-tui weights export experiments/NAME/runs/ARM out")),
    }
}

fn rows(seen: &Inspection) -> Vec<(String, String)> {
    let mut rows: Vec<(String, String)> = Vec::new();
    let mut add = |label: &str, text: String| rows.push((label.to_owned(), text));
    for file in &seen.files {
        let size = format!("{} bytes, {} tensors", thousands(file.bytes), file.tensors);
        add("file", format!("{}, {size}", file.path.display()));
    }
    add(
        "layout",
        match seen.layout {
            Layout::LingbotVa => "LingBot-VA (weights.init: official)",
            Layout::Wan22 => "Wan2.2 original (weights.init: wan22)",
            Layout::Unknown => "not known",
        }
        .to_owned(),
    );
    let dtypes: Vec<String> = seen.dtypes.iter().map(|(dtype, tensors)| format!("{tensors} {dtype}")).collect();
    add("tensors", dtypes.join(", "));
    add("parameters", thousands(seen.parameters));
    if let Some(sizes) = &seen.sizes {
        let actions = sizes.action_dim.map_or("no actions".to_owned(), |dim| format!("{dim} action channels"));
        let [time, height, width] = sizes.patch_size;
        add("trunk", format!("{} blocks of {}, ffn {}", sizes.num_layers, sizes.dim, sizes.ffn_dim));
        let latent =
            format!("{} latent channels in, {} out, patches {time}x{height}x{width}", sizes.in_dim, sizes.out_dim);
        add("streams", format!("{latent}; {actions}"));
        add("inputs", format!("text {}, timestep {}", sizes.text_dim, sizes.freq_dim));
    }
    add(
        "config.json",
        match &seen.config_differences {
            None => "none".to_owned(),
            Some(differences) if differences.is_empty() => "agrees".to_owned(),
            Some(differences) => differences.join("; "),
        },
    );
    if let Some(fit) = &seen.fit {
        let other = fit
            .other_shape
            .iter()
            .map(|other| format!("{} is {:?}, {:?} expected", other.name, other.stored, other.expected));
        for (label, names) in [
            ("missing", fit.missing.clone()),
            ("other shape", other.collect()),
            ("unexpected", fit.unexpected.clone()),
            ("ignored", fit.ignored.clone()),
        ] {
            names.iter().take(NAMED).for_each(|name| add(label, name.clone()));
            if names.len() > NAMED {
                add(label, format!("and {} more", names.len() - NAMED));
            }
        }
    }
    add("fits", if seen.fits() { "yes" } else { "no" }.to_owned());
    rows
}
