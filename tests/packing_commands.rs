//! `verify packing`, `profile` and `LINGBOT_PROFILE` from outside, on a tiny LingBot-VA recipe and real episodes.

use assert_cmd::Command;
use lbva_tui::codec::{FitSettings, LinearCodec};
use lbva_tui::config::{self, Recipe};
use lbva_tui::data::{Dataset, EpisodeSet};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::OnceLock;
use tempfile::TempDir;

const REPOSITORY: &str = env!("CARGO_MANIFEST_DIR");
const RECIPE: &str = "tests/fixtures/lingbot_tiny.yaml";

/// A fit that is good for nothing but numbers.
const HURRY: FitSettings = FitSettings { clips: 4, wrist_patches: 500, wrist_emphasis: 5, iterations: 2 };

struct Ran {
    code: i32,
    out: String,
    err: String,
}

impl Ran {
    fn json(&self) -> Value {
        serde_json::from_str(&self.out).unwrap_or_else(|error| panic!("{error}: {}{}", self.out, self.err))
    }
}

fn run_with(arguments: &[&str], variables: &[(&str, &str)]) -> Ran {
    let mut command = Command::cargo_bin("lbva-tui").unwrap();
    command.current_dir(REPOSITORY).env_remove("COLUMNS").env_remove("LINGBOT_PROFILE");
    let output = command.envs(variables.iter().copied()).args(arguments).output().unwrap();
    Ran {
        code: output.status.code().expect("an exit code, not a signal"),
        out: String::from_utf8(output.stdout).unwrap(),
        err: String::from_utf8(output.stderr).unwrap(),
    }
}

fn run(arguments: &[&str]) -> Ran {
    run_with(arguments, &[])
}

/// `codec.path=FILE` of a codec that was fitted in a hurry, once a process.
fn codec() -> String {
    static FILE: OnceLock<(TempDir, PathBuf)> = OnceLock::new();
    let (_, path) = FILE.get_or_init(|| {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("codec.safetensors");
        let Recipe::Lingbot(recipe) = config::load(&Path::new(REPOSITORY).join(RECIPE)).unwrap() else {
            panic!("the fixture is a LingBot-VA recipe")
        };
        let set = EpisodeSet::open(&recipe.data, &recipe.model, &recipe.text).unwrap();
        LinearCodec::fit(&set, HURRY, &|_, _| Ok(())).unwrap().save(&path).unwrap();
        (folder, path)
    });
    format!("codec.path={}", path.display())
}

/// An experiment over the tiny recipe: packed by budget, and by bucket.
fn experiment() -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let directory = folder.path().join("tiny");
    std::fs::create_dir(&directory).unwrap();
    let text = format!(
        "name: tiny
question: Does it matter how episodes are packed?
base: {REPOSITORY}/{RECIPE}
ablated: [packing.kind]
decision: {{baseline: budget, candidate: bucket, metric: wrist_lpips, confidence: 0.95, resamples: 1000}}
arms:
  - name: budget
  - name: bucket
    set: {{packing.kind: bucket}}
"
    );
    std::fs::write(directory.join("experiment.yaml"), text).unwrap();
    (folder, directory)
}

#[test]
fn packed_episodes_of_the_recipe_pass() {
    let ran = run(&["verify", "packing", RECIPE, "--frames", "3,9,5", "--json"]);
    assert_eq!(ran.code, 0, "{}", ran.err);
    let report = &ran.json()["report"];
    assert_eq!((&report["passed"], &report["tile"]), (&Value::from(true), &Value::from(vec![8, 16])));
    // 4 x 8 patches and 4 x 2 actions.
    assert_eq!(report["tokens_per_frame"], 40);
    let cases = report["cases"].as_array().unwrap();
    let of = |index: usize, field: &str| cases[index][field].clone();
    let lengths = |list: [usize; 3]| Value::from(list.to_vec());
    assert_eq!([0, 1, 2].map(|case| of(case, "case")), ["equal", "bucket", "budget"].map(Value::from));
    assert_eq!([0, 1, 2].map(|case| of(case, "frames")), [[8; 3], [3, 9, 5], [3, 9, 5]].map(lengths));
    assert_eq!([0, 1, 2].map(|case| of(case, "padded_frames")), [[8; 3], [16; 3], [3, 9, 5]].map(lengths));
    // 2 x 40 a frame, to 128: 1920, 3840, 1360 -> 1408; by themselves 640, and 240 + 720 + 400 -> 256 + 768 + 512.
    let tokens = |side: &str| [0, 1, 2].map(|case| cases[case][side]["tokens"].as_u64().unwrap());
    assert_eq!((tokens("packed"), tokens("separate")), ([1920, 3840, 1408], [1920, 1536, 1536]));
    for case in cases {
        assert_eq!(case["finite_gradients"], case["trained_parameters"]);
        assert!(case["trained_parameters"].as_u64().unwrap() == 79, "83 tensors, 4 of them read by nothing");
        assert!(case["packed"]["peak_bytes"].as_u64() >= case["packed"]["before_bytes"].as_u64());
        assert!(case["gradient"]["error"].as_f64().unwrap() < 1e-5);
    }
}

