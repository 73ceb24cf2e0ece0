//! Which samples a recipe's datasets hold, from their metadata and from listings of folders: no video, parquet or
//! latent file is opened, so that a hundred thousand episodes are found in seconds.

use rayon::prelude::*;
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::OnceLock;

use crate::config::{EpisodeDataConfig, LatentSource, SampleUnit};
use crate::data::lerobot::{EpisodeRecord, Metadata};
use crate::pack::length::latent_frames;
use crate::{Error, Result};

/// One sample: a whole episode (`episode_000012`) or its frames from a first to one past a last
/// (`episode_000012_0_110`); with several datasets, after the dataset's place in the order of their paths
/// (`dataset_0003_episode_000012`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EpisodeId {
    /// Place of the dataset, if the recipe has several.
    pub dataset: Option<u32>,
    pub episode: usize,
    /// First and one past the last source frame, unless a sample is a whole episode.
    pub segment: Option<(usize, usize)>,
}

impl fmt::Display for EpisodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut name = self.dataset.map_or(String::new(), |dataset| format!("dataset_{dataset:04}_"));
        name.push_str(&file_stem(self.episode, self.segment));
        f.pad(&name)
    }
}

impl FromStr for EpisodeId {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let parsed = || {
            let (dataset, rest) = match text.strip_prefix("dataset_") {
                Some(rest) => {
                    let (dataset, rest) = rest.split_once('_')?;
                    (Some(dataset.parse().ok()?), rest)
                }
                None => (None, text),
            };
            let numbers: Vec<usize> =
                rest.strip_prefix("episode_")?.split('_').map(|part| part.parse().ok()).collect::<Option<_>>()?;
            match numbers[..] {
                [episode] => Some(Self { dataset, episode, segment: None }),
                [episode, first, end] => Some(Self { dataset, episode, segment: Some((first, end)) }),
                _ => None,
            }
        };
        parsed().ok_or_else(|| {
            Error::usage("bad_episode", format!("{text} is no sample"))
                .hint("a sample is episode_000012, or episode_000012_0_110")
        })
    }
}

fn file_stem(episode: usize, segment: Option<(usize, usize)>) -> String {
    match segment {
        None => format!("episode_{episode:06}"),
        Some((first, end)) => format!("episode_{episode:06}_{first}_{end}"),
    }
}

/// A sample that is not there, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Excluded {
    /// The episode or segment.
    pub what: String,
    /// The view whose file is missing, if it is about one.
    pub view: Option<String>,
    /// `segment_missing`, `segment_out_of_range` or `latent_missing`.
    pub code: &'static str,
    pub reason: String,
    pub path: PathBuf,
}

impl fmt::Display for Excluded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} is left out: {} ({})", self.what, self.reason, self.path.display())
    }
}

/// What is known of a sample without opening its files.
#[derive(Debug)]
pub(super) struct Sample {
    pub id: EpisodeId,
    /// Place of its dataset in [`Index::datasets`].
    pub dataset: usize,
    /// First source frame.
    pub start: usize,
    /// One past the last source frame.
    pub end: usize,
    pub prompt: String,
    /// Latent frames F.
    pub frames: usize,
    /// Place in [`Index::contents`].
    pub contents: usize,
}

/// All samples, in the order of their ids.
#[derive(Debug)]
pub(super) struct Index {
    /// In the order of their paths.
    pub datasets: Vec<Metadata>,
    pub samples: Vec<Sample>,
    pub excluded: Vec<Excluded>,
    /// Hash over the files that hold pictures or latents, once somebody asked: one a sample for latent files, one an
    /// episode for videos, which its segments share.
    pub contents: Vec<OnceLock<String>>,
}

