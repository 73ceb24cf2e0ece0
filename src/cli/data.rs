//! `data info` and `data fit-codec`.

use super::arguments::{Data, DataArguments, Global};
use super::{allow_writing, output};
use crate::codec::{FitSettings, LatentCodec, LinearCodec};
use crate::config::{self, CodecConfig, Experiment, Recipe};
use crate::data::Dataset;
use crate::data::info::{DatasetSummary, RecipeSummary, SideSummary, describe, summarise};
use crate::words::thousands;
use crate::{Error, Exit, Result};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::json;
use std::path::Path;

/// One of the dataset commands.
pub fn data(arguments: &DataArguments, global: &Global) -> Result<Exit> {
    match &arguments.what {
        Data::Info { path } => info(path, global),
        Data::FitCodec { path } => fit_codec(path, global),
    }
}

fn info(path: &Path, global: &Global) -> Result<Exit> {
    // A dataset's folder is looked at by itself; an experiment or a recipe says how clips are cut from it.
    if path.join("meta/info.json").is_file() {
        let summary = describe(path)?;
        if global.json {
            output::document(&summary)?
        } else {
            print(&dataset_rows(&summary))?
        }
        return Ok(Exit::Done);
    }
    let recipe = recipe_of(path)?;
    let summary = with_progress("hashing files", global, |progress| summarise(&recipe.data, &recipe.model, progress))?;
    if global.json {
        output::document(&summary)?
    } else {
        print(&recipe_rows(&summary))?
    }
    Ok(Exit::Done)
}

fn fit_codec(path: &Path, global: &Global) -> Result<Exit> {
    allow_writing(global, "fitting a codec")?;
    let recipe = recipe_of(path)?;
    let CodecConfig::Linear { path: target } = &recipe.codec else {
        return Err(Error::refused(
            "codec_not_fitted",
            "only the linear codec is fitted, and the recipe names another",
        )
        .in_place("codec.kind"));
    };
    let dataset = Dataset::open(&recipe.data, &recipe.model)?;
    let codec = with_progress("fitting the codec", global, |progress| {
        LinearCodec::fit(&dataset, FitSettings::default(), progress)
    })?;
    codec.save(target)?;
    let clips = dataset.train().len();
    if global.json {
        output::document(&json!({"path": target, "hash": codec.hash(), "clips": clips}))?;
    } else {
        print(&[
            ("codec".to_owned(), target.display().to_string()),
            ("fitted on".to_owned(), format!("{clips} training clips")),
            ("hash".to_owned(), codec.hash().to_owned()),
        ])?;
    }
    Ok(Exit::Done)
}

/// The recipe of a file, or of an experiment's baseline: data and codec are the same in every arm unless ablated.
fn recipe_of(path: &Path) -> Result<Recipe> {
    if path.is_file() && path.file_name().is_some_and(|name| name != "experiment.yaml") {
        return config::load(path);
    }
    let experiment = Experiment::load(path)?;
    Ok(experiment.arm(&experiment.rule.baseline)?.recipe.clone())
}

/// Shows a bar on stderr while something long goes on; none for scripts or without a terminal.
fn with_progress<T>(what: &'static str, global: &Global, work: impl FnOnce(&(dyn Fn(u64, u64) + Sync)) -> T) -> T {
    let target = if global.json { ProgressDrawTarget::hidden() } else { ProgressDrawTarget::stderr() };
    let bar = ProgressBar::with_draw_target(None, target).with_message(what);
    if let Ok(style) = ProgressStyle::with_template("{msg} [{bar:30}] {pos}/{len}") {
        bar.set_style(style.progress_chars("=> "));
    }
    let result = work(&|done, total| {
        bar.set_length(total);
        bar.set_position(done);
    });
    bar.finish_and_clear();
    result
}

fn print(rows: &[(String, String)]) -> Result<()> {
    output::columns(rows).into_iter().try_for_each(output::line)
}

fn dataset_rows(summary: &DatasetSummary) -> Vec<(String, String)> {
    let [shortest, median, longest] = summary.lengths;
    let mut rows = vec![
        ("dataset".to_owned(), summary.root.display().to_string()),
        (
            "format".to_owned(),
            format!("LeRobot {}, {}", summary.version, summary.robot.as_deref().unwrap_or("robot not named")),
        ),
        (
            "frames".to_owned(),
            format!(
                "{} in {} episodes at {} fps; {shortest} to {longest} an episode, median {median}",
                thousands(summary.frames as u64),
                summary.episodes,
                summary.fps
            ),
        ),
    ];
    for view in &summary.views {
        let size = match (view.width, view.height) {
            (Some(width), Some(height)) => format!("{width} x {height}"),
            _ => "size not named".to_owned(),
        };
        rows.push(("view".to_owned(), format!("{} ({size})", view.name)));
    }
    for (task, episodes) in &summary.tasks {
        rows.push(("task".to_owned(), format!("{task} ({episodes} episodes)")));
    }
    if let Some(geometry) = &summary.geometry {
        rows.push((
            "geometry".to_owned(),
            format!(
                "{}: {} x {} tokens of {} for each of {}, every {} frames",
                geometry.encoder,
                geometry.grid[0],
                geometry.grid[1],
                geometry.dim,
                geometry.views.join(" and "),
                geometry.frame_stride
            ),
        ));
    }
    rows
}

fn recipe_rows(summary: &RecipeSummary) -> Vec<(String, String)> {
    let mut rows = dataset_rows(&summary.dataset);
    rows.push(("wrist view".to_owned(), summary.wrist_view.clone()));
    let side = |side: &SideSummary| format!("{} clips of {} episodes", thousands(side.clips as u64), side.episodes);
    rows.push(("training".to_owned(), side(&summary.train)));
    rows.push(("validation".to_owned(), side(&summary.validation)));
    if !summary.too_short.is_empty() {
        let episodes: Vec<String> = summary.too_short.iter().map(usize::to_string).collect();
        rows.push(("too short".to_owned(), format!("episodes {}", episodes.join(", "))));
    }
    rows.push(("identity".to_owned(), summary.identity.clone()));
    rows
}
