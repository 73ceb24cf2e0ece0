//! The clips of a dataset: which windows exist, which side of the split they are on, and what one contains.
//!
//! A clip is (episode, start). Frames are `start + k * frame_skip`; the order is fixed: by episode, then by start.
//! Training, validation and checks all read clips through [`Dataset::load`].

mod check;

use rayon::prelude::*;
use std::fmt;
use std::ops::RangeInclusive;
use std::str::FromStr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use super::Progress;
use super::geometry::GeometryCache;
use super::identity::{self, Part};
use super::lerobot::Metadata;
use super::robot::{self, RobotRows};
use super::statistics::Statistics;
use super::views;
use crate::config::{DataConfig, ModelConfig};
use crate::{Error, Result};

/// Pixels of one latent cell: picture sides must be multiples of it.
const LATENT_STRIDE: usize = 16;

/// One clip: `episode_000012@32` is the window of episode 12 that starts at source frame 32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClipId {
    pub episode: usize,
    /// First source frame.
    pub start: usize,
}

impl fmt::Display for ClipId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&format!("episode_{:06}@{}", self.episode, self.start))
    }
}

impl FromStr for ClipId {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let parts = text.strip_prefix("episode_").and_then(|rest| rest.split_once('@'));
        let parsed = parts.and_then(|(episode, start)| Some((episode.parse().ok()?, start.parse().ok()?)));
        match parsed {
            Some((episode, start)) => Ok(Self { episode, start }),
            None => Err(Error::usage("bad_clip", format!("{text} is no clip")).hint("a clip is episode_000012@32")),
        }
    }
}

/// All that training or validation needs of one clip. T frames, V views, A actions.
#[derive(Clone, PartialEq)]
pub struct ClipSample {
    pub clip: ClipId,
    /// One a view, in the recipe's order: RGB, [T, 3, height, width].
    pub frames: Vec<Vec<u8>>,
    /// Pixels.
    pub height: usize,
    pub width: usize,
    /// [T, proprio_dim], normalised; an absent arm is zeros.
    pub proprio: Vec<f32>,
    /// 1 where `proprio` is measured, 0 where the arm is absent.
    pub proprio_mask: Vec<f32>,
    /// [A, action_dim], normalised.
    pub action: Vec<f32>,
    pub action_mask: Vec<f32>,
    pub prompt: String,
    /// [tokens, token_dim]; only if the recipe's geometry branch is enabled.
    pub geometry: Option<Vec<f32>>,
}

impl fmt::Debug for ClipSample {
    /// Sizes, not a million pixels.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClipSample")
            .field("clip", &self.clip)
            .field("views", &self.frames.len())
            .field("height", &self.height)
            .field("width", &self.width)
            .field("prompt", &self.prompt)
            .finish_non_exhaustive()
    }
}

impl ClipSample {
    /// Frames T of the clip.
    pub fn frame_count(&self) -> usize {
        self.frames.first().map_or(0, |view| view.len() / (3 * self.height * self.width).max(1))
    }

    /// One view as the codec takes it: [3, T, height, width], `x / 127.5 - 1`. Empty for a view that is not there.
    pub fn video(&self, view: usize) -> Vec<f32> {
        self.frames.get(view).map_or(Vec::new(), |frames| views::to_video(frames, self.height * self.width))
    }
}

/// One episode's numbers and text.
struct Episode {
    index: usize,
    length: usize,
    prompt: String,
    /// Why there are none, in a dataset that was opened [with its faults](Dataset::open_with_faults).
    rows: Result<RobotRows>,
    /// Hash over the video files of the recipe's views, once somebody asked for it.
    videos: OnceLock<String>,
}

