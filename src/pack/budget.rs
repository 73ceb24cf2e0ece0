//! Episodes to ranks by cost, and within a rank into as few sequences as a token budget allows; nothing is padded to
//! another's length.
//!
//! Dealing decides how long ranks wait for each other, cutting how many kernels start and what fits in memory. They are
//! separate: after dealing, a micro-batch never crosses ranks.

use super::length::round_up;
use crate::{Error, Result};

/// What dealing and cutting know of an episode.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Load {
    /// Index in the dataset, for errors.
    pub episode: usize,
    /// In the trunk, both copies.
    pub tokens: usize,
    /// In any unit.
    pub cost: f64,
}

/// The most tokens of a micro-batch, whose sequence is rounded up to `alignment`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenBudget {
    pub tokens: usize,
    pub alignment: usize,
}

impl TokenBudget {
    /// # Errors
    /// `alignment_zero`.
    pub fn new(tokens: usize, alignment: usize) -> Result<Self> {
        match alignment {
            0 => Err(Error::refused("alignment_zero", "no length is a multiple of 0").in_place("packing.alignment")),
            _ => Ok(Self { tokens, alignment }),
        }
    }

    /// Tokens that fit before alignment: rounding them up stays within the budget.
    fn capacity(self) -> usize {
        self.tokens - self.tokens % self.alignment
    }

    /// Is there room for this episode alone?
    ///
    /// # Errors
    /// `over_token_budget`, with the episode, its tokens and the budget.
    pub fn admit(self, load: &Load) -> Result<()> {
        if load.tokens <= self.capacity() {
            return Ok(());
        }
        let aligned = round_up(load.tokens, self.alignment);
        let what = format!(
            "training episode {} alone takes {aligned} tokens, more than the {} of a micro-batch",
            load.episode, self.tokens
        );
        Err(Error::refused("over_token_budget", what)
            .in_place("packing.token_budget")
            .hint(format!("raise packing.token_budget to {aligned} or more, or leave the episode out")))
    }
}

/// Deals loads to ranks, the costliest first, each to the rank with the least so far (LPT: at most 4/3 of the best
/// possible makespan, and close to it where there are many loads a rank). Equal costs go in the order of `loads`, equal
/// ranks by number. Returns each rank's indices into `loads`, in ascending order.
///
/// # Errors
/// `no_ranks`.
pub fn deal(loads: &[Load], ranks: usize) -> Result<Vec<Vec<usize>>> {
    if ranks == 0 {
        return Err(Error::refused("no_ranks", "at least one rank is needed").in_place("packing.ranks"));
    }
    let mut order: Vec<usize> = (0..loads.len()).collect();
    order.sort_by(|&a, &b| loads[b].cost.total_cmp(&loads[a].cost));
    let mut dealt = vec![Vec::new(); ranks];
    let mut sums = vec![0.0; ranks];
    for index in order {
        // min_by keeps the first of equals.
        let rank = (0..ranks).min_by(|&a, &b| f64::total_cmp(&sums[a], &sums[b])).unwrap_or(0);
        sums[rank] += loads[index].cost;
        dealt[rank].push(index);
    }
    dealt.iter_mut().for_each(|rank| rank.sort_unstable());
    Ok(dealt)
}

/// Cuts one rank's loads into the fewest micro-batches that keep the budget. Returns indices into `loads`, ascending
/// within a micro-batch; micro-batches come in the order of their first load.
///
/// Best-fit decreasing first; where that is above the lower bound, an exact search for fewer, of at most
/// [`SEARCH_NODES`] placements for each number tried. Within that bound the number is the least possible; beyond it,
/// best-fit decreasing's (at most 11/9 of the least, plus one).
///
/// # Errors
/// `over_token_budget`.
pub fn cut(loads: &[Load], budget: TokenBudget) -> Result<Vec<Vec<usize>>> {
    loads.iter().try_for_each(|load| budget.admit(load))?;
    let capacity = budget.capacity();
    let mut order: Vec<usize> = (0..loads.len()).collect();
    order.sort_by_key(|&index| std::cmp::Reverse(loads[index].tokens));
    let sizes: Vec<usize> = order.iter().map(|&index| loads[index].tokens).collect();
    let mut bins = best_fit(&sizes, capacity);
    let used = bin_count(&bins);
    for fewer in lower_bound(&sizes, capacity)..used {
        if let Some(found) = search(&sizes, capacity, fewer) {
            bins = found;
            break;
        }
    }
    let mut micro_batches = vec![Vec::new(); bin_count(&bins)];
    for (position, bin) in bins.into_iter().enumerate() {
        micro_batches[bin].push(order[position]);
    }
    micro_batches.iter_mut().for_each(|indices: &mut Vec<usize>| indices.sort_unstable());
    micro_batches.sort_unstable();
    Ok(micro_batches)
}

/// Placements that the exact search tries before it gives up on a number of micro-batches: about 0.1 ms.
pub const SEARCH_NODES: usize = 4_000;

