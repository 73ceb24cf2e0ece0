//! Where each parameter lies in one flat buffer.
//!
//! Parameters, gradients, masters and moments share one order, so the optimizer, the gradient norm and a snapshot are
//! single passes, and a future sharding is a range. It is that of names, in which numbers count as numbers: a block lies
//! together, block after block. What one matrix product reads has no gap either: the weights of query, key and value,
//! those of key and value of the text. Parameters that nothing trains come last, behind the range that the optimizer
//! touches.

use crate::{Error, Result};
use std::collections::BTreeMap;

/// Tensors start at multiples of this many elements: 256 bytes of bf16, which cuBLASLt takes for granted.
const ALIGNMENT: usize = 128;
/// Those that must follow one another, at multiples of 16 bytes of bf16: the widest loads.
const LEAST: usize = 8;

/// A parameter's place, in elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    pub offset: usize,
    pub len: usize,
}

/// The order of a model's parameters.
#[derive(Clone, Debug)]
pub(crate) struct FlatLayout {
    spans: BTreeMap<String, Span>,
    /// Elements that are trained, gaps included; a multiple of the alignment.
    pub trained: usize,
    /// Elements in all.
    pub len: usize,
}

impl FlatLayout {
    /// `tensors` are (name, elements, trained). `adjacent` lists names that must follow one another without a gap.
    pub fn new<'a>(tensors: impl Iterator<Item = (&'a str, usize, bool)>, adjacent: &[Vec<String>]) -> Result<Self> {
        let tensors: BTreeMap<&str, (usize, bool)> =
            tensors.map(|(name, len, trained)| (name, (len, trained))).collect();
        let mut spans = BTreeMap::new();
        let mut end: usize = 0;
        let mut place = |name: &str, len: usize, alignment: usize| -> bool {
            let offset = end.next_multiple_of(alignment);
            let gap = offset != end;
            end = offset + len;
            spans.insert(name.to_owned(), Span { offset, len });
            !gap
        };
        let mut grouped: Vec<&str> = adjacent.iter().flatten().map(String::as_str).collect();
        grouped.sort_unstable();
        let alone = |wanted: bool| {
            let grouped = &grouped;
            tensors
                .iter()
                .filter(move |(name, (_, trained))| *trained == wanted && grouped.binary_search(name).is_err())
                .map(|(name, _)| *name)
        };
        let mut runs: Vec<Vec<&str>> = adjacent
            .iter()
            .map(|group| group.iter().map(String::as_str).collect())
            .chain(alone(true).map(|name| vec![name]))
            .collect();
        runs.sort_by_cached_key(|run| run.first().map(|name| by_number(name)));
        for run in &runs {
            for (position, name) in run.iter().enumerate() {
                let Some(&(len, _)) = tensors.get(name) else {
                    return Err(Error::crash(format!("no parameter named {name}")));
                };
                let alignment = if position == 0 { ALIGNMENT } else { LEAST };
                if !place(name, len, alignment) && position > 0 {
                    let what = format!("{name} cannot follow {}", run[position - 1]);
                    return Err(
                        Error::refused("width_not_supported", what).hint("on a GPU model.dim must be a multiple of 8")
                    );
                }
            }
        }
        let trained = end.next_multiple_of(ALIGNMENT);
        end = trained;
        for name in alone(false) {
            let len = tensors.get(name).map_or(0, |(len, _)| *len);
            let offset = end.next_multiple_of(ALIGNMENT);
            end = offset + len;
            spans.insert(name.to_owned(), Span { offset, len });
        }
        Ok(Self { spans, trained, len: end.next_multiple_of(ALIGNMENT) })
    }

    /// Bytes of parameters and gradients, and with an optimizer of moments and, beside bf16 parameters, masters.
    pub fn state_bytes(&self, half: bool, with_optimizer: bool) -> u64 {
        let (parameter, master) = if half { (2, 4) } else { (4, 0) };
        let optimizer = if with_optimizer { 8 + master } else { 0 };
        (self.len * parameter + self.trained * (4 + optimizer)) as u64
    }

    pub fn span(&self, name: &str) -> Result<Span> {
        self.spans.get(name).copied().ok_or_else(|| Error::crash(format!("no parameter named {name}")))
    }

    /// The place of all trained parameters whose names begin so, which lie together.
    pub fn span_of_all(&self, beginning: &str) -> Span {
        let wanted = |name: &str, span: &Span| span.offset < self.trained && name.starts_with(beginning);
        let spans = || self.iter().filter(|(name, span)| wanted(name, span)).map(|(_, span)| span);
        let start = spans().map(|span| span.offset).min().unwrap_or(0);
        let end = spans().map(|span| span.offset + span.len).max().unwrap_or(0);
        Span { offset: start, len: (end.next_multiple_of(ALIGNMENT) - start).min(self.trained.saturating_sub(start)) }
    }

    /// (name, place) in name order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, Span)> {
        self.spans.iter().map(|(name, span)| (name.as_str(), *span))
    }

    /// The parameter that element `index` belongs to.
    pub fn name_at(&self, index: usize) -> Option<&str> {
        self.iter().find(|(_, span)| (span.offset..span.offset + span.len).contains(&index)).map(|(name, _)| name)
    }
}

