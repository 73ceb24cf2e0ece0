//! The gate in front of every picture metric: f32, three channels, finite, inside the stated range, equal sizes.
//!
//! All metrics share it, so none of them can accept what another refuses.

use crate::{Error, Exit, Result};
use candle_core::{DType, Tensor};
use std::ops::RangeInclusive;

/// Pixels in [0, 1]: PSNR, SSIM, strips.
pub(super) const UNIT: RangeInclusive<f32> = 0.0..=1.0;
/// Pixels in [-1, 1]: LPIPS.
pub(super) const SIGNED: RangeInclusive<f32> = -1.0..=1.0;

/// `count` pictures as planar f32: [count, 3, height, width].
pub(super) struct Pictures {
    pub pixels: Vec<f32>,
    pub count: usize,
    pub height: usize,
    pub width: usize,
}

impl Pictures {
    /// Floats in one picture.
    pub fn picture_len(&self) -> usize {
        3 * self.plane_len()
    }

    /// Floats in one channel of one picture.
    pub fn plane_len(&self) -> usize {
        self.height * self.width
    }
}

/// Reads the values of an f32 tensor; any other dtype is an error, never a conversion.
pub(super) fn f32_values(tensor: &Tensor, metric: &str) -> Result<Vec<f32>> {
    if tensor.dtype() != DType::F32 {
        let what = format!("{metric} takes f32 and got {}", tensor.dtype().as_str());
        return Err(Error::new(Exit::Crash, "metric_dtype", what).hint("convert to f32 where the values are made"));
    }
    Ok(tensor.flatten_all()?.to_vec1::<f32>()?)
}

/// Checks `tensor` ([3, H, W] or [N, 3, H, W]) and reads it.
///
/// # Errors
/// `metric_dtype`, `metric_shape`, `not_finite`, `pixel_range`.
pub(super) fn read_pictures(tensor: &Tensor, metric: &str, range: RangeInclusive<f32>) -> Result<Pictures> {
    let (count, height, width) = match *tensor.dims() {
        [3, height, width] => (1, height, width),
        [count, 3, height, width] => (count, height, width),
        ref dims => {
            let what = format!("{metric} takes pictures [3, H, W] or [N, 3, H, W] and got {dims:?}");
            return Err(Error::new(Exit::Crash, "metric_shape", what));
        }
    };
    let pixels = f32_values(tensor, metric)?;
    if let Some(value) = pixels.iter().find(|value| !range.contains(value)) {
        let (low, high) = (range.start(), range.end());
        let (code, what) = match value.is_finite() {
            true => ("pixel_range", format!("{metric} takes pixels in [{low}, {high}] and met {value}")),
            false => ("not_finite", format!("{metric} met a pixel that is {value}")),
        };
        return Err(Error::new(Exit::Crash, code, what).hint("clamp finite predictions first"));
    }
    Ok(Pictures { pixels, count, height, width })
}

/// Reads two stacks of pictures of equal shape.
///
/// # Errors
/// Those of [`read_pictures`], and `size_mismatch`.
pub(super) fn read_pair(a: &Tensor, b: &Tensor, metric: &str) -> Result<(Pictures, Pictures)> {
    let (a, b) = (read_pictures(a, metric, UNIT)?, read_pictures(b, metric, UNIT)?);
    if (a.count, a.height, a.width) != (b.count, b.height, b.width) {
        return Err(size_mismatch(metric, (a.count, a.height, a.width), (b.count, b.height, b.width)));
    }
    Ok((a, b))
}

/// Two stacks (count, height, width) that cannot be compared.
pub(super) fn size_mismatch(metric: &str, a: (usize, usize, usize), b: (usize, usize, usize)) -> Error {
    let say = |(count, height, width)| format!("{count} of {width}x{height}");
    let what = format!("{metric} compares pictures of one size and got {} against {}", say(a), say(b));
    Error::new(Exit::Crash, "size_mismatch", what)
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    fn code(tensor: &Tensor) -> &'static str {
        read_pictures(tensor, "psnr", UNIT).err().expect("refused").code
    }

    #[test]
    fn refuses_every_dtype_but_f32() -> Result<()> {
        let f32s = Tensor::full(0.5f32, (3, 4, 4), &Device::Cpu)?;
        assert!(read_pictures(&f32s, "psnr", UNIT).is_ok());
        for dtype in [DType::BF16, DType::F16, DType::F64, DType::U8, DType::U32, DType::I64] {
            assert_eq!(code(&f32s.to_dtype(dtype)?), "metric_dtype", "{dtype:?}");
        }
        Ok(())
    }

    #[test]
    fn refuses_values_no_picture_has() -> Result<()> {
        for (value, expected) in [
            (f32::NAN, "not_finite"),
            (f32::INFINITY, "not_finite"),
            (f32::NEG_INFINITY, "not_finite"),
            (1.0001, "pixel_range"),
            (-0.0001, "pixel_range"),
        ] {
            let mut pixels = vec![0.5f32; 48];
            pixels[17] = value;
            assert_eq!(code(&Tensor::from_vec(pixels, (3, 4, 4), &Device::Cpu)?), expected, "{value}");
        }
        Ok(())
    }

    #[test]
    fn refuses_shapes_that_are_no_pictures() -> Result<()> {
        for dims in [vec![4, 4], vec![1, 4, 4], vec![4, 4, 3], vec![2, 1, 4, 4], vec![1, 1, 3, 4, 4]] {
            assert_eq!(code(&Tensor::zeros(dims, DType::F32, &Device::Cpu)?), "metric_shape");
        }
        Ok(())
    }

    #[test]
    fn reads_a_view_in_its_logical_order() -> Result<()> {
        let tensor = Tensor::from_vec((0..48).map(|i| i as f32 / 48.0).collect(), (4, 4, 3), &Device::Cpu)?;
        let planar = read_pictures(&tensor.permute((2, 0, 1))?, "psnr", UNIT)?;
        assert_eq!(planar.pixels[1], 3.0 / 48.0);
        Ok(())
    }
}
