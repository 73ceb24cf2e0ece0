//! The check of a token cache as its command: what is whole passes, and each way in which it can lie has its own code.

mod planted;
mod recipes;

use half::bf16;
use lbva_tui::data::sha256_hex;
use planted::{Broken, TOKENS};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;
use std::collections::HashMap;
use std::path::Path;
use std::process::Command;

fn tokens(arguments: &[&str]) -> (i32, Value) {
    let output = Command::new(env!("CARGO_BIN_EXE_lbva-tui"))
        .args(["--json", "data", "tokens"])
        .args(arguments)
        .output()
        .unwrap();
    let document = serde_json::from_slice(&output.stdout).unwrap_or(Value::Null);
    (output.status.code().unwrap(), document)
}

fn code(document: &Value) -> Option<&str> {
    document["problems"][0]["code"].as_str()
}

/// Rewrites every token of one episode's file: `change` gets the source view and the number.
fn rewrite(path: &Path, views: usize, change: impl Fn(usize, f32) -> f32) {
    let bytes = std::fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let (tokens, frames) = (file.tensor("tokens").unwrap(), file.tensor("frames").unwrap());
    let row = tokens.shape()[1] * tokens.shape()[2];
    let number = |(at, pair): (usize, &[u8])| {
        let value = bf16::from_le_bytes([pair[0], pair[1]]).to_f32();
        bf16::from_f32(change(at % row / (row / views), value)).to_le_bytes()
    };
    let data: Vec<u8> = tokens.data().chunks_exact(2).enumerate().flat_map(number).collect();
    let tensors = HashMap::from([
        ("tokens", TensorView::new(Dtype::BF16, tokens.shape().to_vec(), &data).unwrap()),
        ("frames", TensorView::new(Dtype::I64, frames.shape().to_vec(), frames.data()).unwrap()),
    ]);
    std::fs::write(path, safetensors::serialize(tensors, None).unwrap()).unwrap();
}

fn every_file(dataset: &Broken) -> Vec<std::path::PathBuf> {
    let folder = dataset.path("geometry/chunk-000");
    std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect()
}

/// Writes the checksum that belongs to the files, as an encoder does at its end.
fn sign(dataset: &Broken) {
    let mut files = every_file(dataset);
    files.sort();
    let all: Vec<u8> = files.iter().flat_map(|file| std::fs::read(file).unwrap()).collect();
    let mut info: Value = serde_json::from_slice(&dataset.read("geometry/info.json")).unwrap();
    info["sha256_of_files"] = sha256_hex(&all).into();
    dataset.write("geometry/info.json", info.to_string());
}

#[test]
fn a_whole_cache_is_described_by_its_content() {
    let (one, other) = (Broken::new(), Broken::new());
    let (exit, document) = tokens(&[one.folder.path().to_str().unwrap()]);
    assert_eq!((exit, document["problems"].as_array().map(Vec::len)), (0, Some(0)));
    assert!(document["episodes"] == 4 && document["frames"].as_u64().unwrap() > 4, "{document}");
    let elsewhere = tokens(&[other.folder.path().to_str().unwrap()]).1;
    assert_eq!(document["sha256"], elsewhere["sha256"], "wherever it lies");
    rewrite(&other.path(TOKENS), 2, |_, value| -value);
    let (exit, changed) = tokens(&[other.folder.path().to_str().unwrap()]);
    assert_ne!(document["sha256"], changed["sha256"]);
    // Finite and of the right shape, and yet not what the encoder wrote.
    assert_eq!((exit, code(&changed)), (65, Some("token_checksum")));
    sign(&other);
    assert_eq!(tokens(&[other.folder.path().to_str().unwrap()]).0, 0);
    std::fs::remove_file(other.path(TOKENS)).unwrap();
    assert_eq!(code(&tokens(&[other.folder.path().to_str().unwrap()]).1), Some("token_checksum"), "a file is lost");
}

