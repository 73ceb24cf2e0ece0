//! Runs under a real Slurm: preempted, killed, cancelled, at their time limit, and with the controller gone.
//!
//! `.ci/run` starts the cluster of tests/slurm/cluster.sh and sets LBVA_TUI_TEST_SLURM to that script; then every test
//! here must pass. Without it they are left out, and say so: a developer's machine need not have Slurm.

mod run_fixture;

use lbva_tui::runlog::{Outcome, RunReader, RunState, now_ms};
use run_fixture::{ARM, Experiment, Fixture, said};
use std::fs;
use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Output};
use std::sync::RwLock;
use std::time::{Duration, Instant};

/// Nothing here takes longer, however busy the machine is.
const PATIENCE: Duration = Duration::from_secs(150);
/// Whoever stops the controller has the cluster for himself.
static CLUSTER: RwLock<()> = RwLock::new(());

/// The script that controls the cluster; `None` where these tests are left out.
fn cluster(test: &str) -> Option<PathBuf> {
    let script = std::env::var_os("LBVA_TUI_TEST_SLURM").map(PathBuf::from);
    if script.is_none() {
        left_out(test, "it needs Slurm; eval \"$(tests/slurm/cluster.sh env)\" after `start`");
    }
    script
}

/// Past the capture of the test's output: this must be seen.
fn left_out(test: &str, why: &str) {
    let stderr = fs::OpenOptions::new().append(true).open("/dev/stderr");
    let _ = stderr.and_then(|mut it| writeln!(it, "LEFT OUT: {test}: {why}"));
}

fn slurm(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).env("SLURM_TIME_FORMAT", "%s").output().unwrap();
    assert!(output.status.success(), "{program} {arguments:?}: {}", said(&output));
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

fn program(arguments: &[&str], experiment: &Experiment) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lbva-tui"));
    let (first, rest) = arguments.split_first().unwrap();
    command.arg(first).arg(&experiment.folder).args(rest).output().unwrap()
}

/// An experiment with a `slurm:` block, and the job of its arm.
struct Submitted {
    experiment: Experiment,
    job: String,
}

impl Submitted {
    fn new(fixture: &Fixture, name: &str, settings: &str) -> Self {
        let experiment = fixture.here(name);
        let file = experiment.folder.join("experiment.yaml");
        let text = fs::read_to_string(&file).unwrap();
        fs::write(&file, format!("{text}slurm: {settings}\n")).unwrap();
        let mut submitted = Self { experiment, job: String::new() };
        submitted.submit();
        submitted
    }

    fn submit(&mut self) {
        let output = program(&["submit", "--arm", ARM, "--json"], &self.experiment);
        assert_eq!(output.status.code(), Some(0), "{}", said(&output));
        let document: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        self.job = document["arms"][0]["job"].to_string();
    }

