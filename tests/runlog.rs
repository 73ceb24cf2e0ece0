//! The run directory under everything that happens to files: torn and bad lines, two writers, kills, full disks.

mod small_disk;

use lbva_tui::files::{create_new, write_file, write_whole};
use lbva_tui::runlog::*;
use lbva_tui::{Error, Exit};
use serde_json::json;
use small_disk::SmallDisk;
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

fn run_in(folder: &TempDir) -> RunDir {
    RunDir::new(folder.path().join("runs/m1_baseline"))
}

fn new_attempt(start_step: u64) -> NewAttempt {
    NewAttempt {
        arm: "m1_baseline".to_owned(),
        start_step,
        total_steps: 100,
        save_every: 10,
        validate_every: 25,
        parameters: 1_234_567,
        device: "cpu".to_owned(),
        threads: 1,
        job: None,
        command_line: vec!["lbva-tui".to_owned(), "run".to_owned()],
        code_version: "0.1.0".to_owned(),
        arm_yaml: "train:\n  steps: 100\n  seed: 7\n".to_owned(),
        known_identity: serde_json::Map::new(),
        accepted: vec![],
    }
}

fn step(step: u64) -> StepEvent {
    StepEvent {
        step,
        loss: 1.0 / step as f64,
        loss_video: 0.5,
        loss_action: 0.25,
        loss_proprio: 0.25,
        grad_norm: 1.5,
        lr: 3e-5,
        step_ms: 100.0 + step as f64,
        data_ms: 2.0,
        padding_waste: 0.023,
        tokens: 4096,
        memory: Memory {
            kind: MemoryKind::Rss,
            bytes: 123_456_789,
            peak_bytes: 223_456_789,
            total_bytes: 8_000_000_000,
            parts: None,
        },
        branch_norm: None,
        packing: None,
        times: None,
        work: None,
    }
}

fn step_line(at: u64, time_ms: u64) -> String {
    serde_json::to_string(&EventLine { v: 1, time_ms, event: Event::Step(step(at)) }).unwrap()
}

fn append(path: &Path, bytes: &[u8]) {
    OpenOptions::new().append(true).create(true).open(path).unwrap().write_all(bytes).unwrap();
}

fn poll(reader: &mut RunReader) -> bool {
    reader.poll(now_ms()).unwrap()
}

/// An attempt's log with nothing behind it but its folder.
fn bare_log(run: &RunDir, attempt: u32) -> PathBuf {
    fs::create_dir_all(run.attempt(attempt).root()).unwrap();
    run.attempt(attempt).events()
}

fn refused(error: &Error, code: &str, exit: Exit) {
    assert_eq!((error.code, error.exit), (code, exit), "{error}");
    assert_eq!(error.to_string().lines().count(), 1);
}

#[test]
fn what_a_writer_writes_a_reader_reads() {
    let folder = TempDir::new().unwrap();
    let run = run_in(&folder);
    let mut reader = RunReader::open(run.root());
    assert!(!poll(&mut reader), "no folder yet is no change and no error");
    assert_eq!(reader.view().state(now_ms()).0, RunState::Waiting);

    let mut writer = RunWriter::begin(run.clone(), new_attempt(0)).unwrap();
    assert!(poll(&mut reader));
    assert!(!poll(&mut reader), "nothing new");
    assert_eq!(reader.view().liveness, Liveness::Alive);
    assert_eq!(reader.view().state(now_ms()).0, RunState::Starting);

    writer.emit(Event::Phase { phase: Phase::CachingLatents, done: 312, total: 720 }).unwrap();
    poll(&mut reader);
    assert_eq!(reader.view().state(now_ms()), (RunState::Starting, "caching latents 312/720".to_owned()));

    for at in 1..=20 {
        writer.emit(Event::Step(step(at))).unwrap();
    }
    poll(&mut reader);
    let view = reader.view();
    assert_eq!(view.series.step, (1..=20).collect::<Vec<_>>());
    assert_eq!(view.series.loss[3], 0.25);
    assert_eq!(view.last_step, Some(step(20)));
    assert_eq!(view.state(now_ms()).0, RunState::Running);
    // Steps 2..=20: the first is left out.
    assert_eq!(view.median_step_ms(), Some(111.0));
    assert_eq!(view.eta_ms(), Some(80.0 * 111.0));

    writer.emit(Event::Phase { phase: Phase::Saving, done: 0, total: 1 }).unwrap();
    let saved =
        writer.checkpoints().publish(20, json!({"step": 20}), |at| write_file(&at.join("weights"), &[7; 100])).unwrap();
    poll(&mut reader);
    let save = reader.view().last_save.unwrap();
    assert!(save.step == 20 && save.bytes == 100 && save.ms.is_nan(), "the folder is there before the log says so");
    writer.emit(Event::Checkpoint { step: 20, bytes: saved.bytes(), ms: 12.5, blocked_ms: None }).unwrap();
    poll(&mut reader);
    assert_eq!(reader.view().last_save.unwrap().ms, 12.5);

    writer.emit(Event::StopRequested { by: "SIGTERM".to_owned() }).unwrap();
    poll(&mut reader);
    assert_eq!(reader.view().state(now_ms()).0, RunState::Stopping);
    fs::write(run.stop_request(), b"").unwrap();
    assert_eq!(writer.stop_requested().unwrap().by, "stop file");
    let reason = "stopped by SIGTERM at step 20 with a checkpoint";
    writer.finish(Outcome::Stopped, 20, Exit::Stopped, reason).unwrap();
    assert!(!run.stop_request().exists(), "a request that was obeyed is gone");
    poll(&mut reader);
    assert_eq!(reader.view().state(now_ms()), (RunState::Stopped, reason.to_owned()));
    assert_eq!(reader.view().outcome.as_ref().unwrap().exit_code, 75);

    // A new attempt: the old outcome must not be taken for its own.
    let writer = RunWriter::begin(run.clone(), new_attempt(20)).unwrap();
    assert_eq!(writer.attempt().number(), 2);
    assert!(!run.outcome().exists());
    poll(&mut reader);
    assert_eq!(reader.view().state(now_ms()), (RunState::Starting, "resuming at step 20".to_owned()));
    assert!(reader.view().series.superseded.iter().all(|superseded| !superseded));
    writer.finish(Outcome::Finished, 100, Exit::Done, "all 100 steps done").unwrap();
    poll(&mut reader);
    assert_eq!(reader.view().state(now_ms()).0, RunState::Finished);
    assert_eq!(reader.view(), RunReader::open(run.root()).polled().view(), "read at once = read bit by bit");
}

