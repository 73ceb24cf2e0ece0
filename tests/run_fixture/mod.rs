//! A small experiment of either family over the episodes of tests/data, and what two runs of it must have in common:
//! shared by the tests that disturb runs.
#![allow(dead_code)]

use lbva_tui::codec::{FitSettings, LinearCodec, PictureSource};
use lbva_tui::config::{CodecConfig, Recipe};
use lbva_tui::data::{Dataset, EpisodeSet};
use lbva_tui::runlog::{Check, CheckpointStore, ExperimentRuns, OutcomeRecord, RunDir};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use tempfile::TempDir;

pub const REPOSITORY: &str = env!("CARGO_MANIFEST_DIR");
pub const ARM: &str = "one";

/// An experiment of one family in a folder of its own, over the four episodes of tests/data.
pub struct Fixture {
    pub folder: TempDir,
    pub recipe: PathBuf,
}

fn fit(source: &dyn PictureSource, folder: &Path) -> CodecConfig {
    let path = folder.join("codec.safetensors");
    let settings = FitSettings { clips: 4, wrist_patches: 500, wrist_emphasis: 5, iterations: 2 };
    LinearCodec::fit(source, settings, &|_, _| Ok(())).unwrap().save(&path).unwrap();
    CodecConfig::Linear { path }
}

impl Fixture {
    pub fn xwam(steps: u64) -> Self {
        let folder = TempDir::new().unwrap();
        let text = fs::read_to_string(Path::new(REPOSITORY).join("configs/xwam_demo.yaml")).unwrap();
        let mut recipe = serde_yaml::from_str::<Recipe>(&text).unwrap().xwam("the test").unwrap().clone();
        recipe.data.dataset = Path::new(REPOSITORY).join("tests/data/robosuite_tiny_v21");
        recipe.data.validation_episodes = vec![3];
        recipe.codec = fit(&Dataset::open(&recipe.data, &recipe.model).unwrap(), folder.path());
        let model = &mut recipe.model;
        (model.dim, model.ffn_dim, model.num_layers, model.num_heads) = (48, 64, 2, 2);
        (model.geometry.layers, model.geometry.enabled) = (vec![0, 1], true);
        let train = &mut recipe.train;
        (train.steps, train.batch_size, train.accumulate, train.warmup_steps) = (steps, 1, 1, 3);
        (train.save_every, train.keep_last, train.keep_every) = (2, 2, 12);
        let validation = &mut recipe.validation;
        (validation.every, validation.clips, validation.strips) = (8, 2, 1);
        (validation.sample_steps, validation.action_steps) = (2, 1);
        Self::write(folder, &Recipe::Xwam(recipe))
    }

    pub fn lingbot(steps: u64) -> Self {
        let folder = TempDir::new().unwrap();
        let text = fs::read_to_string(Path::new(REPOSITORY).join("tests/fixtures/lingbot_tiny.yaml")).unwrap();
        let mut recipe = serde_yaml::from_str::<Recipe>(&text).unwrap().lingbot("the test").unwrap().clone();
        recipe.data.dataset = Path::new(REPOSITORY).join("tests/data/robosuite_tiny_v21");
        recipe.data.frame_stride = 4;
        let set = EpisodeSet::open(&recipe.data, &recipe.model, &recipe.text).unwrap();
        recipe.codec = fit(&set, folder.path());
        let train = &mut recipe.train;
        (train.steps, train.batch_size, train.accumulate) = (steps, 1, 1);
        (train.save_every, train.keep_last, train.keep_every) = (1, 1, 0);
        recipe.validation.every = 8;
        Self::write(folder, &Recipe::Lingbot(recipe))
    }

    pub fn write(folder: TempDir, recipe: &Recipe) -> Self {
        let path = folder.path().join("recipe.yaml");
        fs::write(&path, recipe.to_yaml()).unwrap();
        Self { folder, recipe: path }
    }

    /// An experiment over the recipe in `folder`; a second arm is there because an experiment compares two.
    pub fn experiment(&self, folder: &Path) -> Experiment {
        fs::create_dir_all(folder).unwrap();
        let text = format!(
            "name: kill\nquestion: Is anything lost?\nbase: {}\nablated: [train.seed]\n\
             decision: {{baseline: {ARM}, candidate: two, metric: wrist_lpips, confidence: 0.95, resamples: 100}}\n\
             arms:\n  - name: {ARM}\n  - name: two\n    set:\n      train.seed: 1\n",
            self.recipe.display()
        );
        fs::write(folder.join("experiment.yaml"), text).unwrap();
        Experiment { folder: folder.to_owned(), run: ExperimentRuns::new(folder).run(ARM) }
    }

