//! What no single sample shows: a dataset's totals against its parts, and values far outside the usual.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::data::Range;
use crate::data::lerobot::{Metadata, parse_json, read_text};
use crate::{Error, Result};

/// Whether something has to be repaired.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Severity {
    /// The dataset contradicts itself: part of it may be missing.
    Problem,
    /// Training is possible, and somebody should look.
    Warning,
}

/// Something about a dataset, or about an episode that can still be trained on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    pub code: String,
    pub severity: Severity,
    pub what: String,
    /// Relative to the dataset, or a path.
    pub place: String,
}

impl Finding {
    pub(in crate::data) fn warning(error: Error) -> Self {
        Self { code: error.code.to_owned(), severity: Severity::Warning, what: error.what, place: error.place }
    }

    fn problem(error: Error) -> Self {
        Self { severity: Severity::Problem, ..Self::warning(error) }
    }
}

/// How large a number may be before somebody should look at it.
pub(in crate::data) struct Bound(f64);

impl Bound {
    /// Ten times the larger end of the quantiles: a slip of the decimal point, or another unit. Columns that hardly
    /// move are measured against 1e-3.
    pub fn of(range: Range) -> Self {
        Self(10.0 * range.q01.abs().max(range.q99.abs()).max(1e-3))
    }

    /// The first value of a column beyond it, as an error without a place; rows are counted from `first_row`.
    pub fn exceeded(
        &self,
        name: &str,
        column: usize,
        values: impl Iterator<Item = f64>,
        first_row: usize,
    ) -> Option<Error> {
        let (row, value) = values.enumerate().find(|(_, value)| value.abs() > self.0)?;
        let what = format!(
            "{name}[{column}] is {value} in row {}, over ten times what is usual ({:.3})",
            first_row + row,
            self.0 / 10.0
        );
        Some(Error::data("far_value", what))
    }
}

/// A dataset against itself.
pub(super) fn of_dataset(metadata: &Metadata, views: &[String]) -> Vec<Finding> {
    let mut found = Vec::new();
    let path = metadata.root.join("meta/info.json");
    let info: Result<Value> = read_text(&path).and_then(|text| parse_json(&text, &path, 0));
    let info = match info {
        Ok(info) => info,
        // It was read to open the dataset, so it changed meanwhile.
        Err(error) => return vec![Finding::problem(error)],
    };
    let videos = metadata.features.values().filter(|feature| feature.dtype == "video").count();
    let frames: usize = metadata.episodes.iter().map(|record| record.length).sum();
    let totals = [
        ("total_episodes", metadata.episodes.len(), true),
        ("total_frames", frames, true),
        ("total_tasks", metadata.tasks.len(), false),
        // Some published datasets count otherwise.
        ("total_videos", metadata.episodes.len() * videos, false),
    ];
    for (field, counted, is_problem) in totals {
        let Some(stated) = info.get(field).and_then(Value::as_u64) else { continue };
        if stated != counted as u64 {
            let what = format!("{field} is {stated}, meta/episodes.jsonl and meta/tasks.jsonl give {counted}");
            let error = Error::data("wrong_totals", what).at(&path);
            found.push(if is_problem { Finding::problem(error) } else { Finding::warning(error) });
        }
    }
    for view in views {
        let stated = |key: &str| {
            let info =
                info.get("features")?.get(view)?.get("info").or(info.get("features")?.get(view)?.get("video_info"))?;
            info.get(format!("video.{key}")).or_else(|| info.get(key))
        };
        if let Some(fps) = stated("fps").and_then(Value::as_f64)
            && fps != metadata.fps
        {
            let what = format!("{view} is said to have {fps} fps, the dataset {}", metadata.fps);
            found.push(Finding::warning(Error::data("wrong_fps", what).at(&path)));
        }
        if let Some(codec) = stated("codec").and_then(Value::as_str)
            && !matches!(codec, "h264" | "avc" | "avc1" | "libx264")
        {
            let what = format!("{view} is said to be {codec}; only H.264 can be decoded");
            found.push(Finding::warning(Error::data("wrong_codec", what).at(&path)));
        }
    }
    let listed = |task: &String| metadata.tasks.values().any(|known| known == task);
    for record in &metadata.episodes {
        if let Some(task) = record.tasks.iter().find(|task| !listed(task)) {
            let what =
                format!("episode {} has the task \"{task}\", which tasks.jsonl does not list", record.episode_index);
            found.push(Finding::problem(
                Error::data("unknown_task", what).at(metadata.root.join("meta/episodes.jsonl")),
            ));
        }
    }
    if !["meta/episodes_stats.jsonl", "meta/stats.json"].iter().any(|file| metadata.root.join(file).is_file()) {
        let what = "it has no statistics; LeRobot looks for them elsewhere and training here does without";
        found.push(Finding::warning(
            Error::data("stats_missing", what).at(metadata.root.join("meta/episodes_stats.jsonl")),
        ));
    }
    found
}
