//! An experiment: a base recipe, arms that differ in declared fields, one decision rule.
//!
//! Parity is an equation, not a permission: the resolved recipes of two arms must differ in exactly the ablated
//! fields. One more is a confounder; one missing means that the arms are the same and the comparison says nothing.

use super::document::{Document, Segment};
use super::resolve::{Layers, absolute, folder_of, nearest_field};
use super::typed::from_tree;
use super::types::{DecisionRule, ExperimentFile, Recipe, SlurmSettings};
use super::{first_problem, validate::repeated};
use crate::{Error, Result};
use std::path::{Path, PathBuf};

/// The file that makes a folder an experiment.
const FILE_NAME: &str = "experiment.yaml";

/// One arm, resolved: base file, its overrides, the command line's.
#[derive(Clone, Debug, PartialEq)]
pub struct Arm {
    /// Also the name of its run folder.
    pub name: String,
    pub recipe: Recipe,
}

/// A loaded experiment whose arms agree except in the ablated fields.
#[derive(Clone, Debug, PartialEq)]
pub struct Experiment {
    pub name: String,
    /// What is asked, in one sentence.
    pub question: String,
    /// Absolute folder of `experiment.yaml`.
    pub directory: PathBuf,
    /// Dotted fields in which the arms differ.
    pub ablated: Vec<String>,
    pub rule: DecisionRule,
    /// In the file's order.
    pub arms: Vec<Arm>,
    /// How `submit` asks a cluster for a job.
    pub slurm: Option<SlurmSettings>,
}

/// An experiment and everything that is wrong with it.
#[derive(Clone, Debug)]
pub struct Examination {
    /// The experiment as far as it could be read; absent if the file or every arm has a fault of form.
    pub experiment: Option<Experiment>,
    /// One line each; empty means that the configuration may run.
    pub problems: Vec<Error>,
}

impl Experiment {
    /// Loads a folder with an `experiment.yaml` (or that file itself). Fails at the first problem; [`examine`] lists
    /// all. Beside the codes of [`load`](super::load): `no_experiment`, `arms_differ`, `ablation_missing`.
    pub fn load(path: &Path) -> Result<Self> {
        Self::load_with(path, &[])
    }

    /// [`Experiment::load`] with `key=value` overrides on top of every arm.
    pub fn load_with(path: &Path, overrides: &[String]) -> Result<Self> {
        let examination = examine(path, overrides);
        match (first_problem(examination.problems), examination.experiment) {
            (Some(problem), _) => Err(problem),
            (None, Some(experiment)) => Ok(experiment),
            (None, None) => Err(Error::crash("an experiment without problems could not be loaded").at(path)),
        }
    }

    /// Are the arms the same function before the first step, so that a difference at step 0 is a fault? The geometry
    /// branch starts as an exact no-op and the optimisation has not begun; any other ablated field may change it.
    pub fn arms_start_equal(&self) -> bool {
        let equal = |field: &String| {
            field.starts_with("model.geometry")
                || field.starts_with("packing.")
                || (field.starts_with("train.") && field != "train.seed")
        };
        self.ablated.iter().all(equal)
    }

    /// The arm of this name, or an error that names the nearest (exit 2: arms are named on the command line).
    pub fn arm(&self, name: &str) -> Result<&Arm> {
        self.arms.iter().find(|arm| arm.name == name).ok_or_else(|| {
            let names: Vec<String> = self.arms.iter().map(|arm| arm.name.clone()).collect();
            let hint = match super::nearest(name, &names) {
                Some(nearest) => format!("did you mean {nearest}?"),
                None => format!("its arms are {}", names.join(", ")),
            };
            Error::usage("unknown_arm", format!("experiment {} has no arm {name}", self.name)).hint(hint)
        })
    }
}

/// Reads an experiment and lists every problem that the configuration alone decides.
pub fn examine(path: &Path, overrides: &[String]) -> Examination {
    let mut problems = Vec::new();
    let experiment = match read_file(path) {
        Ok((file, document, directory)) => Some(resolve(file, &document, directory, overrides, &mut problems)),
        Err(problem) => {
            problems.push(problem);
            None
        }
    };
    Examination { experiment, problems }
}

fn read_file(path: &Path) -> Result<(ExperimentFile, Document, PathBuf)> {
    let file = if path.is_dir() { path.join(FILE_NAME) } else { path.to_owned() };
    if !file.is_file() {
        let what = if path.exists() { "no experiment.yaml in this folder" } else { "no such experiment" };
        return Err(Error::refused("no_experiment", what).at(path).hint("name a folder such as experiments/demo"));
    }
    let document = Document::read(&file)?;
    let read: ExperimentFile = from_tree(&document.tree).map_err(|fault| {
        Error::refused(fault.code(), fault.sentence()).in_place(document.place(&fault.path())).hint(fault.hint(&[]))
    })?;
    let directory = folder_of(&file)?;
    Ok((read, document, directory))
}

