//! What `check` says of the arms' appetite: memory by part, checkpoints against the free disk, and how soon a run is safe.

use crate::config::Recipe;
use crate::files::free_bytes;
use crate::plan::Survival;
use crate::runlog::{CheckpointStore, ExperimentRuns, RunReader, now_ms};
use crate::train::engine::gpus_to_forecast;
use crate::train::forecast::{self, GpuForecast, MemoryForecast, Shape};
use crate::train::profile::megabytes;
use crate::words::{duration, thousands};
use crate::{Error, Exit, Result};
use serde::Serialize;
use std::path::Path;

/// What one arm will take.
#[derive(Serialize)]
pub struct ArmForecast {
    pub memory: MemoryForecast,
    pub memory_bytes: u64,
    /// What training takes of GPUs by name: of the one here, or where there is none of those that people have. Empty where a
    /// run cannot use one, or the size of a batch is not known.
    pub gpus: Vec<(String, GpuForecast)>,
    pub checkpoint_bytes: u64,
    /// At the fullest moment of the run, one that is being written included.
    pub disk_bytes: u64,
    pub first_checkpoint: FirstCheckpoint,
}

/// The moment from which an interruption costs no more than what came since.
#[derive(Serialize)]
pub struct FirstCheckpoint {
    pub step: u64,
    /// By the pace of an earlier attempt; absent before there is one.
    pub ms: Option<u64>,
    /// Of the attempts that were seen, the share that lived so long.
    pub reached: Option<f64>,
}

impl FirstCheckpoint {
    fn at(step: u64, pace_ms: Option<f64>, attempts: Option<&Survival>) -> Self {
        let ms = pace_ms.map(|ms| (ms * step as f64) as u64);
        let reached = ms.zip(attempts).map(|(ms, attempts)| attempts.at(ms as f64 / 1e3));
        Self { step, ms, reached }
    }

    /// `first at step 200, after about 12 min at the pace of the last attempt; 83 % of attempts live that long`
    fn words(&self) -> String {
        let when = match self.ms {
            Some(ms) => format!("after about {} at the pace of the last attempt", duration(ms)),
            None => "no attempt has told its pace yet".to_owned(),
        };
        let reached = self.reached.map_or_else(String::new, |share| {
            let hint = if share < 0.5 { ": save more often (train.save_every)" } else { "" };
            format!("; {:.0} % of attempts live that long{hint}", 100.0 * share)
        });
        format!("first at step {}, {when}{reached}", thousands(self.step))
    }
}

impl ArmForecast {
    /// `run` is the arm's, if it is an experiment's.
    /// `attempts`, if they are known, tell how many live until the first checkpoint.
    pub fn of(
        recipe: &Recipe,
        shape: Option<Shape>,
        run: Option<&crate::runlog::RunDir>,
        attempts: Option<&Survival>,
    ) -> Self {
        let memory = forecast::memory(recipe, shape);
        let step = recipe.train().save_every.min(recipe.train().steps);
        let pace_ms = run.and_then(|run| {
            let mut reader = RunReader::open(run.root());
            // What cannot be read tells no pace; whoever resumes the run hears of it.
            reader.poll(now_ms()).ok()?;
            reader.view().pace_ms()
        });
        Self {
            memory,
            memory_bytes: memory.total(),
            gpus: shape.map_or_else(Vec::new, |shape| gpus(recipe, shape)),
            checkpoint_bytes: forecast::checkpoint_bytes(recipe),
            disk_bytes: forecast::disk_bytes(recipe),
            first_checkpoint: FirstCheckpoint::at(step, pace_ms, attempts),
        }
    }

    /// Label and text of each row for people.
    pub fn rows(&self, name: &str) -> Vec<(String, String)> {
        let MemoryForecast { parameters, gradients, master, moments, activations, snapshot } = self.memory;
        let mut parts: Vec<(&str, u64)> = vec![
            ("parameters", parameters),
            ("gradients", gradients),
            ("master weights", master),
            ("moments", moments),
        ];
        parts.extend(activations.map(|bytes| ("activations", bytes)));
        parts.push(("a save's copy", snapshot));
        let list =
            parts.iter().map(|(part, bytes)| format!("{part} {}", megabytes(*bytes))).collect::<Vec<_>>().join(", ");
        let unknown = if activations.is_none() { "; activations are known once the data are here" } else { "" };
        let mut rows = vec![(
            format!("memory, {name}"),
            format!("{} MB on the CPU: {list}{unknown}", megabytes(self.memory_bytes)),
        )];
        rows.extend(gpu_words(&self.gpus).map(|words| (format!("GPU, {name}"), words)));
        rows.push((
            format!("disk, {name}"),
            format!(
                "{} MB a checkpoint, {} MB at the fullest moment; {}",
                megabytes(self.checkpoint_bytes),
                megabytes(self.disk_bytes),
                self.first_checkpoint.words()
            ),
        ));
        rows
    }
}

