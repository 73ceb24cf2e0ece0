//! `metrics A B`: PSNR, SSIM and LPIPS of two pictures, or of two folders picture by picture.
//!
//! The same functions that a validation uses, reachable from outside, so anybody can check them against another program.

use super::files::read_error;
use super::lpips::{Lpips, LpipsIdentity, SMALLEST_SIDE};
use super::{psnr, ssim};
use crate::{Error, Result};
use candle_core::{Device, Tensor};
use image::{ColorType, DynamicImage, ImageFormat, ImageReader};
use serde::Serialize;
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs;
use std::io::Cursor;
use std::path::{Path, PathBuf};

/// What `metrics` prints: the means over all pairs, then each pair.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Comparison {
    #[serde(flatten)]
    pub mean: Scores,
    pub pairs: Vec<PairScores>,
    /// How many files of either folder are no PNG or JPEG by their names and were passed over.
    pub ignored_files: usize,
    /// Which LPIPS this is; its input size is that of the first pair.
    pub lpips_identity: LpipsIdentity,
}

/// One pair of pictures, or the mean of many.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Scores {
    /// dB, at most 80 (which equal pictures score); higher is better.
    pub psnr_db: f64,
    /// Higher is better, 1 for equal pictures.
    pub ssim: f64,
    /// Lower is better, 0 for equal pictures.
    pub lpips: f64,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PairScores {
    /// Paths as given (folders: joined with the file name).
    pub a: String,
    pub b: String,
    pub width: usize,
    pub height: usize,
    #[serde(flatten)]
    pub scores: Scores,
    /// Every pixel of one is that of the other.
    pub identical: bool,
}

/// Measures two pictures, or the pictures of two folders matched by file name (subfolders are not entered).
///
/// Pictures are 8-bit PNG or JPEG, colour or grey; an alpha channel must be opaque.
///
/// # Errors
/// All exit 65: `file_missing`, `not_readable`, `folder_and_file`, `no_pictures`, `unmatched_pictures`, `not_a_picture`,
/// `not_8_bit`, `transparent`, `size_mismatch`, `picture_too_small`.
pub fn compare(a: &Path, b: &Path) -> Result<Comparison> {
    let (pairs, ignored_files) = pair_up(a, b)?;
    let lpips = Lpips::new()?;
    let mut scored = Vec::with_capacity(pairs.len());
    for (a, b) in pairs {
        scored.push(score(&a, &b, &lpips)?);
    }
    let Some(first) = scored.first() else {
        return Err(Error::data("no_pictures", "nothing to compare").at(a));
    };
    let lpips_identity = lpips.identity(first.height, first.width);
    let mean = |get: fn(&Scores) -> f64| scored.iter().map(|pair| get(&pair.scores)).sum::<f64>() / scored.len() as f64;
    let mean = Scores { psnr_db: mean(|s| s.psnr_db), ssim: mean(|s| s.ssim), lpips: mean(|s| s.lpips) };
    Ok(Comparison { mean, pairs: scored, ignored_files, lpips_identity })
}

impl Comparison {
    /// An aligned table for a terminal: a line a pair, and the mean when there are several.
    pub fn render_text(&self) -> String {
        let name = |pair: &PairScores| match self.pairs.len() {
            1 => format!("{} | {}", pair.a, pair.b),
            _ => Path::new(&pair.a).file_name().unwrap_or_default().to_string_lossy().into_owned(),
        };
        let mut rows: Vec<(String, Scores)> = self.pairs.iter().map(|pair| (name(pair), pair.scores)).collect();
        if rows.len() > 1 {
            rows.push((format!("mean of {}", rows.len()), self.mean));
        }
        let name_width = rows.iter().map(|(name, _)| name.chars().count()).max().unwrap_or(0);
        let mut text = format!("{:name_width$}  {:>9}  {:>8}  {:>8}\n", "", "PSNR dB", "SSIM", "LPIPS");
        for (name, scores) in rows {
            let Scores { psnr_db, ssim, lpips } = scores;
            text.push_str(&format!("{name:name_width$}  {psnr_db:>9.4}  {ssim:>8.6}  {lpips:>8.6}\n"));
        }
        text
    }
}

fn pair_up(a: &Path, b: &Path) -> Result<(Vec<(PathBuf, PathBuf)>, usize)> {
    let is_folder =
        |path: &Path| fs::metadata(path).map(|meta| meta.is_dir()).map_err(|error| read_error(&error, path));
    match (is_folder(a)?, is_folder(b)?) {
        (false, false) => Ok((vec![(a.into(), b.into())], 0)),
        (true, true) => pair_folders(a, b),
        (a_is_folder, _) => {
            let (folder, file) = if a_is_folder { (a, b) } else { (b, a) };
            let what = format!("one of the two is a folder, the other a file: {}", file.display());
            Err(Error::data("folder_and_file", what).at(folder).hint("give two pictures or two folders"))
        }
    }
}

