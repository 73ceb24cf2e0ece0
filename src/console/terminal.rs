//! The terminal's life: entered once, left in every case.
//!
//! Panics of any thread are caught by one hook that records them instead of printing over the screen; the main loop then
//! leaves in order and the message appears on the primary screen. Nothing here prints, so a dead terminal can't make it
//! panic again.

use super::app::Msg;
use crossbeam_channel::Sender;
use crossterm::cursor::{Hide, Show};
use crossterm::terminal::{EnterAlternateScreen, LeaveAlternateScreen, disable_raw_mode, enable_raw_mode};
use ratatui::Terminal;
use ratatui::backend::CrosstermBackend;
use std::io::{self, BufWriter, Stdout, Write};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::ThreadId;

/// A terminal on stdout whose frames are written in one piece.
pub type Screen = Terminal<CrosstermBackend<BufWriter<Stdout>>>;

/// Raw mode and alternate screen, until dropped.
pub struct Guard(());

impl Guard {
    /// Enters. Errors: stdin or stdout is no usable terminal.
    pub fn enter() -> io::Result<Self> {
        let guard = Self(());
        set_up()?;
        Ok(guard)
    }
}

fn set_up() -> io::Result<()> {
    enable_raw_mode()?;
    let mut stdout = io::stdout();
    crossterm::queue!(stdout, EnterAlternateScreen, Hide)?;
    stdout.flush()
}

/// Enters again after a suspension, or after somebody else changed the terminal's mode.
pub fn reenter() -> io::Result<()> {
    // Raw mode set twice is not set again: it has to be left first.
    let _ = disable_raw_mode();
    set_up()
}

impl Drop for Guard {
    fn drop(&mut self) {
        restore();
    }
}

/// Gives the terminal back to the shell; what fails on a dead terminal fails silently.
pub fn restore() {
    let mut stdout = io::stdout();
    let _ = crossterm::queue!(stdout, LeaveAlternateScreen, Show);
    let _ = stdout.flush();
    let _ = disable_raw_mode();
}

/// A screen that draws on stdout in blocks, so that a frame doesn't tear over ssh.
pub fn screen() -> io::Result<Screen> {
    Terminal::new(CrosstermBackend::new(BufWriter::with_capacity(1 << 16, io::stdout())))
}

/// Does the terminal still answer? After a hang-up that nobody delivered as a signal it doesn't.
pub fn is_alive() -> bool {
    rustix::termios::tcgetattr(rustix::stdio::stdin()).is_ok()
}

/// Is there a shell that a suspended process would return to? A session leader (a container's first process, `srun
/// --pty`) has none, and would stop for ever.
pub fn can_suspend() -> bool {
    match rustix::process::getsid(None) {
        Ok(session) => session != rustix::process::getpid(),
        Err(_) => false,
    }
}

/// Where a panic of the screen's own thread is kept until the terminal is restored.
#[derive(Clone, Default)]
pub struct PanicRecord(Arc<Mutex<Option<String>>>);

impl PanicRecord {
    /// The recorded panic, if any.
    pub fn take(&self) -> Option<String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    fn set(&self, text: String) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(text);
    }
}

type Hook = Box<dyn Fn(&std::panic::PanicHookInfo<'_>) + Send + Sync>;

/// The process's panic hook, replaced until dropped; holds the one before.
pub struct PanicHook(Option<Hook>);

impl PanicHook {
    /// Panics of the calling thread go to `record`; those of all others become [`Msg::WorkerDied`].
    pub fn install(record: PanicRecord, messages: Sender<Msg>) -> Self {
        let screen: ThreadId = std::thread::current().id();
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            let payload = info.payload();
            let text = payload
                .downcast_ref::<&str>()
                .map(|text| (*text).to_owned())
                .or_else(|| payload.downcast_ref::<String>().cloned())
                .unwrap_or_else(|| "no message".to_owned());
            let place =
                info.location().map(|place| format!(" at {}:{}", place.file(), place.line())).unwrap_or_default();
            let message = format!("{text}{place}");
            let thread = std::thread::current();
            if thread.id() == screen {
                record.set(message);
            } else {
                let thread = thread.name().unwrap_or("unnamed").to_owned();
                // The loop may be gone already; then nobody needs to know.
                let _ = messages.send(Msg::WorkerDied { thread, message });
            }
        }));
        Self(Some(before))
    }
}

impl Drop for PanicHook {
    fn drop(&mut self) {
        // Setting a hook while unwinding would abort.
        if !std::thread::panicking()
            && let Some(before) = self.0.take()
        {
            std::panic::set_hook(before);
        }
    }
}
