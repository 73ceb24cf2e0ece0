//! `check`: everything that a CPU can decide, in seconds, before anything is queued or trained.

use super::arguments::{CheckArguments, Global};
use super::device::{Device, describe};
use super::forecast::{self, ArmForecast, DiskReport};
use super::output;
use crate::codec::{Extent, LatentCodec, LinearCodec, SPACE_STRIDE};
use crate::config::{self, CodecConfig, Experiment, LatentSource, LingbotRecipe, PackingKind, Recipe, XwamRecipe};
use crate::data::{ClipSample, Dataset, EpisodeSet};
use crate::hub::{Access, Hub, Repository, missing_repositories};
use crate::model::{self, ParameterCount};
use crate::pack::cost::CostModel;
use crate::pack::length::{round_up, trunk_tokens};
use crate::pack::step::Planner;
use crate::plan::{Survival, from_csv};
use crate::runlog::ExperimentRuns;
use crate::train::forecast::Shape;
use crate::train::lingbot::{UNDECODED, batches, measured_chunks};
use crate::train::profile::megabytes;
use crate::words::thousands;
use crate::{Error, Exit, Result};
use rayon::prelude::*;
use serde::Serialize;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

/// Checks an experiment or a recipe; exit 0 without problems, else that of the first.
pub fn check(arguments: &CheckArguments, global: &Global) -> Result<Exit> {
    let named = arguments.hub.iter().map(|text| Repository::parse(text)).collect::<Result<Vec<_>>>()?;
    let attempts = arguments.attempts.as_deref().map(|path| Survival::of(&from_csv(path)?)).transpose()?;
    let mut report = examine(&arguments.path, &arguments.set, attempts.as_ref());
    report.ask_hub(named);
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
    /// Of an experiment, whose runs have a place.
    disk: Option<DiskReport>,
    /// What is worth knowing and no problem.
    notes: Vec<String>,
    device: Option<Device>,
    /// Repositories that may be downloaded, and with whose token.
    hub: Vec<Access>,
    /// Repositories that files of the recipe, which are not here, would come from.
    #[serde(skip)]
    repositories: Vec<Repository>,
    #[serde(serialize_with = "problems_as_json")]
    problems: Vec<Error>,
}

