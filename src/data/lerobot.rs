//! LeRobot v2.1 metadata: what a dataset says about itself, and where its files lie.
//!
//! Public datasets vary in what they write, so only the fields that are used are required, and `names` may be a list,
//! a map, null or nested in `axes` / `motors`.

use serde::Deserialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use crate::{Error, Result};

/// Versions whose layout this module reads.
const VERSIONS: [&str; 2] = ["v2.0", "v2.1"];

/// A dataset's metadata; episodes in ascending order of their index.
#[derive(Clone, Debug)]
pub struct Metadata {
    pub root: PathBuf,
    /// `v2.1`
    pub version: String,
    pub robot: Option<String>,
    /// Frames a second.
    pub fps: f64,
    pub features: BTreeMap<String, Feature>,
    pub episodes: Vec<EpisodeRecord>,
    /// Task text by task index.
    pub tasks: BTreeMap<i64, String>,
    chunks_size: usize,
    data_path: String,
    video_path: Option<String>,
}

/// One column or video of a dataset.
#[derive(Clone, Debug)]
pub struct Feature {
    pub dtype: String,
    pub shape: Vec<usize>,
    /// (height, width) in pixels of a video or image; from `info`, else from `shape`.
    pub size: Option<(usize, usize)>,
}

/// One line of `meta/episodes.jsonl`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct EpisodeRecord {
    pub episode_index: usize,
    #[serde(default)]
    pub tasks: Vec<String>,
    /// Frames.
    pub length: usize,
    /// LingBot-VA's addition: what is done from when to when.
    #[serde(default)]
    pub action_config: Option<Vec<SegmentRecord>>,
}

/// One entry of an episode's `action_config`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct SegmentRecord {
    /// First source frame.
    pub start_frame: usize,
    /// One past the last source frame.
    pub end_frame: usize,
    #[serde(default)]
    pub action_text: String,
}

#[derive(Deserialize)]
struct TaskRecord {
    task_index: i64,
    task: String,
}

#[derive(Deserialize)]
struct Info {
    codebase_version: String,
    #[serde(default)]
    robot_type: Option<String>,
    fps: f64,
    #[serde(default = "default_chunks_size")]
    chunks_size: usize,
    data_path: String,
    #[serde(default)]
    video_path: Option<String>,
    features: BTreeMap<String, FeatureRecord>,
}

#[derive(Deserialize)]
struct FeatureRecord {
    dtype: String,
    #[serde(default)]
    shape: Vec<usize>,
    #[serde(default, alias = "video_info")]
    info: Option<Value>,
}

fn default_chunks_size() -> usize {
    1000
}

impl Metadata {
    /// Reads `meta/` of a dataset.
    ///
    /// # Errors
    /// `dataset_missing`, `file_missing`, `lfs_pointer`, `not_openable`, `broken_json` (file and line), `unknown_version`,
    /// `broken_metadata` (a value that cannot be).
    pub fn open(root: &Path) -> Result<Self> {
        if !root.is_dir() {
            return Err(Error::data("dataset_missing", "dataset folder is missing")
                .at(root)
                .hint("set data.dataset to the root of a LeRobot v2.1 dataset"));
        }
        let info_path = root.join("meta/info.json");
        let text = read_text(&info_path)?;
        // The version is looked at first: another version may lack the other fields.
        let raw: Value = parse_json(&text, &info_path, 0)?;
        let version = raw.get("codebase_version").and_then(Value::as_str).unwrap_or("(none)");
        if !VERSIONS.contains(&version) {
            return Err(Error::data("unknown_version", format!("dataset version {version} cannot be read"))
                .at(&info_path)
                .hint(format!("known versions: {}", VERSIONS.join(", "))));
        }
        let info: Info = parse_json(&text, &info_path, 0)?;
        let broken = |what: String| Error::data("broken_metadata", what).at(&info_path);
        if info.chunks_size == 0 {
            return Err(broken("chunks_size is 0".into()));
        }
        if !(info.fps.is_finite() && info.fps > 0.0) {
            return Err(broken(format!("fps is {}", info.fps)));
        }
        for template in std::iter::once(&info.data_path).chain(&info.video_path) {
            fill(template, 0, 0, "view").map_err(&broken)?;
        }

        let episodes = read_episodes(&root.join("meta/episodes.jsonl"))?;
        let tasks_path = root.join("meta/tasks.jsonl");
        let tasks = parse_lines::<TaskRecord>(&read_text(&tasks_path)?, &tasks_path)?;
        Ok(Self {
            root: root.to_owned(),
            version: info.codebase_version,
            robot: info.robot_type,
            fps: info.fps,
            features: info.features.into_iter().map(|(key, record)| (key, feature(record))).collect(),
            episodes,
            tasks: tasks.into_iter().map(|record| (record.task_index, record.task)).collect(),
            chunks_size: info.chunks_size,
            data_path: info.data_path,
            video_path: info.video_path,
        })
    }