    pub fn here(&self, name: &str) -> Experiment {
        self.experiment(&self.folder.path().join(name))
    }

    /// An experiment whose run nothing disturbed.
    pub fn undisturbed(&self) -> Experiment {
        let experiment = self.here("undisturbed");
        let output = experiment.finish();
        assert_eq!(output.status.code(), Some(0), "{}", said(&output));
        experiment
    }
}

pub struct Experiment {
    pub folder: PathBuf,
    pub run: RunDir,
}

impl Experiment {
    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_lbva-tui"));
        command.args(["--no-ui", "run"]).arg(&self.folder).args(["--arm", ARM]).args(arguments).stdin(Stdio::null());
        command
    }

    pub fn finish(&self) -> Output {
        self.command(&[]).output().unwrap()
    }

    pub fn stop_after(&self, step: u64) {
        let output = self.command(&["--stop-after", &step.to_string()]).output().unwrap();
        assert_eq!(output.status.code(), Some(75), "{}", said(&output));
    }

    pub fn checkpoints(&self) -> CheckpointStore {
        CheckpointStore::new(&self.run)
    }

    /// Step of the newest checkpoint that holds what its manifest says; 0 if there is none.
    pub fn saved(&self) -> u64 {
        let latest = self.checkpoints().latest_complete(Check::Hashes).unwrap();
        assert_eq!(latest.warnings, [], "an interrupted save is invisible, not damaged");
        latest.checkpoint.map_or(0, |checkpoint| checkpoint.step)
    }

    pub fn outcome(&self) -> OutcomeRecord {
        serde_json::from_slice(&fs::read(self.run.outcome()).unwrap()).unwrap()
    }

    pub fn lines(&self, attempt: u32) -> Vec<Value> {
        let text = fs::read_to_string(self.run.attempt(attempt).events()).unwrap_or_default();
        // The last line may be torn.
        text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
    }

    /// What a step says that follows from seed and step alone, of every attempt; repeated steps must agree.
    pub fn losses(&self) -> BTreeMap<u64, Vec<Value>> {
        let mut losses = BTreeMap::new();
        for attempt in self.run.attempt_numbers().unwrap() {
            for line in self.lines(attempt).iter().filter(|line| line["event"] == "step") {
                let keys = ["loss", "loss_video", "loss_action", "loss_proprio", "grad_norm", "lr", "tokens"];
                let values = keys.map(|key| line[key].clone()).to_vec();
                let step = line["step"].as_u64().unwrap();
                if let Some(before) = losses.insert(step, values.clone()) {
                    assert_eq!(before, values, "step {step} differs when attempt {attempt} repeats it");
                }
            }
        }
        losses
    }

    /// Every file below a folder of the run, with its bytes, but for what a kill left of a file not yet whole.
    pub fn files(&self, folder: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
        fn collect(root: &Path, folder: &Path, into: &mut BTreeMap<PathBuf, Vec<u8>>) {
            for entry in fs::read_dir(folder).unwrap().map(Result::unwrap) {
                let path = entry.path();
                if path.is_dir() {
                    collect(root, &path, into);
                } else if !entry.file_name().to_string_lossy().starts_with(".tmp-") {
                    into.insert(path.strip_prefix(root).unwrap().to_owned(), fs::read(&path).unwrap());
                }
            }
        }
        let mut files = BTreeMap::new();
        collect(folder, folder, &mut files);
        files
    }

    /// Bit for bit: weights and moments of every checkpoint kept, every logged loss, every validation metric and strip.
    pub fn equals(&self, other: &Self) {
        let names = |files: &BTreeMap<PathBuf, Vec<u8>>| files.keys().cloned().collect::<Vec<_>>();
        for folder in [RunDir::checkpoints, RunDir::validation] {
            let (ours, theirs) = (self.files(&folder(&self.run)), other.files(&folder(&other.run)));
            assert_eq!(names(&ours), names(&theirs));
            for (name, bytes) in &ours {
                assert!(*bytes == theirs[name], "{} differs", name.display());
            }
        }
        assert_eq!(self.losses(), other.losses());
    }
}

pub fn said(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}
