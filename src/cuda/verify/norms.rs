//! The residual stream's LayerNorms, the RMSNorms of queries and keys with their turns, and the sums that they leave.

use super::Table;
use super::products::column_sums;
use super::rig::{EPS, Format, Matrix, Rig, Verdict};
use crate::Result;
use crate::cuda::batch::segments;
use crate::cuda::launch::{Operand, Slice};
use crate::cuda::ops::{self, Added, Change, Modulation, Moments, Ops, Partials, Segments, Turns};

/// A use that the trunk makes of the kernels: what is added before, and the norm behind it.
#[derive(Clone, Copy, Debug)]
struct Form {
    name: &'static str,
    /// The part of the modulation that gates y, if any does; `None`: there is no y.
    gate: Option<Option<usize>>,
    norm: Norm,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Norm {
    None,
    Affine,
    /// Parts of the modulation.
    Modulate {
        shift: usize,
        scale: usize,
    },
}

/// Taken back where the stream lies, as the backward pass does before it computes a norm again.
const TAKEN_BACK: [Form; 2] = [
    Form { name: "gated y taken back, modulated", gate: Some(Some(5)), norm: Norm::Modulate { shift: 3, scale: 4 } },
    Form { name: "y taken back, affine", gate: Some(None), norm: Norm::Affine },
];

const FORMS: [Form; 4] = [
    Form { name: "modulated", gate: None, norm: Norm::Modulate { shift: 0, scale: 1 } },
    Form { name: "gated y, affine", gate: Some(Some(2)), norm: Norm::Affine },
    Form { name: "y, modulated", gate: Some(None), norm: Norm::Modulate { shift: 3, scale: 4 } },
    Form { name: "gated y alone", gate: Some(Some(5)), norm: Norm::None },
];

pub(super) fn all(rig: &mut Rig<'_>, table: &mut Table) {
    for (tokens, width) in [(1, 48), (77, 208), (150, 3072), (21, 3200)] {
        for form in FORMS {
            let shape = format!("{tokens} x {width}, {}", form.name);
            table.case(rig, "residual_norm", shape.clone(), |rig| residual_norm(rig, form, 1.0, tokens, width));
            table.case(rig, "residual_norm gradient", shape, |rig| residual_norm_backward(rig, form, tokens, width));
        }
        for form in TAKEN_BACK {
            let shape = format!("{tokens} x {width}, {}", form.name);
            table.case(rig, "residual_norm", shape, |rig| residual_norm(rig, form, -1.0, tokens, width));
        }
    }
    for (tokens, heads, head_dim, parts) in [(1, 2, 24, 1), (77, 4, 52, 3), (70, 24, 128, 3), (33, 25, 128, 1)] {
        for turned in [true, false] {
            let strided = if parts > 1 { ", strided" } else { "" };
            let turns = if turned { ", turned" } else { "" };
            let shape = format!("{tokens} x {}{turns}{strided}", heads * head_dim);
            let heads = Heads { tokens, heads, head_dim, parts, turned };
            table.case(rig, "rms_norm_rope", shape.clone(), |rig| rms_norm_rope(rig, heads));
            table.case(rig, "rms_norm_rope gradient", shape, |rig| rms_norm_rope_backward(rig, heads));
        }
    }
    if !rig.half() {
        for (tokens, width) in [(77, 48), (700, 3072), (90, 1032)] {
            table.case(rig, "reduce_rows", format!("{tokens} x {width}"), |rig| reduce_rows(rig, tokens, width));
        }
        for (rows, width) in [(1, 48), (37, 208), (701, 3072)] {
            table.case(rig, "column_sum", format!("{rows} x {width}"), |rig| column_sum(rig, rows, width));
        }
    }
}

/// Inputs of a norm in f64, as the kernels' arguments are.
struct Problem<'a> {
    form: Form,
    /// 1, or -1 for what is taken back.
    sign: f64,
    width: usize,
    /// [N]
    rows: &'a [usize],
    /// [R, 6, D]
    e0: &'a [f64],
    /// [6, D], of the norm's block and of that whose result is added
    table: &'a [f64],
    gates: &'a [f64],
    weight: &'a [f64],
    bias: &'a [f64],
    /// [N, D]; not read without a y.
    y: &'a [f64],
}

