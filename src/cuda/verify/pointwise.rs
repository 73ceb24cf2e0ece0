//! GELU, rotary turns, and rows that are moved or centred.

use super::Table;
use super::rig::{Format, Matrix, Rig, Verdict};
use crate::Result;
use crate::cuda::launch::{Operand, Slice};
use crate::cuda::ops::Turns;
use crate::ops::RopeTable;

pub(super) fn all(rig: &mut Rig<'_>, table: &mut Table) {
    for count in [8, 4_099, 50 * 4096] {
        table.case(rig, "gelu", format!("{count} elements"), |rig| forward(rig, count));
        table.case(rig, "gelu gradient", format!("{count} elements"), |rig| backward(rig, count));
    }
    for width in [48, 208, 3072] {
        let words = format!("530 x {width}");
        for weighed in [false, true] {
            let words = if weighed { format!("{words}, weighed") } else { words.clone() };
            table.case(rig, "center_rows", words, |rig| center(rig, 530, width, weighed));
        }
        table.case(rig, "take_rows", words.clone(), |rig| take(rig, 530, width));
        table.case(rig, "put_rows", words.clone(), |rig| put(rig, 530, width));
        table.case(rig, "embed_rows", words.clone(), |rig| embed(rig, 530, width));
        table.case(rig, "embed_rows gradient", words, |rig| embed_backward(rig, 530, width));
    }
    if !rig.half() {
        for (tokens, head_dim) in [(1, 24), (333, 52), (270, 128)] {
            let shape = format!("{tokens} tokens, {} pairs", head_dim / 2);
            table.case(rig, "rope_table", shape, |rig| turns(rig, tokens, head_dim));
        }
    }
}

const CUBIC: f64 = 0.044715;

fn inner(u: f64) -> f64 {
    (2.0 / std::f64::consts::PI).sqrt() * (u + CUBIC * u * u * u)
}

/// 0.5 u (1 + tanh w) = u / (1 + exp(-2 w)), which keeps its relative accuracy where the result is small.
fn gelu(u: f64) -> f64 {
    u / (1.0 + (-2.0 * inner(u)).exp())
}

fn gelu_slope(u: f64) -> f64 {
    let tanh = inner(u).tanh();
    let slope = (2.0 / std::f64::consts::PI).sqrt() * (1.0 + 3.0 * CUBIC * u * u);
    0.5 * (1.0 + tanh) + 0.5 * u * (1.0 - tanh * tanh) * slope
}

fn forward(rig: &mut Rig<'_>, count: usize) -> Result<Verdict> {
    let row = Matrix::new(1, count);
    let u = rig.operands(row, 3.0)?;
    let a = rig.output("a", rig.operand, row)?;
    let expected: Vec<f64> = u.values.iter().map(|&u| gelu(u)).collect();
    rig.compare(&[(&a, &expected)], |rig| rig.ops.gelu(u.place.slice(), a.place.slice(), count))
}

fn backward(rig: &mut Rig<'_>, count: usize) -> Result<Verdict> {
    let row = Matrix::new(1, count);
    let u = rig.operands(row, 3.0)?;
    let gradient = rig.operands(row, 1.0)?.values;
    let du = rig.changed("du", rig.operand, row, &gradient)?;
    let expected: Vec<f64> = u.values.iter().zip(&gradient).map(|(&u, da)| da * gelu_slope(u)).collect();
    rig.compare(&[(&du, &expected)], |rig| rig.ops.gelu_backward(u.place.slice(), du.place.slice(), count))
}

/// Prompts of one row and of many, and rows of none.
fn center(rig: &mut Rig<'_>, rows: usize, width: usize, weighed: bool) -> Result<Verdict> {
    let first = 1 + rig.draw().below(rows - 10);
    let spans = [0..first, first..first + 1, first + 4..rows];
    let matrix = Matrix::new(rows, width);
    let before = rig.operands(matrix, 1.0)?.values;
    let x = rig.changed("x", rig.operand, matrix, &before)?;
    let bias = rig.floats(Matrix::new(1, rows), 2.0)?;
    let mut expected = before;
    for span in &spans {
        let part = &mut expected[span.start * width..span.end * width];
        let weights: Vec<f64> =
            bias.values[span.clone()].iter().map(|bias| if weighed { bias.exp() } else { 1.0 }).collect();
        let mut mean = vec![0.0; width];
        for (row, weight) in part.chunks_exact(width).zip(&weights) {
            mean.iter_mut().zip(row).for_each(|(sum, value)| *sum += weight * value / weights.iter().sum::<f64>());
        }
        for row in part.chunks_exact_mut(width) {
            row.iter_mut().zip(&mean).for_each(|(value, mean)| *value -= mean);
        }
    }
    let table: Vec<i32> = spans.iter().flat_map(|span| [span.start as i32, span.end as i32]).collect();
    let table = rig.table(&table)?;
    let bias = if weighed { bias.place.slice() } else { Slice::null() };
    rig.compare(&[(&x, &expected)], |rig| rig.ops.center_rows(x.place.slice(), bias, table, width))
}

/// Some of the rows, in any order.
fn picked(rig: &mut Rig<'_>, rows: usize) -> Vec<usize> {
    let mut all: Vec<usize> = (0..rows).collect();
    for last in (1..rows).rev() {
        let other = rig.draw().below(last + 1);
        all.swap(last, other);
    }
    all.truncate(rows / 2);
    all
}

