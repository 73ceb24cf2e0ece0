use super::EpisodeStore;
use crate::Result;
use crate::config::LingbotRecipe;
use crate::data::episodes::{EpisodeId, EpisodeSet};
use crate::model::LingbotModel;
use crate::train::task::{GoOn, Point};
use std::path::Path;
#[derive(Clone, Debug)]
pub struct ChunkId {
    pub episode: EpisodeId,
    pub chunk: usize,
}
impl std::fmt::Display for ChunkId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}#{}", self.episode, self.chunk)
    }
}
pub fn measured_chunks(_: &EpisodeSet, _: &LingbotRecipe) -> Result<Vec<ChunkId>> {
    Ok(vec![])
}
pub struct Validator;
impl Validator {
    pub fn new(
        _: &EpisodeStore,
        _: &LingbotRecipe,
        _: &[ChunkId],
        _: &mut dyn FnMut(u64, u64) -> Result<()>,
    ) -> Result<Self> {
        Ok(Self)
    }
    pub fn measure(
        &self,
        _: &EpisodeStore,
        _: &LingbotModel,
        _: &LingbotRecipe,
        _: u64,
        _: &Path,
        _: GoOn<'_>,
    ) -> Result<Option<Point>> {
        Ok(None)
    }
}
