//! The edge: terminal, signals and threads around the pure [`App`].
//!
//! Four threads feed one channel: keys, signals, runs, pictures. The main loop takes all that waits, then draws at most
//! ten frames a second and none when nothing changed. The first frame comes before anything is read from disk.

use super::app::{App, Effect, Leave, Msg, StripRequest};
use super::feed::{self, Command};
use super::format::{fit, pad, thousands};
use super::snapshot::VerdictView;
use super::terminal::{self, Guard, PanicHook, PanicRecord, Screen};
use super::theme::{Theme, ThemeChoice};
use super::{pictures, status, view};
use crate::control::{SubmitCommand, WorkerCommand};
use crate::runlog::{ExperimentRuns, RunView, now_ms};
use crate::{Error, Exit, Result};
use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, unbounded};
use crossterm::event::Event;
use crossterm::terminal::{BeginSynchronizedUpdate, EndSynchronizedUpdate};
use signal_hook::consts::{SIGALRM, SIGCONT, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGTSTP, SIGUSR1, SIGUSR2};
use std::io::Write as _;
use std::panic::AssertUnwindSafe;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Two frames are at least this far apart.
const FRAME: Duration = Duration::from_millis(100);
/// The terminal is asked this often whether it still lives.
const PULSE: Duration = Duration::from_secs(1);

/// Forms the verdict from the runs; called off the screen's thread, when validation points were added.
pub type VerdictSource = Box<dyn FnMut(&[Arc<RunView>]) -> Option<VerdictView> + Send>;

/// Plans an arm, in lines; called off the screen's thread.
pub type PlanSource = Arc<dyn Fn(&str) -> Result<Vec<String>> + Send + Sync>;

/// What the console is told besides the folder.
#[derive(Default)]
pub struct ConsoleOptions {
    /// Name in the header; the folder if empty.
    pub title: String,
    /// Experiments beside this one that could have been meant; named once.
    pub others: Vec<String>,
    /// What the experiment asks, in a sentence.
    pub question: String,
    /// Arms in the experiment's order, shown even before their runs exist. Runs on disk beyond them are shown too.
    pub arms: Vec<String>,
    /// Validation points of a complete run; 0 if unknown.
    pub planned_validations: u64,
    pub verdict: Option<VerdictSource>,
    pub plan: Option<PlanSource>,
    /// How workers are started; without it nothing can be stopped, killed or resumed.
    pub worker: Option<WorkerCommand>,
    /// How jobs are submitted; absent where the experiment does not say.
    pub submit: Option<SubmitCommand>,
    /// Start every arm that is neither at work nor finished.
    pub start_missing_arms: bool,
    /// Arms started so leave with a checkpoint after this step; those resumed from the console do not.
    pub stop_after: Option<u64>,
    pub read_only: bool,
    pub theme: ThemeChoice,
}

/// Shows the runs of the experiment in `directory` until somebody leaves; returns the exit code of the process.
///
/// 0 after `q`; 75 after a signal (the runs go on); errors: 69 if the terminal can't be used or is lost, 70 if a thread
/// of the console failed, 65 if `directory` doesn't exist. Whatever happens, the terminal is restored first.
pub fn run(directory: &Path, mut options: ConsoleOptions) -> Result<u8> {
    if !directory.is_dir() {
        return Err(Error::data("folder_missing", "no such experiment folder").at(directory));
    }
    if options.title.is_empty() {
        options.title = directory.display().to_string();
    }
    let theme = Theme::detect(options.theme, |name| std::env::var(name).ok());
    // The terminal library looks at NO_COLOR itself and knows nothing of the choice.
    crossterm::style::force_color_output(theme.color);
    let read_only = options.read_only || options.worker.is_none();
    let record = PanicRecord::default();
    let (sender, messages) = unbounded();
    if !options.others.is_empty() {
        let text = format!("also here: {}; name one to watch it instead", options.others.join(", "));
        let _ = sender.send(Msg::EffectResult { ok: true, text });
    }
    let hook = PanicHook::install(record.clone(), sender.clone());
    let mut last = None;
    let left = std::panic::catch_unwind(AssertUnwindSafe(|| {
        let guard = Guard::enter().map_err(|error| unusable(&error))?;
        let leave = watch(directory, options, theme, read_only, &sender, &messages, &mut last);
        drop(guard);
        leave
    }));
    drop(hook);
    let leave = match left {
        Ok(leave) => leave?,
        Err(_) => Leave::Crash("screen".into(), record.take().unwrap_or_else(|| "no message".into())),
    };
    match leave {
        Leave::ByUser => {
            say_goodbye(directory, last.as_ref(), None);
            Ok(Exit::Done.code())
        }
        Leave::Signal(signal) => {
            if signal != SIGHUP {
                say_goodbye(directory, last.as_ref(), Some(signal));
            }
            Ok(Exit::Stopped.code())
        }
        Leave::TerminalLost => Err(unusable(&std::io::Error::other("it is gone"))),
        Leave::Crash(thread, message) => Err(Error::crash(format!("the console's {thread} thread failed: {message}"))
            .hint("runs go on; please report this message")),
    }
}

