//! Every sample of a recipe through the functions that training loads with, before anything is queued.
//!
//! A sample is clean if and only if the loader returns it. The verdicts go to three files of one folder:
//! `verdicts.jsonl`, a line a recording as soon as it is checked, under the hash of all that the verdict depends on, so
//! that a later pass checks what changed and no more; `clean.jsonl` and `rejects.jsonl`, whole, in the order of the
//! index, at the end of a pass.

mod colours;
mod findings;

pub(super) use colours::MeanColour;
pub(super) use findings::Bound;
pub use findings::{Finding, Severity};

use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use super::Progress;
use super::identity::{sha256_file, sha256_hex};
use super::lerobot::Metadata;
use super::video::FrameFault;
use crate::files::{LineFile, create_folder, io_error, write_whole};
use crate::{Error, Result};

/// Version of the verdicts' file, and the code that came to them: another loader may decide otherwise.
const VERSION: &str = concat!("validate 1 ", env!("CARGO_PKG_VERSION"), " ", env!("LBVA_COMMIT"));

/// A set of samples that can be checked, an episode at a time.
pub trait Source: Sync {
    /// Names a sample.
    type Id: fmt::Display + Send + Sync;

    /// Every sample of the index in its order, and those that it leaves out.
    fn recordings(&self) -> Vec<Recording<Self::Id>>;

    /// What the datasets say about themselves.
    fn datasets(&self) -> Vec<&Metadata>;

    /// The recipe's views.
    fn views(&self) -> &[String];

    /// All that the verdicts of a recording depend on.
    ///
    /// # Errors
    /// `no_videos`.
    fn inputs(&self, recording: &Recording<Self::Id>) -> Result<Inputs>;

    /// What the loader says of each sample of a recording.
    fn check(&self, recording: &Recording<Self::Id>) -> Checked;

    /// What is to be said of the whole.
    fn findings(&self) -> Vec<Finding>;
}

/// The samples of one episode.
#[derive(Clone, Debug)]
pub struct Recording<Id> {
    /// Place among [`Source::datasets`].
    pub dataset: usize,
    pub episode: usize,
    pub units: Vec<Unit<Id>>,
}

/// One sample.
#[derive(Clone, Debug)]
pub struct Unit<Id> {
    pub id: Id,
    /// `train` or `validation`.
    pub side: &'static str,
    /// Why the index does not have it.
    pub left_out: Option<Reject>,
}

/// What verdicts depend on: settings in words, and the contents of files.
#[derive(Clone, Debug)]
pub struct Inputs {
    pub records: String,
    /// One a view.
    pub videos: Vec<PathBuf>,
    pub others: Vec<PathBuf>,
}

/// What a look at a recording gives.
#[derive(Clone, Debug)]
pub struct Checked {
    /// One a sample.
    pub(super) verdicts: Vec<Result<(), FrameFault>>,
    pub(super) warnings: Vec<Finding>,
    /// Of the pictures that were decoded, one a view.
    pub(super) colours: Vec<MeanColour>,
}

/// Why a sample cannot be trained on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reject {
    /// Stable: the code of the loader's error, `decode_failed` with the frame after a colon if it is known;
    /// `frame_count` where video, rows and metadata have unlike lengths.
    pub reason: String,
    pub what: String,
    /// Relative to the dataset.
    pub place: String,
}

impl Reject {
    /// The reason behind a fault.
    pub fn of(fault: &FrameFault) -> Self {
        let reason = match (fault.error.code, fault.frame) {
            ("decode_failed", Some(frame)) => format!("decode_failed:{frame}"),
            ("too_long" | "wrong_row_count", _) => "frame_count".to_owned(),
            (code, _) => code.to_owned(),
        };
        Self { reason, what: fault.error.what.clone(), place: fault.error.place.clone() }
    }
}

/// A reason or finding, how often there is one, and the first.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Tally {
    /// Without the frame.
    pub code: String,
    pub count: usize,
    /// Sample of the first, empty for a finding.
    pub sample: String,
    pub what: String,
    pub place: String,
}

/// The end of a pass.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Report {
    /// Samples looked at, those that the index leaves out included.
    pub samples: usize,
    pub clean: usize,
    pub rejects: usize,
    /// Samples whose verdict was known from an earlier pass.
    pub known: usize,
    pub reasons: Vec<Tally>,
    /// Faults of the dataset as a whole.
    pub problems: Vec<Tally>,
    pub warnings: Vec<Tally>,
    pub clean_file: PathBuf,
    pub rejects_file: PathBuf,
    /// SHA-256 of the list of clean samples.
    pub clean_sha256: String,
}

