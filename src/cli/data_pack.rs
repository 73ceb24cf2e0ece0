//! `data pack`: the three packings of a dataset's episodes side by side, before a GPU is asked for.

use super::output;
use crate::config::{
    LingbotFlowConfig, LingbotModelConfig, LingbotRecipe, PackingConfig, PackingKind, TextConfig, TrainConfig,
};
use crate::data::episodes::EpisodeSet;
use crate::pack::cost::CostModel;
use crate::pack::sequence::FrameTokens;
use crate::pack::statistics::{PackingStatistics, TextTokens, statistics};
use crate::pack::step::Planner;
use crate::train::lingbot::batches;
use crate::words::thousands;
use crate::{Exit, Result};
use serde::Serialize;

/// What is packed.
pub struct PackInputs<'a> {
    /// The recipe's, for people.
    pub name: &'a str,
    /// Latent frames of each training episode.
    pub lengths: &'a [usize],
    pub frame: FrameTokens,
    pub packing: &'a PackingConfig,
    pub train: &'a TrainConfig,
    pub flow: &'a LingbotFlowConfig,
    pub model: &'a LingbotModelConfig,
    /// Tokens of each training episode's prompt; `None` if only the latent files say.
    pub real_text_tokens: Option<&'a [usize]>,
}

/// The document of `--json`. Shares are of 1, not per cent.
#[derive(Debug, Serialize)]
pub struct PackReport {
    pub name: String,
    pub episodes: usize,
    /// Latent frames of the shortest, the median and the longest episode.
    pub latent_frames: [usize; 3],
    /// Of one copy of a latent frame.
    pub tokens_per_frame: usize,
    pub effective_batch: usize,
    pub ranks: usize,
    pub batch_size: usize,
    pub accumulate: usize,
    pub pad_multiple: usize,
    pub pool_factor: usize,
    pub token_budget: usize,
    pub alignment: usize,
    /// What the recipe trains with.
    pub kind: PackingKind,
    /// `None` if these episodes cannot be packed so; `impossible` says why.
    pub unpacked: Option<PackingStatistics>,
    pub bucket: Option<PackingStatistics>,
    pub budget: Option<PackingStatistics>,
    pub impossible: Vec<Impossible>,
}

/// A packing that the recipe does not ask for and these episodes do not allow.
#[derive(Debug, Serialize)]
pub struct Impossible {
    pub kind: PackingKind,
    pub reason: String,
}

/// Opens the recipe's metadata, computes and prints.
pub(super) fn pack_recipe(name: &str, recipe: &LingbotRecipe, json: bool) -> Result<Exit> {
    let set = EpisodeSet::open(&recipe.data, &recipe.model, &recipe.text)?;
    batches::admit(&set, recipe)?;
    let lengths = batches::lengths(&set);
    let real_text_tokens: Option<Vec<usize>> = match recipe.text {
        TextConfig::LatentFiles => None,
        _ => Some(set.train().iter().map(|&id| set.text().tokens(set.prompt(id))).collect()),
    };
    let inputs = PackInputs {
        name,
        lengths: &lengths,
        frame: batches::frame_tokens(&set, &recipe.model),
        packing: &recipe.packing,
        train: &recipe.train,
        flow: &recipe.flow,
        model: &recipe.model,
        real_text_tokens: real_text_tokens.as_deref(),
    };
    pack(&inputs, json)
}

/// Computes and prints.
pub fn pack(inputs: &PackInputs<'_>, json: bool) -> Result<Exit> {
    let report = report(inputs)?;
    match json {
        true => output::document(&report)?,
        false => lines(&report).into_iter().try_for_each(output::line)?,
    }
    Ok(Exit::Done)
}

/// All three packings over one epoch.
///
/// # Errors
/// Those of [`Planner::new`] and [`statistics`], if they concern the recipe's own kind of packing.
pub fn report(inputs: &PackInputs<'_>) -> Result<PackReport> {
    let &PackInputs { lengths, frame, packing, train, flow, model, real_text_tokens, .. } = inputs;
    let cost = CostModel::of_model(model, train.recompute);
    let text = TextTokens { slots: model.text_len, real: real_text_tokens };
    let mut impossible = Vec::new();
    let mut of = |kind| -> Result<Option<PackingStatistics>> {
        let planner = Planner::new(kind, lengths, frame, packing, train, flow, cost);
        match planner.and_then(|planner| statistics(&planner, text)) {
            Ok(statistics) => Ok(Some(statistics)),
            Err(error) if kind == packing.kind => Err(error),
            Err(error) => {
                impossible.push(Impossible { kind, reason: error.to_string() });
                Ok(None)
            }
        }
    };
    let [unpacked, bucket, budget] = [of(PackingKind::Unpacked)?, of(PackingKind::Bucket)?, of(PackingKind::Budget)?];
    let mut sorted = lengths.to_vec();
    sorted.sort_unstable();
    let at = |index: usize| sorted.get(index).copied().unwrap_or(0);
    Ok(PackReport {
        name: inputs.name.to_owned(),
        episodes: lengths.len(),
        latent_frames: [at(0), at(lengths.len() / 2), at(lengths.len().saturating_sub(1))],
        tokens_per_frame: frame.both(),
        effective_batch: packing.ranks * train.batch_size * train.accumulate,
        ranks: packing.ranks,
        batch_size: train.batch_size,
        accumulate: train.accumulate,
        pad_multiple: packing.pad_multiple,
        pool_factor: packing.pool_factor,
        token_budget: packing.token_budget,
        alignment: packing.alignment,
        kind: packing.kind,
        unpacked,
        bucket,
        budget,
        impossible,
    })
}