fn resolve(
    file: ExperimentFile,
    document: &Document,
    directory: PathBuf,
    overrides: &[String],
    problems: &mut Vec<Error>,
) -> Experiment {
    judge_file(&file, document, problems);
    let folder = directory.clone();
    let base_path = shortened(&absolute(&directory, &file.base));
    let mut arms = Vec::new();
    match Layers::read(&base_path) {
        Err(problem) => problems.push(named_by_base(problem, document)),
        Ok(base) => {
            for (index, arm) in file.arms.iter().enumerate() {
                let place =
                    format!("{}, arm {}", document.place(&[key("arms"), Segment::Index(index), key("set")]), arm.name);
                let mut layers = base.clone();
                let resolved = layers
                    .add_arm(&arm.set, &document.path, &place)
                    .and_then(|()| layers.add_command_line(overrides))
                    .and_then(|()| layers.resolve());
                match resolved {
                    Ok((recipe, found)) => {
                        add_new(problems, found);
                        arms.push(Arm { name: arm.name.clone(), recipe });
                    }
                    Err(problem) => add_new(problems, vec![problem]),
                }
            }
        }
    }
    let experiment = Experiment {
        name: file.name,
        question: file.question,
        directory,
        ablated: file.ablated,
        rule: file.decision,
        arms,
        slurm: file.slurm.map(|settings| SlurmSettings {
            wrapper: settings.wrapper.as_deref().map(|path| absolute(&folder, path)),
            ..settings
        }),
    };
    judge_parity(&experiment, document, problems);
    experiment
}

/// A fault of the base file shows in every arm; it is one problem.
fn add_new(problems: &mut Vec<Error>, found: Vec<Error>) {
    for problem in found {
        if !problems.contains(&problem) {
            problems.push(problem);
        }
    }
}

/// A base that is absent is the experiment file's mistake: say which line names it.
fn named_by_base(problem: Error, document: &Document) -> Error {
    if problem.code != "file_missing" {
        return problem;
    }
    let named = format!("base names {}, which does not exist", problem.place);
    Error::refused("file_missing", named).in_place(document.place(&[key("base")]))
}

/// Paths below the current folder are shown as the user would type them.
fn shortened(path: &Path) -> PathBuf {
    let current = std::env::current_dir().and_then(std::fs::canonicalize);
    match current.ok().and_then(|current| path.strip_prefix(current).ok().map(Path::to_owned)) {
        Some(relative) if !relative.as_os_str().is_empty() => relative,
        _ => path.to_owned(),
    }
}

fn judge_file(file: &ExperimentFile, document: &Document, problems: &mut Vec<Error>) {
    let mut refuse = |path: &[Segment], what: String| {
        problems.push(Error::refused("bad_value", what).in_place(document.place(path)));
    };
    if file.name.trim().is_empty() {
        refuse(&[key("name")], "name: must not be empty".to_owned());
    }
    if file.ablated.is_empty() {
        refuse(&[key("ablated")], "ablated: name at least one field in which the arms differ".to_owned());
    }
    if let Some(field) = repeated(&file.ablated) {
        refuse(&[key("ablated")], format!("ablated: {field} stands twice"));
    }
    if file.arms.len() < 2 {
        refuse(&[key("arms")], format!("arms: a comparison needs at least two, found {}", file.arms.len()));
    }
    for (index, arm) in file.arms.iter().enumerate() {
        // The name becomes a folder and a word of log lines and job names.
        let plain = arm.name.chars().all(|letter| letter.is_ascii_alphanumeric() || matches!(letter, '_' | '-' | '.'));
        if arm.name.is_empty() || arm.name.len() > 64 || !plain || arm.name.starts_with(['.', '-']) {
            let path = [key("arms"), Segment::Index(index), key("name")];
            refuse(
                &path,
                format!(
                    "arms[{index}].name: {:?} is no folder name: letters, digits, _ - and ., at most 64, a letter or digit first",
                    arm.name
                ),
            );
        }
    }
    let names: Vec<&str> = file.arms.iter().map(|arm| arm.name.as_str()).collect();
    if let Some(name) = repeated(&names) {
        refuse(&[key("arms")], format!("arms: {name} stands twice"));
    }
    let rule = &file.decision;
    for (field, arm) in [("baseline", &rule.baseline), ("candidate", &rule.candidate)] {
        if !names.contains(&arm.as_str()) {
            let path = [key("decision"), key(field)];
            refuse(&path, format!("decision.{field}: {arm} is no arm of this experiment ({})", names.join(", ")));
        }
    }
    if rule.baseline == rule.candidate {
        refuse(&[key("decision"), key("candidate")], "decision.candidate: the same arm as the baseline".to_owned());
    }
    if rule.metric != "wrist_lpips" {
        let what = format!("decision.metric: only wrist_lpips decides, found {}", rule.metric);
        refuse(&[key("decision"), key("metric")], what);
    }
    if !(rule.confidence > 0.5 && rule.confidence < 1.0) {
        let what = format!("decision.confidence: must lie between 0.5 and 1, found {}", rule.confidence);
        refuse(&[key("decision"), key("confidence")], what);
    }
    for (field, what) in file.slurm.iter().flat_map(slurm_faults) {
        let path = [key("slurm"), key(field)];
        refuse(&path, format!("slurm.{field}: {what}"));
    }
    if !(100..=1_000_000).contains(&rule.resamples) {
        let what = format!("decision.resamples: must be from 100 to 1,000,000, found {}", rule.resamples);
        refuse(&[key("decision"), key("resamples")], what);
    }
}