    fn wait_for<T>(&self, what: &str, mut found: impl FnMut() -> Option<T>) -> T {
        let from = Instant::now();
        loop {
            if let Some(value) = found() {
                return value;
            }
            if from.elapsed() > PATIENCE {
                let queue = slurm("squeue", &["-h", "-t", "all"]);
                let outputs = fs::read_dir(self.experiment.run.slurm()).into_iter().flatten().flatten();
                let outputs: Vec<String> = outputs.filter_map(|entry| fs::read_to_string(entry.path()).ok()).collect();
                panic!("{what} never came; queue:\n{queue}\n{}", outputs.join("\n---\n"));
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Waits until attempt `number` has logged `count` steps.
    fn steps(&self, number: u32, count: usize) {
        self.wait_for(&format!("step {count} of attempt {number}"), || {
            let steps = self.experiment.lines(number).iter().filter(|line| line["event"] == "step").count();
            (steps >= count).then_some(())
        });
    }

    /// Waits for the last line of attempt `number`, and returns its outcome and reason.
    fn ended(&self, number: u32) -> (String, String) {
        self.wait_for(&format!("end of attempt {number}"), || {
            let lines = self.experiment.lines(number);
            let line = lines.iter().find(|line| line["event"] == "attempt_ended")?;
            Some((line["outcome"].as_str()?.to_owned(), line["reason"].as_str()?.to_owned()))
        })
    }

    /// First step, last logged step and last saved step of an attempt.
    fn span(&self, number: u32) -> (u64, u64, u64) {
        let lines = self.experiment.lines(number);
        let last = |event: &str| {
            lines.iter().filter(|line| line["event"] == event).filter_map(|line| line["step"].as_u64()).max()
        };
        let start = lines[0]["start_step"].as_u64().unwrap();
        (start, last("step").unwrap_or(start), last("checkpoint").unwrap_or(start))
    }

    /// What accounting says of the job's newest attempt, once it is over.
    fn accounted(&self) -> String {
        self.wait_for("the end of the job in accounting", || {
            let rows = slurm("sacct", &["-n", "-P", "-D", "-X", "-j", &self.job, "-o", "State,End"]);
            let (state, end) = rows.lines().last()?.split_once('|')?;
            (!["RUNNING", "PENDING", "REQUEUED"].contains(&state) && end != "Unknown").then(|| state.to_owned())
        })
    }

    /// States of all attempts of the job.
    fn accounts(&self) -> String {
        slurm("sacct", &["-n", "-P", "-D", "-X", "-j", &self.job, "-o", "State"])
    }

    /// What `lbva-tui --no-ui --json` says of the arm.
    fn status(&self) -> serde_json::Value {
        let mut command = Command::new(env!("CARGO_BIN_EXE_lbva-tui"));
        let output = command.args(["--no-ui", "--json"]).arg(&self.experiment.folder).output().unwrap();
        let document: serde_json::Value = serde_json::from_slice(&output.stdout).expect("a document");
        let arms = document["experiments"][0]["arms"].as_array().unwrap();
        arms.iter().find(|arm| arm["arm"] == ARM).unwrap().clone()
    }

    fn state(&self) -> (RunState, String) {
        let mut reader = RunReader::open(self.experiment.run.root());
        reader.poll(now_ms()).unwrap();
        reader.view().state(now_ms())
    }
}

impl Drop for Submitted {
    fn drop(&mut self) {
        let _ = Command::new("scancel").arg(&self.job).output();
    }
}

/// A run whose learning rate no weights survive: the loss of its second step is not finite, in every attempt.
fn broken() -> Fixture {
    let fixture = Fixture::xwam(4000);
    let text = fs::read_to_string(&fixture.recipe).unwrap();
    let line = |line: &str| {
        if line.trim_start().starts_with("lr:") { "  lr: 1.0e30\n".to_owned() } else { format!("{line}\n") }
    };
    let text: String = text.lines().map(line).collect();
    let text = text.replace("save_every: 2", "save_every: 1000").replace("keep_every: 12", "keep_every: 0");
    fs::write(&fixture.recipe, text).unwrap();
    fixture
}

fn program_without_ui(experiment: &Experiment) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lbva-tui"));
    command.args(["--no-ui"]).arg(&experiment.folder).output().unwrap()
}

/// A job of higher priority that needs the whole node for a moment.
fn preempt() {
    slurm("sbatch", &["--parsable", "-p", "own", "--gres=gpu:8", "-o", "/dev/null", "--wrap", "sleep 1"]);
}

#[test]
fn a_run_preempted_five_times_and_killed_once_ends_as_if_nothing_had_happened() {
    let Some(_) = cluster("preemption") else { return };
    let _shared = CLUSTER.read();
    let fixture = Fixture::xwam(220);
    let undisturbed = fixture.undisturbed();
    let mut run = Submitted::new(&fixture, "preempted", "{partition: extra, gpus: 8, cpus: 1}");
    let again = program(&["submit", "--arm", ARM], &run.experiment);
    assert_eq!(again.status.code(), Some(78), "a second job of one run: {}", said(&again));
    for attempt in 1..=5 {
        run.steps(attempt, 4);
        preempt();
        let (outcome, reason) = run.ended(attempt);
        assert!(outcome == "stopped" && reason.starts_with("preempted, and requeued by Slurm with a"), "{reason}");
        let (_, done, saved) = run.span(attempt);
        assert_eq!(saved, done, "a save that fits into the time loses nothing");
        assert!(run.experiment.run.attempt(attempt).batch_script().exists());
    }
    run.steps(6, 4);
    let pid = run.experiment.lines(6)[0]["pid"].to_string();
    slurm("kill", &["-KILL", &pid]);
    assert_eq!(run.accounted(), "FAILED");
    run.submit();
    run.steps(7, 1);
    let (_, done, _) = run.span(6);
    let (start, ..) = run.span(7);
    // Two steps between saves; the newest may not have been durable yet.
    assert!(start + 2 * 2 > done, "{start} after {done}");
    assert_eq!(run.ended(7), ("finished".to_owned(), "all 220 steps done".to_owned()));
    assert_eq!(run.accounted(), "COMPLETED");
    let restarts: Vec<u64> =
        (1..=7).map(|number| run.experiment.lines(number)[0]["job"]["restart"].as_u64().unwrap()).collect();
    assert_eq!(restarts, [0, 1, 2, 3, 4, 5, 0]);
    run.experiment.equals(&undisturbed);
}

#[test]
fn in_the_grace_time_the_worker_saves_and_requeues_itself() {
    let Some(_) = cluster("grace time") else { return };
    let _shared = CLUSTER.read();
    let fixture = Fixture::xwam(4000);
    let run = Submitted::new(&fixture, "grace", "{partition: grace, gpus: 8, cpus: 1}");
    run.steps(1, 4);
    preempt();
    let (outcome, reason) = run.ended(1);
    assert_eq!((outcome.as_str(), reason.as_str()), ("stopped", "preempted by Slurm with a checkpoint; requeued"));
    run.steps(2, 1);
    assert_eq!(run.span(2).0, run.span(1).1);
}

#[test]
fn a_users_scancel_stays_a_cancel() {
    let Some(_) = cluster("scancel") else { return };
    let _shared = CLUSTER.read();
    let fixture = Fixture::xwam(4000);
    let run = Submitted::new(&fixture, "cancelled", "{partition: extra, cpus: 1}");
    run.steps(1, 4);
    slurm("scancel", &[&run.job]);
    let (outcome, reason) = run.ended(1);
    assert_eq!((outcome.as_str(), reason.as_str()), ("stopped", "cancelled with scancel with a checkpoint"));
    assert_eq!(run.state().0, RunState::Stopped);
    assert!(run.accounted().starts_with("CANCELLED"));
    std::thread::sleep(Duration::from_secs(8));
    assert_eq!(run.experiment.run.attempt_numbers().unwrap(), [1], "it was started again");
}

#[test]
fn at_the_time_limit_the_worker_saves_and_comes_back() {
    let Some(_) = cluster("time limit") else { return };
    let _shared = CLUSTER.read();
    let fixture = Fixture::xwam(40_000);
    let run = Submitted::new(&fixture, "limit", "{partition: extra, cpus: 1, time: \"1\"}");
    let (outcome, reason) = run.ended(1);
    let wanted = "preempted by the job's time limit with a checkpoint; requeued";
    assert_eq!((outcome.as_str(), reason.as_str()), ("stopped", wanted));
    run.steps(2, 1);
    assert_eq!(run.span(2).0, run.span(1).1);
    assert_eq!(run.experiment.lines(2)[0]["job"]["restart"], 1);
}

#[test]
fn a_crash_is_tried_once_more_and_then_given_up() {
    let Some(_) = cluster("crash") else { return };
    let _shared = CLUSTER.read();
    let fixture = broken();
    let run = Submitted::new(&fixture, "crash", "{partition: extra, cpus: 1}");
    let (outcome, reason) = run.ended(1);
    assert!(outcome == "failed" && reason.ends_with("; requeued"), "{reason}");
    let (_, reason) = run.ended(2);
    assert!(reason.starts_with("failed 2 times in a row without a new checkpoint"), "{reason}");
    assert_eq!(run.accounted(), "FAILED");
    let outcome = run.experiment.outcome();
    assert_eq!((outcome.outcome, outcome.exit_code), (Outcome::Failed, 78));
}

/// A wrapper as sites have them: the exit code is that of the `echo`.
#[test]
fn a_wrapper_that_hides_the_exit_code_is_warned_of_and_found_out() {
    let Some(_) = cluster("wrapper") else { return };
    let _shared = CLUSTER.read();
    let fixture = broken();
    let wrapper = fixture.folder.path().join("template.sh");
    fs::write(&wrapper, "#!/bin/bash\nsrun \"$@\"\necho done\n").unwrap();
    fs::set_permissions(&wrapper, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let run =
        Submitted::new(&fixture, "wrapper", &format!("{{partition: extra, cpus: 1, wrapper: {}}}", wrapper.display()));
    let shown = program(&["submit", "--arm", ARM, "--dry-run"], &run.experiment);
    assert!(said(&shown).contains("line 3: a command after the program"), "{}", said(&shown));
    run.ended(2);
    assert_eq!(run.accounted(), "COMPLETED");
    let reason = run.status()["reason"].as_str().unwrap().to_owned();
    assert!(reason.starts_with("Slurm says COMPLETED, the run crashed at step"), "{reason}");
}

#[test]
fn a_stop_saves_and_then_cancels_and_a_kill_cancels_at_once() {
    let Some(_) = cluster("stop") else { return };
    let _shared = CLUSTER.read();
    let fixture = Fixture::xwam(40_000);
    let mut run = Submitted::new(&fixture, "stopped", "{partition: extra, cpus: 1}");
    run.steps(1, 4);
    let output = program(&["stop", "--arm", ARM], &run.experiment);
    assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    assert!(run.accounted().starts_with("CANCELLED"));
    let (outcome, reason) = run.ended(1);
    assert_eq!((outcome.as_str(), reason.as_str()), ("stopped", "stopped by lbva-tui stop with a checkpoint"));
    let (_, done, saved) = run.span(1);
    assert_eq!((done, run.experiment.saved()), (saved, saved));

    run.submit();
    run.steps(2, 4);
    let output = program(&["stop", "--arm", ARM, "--kill"], &run.experiment);
    assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    assert!(run.accounted().starts_with("CANCELLED"));
    let (_, reason) = run.ended(2);
    assert!(reason.starts_with("killed on request by lbva-tui stop without a new checkpoint"), "{reason}");

    // What waits has nothing to save.
    let blocker = slurm("sbatch", &["--parsable", "-p", "own", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 60"]);
    run.wait_for("the blocker", || (slurm("squeue", &["-h", "-j", &blocker, "-o", "%T"]) == "RUNNING").then_some(()));
    run.submit();
    run.wait_for("the reason", || {
        let status = run.status();
        let told = status["state"] == "queued" && !status["reason"].as_str().unwrap().contains("a moment ago");
        std::thread::sleep(Duration::from_millis(500));
        told.then_some(())
    });
    let output = program(&["stop", "--arm", ARM], &run.experiment);
    assert!(said(&output).contains("is taken out of the queue; it was"), "{}", said(&output));
    slurm("scancel", &[&blocker]);
    assert!(run.accounted().starts_with("CANCELLED"));
}

#[test]
fn an_abort_in_the_console_leaves_the_job_cancelled_and_a_checkpoint() {
    let Some(_) = cluster("console") else { return };
    let _shared = CLUSTER.read();
    let fixture = Fixture::xwam(40_000);
    let run = Submitted::new(&fixture, "console", "{partition: extra, cpus: 1}");
    run.steps(1, 4);
    let size = portable_pty::PtySize { rows: 40, cols: 120, pixel_width: 0, pixel_height: 0 };
    let pair = portable_pty::native_pty_system().openpty(size).unwrap();
    let mut command = portable_pty::CommandBuilder::new(env!("CARGO_BIN_EXE_lbva-tui"));
    command.arg(&run.experiment.folder);
    command.env("TERM", "xterm-256color");
    let mut console = pair.slave.spawn_command(command).unwrap();
    drop(pair.slave);
    let (mut output, mut keyboard) = (pair.master.try_clone_reader().unwrap(), pair.master.take_writer().unwrap());
    let screen = std::sync::Arc::new(std::sync::Mutex::new(vt100::Parser::new(
        40.try_into().unwrap(),
        120.try_into().unwrap(),
        0,
    )));
    let drawn = screen.clone();
    std::thread::spawn(move || {
        let mut bytes = [0; 4096];
        while let Ok(count @ 1..) = std::io::Read::read(&mut output, &mut bytes) {
            drawn.lock().unwrap().process(&bytes[..count]);
        }
    });
    let shows = |text: &str| {
        let from = Instant::now();
        while !screen.lock().unwrap().screen().contents().contains(text) {
            let contents = screen.lock().unwrap().screen().contents();
            assert!(from.elapsed() < Duration::from_secs(60), "{text:?} never came; the screen was\n{contents}");
            std::thread::sleep(Duration::from_millis(50));
        }
    };
    shows(&format!("job {} RUNNING", run.job));
    keyboard.write_all(b"S").unwrap();
    shows(&format!("scancel --signal=USR2 {}, and when it is written scancel {}", run.job, run.job));
    println!("{}", screen.lock().unwrap().screen().contents());
    keyboard.write_all(b"\r").unwrap();
    let (outcome, reason) = run.ended(1);
    assert_eq!((outcome.as_str(), reason.as_str()), ("stopped", "stopped by console with a checkpoint"));
    assert!(run.accounted().starts_with("CANCELLED"));
    assert_eq!(run.state().0, RunState::Stopped);
    assert!(run.experiment.saved() > 0);
    keyboard.write_all(b"q").unwrap();
    console.wait().unwrap();
}

#[test]
fn what_slurm_refuses_is_told_in_its_words() {
    let Some(_) = cluster("refusals") else { return };
    let _shared = CLUSTER.read();
    let fixture = Fixture::xwam(10);
    let submit = |name: &str, settings: &str, path: Option<&str>| {
        let experiment = fixture.here(name);
        let file = experiment.folder.join("experiment.yaml");
        let text = fs::read_to_string(&file).unwrap();
        fs::write(&file, format!("{text}{settings}")).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_lbva-tui"));
        command.arg("submit").arg(&experiment.folder).args(["--arm", ARM]);
        if let Some(path) = path {
            command.env("PATH", path);
        }
        let output = command.output().unwrap();
        assert!(!experiment.run.submitted_jobs().exists());
        (output.status.code(), said(&output))
    };
    let (code, text) = submit("partition", "slurm: {partition: nix}\n", None);
    assert!(code == Some(78) && text.contains("invalid partition specified: nix"), "{text}");
    let (code, text) = submit("qos", "slurm: {partition: extra, qos: nix}\n", None);
    assert!(code == Some(78) && text.contains("Invalid qos specification"), "{text}");
    let (code, text) = submit("account", "slurm: {partition: extra, account: nix}\n", None);
    assert!(code == Some(78) && text.contains("Invalid account or account/partition combination"), "{text}");
    let (code, text) = submit("quota", "slurm: {partition: extra, qos: full}\n", None);
    assert!(code == Some(78) && text.contains("QOSMaxSubmitJobPerUserLimit"), "{text}");
    let (code, text) = submit("array", "slurm: {partition: extra, extra: [--array=0-3]}\n", None);
    assert!(code == Some(78) && text.contains("--array is set by the program itself"), "{text}");
    let (code, text) = submit("gpus", "slurm: {partition: extra, gpus: 9}\n", None);
    assert!(code == Some(78) && text.contains("Requested node configuration is not available"), "{text}");
    let (code, text) = submit("none", "", None);
    assert!(code == Some(78) && text.contains("experiment.yaml has no slurm: block"), "{text}");
    let (code, text) = submit("own", "slurm: {extra: [--no-requeue]}\n", None);
    assert!(code == Some(78) && text.contains("--no-requeue is set by the program itself"), "{text}");
    let (code, text) = submit("absent", "slurm: {partition: extra}\n", Some("/nowhere"));
    assert!(code == Some(69) && text.contains("squeue cannot be run"), "{text}");
}

#[test]
fn a_run_that_takes_too_much_memory_is_told_so() {
    let Some(_) = cluster("out of memory") else { return };
    if std::env::var_os("LBVA_TUI_TEST_SLURM_MEMORY").is_none() {
        return left_out("out of memory", "this machine's Slurm cannot limit memory (cgroup v1)");
    }
    let _shared = CLUSTER.read();
    let fixture = Fixture::xwam(4000);
    let run = Submitted::new(&fixture, "memory", "{partition: extra, cpus: 1, mem: 30M}");
    assert_eq!(run.accounted(), "FAILED", "srun hides it");
    let status = run.status();
    assert_eq!((&status["state"], &status["job"]["state"]), (&"failed".into(), &"OUT_OF_MEMORY".into()), "{status}");
    assert!(status["reason"].as_str().unwrap().contains("ran out of memory"), "{status}");
}

/// The node, gone until this is dropped: a test that fails must not keep it from the others.
struct LostNode;

impl LostNode {
    fn new() -> Self {
        slurm("scontrol", &["update", "nodename=gpu1", "state=down", "reason=test"]);
        Self
    }
}

impl Drop for LostNode {
    fn drop(&mut self) {
        let _ = Command::new("scontrol").args(["update", "nodename=gpu1", "state=resume"]).output();
    }
}

/// The program as a user who owns nothing here, from a copy that he may read.
fn as_nobody(fixture: &Fixture, arguments: &[&str], experiment: &Experiment) -> Output {
    let folder = fixture.folder.path();
    let copy = folder.join("lbva-tui");
    if !copy.exists() {
        fs::set_permissions(folder, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        fs::copy(env!("CARGO_BIN_EXE_lbva-tui"), &copy).unwrap();
    }
    let (first, rest) = arguments.split_first().unwrap();
    let mut command = Command::new("setpriv");
    command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]).arg(copy).env("HOME", "/nonexistent");
    command.arg(first).arg(&experiment.folder).args(rest).output().unwrap()
}

#[test]
fn another_user_sees_a_run_and_ends_it_only_where_he_may_write() {
    let Some(_) = cluster("another user") else { return };
    let _shared = CLUSTER.read();
    let fixture = Fixture::xwam(40_000);
    let run = Submitted::new(&fixture, "shared", "{partition: extra, cpus: 1}");
    run.steps(1, 4);
    let told = |output: &Output, code: i32, words: &[&str]| {
        let text = said(output);
        let all = words.iter().all(|words| text.contains(words));
        assert!(output.status.code() == Some(code) && all, "{:?}, not {code} and {words:?}: {text}", output.status);
    };
    let job = format!("job {} RUNNING", run.job);
    run.wait_for("the job in accounting", || {
        let rows = slurm("sacct", &["-n", "-P", "-X", "-j", &run.job, "-o", "State"]);
        rows.starts_with("RUNNING").then_some(())
    });
    told(&as_nobody(&fixture, &["--no-ui"], &run.experiment), 0, &["running", &job]);
    told(&as_nobody(&fixture, &["stop", "--arm", ARM], &run.experiment), 74, &["ermission denied"]);
    told(&as_nobody(&fixture, &["submit", "--arm", ARM], &run.experiment), 74, &["ermission denied"]);
    assert_eq!(run.status()["state"], "running");

    // A folder that a group shares: the job is still its owner's.
    slurm("chmod", &["-R", "a+rwX", &run.experiment.folder.to_string_lossy()]);
    let busy = format!("job {} of this run is RUNNING", run.job);
    told(&as_nobody(&fixture, &["submit", "--arm", ARM], &run.experiment), 78, &[&busy, "another user's"]);
    let refused = ["stop file written", "Access/permission denied", "it cancels its job itself within a minute"];
    told(&as_nobody(&fixture, &["stop", "--arm", ARM], &run.experiment), 0, &refused);
    let (outcome, reason) = run.ended(1);
    assert_eq!((outcome.as_str(), reason.as_str()), ("stopped", "stopped by lbva-tui stop with a checkpoint"));
    assert!(run.accounted().starts_with("CANCELLED"));
}

#[test]
fn two_who_ask_at_once_get_one_job_and_one_end() {
    let Some(_) = cluster("two at once") else { return };
    let _shared = CLUSTER.read();
    let fixture = Fixture::xwam(40_000);
    let mut run = Submitted::new(&fixture, "twice", "{partition: extra, cpus: 1}");
    let both = |arguments: [&str; 3], experiment: &Experiment| -> Vec<Output> {
        let begin = |_| {
            let mut command = Command::new(env!("CARGO_BIN_EXE_lbva-tui"));
            command.arg(arguments[0]).arg(&experiment.folder).args(&arguments[1..]);
            command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped()).spawn().unwrap()
        };
        let children: Vec<_> = (0..2).map(begin).collect();
        children.into_iter().map(|child| child.wait_with_output().unwrap()).collect()
    };
    run.steps(1, 4);
    for output in both(["stop", "--arm", ARM], &run.experiment) {
        assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    }
    assert_eq!(run.ended(1).1, "stopped by lbva-tui stop with a checkpoint");
    assert!(run.accounted().starts_with("CANCELLED"));
    let outputs = both(["submit", "--arm", ARM], &run.experiment);
    let mut codes: Vec<_> = outputs.iter().map(|output| output.status.code().unwrap()).collect();
    codes.sort_unstable();
    assert_eq!(codes, [0, 78], "{}\n{}", said(&outputs[0]), said(&outputs[1]));
    let records = fs::read_to_string(run.experiment.run.submitted_jobs()).unwrap();
    let newest: serde_json::Value = serde_json::from_str(records.lines().last().unwrap()).unwrap();
    assert_eq!(records.lines().count(), 2, "{records}");
    run.job = newest["job"].to_string();
}

#[test]
fn a_lost_node_costs_an_attempt_and_not_the_run() {
    let Some(_) = cluster("node failure") else { return };
    let _alone = CLUSTER.write();
    let fixture = Fixture::xwam(40_000);
    let run = Submitted::new(&fixture, "node", "{partition: extra, cpus: 1}");
    run.steps(1, 6);
    let lost = LostNode::new();
    run.wait_for("the failure", || run.accounts().contains("NODE_FAIL").then_some(()));
    drop(lost);
    run.steps(2, 1);
    let (start, ..) = run.span(2);
    assert!(start > 0 && start + 4 >= run.span(1).1, "at most a save interval is lost");
    let status = run.status();
    assert_eq!((&status["job"]["restarts"], &status["job"]["tries_in_vain"]), (&1.into(), &0.into()), "{status}");
    assert_eq!(
        (&status["job"]["tries_in_vain_allowed"], &status["state"]),
        (&10.into(), &"running".into()),
        "{status}"
    );
}

#[test]
fn tasks_of_an_array_are_told_apart_and_only_one_trains() {
    let Some(_) = cluster("array") else { return };
    let _shared = CLUSTER.read();
    let fixture = Fixture::xwam(40_000);
    let mut run = Submitted { experiment: fixture.here("array"), job: String::new() };
    let submit = |tasks: &str| {
        let program = env!("CARGO_BIN_EXE_lbva-tui");
        let line = format!("exec srun '{program}' --no-ui run '{}' --arm {ARM}", run.experiment.folder.display());
        slurm("sbatch", &["--parsable", "-p", "extra", "--array", tasks, "-o", "/dev/null", "--wrap", &line])
    };
    let stop = |run: &Submitted| {
        let output = program(&["stop"], &run.experiment);
        assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    };
    let job = submit("3-4");
    run.job = job.clone();
    run.steps(1, 4);
    let identity = run.experiment.lines(1)[0]["job"]["id"].as_str().unwrap().to_owned();
    let tasks = [format!("{job}_3"), format!("{job}_4")];
    let other = tasks.iter().find(|task| **task != identity).unwrap().clone();
    assert!(tasks.contains(&identity), "{identity}");
    run.job = other;
    assert_eq!(run.accounted(), "FAILED", "the lock is the first task's");
    assert_eq!(run.experiment.run.attempt_numbers().unwrap(), [1]);
    run.job = identity;
    stop(&run);
    assert!(run.accounted().starts_with("CANCELLED"));

    // One after the other: the end of the first is none of the second, which goes on from its checkpoint.
    let job = submit("0-2%1");
    run.job = format!("{job}_0");
    run.steps(2, 4);
    assert!(slurm("squeue", &["--me", "-h", "-O", "JobArrayID:|"]).contains(&format!("{job}_[1-2%1]")));
    stop(&run);
    // The next task may have begun before the cancel that follows the checkpoint: then it is its own exit that is recorded.
    let ended = run.accounted();
    assert!(ended.starts_with("CANCELLED") || ended == "FAILED", "{ended}");
    run.steps(3, 1);
    assert_eq!(run.experiment.lines(3)[0]["job"]["id"], format!("{job}_1"));
    assert_eq!(run.span(3).0, run.span(2).1);
    run.job = job;
}

#[test]
fn two_hundred_jobs_cost_little_and_an_outage_costs_nothing() {
    let Some(script) = cluster("outage") else { return };
    let _alone = CLUSTER.write();
    let fixture = Fixture::xwam(40_000);
    let run = Submitted::new(&fixture, "outage", "{partition: extra, cpus: 1}");
    let mut jobs = Vec::new();
    for _ in 0..200 {
        jobs.push(slurm("sbatch", &["--parsable", "--hold", "-p", "extra", "--wrap", "true"]));
    }
    run.steps(1, 2);
    // CPU time of the whole look, the scheduler's command included.
    let line = format!("'{}' --no-ui '{}' >&2; times", env!("CARGO_BIN_EXE_lbva-tui"), run.experiment.folder.display());
    let times = Command::new("bash").args(["-c", &line]).output().unwrap();
    let children = String::from_utf8(times.stdout).unwrap().lines().nth(1).unwrap().to_owned();
    let cpu_s: f64 = children
        .split_whitespace()
        .map(|time| time.trim_end_matches('s').split_once('m').unwrap())
        .map(|(minutes, seconds)| minutes.parse::<f64>().unwrap() * 60.0 + seconds.parse::<f64>().unwrap())
        .sum();
    println!("a look at 201 jobs: {cpu_s} s of CPU");
    assert!(cpu_s <= 0.3, "{cpu_s} s");
    jobs.chunks(50).for_each(|jobs| drop(slurm("scancel", &jobs.iter().map(String::as_str).collect::<Vec<_>>())));

    let began = Instant::now();
    assert!(Command::new(&script).arg("pause").status().unwrap().success());
    let before = run.span(1).1;
    let status = program_without_ui(&run.experiment);
    assert_eq!(status.status.code(), Some(0), "{}", said(&status));
    assert!(said(&status).contains("Slurm does not answer"), "{}", said(&status));
    assert!(said(&status).contains("running"), "{}", said(&status));
    let stop = program(&["stop", "--arm", ARM], &run.experiment);
    assert_eq!(stop.status.code(), Some(69), "{}", said(&stop));
    std::thread::sleep(Duration::from_secs(60).saturating_sub(began.elapsed()));
    assert!(Command::new(&script).arg("start").status().unwrap().success());
    assert!(run.span(1).1 > before, "it trained on");
    assert_eq!(run.status()["job"]["state"], "RUNNING");
    let output = program(&["stop", "--arm", ARM], &run.experiment);
    assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    assert!(run.accounted().starts_with("CANCELLED"));
}