#[derive(Debug, Default)]
struct Forward {
    x1: Vec<f64>,
    h: Vec<f64>,
    mean: Vec<f64>,
    rstd: Vec<f64>,
}

#[derive(Debug, Default)]
struct Backward {
    dx: Vec<f64>,
    dy: Vec<f64>,
    /// [S, D] each
    scale: Vec<f64>,
    shift: Vec<f64>,
    gate: Vec<f64>,
}

impl Problem<'_> {
    fn part(&self, table: &[f64], token: usize, part: usize, channel: usize) -> f64 {
        self.e0[(self.rows[token] * 6 + part) * self.width + channel] + table[part * self.width + channel]
    }

    /// What multiplies y.
    fn gate(&self, token: usize, channel: usize) -> f64 {
        match self.form.gate {
            Some(Some(part)) => self.sign * self.part(self.gates, token, part, channel),
            Some(None) => self.sign,
            None => 0.0,
        }
    }

    /// What multiplies the normalised stream.
    fn factor(&self, token: usize, channel: usize) -> f64 {
        match self.form.norm {
            Norm::None => 1.0,
            Norm::Affine => self.weight[channel],
            Norm::Modulate { scale, .. } => 1.0 + self.part(self.table, token, scale, channel),
        }
    }

    fn shift(&self, token: usize, channel: usize) -> f64 {
        match self.form.norm {
            Norm::None => 0.0,
            Norm::Affine => self.bias[channel],
            Norm::Modulate { shift, .. } => self.part(self.table, token, shift, channel),
        }
    }

    fn forward(&self, x: &[f64]) -> Forward {
        let mut result = Forward::default();
        for (token, x) in x.chunks_exact(self.width).enumerate() {
            let y = |channel: usize| self.y.get(token * self.width + channel).copied().unwrap_or(0.0);
            let x1: Vec<f64> = x.iter().enumerate().map(|(c, x)| x + self.gate(token, c) * y(c)).collect();
            let mean = x1.iter().sum::<f64>() / self.width as f64;
            let variance = x1.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / self.width as f64;
            let rstd = (variance + EPS).sqrt().recip();
            let normed = x1.iter().enumerate();
            result.h.extend(normed.map(|(c, x)| (x - mean) * rstd * self.factor(token, c) + self.shift(token, c)));
            result.x1.extend(x1);
            result.mean.push(mean);
            result.rstd.push(rstd);
        }
        result
    }

    /// `dx` is the gradient of x1 that comes from later; segments are runs of `tokens_by_row`.
    fn backward(
        &self,
        [dh, dx, x1]: [&[f64]; 3],
        [mean, rstd]: [&[f64]; 2],
        tokens_by_row: &[usize],
        segment_start: &[usize],
    ) -> Backward {
        let width = self.width;
        let count = segment_start.len().saturating_sub(1) * width;
        let mut result = Backward {
            dx: dx.to_vec(),
            dy: vec![0.0; dx.len()],
            scale: vec![0.0; count],
            shift: vec![0.0; count],
            gate: vec![0.0; count],
        };
        for (segment, ends) in segment_start.windows(2).enumerate() {
            for &token in &tokens_by_row[ends[0]..ends[1]] {
                let start = token * width;
                if self.form.norm != Norm::None {
                    let xhat: Vec<f64> = (0..width).map(|c| (x1[start + c] - mean[token]) * rstd[token]).collect();
                    let inner: Vec<f64> = (0..width).map(|c| dh[start + c] * self.factor(token, c)).collect();
                    let mean_inner = inner.iter().sum::<f64>() / width as f64;
                    let mean_product = inner.iter().zip(&xhat).map(|(a, b)| a * b).sum::<f64>() / width as f64;
                    for c in 0..width {
                        result.dx[start + c] += rstd[token] * (inner[c] - mean_inner - xhat[c] * mean_product);
                        result.scale[segment * width + c] += dh[start + c] * xhat[c];
                        result.shift[segment * width + c] += dh[start + c];
                    }
                }
                for c in 0..width {
                    let gradient = result.dx[start + c];
                    result.dy[start + c] = self.gate(token, c) * gradient;
                    result.gate[segment * width + c] += gradient * self.y.get(start + c).copied().unwrap_or(0.0);
                }
            }
        }
        result
    }
}

