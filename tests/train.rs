//! The trainer end to end on four real episodes: determinism, resume, stop, refusal, what is on disk.

mod worker_fixture;

use lbva_tui::Exit;
use lbva_tui::codec::{FitSettings, LinearCodec};
use lbva_tui::config::{CodecConfig, Decay, Recipe, XwamRecipe};
use lbva_tui::data::Dataset;
use lbva_tui::runlog::{
    Check, Checkpoint, CheckpointStore, Event, Level, Outcome, OutcomeRecord, Phase, RunDir, RunReader, RunState, Work,
    now_ms,
};
use lbva_tui::train::stop::StopFlag;
use lbva_tui::train::worker::{self, WorkerSpec};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use worker_fixture::{last_checkpoint, losses, metrics, spec_of, train};

/// A codec of the tiny dataset, fitted once a process.
fn codec_file(recipe: &XwamRecipe) -> PathBuf {
    static FILE: OnceLock<(tempfile::TempDir, PathBuf)> = OnceLock::new();
    let (_, path) = FILE.get_or_init(|| {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("codec.safetensors");
        let dataset = Dataset::open(&recipe.data, &recipe.model).unwrap();
        let settings = FitSettings { clips: 4, wrist_patches: 500, wrist_emphasis: 5, iterations: 2 };
        LinearCodec::fit(&dataset, settings, &|_, _| Ok(())).unwrap().save(&path).unwrap();
        (folder, path)
    });
    path.clone()
}

/// A tiny recipe over tests/data/robosuite_tiny_v21.
fn recipe(geometry: bool) -> XwamRecipe {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(root.join("configs/xwam_demo.yaml")).unwrap();
    let mut recipe = serde_yaml::from_str::<Recipe>(&text).unwrap().xwam("the test").unwrap().clone();
    recipe.data.dataset = root.join("tests/data/robosuite_tiny_v21");
    recipe.data.validation_episodes = vec![3];
    recipe.codec = CodecConfig::Linear { path: codec_file(&recipe) };
    let model = &mut recipe.model;
    (model.dim, model.ffn_dim, model.num_layers, model.num_heads) = (48, 64, 2, 2);
    model.geometry.layers = vec![0, 1];
    model.geometry.enabled = geometry;
    let train = &mut recipe.train;
    (train.steps, train.batch_size, train.accumulate) = (6, 2, 2);
    (train.save_every, train.keep_last, train.warmup_steps) = (2, 2, 3);
    let validation = &mut recipe.validation;
    (validation.every, validation.clips, validation.strips) = (3, 2, 1);
    (validation.sample_steps, validation.action_steps) = (2, 1);
    recipe
}

fn spec(folder: &Path, name: &str, recipe: &XwamRecipe) -> WorkerSpec {
    spec_of(folder, name, Recipe::Xwam(recipe.clone()))
}

#[test]
fn one_seed_gives_one_run_and_another_seed_another() {
    let folder = tempfile::tempdir().unwrap();
    let recipe = recipe(true);
    let (first, events) = train(spec(folder.path(), "a", &recipe));
    assert_eq!(first.unwrap(), Exit::Done);
    let (second, again) = train(spec(folder.path(), "b", &recipe));
    assert_eq!(second.unwrap(), Exit::Done);
    assert_eq!(losses(&events), losses(&again));
    let (step, files) = last_checkpoint(&folder.path().join("a"));
    assert_eq!(step, 6);
    assert!(files.len() == 3 && files.values().all(|bytes| !bytes.is_empty()));
    assert!((step, files) == last_checkpoint(&folder.path().join("b")), "equal bytes in every file");
    for point in [0, 3, 6] {
        assert_eq!(metrics(&folder.path().join("a"), point), metrics(&folder.path().join("b"), point));
    }

    let mut other = recipe;
    other.train.seed += 1;
    let (_, different) = train(spec(folder.path(), "c", &other));
    assert_ne!(losses(&events), losses(&different));
}

