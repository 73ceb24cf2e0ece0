//! The program from outside: exit codes, the one error line, JSON documents, help, and a short run end to end.

use assert_cmd::Command;
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use tempfile::TempDir;

const REPOSITORY: &str = env!("CARGO_MANIFEST_DIR");

fn program() -> Command {
    let mut command = Command::cargo_bin("lbva-tui").unwrap();
    command.current_dir(REPOSITORY).env_remove("COLUMNS");
    command
}

struct Ran {
    code: i32,
    out: String,
    err: String,
}

impl Ran {
    /// stdout as the one JSON document it must be.
    fn json(&self) -> Value {
        serde_json::from_str(&self.out).unwrap_or_else(|error| panic!("{error}: {}", self.out))
    }

    /// The only `error:` line on stderr.
    fn error_line(&self) -> &str {
        let lines: Vec<&str> = self.err.lines().filter(|line| line.starts_with("error: ")).collect();
        assert_eq!(lines.len(), 1, "{}", self.err);
        lines[0]
    }
}

fn run_in(folder: &Path, arguments: &[&str]) -> Ran {
    let output = program().current_dir(folder).args(arguments).output().unwrap();
    Ran {
        code: output.status.code().expect("an exit code, not a signal"),
        out: String::from_utf8(output.stdout).unwrap(),
        err: String::from_utf8(output.stderr).unwrap(),
    }
}

fn run(arguments: &[&str]) -> Ran {
    run_in(Path::new(REPOSITORY), arguments)
}

/// An experiment in a folder of its own, over the shipped clips: the demo's file with changed text.
fn experiment(change: impl Fn(String) -> String) -> (TempDir, PathBuf) {
    let folder = TempDir::new().unwrap();
    let directory = folder.path().join("small");
    fs::create_dir(&directory).unwrap();
    let text = fs::read_to_string(Path::new(REPOSITORY).join("experiments/demo/experiment.yaml")).unwrap();
    let base = Path::new(REPOSITORY).join("configs/xwam_demo.yaml");
    let text = text.replace("../../configs/xwam_demo.yaml", base.to_str().unwrap());
    fs::write(directory.join("experiment.yaml"), change(text)).unwrap();
    (folder, directory)
}

#[test]
fn help_teaches_each_command() {
    let commands = [
        &["--help"] as &[&str],
        &["demo", "--help"],
        &["run", "--help"],
        &["resume", "--help"],
        &["stop", "--help"],
        &["check", "--help"],
        &["verify", "--help"],
        &["verify", "golden", "--help"],
        &["verify", "packing", "--help"],
        &["verify", "noop", "--help"],
        &["verify", "kernels", "--help"],
        &["profile", "--help"],
        &["metrics", "--help"],
        &["weights", "--help"],
        &["weights", "inspect", "--help"],
        &["weights", "export", "--help"],
        &["data", "--help"],
        &["data", "info", "--help"],
        &["data", "fit-codec", "--help"],
        &["data", "pack", "--help"],
        &["data", "quantiles", "--help"],
        &["data", "tokens", "--help"],
        &["report", "--help"],
        &["help"],
    ];
    for command in commands {
        let ran = run(command);
        assert_eq!((ran.code, ran.err.as_str()), (0, ""), "{command:?}");
        insta::assert_snapshot!(command.join("_").replace("--", ""), ran.out);
    }
    let version = run(&["--version"]).out;
    assert!(version.starts_with(concat!("lbva-tui ", env!("CARGO_PKG_VERSION"), " (")), "{version}");
}

