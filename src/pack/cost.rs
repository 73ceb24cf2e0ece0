//! What a micro-batch costs: C = alpha T + beta P + gamma, of T tokens in the trunk and P visible pairs.
//!
//! The window bounds P, so cost is all but linear in an episode's length; but P swings by a factor of forty with the
//! draw of chunk and window, and where a frame has a hundred tokens that alone unbalances ranks. The draw is known when
//! episodes are dealt, so it is weighed.

use super::draw::ChunkWindow;
use super::sequence::FrameTokens;
use crate::config::LingbotModelConfig;
use crate::{Error, Result};
use serde::Serialize;

/// The three coefficients, in one unit: FLOP ([`CostModel::of_model`]) or milliseconds ([`CostModel::fit`]).
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct CostModel {
    /// alpha: a token, padding included.
    pub per_token: f64,
    /// beta: a (query, key) pair of self-attention that the mask lets through.
    pub per_pair: f64,
    /// gamma: a micro-batch, however large.
    pub per_micro_batch: f64,
}

/// One measured micro-step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MeasuredMicroStep {
    /// Tokens in the trunk, padding included.
    pub tokens: usize,
    pub visible_pairs: u64,
    /// Forward and backward.
    pub ms: f64,
}

impl CostModel {
    /// FLOP of forward and backward by the sizes of the model, a multiply-add counting 2.
    ///
    /// Forward, a token: `layers` x 2 x (6 D^2 + 2 D ffn) in the linears of the blocks and `layers` x 4 D x `text_len`
    /// in the scores and values of cross-attention; a visible pair: `layers` x 4 D. A linear costs its forward 3 times
    /// (4 times if blocks are recomputed), attention 3.5 times (4.5). Embedders and heads are left out (below 0.1 %), and
    /// so is what a text costs once an episode (as much as 70 tokens). gamma is 0: it is overhead, and no size of the
    /// model tells it.
    pub fn of_model(model: &LingbotModelConfig, recompute: bool) -> Self {
        let [layers, dim, ffn, text] =
            [model.num_layers, model.dim, model.ffn_dim, model.text_len].map(|size| size as f64);
        let [linear, attention] = if recompute { [4.0, 4.5] } else { [3.0, 3.5] };
        let linears = layers * 2.0 * (6.0 * dim * dim + 2.0 * dim * ffn);
        let pair = layers * 4.0 * dim;
        Self { per_token: linear * linears + attention * pair * text, per_pair: attention * pair, per_micro_batch: 0.0 }
    }

    /// The cost of one micro-batch.
    pub fn of(&self, tokens: usize, visible_pairs: u64) -> f64 {
        self.per_token * tokens as f64 + self.per_pair * visible_pairs as f64 + self.per_micro_batch
    }