#[test]
fn a_run_in_pieces_equals_a_run_in_one() {
    let folder = tempfile::tempdir().unwrap();
    let recipe = recipe(true);
    let (_, whole) = train(spec(folder.path(), "whole", &recipe));
    let mut pieces = Vec::new();
    // Step 1 is no multiple of save_every and step 3 is a validation point.
    for (stop_after, exit) in [(Some(1), Exit::Stopped), (Some(3), Exit::Stopped), (None, Exit::Done)] {
        let (result, events) = train(WorkerSpec { stop_after, ..spec(folder.path(), "pieces", &recipe) });
        assert_eq!(result.unwrap(), exit);
        pieces.extend(losses(&events));
    }
    assert_eq!(losses(&whole), pieces, "every logged loss, bit for bit");
    assert!(last_checkpoint(&folder.path().join("whole")) == last_checkpoint(&folder.path().join("pieces")));
    for point in [0, 3, 6] {
        let of = |run: &str| metrics(&folder.path().join(run), point);
        assert_eq!(of("whole"), of("pieces"), "validation point {point}");
    }
}

#[test]
fn the_arms_are_equal_at_step_0_and_differ_afterwards() {
    let folder = tempfile::tempdir().unwrap();
    for (name, geometry) in [("m1", false), ("m2", true)] {
        train(spec(folder.path(), name, &recipe(geometry))).0.unwrap();
    }
    let of = |run: &str, point| metrics(&folder.path().join(run), point);
    assert_eq!(of("m1", 0), of("m2", 0), "every digit of every metric");
    assert_ne!(of("m1", 6), of("m2", 6));
    let shared = |run: &str| {
        let text = std::fs::read(folder.path().join(run).join("identity.json")).unwrap();
        let value: serde_json::Value = serde_json::from_slice(&text).unwrap();
        ["data", "training_clips", "validation_clips", "codec", "initial_shared_weights"].map(|key| value[key].clone())
    };
    assert_eq!(shared("m1"), shared("m2"));
}

/// Parity at the start of an arm: the clips, the weights, and what the untrained model says of the first picture.
#[test]
fn an_arm_that_begins_otherwise_than_its_peers_is_not_trained() {
    let folder = tempfile::tempdir().unwrap();
    let one = |name: &str, recipe: &XwamRecipe| WorkerSpec { stop_after: Some(1), ..spec(folder.path(), name, recipe) };
    train(one("m1", &recipe(false))).0.unwrap();
    let beside = |name: &str, recipe: &XwamRecipe| {
        let peers = ["m1", "not_begun"].map(|peer| RunDir::new(folder.path().join(peer)));
        WorkerSpec { peers: peers.into(), ..one(name, recipe) }
    };
    assert_eq!(train(beside("equal", &recipe(true))).0.unwrap(), Exit::Stopped);

    let refused = |name: &str, recipe: &XwamRecipe, words: &str| {
        let (result, events) = train(beside(name, recipe));
        let error = result.unwrap_err();
        assert_eq!((error.exit, error.code), (Exit::Refused, "arms_differ"), "{error}");
        assert!(error.what.contains(words), "{error}");
        assert!(losses(&events).is_empty(), "not one step");
    };
    let mut other = recipe(true);
    other.train.seed += 1;
    refused("seed", &other, "initial_shared_weights is ");
    let mut other = recipe(true);
    other.validation.clips -= 1;
    refused("clips", &other, "validation_clips is ");
    // The same by every record, and another function all the same.
    let mut other = recipe(true);
    other.validation.sample_steps += 1;
    refused("sampler", &other, "before the first step wrist_lpips of ");
}

#[test]
fn a_changed_configuration_is_refused_and_named() {
    let folder = tempfile::tempdir().unwrap();
    let first = recipe(false);
    train(WorkerSpec { stop_after: Some(1), ..spec(folder.path(), "run", &first) }).0.unwrap();
    let before = last_checkpoint(&folder.path().join("run"));
    let mut changed = first;
    changed.train.lr *= 2.0;
    let error = train(spec(folder.path(), "run", &changed)).0.unwrap_err();
    assert_eq!((error.exit, error.code), (Exit::Refused, "arm_differs"));
    assert!(error.to_string().contains("train.lr"), "{error}");
    assert!(before == last_checkpoint(&folder.path().join("run")), "nothing saved is lost");
}

