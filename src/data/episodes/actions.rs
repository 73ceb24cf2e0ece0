//! Action rows -> the channels that a model of the LingBot-VA family predicts.
//!
//! A latent frame owns the controls that lead to it from the one before: with n controls a latent frame, frame f owns
//! rows (f - 1) n to f n. The first frame has none and owns rows of zeros, which are normalised like any others and
//! are trained on as the constants that they become (the public training does so).

use rayon::prelude::*;
use serde::Serialize;
use std::sync::atomic::{AtomicU64, Ordering};

use super::EpisodeSet;
use crate::config::{ActionConfig, Tile};
use crate::data::{Progress, Range};
use crate::{Error, Result};

/// Channels are clipped to this magnitude.
const CLIP: f64 = 1.5;
/// Keeps a channel that never moves from a division by zero.
const MIN_WIDTH: f64 = 1e-6;
/// Elements of one arm in a row of poses: xyz, quaternion xyzw, gripper.
const ARM: usize = 8;

/// Rows of actions in the dataset's own units.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Rows {
    pub width: usize,
    /// [rows, width]
    pub values: Vec<f64>,
}

impl Rows {
    /// Poses relative to the first row if the tile's robot asks for it.
    ///
    /// # Errors
    /// `action_nonfinite` with row (counted from `first`) and column; `action_width`; `action_quaternion` for a
    /// rotation of length 0.
    pub fn prepare(mut self, config: &ActionConfig, tile: Tile, first: usize) -> Result<Self> {
        let width = config.channels.len();
        if self.width != width {
            let what = format!("an action row has {} numbers, data.actions.channels names {width}", self.width);
            return Err(Error::refused("action_width", what).in_place("data.actions.channels"));
        }
        if let Some(at) = self.values.iter().position(|value| !value.is_finite()) {
            let (row, column) = (first + at / width, at % width);
            return Err(Error::data(
                "action_nonfinite",
                format!("action[{column}] is {} in row {row}", self.values[at]),
            )
            .hint("repair the episode, or leave it out"));
        }
        if tile == Tile::RobotwinTshape {
            self.make_relative(first)?;
        }
        Ok(self)
    }

    /// Each arm's position minus its first (along the world's axes) and its rotation after undoing its first,
    /// q0^-1 q, quaternions xyzw scaled to unit length and with the sign that comes out; grippers stay.
    fn make_relative(&mut self, first: usize) -> Result<()> {
        if !self.width.is_multiple_of(ARM) {
            let what = format!("rows of {} numbers are no poses of {ARM} numbers an arm", self.width);
            return Err(Error::refused("action_width", what).in_place("data.actions.channels"));
        }
        let Some(origin) = self.values.get(..self.width).map(<[f64]>::to_vec) else { return Ok(()) };
        for (row, values) in self.values.chunks_exact_mut(self.width).enumerate() {
            for (arm, origin) in values.chunks_exact_mut(ARM).zip(origin.chunks_exact(ARM)) {
                for axis in 0..3 {
                    arm[axis] -= origin[axis];
                }
                let unit = |pose: &[f64], row: usize| {
                    let length = pose[3..7].iter().map(|value| value * value).sum::<f64>().sqrt();
                    if length == 0.0 {
                        let what = format!("a rotation in row {} is a quaternion of zeros", first + row);
                        return Err(Error::data("action_quaternion", what).hint("repair the episode, or leave it out"));
                    }
                    Ok([3, 4, 5, 6].map(|at| pose[at] / length))
                };
                let relative = undo(unit(origin, 0)?, unit(arm, row)?);
                arm[3..7].copy_from_slice(&relative);
            }
        }
        Ok(())
    }
}

/// a^-1 b of unit quaternions xyzw.
fn undo(a: [f64; 4], b: [f64; 4]) -> [f64; 4] {
    let [ax, ay, az, aw] = [-a[0], -a[1], -a[2], a[3]];
    let [bx, by, bz, bw] = b;
    [
        aw * bx + ax * bw + ay * bz - az * by,
        aw * by - ax * bz + ay * bw + az * bx,
        aw * bz + ax * by - ay * bx + az * bw,
        aw * bw - ax * bx - ay * by - az * bz,
    ]
}

