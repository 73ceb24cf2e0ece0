//! Curves for charts: which points count, smoothing on the raw data, and at most two points a column.
//!
//! A chart of eight arms with 200,000 steps each is redrawn in milliseconds because nothing here is proportional to
//! the number of steps once a step has been taken in: minima and maxima are kept for blocks of [`BLOCK`] points, and
//! new points only extend the last block. Smoothing runs over every raw point *before* points are merged into
//! columns; smoothing merged points would bend the curve by the width of the window.

use super::metric::{Metric, Source};
use crate::runlog::{RunView, Series, ValidationPoint};

/// Points summarised by one minimum and one maximum.
const BLOCK: usize = 32;

/// A step and a value.
pub type Point = (u64, f32);

/// Borrowed columns of one metric, in order of arrival.
#[derive(Clone, Copy)]
struct Columns<'a> {
    step: &'a [u64],
    attempt: &'a [u32],
    superseded: &'a [bool],
    value: &'a [f32],
}

impl<'a> Columns<'a> {
    /// The four columns cut to their common length, so that no index can miss.
    fn new(step: &'a [u64], attempt: &'a [u32], superseded: &'a [bool], value: &'a [f32]) -> Self {
        let len = step.len().min(attempt.len()).min(superseded.len()).min(value.len());
        Self { step: &step[..len], attempt: &attempt[..len], superseded: &superseded[..len], value: &value[..len] }
    }

    fn len(&self) -> usize {
        self.step.len()
    }

    /// A point that a chart may show: of the line that was continued, and finite.
    fn kept(&self, index: usize) -> Option<f32> {
        let value = *self.value.get(index)?;
        (value.is_finite() && !*self.superseded.get(index)?).then_some(value)
    }
}

/// A stretch of points of one attempt with rising steps: `start..end` in the columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Segment {
    start: usize,
    end: usize,
}

/// What is kept of the points of one block.
#[derive(Clone, Copy, Debug)]
struct Block {
    low: f32,
    high: f32,
    sum: f32,
    count: u32,
}

impl Block {
    const EMPTY: Self = Self { low: f32::INFINITY, high: f32::NEG_INFINITY, sum: 0.0, count: 0 };

    fn add(&mut self, value: f32) {
        self.merge(&Self { low: value, high: value, sum: value, count: 1 });
    }

    fn merge(&mut self, other: &Self) {
        self.low = self.low.min(other.low);
        self.high = self.high.max(other.high);
        self.sum += other.sum;
        self.count += other.count;
    }
}

/// How the points of a column are merged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Merge {
    /// Minimum and maximum: nothing is hidden.
    Extremes,
    /// One mean: what a curve two fingers wide can show of noise.
    Mean,
}

/// Exponential moving average of the kept points, without the start-up bias of a zero initial value:
/// `m <- w m + (1 - w) x`, shown as `m / (1 - w^n)`. It runs on across a seam: a resumed run is the same run.
#[derive(Clone, Debug)]
struct Smoothed {
    weight: f32,
    mean: f64,
    /// `w^n`; reaches 0, after which the division changes nothing.
    decay: f64,
    /// Aligned with the raw columns; NaN where the raw point isn't kept.
    values: Vec<f32>,
    blocks: Vec<Block>,
}

impl Smoothed {
    fn new(weight: f32) -> Self {
        Self { weight, mean: 0.0, decay: 1.0, values: Vec::new(), blocks: Vec::new() }
    }

    fn push(&mut self, raw: Option<f32>) {
        let value = raw.map(|raw| {
            let weight = f64::from(self.weight);
            self.mean = weight * self.mean + (1.0 - weight) * f64::from(raw);
            self.decay *= weight;
            (self.mean / (1.0 - self.decay)) as f32
        });
        push_block(&mut self.blocks, self.values.len(), value);
        self.values.push(value.unwrap_or(f32::NAN));
    }
}

fn push_block(blocks: &mut Vec<Block>, index: usize, value: Option<f32>) {
    if blocks.len() <= index / BLOCK {
        blocks.push(Block::EMPTY);
    }
    if let (Some(value), Some(block)) = (value, blocks.last_mut()) {
        block.add(value);
    }
}