#[test]
fn an_accepted_change_goes_on_from_the_checkpoint_with_the_new_value() {
    let folder = tempfile::tempdir().unwrap();
    let mut first = recipe(false);
    (first.train.warmup_steps, first.train.decay) = (0, Decay::Constant);
    train(WorkerSpec { stop_after: Some(1), ..spec(folder.path(), "run", &first) }).0.unwrap();
    let mut changed = first.clone();
    (changed.train.lr, changed.train.seed) = (2.0 * first.train.lr, first.train.seed + 1);
    let again = |accepted: &[&str], code: &str| WorkerSpec {
        accepted: accepted.iter().map(|&field| field.to_owned()).collect(),
        code_version: code.into(),
        ..spec(folder.path(), "run", &changed)
    };
    let error = train(again(&["train.lr"], "other")).0.unwrap_err();
    assert_eq!((error.exit, error.code), (Exit::Refused, "arm_differs"));
    assert!(
        error.what.contains("train.seed: recorded") && error.what.contains("code: recorded \"test\", now \"other\""),
        "{error}"
    );
    // Another seed draws other initial weights, whose hash the identity has.
    let accepted = ["train.lr", "train.seed", "code", "initial_shared_weights"];
    let (result, events) = train(again(&accepted, "other"));
    assert_eq!(result.unwrap(), Exit::Done);
    let rates: Vec<(u64, f64)> = events
        .iter()
        .filter_map(|event| if let Event::Step(step) = event { Some((step.step, step.lr)) } else { None })
        .collect();
    assert_eq!(rates.first(), Some(&(2, changed.train.lr)));
}

/// A checkpoint of weights alone, as another program leaves it: the schedule goes on, the rate warms up again, and a
/// second resume in the middle of that changes nothing.
#[test]
fn weights_without_moments_warm_up_again() {
    let folder = tempfile::tempdir().unwrap();
    let mut recipe = recipe(false);
    (recipe.train.warmup_steps, recipe.train.resume_warmup, recipe.train.decay) = (1, 4, Decay::Constant);
    recipe.train.steps = 6;
    let strip = |run: &str| {
        let store = CheckpointStore::new(&RunDir::new(folder.path().join(run)));
        let checkpoint = store.latest_complete(Check::Hashes).unwrap().checkpoint.unwrap();
        let names = checkpoint.manifest.files.iter().map(|file| &file.name);
        let copy = |at: &Path| {
            for name in names.filter(|name| *name != "optimizer.safetensors") {
                std::fs::create_dir_all(at.join(name).parent().unwrap()).unwrap();
                std::fs::copy(checkpoint.path.join(name), at.join(name)).unwrap();
            }
            Ok(())
        };
        store.publish(checkpoint.step, serde_json::json!({}), copy).unwrap();
    };
    let rates = |events: &[Event]| -> Vec<f64> {
        events
            .iter()
            .filter_map(|event| if let Event::Step(step) = event { Some(step.lr / 1e-3) } else { None })
            .collect()
    };
    recipe.train.lr = 1e-3;
    for run in ["once", "twice"] {
        train(WorkerSpec { stop_after: Some(2), ..spec(folder.path(), run, &recipe) }).0.unwrap();
        strip(run);
    }
    let (result, events) = train(spec(folder.path(), "once", &recipe));
    result.unwrap();
    assert_eq!(rates(&events), [0.25, 0.5, 0.75, 1.0]);
    assert!(
        events.iter().any(
            |event| matches!(event, Event::Message { level: Level::Warning, text } if text.contains("no moments"))
        )
    );
    let work = events.iter().rev().find_map(|event| if let Event::Step(step) = event { step.work } else { None });
    let samples = recipe.train.batch_size as u64 * recipe.train.accumulate as u64;
    assert_eq!(work, Some(Work { full_lr_steps: 3, full_lr_samples: 3 * samples, warmup_steps: 3 }));
    train(WorkerSpec { stop_after: Some(4), ..spec(folder.path(), "twice", &recipe) }).0.unwrap();
    train(spec(folder.path(), "twice", &recipe)).0.unwrap();
    assert!(last_checkpoint(&folder.path().join("once")) == last_checkpoint(&folder.path().join("twice")));
}

