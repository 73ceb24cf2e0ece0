//! What one program of a user was told of the queue serves the others on this machine: ten consoles are no more load on
//! the controller than one.
//!
//! A file of the user's cache folder, for each machine its own, so that only one clock says how old it is. Losing it
//! costs a question; nothing else depends on it.

use crate::data::sha256_hex;
use crate::files::write_whole;
use crate::runlog::{host_name, now_ms};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The kept answer.
#[derive(Clone, Debug)]
pub(super) struct SharedQueue {
    path: PathBuf,
    /// Unix ms.
    clock: fn() -> u64,
}

impl SharedQueue {
    /// In the user's cache folder; `None` where there is none. What would make Slurm answer of another cluster or user has
    /// another file.
    pub fn of_user() -> Option<Self> {
        let folder =
            |name: &str| std::env::var_os(name).filter(|path| Path::new(path).is_absolute()).map(PathBuf::from);
        let cache = folder("XDG_CACHE_HOME").or_else(|| Some(folder("HOME")?.join(".cache")))?;
        let mut asked = rustix::process::getuid().as_raw().to_string();
        for name in ["SLURM_CONF", "SLURM_CLUSTERS", "PATH"] {
            asked += &format!("\n{:?}", std::env::var_os(name));
        }
        let digest = sha256_hex(asked.as_bytes());
        let name = format!("queue-{}-{}", host_name(), digest.get(..12).unwrap_or_default());
        Some(Self::at(cache.join("lbva-tui").join(name), now_ms))
    }

    pub fn at(path: PathBuf, clock: fn() -> u64) -> Self {
        Self { path, clock }
    }

    /// Keeps an answer of this moment. That it cannot be kept is no error: others will ask for themselves.
    pub fn keep(&self, text: &str) {
        let Some(folder) = self.path.parent() else { return };
        let kept = std::fs::create_dir_all(folder).is_ok();
        if kept && let Err(error) = write_whole(&self.path, format!("{}\n{text}", (self.clock)()).as_bytes()) {
            tracing::debug!("the queue is not shared: {error}");
        }
    }

    /// The answer and its age, if it is no older than this. One from the future has no age.
    pub fn at_most(&self, age: Duration) -> Option<(String, Duration)> {
        if age.is_zero() {
            return None;
        }
        let content = std::fs::read_to_string(&self.path).ok()?;
        let (kept_ms, text) = content.split_once('\n')?;
        let its_age = Duration::from_millis((self.clock)().checked_sub(kept_ms.parse().ok()?)?);
        (its_age <= age).then(|| (text.to_owned(), its_age))
    }

    /// Something was done that changes the queue.
    pub fn forget(&self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU64, Ordering};

    static NOW_MS: AtomicU64 = AtomicU64::new(50_000);

    #[test]
    fn an_answer_is_kept_while_it_is_young() {
        let folder = tempfile::tempdir().unwrap();
        let shared = SharedQueue::at(folder.path().join("lbva-tui/queue"), || NOW_MS.load(Ordering::Relaxed));
        let seconds = Duration::from_secs;
        assert_eq!(shared.at_most(seconds(60)), None);
        shared.keep("7|x|\n8|y|\n");
        assert_eq!(shared.at_most(Duration::ZERO), None, "asked for news");
        NOW_MS.store(65_000, Ordering::Relaxed);
        assert_eq!(shared.at_most(seconds(15)), Some(("7|x|\n8|y|\n".to_owned(), seconds(15))));
        assert_eq!(shared.at_most(seconds(14)), None);
        NOW_MS.store(40_000, Ordering::Relaxed);
        assert_eq!(shared.at_most(seconds(60)), None, "the clock was set back");
        shared.forget();
        NOW_MS.store(50_000, Ordering::Relaxed);
        assert_eq!(shared.at_most(seconds(60)), None);
        std::fs::write(folder.path().join("lbva-tui/queue"), "torn").unwrap();
        assert_eq!(shared.at_most(seconds(60)), None);
    }
}