#[test]
fn the_table_states_its_limits() {
    let ran = run(&["verify", "packing", "no/such.yaml"]);
    assert_eq!(ran.code, 78, "{}", ran.err);
    let ran = run(&[
        "verify",
        "packing",
        RECIPE,
        "--frames",
        "2,3",
        "--tile",
        "2x4",
        "--set",
        "data.dataset=/no/such/folder",
    ]);
    assert_eq!(ran.code, 0, "a tile that is named needs no data: {}", ran.err);
    let lines: Vec<&str> = ran.out.lines().collect();
    assert!(lines[0].starts_with(RECIPE) && lines[0].contains("PASS") && lines[0].contains("tile 2x4"), "{}", ran.out);
    let row = |label: &str| {
        let line = lines.iter().find(|line| line.trim_start().starts_with(label));
        line.unwrap_or_else(|| panic!("{label}: {}", ran.out)).split_whitespace().collect::<Vec<_>>()
    };
    assert!(row("largest output difference").ends_with(&["2e-6"]), "{}", ran.out);
    assert!(row("largest gradient difference").ends_with(&["1e-5"]), "{}", ran.out);
    assert!(row("video loss, difference").ends_with(&["1e-6"]), "{}", ran.out);
    assert!(row("latent frames").ends_with(&["2", "x", "8", "2+3", "2+3"]), "{}", ran.out);
    assert!(row("padded to").ends_with(&["-", "2", "x", "8", "-"]), "{}", ran.out);
    assert!(row("result").ends_with(&["pass", "pass", "pass"]), "{}", ran.out);
}

#[test]
fn what_cannot_be_verified_is_said_in_one_line() {
    let refused = |arguments: &[&str]| {
        let ran = run(&[&["verify", "packing"], arguments, &["--json"]].concat());
        let code = ran.json()["error"]["code"].as_str().unwrap_or_default().to_owned();
        (ran.code, code)
    };
    let no = |exit, code: &str| (exit, code.to_owned());
    assert_eq!(refused(&[RECIPE, "--frames", "5"]), no(2, "too_few_episodes"));
    assert_eq!(refused(&[RECIPE, "--frames", "5,0"]), no(2, "no_frames"));
    assert_eq!(refused(&[RECIPE, "--frames", "5,many"]), no(2, "usage"));
    assert_eq!(refused(&[RECIPE, "--tile", "24"]), no(2, "usage"));
    assert_eq!(refused(&[RECIPE, "--tile", "3x4"]), no(2, "tile_size"));
    assert_eq!(refused(&["configs/xwam_demo.yaml"]), no(78, "other_family"));
    assert_eq!(refused(&[RECIPE, "--set", "data.dataset=/no/such/folder"]).0, 65);
    let large = "9000000000,9000000000";
    assert_eq!(refused(&[RECIPE, "--frames", large]), no(69, "not_enough_memory"));
    let ran = run(&["verify", "packing", RECIPE, "--frames", large]);
    assert!(ran.err.contains("of memory are needed, this machine has"), "{}", ran.err);
}

