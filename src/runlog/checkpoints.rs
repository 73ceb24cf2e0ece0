//! Checkpoints that are complete or invisible: written under a temporary name, manifest last, then renamed.
//!
//! A checkpoint `checkpoints/step-00000500/` is complete if its `manifest.json` is valid and every file it lists has the
//! listed size (and, where asked for, the listed SHA-256). Anything else is skipped with a warning, never loaded.

use super::paths::{RunDir, folder_names, parse_step_name, step_name};
use crate::files::{create_folder, io_error, sync_folder, write_whole};
use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

const MANIFEST: &str = "manifest.json";
const TEMPORARY: &str = ".tmp-";
/// Checkpoints that a resume could not use; kept for a person to look at, seen by nothing else.
const BAD: &str = ".bad-";

/// How thoroughly completeness is proven.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Check {
    /// Manifest and file sizes: finds everything an interrupted write can leave. Milliseconds.
    Sizes,
    /// Also the SHA-256 of every file: finds damaged disks and hand-made changes. Reads all bytes; for resuming.
    Hashes,
}

/// `manifest.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    pub v: u32,
    pub step: u64,
    pub files: Vec<ManifestFile>,
    /// Whatever the trainer binds to the checkpoint (identity, counters).
    pub details: Value,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ManifestFile {
    /// Path inside the checkpoint, with `/`.
    pub name: String,
    pub bytes: u64,
    /// Lower-case hex.
    pub sha256: String,
}

/// One complete checkpoint.
#[derive(Clone, Debug, PartialEq)]
pub struct Checkpoint {
    pub step: u64,
    pub path: PathBuf,
    pub manifest: Manifest,
}

impl Checkpoint {
    /// Bytes of all files but the manifest.
    pub fn bytes(&self) -> u64 {
        self.manifest.files.iter().map(|file| file.bytes).sum()
    }

    /// Opens `path` as a checkpoint of `step`, or says why it is none (exit 65).
    pub fn open(path: &Path, step: u64, check: Check) -> Result<Self> {
        let manifest_path = path.join(MANIFEST);
        let text = std::fs::read(&manifest_path)
            .map_err(|error| Error::data("checkpoint_incomplete", format!("no readable manifest: {error}")).at(path))?;
        let manifest: Manifest = serde_json::from_slice(&text)
            .map_err(|error| Error::data("checkpoint_incomplete", format!("manifest is damaged: {error}")).at(path))?;
        if manifest.step != step {
            let what = format!("manifest is of step {}, the folder's name says {step}", manifest.step);
            return Err(Error::data("checkpoint_corrupt", what).at(path));
        }
        for file in &manifest.files {
            let file_path = path.join(&file.name);
            let bytes = std::fs::metadata(&file_path).map(|metadata| metadata.len());
            let bytes = bytes.map_err(|error| {
                Error::data("checkpoint_incomplete", format!("a file of the checkpoint cannot be read: {error}"))
                    .at(&file_path)
            })?;
            if bytes != file.bytes {
                let what = format!("file has {bytes} bytes, the manifest says {}", file.bytes);
                return Err(Error::data("checkpoint_incomplete", what).at(&file_path));
            }
            if check == Check::Hashes && sha256_of(&file_path)?.1 != file.sha256 {
                return Err(
                    Error::data("checkpoint_corrupt", "content differs from the manifest's SHA-256").at(&file_path)
                );
            }
        }
        Ok(Self { step, path: path.to_owned(), manifest })
    }
}

/// The newest usable checkpoint, and what was passed over to reach it.
#[derive(Clone, Debug, PartialEq)]
pub struct Latest {
    pub checkpoint: Option<Checkpoint>,
    /// One for each newer folder that is incomplete or corrupt.
    pub warnings: Vec<Error>,
}

/// Which complete checkpoints stay when a new one is durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retention {
    /// The newest ones; at least one stays.
    pub last: usize,
    /// Multiples of this many steps stay for good; 0 keeps none. Step 0 is none of them: a run makes it again at will.
    pub every: u64,
}

impl Retention {
    /// Those of `complete` (steps, ascending) that go.
    pub fn surplus(self, complete: &[u64]) -> Vec<u64> {
        let old = complete.len().saturating_sub(self.last.max(1));
        let milestone = |step: u64| self.every > 0 && step > 0 && step.is_multiple_of(self.every);
        complete.iter().take(old).copied().filter(|&step| !milestone(step)).collect()
    }
}