impl Index {
    /// # Errors
    /// `dataset_missing`; those of [`Metadata::open`]; `unknown_task` for an episode without a text;
    /// `broken_metadata` for a segment that stands there twice; those of [`latent_frames`].
    pub fn read(config: &EpisodeDataConfig) -> Result<Self> {
        let roots = find(&config.dataset)?;
        let datasets: Vec<Result<Metadata>> = roots.par_iter().map(|root| Metadata::open(root)).collect();
        let datasets = datasets.into_iter().collect::<Result<Vec<_>>>()?;
        let several = datasets.len() > 1;
        let mut index = Self { datasets: Vec::new(), samples: Vec::new(), excluded: Vec::new(), contents: Vec::new() };
        for (place, metadata) in datasets.iter().enumerate() {
            let name = match several {
                false => None,
                true => Some(u32::try_from(place).map_err(|_| Error::crash("more datasets than fit a number"))?),
            };
            let files = match config.latents {
                LatentSource::Official => Some(LatentFiles::list(metadata, &config.views)),
                LatentSource::Videos => None,
            };
            for record in &metadata.episodes {
                index.add_episode(config, metadata, (place, name), files.as_ref(), record)?;
            }
        }
        index.datasets = datasets;
        Ok(index)
    }

    fn add_episode(
        &mut self,
        config: &EpisodeDataConfig,
        metadata: &Metadata,
        (dataset, name): (usize, Option<u32>),
        files: Option<&LatentFiles>,
        record: &EpisodeRecord,
    ) -> Result<()> {
        let episode = record.episode_index;
        let episodes_file = || metadata.root.join("meta/episodes.jsonl");
        let mut units = match config.sample {
            SampleUnit::Episode => vec![(0, record.length, task(metadata, record)?.to_owned())],
            SampleUnit::Segment => {
                let segments = record.action_config.as_deref().unwrap_or_default();
                segments.iter().map(|it| (it.start_frame, it.end_frame, it.action_text.clone())).collect()
            }
        };
        if units.is_empty() {
            self.excluded.push(Excluded {
                what: EpisodeId { dataset: name, episode, segment: None }.to_string(),
                view: None,
                code: "segment_missing",
                reason: "it has no action_config".into(),
                path: episodes_file(),
            });
        }
        units.sort_by_key(|unit| (unit.0, unit.1));
        if let Some(pair) = units.windows(2).find(|pair| (pair[0].0, pair[0].1) == (pair[1].0, pair[1].1)) {
            let what = format!("frames {} to {} of episode {episode} stand there twice", pair[0].0, pair[0].1);
            return Err(Error::data("broken_metadata", what).at(episodes_file()));
        }
        let shared = self.contents.len();
        if files.is_none() {
            self.contents.push(OnceLock::new());
        }
        for (start, end, prompt) in units {
            let segment = (config.sample == SampleUnit::Segment).then_some((start, end));
            let id = EpisodeId { dataset: name, episode, segment };
            let mut leave_out = |view: Option<&String>, code, reason: String, path: PathBuf| {
                self.excluded.push(Excluded { what: id.to_string(), view: view.cloned(), code, reason, path });
            };
            if start >= end || end > record.length {
                let reason = format!("frames {start} to {end} are none of its {}", record.length);
                leave_out(None, "segment_out_of_range", reason, episodes_file());
                continue;
            }
            if let Some(files) = files {
                let missing = config.views.iter().find(|view| !files.has(metadata, view, episode, (start, end)));
                if let Some(view) = missing {
                    let path = latent_file(metadata, view, episode, (start, end));
                    leave_out(Some(view), "latent_missing", format!("no latent file of {view}"), path);
                    continue;
                }
                self.contents.push(OnceLock::new());
            }
            self.samples.push(Sample {
                id,
                dataset,
                start,
                end,
                prompt,
                frames: latent_frames(end - start, config.frame_stride)?,
                contents: if files.is_some() { self.contents.len() - 1 } else { shared },
            });
        }
        Ok(())
    }

    /// The latent file of a view of a sample.
    pub fn latent_file(&self, sample: &Sample, view: &str) -> Result<PathBuf> {
        let metadata = self.datasets.get(sample.dataset);
        let metadata = metadata.ok_or_else(|| Error::crash("a sample of no dataset"))?;
        Ok(latent_file(metadata, view, sample.id.episode, (sample.start, sample.end)))
    }

    /// # Errors
    /// `unknown_episode`.
    pub fn sample(&self, id: EpisodeId) -> Result<&Sample> {
        let at = self.samples.binary_search_by_key(&id, |sample| sample.id);
        at.map(|at| &self.samples[at])
            .map_err(|_| Error::data("unknown_episode", format!("the dataset has no sample {id}")))
    }
}