/// Rows of tokens: in runs, as frames lie, with single tokens of other rows between; the second row has no token.
fn rows_of(rig: &mut Rig<'_>, tokens: usize) -> (Vec<usize>, usize) {
    const ROWS: usize = 7;
    let mut rows = Vec::with_capacity(tokens);
    while rows.len() < tokens {
        let draw = rig.draw();
        let row = [0, 2, 3, 4, 5, 6][draw.below(6)];
        let run = if draw.below(3) == 0 { 1 } else { 1 + draw.below(45) };
        rows.extend(std::iter::repeat_n(row, run.min(tokens - rows.len())));
    }
    (rows, ROWS)
}

fn ints(values: &[usize]) -> Vec<i32> {
    values.iter().map(|&value| value as i32).collect()
}

fn residual_norm(rig: &mut Rig<'_>, form: Form, sign: f64, tokens: usize, width: usize) -> Result<Verdict> {
    let (rows, count) = rows_of(rig, tokens);
    let (stream, channels) = (Matrix::new(tokens, width), Matrix::new(1, width));
    let x = rig.normal(Format::F32, stream, 1.0, 0.5)?;
    let y = rig.operands(stream, 1.0)?;
    let table = Matrix::new(6, width);
    let e0 = rig.operands(Matrix::new(count * 6, width), 0.5)?;
    let (parts, gates) = (rig.operands(table, 0.5)?, rig.operands(table, 0.5)?);
    let (weight, bias) = (rig.operands(channels, 1.0)?, rig.operands(channels, 1.0)?);
    let problem = Problem {
        form,
        sign,
        width,
        rows: &rows,
        e0: &e0.values,
        table: &parts.values,
        gates: &gates.values,
        weight: &weight.values,
        bias: &bias.values,
        y: &y.values,
    };
    let expected = problem.forward(&x.values);
    let modulation = Modulation { e0: e0.place.slice(), table: parts.place.slice(), rows: rig.table(&ints(&rows))? };
    let x1 = match sign < 0.0 {
        true => rig.changed("x1", Format::F32, stream, &x.values)?,
        false => rig.output("x1", Format::F32, stream)?,
    };
    let h = rig.output("h", rig.operand, stream)?;
    let mean = rig.output("mean", Format::F32, Matrix::new(1, tokens))?;
    let rstd = rig.output("rstd", Format::F32, Matrix::new(1, tokens))?;
    let mut outputs = Vec::new();
    if form.gate.is_some() {
        outputs.push((&x1, expected.x1.as_slice()));
    }
    if form.norm != Norm::None {
        outputs.extend([(&h, expected.h.as_slice()), (&mean, &expected.mean), (&rstd, &expected.rstd)]);
    }
    let norm = launched(form.norm, weight.place.slice(), bias.place.slice());
    let change = form.gate.map_or(Change::Nothing, |gate| match added(y.place.slice(), gate, gates.place.slice()) {
        added if sign < 0.0 => Change::TakeBack(added, x1.place.slice()),
        added => Change::Add(added, x1.place.slice()),
    });
    let from = if sign < 0.0 { x1.place.slice() } else { x.place.slice() };
    let none = form.norm == Norm::None;
    let moments = Moments { mean: or_null(none, mean.place.slice()), rstd: or_null(none, rstd.place.slice()) };
    let h_out = or_null(none, h.place.slice());
    rig.compare(&outputs, |rig| rig.ops.residual_norm(from, change, &modulation, norm, h_out, moments, tokens, width))
}

