//! An attention plan as a kernel reads it: which tiles of queries and keys meet, and what each row sees inside them.
//!
//! A kernel walks the key tiles of a query tile and asks for a mask only in tiles that somebody sees in part; the
//! gradient of keys and values walks the same list the other way round. Lists follow frames and chunks, so they are
//! made on the host in about the time of one kernel launch.

use super::AttentionPlan;

/// Tiles that meet, by tile of one side: the other side's tile number shifted left by one, plus 1 if some row of the
/// query tile does not see every key of the key tile.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TileLists {
    /// Where each tile's list starts, and the end of the last.
    pub start: Vec<i32>,
    pub list: Vec<i32>,
    /// Tiles, those with the most work first.
    pub order: Vec<i32>,
}

impl TileLists {
    fn new(lists: Vec<Vec<i32>>) -> Self {
        let mut start = Vec::with_capacity(lists.len() + 1);
        start.push(0);
        let mut total = 0;
        for list in &lists {
            total += list.len() as i32;
            start.push(total);
        }
        let mut order: Vec<i32> = (0..lists.len() as i32).collect();
        order.sort_by_key(|&tile| std::cmp::Reverse(lists[tile as usize].len()));
        Self { start, list: lists.concat(), order }
    }

    /// Number of tiles that have a list.
    pub fn tiles(&self) -> usize {
        self.order.len()
    }
}

impl AttentionPlan {
    /// What each query sees, [queries][8]: start and end of three intervals of keys, then two zeros.
    pub fn row_keys(&self) -> Vec<i32> {
        let mut rows = vec![0; self.queries() * 8];
        for group in self.groups() {
            let mut keys = [0; 8];
            for (place, interval) in keys.chunks_exact_mut(2).zip(group.intervals()) {
                place.copy_from_slice(&[interval.start as i32, interval.end as i32]);
            }
            for query in group.queries.clone() {
                rows[query as usize * 8..][..8].copy_from_slice(&keys);
            }
        }
        rows
    }

    /// The key tiles that each query tile meets, ascending.
    pub fn tiles_by_query(&self, tile_queries: usize, tile_keys: usize) -> TileLists {
        let tiles = self.queries().div_ceil(tile_queries);
        let mut lists = vec![Vec::new(); tiles];
        // How many rows of the present query tile touch each key tile, and how many see all of it, as differences.
        let mut touched = vec![0i32; self.keys().div_ceil(tile_keys) + 1];
        let mut whole = touched.clone();
        let mut first_group = 0;
        for (tile, list) in lists.iter_mut().enumerate() {
            let rows = tile * tile_queries..((tile + 1) * tile_queries).min(self.queries());
            while self.groups().get(first_group).is_some_and(|group| group.queries.end as usize <= rows.start) {
                first_group += 1;
            }
            let (mut first, mut end) = (usize::MAX, 0);
            for group in
                self.groups()[first_group..].iter().take_while(|group| (group.queries.start as usize) < rows.end)
            {
                let count = (group.queries.end as usize).min(rows.end) - (group.queries.start as usize).max(rows.start);
                for keys in group.intervals() {
                    let met = keys.start / tile_keys..keys.end.div_ceil(tile_keys);
                    let full = keys.start.div_ceil(tile_keys)..keys.end / tile_keys;
                    (first, end) = (first.min(met.start), end.max(met.end));
                    touched[met.start] += count as i32;
                    touched[met.end] -= count as i32;
                    if full.start < full.end {
                        whole[full.start] += count as i32;
                        whole[full.end] -= count as i32;
                    }
                }
            }
            if first >= end {
                continue;
            }
            let (mut touching, mut seeing) = (0, 0);
            for key_tile in first..end {
                touching += touched[key_tile];
                seeing += whole[key_tile];
                if touching > 0 {
                    let partial = seeing < tile_queries as i32;
                    list.push((key_tile as i32) << 1 | i32::from(partial));
                }
            }
            touched[first..=end].fill(0);
            whole[first..=end].fill(0);
        }
        TileLists::new(lists)
    }

