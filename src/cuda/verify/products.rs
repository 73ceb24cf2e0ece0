//! Matrix products of a Linear layer, and the gradient of its bias.

use super::Table;
use super::rig::{F32_LIMIT, Format, MATRIX_LIMIT, Matrix, Rig, Verdict};
use crate::Result;
use crate::cuda::ops::Ops;
use ndarray::linalg::general_mat_mul;
use ndarray::{ArrayView2, ArrayViewMut2, s};
use rayon::prelude::*;

/// A layer on so many rows, operands among others in `parts` times as wide rows.
#[derive(Clone, Copy)]
struct Layer {
    rows: usize,
    inputs: usize,
    outputs: usize,
    parts: usize,
}

impl Layer {
    fn x(self) -> Matrix {
        Matrix::new(self.rows, self.inputs).part_of(self.parts)
    }

    fn y(self) -> Matrix {
        Matrix::new(self.rows, self.outputs).part_of(self.parts)
    }

    fn weight(self) -> Matrix {
        Matrix::new(self.outputs, self.inputs)
    }

    /// That keeps a product's values near 1.
    fn scale(self) -> f64 {
        (self.inputs as f64).sqrt().recip()
    }
}

pub(super) fn all(rig: &mut Rig<'_>, table: &mut Table) {
    let layer = |rows, inputs, outputs, parts| Layer { rows, inputs, outputs, parts };
    let layers = [
        layer(1, 48, 208, 1),
        layer(77, 208, 48, 1),
        layer(96, 128, 256, 2),
        layer(130, 384, 3072, 1),
        layer(301, 3072, 384, 1),
    ];
    for layer in layers {
        let Layer { rows, inputs, outputs, parts } = layer;
        let strided = if parts > 1 { ", strided" } else { "" };
        let shape = format!("{rows} rows, {inputs} to {outputs}{strided}");
        table.case(rig, "product with bias", shape.clone(), |rig| forward(rig, layer));
        if rig.half() {
            table.case(rig, "product with bias, GELU", shape.clone(), |rig| forward_gelu(rig, layer));
            table.case(rig, "input gradient times GELU'", shape.clone(), |rig| input_gradient_gelu(rig, layer));
        }
        table.case(rig, "input gradient", shape.clone(), |rig| input_gradient(rig, layer));
        table.case(rig, "input gradient, summed", shape.clone(), |rig| input_gradient_sum(rig, layer));
        table.case(rig, "weight gradient", shape.clone(), |rig| weight_gradient(rig, layer));
        table.case(rig, "bias gradient", shape, |rig| bias_gradient(rig, layer));
    }
    let long = layer(1_541, 8, 1_032, 1);
    table.case(rig, "bias gradient", "1541 rows, to 1032".into(), |rig| bias_gradient(rig, long));
}

fn view(values: &[f64], (rows, columns): (usize, usize)) -> Result<ArrayView2<'_, f64>> {
    ArrayView2::from_shape((rows, columns), values).map_err(crate::Error::crash)
}

/// a b, row-major.
fn product(a: ArrayView2<f64>, b: ArrayView2<f64>) -> Result<Vec<f64>> {
    const ROWS: usize = 32;
    let columns = b.ncols();
    let mut out = vec![0.0; a.nrows() * columns];
    out.par_chunks_mut(ROWS * columns).enumerate().try_for_each(|(block, out)| {
        let rows = out.len() / columns;
        let mut out = ArrayViewMut2::from_shape((rows, columns), out).map_err(crate::Error::crash)?;
        general_mat_mul(1.0, &a.slice(s![block * ROWS..block * ROWS + rows, ..]), &b, 0.0, &mut out);
        Ok::<(), crate::Error>(())
    })?;
    Ok(out)
}

fn add(a: &[f64], b: &[f64]) -> Vec<f64> {
    a.iter().zip(b).map(|(a, b)| a + b).collect()
}

/// Sums over rows of [rows, columns].
pub(super) fn column_sums(values: &[f64], columns: usize) -> Vec<f64> {
    let mut sums = vec![0.0; columns];
    for row in values.chunks_exact(columns) {
        sums.iter_mut().zip(row).for_each(|(sum, value)| *sum += value);
    }
    sums
}