/// One metric of one arm, prepared for drawing and kept up to date as points arrive.
#[derive(Clone, Debug)]
pub struct Curve {
    metric: Metric,
    /// Validation points as columns; per-step metrics are read in place from the run's own columns.
    validation: Series,
    segments: Vec<Segment>,
    blocks: Vec<Block>,
    smoothed: Option<Smoothed>,
    taken_in: usize,
    /// Step and attempt of the last point taken in: if they no longer stand there, the log was rewritten.
    last: Option<(u64, u32)>,
    non_finite: u64,
    /// First step of the non-finite points that the curve ends with.
    non_finite_since: Option<u64>,
}

impl Curve {
    /// An empty curve.
    pub fn new(metric: Metric) -> Self {
        Self {
            metric,
            validation: Series::default(),
            segments: Vec::new(),
            blocks: Vec::new(),
            smoothed: None,
            taken_in: 0,
            last: None,
            non_finite: 0,
            non_finite_since: None,
        }
    }

    fn columns<'a>(&'a self, run: &'a RunView) -> Columns<'a> {
        let (series, value) = match self.metric.source() {
            Source::Validation(_) => (&self.validation, &self.validation.loss),
            Source::Step(column) => (&run.series, column(&run.series)),
        };
        Columns::new(&series.step, &series.attempt, &series.superseded, value)
    }

    /// Takes in what is new in `run`. A new attempt re-reads the columns once, because it may have marked earlier
    /// points as superseded.
    pub fn update(&mut self, run: &RunView) {
        if let Source::Validation(value) = self.metric.source() {
            let replaced = validation_columns(&run.validations, value);
            if replaced != self.validation {
                self.validation = replaced;
                self.forget();
            }
        }
        let columns = self.columns(run);
        let same_start = self.taken_in == 0
            || (columns.len() >= self.taken_in
                && self.last
                    == columns
                        .step
                        .get(self.taken_in - 1)
                        .copied()
                        .zip(columns.attempt.get(self.taken_in - 1).copied())
                && self.last.map(|(_, attempt)| attempt) == columns.attempt.last().copied());
        if !same_start {
            self.forget();
        }
        self.take_in(run);
    }

    fn forget(&mut self) {
        self.segments.clear();
        self.blocks.clear();
        self.smoothed = self.smoothed.as_ref().map(|smoothed| Smoothed::new(smoothed.weight));
        self.taken_in = 0;
        self.last = None;
        self.non_finite = 0;
        self.non_finite_since = None;
    }

    fn take_in(&mut self, run: &RunView) {
        // The columns borrow `self` for validation metrics, so the parts that grow are moved out while they do.
        let mut segments = std::mem::take(&mut self.segments);
        let mut blocks = std::mem::take(&mut self.blocks);
        let mut smoothed = self.smoothed.take();
        let (mut non_finite, mut since, mut last) = (self.non_finite, self.non_finite_since, self.last);
        let columns = self.columns(run);
        for index in self.taken_in..columns.len() {
            let (step, attempt) = (columns.step[index], columns.attempt[index]);
            let kept = columns.kept(index);
            let continues = last.is_some_and(|(before, of)| of == attempt && before < step);
            match segments.last_mut() {
                Some(segment) if continues => segment.end = index + 1,
                _ => segments.push(Segment { start: index, end: index + 1 }),
            }
            last = Some((step, attempt));
            push_block(&mut blocks, index, kept);
            if let Some(smoothed) = &mut smoothed {
                smoothed.push(kept);
            }
            if columns.superseded[index] {
                continue;
            }
            if kept.is_some() {
                since = None;
            } else {
                non_finite += 1;
                since = since.or(Some(step));
            }
        }
        self.taken_in = columns.len();
        self.segments = segments;
        self.blocks = blocks;
        self.smoothed = smoothed;
        self.non_finite = non_finite;
        self.non_finite_since = since;
        self.last = last;
    }

    /// Sets the weight of the moving average, 0 for none. Reads all points again if it changed.
    pub fn smooth(&mut self, weight: f32, run: &RunView) {
        let current = self.smoothed.as_ref().map_or(0.0, |smoothed| smoothed.weight);
        if current == weight {
            return;
        }
        if weight <= 0.0 || weight >= 1.0 {
            self.smoothed = None;
            return;
        }
        let mut smoothed = Smoothed::new(weight);
        let columns = self.columns(run);
        for index in 0..self.taken_in {
            smoothed.push(columns.kept(index));
        }
        self.smoothed = Some(smoothed);
    }

    /// Is a moving average drawn?
    pub fn is_smoothed(&self) -> bool {
        self.smoothed.is_some()
    }

