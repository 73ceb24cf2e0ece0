//! YAML -> typed, validated configuration; experiment -> arms; arm parity.
//!
//! A configuration error is found here, on a CPU, within milliseconds, and never on a GPU node after a queue: whatever
//! the recipe alone decides is decided before a dataset is opened. Three passes, one module each: [`document`] turns
//! text into a tree and knows the line of each key, [`typed`] turns the tree into the structs of [`types`], and
//! [`validate`](mod@validate) checks what the types cannot say. [`resolve`] stacks the layers (base file, arm, command line) between them.

mod document;
mod experiment;
mod lingbot;
mod resolve;
mod typed;
mod types;
mod validate;

pub(crate) use experiment::covers;
pub use experiment::{Arm, Examination, Experiment, examine};
pub use lingbot::*;
pub(crate) use typed::nearest;
pub use types::*;
pub use validate::{validate, validate_image_size};

use crate::{Error, Result};
use serde_yaml::Value;
use std::path::Path;

/// Reads one recipe file and refuses it unless every field is known, present, well typed and sensible.
///
/// Errors carry the dotted path and line of the field: `unknown_key`, `wrong_type`, `missing_key`, `duplicate_key`,
/// `unknown_choice`, `bad_value`, `bad_yaml`, `not_text`, `empty_file`, `file_missing`, `unreadable`.
pub fn load(path: &Path) -> Result<Recipe> {
    load_with(path, &[])
}

/// [`load`] with `key=value` overrides from the command line on top; their relative paths resolve against the current
/// directory.
pub fn load_with(path: &Path, overrides: &[String]) -> Result<Recipe> {
    let (recipe, problems) = examine_recipe(path, overrides)?;
    match first_problem(problems) {
        Some(problem) => Err(problem),
        None => Ok(recipe),
    }
}

/// [`load_with`], listing every problem of the values instead of failing at the first. A fault of form (not YAML, a key,
/// a type) leaves no recipe and is the error.
pub fn examine_recipe(path: &Path, overrides: &[String]) -> Result<(Recipe, Vec<Error>)> {
    let mut layers = resolve::Layers::read(path)?;
    layers.add_command_line(overrides)?;
    layers.resolve()
}

/// The first of several problems, saying how many more there are.
fn first_problem(problems: Vec<Error>) -> Option<Error> {
    let more = problems.len().saturating_sub(1);
    let first = problems.into_iter().next()?;
    if more == 0 {
        return Some(first);
    }
    let counted = format!("{more} more problem{}: run check", if more == 1 { "" } else { "s" });
    let hint = if first.hint.is_empty() { counted } else { format!("{}; {counted}", first.hint) };
    Some(first.hint(hint))
}

impl Recipe {
    /// The recipe as canonical YAML: every field, in the order of the types, defaults written out. Reading it back
    /// with [`load`] gives the same recipe.
    pub fn to_yaml(&self) -> String {
        // Strings, numbers, booleans and lists under string keys: nothing that YAML cannot hold, so this cannot fail
        // except for a path that is not UTF-8, which loading from UTF-8 text never makes.
        serde_yaml::to_string(self).unwrap_or_default()
    }

    /// Every field as (dotted path, value on one line), in the order of the types. A list is one value.
    pub fn flatten(&self) -> Vec<(String, String)> {
        let mut fields = Vec::new();
        if let Ok(tree) = serde_yaml::to_value(self) {
            flatten_into(&tree, "", &mut fields);
        }
        fields
    }
}

fn flatten_into(tree: &Value, path: &str, fields: &mut Vec<(String, String)>) {
    match tree {
        Value::Mapping(mapping) => {
            for (key, value) in mapping {
                let key = key.as_str().unwrap_or_default();
                let path = if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") };
                flatten_into(value, &path, fields);
            }
        }
        leaf => fields.push((path.to_owned(), on_one_line(leaf))),
    }
}

/// A value as it would stand after a colon: `0.9`, `true`, `[0, 2, 4]`, `text`.
fn on_one_line(value: &Value) -> String {
    match value {
        Value::Null => "null".to_owned(),
        Value::Bool(value) => value.to_string(),
        Value::Number(value) => value.to_string(),
        Value::String(value) => value.clone(),
        Value::Sequence(items) => format!("[{}]", items.iter().map(on_one_line).collect::<Vec<_>>().join(", ")),
        Value::Mapping(mapping) => {
            let fields = mapping.iter().map(|(key, value)| format!("{}: {}", on_one_line(key), on_one_line(value)));
            format!("{{{}}}", fields.collect::<Vec<_>>().join(", "))
        }
        Value::Tagged(tagged) => on_one_line(&tagged.value),
    }
}
