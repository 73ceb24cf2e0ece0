//! Whole episodes, or the segments of their `action_config`: what the LingBot-VA family trains on.
//!
//! [`EpisodeSet`] is the door: it knows every sample of a recipe from metadata alone and [`EpisodeSet::load`]s one:
//! the latents of all views in one tile, the actions that lead from frame to frame, and the text. Latents come from
//! the files published with a dataset, or from its videos through the recipe's codec.

mod actions;
mod check;
mod content;
mod index;
mod latent_file;
mod load;
mod pictures;
pub mod tile;
mod torch_file;

pub use actions::Quantiles;
pub use index::{EpisodeId, Excluded};
pub use load::EpisodeSample;

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::{Mutex, Weak};

use super::lerobot::Metadata;
use super::text::TextTable;
use super::views;
use crate::codec::SPACE_STRIDE;
use crate::config::{EpisodeDataConfig, LatentSource, LingbotModelConfig, TextConfig};
use crate::{Error, Result};
use index::{Index, Sample};
use latent_file::LatentFile;
use tile::{Cells, Layout, Region};

/// Video frames behind one latent frame, after the first; so many strides of source frames have an action each.
const VIDEO_FRAMES: usize = crate::codec::TIME_STRIDE;

/// The samples of a LingBot-VA recipe. Cheap to share between threads; files are opened for each sample.
pub struct EpisodeSet {
    config: EpisodeDataConfig,
    action_dim: usize,
    text_len: usize,
    text_dim: usize,
    /// Whether a sample's text comes with its latent file; the table then has the empty prompt alone.
    text_in_files: bool,
    text: TextTable,
    index: Index,
    layout: Layout,
    train: Vec<EpisodeId>,
    validation: Vec<EpisodeId>,
    /// Texts of latent files that somebody holds, by their hash: samples with one text share it.
    live: Mutex<HashMap<String, Weak<[f32]>>>,
}

impl fmt::Debug for EpisodeSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EpisodeSet")
            .field("dataset", &self.config.dataset)
            .field("train", &self.train.len())
            .field("validation", &self.validation.len())
            .field("excluded", &self.index.excluded.len())
            .finish_non_exhaustive()
    }
}

impl EpisodeSet {
    /// Reads the metadata of every dataset under `config.dataset` and lists latent files. Of published latents, the
    /// files of the first sample are opened, since only they say how large the tile is; no video or parquet is.
    ///
    /// # Errors
    /// `dataset_missing`, `missing_view`, `unknown_episode`, `unknown_task`, `empty_split`, `tile_size`; those of
    /// [`Metadata::open`] and [`TextTable::new`]; of published latents also those of their files.
    pub fn open(config: &EpisodeDataConfig, model: &LingbotModelConfig, text: &TextConfig) -> Result<Self> {
        if !config.views.contains(&config.wrist_view) {
            return Err(Error::refused("missing_view", format!("{} is none of data.views", config.wrist_view))
                .in_place("data.wrist_view"));
        }
        let index = Index::read(config)?;
        views::check_held_out(&index.datasets, &config.validation_episodes)?;
        let held_out: HashSet<usize> = config.validation_episodes.iter().copied().collect();
        let (validation, train): (Vec<EpisodeId>, Vec<EpisodeId>) =
            index.samples.iter().map(|sample| sample.id).partition(|id| held_out.contains(&id.episode));
        for (side, ids) in [("training", &train), ("validation", &validation)] {
            if ids.is_empty() {
                let what = format!("no sample is on the {side} side");
                let hint = match index.excluded.first() {
                    None => "move episodes to the other side".to_owned(),
                    Some(first) => format!("{} samples are left out: {first}", index.excluded.len()),
                };
                return Err(Error::refused("empty_split", what).in_place("data.validation_episodes").hint(hint));
            }
        }
        let layout = match config.latents {
            LatentSource::Videos => video_layout(&index.datasets, config)?,
            LatentSource::Official => file_layout(&index, config)?,
        };
        let ((height, width), [_, patch_height, patch_width]) = (layout.size(), model.patch_size);
        if !height.is_multiple_of(patch_height) || !width.is_multiple_of(patch_width) {
            let what =
                format!("a tile of {height}x{width} latent cells has no whole {patch_height}x{patch_width} patches");
            return Err(Error::refused("tile_size", what)
                .in_place("data.tile")
                .hint("the sides of a view in pixels must be multiples of 32"));
        }
        let text_in_files = *text == TextConfig::LatentFiles && config.latents == LatentSource::Official;
        let (text_len, text_dim) = (model.text_len, model.text_dim);
        let text = if text_in_files {
            let path = content::empty_text_file(config);
            TextTable::of_empty(latent_file::empty_text(&path, text_len, text_dim)?, text_len, text_dim)
        } else {
            TextTable::new(text, text_len, text_dim, &prompts(&index.samples))?
        };
        Ok(Self {
            config: config.clone(),
            action_dim: model.action_dim,
            text_len,
            text_dim,
            text_in_files,
            text,
            index,
            layout,
            train,
            validation,
            live: Mutex::new(HashMap::new()),
        })
    }

