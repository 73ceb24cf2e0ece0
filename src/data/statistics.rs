//! Quantiles that bring poses and actions to about [-1, 1], and the way back to metres.

use serde::Serialize;

use super::robot::{ActionRow, PoseRow};

/// 1 % and 99 % quantile of one number.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Range {
    pub q01: f64,
    pub q99: f64,
}

impl Range {
    /// `2 (v - q01) / max(q99 - q01, 1e-6) - 1`, not clipped (x-wam's normalisation).
    pub fn normalise(&self, value: f64) -> f64 {
        2.0 * (value - self.q01) / self.width() - 1.0
    }

    /// The inverse of [`Range::normalise`].
    pub fn restore(&self, normalised: f64) -> f64 {
        (normalised + 1.0) / 2.0 * self.width() + self.q01
    }

    fn width(&self) -> f64 {
        (self.q99 - self.q01).max(1e-6)
    }

    /// Quantiles of some numbers.
    pub(super) fn of(values: impl Iterator<Item = f64>) -> Self {
        let mut sorted: Vec<f64> = values.collect();
        sorted.sort_unstable_by(f64::total_cmp);
        Self { q01: quantile(&sorted, 0.01), q99: quantile(&sorted, 0.99) }
    }

    /// The same largest magnitude both ways, so that a normalised 0 is no motion.
    fn symmetric(self) -> Self {
        let largest = self.q01.abs().max(self.q99.abs());
        Self { q01: -largest, q99: largest }
    }
}

/// Linear interpolation between the two nearest ranks, as numpy does by default. 0 for no values.
fn quantile(sorted: &[f64], share: f64) -> f64 {
    let Some(last) = sorted.len().checked_sub(1) else { return 0.0 };
    let rank = share * last as f64;
    let below = (rank.floor() as usize).min(last);
    let above = (below + 1).min(last);
    sorted[below] + (sorted[above] - sorted[below]) * (rank - below as f64)
}

/// Statistics of the training episodes; validation episodes have no part in them.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Statistics {
    /// Gripper position in the world, metres.
    pub position: [Range; 3],
    /// Opening in metres.
    pub gripper: Range,
    /// Commanded deltas, in the dataset's own units; symmetric.
    pub action_position: [Range; 3],
    pub action_axis_angle: [Range; 3],
}

impl Statistics {
    pub(super) fn of<'a>(
        poses: impl Iterator<Item = &'a PoseRow> + Clone,
        actions: impl Iterator<Item = &'a ActionRow> + Clone,
    ) -> Self {
        let pose = |column: usize| Range::of(poses.clone().map(move |row| f64::from(row[column])));
        let action = |column: usize| Range::of(actions.clone().map(move |row| f64::from(row[column]))).symmetric();
        Self {
            position: std::array::from_fn(pose),
            gripper: pose(7),
            action_position: std::array::from_fn(action),
            action_axis_angle: std::array::from_fn(|column| action(3 + column)),
        }
    }

    /// Normalised position (proprio dims 0..3) -> metres.
    pub fn position_metres(&self, normalised: [f64; 3]) -> [f64; 3] {
        std::array::from_fn(|axis| self.position[axis].restore(normalised[axis]))
    }

    /// One pose as the model sees it: position and gripper normalised, the quaternion as it is.
    pub(super) fn normalise_pose(&self, row: &PoseRow) -> PoseRow {
        let mut normalised = *row;
        for (value, range) in normalised.iter_mut().zip(&self.position) {
            *value = range.normalise(f64::from(*value)) as f32;
        }
        normalised[7] = self.gripper.normalise(f64::from(row[7])) as f32;
        normalised
    }

    /// One action as the model sees it; the gripper command is left as it is.
    pub(super) fn normalise_action(&self, row: &ActionRow) -> ActionRow {
        let mut normalised = *row;
        for (value, range) in normalised.iter_mut().zip(self.action_position.iter().chain(&self.action_axis_angle)) {
            *value = range.normalise(f64::from(*value)) as f32;
        }
        normalised
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn quantiles_are_numpys() {
        // numpy.quantile(range(11), [0.01, 0.99]) = [0.1, 9.9]
        let range = Range::of((0..11).rev().map(f64::from));
        assert!((range.q01 - 0.1).abs() < 1e-12 && (range.q99 - 9.9).abs() < 1e-12);
        assert_eq!(Range::of([3.0].into_iter()), Range { q01: 3.0, q99: 3.0 });
    }

    #[test]
    fn a_constant_column_stays_finite() {
        let range = Range { q01: 0.25, q99: 0.25 };
        assert_eq!(range.normalise(0.25), -1.0);
        assert_eq!(range.restore(-1.0), 0.25);
    }

    #[test]
    fn actions_are_symmetric_and_zero_stays_zero() {
        let rows: Vec<ActionRow> = (0..101).map(|index| [index as f32 / 100.0 - 0.25; 7]).collect();
        let poses = [[0.5_f32; 8]];
        let statistics = Statistics::of(poses.iter(), rows.iter());
        let range = statistics.action_position[0];
        assert_eq!(range.q01, -range.q99);
        assert_eq!(statistics.normalise_action(&[0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0]), [0., 0., 0., 0., 0., 0., -1.]);
    }

    proptest! {
        #[test]
        fn restoring_undoes_normalising(low in -5.0..5.0_f64, width in 0.0..3.0_f64, value in -10.0..10.0_f64) {
            let range = Range { q01: low, q99: low + width };
            prop_assert!((range.restore(range.normalise(value)) - value).abs() < 1e-8);
        }
    }
}