    /// Non-finite points dropped.
    pub fn non_finite(&self) -> u64 {
        self.non_finite
    }

    /// First step of the non-finite values the curve ends with: "NaN since step N".
    pub fn non_finite_since(&self) -> Option<u64> {
        self.non_finite_since
    }

    /// The last kept point.
    pub fn last(&self, run: &RunView) -> Option<Point> {
        self.at(run, u64::MAX)
    }

    /// The last kept point at or before `step`.
    pub fn at(&self, run: &RunView, step: u64) -> Option<Point> {
        let columns = self.columns(run);
        let mut best: Option<Point> = None;
        for segment in self.segments.iter().rev() {
            let steps = columns.step.get(segment.start..segment.end)?;
            let end = segment.start + steps.partition_point(|s| *s <= step);
            let found = (segment.start..end).rev().find_map(|index| Some((columns.step[index], columns.kept(index)?)));
            match (found, best) {
                (Some(found), Some(before)) if found.0 <= before.0 => {}
                (Some(found), _) => best = Some(found),
                (None, _) => {}
            }
            // Later attempts continue earlier ones, so the first hit from the back is the newest line.
            if best.is_some() {
                break;
            }
        }
        best
    }

    /// Smallest and largest step with a kept point.
    pub fn extent(&self, run: &RunView) -> Option<(u64, u64)> {
        let columns = self.columns(run);
        let first = self.segments.iter().find_map(|segment| {
            (segment.start..segment.end).find_map(|index| columns.kept(index).map(|_| columns.step[index]))
        })?;
        Some((first, self.last(run)?.0.max(first)))
    }

    /// Lines within `from..=to`, one for each stretch of an attempt, at most two points a column (its minimum and
    /// maximum). One point beyond each edge is kept so that lines reach the border.
    pub fn trace(&self, run: &RunView, smoothed: bool, from: u64, to: u64, columns: usize) -> Vec<Vec<Point>> {
        self.lines(run, smoothed, (from, to), columns, Merge::Extremes)
    }

    /// As [`trace`](Self::trace) on the raw points, with one point a column: their mean.
    pub fn means(&self, run: &RunView, from: u64, to: u64, columns: usize) -> Vec<Vec<Point>> {
        self.lines(run, false, (from, to), columns, Merge::Mean)
    }

    fn lines(
        &self,
        run: &RunView,
        smoothed: bool,
        (from, to): (u64, u64),
        columns: usize,
        merge: Merge,
    ) -> Vec<Vec<Point>> {
        let raw = self.columns(run);
        let (values, blocks) = match &self.smoothed {
            Some(curve) if smoothed => (curve.values.as_slice(), curve.blocks.as_slice()),
            _ if smoothed => return Vec::new(),
            _ => (raw.value, self.blocks.as_slice()),
        };
        let source = Columns::new(raw.step, raw.attempt, raw.superseded, values);
        let mut lines = Vec::new();
        for segment in &self.segments {
            let end = segment.end.min(source.len());
            let Some(steps) = source.step.get(segment.start..end) else { continue };
            let first = (segment.start + steps.partition_point(|s| *s < from)).saturating_sub(1).max(segment.start);
            let last = (segment.start + steps.partition_point(|s| *s <= to) + 1).min(end);
            let line = merge_columns(&source, blocks, (first, last), (from, to), columns.max(1), merge);
            if !line.is_empty() {
                lines.push(line);
            }
        }
        lines
    }
}

/// The kept points of `first..last`, or the extremes of each column if there are more than two a column.
fn merge_columns(
    source: &Columns<'_>,
    blocks: &[Block],
    (first, last): (usize, usize),
    (from, to): (u64, u64),
    columns: usize,
    merge: Merge,
) -> Vec<Point> {
    let most = if merge == Merge::Mean { columns } else { 2 * columns };
    if last.saturating_sub(first) <= most {
        return (first..last).filter_map(|index| Some((source.step[index], source.kept(index)?))).collect();
    }
    let span = u128::from(to.saturating_sub(from)) + 1;
    let mut line: Vec<Point> = Vec::with_capacity(2 * columns + 2);
    let mut start = first;
    for column in 0..columns {
        let bound = from.saturating_add((span * (column as u128 + 1) / columns as u128) as u64);
        let end = if column + 1 == columns {
            last
        } else {
            start + source.step.get(start..last).map_or(0, |steps| lower_bound(steps, bound))
        };
        let Block { low, high, sum, count } = summary(source, blocks, start, end);
        if count > 0 {
            let step = source.step[start + (end - start) / 2];
            if merge == Merge::Mean {
                line.push((step, sum / count as f32));
                start = end;
                continue;
            }
            // Enter the column at the end nearer to where the line comes from: no needless vertical strokes.
            let rising = line.last().is_none_or(|(_, before)| (before - low).abs() <= (before - high).abs());
            let (one, other) = if rising { (low, high) } else { (high, low) };
            line.push((step, one));
            if one != other {
                line.push((step, other));
            }
        }
        start = end;
    }
    line
}