fn gpus(recipe: &Recipe, shape: Shape) -> Vec<(String, GpuForecast)> {
    // A recipe whose parameters cannot be laid out has been refused already.
    let forecast = |(name, total)| Some((name, forecast::gpu(recipe, shape, total).ok()??));
    gpus_to_forecast(recipe.device()).into_iter().filter_map(forecast).collect()
}

/// `800 to 1,182 MB (parameters, gradients and optimizer 35); an H200: nothing is computed again`
fn gpu_words(gpus: &[(String, GpuForecast)]) -> Option<String> {
    let (_, GpuForecast { state, least, most, .. }) = gpus.first()?;
    let on = gpus.iter().map(|(name, GpuForecast { total, most, peak, kept, .. })| match (peak, kept) {
        (Some(peak), _) if peak == most => format!("{name}: nothing is computed again"),
        (Some(peak), Some(kept)) => format!(
            "{name}: {} of {} MB at the peak, the backward pass finds {kept}, and what the host's memory takes",
            megabytes(*peak),
            megabytes(*total)
        ),
        _ => format!("{name}, {} MB: does not fit, take a smaller batch", megabytes(*total)),
    });
    let on = on.collect::<Vec<_>>().join("; ");
    let [least, most, state] = [least, most, state].map(|bytes| megabytes(*bytes));
    Some(format!("{least} to {most} MB (parameters, gradients and optimizer {state}); {on}"))
}

/// Free disk against what all arms will take.
#[derive(Serialize)]
pub struct DiskReport {
    pub needed_bytes: u64,
    /// What is free, and what checkpoints of the arms' runs take already.
    pub available_bytes: u64,
}

/// Compares the arms' checkpoints with the disk that their runs lie on, and asks whether anything may be written there.
///
/// # Errors
/// Of the disk: `permission_denied` and its kin. A disk that is too small is told in the second part.
pub fn disk(experiment: &Path, arms: &[(String, Recipe)]) -> Result<(DiskReport, Option<Error>)> {
    let runs = ExperimentRuns::new(experiment);
    let root = runs.root();
    // Where nothing has run yet, its folder is made in the nearest one that exists.
    let there = root.ancestors().find(|folder| folder.exists()).unwrap_or(experiment);
    rustix::fs::access(there, rustix::fs::Access::WRITE_OK)
        .map_err(|error| crate::files::io_error("runs cannot be written here", there, &error.into()))?;
    let present = |arm: &str| -> Result<u64> {
        let complete = CheckpointStore::new(&runs.run(arm)).complete()?;
        Ok(complete.iter().map(crate::runlog::Checkpoint::bytes).sum())
    };
    let mut report = DiskReport { needed_bytes: 0, available_bytes: free_bytes(there)? };
    for (arm, recipe) in arms {
        report.needed_bytes = report.needed_bytes.saturating_add(forecast::disk_bytes(recipe));
        report.available_bytes = report.available_bytes.saturating_add(present(arm)?);
    }
    let problem = (report.needed_bytes > report.available_bytes).then(|| {
        let what = format!(
            "checkpoints of {} arms will take {} MB, and {} MB can be had",
            arms.len(),
            megabytes(report.needed_bytes),
            megabytes(report.available_bytes)
        );
        Error::new(Exit::Disk, "disk_too_small", what)
            .at(there)
            .hint("free space, or lower train.keep_last or the number of milestones (a higher train.keep_every)")
    });
    Ok((report, problem))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_first_checkpoint_is_held_against_how_long_attempts_live() {
        let seen = Survival::weibull(1.0, 600.0, 0.0);
        let words = |pace_ms, attempts| FirstCheckpoint::at(200, pace_ms, attempts).words();
        assert_eq!(words(None, Some(&seen)), "first at step 200, no attempt has told its pace yet");
        // exp(-60 / 600) and exp(-1200 / 600).
        assert!(words(Some(300.0), Some(&seen)).ends_with("; 90 % of attempts live that long"));
        let late = words(Some(6000.0), Some(&seen));
        assert!(late.ends_with("; 14 % of attempts live that long: save more often (train.save_every)"), "{late}");
        assert!(words(Some(6000.0), None).ends_with("at the pace of the last attempt"));
    }
}