/// The verdicts of one recording, as a line of `verdicts.jsonl`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Verdicts {
    key: String,
    episode: usize,
    /// By place among the recording's samples; those that are not here are clean.
    rejects: BTreeMap<usize, Reject>,
    warnings: Vec<Finding>,
}

/// A line of `clean.jsonl`.
#[derive(Serialize)]
struct CleanLine<'a> {
    sample: &'a str,
    side: &'a str,
}

/// A line of `rejects.jsonl`.
#[derive(Serialize)]
struct RejectLine<'a> {
    sample: &'a str,
    side: &'a str,
    #[serde(flatten)]
    reject: &'a Reject,
}

/// Checks every sample, in parallel over episodes, and writes the three files into `folder`. `progress` counts
/// samples; its error ends the pass, and what was done until then is known to the next.
///
/// # Errors
/// Those of writing; an error of `progress`. A broken sample is no error.
pub fn validate<S: Source>(source: &S, folder: &Path, progress: Progress<'_>) -> Result<Report> {
    create_folder(folder)?;
    let (known, log) = open_verdicts(&folder.join("verdicts.jsonl"))?;
    let log = Mutex::new(log);
    let (recordings, datasets) = (source.recordings(), source.datasets());
    let root = |recording: &Recording<S::Id>| datasets.get(recording.dataset).map(|metadata| metadata.root.as_path());
    let stated: Vec<_> = datasets.iter().map(|metadata| colours::stated(&metadata.root, source.views())).collect();
    let samples = recordings.iter().map(|recording| recording.units.len()).sum::<usize>();
    let (done, reused) = (AtomicU64::new(0), AtomicU64::new(0));
    progress(0, samples as u64)?;
    let checked: Vec<Result<Verdicts>> = recordings
        .par_iter()
        .map(|recording| {
            // Where a stop is heard: before work is begun, not after.
            progress(done.load(Ordering::Relaxed), samples as u64)?;
            let count = recording.units.len() as u64;
            let stated = stated.get(recording.dataset).and_then(|episodes| episodes.get(&recording.episode));
            let stated = stated.map_or(&[][..], Vec::as_slice);
            let (key, twins) = source.inputs(recording).map_or((None, None), |inputs| contents(&inputs, stated));
            let verdicts = match key.as_ref().and_then(|key| known.get(key)) {
                Some(verdicts) => {
                    reused.fetch_add(count, Ordering::Relaxed);
                    verdicts.clone()
                }
                None => {
                    let verdicts = check(source, recording, key.clone(), twins, stated, root(recording));
                    if key.is_some() {
                        let line = json(&verdicts)?;
                        log.lock().unwrap_or_else(PoisonError::into_inner).append(&line)?;
                    }
                    verdicts
                }
            };
            progress(done.fetch_add(count, Ordering::Relaxed) + count, samples as u64)?;
            Ok(verdicts)
        })
        .collect();
    log.lock().unwrap_or_else(PoisonError::into_inner).sync()?;
    let checked = checked.into_iter().collect::<Result<Vec<_>>>()?;

    let (mut clean, mut rejected) = (String::new(), String::new());
    let (mut clean_count, mut reasons) = (0, Tallies::default());
    for (recording, verdicts) in recordings.iter().zip(&checked) {
        for (at, unit) in recording.units.iter().enumerate() {
            let (sample, side) = (&unit.id.to_string(), unit.side);
            match verdicts.rejects.get(&at) {
                None => {
                    clean_count += 1;
                    clean.push_str(&json(&CleanLine { sample, side })?);
                    clean.push('\n');
                }
                Some(reject) => {
                    rejected.push_str(&json(&RejectLine { sample, side, reject })?);
                    rejected.push('\n');
                    reasons.add(&reject.reason, sample, &reject.what, &reject.place);
                }
            }
        }
    }
    let (mut problems, mut warnings) = (Tallies::default(), Tallies::default());
    let of_datasets = datasets.iter().flat_map(|metadata| findings::of_dataset(metadata, source.views()));
    let all = of_datasets.chain(source.findings()).chain(checked.into_iter().flat_map(|verdicts| verdicts.warnings));
    for finding in all {
        let tallies = if finding.severity == Severity::Problem { &mut problems } else { &mut warnings };
        tallies.add(&finding.code, "", &finding.what, &finding.place);
    }
    let (clean_file, rejects_file) = (folder.join("clean.jsonl"), folder.join("rejects.jsonl"));
    write_whole(&rejects_file, rejected.as_bytes())?;
    write_whole(&clean_file, clean.as_bytes())?;
    Ok(Report {
        samples,
        clean: clean_count,
        rejects: samples - clean_count,
        known: usize::try_from(reused.into_inner()).unwrap_or(samples),
        reasons: reasons.0,
        problems: problems.0,
        warnings: warnings.0,
        clean_file,
        rejects_file,
        clean_sha256: sha256_hex(clean.as_bytes()),
    })
}