/// Steps below `bound` at the start of the rising `steps`. Steps nearly always rise by one, so the place is guessed
/// first: a search would touch memory all over the column, once for each column of the screen.
fn lower_bound(steps: &[u64], bound: u64) -> usize {
    let Some(first) = steps.first() else { return 0 };
    let guess = usize::try_from(bound.saturating_sub(*first)).unwrap_or(usize::MAX).min(steps.len());
    let below = guess.checked_sub(1).and_then(|before| steps.get(before)).is_none_or(|step| *step < bound);
    let above = steps.get(guess).is_none_or(|step| *step >= bound);
    if below && above { guess } else { steps.partition_point(|step| *step < bound) }
}

/// What is kept of the points `start..end`: whole blocks by their summary, the rest point by point.
fn summary(source: &Columns<'_>, blocks: &[Block], start: usize, end: usize) -> Block {
    let mut found = Block::EMPTY;
    let mut index = start;
    while index < end {
        if index.is_multiple_of(BLOCK) && index + BLOCK <= end {
            if let Some(block) = blocks.get(index / BLOCK) {
                found.merge(block);
            }
            index += BLOCK;
        } else {
            if let Some(value) = source.kept(index) {
                found.add(value);
            }
            index += 1;
        }
    }
    found
}

/// Validation points as columns (values in `loss`): a point is superseded if a later attempt measured its step or an
/// earlier one again.
fn validation_columns(points: &[ValidationPoint], value: fn(&crate::runlog::ValidationEvent) -> f64) -> Series {
    let mut columns = Series {
        step: points.iter().map(|point| point.event.step).collect(),
        attempt: points.iter().map(|point| point.attempt).collect(),
        superseded: vec![false; points.len()],
        loss: points.iter().map(|point| value(&point.event) as f32).collect(),
        ..Series::default()
    };
    let mut lowest_later = u64::MAX;
    for (superseded, point) in columns.superseded.iter_mut().zip(points).rev() {
        *superseded = point.event.step >= lowest_later;
        lowest_later = lowest_later.min(point.event.step);
    }
    columns
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn run_of(values: &[f32]) -> RunView {
        let mut run = RunView::default();
        for (index, value) in values.iter().enumerate() {
            push(&mut run, index as u64 + 1, 1, *value);
        }
        run
    }

    fn push(run: &mut RunView, step: u64, attempt: u32, loss: f32) {
        run.series.step.push(step);
        run.series.attempt.push(attempt);
        run.series.superseded.push(false);
        run.series.loss.push(loss);
    }

    fn curve_of(run: &RunView, weight: f32) -> Curve {
        let mut curve = Curve::new(Metric::Loss);
        curve.update(run);
        curve.smooth(weight, run);
        curve
    }

    #[test]
    fn smoothing_runs_over_every_raw_point() {
        let values: Vec<f32> = (0..10_000).map(|i| if i % 2 == 0 { 1.0 } else { 3.0 }).collect();
        let run = run_of(&values);
        let curve = curve_of(&run, 0.9);
        let line = &curve.trace(&run, true, 1, 10_000, 50)[0];
        assert!(line.len() <= 100);
        // The mean of the raw points, not of merged extremes or of a subsample that hits only one parity.
        for (step, value) in line.iter().skip(2) {
            assert!((value - 2.0).abs() < 0.2, "{step}: {value}");
        }
    }

    #[test]
    fn the_average_has_no_start_up_bias() {
        let run = run_of(&[5.0, 5.0, 5.0]);
        let curve = curve_of(&run, 0.9);
        for (_, value) in &curve.trace(&run, true, 0, 10, 10)[0] {
            assert!((value - 5.0).abs() < 1e-5);
        }
    }

    #[test]
    fn a_spike_survives_merging() {
        let mut values = vec![1.0; 200_000];
        values[123_456] = 40.0;
        let run = run_of(&values);
        let line = &curve_of(&run, 0.0).trace(&run, false, 1, 200_000, 100)[0];
        assert!(line.len() <= 200);
        assert!(line.iter().any(|(_, value)| *value == 40.0));
    }

    #[test]
    fn superseded_points_are_left_out_and_the_seam_breaks_the_line() {
        let mut run = run_of(&[5.0, 4.0, 3.0, 99.0]);
        let mut curve = curve_of(&run, 0.0);
        assert_eq!(curve.last(&run), Some((4, 99.0)));
        run.series.superseded[3] = true;
        push(&mut run, 4, 2, 2.0);
        push(&mut run, 5, 2, 1.0);
        curve.update(&run);
        let lines = curve.trace(&run, false, 0, 10, 10);
        assert_eq!(lines, vec![vec![(1, 5.0), (2, 4.0), (3, 3.0)], vec![(4, 2.0), (5, 1.0)]]);
        assert_eq!(curve.at(&run, 4), Some((4, 2.0)));
        assert_eq!(curve.at(&run, 3), Some((3, 3.0)));
        assert_eq!(curve.at(&run, 0), None);
    }

    #[test]
    fn non_finite_points_are_dropped_and_reported() {
        let mut run = run_of(&[1.0, f32::NAN, 2.0, f32::INFINITY, f32::NAN]);
        let mut curve = curve_of(&run, 0.5);
        assert_eq!((curve.non_finite(), curve.non_finite_since()), (3, Some(4)));
        assert_eq!(curve.last(&run), Some((3, 2.0)));
        assert!(curve.trace(&run, true, 0, 9, 10).iter().flatten().all(|(_, value)| value.is_finite()));
        push(&mut run, 6, 1, 3.0);
        curve.update(&run);
        assert_eq!((curve.non_finite(), curve.non_finite_since()), (3, None));
    }

    #[test]
    fn the_guessed_place_is_the_searched_one() {
        for steps in [vec![5, 6, 7, 8], vec![5, 7, 9, 30], vec![1, 2, 3, u64::MAX], vec![4], vec![]] {
            for bound in [0, 1, 4, 5, 6, 7, 8, 9, 10, 29, 30, 31, u64::MAX] {
                assert_eq!(
                    lower_bound(&steps, bound),
                    steps.partition_point(|step| *step < bound),
                    "{steps:?} {bound}"
                );
            }
        }
    }

    #[test]
    fn a_log_that_shrank_is_read_again() {
        let mut curve = curve_of(&run_of(&[1.0, 2.0, 3.0]), 0.0);
        let shorter = run_of(&[7.0]);
        curve.update(&shorter);
        assert_eq!(curve.last(&shorter), Some((1, 7.0)));
    }

    proptest! {
        #[test]
        fn growing_by_any_pieces_equals_reading_at_once(
            values in prop::collection::vec(prop_oneof![9 => -1e3f32..1e3, 1 => Just(f32::NAN)], 1..400),
            cuts in prop::collection::vec(0usize..400, 0..6),
            resume_at in 0usize..400,
            columns in 1usize..60,
        ) {
            let mut whole = run_of(&values);
            let resume_at = resume_at.min(values.len());
            for index in resume_at..values.len() { whole.series.superseded[index] = true; }
            for (index, value) in values.iter().enumerate().skip(resume_at) {
                push(&mut whole, index as u64 + 1, 2, value * 0.5);
            }
            let at_once = curve_of(&whole, 0.7);
            let mut pieces = Curve::new(Metric::Loss);
            let mut cuts: Vec<usize> = cuts.into_iter().map(|c| c.min(whole.series.len())).collect();
            cuts.push(whole.series.len());
            cuts.sort_unstable();
            for cut in cuts {
                let mut part = whole.clone();
                part.series.step.truncate(cut);
                part.series.attempt.truncate(cut);
                part.series.superseded.truncate(cut);
                part.series.loss.truncate(cut);
                if part.series.attempt.last() != Some(&2) {
                    part.series.superseded.iter_mut().for_each(|flag| *flag = false);
                }
                pieces.update(&part);
                pieces.smooth(0.7, &part);
            }
            for smoothed in [false, true] {
                let lines = at_once.trace(&whole, smoothed, 3, 350, columns);
                prop_assert_eq!(&lines, &pieces.trace(&whole, smoothed, 3, 350, columns));
                for line in &lines { prop_assert!(line.len() <= 2 * columns + 2); }
            }
        }
    }
}
