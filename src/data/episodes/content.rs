//! What the samples of a recipe depend on, by content: keys for caches and codecs, and the identity of a run's data.

use rayon::prelude::*;
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};

use super::index::Sample;
use super::load::video_frames;
use super::{EpisodeId, EpisodeSet};
use crate::Result;
use crate::config::{EpisodeDataConfig, LatentSource};
use crate::data::Progress;
use crate::data::identity::{self, Part};

/// Where published datasets keep the embedding of the empty prompt.
pub(super) fn empty_text_file(config: &EpisodeDataConfig) -> PathBuf {
    config.dataset.join("empty_emb.pt")
}

impl EpisodeSet {
    /// SHA-256 over the samples and the contents of every file behind them.
    ///
    /// # Errors
    /// `file_missing` or `not_openable` with the first file that cannot be read; an error of `progress`.
    pub fn identity(&self, progress: Progress<'_>) -> Result<String> {
        let config = &self.config;
        self.hash_contents(self.index.samples.iter(), progress)?;
        let mut records = format!(
            "episode index 1\nviews {:?}\ntile {:?} latents {:?} stride {} sample {:?}\nactions {:?}\n",
            config.views, config.tile, config.latents, config.frame_stride, config.sample, config.actions
        );
        let mut parts = Vec::new();
        let mut part = |path: PathBuf| {
            let name = path.strip_prefix(&config.dataset).unwrap_or(&path).to_string_lossy().into_owned();
            parts.push(Part { name, path, optional: false });
        };
        if self.text_in_files {
            part(empty_text_file(config));
        }
        let mut last = None;
        for sample in &self.index.samples {
            let held_out = self.validation.binary_search(&sample.id).is_ok();
            let side = if held_out { "validation" } else { "train" };
            let (start, end, prompt, contents) = (sample.start, sample.end, &sample.prompt, self.contents(sample)?);
            records.push_str(&format!("{side} {} {start} {end} {prompt:?} {contents}\n", sample.id));
            let episode = Some((sample.dataset, sample.id.episode));
            if last != episode {
                part(self.index.datasets[sample.dataset].data_file(sample.id.episode)?);
                last = episode;
            }
        }
        identity::hash(&records, &parts, progress)
    }

    /// SHA-256 over the training samples and all that their pictures depend on, as [`crate::data::Dataset`] has it:
    /// samples that happen to be the clips of an X-WAM recipe, from the same videos, have the same key.
    ///
    /// `progress` runs over the videos that were not hashed yet.
    ///
    /// # Errors
    /// `codec_without_videos` for published latents; `file_missing`, `not_openable`; an error of `progress`.
    pub fn training_key(&self, progress: Progress<'_>) -> Result<String> {
        self.videos_needed()?;
        let train: Vec<&Sample> = self.train.iter().map(|id| self.index.sample(*id)).collect::<Result<_>>()?;
        self.hash_contents(train.iter().copied(), progress)?;
        let mut keys = Vec::with_capacity(train.len());
        for sample in train {
            let window = EpisodeId { segment: None, ..sample.id };
            keys.push((format!("{window}@{}", sample.start), self.picture_key(sample)?));
        }
        Ok(identity::training_key(keys))
    }

    /// SHA-256 over the contents of a sample's videos and the frames taken.
    pub(super) fn picture_key(&self, sample: &Sample) -> Result<String> {
        let window = (sample.start, video_frames(sample.frames), self.config.frame_stride);
        Ok(identity::picture_key(self.contents(sample)?, window))
    }

    /// SHA-256 over the contents of the sample's videos or latent files, a view after the other.
    ///
    /// A file is hashed once in the life of this value, so a file that changes meanwhile is not seen.
    pub(super) fn contents(&self, sample: &Sample) -> Result<&str> {
        let slot = &self.index.contents[sample.contents];
        if let Some(hash) = slot.get() {
            return Ok(hash);
        }
        let mut parts = Vec::new();
        for view in &self.config.views {
            let path = match self.config.latents {
                LatentSource::Videos => self.index.datasets[sample.dataset].video_file(view, sample.id.episode)?,
                LatentSource::Official => self.index.latent_file(sample, view)?,
            };
            parts.push(Part { name: String::new(), path, optional: false });
        }
        let hash = identity::hash("", &parts, &|_, _| Ok(()))?;
        Ok(slot.get_or_init(|| hash))
    }

    /// Hashes what was not hashed yet, in parallel.
    fn hash_contents<'a>(&self, samples: impl Iterator<Item = &'a Sample>, progress: Progress<'_>) -> Result<()> {
        let mut seen = BTreeSet::new();
        let new: Vec<&Sample> = samples
            .filter(|sample| self.index.contents[sample.contents].get().is_none() && seen.insert(sample.contents))
            .collect();
        let begun = AtomicU64::new(0);
        let hashed: Vec<Result<()>> = new
            .par_iter()
            .map(|sample| {
                progress(begun.fetch_add(1, Ordering::Relaxed), new.len() as u64)?;
                self.contents(sample).map(drop)
            })
            .collect();
        hashed.into_iter().collect()
    }
}
