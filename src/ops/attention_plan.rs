//! What each query of an attention sees, as a value.
//!
//! Consecutive queries of a packed sequence see the same few intervals of keys, so a mask is a list of groups whose
//! size follows frames and chunks, never tokens times tokens. A plan travels with the call that uses it: recomputation
//! in a backward pass cannot meet the mask of another forward.

use candle_core::{Result, bail};
use std::ops::Range;

/// Consecutive queries that see the same keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    pub queries: Range<u32>,
    /// At most three intervals, sorted and disjoint; unused ones are empty.
    pub keys: [Range<u32>; 3],
}

impl Group {
    /// The intervals that hold a key, in order.
    pub fn intervals(&self) -> impl Iterator<Item = Range<usize>> + '_ {
        self.keys.iter().filter(|keys| !keys.is_empty()).map(|keys| keys.start as usize..keys.end as usize)
    }

    /// How many keys each query sees.
    pub fn key_count(&self) -> usize {
        self.intervals().map(|keys| keys.len()).sum()
    }
}

/// What each query sees. Queries in no group (padding) see nothing.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionPlan {
    queries: usize,
    keys: usize,
    groups: Vec<Group>,
    key_bias: Option<Vec<f32>>,
}

impl AttentionPlan {
    /// A plan over `queries` rows and `keys` rows; `key_bias` [keys] is added to the scores of its key. Groups are kept
    /// in the order of their queries, those without queries are dropped.
    ///
    /// # Errors
    /// If a group is out of range, groups share a query, a group's intervals are unsorted or overlap, or the bias does
    /// not fit the keys or is not finite.
    pub fn new(queries: usize, keys: usize, mut groups: Vec<Group>, key_bias: Option<Vec<f32>>) -> Result<Self> {
        groups.retain(|group| group.queries.start != group.queries.end);
        groups.sort_by_key(|group| group.queries.start);
        let mut planned = 0;
        for group in &groups {
            if group.queries.start > group.queries.end || group.queries.end as usize > queries {
                bail!("attention plan: queries {:?} do not lie in 0..{queries}", group.queries);
            }
            if group.queries.start < planned {
                bail!("attention plan: query {} is in two groups", group.queries.start);
            }
            planned = group.queries.end;
            let mut seen = 0;
            for interval in &group.keys {
                if interval.start > interval.end || interval.end as usize > keys {
                    bail!("attention plan: keys {interval:?} do not lie in 0..{keys}");
                }
                if interval.is_empty() {
                    continue;
                }
                if interval.start < seen {
                    bail!("attention plan: key intervals {:?} are unsorted or overlap", group.keys);
                }
                seen = interval.end;
            }
        }
        if let Some(bias) = &key_bias
            && (bias.len() != keys || bias.iter().any(|value| !value.is_finite()))
        {
            bail!("attention plan: the bias needs one finite value for each of {keys} keys");
        }
        Ok(Self { queries, keys, groups, key_bias })
    }

    /// Rows of q, planned or not.
    pub fn queries(&self) -> usize {
        self.queries
    }

    /// Rows of k and v.
    pub fn keys(&self) -> usize {
        self.keys
    }

    /// In the order of their queries; none is empty.
    pub fn groups(&self) -> &[Group] {
        &self.groups
    }

    /// What is added to the scores of each key.
    pub fn key_bias(&self) -> Option<&[f32]> {
        self.key_bias.as_deref()
    }

    /// The plan of some of the queries, in another order: query i sees what `queries[i]` sees here.
    ///
    /// # Errors
    /// If one of them is not of this plan.
    pub fn of_queries(&self, queries: &[u32]) -> Result<Self> {
        let mut group_of = vec![None; self.queries];
        for (number, group) in self.groups.iter().enumerate() {
            group_of[group.queries.start as usize..group.queries.end as usize].fill(Some(number));
        }
        let mut groups: Vec<Group> = Vec::new();
        let mut last = None;
        for (query, from) in (0u32..).zip(queries) {
            let Some(&number) = group_of.get(*from as usize) else {
                bail!("attention plan: query {from} of {}", self.queries);
            };
            match (number, groups.last_mut()) {
                (Some(_), Some(group)) if number == last => group.queries.end = query + 1,
                (Some(number), _) => {
                    groups.push(Group { queries: query..query + 1, keys: self.groups[number].keys.clone() });
                }
                (None, _) => {}
            }
            last = number;
        }
        Self::new(queries.len(), self.keys, groups, self.key_bias.clone())
    }

    /// Disjoint runs of keys, ascending, such that all keys of a query are in one.
    pub fn key_spans(&self) -> Vec<Range<usize>> {
        let mut spans: Vec<Range<usize>> = Vec::new();
        let mut ranges: Vec<Range<usize>> =
            self.groups.iter().filter_map(|g| Some(g.intervals().next()?.start..g.intervals().last()?.end)).collect();
        ranges.sort_unstable_by_key(|range| range.start);
        for range in ranges {
            match spans.last_mut() {
                Some(last) if range.start < last.end => last.end = last.end.max(range.end),
                _ => spans.push(range),
            }
        }
        spans
    }

