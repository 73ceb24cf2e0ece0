//! Reads the validation points of a run: `<run>/validation/step-NNNNNNNN/metrics.jsonl`, a line a clip.
//!
//! `metrics.jsonl` is renamed into place when it is complete, so its presence means that the point is whole; a folder
//! without it is a validation in progress, or one cut short, and is passed over.

use super::super::files::read_error;
use crate::runlog::{ClipMetrics, parse_step_name};
use crate::{Error, Result};
use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::path::Path;

/// All validation points of one arm.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ArmPoints {
    pub arm: String,
    /// By completed optimizer steps.
    pub points: BTreeMap<u64, Point>,
}

/// One validation point.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Point {
    /// By clip id.
    pub clips: BTreeMap<String, ClipMetrics>,
    /// Lines that were no valid metrics; a torn last line is one of them.
    pub bad_lines: usize,
}

impl Point {
    /// A point of these clips; a clip measured again (after a resume) replaces its earlier line.
    pub fn new(clips: impl IntoIterator<Item = ClipMetrics>) -> Self {
        let clips = clips.into_iter().map(|metrics| (metrics.clip.clone(), metrics)).collect();
        Self { clips, bad_lines: 0 }
    }

    /// Parses `metrics.jsonl`.
    pub fn parse(text: &str) -> Self {
        let lines = text.lines().filter(|line| !line.trim().is_empty());
        // Not every family has every metric, but what decides is written as null only if nothing can be judged by it.
        let decides = |metrics: &ClipMetrics| metrics.wrist_lpips.is_finite();
        let parse = |line| serde_json::from_str::<ClipMetrics>(line).ok().filter(decides);
        let (good, bad): (Vec<_>, Vec<_>) = lines.map(parse).partition(Option::is_some);
        Self { bad_lines: bad.len(), ..Self::new(good.into_iter().flatten()) }
    }
}

/// Loads every complete validation point of a run directory; a run that has not validated yet has none.
///
/// # Errors
/// `file_missing` if the run directory itself is absent; `not_readable` and `read_failed` for what lies in it.
pub fn load_points(run: &Path) -> Result<ArmPoints> {
    if !run.is_dir() {
        return Err(Error::data("file_missing", "no such run directory").at(run));
    }
    let arm = run.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let mut loaded = ArmPoints { arm, points: BTreeMap::new() };
    let folder = run.join("validation");
    let entries = match fs::read_dir(&folder) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(loaded),
        entries => entries.map_err(|error| read_error(&error, &folder))?,
    };
    for entry in entries {
        let path = entry.map_err(|error| read_error(&error, &folder))?.path();
        let Some(step) = path.file_name().and_then(|name| parse_step_name(&name.to_string_lossy())) else { continue };
        let file = path.join("metrics.jsonl");
        match fs::read(&file) {
            Ok(bytes) => {
                loaded.points.insert(step, Point::parse(&String::from_utf8_lossy(&bytes)));
            }
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {}
            Err(error) => return Err(read_error(&error, &file)),
        }
    }
    Ok(loaded)
}

#[cfg(test)]
mod tests {
    use super::super::tests::clip;
    use super::*;

    fn line(metrics: &ClipMetrics) -> String {
        serde_json::to_string(metrics).expect("json")
    }

    #[test]
    fn reads_complete_points_and_passes_over_the_rest() {
        let run = tempfile::tempdir().expect("folder");
        let write = |folder: &str, file: &str, text: &str| {
            let folder = run.path().join("validation").join(folder);
            fs::create_dir_all(&folder).expect("folder");
            fs::write(folder.join(file), text).expect("written");
        };
        let (first, again, other) = (clip("a@0", 0.5), clip("a@0", 0.25), clip("b@0", 0.75));
        let whole = line(&other);
        let torn = &whole[..whole.len() / 2];
        let text = [&line(&first), &whole, &line(&again), "{\"clip\":7}", torn].join("\n");
        write("step-00000000", "metrics.jsonl", &text);
        write("step-00000100", "metrics.jsonl.tmp", &line(&first));
        write("step-100", "metrics.jsonl", &line(&first));
        write("step-00000100.old", "metrics.jsonl", &line(&first));
        fs::write(run.path().join("validation/step-00000200"), "a file").expect("written");

        let loaded = load_points(run.path()).expect("loaded");
        assert_eq!(loaded.points.keys().copied().collect::<Vec<_>>(), [0]);
        let point = &loaded.points[&0];
        assert_eq!(point.clips.values().cloned().collect::<Vec<_>>(), [again, other], "the last line of a clip wins");
        assert_eq!(point.bad_lines, 2);
    }

    #[test]
    fn keeps_every_bit_of_a_value() {
        let mut metrics = clip("a@0", 0.1 + 0.2);
        metrics.rot_deg = 80.713_826_636_253_63;
        let point = Point::parse(&line(&metrics));
        assert_eq!(point.clips["a@0"].rot_deg.to_bits(), metrics.rot_deg.to_bits());
        assert_eq!(point.clips["a@0"].wrist_lpips.to_bits(), metrics.wrist_lpips.to_bits());
    }

    #[test]
    fn a_line_without_what_decides_is_bad_and_one_without_the_rest_is_not() {
        let point = Point::parse(&line(&clip("a@0", f64::NAN)));
        assert_eq!((point.clips.len(), point.bad_lines), (0, 1));
        let without_pose = ClipMetrics { trans_l2_m: f64::NAN, rot_deg: f64::NAN, ..clip("a@0", 0.5) };
        let point = Point::parse(&line(&without_pose));
        assert_eq!((point.clips.len(), point.bad_lines), (1, 0));
        assert!(point.clips["a@0"].rot_deg.is_nan());
    }

    #[test]
    fn an_absent_run_is_an_error_and_an_early_one_is_not() {
        let run = tempfile::tempdir().expect("folder");
        assert!(load_points(run.path()).expect("loaded").points.is_empty());
        assert_eq!(load_points(&run.path().join("absent")).expect_err("refused").code, "file_missing");
    }
}