fn residual_norm_backward(rig: &mut Rig<'_>, form: Form, tokens: usize, width: usize) -> Result<Verdict> {
    let (rows, count) = rows_of(rig, tokens);
    let (tokens_by_row, segment_start, row_segment_start) = segments(&rows, count);
    let (stream, channels) = (Matrix::new(tokens, width), Matrix::new(1, width));
    let x1 = rig.normal(Format::F32, stream, 1.0, 0.5)?;
    let before = rig.floats(stream, 1.0)?.values;
    let (dh, y) = (rig.operands(stream, 1.0)?, rig.operands(stream, 1.0)?);
    let table = Matrix::new(6, width);
    let e0 = rig.operands(Matrix::new(count * 6, width), 0.5)?;
    let (parts, gates) = (rig.operands(table, 0.5)?, rig.operands(table, 0.5)?);
    let weight = rig.operands(channels, 1.0)?;
    // Statistics as the forward leaves them.
    let plain = Form { gate: None, norm: Norm::None, ..form };
    let nothing: &[f64] = &[];
    let problem = Problem {
        form,
        sign: 1.0,
        width,
        rows: &rows,
        e0: &e0.values,
        table: &parts.values,
        gates: &gates.values,
        weight: &weight.values,
        bias: nothing,
        y: &y.values,
    };
    let Forward { mean, rstd, .. } = Problem { form: plain, ..problem }.forward(&x1.values);
    let mean = rig.given(Format::F32, Matrix::new(1, tokens), mean)?;
    let rstd = rig.given(Format::F32, Matrix::new(1, tokens), rstd)?;
    let gradients = [dh.values.as_slice(), &before, &x1.values];
    let expected = problem.backward(gradients, [&mean.values, &rstd.values], &tokens_by_row, &segment_start);

    let segment_count = segment_start.len() - 1;
    let sums = Matrix::new(segment_count, width);
    let dx = rig.changed("dx", Format::F32, stream, &before)?;
    let dy = rig.output("dy", rig.operand, stream)?;
    let scale = rig.output("scale sums", Format::F32, sums)?;
    let shift = rig.output("shift sums", Format::F32, sums)?;
    let gate = rig.output("gate sums", Format::F32, sums)?;
    let mut outputs = vec![(&dx, expected.dx.as_slice())];
    if form.gate.is_some() {
        outputs.push((&dy, &expected.dy));
    }
    if matches!(form.gate, Some(Some(_))) {
        outputs.push((&gate, &expected.gate));
    }
    let none = form.norm == Norm::None;
    if !none {
        outputs.extend([(&scale, expected.scale.as_slice()), (&shift, &expected.shift)]);
    }
    let modulation = Modulation { e0: e0.place.slice(), table: parts.place.slice(), rows: rig.table(&ints(&rows))? };
    let segments = Segments {
        tokens_by_row: rig.table(&ints(&tokens_by_row))?,
        start: rig.table(&ints(&segment_start))?,
        of_row: rig.table(&ints(&row_segment_start))?,
        count: segment_count,
        rows: count,
    };
    let partials = Partials { scale: scale.place.slice(), shift: shift.place.slice(), gate: gate.place.slice() };
    let norm = launched(form.norm, weight.place.slice(), Slice::null());
    let added = form.gate.map(|gate| (added(y.place.slice(), gate, gates.place.slice()), dy.place.slice()));
    let moments = Moments { mean: or_null(none, mean.place.slice()), rstd: or_null(none, rstd.place.slice()) };
    let (dh, x1) = (or_null(none, dh.place.slice()), x1.place.slice());
    rig.compare(&outputs, |rig| {
        let dx = dx.place.slice();
        rig.ops.residual_norm_backward(dh, dx, x1, moments, norm, added, &modulation, &partials, &segments, width)
    })
}

fn or_null<E>(null: bool, slice: Slice<E>) -> Slice<E> {
    if null { Slice::null() } else { slice }
}

