//! Whole episodes from outside: which samples there are, what one holds, and how each way to be broken is said.

mod recipes;

use lbva_tui::codec::{
    self, CHANNELS, Extent, FitSettings, LatentCache, LatentCodec, LinearCodec, PictureSource, Side, fit_and_save,
};
use lbva_tui::config::{
    ActionConfig, CodecConfig, EpisodeDataConfig, LatentSource, LingbotModelConfig, SampleUnit, TextConfig, Tile,
};
use lbva_tui::data::columns::ColumnFile;
use lbva_tui::data::episodes::tile;
use lbva_tui::data::video::VideoFile;
use lbva_tui::data::{Dataset, EpisodeId, EpisodeSample, EpisodeSet};
use lbva_tui::{Error, Exit, Result};
use parquet::data_type::FloatType;
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use rayon::prelude::*;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const FRONT: &str = "observation.images.agentview_rgb";
/// The sample that variants of latent files stand for, and its file's name.
const VARIED: &str = "episode_000003_79_111";

/// The public LIBERO configuration of the seven numbers that the fixtures' actions have.
fn libero() -> ActionConfig {
    ActionConfig {
        channels: (0..7).collect(),
        q01: vec![
            -0.6589285731315613,
            -0.84375,
            -0.9375,
            -0.12107142806053162,
            -0.15964286029338837,
            -0.26571428775787354,
            -1.0,
        ],
        q99: vec![
            0.8999999761581421,
            0.8544642925262451,
            0.9375,
            0.1714285711145401,
            0.1842857152223587,
            0.34392857551574707,
            1.0,
        ],
    }
}

fn videos(dataset: &Path, sample: SampleUnit, frame_stride: usize) -> EpisodeDataConfig {
    let views = [FRONT, "observation.images.sideview_rgb", recipes::WRIST];
    EpisodeDataConfig { frame_stride, actions: libero(), ..recipes::episodes(dataset, &views, sample) }
}

fn tiny_root() -> PathBuf {
    recipes::repository("tests/data/robosuite_tiny_v21")
}

fn tiny(sample: SampleUnit, frame_stride: usize) -> EpisodeSet {
    open(&videos(&tiny_root(), sample, frame_stride)).unwrap()
}

fn open(config: &EpisodeDataConfig) -> Result<EpisodeSet> {
    let text = match config.latents {
        LatentSource::Videos => TextConfig::HashedWords,
        LatentSource::Official => TextConfig::LatentFiles,
    };
    EpisodeSet::open(config, &recipes::episode_model(), &text)
}

fn shipped() -> LinearCodec {
    LinearCodec::load(&recipes::repository("experiments/demo/codec.safetensors")).unwrap()
}

fn id(name: &str) -> EpisodeId {
    name.parse().unwrap()
}

fn names(ids: &[EpisodeId]) -> Vec<String> {
    ids.iter().map(EpisodeId::to_string).collect()
}

fn silent(_: u64, _: u64) -> Result<()> {
    Ok(())
}

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

/// The tiny dataset with published latents beside it, to break.
struct Published {
    folder: tempfile::TempDir,
    config: EpisodeDataConfig,
}

impl Published {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        for part in ["meta", "data"] {
            copy(&tiny_root().join(part), &folder.path().join(part));
        }
        copy(&fixture("latents"), &folder.path().join("latents"));
        std::fs::copy(fixture("empty_emb.pt"), folder.path().join("empty_emb.pt")).unwrap();
        let config = EpisodeDataConfig {
            views: vec![FRONT.into(), recipes::WRIST.into()],
            latents: LatentSource::Official,
            ..videos(folder.path(), SampleUnit::Segment, 4)
        };
        Self { folder, config }
    }

    fn open(&self) -> EpisodeSet {
        open(&self.config).unwrap()
    }

    fn file(&self, view: &str, sample: &str) -> PathBuf {
        self.folder.path().join(format!("latents/chunk-000/{view}/{sample}.pth"))
    }

    fn load(&self, sample: &str) -> Result<EpisodeSample> {
        self.open().load(id(sample), None, None)
    }
}

fn fixture(part: &str) -> PathBuf {
    recipes::repository("tests/data/latent_files").join(part)
}

/// Files of a folder of variants, by name without `.pth`.
fn variants(kind: &str) -> BTreeMap<String, PathBuf> {
    let entries = std::fs::read_dir(fixture("variants").join(kind)).unwrap().map(|entry| entry.unwrap().path());
    entries.map(|path| (path.file_stem().unwrap().to_string_lossy().into_owned(), path)).collect()
}

/// [48, frames * cells] as `make.py` computes it, row by row in its own order.
fn published_latent(frames: usize, view: usize, episode: usize, start: usize, cells: usize) -> Vec<f32> {
    let value = |index: usize| ((index * 7 + view * 13 + episode * 31 + start) % 256) as f32;
    (0..48 * frames * cells)
        .map(|at| {
            let (channel, row) = (at / (frames * cells), at % (frames * cells));
            (value(row * 48 + channel) - 128.0) / 64.0
        })
        .collect()
}

/// `make.py`'s embedding of a prompt, without the rows of zeros.
fn published_text(words: &str) -> Vec<f32> {
    let rows = words.split_whitespace().enumerate();
    rows.flat_map(|(row, word)| [word.len() as f32 + 1.0, -1.0, 0.5, row as f32 / 16.0]).collect()
}