trait Polled {
    fn polled(self) -> Self;
}

impl Polled for RunReader {
    fn polled(mut self) -> Self {
        poll(&mut self);
        self
    }
}

#[test]
fn a_torn_line_is_read_when_it_is_complete_and_counted_never() {
    let folder = TempDir::new().unwrap();
    let run = run_in(&folder);
    let log = bare_log(&run, 1);
    let mut reader = RunReader::open(run.root());
    let text = format!("{}\n{}\n", step_line(1, 1000), step_line(2, 2000));
    for (count, byte) in text.bytes().enumerate() {
        append(&log, &[byte]);
        poll(&mut reader);
        assert_eq!(reader.view().series.len(), text.as_bytes()[..=count].iter().filter(|&&byte| byte == b'\n').count());
    }
    append(&log, b"{\"v\":1,\"time_ms\":3000,\"event\":\"st");
    assert!(!poll(&mut reader));
    assert_eq!(reader.view().bad_lines, 0);
    assert_eq!(reader.view().last_step, Some(step(2)));
}

#[test]
fn bad_lines_are_counted_and_shown_with_their_place_and_the_rest_is_read() {
    let folder = TempDir::new().unwrap();
    let run = run_in(&folder);
    let log = bare_log(&run, 1);
    let mut zeros = vec![0u8; 3 << 20];
    zeros.push(b'\n');
    let bad: [&[u8]; 7] = [
        b"{\"v\":1,\"time_ms\":1,\"event\":\"step\",\"step\":1}\n",
        b"not json at all\n",
        b"\xff\xfe\x80 not utf-8 \x1b[2J\n",
        b"{\"v\":1,\"time_ms\":1,\"event\":\"phase\",\"phase\":\"loading_data\",\"done\":\"x\",\"total\":1}\n",
        b"[]\n",
        b"{\"event\":\"step\"\n",
        &zeros,
    ];
    for (index, line) in bad.iter().enumerate() {
        append(&log, line);
        append(&log, format!("{}\n", step_line(index as u64 + 1, 1000)).as_bytes());
    }
    // Kinds and fields of a newer writer, and blank lines, are no errors.
    append(&log, b"{\"v\":1,\"time_ms\":1,\"event\":\"teleported\",\"where\":3}\n\n");
    append(&log, b"{\"v\":2,\"time_ms\":1,\"event\":\"step\",\"renamed\":3}\n");
    append(
        &log,
        b"{\"v\":1,\"time_ms\":9,\"event\":\"message\",\"level\":\"info\",\"text\":\"a\\u001b[2Jb\",\"more\":[]}\n",
    );
    let mut reader = RunReader::open(run.root());
    poll(&mut reader);
    let view = reader.view();
    assert_eq!(view.bad_lines, 7);
    assert_eq!(view.series.step, [1, 2, 3, 4, 5, 6, 7]);
    let texts: Vec<&str> = view.log.iter().map(|line| line.text.as_str()).collect();
    assert!(texts.iter().any(|text| text.starts_with("attempts/0001/events.jsonl line 3 is no event")), "{texts:?}");
    assert!(texts.iter().any(|text| text.starts_with("attempts/0001/events.jsonl line 13 is no event (longer than")));
    assert!(texts.contains(&"a [2Jb"), "{texts:?}");
    assert!(texts.iter().all(|text| !text.chars().any(char::is_control)));
}

#[test]
fn an_over_long_line_still_being_written_is_counted_once() {
    let folder = TempDir::new().unwrap();
    let run = run_in(&folder);
    let log = bare_log(&run, 1);
    let mut reader = RunReader::open(run.root());
    for _ in 0..4 {
        append(&log, &vec![b'x'; 1 << 20]);
        poll(&mut reader);
    }
    append(&log, format!("\n{}\n", step_line(1, 1)).as_bytes());
    poll(&mut reader);
    assert_eq!((reader.view().bad_lines, reader.view().series.len()), (1, 1));
}

