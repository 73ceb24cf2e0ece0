//! `lbva-tui [PATH]`: the console over an experiment, or what every run there is doing, as lines.

use super::arguments::Global;
use super::recorded::recorded_overrides;
use super::session::Session;
use super::{has_screen, output};
use crate::config::Experiment;
use crate::runlog::{AttemptView, ExperimentRuns, MOST_CRASHES, RunReader, RunState, RunView, Tries, now_ms};
use crate::slurm::{JobView, JobWatch, Look, Slurm, job_words, judge};
use crate::{Error, Exit, Result};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// Where experiments are, if nobody says.
const DEFAULT: &str = "experiments";

/// Opens the console, or prints the states of all runs.
pub fn open(path: Option<&Path>, global: &Global) -> Result<Exit> {
    let path = path.unwrap_or(Path::new(DEFAULT));
    let experiments = experiments_in(path)?;
    if !has_screen(global) {
        return list(&experiments, global);
    }
    let (chosen, others) = most_recent(&experiments).ok_or_else(|| nothing_in(path))?;
    let experiment = Experiment::load(chosen)?;
    let arms: Vec<String> = experiment.arms.iter().map(|arm| arm.name.clone()).collect();
    // A run that is resumed from the console must be started as it was.
    let overrides = recorded_overrides(&experiment.directory, &arms)?.unwrap_or_default();
    Session::new(experiment, &[], overrides.arguments(), None)?.watch(global, false, others)
}

/// The path itself if it is an experiment, else the experiments right below it, by name.
fn experiments_in(path: &Path) -> Result<Vec<PathBuf>> {
    let is_experiment = |folder: &Path| folder.join("experiment.yaml").is_file();
    if is_experiment(path) {
        return Ok(vec![path.to_owned()]);
    }
    if !path.is_dir() {
        return Err(not_there(path));
    }
    let entries = std::fs::read_dir(path)
        .map_err(|error| Error::data("not_readable", format!("cannot be read: {error}")).at(path))?;
    let mut found: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).filter(|it| is_experiment(it)).collect();
    found.sort();
    if found.is_empty() { Err(nothing_in(path)) } else { Ok(found) }
}

/// A word that is no folder may be a command with a slip in it.
fn not_there(path: &Path) -> Error {
    use clap::CommandFactory;
    let error = Error::usage("no_experiment", "no such experiment or command").at(path);
    let commands: Vec<String> =
        super::Arguments::command().get_subcommands().map(|command| command.get_name().to_owned()).collect();
    match path.to_str().and_then(|name| crate::config::nearest(name, &commands)) {
        Some(command) => error.hint(format!("did you mean the command {command}?")),
        None => error.hint("name a folder such as experiments/demo, or see --help"),
    }
}

fn nothing_in(path: &Path) -> Error {
    Error::usage("no_experiment", "no experiment here: no folder with an experiment.yaml").at(path)
}

/// The experiment whose runs changed last (without runs the first by name), and the names of the others.
fn most_recent(experiments: &[PathBuf]) -> Option<(&PathBuf, Vec<String>)> {
    let newest = experiments
        .iter()
        .filter_map(|folder| Some((last_change(folder)?, folder)))
        .max_by(|(left, _), (right, _)| left.cmp(right));
    let chosen = newest.map(|(_, folder)| folder).or(experiments.first())?;
    let name = |path: &PathBuf| path.file_name().map(|name| name.to_string_lossy().into_owned());
    Some((chosen, experiments.iter().filter(|folder| *folder != chosen).filter_map(name).collect()))
}

/// When a log of the experiment's newest attempts last grew.
fn last_change(experiment: &Path) -> Option<SystemTime> {
    let runs = ExperimentRuns::new(experiment).list().ok()?;
    let newest_of = |run: &crate::runlog::RunDir| {
        let events = run.newest_attempt().ok()??.events();
        std::fs::metadata(events).and_then(|metadata| metadata.modified()).ok()
    };
    runs.iter().filter_map(newest_of).max()
}

/// The jobs of an experiment's runs. Slurm is asked only where one was submitted; without an answer the run directories
/// still tell what they know.
pub(super) fn jobs(runs: &ExperimentRuns) -> Result<Look> {
    let runs = runs.list()?;
    if JobWatch::recorded(&runs).is_empty() {
        return Ok(Look::default());
    }
    let look = JobWatch::default().look(&Slurm::default(), &runs, Duration::ZERO).clone();
    if let Some(error) = &look.error {
        output::note(format!("warning: {error}"));
    }
    Ok(look)
}