// Which samples there are.

#[test]
fn episodes_and_segments_of_the_tiny_dataset() {
    let episodes = tiny(SampleUnit::Episode, 1);
    assert_eq!(names(episodes.train()), ["episode_000000", "episode_000002", "episode_000003"]);
    assert_eq!(names(episodes.validation()), ["episode_000001"]);
    // 71, 134, 111 and 75 frames: one alone, then groups of four; what is left over is dropped.
    let frames = |set: &EpisodeSet| -> Vec<usize> {
        set.train().iter().chain(set.validation()).map(|id| set.frames(*id)).collect()
    };
    assert_eq!(frames(&episodes), [18, 34, 28, 19]);
    assert_eq!(episodes.prompt(id("episode_000002")), "stack the red cube on top of the green cube");
    assert_eq!((episodes.grid(), episodes.actions_per_frame(), episodes.wrist_view()), ((8, 24), 4, 2));
    assert_eq!((episodes.excluded().len(), episodes.prompts().len()), (0, 3));

    let segments = tiny(SampleUnit::Segment, 4);
    assert_eq!(
        names(segments.train()),
        [
            "episode_000000_0_71",
            "episode_000002_0_71",
            "episode_000002_71_134",
            "episode_000003_0_79",
            "episode_000003_79_111"
        ]
    );
    assert_eq!(names(segments.validation()), ["episode_000001_0_75"]);
    // Every 4th of 71, 71, 63, 79, 32 and 75 frames: 18, 18, 16, 20, 8 and 19 of the video.
    assert_eq!(frames(&segments), [5, 5, 4, 5, 2, 5]);
    assert_eq!(segments.prompt(id(VARIED)), "carry the can to the other bin and let go");
    assert_eq!(segments.actions_per_frame(), 16);
    let wrist = segments.region(2).unwrap();
    assert_eq!((wrist.rows(), wrist.cols(), segments.region(3)), (0..8, 16..24, None));
    assert_eq!(segments.load(id("episode_000003"), None, None).unwrap_err().code, "unknown_episode");
}

/// Against the demo's metadata, read here by themselves.
#[test]
fn the_demos_dataset_is_found_whole() {
    let root = recipes::repository("experiments/demo/data/robosuite_lift");
    let lines = std::fs::read_to_string(root.join("meta/episodes.jsonl")).unwrap();
    let records: Vec<serde_json::Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let number = |value: &serde_json::Value, key: &str| value[key].as_u64().unwrap() as usize;
    for stride in [1, 2, 5] {
        let set = open(&videos(&root, SampleUnit::Segment, stride)).unwrap();
        let mut expected = Vec::new();
        for record in &records {
            let episode = number(record, "episode_index");
            for segment in record["action_config"].as_array().unwrap() {
                let (start, end) = (number(segment, "start_frame"), number(segment, "end_frame"));
                let taken = (start..end).step_by(stride).count();
                let frames = 1 + (taken - 1) / 4;
                expected.push((format!("episode_{episode:06}_{start}_{end}"), frames, segment["action_text"].clone()));
            }
        }
        let mut ids: Vec<EpisodeId> = set.train().iter().chain(set.validation()).copied().collect();
        ids.sort();
        let found: Vec<_> = ids.iter().map(|id| (id.to_string(), set.frames(*id), set.prompt(*id).into())).collect();
        assert_eq!(found, expected);
    }
}

#[test]
fn several_datasets_are_taken_in_the_order_of_their_paths() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["b/two", "a", "b/one"] {
        copy(&tiny_root().join("meta"), &folder.path().join(name).join("meta"));
    }
    std::os::unix::fs::symlink(folder.path(), folder.path().join("b/loop")).unwrap();
    let set = open(&videos(folder.path(), SampleUnit::Episode, 1)).unwrap();
    let roots: Vec<&Path> = set.datasets().iter().map(|it| it.root.strip_prefix(folder.path()).unwrap()).collect();
    assert_eq!(roots, ["a", "b/one", "b/two"].map(Path::new));
    assert_eq!(
        names(set.validation()),
        ["dataset_0000_episode_000001", "dataset_0001_episode_000001", "dataset_0002_episode_000001"]
    );
    assert_eq!(set.train().len(), 9);
    assert!(set.train().is_sorted());

    // One size for all.
    let info = folder.path().join("b/two/meta/info.json");
    let text = std::fs::read_to_string(&info).unwrap();
    std::fs::write(&info, text.replacen("\"video.height\": 128", "\"video.height\": 256", 1)).unwrap();
    let error = open(&videos(folder.path(), SampleUnit::Episode, 1)).unwrap_err();
    assert_eq!((error.code, error.exit), ("tile_size", Exit::Refused));
    assert!(error.what.contains("sideview_rgb has 8x8"), "{error}");
}

