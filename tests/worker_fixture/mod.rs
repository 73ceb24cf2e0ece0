//! Runs of the worker in this process, and what they leave: shared by the tests of both families.

use lbva_tui::config::Recipe;
use lbva_tui::runlog::{Check, CheckpointStore, Event, RunDir};
use lbva_tui::train::stop::StopFlag;
use lbva_tui::train::worker::{self, WorkerSpec};
use lbva_tui::{Exit, Result};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// A run of this recipe in `folder/name`, with the latent cache of all runs beside it.
pub fn spec_of(folder: &Path, name: &str, recipe: Recipe) -> WorkerSpec {
    WorkerSpec {
        experiment: "test".into(),
        arm: "arm".into(),
        arm_index: (0, 1),
        recipe_text: recipe.to_yaml(),
        recipe,
        run: RunDir::new(folder.join(name)),
        cache: folder.join("cache"),
        stop_after: None,
        detached: false,
        job: None,
        warnings: vec![],
        command_line: vec!["test".into()],
        code_version: "test".into(),
        accepted: vec![],
        peers: vec![],
    }
}

/// The whole run, and everything it recorded.
pub fn train(spec: WorkerSpec) -> (Result<Exit>, Vec<Event>) {
    let mut events = Vec::new();
    let exit = worker::run(spec, StopFlag::default(), &mut |event| events.push(event.clone()));
    (exit, events)
}

/// Every file of the newest checkpoint, by name.
pub fn last_checkpoint(run: &Path) -> (u64, BTreeMap<PathBuf, Vec<u8>>) {
    let latest = CheckpointStore::new(&RunDir::new(run)).latest_complete(Check::Hashes).unwrap();
    let checkpoint = latest.checkpoint.expect("a checkpoint");
    let files = checkpoint.manifest.files.iter().map(|file| {
        let path = checkpoint.path.join(&file.name);
        (PathBuf::from(&file.name), std::fs::read(path).unwrap())
    });
    (checkpoint.step, files.collect())
}

/// The measurements of a validation point, as they are on disk.
pub fn metrics(run: &Path, step: u64) -> String {
    std::fs::read_to_string(RunDir::new(run).validation_metrics(step)).unwrap()
}

/// Step and loss of every step event.
pub fn losses(events: &[Event]) -> Vec<(u64, f64)> {
    events
        .iter()
        .filter_map(|event| match event {
            Event::Step(step) => Some((step.step, step.loss)),
            _ => None,
        })
        .collect()
}