#[test]
fn command_line_mistakes_end_with_2() {
    for arguments in [
        &["check"][..],
        &["check", "a", "b"],
        &["run"],
        &["run", "experiments/demo", "--steps", "many"],
        &["run", "experiments/demo", "--steps", "-1"],
        &["resume", "experiments/demo"],
        &["stop"],
        &["verify"],
        &["verify", "golden"],
        &["verify", "packing"],
        &["profile"],
        &["data"],
        &["data", "inf", "x"],
        &["metrics", "a.png"],
        &["--no-such-flag"],
        &["--light", "--dark"],
        &["--color", "sometimes"],
        &["dmeo"],
        &["no/such/folder"],
        &["experiments", "demo"],
        &["run", "experiments/demo", "--arm", "m3"],
        &["stop", "experiments/demo", "--arm", "m3"],
        &["check", "experiments/demo", "--set", "train.lr"],
        &["check", "experiments/demo", "--set", "train.lrr=1"],
        &["check", "experiments/demo", "--set", "train.lr=fast"],
        &["--read-only", "run", "experiments/demo"],
        &["--read-only", "demo"],
        &["--read-only", "stop", "experiments/demo", "--arm", "m1_baseline"],
        &["--read-only", "data", "fit-codec", "experiments/demo"],
    ] {
        let ran = run(arguments);
        assert_eq!(ran.code, 2, "{arguments:?}: {}", ran.err);
        // `check` reports what it could find out even so.
        assert!(ran.out.is_empty() || arguments[0] == "check", "{arguments:?}: {}", ran.out);
        assert!(!ran.err.is_empty(), "{arguments:?}");
    }
    assert!(run(&["dmeo"]).error_line().ends_with("did you mean the command demo?"));
    let line = run(&["run", "experiments/demo", "--arm", "m2_geometri"]).err;
    assert!(line.contains("did you mean m2_geometry?"), "{line}");
}

#[test]
fn errors_are_a_document_for_scripts() {
    let ran = run(&["--json", "check"]);
    assert_eq!((ran.code, ran.json()["error"]["code"].as_str()), (2, Some("usage")));
    let ran = run(&["--json", "report", "no/such"]);
    assert_eq!(ran.code, 78);
    let error = &ran.json()["error"];
    assert_eq!(
        (error["code"].as_str(), error["what"].as_str(), error["place"].as_str()),
        (Some("no_experiment"), Some("no such experiment"), Some("no/such"))
    );
    assert!(error["hint"].as_str().is_some_and(|hint| !hint.is_empty()));
    assert_eq!(ran.error_line(), "error: no such experiment (no/such); name a folder such as experiments/demo");
}

#[test]
fn check_counts_the_5b_recipe_without_its_data() {
    let ran = run(&["check", "configs/xwam_5b.yaml"]);
    assert_eq!(ran.code, 0, "{}", ran.err);
    assert!(ran.out.lines().any(|line| line.trim().starts_with("parameters") && line.ends_with(" 5,037,748,446")));
    let ran = run(&["check", "configs/xwam_5b.yaml", "--json", "--set", "model.geometry.enabled=true"]);
    let parameters = &ran.json()["arms"][0]["parameters"];
    assert_eq!(parameters["base_total"], 5_037_748_446_u64);
    assert_eq!(parameters["geometry_total"], 383_976_448_u64);
    assert_eq!(parameters["total"], 5_421_724_894_u64);
}

#[test]
fn check_accepts_the_committed_experiment() {
    let ran = run(&["check", "experiments/demo"]);
    assert_eq!(ran.code, 0, "{}", ran.err);
    assert!(ran.out.contains("model.geometry.enabled: m1_baseline false, m2_geometry true"), "{}", ran.out);
    let document = run(&["check", "experiments/demo", "--json"]).json();
    assert_eq!((&document["ok"], document["problems"].as_array().map(Vec::len)), (&Value::Bool(true), Some(0)));
    let samples = |side: &str| document["data"][side].as_u64().unwrap();
    assert!(samples("training") > samples("validation") && document["data"]["sample"] == "clips");
    assert!(document["device"]["name"].as_str().is_some());
}

