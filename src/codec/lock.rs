//! One process at a time fits a codec file; the others wait for it instead of doing the same minutes of work.

use std::fs::{File, OpenOptions, TryLockError};
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::Result;
use crate::data::Progress;
use crate::files::{create_folder, io_error};

/// Between two looks at a lock that another process holds.
const POLL: Duration = Duration::from_millis(100);

/// Waits for the lock beside a codec file, calling `progress(0, 0)`. It is held until the file is dropped, or by the
/// kernel until the process ends. The empty lock file stays: removing it would let two processes hold two of them.
///
/// # Errors
/// The disk errors of [`crate::files`] (exit 74) if the lock cannot be made; an error of `progress`.
pub(super) fn acquire(codec: &Path, progress: Progress<'_>) -> Result<File> {
    if let Some(folder) = codec.parent() {
        create_folder(folder)?;
    }
    let mut path = codec.as_os_str().to_owned();
    path.push(".lock");
    let path = PathBuf::from(path);
    let file = OpenOptions::new().write(true).create(true).truncate(false).open(&path);
    let file = file.map_err(|error| io_error("cannot open the codec's lock", &path, &error))?;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(TryLockError::WouldBlock) => {
                progress(0, 0)?;
                std::thread::sleep(POLL);
            }
            // A file system without locks. Two fits make the same file, each whole; only time is lost.
            Err(TryLockError::Error(error)) => {
                tracing::warn!("{}: {error}; other processes may fit the same codec", path.display());
                return Ok(file);
            }
        }
    }
}