fn added(y: Slice<Operand>, gate: Option<usize>, table: Slice<Operand>) -> Added {
    Added { y, gate: gate.map_or(-1, |part| part as i32), table }
}

fn launched(norm: Norm, weight: Slice<Operand>, bias: Slice<Operand>) -> ops::Norm {
    match norm {
        Norm::None => ops::Norm::None,
        Norm::Affine => ops::Norm::Affine { weight, bias },
        Norm::Modulate { shift, scale } => ops::Norm::Modulate { shift: shift as i32, scale: scale as i32 },
    }
}

fn reduce_rows(rig: &mut Rig<'_>, tokens: usize, width: usize) -> Result<Verdict> {
    const PART: usize = 4;
    let (rows, count) = rows_of(rig, tokens);
    let (tokens_by_row, segment_start, row_segment_start) = segments(&rows, count);
    let segment_count = segment_start.len() - 1;
    let partial = rig.floats(Matrix::new(segment_count, width), 1.0)?;
    let before = rig.floats(Matrix::new(count * 6, width), 1.0)?.values;
    let out = rig.changed("e0 gradient", Format::F32, Matrix::new(count * 6, width), &before)?;
    let mut expected = before;
    for (row, ends) in row_segment_start.windows(2).enumerate() {
        let sums = column_sums(&partial.values[ends[0] * width..ends[1] * width], width);
        let to = &mut expected[(row * 6 + PART) * width..][..width];
        to.iter_mut().zip(sums).for_each(|(to, sum)| *to += sum);
    }
    let segments = Segments {
        tokens_by_row: rig.table(&ints(&tokens_by_row))?,
        start: rig.table(&ints(&segment_start))?,
        of_row: rig.table(&ints(&row_segment_start))?,
        count: segment_count,
        rows: count,
    };
    rig.compare(&[(&out, expected.as_slice())], |rig| {
        rig.ops.reduce_rows(partial.place.slice(), &segments, out.place.slice(), PART as i32, width)
    })
}

fn column_sum(rig: &mut Rig<'_>, rows: usize, width: usize) -> Result<Verdict> {
    let partial = rig.floats(Matrix::new(rows, width), 1.0)?;
    let row = Matrix::new(1, width);
    let before = rig.floats(row, 1.0)?.values;
    let out = rig.changed("sums", Format::F32, row, &before)?;
    let sums = column_sums(&partial.values, width);
    let expected: Vec<f64> = before.iter().zip(sums).map(|(before, sum)| before + sum).collect();
    rig.compare(&[(&out, expected.as_slice())], |rig| {
        let scratch = rig.arena.take(Ops::column_scratch(rows, width))?;
        rig.ops.column_sum(partial.place.slice(), scratch, out.place.slice(), rows, width)
    })
}

/// An RMSNorm over all heads, and turns of each; x and its gradient as one of `parts` in wider rows.
#[derive(Clone, Copy, Debug)]
struct Heads {
    tokens: usize,
    heads: usize,
    head_dim: usize,
    parts: usize,
    turned: bool,
}

impl Heads {
    fn width(&self) -> usize {
        self.heads * self.head_dim
    }

    fn pairs(&self) -> usize {
        self.head_dim / 2
    }

    /// Turns each pair of each head by its token's angle, or back.
    fn turn(&self, values: &mut [f64], cos_sin: &[f64], back: bool) {
        if !self.turned {
            return;
        }
        let pairs = self.pairs();
        for (token, row) in values.chunks_exact_mut(self.width()).enumerate() {
            for (index, pair) in row.chunks_exact_mut(2).enumerate() {
                let at = 2 * (token * pairs + index % pairs);
                let (cosine, sine) = (cos_sin[at], if back { -cos_sin[at + 1] } else { cos_sin[at + 1] });
                let (a, b) = (pair[0], pair[1]);
                pair[0] = a * cosine - b * sine;
                pair[1] = a * sine + b * cosine;
            }
        }
    }

