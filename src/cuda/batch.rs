//! A batch's tables: modulation rows and their segments, rotary turns, attention tiles. Made on the host from a
//! [`Placement`], which every sample of a batch shares; on the device the batch is one sequence.

use super::arena::Arena;
use super::attention::Tiling;
use super::launch::{Element, Launcher, Slice, device_error};
use super::ops::{Ops, Turns};
use crate::model::{Placement, Sight};
use crate::ops::{AttentionPlan, Group, TileLists};
use crate::{Error, Result};
use std::sync::Arc;

/// Most tokens of a segment: what one block of a kernel sums up.
const SEGMENT: usize = 32;

/// Host tables of a batch.
#[derive(Clone, Debug)]
pub(crate) struct BatchTables {
    /// Of every token.
    pub all: TokenTables,
    /// Which token each row of the embedders is, -1: none; `None`: rows are tokens.
    pub place_of_row: Option<Vec<i32>>,
    /// Whether some token is no row: padding.
    pub has_padding: bool,
    /// The tokens that heads read, in their order, and what belongs to them; `None`: all.
    pub read: Option<(Vec<i32>, TokenTables)>,
    /// How many tokens each head reads.
    pub read_by_head: Vec<usize>,
    /// [N, 3]
    positions: Vec<f64>,
    axis: Vec<i32>,
    frequency: Vec<f64>,
    /// [P, 2], the rows of text that some query sees together, by prompt.
    pub prompts: Vec<i32>,
}

/// A batch by its sizes alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BatchSize {
    /// N, and those of them that heads read.
    pub tokens: usize,
    pub read: usize,
    /// Rows of text.
    pub text: usize,
    /// Modulation rows.
    pub rows: usize,
}

/// What is looked up by token: N of them over R modulation rows.
#[derive(Clone, Debug)]
pub(crate) struct TokenTables {
    /// [N]
    pub row_of_token: Vec<i32>,
    /// [N], the tokens of row 0, of row 1, ...
    pub tokens_by_row: Vec<i32>,
    /// [S + 1]
    pub segment_start: Vec<i32>,
    /// [R + 1]
    pub row_segment_start: Vec<i32>,
    /// These tokens as queries: of all tokens, and of the text.
    pub attention: AttentionLists,
    pub text: AttentionLists,
}

/// An attention plan as its kernels read it.
#[derive(Clone, Debug)]
pub(crate) struct AttentionLists {
    pub queries: usize,
    pub keys: usize,
    /// [queries, 8]
    pub row_keys: Vec<i32>,
    /// [keys]
    pub key_bias: Option<Vec<f32>>,
    pub forward: TileLists,
    pub by_query: TileLists,
    pub by_key: TileLists,
    /// (query, key) pairs that see each other.
    pub pairs: u64,
}

impl AttentionLists {
    pub fn new(plan: &AttentionPlan, tiling: &Tiling) -> Self {
        let [forward, by_query, by_key] = [tiling.forward, tiling.by_query, tiling.by_key];
        let forward_lists = plan.tiles_by_query(forward[0], forward[1]);
        let by_query_lists = match by_query == forward {
            true => forward_lists.clone(),
            false => plan.tiles_by_query(by_query[0], by_query[1]),
        };
        Self {
            queries: plan.queries(),
            keys: plan.keys(),
            row_keys: plan.row_keys(),
            key_bias: plan.key_bias().map(<[f32]>::to_vec),
            forward: forward_lists,
            by_query: by_query_lists,
            by_key: plan.tiles_by_key(by_key[0], by_key[1]),
            pairs: plan.visible_pairs(),
        }
    }
}

