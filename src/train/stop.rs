//! Stop requests: a signal sets a flag, nothing more. The loops poll it, save and leave.

use crate::{Error, Result};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Which signal asked, if any.
#[derive(Clone, Debug, Default)]
pub struct StopFlag {
    signal: Arc<AtomicUsize>,
}

const SIGNALS: [(i32, &str); 4] = [
    (signal_hook::consts::SIGHUP, "SIGHUP"),
    (signal_hook::consts::SIGTERM, "SIGTERM"),
    (signal_hook::consts::SIGINT, "SIGINT"),
    (signal_hook::consts::SIGUSR2, "SIGUSR2"),
];

impl StopFlag {
    /// A flag set by SIGTERM, SIGINT, SIGUSR2 and SIGHUP from now on. A file that would pass `ulimit -f` then is an
    /// error of its write, as a full disk is, instead of the end of the process (SIGXFSZ).
    pub fn on_signals() -> Result<Self> {
        let flag = Self::default();
        signal_hook::flag::register(signal_hook::consts::SIGXFSZ, Arc::default())
            .map_err(|error| Error::crash(format!("cannot install a signal handler: {error}")))?;
        for (signal, _) in SIGNALS {
            signal_hook::flag::register_usize(signal, Arc::clone(&flag.signal), signal as usize)
                .map_err(|error| Error::crash(format!("cannot install a signal handler: {error}")))?;
        }
        Ok(flag)
    }

    /// Name of the signal that asked to stop.
    pub fn requested(&self) -> Option<&'static str> {
        let signal = self.signal.load(Ordering::SeqCst);
        SIGNALS.iter().find(|(number, _)| *number as usize == signal).map(|(_, name)| *name)
    }
}
