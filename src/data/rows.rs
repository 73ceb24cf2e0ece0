//! What both families ask of an episode's rows before they read them: a row a frame, at the dataset's rate.

use std::path::Path;

use super::columns::ColumnFile;
use crate::{Error, Result};

/// Compares a parquet file with the metadata: `length` rows, and timestamps and frame numbers, where it has them, that
/// go on evenly. A row half a step or more out of time belongs to another frame of the video.
///
/// # Errors
/// `wrong_row_count`, `timestamp_gap`; `not_openable`.
pub(super) fn check(file: &ColumnFile<'_>, path: &Path, length: usize, fps: f64) -> Result<()> {
    if file.rows() != length {
        let what = format!("parquet file has {} rows, meta/episodes.jsonl says {length}", file.rows());
        return Err(Error::data("wrong_row_count", what).at(path).hint("copy the dataset again from its source"));
    }
    for (name, rows_a_unit, unit) in [("timestamp", fps, " s"), ("frame_index", 1.0, "")] {
        let Some(column) = file.read_optional(name)?.filter(|column| column.width == 1) else { continue };
        let first = column.values.first().copied().unwrap_or(0.0);
        // A value that is no number is not in time.
        let in_time = |row: usize, value: f64| ((value - first) * rows_a_unit - row as f64).abs() < 0.5;
        if let Some(row) = column.values.iter().enumerate().position(|(row, value)| !in_time(row, *value)) {
            let expected = first + row as f64 / rows_a_unit;
            let what = format!("{name} is {:.3}{unit} in row {row}, not {expected:.3}{unit}", column.values[row]);
            return Err(Error::data("timestamp_gap", what).at(path).hint("rows are missing, or at another rate"));
        }
    }
    Ok(())
}

/// The error for a column that is not there, under the code that says what it would have held.
pub(super) fn missing(error: Error, code: &'static str) -> Error {
    if error.code == "missing_column" { Error { code, ..error } } else { error }
}