#[test]
fn numbers_that_are_none_reach_the_view_as_nan_on_every_path() {
    let folder = TempDir::new().unwrap();
    let run = run_in(&folder);
    let mut writer = RunWriter::begin(run.clone(), new_attempt(0)).unwrap();
    writer.emit(Event::Step(StepEvent { loss: f64::NAN, grad_norm: f64::INFINITY, ..step(1) })).unwrap();
    // Another key order goes the general way.
    let line = step_line(2, 5).replace("\"loss\":0.5", "\"loss\":null").replace("{\"v\":1,", "{") + "\n";
    append(&run.attempt(1).events(), line.replace("\"tokens\"", "\"v\":1,\"tokens\"").as_bytes());
    writer.emit(Event::Checkpoint { step: 2, bytes: 1, ms: f64::NAN, blocked_ms: None }).unwrap();
    let reader = RunReader::open(run.root()).polled();
    let view = reader.view();
    assert_eq!((view.series.len(), view.bad_lines), (2, 0));
    assert!(view.series.loss.iter().all(|loss| loss.is_nan()));
    assert!(view.last_step.as_ref().unwrap().loss.is_nan());
}

#[test]
fn steps_repeated_after_a_resume_supersede_the_lost_ones() {
    let folder = TempDir::new().unwrap();
    let run = run_in(&folder);
    let mut first = RunWriter::begin(run.clone(), new_attempt(0)).unwrap();
    (1..=15).for_each(|at| first.emit(Event::Step(step(at))).unwrap());
    let point = |step, wrist_lpips| {
        Event::Validation(ValidationEvent {
            step,
            clips: 4,
            wrist_lpips,
            wrist_psnr: 15.0,
            wrist_ssim: 0.5,
            trans_l2_norm: 1.0,
            trans_l2_m: 0.1,
            rot_deg: 80.0,
            ceiling_lpips: 0.1,
            ceiling_psnr: 27.0,
            wrist_latent_mse: None,
            ms: 100.0,
            work: None,
        })
    };
    for (step, lpips) in [(0, 0.7), (10, 0.6), (15, 0.5)] {
        first.emit(point(step, lpips)).unwrap();
    }
    drop(first);
    let mut reader = RunReader::open(run.root()).polled();
    let mut second = RunWriter::begin(run.clone(), new_attempt(10)).unwrap();
    poll(&mut reader);
    assert_eq!(reader.view().series.superseded, [vec![false; 10], vec![true; 5]].concat(), "lost at the resume");
    assert_eq!(reader.view().steps_done(), 10);
    second.emit(point(15, 0.51)).unwrap();
    (11..=12).for_each(|at| second.emit(Event::Step(step(at))).unwrap());
    drop(second);
    let mut third = RunWriter::begin(run.clone(), new_attempt(10)).unwrap();
    (11..=13).for_each(|at| third.emit(Event::Step(step(at))).unwrap());
    poll(&mut reader);
    let view = reader.view();
    let active: Vec<(u64, u32)> = (0..view.series.len())
        .filter(|&index| !view.series.superseded[index])
        .map(|index| (view.series.step[index], view.series.attempt[index]))
        .collect();
    assert_eq!(active, (1..=10).map(|at| (at, 1)).chain((11..=13).map(|at| (at, 3))).collect::<Vec<_>>());
    assert_eq!(view.series.len(), 15 + 2 + 3);
    assert_eq!(view.attempts.len(), 3);
    let points: Vec<_> = view.validations.iter().map(|p| (p.event.step, p.attempt, p.event.wrist_lpips)).collect();
    assert_eq!(points, [(0, 1, 0.7), (10, 1, 0.6), (15, 2, 0.51)]);
}

#[test]
fn a_truncated_or_replaced_log_is_read_again() {
    let folder = TempDir::new().unwrap();
    let run = run_in(&folder);
    let log = bare_log(&run, 1);
    append(&log, format!("{}\n{}\n", step_line(1, 1), step_line(2, 2)).as_bytes());
    let mut reader = RunReader::open(run.root()).polled();
    fs::write(&log, format!("{}\n", step_line(5, 3))).unwrap();
    assert!(poll(&mut reader));
    assert_eq!(reader.view().series.step, [5]);
    assert!(reader.view().log.iter().any(|line| line.text.contains("read again")));
    let other = log.with_extension("new");
    fs::write(&other, format!("{}\n{}\n{}\n", step_line(7, 3), step_line(8, 3), step_line(9, 3))).unwrap();
    fs::rename(&other, &log).unwrap();
    assert!(poll(&mut reader));
    assert_eq!(reader.view().series.step, [7, 8, 9]);
    fs::remove_dir_all(run.attempts()).unwrap();
    assert!(poll(&mut reader));
    assert!(reader.view().series.is_empty());
}

#[test]
fn a_second_worker_on_one_run_is_refused_with_the_holder_named() {
    let folder = TempDir::new().unwrap();
    let run = run_in(&folder);
    let writer = RunWriter::begin(run.clone(), new_attempt(0)).unwrap();
    let error = RunWriter::begin(run.clone(), new_attempt(0)).unwrap_err();
    refused(&error, "run_busy", Exit::Refused);
    assert!(error.what.contains(&format!("worker {} on host {}", std::process::id(), host_name())), "{error}");
    assert_eq!(run.attempt_numbers().unwrap(), [1], "the refused one leaves no trace");
    drop(writer);
    assert_eq!(RunWriter::begin(run, new_attempt(0)).unwrap().attempt().number(), 2);
}