    /// out and rstd.
    fn forward(&self, x: &[f64], weight: &[f64], cos_sin: &[f64]) -> (Vec<f64>, Vec<f64>) {
        let width = self.width();
        let mean_square = |row: &[f64]| row.iter().map(|x| x * x).sum::<f64>() / width as f64;
        let rstd: Vec<f64> = x.chunks_exact(width).map(|row| (mean_square(row) + EPS).sqrt().recip()).collect();
        let mut out: Vec<f64> = x.iter().enumerate().map(|(i, x)| x * rstd[i / width] * weight[i % width]).collect();
        self.turn(&mut out, cos_sin, false);
        (out, rstd)
    }

    /// dx, and the weight's gradient by runs of 32 tokens.
    fn backward(&self, [dy, x, weight, rstd]: [&[f64]; 4], cos_sin: &[f64]) -> (Vec<f64>, Vec<f64>) {
        let width = self.width();
        let mut gradient = dy.to_vec();
        self.turn(&mut gradient, cos_sin, true);
        let mut sums = vec![0.0; self.tokens.div_ceil(RUN) * width];
        let mut dx = Vec::with_capacity(x.len());
        for (token, (g, x)) in gradient.chunks_exact(width).zip(x.chunks_exact(width)).enumerate() {
            let rstd = rstd[token];
            let product = (0..width).map(|c| g[c] * weight[c] * x[c]).sum::<f64>() / width as f64;
            dx.extend((0..width).map(|c| rstd * (g[c] * weight[c] - x[c] * rstd * rstd * product)));
            let sums = &mut sums[token / RUN * width..][..width];
            (0..width).for_each(|c| sums[c] += g[c] * x[c] * rstd);
        }
        (dx, sums)
    }
}

/// Tokens of a partial sum of the weight's gradient.
const RUN: usize = 32;

/// Random angles.
fn angles(rig: &mut Rig<'_>, heads: Heads) -> Result<super::rig::Input> {
    let count = heads.tokens * heads.pairs();
    let turns = (0..count).flat_map(|_| {
        let (sine, cosine) = (std::f64::consts::TAU * rig.draw().uniform()).sin_cos();
        [cosine, sine]
    });
    let turns: Vec<f64> = turns.collect();
    rig.given(Format::F32, Matrix::new(heads.tokens, 2 * heads.pairs()), turns)
}

fn rms_norm_rope(rig: &mut Rig<'_>, heads: Heads) -> Result<Verdict> {
    let (tokens, width) = (heads.tokens, heads.width());
    let stream = Matrix::new(tokens, width);
    let x = rig.operands(stream.part_of(heads.parts), 2.0)?;
    let weight = rig.operands(Matrix::new(1, width), 1.0)?;
    let cos_sin = angles(rig, heads)?;
    let out = rig.output("out", rig.operand, stream)?;
    let rstd = rig.output("rstd", Format::F32, Matrix::new(1, tokens))?;
    let expected = heads.forward(&x.values, &weight.values, &cos_sin.values);
    let turns = Turns { cos_sin: cos_sin.place.slice(), pairs: heads.pairs() };
    let turns = heads.turned.then_some(&turns);
    rig.compare(&[(&out, expected.0.as_slice()), (&rstd, &expected.1)], |rig| {
        let (x, out, rstd) = (x.place.rows(), out.place.rows(), rstd.place.slice());
        rig.ops.rms_norm_rope(x, weight.place.slice(), turns, out, rstd, tokens, width)
    })
}

