//! The layers of a recipe: base file, then an arm's overrides, then the command line's.
//!
//! Layers are stacked as trees and typed once, at the end, so that an override is judged by the same rules as the
//! file, and a fault can be placed where it was written: a line of the file, an arm, or a `--set`.

use super::document::{Document, Segment, dotted};
use super::typed::{Fault, FaultKind, nearest, recipe_from_tree};
use super::types::Recipe;
use super::{flatten_into, validate};
use crate::{Error, Exit, Result};
use serde_yaml::{Mapping, Value};
use std::path::{Component, Path, PathBuf};

/// Fields that hold paths; relative ones resolve against the folder of the file that names them.
const PATH_FIELDS: [[&str; 2]; 4] = [["data", "dataset"], ["codec", "path"], ["text", "path"], ["weights", "path"]];

/// Environment variables that the first packed training honoured, and the fields that they set.
const ENVIRONMENT: [(&str, [&str; 2]); 2] =
    [("LINGBOT_PAD_MULTIPLE", ["packing", "pad_multiple"]), ("LINGBOT_RESUME_WARMUP", ["train", "resume_warmup"])];

/// Where an override was written.
#[derive(Clone, Debug)]
struct Origin {
    path: Vec<String>,
    /// `--set train.lr=fast`, or the experiment file and its arm.
    place: String,
    /// The fault is the command line's (exit 2), not a file's (exit 78).
    command_line: bool,
}

/// A base file with overrides on top.
#[derive(Clone, Debug)]
pub(super) struct Layers {
    base: Document,
    tree: Value,
    origins: Vec<Origin>,
}

impl Layers {
    /// The base layer.
    pub fn read(path: &Path) -> Result<Self> {
        let base = Document::read(path)?;
        let mut tree = base.tree.clone();
        resolve_paths(&mut tree, &folder_of(path)?);
        Ok(Self { base, tree, origins: Vec::new() })
    }

    /// An arm's overrides: dotted field -> value, written in `file` at `place`.
    pub fn add_arm(&mut self, set: &Mapping, file: &Path, place: &str) -> Result<()> {
        let folder = folder_of(file)?;
        for (key, value) in set {
            let field = key.as_str().unwrap_or_default();
            let origin = Origin { path: split(field), place: place.to_owned(), command_line: false };
            self.set(origin, value.clone(), &folder)?;
        }
        Ok(())
    }

    /// Overrides from the environment, then those from the command line: `key=value`, the value in YAML.
    pub fn add_command_line(&mut self, overrides: &[String]) -> Result<()> {
        for (variable, field) in ENVIRONMENT {
            let there = self.tree.get(field[0]).and_then(|section| section.get(field[1])).is_some();
            if let (true, Ok(value)) = (there, std::env::var(variable)) {
                let value = serde_yaml::from_str(&value).map_err(|error| {
                    Error::usage("bad_override", format!("not valid YAML: {error}")).in_place(variable)
                })?;
                let path = field.map(str::to_owned).to_vec();
                self.set(Origin { path, place: variable.to_owned(), command_line: true }, value, Path::new("/"))?;
            }
        }
        for text in overrides {
            let folder = std::env::current_dir()
                .map_err(|error| Error::crash(format!("the current folder cannot be read: {error}")))?;
            let place = format!("--set {text}");
            let Some((field, value)) = text.split_once('=').filter(|(field, _)| !field.trim().is_empty()) else {
                return Err(Error::usage("bad_override", "not of the form key=value")
                    .in_place(place)
                    .hint("for example --set train.lr=1e-4"));
            };
            let value = serde_yaml::from_str(value).map_err(|error| {
                Error::usage("bad_override", format!("the value is not valid YAML: {error}")).in_place(&place)
            })?;
            self.set(Origin { path: split(field.trim()), place, command_line: true }, value, &folder)?;
        }
        Ok(())
    }

    fn set(&mut self, origin: Origin, value: Value, folder: &Path) -> Result<()> {
        let mut node = &mut self.tree;
        for (depth, name) in origin.path.iter().enumerate() {
            let Value::Mapping(mapping) = node else {
                let parent = origin.path.get(..depth).unwrap_or_default().join(".");
                return Err(origin.refuse("unknown_key", format!("{parent} is no mapping: it has no keys")));
            };
            // A key that does not exist is created here and refused when the tree is typed, with the valid names.
            node = mapping.entry(Value::from(name.as_str())).or_insert(Value::Mapping(Mapping::new()));
        }
        *node = value;
        resolve_paths(&mut self.tree, folder);
        self.origins.push(origin);
        Ok(())
    }

