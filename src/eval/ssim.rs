//! Structural similarity of each picture: the textbook form with a Gaussian window and a valid convolution.

use super::pictures::{Pictures, read_pair};
use crate::{Error, Exit, Result};
use candle_core::Tensor;

/// Side of the Gaussian window, and so the smallest picture side.
pub const SSIM_WINDOW: usize = 11;
const SIGMA: f64 = 1.5;
const C1: f64 = 0.01 * 0.01;
const C2: f64 = 0.03 * 0.03;

/// SSIM of each picture (Wang et al. 2004): 11x11 Gaussian window with sigma 1.5, valid convolution, population
/// variances, C1 = 0.01^2, C2 = 0.03^2, for each channel; the mean of the map over channels and positions, in f64.
/// `a` and `b` are f32 in [0, 1], [3, H, W] or [N, 3, H, W]; the result has N values, each in [-1, 1].
///
/// Equal to skimage with `gaussian_weights=True, sigma=1.5, use_sample_covariance=False`, which leaves out a border
/// of 5 pixels; not to torchmetrics, which mirrors the picture's edge.
///
/// # Errors
/// A dtype other than f32, another shape, a pixel outside [0, 1], unequal sizes, a side below [`SSIM_WINDOW`].
pub fn ssim(a: &Tensor, b: &Tensor) -> Result<Vec<f64>> {
    let (a, b) = read_pair(a, b, "ssim")?;
    let side = a.height.min(a.width);
    if side < SSIM_WINDOW {
        let what = format!("ssim takes pictures of at least {SSIM_WINDOW} pixels a side and got {side}");
        return Err(Error::new(Exit::BadData, "picture_too_small", what));
    }
    let window = gaussian();
    Ok((0..a.count).map(|index| picture_ssim(&a, &b, index, &window)).collect())
}

fn gaussian() -> [f64; SSIM_WINDOW] {
    let centre = (SSIM_WINDOW / 2) as f64;
    let mut window = [0.0; SSIM_WINDOW];
    for (k, weight) in window.iter_mut().enumerate() {
        *weight = (-(k as f64 - centre).powi(2) / (2.0 * SIGMA * SIGMA)).exp();
    }
    let sum: f64 = window.iter().sum();
    window.map(|weight| weight / sum)
}

fn picture_ssim(a: &Pictures, b: &Pictures, index: usize, window: &[f64; SSIM_WINDOW]) -> f64 {
    let planes = |pictures: &Pictures| -> Vec<Vec<f64>> {
        let length = pictures.plane_len();
        let planes = pictures.pixels.chunks_exact(length).skip(index * 3).take(3);
        planes.map(|plane| plane.iter().map(|&value| f64::from(value)).collect()).collect()
    };
    let mut sum = 0.0;
    let mut positions = 0;
    for (a_plane, b_plane) in planes(a).iter().zip(&planes(b)) {
        let products =
            |f: fn(f64, f64) -> f64| -> Vec<f64> { a_plane.iter().zip(b_plane).map(|(&a, &b)| f(a, b)).collect() };
        let blur = |plane: &[f64]| blur_valid(plane, a.height, a.width, window);
        let (mean_a, mean_b) = (blur(a_plane), blur(b_plane));
        // Only the sum of both variances enters, so one blur serves a^2 and b^2.
        let squares = blur(&products(|a, b| a * a + b * b));
        let cross = blur(&products(|a, b| a * b));
        for (((&mean_a, &mean_b), &squares), &cross) in mean_a.iter().zip(&mean_b).zip(&squares).zip(&cross) {
            let mean_squares = mean_a * mean_a + mean_b * mean_b;
            let mean_product = mean_a * mean_b;
            let luminance = (2.0 * mean_product + C1) / (mean_squares + C1);
            let structure = (2.0 * (cross - mean_product) + C2) / (squares - mean_squares + C2);
            sum += luminance * structure;
        }
        positions += mean_a.len();
    }
    sum / positions as f64
}

