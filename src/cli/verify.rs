//! `verify`: proofs of the engine, against reference numbers and against itself.

use super::arguments::{Global, GradientsArguments, KernelsArguments, PackingArguments, Verify, VerifyArguments};
use super::chosen::choose;
use super::data::with_progress;
use super::profile::Shown;
use super::{allow_writing, output};
use crate::config::{DeviceChoice, Experiment, LingbotRecipe, ParameterFormat};
use crate::data::EpisodeSet;
use crate::runlog::ExperimentRuns;
use crate::train::stop::StopFlag;
use crate::train::{golden, gradient_check, noop, packing_check};
use crate::{Error, Exit, Result};
use serde_json::json;
use std::path::{Path, PathBuf};

/// One of the proofs; exit 0 only if everything is inside its tolerances, 70 if something is not.
pub fn verify(arguments: &VerifyArguments, global: &Global) -> Result<Exit> {
    match &arguments.what {
        Verify::Golden { files } => golden(files, global),
        Verify::Packing(arguments) => packing(arguments, global),
        Verify::Gradients(arguments) => gradients(arguments, global),
        Verify::Kernels(arguments) => kernels(arguments, global),
        Verify::Noop { experiment } => noop(experiment, global),
    }
}

fn gradients(arguments: &GradientsArguments, global: &Global) -> Result<Exit> {
    let chosen = choose(&arguments.path, arguments.arm.as_deref(), &arguments.set)?;
    let device = match chosen.recipe.device() {
        DeviceChoice::Cuda(number) => DeviceChoice::Cuda(*number),
        DeviceChoice::Auto | DeviceChoice::Cpu => DeviceChoice::Cuda(0),
    };
    let formats = match arguments.regime.as_deref() {
        Some("f32") => vec![ParameterFormat::F32],
        Some(_) => vec![ParameterFormat::Bf16],
        None => vec![ParameterFormat::F32, ParameterFormat::Bf16],
    };
    let mut reports = Vec::new();
    for format in formats {
        let report = gradient_check::check(&chosen.recipe, &device, format)?;
        if !global.json {
            output::line(format!("{}: {}", chosen.name, report.to_text(arguments.show)))?;
        }
        reports.push(report);
    }
    if global.json {
        output::document(&reports)?;
    }
    let failed: Vec<String> =
        reports.iter().filter(|report| !report.passed).map(|report| report.regime.to_owned()).collect();
    let error = Error::new(Exit::Crash, "gradients_differ", "the GPU's gradients are not the reference path's");
    end(failed, error, global)
}

#[cfg(not(feature = "cuda"))]
fn kernels(_: &KernelsArguments, _: &Global) -> Result<Exit> {
    Err(crate::train::engine::without_cuda())
}

#[cfg(feature = "cuda")]
fn kernels(arguments: &KernelsArguments, global: &Global) -> Result<Exit> {
    let clock = || {
        let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        u64::from(since.subsec_nanos()) ^ since.as_secs()
    };
    let seed = arguments.seed.unwrap_or_else(clock);
    let report = crate::cuda::verify_kernels(seed, arguments.timing, &mut |what| output::note(format!("{what} ...")))?;
    match global.json {
        true => output::document(&report)?,
        false => output::line(report.to_text())?,
    }
    end(
        report.failures(),
        Error::new(Exit::Crash, "kernels_differ", "a kernel does not compute what it should"),
        global,
    )
}

fn golden(files: &[PathBuf], global: &Global) -> Result<Exit> {
    let mut reports = Vec::new();
    for file in files {
        let report = golden::verify(file)?;
        if !global.json {
            output::line(report.to_text())?;
        }
        reports.push(report);
    }
    if global.json {
        output::document(&reports)?;
    }
    let failed: Vec<String> =
        reports.iter().filter(|report| !report.passed()).map(|report| report.file.display().to_string()).collect();
    let error = Error::new(Exit::Crash, "golden_differs", "the engine's numbers differ from the golden file's");
    end(failed, error, global)
}

fn packing(arguments: &PackingArguments, global: &Global) -> Result<Exit> {
    let chosen = choose(&arguments.path, None, &arguments.set)?;
    let recipe = chosen.recipe.lingbot("verify packing")?;
    let tile = arguments.tile.map_or_else(|| tile_of_data(recipe), |tile| Ok(tile.0))?;
    let report = with_progress("packed against separate, per cent", global, |progress| {
        packing_check::check(recipe, tile, &arguments.frames, progress)
    })?;
    if global.json {
        output::document(&json!({"recipe": chosen.name, "report": report}))?;
    } else {
        output::line(format!("{}: {}", chosen.name, report.to_text()))?;
    }
    let failed: Vec<String> = report.failures().cloned().collect();
    let error = Error::new(Exit::Crash, "packing_differs", "packed episodes do not give what each gives alone");
    end(failed, error, global)
}

fn noop(path: &Path, global: &Global) -> Result<Exit> {
    allow_writing(global, "filling the latent cache")?;
    let experiment = Experiment::load(path)?;
    let arm = |name: &str| experiment.arm(name)?.recipe.xwam("verify noop");
    let (without, with) = (arm(&experiment.rule.baseline)?, arm(&experiment.rule.candidate)?);
    let stop = StopFlag::on_signals()?;
    let cache = ExperimentRuns::new(&experiment.directory).root().join(".cache");
    let report = noop::check(without, with, &cache, &mut Shown { global, stop: &stop })?;
    if global.json {
        output::document(&json!({"experiment": experiment.name, "passed": report.passed(), "report": report}))?;
    } else {
        output::line(format!("{}: {}", experiment.name, report.to_text()))?;
    }
    let failed = report.checks.iter().filter(|check| !check.passed).map(|check| check.name.to_owned()).collect();
    end(failed, Error::new(Exit::Crash, "not_a_noop", "the branch is no exact no-op in the training regime"), global)
}

/// What the datasets say of their views; no picture is read.
fn tile_of_data(recipe: &LingbotRecipe) -> Result<(usize, usize)> {
    let set = EpisodeSet::open(&recipe.data, &recipe.model, &recipe.text).map_err(|error| {
        let hint = "or name the tile in latent cells (16 pixels each), as in --tile 24x20: then no data is needed";
        let hint = if error.hint.is_empty() { hint.to_owned() } else { format!("{}; {hint}", error.hint) };
        error.hint(hint)
    })?;
    Ok(set.grid())
}

/// The exit of a proof that found these failures.
fn end(failed: Vec<String>, error: Error, global: &Global) -> Result<Exit> {
    if failed.is_empty() {
        return Ok(Exit::Done);
    }
    let error = error.in_place(failed.join(", "));
    // With --json the reports are the document.
    if global.json {
        output::warn(&error);
        return Ok(error.exit);
    }
    Err(error)
}
