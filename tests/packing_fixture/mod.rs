//! Lengths and recipe parts like those of the published packed training, for its tests and its bench.
#![allow(dead_code)] // each includer uses a part

use lbva_tui::config::{
    Decay, LingbotFlowConfig, LingbotModelConfig, LossMean, PackingConfig, PackingKind, TrainConfig,
};
use lbva_tui::pack::sequence::FrameTokens;
use lbva_tui::random::{Draw, Purpose};

/// Latent frames of episodes: a normal of mean 232.5 and standard deviation 58, rounded, outside 103..=362 drawn again.
///
/// Range and padding are what is known of the real ones: random batches of 4 padded to 8 waste 20.3 %; pools of 50 x 4,
/// sorted and padded to 8, were simulated at 2.6 % and measured at 2.3 %. These parameters give 20.2 % and 2.45 %.
pub fn lengths(count: usize, seed: u64) -> Vec<usize> {
    let mut draw = Draw::new(seed, Purpose::Initialise, 0, "lengths");
    let mut lengths = Vec::with_capacity(count);
    while lengths.len() < count {
        let frames = (232.5 + 58.0 * draw.normal()).round();
        if (103.0..=362.0).contains(&frames) {
            lengths.push(frames as usize);
        }
    }
    lengths
}

/// Two views of 64 x 32 pixels, say: 18 tokens a frame.
pub const FRAME: FrameTokens = FrameTokens { grid: [4, 4], actions: 2 };

/// 8 ranks x 4 episodes x 4 = 128.
pub fn packing() -> PackingConfig {
    PackingConfig {
        kind: PackingKind::Budget,
        ranks: 8,
        pad_multiple: 8,
        pool_factor: 50,
        token_budget: 81_920,
        alignment: 128,
    }
}

/// 8 ranks x 4 episodes x 4 = 128.
pub fn train() -> TrainConfig {
    TrainConfig {
        seed: 7,
        steps: 1500,
        batch_size: 4,
        accumulate: 4,
        lr: 3e-5,
        warmup_steps: 200,
        decay: Decay::Constant,
        weight_decay: 0.1,
        betas: [0.9, 0.95],
        adam_eps: 1e-8,
        clip_norm: 2.0,
        save_every: 100,
        keep_last: 2,
        keep_every: 0,
        resume_warmup: 50,
        recompute: true,
    }
}

/// The published flow.
pub fn flow() -> LingbotFlowConfig {
    LingbotFlowConfig {
        video_shift: 5.0,
        action_shift: 1.0,
        train_timesteps: 1000,
        history_noise: 0.5,
        chunk: [1, 4],
        window: [4, 64],
        loss_mean: LossMean::Episodes,
        text_dropout: 0.1,
    }
}

/// The published sizes.
pub fn model() -> LingbotModelConfig {
    LingbotModelConfig {
        dim: 3072,
        ffn_dim: 14336,
        num_heads: 24,
        num_layers: 30,
        in_dim: 48,
        out_dim: 48,
        patch_size: [1, 2, 2],
        action_dim: 30,
        freq_dim: 256,
        text_dim: 4096,
        text_len: 512,
        eps: 1e-6,
    }
}
