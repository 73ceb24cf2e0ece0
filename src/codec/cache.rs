//! Encoded clips on disk, keyed by what they were made from, so that no changed index or file can misread them.
//!
//! A key is SHA-256 over the codec, the contents of the clip's video files and the frames taken. An entry is written
//! to a temporary file and renamed; several processes may share a folder. A cache is never needed: an entry that is
//! torn or cannot be written costs time and a warning, not the run.

use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use super::{CHANNELS, Extent, LatentCodec, encode_clip};
use crate::data::{ClipId, Dataset, sha256_hex};
use crate::{Error, Result};

const MAGIC: &[u8; 8] = b"latents1";
/// Hex digits of the SHA-256 at the end of an entry.
const CHECKSUM: usize = 64;

/// A folder of encoded clips.
#[derive(Debug)]
pub struct LatentCache {
    folder: PathBuf,
    /// Tells temporary files of one process apart.
    written: AtomicU64,
}

impl LatentCache {
    /// Opens (and makes) the folder.
    ///
    /// # Errors
    /// `write_failed` (exit 74) if it cannot be made.
    pub fn open(folder: &Path) -> Result<Self> {
        std::fs::create_dir_all(folder).map_err(|error| {
            Error::disk("write_failed", format!("the latent cache cannot be made: {error}")).at(folder)
        })?;
        Ok(Self { folder: folder.to_owned(), written: AtomicU64::new(0) })
    }

    /// Latents [48, T', V, h, w] of a clip: from the cache, else encoded and stored.
    ///
    /// # Errors
    /// Those of [`Dataset::load`] and of the codec. Trouble with the cache itself is a warning in the log.
    pub fn latents(&self, dataset: &Dataset, codec: &dyn LatentCodec, clip: &ClipId) -> Result<Vec<f32>> {
        let key = key(dataset, codec, clip)?;
        let (height, width) = dataset.picture_size();
        let config = dataset.config();
        let extent = Extent { frames: config.frames, height, width }.latent()?;
        let count = CHANNELS * extent.cells() * config.views.len();
        match self.get(&key, count) {
            Ok(Some(latents)) => return Ok(latents),
            Ok(None) => {}
            Err(error) => tracing::warn!("{clip}: {error}; it is encoded again"),
        }
        let latents = encode_clip(codec, &dataset.load(clip)?)?;
        if let Err(error) = self.put(&key, &latents) {
            tracing::warn!("{clip}: {error}");
        }
        Ok(latents)
    }

    /// Is there an entry for the clip? It may still turn out damaged when read.
    ///
    /// # Errors
    /// Those of [`Dataset::picture_key`].
    pub fn contains(&self, dataset: &Dataset, codec: &dyn LatentCodec, clip: &ClipId) -> Result<bool> {
        Ok(self.path(&key(dataset, codec, clip)?).exists())
    }

    /// The `count` numbers stored under `key`, or `None` if there is no entry.
    ///
    /// # Errors
    /// `cache_corrupt` if the entry is torn, altered or of another length.
    pub fn get(&self, key: &str, count: usize) -> Result<Option<Vec<f32>>> {
        let path = self.path(key);
        let corrupt = |why: String| Error::data("cache_corrupt", format!("cached latents are broken: {why}")).at(&path);
        let bytes = match std::fs::read(&path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(corrupt(error.to_string())),
        };
        if bytes.len() != MAGIC.len() + 4 * count + CHECKSUM {
            return Err(corrupt(format!("{} bytes where {count} numbers are expected", bytes.len())));
        }
        let (content, checksum) = bytes.split_at(bytes.len() - CHECKSUM);
        if !content.starts_with(MAGIC) || sha256_hex(content).as_bytes() != checksum {
            return Err(corrupt("the checksum does not fit".into()));
        }
        let numbers = content[MAGIC.len()..].chunks_exact(4);
        Ok(Some(numbers.map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()))
    }

    /// Stores numbers under `key`, whole or not at all.
    ///
    /// # Errors
    /// `write_failed` (exit 74).
    pub fn put(&self, key: &str, latents: &[f32]) -> Result<()> {
        let path = self.path(key);
        let mut bytes = MAGIC.to_vec();
        bytes.extend(latents.iter().flat_map(|value| value.to_le_bytes()));
        let checksum = sha256_hex(&bytes);
        bytes.extend(checksum.bytes());
        let number = self.written.fetch_add(1, Ordering::Relaxed);
        let temporary = self.folder.join(format!("{key}.tmp-{}-{number}", std::process::id()));
        // Not synced: the checksum finds a torn entry, and losing one costs an encoding.
        let written = std::fs::File::create(&temporary)
            .and_then(|mut file| file.write_all(&bytes))
            .and_then(|()| std::fs::rename(&temporary, &path));
        written.map_err(|error| {
            let _ = std::fs::remove_file(&temporary); // it may not exist; the write's own error is the one to tell
            Error::disk("write_failed", format!("latents cannot be cached: {error}")).at(&path)
        })
    }

    fn path(&self, key: &str) -> PathBuf {
        self.folder.join(format!("{key}.latents"))
    }
}

/// Hash of all that decides a clip's latents.
fn key(dataset: &Dataset, codec: &dyn LatentCodec, clip: &ClipId) -> Result<String> {
    Ok(sha256_hex(format!("{} {}", codec.hash(), dataset.picture_key(clip)?).as_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_come_back_bit_for_bit_and_damage_is_seen() {
        let folder = tempfile::tempdir().unwrap();
        let cache = LatentCache::open(&folder.path().join("a/b")).unwrap();
        let numbers = [0.0, -1.5, f32::MIN_POSITIVE, 3.0e30];
        assert_eq!(cache.get("key", 4).unwrap(), None);
        cache.put("key", &numbers).unwrap();
        assert_eq!(cache.get("key", 4).unwrap().unwrap(), numbers);
        assert_eq!(std::fs::read_dir(folder.path().join("a/b")).unwrap().count(), 1, "no temporary file stays");

        assert_eq!(cache.get("key", 5).unwrap_err().code, "cache_corrupt");
        let path = cache.path("key");
        let whole = std::fs::read(&path).unwrap();
        for at in [0, 9, whole.len() - 1] {
            let mut damaged = whole.clone();
            damaged[at] ^= 1;
            std::fs::write(&path, damaged).unwrap();
            assert_eq!(cache.get("key", 4).unwrap_err().code, "cache_corrupt", "byte {at}");
        }
        std::fs::write(&path, &whole[..whole.len() / 2]).unwrap();
        assert_eq!(cache.get("key", 4).unwrap_err().code, "cache_corrupt");
    }

    #[test]
    fn an_unwritable_folder_is_a_disk_error() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        std::fs::write(&file, "").unwrap();
        assert_eq!(LatentCache::open(&file.join("cache")).unwrap_err().code, "write_failed");
    }
}