#[test]
fn check_lists_every_problem_and_ends_with_the_first_ones_code() {
    let (_folder, directory) =
        experiment(|text| text.replace("confidence: 0.95", "confidence: 2").replace("resamples: 2000", "resamples: 1"));
    let ran = run(&["check", directory.to_str().unwrap()]);
    assert_eq!(ran.code, 78);
    assert_eq!(ran.err.lines().filter(|line| line.starts_with("error: decision.")).count(), 2, "{}", ran.err);
    let document = run(&["check", directory.to_str().unwrap(), "--json"]).json();
    assert_eq!((&document["ok"], document["problems"].as_array().map(Vec::len)), (&Value::Bool(false), Some(2)));

    let (_folder, directory) = experiment(|text| text.replace("enabled: true", "enabled: false"));
    let ran = run(&["check", directory.to_str().unwrap(), "--json"]);
    assert_eq!((ran.code, ran.json()["problems"][0]["code"].as_str()), (78, Some("ablation_missing")));

    // Absent data is data's fault, not the configuration's.
    let ran = run(&["check", "experiments/demo", "--set", "data.dataset=no/such"]);
    assert_eq!(ran.code, 65, "{}", ran.err);
    assert!(ran.error_line().contains("no/such"));
}

#[test]
fn configuration_mistakes_end_with_78_for_every_command_that_reads_them() {
    let (_folder, directory) = experiment(|text| text.replace("ablated:", "ablate:"));
    let directory = directory.to_str().unwrap();
    for arguments in [
        &["check", directory][..],
        &["run", directory],
        &["resume", directory, "--arm", "m1_baseline"],
        &["stop", directory, "--arm", "m1_baseline"],
        &["report", directory],
        &["data", "info", directory],
        &["data", "fit-codec", directory],
        &["--no-ui", directory],
    ] {
        let ran = run(arguments);
        assert_eq!(ran.code, 78, "{arguments:?}: {}", ran.err);
        assert!(ran.error_line().starts_with("error: unknown key ablate ("), "{arguments:?}: {}", ran.err);
        assert!(ran.error_line().ends_with("did you mean ablated?"), "{arguments:?}: {}", ran.err);
    }
}

#[test]
fn without_a_terminal_lines_are_printed_and_it_is_said_once() {
    let notice = "no terminal: going on as with --no-ui";
    let ran = run(&["experiments"]);
    assert_eq!((ran.code, ran.err.trim()), (0, notice));
    assert!(ran.out.contains("m1_baseline"), "{}", ran.out);
    // Asked for, it needs no explanation.
    assert_eq!(run(&["--no-ui", "experiments"]).err, "");
    let ran = run(&["--json", "experiments/demo"]);
    assert_eq!(ran.err, "");
    assert_eq!(ran.json()["experiments"][0]["arms"].as_array().map(Vec::len), Some(2));
    // The default is ./experiments.
    let empty = TempDir::new().unwrap();
    let ran = run_in(empty.path(), &["--no-ui"]);
    assert_eq!(ran.code, 2);
    assert!(ran.error_line().contains("experiments"), "{}", ran.err);
}

#[test]
fn a_reader_that_leaves_early_is_no_failure() {
    let mut child = std::process::Command::new(assert_cmd::cargo::cargo_bin("lbva-tui"))
        .args(["check", "experiments/demo"])
        .current_dir(REPOSITORY)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    // The notice about the missing terminal goes to a stderr that nobody reads.
    let mut child = std::process::Command::new(assert_cmd::cargo::cargo_bin("lbva-tui"))
        .arg("experiments")
        .current_dir(REPOSITORY)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stderr.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    assert!(String::from_utf8_lossy(&output.stdout).contains("m1_baseline"));
}

#[test]
fn arms_whose_dataset_is_absent_were_started_and_say_what_is_missing() {
    let (_folder, directory) = experiment(|text| text);
    let ran = run(&["--no-ui", "run", directory.to_str().unwrap(), "--set", "data.dataset=no/such"]);
    assert_eq!(ran.code, 65, "{}{}", ran.out, ran.err);
    assert!(ran.out.contains("attempt 1 starts") && !ran.out.contains("not started"), "{}", ran.out);
    assert!(ran.out.contains("m1_baseline   FAILED at step 0 (exit code 65)"), "{}", ran.out);
}

#[test]
fn files_that_are_not_there_are_bad_data() {
    for arguments in [
        &["metrics", "no/a.png", "no/b.png"][..],
        &["verify", "golden", "no/such.safetensors"],
        &["data", "info", "experiments/demo/data/robosuite_lift/videos"],
    ] {
        let ran = run(arguments);
        let expected = if arguments[0] == "data" { 78 } else { 65 };
        assert_eq!(ran.code, expected, "{arguments:?}: {}", ran.err);
        ran.error_line();
    }
}

