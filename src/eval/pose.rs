//! Pose error of a predicted clip: how far, and turned by how much, the hand is from where it was.

use super::pictures::f32_values;
use crate::{Error, Exit, Result};
use candle_core::Tensor;
use serde::{Deserialize, Serialize};

/// Width of a proprio row: two arms of (xyz, quaternion wxyz, gripper).
const PROPRIO_DIM: usize = 16;
/// Below this norm four numbers say nothing about a rotation.
const SMALLEST_QUATERNION: f64 = 1e-6;

/// Mean over the predicted steps of a clip, first arm.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct PoseError {
    /// Distance of the positions in normalised coordinates (what the model predicts).
    pub trans_l2_norm: f64,
    /// The same in metres.
    pub trans_l2_m: f64,
    /// Angle between the orientations in degrees, 0..=180.
    pub rot_deg: f64,
}

/// Pose error of the first arm over steps 1.. of a clip; step 0 is given to the model and does not count.
///
/// `predicted` and `truth` are f32 [T, 16], T >= 2 (9 for a clip: steps 1..8); a row holds xyz (normalised), the
/// quaternion wxyz and the gripper of each arm. `position_scale_m` is the metres one normalised unit is worth on each axis:
/// `max(q99 - q01, 1e-6) / 2` for quantile normalisation to [-1, 1].
///
/// `trans_l2` is the mean Euclidean distance. The angle between unit quaternions p and q is `2 atan2(|v|, |w|)` of
/// `conj(q) p = (w, v)`: the angle of `R_q^T R_p`, exact near 0 and near 180 degrees, and blind to the sign of a
/// quaternion. Quaternions are normalised first. **By definition** a predicted quaternion of norm below 1e-6 has no
/// orientation and scores the worst angle, 180 degrees; one in the truth is an error of the data.
///
/// # Errors
/// `metric_dtype`, `metric_shape`, `not_finite`, `zero_quaternion`.
pub fn pose_error(predicted: &Tensor, truth: &Tensor, position_scale_m: [f64; 3]) -> Result<PoseError> {
    let (predicted, truth) = (read_poses(predicted)?, read_poses(truth)?);
    if predicted.len() != truth.len() {
        let what = format!("pose error compares clips of one length and got {} and {}", predicted.len(), truth.len());
        return Err(Error::new(Exit::Crash, "metric_shape", what));
    }
    let steps = predicted.len() as f64;
    let mut total = PoseError { trans_l2_norm: 0.0, trans_l2_m: 0.0, rot_deg: 0.0 };
    for (step, (predicted, truth)) in predicted.iter().zip(&truth).enumerate() {
        let truth_quaternion = unit(truth.quaternion_wxyz).ok_or_else(|| {
            Error::data("zero_quaternion", "the true orientation is a quaternion of norm 0")
                .in_place(format!("step {}", step + 1))
        })?;
        let offset = [0, 1, 2].map(|axis| predicted.position[axis] - truth.position[axis]);
        total.trans_l2_norm += norm(&offset) / steps;
        total.trans_l2_m += norm(&[0, 1, 2].map(|axis| offset[axis] * position_scale_m[axis])) / steps;
        let angle = unit(predicted.quaternion_wxyz).map_or(180.0, |unit| angle_deg(unit, truth_quaternion));
        total.rot_deg += angle / steps;
    }
    Ok(total)
}

struct Pose {
    position: [f64; 3],
    quaternion_wxyz: [f64; 4],
}

/// Steps 1.. of the first arm.
fn read_poses(rows: &Tensor) -> Result<Vec<Pose>> {
    match rows.dims() {
        [steps, PROPRIO_DIM] if *steps >= 2 => {}
        dims => {
            let what = format!("pose error takes [T >= 2, {PROPRIO_DIM}] and got {dims:?}");
            return Err(Error::new(Exit::Crash, "metric_shape", what));
        }
    }
    let values = f32_values(rows, "pose error")?;
    let mut poses = Vec::new();
    for (step, row) in values.chunks_exact(PROPRIO_DIM).enumerate().skip(1) {
        let &[x, y, z, qw, qx, qy, qz, ..] = row else { continue };
        if let Some(value) = row[..7].iter().find(|value| !value.is_finite()) {
            let error = Error::new(Exit::Crash, "not_finite", format!("pose error met a value that is {value}"));
            return Err(error.in_place(format!("step {step}")));
        }
        poses.push(Pose { position: [x, y, z].map(f64::from), quaternion_wxyz: [qw, qx, qy, qz].map(f64::from) });
    }
    Ok(poses)
}

fn norm<const N: usize>(values: &[f64; N]) -> f64 {
    values.iter().map(|value| value * value).sum::<f64>().sqrt()
}

fn unit(quaternion: [f64; 4]) -> Option<[f64; 4]> {
    let norm = norm(&quaternion);
    (norm >= SMALLEST_QUATERNION).then(|| quaternion.map(|value| value / norm))
}

