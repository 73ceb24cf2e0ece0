//! The picture kept of a validated clip: ground truth over prediction, frames side by side.

use super::pictures::{Pictures, read_pair};
use crate::files::write_whole;
use crate::{Error, Result};
use candle_core::Tensor;
use image::{ImageFormat, RgbImage};
use std::io::Cursor;
use std::path::Path;

/// Writes a PNG of two rows, `truth` above `prediction`, T frames side by side: T*W x 2*H pixels. Both are f32 in
/// [0, 1], [T, 3, H, W]. The file appears whole or not at all; its folder must exist.
///
/// # Errors
/// A dtype other than f32, another shape, a pixel outside [0, 1], unequal sizes; the disk errors of [`crate::files`].
pub fn write_strip(path: &Path, truth: &Tensor, prediction: &Tensor) -> Result<()> {
    let (truth, prediction) = read_pair(truth, prediction, "strip")?;
    let strip = compose(&truth, &prediction)?;
    let mut png = Cursor::new(Vec::new());
    strip
        .write_to(&mut png, ImageFormat::Png)
        .map_err(|error| Error::crash(format!("cannot encode a strip: {error}")).at(path))?;
    write_whole(path, &png.into_inner())
}

fn compose(truth: &Pictures, prediction: &Pictures) -> Result<RgbImage> {
    let mut bytes = Vec::with_capacity(2 * truth.pixels.len());
    for row in [truth, prediction] {
        for y in 0..row.height {
            for frame in row.pixels.chunks_exact(row.picture_len()) {
                let lines = [0, 1, 2].map(|channel| &frame[channel * row.plane_len() + y * row.width..][..row.width]);
                for x in 0..row.width {
                    bytes.extend(lines.map(|line| (line[x] * 255.0).round() as u8));
                }
            }
        }
    }
    let side = |pixels: usize| u32::try_from(pixels).ok();
    side(truth.count * truth.width)
        .zip(side(2 * truth.height))
        .and_then(|(width, height)| RgbImage::from_raw(width, height, bytes))
        .ok_or_else(|| Error::crash("a strip is too large for a picture"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{DType, Device};

    /// Frame t is all `base + t / 10`.
    fn frames(base: f32) -> Tensor {
        let pixels = (0..4).flat_map(|t| vec![base + t as f32 / 10.0; 3 * 6 * 5]).collect();
        Tensor::from_vec(pixels, (4, 3, 6, 5), &Device::Cpu).expect("tensor")
    }

    #[test]
    fn truth_is_above_and_time_runs_right() {
        let folder = tempfile::tempdir().expect("folder");
        let path = folder.path().join("clip.png");
        write_strip(&path, &frames(0.0), &frames(0.6)).expect("written");
        let strip = image::open(&path).expect("a PNG").into_rgb8();
        assert_eq!(strip.dimensions(), (4 * 5, 2 * 6));
        for t in 0..4u32 {
            assert_eq!(strip.get_pixel(t * 5 + 2, 0).0, [(t as f32 * 25.5).round() as u8; 3]);
            assert_eq!(strip.get_pixel(t * 5 + 4, 6).0, [((0.6 + t as f32 / 10.0) * 255.0).round() as u8; 3]);
        }
        assert_eq!(std::fs::read_dir(folder.path()).expect("folder").count(), 1, "no temporary file is left");
    }

    #[test]
    fn keeps_channels_and_columns_apart() {
        let pixels = (0..3 * 2 * 2).map(|i| i as f32 / 255.0).collect();
        let truth = Tensor::from_vec(pixels, (1, 3, 2, 2), &Device::Cpu).expect("tensor");
        let (truth, other) = read_pair(&truth, &truth.zeros_like().expect("zeros"), "strip").expect("pair");
        let strip = compose(&truth, &other).expect("strip");
        assert_eq!(strip.get_pixel(1, 0).0, [1, 5, 9]);
        assert_eq!(strip.get_pixel(0, 1).0, [2, 6, 10]);
    }

    #[test]
    fn a_failed_write_says_where_and_leaves_nothing() {
        let folder = tempfile::tempdir().expect("folder");
        let path = folder.path().join("absent/clip.png");
        let error = write_strip(&path, &frames(0.0), &frames(0.1)).expect_err("refused");
        assert_eq!((error.exit.code(), error.code), (74, "path_missing"));
        assert!(error.to_string().contains("absent/clip.png"), "{error}");
        let wrong = frames(0.0).to_dtype(DType::BF16).expect("cast");
        assert_eq!(write_strip(&path, &wrong, &frames(0.1)).expect_err("refused").code, "metric_dtype");
    }
}
