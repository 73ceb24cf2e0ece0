//! `data validate`: every clip or episode through the loader, and lists of those that can and cannot be trained on.

use super::arguments::{Global, ValidateArguments};
use super::chosen::{Chosen, choose};
use super::data::with_progress;
use super::{allow_writing, output};
use crate::config::{Experiment, Recipe};
use crate::data::validate::{Report, Source, Tally, validate};
use crate::data::{Dataset, EpisodeSet};
use crate::runlog::ExperimentRuns;
use crate::train::stop::StopFlag;
use crate::words::thousands;
use crate::{Error, Exit, Result};
use serde_json::{Value, json};
use std::path::Path;

/// Exit 0, or 65 if more is rejected than is allowed or the dataset contradicts itself.
pub fn validate_data(arguments: &ValidateArguments, global: &Global) -> Result<Exit> {
    allow_writing(global, "writing verdicts")?;
    if let Some(share) = arguments.max_reject_share
        && !(0.0..=1.0).contains(&share)
    {
        return Err(Error::usage("bad_share", format!("{share} is no share")).in_place("--max-reject-share"));
    }
    let Chosen { name, recipe, experiment } = chosen(arguments)?;
    let folder = match (&arguments.out, &experiment) {
        (Some(folder), _) => folder.clone(),
        (None, Some(directory)) => ExperimentRuns::new(directory).root().join(".validate"),
        (None, None) => {
            return Err(
                Error::usage("no_out", "a recipe by itself has no folder for verdicts").hint("name one: --out DIR")
            );
        }
    };
    let report = match &recipe {
        Recipe::Xwam(recipe) => pass(&Dataset::open_with_faults(&recipe.data, &recipe.model)?, &folder, global)?,
        Recipe::Lingbot(recipe) => {
            pass(&EpisodeSet::open(&recipe.data, &recipe.model, &recipe.text)?, &folder, global)?
        }
    };
    let passed = report.problems.is_empty() && within(arguments, &report);
    if global.json {
        output::document(&document(&name, passed, &report)?)?;
    } else {
        lines(&name, &report).into_iter().try_for_each(output::line)?;
    }
    Ok(if passed { Exit::Done } else { Exit::BadData })
}

/// The recipe to check with. Of an experiment, unless an arm is named, the one that reads most: arms have one dataset,
/// and what loads with geometry tokens loads without.
fn chosen(arguments: &ValidateArguments) -> Result<Chosen> {
    let (path, set) = (arguments.path.as_path(), arguments.set.as_slice());
    if arguments.arm.is_some() || (path.is_file() && path.file_name().is_some_and(|name| name != "experiment.yaml")) {
        return choose(path, arguments.arm.as_deref(), set);
    }
    let experiment = Experiment::load_with(path, set)?;
    if let Some(field) = experiment.ablated.iter().find(|field| field.starts_with("data.")) {
        return Err(Error::usage("arm_needed", format!("the arms differ in {field}")).hint("name one: --arm ARM"));
    }
    let reads_tokens = |recipe: &Recipe| matches!(recipe, Recipe::Xwam(recipe) if recipe.model.geometry.enabled);
    let most = experiment.arms.iter().find(|arm| reads_tokens(&arm.recipe)).map(|arm| arm.name.as_str());
    choose(path, most, set)
}

fn pass(source: &impl Source, folder: &Path, global: &Global) -> Result<Report> {
    let stop = StopFlag::on_signals()?;
    with_progress("checking samples", global, |progress| {
        validate(source, folder, &|done, total| match stop.requested() {
            Some(by) => Err(Error::new(
                Exit::Stopped,
                "stopped",
                format!("stopped by {by} with {done} of {total} samples checked"),
            )
            .hint("start it again to go on from there")),
            None => progress(done, total),
        })
    })
}

/// A share that is given stands for the number that is not.
fn within(arguments: &ValidateArguments, report: &Report) -> bool {
    let (rejects, samples) = (report.rejects as f64, report.samples.max(1) as f64);
    let share = arguments.max_reject_share.is_none_or(|share| rejects <= share * samples);
    let number = match (arguments.max_rejects, arguments.max_reject_share) {
        (None, Some(_)) => true,
        (number, _) => report.rejects as u64 <= number.unwrap_or(0),
    };
    share && number
}

fn document(name: &str, passed: bool, report: &Report) -> Result<Value> {
    let fields = serde_json::to_value(report)
        .map_err(|error| Error::crash(format!("the JSON document cannot be written: {error}")))?;
    let mut document = json!({"ok": passed, "recipe": name, "version": crate::cli::COMMIT});
    if let (Some(document), Value::Object(fields)) = (document.as_object_mut(), fields) {
        document.extend(fields);
    }
    Ok(document)
}

fn lines(name: &str, report: &Report) -> Vec<String> {
    let count = |count: usize| thousands(count as u64);
    let mut lines = vec![name.to_owned()];
    let tables = [("rejected", &report.reasons), ("problem", &report.problems), ("warning", &report.warnings)];
    for (label, tallies) in tables {
        if tallies.is_empty() {
            continue;
        }
        lines.push(String::new());
        let row = |tally: &Tally| {
            let sample = if tally.sample.is_empty() { String::new() } else { format!("{}: ", tally.sample) };
            let place = if tally.place.is_empty() { String::new() } else { format!(" ({})", tally.place) };
            (format!("{label}  {}", tally.code), format!("{:>6}  {sample}{}{place}", count(tally.count), tally.what))
        };
        lines.extend(output::columns(&tallies.iter().map(row).collect::<Vec<_>>()));
    }
    lines.push(String::new());
    let known = match report.known {
        0 => String::new(),
        known => format!("; {} known from before", count(known)),
    };
    lines.extend(output::columns(&[
        (
            "samples".to_owned(),
            format!(
                "{} clean and {} rejected of {}{known}",
                count(report.clean),
                count(report.rejects),
                count(report.samples)
            ),
        ),
        ("clean".to_owned(), report.clean_file.display().to_string()),
        ("rejects".to_owned(), report.rejects_file.display().to_string()),
        ("SHA-256".to_owned(), report.clean_sha256.clone()),
    ]));
    lines
}
