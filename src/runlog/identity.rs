//! A run is bound to what it was started with; a later attempt that differs is refused, every difference named.

use super::checkpoints::CheckpointStore;
use super::paths::{RunDir, folder_names};
use crate::files::{create_new, io_error, remove_file};
use crate::{Error, Result};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

/// One field in which two documents differ; `None` where it is absent.
#[derive(Clone, Debug, PartialEq)]
pub struct Difference {
    /// Dotted path: `data.views[1]`.
    pub field: String,
    pub recorded: Option<Value>,
    pub now: Option<Value>,
}

impl std::fmt::Display for Difference {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let show = |value: &Option<Value>| value.as_ref().map_or_else(|| "absent".to_owned(), Value::to_string);
        write!(f, "{}: recorded {}, now {}", self.field, show(&self.recorded), show(&self.now))
    }
}

/// All fields in which the documents differ, by name.
pub fn differences(recorded: &Value, now: &Value) -> Vec<Difference> {
    let (mut before, mut after) = (BTreeMap::new(), BTreeMap::new());
    flatten(String::new(), recorded, &mut before);
    flatten(String::new(), now, &mut after);
    let mut fields: Vec<&String> = before.keys().chain(after.keys()).collect();
    fields.sort();
    fields.dedup();
    let value = |map: &BTreeMap<String, &Value>, field: &String| map.get(field).map(|value| (*value).clone());
    fields
        .into_iter()
        .filter(|field| before.get(*field) != after.get(*field))
        .map(|field| Difference { field: field.clone(), recorded: value(&before, field), now: value(&after, field) })
        .collect()
}

fn flatten<'v>(path: String, value: &'v Value, into: &mut BTreeMap<String, &'v Value>) {
    match value {
        Value::Object(map) if !map.is_empty() => {
            for (key, value) in map {
                let inner = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
                flatten(inner, value, into);
            }
        }
        Value::Array(items) if !items.is_empty() => {
            for (index, value) in items.iter().enumerate() {
                flatten(format!("{path}[{index}]"), value, into);
            }
        }
        leaf => {
            into.insert(path, leaf);
        }
    }
}

/// Creates `identity.json`, or compares with the one that is there.
pub(super) fn bind_identity(path: &Path, identity: &Value) -> Result<()> {
    let text = serde_json::to_vec_pretty(identity).map_err(|error| Error::crash(format!("identity: {error}")))?;
    if create_new(path, &text)? {
        return Ok(());
    }
    let recorded = std::fs::read(path).map_err(|error| io_error("cannot read the run's identity", path, &error))?;
    let recorded: Value = serde_json::from_slice(&recorded).map_err(|error| {
        Error::refused("identity_unreadable", format!("the run's identity is damaged: {error}")).at(path).hint(FRESH)
    })?;
    refuse_differences("identity_differs", "this run was started with another identity", path, &recorded, identity)
}

/// Creates `arm.yaml` unless it is there; [`check_arm_yaml`] has compared it.
pub(super) fn bind_arm_yaml(path: &Path, text: &str) -> Result<()> {
    create_new(path, text.as_bytes()).map(drop)
}

/// What a run has recorded of its configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recorded {
    /// Nothing, or the same configuration.
    Fits,
    /// Another one, but no checkpoint and no validation point came of it: there is nothing to protect.
    Unused,
}

/// Compares a run's `arm.yaml` with `text`, by values: layout and comments may change.
///
/// # Errors
/// `arm_differs` (exit 78) with every differing field, if the run has results of another configuration.
pub fn check_arm_yaml(run: &RunDir, text: &str) -> Result<Recorded> {
    let path = run.arm_yaml();
    let recorded = match std::fs::read(&path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Recorded::Fits),
        read => read.map_err(|error| io_error("cannot read the run's configuration", &path, &error))?,
    };
    if recorded == text.as_bytes() {
        return Ok(Recorded::Fits);
    }
    let unreadable = |error| {
        Error::refused("arm_yaml_unreadable", format!("the run's configuration is damaged: {error}"))
            .at(&path)
            .hint(FRESH)
    };
    let now: Value = serde_yaml::from_str(text).map_err(|error| Error::crash(format!("resolved arm: {error}")))?;
    let differs = serde_yaml::from_slice(&recorded).map_err(unreadable).and_then(|recorded: Value| {
        refuse_differences("arm_differs", "this run was started with another configuration", &path, &recorded, &now)
    });
    match differs {
        Err(_) if !has_results(run)? => Ok(Recorded::Unused),
        differs => differs.map(|()| Recorded::Fits),
    }
}

/// Has the run a checkpoint (whole or not) or a validation point?
fn has_results(run: &RunDir) -> Result<bool> {
    let validated = || folder_names(&run.validation()).map(|names| !names.is_empty());
    Ok(!CheckpointStore::new(run).list()?.is_empty() || validated()?)
}

/// Moves the configuration and identity that nothing came of into the folder of the last attempt that used them.
pub(super) fn retire(run: &RunDir) -> Result<()> {
    let Some(attempt) = run.newest_attempt()? else { return remove_file(&run.arm_yaml()) };
    for path in [run.arm_yaml(), run.identity()] {
        let Some(name) = path.file_name().filter(|_| path.exists()) else { continue };
        std::fs::rename(&path, attempt.root().join(name))
            .map_err(|error| io_error("cannot retire the unused configuration", &path, &error))?;
    }
    Ok(())
}

/// The way out of a refusal.
const FRESH: &str = "undo the change, or begin anew with --fresh, which moves the present run aside";

/// Fields that say where something lies. What lies there is hashed in the identity, so a checkout or a mount that
/// moved does not make another run.
const LOCATIONS: [&str; 4] = ["data.dataset", "codec.path", "text.path", "weights.path"];

fn refuse_differences(code: &'static str, what: &str, path: &Path, recorded: &Value, now: &Value) -> Result<()> {
    let mut found = differences(recorded, now);
    found.retain(|difference| !LOCATIONS.contains(&difference.field.as_str()));
    if found.is_empty() {
        return Ok(());
    }
    let list = found.iter().map(Difference::to_string).collect::<Vec<_>>().join("; ");
    Err(Error::refused(code, format!("{what}: {list}")).at(path).hint(FRESH))
}