#[test]
fn diverging_training_fails_loudly_and_keeps_the_last_checkpoint() {
    let folder = tempfile::tempdir().unwrap();
    let mut recipe = recipe(false);
    recipe.train.lr = 1e30;
    recipe.train.warmup_steps = 0;
    recipe.train.save_every = 1;
    recipe.validation.every = 100;
    let (result, events) = train(spec(folder.path(), "run", &recipe));
    let error = result.unwrap_err();
    assert_eq!(error.exit, Exit::Crash);
    assert!(error.to_string().contains("not finite") || error.to_string().contains("loss is"), "{error}");
    assert!(matches!(events.last(), Some(Event::AttemptEnded { outcome: Outcome::Failed, exit_code: 70, .. })));
    let outcome = std::fs::read_to_string(folder.path().join("run/outcome.json")).unwrap();
    assert!(outcome.contains("failed"), "{outcome}");
    last_checkpoint(&folder.path().join("run"));
}

#[test]
fn ruined_weights_are_named_and_never_saved() {
    let folder = tempfile::tempdir().unwrap();
    let mut recipe = recipe(false);
    // Infinite in f32: the first update ruins every weight.
    (recipe.train.lr, recipe.train.warmup_steps, recipe.train.decay) = (1e39, 0, Decay::Constant);
    (recipe.train.save_every, recipe.validation.every) = (1, 100);
    let error = train(spec(folder.path(), "run", &recipe)).0.unwrap_err();
    assert_eq!(error.exit, Exit::Crash);
    assert!(error.what.contains("action_decoder.") && error.what.contains("not finite"), "{error}");
    assert_eq!(CheckpointStore::new(&RunDir::new(folder.path().join("run"))).list().unwrap(), Vec::<u64>::new());
}

#[test]
fn a_panic_is_a_failure_with_its_reason_on_disk() {
    let folder = tempfile::tempdir().unwrap();
    let spec = spec(folder.path(), "run", &recipe(false));
    let run = spec.run.clone();
    let error = worker::run(spec, StopFlag::default(), &mut |event| {
        assert!(!matches!(event, Event::Step(step) if step.step == 2), "a bug at step 2");
    })
    .unwrap_err();
    assert_eq!(error.exit, Exit::Crash);
    let outcome: OutcomeRecord = serde_json::from_slice(&std::fs::read(run.outcome()).unwrap()).unwrap();
    assert_eq!((outcome.outcome, outcome.exit_code), (Outcome::Failed, 70));
    assert!(outcome.reason.contains("panicked"), "{outcome:?}");
    let mut reader = RunReader::open(run.root());
    reader.poll(now_ms()).unwrap();
    assert_eq!(reader.view().state(now_ms()).0, RunState::Failed);
}

#[test]
fn a_checkpoint_is_announced_when_it_is_durable_and_milestones_stay() {
    let folder = tempfile::tempdir().unwrap();
    let mut recipe = recipe(false);
    (recipe.train.save_every, recipe.train.keep_last, recipe.train.keep_every) = (1, 1, 2);
    let spec = spec(folder.path(), "run", &recipe);
    let run = spec.run.clone();
    let mut announced = Vec::new();
    let exit = worker::run(spec, StopFlag::default(), &mut |event| {
        if let Event::Checkpoint { step, bytes, ms, blocked_ms } = event {
            let checkpoint = Checkpoint::open(&run.checkpoint(*step), *step, Check::Hashes).unwrap();
            assert_eq!(checkpoint.bytes(), *bytes);
            let blocked_ms = blocked_ms.unwrap();
            assert!(blocked_ms > 0.0 && *ms > 0.0 && ms.is_finite(), "{ms} ms, {blocked_ms} ms");
            announced.push(*step);
        }
    });
    assert_eq!(exit.unwrap(), Exit::Done);
    assert_eq!(announced, [1, 2, 3, 4, 5, 6]);
    assert_eq!(CheckpointStore::new(&run).list().unwrap(), [2, 4, 6]);
}