fn list(experiments: &[PathBuf], global: &Global) -> Result<Exit> {
    let mut documents = Vec::new();
    for path in experiments {
        let experiment = Experiment::load(path)?;
        let runs = ExperimentRuns::new(&experiment.directory);
        let look = jobs(&runs)?;
        let mut arms = Vec::new();
        let mut rows = Vec::new();
        for arm in &experiment.arms {
            let mut reader = RunReader::open(runs.run(&arm.name).root());
            let now_ms = now_ms();
            reader.poll(now_ms)?;
            let view = reader.view();
            let job = look.jobs.get(&arm.name);
            let (state, reason) = judge(view, now_ms, job);
            let total = if view.total_steps() > 0 { view.total_steps() } else { arm.recipe.train().steps };
            let said = match job.filter(|job| job.is_live() && state != RunState::Queued) {
                Some(job) => format!("{reason}; {}", job_words(view, job)),
                None => reason.clone(),
            };
            rows.push((arm.name.clone(), format!("{:9} step {}/{total}  {said}", state.word(), view.steps_done())));
            let mut document =
                arm_document(&arm.name, state.word(), &reason, view.steps_done(), total, view.age_ms(now_ms));
            document["attempts"] = attempts(view).into();
            document["job"] = job.map_or(Value::Null, |job| job_document(view, job));
            arms.push(document);
        }
        if !global.json {
            output::line(format!("{}  {}", path.display(), experiment.question))?;
            for line in output::columns(&rows) {
                output::line(format!("  {line}"))?;
            }
        }
        documents.push(json!({"experiment": experiment.name, "path": path, "arms": arms}));
    }
    if global.json {
        output::document(&json!({"experiments": documents}))?;
    }
    Ok(Exit::Done)
}

fn arm_document(name: &str, state: &str, reason: &str, step: u64, total: u64, age_ms: Option<u64>) -> Value {
    json!({"arm": name, "state": state, "reason": reason, "step": step, "total_steps": total, "age_ms": age_ms})
}

/// What each attempt got done, oldest first.
fn attempts(view: &RunView) -> Vec<Value> {
    let reached = |number: u32| {
        let newest = view.series.attempt.partition_point(|attempt| *attempt <= number);
        let last = newest.checked_sub(1).filter(|last| view.series.attempt.get(*last) == Some(&number));
        last.and_then(|last| view.series.step.get(last)).copied()
    };
    let document = |attempt: &AttemptView| {
        let started = &attempt.started;
        json!({
            "attempt": started.attempt, "from_step": started.start_step,
            "to_step": reached(started.attempt).unwrap_or(started.start_step), "started_ms": attempt.started_ms,
            "host": started.host, "job": started.job, "ended": attempt.ended.as_ref().map(|(_, reason)| reason),
        })
    };
    view.attempts.iter().map(document).collect()
}

fn job_document(view: &RunView, job: &JobView) -> Value {
    let Tries { idle, crashes } = view.tries_before(job.id, job.restarts);
    let started = view.attempt().and_then(|attempt| attempt.started.job.as_ref());
    let allowed = started.filter(|started| started.id == job.id).and_then(|started| started.max_idle_attempts);
    json!({
        "tries_in_vain": idle, "tries_in_vain_allowed": allowed,
        "crashes": crashes, "crashes_allowed": allowed.map(|_| MOST_CRASHES),
        "id": job.id, "state": job.state.word(), "words": job.words, "restarts": job.restarts, "used_s": job.used_s,
        "limit_s": job.limit_s, "nodes": job.nodes,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_of_experiments_means_the_one_that_changed_last() {
        let folder = tempfile::tempdir().unwrap();
        for (name, age_s) in [("old", Some(500)), ("new", Some(10)), ("middle", Some(100)), ("unstarted", None)] {
            let experiment = folder.path().join(name);
            let attempt = experiment.join("runs/m1/attempts/0001");
            std::fs::create_dir_all(&attempt).unwrap();
            std::fs::write(experiment.join("experiment.yaml"), "").unwrap();
            if let Some(age_s) = age_s {
                let log = std::fs::File::create(attempt.join("events.jsonl")).unwrap();
                log.set_modified(SystemTime::now() - std::time::Duration::from_secs(age_s)).unwrap();
            }
        }
        std::fs::create_dir_all(folder.path().join("no_experiment")).unwrap();
        let found = experiments_in(folder.path()).unwrap();
        let (chosen, others) = most_recent(&found).unwrap();
        assert_eq!(chosen, &folder.path().join("new"));
        assert_eq!(others, ["middle", "old", "unstarted"]);
        assert_eq!(most_recent(&found[3..]), Some((&folder.path().join("unstarted"), vec![])));
        assert_eq!(most_recent(&[]), None);
    }
}