#[test]
fn a_profile_measures_each_micro_step_and_touches_no_run() {
    let (_folder, experiment) = experiment();
    let path = experiment.to_str().unwrap();
    let codec = codec();
    let ran = run(&["profile", path, "--micro-steps", "7", "--set", &codec, "--json"]);
    assert_eq!(ran.code, 0, "{}", ran.err);
    let document = ran.json();
    assert_eq!((&document["recipe"], &document["family"]), (&"tiny, budget".into(), &"lingbot".into()));
    let profile = &document["profile"];
    let micro_steps = profile["micro_steps"].as_array().unwrap();
    assert_eq!(micro_steps.len(), 7);
    for micro_step in micro_steps {
        let number = |field: &str| micro_step[field].as_f64().unwrap_or_else(|| panic!("{field}: {micro_step}"));
        assert!(number("tokens") > 0.0 && number("tokens") % 128.0 == 0.0 && number("tokens") <= 2048.0);
        assert!(number("visible_pairs") > number("tokens") && number("samples") >= 1.0, "{micro_step}");
        assert!(number("forward_ms") > 0.0 && number("backward_ms") > 0.0 && number("data_ms") >= 0.0);
        assert!(micro_step["memory"]["peak_bytes"].as_u64() >= micro_step["memory"]["bytes"].as_u64());
        let last = number("micro_step") == number("micro_steps");
        assert_eq!(micro_step["update_ms"].is_f64(), last, "{micro_step}");
    }
    // Of the steps of four episodes each, all but the last one measured whole.
    for step in 1..micro_steps[6]["step"].as_u64().unwrap() {
        let of_step = micro_steps.iter().filter(|micro_step| micro_step["step"] == step);
        assert_eq!(of_step.map(|micro_step| micro_step["samples"].as_u64().unwrap()).sum::<u64>(), 4);
    }
    let summary = &profile["summary"];
    assert_eq!(summary["micro_steps"], 6);
    assert!(summary["tokens_per_s"].as_f64().unwrap() > 0.0 && summary["gflop_per_s"].as_f64().unwrap() > 0.0);
    assert!(profile["stopped"].is_null());
    let runs: Vec<_> = std::fs::read_dir(experiment.join("runs")).unwrap().map(|it| it.unwrap().file_name()).collect();
    assert_eq!(runs, [".cache"], "only latents are kept");

    // The other arm, as lines.
    let ran = run(&["profile", path, "--arm", "bucket", "--micro-steps", "3", "--set", &codec]);
    assert_eq!(ran.code, 0, "{}", ran.err);
    let lines: Vec<&str> = ran.out.lines().collect();
    assert!(lines[0] == "tiny, bucket" && lines[1].contains("episodes"), "{}", ran.out);
    assert!(lines[3].ends_with("first") && !lines[4].ends_with("first"), "{}", ran.out);
    let cells = |line: usize| lines[line].split_whitespace().collect::<Vec<_>>();
    assert_eq!([3, 4, 5].map(|line| cells(line)[1].to_owned()), ["1/2", "2/2", "1/2"]);
    assert_eq!(cells(3)[8], "-");
    assert!(cells(4)[8].parse::<f64>().unwrap() > 0.0, "{}", ran.out);
    assert!(lines.contains(&"2 micro-steps, without the first:"), "{}", ran.out);
}

#[test]
fn x_wam_is_profiled_as_well() {
    let sizes = ["model.dim=24", "model.ffn_dim=32", "model.num_layers=1", "model.num_heads=2", "train.accumulate=2"];
    let mut arguments = vec!["profile", "configs/xwam_demo.yaml", "--micro-steps", "3", "--json"];
    sizes.iter().chain(&["train.batch_size=1", "model.geometry.layers=[0]"]).for_each(|set| {
        arguments.extend(["--set", set]);
    });
    let ran = run(&arguments);
    assert_eq!(ran.code, 0, "{}", ran.err);
    let document = ran.json();
    let micro_steps = document["profile"]["micro_steps"].as_array().unwrap();
    assert_eq!(micro_steps.len(), 3);
    assert_eq!(micro_steps[1]["tokens"].as_u64().unwrap().pow(2), micro_steps[1]["visible_pairs"].as_u64().unwrap());
    assert_eq!(micro_steps.iter().map(|it| it["update_ms"].is_f64()).collect::<Vec<_>>(), [false, true, false]);
    assert!(document["profile"]["summary"]["flop"].is_null(), "the FLOP model is LingBot-VA's");
}

#[test]
fn what_cannot_be_profiled_is_said_in_one_line() {
    let (_folder, experiment) = experiment();
    let path = experiment.to_str().unwrap();
    let refused = |arguments: &[&str]| {
        let ran = run(&[&["profile"], arguments, &["--json"]].concat());
        (ran.code, ran.json()["error"]["code"].as_str().unwrap_or_default().to_owned())
    };
    let no = |exit, code: &str| (exit, code.to_owned());
    assert_eq!(refused(&[path, "--arm", "buckets"]), no(2, "unknown_arm"));
    assert_eq!(refused(&[RECIPE, "--arm", "bucket"]), no(2, "unknown_arm"));
    assert_eq!(refused(&[path, "--micro-steps", "0"]), no(2, "no_micro_steps"));
    assert_eq!(refused(&[path, "--read-only"]), no(2, "read_only"));
    assert_eq!(refused(&["no/such/folder"]), no(78, "no_experiment"));
    assert_eq!(refused(&[path, "--set", "data.dataset=/no/such/folder"]).0, 65);
    assert!(!experiment.join("runs").exists());
}

