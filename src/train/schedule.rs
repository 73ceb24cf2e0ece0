//! The learning rate: linear warm-up, then constant or half a cosine to zero (X-WAM's scheduler). A pure function of
//! the step, so a resume continues it.

use crate::config::{Decay, TrainConfig};

/// Rate of the update that completes step `step` (the first is 1).
///
/// With w = `warmup_steps` and n = `steps`: lr min(1, step / w), times (1 + cos(pi (step - w) / (n - w))) / 2 after
/// warm-up for `cosine`. The last update has a rate of zero then, as in the public recipe's scheduler.
pub fn learning_rate(config: &TrainConfig, step: u64) -> f64 {
    let warmup = config.warmup_steps;
    if step < warmup {
        return config.lr * step as f64 / warmup as f64;
    }
    match config.decay {
        Decay::Constant => config.lr,
        Decay::Cosine => {
            let share = (step - warmup) as f64 / config.steps.saturating_sub(warmup).max(1) as f64;
            config.lr * (1.0 + (std::f64::consts::PI * share.min(1.0)).cos()) / 2.0
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> TrainConfig {
        let text = "{seed: 1, steps: 8, batch_size: 1, accumulate: 1, lr: 0.5, warmup_steps: 4, decay: constant, \
                    weight_decay: 0, betas: [0.9, 0.999], adam_eps: 1e-8, clip_norm: 1, save_every: 5, keep_last: 2, \
                    keep_every: 0, recompute: false}";
        serde_yaml::from_str(text).unwrap()
    }

    #[test]
    fn warm_up_ends_at_the_full_rate_and_stays() {
        let rates: Vec<f64> = (1..=6).map(|step| learning_rate(&config(), step)).collect();
        assert_eq!(rates, [0.125, 0.25, 0.375, 0.5, 0.5, 0.5]);
        assert_eq!(learning_rate(&TrainConfig { warmup_steps: 0, ..config() }, 1), 0.5);
    }

    #[test]
    fn cosine_goes_from_the_full_rate_to_zero() {
        let config = TrainConfig { decay: Decay::Cosine, ..config() };
        let rates: Vec<f64> = (4..=9).map(|step| learning_rate(&config, step)).collect();
        let half = 0.5 * (1.0 + std::f64::consts::FRAC_1_SQRT_2) / 2.0;
        for (rate, expected) in rates.iter().zip([0.5, half, 0.25, 0.5 - half, 0.0, 0.0]) {
            assert!((rate - expected).abs() < 1e-15, "{rates:?}");
        }
    }
}