    /// The coefficients in milliseconds that leave the least sum of squares over measured micro-steps.
    ///
    /// By orthogonalising the three columns (modified Gram-Schmidt), each scaled to length 1 first: tokens and pairs
    /// differ by five orders of magnitude, and normal equations would square that.
    ///
    /// # Errors
    /// `fit_underdetermined` if the micro-steps do not tell the three apart: fewer than three, or all alike in tokens,
    /// or pairs that follow from tokens.
    pub fn fit(measured: &[MeasuredMicroStep]) -> Result<Self> {
        /// Of a column, what the ones before it must leave unexplained.
        const LEAST_REMAINDER: f64 = 1e-6;
        let underdetermined = || {
            Error::data("fit_underdetermined", "the micro-steps do not tell tokens, pairs and overhead apart")
                .hint("measure at least three that differ in length and in chunk and window")
        };
        let column = |value: fn(&MeasuredMicroStep) -> f64| measured.iter().map(value).collect::<Vec<f64>>();
        let mut basis = [column(|_| 1.0), column(|step| step.tokens as f64), column(|step| step.visible_pairs as f64)];
        let mut remainder = column(|step| step.ms);
        let mut upper = [[0.0; 3]; 3];
        let mut projected = [0.0; 3];
        let mut scales = [0.0; 3];
        for index in 0..3 {
            let (before, rest) = basis.split_at_mut(index);
            let current = &mut rest[0];
            scales[index] = dot(current, current).sqrt();
            current.iter_mut().for_each(|value| *value /= scales[index]);
            for (row, earlier) in before.iter().enumerate() {
                upper[row][index] = dot(earlier, current);
                subtract(current, upper[row][index], earlier);
            }
            let length = dot(current, current).sqrt();
            // A column of zeros has become NaN.
            if length.is_nan() || length <= LEAST_REMAINDER {
                return Err(underdetermined());
            }
            upper[index][index] = length;
            current.iter_mut().for_each(|value| *value /= length);
            projected[index] = dot(current, &remainder);
            subtract(&mut remainder, projected[index], current);
        }
        let mut solution = [0.0; 3];
        for index in (0..3).rev() {
            let known: f64 = (index + 1..3).map(|later| upper[index][later] * solution[later]).sum();
            solution[index] = (projected[index] - known) / upper[index][index];
        }
        let [per_micro_batch, per_token, per_pair] = [0, 1, 2].map(|index| solution[index] / scales[index]);
        Ok(Self { per_token, per_pair, per_micro_batch })
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn subtract(from: &mut [f64], factor: f64, what: &[f64]) {
    from.iter_mut().zip(what).for_each(|(value, part)| *value -= factor * part);
}

/// Visible (query, key) pairs of one episode of `frames` latent frames, none of them padding.
///
/// The same number as the sequence's own plan counts, in closed form, since dealing needs it of every episode of a step
/// before any sequence exists. With V video and A action tokens a frame, chunk k of s_k frames (all c but the last) and
/// history of m(h) = min(k, h) chunks, queries of either copy see equally many keys, and
///
/// P = 2 sum_k s_k [ s_k (V^2 + V A + A^2) + c ( m(w/2) (V^2 + A^2) + (m((w+1)/2) + m((w-1)/2)) V A ) ]
pub fn visible_pairs(frames: usize, draw: ChunkWindow, frame: FrameTokens) -> u64 {
    let chunk = draw.chunk.max(1) as u64;
    let window = draw.window as u64;
    let (video, actions) = (frame.video() as u64, frame.actions as u64);
    let frames = frames as u64;
    let whole = frames / chunk;
    let last = frames % chunk;
    // Chunks of history, summed over the whole chunks 0, 1, ... and weighted with the last, shorter one.
    let history = |reach: u64| {
        let growing = whole.min(reach + 1);
        let over_whole = growing * growing.saturating_sub(1) / 2 + (whole - growing) * reach;
        chunk * (chunk * over_whole + last * whole.min(reach))
    };
    let within = whole * chunk * chunk + last * last;
    // A window of 0 hides even the own chunk's video from its actions.
    let across = if window == 0 { 0 } else { video * actions };
    let squares = video * video + actions * actions;
    let mixed = history(window.div_ceil(2)) + history(window.saturating_sub(1) / 2);
    2 * (within * (squares + across) + history(window / 2) * squares + mixed * video * actions)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Rule 3 of the mask, token by token: (frame id, is clean) of a query and a key.
    fn sees(query: (i64, bool), key: (i64, bool), window: i64) -> bool {
        (query.0 - key.0).abs() <= window
            && match (query.1, key.1) {
                (true, true) => key.0 <= query.0,
                (false, true) => key.0 < query.0,
                (false, false) => key.0 == query.0,
                (true, false) => false,
            }
    }

    fn counted(frames: usize, draw: ChunkWindow, frame: FrameTokens) -> u64 {
        let mut tokens = Vec::new();
        for clean in [false, true] {
            for f in 0..frames {
                let id = 2 * (f / draw.chunk) as i64;
                tokens.extend(std::iter::repeat_n((id, clean), frame.grid[0] * frame.grid[1]));
                tokens.extend(std::iter::repeat_n((id + 1, clean), frame.actions));
            }
        }
        let window = draw.window as i64;
        tokens.iter().map(|&q| tokens.iter().filter(|&&k| sees(q, k, window)).count() as u64).sum()
    }

    proptest! {
        #[test]
        fn pairs_are_those_of_the_mask(
            frames in 1usize..14, chunk in 1usize..6, window in 0usize..12, grid in 1usize..4, actions in 0usize..3,
        ) {
            let draw = ChunkWindow { chunk, window };
            let frame = FrameTokens { grid: [grid, 2], actions };
            prop_assert_eq!(visible_pairs(frames, draw, frame), counted(frames, draw, frame));
        }

        #[test]
        fn a_fit_finds_the_coefficients_that_made_the_times(
            alpha in 0.01f64..1.0, beta in 1e-7f64..1e-5, gamma in -50.0f64..500.0,
        ) {
            let measured: Vec<MeasuredMicroStep> = (0..40u64)
                .map(|i| {
                    let tokens = 5_000 + 1_987 * i as usize;
                    let visible_pairs = tokens as u64 * (200 + 377 * (i * 7 % 11));
                    let ms = alpha * tokens as f64 + beta * visible_pairs as f64 + gamma;
                    MeasuredMicroStep { tokens, visible_pairs, ms }
                })
                .collect();
            let fit = CostModel::fit(&measured).unwrap();
            prop_assert!((fit.per_token / alpha - 1.0).abs() < 1e-6, "{fit:?}");
            prop_assert!((fit.per_pair / beta - 1.0).abs() < 1e-6, "{fit:?}");
            prop_assert!((fit.per_micro_batch - gamma).abs() < 1e-3, "{fit:?}");
        }
    }

    #[test]
    fn of_noisy_times_a_fit_leaves_less_than_any_neighbour() {
        let measured: Vec<MeasuredMicroStep> = (0..30u64)
            .map(|i| {
                let (tokens, visible_pairs) = (4_000 + 900 * i as usize, 1_000_000 * (1 + i * i * 13 % 17));
                let noise = (i * 29 % 7) as f64 - 3.0;
                MeasuredMicroStep {
                    tokens,
                    visible_pairs,
                    ms: 0.15 * tokens as f64 + 2e-6 * visible_pairs as f64 + noise,
                }
            })
            .collect();
        let left = |model: CostModel| -> f64 {
            measured.iter().map(|step| (model.of(step.tokens, step.visible_pairs) - step.ms).powi(2)).sum()
        };
        let fit = CostModel::fit(&measured).unwrap();
        for sign in [-1.0, 1.0] {
            assert!(left(fit) < left(CostModel { per_token: fit.per_token + sign * 1e-5, ..fit }));
            assert!(left(fit) < left(CostModel { per_pair: fit.per_pair + sign * 1e-9, ..fit }));
            assert!(left(fit) < left(CostModel { per_micro_batch: fit.per_micro_batch + sign * 0.01, ..fit }));
        }
    }

    #[test]
    fn a_fit_that_cannot_tell_is_refused() {
        let step = |tokens: usize| MeasuredMicroStep { tokens, visible_pairs: 700 * tokens as u64, ms: tokens as f64 };
        for measured in [vec![], vec![step(3); 9], vec![step(3), step(4)], (1..20).map(step).collect::<Vec<_>>()] {
            assert_eq!(CostModel::fit(&measured).unwrap_err().code, "fit_underdetermined");
        }
        let blind = (1..20).map(|i| MeasuredMicroStep { visible_pairs: 0, ..step(i) }).collect::<Vec<_>>();
        assert_eq!(CostModel::fit(&blind).unwrap_err().code, "fit_underdetermined");
    }

    #[test]
    fn mean_keys_a_query_are_the_published_ones() {
        let frame = FrameTokens { grid: [12, 10], actions: 16 };
        let tokens = 2.0 * 136.0 * 30.0;
        let keys = |chunk, window| visible_pairs(30, ChunkWindow { chunk, window }, frame) as f64 / tokens;
        let all: Vec<f64> = (1..=4).flat_map(|chunk| (4..=64).map(move |window| keys(chunk, window))).collect();
        assert_eq!((all.iter().sum::<f64>() / all.len() as f64).round(), 1_938.0);
        assert_eq!(all.iter().copied().fold(0.0, f64::max).round(), 2_248.0);
    }
}
