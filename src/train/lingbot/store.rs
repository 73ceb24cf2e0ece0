//! What training and validation of this family read from.

use crate::Result;
use crate::codec::{LatentCache, LatentCodec};
use crate::data::episodes::{EpisodeId, EpisodeSample, EpisodeSet};

/// Episodes with their latents, by way of the cache.
pub struct EpisodeStore {
    pub set: EpisodeSet,
    /// Absent if no codec of this version can decode the latents: they can be trained on, and not looked at.
    pub codec: Option<Box<dyn LatentCodec>>,
    pub cache: LatentCache,
}

impl EpisodeStore {
    /// Latents, actions and text of an episode.
    pub fn load(&self, id: EpisodeId) -> Result<EpisodeSample> {
        self.set.load(id, self.codec.as_deref(), Some(&self.cache))
    }

    /// Are the episode's latents cached?
    pub fn is_cached(&self, id: EpisodeId) -> Result<bool> {
        self.set.is_cached(id, self.codec.as_deref(), &self.cache)
    }
}