/// A dataset as one recipe sees it. Cheap to share between threads; files are opened for each clip.
pub struct Dataset {
    metadata: Metadata,
    config: DataConfig,
    /// (height, width) in pixels of every view.
    size: (usize, usize),
    proprio_dim: usize,
    action_dim: usize,
    /// Source frames between two actions.
    action_skip: usize,
    episodes: Vec<Episode>,
    train: Vec<ClipId>,
    validation: Vec<ClipId>,
    statistics: Statistics,
    /// Present if the dataset has a cache and it counts for this recipe.
    geometry: Option<GeometryCache>,
    geometry_enabled: bool,
}

impl fmt::Debug for Dataset {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Dataset")
            .field("root", &self.metadata.root)
            .field("train", &self.train.len())
            .field("validation", &self.validation.len())
            .finish_non_exhaustive()
    }
}

impl Dataset {
    /// Reads metadata and all state and action rows, cuts the clips and computes the statistics. Opens no video.
    ///
    /// # Errors
    /// Those of [`Metadata::open`] and of the parquet files; `missing_view`, `wrong_size`, `unknown_episode`,
    /// `empty_split`, `unknown_task`, `geometry_missing`, `geometry_mismatch`, `bad_window`.
    pub fn open(config: &DataConfig, model: &ModelConfig) -> Result<Self> {
        Self::read(config, model, false)
    }

    /// The same, but an episode whose rows or task are broken keeps its clips: each of them fails to load, with that
    /// error. For a check of everything; statistics are of the sound episodes.
    ///
    /// # Errors
    /// Those of [`Dataset::open`] that are not about one episode.
    pub fn open_with_faults(config: &DataConfig, model: &ModelConfig) -> Result<Self> {
        Self::read(config, model, true)
    }

    fn read(config: &DataConfig, model: &ModelConfig, with_faults: bool) -> Result<Self> {
        let metadata = Metadata::open(&config.dataset)?;
        let action_skip = check_window(config, model)?;
        let size = picture_size(&metadata, config)?;
        views::check_held_out(std::slice::from_ref(&metadata), &config.validation_episodes)?;
        let geometry = open_geometry(&metadata, config, model)?;

        let read: Vec<Result<Episode>> = metadata
            .episodes
            .par_iter()
            .map(|record| {
                let (index, length) = (record.episode_index, record.length);
                let read = robot::read(&metadata, &config.robot, index, length)
                    .and_then(|rows| Ok((prompt(&metadata, index, rows.task_index)?, rows)));
                let (prompt, rows) = match read {
                    Ok((prompt, rows)) => (prompt, Ok(rows)),
                    Err(error) if with_faults => (String::new(), Err(error)),
                    Err(error) => return Err(error),
                };
                Ok(Episode { index, length, prompt, rows, videos: OnceLock::new() })
            })
            .collect();
        let episodes = read.into_iter().collect::<Result<Vec<_>>>()?;

        let held_out = |episode: &Episode| config.validation_episodes.contains(&episode.index);
        let clips = |wanted: bool| -> Vec<ClipId> {
            episodes
                .iter()
                .filter(|episode| held_out(episode) == wanted)
                .flat_map(|episode| cut(episode, config))
                .collect()
        };
        let (train, validation) = (clips(false), clips(true));
        for (side, clips) in [("training", &train), ("validation", &validation)] {
            if clips.is_empty() {
                let what = format!("no episode of the {side} side is long enough for a clip");
                return Err(Error::refused("empty_split", what)
                    .in_place("data.validation_episodes")
                    .hint("move episodes to the other side, or shorten the clip"));
            }
        }
        let training =
            || episodes.iter().filter(|episode| !held_out(episode)).filter_map(|episode| episode.rows.as_ref().ok());
        let statistics = Statistics::of(
            training().flat_map(|rows| &rows.poses).collect::<Vec<_>>().into_iter(),
            training().flat_map(|rows| &rows.actions).collect::<Vec<_>>().into_iter(),
        );
        Ok(Self {
            metadata,
            config: config.clone(),
            size,
            proprio_dim: model.proprio_dim,
            action_dim: model.action_dim,
            action_skip,
            episodes,
            train,
            validation,
            statistics,
            geometry,
            geometry_enabled: model.geometry.enabled,
        })
    }

