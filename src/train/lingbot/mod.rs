//! LingBot-VA's part of the training loop: whole episodes, packed; chunks predicted from clean history.

pub mod flow;
mod store;

pub use store::EpisodeStore;