fn pair_folders(a: &Path, b: &Path) -> Result<(Vec<(PathBuf, PathBuf)>, usize)> {
    let ((a_names, a_ignored), (b_names, b_ignored)) = (picture_names(a)?, picture_names(b)?);
    let only = |here: &BTreeSet<OsString>, there: &BTreeSet<OsString>, folder: &Path| {
        let names: Vec<String> = here.difference(there).map(|name| name.to_string_lossy().into_owned()).collect();
        (!names.is_empty()).then(|| format!("only in {}: {}", folder.display(), list(&names)))
    };
    let unmatched: Vec<String> =
        [only(&a_names, &b_names, a), only(&b_names, &a_names, b)].into_iter().flatten().collect();
    if !unmatched.is_empty() {
        let what = format!("pictures without a partner of the same file name: {}", unmatched.join("; "));
        return Err(Error::data("unmatched_pictures", what).hint("rename or remove them"));
    }
    Ok((a_names.iter().map(|name| (a.join(name), b.join(name))).collect(), a_ignored + b_ignored))
}

/// File names of the pictures in a folder, in order, and the number of other files.
fn picture_names(folder: &Path) -> Result<(BTreeSet<OsString>, usize)> {
    let mut names = BTreeSet::new();
    let mut ignored = 0;
    for entry in fs::read_dir(folder).map_err(|error| read_error(&error, folder))? {
        let path = entry.map_err(|error| read_error(&error, folder))?.path();
        if path.is_dir() {
            continue;
        }
        let extension = path.extension().map(|extension| extension.to_string_lossy().to_ascii_lowercase());
        match (extension.as_deref(), path.file_name()) {
            (Some("png" | "jpg" | "jpeg"), Some(name)) => {
                names.insert(name.to_os_string());
            }
            _ => ignored += 1,
        }
    }
    match names.is_empty() {
        true => Err(Error::data("no_pictures", "the folder has no PNG or JPEG pictures").at(folder)),
        false => Ok((names, ignored)),
    }
}

