//! Clips of a good dataset: which there are, what is in them, and what identifies them.

mod recipes;

use lbva_tui::data::{ClipId, Dataset, info};
use std::path::Path;

fn tiny() -> std::path::PathBuf {
    recipes::repository("tests/data/robosuite_tiny_v21")
}

fn open(geometry: bool) -> Dataset {
    Dataset::open(&recipes::data(&tiny(), &[1]), &recipes::model(geometry)).unwrap()
}

/// Copies a folder's files, folder by folder.
fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy(&entry.path(), &target);
        } else {
            std::fs::copy(entry.path(), target).unwrap();
        }
    }
}

#[test]
fn clips_start_at_multiples_of_the_stride_while_the_last_frame_exists() {
    let dataset = open(false);
    let names = |clips: &[ClipId]| clips.iter().map(ClipId::to_string).collect::<Vec<_>>();
    // 71 frames: the last start is 71 - 33 = 38 or less; 134: 101; 111: 78.
    let mut expected = Vec::new();
    for (episode, starts) in [(0, 3), (2, 7), (3, 5)] {
        expected.extend((0..starts).map(|k| format!("episode_{episode:06}@{}", 16 * k)));
    }
    assert_eq!(names(dataset.train()), expected);
    assert_eq!(names(dataset.validation()), ["episode_000001@0", "episode_000001@16", "episode_000001@32"]);
}

#[test]
fn the_last_window_ends_on_the_last_frame() {
    let mut config = recipes::data(&tiny(), &[1]);
    // Episode 0 has 71 frames: with 10 between two frames of 8 intervals, 70 is the last.
    config.views.truncate(1);
    config.frames = 5;
    config.frame_skip = 14;
    config.clip_stride = 14;
    let mut model = recipes::model(false);
    model.num_views = 1;
    model.action_num = 7;
    let dataset = Dataset::open(&config, &model).unwrap();
    let last = dataset.train().iter().rfind(|clip| clip.episode == 0).unwrap();
    assert_eq!(*last, ClipId { episode: 0, start: 14 });
    let sample = dataset.load(last).unwrap();
    assert_eq!(sample.frame_count(), 5);
    // 4 intervals of 7 actions, each the last of two rows.
    assert_eq!(sample.action.len(), 28 * 14);
    assert_eq!(dataset.load(&ClipId { episode: 0, start: 15 }).unwrap_err().code, "unknown_clip");
}

#[test]
fn numbers_are_those_of_the_parquet_file_normalised() {
    let dataset = open(true);
    let clip = ClipId { episode: 2, start: 16 };
    let sample = dataset.load(&clip).unwrap();
    assert_eq!(sample.prompt, "stack the red cube on top of the green cube");
    assert_eq!(sample.proprio.len(), 9 * 16);
    assert_eq!(sample.action.len(), 32 * 14);
    let close = |got: f64, expected: f64| assert!((got - expected).abs() < 2e-6, "{got}, expected {expected}");

    // Quantiles of episodes 0, 2, 3 by numpy.
    let statistics = dataset.statistics();
    for (axis, (q01, q99)) in
        [(-0.09204603, 0.179271), (-0.15793893, 0.07266659), (0.82114145, 1.0379123)].into_iter().enumerate()
    {
        close(statistics.position[axis].q01, q01);
        close(statistics.position[axis].q99, q99);
    }
    close(statistics.gripper.q01, 0.01654239);
    close(statistics.gripper.q99, 0.0798216);
    close(statistics.action_position[0].q99, 0.85563194);
    close(statistics.action_axis_angle[2].q01, -0.49887024);

    // Frame 36 of the episode is frame 5 of the clip.
    let row = &sample.proprio[5 * 16..6 * 16];
    let metres = statistics.position_metres([f64::from(row[0]), f64::from(row[1]), f64::from(row[2])]);
    for (got, expected) in metres.into_iter().zip([0.10082247, -0.00553861, 0.85055155]) {
        close(got, expected);
    }
    for (got, expected) in row[3..7].iter().zip([0.05377527, 0.8370646, 0.54311067, 0.03823554]) {
        close(f64::from(*got), expected);
    }
    close(statistics.gripper.restore(f64::from(row[7])), 0.02655432 + 0.02657836);
    assert_eq!(row[8..], [0.0; 8]);
    assert_eq!(sample.proprio_mask[..16], [1., 1., 1., 1., 1., 1., 1., 1., 0., 0., 0., 0., 0., 0., 0., 0.]);

    // Row 16 is action 0 of the clip, row 47 its last.
    for (index, row) in [
        (0, [0.8557256, -0.18192455, -0.19450347, 0.02337852, 0.04203175, -0.01840481, -1.0]),
        (31, [-0.62598473, 0.31624323, 0.48974240, -0.0261329, -0.026651165, -0.00037461999, -1.0]),
    ] {
        let ranges = statistics.action_position.iter().chain(&statistics.action_axis_angle);
        let got = &sample.action[index * 14..];
        for ((got, expected), range) in got.iter().zip(row).zip(ranges) {
            close(range.restore(f64::from(*got)), expected);
        }
        assert_eq!(got[6], -1.0);
        assert_eq!(got[7..14], [0.0; 7]);
    }
    assert_eq!(sample.action_mask[14..28], [1., 1., 1., 1., 1., 1., 1., 0., 0., 0., 0., 0., 0., 0.]);
}