/// The latent file of a view: `latents/chunk-000/<view>/episode_000000_<first>_<end>.pth`.
fn latent_file(metadata: &Metadata, view: &str, episode: usize, frames: (usize, usize)) -> PathBuf {
    metadata.latent_folder(view, episode).join(format!("{}.pth", file_stem(episode, Some(frames))))
}

/// The latent files of a dataset, by listing their folders: asking for each of a hundred thousand names would take
/// minutes on a network file system.
struct LatentFiles(BTreeMap<PathBuf, HashSet<String>>);

impl LatentFiles {
    fn list(metadata: &Metadata, views: &[String]) -> Self {
        let folders: BTreeSet<PathBuf> = metadata
            .episodes
            .iter()
            .flat_map(|record| views.iter().map(|view| metadata.latent_folder(view, record.episode_index)))
            .collect();
        let folders: Vec<PathBuf> = folders.into_iter().collect();
        // A folder that cannot be listed has no files that can be read; the samples then say what they miss.
        let names = |folder: &PathBuf| -> HashSet<String> {
            let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
            entries.filter_map(|entry| entry.file_name().into_string().ok()).collect()
        };
        Self(
            folders
                .into_par_iter()
                .map(|folder| {
                    let names = names(&folder);
                    (folder, names)
                })
                .collect(),
        )
    }

    fn has(&self, metadata: &Metadata, view: &str, episode: usize, frames: (usize, usize)) -> bool {
        let names = self.0.get(&metadata.latent_folder(view, episode));
        names.is_some_and(|names| names.contains(&format!("{}.pth", file_stem(episode, Some(frames)))))
    }
}

/// The text of a whole episode.
fn task<'a>(metadata: &'a Metadata, record: &'a EpisodeRecord) -> Result<&'a str> {
    // A dataset of one task need not repeat it.
    let only = (metadata.tasks.len() == 1).then(|| metadata.tasks.values().next()).flatten();
    record.tasks.first().or(only).map(String::as_str).ok_or_else(|| {
        Error::data("unknown_task", format!("episode {} has no task", record.episode_index))
            .at(metadata.root.join("meta/episodes.jsonl"))
    })
}

/// Roots of the datasets in a folder (grandparents of a `meta/info.json`), in the order of their paths.
fn find(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut roots = Vec::new();
    if folder.is_dir() {
        walk(folder, &mut HashSet::new(), &mut roots);
    }
    roots.sort();
    if roots.is_empty() {
        return Err(Error::data("dataset_missing", "no dataset is in this folder")
            .at(folder)
            .hint("set data.dataset to a LeRobot v2.1 dataset (it has meta/info.json) or to a folder of them"));
    }
    Ok(roots)
}

/// A dataset's own folders are not searched: they hold a hundred thousand files and no dataset.
fn walk(folder: &Path, seen: &mut HashSet<PathBuf>, roots: &mut Vec<PathBuf>) {
    // By its real path, so that a link to a folder above ends here.
    if !std::fs::canonicalize(folder).is_ok_and(|real| seen.insert(real)) {
        return;
    }
    if folder.join("meta/info.json").is_file() {
        roots.push(folder.to_owned());
        return;
    }
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut folders: Vec<PathBuf> = entries.map(|entry| entry.path()).filter(|path| path.is_dir()).collect();
    // Of two ways to one folder, the same one is always taken.
    folders.sort();
    for folder in folders {
        walk(&folder, seen, roots);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_reads_back_from_its_name() {
        for (id, name) in [
            (EpisodeId { dataset: None, episode: 12, segment: None }, "episode_000012"),
            (EpisodeId { dataset: None, episode: 12, segment: Some((0, 110)) }, "episode_000012_0_110"),
            (EpisodeId { dataset: Some(3), episode: 12, segment: Some((5, 9)) }, "dataset_0003_episode_000012_5_9"),
        ] {
            assert_eq!(id.to_string(), name);
            assert_eq!(name.parse::<EpisodeId>().unwrap(), id);
        }
        for broken in ["", "episode_", "episode_1_2", "episode_1_2_3_4", "dataset_x_episode_1", "episode_000012@3"] {
            assert_eq!(broken.parse::<EpisodeId>().unwrap_err().code, "bad_episode", "{broken}");
        }
    }
}