#[derive(Serialize)]
struct ArmReport {
    name: String,
    parameters: Value,
    #[serde(skip)]
    count: ParameterCount,
    forecast: ArmForecast,
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

fn examine(path: &Path, overrides: &[String], attempts: Option<&Survival>) -> Report {
    // A folder, or its experiment.yaml, is an experiment; any other file is a recipe.
    let is_recipe = path.is_file() && path.file_name().is_some_and(|name| name != "experiment.yaml");
    if is_recipe {
        match config::examine_recipe(path, overrides) {
            Ok((recipe, problems)) => Report::new(path, None, vec![("recipe".to_owned(), recipe)], problems, attempts),
            Err(problem) => Report::new(path, None, Vec::new(), vec![problem], attempts),
        }
    } else {
        let config::Examination { experiment, problems } = config::examine(path, overrides);
        let arms = experiment.iter().flat_map(|experiment| &experiment.arms);
        let arms = arms.map(|arm| (arm.name.clone(), arm.recipe.clone())).collect();
        Report::new(path, experiment.as_ref(), arms, problems, attempts)
    }
}

/// Opens what the recipes name, as a run would: metadata, every row of state and action, every video's frame table, the
/// codec. Decoded are the first and the last sample of training and of validation. Gives the shape of each recipe's largest
/// micro-step.
fn open_data(report: &mut Report, recipes: &[(String, Recipe)]) -> Vec<Option<Shape>> {
    let mut shapes = Vec::new();
    for (_, recipe) in recipes {
        shapes.push(match recipe {
            Recipe::Xwam(recipe) => open_clips(report, recipe),
            Recipe::Lingbot(recipe) => open_episodes(report, recipe),
        });
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
    shapes
}

/// The first and the last of a list, once if they are one.
fn ends<T: Copy + PartialEq>(list: &[T]) -> Vec<T> {
    let mut ends: Vec<T> = list.first().into_iter().chain(list.last()).copied().collect();
    ends.dedup();
    ends
}

/// Are the latents read from files, so that training needs no codec?
fn published(recipe: &Recipe) -> bool {
    matches!(recipe, Recipe::Lingbot(recipe) if recipe.data.latents == LatentSource::Official)
}

fn open_clips(report: &mut Report, recipe: &XwamRecipe) -> Option<Shape> {
    let mut shape = None;
    match Dataset::open(&recipe.data, &recipe.model) {
        Ok(dataset) => {
            let (height, width) = dataset.picture_size();
            report.add(config::validate_image_size(recipe.model.patch_size, height, width));
            report.add(dataset.probe());
            let clips = [ends(dataset.train()), ends(dataset.validation())].concat();
            let samples: Vec<Result<ClipSample>> = clips.par_iter().map(|clip| dataset.load(clip)).collect();
            let cells = Extent { frames: recipe.data.frames, height, width }.latent().ok();
            for sample in samples {
                match (sample, cells) {
                    (Ok(sample), Some(cells)) => shape = Some(clip_shape(recipe, &sample, cells)),
                    (Ok(_), None) => {}
                    (Err(problem), _) => report.add(vec![problem]),
                }
            }
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
    shape
}

/// Tokens of a clip: patches of all views' latents, actions, proprioception.
fn clip_shape(recipe: &XwamRecipe, sample: &ClipSample, cells: Extent) -> Shape {
    let model = &recipe.model;
    let [time, height, width] = model.patch_size;
    let video = model.num_views * (cells.frames / time) * (cells.height / height) * (cells.width / width);
    let (actions, proprios) = (sample.action.len() / model.action_dim, sample.proprio.len() / model.proprio_dim);
    let tokens = (video + actions + proprios) as u64;
    Shape {
        sequences: recipe.train.batch_size as u64,
        tokens,
        text_rows: model.text_len as u64,
        read: tokens,
        rows: (cells.frames / time + actions + proprios) as u64,
        alone: recipe.train.accumulate == 1,
    }
}

fn open_episodes(report: &mut Report, recipe: &LingbotRecipe) -> Option<Shape> {
    let set = match EpisodeSet::open(&recipe.data, &recipe.model, &recipe.text) {
        Ok(set) => set,
        Err(problem) => {
            report.add(vec![problem]);
            return None;
        }
    };
    for left_out in set.excluded() {
        report.note(left_out.to_string());
    }
    report.add(set.probe());
    let codec = match &recipe.codec {
        CodecConfig::Linear { path } => LinearCodec::load(path).ok(),
        CodecConfig::WanVae { .. } => None,
    };
    if codec.is_some() || recipe.data.latents == LatentSource::Official {
        let codec = codec.as_ref().map(|codec| codec as &dyn LatentCodec);
        let episodes = [ends(set.train()), ends(set.validation())].concat();
        report.add(episodes.par_iter().filter_map(|id| set.load(*id, codec, None).err()).collect());
    }
    let (height, width) = set.grid();
    let problems = config::validate_image_size(recipe.model.patch_size, height * SPACE_STRIDE, width * SPACE_STRIDE);
    let problems_free = problems.is_empty();
    if problems_free {
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
    problems_free.then(|| episode_shape(&set, recipe))
}

/// The longest sequence that this packing makes.
fn episode_shape(set: &EpisodeSet, recipe: &LingbotRecipe) -> Shape {
    let (packing, frame) = (&recipe.packing, batches::frame_tokens(set, &recipe.model));
    let longest = batches::lengths(set).into_iter().max().unwrap_or(0);
    let batches = recipe.train.accumulate * packing.ranks;
    let (tokens, episodes, alone) = match packing.kind {
        PackingKind::Unpacked => (trunk_tokens(longest, frame), 1, batches * recipe.train.batch_size == 1),
        PackingKind::Bucket => {
            let episodes = recipe.train.batch_size;
            (episodes * trunk_tokens(round_up(longest, packing.pad_multiple), frame), episodes, batches == 1)
        }
        // Some steps may be one sequence, and need less than those that are several.
        PackingKind::Budget => (packing.token_budget, recipe.train.batch_size * recipe.train.accumulate, false),
    };
    let tokens = round_up(tokens, packing.alignment) as u64;
    // Each latent frame has video and actions, noisy and clean, and a modulation row for each of the four.
    let frames = tokens.div_ceil(trunk_tokens(1, frame).max(1) as u64);
    Shape {
        sequences: 1,
        tokens,
        text_rows: (episodes * recipe.model.text_len) as u64,
        read: tokens / 2,
        rows: 4 * frames,
        alone,
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
    fn new(
        path: &Path,
        experiment: Option<&Experiment>,
        recipes: Vec<(String, Recipe)>,
        problems: Vec<Error>,
        attempts: Option<&Survival>,
    ) -> Self {
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
        let runs = experiment.map(|experiment| ExperimentRuns::new(&experiment.directory));
        let arms = |shapes: &[Option<Shape>]| -> Vec<ArmReport> {
            let countable = recipes.iter().enumerate().filter(|(_, (_, recipe))| countable(recipe));
            let arm = countable.map(|(index, (name, recipe))| {
                let count = model::count(recipe);
                let parameters = json!({
                    "base": count.base, "base_total": count.base_total(),
                    "geometry": count.geometry, "geometry_total": count.geometry_total(),
                    "total": count.total(),
                });
                let run = runs.as_ref().map(|runs| runs.run(name));
                let forecast = ArmForecast::of(recipe, shapes.get(index).copied().flatten(), run.as_ref(), attempts);
                ArmReport { name: name.clone(), parameters, count, forecast }
            });
            arm.collect()
        };
        let mut report = Self {
            ok: true,
            name: experiment.map_or_else(|| path.display().to_string(), |experiment| experiment.name.clone()),
            question: experiment.map(|experiment| experiment.question.clone()).unwrap_or_default(),
            arms: Vec::new(),
            ablated,
            data: None,
            disk: None,
            notes: Vec::new(),
            device,
            hub: Vec::new(),
            repositories: recipes.iter().flat_map(|(_, recipe)| missing_repositories(recipe)).collect(),
            problems,
        };
        // A recipe by itself may name what lies on another machine; an experiment is about to be run here.
        match recipes.first() {
            Some((_, recipe)) if experiment.is_none() && !recipe.dataset().exists() => {
                report.note(format!("{} is not here: data and codec were not checked", recipe.dataset().display()));
            }
            Some(_) if report.problems.is_empty() => {
                let shapes = open_data(&mut report, &recipes);
                report.arms = arms(&shapes);
                if let Some(experiment) = experiment {
                    match forecast::disk(&experiment.directory, &recipes) {
                        Ok((disk, problem)) => {
                            report.disk = Some(disk);
                            report.add(problem.into_iter().collect());
                        }
                        Err(problem) => report.add(vec![problem]),
                    }
                }
            }
            _ => {}
        }
        if report.arms.is_empty() {
            report.arms = arms(&[]);
        }
        report.ok = report.problems.is_empty();
        report
    }

    /// Asks for those named on the command line and those of the recipe.
    fn ask_hub(&mut self, named: Vec<Repository>) {
        let repositories: BTreeSet<Repository> = named.into_iter().chain(self.repositories.drain(..)).collect();
        if repositories.is_empty() {
            return;
        }
        let hub = Hub::from_environment();
        for repository in &repositories {
            match hub.access(repository) {
                Ok(access) => self.hub.push(access),
                Err(problem) => self.add(vec![problem]),
            }
        }
        self.ok = self.problems.is_empty();
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
        let forecasts: Vec<(String, String)> = self.arms.iter().flat_map(|arm| arm.forecast.rows(&arm.name)).collect();
        rows.extend(forecasts.iter().map(|(label, text)| (label.as_str(), text.clone())));
        if let Some(disk) = &self.disk {
            let (needed, available) = (megabytes(disk.needed_bytes), megabytes(disk.available_bytes));
            rows.push(("disk", format!("{needed} MB for the checkpoints of all arms, {available} MB can be had")));
        }
        if let Some(device) = &self.device {
            rows.push(("device", format!("{} ({})", device.name, device.reason)));
        }
        for Access { repository, identity } in &self.hub {
            let who =
                identity.as_ref().map_or("without a token".to_owned(), |name| format!("with the token of {name}"));
            rows.push(("hub", format!("{} may be downloaded {who}", repository.name)));
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
