//! `data info` of a LingBot-VA recipe: what its episodes are, from the metadata alone.

use super::output;
use crate::codec::SPACE_STRIDE;
use crate::config::LingbotRecipe;
use crate::data::EpisodeSet;
use crate::pack::length::trunk_tokens;
use crate::train::lingbot::batches;
use crate::words::thousands;
use crate::{Exit, Result};
use serde::Serialize;
use std::path::PathBuf;

#[derive(Debug, Serialize)]
struct Summary {
    datasets: Vec<PathBuf>,
    views: Vec<String>,
    wrist_view: String,
    training: usize,
    validation: usize,
    /// Shortest, median and longest, of the training episodes.
    latent_frames: [usize; 3],
    /// Pixels of the tile, height and width.
    tile: [usize; 2],
    /// Of one latent frame, one copy.
    video_tokens: usize,
    action_tokens: usize,
    /// Noisy and clean copies of all training episodes.
    tokens: usize,
    prompts: Vec<String>,
    excluded: Vec<String>,
}

/// Opens the recipe's metadata and prints what it gives.
pub(super) fn info(recipe: &LingbotRecipe, json: bool) -> Result<Exit> {
    let set = EpisodeSet::open(&recipe.data, &recipe.model, &recipe.text)?;
    let mut lengths = batches::lengths(&set);
    let frame = batches::frame_tokens(&set, &recipe.model);
    lengths.sort_unstable();
    let at = |index: usize| lengths.get(index).copied().unwrap_or(0);
    let (height, width) = set.grid();
    let summary = Summary {
        datasets: set.datasets().iter().map(|metadata| metadata.root.clone()).collect(),
        views: recipe.data.views.clone(),
        wrist_view: recipe.data.wrist_view.clone(),
        training: set.train().len(),
        validation: set.validation().len(),
        latent_frames: [at(0), at(lengths.len() / 2), at(lengths.len().saturating_sub(1))],
        tile: [height * SPACE_STRIDE, width * SPACE_STRIDE],
        video_tokens: frame.video(),
        action_tokens: frame.actions,
        tokens: trunk_tokens(lengths.iter().sum(), frame),
        prompts: set.prompts().into_iter().map(str::to_owned).collect(),
        excluded: set.excluded().iter().map(ToString::to_string).collect(),
    };
    if json {
        output::document(&summary)?;
    } else {
        output::columns(&rows(&summary)).into_iter().try_for_each(output::line)?;
    }
    Ok(Exit::Done)
}

fn rows(summary: &Summary) -> Vec<(String, String)> {
    let [shortest, median, longest] = summary.latent_frames;
    let [height, width] = summary.tile;
    let mut rows: Vec<(&str, String)> = Vec::new();
    rows.extend(summary.datasets.iter().map(|root| ("dataset", root.display().to_string())));
    rows.extend(summary.views.iter().map(|view| ("view", view.clone())));
    rows.push(("wrist view", summary.wrist_view.clone()));
    rows.push(("tile", format!("{width} x {height}")));
    let counts = [summary.training, summary.validation].map(|count| thousands(count as u64));
    rows.push(("episodes", format!("{} training, {} validation", counts[0], counts[1])));
    rows.push(("length", format!("{shortest} to {longest} latent frames, median {median}")));
    let (video, actions) = (summary.video_tokens, summary.action_tokens);
    let all = thousands(summary.tokens as u64);
    rows.push(("tokens", format!("{video} video and {actions} action tokens a frame and copy; {all} an epoch")));
    rows.extend(summary.prompts.iter().map(|prompt| ("prompt", prompt.clone())));
    rows.extend(summary.excluded.iter().map(|excluded| ("left out", excluded.clone())));
    rows.into_iter().map(|(label, text)| (label.to_owned(), text)).collect()
}
