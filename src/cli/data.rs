//! `data info`, `data fit-codec` and `data quantiles`; `data pack`, `data tokens` and `data validate` in files of their own.

use super::arguments::{Data, DataArguments, Global};
use super::chosen::choose;
use super::data_pack::pack_recipe;
use super::data_tokens::check_tokens;
use super::data_validate::validate_data;
use super::{allow_writing, data_episodes, output};
use crate::codec::{FitSettings, FitSummary, PictureSource, fit_and_save};
use crate::config::{CodecConfig, Recipe};
use crate::data::info::{DatasetSummary, RecipeSummary, SideSummary, describe, summarise};
use crate::data::{Dataset, EpisodeSet, Progress};
use crate::words::thousands;
use crate::{Error, Exit, Result};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::path::Path;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// One of the dataset commands.
pub fn data(arguments: &DataArguments, global: &Global) -> Result<Exit> {
    match &arguments.what {
        Data::Info { path } => info(path, global),
        Data::FitCodec { path } => fit_codec(path, global),
        Data::Pack { path, set } => {
            let recipe = choose(path, None, set)?.recipe;
            pack_recipe(&path.display().to_string(), recipe.lingbot("data pack")?, global.json)
        }
        Data::Quantiles { path } => quantiles(path, global),
        Data::Tokens(arguments) => check_tokens(arguments, global),
        Data::Validate(arguments) => validate_data(arguments, global),
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
    let recipe = match recipe_of(path)? {
        Recipe::Xwam(recipe) => recipe,
        Recipe::Lingbot(recipe) => return data_episodes::info(&recipe, global.json),
    };
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
    let CodecConfig::Linear { path: target } = recipe.codec() else {
        return Err(Error::refused(
            "codec_not_fitted",
            "only the linear codec is fitted, and the recipe names another",
        )
        .in_place("codec.kind"));
    };
    let source: Box<dyn PictureSource> = match &recipe {
        Recipe::Xwam(recipe) => Box::new(Dataset::open(&recipe.data, &recipe.model)?),
        Recipe::Lingbot(recipe) => Box::new(EpisodeSet::open(&recipe.data, &recipe.model, &recipe.text)?),
    };
    with_progress("hashing videos", global, |progress| source.training_key(progress))?;
    let summary = with_progress("fitting the codec", global, |progress| {
        fit_and_save(source.as_ref(), FitSettings::default(), target, progress)
    })?;
    if global.json {
        output::document(&summary)?;
    } else {
        print(&fit_rows(&summary))?;
    }
    Ok(Exit::Done)
}

fn quantiles(path: &Path, global: &Global) -> Result<Exit> {
    let recipe = recipe_of(path)?;
    let recipe = recipe.lingbot("data quantiles")?;
    let set = EpisodeSet::open(&recipe.data, &recipe.model, &recipe.text)?;
    let found = with_progress("reading actions", global, |progress| set.quantiles(progress))?;
    if global.json {
        output::document(&found)?;
    } else {
        found.yaml().lines().try_for_each(output::line)?;
    }
    Ok(Exit::Done)
}

/// The recipe of a file, or of an experiment's baseline: data and codec are the same in every arm unless ablated.
fn recipe_of(path: &Path) -> Result<Recipe> {
    Ok(choose(path, None, &[])?.recipe)
}

/// Shows how far something long has come, on stderr: a bar on a terminal, else a line every few seconds. Nothing for
/// `--json`, whose readers want the document.
pub(super) fn with_progress<T>(
    what: &'static str,
    global: &Global,
    work: impl FnOnce(Progress<'_>) -> Result<T>,
) -> Result<T> {
    const LINE_INTERVAL: Duration = Duration::from_secs(5);
    if global.json {
        return work(&|_, _| Ok(()));
    }
    // Hidden by itself where stderr is no terminal.
    let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr()).with_message(what);
    if let Ok(style) = ProgressStyle::with_template("{msg} [{bar:30}] {pos}/{len} {per_sec} {eta}") {
        bar.set_style(style.progress_chars("=> "));
    }
    let begun = Instant::now();
    let said = Mutex::new(begun);
    let result = work(&|done, total| {
        bar.set_length(total);
        bar.set_position(done);
        if let Ok(mut said) = said.try_lock()
            && bar.is_hidden()
            && said.elapsed() >= LINE_INTERVAL
        {
            *said = Instant::now();
            output::note(match total {
                0 => format!("{what}: waiting for another process"),
                _ => {
                    let rate = done as f64 / begun.elapsed().as_secs_f64().max(1e-3);
                    let left = total.saturating_sub(done) as f64 / rate.max(1e-3);
                    format!("{what}: {done} of {total}, {rate:.1}/s, {left:.0} s left")
                }
            });
        }
        Ok(())
    });
    bar.finish_and_clear();
    result
}

fn fit_rows(summary: &FitSummary) -> Vec<(String, String)> {
    let mut rows = vec![
        ("codec".to_owned(), format!("{}, {} bytes", summary.path.display(), thousands(summary.bytes))),
        ("hash".to_owned(), summary.hash.clone()),
        ("fitted to".to_owned(), format!("{} training clips", thousands(summary.train_clips as u64))),
        ("measured on".to_owned(), format!("{} held-out clips", thousands(summary.measured_clips as u64))),
    ];
    rows.extend(summary.views.iter().map(|view| ("PSNR".to_owned(), format!("{:.2} dB {}", view.psnr_db, view.view))));
    rows
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::ViewQuality;

    #[test]
    fn a_fit_is_reported_view_by_view() {
        let view = |view: &str, psnr_db| ViewQuality { view: view.to_owned(), psnr_db };
        let summary = FitSummary {
            path: "a/codec.safetensors".into(),
            hash: "0f".into(),
            bytes: 388_000,
            train_clips: 1234,
            measured_clips: 64,
            views: vec![view("front", 31.256), view("wrist", 26.9)],
        };
        assert_eq!(
            output::columns(&fit_rows(&summary)),
            [
                "codec        a/codec.safetensors, 388,000 bytes",
                "hash         0f",
                "fitted to    1,234 training clips",
                "measured on  64 held-out clips",
                "PSNR         31.26 dB front",
                "PSNR         26.90 dB wrist",
            ]
        );
    }
}