    /// Clips to train on.
    pub fn train(&self) -> &[ClipId] {
        &self.train
    }

    /// Held-out clips.
    pub fn validation(&self) -> &[ClipId] {
        &self.validation
    }

    /// Quantiles of the training episodes.
    pub fn statistics(&self) -> &Statistics {
        &self.statistics
    }

    /// What the dataset says about itself.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    /// The recipe's part that this dataset was opened with.
    pub fn config(&self) -> &DataConfig {
        &self.config
    }

    /// (height, width) in pixels of every view.
    pub fn picture_size(&self) -> (usize, usize) {
        self.size
    }

    /// Place of the wrist view in [`ClipSample::frames`].
    pub fn wrist_view(&self) -> usize {
        self.config.views.iter().position(|view| *view == self.config.wrist_view).unwrap_or(0)
    }

    /// Task text of an episode; empty for an episode that does not exist.
    pub fn prompt(&self, episode: usize) -> &str {
        self.episode(episode).map_or("", |episode| &episode.prompt)
    }

    /// The distinct task texts of all episodes, sorted.
    pub fn prompts(&self) -> Vec<&str> {
        let mut prompts: Vec<&str> = self.episodes.iter().map(|episode| episode.prompt.as_str()).collect();
        prompts.sort_unstable();
        prompts.dedup();
        prompts
    }

    fn episode(&self, index: usize) -> Option<&Episode> {
        let at = self.episodes.binary_search_by_key(&index, |episode| episode.index).ok()?;
        self.episodes.get(at)
    }

    /// SHA-256 over the clip index and the contents of every file behind it.
    ///
    /// Geometry files count if the dataset has them, whether or not this recipe's branch reads them: the two arms of
    /// an ablation of that branch have the same data.
    ///
    /// # Errors
    /// `file_missing` or `not_openable` with the first file that cannot be read.
    pub fn identity(&self, progress: Progress<'_>) -> Result<String> {
        let config = &self.config;
        let mut records = format!(
            "clip index 1\nviews {:?}\nframes {} skip {} stride {} action skip {}\nrobot {:?}\n",
            config.views, config.frames, config.frame_skip, config.clip_stride, self.action_skip, config.robot
        );
        let mut parts = Vec::new();
        if let Some(geometry) = &self.geometry {
            records.push_str(&format!("geometry {:?}\n", geometry.info()));
        }
        for episode in &self.episodes {
            records.push_str(&format!("episode {} length {} {:?}\n", episode.index, episode.length, episode.prompt));
            let mut part = |path: std::path::PathBuf, optional| {
                let name = path.strip_prefix(&self.metadata.root).unwrap_or(&path).to_string_lossy().into_owned();
                parts.push(Part { name, path, optional });
            };
            part(self.metadata.data_file(episode.index)?, false);
            for view in &config.views {
                part(self.metadata.video_file(view, episode.index)?, false);
            }
            if let Some(geometry) = &self.geometry {
                part(geometry.file(episode.index), true);
            }
        }
        for (side, clips) in [("train", &self.train), ("validation", &self.validation)] {
            for clip in clips {
                records.push_str(&format!("{side} {clip}\n"));
            }
        }
        identity::hash(&records, &parts, progress)
    }

    /// SHA-256 over the contents of a clip's video files and the frames taken: what its pictures depend on.
    ///
    /// A file is hashed once in the life of this value, so a file that changes meanwhile is not seen.
    ///
    /// # Errors
    /// `file_missing` or `not_openable`.
    pub fn picture_key(&self, clip: &ClipId) -> Result<String> {
        let window = (clip.start, self.config.frames, self.config.frame_skip);
        let videos = self.videos_hash(clip.episode).map_err(|error| name_clip(clip, error))?;
        Ok(identity::picture_key(videos, window))
    }