/// The `checkpoints/` folder of one run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckpointStore {
    folder: PathBuf,
}

impl CheckpointStore {
    pub fn new(run: &RunDir) -> Self {
        Self { folder: run.checkpoints() }
    }

    /// Steps that have a folder, ascending, complete or not.
    pub fn list(&self) -> Result<Vec<u64>> {
        let mut steps: Vec<u64> = folder_names(&self.folder)?.iter().filter_map(|name| parse_step_name(name)).collect();
        steps.sort_unstable();
        Ok(steps)
    }

    /// The newest complete checkpoint; incomplete and corrupt ones are skipped, each with a warning.
    pub fn latest_complete(&self, check: Check) -> Result<Latest> {
        let mut warnings = Vec::new();
        for step in self.list()?.into_iter().rev() {
            match Checkpoint::open(&self.path(step), step, check) {
                Ok(checkpoint) => return Ok(Latest { checkpoint: Some(checkpoint), warnings }),
                Err(error) => warnings.push(error),
            }
        }
        Ok(Latest { checkpoint: None, warnings })
    }

    /// Writes the checkpoint of `step`: `write` fills the folder it is given (subfolders allowed); then every file is
    /// hashed and made durable, the manifest is written last, and the folder is renamed to its final name.
    ///
    /// On any error the temporary folder is removed and every older checkpoint stays as it was. One that already has
    /// this step is replaced in one move. Errors: exit 74 with a code for each cause, or whatever `write` returns.
    pub fn publish(&self, step: u64, details: Value, write: impl FnOnce(&Path) -> Result<()>) -> Result<Checkpoint> {
        self.publish_sealed(step, details, |staged| {
            write(staged)?;
            let mut files = Vec::new();
            seal_folder(staged, staged, &mut files)?;
            Ok(files)
        })
    }

    /// [`CheckpointStore::publish`] for a `write` that has hashed every file and made it durable, folders included:
    /// what was hashed while it was written need not be read again.
    pub fn publish_sealed(
        &self,
        step: u64,
        details: Value,
        write: impl FnOnce(&Path) -> Result<Vec<ManifestFile>>,
    ) -> Result<Checkpoint> {
        create_folder(&self.folder)?;
        let staged = self.folder.join(format!("{TEMPORARY}{}-{}", step_name(step), std::process::id()));
        let result = self.stage_and_rename(step, details, &staged, write);
        if result.is_err() {
            let _ = std::fs::remove_dir_all(&staged);
        }
        result
    }

    fn stage_and_rename(
        &self,
        step: u64,
        details: Value,
        staged: &Path,
        write: impl FnOnce(&Path) -> Result<Vec<ManifestFile>>,
    ) -> Result<Checkpoint> {
        remove_folder(staged)?;
        create_folder(staged)?;
        let mut files = write(staged)?;
        files.sort_by(|a, b| a.name.cmp(&b.name));
        let manifest = Manifest { v: 1, step, files, details };
        let text = serde_json::to_vec_pretty(&manifest).map_err(|error| Error::crash(format!("manifest: {error}")))?;
        write_whole(&staged.join(MANIFEST), &text)?;
        let path = self.path(step);
        move_into_place(staged, &path)?;
        sync_folder(&self.folder)?;
        Ok(Checkpoint { step, path, manifest })
    }

    /// Complete checkpoints, by sizes, oldest first.
    pub fn complete(&self) -> Result<Vec<Checkpoint>> {
        let open = |step| Checkpoint::open(&self.path(step), step, Check::Sizes).ok();
        Ok(self.list()?.into_iter().filter_map(open).collect())
    }

    /// Removes the complete checkpoints that `retention` does not keep and returns their steps. Incomplete ones count
    /// for nothing and are left for a person to look at.
    pub fn prune(&self, retention: Retention) -> Result<Vec<u64>> {
        let complete: Vec<u64> = self.complete()?.iter().map(|checkpoint| checkpoint.step).collect();
        let removed = retention.surplus(&complete);
        for &step in &removed {
            // Renamed first, so that a half-removed folder is never taken for a checkpoint.
            let path = self.path(step);
            let doomed = self.folder.join(format!("{TEMPORARY}removed-{}", step_name(step)));
            remove_folder(&doomed)?;
            std::fs::rename(&path, &doomed).map_err(|error| io_error("cannot remove the checkpoint", &path, &error))?;
            remove_folder(&doomed)?;
        }
        Ok(removed)
    }

