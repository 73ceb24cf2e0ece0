//! What data a run saw: one SHA-256 over the clip records and the contents of every file behind them.
//!
//! Nothing is remembered between runs: a file that changed in place must change the identity, and times and sizes do
//! not prove that it did not.

use rayon::prelude::*;
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use super::Progress;
use crate::{Error, Result};

/// One file that counts, by its name relative to the dataset.
pub(super) struct Part {
    pub name: String,
    pub path: PathBuf,
    /// Whether its absence is a fact to record (a cache) rather than an error.
    pub optional: bool,
}

/// Hashes `records` and the contents of the parts, in their order.
///
/// # Errors
/// `file_missing` or `not_openable` with the first part (in order) that cannot be read; an error of `progress`.
pub(super) fn hash(records: &str, parts: &[Part], progress: Progress<'_>) -> Result<String> {
    let total = parts.len() as u64;
    let begun = AtomicU64::new(0);
    let contents: Vec<Result<String>> = parts
        .par_iter()
        .map(|part| {
            progress(begun.fetch_add(1, Ordering::Relaxed), total)?;
            match sha256_file(&part.path) {
                Err(error) if part.optional && error.code == "file_missing" => Ok("absent".to_owned()),
                other => other,
            }
        })
        .collect();
    let mut hasher = Sha256::new();
    hasher.update(records);
    for (part, content) in parts.iter().zip(contents) {
        hasher.update(format!("{}\t{}\n", part.name, content?));
    }
    progress(total, total)?;
    Ok(hex(&hasher.finalize()))
}

/// What the pictures of one window depend on: its videos' contents, and its first frame, frame count and stride.
pub(super) fn picture_key(videos: &str, window: (usize, usize, usize)) -> String {
    sha256_hex(format!("{videos} {window:?}").as_bytes())
}

/// What was fitted to these windows, each with its name and [`picture_key`], is fitted to no others.
pub(super) fn training_key<Name: std::fmt::Display>(windows: impl IntoIterator<Item = (Name, String)>) -> String {
    let mut records = "training pictures 1\n".to_owned();
    for (name, key) in windows {
        records.push_str(&format!("{name} {key}\n"));
    }
    sha256_hex(records.as_bytes())
}

/// SHA-256 of some bytes, as 64 hex digits.
pub fn sha256_hex(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}

/// SHA-256 of a file's content.
///
/// # Errors
/// `file_missing`, `not_openable`.
pub(super) fn sha256_file(path: &Path) -> Result<String> {
    sha256_files([path])
}

/// SHA-256 of the contents of these files, one after another.
///
/// # Errors
/// As [`sha256_file`].
pub(super) fn sha256_files(paths: impl IntoIterator<Item = impl AsRef<Path>>) -> Result<String> {
    let mut hasher = Sha256::new();
    let mut buffer = vec![0; 1 << 16];
    for path in paths {
        let path = path.as_ref();
        let failed = |error: std::io::Error| match error.kind() {
            ErrorKind::NotFound => Error::data("file_missing", "file of the dataset is missing").at(path),
            _ => Error::data("not_openable", format!("file cannot be read: {error}")).at(path),
        };
        let mut file = File::open(path).map_err(failed)?;
        loop {
            match file.read(&mut buffer).map_err(failed)? {
                0 => break,
                count => hasher.update(&buffer[..count]),
            }
        }
    }
    Ok(hex(&hasher.finalize()))
}

/// Two hex digits a byte.
pub(super) fn hex(digest: &[u8]) -> String {
    use std::fmt::Write;
    digest.iter().fold(String::with_capacity(2 * digest.len()), |mut text, byte| {
        let _ = write!(text, "{byte:02x}"); // writing to a String cannot fail
        text
    })
}

#[cfg(test)]
mod tests {
    #[test]
    fn sha256_is_the_standards() {
        assert_eq!(super::sha256_hex(b"abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    }
}
