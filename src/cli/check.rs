//! `check`: everything that a CPU can decide, in seconds, before anything is queued or trained.

use super::arguments::{CheckArguments, Global};
use super::device::{Device, describe};
use super::output;
use crate::codec::{LinearCodec, SPACE_STRIDE};
use crate::config::{self, CodecConfig, Experiment, LatentSource, LingbotRecipe, Recipe, XwamRecipe};
use crate::data::{Dataset, EpisodeSet};
use crate::model::{self, ParameterCount};
use crate::pack::cost::CostModel;
use crate::pack::step::Planner;
use crate::train::lingbot::{UNDECODED, batches, measured_chunks};
use crate::words::thousands;
use crate::{Error, Exit, Result};
use serde::Serialize;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// Checks an experiment or a recipe; exit 0 without problems, else that of the first.
pub fn check(arguments: &CheckArguments, global: &Global) -> Result<Exit> {
    let report = examine(&arguments.path, &arguments.set);
    if global.json {
        output::document(&report)?;
    } else {
        for line in report.lines() {
            output::line(line)?;
        }
    }
    report.problems.iter().for_each(output::warn);
    Ok(report.problems.first().map_or(Exit::Done, |problem| problem.exit))
}

/// What was found out.
#[derive(Serialize)]
struct Report {
    ok: bool,
    /// Of the experiment, or the recipe's file.
    name: String,
    question: String,
    arms: Vec<ArmReport>,
    ablated: Vec<Ablated>,
    /// Absent if it was not opened.
    data: Option<DataReport>,
    /// What is worth knowing and no problem.
    notes: Vec<String>,
    device: Option<Device>,
    #[serde(serialize_with = "problems_as_json")]
    problems: Vec<Error>,
}

#[derive(Serialize)]
struct ArmReport {
    name: String,
    parameters: Value,
    #[serde(skip)]
    count: ParameterCount,
}

/// What the dataset gives this recipe.
#[derive(Serialize)]
struct DataReport {
    dataset: PathBuf,
    /// `clips` or `episodes`.
    sample: &'static str,
    training: usize,
    validation: usize,
    /// Pixels.
    height: usize,
    width: usize,
}

/// One field in which the arms differ, and each arm's value.
#[derive(Serialize)]
struct Ablated {
    field: String,
    values: Vec<String>,
}

fn problems_as_json<S: serde::Serializer>(problems: &[Error], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(problems.iter().map(output::as_json))
}

fn examine(path: &Path, overrides: &[String]) -> Report {
    // A folder, or its experiment.yaml, is an experiment; any other file is a recipe.
    let is_recipe = path.is_file() && path.file_name().is_some_and(|name| name != "experiment.yaml");
    if is_recipe {
        match config::examine_recipe(path, overrides) {
            Ok((recipe, problems)) => Report::new(path, None, vec![("recipe".to_owned(), recipe)], problems),
            Err(problem) => Report::new(path, None, Vec::new(), vec![problem]),
        }
    } else {
        let config::Examination { experiment, problems } = config::examine(path, overrides);
        let arms = experiment.iter().flat_map(|experiment| &experiment.arms);
        let arms = arms.map(|arm| (arm.name.clone(), arm.recipe.clone())).collect();
        Report::new(path, experiment.as_ref(), arms, problems)
    }
}

/// Opens what the recipes name, as a run would, short of decoding: metadata, every row of state and action, every
/// video's frame table, the codec.
fn open_data(report: &mut Report, recipes: &[(String, Recipe)]) {
    for (_, recipe) in recipes {
        match recipe {
            Recipe::Xwam(recipe) => open_clips(report, recipe),
            Recipe::Lingbot(recipe) => open_episodes(report, recipe),
        }
        match recipe.codec() {
            CodecConfig::Linear { path } if path.exists() => {
                report.add(LinearCodec::load(path).err().into_iter().collect())
            }
            CodecConfig::Linear { path } => report.note(format!("{} will be fitted at first use", path.display())),
            CodecConfig::WanVae { .. } if published(recipe) => report.note(UNDECODED.to_owned()),
            CodecConfig::WanVae { path } => report.add(vec![
                Error::refused("codec_unavailable", "the Wan2.2 VAE cannot be run by this version")
                    .at(path)
                    .hint("set codec.kind to linear"),
            ]),
        }
        let (warmup, steps) = (recipe.train().warmup_steps, recipe.train().steps);
        if warmup >= steps {
            report.note(format!("train.warmup_steps {warmup} does not end within train.steps {steps}"));
        }
    }
}

