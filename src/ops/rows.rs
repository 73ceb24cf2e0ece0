//! Which modulation row each token reads.
//!
//! All tokens of a frame share one timestep, so shift, scale and gate are computed once a frame (action, proprio) row
//! and indexed here, instead of being expanded to [tokens, 6, D].

use std::sync::Arc;

/// Token -> row map, the same for every sample of a batch.
#[derive(Clone, Debug)]
pub struct Rows {
    /// Row of each of the L tokens.
    pub of_token: Arc<Vec<usize>>,
    /// Number of rows R.
    pub count: usize,
}

impl Rows {
    /// `of_token[l]` must be below `count`.
    pub fn new(of_token: Vec<usize>, count: usize) -> Self {
        assert!(of_token.iter().all(|&row| row < count), "token reads a row past {count}");
        Self { of_token: Arc::new(of_token), count }
    }

    /// Whether row r is read by tokens r L / R .. (r + 1) L / R: equally many, in order.
    pub fn are_even(&self) -> bool {
        let run = self.of_token.len() / self.count.max(1);
        run * self.count == self.of_token.len()
            && self.of_token.iter().enumerate().all(|(token, &row)| row == token / run)
    }

    /// All tokens read row 0: an affine weight.
    pub fn single(tokens: usize) -> Self {
        Self { of_token: Arc::new(vec![0; tokens]), count: 1 }
    }
}
