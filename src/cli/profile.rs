//! `profile`: some micro-steps of an arm on its own data, and where their time goes.

use super::arguments::{Global, ProfileArguments};
use super::chosen::{Chosen, choose};
use super::data::with_progress;
use super::{allow_writing, output};
use crate::config::Family;
use crate::data::Progress;
use crate::runlog::{ExperimentRuns, Phase};
use crate::train::Opening;
use crate::train::profile::{MicroStepProfile, Profile, Summary, megabytes, profile as measure};
use crate::train::stop::StopFlag;
use crate::words::thousands;
use crate::{Error, Exit, Result};
use serde_json::json;

/// Measures and prints a line a micro-step, then the summary. Ended by a signal, it says what it has.
pub fn profile(arguments: &ProfileArguments, global: &Global) -> Result<Exit> {
    allow_writing(global, "filling the latent cache")?;
    if arguments.micro_steps == 0 {
        return Err(Error::usage("no_micro_steps", "at least one micro-step is needed").in_place("--micro-steps"));
    }
    let Chosen { name, recipe, experiment } = choose(&arguments.path, arguments.arm.as_deref(), &arguments.set)?;
    let stop = StopFlag::on_signals()?;
    // Latents of a recipe by itself belong to nobody: they go when this ends.
    let own = match &experiment {
        Some(_) => None,
        None => Some(
            tempfile::tempdir()
                .map_err(|error| Error::disk("write_failed", format!("no temporary folder for latents: {error}")))?,
        ),
    };
    let cache = match (&experiment, &own) {
        (Some(directory), _) => ExperimentRuns::new(directory).root().join(".cache"),
        (None, own) => own.as_ref().map(|folder| folder.path().to_owned()).unwrap_or_default(),
    };
    let samples = match recipe.family() {
        Family::Lingbot => "episodes",
        Family::Xwam => "clips",
    };
    let mut opening = Shown { global, stop: &stop };
    let mut first = true;
    let profile = measure(&recipe, &cache, arguments.micro_steps, &stop, &mut opening, &mut |micro_step| {
        if global.json {
            return Ok(());
        }
        if first {
            output::line(name.as_str())?;
            output::line(heading(samples))?;
        }
        let mark = if std::mem::take(&mut first) { "  first" } else { "" };
        output::line(format!("{}{mark}", row(micro_step)))
    })?;
    if global.json {
        output::document(&json!({"recipe": name, "family": recipe.family(), "profile": profile}))?;
    } else {
        closing(&profile).into_iter().try_for_each(output::line)?;
    }
    if let Some(by) = &profile.stopped {
        let (done, asked) = (profile.micro_steps.len(), arguments.micro_steps);
        output::note(format!("stopped by {by}: {done} of {asked} micro-steps were measured"));
    }
    Ok(Exit::Done)
}

/// Opening as it is shown on stderr.
pub(super) struct Shown<'a> {
    pub global: &'a Global,
    pub stop: &'a StopFlag,
}

impl Opening for Shown<'_> {
    fn begin(&mut self, _: Phase) -> Result<()> {
        Ok(())
    }

    fn warn(&mut self, text: String) -> Result<()> {
        output::note(format!("warning: {text}"));
        Ok(())
    }

    fn watch<T: Send>(&mut self, phase: Phase, work: impl FnOnce(Progress<'_>) -> Result<T> + Send) -> Result<T> {
        let stop = self.stop;
        with_progress(phase.words(1), self.global, |progress| {
            work(&|done, total| match stop.requested() {
                Some(by) => Err(Error::new(Exit::Stopped, "stopped", by)),
                None => progress(done, total),
            })
        })
    }
}

const WIDTHS: [usize; 12] = [4, 7, 8, 8, 13, 8, 10, 10, 8, 9, 8, 8];

fn aligned(cells: [String; 12]) -> String {
    let cells = cells.iter().zip(WIDTHS).map(|(cell, width)| format!("{cell:>width$}"));
    cells.collect::<Vec<_>>().join(" ")
}

