//! Reading one sample: latents of all views in one tile, actions, text.

use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fmt;
use std::sync::{Arc, PoisonError};

use super::actions::{self, Rows};
use super::index::Sample;
use super::latent_file::LatentFile;
use super::tile::{self, Region};
use super::{EpisodeId, EpisodeSet, VIDEO_FRAMES};
use crate::codec::{CHANNELS, Extent, LatentCache, LatentCodec, SPACE_STRIDE, encode_pieces};
use crate::config::LatentSource;
use crate::data::columns::ColumnFile;
use crate::data::video::{Picture, VideoFile};
use crate::data::{rows, sha256_hex, views};
use crate::{Error, Result};

/// All that training or validation needs of one sample: F latent frames, A action channels, n actions a frame.
#[derive(Clone, PartialEq)]
pub struct EpisodeSample {
    pub id: EpisodeId,
    pub prompt: String,
    /// The text's real rows, [tokens * text_dim]; samples of one text share them.
    pub text: Arc<[f32]>,
    /// Latent frames F.
    pub frames: usize,
    /// [48, F, height, width] of the tile.
    pub latent: Vec<f32>,
    /// [A, F, n], normalised; an unused channel is zeros.
    pub actions: Vec<f32>,
    /// [A, F, n]: 1 where a channel is used, in the first frame too.
    pub action_mask: Vec<f32>,
}

impl fmt::Debug for EpisodeSample {
    /// Sizes, not a million numbers.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EpisodeSample")
            .field("id", &self.id)
            .field("prompt", &self.prompt)
            .field("frames", &self.frames)
            .finish_non_exhaustive()
    }
}

/// What latent files say beside their latents, in the cache.
#[derive(Serialize, Deserialize)]
struct Facts {
    /// First source frame that was encoded.
    first_frame: usize,
    /// SHA-256 of the text's real rows, under which they are cached, and their number.
    text: Option<(String, usize)>,
}

/// What latent files hold.
pub(super) struct Published {
    latent: Vec<f32>,
    pub first_frame: usize,
    /// Hash and rows; absent if the recipe takes its text from elsewhere.
    pub text: Option<(String, Arc<[f32]>)>,
}

impl EpisodeSet {
    /// Reads one sample. The codec is needed where latents come from videos. With a cache, latents are made once:
    /// videos are decoded and encoded, and published files are read, only if it does not have them.
    ///
    /// # Errors
    /// `unknown_episode`; `codec_missing`; those of videos and of the codec; of published files `latent_corrupt`,
    /// `pickle_refused`, `latent_size`, `latent_frames`, `latent_shape`, `latent_stride`, `latent_nonfinite`,
    /// `text_mismatch`, `text_nonfinite`; of actions `action_rows`, `action_nonfinite`, `action_width`,
    /// `action_quaternion`, `action_channel`. The message names the sample.
    pub fn load(
        &self,
        id: EpisodeId,
        codec: Option<&dyn LatentCodec>,
        cache: Option<&LatentCache>,
    ) -> Result<EpisodeSample> {
        let sample = self.index.sample(id)?;
        self.read(sample, codec, cache).map_err(|error| name(id, error))
    }

    /// Are the sample's latents cached? They may still turn out damaged when read.
    ///
    /// # Errors
    /// `unknown_episode`, `codec_missing`; `file_missing` or `not_openable` of the files that hold its pictures.
    pub fn is_cached(&self, id: EpisodeId, codec: Option<&dyn LatentCodec>, cache: &LatentCache) -> Result<bool> {
        let sample = self.index.sample(id)?;
        let key = match self.config.latents {
            LatentSource::Videos => self.video_key(sample, needed(codec)?),
            LatentSource::Official => self.file_key(sample),
        };
        Ok(cache.has(&key.map_err(|error| name(id, error))?))
    }

