//! The learning rate: linear warm-up, then constant. A pure function of the step, so a resume continues it.

use crate::config::TrainConfig;

/// Rate of the update that completes step `step` (the first is 1): lr min(1, step / warmup).
pub fn learning_rate(config: &TrainConfig, step: u64) -> f64 {
    match config.warmup_steps {
        0 => config.lr,
        warmup => config.lr * (step as f64 / warmup as f64).min(1.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warm_up_ends_at_the_full_rate_and_stays() {
        let text = "{seed: 1, steps: 10, batch_size: 1, accumulate: 1, lr: 0.5, warmup_steps: 4, weight_decay: 0, \
                    betas: [0.9, 0.999], adam_eps: 1e-8, clip_norm: 1, save_every: 5, keep_last: 2, recompute: false}";
        let config: TrainConfig = serde_yaml::from_str(text).unwrap();
        let rates: Vec<f64> = (1..=6).map(|step| learning_rate(&config, step)).collect();
        assert_eq!(rates, [0.125, 0.25, 0.375, 0.5, 0.5, 0.5]);
        assert_eq!(learning_rate(&TrainConfig { warmup_steps: 0, ..config }, 1), 0.5);
    }
}
