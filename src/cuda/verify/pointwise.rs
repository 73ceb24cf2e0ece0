//! GELU and rotary turns.

use super::Table;
use super::rig::{Format, Matrix, Rig, Verdict};
use crate::Result;
use crate::cuda::ops::Turns;
use crate::ops::RopeTable;

pub(super) fn all(rig: &mut Rig<'_>, table: &mut Table) {
    for count in [8, 4_099, 50 * 4096] {
        table.case(rig, "gelu", format!("{count} elements"), |rig| forward(rig, count));
        table.case(rig, "gelu gradient", format!("{count} elements"), |rig| backward(rig, count));
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
