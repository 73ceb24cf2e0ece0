//! The real program in a pseudo-terminal: it starts, leaves, and gives the terminal back whatever happens.

mod console_fixture;

use console_fixture::write_runs;
use portable_pty::{Child, CommandBuilder, MasterPty, PtySize, native_pty_system};
use std::io::{Read, Write};
use std::num::NonZeroU16;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(30);
/// Enters the alternate screen.
const ENTER: &[u8] = b"\x1b[?1049h";
/// Leaves it.
const LEAVE: &[u8] = b"\x1b[?1049l";

/// The program on a terminal of its own.
struct Session {
    child: Box<dyn Child + Send + Sync>,
    master: Box<dyn MasterPty + Send>,
    keyboard: Box<dyn Write + Send>,
    output: Receiver<Vec<u8>>,
    screen: vt100::Parser,
    raw: Vec<u8>,
    /// Makes the reading thread give up its end of the terminal.
    hung_up: Arc<AtomicBool>,
}

fn cells(count: u16) -> NonZeroU16 {
    NonZeroU16::new(count).unwrap()
}

fn size(columns: u16, rows: u16) -> PtySize {
    PtySize { rows, cols: columns, pixel_width: 0, pixel_height: 0 }
}

impl Session {
    fn start(folder: &Path, arguments: &[&str], variables: &[(&str, &str)]) -> Self {
        let pair = native_pty_system().openpty(size(120, 40)).unwrap();
        let mut command = CommandBuilder::new(env!("CARGO_BIN_EXE_lbva-tui"));
        command.args(arguments);
        command.arg(folder);
        command.env("TERM", "xterm-256color");
        command.env("LANG", "C.UTF-8");
        command.env_remove("LC_ALL");
        command.env_remove("NO_COLOR");
        for (name, value) in variables {
            command.env(name, value);
        }
        let child = pair.slave.spawn_command(command).unwrap();
        drop(pair.slave);
        let mut reader = pair.master.try_clone_reader().unwrap();
        let keyboard = pair.master.take_writer().unwrap();
        let (send, output) = channel();
        let hung_up = Arc::new(AtomicBool::new(false));
        let until = hung_up.clone();
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(count @ 1..) = reader.read(&mut buffer) {
                if until.load(Ordering::Relaxed) || send.send(buffer[..count].to_vec()).is_err() {
                    return;
                }
            }
        });
        let screen = vt100::Parser::new(cells(40), cells(120), 0);
        Self { child, master: pair.master, keyboard, output, screen, raw: Vec::new(), hung_up }
    }

    fn take_in(&mut self, wait: Duration) {
        let mut wait = wait;
        while let Ok(bytes) = self.output.recv_timeout(wait) {
            self.screen.process(&bytes);
            self.raw.extend(bytes);
            wait = Duration::ZERO;
        }
    }

    /// Waits until the screen shows `text`.
    fn wait_for(&mut self, text: &str) {
        let started = Instant::now();
        while !self.screen.screen().contents().contains(text) {
            assert!(
                started.elapsed() < PATIENCE,
                "{text:?} never came; the screen was\n{}",
                self.screen.screen().contents()
            );
            self.take_in(Duration::from_millis(20));
        }
    }

    fn press(&mut self, keys: &str) {
        self.keyboard.write_all(keys.as_bytes()).unwrap();
        self.keyboard.flush().unwrap();
    }

    fn resize(&mut self, columns: u16, rows: u16) {
        self.master.resize(size(columns, rows)).unwrap();
        self.screen.screen_mut().set_size(cells(rows), cells(columns));
    }

    fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_raw(self.child.process_id().unwrap() as i32).unwrap();
        rustix::process::kill_process(pid, signal).unwrap();
    }

    /// Waits for the end; returns the exit code.
    fn end(&mut self) -> u32 {
        let started = Instant::now();
        loop {
            self.take_in(Duration::from_millis(20));
            if let Some(status) = self.child.try_wait().unwrap() {
                self.take_in(Duration::from_millis(200));
                return status.exit_code();
            }
            assert!(
                started.elapsed() < PATIENCE,
                "it doesn't end; the screen was\n{}",
                self.screen.screen().contents()
            );
        }
    }

    /// The alternate screen was entered and left, the cursor is visible again.
    fn assert_restored(&self) {
        let last = |pattern: &[u8]| self.raw.windows(pattern.len()).rposition(|window| window == pattern);
        let (entered, left) = (last(ENTER).expect("entered"), last(LEAVE).expect("left"));
        assert!(entered < left, "the last word is to leave the alternate screen");
        assert!(!self.screen.screen().alternate_screen());
        assert!(!self.screen.screen().hide_cursor());
        // Nothing is drawn on the primary screen afterwards: no cursor addressing after leaving.
        let after = String::from_utf8_lossy(&self.raw[left + LEAVE.len()..]).into_owned();
        let addresses_cursor = |sequence: &str| {
            let end = sequence.find(|letter: char| letter.is_ascii_alphabetic());
            end.is_some_and(|end| sequence[end..].starts_with('H') && sequence[..end].contains(';'))
        };
        assert!(!after.split("\x1b[").skip(1).any(addresses_cursor), "frames on the primary screen: {after:?}");
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let _ = self.child.kill();
    }
}

fn experiment() -> tempfile::TempDir {
    experiment_with(2, 400)
}