fn check<S: Source>(
    source: &S,
    recording: &Recording<S::Id>,
    key: Option<String>,
    twins: Option<Finding>,
    stated: &[Option<[f64; 3]>],
    root: Option<&Path>,
) -> Verdicts {
    let Checked { verdicts, mut warnings, colours } = source.check(recording);
    warnings.extend(twins);
    warnings.extend(colours::exchanged(recording.episode, source.views(), &colours, stated));
    let rejects = recording.units.iter().zip(verdicts).enumerate().filter_map(|(at, (unit, result))| {
        let reject = unit.left_out.clone().or_else(|| result.err().map(|fault| Reject::of(&fault)))?;
        Some((at, Reject { place: relative(&reject.place, root), ..reject }))
    });
    let rejects = rejects.collect();
    for warning in &mut warnings {
        warning.place = relative(&warning.place, root);
    }
    Verdicts { key: key.unwrap_or_default(), episode: recording.episode, rejects, warnings }
}

fn relative(place: &str, root: Option<&Path>) -> String {
    let inside = root.and_then(|root| Path::new(place).strip_prefix(root).ok());
    inside.map_or_else(|| place.to_owned(), |inside| inside.display().to_string())
}

/// The key of a recording, absent if a file can neither be read nor is missing (it may be read the next time); and a
/// warning if two views show one film.
fn contents(inputs: &Inputs, stated: &[Option<[f64; 3]>]) -> (Option<String>, Option<Finding>) {
    let state = |path: &PathBuf| match sha256_file(path) {
        Ok(hash) => Some(hash),
        Err(error) if error.code == "file_missing" => Some("absent".to_owned()),
        Err(_) => None,
    };
    let videos: Vec<Option<String>> = inputs.videos.iter().map(state).collect();
    let same = videos.iter().enumerate().find_map(|(at, hash)| {
        let hash = hash.as_ref().filter(|hash| *hash != "absent")?;
        let first = videos[..at].iter().position(|other| other.as_ref() == Some(hash))?;
        let what = format!("it is the same file as {}", inputs.videos[first].display());
        Some(Finding::warning(Error::data("same_video", what).at(&inputs.videos[at])))
    });
    let states: Option<Vec<String>> = videos.into_iter().chain(inputs.others.iter().map(state)).collect();
    let key = states
        .map(|states| sha256_hex(format!("{VERSION}\n{}{stated:?}\n{}", inputs.records, states.join("\n")).as_bytes()));
    (key, same)
}

/// The verdicts of earlier passes by their keys, and the file to append to. A line that cannot be read (the last one
/// of a pass that was killed) is as if it were not there.
fn open_verdicts(path: &Path) -> Result<(HashMap<String, Verdicts>, LineFile)> {
    let text = match std::fs::read(path) {
        Ok(bytes) => String::from_utf8_lossy(&bytes).into_owned(),
        Err(error) if error.kind() == ErrorKind::NotFound => String::new(),
        Err(error) => return Err(io_error("cannot read the verdicts", path, &error)),
    };
    let lines = text.lines().filter_map(|line| serde_json::from_str::<Verdicts>(line).ok());
    let known = lines.map(|verdicts| (verdicts.key.clone(), verdicts)).collect();
    let mut file = LineFile::append_to(path)?;
    if !text.is_empty() && !text.ends_with('\n') {
        file.append("")?;
    }
    Ok((known, file))
}

fn json(value: &impl Serialize) -> Result<String> {
    serde_json::to_string(value).map_err(|error| Error::crash(format!("a verdict cannot be written: {error}")))
}

/// In the order in which they were first seen.
#[derive(Default)]
struct Tallies(Vec<Tally>);

impl Tallies {
    fn add(&mut self, reason: &str, sample: &str, what: &str, place: &str) {
        let code = reason.split(':').next().unwrap_or_default();
        match self.0.iter_mut().find(|tally| tally.code == code) {
            Some(tally) => tally.count += 1,
            None => self.0.push(Tally {
                code: code.to_owned(),
                count: 1,
                sample: sample.to_owned(),
                what: what.to_owned(),
                place: place.to_owned(),
            }),
        }
    }
}