#[test]
fn a_resume_with_another_identity_or_configuration_names_every_difference() {
    let folder = TempDir::new().unwrap();
    let run = run_in(&folder);
    let mut writer = RunWriter::begin(run.clone(), new_attempt(0)).unwrap();
    writer.bind_identity(&json!({"config": "aa", "clips": {"train": "bb", "validation": "cc"}})).unwrap();
    writer.checkpoints().publish(10, json!({}), |dir| write_file(&dir.join("weights"), b"w")).unwrap();
    drop(writer);
    let recorded = (fs::read(run.identity()).unwrap(), fs::read(run.arm_yaml()).unwrap());

    let mut writer = RunWriter::begin(run.clone(), new_attempt(10)).unwrap();
    let other = json!({"config": "aa", "clips": {"train": "XX"}, "world": 8});
    let error = writer.bind_identity(&other).unwrap_err();
    drop(writer);
    refused(&error, "identity_differs", Exit::Refused);
    for words in [
        "clips.train: recorded \"bb\", now \"XX\"",
        "clips.validation: recorded \"cc\", now absent",
        "world: recorded absent, now 8",
    ] {
        assert!(error.what.contains(words), "{error}");
    }
    assert!(!error.what.contains("config:"), "{error}");

    let mut other = new_attempt(0);
    other.arm_yaml = other.arm_yaml.replace("seed: 7", "seed: 8");
    let error = RunWriter::begin(run.clone(), other).unwrap_err();
    refused(&error, "arm_differs", Exit::Refused);
    assert!(error.what.ends_with("train.seed: recorded 7, now 8"), "{error}");

    let mut reformatted = new_attempt(0);
    reformatted.arm_yaml = "# a comment\ntrain: {seed: 7, steps: 100}\n".to_owned();
    drop(RunWriter::begin(run.clone(), reformatted).unwrap());
    assert_eq!((fs::read(run.identity()).unwrap(), fs::read(run.arm_yaml()).unwrap()), recorded, "never overwritten");
    assert_eq!(run.attempt_numbers().unwrap(), [1, 2, 3]);
}