/// An experiment whose arms have run for `steps` steps each.
fn experiment_with(arms: u64, steps: u64) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let recipe = Path::new(env!("CARGO_MANIFEST_DIR")).join("configs/xwam_demo.yaml");
    let others: String =
        (1..arms).map(|arm| format!("  - {{name: arm{arm}_long, set: {{model.geometry.enabled: true}}}}\n")).collect();
    let text = format!(
        "name: long\nquestion: Which?\nbase: {}\nablated: [model.geometry.enabled]\n\
         decision: {{baseline: arm0_long, candidate: arm1_long, metric: wrist_lpips, confidence: 0.95, resamples: 2000}}\n\
         arms:\n  - name: arm0_long\n{others}",
        recipe.display()
    );
    std::fs::write(folder.path().join("experiment.yaml"), text).unwrap();
    write_runs(folder.path(), arms, steps).unwrap();
    folder
}

#[test]
fn it_shows_the_runs_and_leaves_with_q() {
    let folder = experiment();
    let mut session = Session::start(folder.path(), &[], &[]);
    session.wait_for("arm1_long");
    session.wait_for("wrist LPIPS");
    session.press("?");
    session.wait_for("any other key closes");
    session.press("x");
    session.press("q");
    assert_eq!(session.end(), 0);
    session.assert_restored();
    let left = session.screen.screen().contents();
    assert!(left.contains("Watch again: lbva-tui"), "{left}");
    assert!(left.contains("arm0_long"), "{left}");
}

#[test]
fn without_colour_no_colour_is_sent() {
    let folder = experiment();
    let colours = |arguments: &[&str], variables: &[(&str, &str)]| {
        let mut session = Session::start(folder.path(), arguments, variables);
        session.wait_for("wrist LPIPS");
        session.press("q");
        assert_eq!(session.end(), 0);
        let text = String::from_utf8_lossy(&session.raw).into_owned();
        text.contains("[38;5;") || text.contains("[38;2;")
    };
    assert!(colours(&[], &[]));
    assert!(!colours(&["--color", "never"], &[]));
    assert!(!colours(&[], &[("NO_COLOR", "1")]));
    assert!(colours(&["--color", "always"], &[("NO_COLOR", "1")]));
}

#[test]
fn ctrl_c_leaves_too() {
    let folder = experiment();
    let mut session = Session::start(folder.path(), &[], &[]);
    session.wait_for("arm1_long");
    session.press("\x03");
    assert_eq!(session.end(), 0);
    session.assert_restored();
}

#[test]
fn signals_restore_the_terminal_and_end_with_a_code_below_128() {
    use rustix::process::Signal;
    for signal in [Signal::TERM, Signal::INT, Signal::HUP, Signal::QUIT] {
        let folder = experiment();
        let mut session = Session::start(folder.path(), &[], &[]);
        session.wait_for("arm1_long");
        session.signal(signal);
        assert_eq!(session.end(), 75, "{signal:?}");
        session.assert_restored();
        let left = session.screen.screen().contents();
        assert_eq!(left.contains("ended the console, not the runs"), signal != Signal::HUP, "{left}");
    }
}

#[cfg(debug_assertions)]
#[test]
fn a_panic_of_any_thread_restores_the_terminal_and_is_told() {
    for thread in ["runs", "screen"] {
        let folder = experiment();
        let mut session = Session::start(folder.path(), &[], &[("LBVA_TEST_PANIC", thread)]);
        assert_eq!(session.end(), 70, "{thread}");
        session.assert_restored();
        let left = session.screen.screen().contents();
        assert!(left.contains(thread) && left.contains("LBVA_TEST_PANIC"), "{left}");
    }
}

#[test]
fn a_tiny_terminal_says_what_it_needs_and_recovers() {
    let folder = experiment();
    let mut session = Session::start(folder.path(), &[], &[]);
    session.wait_for("wrist LPIPS");
    for (columns, rows) in [(40, 10), (1, 1), (30, 5)] {
        session.resize(columns, rows);
        session.take_in(Duration::from_millis(300));
    }
    session.wait_for("needs 60x15");
    session.resize(80, 24);
    session.wait_for("wrist LPIPS");
    session.press("q");
    assert_eq!(session.end(), 0);
    session.assert_restored();
}

#[test]
fn a_session_leader_is_not_suspended_for_ever() {
    // The child of a pseudo-terminal leads its session: no shell could bring it back.
    let folder = experiment();
    let mut session = Session::start(folder.path(), &[], &[]);
    session.wait_for("arm1_long");
    session.press("\x1a");
    session.wait_for("no shell to return to");
    session.press("q");
    assert_eq!(session.end(), 0);
}

#[test]
fn a_terminal_that_goes_away_ends_it() {
    let folder = experiment();
    let mut session = Session::start(folder.path(), &[], &[]);
    session.wait_for("arm1_long");
    let pid = session.child.process_id().unwrap();
    // Closing every hold on the master side is what a dropped ssh connection looks like. The reading thread lets go
    // at the next output, which the clock in the header brings within a second.
    session.hung_up.store(true, Ordering::Relaxed);
    session.keyboard = Box::new(std::io::sink());
    let elsewhere = native_pty_system().openpty(size(80, 24)).unwrap();
    drop(std::mem::replace(&mut session.master, elsewhere.master));
    let started = Instant::now();
    while session.child.try_wait().unwrap().is_none() {
        assert!(started.elapsed() < PATIENCE, "process {pid} survived its terminal");
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn the_first_frame_comes_before_anything_is_read() {
    let folder = experiment_with(4, 20_000);
    let mut session = Session::start(folder.path(), &[], &[]);
    session.wait_for("lbva-tui");
    session.wait_for("arm3_long");
    let text = String::from_utf8_lossy(&session.raw);
    let (reading, runs) = (text.find("reading").expect("a first frame"), text.find("arm3_long").expect("the runs"));
    assert!(reading < runs);
    session.press("q");
    assert_eq!(session.end(), 0);
}
