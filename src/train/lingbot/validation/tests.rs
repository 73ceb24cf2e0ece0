//! On four real episodes, with a tiny random model.

use super::*;
use crate::codec::{FitSettings, LatentCache, LinearCodec};
use crate::config::{LatentSource, Recipe, SampleUnit, TextConfig};
use crate::model::{Parameters, lingbot_parameter_specs};
use std::path::PathBuf;
use std::sync::LazyLock;

fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// Episodes 2 and 3 held out: 134 and 111 frames, every 4th is 34 and 28, so 9 and 7 latent frames.
fn recipe() -> LingbotRecipe {
    let text = std::fs::read_to_string(repository("configs/lingbot_tiny.yaml")).unwrap();
    let mut recipe = serde_yaml::from_str::<Recipe>(&text).unwrap().lingbot("the test").unwrap().clone();
    recipe.data.dataset = repository("tests/data/robosuite_tiny_v21");
    recipe.data.validation_episodes = vec![2, 3];
    let model = &mut recipe.model;
    (model.dim, model.ffn_dim, model.num_layers, model.num_heads) = (48, 64, 2, 2);
    let validation = &mut recipe.validation;
    (validation.chunk, validation.clips, validation.sample_steps, validation.strips) = (2, 4, 2, 2);
    recipe
}

struct Fixture {
    _folder: tempfile::TempDir,
    recipe: LingbotRecipe,
    store: EpisodeStore,
    validator: Validator,
}

fn open(recipe: &LingbotRecipe) -> EpisodeSet {
    EpisodeSet::open(&recipe.data, &recipe.model, &recipe.text).unwrap()
}

fn fitted(set: &EpisodeSet) -> LinearCodec {
    let settings = FitSettings { clips: 4, wrist_patches: 500, wrist_emphasis: 5, iterations: 2 };
    LinearCodec::fit(set, settings, &|_, _| Ok(())).unwrap()
}

/// One codec, and one look at the truth, for all tests.
static FIXTURE: LazyLock<Fixture> = LazyLock::new(|| {
    let folder = tempfile::tempdir().unwrap();
    let recipe = recipe();
    let set = open(&recipe);
    let codec: Box<dyn LatentCodec> = Box::new(fitted(&set));
    let store = EpisodeStore { set, codec: Some(codec), cache: LatentCache::open(folder.path()).unwrap() };
    let validator = validator(&store, &recipe);
    Fixture { _folder: folder, recipe, store, validator }
});

fn validator(store: &EpisodeStore, recipe: &LingbotRecipe) -> Validator {
    let measured = measured_chunks(&store.set, recipe).unwrap();
    let mut told = Vec::new();
    let mut progress = |done, total| {
        told.push((done, total));
        Ok(())
    };
    let validator = Validator::new(store, recipe, &measured, &mut progress).unwrap();
    let total = measured.len() as u64;
    assert_eq!(told, (0..total).map(|done| (done, total)).collect::<Vec<_>>());
    validator
}

fn model(recipe: &LingbotRecipe) -> LingbotModel {
    let specs = lingbot_parameter_specs(&recipe.model);
    LingbotModel::new(&recipe.model, &Parameters::initialise(&specs, 1, &Device::Cpu).unwrap()).unwrap()
}

fn names(chunks: &[ChunkId]) -> Vec<String> {
    chunks.iter().map(ChunkId::to_string).collect()
}

#[test]
fn whole_chunks_after_the_first_are_spread_evenly() {
    let (mut recipe, set) = (FIXTURE.recipe.clone(), &FIXTURE.store.set);
    let mut found = |chunk, clips| {
        (recipe.validation.chunk, recipe.validation.clips) = (chunk, clips);
        measured_chunks(set, &recipe)
    };
    let all = ["episode_000002#1", "episode_000002#2", "episode_000002#3", "episode_000003#1", "episode_000003#2"];
    assert_eq!(names(&found(2, 99).unwrap()), all, "frames 8 and 6 begin no whole chunk");
    assert_eq!(names(&found(2, 2).unwrap()), [all[0], all[2]]);
    assert_eq!(names(&found(4, 9).unwrap()), ["episode_000002#1"]);
    let error = found(5, 9).unwrap_err();
    assert_eq!((error.code, error.exit), ("validation_too_short", crate::Exit::Refused));
    for part in ["5 latent frames", "episode_000002 has 9, episode_000003 has 7", "validation.chunk"] {
        assert!(error.to_string().contains(part), "{error}");
    }
}