/// What would break out of a line of the batch script, or be no option of sbatch: field and sentence.
fn slurm_faults(slurm: &SlurmSettings) -> Vec<(&'static str, String)> {
    let word =
        |text: &str| !text.is_empty() && !text.contains(|c: char| c.is_whitespace() || c.is_control() || c == '#');
    let words = [
        ("partition", &slurm.partition),
        ("qos", &slurm.qos),
        ("account", &slurm.account),
        ("mem", &slurm.mem),
        ("time", &slurm.time),
    ];
    let bad = words.into_iter().filter_map(|(field, value)| Some((field, value.as_ref()?)));
    let mut faults: Vec<_> =
        bad.filter(|(_, value)| !word(value)).map(|(field, value)| (field, format!("{value:?} is no word"))).collect();
    for (field, value) in [("gpus", slurm.gpus), ("cpus", slurm.cpus), ("max_idle_attempts", slurm.max_idle_attempts)] {
        if value == Some(0) {
            faults.push((field, "must be at least 1, or left out".to_owned()));
        }
    }
    for line in &slurm.extra {
        // These are the program's own: otherwise a preempted run is lost, or trained twice. Tasks of an array would all
        // train the one run.
        let own = [
            "--job-name",
            "--comment",
            "--dependency",
            "--requeue",
            "--no-requeue",
            "--open-mode",
            "--signal",
            "--array",
        ];
        if let Some(own) = own.iter().find(|own| line.starts_with(**own)) {
            faults.push(("extra", format!("{own} is set by the program itself")));
        } else if !line.starts_with("--") || line.contains(['\n', '\r']) {
            faults.push(("extra", format!("{line:?} is no option of sbatch, as in --exclude=gpu3")));
        }
    }
    if let Some(line) = slurm.setup.iter().find(|line| line.contains(['\n', '\r'])) {
        faults.push(("setup", format!("{line:?} is more than one line")));
    }
    faults
}

/// Compares every arm with the baseline, field by field, in the resolved recipes.
fn judge_parity(experiment: &Experiment, document: &Document, problems: &mut Vec<Error>) {
    let Some(baseline) = experiment.arms.iter().find(|arm| arm.name == experiment.rule.baseline) else { return };
    let place = document.place(&[key("ablated")]);
    let reference = baseline.recipe.flatten();
    let fields: Vec<String> = reference.iter().map(|(field, _)| field.clone()).collect();
    for ablated in &experiment.ablated {
        if !fields.iter().any(|field| covers(ablated, field)) {
            let problem = Error::refused("unknown_key", format!("ablated: the recipe has no field {ablated}"));
            let hint = nearest_field(ablated, &fields).map(|name| format!("did you mean {name}?")).unwrap_or_default();
            problems.push(problem.in_place(&place).hint(hint));
        }
    }
    for arm in experiment.arms.iter().filter(|arm| arm.name != baseline.name) {
        let pair = format!("{} and {}", baseline.name, arm.name);
        let differences = differences(&reference, &arm.recipe.flatten());
        for (field, left, right) in &differences {
            if !experiment.ablated.iter().any(|ablated| covers(ablated, field)) {
                let what = format!("{pair} differ in {field} ({left} against {right}), which is not ablated");
                problems.push(
                    Error::refused("arms_differ", what)
                        .in_place(&place)
                        .hint("give both arms one value, or declare the field"),
                );
            }
        }
        for ablated in &experiment.ablated {
            let known = reference.iter().find(|(field, _)| covers(ablated, field));
            let Some((_, value)) = known else { continue };
            if !differences.iter().any(|(field, ..)| covers(ablated, field)) {
                let what = format!("{pair} do not differ in the ablated field {ablated} (both {value})");
                problems.push(
                    Error::refused("ablation_missing", what)
                        .in_place(&place)
                        .hint("override it in one arm only, and in no --set"),
                );
            }
        }
    }
}

/// Does a field that is named as ablated stand for this one? A whole group may be: `model.geometry` stands for each
/// field below it, a list for its elements.
pub(crate) fn covers(ablated: &str, field: &str) -> bool {
    field.strip_prefix(ablated).is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']))
}

/// Fields whose values differ, with both; a field that one side lacks is `absent` there.
fn differences(left: &[(String, String)], right: &[(String, String)]) -> Vec<(String, String, String)> {
    let value = |side: &[(String, String)], field: &str| {
        side.iter().find(|(name, _)| name == field).map_or("absent".to_owned(), |(_, value)| value.clone())
    };
    let only_right = right.iter().filter(|(field, _)| !left.iter().any(|(name, _)| name == field));
    left.iter()
        .chain(only_right)
        .map(|(field, _)| (field.clone(), value(left, field), value(right, field)))
        .filter(|(_, left, right)| left != right)
        .collect()
}

fn key(name: &str) -> Segment {
    Segment::Key(name.to_owned())
}
