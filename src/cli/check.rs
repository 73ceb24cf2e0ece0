//! `check`: everything that a CPU can decide, in seconds, before anything is queued or trained.

use super::arguments::{CheckArguments, Global};
use super::device::{Device, describe};
use super::output;
use crate::config::{self, Experiment, ParameterCount, Recipe, thousands};
use crate::{Error, Exit, Result};
use serde::Serialize;
use serde_json::{Value, json};
use std::path::Path;

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
    let is_recipe = !path.is_dir() && path.file_name().is_some_and(|name| name != "experiment.yaml") && path.exists();
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

impl Report {
    fn new(path: &Path, experiment: Option<&Experiment>, recipes: Vec<(String, Recipe)>, problems: Vec<Error>) -> Self {
        let device = recipes.first().map(|(_, recipe)| describe(&recipe.device));
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
            let count = config::count(&recipe.model);
            let parameters = json!({
                "base": count.base, "base_total": count.base_total(),
                "geometry": count.geometry, "geometry_total": count.geometry_total(),
                "total": count.total(),
            });
            ArmReport { name: name.clone(), parameters, count }
        });
        Self {
            ok: problems.is_empty(),
            name: experiment.map_or_else(|| path.display().to_string(), |experiment| experiment.name.clone()),
            question: experiment.map(|experiment| experiment.question.clone()).unwrap_or_default(),
            arms: arms.collect(),
            ablated,
            device,
            problems,
        }
    }

    fn lines(&self) -> Vec<String> {
        let mut lines = vec![self.name.clone()];
        if !self.question.is_empty() {
            lines.push(self.question.clone());
        }
        for arm in &self.arms {
            lines.push(String::new());
            lines.push(arm.name.clone());
            lines.extend(parameter_lines(&arm.count));
        }
        lines.push(String::new());
        let names: Vec<&str> = self.arms.iter().map(|arm| arm.name.as_str()).collect();
        for ablated in &self.ablated {
            let values: Vec<String> =
                names.iter().zip(&ablated.values).map(|(name, value)| format!("{name} {value}")).collect();
            lines.push(format!("ablated  {}: {}", ablated.field, values.join(", ")));
        }
        if let Some(device) = &self.device {
            lines.push(format!("device   {} ({})", device.name, device.reason));
        }
        lines.push(match self.problems.len() {
            0 => "result   no problem found".to_owned(),
            1 => "result   1 problem".to_owned(),
            count => format!("result   {count} problems"),
        });
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
