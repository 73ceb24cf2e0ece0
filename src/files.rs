//! Writes that are either there whole or not there at all, and disk errors in words with their own codes.
//!
//! The recipe is always the same: write under another name in the same folder, fsync the file, rename it, fsync the
//! folder. A power cut or a full disk leaves the old content or the new one.

use crate::{Error, Exit, Result};
use rustix::io::Errno;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// Turns an operating system error of a file operation into the one-line error with exit 74 and a distinct code.
///
/// `action` is what failed, as the start of a sentence: `cannot write the checkpoint`.
pub fn io_error(action: &str, path: &Path, error: &io::Error) -> Error {
    let errno = error.raw_os_error().map(Errno::from_raw_os_error);
    let (code, words, hint) = match errno {
        Some(Errno::NOSPC) => {
            ("disk_full", "the disk is full", "free space, then start again; what was saved before is intact")
        }
        Some(Errno::DQUOT) => {
            ("quota_exceeded", "the disk quota is used up", "free space or ask for quota, then start again")
        }
        Some(Errno::ROFS) => {
            ("read_only_filesystem", "the file system is read-only", "use a folder on a writable file system")
        }
        Some(Errno::ACCESS | Errno::PERM) => {
            ("permission_denied", "permission denied", "check who owns the folder and its mode")
        }
        Some(Errno::FBIG) => ("file_too_large", "the file is larger than the limit", "raise `ulimit -f`"),
        Some(Errno::NOENT) => ("path_missing", "no such file or folder", ""),
        Some(Errno::NOTDIR) => ("not_a_folder", "a part of the path is a file, not a folder", "move that file away"),
        Some(Errno::ISDIR) => ("is_a_folder", "a folder lies where a file should be", "move that folder away"),
        Some(Errno::MFILE | Errno::NFILE) => ("too_many_open_files", "too many open files", "raise `ulimit -n`"),
        Some(Errno::NAMETOOLONG) => ("name_too_long", "the name is too long for this file system", ""),
        Some(Errno::STALE) => ("stale_file_handle", "the network file system lost the file", "check the mount"),
        Some(Errno::IO) => ("io_failed", "the device reports an input/output error", "check the disk"),
        _ => return Error::new(Exit::Disk, "io_failed", format!("{action}: {error}")).at(path),
    };
    Error::new(Exit::Disk, code, format!("{action}: {words}")).at(path).hint(hint)
}

/// Replaces `path` by `bytes`: afterwards the file has the old content or the new one, durably, and nothing between.
pub fn write_whole(path: &Path, bytes: &[u8]) -> Result<()> {
    let staged = stage(path, bytes)?;
    if let Err(error) = std::fs::rename(&staged, path) {
        let _ = std::fs::remove_file(&staged);
        return Err(io_error("cannot write the file", path, &error));
    }
    sync_folder_of(path)
}

/// Creates `path` with `bytes` unless it exists; `false` if it did, and then it is left as it is.
///
/// The file appears whole: it is written under another name and linked. Where hard links are not supported, it is
/// created exclusively and removed again if writing fails.
pub fn create_new(path: &Path, bytes: &[u8]) -> Result<bool> {
    if path.symlink_metadata().is_ok() {
        return Ok(false);
    }
    let staged = stage(path, bytes)?;
    let linked = std::fs::hard_link(&staged, path);
    let _ = std::fs::remove_file(&staged);
    match linked {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Ok(false),
        Err(error) => match error.raw_os_error().map(Errno::from_raw_os_error) {
            Some(Errno::PERM | Errno::OPNOTSUPP | Errno::NOSYS | Errno::MLINK) => {
                match OpenOptions::new().write(true).create_new(true).open(path) {
                    Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Ok(false),
                    opened => {
                        if let Err(error) = opened.and_then(|mut file| file.write_all(bytes).and(file.sync_all())) {
                            let _ = std::fs::remove_file(path);
                            return Err(io_error("cannot create the file", path, &error));
                        }
                    }
                }
            }
            _ => return Err(io_error("cannot create the file", path, &error)),
        },
    }
    sync_folder_of(path)?;
    Ok(true)
}