fn bin_count(bins: &[usize]) -> usize {
    bins.iter().max().map_or(0, |last| last + 1)
}

/// Bin of each size: the fullest that has room, else a new one. Sizes in descending order.
fn best_fit(sizes: &[usize], capacity: usize) -> Vec<usize> {
    let mut filled: Vec<usize> = Vec::new();
    sizes
        .iter()
        .map(|&size| {
            let fits = (0..filled.len()).filter(|&bin| filled[bin] + size <= capacity);
            // Of equally full ones the first.
            let bin = fits.max_by_key(|&bin| (filled[bin], std::cmp::Reverse(bin))).unwrap_or_else(|| {
                filled.push(0);
                filled.len() - 1
            });
            filled[bin] += size;
            bin
        })
        .collect()
}

/// Martello and Toth's L2: for each threshold, sizes above what it leaves are alone, those above a half are one a bin, and
/// the rest down to the threshold must go beside the latter or into bins of their own. Sizes in descending order.
fn lower_bound(sizes: &[usize], capacity: usize) -> usize {
    let mut best = usize::from(!sizes.is_empty());
    let halves: Vec<usize> = sizes.iter().copied().filter(|&size| 2 * size <= capacity).collect();
    for threshold in std::iter::once(0).chain(halves) {
        let alone = sizes.iter().filter(|&&size| size > capacity - threshold).count();
        let (mut halved, mut room, mut rest) = (0, 0, 0);
        for &size in sizes.iter().filter(|&&size| size <= capacity - threshold && size >= threshold) {
            if 2 * size > capacity {
                halved += 1;
                room += capacity - size;
            } else {
                rest += size;
            }
        }
        best = best.max(alone + halved + rest.saturating_sub(room).div_ceil(capacity.max(1)));
    }
    best
}