#[test]
fn what_is_left_out_is_listed() {
    let published = Published::new();
    std::fs::remove_file(published.file(recipes::WRIST, "episode_000002_0_71")).unwrap();
    let episodes = published.folder.path().join("meta/episodes.jsonl");
    let text = std::fs::read_to_string(&episodes).unwrap();
    std::fs::write(
        &episodes,
        text.replace("\"end_frame\": 79}", "\"end_frame\": 112}").replace("\"end_frame\": 79,", "\"end_frame\": 112,"),
    )
    .unwrap();
    let set = published.open();
    assert_eq!(names(set.train()), ["episode_000000_0_71", "episode_000002_71_134", VARIED]);
    let [missing, outside] = set.excluded() else { panic!("{:?}", set.excluded()) };
    assert_eq!(missing.what, "episode_000002_0_71");
    assert_eq!(missing.view.as_deref(), Some(recipes::WRIST));
    assert_eq!(missing.path, published.file(recipes::WRIST, "episode_000002_0_71"));
    assert!(missing.to_string().contains("no latent file"), "{missing}");
    assert_eq!((outside.what.as_str(), &outside.view), ("episode_000003_0_112", &None));
    assert!(outside.reason.contains("none of its 111"), "{outside}");

    std::fs::remove_dir_all(published.folder.path().join("latents")).unwrap();
    let error = open(&published.config).unwrap_err();
    assert_eq!(error.code, "empty_split");
    assert!(error.hint.contains("no latent file of observation.images.agentview_rgb"), "{error}");
}

#[test]
fn a_recipe_that_does_not_fit_is_refused() {
    let config = videos(&tiny_root(), SampleUnit::Episode, 1);
    let code = |change: &dyn Fn(&mut EpisodeDataConfig)| {
        let mut config = config.clone();
        change(&mut config);
        open(&config).unwrap_err().code
    };
    assert_eq!(code(&|it| it.dataset = it.dataset.join("videos")), "dataset_missing");
    assert_eq!(code(&|it| it.wrist_view = "observation.images.front".into()), "missing_view");
    assert_eq!(code(&|it| it.views[1] = "observation.images.front".into()), "missing_view");
    assert_eq!(code(&|it| it.validation_episodes = vec![4]), "unknown_episode");
    assert_eq!(code(&|it| it.validation_episodes = vec![]), "empty_split");
    assert_eq!(code(&|it| it.validation_episodes = vec![0, 1, 2, 3]), "empty_split");
    assert_eq!(code(&|it| it.frame_stride = 0), "frame_stride_zero");
    assert_eq!(code(&|it| it.tile = Tile::RobotwinTshape), "tile_size");
    let patches = LingbotModelConfig { patch_size: [1, 3, 2], ..recipes::episode_model() };
    assert_eq!(EpisodeSet::open(&config, &patches, &TextConfig::HashedWords).unwrap_err().code, "tile_size");
    let short = LingbotModelConfig { text_len: 3, ..recipes::episode_model() };
    assert_eq!(EpisodeSet::open(&config, &short, &TextConfig::HashedWords).unwrap_err().code, "prompt_too_long");
    assert_eq!(
        EpisodeSet::open(&config, &recipes::episode_model(), &TextConfig::LatentFiles).unwrap_err().code,
        "text_mismatch"
    );
}

// Latents from videos.

/// Frames of a view, straight from its file.
fn source_video(view: &str, episode: usize, frames: &[usize]) -> Vec<f32> {
    let path = tiny_root().join(format!("videos/chunk-000/{view}/episode_{episode:06}.mp4"));
    let mut rgb = Vec::new();
    for picture in VideoFile::open(&path).unwrap().read_frames(frames).unwrap() {
        picture.append_rgb_planes(&mut rgb);
    }
    let (plane, count) = (128 * 128, frames.len());
    (0..3 * count * plane)
        .map(|at| {
            let (channel, frame, pixel) = (at / (count * plane), at / plane % count, at % plane);
            f32::from(rgb[(frame * 3 + channel) * plane + pixel]) / 127.5 - 1.0
        })
        .collect()
}

#[test]
fn a_sample_of_videos_is_each_views_latents_in_its_place() {
    let (set, codec) = (tiny(SampleUnit::Segment, 2), shipped());
    let sample = set.load(id(VARIED), Some(&codec), None).unwrap();
    // 32 rows, every second: 16 frames, of which 13 are one and three groups of four.
    assert_eq!((sample.frames, sample.latent.len()), (4, 48 * 4 * 8 * 24));
    let frames: Vec<usize> = (0..13).map(|frame| 79 + 2 * frame).collect();
    let extent = Extent { frames: 13, height: 128, width: 128 };
    for (view, name) in set.config().views.iter().enumerate() {
        let video = source_video(name, 3, &frames);
        let expected = codec.encode(&video, extent).unwrap();
        assert_eq!(tile::cut(&sample.latent, set.grid(), set.region(view).unwrap()), expected, "{name}");
        if view == set.wrist_view() {
            assert_eq!(set.wrist_frames(id(VARIED), 0..13).unwrap().unwrap(), video);
        }
    }
    let part = set.wrist_frames(id(VARIED), 3..5).unwrap().unwrap();
    assert_eq!(part, source_video(recipes::WRIST, 3, &[85, 87]));
    assert_eq!(sample.text[..], set.text().get(&sample.prompt).unwrap()[..10 * 4]);

    assert_eq!(set.load(id(VARIED), None, None).unwrap_err().code, "codec_missing");
    assert_eq!(set.wrist_frames(id(VARIED), 0..17).unwrap_err().code, "too_short", "beyond the episode");
}