/// Are the latents read from files, so that training needs no codec?
fn published(recipe: &Recipe) -> bool {
    matches!(recipe, Recipe::Lingbot(recipe) if recipe.data.latents == LatentSource::Official)
}

fn open_clips(report: &mut Report, recipe: &XwamRecipe) {
    match Dataset::open(&recipe.data, &recipe.model) {
        Ok(dataset) => {
            let (height, width) = dataset.picture_size();
            report.add(config::validate_image_size(recipe.model.patch_size, height, width));
            report.add(dataset.probe());
            report.data = Some(DataReport {
                dataset: recipe.data.dataset.clone(),
                sample: "clips",
                training: dataset.train().len(),
                validation: dataset.validation().len(),
                height,
                width,
            });
            if recipe.validation.clips > dataset.validation().len() {
                let (asked, there) = (recipe.validation.clips, dataset.validation().len());
                report.note(format!("validation.clips asks for {asked}, the held-out episodes have {there}"));
            }
        }
        Err(problem) => report.add(vec![problem]),
    }
}

fn open_episodes(report: &mut Report, recipe: &LingbotRecipe) {
    let set = match EpisodeSet::open(&recipe.data, &recipe.model, &recipe.text) {
        Ok(set) => set,
        Err(problem) => return report.add(vec![problem]),
    };
    for left_out in set.excluded() {
        report.note(left_out.to_string());
    }
    report.add(set.probe());
    let (height, width) = set.grid();
    let problems = config::validate_image_size(recipe.model.patch_size, height * SPACE_STRIDE, width * SPACE_STRIDE);
    if problems.is_empty() {
        report.add(planned(&set, recipe).err().into_iter().collect());
    }
    report.add(problems);
    report.data = Some(DataReport {
        dataset: recipe.data.dataset.clone(),
        sample: "episodes",
        training: set.train().len(),
        validation: set.validation().len(),
        height: height * SPACE_STRIDE,
        width: width * SPACE_STRIDE,
    });
    match measured_chunks(&set, recipe) {
        Ok(chunks) if chunks.len() < recipe.validation.clips => {
            let (asked, there) = (recipe.validation.clips, chunks.len());
            report.note(format!("validation.clips asks for {asked} chunks, the held-out episodes have {there}"));
        }
        Ok(_) => {}
        Err(problem) => report.add(vec![problem]),
    }
}

/// Does every step of this packing come about?
fn planned(set: &EpisodeSet, recipe: &LingbotRecipe) -> Result<()> {
    batches::admit(set, recipe)?;
    let lengths = batches::lengths(set);
    let frame = batches::frame_tokens(set, &recipe.model);
    let cost = CostModel::of_model(&recipe.model, recipe.train.recompute);
    let kind = recipe.packing.kind;
    Planner::new(kind, &lengths, frame, &recipe.packing, &recipe.train, &recipe.flow, cost)?.step(1).map(|_| ())
}