fn unusable(error: &std::io::Error) -> Error {
    Error::new(Exit::Unavailable, "terminal_unusable", format!("the terminal can't be used: {error}"))
        .hint("--no-ui works without one")
}

/// Starts the threads, runs the loop, and stops those that would outlive it.
fn watch(
    directory: &Path,
    options: ConsoleOptions,
    theme: Theme,
    read_only: bool,
    sender: &Sender<Msg>,
    messages: &Receiver<Msg>,
    last: &mut Option<App>,
) -> Result<Leave> {
    let mut screen = terminal::screen().map_err(|error| unusable(&error))?;
    let size = screen.size().map_err(|error| unusable(&error))?;
    let app = last.insert(App::new(theme, read_only, (size.width, size.height), now_ms()));
    draw(&mut screen, app).map_err(|error| unusable(&error))?;

    let ended = Arc::new(AtomicBool::new(false));
    let (commands, commands_in) = unbounded();
    let (strips, strips_in) = unbounded();
    // Every signal that would end the process without a word, and with the terminal as it is.
    let watched = [SIGTERM, SIGHUP, SIGINT, SIGQUIT, SIGUSR1, SIGUSR2, SIGALRM, SIGCONT, SIGTSTP];
    let signals = signal_hook::iterator::Signals::new(watched)
        .map_err(|error| Error::crash(format!("signals can't be watched: {error}")))?;
    let signals_end = signals.handle();
    let experiment = ExperimentRuns::new(directory);
    let planner = Planner { source: options.plan.clone(), out: sender.clone() };
    let out = sender.clone();
    spawn("runs", move || feed::run(experiment, options, &commands_in, &out))?;
    let out = sender.clone();
    spawn("pictures", move || pictures::run(&strips_in, &out))?;
    let out = sender.clone();
    spawn("signals", move || forward_signals(signals, &out))?;
    let (out, until) = (sender.clone(), ended.clone());
    spawn("keys", move || read_keys(&until, &out))?;

    let leave = main_loop(&mut screen, app, messages, &commands, &strips, &planner);
    ended.store(true, Ordering::Relaxed);
    signals_end.close();
    Ok(leave)
}

fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> Result<()> {
    let started = std::thread::Builder::new().name(name.to_owned()).spawn(body);
    started.map(drop).map_err(|error| Error::crash(format!("the {name} thread can't be started: {error}")))
}