    /// The query tiles that each key tile meets, ascending: the transpose of [`Self::tiles_by_query`].
    pub fn tiles_by_key(&self, tile_queries: usize, tile_keys: usize) -> TileLists {
        let by_query = self.tiles_by_query(tile_queries, tile_keys);
        let mut lists = vec![Vec::new(); self.keys().div_ceil(tile_keys)];
        for (query_tile, ends) in by_query.start.windows(2).enumerate() {
            for entry in &by_query.list[ends[0] as usize..ends[1] as usize] {
                lists[(entry >> 1) as usize].push((query_tile as i32) << 1 | (entry & 1));
            }
        }
        TileLists::new(lists)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::Group;
    use crate::random::{Draw, Purpose};

    /// Every pair of rows and keys against the lists, for random plans.
    #[test]
    fn lists_hold_every_visible_pair_and_mark_every_hidden_one() {
        for item in 0..60 {
            let mut draw = Draw::new(7, Purpose::Initialise, item, "tiles");
            let (queries, keys) = (1 + draw.below(70), 1 + draw.below(90));
            let mut groups = Vec::new();
            let mut at = draw.below(4);
            while at < queries {
                let end = (at + 1 + draw.below(20)).min(queries);
                let mut cuts: Vec<u32> = (0..6).map(|_| draw.below(keys + 1) as u32).collect();
                cuts.sort_unstable();
                groups.push(Group {
                    queries: at as u32..end as u32,
                    keys: [cuts[0]..cuts[1], cuts[2]..cuts[3], cuts[4]..cuts[5]],
                });
                at = end + draw.below(3);
            }
            let plan = AttentionPlan::new(queries, keys, groups, None).expect("a plan");
            let rows = plan.row_keys();
            let sees = |query: usize, key: usize| {
                let row = &rows[query * 8..][..8];
                (0..3).any(|i| (row[2 * i]..row[2 * i + 1]).contains(&(key as i32)))
            };
            let counted = (0..queries).map(|q| (0..keys).filter(|&k| sees(q, k)).count() as u64).sum::<u64>();
            assert_eq!(counted, plan.visible_pairs());
            let (height, width) = (1 + draw.below(16), 1 + draw.below(16));
            let by_query = plan.tiles_by_query(height, width);
            let by_key = plan.tiles_by_key(height, width);
            assert_eq!(by_query.list.len(), by_key.list.len());
            assert_eq!(by_query.tiles(), queries.div_ceil(height));
            for query_tile in 0..by_query.tiles() {
                let of = |lists: &TileLists, tile: usize| {
                    lists.list[lists.start[tile] as usize..lists.start[tile + 1] as usize].to_vec()
                };
                let list = of(&by_query, query_tile);
                for key_tile in 0..keys.div_ceil(width) {
                    let pairs: Vec<bool> = (query_tile * height..(query_tile + 1) * height)
                        .flat_map(|q| (key_tile * width..(key_tile + 1) * width).map(move |k| (q, k)))
                        .map(|(q, k)| q < queries && k < keys && sees(q, k))
                        .collect();
                    let entry = list.iter().find(|entry| **entry >> 1 == key_tile as i32);
                    assert_eq!(entry.is_some(), pairs.contains(&true), "{item}: {query_tile} {key_tile}");
                    // Intervals that touch may see a tile whole without knowing it: then it is masked in vain.
                    if entry.is_some_and(|entry| entry & 1 == 0) {
                        assert!(!pairs.contains(&false), "{item}: {query_tile} {key_tile}");
                    }
                    let transposed = of(&by_key, key_tile);
                    let other = transposed.iter().find(|entry| **entry >> 1 == query_tile as i32);
                    assert_eq!(other.map(|entry| entry & 1), entry.map(|entry| entry & 1));
                }
            }
            let work = |tile: &i32| by_query.start[*tile as usize + 1] - by_query.start[*tile as usize];
            assert!(by_query.order.windows(2).all(|pair| work(&pair[0]) >= work(&pair[1])));
        }
    }
}
