//! Noise levels that samplers step through, and the shift that schedules share.

/// s a / (1 + (s - 1) a): a level `a` of 0..=1 with more of the schedule spent in noise for s above 1.
pub fn shifted(level: f64, shift: f64) -> f64 {
    shift * level / (1.0 + (shift - 1.0) * level)
}

/// Shifted noise levels, `steps` of them falling evenly from `first`, and a final 0.
pub fn sigmas(first: f64, steps: usize, shift: f64) -> Vec<f64> {
    (0..steps).map(|i| shifted(first * (1.0 - i as f64 / steps as f64), shift)).chain([0.0]).collect()
}