impl BatchTables {
    /// Tables for `batch` samples of one placement, with `text` rows of text each; the embedders made `embedded` rows.
    pub fn new(placement: &Placement, batch: usize, text: usize, embedded: usize, tiling: &Tiling) -> Result<Self> {
        let tokens = placement.rows.of_token.len();
        let row_count = placement.rows.count;
        let row_of_token: Vec<usize> = (0..batch)
            .flat_map(|sample| placement.rows.of_token.iter().map(move |row| sample * row_count + row))
            .collect();
        let (token_plan, text_plan) = match &placement.sight {
            Sight::Planned { tokens, text } if batch == 1 => (Arc::clone(tokens), Arc::clone(text)),
            Sight::Planned { .. } => return Err(Error::crash("a packed sequence is one sample")),
            Sight::Everything => {
                (Arc::new(samples_apart(batch, tokens, tokens)?), Arc::new(samples_apart(batch, tokens, text)?))
            }
        };
        let of_read = |heads: &Vec<Vec<u32>>| -> Result<(Vec<i32>, TokenTables)> {
            let read = &heads.concat();
            let rows = read.iter().map(|token| row_of_token[*token as usize]).collect::<Vec<_>>();
            let plans = [&token_plan.of_queries(read)?, &text_plan.of_queries(read)?];
            let tables = TokenTables::new(&rows, row_count, plans, tiling);
            Ok((read.iter().map(|token| *token as i32).collect(), tables))
        };
        let (all, read) = rayon::join(
            || TokenTables::new(&row_of_token, batch * row_count, [&token_plan, &text_plan], tiling),
            || match &placement.read {
                Some(_) if batch != 1 => Err(Error::crash("tokens are picked from one sample")),
                heads => heads.as_ref().map(of_read).transpose(),
            },
        );
        let read_by_head = match &placement.read {
            None => vec![batch * tokens],
            Some(heads) => heads.iter().map(Vec::len).collect(),
        };
        let place_of_row = placement.sources.as_ref().map(|sources| places(sources, embedded));
        let has_padding = place_of_row.is_some() && embedded < tokens;
        Ok(Self {
            place_of_row,
            has_padding,
            read_by_head,
            all,
            read: read?,
            positions: placement.table.positions().concat().repeat(batch),
            axis: placement.table.frequencies().iter().map(|(axis, _)| *axis as i32).collect(),
            frequency: placement.table.frequencies().iter().map(|(_, frequency)| *frequency).collect(),
            prompts: text_plan.key_spans().iter().flat_map(|span| [span.start as i32, span.end as i32]).collect(),
        })
    }

    /// Tables as large as those of a batch of this size, with `pairs` rotary pairs a head: for counting memory. Of tiles that
    /// meet there are few, which are a thousandth of the whole.
    pub fn sized(size: &BatchSize, pairs: usize, tiling: &Tiling) -> Result<Self> {
        let &BatchSize { tokens, read, text, rows } = size;
        let row_of = |count: usize| (0..count).map(|token| token * rows / count.max(1)).collect::<Vec<_>>();
        let plan = |queries: usize, keys: usize| -> Result<AttentionPlan> {
            let group = Group { queries: 0..queries as u32, keys: [0..keys.min(128) as u32, 0..0, 0..0] };
            Ok(AttentionPlan::new(queries, keys, vec![group], None)?)
        };
        Ok(Self {
            all: TokenTables::new(&row_of(tokens), rows, [&plan(tokens, tokens)?, &plan(tokens, text)?], tiling),
            place_of_row: Some(vec![0; tokens]),
            has_padding: false,
            read: match read == tokens {
                true => None,
                false => {
                    let plans = [&plan(read, tokens)?, &plan(read, text)?];
                    Some((vec![0; read], TokenTables::new(&row_of(read), rows, plans, tiling)))
                }
            },
            read_by_head: vec![read],
            positions: vec![0.0; 3 * tokens],
            axis: vec![0; pairs],
            frequency: vec![0.0; pairs],
            prompts: Vec::new(),
        })
    }

    pub fn batch_size(&self) -> BatchSize {
        BatchSize { tokens: self.tokens(), read: self.tokens_read(), text: self.text(), rows: self.rows() }
    }

    /// N
    pub fn tokens(&self) -> usize {
        self.all.row_of_token.len()
    }

    /// Tokens that heads read.
    pub fn tokens_read(&self) -> usize {
        self.read.as_ref().map_or(self.tokens(), |(tokens, _)| tokens.len())
    }

    /// Rows of text.
    pub fn text(&self) -> usize {
        self.all.text.keys
    }

    pub fn rows(&self) -> usize {
        self.all.row_segment_start.len() - 1
    }

    pub fn segments(&self) -> usize {
        self.all.segments()
    }

    /// Has the device compute the rotary turns.
    pub fn turns(&self, ops: &Ops, arena: &mut Arena) -> Result<Turns> {
        let pairs = self.frequency.len();
        let turns = Turns { cos_sin: arena.take(2 * self.tokens() * pairs)?, pairs };
        let positions = upload(&ops.launcher, arena, &self.positions)?;
        let axis = upload(&ops.launcher, arena, &self.axis)?;
        let frequency = upload(&ops.launcher, arena, &self.frequency)?;
        ops.rope_table(positions, axis, frequency, &turns, self.tokens())?;
        Ok(turns)
    }
}