    /// SHA-256 over the training clips and all that their pictures depend on. Whatever was fitted to the training
    /// pictures of one dataset is fitted to those of another exactly if both have the same key.
    ///
    /// `progress` runs over the training episodes whose videos were not hashed yet.
    ///
    /// # Errors
    /// Those of [`Dataset::picture_key`]; an error of `progress`.
    pub fn training_key(&self, progress: Progress<'_>) -> Result<String> {
        let mut firsts: Vec<&ClipId> = self.train.iter().collect();
        firsts.dedup_by_key(|clip| clip.episode);
        firsts.retain(|clip| self.episode(clip.episode).is_some_and(|episode| episode.videos.get().is_none()));
        let begun = AtomicU64::new(0);
        let hashed: Vec<Result<()>> = firsts
            .par_iter()
            .map(|clip| {
                progress(begun.fetch_add(1, Ordering::Relaxed), firsts.len() as u64)?;
                self.picture_key(clip).map(drop)
            })
            .collect();
        hashed.into_iter().collect::<Result<()>>()?;
        let keys = self.train.iter().map(|clip| Ok((clip, self.picture_key(clip)?)));
        Ok(identity::training_key(keys.collect::<Result<Vec<_>>>()?))
    }

    fn videos_hash(&self, episode: usize) -> Result<&str> {
        let episode = self.episode(episode).ok_or_else(|| self.unknown_clip())?;
        if let Some(hash) = episode.videos.get() {
            return Ok(hash);
        }
        let mut parts = Vec::new();
        for view in &self.config.views {
            let path = self.metadata.video_file(view, episode.index)?;
            parts.push(Part { name: String::new(), path, optional: false });
        }
        let hash = identity::hash("", &parts, &|_, _| Ok(()))?;
        Ok(episode.videos.get_or_init(|| hash))
    }

    /// The error for a window that does not exist.
    pub(crate) fn unknown_clip(&self) -> Error {
        Error::data("unknown_clip", "the dataset has no such window").at(&self.metadata.root)
    }

    /// Everything of a clip but its pictures (`frames` is empty): for a caller that has its latents already.
    ///
    /// # Errors
    /// `unknown_clip`; those of [`GeometryCache::load`]. The message names the clip.
    pub fn load_without_frames(&self, clip: &ClipId) -> Result<ClipSample> {
        self.read_numbers(clip).map_err(|error| name_clip(clip, error))
    }

    /// Reads one clip: decodes its window of every view, normalises pose and actions, takes its geometry tokens.
    ///
    /// # Errors
    /// Those of [`VideoFile`] and [`GeometryCache::load`]; `unknown_clip` for a window that does not exist. The
    /// message names the clip.
    pub fn load(&self, clip: &ClipId) -> Result<ClipSample> {
        let read = || {
            let mut sample = self.read_numbers(clip)?;
            let numbers = self.frame_numbers(clip);
            for view in &self.config.views {
                sample.frames.push(self.read_view(view, clip.episode, &numbers)?);
            }
            Ok(sample)
        };
        read().map_err(|error| name_clip(clip, error))
    }

    /// Source frames of a clip.
    fn frame_numbers(&self, clip: &ClipId) -> Vec<usize> {
        (0..self.config.frames).map(|k| clip.start + k * self.config.frame_skip).collect()
    }

    fn read_numbers(&self, clip: &ClipId) -> Result<ClipSample> {
        self.numbers(clip, || self.geometry_in_use().map(|cache| cache.load(clip.episode, clip.start)).transpose())
    }

    /// The token cache, if the recipe's branch reads it.
    fn geometry_in_use(&self) -> Option<&GeometryCache> {
        self.geometry.as_ref().filter(|_| self.geometry_enabled)
    }