    /// What is wrong with the files behind the samples, one error a file at most: actions are read, videos and latent
    /// files are opened and compared with the metadata. Decodes nothing and reads no latents.
    pub fn probe(&self) -> Vec<Error> {
        let mut videos = BTreeSet::new();
        let samples: Vec<(&Sample, bool)> =
            self.index.samples.iter().map(|sample| (sample, videos.insert(sample.contents))).collect();
        let faults = |(sample, first_of_its_files): (&Sample, bool)| -> Vec<Error> {
            let views = 0..self.config.views.len();
            let open = |view| match self.config.latents {
                LatentSource::Videos => self.pictures(sample, view, 0..0).map(drop),
                LatentSource::Official => self.open_file(sample, view).map(drop),
            };
            let views = views.filter(|_| first_of_its_files).filter_map(|view| open(view).err());
            let actions = self.first_frame(sample).and_then(|first| self.actions(sample, first));
            // What cannot be opened was said.
            let actions =
                actions.err().filter(|error| error.code.starts_with("action") || error.place.ends_with("parquet"));
            views.chain(actions).map(|error| name(sample.id, error)).collect()
        };
        samples.into_par_iter().flat_map_iter(faults).collect()
    }

    fn read(
        &self,
        sample: &Sample,
        codec: Option<&dyn LatentCodec>,
        cache: Option<&LatentCache>,
    ) -> Result<EpisodeSample> {
        let (latent, first_frame, text) = match self.config.latents {
            LatentSource::Videos => (self.video_latents(sample, needed(codec)?, cache)?, sample.start, None),
            LatentSource::Official => {
                let published = self.published(sample, cache)?;
                (published.latent, published.first_frame, published.text.map(|(_, rows)| rows))
            }
        };
        let text = match text {
            Some(rows) => rows,
            None => self.text.rows(&sample.prompt)?.clone(),
        };
        let (actions, action_mask) = self.actions(sample, first_frame)?;
        Ok(EpisodeSample {
            id: sample.id,
            prompt: sample.prompt.clone(),
            text,
            frames: sample.frames,
            latent,
            actions,
            action_mask,
        })
    }

    /// Actions and mask, both [A, F, n].
    fn actions(&self, sample: &Sample, first_frame: usize) -> Result<(Vec<f32>, Vec<f32>)> {
        self.channels(sample, &self.action_rows(sample, first_frame)?)
    }

    pub(super) fn channels(&self, sample: &Sample, rows: &Rows) -> Result<(Vec<f32>, Vec<f32>)> {
        actions::channels(rows, &self.config.actions, self.action_dim, sample.frames, self.actions_per_frame())
    }

    /// The sample's action rows from `first_frame` on, made relative where the robot asks for it.
    pub(super) fn action_rows(&self, sample: &Sample, first_frame: usize) -> Result<Rows> {
        let metadata = &self.index.datasets[sample.dataset];
        let path = metadata.data_file(sample.id.episode)?;
        let file = ColumnFile::open(&path)?;
        let column = file.read("action").map_err(|error| rows::missing(error, "action_missing"))?;
        let count = column.values.len() / column.width.max(1);
        if count < sample.end || first_frame < sample.start {
            let (start, end) = (sample.start, sample.end);
            let what = format!("action has {count} rows, the sample takes {start} to {end} from {first_frame} on");
            return Err(Error::data("action_rows", what).at(&path).hint("copy the dataset again from its source"));
        }
        let length = metadata.episode(sample.id.episode).map_or(count, |record| record.length);
        rows::check(&file, &path, length, metadata.fps)?;
        let values = column.values.get(first_frame * column.width..sample.end * column.width).unwrap_or_default();
        Rows { width: column.width, values: values.to_vec() }
            .prepare(&self.config.actions, self.config.tile, first_frame)
            .map_err(|error| if error.place.is_empty() { error.at(&path) } else { error })
    }

    /// The first source frame that was encoded: latent files may begin later than their sample.
    pub(super) fn first_frame(&self, sample: &Sample) -> Result<usize> {
        match (self.config.latents, self.config.views.first()) {
            (LatentSource::Official, Some(view)) => {
                Ok(LatentFile::open(&self.index.latent_file(sample, view)?)?.first_frame())
            }
            _ => Ok(sample.start),
        }
    }

    /// Numbers in the latents of a sample.
    fn latent_count(&self, sample: &Sample) -> usize {
        let (height, width) = self.layout.size();
        CHANNELS * sample.frames * height * width
    }

    /// Puts the latents [48, F, h, w] of all views, in their order, into one tile [48, F, H, W].
    fn tile(&self, sample: &Sample, views: impl Iterator<Item = Result<Vec<f32>>>) -> Result<Vec<f32>> {
        let mut latent = vec![0.0; self.latent_count(sample)];
        for (region, view) in self.layout.regions().iter().zip(views) {
            tile::place(&mut latent, self.layout.size(), *region, &view?);
        }
        Ok(latent)
    }