    /// The recipe, and everything that is wrong with its values. A fault of form (key, type) leaves no recipe: `Err`.
    pub fn resolve(&self) -> Result<(Recipe, Vec<Error>)> {
        let recipe = recipe_from_tree(&self.tree).map_err(|fault| self.error(&fault))?;
        let problems = validate(&recipe).into_iter().map(|problem| self.place(problem)).collect();
        Ok((recipe, problems))
    }

    fn error(&self, fault: &Fault) -> Error {
        let path = fault.path();
        let mut fields = Vec::new();
        flatten_into(&self.base.tree, "", &mut fields);
        let faulty = dotted(&path);
        let everywhere: Vec<String> = fields.into_iter().map(|(field, _)| field).filter(|it| *it != faulty).collect();
        let error = match self.origin(&path) {
            Some(origin) => origin.refuse(fault.code(), self.sentence(fault, origin)),
            None => Error::refused(fault.code(), fault.sentence()).in_place(self.base.place(&path)),
        };
        error.hint(fault.hint(&everywhere))
    }

    /// An unknown key is named as the override wrote it, not cut where the typing stopped.
    fn sentence(&self, fault: &Fault, origin: &Origin) -> String {
        match fault.kind {
            FaultKind::UnknownKey { .. } => format!("unknown key {}", origin.path.join(".")),
            _ => fault.sentence(),
        }
    }

    /// Says where the value of a problem's field (its place so far) was written.
    fn place(&self, problem: Error) -> Error {
        let path: Vec<Segment> = problem.place.split('.').map(|key| Segment::Key(key.to_owned())).collect();
        match self.origin(&path) {
            Some(origin) => {
                let exit = if origin.command_line { Exit::Usage } else { problem.exit };
                Error { exit, ..problem }.in_place(&origin.place)
            }
            None => problem.in_place(self.base.place(&path)),
        }
    }

    /// The last override that wrote this node, one above it, or one below it.
    fn origin(&self, path: &[Segment]) -> Option<&Origin> {
        let names: Vec<&str> = path
            .iter()
            .map_while(|segment| match segment {
                Segment::Key(key) => Some(key.as_str()),
                Segment::Index(_) => None,
            })
            .collect();
        self.origins
            .iter()
            .rev()
            .find(|origin| origin.path.iter().zip(&names).all(|(written, name)| written == name))
            .filter(|_| !names.is_empty())
    }
}

impl Origin {
    fn refuse(&self, code: &'static str, what: String) -> Error {
        let exit = if self.command_line { Exit::Usage } else { Exit::Refused };
        Error::new(exit, code, what).in_place(&self.place)
    }
}

fn split(field: &str) -> Vec<String> {
    field.split('.').map(|name| name.trim().to_owned()).collect()
}

/// The absolute folder of a file that exists.
pub(super) fn folder_of(file: &Path) -> Result<PathBuf> {
    let folder = file.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    std::fs::canonicalize(folder)
        .map_err(|error| Error::refused("unreadable", format!("cannot be opened: {error}")).at(folder))
}

/// `folder` (absolute, without links) joined with `path`, its `.` and `..` worked out.
pub(super) fn absolute(folder: &Path, path: &Path) -> PathBuf {
    let mut whole = PathBuf::new();
    for component in folder.join(path).components() {
        match component {
            Component::CurDir => {}
            Component::ParentDir => {
                whole.pop();
            }
            other => whole.push(other),
        }
    }
    whole
}

fn resolve_paths(tree: &mut Value, folder: &Path) {
    for [section, field] in PATH_FIELDS {
        if let Some(Value::String(text)) = tree.get_mut(section).and_then(|section| section.get_mut(field)) {
            // An empty path stays empty, to be refused with its own words.
            if !text.is_empty() {
                *text = absolute(folder, Path::new(text)).to_string_lossy().into_owned();
            }
        }
    }
}

/// The nearest of `fields` to a dotted field that is none of them.
pub(super) fn nearest_field<'a>(field: &str, fields: &'a [String]) -> Option<&'a str> {
    let last = field.rsplit('.').next();
    nearest(field, fields)
        .or_else(|| fields.iter().find(|candidate| candidate.rsplit('.').next() == last).map(String::as_str))
}