/// Angle of conj(q) p for unit quaternions wxyz.
fn angle_deg([pw, px, py, pz]: [f64; 4], [qw, qx, qy, qz]: [f64; 4]) -> f64 {
    let w = qw * pw + qx * px + qy * py + qz * pz;
    let v = [
        qw * px - qx * pw - (qy * pz - qz * py),
        qw * py - qy * pw - (qz * px - qx * pz),
        qw * pz - qz * pw - (qx * py - qy * px),
    ];
    (2.0 * norm(&v).atan2(w.abs())).to_degrees()
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{DType, Device};

    fn row(position: [f32; 3], quaternion: [f32; 4]) -> Vec<f32> {
        let mut row = vec![0.0; PROPRIO_DIM];
        row[..3].copy_from_slice(&position);
        row[3..7].copy_from_slice(&quaternion);
        row
    }

    /// A clip whose step 0 is nonsense (it must not count) and whose other steps are `row`.
    fn clip(row: &[f32]) -> Tensor {
        let mut values = vec![9.0; PROPRIO_DIM];
        (0..8).for_each(|_| values.extend_from_slice(row));
        Tensor::from_vec(values, (9, PROPRIO_DIM), &Device::Cpu).expect("tensor")
    }

    fn about(axis: [f64; 3], degrees: f64) -> [f32; 4] {
        let half = degrees.to_radians() / 2.0;
        let [x, y, z] = axis.map(|value| (value / norm(&axis) * half.sin()) as f32);
        [half.cos() as f32, x, y, z]
    }

    fn still() -> Vec<f32> {
        row([0.0; 3], [1.0, 0.0, 0.0, 0.0])
    }

    #[test]
    fn position_is_measured_in_both_units() {
        let error = pose_error(&clip(&row([0.5, 0.0, -0.25], [1.0, 0.0, 0.0, 0.0])), &clip(&still()), [0.2, 1.0, 0.4]);
        let error = error.expect("pose");
        assert!((error.trans_l2_norm - 0.3125f64.sqrt()).abs() < 1e-12, "{error:?}");
        assert!((error.trans_l2_m - 0.02f64.sqrt()).abs() < 1e-12, "{error:?}");
        assert_eq!(error.rot_deg, 0.0);
    }

    #[test]
    fn angles_are_right_from_tiny_to_opposite_and_for_either_sign() {
        let truth = about([0.3, -0.5, 0.8], 20.0);
        for degrees in [0.001, 1.0, 45.0, 120.0, 179.9, 180.0] {
            // About the truth's own axis, so the angle between them is `degrees`.
            let predicted = about([0.3, -0.5, 0.8], 20.0 + degrees);
            for sign in [1.0, -3.0f32] {
                let predicted = clip(&row([0.0; 3], predicted.map(|value| value * sign)));
                let found = pose_error(&predicted, &clip(&row([0.0; 3], truth)), [1.0; 3]).expect("pose").rot_deg;
                assert!((found - degrees).abs() < 2e-5, "{found} {degrees}");
            }
        }
    }

    #[test]
    fn agrees_with_the_matrix_form() {
        let matrix = |[w, x, y, z]: [f64; 4]| {
            [
                [1.0 - 2.0 * (y * y + z * z), 2.0 * (x * y - w * z), 2.0 * (x * z + w * y)],
                [2.0 * (x * y + w * z), 1.0 - 2.0 * (x * x + z * z), 2.0 * (y * z - w * x)],
                [2.0 * (x * z - w * y), 2.0 * (y * z + w * x), 1.0 - 2.0 * (x * x + y * y)],
            ]
        };
        let (p, q) = ([0.3, -0.4, 0.7, 0.2], [-0.1, 0.9, 0.2, 0.35]);
        let (a, b) = (matrix(unit(p).expect("unit")), matrix(unit(q).expect("unit")));
        let product = |i: usize, j: usize| (0..3).map(|k| b[k][i] * a[k][j]).sum::<f64>();
        let vee = [product(2, 1) - product(1, 2), product(0, 2) - product(2, 0), product(1, 0) - product(0, 1)];
        let trace: f64 = (0..3).map(|i| product(i, i)).sum();
        let expected = (norm(&vee) / 2.0).atan2((trace - 1.0) / 2.0).to_degrees();
        let found = angle_deg(unit(p).expect("unit"), unit(q).expect("unit"));
        assert!((found - expected).abs() < 1e-10, "{found} {expected}");
    }

    #[test]
    fn no_orientation_is_the_worst_orientation() {
        let predicted = clip(&row([0.0; 3], [0.0; 4]));
        assert_eq!(pose_error(&predicted, &clip(&still()), [1.0; 3]).expect("pose").rot_deg, 180.0);
        assert_eq!(pose_error(&clip(&still()), &predicted, [1.0; 3]).expect_err("refused").code, "zero_quaternion");
    }

    #[test]
    fn refuses_other_dtypes_shapes_and_values() {
        let good = clip(&still());
        let code = |bad: &Tensor| pose_error(bad, &good, [1.0; 3]).expect_err("refused").code;
        assert_eq!(code(&good.to_dtype(DType::BF16).expect("cast")), "metric_dtype");
        assert_eq!(code(&good.to_dtype(DType::F64).expect("cast")), "metric_dtype");
        assert_eq!(code(&good.narrow(0, 0, 5).expect("narrow")), "metric_shape");
        assert_eq!(code(&good.narrow(1, 0, 7).expect("narrow")), "metric_shape");
        assert_eq!(code(&clip(&row([f32::NAN, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]))), "not_finite");
    }
}
