//! Encoded clips and episodes on disk, keyed by what they were made from, so that no changed index or file can misread them.
//!
//! A key is SHA-256 over the codec, the contents of the video or latent files and the frames taken. An entry is written
//! to a temporary file and renamed; several processes may share a folder. A cache is never needed: an entry that is
//! torn or cannot be written costs time and a warning, not the run.

use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use super::{CHANNELS, Extent, LatentCodec, encode_clip};
use crate::data::{ClipId, Dataset, sha256_hex};
use crate::{Error, Result};

/// Numbers of 32 bits.
const FULL: &[u8; 8] = b"latents1";
/// Numbers of which the upper 16 bits are kept, since the lower are 0 in all of them: latents published as bf16.
const HALF: &[u8; 8] = b"latents2";
/// A line of text.
const NOTE: &[u8; 8] = b"latnote1";
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
        self.get_or_make(clip, &key, count, || encode_clip(codec, &dataset.load(clip)?))
    }

    /// The `count` numbers stored under `key`; if there are none, or broken ones, they are made and stored. `what`
    /// names them in warnings.
    ///
    /// # Errors
    /// Those of `make`. Trouble with the cache itself is a warning in the log.
    pub fn get_or_make(
        &self,
        what: impl std::fmt::Display,
        key: &str,
        count: usize,
        make: impl FnOnce() -> Result<Vec<f32>>,
    ) -> Result<Vec<f32>> {
        match self.get(key, count) {
            Ok(Some(latents)) => return Ok(latents),
            Ok(None) => {}
            Err(error) => tracing::warn!("{what}: {error}; it is made again"),
        }
        let latents = make()?;
        if let Err(error) = self.put(key, &latents) {
            tracing::warn!("{what}: {error}");
        }
        Ok(latents)
    }

    /// Is there an entry for the clip? It may still turn out damaged when read.
    ///
    /// # Errors
    /// Those of [`Dataset::picture_key`].
    pub fn contains(&self, dataset: &Dataset, codec: &dyn LatentCodec, clip: &ClipId) -> Result<bool> {
        Ok(self.has(&key(dataset, codec, clip)?))
    }

    /// Is there an entry under `key`? It may still turn out damaged when read.
    pub fn has(&self, key: &str) -> bool {
        self.path(key).exists()
    }

    /// The `count` numbers stored under `key`, or `None` if there is no entry.
    ///
    /// # Errors
    /// `cache_corrupt` if the entry is torn, altered or of another length.
    pub fn get(&self, key: &str, count: usize) -> Result<Option<Vec<f32>>> {
        let Some(content) = self.read(key)? else { return Ok(None) };
        let (kind, content) = content.split_at(FULL.len());
        let numbers: Vec<f32> = match kind {
            _ if kind == FULL => {
                content.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
            }
            _ if kind == HALF => content.chunks_exact(2).map(|b| f32::from_le_bytes([0, 0, b[0], b[1]])).collect(),
            _ => return Err(self.corrupt(key, "it holds no numbers".into())),
        };
        if numbers.len() != count {
            let why = format!("{} numbers where {count} are expected", numbers.len());
            return Err(self.corrupt(key, why));
        }
        Ok(Some(numbers))
    }

    /// The text stored under `key`, or `None` if there is no entry.
    ///
    /// # Errors
    /// `cache_corrupt`.
    pub fn note(&self, key: &str) -> Result<Option<String>> {
        let Some(content) = self.read(key)? else { return Ok(None) };
        let text = content.strip_prefix(NOTE).and_then(|text| std::str::from_utf8(text).ok());
        text.map(|text| Some(text.to_owned())).ok_or_else(|| self.corrupt(key, "it holds no text".into()))
    }

    /// Stores numbers under `key`, whole or not at all.
    ///
    /// # Errors
    /// `write_failed` (exit 74).
    pub fn put(&self, key: &str, numbers: &[f32]) -> Result<()> {
        let half = numbers.iter().all(|number| number.to_bits() & 0xffff == 0);
        let mut bytes = if half { HALF } else { FULL }.to_vec();
        let dropped = if half { 2 } else { 0 };
        for number in numbers {
            bytes.extend_from_slice(&number.to_le_bytes()[dropped..]);
        }
        self.write(key, bytes)
    }

    /// Stores text under `key`, whole or not at all.
    ///
    /// # Errors
    /// `write_failed` (exit 74).
    pub fn put_note(&self, key: &str, text: &str) -> Result<()> {
        self.write(key, [NOTE, text.as_bytes()].concat())
    }

    fn corrupt(&self, key: &str, why: String) -> Error {
        Error::data("cache_corrupt", format!("cached latents are broken: {why}")).at(self.path(key))
    }

    /// An entry without its checksum, which fits; it is at least as long as the mark of its kind.
    fn read(&self, key: &str) -> Result<Option<Vec<u8>>> {
        let mut bytes = match std::fs::read(self.path(key)) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(self.corrupt(key, error.to_string())),
        };
        let Some(content) = bytes.len().checked_sub(CHECKSUM).filter(|content| *content >= FULL.len()) else {
            return Err(self.corrupt(key, format!("{} bytes are too few", bytes.len())));
        };
        let checksum = bytes.split_off(content);
        if sha256_hex(&bytes).as_bytes() != checksum {
            return Err(self.corrupt(key, "the checksum does not fit".into()));
        }
        Ok(Some(bytes))
    }

    fn write(&self, key: &str, mut bytes: Vec<u8>) -> Result<()> {
        let path = self.path(key);
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

        let published = [0.0, -1.5, f32::from_bits(0x3f81_0000), -0.0, 3.0e30];
        let published = published.map(|number| f32::from_bits(number.to_bits() & 0xffff_0000));
        cache.put("half", &published).unwrap();
        let found = cache.get("half", 5).unwrap().unwrap();
        assert_eq!(found.iter().map(|x| x.to_bits()).collect::<Vec<_>>(), published.map(f32::to_bits));
        let bytes = |key: &str| std::fs::metadata(cache.path(key)).unwrap().len();
        assert_eq!((bytes("key"), bytes("half")), (8 + 16 + 64, 8 + 10 + 64));

        cache.put_note("note", "two words").unwrap();
        assert_eq!(cache.note("note").unwrap().unwrap(), "two words");
        assert_eq!(cache.note("key").unwrap_err().code, "cache_corrupt");
        assert_eq!(cache.get("note", 2).unwrap_err().code, "cache_corrupt");
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