#[test]
fn a_stop_request_that_names_another_attempt_is_not_for_this_one() {
    let folder = TempDir::new().unwrap();
    let run = run_in(&folder);
    drop(RunWriter::begin(run.clone(), new_attempt(0)).unwrap());
    let writer = RunWriter::begin(run.clone(), new_attempt(0)).unwrap();
    let mut reader = RunReader::open(run.root());
    for (text, taken) in [
        (r#"{"by":"console","attempt":1,"time_ms":5}"#, false),
        (r#"{"by":"console","attempt":2,"time_ms":5}"#, true),
        (r#"{"by":"console","attempt":3}"#, false),
        (r#"{"by":"console"}"#, true),
        ("", true),
        ("please", true),
    ] {
        fs::write(run.stop_request(), text).unwrap();
        poll(&mut reader);
        assert_eq!(reader.view().stop_requested, taken, "{text}");
        assert_eq!(writer.stop_requested().is_some(), taken, "{text}");
    }
}

#[test]
fn a_configuration_that_nothing_came_of_may_be_corrected_and_is_kept() {
    let folder = TempDir::new().unwrap();
    let run = run_in(&folder);
    let mut writer = RunWriter::begin(run.clone(), new_attempt(0)).unwrap();
    writer.bind_identity(&json!({"data": "aa"})).unwrap();
    drop(writer);
    let first = fs::read(run.arm_yaml()).unwrap();
    let mut corrected = new_attempt(0);
    corrected.arm_yaml = corrected.arm_yaml.replace("seed: 7", "seed: 8");
    let mut writer = RunWriter::begin(run.clone(), corrected.clone()).unwrap();
    writer.bind_identity(&json!({"data": "bb"})).unwrap();
    assert_eq!(fs::read(run.arm_yaml()).unwrap(), corrected.arm_yaml.as_bytes());
    assert_eq!(fs::read(run.attempt(2).root().join("replaced-arm.yaml")).unwrap(), first, "the evidence stays");
    assert!(run.attempt(2).root().join("replaced-identity.json").exists());
}

#[test]
fn an_accepted_change_is_a_seam_and_the_earlier_record_stays() {
    let folder = TempDir::new().unwrap();
    let run = run_in(&folder);
    let known = |code: &str| serde_json::Map::from_iter([("code".to_owned(), json!(code))]);
    let attempt = |seed: u64, code: &str, accepted: &[&str]| NewAttempt {
        arm_yaml: new_attempt(0).arm_yaml.replace("seed: 7", &format!("seed: {seed}")),
        known_identity: known(code),
        accepted: accepted.iter().map(|&field| field.to_owned()).collect(),
        ..new_attempt(10)
    };
    let mut writer = RunWriter::begin(run.clone(), attempt(7, "c1", &[])).unwrap();
    writer.bind_identity(&json!({"code": "c1", "data": "aa", "clips": ["x", "y"]})).unwrap();
    writer.checkpoints().publish(10, json!({}), |dir| write_file(&dir.join("weights"), b"w")).unwrap();
    drop(writer);
    let first = (fs::read(run.arm_yaml()).unwrap(), fs::read(run.identity()).unwrap());

    // Refused at once, before anything is opened, with all that is known by then, and the way to accept it.
    for accepted in [&[][..], &["train"], &["train.seeds", "data"]] {
        let error = RunWriter::begin(run.clone(), attempt(8, "c2", accepted)).unwrap_err();
        refused(&error, "arm_differs", Exit::Refused);
        assert!(error.what.ends_with("train.seed: recorded 7, now 8; code: recorded \"c1\", now \"c2\""), "{error}");
        assert!(error.hint.ends_with("--accept-change train.seed --accept-change code"), "{error}");
    }
    let error = RunWriter::begin(run.clone(), attempt(8, "c2", &["train.seed"])).unwrap_err();
    assert!(!error.to_string().contains("train.seed") && error.hint.ends_with(": --accept-change code"), "{error}");
    refused(&RunWriter::begin(run.clone(), attempt(7, "c2", &[])).unwrap_err(), "identity_differs", Exit::Refused);
    assert_eq!(run.attempt_numbers().unwrap(), [1], "refused ones leave no trace");

    let mut writer = RunWriter::begin(run.clone(), attempt(8, "c2", &["train.seed", "code", "data"])).unwrap();
    let now = json!({"code": "c2", "data": "bb", "clips": ["x", "z"]});
    let error = writer.bind_identity(&now).unwrap_err();
    refused(&error, "identity_differs", Exit::Refused);
    assert!(error.what.ends_with(": clips[1]: recorded \"y\", now \"z\""), "{error}");
    assert!(error.hint.ends_with("--accept-change 'clips[1]'"), "{error}");
    drop(writer);
    // The configuration was accepted by then, and is the record; the identity is as it was.
    assert_eq!(fs::read(run.attempt(2).replaced(&run.arm_yaml())).unwrap(), first.0);
    assert_eq!(fs::read(run.identity()).unwrap(), first.1);

    let mut writer = RunWriter::begin(run.clone(), attempt(8, "c2", &["code", "data", "clips[1]"])).unwrap();
    writer.bind_identity(&now).unwrap();
    drop(writer);
    assert_eq!(fs::read(run.attempt(3).replaced(&run.identity())).unwrap(), first.1);
    assert!(!run.attempt(3).replaced(&run.arm_yaml()).exists());
    assert_eq!(serde_json::from_slice::<serde_json::Value>(&fs::read(run.identity()).unwrap()).unwrap(), now);
    // It fits now, with and without the words that accepted it.
    for accepted in [&[][..], &["data"]] {
        let mut writer = RunWriter::begin(run.clone(), attempt(8, "c2", accepted)).unwrap();
        writer.bind_identity(&now).unwrap();
    }

    let mut reader = RunReader::open(run.root());
    poll(&mut reader);
    let changes: Vec<_> =
        reader.view().changes.iter().map(|c| (c.attempt, c.step, c.field.as_str(), c.values.as_str())).collect();
    let expected = [
        (2, 10, "train.seed", "7 -> 8"),
        (3, 10, "clips[1]", "y -> z"),
        (3, 10, "code", "c1 -> c2"),
        (3, 10, "data", "aa -> bb"),
    ];
    assert_eq!(changes, expected);
    assert!(reader.view().log.iter().any(|line| line.text == "accepted change at step 10: train.seed 7 -> 8"));
}

#[test]
fn a_damaged_checkpoint_is_set_aside_and_pushes_no_good_one_out() {
    let folder = TempDir::new().unwrap();
    let run = run_in(&folder);
    let store = CheckpointStore::new(&run);
    for step in [10, 20, 30] {
        store.publish(step, json!({}), |dir| write_file(&dir.join("weights"), &[step as u8; 8])).unwrap();
    }
    fs::write(run.checkpoint(30).join("weights"), [9u8; 8]).unwrap();
    let latest = store.latest_complete(Check::Hashes).unwrap();
    assert_eq!(latest.checkpoint.unwrap().step, 20);
    store.set_aside_newer_than(Some(20)).unwrap();
    assert_eq!(store.list().unwrap(), [10, 20]);
    assert!(run.checkpoints().join(".bad-step-00000030/weights").exists(), "kept for a person to look at");
    store.publish(30, json!({}), |dir| write_file(&dir.join("weights"), b"anew")).unwrap();
    assert_eq!(store.prune(Retention { last: 2, every: 0 }).unwrap(), [10]);
    assert_eq!(store.list().unwrap(), [20, 30]);
}

#[test]
fn a_worker_killed_without_a_word_is_failed_and_says_what_is_lost() {
    let folder = TempDir::new().unwrap();
    let run = run_in(&folder);
    let mut child = Command::new("sleep").arg("600").stdin(Stdio::null()).spawn().unwrap();
    let mut writer = RunWriter::begin(run.clone(), new_attempt(0)).unwrap();
    (1..=8).for_each(|at| writer.emit(Event::Step(step(at))).unwrap());
    writer.checkpoints().publish(5, json!({}), |at| write_file(&at.join("weights"), b"w")).unwrap();
    drop(writer);
    // The record names the child from here on: it is the process whose life is in question.
    let stat = fs::read_to_string(format!("/proc/{}/stat", child.id())).unwrap();
    let ticks: u64 = stat.rsplit(')').next().unwrap().split_whitespace().nth(19).unwrap().parse().unwrap();
    let mut record: AttemptRecord = serde_json::from_slice(&fs::read(run.attempt(1).record()).unwrap()).unwrap();
    record.process.pid = child.id();
    record.process.start_ticks = Some(ticks);
    let write =
        |record: &AttemptRecord| fs::write(run.attempt(1).record(), serde_json::to_vec(record).unwrap()).unwrap();
    write(&record);
    let mut reader = RunReader::open(run.root()).polled();
    assert_eq!(reader.view().liveness, Liveness::Alive);
    assert_eq!(reader.view().state(now_ms()).0, RunState::Running);
    assert_eq!(reader.view().state(now_ms() + 40_000).0, RunState::Stalled);

    // The same number with another start time is another process.
    write(&AttemptRecord {
        process: ProcessIdentity { start_ticks: Some(ticks + 1), ..record.process.clone() },
        ..record.clone()
    });
    assert_eq!(RunReader::open(run.root()).polled().view().liveness, Liveness::Dead);
    let elsewhere = ProcessIdentity { host: "another-host".to_owned(), ..record.process.clone() };
    write(&AttemptRecord { process: elsewhere, ..record.clone() });
    assert_eq!(RunReader::open(run.root()).polled().view().liveness, Liveness::Unknown);

    write(&record);
    child.kill().unwrap();
    let deadline = Instant::now() + Duration::from_secs(10);
    while reader.view().liveness == Liveness::Alive && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(10));
        poll(&mut reader);
    }
    // Not waited for yet: a zombie is dead.
    assert_eq!(reader.view().liveness, Liveness::Dead);
    let (state, reason) = reader.view().state(now_ms());
    assert_eq!(state, RunState::Failed);
    assert!(reason.contains("died without a word at step 8; 3 steps after the save at 5 are lost"), "{reason}");
    child.wait().unwrap();

    // A record of a kill on request turns silence into a cause.
    let kill = KillRecord { by: "console".to_owned(), attempt: 1, pid: child.id(), time_ms: 0 };
    fs::write(run.kill_record(), serde_json::to_vec(&kill).unwrap()).unwrap();
    let reader = RunReader::open(run.root()).polled();
    assert_eq!(reader.view().state(now_ms()), (RunState::Failed, "killed on request by console at step 8".to_owned()));
}

/// A run on another host whose clock is `offset_ms` off this machine's: 20 steps, the newest of this moment.
fn run_of_another_clock(folder: &TempDir, offset_ms: i64) -> RunDir {
    let run = run_in(folder);
    let mut writer = RunWriter::begin(run.clone(), new_attempt(0)).unwrap();
    writer.emit(Event::Step(step(1))).unwrap();
    drop(writer);
    let mut record: AttemptRecord = serde_json::from_slice(&fs::read(run.attempt(1).record()).unwrap()).unwrap();
    record.process.host = "gpu1".to_owned();
    record.started_ms = record.started_ms.saturating_add_signed(offset_ms);
    fs::write(run.attempt(1).record(), serde_json::to_vec(&record).unwrap()).unwrap();
    let log = run.attempt(1).events();
    let line = |line: &str| {
        let mut line: EventLine = serde_json::from_str(line).unwrap();
        line.time_ms = line.time_ms.saturating_add_signed(offset_ms);
        if let Event::AttemptStarted(started) = &mut line.event {
            started.host = "gpu1".to_owned();
        }
        serde_json::to_string(&line).unwrap() + "\n"
    };
    let mut text: String = fs::read_to_string(&log).unwrap().lines().map(line).collect();
    (2..=20).for_each(|at| text += &(step_line(at, now_ms().saturating_add_signed(offset_ms)) + "\n"));
    fs::write(&log, text).unwrap();
    run
}

#[test]
fn a_node_whose_clock_is_off_is_neither_dead_before_nor_alive_after_its_time() {
    for offset_ms in [-240_000, 240_000, -3_000_000, 3_000_000] {
        let folder = TempDir::new().unwrap();
        let run = run_of_another_clock(&folder, offset_ms);
        let mut reader = RunReader::open(run.root()).polled();
        if offset_ms == -3_000_000 {
            // So far behind that it may as well be the copy of an old log: it is told by the next line.
            assert_eq!(reader.view().state(now_ms()).0, RunState::Stalled);
            append(&run.attempt(1).events(), (step_line(21, now_ms() - 3_000_000) + "\n").as_bytes());
            poll(&mut reader);
        }
        let view = reader.view();
        assert_eq!(view.liveness, Liveness::Unknown);
        assert_eq!(view.state(now_ms()).0, RunState::Running, "{offset_ms}");
        assert!(view.age_ms(now_ms()).unwrap() < 5000, "{offset_ms}");
        let told = view.log.iter().filter(|line| line.text.contains("the clock of gpu1 is ")).count();
        assert_eq!(told, 1, "{offset_ms}: {:?}", view.log);
        // Silence is seen as soon as on any other node.
        assert_eq!(view.state(now_ms() + 40_000).0, RunState::Stalled, "{offset_ms}");
        append(&run.attempt(1).events(), (step_line(22, now_ms().saturating_add_signed(offset_ms)) + "\n").as_bytes());
        poll(&mut reader);
        assert_eq!(reader.view().state(now_ms()).0, RunState::Running, "{offset_ms}");
    }
}

#[test]
fn an_interrupted_publish_leaves_the_older_checkpoint_the_latest() {
    let folder = TempDir::new().unwrap();
    let run = run_in(&folder);
    let store = CheckpointStore::new(&run);
    assert_eq!(store.latest_complete(Check::Hashes).unwrap(), Latest { checkpoint: None, warnings: vec![] });
    let weights = |byte: u8| {
        move |at: &Path| {
            fs::create_dir(at.join("transformer")).unwrap();
            write_file(&at.join("transformer/weights"), &[byte; 1000]).and(write_file(&at.join("state.json"), b"{}"))
        }
    };
    store.publish(10, json!({"seed": 7}), weights(1)).unwrap();
    let error = store.publish(20, json!({}), |at| weights(2)(at).and(Err(Error::crash("out of luck")))).unwrap_err();
    assert_eq!(error.what, "out of luck");
    assert_eq!(fs::read_dir(run.checkpoints()).unwrap().count(), 1, "no leftover");

    // Killed in the middle: the folder is there, the manifest is not.
    let child = Command::new("sh")
        .arg("-c")
        .arg("mkdir -p \"$1/.tmp-step-00000030-1/transformer\"; echo half > \"$1/.tmp-step-00000030-1/state.json\"; kill -9 $$")
        .args(["sh".as_ref(), run.checkpoints().as_os_str()])
        .status()
        .unwrap();
    assert!(!child.success());
    let latest = store.latest_complete(Check::Hashes).unwrap();
    assert_eq!((latest.checkpoint.as_ref().unwrap().step, latest.warnings.len()), (10, 0));
    assert_eq!(latest.checkpoint.unwrap().manifest.details, json!({"seed": 7}));
    store.remove_leftovers().unwrap();
    assert_eq!(fs::read_dir(run.checkpoints()).unwrap().count(), 1);

    // Damage of each kind is passed over with a warning.
    for step in [40, 50, 60, 70] {
        store.publish(step, json!({}), weights(4)).unwrap();
    }
    fs::remove_file(run.checkpoint(40).join("manifest.json")).unwrap();
    fs::write(run.checkpoint(50).join("transformer/weights"), [4; 999]).unwrap();
    fs::remove_file(run.checkpoint(60).join("state.json")).unwrap();
    fs::write(run.checkpoint(70).join("transformer/weights"), [5; 1000]).unwrap();
    let by_size = store.latest_complete(Check::Sizes).unwrap();
    assert_eq!((by_size.checkpoint.unwrap().step, by_size.warnings.len()), (70, 0));
    let latest = store.latest_complete(Check::Hashes).unwrap();
    assert_eq!(latest.checkpoint.unwrap().step, 10);
    let codes: Vec<&str> = latest.warnings.iter().map(|warning| warning.code).collect();
    assert_eq!(
        codes,
        ["checkpoint_corrupt", "checkpoint_incomplete", "checkpoint_incomplete", "checkpoint_incomplete"]
    );

    // A step that is there already is replaced; pruning counts complete ones only.
    store.publish(50, json!({}), weights(6)).unwrap();
    assert_eq!(Checkpoint::open(&run.checkpoint(50), 50, Check::Hashes).unwrap().bytes(), 1002);
    assert_eq!(store.prune(Retention { last: 1, every: 0 }).unwrap(), [10, 50]);
    assert_eq!(store.list().unwrap(), [40, 60, 70]);
}

#[test]
fn whole_writes_are_whole() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("file");
    assert!(create_new(&path, b"first").unwrap());
    assert!(!create_new(&path, b"second").unwrap());
    assert_eq!(fs::read(&path).unwrap(), b"first");
    write_whole(&path, b"third").unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"third");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "no temporary stays");
    refused(&write_whole(&folder.path().join("no/such/file"), b"").unwrap_err(), "path_missing", Exit::Disk);
    refused(&write_whole(&path.join("below-a-file"), b"").unwrap_err(), "not_a_folder", Exit::Disk);
    refused(&RunWriter::begin(RunDir::new(path.join("m1")), new_attempt(0)).unwrap_err(), "not_a_folder", Exit::Disk);
}

