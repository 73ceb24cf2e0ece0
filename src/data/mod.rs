//! Reading robot episodes: LeRobot metadata, parquet columns, video windows, geometry tokens -> clips.
//!
//! There are two doors: [`Dataset`] knows every clip of an X-WAM recipe and [`Dataset::load`]s one; [`EpisodeSet`] does
//! the same for the whole episodes of a LingBot-VA recipe. The other modules each read one kind of file and know
//! nothing of recipes.

mod clips;
pub mod columns;
pub mod episodes;
pub mod geometry;
mod identity;
pub mod info;
pub mod lerobot;
mod robot;
mod rows;
mod statistics;
mod text;
pub mod token_check;
pub mod validate;
pub mod video;
mod views;

pub use clips::{ClipId, ClipSample, Dataset};
pub use episodes::{EpisodeId, EpisodeSample, EpisodeSet};
pub use identity::sha256_hex;
pub use statistics::{Range, Statistics};
pub use text::TextTable;
pub use views::ViewFrames;

/// Called with (done, total) while something long goes on; from any thread. A total of 0 says that the work waits for
/// another process. An error ends the work with that error: this is how a stop is heard in the middle of it.
pub type Progress<'a> = &'a (dyn Fn(u64, u64) -> crate::Result<()> + Sync);