    /// Moves every checkpoint newer than `step` (all, for `None`) out of the way, as `.bad-step-NNNNNNNN`: what a resume
    /// from `step` passed over. Left in place, it would pass for saved once the run gets to its step again, and push
    /// good ones out when old ones are pruned. Only for the holder of the run's lock.
    pub fn set_aside_newer_than(&self, step: Option<u64>) -> Result<()> {
        for newer in self.list()?.into_iter().filter(|&newer| step.is_none_or(|step| newer > step)) {
            let path = self.path(newer);
            let aside = self.folder.join(format!("{BAD}{}", step_name(newer)));
            remove_folder(&aside)?;
            std::fs::rename(&path, &aside)
                .map_err(|error| io_error("cannot move the damaged checkpoint aside", &path, &error))?;
        }
        Ok(())
    }

    /// Removes what killed workers left half-written. Only for the holder of the run's lock.
    pub fn remove_leftovers(&self) -> Result<()> {
        for name in folder_names(&self.folder)?.iter().filter(|name| name.starts_with(TEMPORARY)) {
            remove_folder(&self.folder.join(name))?;
        }
        Ok(())
    }

    fn path(&self, step: u64) -> PathBuf {
        self.folder.join(step_name(step))
    }
}

/// Renames `staged` to `path`; a folder already there is swapped out in one move where the system can do that.
fn move_into_place(staged: &Path, path: &Path) -> Result<()> {
    let failed = |error: &std::io::Error| io_error("cannot publish the checkpoint", path, error);
    if !path.exists() {
        return std::fs::rename(staged, path).map_err(|error| failed(&error));
    }
    #[cfg(target_os = "linux")]
    {
        use rustix::fs::{CWD, RenameFlags, renameat_with};
        if renameat_with(CWD, staged, CWD, path, RenameFlags::EXCHANGE).is_ok() {
            return remove_folder(staged);
        }
    }
    let replaced = path.with_file_name(format!("{TEMPORARY}replaced-{}", std::process::id()));
    remove_folder(&replaced)?;
    std::fs::rename(path, &replaced).map_err(|error| failed(&error))?;
    std::fs::rename(staged, path).map_err(|error| failed(&error))?;
    remove_folder(&replaced)
}

fn remove_folder(path: &Path) -> Result<()> {
    match std::fs::remove_dir_all(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(io_error("cannot remove the folder", path, &error))
        }
        _ => Ok(()),
    }
}

/// Hashes and syncs every file under `folder`, and the folders themselves.
fn seal_folder(root: &Path, folder: &Path, files: &mut Vec<ManifestFile>) -> Result<()> {
    let failed = |error: std::io::Error| io_error("cannot read the checkpoint back", folder, &error);
    for entry in std::fs::read_dir(folder).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        let kind = path.symlink_metadata().map_err(failed)?.file_type();
        if kind.is_dir() {
            seal_folder(root, &path, files)?;
        } else if kind.is_file() {
            let (bytes, sha256) = sha256_of(&path)?;
            let synced = File::open(&path).and_then(|file| file.sync_all());
            synced.map_err(|error| io_error("cannot make the checkpoint durable", &path, &error))?;
            let inside = path.strip_prefix(root).unwrap_or(&path);
            let parts: Vec<_> =
                inside.components().map(|part| part.as_os_str().to_string_lossy().into_owned()).collect();
            files.push(ManifestFile { name: parts.join("/"), bytes, sha256 });
        } else {
            return Err(Error::crash("a checkpoint may hold only files and folders").at(&path));
        }
    }
    sync_folder(folder)
}