#[test]
fn a_full_or_read_only_disk_costs_nothing_already_saved() {
    let folder = TempDir::new().unwrap();
    let Some(disk) = SmallDisk::mount(folder.path(), "size=1m") else { return };
    let run = RunDir::new(folder.path().join("m1"));
    let mut writer = RunWriter::begin(run.clone(), new_attempt(0)).unwrap();
    let store = writer.checkpoints();
    store.publish(10, json!({}), |at| write_file(&at.join("weights"), &[1; 400_000])).unwrap();
    let error = store.publish(20, json!({}), |at| write_file(&at.join("weights"), &[2; 800_000])).unwrap_err();
    refused(&error, "disk_full", Exit::Disk);
    assert_eq!(store.list().unwrap(), [10]);
    assert_eq!(fs::read_dir(run.checkpoints()).unwrap().count(), 1, "the half-written one is gone");
    assert_eq!(store.latest_complete(Check::Hashes).unwrap().checkpoint.unwrap().step, 10);

    // The log cannot grow either: that is reported, and the torn line does not swallow the next one.
    writer.emit(Event::Step(step(1))).unwrap();
    let filler = folder.path().join("filler");
    let mut file = fs::File::create(&filler).unwrap();
    while file.write_all(&[0; 512]).is_ok() {}
    let long = "x".repeat(8000);
    refused(&writer.message(Level::Info, &long).unwrap_err(), "disk_full", Exit::Disk);
    refused(&write_whole(&run.outcome(), &[0; 9000]).unwrap_err(), "disk_full", Exit::Disk);
    fs::remove_file(&filler).unwrap();
    drop(file);
    writer.emit(Event::Step(step(2))).unwrap();
    let reader = RunReader::open(run.root()).polled();
    assert_eq!(reader.view().series.step, [1, 2]);

    drop(writer);
    disk.remount("ro");
    refused(&RunWriter::begin(run.clone(), new_attempt(10)).unwrap_err(), "read_only_filesystem", Exit::Disk);
    refused(&store.publish(30, json!({}), |_| Ok(())).unwrap_err(), "read_only_filesystem", Exit::Disk);
    assert_eq!(store.latest_complete(Check::Hashes).unwrap().checkpoint.unwrap().step, 10);
}