    /// The record of an episode.
    pub fn episode(&self, episode_index: usize) -> Option<&EpisodeRecord> {
        let at = self.episodes.binary_search_by_key(&episode_index, |record| record.episode_index).ok()?;
        self.episodes.get(at)
    }

    /// The parquet file of an episode.
    pub fn data_file(&self, episode_index: usize) -> Result<PathBuf> {
        self.file(&self.data_path, episode_index, "")
    }

    /// The video file of an episode and view.
    ///
    /// # Errors
    /// `no_videos` if the dataset keeps its pictures elsewhere (inside parquet).
    pub fn video_file(&self, view: &str, episode_index: usize) -> Result<PathBuf> {
        let Some(template) = &self.video_path else {
            return Err(Error::data("no_videos", "the dataset has no video files (video_path is null)")
                .at(self.root.join("meta/info.json"))
                .hint("convert its pictures to video first"));
        };
        self.file(template, episode_index, view)
    }

    /// Folder of LingBot-VA's latent files of a view, for the chunk that holds an episode.
    pub fn latent_folder(&self, view: &str, episode_index: usize) -> PathBuf {
        self.root.join(format!("latents/chunk-{:03}/{view}", episode_index / self.chunks_size))
    }

    fn file(&self, template: &str, episode_index: usize, view: &str) -> Result<PathBuf> {
        let relative = fill(template, episode_index / self.chunks_size, episode_index, view)
            .map_err(|what| Error::data("broken_metadata", what).at(self.root.join("meta/info.json")))?;
        Ok(self.root.join(relative))
    }
}

fn feature(record: FeatureRecord) -> Feature {
    let pixels = |key: &str| {
        let info = record.info.as_ref()?;
        info.get(format!("video.{key}"))
            .or_else(|| info.get(key))?
            .as_u64()
            .and_then(|value| usize::try_from(value).ok())
    };
    let size = match (pixels("height"), pixels("width"), record.shape.as_slice()) {
        (Some(height), Some(width), _) => Some((height, width)),
        // [H, W, C] or [C, H, W]: the channels are the side of 1, 3 or 4.
        (_, _, [height, width, 1 | 3 | 4]) => Some((*height, *width)),
        (_, _, [1 | 3 | 4, height, width]) => Some((*height, *width)),
        _ => None,
    };
    Feature { dtype: record.dtype, shape: record.shape, size }
}

fn read_episodes(path: &Path) -> Result<Vec<EpisodeRecord>> {
    let mut episodes = parse_lines::<EpisodeRecord>(&read_text(path)?, path)?;
    episodes.sort_by_key(|record| record.episode_index);
    if let Some(pair) = episodes.windows(2).find(|pair| pair[0].episode_index == pair[1].episode_index) {
        let what = format!("episode {} stands there twice", pair[0].episode_index);
        return Err(Error::data("broken_metadata", what).at(path));
    }
    if episodes.is_empty() {
        return Err(Error::data("broken_metadata", "the dataset has no episodes").at(path));
    }
    Ok(episodes)
}