fn heading(samples: &str) -> String {
    let units = ["", "", "", "", "", "ms", "ms", "ms", "ms", "tokens", "MB", "MB"];
    let words = [
        "step", "micro", "tokens", samples, "pairs", "data", "forward", "backward", "update", "ms/1k", "resident",
        "peak",
    ];
    format!("{}\n{}", aligned(words.map(str::to_owned)), aligned(units.map(str::to_owned)))
}

fn row(micro_step: &MicroStepProfile) -> String {
    let ms = |ms: f64| format!("{ms:.1}");
    aligned([
        micro_step.step.to_string(),
        format!("{}/{}", micro_step.micro_step, micro_step.micro_steps),
        thousands(micro_step.tokens),
        micro_step.samples.to_string(),
        thousands(micro_step.visible_pairs),
        ms(micro_step.data_ms),
        ms(micro_step.forward_ms),
        ms(micro_step.backward_ms),
        micro_step.update_ms.map_or("-".to_owned(), ms),
        format!("{:.2}", micro_step.ms_per_1k_tokens()),
        megabytes(micro_step.memory.bytes),
        megabytes(micro_step.memory.peak_bytes),
    ])
}

/// Everything after the last micro-step.
fn closing(profile: &Profile) -> Vec<String> {
    let Some(summary) = &profile.summary else {
        return vec![String::new(), "no summary: it takes a micro-step after the first".to_owned()];
    };
    let update = summary.update_ms.map_or("none".to_owned(), |ms| format!("{ms:.1} ms"));
    let mut rows = vec![
        ("model", format!("{} weights", thousands(profile.parameters as u64))),
        (
            "median",
            format!(
                "{} tokens; data {:.1}, forward {:.1}, backward {:.1} ms; update {update}; {:.2} ms/1k tokens",
                thousands(summary.tokens as u64),
                summary.data_ms,
                summary.forward_ms,
                summary.backward_ms,
                summary.ms_per_1k_tokens
            ),
        ),
        ("speed", format!("{} tokens/s, updates and waiting included", thousands(summary.tokens_per_s as u64))),
        ("peak", format!("{} MB resident", megabytes(summary.peak_bytes))),
    ];
    rows.extend(cost_rows(summary));
    let rows: Vec<(String, String)> = rows.into_iter().map(|(label, text)| (label.to_owned(), text)).collect();
    let mut lines = vec![String::new(), format!("{} micro-steps, without the first:", summary.micro_steps)];
    lines.extend(super::output::columns(&rows));
    lines
}

/// What was measured against what the sizes of the model let expect.
fn cost_rows(summary: &Summary) -> Vec<(&'static str, String)> {
    let mut rows = Vec::new();
    match (summary.measured_cost, summary.residual_ms) {
        (Some(cost), Some(residual)) => rows.push((
            "fitted",
            format!(
                "{:.4} ms a token + {:.3e} ms a pair + {:.1} ms a micro-step, to {residual:.1} ms",
                cost.per_token, cost.per_pair, cost.per_micro_batch
            ),
        )),
        _ => rows.push(("fitted", "nothing: the micro-steps are too few or too much alike".to_owned())),
    }
    if let (Some(flop), Some(speed)) = (summary.flop, summary.gflop_per_s) {
        let ratio = flop.per_token / flop.per_pair;
        rows.push((
            "by size",
            format!(
                "{} FLOP a token, {} a pair: {speed:.1} GFLOP/s; a token is worth {ratio:.0} pairs",
                thousands(flop.per_token as u64),
                thousands(flop.per_pair as u64)
            ),
        ));
        if let Some(cost) = summary.measured_cost {
            rows.push((
                "",
                match cost.per_token > 0.0 && cost.per_pair > 0.0 {
                    true => format!("measured, {:.0} pairs", cost.per_token / cost.per_pair),
                    false => "measured, a cost below zero: noise; more micro-steps tell more".to_owned(),
                },
            ));
        }
    }
    rows
}
