//! Whatever reads files that others wrote, fed with bytes: each reader by the public function that a command would call.
//!
//! Shared by the targets of cargo-fuzz beside it and by `tests/fuzz.rs`, which needs no nightly compiler. What a reader
//! answers does not matter here, only that it answers: no panic, no endless loop, no memory that grows with a number in a
//! file. The corpus is the repository's own test data:
//!
//! `cargo +nightly fuzz run --dev parquet -s none fuzz/corpus/parquet tests/data/robosuite_tiny_v21/data/chunk-000 --
//! -max_total_time=600` with cargo-fuzz, from the repository's root; `fuzz/corpus` is where it keeps what it finds. `-s none`
//! leaves the address sanitiser out, with which every dependency would be built.

#[path = "../../tests/recipes/mod.rs"]
mod recipes;

use lbva_tui::config::{self, EpisodeDataConfig, LatentSource, SampleUnit, TextConfig};
use lbva_tui::data::columns::ColumnFile;
use lbva_tui::data::lerobot::Metadata;
use lbva_tui::data::video::VideoFile;
use lbva_tui::data::{EpisodeId, EpisodeSet};
use lbva_tui::runlog::{Check, Checkpoint, RunReader};
use std::fs;
use std::path::{Path, PathBuf};

/// Kinds of files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Input {
    RunLog,
    Manifest,
    Recipe,
    Metadata,
    Parquet,
    Video,
    /// A pickle in a zip archive.
    LatentFile,
}

pub const ALL: [Input; 7] =
    [Input::RunLog, Input::Manifest, Input::Recipe, Input::Metadata, Input::Parquet, Input::Video, Input::LatentFile];

const VIEW: &str = "observation.images.agentview_rgb";
const LATENTS: &str = "episode_000003_79_111";

/// A folder in which files are put where their readers look for them.
pub struct Readers {
    folder: tempfile::TempDir,
    repository: PathBuf,
    episodes: EpisodeSet,
}

impl Readers {
    /// `repository` is the root of this project's checkout.
    pub fn new(repository: &Path) -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let dataset = folder.path().join("dataset");
        copy(&repository.join("tests/data/robosuite_tiny_v21/meta"), &dataset.join("meta"));
        copy(&repository.join("tests/data/robosuite_tiny_v21/data"), &dataset.join("data"));
        copy(&repository.join("tests/data/latent_files/latents"), &dataset.join("latents"));
        fs::copy(repository.join("tests/data/latent_files/empty_emb.pt"), dataset.join("empty_emb.pt"))
            .expect("copied");
        let config = EpisodeDataConfig {
            latents: LatentSource::Official,
            frame_stride: 4,
            ..recipes::episodes(&dataset, &[VIEW], SampleUnit::Segment)
        };
        let episodes =
            EpisodeSet::open(&config, &recipes::episode_model(), &TextConfig::LatentFiles).expect("the tiny dataset");
        fs::create_dir_all(folder.path().join("run/attempts/0001")).expect("a run");
        fs::create_dir_all(folder.path().join("step-00000001")).expect("a checkpoint");
        copy(&repository.join("tests/data/robosuite_tiny_v21/meta"), &folder.path().join("described/meta"));
        Self { folder, repository: repository.to_owned(), episodes }
    }

    /// Where the bytes of this kind are put: after an abort, the input that caused it.
    pub fn path(&self, input: Input) -> PathBuf {
        self.folder.path().join(match input {
            Input::RunLog => "run/attempts/0001/events.jsonl".to_owned(),
            Input::Manifest => "step-00000001/manifest.json".to_owned(),
            Input::Recipe => "recipe.yaml".to_owned(),
            Input::Metadata => "described/meta/info.json".to_owned(),
            Input::Parquet => "rows.parquet".to_owned(),
            Input::Video => "video.mp4".to_owned(),
            Input::LatentFile => format!("dataset/latents/chunk-000/{VIEW}/{LATENTS}.pth"),
        })
    }

    /// Small files of this kind, whole.
    pub fn corpus(&self, input: Input) -> Vec<Vec<u8>> {
        let tiny = "tests/data/robosuite_tiny_v21";
        let files: Vec<String> = match input {
            Input::RunLog => return vec![RUN_LOG.as_bytes().to_vec()],
            Input::Manifest => return vec![MANIFEST.as_bytes().to_vec()],
            Input::Recipe => vec!["configs/xwam_demo.yaml".into(), "configs/lingbot_tiny.yaml".into()],
            Input::Metadata => vec![format!("{tiny}/meta/info.json")],
            Input::Parquet => vec![format!("{tiny}/data/chunk-000/episode_000000.parquet")],
            Input::Video => vec!["tests/data/bframes/eye_in_hand_rgb_000000.mp4".into()],
            Input::LatentFile => vec![
                format!("tests/data/latent_files/latents/chunk-000/{VIEW}/{LATENTS}.pth"),
                "tests/data/latent_files/empty_emb.pt".into(),
            ],
        };
        files.iter().map(|file| fs::read(self.repository.join(file)).expect("test data")).collect()
    }

    /// Reads the bytes as this kind of file. Answers are dropped, errors are spelled out.
    pub fn read(&self, input: Input, bytes: &[u8]) {
        let path = self.path(input);
        fs::write(&path, bytes).expect("written");
        let error = match input {
            Input::RunLog => {
                let mut reader = RunReader::open(&self.folder.path().join("run"));
                let read = reader.poll(1).err();
                let _ = (reader.view().state(1), reader.view().eta_ms());
                read
            }
            Input::Manifest => path.parent().and_then(|folder| Checkpoint::open(folder, 1, Check::Hashes).err()),
            Input::Recipe => config::load(&path).err(),
            Input::Metadata => Metadata::open(&self.folder.path().join("described")).err(),
            Input::Parquet => ColumnFile::open(&path)
                .and_then(|columns| columns.read("action").and(columns.read("observation.state")))
                .err(),
            Input::Video => VideoFile::open(&path).and_then(|mut video| video.read_frames(&[0, 7, 20])).err(),
            Input::LatentFile => {
                let id = self.episodes.train().iter().find(|id| id.to_string() == LATENTS).copied();
                id.and_then(|id: EpisodeId| self.episodes.load(id, None, None).err())
            }
        };
        let words = error.map(|error| error.to_string()).unwrap_or_default();
        assert!(!words.contains('\n') && words.len() < 4000, "an error is a line: {words}");
    }
}

fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).expect("a folder");
    for entry in fs::read_dir(from).expect("test data").flatten() {
        let target = to.join(entry.file_name());
        if entry.path().is_dir() {
            copy(&entry.path(), &target);
        } else {
            fs::copy(entry.path(), target).expect("copied");
        }
    }
}

const RUN_LOG: &str = r#"{"v":1,"time_ms":1,"event":"attempt_started","attempt":1,"arm":"m1","pid":1,"host":"h","start_step":0,"total_steps":20,"save_every":5,"validate_every":5,"parameters":1,"device":"cpu","threads":2}
{"v":1,"time_ms":2,"event":"phase","phase":"caching_latents","done":1,"total":7}
{"v":1,"time_ms":3,"event":"step","step":1,"loss":1.5,"loss_video":1.0,"loss_action":0.25,"loss_proprio":null,"grad_norm":2e0,"lr":0.0001,"step_ms":100.5,"data_ms":2.0,"padding_waste":0.0123,"tokens":1480,"memory":{"kind":"rss","bytes":5,"peak_bytes":6,"total_bytes":7},"branch_norm":0.0,"packing":{"micro_steps":2,"distinct_shapes":3,"frame_padding":0.1,"alignment_padding":0.0,"rank_imbalance":1.0},"work":{"full_lr_steps":0,"full_lr_samples":0,"warmup_steps":1}}
{"v":1,"time_ms":4,"event":"checkpoint","step":1,"bytes":5,"ms":1.0,"blocked_ms":0.5}
{"v":1,"time_ms":5,"event":"change_accepted","field":"train.lr","recorded":0.1,"now":[1,{"a":null}]}
{"v":1,"time_ms":6,"event":"validation","step":5,"clips":2,"wrist_lpips":0.5,"wrist_psnr":18.5,"wrist_ssim":null,"trans_l2_norm":null,"trans_l2_m":null,"rot_deg":null,"ceiling_lpips":null,"ceiling_psnr":null,"ms":null}
{"v":1,"time_ms":7,"event":"message","level":"warning","text":"a \u001b[31mword"}
{"v":1,"time_ms":8,"event":"stop_requested","by":"x"}
{"v":1,"time_ms":9,"event":"attempt_ended","outcome":"stopped","step":5,"exit_code":75,"reason":"preempted"}
"#;

const MANIFEST: &str = r#"{"v":1,"step":1,"files":[{"name":"manifest.json","bytes":210,"sha256":"ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"}],"details":{"a":[1,2.5e3,null,true,"x"]}}
"#;
