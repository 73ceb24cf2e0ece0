//! The program killed at every moment of a run's life, and what is left: in the end nothing may tell a run that was
//! killed many times from one that never was. And the softer ends: SIGTERM in a save, a full disk, a folder that cannot
//! be written.

mod run_fixture;
mod small_disk;

use lbva_tui::random::{Draw, Purpose};
use lbva_tui::runlog::{Liveness, Outcome, RunDir, RunReader, RunState, now_ms};
use run_fixture::{ARM, Experiment, Fixture, said};
use rustix::process::{Pid, Signal, kill_process};
use small_disk::SmallDisk;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant, UNIX_EPOCH};

/// No moment of these runs takes longer, however busy the machine is.
const PATIENCE: Duration = Duration::from_secs(120);
/// An attempt that has not met its moment after this many steps is killed all the same.
const MOST_STEPS: usize = 3;

/// The run's next attempt, in a process of its own.
fn start(experiment: &Experiment) -> Attempt<'_> {
    let before = experiment.run.attempt_numbers().unwrap().last().copied().unwrap_or(0);
    let child = experiment.command(&[]).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    Attempt { experiment, child, number: before + 1 }
}

/// A moment of an attempt's life that shows in its files.
#[derive(Clone, Copy, Debug)]
enum Moment {
    /// A line of the log has this in it.
    Line(&'static str),
    /// So many steps are logged.
    Steps(usize),
    /// A checkpoint is being written.
    Staged,
    /// A checkpoint has got its name, and the one that it pushes out has not gone.
    Published,
    /// An old checkpoint is being removed.
    Removing,
}

/// One attempt in a process of its own; killed if the test fails.
struct Attempt<'e> {
    experiment: &'e Experiment,
    child: Child,
    number: u32,
}

impl Attempt<'_> {
    fn shows(&self, moment: Moment, log: &str) -> bool {
        let names = || {
            let entries = fs::read_dir(self.experiment.run.checkpoints()).into_iter().flatten().flatten();
            entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect::<Vec<_>>()
        };
        match moment {
            Moment::Line(text) => log.contains(text),
            Moment::Steps(count) => log.matches("\"event\":\"step\"").count() >= count,
            Moment::Staged => names().iter().any(|name| name.starts_with(".tmp-step-")),
            Moment::Published => {
                let newest = names().iter().filter_map(|name| lbva_tui::runlog::parse_step_name(name)).max();
                newest.is_some_and(|step| {
                    log.contains("\"event\":\"step\"") && !log.contains(&format!("\"checkpoint\",\"step\":{step},"))
                })
            }
            Moment::Removing => names().iter().any(|name| name.starts_with(".tmp-removed-")),
        }
    }

    /// Waits for the moment. `Ok(false)` if steps enough passed without it; the exit status if the process ended.
    fn reach(&mut self, moment: Moment, most_steps: usize) -> Result<bool, ExitStatus> {
        let from = Instant::now();
        let events = self.experiment.run.attempt(self.number).events();
        loop {
            let ended = self.child.try_wait().unwrap();
            let log = fs::read_to_string(&events).unwrap_or_default();
            if self.shows(moment, &log) {
                return Ok(true);
            }
            if let Some(status) = ended {
                return Err(status);
            }
            if log.matches("\"event\":\"step\"").count() > most_steps {
                return Ok(false);
            }
            assert!(from.elapsed() < PATIENCE, "{moment:?} never came: {log}");
            // Some moments are shorter than the shortest sleep.
            match moment {
                Moment::Line(_) | Moment::Steps(_) => std::thread::sleep(Duration::from_micros(500)),
                Moment::Staged | Moment::Published | Moment::Removing => std::thread::yield_now(),
            }
        }
    }

    /// SIGKILL; `false` if the process was over by then.
    fn kill(mut self) -> bool {
        self.child.kill().unwrap();
        !self.child.wait().unwrap().success()
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    fn ended(&mut self) -> Option<i32> {
        self.child.wait().unwrap().code()
    }
}

impl Drop for Attempt<'_> {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

const STARTED: Moment = Moment::Line("attempt_started");
const LOADING: Moment = Moment::Line("loading_data");
const BUILDING: Moment = Moment::Line("building_model");
const CACHING: Moment = Moment::Line("caching_latents");
const RESUMING: Moment = Moment::Line("\"resuming\"");
const VALIDATING: Moment = Moment::Line("\"validating\"");
const VALIDATED: Moment = Moment::Line("\"event\":\"validation\"");
const SAVING: Moment = Moment::Line("\"saving\"");
const SAVED: Moment = Moment::Line("\"event\":\"checkpoint\"");

