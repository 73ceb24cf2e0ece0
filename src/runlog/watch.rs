//! Says when run directories may have changed, so that nobody reads them in vain.
//!
//! inotify reports local changes at once but sees nothing of what other hosts write on network file systems, and may run
//! out of watches. So a slow tick always runs beside it: readers find out cheaply that nothing is new.

use crossbeam_channel::{Receiver, Sender, TrySendError, bounded, never};
use notify::event::{AccessKind, AccessMode};
use notify::{EventKind, RecommendedWatcher, RecursiveMode, Watcher as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Two reports are at least this far apart.
const SHORTEST_GAP: Duration = Duration::from_millis(100);
/// The tick that finds what inotify does not see.
const TICK: Duration = Duration::from_secs(1);

const FILE_WRITTEN: EventKind = EventKind::Access(AccessKind::Close(AccessMode::Write));

/// Something may have changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Changed;

/// A thread that watches folders until it is dropped.
#[derive(Debug)]
pub struct Watcher {
    changes: Receiver<Changed>,
    /// Its end tells the thread to leave.
    _alive: Sender<()>,
}

impl Watcher {
    /// Watches `folders` (an experiment's `runs/`, say) with all that is in them. Those that do not exist yet are
    /// watched as soon as they do.
    pub fn new(folders: Vec<PathBuf>) -> std::io::Result<Self> {
        let (report, changes) = bounded(1);
        let (alive, ended) = bounded(0);
        std::thread::Builder::new().name("runlog-watch".to_owned()).spawn(move || watch(&folders, &report, &ended))?;
        Ok(Self { changes, _alive: alive })
    }

    /// At most ten reports a second; one that was not taken yet stands for all that came after it.
    pub fn changes(&self) -> &Receiver<Changed> {
        &self.changes
    }
}

fn watch(folders: &[PathBuf], report: &Sender<Changed>, ended: &Receiver<()>) {
    let (wake, woken) = bounded(1);
    let handler = move |event: notify::Result<notify::Event>| {
        // Reading a file is reported too; a reader must not wake itself up.
        if event.is_ok_and(|event| event.kind.is_access() && event.kind != FILE_WRITTEN) {
            return;
        }
        // Full means that a wake-up is waiting already; nobody listens only after the end.
        let _ = wake.try_send(());
    };
    let mut notifier = notify::recommended_watcher(handler).ok();
    // Without inotify only the tick is left; the channel must then not look like a stream of wake-ups.
    let woken = if notifier.is_some() { woken } else { never() };
    let mut unwatched: Vec<&Path> = folders.iter().map(PathBuf::as_path).collect();
    let mut next_tick = Instant::now() + TICK;
    loop {
        if let Some(notifier) = &mut notifier {
            unwatched.retain(|folder| !attach(notifier, folder));
        }
        crossbeam_channel::select! {
            recv(ended) -> _ => return,
            recv(woken) -> _ => {}
            recv(crossbeam_channel::at(next_tick)) -> _ => next_tick = Instant::now() + TICK,
        }
        if let Err(TrySendError::Disconnected(_)) = report.try_send(Changed) {
            return;
        }
        // Whatever comes in the gap is one wake-up afterwards.
        if !matches!(ended.recv_timeout(SHORTEST_GAP), Err(crossbeam_channel::RecvTimeoutError::Timeout)) {
            return;
        }
    }
}

fn attach(notifier: &mut RecommendedWatcher, folder: &Path) -> bool {
    folder.is_dir() && notifier.watch(folder, RecursiveMode::Recursive).is_ok()
}