#[test]
fn a_long_episode_is_coded_in_pieces_that_fit_together() {
    let (set, codec) = (tiny(SampleUnit::Episode, 1), shipped());
    let sample = set.load(id("episode_000001"), Some(&codec), None).unwrap();
    assert_eq!(sample.frames, 19);
    let video = source_video(FRONT, 1, &(0..73).collect::<Vec<_>>());
    let expected = codec.encode(&video, Extent { frames: 73, height: 128, width: 128 }).unwrap();
    assert_eq!(tile::cut(&sample.latent, set.grid(), set.region(0).unwrap()), expected);

    // A codec that looks back is given the whole video at once.
    struct Whole(LinearCodec);
    impl LatentCodec for Whole {
        fn encode(&self, video: &[f32], extent: Extent) -> Result<Vec<f32>> {
            assert_eq!(extent.frames, 73);
            self.0.encode(video, extent)
        }
        fn decode(&self, latents: &[f32], extent: Extent) -> Result<Vec<f32>> {
            self.0.decode(latents, extent)
        }
        fn hash(&self) -> &str {
            "whole"
        }
    }
    assert_eq!(set.load(id("episode_000001"), Some(&Whole(codec)), None).unwrap(), sample);
}

#[test]
fn parallel_loads_with_and_without_a_cache_give_the_same_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let (set, codec) = (tiny(SampleUnit::Segment, 4), shipped());
    let cache = LatentCache::open(folder.path()).unwrap();
    let ids: Vec<EpisodeId> = set.train().iter().chain(set.validation()).copied().collect();
    let one_by_one: Vec<EpisodeSample> = ids.iter().map(|id| set.load(*id, Some(&codec), None).unwrap()).collect();
    assert!(ids.iter().all(|id| !set.is_cached(*id, Some(&codec), &cache).unwrap()));
    for _ in 0..2 {
        let twice: Vec<&EpisodeId> = ids.iter().chain(&ids).collect();
        let parallel: Vec<EpisodeSample> =
            twice.par_iter().map(|id| set.load(**id, Some(&codec), Some(&cache)).unwrap()).collect();
        assert_eq!(parallel[..ids.len()], one_by_one);
        assert_eq!(parallel[ids.len()..], one_by_one);
    }
    assert!(ids.iter().all(|id| set.is_cached(*id, Some(&codec), &cache).unwrap()));
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), ids.len());
    // Another stride is another entry, though it may have as many numbers.
    let other = tiny(SampleUnit::Segment, 5);
    assert!(!other.is_cached(id(VARIED), Some(&codec), &cache).unwrap());
}

// Published latents.

#[test]
fn a_sample_of_latent_files_is_what_the_files_hold() {
    let published = Published::new();
    let set = published.open();
    assert_eq!(set.grid(), (2, 4));
    for (name, frames, episode, start) in [("episode_000000_0_71", 5, 0, 0), ("episode_000002_71_134", 4, 2, 71)] {
        let sample = set.load(id(name), None, None).unwrap();
        assert_eq!(sample.frames, frames);
        for view in 0..2 {
            let cut = tile::cut(&sample.latent, set.grid(), set.region(view).unwrap());
            assert_eq!(cut, published_latent(frames, view, episode, start, 4), "{name}, view {view}");
        }
        assert_eq!(sample.text[..], published_text(&sample.prompt));
    }
    assert_eq!(set.text().rows("").unwrap()[..], [2.0, -1.0, 0.5, 0.0], "empty_emb.pt holds one row");
    // The prompt of two samples is kept once.
    let [a, b] = ["episode_000000_0_71", "episode_000001_0_75"].map(|name| set.load(id(name), None, None).unwrap());
    assert!(Arc::ptr_eq(&a.text, &b.text));
    assert_eq!(set.wrist_frames(id(VARIED), 0..5).unwrap(), None, "there are no videos");

    // Text may come from elsewhere.
    let hashed = EpisodeSet::open(&published.config, &recipes::episode_model(), &TextConfig::HashedWords).unwrap();
    let sample = hashed.load(id(VARIED), None, None).unwrap();
    assert_eq!(&sample.text, hashed.text().rows(&sample.prompt).unwrap());
}

#[test]
fn latent_files_are_read_once_and_then_their_small_copies() {
    let published = Published::new();
    let folder = tempfile::tempdir().unwrap();
    let cache = LatentCache::open(folder.path()).unwrap();
    let set = published.open();
    let all = |set: &EpisodeSet| -> Vec<EpisodeSample> {
        let ids: Vec<&EpisodeId> = set.train().iter().chain(set.validation()).collect();
        ids.par_iter().map(|id| set.load(**id, None, Some(&cache)).unwrap()).collect()
    };
    let first = all(&set);
    assert!(set.is_cached(id(VARIED), None, &cache).unwrap());
    // Latents and facts of six samples, and the texts of five prompts.
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2 * 6 + 5);
    // The set knows by now what its files hold, and does not read them again.
    let files = published.folder.path().join("latents");
    std::fs::rename(&files, published.folder.path().join("away")).unwrap();
    assert_eq!(all(&set), first);
    std::fs::rename(published.folder.path().join("away"), &files).unwrap();
    assert_eq!(all(&published.open()), first, "another process finds the entries");

    // A file that changed is another file: size and name stay, the numbers do not.
    std::fs::copy(published.file(recipes::WRIST, VARIED), published.file(FRONT, VARIED)).unwrap();
    let changed = published.open().load(id(VARIED), None, Some(&cache)).unwrap();
    let before = first.iter().find(|sample| sample.id == id(VARIED)).unwrap();
    assert_ne!(changed.latent, before.latent);

    // Damaged entries are made again.
    for entry in std::fs::read_dir(folder.path()).unwrap() {
        std::fs::write(entry.unwrap().path(), "torn").unwrap();
    }
    assert_eq!(published.open().load(id(VARIED), None, Some(&cache)).unwrap(), changed);
    assert_eq!(published.open().load(id(VARIED), None, Some(&cache)).unwrap(), changed);
}