    fn numbers(&self, clip: &ClipId, tokens: impl FnOnce() -> Result<Option<Vec<f32>>>) -> Result<ClipSample> {
        let span = span(&self.config);
        let episode = self
            .episode(clip.episode)
            .filter(|episode| clip.start.checked_add(span).is_some_and(|last| last < episode.length))
            .ok_or_else(|| self.unknown_clip())?;
        let rows = episode.rows.as_ref().map_err(Clone::clone)?;
        let (proprio, proprio_mask) = arm_rows(self.proprio_dim, &self.frame_numbers(clip), |frame| {
            rows.poses.get(frame).map(|row| self.statistics.normalise_pose(row))
        })?;
        // With an action skip, the last action of each group stands for the group.
        let steps: Vec<usize> =
            (1..=span / self.action_skip).map(|group| clip.start + group * self.action_skip - 1).collect();
        let (action, action_mask) = arm_rows(self.action_dim, &steps, |frame| {
            rows.actions.get(frame).map(|row| self.statistics.normalise_action(row))
        })?;
        let geometry = tokens()?;
        Ok(ClipSample {
            clip: *clip,
            frames: Vec::new(),
            height: self.size.0,
            width: self.size.1,
            proprio,
            proprio_mask,
            action,
            action_mask,
            prompt: episode.prompt.clone(),
            geometry,
        })
    }

    /// What is wrong with the files behind the clips, one error a file: videos are opened and compared with the
    /// metadata, the geometry of each episode's first clip is read. Decodes nothing.
    pub fn probe(&self) -> Vec<Error> {
        let views = |episode: &Episode| -> Vec<Error> {
            let open = |view: &String| views::open(&self.metadata, view, episode.index, self.size).err();
            let first_tokens = self.geometry_in_use().and_then(|cache| cache.load(episode.index, 0).err());
            self.config.views.iter().filter_map(open).chain(first_tokens).collect()
        };
        self.episodes.par_iter().flat_map_iter(views).collect()
    }

    fn read_view(&self, view: &str, episode: usize, numbers: &[usize]) -> Result<Vec<u8>> {
        let mut video = views::open(&self.metadata, view, episode, self.size)?;
        let mut rgb = Vec::with_capacity(numbers.len() * 3 * self.size.0 * self.size.1);
        for picture in video.read_frames(numbers)? {
            picture.append_rgb_planes(&mut rgb);
        }
        Ok(rgb)
    }
}

fn name_clip(clip: &ClipId, error: Error) -> Error {
    Error { what: format!("{clip}: {}", error.what), ..error }
}

/// Source frames from the first to the last frame of a clip.
fn span(config: &DataConfig) -> usize {
    config.frames.saturating_sub(1) * config.frame_skip
}

/// The clips of an episode whose last frame exists.
fn cut(episode: &Episode, config: &DataConfig) -> impl Iterator<Item = ClipId> {
    let (index, ends) = (episode.index, episode.length.saturating_sub(span(config)));
    (0..ends).step_by(config.clip_stride).map(move |start| ClipId { episode: index, start })
}

/// Rows of one arm in a table for two: the first arm's dims filled, the rest zero with mask 0.
fn arm_rows<const N: usize>(
    dim: usize,
    frames: &[usize],
    row: impl Fn(usize) -> Option<[f32; N]>,
) -> Result<(Vec<f32>, Vec<f32>)> {
    let mut values = vec![0.0; frames.len() * dim];
    let mut mask = vec![0.0; frames.len() * dim];
    for (index, frame) in frames.iter().enumerate() {
        let numbers = row(*frame).ok_or_else(|| Error::crash(format!("row {frame} was checked but is not there")))?;
        values[index * dim..index * dim + N].copy_from_slice(&numbers);
        mask[index * dim..index * dim + N].fill(1.0);
    }
    Ok((values, mask))
}

