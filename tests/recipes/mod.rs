//! Recipes that the tests read datasets with.
#![allow(dead_code)] // each test file uses its own part

use lbva_tui::config::{
    ActionConfig, DataConfig, EpisodeDataConfig, GeometryConfig, LatentSource, LingbotModelConfig, ModelConfig,
    RobotLayout, SampleUnit, Tile,
};
use std::path::{Path, PathBuf};

pub const WRIST: &str = "observation.images.eye_in_hand_rgb";

/// A path inside the repository.
pub fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

pub fn data(dataset: &Path, validation_episodes: &[usize]) -> DataConfig {
    DataConfig {
        dataset: dataset.to_owned(),
        views: ["observation.images.agentview_rgb", "observation.images.sideview_rgb", WRIST].map(String::from).into(),
        wrist_view: WRIST.into(),
        frames: 9,
        frame_skip: 4,
        clip_stride: 16,
        validation_episodes: validation_episodes.to_vec(),
        robot: RobotLayout { state_position: 7, state_quaternion_xyzw: 10, state_gripper: vec![14, 15], action: 0 },
    }
}

pub fn model(geometry: bool) -> ModelConfig {
    ModelConfig {
        dim: 96,
        ffn_dim: 192,
        num_heads: 4,
        num_layers: 2,
        in_dim: 48,
        out_dim: 48,
        patch_size: [1, 2, 2],
        num_views: 3,
        action_dim: 14,
        action_num: 4,
        proprio_dim: 16,
        freq_dim: 64,
        text_dim: 32,
        text_len: 16,
        eps: 1e-6,
        geometry: GeometryConfig {
            enabled: geometry,
            layers: vec![0],
            token_dim: 32,
            grid: [8, 8],
            source_views: 2,
            seed: 1,
        },
    }
}

/// Of LingBot-VA. Its sizes matter only where a sample's arrays are shaped.
pub fn episode_model() -> LingbotModelConfig {
    LingbotModelConfig {
        dim: 96,
        ffn_dim: 192,
        num_heads: 4,
        num_layers: 2,
        in_dim: 48,
        out_dim: 48,
        patch_size: [1, 2, 2],
        action_dim: 30,
        freq_dim: 64,
        text_dim: 4,
        text_len: 64,
        eps: 1e-6,
    }
}

/// These views of a dataset, the last one the wrist's, frame by frame from its videos.
pub fn episodes(dataset: &Path, views: &[&str], sample: SampleUnit) -> EpisodeDataConfig {
    EpisodeDataConfig {
        dataset: dataset.to_owned(),
        views: views.iter().map(|view| (*view).to_owned()).collect(),
        wrist_view: views.last().copied().unwrap_or_default().to_owned(),
        tile: Tile::Row,
        latents: LatentSource::Videos,
        frame_stride: 1,
        sample,
        validation_episodes: vec![1],
        actions: ActionConfig { channels: (0..7).collect(), q01: vec![-1.0; 7], q99: vec![1.0; 7] },
    }
}