/// The first names, and how many more there are: a message stays a line that a person reads.
fn list(names: &[String]) -> String {
    const SHOWN: usize = 10;
    let shown = names.iter().take(SHOWN).map(String::as_str).collect::<Vec<_>>().join(", ");
    match names.len().saturating_sub(SHOWN) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

fn score(a: &Path, b: &Path, lpips: &Lpips) -> Result<PairScores> {
    let (a_tensor, b_tensor) = (read_picture(a)?, read_picture(b)?);
    let (_, height, width) = a_tensor.dims3()?;
    let (_, b_height, b_width) = b_tensor.dims3()?;
    if (height, width) != (b_height, b_width) {
        let what = format!("pictures of different sizes: {width}x{height} and {b_width}x{b_height}");
        return Err(Error::data("size_mismatch", what).in_place(format!("{} and {}", a.display(), b.display())));
    }
    if height.min(width) < SMALLEST_SIDE {
        let what = format!("the picture is {width}x{height}; LPIPS takes at least {SMALLEST_SIDE} pixels a side");
        return Err(Error::data("picture_too_small", what).at(a));
    }
    let features = |picture: &Tensor| lpips.features(&picture.affine(2.0, -1.0)?);
    let lpips = lpips.distance(&features(&a_tensor)?, &features(&b_tensor)?)?;
    let one = |values: Vec<f64>| values.first().copied().unwrap_or(f64::NAN);
    let scores =
        Scores { psnr_db: one(psnr(&a_tensor, &b_tensor)?), ssim: one(ssim(&a_tensor, &b_tensor)?), lpips: one(lpips) };
    let identical = a_tensor.flatten_all()?.to_vec1::<f32>()? == b_tensor.flatten_all()?.to_vec1::<f32>()?;
    let say = |path: &Path| path.display().to_string();
    Ok(PairScores { a: say(a), b: say(b), width, height, scores, identical })
}

/// An 8-bit picture as f32 [3, H, W] in [0, 1]: u8 / 255.
///
/// # Errors
/// `file_missing`, `not_readable`, `not_a_picture`, `not_8_bit`, `transparent`.
pub fn read_picture(path: &Path) -> Result<Tensor> {
    let unreadable =
        |reason: String| Error::data("not_a_picture", format!("not a readable PNG or JPEG: {reason}")).at(path);
    // A pipe or a device has no end to read to.
    if !fs::metadata(path).map_err(|error| read_error(&error, path))?.is_file() {
        return Err(unreadable("it is no regular file".into()));
    }
    let bytes = fs::read(path).map_err(|error| read_error(&error, path))?;
    let format = image::guess_format(&bytes).map_err(|error| unreadable(error.to_string()))?;
    if format == ImageFormat::Jpeg && !jpeg_is_whole(&bytes) {
        return Err(unreadable("the JPEG ends before its end marker".into()));
    }
    let reader = ImageReader::with_format(Cursor::new(bytes), format);
    let picture = reader.decode().map_err(|error| unreadable(error.to_string()))?;
    if !matches!(picture.color(), ColorType::L8 | ColorType::La8 | ColorType::Rgb8 | ColorType::Rgba8) {
        let what = format!("the picture is {:?}; metrics take 8 bits a channel", picture.color());
        return Err(Error::data("not_8_bit", what).at(path));
    }
    if has_transparency(&picture) {
        let what = "the picture is transparent in places, and metrics have no background to put behind it";
        return Err(Error::data("transparent", what).at(path).hint("flatten it first"));
    }
    let rgb = picture.into_rgb8();
    let (width, height) = (rgb.width() as usize, rgb.height() as usize);
    let pixels = rgb.into_raw().into_iter().map(|value| f32::from(value) / 255.0).collect();
    Ok(Tensor::from_vec(pixels, (height, width, 3), &Device::Cpu)?.permute((2, 0, 1))?.contiguous()?)
}

/// Whether the end marker follows the picture. The decoder fills the rest of a truncated JPEG with grey and says nothing,
/// which would be measured as if it were the picture.
fn jpeg_is_whole(bytes: &[u8]) -> bool {
    let mut at = 2;
    while let Some(&[first, marker]) = bytes.get(at..at + 2) {
        at += match (first, marker) {
            (0xFF, 0xD9) => return true,
            // Compressed data (0xFF is stuffed with 0 there, and restart markers stand alone) or fill bytes.
            (0..=0xFE, _) | (0xFF, 0xFF) => 1,
            (0xFF, 0 | 0x01 | 0xD0..=0xD8) => 2,
            // Any other marker starts a segment of this length; a thumbnail's end marker lies inside one.
            (0xFF, _) => match bytes.get(at + 2..at + 4) {
                Some(&[high, low]) => 2 + usize::from(u16::from_be_bytes([high, low])),
                _ => return false,
            },
        };
    }
    false
}

fn has_transparency(picture: &DynamicImage) -> bool {
    match picture {
        DynamicImage::ImageRgba8(pixels) => pixels.pixels().any(|pixel| pixel.0[3] != 255),
        DynamicImage::ImageLumaA8(pixels) => pixels.pixels().any(|pixel| pixel.0[1] != 255),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use image::{GrayImage, ImageBuffer, Luma, Rgb, RgbImage, RgbaImage};
    use serde_json::json;
    use tempfile::TempDir;

    fn folder() -> TempDir {
        tempfile::tempdir().expect("folder")
    }

    fn picture(width: u32, height: u32, shade: u8) -> RgbImage {
        RgbImage::from_fn(width, height, |x, y| Rgb([shade, (x * 7) as u8, (y * 5) as u8]))
    }

    fn code(a: &Path, b: &Path) -> (&'static str, String) {
        let error = compare(a, b).expect_err("refused");
        assert_eq!(error.exit.code(), 65, "{error}");
        (error.code, error.to_string())
    }

    #[test]
    fn folders_are_compared_name_by_name() {
        let (a, b) = (folder(), folder());
        for (name, shade) in [("0.png", 10), ("1.PNG", 20), ("2.jpg", 30)] {
            picture(40, 33, 10).save(a.path().join(name)).expect("saved");
            picture(40, 33, shade).save(b.path().join(name)).expect("saved");
        }
        fs::write(a.path().join("notes.txt"), "no picture").expect("written");
        fs::create_dir(b.path().join("deeper")).expect("folder");
        let found = compare(a.path(), b.path()).expect("compared");
        assert_eq!((found.pairs.len(), found.ignored_files), (3, 1));
        assert!(found.pairs[0].identical && !found.pairs[1].identical);
        let Scores { psnr_db, ssim, lpips } = found.pairs[0].scores;
        assert_eq!((psnr_db, lpips), (80.0, 0.0));
        assert!((ssim - 1.0).abs() < 1e-12);
        // One channel of three is 10 levels off.
        let expected = -10.0 * ((10.0 / 255.0f64).powi(2) / 3.0).log10();
        assert!((found.pairs[1].scores.psnr_db - expected).abs() < 1e-4);
        let mean = found.pairs.iter().map(|pair| pair.scores.lpips).sum::<f64>() / 3.0;
        assert_eq!(found.mean.lpips, mean);
        let text = found.render_text();
        assert!(text.lines().count() == 5 && text.contains("mean of 3"), "{text}");
        let json = serde_json::to_value(&found).expect("json");
        assert_eq!(json["psnr_db"], json!(found.mean.psnr_db));
        assert_eq!(json["pairs"][1]["lpips"], json!(found.pairs[1].scores.lpips));
    }

    #[test]
    fn grey_and_opaque_pictures_are_taken() {
        let here = folder();
        let (grey, opaque) = (here.path().join("grey.png"), here.path().join("opaque.png"));
        GrayImage::from_pixel(40, 40, Luma([77])).save(&grey).expect("saved");
        RgbaImage::from_pixel(40, 40, image::Rgba([77, 77, 77, 255])).save(&opaque).expect("saved");
        assert!(compare(&grey, &opaque).expect("compared").pairs[0].identical);
    }

    #[test]
    fn a_wrong_name_does_not_hide_a_right_picture() {
        let here = folder();
        let (good, misnamed) = (here.path().join("a.png"), here.path().join("a.dat"));
        picture(40, 40, 1).save(&good).expect("saved");
        fs::copy(&good, &misnamed).expect("copied");
        assert!(compare(&good, &misnamed).expect("compared").pairs[0].identical);
    }

    #[test]
    fn every_kind_of_bad_input_has_its_own_reason() {
        let here = folder();
        let path = |name: &str| here.path().join(name);
        let good = path("good.png");
        picture(40, 40, 1).save(&good).expect("saved");

        picture(200, 200, 1).save(path("good.jpg")).expect("saved");
        let (whole, jpeg) = (fs::read(&good).expect("read"), fs::read(path("good.jpg")).expect("read"));

        assert_eq!(code(&good, &path("absent.png")).0, "file_missing");
        for (name, bytes) in [
            ("empty.png", &b""[..]),
            ("text.png", b"hello"),
            ("cut.png", &whole[..60]),
            ("half.png", &whole[..whole.len() / 2]),
            ("half.jpg", &jpeg[..jpeg.len() / 2]),
        ] {
            fs::write(path(name), bytes).expect("written");
            let (reason, line) = code(&good, &path(name));
            assert_eq!(reason, "not_a_picture", "{name}");
            assert!(line.contains(name), "{line}");
        }
        picture(41, 40, 1).save(path("wide.png")).expect("saved");
        let (reason, line) = code(&good, &path("wide.png"));
        assert_eq!(reason, "size_mismatch");
        assert!(line.contains("40x40") && line.contains("41x40") && line.contains("wide.png"), "{line}");
        picture(30, 40, 1).save(path("small.png")).expect("saved");
        assert_eq!(code(&path("small.png"), &path("small.png")).0, "picture_too_small");
        ImageBuffer::<Rgb<u16>, _>::from_pixel(40, 40, Rgb([1, 2, 3])).save(path("deep.png")).expect("saved");
        assert_eq!(code(&good, &path("deep.png")).0, "not_8_bit");
        RgbaImage::from_pixel(40, 40, image::Rgba([1, 2, 3, 128])).save(path("clear.png")).expect("saved");
        assert_eq!(code(&good, &path("clear.png")).0, "transparent");
    }

    #[test]
    fn folders_that_do_not_match_are_refused_with_the_names() {
        let (a, b, empty) = (folder(), folder(), folder());
        picture(40, 40, 1).save(a.path().join("only_a.png")).expect("saved");
        picture(40, 40, 1).save(b.path().join("only_b.png")).expect("saved");
        let (reason, line) = code(a.path(), b.path());
        assert_eq!(reason, "unmatched_pictures");
        assert!(line.contains("only_a.png") && line.contains("only_b.png"), "{line}");
        assert_eq!(code(a.path(), empty.path()).0, "no_pictures");
        assert_eq!(code(empty.path(), empty.path()).0, "no_pictures");
        assert_eq!(code(a.path(), &b.path().join("only_b.png")).0, "folder_and_file");
        let many: Vec<String> = (0..12).map(|i| format!("{i}.png")).collect();
        assert!(list(&many).ends_with("9.png and 2 more"));
    }
}