/// Of a sum in f32 over products of operands.
fn sum_limit(rig: &Rig<'_>) -> f64 {
    if rig.half() { MATRIX_LIMIT } else { F32_LIMIT }
}

fn forward(rig: &mut Rig<'_>, layer: Layer) -> Result<Verdict> {
    let Layer { rows, inputs, outputs, .. } = layer;
    let (x, weight) = (rig.operands(layer.x(), 1.0)?, rig.operands(layer.weight(), layer.scale())?);
    let bias = rig.operands(Matrix::new(1, outputs), 1.0)?;
    let y = rig.output("y", rig.operand, layer.y())?;
    let mut expected = product(view(&x.values, (rows, inputs))?, view(&weight.values, (outputs, inputs))?.t())?;
    add_bias(&mut expected, &bias.values);
    rig.compare(&[(&y, &expected)], |rig| {
        let bias = bias.place.slice();
        rig.gemm.forward(x.place.rows(), weight.place.slice(), bias, y.place.rows(), rows, inputs, outputs)
    })
}

fn add_bias(rows: &mut [f64], bias: &[f64]) {
    rows.chunks_exact_mut(bias.len()).for_each(|row| row.iter_mut().zip(bias).for_each(|(y, bias)| *y += bias));
}

/// sqrt(2 / pi)
const SLOPE: f64 = 0.797_884_560_802_865_4;

/// GELU in its tanh form, and its slope.
fn gelu(u: f64) -> (f64, f64) {
    let bend = (SLOPE * (u + 0.044715 * u * u * u)).tanh();
    let slope = SLOPE * (1.0 + 3.0 * 0.044715 * u * u);
    (0.5 * u * (1.0 + bend), 0.5 * (1.0 + bend) + 0.5 * u * (1.0 - bend * bend) * slope)
}

fn forward_gelu(rig: &mut Rig<'_>, layer: Layer) -> Result<Verdict> {
    let Layer { rows, inputs, outputs, .. } = layer;
    let (x, weight) = (rig.operands(Matrix::new(rows, inputs), 1.0)?, rig.operands(layer.weight(), layer.scale())?);
    let bias = rig.operands(Matrix::new(1, outputs), 1.0)?;
    let y = rig.output("y", rig.operand, Matrix::new(rows, outputs))?;
    let argument = rig.output("argument", rig.operand, Matrix::new(rows, outputs))?;
    let mut before = product(view(&x.values, (rows, inputs))?, view(&weight.values, (outputs, inputs))?.t())?;
    add_bias(&mut before, &bias.values);
    let after: Vec<f64> = before.iter().map(|&u| gelu(u).0).collect();
    rig.compare(&[(&y, &after), (&argument, &before)], |rig| {
        rig.gemm.forward_gelu(
            x.place.slice(),
            weight.place.slice(),
            bias.place.slice(),
            Some(argument.place.slice()),
            y.place.slice(),
            rows,
            inputs,
            outputs,
        )
    })
}

fn input_gradient_gelu(rig: &mut Rig<'_>, layer: Layer) -> Result<Verdict> {
    let Layer { rows, inputs, outputs, .. } = layer;
    let (dy, weight) = (rig.operands(Matrix::new(rows, outputs), 1.0)?, rig.operands(layer.weight(), layer.scale())?);
    let argument = rig.operands(Matrix::new(rows, inputs), 1.0)?;
    let du = rig.output("du", rig.operand, Matrix::new(rows, inputs))?;
    let mut expected = product(view(&dy.values, (rows, outputs))?, view(&weight.values, (outputs, inputs))?)?;
    expected.iter_mut().zip(&argument.values).for_each(|(du, &u)| *du *= gelu(u).1);
    rig.compare(&[(&du, &expected)], |rig| {
        rig.gemm.input_gradient_gelu(
            dy.place.slice(),
            weight.place.slice(),
            argument.place.slice(),
            du.place.slice(),
            rows,
            inputs,
            outputs,
        )
    })
}