#[test]
fn quaternions_have_w_not_negative_and_unit_length() {
    let dataset = open(false);
    for clip in dataset.train() {
        for row in dataset.load_without_frames(clip).unwrap().proprio.chunks(16) {
            assert!(row[3] >= 0.0);
            let norm = row[3..7].iter().map(|value| value * value).sum::<f32>();
            assert!((norm - 1.0).abs() < 1e-5);
        }
    }
}

#[test]
fn pictures_are_the_frames_of_the_window() {
    let dataset = open(false);
    let clip = ClipId { episode: 2, start: 32 };
    let sample = dataset.load(&clip).unwrap();
    assert_eq!((sample.frames.len(), sample.height, sample.width), (3, 128, 128));
    let plane = 3 * 128 * 128;
    let path = tiny().join("videos/chunk-000").join(recipes::WRIST).join("episode_000002.mp4");
    let mut video = lbva_tui::data::video::VideoFile::open(&path).unwrap();
    for k in 0..9 {
        let mut rgb = Vec::new();
        video.read_frames(&[32 + 4 * k]).unwrap()[0].append_rgb_planes(&mut rgb);
        assert!(sample.frames[2][k * plane..(k + 1) * plane] == rgb, "frame {k}");
    }
    // The codec's layout: channel first, then time.
    let pixels = sample.video(2);
    assert_eq!(
        pixels[(9 + 4) * 128 * 128 + 77],
        f32::from(sample.frames[2][(4 * 3 + 1) * 128 * 128 + 77]) / 127.5 - 1.0
    );
}

#[test]
fn geometry_tokens_come_only_with_the_branch_and_are_of_the_first_frame() {
    let clip = ClipId { episode: 2, start: 48 };
    assert!(open(false).load(&clip).unwrap().geometry.is_none());
    let tokens = open(true).load(&clip).unwrap().geometry.unwrap();
    let bytes = std::fs::read(tiny().join("geometry/chunk-000/episode_000002.safetensors")).unwrap();
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let row: Vec<f32> = tensors.tensor("tokens").unwrap().data()[3 * 128 * 32 * 2..4 * 128 * 32 * 2]
        .chunks(2)
        .map(|pair| half::bf16::from_le_bytes([pair[0], pair[1]]).to_f32())
        .collect();
    assert_eq!(tokens, row);
}

#[test]
fn every_clip_of_the_shipped_dataset_loads_in_threads() {
    let root = recipes::repository("experiments/demo/data/robosuite_lift");
    let dataset = Dataset::open(&recipes::data(&root, &[7, 11, 14, 16, 19, 24]), &recipes::model(true)).unwrap();
    assert_eq!(dataset.prompts().len(), 3);
    let clips: Vec<ClipId> = dataset.train().iter().chain(dataset.validation()).step_by(7).copied().collect();
    std::thread::scope(|scope| {
        for half in clips.chunks(clips.len().div_ceil(2)) {
            let dataset = &dataset;
            scope.spawn(move || {
                for clip in half {
                    let sample = dataset.load(clip).unwrap();
                    assert!(sample.frames.iter().all(|view| view.len() == 9 * 3 * 128 * 128));
                }
            });
        }
    });
}

