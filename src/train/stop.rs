//! Stop requests: a signal sets a flag, nothing more. The loops poll it, save and leave.

use crate::{Error, Result};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Which signal asked, if any.
#[derive(Clone, Debug, Default)]
pub struct StopFlag {
    signal: Arc<AtomicUsize>,
}

const SIGNALS: [(i32, &str); 3] = [
    (signal_hook::consts::SIGTERM, "SIGTERM"),
    (signal_hook::consts::SIGINT, "SIGINT"),
    (signal_hook::consts::SIGUSR2, "SIGUSR2"),
];

impl StopFlag {
    /// A flag set by SIGTERM, SIGINT and SIGUSR2 from now on.
    pub fn on_signals() -> Result<Self> {
        let flag = Self::default();
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