fn take(rig: &mut Rig<'_>, rows: usize, width: usize) -> Result<Verdict> {
    let picked = picked(rig, rows);
    let x = rig.operands(Matrix::new(rows, width), 1.0)?;
    let y = rig.output("y", rig.operand, Matrix::new(picked.len(), width))?;
    let expected: Vec<f64> = picked.iter().flat_map(|row| x.values[row * width..][..width].to_vec()).collect();
    let index = rig.table(&picked.iter().map(|row| *row as i32).collect::<Vec<_>>())?;
    let bytes = width * rig.ops.operand_bytes();
    rig.compare(&[(&y, &expected)], |rig| rig.ops.take_rows::<Operand>(x.place.slice(), index, y.place.slice(), bytes))
}

fn put(rig: &mut Rig<'_>, rows: usize, width: usize) -> Result<Verdict> {
    let picked = picked(rig, rows);
    let x = rig.operands(Matrix::new(picked.len(), width), 1.0)?;
    let before = rig.operands(Matrix::new(rows, width), 1.0)?.values;
    let y = rig.changed("y", rig.operand, Matrix::new(rows, width), &before)?;
    let mut expected = before;
    for (from, to) in x.values.chunks_exact(width).zip(&picked) {
        expected[to * width..][..width].copy_from_slice(from);
    }
    let index = rig.table(&picked.iter().map(|row| *row as i32).collect::<Vec<_>>())?;
    let bytes = width * rig.ops.operand_bytes();
    rig.compare(&[(&y, &expected)], |rig| rig.ops.put_rows::<Operand>(x.place.slice(), index, y.place.slice(), bytes))
}

/// Half of the rows go somewhere.
fn embed(rig: &mut Rig<'_>, rows: usize, width: usize) -> Result<Verdict> {
    let places = picked(rig, rows);
    let part = rig.operands(Matrix::new(rows, width), 1.0)?;
    let before = rig.floats(Matrix::new(rows, width), 1.0)?.values;
    let x = rig.changed("x", Format::F32, Matrix::new(rows, width), &before)?;
    let mut expected = before;
    let mut index = vec![-1; rows];
    for (row, place) in places.iter().enumerate() {
        index[2 * row] = *place as i32;
        expected[place * width..][..width].copy_from_slice(&part.values[2 * row * width..][..width]);
    }
    let index = rig.table(&index)?;
    rig.compare(&[(&x, &expected)], |rig| rig.ops.embed_rows(part.place.slice(), index, x.place.slice(), width))
}

fn embed_backward(rig: &mut Rig<'_>, rows: usize, width: usize) -> Result<Verdict> {
    let places = picked(rig, rows);
    let dx = rig.floats(Matrix::new(rows, width), 1.0)?;
    let part = rig.output("rows", rig.operand, Matrix::new(rows, width))?;
    let mut expected = vec![0.0; rows * width];
    let mut index = vec![-1; rows];
    for (row, place) in places.iter().enumerate() {
        index[2 * row] = *place as i32;
        expected[2 * row * width..][..width].copy_from_slice(&dx.values[place * width..][..width]);
    }
    let index = rig.table(&index)?;
    rig.compare(&[(&part, &expected)], |rig| {
        rig.ops.embed_rows_backward(dx.place.slice(), index, part.place.slice(), width)
    })
}

/// Positions of video, and of actions between frames, as far as long episodes go.
fn turns(rig: &mut Rig<'_>, tokens: usize, head_dim: usize) -> Result<Verdict> {
    let positions: Vec<[f64; 3]> = (0..tokens)
        .map(|_| {
            let draw = rig.draw();
            let frame = draw.below(300) as f64;
            match draw.below(4) {
                0 => [frame + draw.uniform(), -1.0, -1.0],
                _ => [frame, draw.below(16) as f64, draw.below(16) as f64],
            }
        })
        .collect();
    let reference = RopeTable::new(&positions, RopeTable::lingbot_axes(head_dim));
    let pairs = reference.pairs();
    let out = rig.output("cos, sin", Format::F32, Matrix::new(tokens, 2 * pairs))?;
    let flat: Vec<f64> = positions.iter().flatten().copied().collect();
    let axis: Vec<i32> = reference.frequencies().iter().map(|(axis, _)| *axis as i32).collect();
    let frequency: Vec<f64> = reference.frequencies().iter().map(|(_, frequency)| *frequency).collect();
    let (flat, axis, frequency) = (rig.table(&flat)?, rig.table(&axis)?, rig.table(&frequency)?);
    let expected: Vec<f64> = (0..tokens * pairs)
        .flat_map(|i| {
            let (cosine, sine) = reference.at(i / pairs, i % pairs);
            [f64::from(cosine), f64::from(sine)]
        })
        .collect();
    let turns = Turns { cos_sin: out.place.slice(), pairs };
    rig.compare(&[(&out, &expected)], |rig| rig.ops.rope_table(flat, axis, frequency, &turns, tokens))
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{Device, Tensor, Var};

    #[test]
    fn gelu_and_its_slope_are_those_of_the_ops() -> candle_core::Result<()> {
        let values: Vec<f64> = (-60..=60).map(|i| f64::from(i) / 10.0).collect();
        let u = Var::from_tensor(&Tensor::new(values.clone(), &Device::Cpu)?)?;
        let a = crate::ops::gelu_tanh(&u)?;
        let store = a.sum_all()?.backward()?;
        let slopes: Vec<f64> = store.get(&u).expect("a gradient").to_vec1()?;
        for ((u, a), slope) in values.into_iter().zip(a.to_vec1::<f64>()?).zip(slopes) {
            assert!((gelu(u) - a).abs() < 1e-13 && (gelu_slope(u) - slope).abs() < 1e-13, "{u}");
        }
        Ok(())
    }
}