fn rms_norm_rope_backward(rig: &mut Rig<'_>, heads: Heads) -> Result<Verdict> {
    let (tokens, width) = (heads.tokens, heads.width());
    let stream = Matrix::new(tokens, width);
    let x = rig.operands(stream.part_of(heads.parts), 2.0)?;
    let dy = rig.operands(stream, 1.0)?;
    let weight = rig.operands(Matrix::new(1, width), 1.0)?;
    let cos_sin = angles(rig, heads)?;
    let rstd = heads.forward(&x.values, &weight.values, &cos_sin.values).1;
    let rstd = rig.given(Format::F32, Matrix::new(1, tokens), rstd)?;
    let dx = rig.output("dx", rig.operand, stream.part_of(heads.parts))?;
    let sums = rig.output("weight sums", Format::F32, Matrix::new(tokens.div_ceil(RUN), width))?;
    let inputs = [dy.values.as_slice(), &x.values, &weight.values, &rstd.values];
    let expected = heads.backward(inputs, &cos_sin.values);
    let turns = Turns { cos_sin: cos_sin.place.slice(), pairs: heads.pairs() };
    let turns = heads.turned.then_some(&turns);
    rig.compare(&[(&dx, expected.0.as_slice()), (&sums, &expected.1)], |rig| {
        let (dy, x, dx) = (dy.place.rows(), x.place.rows(), dx.place.rows());
        let (weight, rstd) = (weight.place.slice(), rstd.place.slice());
        rig.ops.rms_norm_rope_backward(dy, x, weight, rstd, turns, dx, sums.place.slice(), tokens, width)
    })
}

#[cfg(test)]
mod tests {
    use super::super::rig::relative;
    use super::*;
    use crate::ops::{RopeTable, Rows, gated_residual, layer_norm_affine, norm_modulate, rms_norm, rope};
    use crate::random::{Draw, Purpose};
    use candle_core::{Device, Tensor, Var};

    fn draw(name: &str, count: usize) -> Vec<f64> {
        let mut draw = Draw::new(3, Purpose::Noise, 0, name);
        (0..count).map(|_| draw.normal()).collect()
    }

    fn variable(values: &[f64], shape: &[usize]) -> Var {
        Var::from_tensor(&Tensor::from_slice(values, shape, &Device::Cpu).expect("a tensor")).expect("a variable")
    }

    fn values(tensor: &Tensor) -> Vec<f64> {
        tensor.flatten_all().expect("flat").to_vec1().expect("values")
    }

    fn assert_same(what: &str, a: &[f64], b: &[f64]) {
        let error = relative(a, b);
        assert!(error < 1e-12, "{what}: {error:.1e}");
    }