impl Report {
    fn new(path: &Path, experiment: Option<&Experiment>, recipes: Vec<(String, Recipe)>, problems: Vec<Error>) -> Self {
        let device = recipes.first().map(|(_, recipe)| describe(recipe.device()));
        let fields: Vec<Vec<(String, String)>> = recipes.iter().map(|(_, recipe)| recipe.flatten()).collect();
        let ablated = fields.first().into_iter().flatten().filter_map(|(field, _)| {
            let value_in = |arm: &Vec<(String, String)>| {
                arm.iter().find(|(name, _)| name == field).map_or("absent".to_owned(), |(_, value)| value.clone())
            };
            let values: Vec<String> = fields.iter().map(value_in).collect();
            values.windows(2).any(|pair| pair[0] != pair[1]).then(|| Ablated { field: field.clone(), values })
        });
        let ablated = ablated.collect();
        // Sizes that are refused could overflow the arithmetic of counting.
        let countable = |recipe: &Recipe| config::validate(recipe).is_empty();
        let arms = recipes.iter().filter(|(_, recipe)| countable(recipe)).map(|(name, recipe)| {
            let count = model::count(recipe);
            let parameters = json!({
                "base": count.base, "base_total": count.base_total(),
                "geometry": count.geometry, "geometry_total": count.geometry_total(),
                "total": count.total(),
            });
            ArmReport { name: name.clone(), parameters, count }
        });
        let mut report = Self {
            ok: true,
            name: experiment.map_or_else(|| path.display().to_string(), |experiment| experiment.name.clone()),
            question: experiment.map(|experiment| experiment.question.clone()).unwrap_or_default(),
            arms: arms.collect(),
            ablated,
            data: None,
            notes: Vec::new(),
            device,
            problems,
        };
        // A recipe by itself may name what lies on another machine; an experiment is about to be run here.
        match recipes.first() {
            Some((_, recipe)) if experiment.is_none() && !recipe.dataset().exists() => {
                report.note(format!("{} is not here: data and codec were not checked", recipe.dataset().display()));
            }
            Some(_) if report.problems.is_empty() => open_data(&mut report, &recipes),
            _ => {}
        }
        report.ok = report.problems.is_empty();
        report
    }

    /// What several arms share is one problem.
    fn add(&mut self, problems: Vec<Error>) {
        for problem in problems {
            if !self.problems.contains(&problem) {
                self.problems.push(problem);
            }
        }
    }

    fn note(&mut self, note: String) {
        if !self.notes.contains(&note) {
            self.notes.push(note);
        }
    }

    fn lines(&self) -> Vec<String> {
        let mut lines = vec![self.name.clone()];
        if !self.question.is_empty() {
            lines.push(self.question.clone());
        }
        // Arms of one model share a table.
        for alike in self.arms.chunk_by(|a, b| a.count == b.count) {
            lines.push(String::new());
            lines.push(alike.iter().map(|arm| arm.name.as_str()).collect::<Vec<_>>().join(", "));
            lines.extend(parameter_lines(&alike[0].count));
        }
        lines.push(String::new());
        let names: Vec<&str> = self.arms.iter().map(|arm| arm.name.as_str()).collect();
        let mut rows: Vec<(&str, String)> = Vec::new();
        for ablated in &self.ablated {
            let values: Vec<String> =
                names.iter().zip(&ablated.values).map(|(name, value)| format!("{name} {value}")).collect();
            rows.push(("ablated", format!("{}: {}", ablated.field, values.join(", "))));
        }
        if let Some(data) = &self.data {
            let (training, validation) = (thousands(data.training as u64), thousands(data.validation as u64));
            let size = format!("{} x {}", data.width, data.height);
            rows.push(("data", format!("{training} training and {validation} validation {} of {size}", data.sample)));
        }
        if let Some(device) = &self.device {
            rows.push(("device", format!("{} ({})", device.name, device.reason)));
        }
        rows.extend(self.notes.iter().map(|note| ("note", note.clone())));
        rows.push((
            "result",
            match self.problems.len() {
                0 => "no problem found".to_owned(),
                1 => "1 problem".to_owned(),
                count => format!("{count} problems"),
            },
        ));
        let rows: Vec<(String, String)> = rows.into_iter().map(|(label, text)| (label.to_owned(), text)).collect();
        lines.extend(output::columns(&rows));
        lines
    }
}

/// A table of parts, with the total without the branch and, if there is one, with it.
fn parameter_lines(count: &ParameterCount) -> Vec<String> {
    let mut rows: Vec<(&str, u64, &str)> = Vec::new();
    rows.extend(count.base.iter().map(|part| (part.name, part.parameters, part.detail.as_str())));
    rows.push(("parameters", count.base_total(), ""));
    if !count.geometry.is_empty() {
        rows.extend(count.geometry.iter().map(|part| (part.name, part.parameters, part.detail.as_str())));
        rows.push(("with geometry branch", count.total(), ""));
    }
    let label_width = rows.iter().map(|(label, ..)| label.len()).max().unwrap_or(0);
    let number_width = rows.iter().map(|(_, number, _)| thousands(*number).len()).max().unwrap_or(0);
    rows.iter()
        .map(|(label, number, detail)| {
            let number = thousands(*number);
            format!("  {label:label_width$}  {number:>number_width$}  {detail}").trim_end().to_owned()
        })
        .collect()
}