#[test]
fn a_signal_ends_a_profile_with_what_it_has() {
    use std::io::{BufRead, BufReader};
    let (_folder, experiment) = experiment();
    let mut child = std::process::Command::new(assert_cmd::cargo::cargo_bin("lbva-tui"))
        .args(["profile", experiment.to_str().unwrap(), "--micro-steps", "1000000", "--set", &codec()])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
    assert!(lines.any(|line| line.ends_with("first")));
    let pid = rustix::process::Pid::from_raw(i32::try_from(child.id()).unwrap()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    let rest: Vec<String> = lines.collect();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("stopped by SIGINT: ") && said.contains(" of 1000000 micro-steps were measured"), "{said}");
    assert!(rest.iter().any(|line| line.contains("summary") || line.contains("without the first")), "{rest:?}");
}

#[test]
fn a_run_tells_its_first_micro_steps_if_asked() {
    let folder = tempfile::tempdir().unwrap();
    let text = std::fs::read_to_string(Path::new(REPOSITORY).join("experiments/demo/experiment.yaml")).unwrap();
    let text = text.replace("../../configs", &format!("{REPOSITORY}/configs"));
    std::fs::write(folder.path().join("experiment.yaml"), text).unwrap();
    let codec = folder.path().join("codec.safetensors");
    let set = [
        "data.dataset=tests/data/robosuite_tiny_v21",
        "data.validation_episodes=[3]",
        &format!("codec.path={}", codec.display()),
        "model.num_layers=1",
        "model.geometry.layers=[0]",
        "model.dim=24",
        "model.num_heads=2",
        "model.ffn_dim=32",
        "train.batch_size=1",
        "train.accumulate=2",
        "validation.every=10",
        "validation.clips=1",
        "validation.strips=1",
        "validation.sample_steps=1",
        "validation.action_steps=1",
    ]
    .map(str::to_owned);
    let recipe = config::load_with(&Path::new(REPOSITORY).join("configs/xwam_demo.yaml"), &set).unwrap();
    let recipe = recipe.xwam("the test").unwrap();
    let dataset = Dataset::open(&recipe.data, &recipe.model).unwrap();
    LinearCodec::fit(&dataset, HURRY, &|_, _| Ok(())).unwrap().save(&codec).unwrap();

    let path = folder.path().to_str().unwrap();
    let mut arguments = vec!["run", path, "--arm", "m1_baseline", "--no-ui", "--steps", "2"];
    set.iter().for_each(|set| arguments.extend(["--set", set]));
    let told = |ran: &Ran| -> Vec<String> {
        let lines = ran.out.lines().filter_map(|line| line.split_once("profile: "));
        lines.map(|(_, text)| text.to_owned()).collect()
    };
    let ran = run_with(&arguments, &[("LINGBOT_PROFILE", "many")]);
    assert_eq!(ran.code, 2, "{}", ran.err);
    assert!(ran.err.contains("\"many\" is no number of micro-steps (LINGBOT_PROFILE)"), "{}", ran.err);
    assert!(!folder.path().join("runs/m1_baseline/attempts").exists(), "refused before the run began");

    let ran = run_with(&arguments, &[("LINGBOT_PROFILE", "3")]);
    assert_eq!(ran.code, 0, "{}{}", ran.out, ran.err);
    let lines = told(&ran);
    assert_eq!(lines.len(), 3, "{}{}", ran.out, ran.err);
    assert!(lines[0].starts_with("step 1, micro-step 1 of 2: ") && lines[0].ends_with("; the first: caches are cold"));
    assert!(lines[1].starts_with("step 1, micro-step 2 of 2: ") && !lines[1].contains("update - ms"), "{lines:?}");
    assert!(lines[2].starts_with("step 2, micro-step 1 of 2: ") && lines[2].contains("update - ms"), "{lines:?}");
    let log = std::fs::read_to_string(folder.path().join("runs/m1_baseline/attempts/0001/events.jsonl")).unwrap();
    let events = log.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let told_in_log = |event: &Value| event["text"].as_str().is_some_and(|text| text.starts_with("profile: "));
    let messages: Vec<Value> = events.filter(told_in_log).collect();
    assert_eq!((messages.len(), &messages[0]["level"]), (3, &Value::from("info")));

    arguments.push("--fresh");
    assert_eq!(told(&run(&arguments)), Vec::<String>::new());
}
