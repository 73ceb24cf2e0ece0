//! LingBot-VA trained end to end on four real episodes, under every packing: determinism, resume, what packing changes.

mod worker_fixture;

use lbva_tui::Exit;
use lbva_tui::codec::{self, FitSettings, LatentCache, LinearCodec};
use lbva_tui::config::{self, CodecConfig, LingbotRecipe, PackingKind, ParameterFormat, Recipe};
use lbva_tui::data::EpisodeSet;
use lbva_tui::model::{LingbotModel, Parameters, lingbot_parameter_specs};
use lbva_tui::runlog::{Event, PackingStep};
use lbva_tui::train::gradients::{Pass, forward_backward};
use lbva_tui::train::lingbot::flow::{Schedules, losses};
use lbva_tui::train::lingbot::{EpisodeStore, batches};
use lbva_tui::train::optimizer::GradientSum;
use lbva_tui::train::worker::WorkerSpec;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use worker_fixture::{last_checkpoint, losses as logged, metrics, spec_of, train};

fn codec_file(recipe: &LingbotRecipe) -> PathBuf {
    static FILE: OnceLock<(tempfile::TempDir, PathBuf)> = OnceLock::new();
    let (_, path) = FILE.get_or_init(|| {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("codec.safetensors");
        let set = EpisodeSet::open(&recipe.data, &recipe.model, &recipe.text).unwrap();
        let settings = FitSettings { clips: 4, wrist_patches: 500, wrist_emphasis: 5, iterations: 2 };
        LinearCodec::fit(&set, settings, &|_, _| Ok(())).unwrap().save(&path).unwrap();
        (folder, path)
    });
    path.clone()
}

fn recipe(kind: PackingKind) -> LingbotRecipe {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/lingbot_tiny.yaml");
    let mut recipe = config::load(&file).unwrap().lingbot("the test").unwrap().clone();
    // A latent frame spans 16 source frames: episodes of 5 to 9 latent frames.
    recipe.data.frame_stride = 4;
    recipe.codec = CodecConfig::Linear { path: codec_file(&recipe) };
    recipe.packing.kind = kind;
    recipe.packing.pad_multiple = 2;
    // The sampler's batches must not be larger than its three episodes.
    (recipe.train.batch_size, recipe.train.accumulate) = (2, 2);
    (recipe.train.steps, recipe.train.save_every, recipe.train.keep_last) = (4, 2, 2);
    (recipe.validation.every, recipe.validation.clips) = (2, 2);
    recipe
}

fn spec(folder: &Path, name: &str, recipe: &LingbotRecipe) -> WorkerSpec {
    spec_of(folder, name, Recipe::Lingbot(recipe.clone()))
}

fn steps(events: &[Event]) -> Vec<(u64, f64, PackingStep)> {
    let step = |event: &Event| match event {
        Event::Step(step) => Some((step.step, step.loss, step.packing.expect("how it was packed"))),
        _ => None,
    };
    events.iter().filter_map(step).collect()
}

