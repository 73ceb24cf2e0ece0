//! Which episode is trained on when, if episodes are not grouped by length: one stream of slots as long as the run.

use crate::random::{Draw, Purpose};
use crate::{Error, Result};
use std::ops::Range;

/// Episodes of consecutive slots of the run: epochs are shuffled by (seed, epoch), every episode is there once an
/// epoch, and slot s belongs to epoch s div `episodes`. A step takes as many slots as its effective batch, so a batch
/// may reach into the next epoch, and is never short.
///
/// # Errors
/// `no_episodes`.
pub fn episodes_of_slots(episodes: usize, seed: u64, slots: Range<u64>) -> Result<Vec<usize>> {
    if episodes == 0 {
        return Err(no_episodes());
    }
    let count = episodes as u64;
    let mut found = Vec::new();
    let mut slot = slots.start;
    while slot < slots.end {
        let epoch = slot / count;
        let order = Draw::new(seed, Purpose::Order, epoch, "").permutation(episodes);
        let until = slots.end.min((epoch + 1).saturating_mul(count));
        found.extend((slot..until).map(|slot| order[(slot % count) as usize]));
        slot = until;
    }
    Ok(found)
}

/// Nothing to pack.
pub(super) fn no_episodes() -> Error {
    Error::data("no_episodes", "there is no training episode").hint("see data.dataset and data.validation_episodes")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_episode_comes_once_an_epoch_wherever_reading_starts() {
        let all = episodes_of_slots(7, 5, 0..21).unwrap();
        for epoch in all.chunks(7) {
            let mut sorted = epoch.to_vec();
            sorted.sort_unstable();
            assert_eq!(sorted, (0..7).collect::<Vec<_>>());
        }
        assert_ne!(all[..7], all[7..14]);
        for start in 0..21 {
            assert_eq!(episodes_of_slots(7, 5, start as u64..21).unwrap(), all[start..]);
        }
        assert_eq!(episodes_of_slots(0, 5, 0..3).unwrap_err().code, "no_episodes");
    }
}
