//! The picture metrics against values that another program computed (`tests/data/lpips`).

use candle_core::{DType, Device, Tensor};
use lbva_tui::Result;
use lbva_tui::eval::compare::{compare, read_picture};
use lbva_tui::eval::{Lpips, psnr, ssim};
use safetensors::tensor::TensorView;
use serde_json::Value;
use std::path::PathBuf;

const PSNR_TOLERANCE_DB: f64 = 1e-3;
const SSIM_TOLERANCE: f64 = 1e-5;
const LPIPS_TOLERANCE: f64 = 1e-4;

fn data(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data/lpips").join(name)
}

fn values() -> Value {
    serde_json::from_slice(&std::fs::read(data("values.json")).expect("values.json")).expect("JSON")
}

fn picture(entry: &Value) -> Tensor {
    read_picture(&data(entry.as_str().expect("a path"))).expect("a picture")
}

fn number(value: &Value) -> f64 {
    value.as_f64().expect("a number")
}

/// [-1, 1] as LPIPS takes it.
fn signed(picture: &Tensor) -> Tensor {
    picture.affine(2.0, -1.0).expect("affine")
}

/// Largest deviation seen, printed with `--nocapture` and held against the tolerance.
struct Worst(&'static str, f64, f64);

impl Worst {
    fn see(&mut self, what: &str, found: f64, expected: f64) {
        let error = (found - expected).abs();
        assert!(error <= self.2, "{} of {what}: found {found}, expected {expected}", self.0);
        self.1 = self.1.max(error);
    }
}

impl Drop for Worst {
    fn drop(&mut self) {
        eprintln!("{}: largest deviation {:.2e}, tolerance {:.0e}", self.0, self.1, self.2);
    }
}

#[test]
fn every_pair_has_its_reference_values() -> Result<()> {
    let (values, lpips) = (values(), Lpips::new()?);
    let pairs = values["pairs"].as_array().expect("pairs");
    assert_eq!(pairs.len(), 10);
    let mut worst_psnr = Worst("PSNR", 0.0, PSNR_TOLERANCE_DB);
    let mut worst_ssim = Worst("SSIM", 0.0, SSIM_TOLERANCE);
    let mut worst_lpips = Worst("LPIPS", 0.0, LPIPS_TOLERANCE);
    let mut worst_tap = Worst("LPIPS share of a tap", 0.0, LPIPS_TOLERANCE);
    for pair in pairs {
        let name = pair["name"].as_str().expect("a name");
        let (a, b) = (picture(&pair["a"]), picture(&pair["b"]));
        assert_eq!(a.dims(), [3, number(&pair["height"]) as usize, number(&pair["width"]) as usize], "{name}");
        let expected = &pair["fp32"];
        match &expected["psnr_db"] {
            Value::String(infinite) if infinite == "inf" => assert_eq!(psnr(&a, &b)?, [80.0], "{name}: the cap"),
            value => worst_psnr.see(name, psnr(&a, &b)?[0], number(value)),
        }
        worst_ssim.see(name, ssim(&a, &b)?[0], number(&expected["ssim_skimage_gaussian"]));

        let (a, b) = (lpips.features(&signed(&a))?, lpips.features(&signed(&b))?);
        let expected = &pair["lpips"]["alex"];
        worst_lpips.see(name, lpips.distance(&a, &b)?[0], number(&expected["total"]));
        let taps = lpips.tap_distances(&a, &b)?[0];
        for (tap, expected) in expected["per_layer"].as_array().expect("taps").iter().enumerate() {
            worst_tap.see(&format!("{name}, tap {tap}"), taps[tap], number(expected));
        }
    }
    Ok(())
}

#[test]
fn a_clip_is_measured_frame_by_frame_in_one_call() -> Result<()> {
    let values = values();
    let clip = &values["clip"];
    let count = number(&clip["frames"]) as usize;
    let frames = |entry: &Value| -> Result<Tensor> {
        let strip = picture(entry);
        let frames =
            (0..count).map(|frame| strip.narrow(2, frame * 128, 128)).collect::<candle_core::Result<Vec<_>>>()?;
        Ok(Tensor::stack(&frames, 0)?)
    };
    let (a, b) = (frames(&clip["a"])?, frames(&clip["b"])?);
    let lpips = Lpips::new()?;
    let found_psnr = psnr(&a, &b)?;
    let found_lpips = lpips.distance(&lpips.features(&signed(&a))?, &lpips.features(&signed(&b))?)?;
    let mut worst_psnr = Worst("clip PSNR", 0.0, PSNR_TOLERANCE_DB);
    let mut worst_lpips = Worst("clip LPIPS", 0.0, LPIPS_TOLERANCE);
    for frame in 0..count {
        let what = format!("frame {frame}");
        worst_psnr.see(&what, found_psnr[frame], number(&clip["psnr_per_frame_db"][frame]));
        worst_lpips.see(&what, found_lpips[frame], number(&clip["lpips_alex_per_frame"][frame]));
    }
    let mean = found_psnr.iter().sum::<f64>() / count as f64;
    worst_psnr.see("the clip", mean, number(&clip["mean_of_frame_psnr_db"]));

    // A frame's distance does not depend on its neighbours in the batch.
    let alone = |all: &Tensor| lpips.features(&signed(&all.get(3)?));
    let alone = lpips.distance(&alone(&a)?, &alone(&b)?)?[0];
    assert!((alone - found_lpips[3]).abs() < 1e-7, "{alone} {}", found_lpips[3]);
    Ok(())
}

/// Convolutions from the formula in values.json: two programs agree on them without exchanging a file.
fn hash_weights() -> Vec<u8> {
    const SHAPES: [(usize, [usize; 4]); 5] = [
        (0, [64, 3, 11, 11]),
        (3, [192, 64, 5, 5]),
        (6, [384, 192, 3, 3]),
        (8, [256, 384, 3, 3]),
        (10, [256, 256, 3, 3]),
    ];
    let mut tensors: Vec<(String, Vec<usize>, Vec<u8>)> = Vec::new();
    for (layer, (index, shape)) in SHAPES.into_iter().enumerate() {
        let scale = 2.0 * (3.0 / (shape[1] * shape[2] * shape[3]) as f64).sqrt();
        let weight = (0..shape.iter().product::<usize>() as u32).flat_map(|i| {
            let mut h = i.wrapping_mul(2_654_435_761) ^ (layer as u32).wrapping_mul(0x9E37_79B9);
            h ^= h >> 16;
            h = h.wrapping_mul(0x85EB_CA6B);
            h ^= h >> 13;
            h = h.wrapping_mul(0xC2B2_AE35);
            h ^= h >> 16;
            (((f64::from(h) / 4_294_967_296.0 - 0.5) * scale) as f32).to_le_bytes()
        });
        tensors.push((format!("features.{index}.weight"), shape.to_vec(), weight.collect()));
        tensors.push((format!("features.{index}.bias"), vec![shape[0]], vec![0; 4 * shape[0]]));
    }
    serialise(&tensors)
}

fn serialise(tensors: &[(String, Vec<usize>, Vec<u8>)]) -> Vec<u8> {
    let views = tensors.iter().map(|(name, shape, bytes)| {
        (name, TensorView::new(safetensors::Dtype::F32, shape.clone(), bytes).expect("a view"))
    });
    safetensors::serialize(views, None).expect("safetensors")
}

fn linear_weights(value: impl Fn(usize) -> f32) -> Vec<u8> {
    let tensors: Vec<_> = [64, 192, 384, 256, 256]
        .into_iter()
        .enumerate()
        .map(|(tap, channels)| {
            let bytes = value(channels).to_le_bytes().repeat(channels);
            (format!("lin{tap}.model.1.weight"), vec![1, channels, 1, 1], bytes)
        })
        .collect();
    serialise(&tensors)
}

#[test]
fn the_network_is_right_without_its_trained_weights() -> Result<()> {
    let linear = include_bytes!("../src/eval/weights/lpips_lin_alex_v0.1.safetensors");
    let lpips = Lpips::from_safetensors(&hash_weights(), linear)?;
    let mut worst = Worst("LPIPS share of a tap, hash weights", 0.0, 1e-7);
    for pair in values()["pairs"].as_array().expect("pairs") {
        let features = |entry: &Value| lpips.features(&signed(&picture(entry)));
        let found = lpips.tap_distances(&features(&pair["a"])?, &features(&pair["b"])?)?[0];
        let expected = pair["lpips"]["alex_hash_weights"]["per_layer"].as_array().expect("taps");
        for (tap, (&found, expected)) in found.iter().zip(expected).enumerate() {
            worst.see(&format!("{}, tap {tap}", pair["name"]), found, number(expected));
        }
    }
    Ok(())
}

#[test]
fn lpips_refuses_what_it_cannot_measure() -> Result<()> {
    let lpips = Lpips::new()?;
    let code = |tensor: &Tensor| lpips.features(tensor).err().expect("refused").code;
    let good = Tensor::zeros((1, 3, 31, 31), DType::F32, &Device::Cpu)?;
    let features = lpips.features(&good)?;
    assert_eq!(lpips.distance(&features, &features)?, [0.0]);
    for (height, width) in [(30, 128), (128, 30), (1, 1)] {
        assert_eq!(code(&Tensor::zeros((1, 3, height, width), DType::F32, &Device::Cpu)?), "picture_too_small");
    }
    for dtype in [DType::BF16, DType::F16, DType::F64, DType::U8] {
        assert_eq!(code(&good.to_dtype(dtype)?), "metric_dtype");
    }
    assert_eq!(code(&good.affine(1.0, 1.5)?), "pixel_range");
    assert_eq!(code(&good.affine(1.0, f64::NAN)?), "not_finite");
    let other = lpips.features(&Tensor::zeros((1, 3, 31, 32), DType::F32, &Device::Cpu)?)?;
    assert_eq!(lpips.distance(&features, &other).expect_err("refused").code, "size_mismatch");
    Ok(())
}

#[test]
fn broken_weights_are_refused() {
    let linear = linear_weights(|_| 1.0);
    let code = |backbone: &[u8], linear: &[u8]| Lpips::from_safetensors(backbone, linear).err().expect("refused").code;
    assert_eq!(code(b"nothing", &linear), "bad_weights");
    assert_eq!(code(&linear, &linear), "bad_weights");
    assert_eq!(code(&hash_weights(), &hash_weights()), "bad_weights");
}

#[test]
fn the_identity_names_the_weights_and_the_size() -> Result<()> {
    let identity = Lpips::new()?.identity(128, 96);
    assert_eq!((identity.backbone.as_str(), identity.input_size), ("alexnet", [128, 96]));
    let other = Lpips::from_safetensors(&hash_weights(), &linear_weights(|_| 1.0))?.identity(128, 96);
    assert!(identity.backbone_sha256.len() == 64 && identity.backbone_sha256 != other.backbone_sha256);
    assert_ne!(identity.linear_sha256, other.linear_sha256);
    Ok(())
}

#[test]
fn two_pictures_on_disk_score_the_same_values() -> Result<()> {
    let values = values();
    let pair = &values["pairs"][0];
    let path = |side: &str| data(pair[side].as_str().expect("a path"));
    let found = compare(&path("a"), &path("b"))?;
    Worst("compare PSNR", 0.0, PSNR_TOLERANCE_DB).see("pair", found.mean.psnr_db, number(&pair["fp32"]["psnr_db"]));
    let expected = number(&pair["fp32"]["ssim_skimage_gaussian"]);
    Worst("compare SSIM", 0.0, SSIM_TOLERANCE).see("pair", found.mean.ssim, expected);
    let expected = number(&pair["lpips"]["alex"]["total"]);
    Worst("compare LPIPS", 0.0, LPIPS_TOLERANCE).see("pair", found.mean.lpips, expected);
    let text = found.render_text();
    assert!(text.contains("19.7400") && text.contains("0.861245") && text.contains("0.056843"), "{text}");
    Ok(())
}