#[test]
fn a_run_in_pieces_equals_a_run_in_one_under_every_packing_and_in_bf16() {
    let folder = tempfile::tempdir().unwrap();
    let of = |name: &str| folder.path().join(name);
    for (kind, format) in [
        (PackingKind::Unpacked, ParameterFormat::F32),
        (PackingKind::Bucket, ParameterFormat::F32),
        (PackingKind::Budget, ParameterFormat::Bf16),
    ] {
        let mut recipe = recipe(kind);
        recipe.precision.params = format;
        let (whole, pieces) = (format!("{kind:?} whole"), format!("{kind:?} pieces"));
        let (exit, events) = train(spec(folder.path(), &whole, &recipe));
        assert_eq!(exit.unwrap(), Exit::Done);
        let mut seen = Vec::new();
        for (stop_after, exit) in [(Some(1), Exit::Stopped), (Some(3), Exit::Stopped), (None, Exit::Done)] {
            let (result, events) = train(WorkerSpec { stop_after, ..spec(folder.path(), &pieces, &recipe) });
            assert_eq!(result.unwrap(), exit);
            seen.extend(logged(&events));
        }
        assert_eq!(logged(&events), seen, "{kind:?}: every logged loss, bit for bit");
        assert!(last_checkpoint(&of(&whole)) == last_checkpoint(&of(&pieces)), "{kind:?}: every byte");
        for point in [0, 2, 4] {
            assert_eq!(metrics(&of(&whole), point), metrics(&of(&pieces), point), "{kind:?}: point {point}");
        }
        let micro_steps: Vec<u64> = steps(&events).iter().map(|(_, _, packing)| packing.micro_steps).collect();
        let waste: f64 = steps(&events).iter().map(|(_, _, packing)| packing.frame_padding).sum();
        match kind {
            PackingKind::Unpacked => assert!(micro_steps == [4; 4] && waste == 0.0, "{micro_steps:?} {waste}"),
            PackingKind::Bucket => assert!(micro_steps == [2; 4] && waste > 0.0, "{micro_steps:?} {waste}"),
            PackingKind::Budget => {
                assert!(micro_steps.iter().all(|count| *count < 4) && waste == 0.0, "{micro_steps:?} {waste}");
            }
        }
    }
    let at_0 = |name: &str| metrics(&of(name), 0);
    assert_eq!(at_0("Unpacked whole"), at_0("Bucket whole"), "arms are equal before the first step");
}

/// Gradients and loss of the first step by the trainer's own batches.
fn first_step(recipe: &LingbotRecipe, cache: &Path) -> (GradientSum, f64) {
    let set = EpisodeSet::open(&recipe.data, &recipe.model, &recipe.text).unwrap();
    let codec = codec::open(&recipe.codec, &set, &|_, _| Ok(())).unwrap();
    let store = EpisodeStore { set, codec: Some(codec), cache: LatentCache::open(cache).unwrap() };
    let specs = lingbot_parameter_specs(&recipe.model);
    let parameters = Parameters::initialise(&specs, 3, &candle_core::Device::Cpu).unwrap();
    let model = LingbotModel::new(&recipe.model, &parameters).unwrap();
    let schedules = Schedules::new(&recipe.flow);
    let (mut sum, mut total) = (GradientSum::default(), 0.0);
    for place in batches::places(&store, recipe, 1) {
        let place = place.unwrap();
        if place.step > 1 {
            break;
        }
        let batch = batches::build(&store, recipe, &schedules, place).unwrap();
        let loss = |output: &Vec<_>| losses(output, &batch.targets, &batch.shares);
        let Pass { losses, gradients, .. } = forward_backward(&model, &parameters, &batch.input, false, loss).unwrap();
        sum.add(&gradients, 1.0).unwrap();
        total += f64::from(losses.total.to_scalar::<f32>().unwrap());
    }
    (sum, total)
}

#[test]
fn the_trainer_s_own_batches_give_one_gradient_packed_or_not() {
    let folder = tempfile::tempdir().unwrap();
    let (unpacked, loss) = first_step(&recipe(PackingKind::Unpacked), folder.path());
    let (packed, packed_loss) = first_step(&recipe(PackingKind::Budget), folder.path());
    assert!((loss - packed_loss).abs() <= 1e-6 * loss, "{loss} and {packed_loss}");
    assert!((unpacked.norm() - packed.norm()).abs() <= 1e-5 * unpacked.norm());
    let (ours, theirs) = (unpacked.sums(), packed.sums());
    let largest = ours.values().flatten().fold(0f32, |most, value| most.max(value.abs()));
    for (name, values) in ours {
        let difference = values.iter().zip(&theirs[name]).fold(0f32, |most, (a, b)| most.max((a - b).abs()));
        assert!(difference <= 5e-6 * largest, "{name}: {difference:e} of {largest:e}");
    }
}

#[test]
fn an_episode_that_no_micro_batch_holds_is_named_before_the_first_step() {
    let folder = tempfile::tempdir().unwrap();
    let mut recipe = recipe(PackingKind::Budget);
    recipe.packing.token_budget = 256;
    let error = train(spec(folder.path(), "run", &recipe)).0.unwrap_err();
    assert_eq!((error.code, error.exit), ("over_token_budget", Exit::Refused));
    assert!(error.what.starts_with("episode_00000"), "{error}");
}
