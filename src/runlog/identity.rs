//! A run is bound to what it was started with; a later attempt that differs is refused, every difference named, unless
//! whoever starts it accepts each by name. No record is ever overwritten: what an accepted change replaces is kept.

use super::checkpoints::CheckpointStore;
use super::paths::{RunDir, folder_names};
use crate::files::{create_new, io_error, write_whole};
use crate::{Error, Result};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::io::ErrorKind;
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

/// What a run has recorded, against what an attempt comes with.
#[derive(Clone, Debug, PartialEq)]
pub enum Recorded {
    /// Nothing, or the same.
    Fits,
    /// Something else, but no checkpoint and no validation point came of it: there is nothing to protect.
    Unused,
    /// Something else, every difference of which was accepted: those of `arm.yaml`.
    Accepted(Vec<Difference>),
}

/// Compares a run's `arm.yaml` with `text`, by values (layout and comments may change), and what `known` tells of the
/// identity before any data are opened with the same fields of its `identity.json`. Differences in fields named in
/// `accepted` do not count.
///
/// # Errors
/// `arm_differs` or, if that is all, `identity_differs` (exit 78), with every differing field and the arguments that
/// accept them, if the run has results.
pub fn check_binding(run: &RunDir, text: &str, known: &Map<String, Value>, accepted: &[String]) -> Result<Recorded> {
    let compared = compare_arm(&run.arm_yaml(), text).and_then(|arm| {
        let recorded = read_identity(&run.identity())?;
        let identity = recorded.map_or_else(Vec::new, |mut recorded| {
            if let Value::Object(fields) = &mut recorded {
                fields.retain(|field, _| known.contains_key(field));
            }
            differences(&recorded, &Value::Object(known.clone()))
        });
        let all: Vec<Difference> = arm.iter().chain(&identity).cloned().collect();
        match (all.is_empty(), arm.is_empty()) {
            (true, _) => Ok(Recorded::Fits),
            (_, true) => refuse_unless(accepted, "identity_differs", &run.identity(), &all).map(|()| Recorded::Fits),
            _ => refuse_unless(accepted, "arm_differs", &run.arm_yaml(), &all).map(|()| Recorded::Accepted(arm)),
        }
    });
    match compared {
        Ok(Recorded::Accepted(_)) | Err(_) if !has_results(run)? => Ok(Recorded::Unused),
        compared => compared,
    }
}

/// Differences of `text` from the recorded `arm.yaml`; none if there is no record.
fn compare_arm(path: &Path, text: &str) -> Result<Vec<Difference>> {
    let recorded = match std::fs::read(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        read => read.map_err(|error| io_error("cannot read the run's configuration", path, &error))?,
    };
    if recorded == text.as_bytes() {
        return Ok(Vec::new());
    }
    let recorded: Value = serde_yaml::from_slice(&recorded).map_err(|error| {
        Error::refused("arm_yaml_unreadable", format!("the run's configuration is damaged: {error}"))
            .at(path)
            .hint(FRESH)
    })?;
    let now: Value = serde_yaml::from_str(text).map_err(|error| Error::crash(format!("resolved arm: {error}")))?;
    let mut found = differences(&recorded, &now);
    found.retain(|difference| !is_location(&difference.field));
    Ok(found)
}

fn read_identity(path: &Path) -> Result<Option<Value>> {
    let recorded = match std::fs::read(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        read => read.map_err(|error| io_error("cannot read the run's identity", path, &error))?,
    };
    serde_json::from_slice(&recorded).map(Some).map_err(|error| {
        Error::refused("identity_unreadable", format!("the run's identity is damaged: {error}")).at(path).hint(FRESH)
    })
}

/// Differences of this identity from the recorded one, all of them accepted; none if there is no record.
pub(super) fn compare_identity(path: &Path, identity: &Value, accepted: &[String]) -> Result<Vec<Difference>> {
    let found = read_identity(path)?.map_or_else(Vec::new, |recorded| differences(&recorded, identity));
    refuse_unless(accepted, "identity_differs", path, &found)?;
    Ok(found)
}

/// Puts a record in place. One that stands there and differs is kept as `kept`, before it is replaced in one move: the
/// run is never without a record, and no record is ever lost.
pub(super) fn put_record(path: &Path, kept: &Path, text: &[u8], changed: bool) -> Result<()> {
    if changed {
        let before = std::fs::read(path).map_err(|error| io_error("cannot read the run's record", path, &error))?;
        create_new(kept, &before)?;
        return write_whole(path, text);
    }
    create_new(path, text).map(drop)
}

/// Has the run a checkpoint (whole or not) or a validation point?
fn has_results(run: &RunDir) -> Result<bool> {
    let validated = || folder_names(&run.validation()).map(|names| !names.is_empty());
    Ok(!CheckpointStore::new(run).list()?.is_empty() || validated()?)
}

/// Moves the record that nothing came of into the folder of the attempt that begins with another one.
pub(super) fn retire(path: &Path, kept: &Path) -> Result<()> {
    match std::fs::rename(path, kept) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(io_error("cannot retire the unused configuration", path, &error))
        }
        _ => Ok(()),
    }
}

/// The way out of a refusal.
const FRESH: &str = "undo the change, or begin anew with --fresh, which moves the present run aside";

/// Fields that say where something lies. What lies there is hashed in the identity, so a checkout or a mount that
/// moved does not make another run.
const LOCATIONS: [&str; 4] = ["data.dataset", "codec.path", "text.path", "weights.path"];

/// Does this field of a recipe only say where something lies?
pub(crate) fn is_location(field: &str) -> bool {
    LOCATIONS.contains(&field)
}

/// Refuses the differences that were not accepted, all in one sentence.
fn refuse_unless(accepted: &[String], code: &'static str, path: &Path, found: &[Difference]) -> Result<()> {
    let refused: Vec<&Difference> = found.iter().filter(|difference| !accepted.contains(&difference.field)).collect();
    if refused.is_empty() {
        return Ok(());
    }
    let list = refused.iter().map(|difference| difference.to_string()).collect::<Vec<_>>().join("; ");
    let other = if code == "arm_differs" { "configuration" } else { "identity" };
    // Brackets of a list's element mean something to a shell.
    let flag = |difference: &&Difference| match difference.field.contains('[') {
        true => format!("--accept-change '{}'", difference.field),
        false => format!("--accept-change {}", difference.field),
    };
    let flags = refused.iter().map(flag).collect::<Vec<_>>().join(" ");
    Err(Error::refused(code, format!("this run was started with another {other}: {list}"))
        .at(path)
        .hint(format!("{FRESH}; or go on all the same, with a seam in the run's record: {flags}")))
}
