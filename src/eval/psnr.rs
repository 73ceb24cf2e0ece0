//! Peak signal-to-noise ratio of each picture.

use super::pictures::read_pair;
use crate::Result;
use candle_core::Tensor;

/// What equal pictures score, and the most any pair can: the same ceiling as the `MSE + 1e-8` form has, without
/// that form's bias below it (0.003 dB at 48 dB).
pub const PSNR_CAP_DB: f64 = 80.0;

/// PSNR in dB of each picture: `10 log10(1 / MSE)`, the MSE in f64 over channels, rows and columns, at most
/// [`PSNR_CAP_DB`]. `a` and `b` are f32 in [0, 1], [3, H, W] or [N, 3, H, W]; the result has N values.
///
/// A clip's PSNR is the mean of these, not the PSNR of its mean MSE.
///
/// # Errors
/// A dtype other than f32, another shape, a pixel outside [0, 1], unequal sizes.
pub fn psnr(a: &Tensor, b: &Tensor) -> Result<Vec<f64>> {
    let (a, b) = read_pair(a, b, "psnr")?;
    let length = a.picture_len().max(1);
    let pairs = a.pixels.chunks_exact(length).zip(b.pixels.chunks_exact(length));
    Ok(pairs.map(|(a, b)| psnr_of_mse(mean_squared_error(a, b))).collect())
}

fn mean_squared_error(a: &[f32], b: &[f32]) -> f64 {
    let sum: f64 = a.iter().zip(b).map(|(&a, &b)| (f64::from(a) - f64::from(b)).powi(2)).sum();
    sum / a.len() as f64
}

fn psnr_of_mse(mse: f64) -> f64 {
    (-10.0 * mse.log10()).min(PSNR_CAP_DB)
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    fn flat(value: f32) -> Tensor {
        Tensor::full(value, (2, 3, 8, 8), &Device::Cpu).expect("tensor")
    }

    #[test]
    fn follows_the_definition() {
        // A uniform difference d has MSE d^2.
        let values = psnr(&flat(0.25), &flat(0.5)).expect("psnr");
        assert_eq!(values.len(), 2);
        assert!((values[0] - -20.0 * 0.25f64.log10()).abs() < 1e-12, "{values:?}");
    }

    #[test]
    fn caps_equal_and_nearly_equal_pictures() {
        assert_eq!(psnr(&flat(0.5), &flat(0.5)).expect("psnr"), [PSNR_CAP_DB; 2]);
        assert_eq!(psnr(&flat(0.5), &flat(0.50005)).expect("psnr"), [PSNR_CAP_DB; 2]);
        assert!(psnr(&flat(0.5), &flat(0.5002)).expect("psnr")[0] < PSNR_CAP_DB);
    }

    #[test]
    fn refuses_unequal_sizes() {
        let other = Tensor::full(0.5f32, (2, 3, 8, 9), &Device::Cpu).expect("tensor");
        assert_eq!(psnr(&flat(0.5), &other).expect_err("refused").code, "size_mismatch");
    }
}
