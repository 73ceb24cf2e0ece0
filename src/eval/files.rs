//! The errors of files that metrics read.

use crate::{Error, Exit};
use std::io::{self, ErrorKind};
use std::path::Path;

/// A file or folder that cannot be read, by the reason.
pub(super) fn read_error(error: &io::Error, path: &Path) -> Error {
    let (code, what) = match error.kind() {
        ErrorKind::NotFound => ("file_missing", "no such file or folder".to_string()),
        ErrorKind::PermissionDenied => ("not_readable", "no permission to read".to_string()),
        _ => ("read_failed", format!("cannot read: {error}")),
    };
    Error::new(Exit::BadData, code, what).at(path)
}