/// Creates the folder and those above it.
pub fn create_folder(path: &Path) -> Result<()> {
    std::fs::create_dir_all(path).map_err(|error| {
        // std reports a file in the way as "already exists"; the words for that case are those of ENOTDIR.
        if error.kind() == io::ErrorKind::AlreadyExists {
            io_error("cannot create the folder", path, &Errno::NOTDIR.into())
        } else {
            io_error("cannot create the folder", path, &error)
        }
    })
}

/// Writes a file inside a folder that is not published yet, durably.
pub fn write_file(path: &Path, bytes: &[u8]) -> Result<()> {
    let written = File::create(path).and_then(|mut file| file.write_all(bytes).and(file.sync_all()));
    written.map_err(|error| io_error("cannot write the file", path, &error))
}

/// Removes a file; one that is already gone is no error.
pub fn remove_file(path: &Path) -> Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(io_error("cannot remove the file", path, &error)),
        _ => Ok(()),
    }
}

/// Bytes that this user may still write to the file system of `path`.
pub fn free_bytes(path: &Path) -> Result<u64> {
    let space = rustix::fs::statvfs(path);
    let space = space.map_err(|error| io_error("cannot ask for the free space", path, &error.into()))?;
    Ok(space.f_bavail.saturating_mul(space.f_frsize))
}

/// Makes renames and creations inside `folder` durable.
pub fn sync_folder(folder: &Path) -> Result<()> {
    let synced = File::open(folder).and_then(|handle| match handle.sync_all() {
        // Some network file systems refuse fsync on folders; their renames are durable on the server.
        Err(error) if error.raw_os_error() == Some(Errno::INVAL.raw_os_error()) => Ok(()),
        result => result,
    });
    synced.map_err(|error| io_error("cannot make the folder durable", folder, &error))
}

fn sync_folder_of(path: &Path) -> Result<()> {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => sync_folder(folder),
        _ => sync_folder(Path::new(".")),
    }
}

/// Writes and syncs `bytes` under a temporary name beside `path`; removes it if that fails.
fn stage(path: &Path, bytes: &[u8]) -> Result<PathBuf> {
    static SERIAL: AtomicU64 = AtomicU64::new(0);
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
    let staged = path.with_file_name(format!(".tmp-{name}-{}-{serial}", std::process::id()));
    write_file(&staged, bytes).map_err(|mut error| {
        let _ = std::fs::remove_file(&staged);
        error.place = path.display().to_string();
        error
    })?;
    Ok(staged)
}

/// An append-only file of lines. A line is written in one call, so a reader sees it whole or torn at its end only.
#[derive(Debug)]
pub struct LineFile {
    file: File,
    path: PathBuf,
    /// The last write failed part-way: the next line must not continue the torn one.
    torn: bool,
}

impl LineFile {
    /// Opens for appending; creates the file if it is absent.
    pub fn append_to(path: &Path) -> Result<Self> {
        let file = OpenOptions::new().append(true).create(true).open(path);
        let file = file.map_err(|error| io_error("cannot open the log", path, &error))?;
        Ok(Self { file, path: path.to_owned(), torn: false })
    }

    /// Appends `line` (which has no newline) and a newline.
    pub fn append(&mut self, line: &str) -> Result<()> {
        let mut bytes = Vec::with_capacity(line.len() + 2);
        if self.torn {
            bytes.push(b'\n');
        }
        bytes.extend_from_slice(line.as_bytes());
        bytes.push(b'\n');
        let written = self.file.write_all(&bytes).and_then(|()| self.file.flush());
        self.torn = written.is_err();
        written.map_err(|error| io_error("cannot append to the log", &self.path, &error))
    }

    /// Makes all lines durable.
    pub fn sync(&self) -> Result<()> {
        self.file.sync_data().map_err(|error| io_error("cannot make the log durable", &self.path, &error))
    }
}