    /// Samples to train on, in order.
    pub fn train(&self) -> &[EpisodeId] {
        &self.train
    }

    /// Held-out samples, in order.
    pub fn validation(&self) -> &[EpisodeId] {
        &self.validation
    }

    /// Samples that are not there, and why.
    pub fn excluded(&self) -> &[Excluded] {
        &self.index.excluded
    }

    /// The recipe's part that this set was opened with.
    pub fn config(&self) -> &EpisodeDataConfig {
        &self.config
    }

    /// What the datasets say about themselves, in the order of their paths.
    pub fn datasets(&self) -> &[Metadata] {
        &self.index.datasets
    }

    /// Latent frames F of a sample; 0 for one that does not exist.
    pub fn frames(&self, id: EpisodeId) -> usize {
        self.index.sample(id).map_or(0, |sample| sample.frames)
    }

    /// (height, width) of the tile in latent cells.
    pub fn grid(&self) -> Cells {
        self.layout.size()
    }

    /// Place of a view in the tile; `None` if the recipe has no such view.
    pub fn region(&self, view: usize) -> Option<Region> {
        self.layout.region(view)
    }

    /// Place of the wrist view among `config().views`.
    pub fn wrist_view(&self) -> usize {
        self.config.views.iter().position(|view| *view == self.config.wrist_view).unwrap_or(0)
    }

    /// Actions n of one latent frame: one a source frame.
    pub fn actions_per_frame(&self) -> usize {
        VIDEO_FRAMES * self.config.frame_stride
    }

    /// Text of a sample; empty for one that does not exist.
    pub fn prompt(&self, id: EpisodeId) -> &str {
        self.index.sample(id).map_or("", |sample| &sample.prompt)
    }

    /// The distinct texts of all samples, sorted.
    pub fn prompts(&self) -> Vec<&str> {
        prompts(&self.index.samples)
    }

    /// Embeddings of all prompts, or of the empty one alone if the others come with the latent files.
    pub fn text(&self) -> &TextTable {
        &self.text
    }
}

fn prompts(samples: &[Sample]) -> Vec<&str> {
    let mut prompts: Vec<&str> = samples.iter().map(|sample| sample.prompt.as_str()).collect();
    prompts.sort_unstable();
    prompts.dedup();
    prompts
}

/// The tile of the sizes that the datasets state for their videos, which must be the same in all of them.
fn video_layout(datasets: &[Metadata], config: &EpisodeDataConfig) -> Result<Layout> {
    let mut found: Option<Layout> = None;
    for metadata in datasets {
        let mut cells = Vec::new();
        for view in &config.views {
            let (height, width) = views::stated_size(metadata, view)?;
            if !height.is_multiple_of(SPACE_STRIDE) || !width.is_multiple_of(SPACE_STRIDE) {
                let what = format!("{view} is {width}x{height}, sides must be multiples of {SPACE_STRIDE}");
                return Err(Error::data("tile_size", what).at(metadata.root.join("meta/info.json")));
            }
            cells.push((view.as_str(), (height / SPACE_STRIDE, width / SPACE_STRIDE)));
        }
        let layout = Layout::new(config.tile, &cells)?;
        match &found {
            Some(first) if *first != layout => {
                return Err(Error::data("tile_size", "views have other sizes than in the first dataset")
                    .at(metadata.root.join("meta/info.json"))
                    .hint("train on datasets of one size"));
            }
            _ => found = Some(layout),
        }
    }
    found.ok_or_else(|| Error::crash("an index without a dataset"))
}

/// The tile of the first sample's latent files.
fn file_layout(index: &Index, config: &EpisodeDataConfig) -> Result<Layout> {
    let first = index.samples.first().ok_or_else(|| Error::crash("a split without a sample"))?;
    let mut cells = Vec::new();
    for view in &config.views {
        let path = index.latent_file(first, view)?;
        cells.push((view.as_str(), LatentFile::open(&path)?.cells));
    }
    Layout::new(config.tile, &cells)
}
