//! Cached geometry tokens: what a geometry encoder said about a clip's first instant.
//!
//! `geometry/info.json` describes the cache; `geometry/chunk-000/episode_NNNNNN.safetensors` holds, for each cached
//! frame of an episode, `tokens` bf16 [n, source_views * rows * columns, token_dim] and `frames` i64 [n].

use half::bf16;
use safetensors::{Dtype, SafeTensors};
use serde::{Deserialize, Serialize};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use super::lerobot::{is_lfs_pointer, lfs_pointer, parse_json, read_text};
use crate::config::GeometryConfig;
use crate::{Error, Result};

/// Episodes in one `chunk-NNN` folder.
const CHUNK: usize = 1000;
/// Numbers one clip's tokens may have; the largest known cache has 1216 x 6144.
const MAX_VALUES: usize = 1 << 26;

/// `geometry/info.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GeometryInfo {
    /// Encoder and version that made the tokens.
    pub encoder: String,
    /// SHA-256 of the encoder's weights; `null` for an encoder without any.
    #[serde(deserialize_with = "Option::deserialize")] // absent is not null
    pub weights_sha256: Option<String>,
    /// (height, width) in pixels of the pictures that the encoder was given.
    pub input_size: [usize; 2],
    /// Source views, jointly encoded, in token order.
    pub views: Vec<String>,
    /// (rows, columns) of one view's token grid.
    pub grid: [usize; 2],
    pub dim: usize,
    /// Source frames between two cached frames.
    pub frame_stride: usize,
    /// SHA-256 over the token files, one after another in the order of their episodes.
    pub sha256_of_files: String,
}

impl GeometryInfo {
    /// Where two caches do not say the same of how tokens were made, as `field is X here and Y there`. Which frames they hold
    /// is no difference: with episode and frame, these fields are the key of a token.
    pub fn differences(&self, other: &Self) -> Vec<String> {
        let of = |info: &Self| -> [(&str, String); 7] {
            [
                ("encoder", info.encoder.clone()),
                ("weights_sha256", info.weights_sha256.clone().unwrap_or_else(|| "null".into())),
                ("input_size", format!("{:?}", info.input_size)),
                ("views", info.views.join(", ")),
                ("grid", format!("{:?}", info.grid)),
                ("dim", info.dim.to_string()),
                ("frame_stride", info.frame_stride.to_string()),
            ]
        };
        let pairs = of(self).into_iter().zip(of(other)).filter(|(here, there)| here != there);
        pairs.map(|((field, here), (_, there))| format!("{field} is {here} here and {there} there")).collect()
    }
}

/// The geometry cache of a dataset.
#[derive(Clone, Debug)]
pub struct GeometryCache {
    folder: PathBuf,
    info: GeometryInfo,
}

impl GeometryCache {
    /// Opens the cache in a dataset's folder; `None` if the dataset has none.
    ///
    /// # Errors
    /// `not_openable`, `broken_json`, `broken_metadata` for a broken `info.json`.
    pub fn open(dataset: &Path) -> Result<Option<Self>> {
        let folder = dataset.join("geometry");
        let path = folder.join("info.json");
        let text = match read_text(&path) {
            Ok(text) => text,
            Err(error) if error.code == "file_missing" => return Ok(None),
            Err(error) => return Err(error),
        };
        let info: GeometryInfo = parse_json(&text, &path, 0)?;
        let hash =
            |text: &String| text.len() == 64 && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
        if !hash(&info.sha256_of_files) || !info.weights_sha256.iter().all(hash) || info.input_size.contains(&0) {
            let what = "weights_sha256 or sha256_of_files is no SHA-256 in small hex digits, or input_size is 0";
            return Err(Error::data("broken_metadata", what).at(&path));
        }
        let sizes = [info.views.len(), info.grid[0], info.grid[1], info.dim];
        let values = sizes.iter().try_fold(1_usize, |product, size| product.checked_mul(*size));
        if info.frame_stride == 0 || !values.is_some_and(|values| (1..=MAX_VALUES).contains(&values)) {
            let what = "views, grid, dim or frame_stride is 0, or they give more tokens than a clip can have";
            return Err(Error::data("broken_metadata", what).at(&path));
        }
        Ok(Some(Self { folder, info }))
    }

    /// What `info.json` says.
    pub fn info(&self) -> &GeometryInfo {
        &self.info
    }

    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Tokens of one cached frame, all source views together.
    pub fn tokens_per_frame(&self) -> usize {
        self.info.views.len() * self.info.grid[0] * self.info.grid[1]
    }

    /// Refuses a cache that the recipe's branch was not sized for (`geometry_mismatch`).
    pub fn check(&self, config: &GeometryConfig) -> Result<()> {
        let pairs = [
            ("token_dim", config.token_dim.to_string(), self.info.dim.to_string()),
            ("grid", format!("{:?}", config.grid), format!("{:?}", self.info.grid)),
            ("source_views", config.source_views.to_string(), self.info.views.len().to_string()),
        ];
        for (field, wanted, cached) in pairs {
            if wanted != cached {
                let what = format!("model.geometry.{field} is {wanted}, the token cache has {cached}");
                return Err(Error::refused("geometry_mismatch", what)
                    .at(self.folder.join("info.json"))
                    .hint("correct the recipe, or use the cache it was written for"));
            }
        }
        Ok(())
    }

    /// The token file of an episode.
    pub fn file(&self, episode: usize) -> PathBuf {
        self.folder.join(format!("chunk-{:03}/episode_{episode:06}.safetensors", episode / CHUNK))
    }