impl TokenTables {
    /// `plans` are of tokens and of the text.
    fn new(row_of_token: &[usize], rows: usize, plans: [&AttentionPlan; 2], tiling: &Tiling) -> Self {
        let (tokens_by_row, segment_start, row_segment_start) = segments(row_of_token, rows);
        let ints = |values: &[usize]| values.iter().map(|&value| value as i32).collect::<Vec<_>>();
        Self {
            row_of_token: ints(row_of_token),
            tokens_by_row: ints(&tokens_by_row),
            segment_start: ints(&segment_start),
            row_segment_start: ints(&row_segment_start),
            attention: AttentionLists::new(plans[0], tiling),
            text: AttentionLists::new(plans[1], tiling),
        }
    }

    pub fn segments(&self) -> usize {
        self.segment_start.len() - 1
    }
}

/// Copies values to room in the arena.
pub(crate) fn upload<T>(launcher: &Launcher, arena: &mut Arena, values: &[T]) -> Result<Slice<T>>
where
    T: Element + cudarc::driver::DeviceRepr,
{
    let slice = arena.take::<T>(values.len())?;
    if let Some(stream) = launcher.stream()
        && !values.is_empty()
    {
        // SAFETY: the slice has room for the values, and the copy has read them when the call returns, because they lie
        // in pageable memory.
        unsafe { cudarc::driver::result::memcpy_htod_async(slice.address(), values, stream.cu_stream()) }
            .map_err(|error| device_error(error, format!("copying {} values to the device", values.len())))?;
    }
    Ok(slice)
}

/// Where each of `rows` rows goes, by where each token comes from; -1: nowhere.
fn places(sources: &[u32], rows: usize) -> Vec<i32> {
    let mut places = vec![-1; rows];
    for (token, &source) in sources.iter().enumerate() {
        if let Some(place) = places.get_mut(source as usize) {
            *place = token as i32;
        }
    }
    places
}

/// Each sample sees its own keys, all of them.
fn samples_apart(batch: usize, queries: usize, keys: usize) -> Result<AttentionPlan> {
    let interval = |sample: usize, len: usize| (sample * len) as u32..((sample + 1) * len) as u32;
    let groups = (0..batch)
        .map(|sample| Group { queries: interval(sample, queries), keys: [interval(sample, keys), 0..0, 0..0] })
        .collect();
    Ok(AttentionPlan::new(batch * queries, batch * keys, groups, None)?)
}

/// Tokens sorted by row, the starts of segments of at most [`SEGMENT`] of one row, and each row's first segment.
pub(super) fn segments(row_of_token: &[usize], rows: usize) -> (Vec<usize>, Vec<usize>, Vec<usize>) {
    let mut row_start = vec![0usize; rows + 1];
    for &row in row_of_token {
        row_start[row + 1] += 1;
    }
    for row in 0..rows {
        row_start[row + 1] += row_start[row];
    }
    let mut next = row_start.clone();
    let mut tokens_by_row = vec![0; row_of_token.len()];
    for (token, &row) in row_of_token.iter().enumerate() {
        tokens_by_row[next[row]] = token;
        next[row] += 1;
    }
    let (mut segment_start, mut row_segment_start) = (Vec::new(), vec![0]);
    for ends in row_start.windows(2) {
        segment_start.extend((ends[0]..ends[1]).step_by(SEGMENT));
        row_segment_start.push(segment_start.len());
    }
    segment_start.push(row_of_token.len());
    (tokens_by_row, segment_start, row_segment_start)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_find_the_tokens_that_came_from_them() {
        assert_eq!(places(&[2, 0, 4, 4], 4), [1, -1, 0, -1], "4 is padding, rows 1 and 3 are nobody's");
    }

    #[test]
    fn segments_cover_each_token_once_and_stay_in_their_row() {
        let rows: Vec<usize> = (0..100).map(|token| [2, 0, 2, 3][token % 4]).collect();
        let (tokens, segment_start, row_start) = segments(&rows, 5);
        assert_eq!(row_start, [0, 1, 1, 3, 4, 4], "rows 1 and 4 have no token, row 2 has 50");
        assert_eq!(segment_start, [0, 25, 57, 75, 100]);
        let mut sorted = tokens.clone();
        sorted.sort_unstable();
        assert!(sorted.into_iter().eq(0..100));
        for (row, ends) in row_start.windows(2).enumerate() {
            for segment in ends[0]..ends[1] {
                assert!(
                    tokens[segment_start[segment]..segment_start[segment + 1]].iter().all(|&token| rows[token] == row)
                );
            }
        }
    }
}
