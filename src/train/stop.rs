//! Stop requests: a signal sets a flag, nothing more. The loops poll it, save and leave.

use crate::{Error, Result};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Which signals asked, and when.
#[derive(Clone, Debug, Default)]
pub struct StopFlag {
    arrived: Arc<Mutex<Arrived>>,
}

#[derive(Debug, Default)]
struct Arrived {
    /// The newest one's name, and when it came.
    newest: Option<(&'static str, Instant)>,
    count: usize,
}

const SIGNALS: [(i32, &str); 4] = [
    (signal_hook::consts::SIGHUP, "SIGHUP"),
    (signal_hook::consts::SIGTERM, "SIGTERM"),
    (signal_hook::consts::SIGINT, "SIGINT"),
    (signal_hook::consts::SIGUSR2, "SIGUSR2"),
];

impl StopFlag {
    /// A flag set by SIGTERM, SIGINT, SIGUSR2 and SIGHUP from now on. A thread notes them, so that the time of arrival is
    /// known however long a step takes, and the handler itself does nothing. A file that would pass `ulimit -f` then is an
    /// error of its write, as a full disk is, instead of the end of the process (SIGXFSZ).
    pub fn on_signals() -> Result<Self> {
        let flag = Self::default();
        let failed = |error| Error::crash(format!("cannot install a signal handler: {error}"));
        signal_hook::flag::register(signal_hook::consts::SIGXFSZ, Arc::default()).map_err(failed)?;
        let mut signals = signal_hook::iterator::Signals::new(SIGNALS.map(|(signal, _)| signal)).map_err(failed)?;
        let noted = flag.clone();
        let watch = move || signals.forever().for_each(|signal| noted.note(signal));
        std::thread::Builder::new().name("signals".to_owned()).spawn(watch).map_err(failed)?;
        Ok(flag)
    }

    fn note(&self, signal: i32) {
        let name = SIGNALS.iter().find(|(number, _)| *number == signal).map(|(_, name)| *name);
        if let Some(name) = name {
            let mut arrived = self.lock();
            arrived.newest = Some((name, Instant::now()));
            arrived.count += 1;
        }
    }

    /// Name of the newest signal that asked to stop.
    pub fn requested(&self) -> Option<&'static str> {
        self.lock().newest.map(|(name, _)| name)
    }

    /// Time since the newest signal.
    pub fn since(&self) -> Option<Duration> {
        self.lock().newest.map(|(_, at)| at.elapsed())
    }

    /// Signals so far.
    pub fn count(&self) -> usize {
        self.lock().count
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Arrived> {
        self.arrived.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
