//! Counter-based randomness: every draw is a pure function of (seed, purpose, step, item).
//!
//! No generator lives longer than one use, so a resumed run repeats nothing and skips nothing, both arms of an
//! experiment see the same stream, validation cannot shift training, and building a branch shifts no other draw.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use sha2::{Digest, Sha256};

/// What a stream of draws is for; streams of different purposes are independent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Initial value of a parameter.
    Initialise,
    /// Order of the training clips in an epoch.
    Order,
    /// Noise levels and the clean-action mode of a sample.
    Timestep,
    /// Noise of latents, actions and proprio.
    Noise,
    /// Whether a sample's prompt is replaced by the empty one.
    TextDropout,
    /// Starting noise of a validation clip.
    Validation,
    /// A fixed embedding of a word.
    Embedding,
    /// Resampling of clips for a confidence interval.
    Bootstrap,
    /// Chunk and attention window of an episode, or of a batch that shares them.
    ChunkWindow,
    /// How long an attempt lives, in a plan.
    Lifetime,
}

/// One stream of draws.
pub struct Draw {
    rng: ChaCha8Rng,
    spare: Option<f64>,
}

impl Draw {
    /// The stream of `purpose` at `step` for `item` (a clip id, a parameter name, ...).
    pub fn new(seed: u64, purpose: Purpose, step: u64, item: &str) -> Self {
        let mut hash = Sha256::new();
        hash.update(seed.to_le_bytes());
        hash.update([purpose as u8]);
        hash.update(step.to_le_bytes());
        hash.update(item.as_bytes());
        Self { rng: ChaCha8Rng::from_seed(hash.finalize().into()), spare: None }
    }

    /// Uniform in [0, 1), 53 bits.
    pub fn uniform(&mut self) -> f64 {
        (self.rng.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Uniform in 0..n without modulo bias worth naming (n far below 2^53).
    pub fn below(&mut self, n: usize) -> usize {
        ((self.uniform() * n as f64) as usize).min(n.saturating_sub(1))
    }

    /// Standard normal, by Box-Muller in f64.
    pub fn normal(&mut self) -> f64 {
        if let Some(value) = self.spare.take() {
            return value;
        }
        // 1 - u is in (0, 1], so the logarithm is finite.
        let radius = (-2.0 * (1.0 - self.uniform()).ln()).sqrt();
        let angle = std::f64::consts::TAU * self.uniform();
        self.spare = Some(radius * angle.sin());
        radius * angle.cos()
    }

    /// Beta(a, 1) by inversion: its distribution function is x^a.
    pub fn beta_a_1(&mut self, a: f64) -> f64 {
        self.uniform().powf(1.0 / a)
    }

    /// `count` standard normals, rounded to f32.
    pub fn normals(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.normal() as f32).collect()
    }

    /// A permutation of 0..n (Fisher-Yates).
    pub fn permutation(&mut self, n: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..n).collect();
        for last in (1..n).rev() {
            order.swap(last, self.below(last + 1));
        }
        order
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_is_a_function_of_its_key_alone() {
        let mut again = Draw::new(7, Purpose::Noise, 3, "clip");
        let first: Vec<f64> = (0..5).map(|_| again.normal()).collect();
        let mut same = Draw::new(7, Purpose::Noise, 3, "clip");
        assert_eq!(first, (0..5).map(|_| same.normal()).collect::<Vec<_>>());
        for mut other in [
            Draw::new(8, Purpose::Noise, 3, "clip"),
            Draw::new(7, Purpose::Timestep, 3, "clip"),
            Draw::new(7, Purpose::Noise, 4, "clip"),
            Draw::new(7, Purpose::Noise, 3, "clip2"),
        ] {
            assert_ne!(first[0], other.normal());
        }
    }

    #[test]
    fn distributions_have_their_moments() {
        let mut draw = Draw::new(1, Purpose::Noise, 0, "");
        let normals: Vec<f64> = (0..100_000).map(|_| draw.normal()).collect();
        let mean = normals.iter().sum::<f64>() / 1e5;
        let variance = normals.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / 1e5;
        assert!(mean.abs() < 0.015 && (variance - 1.0).abs() < 0.02, "{mean} {variance}");
        let beta = (0..100_000).map(|_| draw.beta_a_1(1.5)).sum::<f64>() / 1e5;
        assert!((beta - 0.6).abs() < 0.005, "Beta(1.5, 1) has mean 0.6, not {beta}");
    }

    #[test]
    fn a_permutation_holds_every_index_once() {
        let mut order = Draw::new(1, Purpose::Order, 0, "").permutation(257);
        assert_ne!(order, (0..257).collect::<Vec<_>>());
        order.sort_unstable();
        assert_eq!(order, (0..257).collect::<Vec<_>>());
    }
}