#[test]
fn a_point_is_finite_repeatable_and_leaves_strips() {
    let Fixture { recipe, store, validator, .. } = &*FIXTURE;
    let model = model(recipe);
    let point = |strips: &Path| {
        let mut told = Vec::new();
        let mut go_on = |done, total| {
            told.push((done, total));
            Ok(true)
        };
        let point = validator.measure(store, &model, recipe, 7, strips, &mut go_on).unwrap().expect("measured");
        told.dedup();
        assert_eq!(told, [(0, 4), (1, 4), (2, 4), (3, 4)]);
        point
    };
    let (first, second) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (point, again) = (point(first.path()), point(second.path()));
    let lines = |point: &Point| serde_json::to_string(&point.clips).unwrap();
    assert_eq!(lines(&point), lines(&again), "the same numbers twice");
    let clips: Vec<&str> = point.clips.iter().map(|clip| clip.clip.as_str()).collect();
    assert_eq!(clips, ["episode_000002#1", "episode_000002#2", "episode_000002#3", "episode_000003#1"]);
    for clip in &point.clips {
        let measured = [clip.wrist_lpips, clip.wrist_psnr, clip.wrist_ssim, clip.ceiling_lpips, clip.ceiling_psnr];
        assert!(measured.iter().all(|value| value.is_finite()), "{clip:?}");
        assert!(clip.trans_l2_norm.is_nan() && clip.trans_l2_m.is_nan() && clip.rot_deg.is_nan());
        assert!(clip.wrist_latent_mse.is_some_and(|error| error > 0.0), "{clip:?}");
        assert!(clip.wrist_psnr < clip.ceiling_psnr && clip.wrist_lpips > clip.ceiling_lpips, "{clip:?}");
    }
    let mean = point.clips.iter().map(|clip| clip.wrist_latent_mse.unwrap()).sum::<f64>() / 4.0;
    assert_eq!((point.mean.step, point.mean.clips, point.mean.wrist_latent_mse), (7, 4, Some(mean)));
    let mut strips: Vec<_> = std::fs::read_dir(first.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    strips.sort();
    assert_eq!(strips, ["episode_000002#1.png", "episode_000002#2.png"]);
    let strip = image::open(first.path().join("episode_000002#1.png")).unwrap();
    assert_eq!((strip.width(), strip.height()), (8 * 128, 2 * 128), "eight frames, truth above prediction");

    // The run directory takes the lines, the verdict reads them.
    let text: String = point.clips.iter().map(|clip| serde_json::to_string(clip).unwrap() + "\n").collect();
    let read = crate::eval::verdict::Point::parse(&text);
    assert_eq!((read.clips.len(), read.bad_lines), (4, 0));
    let event = serde_json::to_string(&point.mean).unwrap();
    assert!(event.contains("\"rot_deg\":null") && event.contains("wrist_latent_mse"), "{event}");
}

#[test]
fn it_stops_where_it_is_told_to() {
    let Fixture { recipe, store, validator, .. } = &*FIXTURE;
    let folder = tempfile::tempdir().unwrap();
    let model = model(recipe);
    let stopped = validator.measure(store, &model, recipe, 0, folder.path(), &mut |done, _| Ok(done < 1)).unwrap();
    assert!(stopped.is_none());
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "the strip of the chunk that was measured");
}

/// Whatever it says of the codec, the truth as prediction is the ceiling.
#[test]
fn a_perfect_prediction_reaches_exactly_the_ceiling() {
    let Fixture { store, validator, .. } = &*FIXTURE;
    let codec = store.codec.as_deref();
    for episode in &validator.episodes {
        for truth in &episode.chunks {
            let perfect = episode.video.narrow(1, 2 * truth.id.chunk, 2).unwrap();
            let metrics = validator.measure_chunk(codec, episode, truth, &perfect, None).unwrap();
            assert_eq!(metrics.wrist_latent_mse, Some(0.0));
            assert_eq!((metrics.wrist_lpips, metrics.wrist_psnr), (metrics.ceiling_lpips, metrics.ceiling_psnr));
            assert!(metrics.ceiling_psnr > 15.0, "{metrics:?}");

            // Another view may be anything.
            let wrong = Tensor::cat(
                &[&perfect.narrow(3, 0, 8).unwrap().affine(0.0, 9.0).unwrap(), &perfect.narrow(3, 8, 8).unwrap()],
                3,
            );
            let other = validator.measure_chunk(codec, episode, truth, &wrong.unwrap(), None).unwrap();
            assert_eq!((other.wrist_latent_mse, other.wrist_lpips), (Some(0.0), metrics.wrist_lpips));
            let off = validator.measure_chunk(codec, episode, truth, &(perfect + 0.5).unwrap(), None).unwrap();
            assert!((off.wrist_latent_mse.unwrap() - 0.25).abs() < 1e-6 && off.wrist_psnr < metrics.wrist_psnr);
        }
    }
    let episode = &validator.episodes[0];
    let nan = (episode.video.narrow(1, 2, 2).unwrap() * f64::NAN).unwrap();
    assert!(validator.measure_chunk(codec, episode, &episode.chunks[0], &nan, None).is_err());
}

