//! One episode's pose and action rows in the model's order of dims, still in the dataset's units.

use std::path::Path;

use super::columns::{Column, ColumnFile};
use super::lerobot::Metadata;
use super::rows;
use crate::config::RobotLayout;
use crate::{Error, Result};

/// One arm: position xyz (metres), quaternion wxyz with w >= 0, gripper opening (metres).
pub(super) type PoseRow = [f32; 8];
/// One arm: delta position xyz, delta axis-angle, gripper command.
pub(super) type ActionRow = [f32; 7];

/// The numbers of one episode, a row a frame.
#[derive(Clone, Debug)]
pub(super) struct RobotRows {
    pub poses: Vec<PoseRow>,
    pub actions: Vec<ActionRow>,
    /// Task index of the first frame.
    pub task_index: i64,
}

/// Reads state, action and task of an episode.
///
/// # Errors
/// Those of [`ColumnFile`] and [`rows::check`]; `pose_missing`, `action_missing` for an absent column;
/// `pose_nonfinite`, `action_nonfinite` with column and row; `column_out_of_range` if the recipe's layout does not fit the columns.
pub(super) fn read(metadata: &Metadata, layout: &RobotLayout, episode: usize, length: usize) -> Result<RobotRows> {
    let path = metadata.data_file(episode)?;
    let file = ColumnFile::open(&path)?;
    rows::check(&file, &path, length, metadata.fps)?;
    let state = file.read("observation.state").map_err(|error| rows::missing(error, "pose_missing"))?;
    let state = finite(&path, "observation.state", state, "pose_nonfinite")?;
    let action = file.read("action").map_err(|error| rows::missing(error, "action_missing"))?;
    let action = finite(&path, "action", action, "action_nonfinite")?;
    let tasks = file.read("task_index")?;

    let in_range = |field: &str, first: usize, count: usize, column: &Column, name: &str| {
        if first.checked_add(count).is_some_and(|end| end <= column.width) {
            return Ok(());
        }
        let what = format!("data.robot.{field} needs {count} of the columns of {name}, from {first} on");
        Err(Error::refused("column_out_of_range", what)
            .at(&path)
            .hint(format!("{name} has {} columns: correct data.robot", column.width)))
    };
    in_range("state_position", layout.state_position, 3, &state, "observation.state")?;
    in_range("state_quaternion_xyzw", layout.state_quaternion_xyzw, 4, &state, "observation.state")?;
    in_range("action", layout.action, 7, &action, "action")?;
    for finger in &layout.state_gripper {
        in_range("state_gripper", *finger, 1, &state, "observation.state")?;
    }
    if !matches!(layout.state_gripper.len(), 1 | 2) {
        return Err(Error::refused("column_out_of_range", "data.robot.state_gripper must name one or two columns"));
    }
    Ok(RobotRows {
        poses: state.values.chunks_exact(state.width).map(|row| pose(row, layout)).collect(),
        actions: action
            .values
            .chunks_exact(action.width)
            .map(|row| std::array::from_fn(|index| row[layout.action + index] as f32))
            .collect(),
        task_index: tasks.values.first().map_or(-1, |index| *index as i64),
    })
}

/// Larger values are refused as infinite ones are: normalised by a range of its least width, 1e-6, they would be.
const LARGEST: f64 = 1e30;

fn finite(path: &Path, name: &str, column: Column, code: &'static str) -> Result<Column> {
    match column.values.iter().position(|value| !value.is_finite() || value.abs() > LARGEST) {
        None => Ok(column),
        Some(at) => {
            let (row, index) = (at / column.width, at % column.width);
            let what = format!("column {name}[{index}] is {} in row {row}", column.values[at]);
            Err(Error::data(code, what).at(path).hint("repair the episode, or leave it out"))
        }
    }
}

/// Columns were checked to be in range.
fn pose(row: &[f64], layout: &RobotLayout) -> PoseRow {
    let position = &row[layout.state_position..];
    let xyzw = &row[layout.state_quaternion_xyzw..];
    // q and -q are one rotation; w >= 0 picks one of them.
    let sign = if xyzw[3] < 0.0 { -1.0 } else { 1.0 };
    let gripper = match layout.state_gripper[..] {
        [first, second] => row[first] - row[second],
        [one] => row[one],
        _ => 0.0, // refused by the caller
    };
    [position[0], position[1], position[2], sign * xyzw[3], sign * xyzw[0], sign * xyzw[1], sign * xyzw[2], gripper]
        .map(|value| value as f32)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout() -> RobotLayout {
        RobotLayout { state_position: 0, state_quaternion_xyzw: 3, state_gripper: vec![7, 8], action: 0 }
    }

    #[test]
    fn a_pose_has_w_first_and_not_negative() {
        let row = [1.0, 2.0, 3.0, 0.1, 0.2, 0.3, -0.9, 0.04, -0.04];
        assert_eq!(pose(&row, &layout()), [1.0, 2.0, 3.0, 0.9, -0.1, -0.2, -0.3, 0.08]);
        let row = [1.0, 2.0, 3.0, 0.1, 0.2, 0.3, 0.9, 0.04, -0.04];
        assert_eq!(pose(&row, &layout()), [1.0, 2.0, 3.0, 0.9, 0.1, 0.2, 0.3, 0.08]);
    }

    #[test]
    fn one_finger_is_read_as_it_is() {
        let layout = RobotLayout { state_gripper: vec![8], ..layout() };
        assert_eq!(pose(&[0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 5.0, 6.0], &layout)[7], 6.0);
    }
}