#[test]
fn files_that_say_the_same_otherwise_are_read_alike() {
    let published = Published::new();
    let expected = published.load(VARIED).unwrap();
    let variants = variants("benign");
    assert!(variants.len() >= 7, "{variants:?}");
    for (name, path) in variants {
        std::fs::copy(path, published.file(FRONT, VARIED)).unwrap();
        assert_eq!(published.load(VARIED).unwrap(), expected, "{name}");
    }
}

#[test]
fn callables_outside_the_list_are_refused_by_name() {
    let published = Published::new();
    for (name, callable) in [("os", "posix.system"), ("eval", "__builtin__.eval"), ("numpy", "numpy")] {
        let path = published.file(FRONT, VARIED);
        std::fs::copy(&variants("refused")[name], &path).unwrap();
        let error = published.load(VARIED).unwrap_err();
        assert_eq!((error.code, error.exit), ("pickle_refused", Exit::BadData), "{name}: {error}");
        assert!(error.what.contains(callable) && error.what.starts_with(VARIED), "{error}");
        assert_eq!(error.place, path.display().to_string());
    }
    std::fs::copy(&variants("refused")["os"], published.folder.path().join("empty_emb.pt")).unwrap();
    assert_eq!(open(&published.config).unwrap_err().code, "pickle_refused");
}

/// The name of a variant is the code of its error.
#[test]
fn each_wrong_field_has_its_own_code() {
    let field = BTreeMap::from([
        ("latent_frames", "latent_num_frames"),
        ("latent_nonfinite", "row 3, channel 5"),
        ("latent_shape", "latent is"),
        ("latent_size", "latent_height"),
        ("latent_stride", "frame_ids"),
        ("text_mismatch", "text_emb"),
        ("text_nonfinite", "text_emb"),
    ]);
    let mut seen = Vec::new();
    for (name, variant) in variants("wrong") {
        let published = Published::new();
        let path = published.file(FRONT, VARIED);
        std::fs::copy(variant, &path).unwrap();
        let error = published.load(VARIED).unwrap_err();
        let code = name.split('.').next().unwrap();
        assert_eq!(error.code, code, "{name}: {error}");
        assert!(error.what.contains(field[code]), "{name}: {error}");
        assert_eq!(error.place, path.display().to_string());
        seen.push(error.code);
    }
    seen.dedup();
    assert_eq!(seen, field.keys().copied().collect::<Vec<_>>());

    // Cameras that disagree: the wrist's file of a longer sample.
    let published = Published::new();
    std::fs::copy(published.file(recipes::WRIST, "episode_000000_0_71"), published.file(recipes::WRIST, VARIED))
        .unwrap();
    assert_eq!(published.load(VARIED).unwrap_err().code, "latent_frames");
    // The same files read with another stride, by which there are as many frames.
    let mut config = Published::new().config;
    config.dataset = published.folder.path().to_owned();
    config.frame_stride = 5;
    let error = open(&config).unwrap().load(id("episode_000002_71_134"), None, None).unwrap_err();
    assert_eq!(error.code, "latent_stride", "{error}");
}

#[test]
fn broken_files_are_errors_and_never_panics() {
    let published = Published::new();
    let set = published.open();
    let path = published.file(FRONT, VARIED);
    let whole = std::fs::read(&path).unwrap();
    let expected = set.load(id(VARIED), None, None).unwrap();
    let variants = variants("corrupt");
    assert!(variants.len() >= 20, "{variants:?}");
    for (name, variant) in variants {
        std::fs::copy(variant, &path).unwrap();
        let error = set.load(id(VARIED), None, None).unwrap_err();
        assert_eq!(error.code, "latent_corrupt", "{name}: {error}");
        assert!(error.to_string().len() < 800, "{name}: {error}");
    }
    for length in (0..whole.len()).step_by(61) {
        std::fs::write(&path, &whole[..length]).unwrap();
        assert_eq!(set.load(id(VARIED), None, None).unwrap_err().code, "latent_corrupt", "{length} bytes");
    }
    // A changed byte is found, unless it is one that says nothing (the date of an entry).
    let mut found = 0;
    for at in (0..whole.len()).step_by(7) {
        let mut changed = whole.clone();
        changed[at] ^= 0x55;
        std::fs::write(&path, changed).unwrap();
        match set.load(id(VARIED), None, None) {
            Err(_) => found += 1,
            Ok(sample) => assert_eq!(sample, expected, "byte {at}"),
        }
    }
    assert!(found > 100, "{found}");
    std::fs::write(&path, "version https://git-lfs.github.com/spec/v1\n").unwrap();
    assert_eq!(set.load(id(VARIED), None, None).unwrap_err().code, "lfs_pointer");
    std::fs::remove_file(&path).unwrap();
    assert_eq!(set.load(id(VARIED), None, None).unwrap_err().code, "file_missing");
}