/// Prepared rows -> actions and mask, both [dim, frames, per_frame]: a mask is 1 where a channel is used, in the rows
/// of zeros too. Rows beyond the last frame are left out.
///
/// # Errors
/// `action_rows` if there are too few; `action_channel` for a channel outside `dim`.
pub(super) fn channels(
    rows: &Rows,
    config: &ActionConfig,
    dim: usize,
    frames: usize,
    per_frame: usize,
) -> Result<(Vec<f32>, Vec<f32>)> {
    let needed = frames.saturating_sub(1) * per_frame;
    let available = rows.values.len() / rows.width.max(1);
    if available < needed {
        let what = format!("{frames} latent frames need {needed} rows of actions, there are {available}");
        return Err(Error::data("action_rows", what).hint("copy the dataset again from its source"));
    }
    let steps = frames * per_frame;
    let (mut actions, mut mask) = (vec![0.0; dim * steps], vec![0.0; dim * steps]);
    for (column, channel) in config.channels.iter().enumerate() {
        let (Some(q01), Some(q99), true) = (config.q01.get(column), config.q99.get(column), *channel < dim) else {
            let what = format!("column {column} has no quantiles, or its channel {channel} is none of {dim}");
            return Err(Error::refused("action_channel", what).in_place("data.actions"));
        };
        let normalised = |value: f64| (2.0 * (value - q01) / (q99 - q01 + MIN_WIDTH) - 1.0).clamp(-CLIP, CLIP) as f32;
        let at = channel * steps;
        mask[at..at + steps].fill(1.0);
        for (step, action) in actions[at..at + steps].iter_mut().enumerate() {
            *action = normalised(match step.checked_sub(per_frame) {
                None => 0.0,
                Some(row) => rows.values[row * rows.width + column],
            });
        }
    }
    Ok((actions, mask))
}

/// 1 % and 99 % quantiles of each element of an action row, as `data.actions` takes them.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Quantiles {
    pub q01: Vec<f64>,
    pub q99: Vec<f64>,
}

impl Quantiles {
    /// Two lines of YAML for `data.actions`.
    pub fn yaml(&self) -> String {
        format!("q01: {:?}\nq99: {:?}\n", self.q01, self.q99)
    }
}