/// Returns the source frames between two actions.
fn check_window(config: &DataConfig, model: &ModelConfig) -> Result<usize> {
    let bad = |what: String, field: &str| Err(Error::refused("bad_window", what).in_place(field));
    const FRAMES: RangeInclusive<usize> = 1..=10_000;
    if !FRAMES.contains(&config.frames) || !FRAMES.contains(&config.frame_skip) || !FRAMES.contains(&config.clip_stride)
    {
        return bad("frames, frame_skip and clip_stride must be 1 or more".into(), "data");
    }
    if config.frames % 4 != 1 {
        let what = format!("{} frames are not one frame and groups of four", config.frames);
        return bad(what, "data.frames");
    }
    if model.num_views != config.views.len() {
        let what = format!("the model has {} views, the data {}", model.num_views, config.views.len());
        return bad(what, "model.num_views");
    }
    if model.proprio_dim < 8 || model.action_dim < 7 {
        return bad("one arm needs 8 proprio and 7 action dims".into(), "model");
    }
    if !config.frame_skip.is_multiple_of(model.action_num) {
        let what = format!("frame_skip {} is no multiple of action_num {}", config.frame_skip, model.action_num);
        return bad(what, "model.action_num");
    }
    Ok(config.frame_skip / model.action_num)
}

/// (height, width) that all views of the recipe have by the dataset's own word.
fn picture_size(metadata: &Metadata, config: &DataConfig) -> Result<(usize, usize)> {
    let path = metadata.root.join("meta/info.json");
    let mut sizes = Vec::new();
    for view in &config.views {
        sizes.push((view, views::stated_size(metadata, view)?));
    }
    let Some((first_view, first)) = sizes.first().copied() else {
        return Err(Error::refused("missing_view", "data.views is empty").in_place("data.views"));
    };
    if let Some((view, (height, width))) = sizes.iter().find(|(_, size)| *size != first) {
        let what = format!("{view} is {width}x{height}, but {first_view} is {}x{}", first.1, first.0);
        return Err(Error::data("wrong_size", what).at(&path).hint("all views of a recipe must have one size"));
    }
    if first.0 == 0 || first.1 == 0 || !first.0.is_multiple_of(LATENT_STRIDE) || !first.1.is_multiple_of(LATENT_STRIDE)
    {
        let what = format!("pictures are {}x{}, sides must be multiples of {LATENT_STRIDE}", first.1, first.0);
        return Err(Error::data("wrong_size", what).at(&path));
    }
    Ok(first)
}

fn prompt(metadata: &Metadata, episode: usize, task_index: i64) -> Result<String> {
    match metadata.tasks.get(&task_index) {
        Some(task) => Ok(task.clone()),
        None => {
            let what = format!("episode {episode} has task {task_index}, which meta/tasks.jsonl does not list");
            Err(Error::data("unknown_task", what).at(metadata.root.join("meta/tasks.jsonl")))
        }
    }
}

fn open_geometry(metadata: &Metadata, config: &DataConfig, model: &ModelConfig) -> Result<Option<GeometryCache>> {
    let cache = GeometryCache::open(&metadata.root)?;
    if !model.geometry.enabled {
        return Ok(cache);
    }
    let Some(cache) = cache else {
        return Err(Error::data("geometry_missing", "the dataset has no geometry tokens")
            .at(metadata.root.join("geometry/info.json"))
            .hint("make the token cache, or set model.geometry.enabled to false"));
    };
    cache.check(&model.geometry)?;
    let stride = cache.info().frame_stride;
    if !config.clip_stride.is_multiple_of(stride) {
        let what = format!("clips start at multiples of {}, tokens exist at multiples of {stride}", config.clip_stride);
        return Err(Error::refused("geometry_mismatch", what).in_place("data.clip_stride"));
    }
    Ok(Some(cache))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clip_reads_back_from_its_name() {
        let clip = ClipId { episode: 12, start: 32 };
        assert_eq!(clip.to_string(), "episode_000012@32");
        assert_eq!(clip.to_string().parse::<ClipId>().unwrap(), clip);
        for broken in ["", "episode_1", "episode_x@3", "12@32", "episode_1@-1"] {
            assert_eq!(broken.parse::<ClipId>().unwrap_err().code, "bad_clip", "{broken}");
        }
    }
}