#[test]
fn a_probe_finds_each_broken_file_once() {
    let published = Published::new();
    assert_eq!(published.open().probe(), []);
    std::fs::copy(&variants("wrong")["latent_stride"], published.file(FRONT, VARIED)).unwrap();
    std::fs::write(published.folder.path().join("data/chunk-000/episode_000000.parquet"), "").unwrap();
    let found = published.open().probe();
    assert_eq!(
        found.iter().map(|error| error.code).collect::<Vec<_>>(),
        ["not_openable", "latent_stride"],
        "{found:?}"
    );
    assert!(found[0].what.starts_with("episode_000000_0_71: "), "{found:?}");

    let folder = tempfile::tempdir().unwrap();
    copy(&tiny_root(), folder.path());
    let config = videos(folder.path(), SampleUnit::Segment, 1);
    assert_eq!(open(&config).unwrap().probe(), []);
    // Both segments of the episode need it.
    std::fs::remove_file(folder.path().join(format!("videos/chunk-000/{FRONT}/episode_000002.mp4"))).unwrap();
    let found = open(&config).unwrap().probe();
    assert_eq!(found.iter().map(|error| error.code).collect::<Vec<_>>(), ["file_missing"], "{found:?}");
}

// Actions.

/// Rows 79, 80 and 106 of episode 3's parquet file, normalised by hand.
#[test]
fn actions_are_the_rows_that_lead_to_a_frame() {
    let (set, codec) = (tiny(SampleUnit::Segment, 1), shipped());
    let sample = set.load(id(VARIED), Some(&codec), None).unwrap();
    let (frames, n) = (8, 4);
    assert_eq!((sample.frames, sample.actions.len(), sample.action_mask.len()), (frames, 30 * 8 * 4, 30 * 8 * 4));
    let at = |channel: usize, frame: usize, step: usize| sample.actions[(channel * frames + frame) * n + step];
    let near = |found: f32, by_hand: f64| assert!((f64::from(found) - by_hand).abs() < 1e-6, "{found} {by_hand}");
    // Zeros in front: 2 * 0.6589285731 / 1.5589295493 - 1.
    near(at(0, 0, 3), -0.1546395);
    // Row 79: 0.0727762505, 0.7655951977 and a gripper of 1.
    near(at(0, 1, 0), 2.0 * 0.7317048237 / 1.5589295493 - 1.0);
    near(at(2, 1, 0), 2.0 * 1.7030951977 / 1.875001 - 1.0);
    near(at(6, 1, 0), 4.0 / 2.000001 - 1.0);
    // Row 80: -0.0778067335.
    near(at(1, 1, 1), 2.0 * 0.7659432665 / 1.6982152925 - 1.0);
    // The last frame's last row is 79 + 6 * 4 + 3.
    let path = tiny_root().join("data/chunk-000/episode_000003.parquet");
    let rows = ColumnFile::open(&path).unwrap().read("action").unwrap();
    let raw = rows.values[106 * 7 + 4];
    near(at(4, 7, 3), (2.0 * (raw + 0.1596428603) / (0.1842857152 + 0.1596428603 + 1e-6) - 1.0).clamp(-1.5, 1.5));
    for channel in 0..30 {
        let mask = &sample.action_mask[channel * 32..][..32];
        assert!(mask.iter().all(|value| *value == f32::from(u8::from(channel < 7))), "channel {channel}");
        assert!(channel < 7 || sample.actions[channel * 32..][..32].iter().all(|value| *value == 0.0));
    }
}

fn write_actions(path: &Path, width: usize, values: &[f32]) {
    let schema = "message schema {
        REQUIRED GROUP action (LIST) { REPEATED GROUP list { REQUIRED FLOAT element; } }
    }";
    let schema = Arc::new(parse_message_type(schema).unwrap());
    let file = std::fs::File::create(path).unwrap();
    let mut writer = SerializedFileWriter::new(file, schema, Arc::new(WriterProperties::builder().build())).unwrap();
    let mut group = writer.next_row_group().unwrap();
    let repetitions: Vec<i16> = (0..values.len()).map(|at| i16::from(at % width != 0)).collect();
    let mut column = group.next_column().unwrap().unwrap();
    column.typed::<FloatType>().write_batch(values, Some(&vec![1; values.len()]), Some(&repetitions)).unwrap();
    column.close().unwrap();
    group.close().unwrap();
    writer.close().unwrap();
}

#[test]
fn broken_actions_are_named() {
    let published = Published::new();
    let path = published.folder.path().join("data/chunk-000/episode_000003.parquet");
    let expect = |error: Error, code: &str, words: &str| {
        assert_eq!(error.code, code, "{error}");
        assert!(error.what.contains(words) && error.what.starts_with(VARIED), "{error}");
    };
    let mut values = vec![0.0; 111 * 7];
    values[90 * 7 + 2] = f32::NAN;
    write_actions(&path, 7, &values);
    let error = published.load(VARIED).unwrap_err();
    assert_eq!(error.place, path.display().to_string());
    expect(error, "action_nonfinite", "action[2] is NaN in row 90");
    assert!(published.load("episode_000003_0_79").is_ok(), "row 90 is no part of this one");
    write_actions(&path, 7, &values[..110 * 7]);
    expect(published.load(VARIED).unwrap_err(), "action_rows", "110 rows");
    write_actions(&path, 6, &vec![0.0; 111 * 6]);
    expect(published.load(VARIED).unwrap_err(), "action_width", "6 numbers");
    std::fs::remove_file(&path).unwrap();
    expect(published.load(VARIED).unwrap_err(), "file_missing", "parquet");
}

