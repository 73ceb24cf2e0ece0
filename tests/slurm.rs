//! Runs under a real Slurm: preempted, killed, cancelled, at their time limit, and with the controller gone.
//!
//! `.ci/run` starts the cluster of tests/slurm/cluster.sh and sets LBVA_TUI_TEST_SLURM to that script; then every test
//! here must pass. Without it they are left out, and say so: a developer's machine need not have Slurm.

mod run_fixture;

use lbva_tui::runlog::{Outcome, RunReader, RunState, now_ms};
use run_fixture::{ARM, Experiment, Fixture, said};
use std::fs;
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
        // Past the capture of the test's output: this must be seen.
        let text = format!("LEFT OUT: {test} needs Slurm; eval \"$(tests/slurm/cluster.sh env)\" after `start`\n");
        let _ = fs::OpenOptions::new().append(true).open("/dev/stderr").and_then(|mut it| std::io::Write::write_all(&mut it, text.as_bytes()));
    }
    script
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
                let outputs: Vec<String> =
                    outputs.filter_map(|entry| fs::read_to_string(entry.path()).ok()).collect();
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
        let last = |event: &str| lines.iter().filter(|line| line["event"] == event).filter_map(|line| line["step"].as_u64()).max();
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
    let restarts: Vec<u64> = (1..=7).map(|number| run.experiment.lines(number)[0]["job"]["restart"].as_u64().unwrap()).collect();
    assert_eq!(restarts, [0, 1, 2, 3, 4, 5, 0]);
    run.experiment.equals(&undisturbed);
}

#[test]
fn in_the_grace_time_the_worker_saves_and_requeues_itself() {
    let Some(_) = cluster("grace time") else { return };
    let _shared = CLUSTER.read();
    let run = Submitted::new(&Fixture::xwam(4000), "grace", "{partition: grace, gpus: 8, cpus: 1}");
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
    let run = Submitted::new(&Fixture::xwam(4000), "cancelled", "{partition: extra, cpus: 1}");
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
    let run = Submitted::new(&Fixture::xwam(40_000), "limit", "{partition: extra, cpus: 1, time: \"1\"}");
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
    // A learning rate that no weights survive: the loss of the second step is not finite, in every attempt.
    let fixture = Fixture::xwam(4000);
    let text = fs::read_to_string(&fixture.recipe).unwrap();
    let text: String = text.lines().map(|line| if line.trim_start().starts_with("lr:") { "  lr: 1.0e30\n".to_owned() } else { format!("{line}\n") }).collect();
    fs::write(&fixture.recipe, text.replace("save_every: 2", "save_every: 1000")).unwrap();
    let run = Submitted::new(&fixture, "crash", "{partition: extra, cpus: 1}");
    let (outcome, reason) = run.ended(1);
    assert!(outcome == "failed" && reason.ends_with("; requeued"), "{reason}");
    let (_, reason) = run.ended(2);
    assert!(reason.starts_with("failed 2 times in a row without a new checkpoint"), "{reason}");
    assert_eq!(run.accounted(), "FAILED");
    let outcome = run.experiment.outcome();
    assert_eq!((outcome.outcome, outcome.exit_code), (Outcome::Failed, 78));
}