fn main_loop(
    screen: &mut Screen,
    app: &mut App,
    messages: &Receiver<Msg>,
    commands: &Sender<Command>,
    strips: &Sender<StripRequest>,
    planner: &Planner,
) -> Leave {
    let mut last_frame = Instant::now();
    let mut last_pulse = Instant::now();
    let mut waiting = false;
    loop {
        let wait = if waiting { FRAME.saturating_sub(last_frame.elapsed()) } else { FRAME };
        let first = match messages.recv_timeout(wait) {
            Ok(msg) => Some(msg),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => return Leave::TerminalLost,
        };
        app.update(Msg::Tick { now_ms: now_ms() });
        for msg in first.into_iter().chain(messages.try_iter()) {
            for effect in app.update(msg) {
                if let Some(leave) = perform(effect, screen, app, commands, strips, planner) {
                    return leave;
                }
            }
        }
        if last_pulse.elapsed() >= PULSE {
            last_pulse = Instant::now();
            if !terminal::is_alive() {
                return Leave::TerminalLost;
            }
        }
        waiting |= app.take_dirty();
        if waiting && last_frame.elapsed() >= FRAME {
            last_frame = Instant::now();
            waiting = false;
            if draw(screen, app).is_err() {
                return Leave::TerminalLost;
            }
        }
    }
}

/// Does what the state machine asked; `Some` ends the loop.
fn perform(
    effect: Effect,
    screen: &mut Screen,
    app: &mut App,
    commands: &Sender<Command>,
    strips: &Sender<StripRequest>,
    planner: &Planner,
) -> Option<Leave> {
    // A closed channel means that its thread died, which arrives as a message of its own.
    match effect {
        Effect::Stop(target) => drop(commands.send(Command::Stop(target))),
        Effect::Kill(target) => drop(commands.send(Command::Kill(target))),
        Effect::Resume { arm } => drop(commands.send(Command::Resume { arm })),
        Effect::Submit { arm } => drop(commands.send(Command::Submit { arm })),
        Effect::Cancel { arm, job } => drop(commands.send(Command::Cancel { arm, job })),
        Effect::Plan { arm } => planner.plan(arm),
        Effect::LoadStrip(request) => drop(strips.send(request)),
        Effect::Refresh => {
            drop(commands.send(Command::Refresh));
            // Somebody else may have written to the terminal, or left it in another mode.
            if reenter(screen).is_err() {
                return Some(Leave::TerminalLost);
            }
        }
        Effect::Suspend if terminal::can_suspend() => {
            if suspend(screen).is_err() {
                return Some(Leave::TerminalLost);
            }
        }
        Effect::Suspend => {
            let text = "no shell to return to: this terminal has only the console".to_owned();
            app.update(Msg::EffectResult { ok: false, text });
        }
        Effect::Quit(leave) => return Some(leave),
    }
    None
}

/// Makes plans, each on a thread that ends with it: accounting may take a minute to answer.
struct Planner {
    source: Option<PlanSource>,
    out: Sender<Msg>,
}

impl Planner {
    fn plan(&self, arm: String) {
        let (source, out) = (self.source.clone(), self.out.clone());
        let work = move || {
            let lines = match source.map(|source| source(&arm)) {
                Some(Ok(lines)) => lines,
                Some(Err(error)) => vec![error.to_string()],
                None => vec!["this console wasn't told how to plan".to_owned()],
            };
            let _ = out.send(Msg::Plan { arm, lines });
        };
        if let Err(error) = spawn("plan", work) {
            let _ = self.out.send(Msg::EffectResult { ok: false, text: error.to_string() });
        }
    }
}

fn suspend(screen: &mut Screen) -> std::io::Result<()> {
    terminal::restore();
    signal_hook::low_level::emulate_default_handler(SIGTSTP)?;
    reenter(screen)
}

fn reenter(screen: &mut Screen) -> std::io::Result<()> {
    terminal::reenter()?;
    screen.clear()
}

/// One frame, inside a synchronized update so that terminals which know it show it at once.
fn draw(screen: &mut Screen, app: &App) -> std::io::Result<()> {
    #[cfg(debug_assertions)]
    if app.snapshot.is_some() && std::env::var_os("LBVA_TEST_PANIC").is_some_and(|value| value == "screen") {
        panic!("asked to by LBVA_TEST_PANIC");
    }
    crossterm::queue!(screen.backend_mut(), BeginSynchronizedUpdate)?;
    screen.draw(|frame| view::draw(app, frame))?;
    crossterm::queue!(screen.backend_mut(), EndSynchronizedUpdate)?;
    std::io::Write::flush(screen.backend_mut())
}

