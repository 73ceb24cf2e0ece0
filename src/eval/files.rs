//! Whole-file writes and the errors of files that metrics read.

use crate::{Error, Exit, Result};
use std::fs::{self, File};
use std::io::{self, ErrorKind, Write};
use std::path::Path;

/// Writes a file whole: a temporary neighbour, fsync, rename. A reader sees the old file, the new one or none.
///
/// # Errors
/// `disk_full`, `not_writable`, `write_failed` (exit 74); what stood there before stays.
pub(super) fn write_whole(path: &Path, bytes: &[u8]) -> Result<()> {
    let mut name = path.file_name().unwrap_or_default().to_os_string();
    name.push(format!(".{}.tmp", std::process::id()));
    let temporary = path.with_file_name(name);
    let written = (|| {
        let mut file = File::create(&temporary)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        fs::rename(&temporary, path)
    })();
    written.map_err(|error| {
        // What is left of a failed write is of no use; failing to remove it changes nothing.
        let _ = fs::remove_file(&temporary);
        let (code, hint) = match error.kind() {
            ErrorKind::StorageFull | ErrorKind::QuotaExceeded => ("disk_full", "free some space"),
            ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem => ("not_writable", "check the permissions"),
            _ => ("write_failed", ""),
        };
        Error::disk(code, format!("cannot write: {error}")).at(path).hint(hint)
    })
}

/// A file or folder that cannot be read, by the reason.
pub(super) fn read_error(error: &io::Error, path: &Path) -> Error {
    let (code, what) = match error.kind() {
        ErrorKind::NotFound => ("file_missing", "no such file or folder".to_string()),
        ErrorKind::PermissionDenied => ("not_readable", "no permission to read".to_string()),
        _ => ("read_failed", format!("cannot read: {error}")),
    };
    Error::new(Exit::BadData, code, what).at(path)
}