/// Rows first, then columns, each as eleven scaled adds over whole rows (which the compiler vectorises):
/// [height, width] -> [height - 10, width - 10].
fn blur_valid(plane: &[f64], height: usize, width: usize, window: &[f64; SSIM_WINDOW]) -> Vec<f64> {
    let (out_height, out_width) = (height + 1 - SSIM_WINDOW, width + 1 - SSIM_WINDOW);
    let mut rows = vec![0.0; height * out_width];
    for (row, out) in plane.chunks_exact(width).zip(rows.chunks_exact_mut(out_width)) {
        for (k, &weight) in window.iter().enumerate() {
            add_scaled(out, row.iter().skip(k), weight);
        }
    }
    let mut blurred = vec![0.0; out_height * out_width];
    for (y, out) in blurred.chunks_exact_mut(out_width).enumerate() {
        for (row, &weight) in rows.chunks_exact(out_width).skip(y).zip(window) {
            add_scaled(out, row.iter(), weight);
        }
    }
    blurred
}

fn add_scaled<'a>(out: &mut [f64], values: impl Iterator<Item = &'a f64>, weight: f64) {
    for (out, value) in out.iter_mut().zip(values) {
        *out += weight * value;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    fn picture(height: usize, width: usize, f: impl Fn(usize) -> f32) -> Tensor {
        let pixels = (0..3 * height * width).map(f).collect();
        Tensor::from_vec(pixels, (3, height, width), &Device::Cpu).expect("tensor")
    }

    /// The definition, written as a plain double loop over the window.
    fn direct(a: &[f32], b: &[f32], height: usize, width: usize) -> f64 {
        let weights = gaussian();
        let mut sum = 0.0;
        let mut count = 0.0;
        for channel in 0..3 {
            for y in 0..height - 10 {
                for x in 0..width - 10 {
                    let (mut ma, mut mb, mut aa, mut bb, mut ab) = (0.0, 0.0, 0.0, 0.0, 0.0);
                    for dy in 0..11 {
                        for dx in 0..11 {
                            let at = channel * height * width + (y + dy) * width + x + dx;
                            let (p, q, w) = (f64::from(a[at]), f64::from(b[at]), weights[dy] * weights[dx]);
                            ma += w * p;
                            mb += w * q;
                            aa += w * p * p;
                            bb += w * q * q;
                            ab += w * p * q;
                        }
                    }
                    let (va, vb, vab) = (aa - ma * ma, bb - mb * mb, ab - ma * mb);
                    sum += (2.0 * ma * mb + C1) * (2.0 * vab + C2) / ((ma * ma + mb * mb + C1) * (va + vb + C2));
                    count += 1.0;
                }
            }
        }
        sum / count
    }

    #[test]
    fn equals_the_definition_on_an_oblong_picture() {
        let wave = |i: usize| (i as f32 * 0.37).sin() * 0.5 + 0.5;
        let noisy = |i: usize| ((i * 2654435761) % 1000) as f32 / 1000.0 * 0.3 + wave(i) * 0.7;
        let (a, b) = (picture(13, 19, wave), picture(13, 19, noisy));
        let values = |t: &Tensor| t.flatten_all().and_then(|t| t.to_vec1::<f32>()).expect("values");
        let expected = direct(&values(&a), &values(&b), 13, 19);
        let found = ssim(&a, &b).expect("ssim")[0];
        assert!((found - expected).abs() < 1e-12, "{found} {expected}");
        assert!(expected < 0.95, "the pair must differ: {expected}");
    }

    #[test]
    fn equal_pictures_score_one() {
        let a = picture(11, 11, |i| (i % 7) as f32 / 7.0);
        assert!((ssim(&a, &a).expect("ssim")[0] - 1.0).abs() < 1e-12);
    }

    #[test]
    fn refuses_pictures_smaller_than_the_window() {
        for (height, width) in [(10, 64), (64, 10), (1, 1)] {
            let a = picture(height, width, |_| 0.5);
            assert_eq!(ssim(&a, &a).expect_err("refused").code, "picture_too_small");
        }
    }
}