    /// Hash of all that decides a sample's latents, encoded from videos.
    fn video_key(&self, sample: &Sample, codec: &dyn LatentCodec) -> Result<String> {
        let (pictures, tile) = (self.picture_key(sample)?, self.config.tile);
        Ok(sha256_hex(format!("episode latents 1 {} {pictures} {tile:?}", codec.hash()).as_bytes()))
    }

    fn video_latents(&self, sample: &Sample, codec: &dyn LatentCodec, cache: Option<&LatentCache>) -> Result<Vec<f32>> {
        let encode = || {
            let views: Vec<Result<Vec<f32>>> = (0..self.config.views.len())
                .into_par_iter()
                .map(|view| self.encode_view(sample, codec, view))
                .collect();
            self.tile(sample, views.into_iter())
        };
        match cache {
            None => encode(),
            Some(cache) => {
                cache.get_or_make(sample.id, &self.video_key(sample, codec)?, self.latent_count(sample), encode)
            }
        }
    }

    /// [48, F, h, w] of one view. Its pictures are in memory as 8-bit YUV, and as f32 a few at a time.
    fn encode_view(&self, sample: &Sample, codec: &dyn LatentCodec, view: usize) -> Result<Vec<f32>> {
        let (pictures, extent) = self.pictures(sample, view, 0..video_frames(sample.frames))?;
        encode_pieces(codec, extent, |frames| Ok(to_video(&pictures[frames], extent)))
    }

    /// Frames of a view, counted in the sample's video (every `frame_stride`-th source frame from its first), and their
    /// extent in pixels.
    pub(super) fn pictures(
        &self,
        sample: &Sample,
        view: usize,
        frames: std::ops::Range<usize>,
    ) -> Result<(Vec<Picture>, Extent)> {
        let (mut video, (height, width)) = self.open_view(sample, view)?;
        let extent = Extent { frames: frames.len(), height, width };
        Ok((video.read_frames(&self.frame_numbers(sample, frames))?, extent))
    }

    /// The video of a view and its (height, width) in pixels.
    pub(super) fn open_view(&self, sample: &Sample, view: usize) -> Result<(VideoFile, (usize, usize))> {
        let region = self.view_region(view)?;
        let size = (region.height * SPACE_STRIDE, region.width * SPACE_STRIDE);
        let metadata = &self.index.datasets[sample.dataset];
        Ok((views::open(metadata, &self.config.views[view], sample.id.episode, size)?, size))
    }

    /// Source frames of frames that are counted in the sample's video.
    pub(super) fn frame_numbers(&self, sample: &Sample, frames: std::ops::Range<usize>) -> Vec<usize> {
        frames.map(|frame| sample.start + frame * self.config.frame_stride).collect()
    }

    /// Hash of all that decides what is taken from a sample's latent files.
    fn file_key(&self, sample: &Sample) -> Result<String> {
        let (contents, config) = (self.contents(sample)?, &self.config);
        let record = format!(
            "published latents 1 {contents} {:?} {:?} stride {} frames {} of {} to {} text {} {}",
            config.tile,
            self.layout,
            config.frame_stride,
            sample.frames,
            sample.start,
            sample.end,
            self.text_len,
            self.text_dim
        );
        Ok(sha256_hex(record.as_bytes()))
    }

    fn published(&self, sample: &Sample, cache: Option<&LatentCache>) -> Result<Published> {
        let Some(cache) = cache else { return self.read_files(sample) };
        let key = self.file_key(sample)?;
        let facts_key = sha256_hex(format!("{key} facts {}", self.text_in_files).as_bytes());
        match self.read_cached(sample, cache, &key, &facts_key) {
            Ok(Some(found)) => return Ok(found),
            Ok(None) => {}
            Err(error) => tracing::warn!("{}: {error}; the latent files are read again", sample.id),
        }
        let found = self.read_files(sample)?;
        let store = || {
            if let Some((hash, rows)) = &found.text
                && !cache.has(hash)
            {
                cache.put(hash, rows)?;
            }
            let text = found.text.as_ref().map(|(hash, rows)| (hash.clone(), rows.len()));
            let facts = serde_json::to_string(&Facts { first_frame: found.first_frame, text })
                .map_err(|error| Error::crash(format!("facts cannot be written: {error}")))?;
            cache.put_note(&facts_key, &facts)?;
            cache.put(&key, &found.latent)
        };
        if let Err(error) = store() {
            tracing::warn!("{}: {error}", sample.id);
        }
        Ok(found)
    }