#[test]
fn a_save_that_fails_is_the_end_of_the_run_and_no_loss() {
    let folder = tempfile::tempdir().unwrap();
    let recipe = recipe(true);
    let (_, whole) = train(spec(folder.path(), "whole", &recipe));
    let broken = spec(folder.path(), "broken", &recipe);
    let (checkpoints, away) = (broken.run.checkpoints(), folder.path().join("away"));
    let mut events = Vec::new();
    let result = worker::run(broken, StopFlag::default(), &mut |event| {
        let saved = events.iter().any(|event| matches!(event, Event::Checkpoint { .. }));
        if saved && !away.exists() && matches!(event, Event::Phase { phase: Phase::Saving, .. }) {
            std::fs::rename(&checkpoints, &away).unwrap();
            std::fs::write(&checkpoints, "a file in the way").unwrap();
        }
        events.push(event.clone());
    });
    let error = result.unwrap_err();
    assert_eq!((error.exit, error.code), (Exit::Disk, "not_a_folder"), "{error}");
    let Some(Event::AttemptEnded { outcome: Outcome::Failed, exit_code: 74, reason, step }) = events.last() else {
        panic!("{:?}", events.last())
    };
    assert_eq!(*reason, error.to_string());
    // Found at a step's end or at the next save, and no later.
    assert!((4..=6).contains(step), "{step}");
    std::fs::remove_file(&checkpoints).unwrap();
    std::fs::rename(&away, &checkpoints).unwrap();
    assert_eq!(last_checkpoint(&folder.path().join("broken")).0, 2);
    let (result, rest) = train(spec(folder.path(), "broken", &recipe));
    assert_eq!(result.unwrap(), Exit::Done);
    assert_eq!(losses(&whole)[2..], losses(&rest));
    assert!(last_checkpoint(&folder.path().join("whole")) == last_checkpoint(&folder.path().join("broken")));
}

#[test]
fn a_damaged_checkpoint_is_passed_over_named_and_kept() {
    let folder = tempfile::tempdir().unwrap();
    let mut recipe = recipe(false);
    (recipe.train.save_every, recipe.train.keep_last) = (1, 6);
    recipe.validation.every = 6;
    train(spec(folder.path(), "whole", &recipe)).0.unwrap();
    train(WorkerSpec { stop_after: Some(4), ..spec(folder.path(), "run", &recipe) }).0.unwrap();
    let run = RunDir::new(folder.path().join("run"));
    let weights = |step| run.checkpoint(step).join("transformer/diffusion_pytorch_model.safetensors");
    // The newest is cut short, the one before lost its manifest, the one before that has a bit turned.
    std::fs::OpenOptions::new().write(true).open(weights(4)).unwrap().set_len(1000).unwrap();
    std::fs::remove_file(run.checkpoint(3).join("manifest.json")).unwrap();
    let mut bytes = std::fs::read(weights(2)).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(weights(2), &bytes).unwrap();
    let (result, events) = train(spec(folder.path(), "run", &recipe));
    assert_eq!(result.unwrap(), Exit::Done);
    let warnings: Vec<&String> = events
        .iter()
        .filter_map(|event| match event {
            Event::Message { level: Level::Warning, text } => Some(text),
            _ => None,
        })
        .collect();
    let found =
        ["file has 1000 bytes, the manifest says", "no readable manifest", "differs from the manifest's SHA-256"];
    assert_eq!(warnings.len(), found.len(), "{warnings:?}");
    for ((warning, found), step) in warnings.iter().zip(found).zip([4, 3, 2]) {
        assert!(warning.starts_with("passed over a checkpoint: ") && warning.contains(found), "{warning}");
        assert!(warning.contains(&format!("step-{step:08}")), "{warning}");
        assert!(run.checkpoints().join(format!(".bad-step-{step:08}")).exists(), "kept for a person to look at");
    }
    assert_eq!(losses(&events).first().unwrap().0, 2, "from the checkpoint of step 1");
    assert!(last_checkpoint(&folder.path().join("whole")) == last_checkpoint(run.root()));
}