/// Reads a metadata file.
///
/// # Errors
/// `file_missing`; `lfs_pointer`; `not_openable` if it is no text or cannot be read.
pub(super) fn read_text(path: &Path) -> Result<String> {
    let text = std::fs::read_to_string(path).map_err(|error| match error.kind() {
        ErrorKind::NotFound => Error::data("file_missing", "metadata file is missing").at(path),
        _ => Error::data("not_openable", format!("metadata file cannot be read: {error}")).at(path),
    })?;
    if is_lfs_pointer(text.as_bytes()) {
        return Err(lfs_pointer(path));
    }
    Ok(text)
}

/// Whether these are the first bytes of a Git LFS pointer file.
pub(super) fn is_lfs_pointer(bytes: &[u8]) -> bool {
    bytes.starts_with(b"version https://git-lfs")
}

/// The error for a file that was never fetched.
pub(super) fn lfs_pointer(path: &Path) -> Error {
    Error::data("lfs_pointer", "file is a Git LFS pointer, not the file itself").at(path).hint("run `git lfs pull`")
}

/// Parses JSON; `before` lines stand before the text in its file.
pub(super) fn parse_json<T: serde::de::DeserializeOwned>(text: &str, path: &Path, before: usize) -> Result<T> {
    serde_json::from_str(text).map_err(|error| {
        let line = before + error.line().max(1);
        // serde_json counts lines itself; its own position would be that inside `text`.
        let why = error.to_string();
        let why = why.split(" at line ").next().unwrap_or_default().to_owned();
        Error::data("broken_json", format!("line {line} is broken: {why}")).at(path)
    })
}

fn parse_lines<T: serde::de::DeserializeOwned>(text: &str, path: &Path) -> Result<Vec<T>> {
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    lines.map(|(number, line)| parse_json(line, path, number)).collect()
}

/// Fills a path template in Python's format: `{episode_index:06d}`, `{video_key}`.
fn fill(template: &str, chunk: usize, episode: usize, view: &str) -> Result<String, String> {
    let mut path = String::new();
    let mut rest = template;
    while let Some((before, after)) = rest.split_once('{') {
        let (field, after) =
            after.split_once('}').ok_or_else(|| format!("path template {template} has a `{{` without `}}`"))?;
        let (name, format) = field.split_once(':').unwrap_or((field, ""));
        path.push_str(before);
        let number = match name {
            "episode_chunk" => chunk,
            "episode_index" => episode,
            "video_key" => {
                path.push_str(view);
                rest = after;
                continue;
            }
            _ => return Err(format!("path template {template} has an unknown field {name}")),
        };
        let digits = format.trim_end_matches('d');
        let digits: usize = match digits {
            "" => 0,
            digits => digits
                .parse()
                .ok()
                .filter(|digits| *digits <= 20)
                .ok_or_else(|| format!("path template {template} has an unknown number format {format}"))?,
        };
        path.push_str(&format!("{number:0digits$}"));
        rest = after;
    }
    path.push_str(rest);
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn templates_are_filled_as_python_does() {
        let template = "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4";
        assert_eq!(fill(template, 1, 1234, "a.b").unwrap(), "videos/chunk-001/a.b/episode_001234.mp4");
        assert_eq!(fill("{episode_index}", 0, 7, "").unwrap(), "7");
        for broken in ["{episode", "{file_index:03d}", "{episode_index:x}"] {
            assert!(fill(broken, 0, 0, "").is_err(), "{broken}");
        }
    }

    #[test]
    fn the_size_of_a_video_is_found_in_every_public_spelling() {
        let of = |json: &str| feature(serde_json::from_str(json).unwrap()).size;
        assert_eq!(of(r#"{"dtype":"video","shape":[180,320,3]}"#), Some((180, 320)));
        assert_eq!(of(r#"{"dtype":"video","shape":[3,180,320],"names":null}"#), Some((180, 320)));
        assert_eq!(
            of(
                r#"{"dtype":"video","shape":[3,1,1],"names":{"axes":["a"]},"info":{"video.height":180,"video.width":320}}"#
            ),
            Some((180, 320))
        );
        assert_eq!(of(r#"{"dtype":"float32","shape":[7]}"#), None);
    }
}