#[test]
fn the_watcher_reports_changes_at_once_and_not_its_readers() {
    let folder = TempDir::new().unwrap();
    let run = run_in(&folder);
    let watcher = Watcher::new(vec![folder.path().join("runs")]).unwrap();
    let mut writer = RunWriter::begin(run.clone(), new_attempt(0)).unwrap();
    watcher.changes().recv_timeout(Duration::from_secs(5)).unwrap();
    let mut reader = RunReader::open(run.root());
    let deadline = Instant::now() + Duration::from_secs(20);
    while reader.view().series.len() < 5 && Instant::now() < deadline {
        writer.emit(Event::Step(step(reader.view().series.len() as u64 + 1))).unwrap();
        watcher.changes().recv_timeout(Duration::from_secs(5)).unwrap();
        poll(&mut reader);
    }
    // Quiet: only the slow tick is left, however often somebody reads.
    std::thread::sleep(Duration::from_millis(300));
    let (from, mut reports) = (Instant::now(), 0);
    while from.elapsed() < Duration::from_secs(3) {
        let _ = fs::read(run.attempt(1).events()).unwrap();
        reports += usize::from(watcher.changes().recv_timeout(Duration::from_millis(50)).is_ok());
    }
    assert!((1..=5).contains(&reports), "{reports} reports in 3 s without a change");
}