/// Two arms that move along x, one unit a row, in the tile of that robot; its files begin at the second frame.
#[test]
fn poses_are_relative_to_the_first_encoded_frame() {
    let mut published = Published::new();
    let path = published.folder.path().join("data/chunk-000/episode_000003.parquet");
    let row = |row: usize| [[row as f32, 2.0, -3.0, 0.0, 0.0, 0.0, 1.0, 0.5]; 2].concat();
    write_actions(&path, 16, &(0..111).flat_map(row).collect::<Vec<f32>>());
    std::fs::remove_dir_all(published.folder.path().join("latents")).unwrap();
    copy(&fixture("tshape"), &published.folder.path().join("latents"));
    published.config.views = ["head", "left", "right"].map(String::from).into();
    published.config.wrist_view = "right".into();
    published.config.tile = Tile::RobotwinTshape;
    published.config.actions = ActionConfig {
        channels: (0..7).chain([28]).chain(7..14).chain([29]).collect(),
        q01: vec![-1.0; 16],
        q99: vec![19.0; 16],
    };
    let set = published.open();
    assert_eq!(names(set.train()), [VARIED]);
    assert_eq!((set.grid(), set.excluded().len()), ((6, 4), 4));
    let sample = set.load(id(VARIED), None, None).unwrap();
    for (view, (cells, rows, cols)) in [(16, 2..6, 0..4), (4, 0..2, 0..2), (4, 0..2, 2..4)].into_iter().enumerate() {
        let region = set.region(view).unwrap();
        assert_eq!((region.rows(), region.cols()), (rows, cols));
        let cut = tile::cut(&sample.latent, set.grid(), region);
        assert_eq!(cut, published_latent(2, view, 3, 79, cells));
    }
    // Frame 1 owns rows 80 to 95, of which the first is 0 away from itself.
    let at = |channel: usize, step: usize| f64::from(sample.actions[(channel * 2 + 1) * 16 + step]);
    let scaled = |value: f64| 2.0 * (value + 1.0) / 20.000001 - 1.0;
    for step in 0..16 {
        for (channel, value) in [
            (0, step as f64),
            (7, step as f64),
            (1, 0.0),
            (2, 0.0),
            (3, 0.0),
            (6, 1.0),
            (13, 1.0),
            (28, 0.5),
            (29, 0.5),
        ] {
            assert!((at(channel, step) - scaled(value)).abs() < 1e-6, "channel {channel}, step {step}");
        }
    }
    // Rows 80 to 110 of the only training sample are 0 to 30 units from the first.
    let quantiles = set.quantiles(&silent).unwrap();
    assert!((quantiles.q01[0] - 0.3).abs() < 1e-9 && (quantiles.q99[8] - 29.7).abs() < 1e-9, "{quantiles:?}");
}

#[test]
fn quantiles_are_those_of_the_training_rows() {
    let set = tiny(SampleUnit::Segment, 1);
    let found = set.quantiles(&silent).unwrap();
    let mut columns = vec![Vec::new(); 7];
    for episode in [0, 2, 3] {
        let path = tiny_root().join(format!("data/chunk-000/episode_{episode:06}.parquet"));
        for row in ColumnFile::open(&path).unwrap().read("action").unwrap().values.chunks(7) {
            row.iter().zip(&mut columns).for_each(|(value, column)| column.push(*value));
        }
    }
    // 71 + 134 + 111 rows: the ranks are 3.15 and 311.85.
    for (column, values) in columns.iter_mut().enumerate() {
        values.sort_unstable_by(f64::total_cmp);
        assert_eq!(values.len(), 316);
        let between = |rank: usize, share: f64| values[rank] * (1.0 - share) + values[rank + 1] * share;
        assert!((found.q01[column] - between(3, 0.15)).abs() < 1e-9, "column {column}");
        assert!((found.q99[column] - between(311, 0.85)).abs() < 1e-9, "column {column}");
    }
    let yaml: BTreeMap<String, Vec<f64>> = serde_yaml::from_str(&found.yaml()).unwrap();
    assert_eq!((&yaml["q01"], &yaml["q99"]), (&found.q01, &found.q99));
}

// Codec and identity.

const QUICK: FitSettings = FitSettings { clips: 4, wrist_patches: 300, wrist_emphasis: 5, iterations: 4 };