impl EpisodeSet {
    /// Quantiles of the training samples' action rows, of the relative poses if the tile makes them relative: what a
    /// recipe for a new robot needs. Those that the recipe has do not matter.
    ///
    /// # Errors
    /// Those of the parquet files; `action_nonfinite`, `action_width`, `action_quaternion`; an error of `progress`.
    pub fn quantiles(&self, progress: Progress<'_>) -> Result<Quantiles> {
        let (begun, total) = (AtomicU64::new(0), self.train.len() as u64);
        let read: Vec<Result<Rows>> = self
            .train
            .par_iter()
            .map(|id| {
                progress(begun.fetch_add(1, Ordering::Relaxed), total)?;
                let sample = self.index.sample(*id)?;
                self.action_rows(sample, self.first_frame(sample)?)
            })
            .collect();
        let rows = read.into_iter().collect::<Result<Vec<_>>>()?;
        progress(total, total)?;
        let width = self.config.actions.channels.len();
        let column = |column| {
            let values = rows.iter().flat_map(|rows| rows.values.iter().skip(column).step_by(width).copied());
            Range::of(values)
        };
        let ranges: Vec<Range> = (0..width).map(column).collect();
        Ok(Quantiles {
            q01: ranges.iter().map(|range| range.q01).collect(),
            q99: ranges.iter().map(|range| range.q99).collect(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The public RoboTwin configuration, in row order.
    fn robotwin() -> ActionConfig {
        let rotation = [-1.0; 4];
        let q01 = [
            &[-0.06172713458538055, -3.6716461181640625e-05, -0.08783501386642456][..],
            &rotation,
            &[0.0],
            &[-0.3547105032205582, -1.3113021850585938e-06, -0.11975435614585876],
            &rotation,
            &[0.0],
        ];
        let q99 = [
            &[0.3462600058317184, 0.39966784834861746, 0.14745532035827624][..],
            &[1.0; 5],
            &[0.034201726913452024, 0.39142737388610793, 0.1792279863357542],
            &[1.0; 5],
        ];
        ActionConfig {
            channels: (0..7).chain([28]).chain(7..14).chain([29]).collect(),
            q01: q01.concat(),
            q99: q99.concat(),
        }
    }

    fn plain(width: usize) -> ActionConfig {
        ActionConfig { channels: (0..width).collect(), q01: vec![-1.0; width], q99: vec![1.0; width] }
    }

    /// A row of two arms that hang still.
    fn row() -> Vec<f64> {
        [[1.0, 2.0, 3.0, 0.0, 0.0, 0.0, 1.0, 0.25], [-1.0, 0.5, 0.0, 0.0, 0.0, 1.0, 0.0, 1.0]].concat()
    }

    #[test]
    fn the_zero_rows_become_the_published_constants() {
        let rows = Rows { width: 16, values: row() }.prepare(&robotwin(), Tile::RobotwinTshape, 0).unwrap();
        let (actions, mask) = channels(&rows, &robotwin(), 30, 1, 16).unwrap();
        let mut expected = [0.0; 30];
        expected[..3].copy_from_slice(&[-0.6974, -0.9998, -0.2534]);
        expected[7..10].copy_from_slice(&[0.8241, -1.0, -0.1989]);
        expected[28..].copy_from_slice(&[-1.0, -1.0]);
        for (channel, expected) in expected.iter().enumerate() {
            for step in 0..16 {
                let value = actions[channel * 16 + step];
                assert!((value - expected).abs() < 6e-5, "channel {channel}: {value}");
                assert_eq!(mask[channel * 16 + step], f32::from(u8::from(!(14..28).contains(&channel))));
            }
        }
    }

    /// Multiplied out by hand: for quarter turns q0 = (r, 0, 0, r) about x and q = (0, 0, r, r) about z, r^2 = 1/2,
    /// q0^-1 q = (-r, 0, 0, r) (0, 0, r, r) = (-1/2, 1/2, 1/2, 1/2).
    #[test]
    fn poses_are_relative_to_the_first_row() {
        let r = 0.5_f64.sqrt();
        let arm = |position: [f64; 3], rotation: [f64; 4], gripper| [&position[..], &rotation, &[gripper]].concat();
        let first = [arm([1.0, 2.0, 3.0], [r, 0.0, 0.0, r], 0.5), arm([0.0; 3], [0.0, 0.0, 0.0, -1.0], 0.0)].concat();
        let second = [arm([1.5, 1.0, 3.0], [0.0, 0.0, r, r], 0.75), arm([0.0; 3], [0.0, 0.0, 0.0, 2.0], 1.0)].concat();
        let rows = Rows { width: 16, values: [first, second].concat() };
        let rows = rows.prepare(&robotwin(), Tile::RobotwinTshape, 0).unwrap();
        let near = |found: &[f64], expected: &[f64]| {
            assert!(found.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-12), "{found:?} {expected:?}");
        };
        near(&rows.values[..8], &[0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.5]);
        near(&rows.values[16..24], &[0.5, -1.0, 0.0, -0.5, 0.5, 0.5, 0.5, 0.75]);
        // Both signs are one rotation, and the sign that comes out stays.
        near(&rows.values[24..], &[0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0, 1.0]);
    }

    proptest! {
        /// q0 (q0^-1 q) = q, by the textbook's product.
        #[test]
        fn undoing_and_redoing_a_rotation_gives_it_back(
            a in prop::array::uniform4(-1.0..1.0_f64), b in prop::array::uniform4(-1.0..1.0_f64)
        ) {
            let length = |q: [f64; 4]| q.iter().map(|x| x * x).sum::<f64>().sqrt();
            prop_assume!(length(a) > 0.1 && length(b) > 0.1);
            let (a, b) = (a.map(|x| x / length(a)), b.map(|x| x / length(b)));
            let d = undo(a, b);
            let cross = |u: [f64; 3], v: [f64; 3]| {
                [u[1] * v[2] - u[2] * v[1], u[2] * v[0] - u[0] * v[2], u[0] * v[1] - u[1] * v[0]]
            };
            let (u, v) = ([a[0], a[1], a[2]], [d[0], d[1], d[2]]);
            let w = a[3] * d[3] - (0..3).map(|i| u[i] * v[i]).sum::<f64>();
            prop_assert!((w - b[3]).abs() < 1e-12);
            for axis in 0..3 {
                let value = a[3] * v[axis] + d[3] * u[axis] + cross(u, v)[axis];
                prop_assert!((value - b[axis]).abs() < 1e-12);
            }
        }

        /// Against the rule spelled out cell by cell: frame f, step j of a column is row (f - 1) n + j.
        #[test]
        fn frames_own_the_rows_that_lead_to_them(
            frames in 1..5_usize, per_frame in 1..6_usize, extra in 0..7_usize, seed in 0..1000_u64
        ) {
            let config = ActionConfig { channels: vec![4, 0, 2], q01: vec![-1.0, 0.0, 2.0], q99: vec![1.0, 0.5, 2.0] };
            let count = (frames - 1) * per_frame + extra;
            let value = |row: usize, column: usize| ((seed as usize + 7 * row + 3 * column) % 11) as f64 / 3.0 - 1.5;
            let values = (0..count).flat_map(|row| (0..3).map(move |column| value(row, column))).collect();
            let (actions, mask) = channels(&Rows { width: 3, values }, &config, 5, frames, per_frame).unwrap();
            for channel in 0..5 {
                let column = config.channels.iter().position(|it| *it == channel);
                for frame in 0..frames {
                    for step in 0..per_frame {
                        let at = (channel * frames + frame) * per_frame + step;
                        let expected = column.map_or(0.0, |column| {
                            let raw = if frame == 0 { 0.0 } else { value((frame - 1) * per_frame + step, column) };
                            let (low, high) = (config.q01[column], config.q99[column]);
                            ((raw - low) / ((high - low + 1e-6) / 2.0) - 1.0).clamp(-1.5, 1.5) as f32
                        });
                        prop_assert!((actions[at] - expected).abs() < 1e-6);
                        prop_assert_eq!(mask[at] == 1.0, column.is_some());
                    }
                }
            }
        }
    }

    #[test]
    fn what_cannot_become_channels_is_said() {
        let prepare = |values: Vec<f64>, width| Rows { width, values }.prepare(&plain(2), Tile::Row, 40).unwrap_err();
        let error = prepare(vec![0.0, 1.0, 0.0, f64::NAN], 2);
        assert_eq!(error.code, "action_nonfinite");
        assert!(error.what.contains("action[1] is NaN in row 41"), "{error}");
        assert_eq!(prepare(vec![0.0; 3], 3).code, "action_width");

        let mut zero = row();
        zero[3..7].fill(0.0);
        let error = Rows { width: 16, values: [row(), zero].concat() }.prepare(&robotwin(), Tile::RobotwinTshape, 0);
        assert_eq!(error.unwrap_err().code, "action_quaternion");

        let few = Rows { width: 2, values: vec![0.0; 2 * 7] };
        assert_eq!(channels(&few, &plain(2), 2, 3, 4).unwrap_err().code, "action_rows");
        assert!(channels(&few, &plain(2), 2, 2, 7).is_ok());
        assert_eq!(channels(&few, &plain(2), 1, 1, 4).unwrap_err().code, "action_channel");
    }
}
