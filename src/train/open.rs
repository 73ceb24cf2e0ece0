//! A run's dataset, codec, text and cache, opened the same way for whoever trains or measures.

use super::lingbot::{EpisodeStore, LingbotTask, UNDECODED};
use super::task::Task;
use super::xwam::XwamTask;
use super::xwam::batches::ClipStore;
use crate::Result;
use crate::codec::{self, Extent, LatentCache, LatentCodec};
use crate::config::{CodecConfig, LatentSource, LingbotRecipe, Recipe, XwamRecipe};
use crate::data::{Dataset, EpisodeSet, Progress, TextTable};
use crate::runlog::Phase;
use std::path::Path;

/// Hears how opening comes along; an error of any of these ends it.
pub trait Opening {
    /// Something short begins.
    fn begin(&mut self, phase: Phase) -> Result<()>;

    /// Something that people should know and that stops nothing.
    fn warn(&mut self, text: String) -> Result<()>;

    /// Does something long and shows how far it has come.
    fn watch<T: Send>(&mut self, phase: Phase, work: impl FnOnce(Progress<'_>) -> Result<T> + Send) -> Result<T>;
}

/// The family's part of a run, its data opened. Latents are looked up and stored in the folder `cache`.
pub(super) fn open(recipe: &Recipe, cache: &Path, opening: &mut impl Opening) -> Result<Box<dyn Task>> {
    match recipe {
        Recipe::Xwam(recipe) => Ok(Box::new(XwamTask::new(recipe, clips(recipe, cache, opening)?))),
        Recipe::Lingbot(recipe) => Ok(Box::new(LingbotTask::new(recipe, episodes(recipe, cache, opening)?)?)),
    }
}

/// Dataset, codec, text and cache of X-WAM.
pub(super) fn clips(recipe: &XwamRecipe, cache: &Path, opening: &mut impl Opening) -> Result<ClipStore> {
    opening.begin(Phase::LoadingData)?;
    let dataset = Dataset::open(&recipe.data, &recipe.model)?;
    let text = TextTable::new(&recipe.text, recipe.model.text_len, recipe.model.text_dim, &dataset.prompts())?;
    // The codec asks for this key, which the dataset remembers in its parts: hashing shows under its own name.
    opening.watch(Phase::LoadingData, |progress| dataset.training_key(progress))?;
    let codec = opening.watch(Phase::FittingCodec, |progress| codec::open(&recipe.codec, &dataset, progress))?;
    let (height, width) = dataset.picture_size();
    let extent = Extent { frames: recipe.data.frames, height, width }.latent()?;
    let cache = LatentCache::open(cache)?;
    Ok(ClipStore { dataset, codec, cache, text, extent })
}

fn episodes(recipe: &LingbotRecipe, cache: &Path, opening: &mut impl Opening) -> Result<EpisodeStore> {
    opening.begin(Phase::LoadingData)?;
    let set = EpisodeSet::open(&recipe.data, &recipe.model, &recipe.text)?;
    for left_out in set.excluded() {
        opening.warn(left_out.to_string())?;
    }
    let codec: Option<Box<dyn LatentCodec>> = match (&recipe.codec, recipe.data.latents) {
        // Published latents are the VAE's: what trains on them does not need to decode them.
        (CodecConfig::WanVae { .. }, LatentSource::Official) => {
            opening.warn(UNDECODED.to_owned())?;
            None
        }
        (config, _) => {
            opening.watch(Phase::LoadingData, |progress| set.training_key(progress))?;
            Some(opening.watch(Phase::FittingCodec, |progress| codec::open(config, &set, progress))?)
        }
    };
    Ok(EpisodeStore { set, codec, cache: LatentCache::open(cache)? })
}