#[test]
#[ignore = "measures: run it alone, in release, with --nocapture"]
fn eight_runs_of_200_000_steps_load_within_a_second() {
    let folder = TempDir::new().unwrap();
    let runs = ExperimentRuns::new(folder.path());
    let names: Vec<String> = (0..8).map(|index| format!("arm_{index}")).collect();
    let mut bytes = 0;
    for name in &names {
        let run = runs.run(name);
        drop(RunWriter::begin(run.clone(), new_attempt(0)).unwrap());
        let mut text = String::new();
        for at in 1..=200_000u64 {
            let noise = (at as f64 * 12.9898).sin();
            let event = StepEvent {
                loss: noise,
                loss_video: noise / 3.0,
                loss_action: noise / 7.0,
                loss_proprio: noise / 11.0,
                grad_norm: 1.0 + noise / 13.0,
                step_ms: 4100.0 + noise * 17.0,
                data_ms: 3.0 + noise,
                padding_waste: 0.02 + noise / 1000.0,
                branch_norm: Some(noise / 9.0),
                packing: None,
                times: None,
                work: None,
                ..step(at)
            };
            text += &serde_json::to_string(&EventLine { v: 1, time_ms: at * 4100, event: Event::Step(event) }).unwrap();
            text.push('\n');
        }
        bytes += text.len();
        append(&run.attempt(1).events(), text.as_bytes());
    }
    let resident = || {
        let text = fs::read_to_string("/proc/self/statm").unwrap();
        text.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() * 4096
    };
    // CPU time of this process in clock ticks of 10 ms: tells the work apart from a busy machine.
    let cpu_ms = || {
        let text = fs::read_to_string("/proc/self/stat").unwrap();
        let fields: Vec<&str> = text.rsplit(')').next().unwrap().split_whitespace().collect();
        (fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()) * 10
    };
    let before = resident();
    let mut readers: Vec<RunReader> = names.iter().map(|name| RunReader::open(runs.run(name).root())).collect();
    let cpu_before = cpu_ms();
    let from = Instant::now();
    let results = poll_all(&mut readers, now_ms());
    let elapsed = from.elapsed();
    let cpu_ms = cpu_ms() - cpu_before;
    let grown = resident().saturating_sub(before);
    assert!(results.iter().all(Result::is_ok));
    assert!(readers.iter().all(|reader| reader.view().series.len() == 200_000));
    let from = Instant::now();
    poll_all(&mut readers, now_ms());
    println!(
        "{} MB of log in {elapsed:?} ({cpu_ms} ms CPU), {} MB more resident; idle poll {:?}",
        bytes >> 20,
        grown >> 20,
        from.elapsed()
    );
    assert!(elapsed < Duration::from_secs(1));
    assert!(grown < 100 << 20);
}