#[test]
fn a_clock_set_back_upsets_neither_readers_nor_a_resume() {
    let folder = tempfile::tempdir().unwrap();
    let recipe = recipe(false);
    let (_, whole) = train(spec(folder.path(), "whole", &recipe));
    train(WorkerSpec { stop_after: Some(3), ..spec(folder.path(), "run", &recipe) }).0.unwrap();
    let run = RunDir::new(folder.path().join("run"));
    // The first attempt seems to come from tomorrow, its second half from before its first.
    let events = run.attempt(1).events();
    let text = std::fs::read_to_string(&events).unwrap();
    let count = text.lines().count();
    let moved = text.lines().enumerate().map(|(index, line)| {
        let mut line: serde_json::Value = serde_json::from_str(line).unwrap();
        let hours = if index < count / 2 { 24 } else { 12 };
        line["time_ms"] = (line["time_ms"].as_u64().unwrap() + hours * 3_600_000).into();
        format!("{line}\n")
    });
    std::fs::write(&events, moved.collect::<String>()).unwrap();
    let (result, rest) = train(spec(folder.path(), "run", &recipe));
    assert_eq!(result.unwrap(), Exit::Done);
    assert_eq!(losses(&whole)[3..], losses(&rest));
    assert!(last_checkpoint(&folder.path().join("whole")) == last_checkpoint(run.root()));
    let mut reader = RunReader::open(run.root());
    reader.poll(now_ms()).unwrap();
    let view = reader.view();
    assert_eq!((view.bad_lines, view.attempts.len()), (0, 2));
    assert_eq!(view.series.step, [1, 2, 3, 4, 5, 6]);
    assert!(view.series.superseded.iter().all(|superseded| !superseded));
    assert_eq!(view.state(now_ms()).0, RunState::Finished);
    assert!(view.last_event_ms.unwrap() <= now_ms(), "silence is counted from the last event, not from tomorrow");
}

/// Trains and asks to stop at the first event of a phase.
fn stop_at(phase: Phase, spec: WorkerSpec) -> (Exit, u64, String) {
    let run = spec.run.clone();
    let mut ended = None;
    let exit = worker::run(spec, StopFlag::default(), &mut |event| match event {
        Event::Phase { phase: at, .. } if *at == phase => {
            std::fs::create_dir_all(run.stop_request().parent().unwrap()).unwrap();
            std::fs::write(run.stop_request(), "").unwrap();
        }
        Event::AttemptEnded { outcome: Outcome::Stopped, step, reason, .. } => ended = Some((*step, reason.clone())),
        _ => {}
    });
    let (step, reason) = ended.unwrap_or_else(|| panic!("not stopped at {phase:?}: {exit:?}"));
    (exit.unwrap(), step, reason)
}

#[test]
fn a_stop_is_heard_before_the_first_step() {
    let folder = tempfile::tempdir().unwrap();
    let mut unfitted = recipe(false);
    unfitted.codec = CodecConfig::Linear { path: folder.path().join("codec.safetensors") };
    for (phase, recipe) in [
        (Phase::LoadingData, &recipe(false)),
        (Phase::FittingCodec, &unfitted),
        (Phase::BuildingModel, &recipe(false)),
        (Phase::Validating, &recipe(false)),
    ] {
        let name = format!("{phase:?}");
        let stopped = stop_at(phase, spec(folder.path(), &name, recipe));
        let reason = "stopped by stop file before the first step; nothing to save yet, start again";
        assert_eq!(stopped, (Exit::Stopped, 0, reason.to_owned()), "{name}");
        let checkpoints = CheckpointStore::new(&RunDir::new(folder.path().join(&name)));
        assert_eq!(checkpoints.list().unwrap(), [0u64; 0], "{name}");
        assert!(!folder.path().join("codec.safetensors").exists(), "a fit that was stopped leaves no file");
    }
    // Starting again does it all; a stop before new steps leaves the checkpoint that is there.
    let again = || spec(folder.path(), "LoadingData", &recipe(false));
    assert_eq!(train(WorkerSpec { stop_after: Some(1), ..again() }).0.unwrap(), Exit::Stopped);
    let (exit, step, reason) = stop_at(Phase::LoadingData, again());
    assert_eq!((exit, step), (Exit::Stopped, 1));
    assert_eq!(reason, "stopped by stop file before a new step; the checkpoint of step 1 stands");
    assert_eq!(train(again()).0.unwrap(), Exit::Done);
}
