//! Which experiment a path means: itself, or the one below it where something happened last.

use crate::runlog::ExperimentRuns;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// The experiment to show, and the names of the others beside it. A folder is an experiment if it has an
/// `experiment.yaml` or a `runs/`; a folder of experiments stands for the one whose runs changed last.
pub fn choose(path: &Path) -> (PathBuf, Vec<String>) {
    if is_experiment(path) {
        return (path.to_owned(), Vec::new());
    }
    let Ok(entries) = std::fs::read_dir(path) else { return (path.to_owned(), Vec::new()) };
    let mut found: Vec<(Option<SystemTime>, PathBuf)> = entries
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| is_experiment(path))
        .map(|path| (last_change(&path), path))
        .collect();
    // Newest last; without runs before all others, by name.
    found.sort();
    let Some((_, chosen)) = found.pop() else { return (path.to_owned(), Vec::new()) };
    let name = |path: &PathBuf| path.file_name().map(|name| name.to_string_lossy().into_owned());
    (chosen, found.iter().filter_map(|(_, path)| name(path)).collect())
}

fn is_experiment(path: &Path) -> bool {
    path.join("experiment.yaml").is_file() || path.join("runs").is_dir()
}

/// When a log of the experiment's newest attempts last grew.
fn last_change(experiment: &Path) -> Option<SystemTime> {
    let runs = ExperimentRuns::new(experiment).list().ok()?;
    let logs = runs.iter().filter_map(|run| Some(run.newest_attempt().ok()??.events()));
    logs.filter_map(|log| std::fs::metadata(log).ok()?.modified().ok()).max()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_of_experiments_means_the_one_that_changed_last() {
        let folder = tempfile::tempdir().unwrap();
        for (name, age_s) in [("old", 500), ("new", 10), ("middle", 100)] {
            let attempt = folder.path().join(name).join("runs/m1/attempts/0001");
            std::fs::create_dir_all(&attempt).unwrap();
            let log = std::fs::File::create(attempt.join("events.jsonl")).unwrap();
            log.set_modified(SystemTime::now() - std::time::Duration::from_secs(age_s)).unwrap();
        }
        std::fs::create_dir_all(folder.path().join("unstarted")).unwrap();
        std::fs::write(folder.path().join("unstarted/experiment.yaml"), "").unwrap();
        std::fs::create_dir_all(folder.path().join("no_experiment")).unwrap();
        let (chosen, others) = choose(folder.path());
        assert_eq!(chosen, folder.path().join("new"));
        assert_eq!(others, ["unstarted", "old", "middle"]);
        assert_eq!(choose(&chosen), (chosen.clone(), vec![]));
        let empty = folder.path().join("no_experiment");
        assert_eq!(choose(&empty), (empty.clone(), vec![]));
    }
}
