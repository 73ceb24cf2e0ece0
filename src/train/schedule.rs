//! The learning rate: linear warm-up, then constant or half a cosine to zero (X-WAM's scheduler). A pure function of
//! the step, so a resume continues it. Only where the moments were lost does a short second warm-up go over it.

use crate::config::{Decay, TrainConfig};
use crate::runlog::Work;

/// Rate of the update that completes step `step` by moments that began, at zero, after step `moments_from`: 0 but for a
/// run that went on from weights alone.
///
/// With s = step - moments_from - 1 updates since then and r = `resume_warmup`: the schedule's rate times
/// min(1, (s + 1) / r). Adam's first updates have the full size of the rate whatever the gradients are, and a rate far
/// beyond warm-up is too much for that.
pub fn rate_at(config: &TrainConfig, moments_from: u64, step: u64) -> f64 {
    learning_rate(config, step) * second_warmup(config, moments_from, step)
}

/// Counts the update that completes step `step`, of `samples` clips or episodes.
pub fn count(work: &mut Work, config: &TrainConfig, moments_from: u64, step: u64, samples: u64) {
    if step < config.warmup_steps || second_warmup(config, moments_from, step) < 1.0 {
        work.warmup_steps += 1;
    } else {
        work.full_lr_steps += 1;
        work.full_lr_samples += samples;
    }
}

fn second_warmup(config: &TrainConfig, moments_from: u64, step: u64) -> f64 {
    if moments_from == 0 || config.resume_warmup == 0 {
        return 1.0;
    }
    (step.saturating_sub(moments_from) as f64 / config.resume_warmup as f64).min(1.0)
}

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
                    keep_every: 0, resume_warmup: 50, recompute: false}";
        serde_yaml::from_str(text).unwrap()
    }

    #[test]
    fn warm_up_ends_at_the_full_rate_and_stays() {
        let rates: Vec<f64> = (1..=6).map(|step| learning_rate(&config(), step)).collect();
        assert_eq!(rates, [0.125, 0.25, 0.375, 0.5, 0.5, 0.5]);
        assert_eq!(learning_rate(&TrainConfig { warmup_steps: 0, ..config() }, 1), 0.5);
    }

    /// The published values: base rate 3e-5, 200 steps of warm-up, 50 after a resume. The published schedule is one
    /// update behind this one (its first update has a rate of zero), which the published digits do not show.
    #[test]
    fn a_resume_without_moments_warms_up_again_as_published() {
        let config = TrainConfig { lr: 3e-5, warmup_steps: 200, steps: 3000, ..config() };
        let after = |from: u64, s: u64| rate_at(&config, from, from + s + 1);
        let close = |rate: f64, published: f64| (rate / published - 1.0).abs() < 1e-12;
        assert!(close(after(1500, 0), 6e-7) && close(after(1500, 49), 3e-5), "{} {}", after(1500, 0), after(1500, 49));
        assert_eq!(format!("{:.0e}", after(100, 0)), "3e-7");
        // Exactly: in the middle of the schedule's own warm-up both factors apply.
        assert!(close(rate_at(&config, 99, 100), 3e-5 * 0.5 * 0.02), "{}", rate_at(&config, 99, 100));
        assert_eq!(after(1500, 50), 3e-5);
        assert_eq!(rate_at(&config, 0, 1501), 3e-5, "with its moments a run goes on as if nothing had happened");
        assert_eq!(rate_at(&TrainConfig { resume_warmup: 0, ..config }, 1500, 1501), 3e-5);
    }

    #[test]
    fn steps_and_samples_at_full_rate_are_counted() {
        let config = TrainConfig { warmup_steps: 4, resume_warmup: 3, ..config() };
        let counted = |from: u64, steps: std::ops::RangeInclusive<u64>| {
            let mut work = Work::default();
            steps.for_each(|step| count(&mut work, &config, from, step, 10));
            work
        };
        let work = counted(0, 1..=10);
        assert_eq!(work, Work { full_lr_steps: 7, full_lr_samples: 70, warmup_steps: 3 });
        assert_eq!(work.warmup_share(), Some(0.3));
        assert_eq!(counted(6, 7..=10), Work { full_lr_steps: 2, full_lr_samples: 20, warmup_steps: 2 });
        assert_eq!(Work::default().warmup_share(), None);
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
