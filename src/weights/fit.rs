//! Whether files hold exactly the tensors that a model takes from them, and taking them.

use super::shards::{WeightFiles, in_file};
use crate::data::Progress;
use crate::{Error, Result};
use candle_core::{Device, Tensor, Var};
use rayon::prelude::*;
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};

/// One tensor that a model takes from a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Wanted {
    /// Its name in the file.
    pub source: String,
    /// Its shape in the file.
    pub stored: Vec<usize>,
    /// The parameter that it becomes.
    pub parameter: String,
    /// The parameter's shape; as many numbers in the same order.
    pub shape: Vec<usize>,
}

/// How the tensors of files differ from those that a model takes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Fit {
    /// Taken by the model, in no file.
    pub missing: Vec<String>,
    /// Of another shape in the file.
    pub other_shape: Vec<OtherShape>,
    /// In a file, taken by nothing.
    pub unexpected: Vec<String>,
    /// In a file, known to be left over from an earlier form of the model.
    pub ignored: Vec<String>,
}

/// A tensor whose shape differs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct OtherShape {
    pub name: String,
    pub stored: Vec<usize>,
    pub expected: Vec<usize>,
}

impl Fit {
    pub(super) fn of(files: &WeightFiles, wanted: &[Wanted], obsolete: &[&str]) -> Self {
        let mut fit = Self::default();
        for Wanted { source, stored: expected, .. } in wanted {
            match files.tensors.get(source) {
                None => fit.missing.push(source.clone()),
                Some(found) if found.shape != *expected => fit.other_shape.push(OtherShape {
                    name: source.clone(),
                    stored: found.shape.clone(),
                    expected: expected.clone(),
                }),
                Some(_) => {}
            }
        }
        let sources: BTreeSet<&str> = wanted.iter().map(|wanted| wanted.source.as_str()).collect();
        let rest = files.tensors.keys().filter(|name| !sources.contains(name.as_str())).cloned();
        (fit.ignored, fit.unexpected) = rest.partition(|name| obsolete.contains(&name.as_str()));
        fit
    }

    /// Every tensor of the model is there, in its shape, and nothing else.
    pub fn is_exact(&self) -> bool {
        self.missing.is_empty() && self.other_shape.is_empty() && self.unexpected.is_empty()
    }

    fn check(&self, files: &WeightFiles) -> Result<()> {
        let in_all = |count: usize| match count {
            1 => String::new(),
            count => format!("{count} such tensors in all; `lbva-tui weights inspect` lists them"),
        };
        let place = |name: &str| match files.tensors.get(name) {
            Some(stored) => in_file(name, files.path_of(stored)),
            None => in_file(name, &files.folder),
        };
        if let Some(name) = self.missing.first() {
            return Err(Error::refused("tensor_missing", "the weights lack a parameter of this model")
                .in_place(place(name))
                .hint(in_all(self.missing.len())));
        }
        if let Some(OtherShape { name, stored, expected }) = self.other_shape.first() {
            return Err(Error::refused("tensor_shape", format!("shape {stored:?} where the model has {expected:?}"))
                .in_place(place(name))
                .hint(in_all(self.other_shape.len())));
        }
        if let Some(name) = self.unexpected.first() {
            return Err(Error::refused("tensor_unexpected", "the weights have a tensor that this model lacks")
                .in_place(place(name))
                .hint(in_all(self.unexpected.len())));
        }
        Ok(())
    }
}

/// Reads what is wanted, all of it and nothing else, as variables in f32 on the CPU, by parameter.
pub(super) fn take(
    files: &WeightFiles,
    wanted: &[Wanted],
    obsolete: &[&str],
    progress: Progress<'_>,
) -> Result<BTreeMap<String, Tensor>> {
    Fit::of(files, wanted, obsolete).check(files)?;
    let (begun, total) = (AtomicU64::new(0), wanted.len() as u64);
    let read: Vec<Result<(String, Tensor)>> = wanted
        .par_iter()
        .map(|wanted| {
            progress(begun.fetch_add(1, Ordering::Relaxed), total)?;
            let values = files.read(&wanted.source, &files.tensors[&wanted.source])?;
            // A variable from the start: making one of a tensor later would copy it.
            let variable = Var::from_vec(values, wanted.shape.as_slice(), &Device::Cpu)?;
            Ok((wanted.parameter.clone(), variable.into_inner()))
        })
        .collect();
    // Collected before judged, so that the same file always gives the same error.
    let tensors = read.into_iter().collect::<Result<_>>()?;
    progress(total, total)?;
    Ok(tensors)
}