#[test]
fn datasets_are_described_by_themselves_and_through_a_recipe() {
    let document = run(&["data", "info", "experiments/demo/data/robosuite_lift", "--json"]).json();
    assert_eq!(document["views"].as_array().map(Vec::len), Some(3));
    let document = run(&["data", "info", "experiments/demo", "--json"]).json();
    assert_eq!(document["identity"].as_str().map(str::len), Some(64));
    assert!(run(&["data", "info", "configs/xwam_demo.yaml"]).out.contains("wrist view"));
}

#[test]
fn a_fit_reports_how_well_held_out_clips_are_coded() {
    let folder = TempDir::new().unwrap();
    let text = fs::read_to_string(Path::new(REPOSITORY).join("configs/xwam_demo.yaml")).unwrap();
    let tiny = Path::new(REPOSITORY).join("tests/data/robosuite_tiny_v21");
    let text = text
        .replace("../experiments/demo/data/robosuite_lift", tiny.to_str().unwrap())
        .replace("../experiments/demo/codec.safetensors", "codec.safetensors")
        .replace("[7, 11, 14, 16, 19, 24]", "[3]");
    let recipe = folder.path().join("recipe.yaml");
    fs::write(&recipe, text).unwrap();
    let document = run(&["data", "fit-codec", recipe.to_str().unwrap(), "--json"]).json();
    let codec = folder.path().join("codec.safetensors");
    assert_eq!(document["bytes"].as_u64().unwrap(), fs::metadata(&codec).unwrap().len());
    assert_eq!(document["hash"].as_str().map(str::len), Some(64));
    assert!(document["measured_clips"].as_u64().unwrap() > 0);
    let views = document["views"].as_array().unwrap();
    assert_eq!(views.len(), 3);
    for view in views {
        let psnr_db = view["psnr_db"].as_f64().unwrap();
        assert!((15.0..50.0).contains(&psnr_db), "{view}");
    }
}

#[test]
fn nothing_runs_nothing_stops_and_nothing_resumes() {
    let (_folder, directory) = experiment(|text| text);
    let directory = directory.to_str().unwrap();
    for arguments in [&["stop", directory, "--arm", "m1_baseline"][..], &["stop", directory]] {
        let ran = run(arguments);
        assert_eq!(ran.code, 78, "{}", ran.err);
        assert!(ran.error_line().contains("nothing to stop"), "{}", ran.err);
    }
    let ran = run(&["resume", directory, "--arm", "m1_baseline"]);
    assert_eq!(ran.code, 78, "{}", ran.err);
    assert!(ran.err.contains("there is nothing to resume"), "{}", ran.err);
    assert_eq!(run(&["report", directory]).code, 65);
}

/// Two steps of a model that is all there and as small as it can be.
const SMALL: [&str; 24] = [
    "--set",
    "model.num_layers=1",
    "--set",
    "model.geometry.layers=[0]",
    "--set",
    "model.dim=48",
    "--set",
    "model.num_heads=2",
    "--set",
    "model.ffn_dim=48",
    "--set",
    "train.batch_size=1",
    "--set",
    "validation.every=1",
    "--set",
    "validation.clips=1",
    "--set",
    "validation.strips=1",
    "--set",
    "validation.sample_steps=1",
    "--set",
    "validation.action_steps=1",
    "--steps",
    "2",
];

