//! The one recipe that a command is about: a recipe file's, or that of an arm of an experiment.

use crate::config::{self, Experiment, Recipe};
use crate::{Error, Result};
use std::path::{Path, PathBuf};

/// A recipe and where it is from.
pub struct Chosen {
    /// Of the recipe's file, or `experiment, arm`.
    pub name: String,
    pub recipe: Recipe,
    /// Folder of the experiment, if it is one's.
    pub experiment: Option<PathBuf>,
}

/// The recipe of a file, or of an experiment's arm (the baseline unless one is named), with `--set` on top.
///
/// # Errors
/// `unknown_arm`; those of loading.
pub fn choose(path: &Path, arm: Option<&str>, set: &[String]) -> Result<Chosen> {
    if path.is_file() && path.file_name().is_some_and(|name| name != "experiment.yaml") {
        if let Some(arm) = arm {
            return Err(Error::usage("unknown_arm", format!("a recipe has no arms, and {arm} was asked for"))
                .at(path)
                .hint("leave out --arm, or name the experiment"));
        }
        let recipe = config::load_with(path, set)?;
        return Ok(Chosen { name: path.display().to_string(), recipe, experiment: None });
    }
    let experiment = Experiment::load_with(path, set)?;
    let arm = experiment.arm(arm.unwrap_or(&experiment.rule.baseline))?;
    Ok(Chosen {
        name: format!("{}, {}", experiment.name, arm.name),
        recipe: arm.recipe.clone(),
        experiment: Some(experiment.directory.clone()),
    })
}