#[test]
fn truth_is_the_frames_that_the_chunk_stands_for() {
    let Fixture { store, validator, .. } = &*FIXTURE;
    let truth = &validator.episodes[1].chunks[0];
    assert_eq!(truth.id.to_string(), "episode_000003#1");
    // Latent frames 2 and 3 stand for frames 5 to 12 of the video.
    let source = store.set.wrist_frames(truth.id.episode, 5..13).unwrap().unwrap();
    let expected = unit_range(&source, Extent { frames: 8, height: 128, width: 128 }, 0).unwrap();
    let found = &truth.pictures.as_ref().unwrap().frames;
    assert_eq!(
        found.flatten_all().unwrap().to_vec1::<f32>().unwrap(),
        expected.flatten_all().unwrap().to_vec1::<f32>().unwrap()
    );
    // A few latent frames away the truth is another: were the decoded frames shifted, the ceiling would tell.
    let away = store.set.wrist_frames(truth.id.episode, 20..28).unwrap().unwrap();
    let away = unit_range(&away, Extent { frames: 8, height: 128, width: 128 }, 0).unwrap();
    assert!(mean(&psnr(&away, found).unwrap()) < truth.pictures.as_ref().unwrap().ceiling.1);
}

/// A codec that says that it needs the whole past.
struct Causal<'a>(&'a dyn LatentCodec);

impl LatentCodec for Causal<'_> {
    fn encode(&self, video: &[f32], extent: Extent) -> Result<Vec<f32>> {
        self.0.encode(video, extent)
    }

    fn decode(&self, latents: &[f32], extent: Extent) -> Result<Vec<f32>> {
        self.0.decode(latents, extent)
    }

    fn hash(&self) -> &str {
        self.0.hash()
    }
}

#[test]
fn a_causal_codec_decodes_the_same_frames_after_the_whole_history() {
    let Fixture { store, validator, .. } = &*FIXTURE;
    let codec = store.codec.as_deref().unwrap();
    let episode = &validator.episodes[0];
    let latents = validator.true_chunk(&episode.video, 3).unwrap();
    let frames = |codec: &dyn LatentCodec| {
        let frames = validator.decoded(codec, &episode.video, 3, &latents).unwrap();
        assert_eq!(frames.dims(), [8, 3, 128, 128]);
        frames.flatten_all().unwrap().to_vec1::<f32>().unwrap()
    };
    assert!(codec.codes_groups_alone() && !Causal(codec).codes_groups_alone());
    assert_eq!(frames(codec), frames(&Causal(codec)));
}

/// Published latents of 5 frames, the wrist view's 2 x 2 cells, without videos.
fn published(folder: &Path) -> LingbotRecipe {
    for part in ["meta", "data"] {
        let from = repository("tests/data/robosuite_tiny_v21").join(part);
        std::os::unix::fs::symlink(from, folder.join(part)).unwrap();
    }
    let files = repository("tests/data/latent_files");
    for part in ["latents", "empty_emb.pt"] {
        std::os::unix::fs::symlink(files.join(part), folder.join(part)).unwrap();
    }
    let mut recipe = recipe();
    let data = &mut recipe.data;
    (data.dataset, data.latents, data.sample) = (folder.to_owned(), LatentSource::Official, SampleUnit::Segment);
    data.validation_episodes = vec![1];
    recipe.text = TextConfig::LatentFiles;
    (recipe.model.text_dim, recipe.model.text_len) = (4, 64);
    recipe
}

#[test]
fn latents_that_cannot_be_decoded_are_compared_as_they_are() {
    let folder = tempfile::tempdir().unwrap();
    let recipe = published(folder.path());
    let cache = LatentCache::open(&folder.path().join("cache")).unwrap();
    let store = EpisodeStore { set: open(&recipe), codec: None, cache };
    let model = model(&recipe);
    let point = validator(&store, &recipe)
        .measure(&store, &model, &recipe, 0, folder.path(), &mut |_, _| Ok(true))
        .unwrap()
        .expect("measured");
    let [clip] = &point.clips[..] else { panic!("{:?}", point.clips) };
    assert_eq!(clip.clip, "episode_000001_0_75#1");
    assert!(clip.wrist_lpips.is_nan() && clip.wrist_psnr.is_nan() && clip.wrist_ssim.is_nan());
    assert!(clip.ceiling_lpips.is_nan() && clip.ceiling_psnr.is_nan());
    assert!(clip.wrist_latent_mse.is_some_and(|error| error.is_finite() && error > 0.0));
    assert_eq!(point.mean.wrist_latent_mse, clip.wrist_latent_mse);
    assert!(!folder.path().join(format!("{}.png", clip.clip)).exists(), "no strip");
}

#[test]
fn without_videos_the_decoded_truth_is_what_is_compared_with() {
    let folder = tempfile::tempdir().unwrap();
    let recipe = published(folder.path());
    let cache = LatentCache::open(&folder.path().join("cache")).unwrap();
    let codec: Box<dyn LatentCodec> = Box::new(fitted(&FIXTURE.store.set));
    let store = EpisodeStore { set: open(&recipe), codec: Some(codec), cache };
    let validator = validator(&store, &recipe);
    let (episode, codec) = (&validator.episodes[0], store.codec.as_deref());
    let truth = episode.video.narrow(1, 2, 2).unwrap();
    let metrics = validator.measure_chunk(codec, episode, &episode.chunks[0], &truth, None).unwrap();
    assert_eq!((metrics.wrist_lpips, metrics.wrist_psnr), (0.0, crate::eval::PSNR_CAP_DB));
    assert!(metrics.ceiling_lpips.is_nan() && metrics.ceiling_psnr.is_nan());
}