/// What a name is sorted by: text as text, numbers as numbers.
fn by_number(name: &str) -> Vec<(u64, &str)> {
    let mut parts = Vec::new();
    let mut rest = name;
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
        let (number, after) = rest.split_at(digits);
        let text = after.find(|c: char| c.is_ascii_digit()).unwrap_or(after.len());
        let (text, after) = after.split_at(text);
        parts.push((number.parse().unwrap_or(0), text));
        rest = after;
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_lie_together_and_untrained_tensors_last() {
        let tensors = [("a", 3, true), ("k", 16, true), ("q", 16, true), ("unused", 5, false), ("z", 8, true)];
        let group = vec![vec!["q".to_owned(), "k".to_owned()]];
        let layout = FlatLayout::new(tensors.into_iter(), &group).expect("a layout");
        assert_eq!(layout.span("a").expect("a"), Span { offset: 0, len: 3 });
        assert_eq!(layout.span("q").expect("q"), Span { offset: 128, len: 16 });
        assert_eq!(layout.span("k").expect("k"), Span { offset: 144, len: 16 });
        assert_eq!(layout.span("z").expect("z"), Span { offset: 256, len: 8 });
        assert_eq!((layout.trained, layout.span("unused").expect("unused").offset, layout.len), (384, 384, 512));
        assert_eq!((layout.name_at(146), layout.name_at(132), layout.name_at(4)), (Some("k"), Some("q"), None));
        assert_eq!(
            [layout.state_bytes(true, false), layout.state_bytes(true, true)],
            [512 * 2 + 384 * 4, 512 * 2 + 384 * 16]
        );
        assert_eq!(layout.state_bytes(false, true), 512 * 4 + 384 * 12);
        let uneven = [("q", 5, true), ("k", 5, true)];
        assert_eq!(FlatLayout::new(uneven.into_iter(), &group).expect_err("a gap").code, "width_not_supported");
        assert!(FlatLayout::new([("q", 8, true)].into_iter(), &group).is_err(), "k is missing");
    }

    #[test]
    fn a_block_lies_together_and_blocks_in_their_order() {
        let names: Vec<String> =
            [10, 9, 2].iter().flat_map(|block| ["b", "q", "k"].map(|part| format!("blocks.{block}.{part}"))).collect();
        let others = ["action", "video"].map(str::to_owned);
        let tensors = names.iter().chain(&others).map(|name| (name.as_str(), 16, true));
        let group = |block: usize| ["q", "k"].map(|part| format!("blocks.{block}.{part}")).to_vec();
        let layout = FlatLayout::new(tensors, &[group(2), group(9), group(10)]).expect("a layout");
        let place = |block: usize| layout.span_of_all(&format!("blocks.{block}."));
        assert_eq!(place(2), Span { offset: 128, len: 256 }, "the biases, then q and k without a gap");
        assert_eq!(place(9), Span { offset: 384, len: 256 });
        assert_eq!(place(10), Span { offset: 640, len: 256 });
        assert_eq!(layout.span("video").expect("video").offset, 896);
    }
}