/// Size and SHA-256 (lower-case hex) of a file.
pub fn sha256_of(path: &Path) -> Result<(u64, String)> {
    let failed = |error: std::io::Error| io_error("cannot read the file", path, &error);
    let mut file = File::open(path).map_err(failed)?;
    let mut hasher = Sha256::new();
    let mut buffer = vec![0u8; 1 << 20];
    let mut bytes = 0u64;
    loop {
        let read = match file.read(&mut buffer) {
            Ok(0) => break,
            Ok(read) => read,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(failed(error)),
        };
        bytes += read as u64;
        hasher.update(buffer.get(..read).unwrap_or_default());
    }
    Ok((bytes, hex(hasher)))
}

fn hex(hasher: Sha256) -> String {
    hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A file of a checkpoint that is being staged: hashed while it is written, in pieces after each of which `pause` may wait.
pub struct SealedFile<'p> {
    file: File,
    path: PathBuf,
    hasher: Sha256,
    bytes: u64,
    /// Work since the last pause, and bytes.
    worked: Duration,
    unpaused: usize,
    pause: &'p dyn Fn(Duration),
}

impl<'p> SealedFile<'p> {
    /// Bytes a piece: long enough to be written well, short enough to pause often (some ms).
    const PIECE: usize = 4 << 20;

    /// Creates the file; `pause` hears after each piece how long the work on it took.
    pub fn create(path: &Path, pause: &'p dyn Fn(Duration)) -> Result<Self> {
        let file = File::create(path).map_err(|error| cannot_write(path, &error))?;
        let (hasher, worked) = (Sha256::new(), Duration::ZERO);
        Ok(Self { file, path: path.to_owned(), hasher, bytes: 0, worked, unpaused: 0, pause })
    }

    /// Other work on what is written next counts for the next pause.
    pub fn worked(&mut self, time: Duration) {
        self.worked += time;
    }

    /// Appends these bytes.
    pub fn write(&mut self, bytes: &[u8]) -> Result<()> {
        for piece in bytes.chunks(Self::PIECE) {
            let started = Instant::now();
            self.hasher.update(piece);
            self.file.write_all(piece).map_err(|error| cannot_write(&self.path, &error))?;
            self.bytes += piece.len() as u64;
            self.unpaused += piece.len();
            self.worked += started.elapsed();
            if self.unpaused >= Self::PIECE {
                (self.pause)(std::mem::take(&mut self.worked));
                self.unpaused = 0;
            }
        }
        Ok(())
    }

    /// Makes the file durable; its entry of the manifest, under this name.
    pub fn seal(self, name: &str) -> Result<ManifestFile> {
        self.file.sync_all().map_err(|error| io_error("cannot make the checkpoint durable", &self.path, &error))?;
        Ok(ManifestFile { name: name.to_owned(), bytes: self.bytes, sha256: hex(self.hasher) })
    }
}

fn cannot_write(path: &Path, error: &std::io::Error) -> Error {
    io_error("cannot write the checkpoint", path, error)
}

#[cfg(test)]
mod tests {
    use super::Retention;
    use proptest::prelude::*;

    #[test]
    fn milestones_stay_beside_the_newest() {
        let steps: Vec<u64> = (0..=10).map(|save| save * 10).collect();
        assert_eq!(Retention { last: 2, every: 0 }.surplus(&steps), [0, 10, 20, 30, 40, 50, 60, 70, 80]);
        assert_eq!(Retention { last: 2, every: 30 }.surplus(&steps), [0, 10, 20, 40, 50, 70, 80]);
        assert_eq!(Retention { last: 0, every: 0 }.surplus(&[7]), [0u64; 0], "the newest is never removed");
    }

    proptest! {
        /// Pruned after each save, in one attempt or many, the same ones are left as of all saves at once.
        #[test]
        fn pruning_by_and_by_leaves_what_pruning_at_once_leaves(
            mut saves in proptest::collection::vec(1u64..200, 1..40), last in 1usize..5, every in 0u64..20,
        ) {
            saves.sort_unstable();
            saves.dedup();
            let retention = Retention { last, every };
            let mut disk = Vec::new();
            for &step in &saves {
                disk.push(step);
                let surplus = retention.surplus(&disk);
                prop_assert!(!surplus.contains(&step));
                disk.retain(|step| !surplus.contains(step));
            }
            let surplus = retention.surplus(&saves);
            prop_assert_eq!(disk, saves.into_iter().filter(|step| !surplus.contains(step)).collect::<Vec<_>>());
        }
    }
}