/// A placement into `count` bins, depth first; sizes in descending order.
fn search(sizes: &[usize], capacity: usize, count: usize) -> Option<Vec<usize>> {
    struct Search<'a> {
        sizes: &'a [usize],
        capacity: usize,
        filled: Vec<usize>,
        bins: Vec<usize>,
        nodes: usize,
    }
    impl Search<'_> {
        /// `slack`: how much of all bins may stay empty from here on.
        fn place(&mut self, position: usize, slack: usize) -> bool {
            let Some(&size) = self.sizes.get(position) else { return true };
            let smallest = self.sizes[self.sizes.len() - 1];
            let mut order: Vec<usize> =
                (0..self.filled.len()).filter(|&bin| self.filled[bin] + size <= self.capacity).collect();
            order.sort_by_key(|&bin| (std::cmp::Reverse(self.filled[bin]), bin));
            // Equally full bins lead to the same placements.
            order.dedup_by_key(|bin| self.filled[*bin]);
            for bin in order {
                if self.nodes == 0 {
                    return false;
                }
                self.nodes -= 1;
                let left = self.capacity - self.filled[bin] - size;
                // What the smallest size no longer fits into stays empty.
                let lost = if left < smallest { left } else { 0 };
                if lost > slack {
                    continue;
                }
                self.filled[bin] += size;
                self.bins.push(bin);
                if self.place(position + 1, slack - lost) {
                    return true;
                }
                self.bins.pop();
                self.filled[bin] -= size;
                if left == 0 {
                    // No other place for this size wastes less.
                    return false;
                }
            }
            false
        }
    }
    let slack = (capacity * count).checked_sub(sizes.iter().sum())?;
    let mut search = Search { sizes, capacity, filled: vec![0; count], bins: Vec::new(), nodes: SEARCH_NODES };
    search.place(0, slack).then_some(search.bins)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn loads(tokens: &[usize]) -> Vec<Load> {
        tokens.iter().enumerate().map(|(episode, &tokens)| Load { episode, tokens, cost: tokens as f64 }).collect()
    }

    /// The fewest bins, by trying every assignment of one item after the other.
    fn brute_force(sizes: &[usize], capacity: usize, filled: &mut Vec<usize>) -> usize {
        let Some((&size, rest)) = sizes.split_first() else { return filled.len() };
        let mut best = usize::MAX;
        for bin in 0..filled.len() {
            if filled[bin] + size <= capacity {
                filled[bin] += size;
                best = best.min(brute_force(rest, capacity, filled));
                filled[bin] -= size;
            }
        }
        filled.push(size);
        best = best.min(brute_force(rest, capacity, filled));
        filled.pop();
        best
    }

    /// The least possible makespan, the same way.
    fn best_makespan(costs: &[f64], sums: &mut [f64]) -> f64 {
        let Some((&cost, rest)) = costs.split_first() else { return sums.iter().copied().fold(0.0, f64::max) };
        (0..sums.len())
            .map(|rank| {
                sums[rank] += cost;
                let best = best_makespan(rest, sums);
                sums[rank] -= cost;
                best
            })
            .fold(f64::INFINITY, f64::min)
    }

    proptest! {
        #[test]
        fn micro_batches_are_as_few_as_can_be(
            sizes in proptest::collection::vec(1usize..60, 0..9), extra in 0usize..64, alignment in 1usize..9,
        ) {
            let budget = TokenBudget::new(60 + alignment + extra, alignment).unwrap();
            let micro_batches = cut(&loads(&sizes), budget).unwrap();
            let fewest = brute_force(&sizes, budget.capacity(), &mut Vec::new());
            prop_assert_eq!(micro_batches.len(), fewest);
        }

        #[test]
        fn micro_batches_hold_every_load_once_and_keep_the_budget(
            sizes in proptest::collection::vec(1usize..5_000, 0..60), extra in 0usize..20_000, alignment in 1usize..200,
        ) {
            let budget = TokenBudget::new(5_000 + alignment + extra, alignment).unwrap();
            let micro_batches = cut(&loads(&sizes), budget).unwrap();
            for micro_batch in &micro_batches {
                let tokens: usize = micro_batch.iter().map(|&index| sizes[index]).sum();
                prop_assert!(!micro_batch.is_empty() && round_up(tokens, alignment) <= budget.tokens);
            }
            let mut all: Vec<usize> = micro_batches.into_iter().flatten().collect();
            all.sort_unstable();
            prop_assert_eq!(all, (0..sizes.len()).collect::<Vec<_>>());
        }

        #[test]
        fn dealing_holds_every_load_once_within_four_thirds_of_the_best(
            costs in proptest::collection::vec(1u32..100, 1..9), ranks in 1usize..4,
        ) {
            let costs: Vec<f64> = costs.into_iter().map(f64::from).collect();
            let loads: Vec<Load> =
                costs.iter().enumerate().map(|(episode, &cost)| Load { episode, tokens: 1, cost }).collect();
            let dealt = deal(&loads, ranks).unwrap();
            let makespan = dealt
                .iter()
                .map(|rank| rank.iter().map(|&index| costs[index]).sum::<f64>())
                .fold(0.0, f64::max);
            let best = best_makespan(&costs, &mut vec![0.0; ranks]);
            prop_assert!(makespan <= best * (4.0 / 3.0) + 1e-9, "{makespan} against {best}");
            let mut all: Vec<usize> = dealt.into_iter().flatten().collect();
            all.sort_unstable();
            prop_assert_eq!(all, (0..costs.len()).collect::<Vec<_>>());
        }

        #[test]
        fn the_lower_bound_is_one(sizes in proptest::collection::vec(1usize..=50, 0..9)) {
            let mut sizes = sizes;
            sizes.sort_unstable_by_key(|&size| std::cmp::Reverse(size));
            let bound = lower_bound(&sizes, 50);
            prop_assert!(bound <= brute_force(&sizes, 50, &mut Vec::new()));
            prop_assert!(bound >= sizes.iter().sum::<usize>().div_ceil(50));
        }
    }

    #[test]
    fn a_case_that_best_fit_decreasing_misses_is_found() {
        // 48 + 28 + 24 and 30 + 26 + 24 + 20 are full; best-fit decreasing puts 30 beside 48 and ends with three.
        let sizes = [48, 30, 28, 26, 24, 24, 20];
        assert_eq!(bin_count(&best_fit(&sizes, 100)), 3, "else the example shows nothing");
        assert_eq!(cut(&loads(&sizes), TokenBudget::new(100, 1).unwrap()).unwrap().len(), 2);
    }

    #[test]
    fn dealing_by_hand() {
        // 8 7 6 5 4 onto two ranks: 8 | 7, 6 to the second, 5 to the first, 4 onto 13 against 13: the first.
        let costs = [5.0, 8.0, 4.0, 7.0, 6.0];
        let loads = costs.map(|cost| Load { episode: 0, tokens: 1, cost });
        assert_eq!(deal(&loads, 2).unwrap(), [vec![0, 1, 2], vec![3, 4]]);
        assert_eq!(deal(&[loads[0]; 4], 2).unwrap(), [[0, 2], [1, 3]], "equal loads go round");
        assert_eq!(deal(&loads, 0).unwrap_err().code, "no_ranks");
        assert_eq!(deal(&[], 2).unwrap(), [[0; 0], [0; 0]]);
    }

    #[test]
    fn an_episode_that_cannot_fit_is_named() {
        let budget = TokenBudget::new(1_000, 128).unwrap();
        // 896 is the last multiple of 128 below 1,000, so 897 aligned are 1,024.
        assert!(cut(&loads(&[5, 896]), budget).is_ok());
        let error = cut(&loads(&[5, 897]), budget).unwrap_err();
        assert_eq!(error.code, "over_token_budget");
        assert_eq!(
            error.to_string(),
            "training episode 1 alone takes 1024 tokens, more than the 1000 of a micro-batch (packing.token_budget); \
             raise packing.token_budget to 1024 or more, or leave the episode out"
        );
        assert_eq!(TokenBudget::new(1_000, 0).unwrap_err().code, "alignment_zero");
        assert_eq!(cut(&loads(&[1]), TokenBudget::new(100, 128).unwrap()).unwrap_err().code, "over_token_budget");
    }
}