    /// How many (query, key) pairs see each other.
    pub fn visible_pairs(&self) -> u64 {
        self.groups.iter().map(|group| group.queries.len() as u64 * group.key_count() as u64).sum()
    }

    /// (query, key) pairs computed by a kernel with tiles of this size that skips tiles nobody sees. Query tiles start
    /// at multiples of `tile_queries`, key tiles at multiples of `tile_keys` (both at least 1); a tile that sticks out
    /// of the matrix is computed whole.
    pub fn computed_pairs(&self, tile_queries: usize, tile_keys: usize) -> u64 {
        let mut tiles = 0;
        let (mut row, mut touched) = (0, Vec::new());
        for group in &self.groups {
            for tile in group.queries.start as usize / tile_queries..=(group.queries.end as usize - 1) / tile_queries {
                if tile != row {
                    tiles += covered(&mut touched);
                    row = tile;
                }
                touched.extend(group.intervals().map(|keys| keys.start / tile_keys..keys.end.div_ceil(tile_keys)));
            }
        }
        tiles += covered(&mut touched);
        tiles * tile_queries as u64 * tile_keys as u64
    }
}

/// Size of the union of some ranges, which are used up.
fn covered(ranges: &mut Vec<Range<usize>>) -> u64 {
    ranges.sort_unstable_by_key(|range| range.start);
    let (mut size, mut end) = (0, 0);
    for range in ranges.drain(..) {
        size += range.end.saturating_sub(end.max(range.start)) as u64;
        end = end.max(range.end);
    }
    size
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group(queries: Range<u32>, keys: [Range<u32>; 3]) -> Group {
        Group { queries, keys }
    }

    #[test]
    fn pairs_are_counted_by_hand() {
        let groups = vec![group(4..6, [0..1, 6..8, 0..0]), group(0..3, [1..3, 0..0, 0..0])];
        let plan = AttentionPlan::new(7, 8, groups, None).unwrap();
        assert_eq!(plan.groups()[0].queries, 0..3, "in the order of the queries");
        assert_eq!(plan.visible_pairs(), 3 * 2 + 2 * 3);
        assert_eq!(plan.computed_pairs(1, 1), plan.visible_pairs());
        // Rows 0-1 and 2-3 touch key tile 0 (keys 0-3), rows 4-5 tiles 0 and 1.
        assert_eq!(plan.computed_pairs(2, 4), (1 + 1 + 2) * 8);
        assert_eq!(plan.computed_pairs(128, 128), 128 * 128);
        let nothing = AttentionPlan::new(3, 0, vec![group(0..2, [0..0, 0..0, 0..0])], None).unwrap();
        assert_eq!((nothing.visible_pairs(), nothing.computed_pairs(2, 2)), (0, 0));
    }

    #[test]
    fn some_queries_in_another_order_see_what_they_saw() {
        let groups = vec![group(0..3, [1..3, 0..0, 0..0]), group(4..6, [0..1, 6..8, 0..0])];
        let plan = AttentionPlan::new(7, 8, groups, Some(vec![0.5; 8])).unwrap();
        let picked = plan.of_queries(&[5, 4, 3, 0, 2, 6]).unwrap();
        let expected = [group(0..2, [0..1, 6..8, 0..0]), group(3..5, [1..3, 0..0, 0..0])];
        assert_eq!((picked.queries(), picked.groups(), picked.key_bias()), (6, &expected[..], plan.key_bias()));
        assert!(plan.of_queries(&[7]).is_err());
        assert_eq!(plan.key_spans(), [0..8], "keys 1 and 2 lie between those of other queries");
        let apart = [group(0..1, [4..6, 0..0, 0..0]), group(1..2, [0..3, 0..0, 0..0]), group(2..3, [3..4, 0..0, 0..0])];
        assert_eq!(AttentionPlan::new(3, 6, apart.to_vec(), None).unwrap().key_spans(), [0..3, 3..4, 4..6]);
    }

    #[test]
    fn contradictions_are_refused() {
        let none = 0..0;
        #[allow(clippy::reversed_empty_ranges)]
        let reversed = 3..2;
        for (groups, bias) in [
            (vec![group(0..9, [0..1, none.clone(), none.clone()])], None),
            (vec![group(0..2, [0..9, none.clone(), none.clone()])], None),
            (vec![group(reversed.clone(), [none.clone(), none.clone(), none.clone()])], None),
            (vec![group(0..2, [reversed, none.clone(), none.clone()])], None),
            (vec![group(0..2, [0..2, 1..3, none.clone()])], None),
            (vec![group(0..2, [4..5, none.clone(), 1..3])], None),
            (vec![group(2..4, [0..1, none.clone(), none.clone()]), group(0..3, [0..1, none.clone(), none])], None),
            (vec![], Some(vec![0.0; 7])),
            (vec![], Some(vec![f32::NEG_INFINITY; 8])),
        ] {
            assert!(AttentionPlan::new(8, 8, groups.clone(), bias).is_err(), "{groups:?}");
        }
    }
}
