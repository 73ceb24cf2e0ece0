//! `data validate` from outside: each planted defect under its reason, the same verdict as the loader's whatever is
//! broken, and the same files however a pass was run.

mod planted;
mod recipes;

use assert_cmd::Command;
use lbva_tui::codec::LinearCodec;
use lbva_tui::config::{EpisodeDataConfig, LatentSource, SampleUnit, TextConfig};
use lbva_tui::data::validate::{Recording, Report, Source, Tally, validate};
use lbva_tui::data::{ClipId, Dataset, EpisodeSet};
use lbva_tui::{Error, Exit, Result};
use planted::{Broken, LFS, PARQUET, TOKENS, VIDEO, faststart, find_box, parquet, parquet_at, replace_bytes};
use proptest::prelude::*;
use serde_json::Value;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

const EPISODES: &str = "meta/episodes.jsonl";
const INFO: &str = "meta/info.json";
const FRONT: &str = "observation.images.agentview_rgb";

fn silent(_: u64, _: u64) -> Result<()> {
    Ok(())
}

/// Lines of a file of JSON lines.
fn lines(path: &Path) -> Vec<Value> {
    std::fs::read_to_string(path).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// One pass into a folder of its own.
fn pass(source: &impl Source) -> (Report, tempfile::TempDir) {
    let out = tempfile::tempdir().unwrap();
    (validate(source, out.path(), &silent).unwrap(), out)
}

/// Sample -> reason, of the rejects' file.
fn rejects(report: &Report) -> BTreeMap<String, String> {
    let text = |line: &Value, field: &str| line[field].as_str().unwrap().to_owned();
    lines(&report.rejects_file).iter().map(|line| (text(line, "sample"), text(line, "reason"))).collect()
}

impl Broken {
    fn dataset(&self) -> Dataset {
        Dataset::open_with_faults(&self.config, &self.model).unwrap()
    }

    fn validated(&self) -> (Report, BTreeMap<String, String>) {
        let (report, _out) = pass(&self.dataset());
        let rejected = rejects(&report);
        (report, rejected)
    }
}

fn clips(episode: usize, starts: &[usize]) -> Vec<String> {
    starts.iter().map(|start| ClipId { episode, start: *start }.to_string()).collect()
}

fn all_of_episode_2() -> Vec<String> {
    clips(2, &[0, 16, 32, 48, 64, 80, 96])
}

fn codes(tallies: &[Tally]) -> Vec<(&str, usize)> {
    tallies.iter().map(|tally| (tally.code.as_str(), tally.count)).collect()
}

#[test]
fn a_sound_dataset_is_clean() {
    let broken = Broken::new();
    let (report, out) = pass(&broken.dataset());
    assert_eq!((report.samples, report.clean, report.rejects, report.known), (18, 18, 0, 0));
    assert_eq!((codes(&report.reasons), codes(&report.problems), codes(&report.warnings)), (vec![], vec![], vec![]));
    let clean = lines(&out.path().join("clean.jsonl"));
    // By episode, then by start, whichever side; episode 1 is held out.
    let named: Vec<String> = clean.iter().map(|line| line["sample"].as_str().unwrap().to_owned()).collect();
    let expected = [clips(0, &[0, 16, 32]), clips(1, &[0, 16, 32]), all_of_episode_2(), clips(3, &[0, 16, 32, 48, 64])];
    assert_eq!(named, expected.concat());
    assert!(clean.iter().all(|line| {
        let held_out = line["sample"].as_str().unwrap().starts_with("episode_000001");
        line["side"] == if held_out { "validation" } else { "train" }
    }));
    let bytes = std::fs::read(out.path().join("clean.jsonl")).unwrap();
    assert_eq!(report.clean_sha256, lbva_tui::data::sha256_hex(&bytes));
    assert_eq!(std::fs::read(out.path().join("rejects.jsonl")).unwrap(), b"");
}

fn half(bytes: Vec<u8>) -> Vec<u8> {
    bytes[..bytes.len() / 2].to_vec()
}

/// Timestamps at 20 fps that skip some seconds after row 39.
fn skipping(seconds: f64) -> Vec<f64> {
    (0..134).map(|row| f64::from(row) / 20.0 + if row < 40 { 0.0 } else { seconds }).collect()
}

/// The same file of another episode.
fn other(part: &str, episode: &str) -> String {
    part.replace("000002", episode)
}

/// Defects that reject every clip of episode 2 and nothing else, with their reason.
#[test]
fn each_defect_of_an_episode_has_its_reason() {
    type Plant<'a> = &'a dyn Fn(&Broken);
    let defects: Vec<(&str, &str, Plant<'_>)> = vec![
        ("missing_wrist_mp4", "file_missing", &|b| std::fs::remove_file(b.path(VIDEO)).unwrap()),
        ("missing_parquet", "file_missing", &|b| std::fs::remove_file(b.path(PARQUET)).unwrap()),
        ("zero_byte_mp4", "not_openable", &|b| b.write(VIDEO, "")),
        ("truncated_mp4", "not_openable", &|b| b.write(VIDEO, half(b.read(VIDEO)))),
        ("not_a_video", "not_openable", &|b| b.write(VIDEO, "a text file")),
        ("lfs_pointer", "lfs_pointer", &|b| b.write(VIDEO, LFS)),
        ("lfs_pointer for rows", "lfs_pointer", &|b| b.write(PARQUET, LFS)),
        ("lfs_pointer for tokens", "lfs_pointer", &|b| b.write(TOKENS, LFS)),
        ("fewer_frames", "too_short", &|b| b.write(VIDEO, b.read(&other(VIDEO, "000000")))),
        ("hevc_mp4", "wrong_codec", &|b| b.write(VIDEO, replace_bytes(&b.read(VIDEO), b"avc1", b"hvc1"))),
        ("wrong_resolution", "wrong_size", &|b| {
            let mut small = b.read(VIDEO);
            let entry = find_box(&small, b"avc1") + 8 + 24;
            small[entry..entry + 4].copy_from_slice(&[0, 64, 0, 64]);
            b.write(VIDEO, small);
        }),
        ("wrong_fps", "wrong_fps", &|b| {
            let mut slow = b.read(VIDEO);
            for clock in [b"mvhd", b"mdhd"] {
                let at = find_box(&slow, clock) + 20;
                let rate = u32::from_be_bytes(slow[at..at + 4].try_into().unwrap());
                slow[at..at + 4].copy_from_slice(&(rate / 2).to_be_bytes());
            }
            b.write(VIDEO, slow);
        }),
        ("truncated_parquet", "not_openable", &|b| b.write(PARQUET, half(b.read(PARQUET)))),
        ("short_parquet", "frame_count", &|b| b.write(PARQUET, b.read(&other(PARQUET, "000000")))),
        ("timestamp_gap", "timestamp_gap", &|b| parquet_at(&b.path(PARQUET), &skipping(0.05), 16, 7, None)),
        ("nan_action", "action_nonfinite", &|b| parquet(&b.path(PARQUET), 134, 16, 7, Some((37, f64::NAN)))),
        ("missing_column", "pose_missing", &|b| {
            b.write(PARQUET, replace_bytes(&b.read(PARQUET), b"observation.state", b"observation.stale"));
        }),
        ("missing tokens", "token_missing", &|b| std::fs::remove_file(b.path(TOKENS)).unwrap()),
    ];
    for (name, reason, plant) in defects {
        let broken = Broken::new();
        plant(&broken);
        let (report, rejected) = broken.validated();
        let expected: BTreeMap<String, String> =
            all_of_episode_2().into_iter().map(|clip| (clip, reason.to_owned())).collect();
        assert_eq!(rejected, expected, "{name}");
        assert_eq!(codes(&report.reasons), [(reason, 7)], "{name}");
        let example = &report.reasons[0];
        assert_eq!(example.sample, "episode_000002@0", "{name}");
        assert!(example.place.contains("episode_000002.") && !example.place.starts_with('/'), "{name}: {example:?}");
        assert_eq!((report.clean, report.rejects), (11, 7), "{name}");
    }
}

/// A video that is longer than its episode, and a task that nobody lists.
#[test]
fn defects_of_other_episodes() {
    let broken = Broken::new();
    broken.write(&VIDEO.replace("000002", "000000"), broken.read(VIDEO));
    let (report, _) = broken.validated();
    assert_eq!(codes(&report.reasons), [("frame_count", 3)]);
    assert_eq!(report.reasons[0].what, "video has 134 frames, the episode 71");

    let broken = Broken::new();
    broken.replace("meta/tasks.jsonl", "\"task_index\": 2", "\"task_index\": 9");
    let (report, rejected) = broken.validated();
    assert_eq!(codes(&report.reasons), [("unknown_task", 5)]);
    assert!(rejected.keys().all(|clip| clip.starts_with("episode_000003@")));
}

/// Damage inside the coded pictures rejects the clips behind it, with the frame, and no others.
#[test]
fn frames_that_cannot_be_decoded_are_named() {
    let broken = Broken::new();
    let whole = broken.read(VIDEO);
    let front = faststart(&whole);
    // From the middle of the coded pictures on, nothing is H.264 any more.
    let mut garbage = whole.clone();
    let pictures_end = find_box(&whole, b"moov");
    for (at, byte) in garbage[pictures_end / 2..pictures_end].iter_mut().enumerate() {
        *byte = (at * 151 % 251) as u8;
    }
    for damaged in [&front[..front.len() * 3 / 4], &garbage] {
        broken.write(VIDEO, damaged);
        let (report, rejected) = broken.validated();
        assert_eq!(codes(&report.reasons), [("decode_failed", rejected.len())]);
        assert!(
            !rejected.contains_key("episode_000002@0") && rejected.contains_key("episode_000002@96"),
            "{rejected:?}"
        );
        let dataset = broken.dataset();
        for start in [0, 16, 32, 48, 64, 80, 96] {
            let clip = ClipId { episode: 2, start };
            let Err(error) = dataset.load(&clip) else {
                assert!(!rejected.contains_key(&clip.to_string()));
                continue;
            };
            let (_, frame) = rejected[&clip.to_string()].split_once(':').expect("a frame is named");
            assert!(error.what.contains(&format!("frame {frame} ")), "{error}");
        }
    }

    // One token of one row: one clip.
    let broken = Broken::new();
    let mut tokens = broken.read(TOKENS);
    let tensors = safetensors::SafeTensors::deserialize(&tokens).unwrap();
    let at = tensors.tensor("tokens").unwrap().data().as_ptr() as usize - tokens.as_ptr() as usize + 2 * 128 * 32 * 2;
    tokens[at..at + 2].copy_from_slice(&half::bf16::INFINITY.to_le_bytes());
    broken.write(TOKENS, tokens);
    let (_, rejected) = broken.validated();
    assert_eq!(rejected, BTreeMap::from([("episode_000002@32".to_owned(), "token_nonfinite".to_owned())]));
}

/// What no clip fails of.
#[test]
fn defects_of_the_whole() {
    type Found<'a> = &'a [(&'a str, usize)];
    type Plant<'a> = &'a dyn Fn(&mut Broken);
    let defects: [(&str, Found<'_>, Found<'_>, Plant<'_>); 8] = [
        ("info_total_frames_wrong", &[("wrong_totals", 1)], &[], &|b| {
            b.replace(INFO, "\"total_frames\": 391", "\"total_frames\": 392");
        }),
        ("total_videos", &[], &[("wrong_totals", 1)], &|b| {
            b.replace(INFO, "\"total_videos\": 12", "\"total_videos\": 4");
        }),
        ("unlisted task", &[("unknown_task", 1)], &[], &|b| b.replace(EPISODES, "[\"stack", "[\"stick")),
        ("no_episodes_stats", &[], &[("stats_missing", 1)], &|b| {
            std::fs::remove_file(b.path("meta/episodes_stats.jsonl")).unwrap();
        }),
        ("huge_action", &[], &[("far_value", 1)], &|b| {
            parquet(&b.path(PARQUET), 134, 16, 7, Some((37, 1e6)));
        }),
        ("one film for two views", &[], &[("same_video", 1)], &|b| {
            b.write(VIDEO, b.read(&VIDEO.replace("eye_in_hand", "agentview")));
        }),
        ("swapped_views", &[], &[("views_exchanged", 1)], &|b| {
            let (first, second) = (VIDEO.replace("eye_in_hand", "agentview"), VIDEO.replace("eye_in_hand", "sideview"));
            let (front, side) = (b.read(&first), b.read(&second));
            b.write(&first, side);
            b.write(&second, front);
        }),
        ("tiny_episode", &[], &[("too_short", 2)], &|b| {
            (b.config.frames, b.config.validation_episodes) = (21, vec![3])
        }),
    ];
    for (name, problems, warnings, plant) in defects {
        let mut broken = Broken::new();
        plant(&mut broken);
        let (report, _) = broken.validated();
        assert_eq!(
            (codes(&report.problems), codes(&report.warnings)),
            (problems.to_vec(), warnings.to_vec()),
            "{name}"
        );
        assert_eq!(report.rejects, 0, "{name}");
    }
}

#[test]
fn a_dataset_without_an_index_is_an_error() {
    for (part, from, to, code) in [
        (EPISODES, "{\"episode_index\": 2", "{\"episode_index\": ", "broken_json"),
        (INFO, "\"v2.1\"", "\"v9\"", "unknown_version"),
    ] {
        let broken = Broken::new();
        broken.replace(part, from, to);
        assert_eq!(Dataset::open_with_faults(&broken.config, &broken.model).unwrap_err().code, code);
    }
}

fn episode_config(dataset: &Path, sample: SampleUnit) -> EpisodeDataConfig {
    recipes::episodes(dataset, &[FRONT, recipes::WRIST], sample)
}

fn episodes(config: &EpisodeDataConfig) -> EpisodeSet {
    let text = match config.latents {
        LatentSource::Videos => TextConfig::HashedWords,
        LatentSource::Official => TextConfig::LatentFiles,
    };
    EpisodeSet::open(config, &recipes::episode_model(), &text).unwrap()
}

const SEGMENTS: [&str; 6] = [
    "episode_000000_0_71",
    "episode_000001_0_75",
    "episode_000002_0_71",
    "episode_000002_71_134",
    "episode_000003_0_79",
    "episode_000003_79_111",
];

#[test]
fn segments_have_their_reasons() {
    let broken = Broken::new();
    let config = episode_config(broken.folder.path(), SampleUnit::Segment);
    let (report, out) = pass(&episodes(&config));
    assert_eq!((report.clean, report.rejects), (6, 0), "{:?}", report.reasons);
    let clean = lines(&out.path().join("clean.jsonl"));
    assert_eq!(clean.iter().map(|line| line["sample"].as_str().unwrap()).collect::<Vec<_>>(), SEGMENTS);

    // The second segment of episode 2 ends beyond it, that of episode 3 has the broken half of a video.
    broken.replace(EPISODES, "\"end_frame\": 134", "\"end_frame\": 135");
    let video = VIDEO.replace("000002", "000003");
    let front = faststart(&broken.read(&video));
    broken.write(&video, &front[..front.len() * 4 / 5]);
    // The rows of episode 0 are those of another length, beyond what its segment takes.
    std::fs::copy(broken.path(PARQUET), broken.path(&PARQUET.replace("000002", "000000"))).unwrap();
    let set = episodes(&config);
    let (report, _out) = pass(&set);
    let rejected = rejects(&report);
    assert_eq!(
        rejected.keys().collect::<Vec<_>>(),
        ["episode_000000_0_71", "episode_000002_71_135", "episode_000003_79_111"]
    );
    assert_eq!(rejected["episode_000000_0_71"], "frame_count");
    assert_eq!(rejected["episode_000002_71_135"], "segment_out_of_range");
    assert!(rejected["episode_000003_79_111"].starts_with("decode_failed:"), "{rejected:?}");
    let codec = LinearCodec::load(&recipes::repository("experiments/demo/codec.safetensors")).unwrap();
    for id in set.train().iter().chain(set.validation()) {
        let loaded = set.load(*id, Some(&codec), None);
        assert_eq!(loaded.is_ok(), !rejected.contains_key(&id.to_string()), "{id}");
    }

    broken.replace(
        EPISODES,
        "\"action_config\": [{\"start_frame\": 0, \"end_frame\": 75",
        "\"other\": [{\"start_frame\": 0, \"end_frame\": 75",
    );
    let config = EpisodeDataConfig { validation_episodes: vec![2], ..config };
    let (report, _out) = pass(&episodes(&config));
    assert_eq!(rejects(&report)["episode_000001"], "segment_missing");
}

#[test]
fn published_latents_have_their_reasons() {
    let broken = Broken::new();
    let fixture = recipes::repository("tests/data/latent_files");
    planted::copy(&fixture.join("latents"), &broken.path("latents"));
    std::fs::copy(fixture.join("empty_emb.pt"), broken.path("empty_emb.pt")).unwrap();
    let config = EpisodeDataConfig {
        latents: LatentSource::Official,
        frame_stride: 4,
        ..episode_config(broken.folder.path(), SampleUnit::Segment)
    };
    let set = episodes(&config);
    let (report, _out) = pass(&set);
    assert_eq!((report.clean, report.rejects), (6, 0), "{:?}", report.reasons);

    let file = |sample: &str| broken.path(&format!("latents/chunk-000/{FRONT}/{sample}.pth"));
    std::fs::remove_file(file("episode_000002_0_71")).unwrap();
    std::fs::write(file("episode_000002_71_134"), LFS).unwrap();
    std::fs::copy(fixture.join("variants/wrong/latent_stride.pth"), file("episode_000003_79_111")).unwrap();
    let whole = std::fs::read(file("episode_000003_0_79")).unwrap();
    std::fs::write(file("episode_000003_0_79"), &whole[..whole.len() - 100]).unwrap();
    let set = episodes(&config);
    let (report, _out) = pass(&set);
    let expected = [
        ("episode_000002_0_71", "latent_missing"),
        ("episode_000002_71_134", "lfs_pointer"),
        ("episode_000003_0_79", "latent_corrupt"),
        ("episode_000003_79_111", "latent_stride"),
    ];
    let expected: BTreeMap<String, String> =
        expected.into_iter().map(|(sample, reason)| (sample.to_owned(), reason.to_owned())).collect();
    assert_eq!(rejects(&report), expected);
    for id in set.train().iter().chain(set.validation()) {
        assert_eq!(set.load(*id, None, None).is_ok(), !expected.contains_key(&id.to_string()), "{id}");
    }
}

/// The property that makes a clean list worth having: random damage to a video, its index, the rows or the tokens, and
/// every verdict is the loader's.
#[test]
fn a_clip_is_clean_if_and_only_if_it_loads() {
    let broken = Broken::new();
    let out = tempfile::tempdir().unwrap();
    let parts = [VIDEO, VIDEO, PARQUET, TOKENS].map(|part| part.replace("000002", "000000"));
    let (clean, rejected) = (Cell::new(0), Cell::new(0));
    proptest!(ProptestConfig::with_cases(48), |(
        kind in 0..4_usize, place in 0.0..1.0_f64, length in 1..24_usize, flip in 1..=255_u8, cut in prop::bool::weighted(0.1)
    )| {
        let whole = broken.read(&parts[kind]);
        // Of the video once the whole, once its index alone.
        let from = if kind == 1 { find_box(&whole, b"moov") } else { 0 };
        let at = from + ((whole.len() - from) as f64 * place) as usize;
        let mut damaged = whole.clone();
        for byte in damaged[at..].iter_mut().take(length) {
            *byte ^= flip;
        }
        if cut {
            damaged.truncate(at);
        }
        broken.write(&parts[kind], &damaged);
        let dataset = Dataset::open_with_faults(&broken.config, &broken.model);
        // Other episodes are known from the cases before.
        let report = dataset.as_ref().map_err(Clone::clone).and_then(|dataset| validate(dataset, out.path(), &silent));
        let loaded = dataset.map(|dataset| [0, 16, 32].map(|start| dataset.load(&ClipId { episode: 0, start })));
        broken.write(&parts[kind], &whole);
        let (report, loaded) = (report.unwrap(), loaded.unwrap());
        let found = rejects(&report);
        for (start, loaded) in [0, 16, 32].into_iter().zip(loaded) {
            let name = ClipId { episode: 0, start }.to_string();
            match loaded {
                Ok(_) => {
                    prop_assert!(!found.contains_key(&name), "{name} loads, but {found:?}");
                    clean.set(clean.get() + 1);
                }
                Err(error) => {
                    let reason = match error.code {
                        "too_long" | "wrong_row_count" => "frame_count",
                        code => code,
                    };
                    let said = found.get(&name).map_or("clean", |found| found.split(':').next().unwrap());
                    prop_assert_eq!(said, reason, "{}", error);
                    rejected.set(rejected.get() + 1);
                }
            }
        }
        prop_assert!(found.keys().all(|name| name.starts_with("episode_000000@")));
    });
    assert!(clean.get() > 20 && rejected.get() > 20, "{clean:?} clean, {rejected:?} rejected");
}

fn several_defects() -> Broken {
    let broken = Broken::new();
    let front = faststart(&broken.read(VIDEO));
    broken.write(VIDEO, &front[..front.len() * 3 / 4]);
    broken.write(&PARQUET.replace("000002", "000000"), "");
    broken.write(&TOKENS.replace("000002", "000003"), LFS);
    broken
}

/// The bytes of both lists.
fn lists(out: &Path) -> [Vec<u8>; 2] {
    ["clean.jsonl", "rejects.jsonl"].map(|name| std::fs::read(out.join(name)).unwrap())
}

#[test]
fn any_number_of_threads_writes_the_same() {
    let broken = several_defects();
    let written = [1, 2, 5].map(|threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let (report, out) = pool.install(|| pass(&broken.dataset()));
        (report.clean_sha256, report.reasons, lists(out.path()))
    });
    assert!(written.iter().all(|it| *it == written[0]));
    assert_eq!(written[0].1.len(), 3);
}

#[test]
fn an_interrupted_pass_goes_on() {
    let broken = several_defects();
    let (whole, expected) = pass(&broken.dataset());
    let out = tempfile::tempdir().unwrap();
    let stop = |done: u64, _: u64| match done {
        0..6 => Ok(()),
        _ => Err(Error::new(Exit::Stopped, "stopped", "enough")),
    };
    let one = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
    let stopped = one.install(|| validate(&broken.dataset(), out.path(), &stop)).unwrap_err();
    assert_eq!(stopped.code, "stopped");
    assert!(!out.path().join("clean.jsonl").exists(), "no list of half a pass");
    // As a kill in the middle of a line would leave it.
    let verdicts = out.path().join("verdicts.jsonl");
    let mut text = std::fs::read_to_string(&verdicts).unwrap();
    assert!(text.lines().count() >= 2, "{text}");
    text.truncate(text.len() - 5);
    std::fs::write(&verdicts, text).unwrap();

    let report = validate(&broken.dataset(), out.path(), &silent).unwrap();
    assert!(report.known >= 3 && report.known < report.samples, "{}", report.known);
    assert_eq!(lists(out.path()), lists(expected.path()));
    assert_eq!((&report.reasons, &report.clean_sha256), (&whole.reasons, &whole.clean_sha256));
    let again = validate(&broken.dataset(), out.path(), &silent).unwrap();
    assert_eq!((again.known, lists(out.path())), (again.samples, lists(expected.path())));

    // Of what changed, though not in size, the verdicts are new.
    let video = VIDEO.replace("000002", "000001");
    let mut bytes = broken.read(&video);
    let middle = find_box(&bytes, b"moov") / 2;
    for byte in &mut bytes[middle..middle + 200] {
        *byte = !*byte;
    }
    broken.write(&video, bytes);
    let changed = validate(&broken.dataset(), out.path(), &silent).unwrap();
    assert_eq!(changed.known, changed.samples - 3);
    let other = Dataset::open_with_faults(&recipes::data(broken.folder.path(), &[1]), &recipes::model(false)).unwrap();
    let without_tokens = validate(&other, out.path(), &silent).unwrap();
    assert_eq!(without_tokens.known, 0, "another recipe has verdicts of its own");
}

#[test]
fn a_source_names_each_sample_once() {
    let broken = Broken::new();
    let dataset = broken.dataset();
    let recordings: Vec<Recording<ClipId>> = dataset.recordings();
    let mut all: Vec<ClipId> = dataset.train().iter().chain(dataset.validation()).copied().collect();
    all.sort_unstable();
    let named: Vec<ClipId> = recordings.iter().flat_map(|it| it.units.iter().map(|unit| unit.id)).collect();
    assert_eq!(named, all);
}

struct Ran {
    code: i32,
    out: String,
    err: String,
}

/// The program over the demo's recipe with another dataset.
fn run(broken: &Broken, out: &Path, more: &[&str]) -> Ran {
    let recipe: PathBuf = recipes::repository("configs/xwam_demo.yaml");
    let set = format!("data.dataset={}", broken.folder.path().display());
    let output = Command::cargo_bin("lbva-tui")
        .unwrap()
        .args(["data", "validate", recipe.to_str().unwrap(), "--set", &set, "--set", "data.validation_episodes=[1]"])
        .args(["--set", "model.geometry.enabled=true", "--out", out.to_str().unwrap()])
        .args(more)
        .output()
        .unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    Ran { code: output.status.code().unwrap(), out: text(output.stdout), err: text(output.stderr) }
}

#[test]
fn the_command_says_what_to_expect_of_its_exit() {
    let broken = Broken::new();
    let out = tempfile::tempdir().unwrap();
    let ran = run(&broken, out.path(), &[]);
    assert_eq!(ran.code, 0, "{}{}", ran.out, ran.err);
    assert!(ran.out.contains("18 clean and 0 rejected of 18"), "{}", ran.out);

    broken.write(VIDEO, "");
    let ran = run(&broken, out.path(), &[]);
    assert_eq!(ran.code, 65, "{}", ran.out);
    assert!(
        ran.out.contains("rejected  not_openable       7  episode_000002@0: video cannot be opened"),
        "{}",
        ran.out
    );
    for (arguments, code) in [
        (&["--max-rejects", "7"][..], 0),
        (&["--max-rejects", "6"], 65),
        (&["--max-reject-share", "0.39"], 0),
        (&["--max-reject-share", "0.38"], 65),
        (&["--max-reject-share", "0.39", "--max-rejects", "6"], 65),
        (&["--max-reject-share", "1.5"], 2),
        (&["--read-only"], 2),
    ] {
        assert_eq!(run(&broken, out.path(), arguments).code, code, "{arguments:?}");
    }
    let ran = run(&broken, out.path(), &["--json"]);
    assert_eq!((ran.code, ran.err.as_str()), (65, ""));
    let document: Value = serde_json::from_str(&ran.out).unwrap();
    assert_eq!((&document["ok"], &document["rejects"], &document["known"]), (&false.into(), &7.into(), &18.into()));
    assert_eq!(document["reasons"][0]["code"], "not_openable");
    assert_eq!(document["clean_sha256"].as_str().unwrap().len(), 64);
}