/// Kills the runs of an experiment at these moments, each after a further delay of 0 to so many ms, and lets it finish.
fn survives(name: &str, fixture: &Fixture, save_every: u64, strikes: &[(Moment, u32)]) {
    let undisturbed = fixture.undisturbed();
    let victim = fixture.here("killed");
    let (mut kills, mut met, mut durable) = (0, 0, 0);
    for (index, &(moment, delay_ms)) in strikes.iter().enumerate() {
        let mut attempt = start(&victim);
        let number = attempt.number;
        let reached = attempt.reach(moment, MOST_STEPS);
        assert!(reached.is_ok(), "{name}: the run ended with {reached:?} before kill {index} at {moment:?}");
        let delay = f64::from(delay_ms) * Draw::new(7, Purpose::Order, index as u64, name).uniform();
        std::thread::sleep(Duration::from_secs_f64(delay / 1e3));
        kills += usize::from(attempt.kill());
        met += usize::from(reached == Ok(true));

        // It began where the newest durable checkpoint stood, and what it said is durable still is.
        let lines = victim.lines(number);
        if let Some(started) = lines.first() {
            assert_eq!(started["start_step"], durable, "{name}: kill {index}");
        }
        let announced =
            lines.iter().filter(|line| line["event"] == "checkpoint").filter_map(|line| line["step"].as_u64());
        let saved = victim.saved();
        assert!(
            saved >= announced.max().unwrap_or(durable).max(durable),
            "{name}: kill {index}, {saved} after {durable}"
        );
        let done = lines.iter().filter(|line| line["event"] == "step").filter_map(|line| line["step"].as_u64()).max();
        // A save is begun each interval and durable a quarter of one later, at the latest after a step.
        let lost = save_every + (save_every / 4).max(1);
        assert!(done.unwrap_or(0) <= saved + lost, "{name}: {done:?} done, {saved} saved");
        durable = saved;
        let reader = read(&victim.run);
        assert_eq!((reader.view().liveness, reader.view().state(now_ms()).0), (Liveness::Dead, RunState::Failed));
    }
    let output = victim.finish();
    assert_eq!(output.status.code(), Some(0), "{name}: {}", said(&output));
    assert_eq!(kills, strikes.len(), "{name}: every attempt was killed");
    println!("{name}: {kills} kills of {} recovered, {met} of them at the moment aimed at", strikes.len());
    victim.equals(&undisturbed);
    assert_eq!(read(&victim.run).view().state(now_ms()).0, RunState::Finished);
}

fn read(run: &RunDir) -> RunReader {
    let mut reader = RunReader::open(run.root());
    reader.poll(now_ms()).unwrap();
    assert_eq!(reader.view().bad_lines, 0);
    reader
}

#[test]
fn an_xwam_run_killed_at_every_moment_ends_as_if_nothing_had_happened() {
    let strikes = [
        (STARTED, 0),
        (LOADING, 20),
        (BUILDING, 10),
        (CACHING, 0),
        (CACHING, 300),
        (VALIDATING, 0),
        (VALIDATING, 60),
        (VALIDATED, 0),
        (Moment::Steps(1), 10),
        (SAVING, 0),
        (Moment::Staged, 0),
        (SAVED, 0),
        (RESUMING, 10),
        (Moment::Published, 0),
        (Moment::Steps(2), 60),
        (Moment::Removing, 0),
        (Moment::Staged, 3),
        (SAVING, 8),
    ];
    survives("xwam", &Fixture::xwam(44), 2, &strikes);
}

#[test]
fn a_lingbot_run_killed_at_every_moment_ends_as_if_nothing_had_happened() {
    let strikes = [
        (STARTED, 5),
        (LOADING, 0),
        (BUILDING, 20),
        (CACHING, 200),
        (VALIDATING, 30),
        (Moment::Steps(1), 0),
        (SAVING, 0),
        (Moment::Staged, 0),
        (RESUMING, 0),
        (Moment::Published, 0),
        (SAVED, 5),
        (Moment::Removing, 0),
        (Moment::Staged, 2),
        (Moment::Steps(2), 100),
        (Moment::Removing, 1),
        (SAVED, 60),
    ];
    survives("lingbot", &Fixture::lingbot(40), 1, &strikes);
}

#[test]
fn a_signal_during_a_save_leaves_with_a_durable_checkpoint() {
    let fixture = Fixture::xwam(40);
    let experiment = fixture.here("run");
    for (moment, signal) in [(SAVING, Signal::TERM), (Moment::Staged, Signal::INT)] {
        let mut attempt = start(&experiment);
        attempt.reach(moment, usize::MAX).unwrap();
        attempt.signal(signal);
        assert_eq!(attempt.ended(), Some(75));
        let outcome = experiment.outcome();
        assert_eq!((outcome.outcome, outcome.exit_code), (Outcome::Stopped, 75));
        assert!(outcome.step > 0 && outcome.step == experiment.saved(), "{outcome:?}");
        // Nothing happened to the checkpoints after the last word: it was not said while they were still on their way.
        let touched = fs::metadata(experiment.run.checkpoints()).unwrap().modified().unwrap();
        let touched_ms = touched.duration_since(UNIX_EPOCH).unwrap().as_millis();
        assert!(touched_ms <= u128::from(outcome.time_ms), "{touched_ms} {outcome:?}");
        assert_eq!(read(&experiment.run).view().state(now_ms()).0, RunState::Stopped);
    }
    assert_eq!(experiment.finish().status.code(), Some(0));
    experiment.equals(&fixture.undisturbed());
}

