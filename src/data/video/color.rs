//! YUV 4:2:0 -> RGB: ITU-R BT.601, limited range, chroma repeated over its 2x2 pixels.
//!
//! Own code because the conversion is part of what a model sees: integers only, the same on every machine.

use super::Picture;

/// Bits after the binary point of the coefficients below.
const SHIFT: u32 = 16;
/// 255/219, 255/112 (1 - Kr), 255/112 (1 - Kb) Kb/Kg, 255/112 (1 - Kr) Kr/Kg, 255/112 (1 - Kb) with Kr = 0.299,
/// Kb = 0.114, each times 2^16.
const LUMA: i32 = 76_309;
const RED_FROM_V: i32 = 104_597;
const GREEN_FROM_U: i32 = 25_675;
const GREEN_FROM_V: i32 = 53_279;
const BLUE_FROM_U: i32 = 132_201;

/// Appends the picture as three planes (red, green, blue), each [height, width].
pub(super) fn append_rgb_planes(picture: &Picture, rgb: &mut Vec<u8>) {
    let (width, height) = (picture.width, picture.height);
    let plane = width * height;
    let chroma_width = width.div_ceil(2);
    let start = rgb.len();
    rgb.resize(start + 3 * plane, 0);
    let (red, rest) = rgb[start..].split_at_mut(plane);
    let (green, blue) = rest.split_at_mut(plane);
    let round = 1 << (SHIFT - 1);
    for row in 0..height {
        let chroma = (row / 2) * chroma_width;
        for column in 0..width {
            let at = row * width + column;
            let luma = (i32::from(picture.y[at]) - 16) * LUMA + round;
            let u = i32::from(picture.u[chroma + column / 2]) - 128;
            let v = i32::from(picture.v[chroma + column / 2]) - 128;
            red[at] = clamp((luma + RED_FROM_V * v) >> SHIFT);
            green[at] = clamp((luma - GREEN_FROM_U * u - GREEN_FROM_V * v) >> SHIFT);
            blue[at] = clamp((luma + BLUE_FROM_U * u) >> SHIFT);
        }
    }
}

fn clamp(value: i32) -> u8 {
    value.clamp(0, 255) as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pixel(y: u8, u: u8, v: u8) -> [u8; 3] {
        let mut rgb = Vec::new();
        append_rgb_planes(&Picture { width: 1, height: 1, y: vec![y], u: vec![u], v: vec![v] }, &mut rgb);
        [rgb[0], rgb[1], rgb[2]]
    }

    #[test]
    fn agrees_with_the_real_valued_formula_to_half_a_level() {
        for y in (0..=255).step_by(5) {
            for u in (0..=255).step_by(5) {
                for v in (0..=255).step_by(5) {
                    let luma = 255.0 / 219.0 * (f64::from(y) - 16.0);
                    let (cb, cr) = (255.0 / 112.0 * (f64::from(u) - 128.0), 255.0 / 112.0 * (f64::from(v) - 128.0));
                    let expected = [
                        luma + 0.701 * cr,
                        luma - 0.886 * 0.114 / 0.587 * cb - 0.701 * 0.299 / 0.587 * cr,
                        luma + 0.886 * cb,
                    ];
                    let got = pixel(y as u8, u as u8, v as u8);
                    for (got, expected) in got.iter().zip(expected) {
                        let difference = (f64::from(*got) - expected.clamp(0.0, 255.0)).abs();
                        assert!(difference <= 0.51, "yuv {y} {u} {v}: {got} against {expected}");
                    }
                }
            }
        }
    }

    #[test]
    fn black_and_white_are_the_ends_of_the_limited_range() {
        assert_eq!(pixel(16, 128, 128), [0, 0, 0]);
        assert_eq!(pixel(235, 128, 128), [255, 255, 255]);
    }
}