    fn read_cached(
        &self,
        sample: &Sample,
        cache: &LatentCache,
        key: &str,
        facts_key: &str,
    ) -> Result<Option<Published>> {
        let Some(facts) = cache.note(facts_key)? else { return Ok(None) };
        let facts: Facts = serde_json::from_str(&facts)
            .map_err(|error| Error::data("cache_corrupt", format!("cached facts are broken: {error}")))?;
        let text = match facts.text {
            None => None,
            Some((hash, count)) => {
                let rows = match self.living(&hash) {
                    Some(rows) => rows,
                    None => match cache.get(&hash, count)? {
                        Some(rows) => self.share(&hash, rows),
                        None => return Ok(None),
                    },
                };
                Some((hash, rows))
            }
        };
        let latent = cache.get(key, self.latent_count(sample))?;
        Ok(latent.map(|latent| Published { latent, first_frame: facts.first_frame, text }))
    }

    /// Opens a view's latent file and compares it with the tile and the metadata.
    fn open_file(&self, sample: &Sample, view: usize) -> Result<LatentFile> {
        let region = self.view_region(view)?;
        let file = LatentFile::open(&self.index.latent_file(sample, &self.config.views[view])?)?;
        file.check((region.height, region.width), sample.frames, self.config.frame_stride)?;
        Ok(file)
    }

    fn view_region(&self, view: usize) -> Result<Region> {
        self.region(view).ok_or_else(|| Error::crash(format!("there is no view {view}")))
    }

    pub(super) fn read_files(&self, sample: &Sample) -> Result<Published> {
        let files = (0..self.config.views.len()).map(|view| self.open_file(sample, view));
        let mut files = files.collect::<Result<Vec<LatentFile>>>()?;
        let latent = self.tile(sample, files.iter_mut().map(LatentFile::latents))?;
        let first = files.first_mut().ok_or_else(|| Error::crash("a tile without a view"))?;
        let first_frame = first.first_frame();
        let text = match self.text_in_files {
            false => None,
            true => {
                let rows = first.text(self.text_len, self.text_dim)?;
                let bytes: Vec<u8> = rows.iter().flat_map(|value| value.to_le_bytes()).collect();
                let hash = sha256_hex(&bytes);
                let rows = self.share(&hash, rows);
                Some((hash, rows))
            }
        };
        Ok(Published { latent, first_frame, text })
    }

    fn living(&self, hash: &str) -> Option<Arc<[f32]>> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner).get(hash)?.upgrade()
    }

    /// One copy of a text for all that hold it.
    fn share(&self, hash: &str, rows: Vec<f32>) -> Arc<[f32]> {
        let mut live = self.live.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(rows) = live.get(hash).and_then(std::sync::Weak::upgrade) {
            return rows;
        }
        live.retain(|_, rows| rows.strong_count() > 0);
        let rows: Arc<[f32]> = rows.into();
        live.insert(hash.to_owned(), Arc::downgrade(&rows));
        rows
    }
}

/// Video frames of so many latent frames; those after them are dropped, as the VAE does.
pub(super) fn video_frames(latent_frames: usize) -> usize {
    (latent_frames.max(1) - 1) * VIDEO_FRAMES + 1
}

/// Pictures -> [3, T, height, width], `x / 127.5 - 1`.
pub(super) fn to_video(pictures: &[Picture], extent: Extent) -> Vec<f32> {
    let mut rgb = Vec::with_capacity(3 * pictures.len() * extent.height * extent.width);
    for picture in pictures {
        picture.append_rgb_planes(&mut rgb);
    }
    views::to_video(&rgb, extent.height * extent.width)
}

fn needed(codec: Option<&dyn LatentCodec>) -> Result<&dyn LatentCodec> {
    codec.ok_or_else(|| Error::refused("codec_missing", "latents of videos need a codec").in_place("data.latents"))
}

fn name(id: EpisodeId, error: Error) -> Error {
    Error { what: format!("{id}: {}", error.what), ..error }
}