/// A file of the run would grow past a limit: what a full disk does, on any machine and at a known place.
#[test]
fn a_save_that_does_not_fit_ends_the_run_and_costs_nothing_already_saved() {
    let fixture = Fixture::xwam(8);
    let experiment = fixture.here("run");
    experiment.stop_after(2);
    // In units of 512 bytes: room for logs and pictures, and not for the moments of this model.
    let mut limited = Command::new("sh");
    limited.args(["-c", "ulimit -f 512; exec \"$@\"", "sh"]).arg(env!("CARGO_BIN_EXE_lbva-tui"));
    let output = limited.args(["--no-ui", "run"]).arg(&experiment.folder).args(["--arm", ARM]).output().unwrap();
    assert_eq!(output.status.code(), Some(74), "{}", said(&output));
    assert!(
        said(&output).contains("cannot write the checkpoint: the file is larger than the limit"),
        "{}",
        said(&output)
    );
    let outcome = experiment.outcome();
    assert_eq!((outcome.outcome, outcome.exit_code), (Outcome::Failed, 74));
    assert!(outcome.reason.starts_with("cannot write the checkpoint: "), "{outcome:?}");
    assert_eq!((experiment.saved(), experiment.checkpoints().list().unwrap()), (2, vec![2]));
    assert_eq!(experiment.finish().status.code(), Some(0));
    // The stop at step 2 is a save at its interval, so even the checkpoints kept are the same ones.
    experiment.equals(&fixture.undisturbed());
}

#[test]
fn a_disk_that_fills_up_ends_the_run_and_one_that_is_too_small_never_starts_it() {
    let fixture = Fixture::xwam(60);
    let at = fixture.folder.path().join("disk");
    let Some(disk) = SmallDisk::mount(&at, "size=64m") else { return };
    let experiment = fixture.experiment(&at.join("run"));
    let mut attempt = start(&experiment);
    attempt.reach(SAVED, usize::MAX).unwrap();
    // Full to the last block: neither a checkpoint nor a line of the log fits from now on.
    let filler = at.join("filler");
    let mut file = fs::File::create(&filler).unwrap();
    let error = std::io::copy(&mut std::io::repeat(0), &mut file).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::StorageFull);
    assert_eq!(attempt.ended(), Some(74));
    drop(attempt);
    let saved = experiment.saved();
    assert!(saved >= 2);
    // With or without room for its last words, the run counts as failed.
    assert_eq!(read_torn(&experiment.run).view().state(now_ms()).0, RunState::Failed);

    let one = experiment.checkpoints().complete().unwrap()[0].bytes();
    drop(file);
    fs::remove_file(&filler).unwrap();
    assert_eq!(experiment.finish().status.code(), Some(0));
    experiment.equals(&fixture.undisturbed());

    // Room for less than two checkpoints is refused at the start, with both numbers.
    let tight = fixture.experiment(&at.join("tight"));
    disk.remount(&format!("size={}", used(&at) + one + one / 2));
    let output = tight.finish();
    assert_eq!(output.status.code(), Some(74), "{}", said(&output));
    assert!(said(&output).contains("checkpoints do not fit on the disk: two of"), "{}", said(&output));
    assert_eq!(tight.outcome().outcome, Outcome::Failed);
    disk.remount("ro");
    let output = tight.finish();
    assert_eq!(output.status.code(), Some(74), "{}", said(&output));
    assert!(said(&output).contains("the file system is read-only"), "{}", said(&output));
}

/// Bytes in use on the file system of `path`.
fn used(path: &Path) -> u64 {
    let space = rustix::fs::statvfs(path).unwrap();
    (space.f_blocks - space.f_bfree) * space.f_frsize
}

/// A reader of a run whose last line may be half on a full disk.
fn read_torn(run: &RunDir) -> RunReader {
    let mut reader = RunReader::open(run.root());
    reader.poll(now_ms()).unwrap();
    assert!(reader.view().bad_lines <= 1);
    reader
}

#[test]
fn a_run_folder_that_cannot_be_written_is_said_in_one_line() {
    let fixture = Fixture::xwam(2);
    let experiment = fixture.here("blocked");
    let runs = experiment.folder.join("runs");
    fs::write(&runs, "a file in the way").unwrap();
    let output = experiment.finish();
    let text = said(&output);
    assert_eq!(output.status.code(), Some(74), "{text}");
    let errors: Vec<&str> = text.lines().filter(|line| line.starts_with("error: ")).collect();
    assert_eq!(errors.len(), 1, "{text}");
    assert!(errors[0].contains("a part of the path is a file, not a folder") && errors[0].contains("/runs"), "{text}");

    if rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: root writes into folders of any mode, so a mode without write permission was not tested");
        return;
    }
    fs::remove_file(&runs).unwrap();
    fs::create_dir(&runs).unwrap();
    fs::set_permissions(&runs, fs::Permissions::from_mode(0o555)).unwrap();
    let output = experiment.finish();
    fs::set_permissions(&runs, fs::Permissions::from_mode(0o755)).unwrap();
    assert_eq!(output.status.code(), Some(74), "{}", said(&output));
    assert!(said(&output).contains("permission denied"), "{}", said(&output));
}