fn input_gradient(rig: &mut Rig<'_>, layer: Layer) -> Result<Verdict> {
    let Layer { rows, inputs, outputs, .. } = layer;
    let (dy, weight) = (rig.operands(layer.y(), 1.0)?, rig.operands(layer.weight(), layer.scale())?);
    let dx = rig.output("dx", rig.operand, layer.x())?;
    let expected = product(view(&dy.values, (rows, outputs))?, view(&weight.values, (outputs, inputs))?)?;
    rig.compare(&[(&dx, &expected)], |rig| {
        rig.gemm.input_gradient(dy.place.rows(), weight.place.slice(), dx.place.rows(), rows, inputs, outputs)
    })
}

fn input_gradient_sum(rig: &mut Rig<'_>, layer: Layer) -> Result<Verdict> {
    let Layer { rows, inputs, outputs, .. } = layer;
    let (dy, weight) = (rig.operands(layer.y(), 1.0)?, rig.operands(layer.weight(), layer.scale())?);
    let before = rig.floats(layer.x(), 1.0)?.values;
    let dx = rig.changed("dx", Format::F32, layer.x(), &before)?.within(sum_limit(rig));
    let added = product(view(&dy.values, (rows, outputs))?, view(&weight.values, (outputs, inputs))?)?;
    rig.compare(&[(&dx, &add(&before, &added))], |rig| {
        let to = dx.place.float_rows();
        rig.gemm.input_gradient_sum(dy.place.rows(), weight.place.slice(), to, rows, inputs, outputs)
    })
}

fn weight_gradient(rig: &mut Rig<'_>, layer: Layer) -> Result<Verdict> {
    let Layer { rows, inputs, outputs, .. } = layer;
    let (dy, x) = (rig.operands(layer.y(), 1.0)?, rig.operands(layer.x(), 1.0)?);
    let before = rig.floats(layer.weight(), 1.0)?.values;
    let gradient = rig.changed("dW", Format::F32, layer.weight(), &before)?.within(sum_limit(rig));
    let added = product(view(&dy.values, (rows, outputs))?.t(), view(&x.values, (rows, inputs))?)?;
    rig.compare(&[(&gradient, &add(&before, &added))], |rig| {
        rig.gemm.weight_gradient(dy.place.rows(), x.place.rows(), gradient.place.slice(), rows, inputs, outputs)
    })
}

fn bias_gradient(rig: &mut Rig<'_>, layer: Layer) -> Result<Verdict> {
    let Layer { rows, outputs, .. } = layer;
    let dy = rig.operands(layer.y(), 1.0)?;
    let row = Matrix::new(1, outputs);
    let before = rig.floats(row, 1.0)?.values;
    let gradient = rig.changed("db", Format::F32, row, &before)?;
    let expected = add(&before, &column_sums(&dy.values, outputs));
    rig.compare(&[(&gradient, &expected)], |rig| {
        let scratch = rig.arena.take(Ops::column_scratch(rows, outputs))?;
        rig.ops.bias_gradient(dy.place.rows(), scratch, gradient.place.slice(), rows, outputs)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_and_column_sums_by_hand() -> Result<()> {
        let (a, b) = ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [1.0, 0.0, -1.0, 2.0, 1.0, 1.0]);
        // [[1 2 3] [4 5 6]] times the transpose of [[1 0 -1] [2 1 1]]
        let across = product(view(&a, (2, 3))?, view(&b, (2, 3))?.t())?;
        assert_eq!(across, [-2.0, 7.0, -2.0, 19.0]);
        // The transpose of the first times the second
        assert_eq!(product(view(&a, (2, 3))?.t(), view(&b, (2, 3))?)?, [9.0, 4.0, 3.0, 12.0, 5.0, 3.0, 15.0, 6.0, 3.0]);
        assert_eq!(column_sums(&a, 3), [5.0, 7.0, 9.0]);
        // More rows than a block has
        let tall: Vec<f64> = (0..70).map(f64::from).collect();
        let doubled = product(view(&tall, (70, 1))?, view(&[2.0], (1, 1))?)?;
        assert!(doubled.iter().zip(&tall).all(|(a, b)| *a == 2.0 * b));
        Ok(())
    }
}
