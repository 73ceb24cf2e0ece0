//! Decoded pictures against FFmpeg's, by MD5 of their YUV planes.

use lbva_tui::data::video::{Picture, VideoFile};
use md5::{Digest, Md5};
use serde_json::Value;
use std::path::{Path, PathBuf};

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data")
}

fn references(folder: &str) -> Vec<(PathBuf, Value)> {
    let folder = fixtures().join(folder);
    let text = std::fs::read_to_string(folder.join("decode_reference.json")).unwrap();
    let videos: serde_json::Map<String, Value> = serde_json::from_str(&text).unwrap();
    videos.into_iter().map(|(name, reference)| (folder.join(name), reference)).collect()
}

fn md5(picture: &Picture) -> String {
    let mut hasher = Md5::new();
    for plane in [&picture.y, &picture.u, &picture.v] {
        hasher.update(plane);
    }
    hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn every_reference_picture_is_bit_exact_alone_and_in_sequence() {
    let videos = references("robosuite_tiny_v21");
    assert_eq!(videos.len(), 12);
    for (path, reference) in videos {
        let mut video = VideoFile::open(&path).unwrap();
        let frames = reference["frames"].as_u64().unwrap() as usize;
        assert_eq!(video.frame_count(), frames, "{}", path.display());
        assert_eq!(video.size(), (128, 128));
        let all = video.read_frames(&(0..frames).collect::<Vec<_>>()).unwrap();
        for (frame, expected) in reference["yuv420p_md5"].as_object().unwrap() {
            let frame: usize = frame.parse().unwrap();
            assert_eq!(md5(&all[frame]), expected.as_str().unwrap(), "{} frame {frame}", path.display());
            assert_eq!(video.read_frames(&[frame]).unwrap(), [all[frame].clone()], "{} frame {frame}", path.display());
        }
    }
}

#[test]
fn the_shipped_episodes_are_bit_exact() {
    let videos = references("../../experiments/demo/data/robosuite_lift");
    assert_eq!(videos.len(), 96);
    for (path, reference) in videos {
        let mut video = VideoFile::open(&path).unwrap();
        assert_eq!(video.frame_count() as u64, reference["frames"].as_u64().unwrap(), "{}", path.display());
        for (frame, expected) in reference["yuv420p_md5"].as_object().unwrap() {
            let picture = video.read_frames(&[frame.parse().unwrap()]).unwrap().remove(0);
            assert_eq!(md5(&picture), expected.as_str().unwrap(), "{} frame {frame}", path.display());
        }
    }
}

/// swscale's quick path rounds down, by 1.4 levels on average; a wrong matrix or range is off by many.
#[test]
fn mean_colours_agree_with_swscale() {
    for (path, reference) in references("robosuite_tiny_v21") {
        let mut video = VideoFile::open(&path).unwrap();
        for (frame, expected) in reference["mean_rgb"].as_object().unwrap() {
            let picture = video.read_frames(&[frame.parse().unwrap()]).unwrap().remove(0);
            let mut rgb = Vec::new();
            picture.append_rgb_planes(&mut rgb);
            for (plane, expected) in rgb.chunks(128 * 128).zip(expected.as_array().unwrap()) {
                let mean = plane.iter().map(|value| f64::from(*value)).sum::<f64>() / plane.len() as f64;
                let difference = (mean - expected.as_f64().unwrap()).abs();
                assert!(difference < 2.0, "{} frame {frame}: mean differs by {difference}", path.display());
            }
        }
    }
}

#[test]
fn a_window_is_the_same_whatever_was_decoded_before_it() {
    let (path, _) = references("robosuite_tiny_v21").remove(2);
    let mut video = VideoFile::open(&path).unwrap();
    let all = video.read_frames(&(0..video.frame_count()).collect::<Vec<_>>()).unwrap();
    for start in [0, 16, 19, 20, 21, 32] {
        let window: Vec<usize> = (0..9).map(|k| start + 4 * k).collect();
        let pictures = video.read_frames(&window).unwrap();
        for (frame, picture) in window.iter().zip(pictures) {
            assert!(picture == all[*frame], "frame {frame} of the window at {start}");
        }
    }
}

/// openh264 errs by a few levels in some B-frames, so the test is on count, order and closeness.
#[test]
fn b_frames_come_out_complete_and_in_order() {
    let (path, reference) = references("bframes").remove(0);
    let mut video = VideoFile::open(&path).unwrap();
    let frames = reference["frames"].as_u64().unwrap() as usize;
    assert_eq!(video.frame_count(), frames);
    let all = video.read_frames(&(0..frames).collect::<Vec<_>>()).unwrap();
    assert_eq!(all.len(), frames);

    // The same episode without B-frames is the order's witness: each picture's nearest neighbour has its own number.
    let plain =
        fixtures().join("robosuite_tiny_v21/videos/chunk-000/observation.images.eye_in_hand_rgb/episode_000000.mp4");
    let plain = VideoFile::open(&plain).unwrap().read_frames(&(0..frames).collect::<Vec<_>>()).unwrap();
    let distance =
        |a: &Picture, b: &Picture| -> u64 { a.y.iter().zip(&b.y).map(|(a, b)| u64::from(a.abs_diff(*b)).pow(2)).sum() };
    let moving = (1..frames - 1).filter(|frame| distance(&plain[*frame], &plain[frame + 1]) > 200_000);
    let mut checked = 0;
    for frame in moving {
        let nearest = (frame - 1..=frame + 1).min_by_key(|other| distance(&all[frame], &plain[*other])).unwrap();
        assert_eq!(nearest, frame);
        checked += 1;
    }
    assert!(checked > frames / 3, "only {checked} frames move enough to tell");
    for (frame, picture) in all.iter().enumerate() {
        let alone = video.read_frames(&[frame]).unwrap();
        assert!(alone[0] == *picture, "frame {frame} alone differs from the frame in sequence");
    }
}