/// What a token's meaning depends on, besides its episode and frame: none of it may differ unseen.
#[test]
fn tokens_are_compared_only_if_they_were_made_alike() {
    let cache = Broken::new();
    let path = cache.folder.path().to_str().unwrap();
    let info: Value = serde_json::from_slice(&cache.read("geometry/info.json")).unwrap();
    let swapped = serde_json::json!([info["views"][1], info["views"][0]]);
    for (field, value) in [
        ("encoder", serde_json::json!("simdepth-v2")),
        ("weights_sha256", serde_json::json!("0".repeat(64))),
        ("input_size", serde_json::json!([128, 160])),
        ("views", swapped),
        ("frame_stride", serde_json::json!(8)),
    ] {
        let other = Broken::new();
        let mut changed = info.clone();
        changed[field] = value;
        other.write("geometry/info.json", changed.to_string());
        let (exit, document) = tokens(&[path, "--repeat", other.folder.path().to_str().unwrap()]);
        assert_eq!((exit, code(&document)), (78, Some("tokens_not_comparable")), "{field}");
        assert!(document["problems"][0]["what"].as_str().unwrap().contains(&format!("{field} is ")), "{document}");
    }
    for (field, value) in [
        ("weights_sha256", serde_json::json!("ABC")),
        ("input_size", serde_json::json!([0, 128])),
        ("sha256_of_files", serde_json::json!("")),
        ("sha256_of_files", Value::Null),
    ] {
        let other = Broken::new();
        let mut changed = info.clone();
        changed[field] = value;
        other.write("geometry/info.json", changed.to_string());
        assert_eq!(tokens(&[other.folder.path().to_str().unwrap()]).0, 65, "{field}");
    }
    for field in ["weights_sha256", "input_size", "sha256_of_files"] {
        let other = Broken::new();
        let mut changed = info.clone();
        changed.as_object_mut().unwrap().remove(field);
        other.write("geometry/info.json", changed.to_string());
        assert_eq!(tokens(&[other.folder.path().to_str().unwrap()]).0, 65, "{field} is absent");
    }
}

#[test]
fn what_is_not_finite_or_damaged_is_refused_with_its_file() {
    let broken = Broken::new();
    rewrite(&broken.path(TOKENS), 2, |view, value| if view == 1 { f32::INFINITY } else { value });
    std::fs::write(broken.path("geometry/chunk-000/episode_000000.safetensors"), "no tensors").unwrap();
    let (exit, document) = tokens(&[broken.folder.path().to_str().unwrap()]);
    assert_eq!(exit, 65);
    let codes: Vec<&str> =
        document["problems"].as_array().unwrap().iter().map(|problem| problem["code"].as_str().unwrap()).collect();
    assert_eq!(codes, ["not_openable", "token_nonfinite"], "all of them: {document}");
    assert!(document["problems"][1]["place"].as_str().unwrap().ends_with("episode_000002.safetensors"));
    std::fs::remove_dir_all(broken.path("geometry")).unwrap();
    assert_eq!(tokens(&[broken.folder.path().to_str().unwrap()]).0, 65);
}

#[test]
fn encoding_again_must_give_the_same_bits_and_more_frames_are_no_fault() {
    let (cache, again) = (Broken::new(), Broken::new());
    let (path, other) = (cache.folder.path().to_str().unwrap(), again.folder.path().to_str().unwrap());
    let (exit, document) = tokens(&[path, "--repeat", other]);
    assert_eq!((exit, &document["repeat"]["largest"]), (0, &Value::from(0.0)));
    let frames = document["repeat"]["frames"].as_u64().unwrap();
    // A superset is legal, and so is a subset: what both have must be equal.
    std::fs::remove_file(again.path("geometry/chunk-000/episode_000000.safetensors")).unwrap();
    let (exit, document) = tokens(&[path, "--repeat", other]);
    assert!(exit == 0 && document["repeat"]["frames"].as_u64().unwrap() < frames, "{document}");
    // The smallest difference that bf16 can show.
    rewrite(&again.path(TOKENS), 2, |_, value| f32::from_bits(value.to_bits() ^ 0x1_0000));
    let (exit, document) = tokens(&[path, "--repeat", other]);
    assert_eq!((exit, code(&document)), (65, Some("tokens_not_repeatable")));
}

#[test]
fn replacing_one_view_must_change_the_tokens_of_the_others() {
    let (cache, joint, apart) = (Broken::new(), Broken::new(), Broken::new());
    let info: Value = serde_json::from_slice(&cache.read("geometry/info.json")).unwrap();
    let views = info["views"].as_array().unwrap().len();
    assert!(views >= 2, "{info}");
    every_file(&joint)
        .iter()
        .for_each(|file| rewrite(file, views, |view, value| if view == 0 { -value } else { value * 1.25 }));
    every_file(&apart)
        .iter()
        .for_each(|file| rewrite(file, views, |view, value| if view == 0 { -value } else { value }));
    let path = cache.folder.path().to_str().unwrap();
    let replaced = |dataset: &Broken, view: &str| {
        tokens(&[path, "--replaced", &format!("{view}={}", dataset.folder.path().display())])
    };
    let first = info["views"][0].as_str().unwrap();
    let (exit, document) = replaced(&joint, first);
    let change = document["coupling"]["change"][0][1].as_f64().unwrap();
    assert!(exit == 0 && (change - 0.25).abs() < 0.01, "{document}");
    let (exit, document) = replaced(&apart, first);
    assert_eq!((exit, code(&document)), (65, Some("tokens_not_joint")));
    assert!(document["problems"][0]["what"].as_str().unwrap().contains("encoded apart"), "{document}");
    assert_eq!(replaced(&joint, "no_such_view").0, 2);
    assert_eq!(tokens(&[path, "--replaced", "nothing"]).0, 2);
}
