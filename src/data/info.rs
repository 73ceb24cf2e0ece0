//! What `data info` shows: a dataset as it describes itself, and as a recipe sees it.

use serde::Serialize;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::geometry::{GeometryCache, GeometryInfo};
use super::lerobot::Metadata;
use super::{Dataset, Progress, Statistics};
use crate::Result;
use crate::config::{DataConfig, ModelConfig};

/// A dataset by its own metadata; no data file was opened.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DatasetSummary {
    pub root: PathBuf,
    pub version: String,
    pub robot: Option<String>,
    /// Frames a second.
    pub fps: f64,
    pub episodes: usize,
    pub frames: usize,
    /// Shortest, median and longest episode, frames.
    pub lengths: [usize; 3],
    /// Task text -> episodes, by `meta/episodes.jsonl`.
    pub tasks: BTreeMap<String, usize>,
    pub views: Vec<ViewSummary>,
    pub geometry: Option<GeometryInfo>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ViewSummary {
    pub name: String,
    /// Pixels; absent if the metadata do not say.
    pub height: Option<usize>,
    pub width: Option<usize>,
}

/// A dataset as a recipe cuts it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RecipeSummary {
    pub dataset: DatasetSummary,
    /// Views of the recipe, in its order.
    pub views: Vec<String>,
    pub wrist_view: String,
    pub train: SideSummary,
    pub validation: SideSummary,
    /// Episodes shorter than one clip.
    pub too_short: Vec<usize>,
    pub statistics: Statistics,
    /// SHA-256 over clip index and file contents.
    pub identity: String,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SideSummary {
    pub episodes: usize,
    pub clips: usize,
    /// Task text -> clips.
    pub tasks: BTreeMap<String, usize>,
}

/// Reads a dataset's metadata.
///
/// # Errors
/// Those of [`Metadata::open`] and [`GeometryCache::open`].
pub fn describe(root: &Path) -> Result<DatasetSummary> {
    describe_metadata(&Metadata::open(root)?)
}

fn describe_metadata(metadata: &Metadata) -> Result<DatasetSummary> {
    let mut lengths: Vec<usize> = metadata.episodes.iter().map(|record| record.length).collect();
    lengths.sort_unstable();
    let at = |index: usize| lengths.get(index).copied().unwrap_or(0);
    let mut tasks = BTreeMap::new();
    for record in &metadata.episodes {
        for task in &record.tasks {
            *tasks.entry(task.clone()).or_default() += 1;
        }
    }
    let videos = metadata.features.iter().filter(|(_, feature)| feature.dtype == "video");
    Ok(DatasetSummary {
        root: metadata.root.clone(),
        version: metadata.version.clone(),
        robot: metadata.robot.clone(),
        fps: metadata.fps,
        episodes: lengths.len(),
        frames: lengths.iter().sum(),
        lengths: [at(0), at(lengths.len() / 2), at(lengths.len().saturating_sub(1))],
        tasks,
        views: videos
            .map(|(name, feature)| ViewSummary {
                name: name.clone(),
                height: feature.size.map(|size| size.0),
                width: feature.size.map(|size| size.1),
            })
            .collect(),
        geometry: GeometryCache::open(&metadata.root)?.map(|cache| cache.info().clone()),
    })
}

/// Opens a dataset as a recipe does and hashes its files.
///
/// # Errors
/// Those of [`Dataset::open`] and [`Dataset::identity`].
pub fn summarise(config: &DataConfig, model: &ModelConfig, progress: Progress<'_>) -> Result<RecipeSummary> {
    let dataset = Dataset::open(config, model)?;
    let side = |clips: &[super::ClipId]| {
        let mut episodes: Vec<usize> = clips.iter().map(|clip| clip.episode).collect();
        episodes.dedup();
        let mut tasks = BTreeMap::new();
        for clip in clips {
            *tasks.entry(dataset.prompt(clip.episode).to_owned()).or_default() += 1;
        }
        SideSummary { episodes: episodes.len(), clips: clips.len(), tasks }
    };
    let needed = (config.frames - 1) * config.frame_skip + 1;
    let records = dataset.metadata().episodes.iter();
    Ok(RecipeSummary {
        dataset: describe_metadata(dataset.metadata())?,
        views: config.views.clone(),
        wrist_view: config.wrist_view.clone(),
        train: side(dataset.train()),
        validation: side(dataset.validation()),
        too_short: records.filter(|record| record.length < needed).map(|record| record.episode_index).collect(),
        statistics: dataset.statistics().clone(),
        identity: dataset.identity(progress)?,
    })
}