    #[test]
    fn norms_and_all_their_gradients_are_those_of_the_ops() -> candle_core::Result<()> {
        let (width, count) = (16, 3);
        let rows = [0, 2, 2, 0, 2];
        let tokens = rows.len();
        let stream = tokens * width;
        let (x, y, dh, later) = (draw("x", stream), draw("y", stream), draw("dh", stream), draw("dx", stream));
        let (e0, table) = (draw("e0", count * 6 * width), draw("table", 6 * width));
        let gates = draw("gates", 6 * width);
        let (weight, bias) = (draw("weight", width), draw("bias", width));
        let (by_row, starts, _) = segments(&rows, count);
        for form in FORMS {
            let problem = Problem {
                form,
                sign: 1.0,
                width,
                rows: &rows,
                e0: &e0,
                table: &table,
                gates: &gates,
                weight: &weight,
                bias: &bias,
                y: &y,
            };
            let forward = problem.forward(&x);
            let moments = [forward.mean.as_slice(), &forward.rstd];
            let backward = problem.backward([&dh, &later, &forward.x1], moments, &by_row, &starts);

            let shape = [1, tokens, width];
            let map = Rows::new(rows.to_vec(), count);
            // Each part of the modulation as a variable of its own: [1, R, D]
            let part = |table: &[f64], part: usize| {
                let at = |i: usize| e0[(i / width * 6 + part) * width + i % width] + table[part * width + i % width];
                variable(&(0..count * width).map(at).collect::<Vec<_>>(), &[1, count, width])
            };
            let parts: Vec<Var> = (0..6).map(|number| part(&table, number)).collect();
            let gates: Vec<Var> = (0..6).map(|number| part(&gates, number)).collect();
            let (x, y) = (variable(&x, &shape), variable(&y, &shape));
            let (weight, bias) = (variable(&weight, &[width]), variable(&bias, &[width]));
            let x1 = match form.gate {
                None => x.as_tensor().clone(),
                Some(None) => (x.as_tensor() + y.as_tensor())?,
                Some(Some(gate)) => gated_residual(&x, &y, &gates[gate], &map)?,
            };
            let h = match form.norm {
                Norm::None => None,
                Norm::Affine => Some(layer_norm_affine(&x1, &weight, &bias, EPS)?),
                Norm::Modulate { shift, scale } => Some(norm_modulate(&x1, &parts[shift], &parts[scale], &map, EPS)?),
            };
            assert_same("x1", &forward.x1, &values(&x1));
            let fixed = |values: &[f64]| Tensor::from_slice(values, &shape, &Device::Cpu);
            let mut loss = (x1 * fixed(&later)?)?.sum_all()?;
            if let Some(h) = h {
                assert_same("h", &forward.h, &values(&h));
                loss = (loss + (h * fixed(&dh)?)?.sum_all()?)?;
            }
            let store = loss.backward()?;
            let gradient = |variable: &Var| values(store.get(variable).expect("a gradient"));
            assert_same("dx", &backward.dx, &gradient(&x));
            if form.gate.is_some() {
                assert_same("dy", &backward.dy, &gradient(&y));
            }
            // Row 0 is segment 0 and row 2 segment 1.
            let by_row = |sums: &[f64]| [&sums[..width], &vec![0.0; width], &sums[width..]].concat();
            if let Some(Some(gate)) = form.gate {
                assert_same("gate", &by_row(&backward.gate), &gradient(&gates[gate]));
            }
            match form.norm {
                Norm::None => {}
                Norm::Affine => {
                    assert_same("weight", &column_sums(&backward.scale, width), &gradient(&weight));
                    assert_same("bias", &column_sums(&backward.shift, width), &gradient(&bias));
                }
                Norm::Modulate { shift, scale } => {
                    assert_same("scale", &by_row(&backward.scale), &gradient(&parts[scale]));
                    assert_same("shift", &by_row(&backward.shift), &gradient(&parts[shift]));
                }
            }
        }
        Ok(())
    }

    #[test]
    fn rms_norm_and_turns_are_those_of_the_ops() -> candle_core::Result<()> {
        for turned in [true, false] {
            let heads = Heads { tokens: 35, heads: 2, head_dim: 12, parts: 1, turned };
            let (tokens, width) = (heads.tokens, heads.width());
            let positions: Vec<[f64; 3]> = (0..tokens).map(|t| [t as f64, (t % 5) as f64, (t % 3) as f64]).collect();
            let table = RopeTable::new(&positions, RopeTable::lingbot_axes(heads.head_dim));
            let cos_sin: Vec<f64> = (0..tokens * heads.pairs())
                .map(|i| table.at(i / heads.pairs(), i % heads.pairs()))
                .flat_map(|(cosine, sine)| [f64::from(cosine), f64::from(sine)])
                .collect();
            let (x, dy, weight) = (draw("x", tokens * width), draw("dy", tokens * width), draw("weight", width));
            let (out, rstd) = heads.forward(&x, &weight, &cos_sin);
            let (dx, sums) = heads.backward([&dy, &x, &weight, &rstd], &cos_sin);

            let shape = [1, tokens, width];
            let (x, weight) = (variable(&x, &shape), variable(&weight, &[width]));
            let normed = rms_norm(&x, &weight, EPS)?;
            let y = if turned { rope(&normed, &table)? } else { normed };
            assert_same("out", &out, &values(&y));
            let store = (y * Tensor::from_slice(&dy, &shape, &Device::Cpu)?)?.sum_all()?.backward()?;
            assert_same("dx", &dx, &values(store.get(&x).expect("a gradient")));
            assert_eq!(sums.len(), 2 * width, "35 tokens are two runs");
            assert_same("weight", &column_sums(&sums, width), &values(store.get(&weight).expect("a gradient")));
        }
        Ok(())
    }
}