    /// Tokens of the clip that starts at source frame `start`: [tokens_per_frame, dim].
    ///
    /// Only the row of exactly that frame is used: nothing of a later frame may enter.
    ///
    /// # Errors
    /// `token_missing` (no file, no such frame, or a row of another frame), `lfs_pointer`, `not_openable`, `token_shape`,
    /// `token_nonfinite`.
    pub fn load(&self, episode: usize, start: usize) -> Result<Vec<f32>> {
        self.open_file(episode)?.row(start)
    }

    /// Reads an episode's file, for more than one of its rows.
    ///
    /// # Errors
    /// `token_missing`, `lfs_pointer`, `not_openable`.
    pub(super) fn open_file(&self, episode: usize) -> Result<TokenFile<'_>> {
        let path = self.file(episode);
        let bytes = std::fs::read(&path).map_err(|error| match error.kind() {
            ErrorKind::NotFound => Error::data("token_missing", "file of geometry tokens is missing").at(&path),
            _ => Error::data("not_openable", format!("geometry tokens cannot be read: {error}")).at(&path),
        })?;
        if is_lfs_pointer(&bytes) {
            return Err(lfs_pointer(&path));
        }
        Ok(TokenFile { cache: self, path, bytes })
    }
}

/// The geometry tokens of one episode.
pub(super) struct TokenFile<'a> {
    cache: &'a GeometryCache,
    path: PathBuf,
    bytes: Vec<u8>,
}

impl TokenFile<'_> {
    /// Frames that the file says it has, in its order.
    ///
    /// # Errors
    /// `not_openable`, `token_shape`.
    pub fn frames(&self) -> Result<Vec<usize>> {
        let broken = |error: safetensors::SafeTensorError| {
            Error::data("not_openable", format!("geometry tokens cannot be read: {error}")).at(&self.path)
        };
        let tensors = SafeTensors::deserialize(&self.bytes).map_err(broken)?;
        let frames = tensors.tensor("frames").map_err(broken)?;
        let number = |bytes: &[u8; 8]| usize::try_from(i64::from_le_bytes(*bytes)).ok();
        let frames: Option<Vec<usize>> = match frames.dtype() {
            Dtype::I64 => frames.data().as_chunks().0.iter().map(number).collect(),
            _ => None,
        };
        frames.ok_or_else(|| Error::data("token_shape", "frames are not counted from 0 in I64").at(&self.path))
    }

    /// SHA-256 of the whole file.
    pub fn sha256(&self) -> String {
        super::identity::sha256_hex(&self.bytes)
    }

    /// As [`GeometryCache::load`].
    pub fn row(&self, start: usize) -> Result<Vec<f32>> {
        let Self { cache, path, bytes } = self;
        let broken = |error: safetensors::SafeTensorError| {
            Error::data("not_openable", format!("geometry tokens cannot be read: {error}")).at(path)
        };
        let tensors = SafeTensors::deserialize(bytes).map_err(broken)?;
        let tokens = tensors.tensor("tokens").map_err(broken)?;
        let frames = tensors.tensor("frames").map_err(broken)?;

        let per_frame = [cache.tokens_per_frame(), cache.info.dim];
        let rows = frames.shape().first().copied().unwrap_or(0);
        if frames.dtype() != Dtype::I64
            || frames.shape().len() != 1
            || tokens.dtype() != Dtype::BF16
            || tokens.shape() != [rows, per_frame[0], per_frame[1]]
        {
            let what = format!(
                "geometry tokens are {:?} {:?} for frames {:?} {:?}, expected BF16 [n, {}, {}] for I64 [n]",
                tokens.dtype(),
                tokens.shape(),
                frames.dtype(),
                frames.shape(),
                per_frame[0],
                per_frame[1]
            );
            return Err(Error::data("token_shape", what).at(path));
        }

        let missing = |what: String| Error::data("token_missing", what).at(path);
        if !start.is_multiple_of(cache.info.frame_stride) {
            let stride = cache.info.frame_stride;
            return Err(missing(format!("tokens exist for every {stride}th frame, not for frame {start}"))
                .hint("set data.clip_stride to a multiple of the cache's frame_stride"));
        }
        let row = start / cache.info.frame_stride;
        let cached = frames
            .data()
            .chunks_exact(8)
            .nth(row)
            .map(|bytes| bytes.iter().rev().fold(0_i64, |value, byte| value << 8 | i64::from(*byte)));
        match cached {
            None => return Err(missing(format!("no tokens for frame {start}, the file has {rows} rows"))),
            Some(frame) if frame != start as i64 => {
                return Err(missing(format!("row {row} has the tokens of frame {frame}, not of frame {start}")));
            }
            Some(_) => {}
        }
        let row_bytes = per_frame[0] * per_frame[1] * 2;
        let values: Vec<f32> = tokens.data()[row * row_bytes..(row + 1) * row_bytes]
            .chunks_exact(2)
            .map(|pair| bf16::from_le_bytes([pair[0], pair[1]]).to_f32())
            .collect();
        // A branch that starts at zero does not hide an infinity: 0 x inf is NaN.
        if let Some(at) = values.iter().position(|value| !value.is_finite()) {
            let what = format!("token {} of frame {start} has the value {}", at / per_frame[1], values[at]);
            return Err(Error::data("token_nonfinite", what).at(path).hint("make the token cache again"));
        }
        Ok(values)
    }
}