fn lines(report: &PackReport) -> Vec<String> {
    let count = |value: usize| thousands(value as u64);
    let [shortest, median, longest] = report.latent_frames;
    let head = [
        ("recipe", report.name.clone()),
        ("episodes", format!("{}; {shortest} to {longest} latent frames, median {median}", count(report.episodes))),
        ("frame", format!("{} tokens, twice in a sequence (noisy and clean)", report.tokens_per_frame)),
        (
            "step",
            format!(
                "{} episodes: {} ranks x {} x {}",
                count(report.effective_batch),
                report.ranks,
                report.batch_size,
                report.accumulate
            ),
        ),
        (
            "packing",
            format!(
                "pad to {} frames, pools of {} batches; at most {} tokens; aligned to {}",
                report.pad_multiple,
                report.pool_factor,
                count(report.token_budget),
                report.alignment
            ),
        ),
    ];
    let mut lines = output::columns(&head.map(|(label, text)| (label.to_owned(), text)));
    lines.push(String::new());
    lines.extend(table(report));
    lines.push(String::new());
    lines.extend(in_words(report));
    lines
}

/// A quantity a line, a packing a column.
fn table(report: &PackReport) -> Vec<String> {
    let count = |value: usize| thousands(value as u64);
    let percent = |share: f64| format!("{:.2} %", 100.0 * share);
    type Show<'a> = &'a dyn Fn(&PackingStatistics) -> String;
    let quantities: [(&str, Show); 19] = [
        ("optimizer steps an epoch", &|s| thousands(s.optimizer_steps)),
        ("episodes trained on", &|s| count(s.samples)),
        ("micro-batches an epoch", &|s| count(s.micro_batches)),
        ("micro-batches a rank and step", &|s| format!("{:.2}", s.micro_batches_per_rank_and_step)),
        ("tokens processed", &|s| count(s.processed_tokens)),
        ("tokens of the largest micro-batch", &|s| count(s.largest_micro_batch_tokens)),
        ("frame padding", &|s| percent(s.frame_padding)),
        ("alignment padding", &|s| percent(s.alignment_padding)),
        ("text padding", &|s| s.text_padding.map_or("-".to_owned(), percent)),
        ("visible pairs", &|s| thousands(s.visible_pairs)),
        ("pairs computed in 128 x 128 tiles", &|s| thousands(s.computed_pairs)),
        ("tile waste", &|s| percent(s.tile_waste)),
        ("distinct sequence lengths", &|s| count(s.distinct_sequence_lengths)),
        ("distinct padded frame counts", &|s| s.distinct_padded_frames.map_or("-".to_owned(), count)),
        ("barriers an epoch", &|s| count(s.barriers)),
        ("rank imbalance, mean", &|s| format!("{:.3}", s.imbalance_mean)),
        ("rank imbalance, 95th percentile", &|s| format!("{:.3}", s.imbalance_p95)),
        ("rank imbalance, largest", &|s| format!("{:.3}", s.imbalance_max)),
        ("GPU time spent waiting", &|s| percent(s.idle_share)),
    ];
    let packings = [&report.unpacked, &report.bucket, &report.budget];
    let cell = |packing: &Option<PackingStatistics>, show: Show| packing.as_ref().map_or("-".to_owned(), show);
    let mut rows = vec![(String::new(), ["unpacked", "bucket", "budget"].map(str::to_owned))];
    rows.extend(
        quantities.iter().map(|(label, show)| ((*label).to_owned(), packings.map(|packing| cell(packing, *show)))),
    );
    let label_width = rows.iter().map(|(label, _)| label.len()).max().unwrap_or(0);
    let width = |column: usize| rows.iter().map(|(_, cells)| cells[column].len()).max().unwrap_or(0);
    let widths = [0, 1, 2].map(width);
    let line = |(label, cells): &(String, [String; 3])| {
        let mut line = format!("{label:label_width$}");
        for (cell, width) in cells.iter().zip(widths) {
            line.push_str(&format!("  {cell:>width$}"));
        }
        line
    };
    rows.iter().map(line).collect()
}

/// What the recipe's packing comes to, and what could not be packed.
fn in_words(report: &PackReport) -> Vec<String> {
    let name = |kind| match kind {
        PackingKind::Unpacked => "unpacked",
        PackingKind::Bucket => "bucket",
        PackingKind::Budget => "budget",
    };
    let own = match report.kind {
        PackingKind::Unpacked => &report.unpacked,
        PackingKind::Bucket => &report.bucket,
        PackingKind::Budget => &report.budget,
    };
    let percent = |share: f64| format!("{:.2} %", 100.0 * share);
    let own = own.iter().map(|own| {
        let padding = match own.frame_padding {
            0.0 => "no frame padding".to_owned(),
            share => format!("{} frame padding", percent(share)),
        };
        let barrier = if own.barriers as u64 == own.optimizer_steps { "step" } else { "micro-step" };
        format!(
            "{} (this recipe's): {padding}, {} alignment; ranks meet once a {barrier} and wait {} of their time",
            name(own.kind),
            percent(own.alignment_padding),
            percent(own.idle_share)
        )
    });
    own.chain(report.impossible.iter().map(|other| format!("{}: {}", name(other.kind), other.reason))).collect()
}