#[test]
fn a_codec_is_fitted_to_episodes_and_bound_to_them() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("codec.safetensors");
    let set = tiny(SampleUnit::Segment, 4);
    // 17, 17, 13, 17 and 5 frames: clips of 9 that share a frame with the next.
    assert_eq!((set.clips(Side::Training), set.clips(Side::HeldOut)), (2 + 2 + 2 + 2 + 1, 2));
    let lengths: Vec<usize> = (0..9).map(|clip| set.clip(Side::Training, clip).unwrap()[0].extent.frames).collect();
    assert_eq!(lengths, [9, 9, 9, 9, 9, 5, 9, 9, 5]);
    assert_eq!(set.clip(Side::Training, 9).err().unwrap().code, "unknown_clip");
    let second = set.clip(Side::Training, 1).unwrap();
    assert_eq!(second.len(), 3);
    let frames: Vec<usize> = (8..17).map(|frame| 4 * frame).collect();
    assert_eq!(second[2].video(), source_video(recipes::WRIST, 0, &frames));

    let summary = fit_and_save(&set, QUICK, &path, &silent).unwrap();
    assert_eq!((summary.train_clips, summary.measured_clips, summary.views.len()), (9, 2, 3));
    assert!(summary.views.iter().all(|view| (20.0..50.0).contains(&view.psnr_db)), "{summary:?}");
    let config = CodecConfig::Linear { path };
    assert_eq!(codec::open(&config, &set, &silent).unwrap().hash(), summary.hash);
    for other in [tiny(SampleUnit::Segment, 2), tiny(SampleUnit::Episode, 4)] {
        assert_eq!(codec::open(&config, &other, &silent).err().unwrap().code, "codec_of_other_clips");
    }
    let published = Published::new().open();
    assert_eq!(codec::open(&config, &published, &silent).err().unwrap().code, "codec_without_videos");
}

#[test]
fn the_same_frames_through_the_other_family_have_the_same_key() {
    let folder = tempfile::tempdir().unwrap();
    copy(&tiny_root(), folder.path());
    let episodes = folder.path().join("meta/episodes.jsonl");
    // One segment an episode: the frames of one clip of 9, every 4th.
    let lines: Vec<String> = std::fs::read_to_string(&episodes)
        .unwrap()
        .lines()
        .map(|line| {
            let mut record: serde_json::Value = serde_json::from_str(line).unwrap();
            record["action_config"] = serde_json::json!([{"start_frame": 0, "end_frame": 33, "action_text": "x"}]);
            record.to_string()
        })
        .collect();
    std::fs::write(&episodes, lines.join("\n")).unwrap();
    let mut clips = recipes::data(folder.path(), &[1]);
    clips.clip_stride = 1000;
    let dataset = Dataset::open(&clips, &recipes::model(false)).unwrap();
    let key = |stride| {
        let set = open(&videos(folder.path(), SampleUnit::Segment, stride)).unwrap();
        set.training_key(&silent).unwrap()
    };
    assert_eq!(key(4), dataset.training_key(&silent).unwrap());
    assert_ne!(key(2), key(4));
}

#[test]
fn identity_is_about_contents_and_samples() {
    let published = Published::new();
    let identity = |config: &EpisodeDataConfig| open(config).unwrap().identity(&silent).unwrap();
    let before = identity(&published.config);
    let moved = Published::new();
    assert_eq!(identity(&moved.config), before, "the place of a dataset does not count");

    let parquet = "data/chunk-000/episode_000002.parquet";
    for part in ["empty_emb.pt", parquet, &format!("latents/chunk-000/{FRONT}/{VARIED}.pth")] {
        let path = published.folder.path().join(part);
        let (set, whole) = (published.open(), std::fs::read(&path).unwrap());
        std::fs::write(&path, [&whole[..], b" "].concat()).unwrap();
        assert_ne!(set.identity(&silent).unwrap(), before, "{part}");
        std::fs::write(&path, whole).unwrap();
    }
    let set = published.open();
    std::fs::rename(published.folder.path().join(parquet), published.folder.path().join("away")).unwrap();
    assert_eq!(set.identity(&silent).unwrap_err().code, "file_missing");
    std::fs::rename(published.folder.path().join("away"), published.folder.path().join(parquet)).unwrap();
    let changed = |change: &dyn Fn(&mut EpisodeDataConfig)| {
        let mut config = published.config.clone();
        change(&mut config);
        identity(&config)
    };
    assert_ne!(changed(&|it| it.validation_episodes = vec![0]), before);
    assert_ne!(changed(&|it| it.actions.q01[0] = -0.5), before);
    assert_ne!(changed(&|it| it.views.reverse()), before);
    std::fs::remove_file(published.file(FRONT, "episode_000000_0_71")).unwrap();
    assert_ne!(identity(&published.config), before, "a sample less");

    let set = tiny(SampleUnit::Segment, 4);
    let stop = |_: u64, _: u64| Err(Error::crash("stopped"));
    assert_eq!(set.identity(&stop).unwrap_err().what, "stopped");
    assert_eq!(set.training_key(&stop).unwrap_err().what, "stopped");
    assert_eq!(set.quantiles(&stop).unwrap_err().what, "stopped");
}

#[test]
fn encoding_by_pieces_is_encoding_at_once() {
    let codec = shipped();
    for frames in [1, 5, 29, 33, 37, 65] {
        let extent = Extent { frames, height: 16, width: 32 };
        let video: Vec<f32> = (0..3 * extent.cells()).map(|at| (at as f32 * 0.37).sin()).collect();
        let read = |range: std::ops::Range<usize>| {
            let plane = 16 * 32;
            let channels = video.chunks_exact(frames * plane);
            Ok(channels.flat_map(|channel| &channel[range.start * plane..range.end * plane]).copied().collect())
        };
        let pieces = codec::encode_pieces(&codec, extent, read).unwrap();
        assert_eq!(pieces, codec.encode(&video, extent).unwrap(), "{frames} frames");
        assert_eq!(pieces.len(), CHANNELS * extent.latent().unwrap().cells());
    }
}