#[test]
fn both_arms_train_stop_resume_and_are_judged() {
    let (_folder, directory) = experiment(|text| text);
    let directory = directory.to_str().unwrap();
    // One arm in this process, left early as a preemption would.
    let stopped =
        run(&[&["--no-ui", "run", directory, "--arm", "m1_baseline", "--stop-after", "1"][..], &SMALL].concat());
    assert_eq!(stopped.code, 75, "{}{}", stopped.out, stopped.err);
    assert!(stopped.out.contains("saved step 1"), "{}", stopped.out);
    // Other overrides are another configuration; the recorded ones are repeated by `resume`.
    assert_eq!(run(&["--no-ui", "run", directory, "--arm", "m1_baseline"]).code, 78);
    // A cache that is damaged meanwhile is made again, and somebody hears of it.
    let cache = fs::read_dir(Path::new(directory).join("runs/.cache")).unwrap().map(|entry| entry.unwrap().path());
    cache
        .filter(|file| file.extension().is_some_and(|it| it == "latents"))
        .for_each(|file| fs::write(file, "").unwrap());
    let resumed = run(&["--json", "resume", directory, "--arm", "m1_baseline"]);
    assert_eq!(resumed.code, 0, "{}{}", resumed.out, resumed.err);
    assert!(resumed.err.contains("WARN") && resumed.err.contains("it is made again"), "{}", resumed.err);
    let events: Vec<Value> = resumed.out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(events.iter().all(|event| event["arm"] == "m1_baseline"));
    let steps: Vec<u64> =
        events.iter().filter(|event| event["event"] == "step").map(|event| event["step"].as_u64().unwrap()).collect();
    assert_eq!(steps, [2]);

    // Both: the finished one is left alone, the other gets a process of its own; then the verdict.
    let both = run(&[&["--no-ui", "run", directory][..], &SMALL].concat());
    assert_eq!(both.code, 0, "{}{}", both.out, both.err);
    assert!(both.out.contains("m2_geometry   finished at step 2"), "{}", both.out);
    assert!(both.out.contains("step 0: both arms equal in every digit of every metric (1 clips)"), "{}", both.out);
    let verdict = run(&["report", directory, "--json"]).json();
    assert_eq!((&verdict["points_done"], &verdict["points_planned"]), (&Value::from(2), &Value::from(2)));
    assert_eq!(verdict["step_zero"]["state"], "equal");
    let listed = run(&["--json", directory]).json();
    for arm in listed["experiments"][0]["arms"].as_array().unwrap() {
        assert_eq!((&arm["state"], &arm["step"]), (&Value::from("finished"), &Value::from(2)));
    }
    assert_eq!(run(&["stop", directory, "--arm", "m1_baseline"]).code, 78);
}

/// Both arms far from their end; neither is named.
#[test]
fn a_stop_without_a_name_stops_every_arm_at_work() {
    let (_folder, directory) = experiment(|text| text);
    let mut small = SMALL;
    small[13] = "validation.every=1000000";
    small[23] = "1000000";
    let mut supervisor = std::process::Command::new(env!("CARGO_BIN_EXE_lbva-tui"))
        .args(["--no-ui", "run", directory.to_str().unwrap()])
        .args(small)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let began = std::time::Instant::now();
    let steps = || -> Vec<u64> {
        let listed = run(&["--json", directory.to_str().unwrap()]).json();
        let arms = listed["experiments"][0]["arms"].as_array().unwrap().clone();
        arms.iter().map(|arm| arm["step"].as_u64().unwrap_or(0)).collect()
    };
    while steps().contains(&0) {
        assert!(began.elapsed().as_secs() < 300, "no step of both arms in five minutes: {:?}", steps());
        std::thread::sleep(std::time::Duration::from_millis(300));
    }
    let killed = run(&["stop", directory.to_str().unwrap(), "--kill"]);
    assert_eq!(killed.code, 2, "{}", killed.err);
    assert!(killed.error_line().contains("m1_baseline, m2_geometry are at work"), "{}", killed.err);
    let stopped = run(&["--json", "stop", directory.to_str().unwrap()]);
    assert_eq!(stopped.code, 0, "{}{}", stopped.out, stopped.err);
    let stopped = stopped.json();
    let ends: Vec<(&str, &str)> = stopped["arms"]
        .as_array()
        .unwrap()
        .iter()
        .map(|arm| (arm["arm"].as_str().unwrap(), arm["state"].as_str().unwrap()))
        .collect();
    assert_eq!(ends, [("m1_baseline", "stopped"), ("m2_geometry", "stopped")]);
    assert!(steps().iter().all(|step| *step > 0));
    assert_ne!(supervisor.wait().unwrap().code(), Some(0), "a stopped run is no finished one");
}