fn read_keys(ended: &AtomicBool, out: &Sender<Msg>) {
    while !ended.load(Ordering::Relaxed) {
        let msg = match crossterm::event::poll(FRAME) {
            Ok(false) => continue,
            Ok(true) => match crossterm::event::read() {
                Ok(Event::Key(key)) => Msg::Key(key),
                Ok(Event::Resize(width, height)) => Msg::Resize(width, height),
                Ok(_) => continue,
                Err(_) => Msg::TerminalLost,
            },
            Err(_) => Msg::TerminalLost,
        };
        let lost = matches!(msg, Msg::TerminalLost);
        if out.send(msg).is_err() || lost {
            return;
        }
    }
}

fn forward_signals(mut signals: signal_hook::iterator::Signals, out: &Sender<Msg>) {
    for signal in signals.forever() {
        let msg = match signal {
            SIGCONT => Msg::Continued,
            SIGTSTP => Msg::Suspend,
            signal => Msg::Signal(signal),
        };
        if out.send(msg).is_err() {
            return;
        }
    }
}

/// What stays on the primary screen: how the runs stand and how to come back. Never panics on a dead terminal.
fn say_goodbye(directory: &Path, app: Option<&App>, signal: Option<i32>) {
    let mut stdout = std::io::stdout().lock();
    for line in goodbye(directory, app, signal) {
        if writeln!(stdout, "{line}").is_err() {
            return;
        }
    }
    let _ = stdout.flush();
}

fn goodbye(directory: &Path, app: Option<&App>, signal: Option<i32>) -> Vec<String> {
    let arms = app.map(App::arms).unwrap_or_default();
    let shown = PathBuf::from(directory);
    let mut lines = Vec::new();
    if let Some(signal) = signal {
        let name = signal_hook::low_level::signal_name(signal).unwrap_or("a signal");
        lines.push(format!("{name} ended the console, not the runs: what was training goes on (exit code 75)"));
    }
    let names = arms.iter().map(|arm| arm.run.arm.chars().count()).max().unwrap_or(0);
    let mut active = Vec::new();
    for arm in &arms {
        let (glyph, word, _) = status::state_look(arm.state);
        let steps = status::progress(arm.run).map(|(step, total)| format!("{}/{}", thousands(step), thousands(total)));
        let steps = steps.unwrap_or_default();
        let detail = if status::is_active(arm.state) {
            active.push(arm.run.arm.as_str());
            arm.run.attempts.last().map(|attempt| format!("pid {}", attempt.started.pid)).unwrap_or_default()
        } else {
            arm.reason.clone()
        };
        lines.push(format!(
            "  {glyph} {}  {}  {}  {}",
            pad(&arm.run.arm, names),
            pad(word, 9),
            pad(&steps, 17),
            fit(&detail, 90)
        ));
    }
    if let Some(verdict) = app.and_then(|app| app.snapshot.as_ref()?.verdict.clone()) {
        lines.push(format!("  verdict: {}", verdict.headline));
        if !verdict.note.is_empty() {
            lines.push(format!("  {}", verdict.note));
        }
    }
    match active.as_slice() {
        [] => {}
        [arm] => {
            lines.push(format!(
                "{arm} keeps running. Stop it with a checkpoint: lbva-tui stop {} --arm {arm}",
                shown.display()
            ));
        }
        [first, ..] => lines.push(format!(
            "{} runs keep running. Stop one with a checkpoint: lbva-tui stop {} --arm {first}",
            active.len(),
            shown.display()
        )),
    }
    lines.push(format!("Watch again: lbva-tui {}", shown.display()));
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_console_ended_by_a_signal_says_that_the_runs_go_on() {
        let lines = goodbye(Path::new("e"), None, Some(SIGTERM));
        assert_eq!(lines[0], "SIGTERM ended the console, not the runs: what was training goes on (exit code 75)");
        assert_eq!(goodbye(Path::new("e"), None, None), ["Watch again: lbva-tui e"]);
    }
}