#[test]
fn the_identity_is_of_contents_and_the_same_for_both_arms() {
    let folder = tempfile::tempdir().unwrap();
    copy(&tiny(), folder.path());
    let config = recipes::data(folder.path(), &[1]);
    let identity =
        |config, geometry| Dataset::open(config, &recipes::model(geometry)).unwrap().identity(&|_, _| Ok(())).unwrap();
    let before = identity(&config, true);
    assert_eq!(before.len(), 64);
    assert_eq!(before, identity(&config, false), "the arms of the ablation have the same data");
    assert_eq!(before, open(true).identity(&|_, _| Ok(())).unwrap(), "the place of a dataset does not count");

    std::fs::write(folder.path().join("README.md"), "changed").unwrap();
    assert_eq!(before, identity(&config, true));
    for part in [
        "videos/chunk-000/observation.images.sideview_rgb/episode_000003.mp4",
        "data/chunk-000/episode_000001.parquet",
        "geometry/chunk-000/episode_000002.safetensors",
    ] {
        let path = folder.path().join(part);
        let whole = std::fs::read(&path).unwrap();
        let mut changed = whole.clone();
        // A byte in the middle of pictures, pages and tokens; for parquet, the footer still parses.
        changed[whole.len() / 4] ^= 1;
        // Opened before the change: the identity reads contents, not what was parsed.
        let dataset = Dataset::open(&config, &recipes::model(true)).unwrap();
        std::fs::write(&path, &changed).unwrap();
        assert_ne!(before, dataset.identity(&|_, _| Ok(())).unwrap(), "{part}");
        std::fs::write(&path, &whole).unwrap();
    }
    let other_split = recipes::data(folder.path(), &[2]);
    assert_ne!(before, identity(&other_split, true));
    let mut other_views = config.clone();
    other_views.views.reverse();
    assert_ne!(before, identity(&other_views, true));
}

#[test]
fn the_picture_key_changes_with_window_and_file_only() {
    let folder = tempfile::tempdir().unwrap();
    copy(&tiny(), folder.path());
    let open = || Dataset::open(&recipes::data(folder.path(), &[1]), &recipes::model(false)).unwrap();
    let dataset = open();
    let (first, second) = (dataset.train()[0], dataset.train()[1]);
    let key = dataset.picture_key(&first).unwrap();
    assert_ne!(key, dataset.picture_key(&second).unwrap());
    // Another split: the same pictures.
    let other = Dataset::open(&recipes::data(folder.path(), &[2]), &recipes::model(true)).unwrap();
    assert_eq!(key, other.picture_key(&first).unwrap());
    let path = folder.path().join("videos/chunk-000").join(recipes::WRIST).join("episode_000000.mp4");
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[1000] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    assert_ne!(key, open().picture_key(&first).unwrap());
}

#[test]
fn a_dataset_is_summarised() {
    let summary = info::summarise(&recipes::data(&tiny(), &[1]), &recipes::model(true), &|_, _| Ok(())).unwrap();
    assert_eq!((summary.dataset.episodes, summary.dataset.frames), (4, 391));
    assert_eq!(summary.dataset.lengths, [71, 111, 134]);
    assert_eq!(summary.dataset.tasks["lift the red cube off the table"], 2);
    assert_eq!(summary.dataset.views.len(), 3);
    assert_eq!(summary.dataset.geometry.as_ref().unwrap().encoder, "simdepth-v1");
    assert_eq!((summary.train.episodes, summary.train.clips), (3, 15));
    assert_eq!((summary.validation.episodes, summary.validation.clips), (1, 3));
    assert!(summary.too_short.is_empty());
    let json = serde_json::to_value(&summary).unwrap();
    assert_eq!(json["identity"].as_str().unwrap(), open(true).identity(&|_, _| Ok(())).unwrap());
}
