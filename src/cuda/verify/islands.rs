//! Ops on candle's side of the seam: each as training calls it, on tensors, with gradients; the reference is the composed form
//! in f64 on the CPU.

use super::Table;
use super::rig::{Check, F32_LIMIT, Rig, Verdict, relative};
use crate::Result;
use crate::ops::{Rows, norm_modulate, reference, weighted_mse};
use candle_core::{DType, Device, Tensor, Var};

pub(super) fn all(rig: &mut Rig<'_>, table: &mut Table) {
    for (rows, run, width) in [(1, 1, 48), (7, 11, 208), (5, 32, 3072)] {
        let shape = format!("{} x {width}, {rows} rows", rows * run);
        table.case(rig, "norm_modulate, with gradients", shape, |rig| modulated(rig, rows, run, width));
    }
    for (channels, frames, cells) in [(1, 1, 1), (30, 5, 4), (48, 33, 128)] {
        for masked in [false, true] {
            let mask = if masked { ", masked" } else { "" };
            let shape = format!("{channels} x {frames} x {cells}{mask}");
            let work = |rig: &mut Rig<'_>| squared(rig, [channels, frames, cells], masked);
            table.case(rig, "weighted_mse, with gradients", shape, work);
        }
    }
}

/// An op's results for some inputs: its output, then the gradients of those that have any.
type Op<'o> = &'o dyn Fn(&[Var]) -> candle_core::Result<(Tensor, usize)>;

/// Output and gradients of an op on a device, as f64; the cotangent is drawn beside the inputs.
fn results(inputs: &[Tensor], cotangent: &Tensor, dtype: DType, device: &Device, op: Op<'_>) -> Result<Vec<Vec<f64>>> {
    let at = |tensor: &Tensor| tensor.to_dtype(dtype)?.to_device(device);
    let variables: Vec<Var> =
        inputs.iter().map(|tensor| Var::from_tensor(&at(tensor)?)).collect::<candle_core::Result<_>>()?;
    let (output, trained) = op(&variables)?;
    let cotangent = at(&cotangent.narrow(0, 0, output.elem_count())?.reshape(output.dims())?)?;
    let store = (&output * cotangent)?.sum_all()?.backward()?;
    let mut found = vec![output];
    for variable in &variables[..trained] {
        found.push(store.get(variable).cloned().map_or_else(|| variable.zeros_like(), Ok)?);
    }
    let values =
        |tensor: &Tensor| tensor.to_dtype(DType::F64)?.to_device(&Device::Cpu)?.flatten_all()?.to_vec1::<f64>();
    Ok(found.iter().map(values).collect::<candle_core::Result<_>>()?)
}

fn compared(
    rig: &mut Rig<'_>,
    names: &[&'static str],
    inputs: &[Tensor],
    cotangents: usize,
    op: Op<'_>,
    oracle: Op<'_>,
) -> Result<Verdict> {
    let cotangent = normal(rig, &[cotangents])?;
    let gpu = rig.gpu.device.clone();
    let first = results(inputs, &cotangent, DType::F32, &gpu, op)?;
    let repeats = results(inputs, &cotangent, DType::F32, &gpu, op)? == first;
    let expected = results(inputs, &cotangent, DType::F64, &Device::Cpu, oracle)?;
    let checks = names.iter().zip(first.iter().zip(&expected)).map(|(output, (found, expected))| Check {
        output,
        error: relative(found, expected),
        limit: F32_LIMIT,
        stray: false,
    });
    Ok(Verdict { checks: checks.collect(), repeats })
}

/// Values that f32 holds exactly.
fn normal(rig: &mut Rig<'_>, shape: &[usize]) -> Result<Tensor> {
    let values: Vec<f32> = (0..shape.iter().product()).map(|_| rig.draw().normal() as f32).collect();
    Ok(Tensor::from_vec(values, shape, &Device::Cpu)?)
}

fn modulated(rig: &mut Rig<'_>, rows: usize, run: usize, width: usize) -> Result<Verdict> {
    const EPS: f64 = 1e-6;
    let inputs =
        [normal(rig, &[1, rows * run, width])?, normal(rig, &[1, rows, width])?, normal(rig, &[1, rows, width])?];
    let map = Rows::new((0..rows * run).map(|token| token / run).collect(), rows);
    let names = ["y", "x gradient", "shift gradient", "scale gradient"];
    compared(
        rig,
        &names,
        &inputs,
        rows * run * width,
        &|v| Ok((norm_modulate(&v[0], &v[1], &v[2], &map, EPS)?, 3)),
        &|v| Ok((reference::norm_modulate(&v[0], &v[1], &v[2], &map, EPS)?, 3)),
    )
}

fn squared(rig: &mut Rig<'_>, shape: [usize; 3], masked: bool) -> Result<Verdict> {
    let mask = normal(rig, &shape)?.ge(0f32)?.to_dtype(DType::F32)?;
    let inputs = [normal(rig, &shape)?, normal(rig, &shape)?, normal(rig, &[shape[1]])?.sqr()?];
    let op = |v: &[Var], form: fn(&Tensor, &Tensor, &Tensor, Option<&Tensor>) -> candle_core::Result<Tensor>| {
        let mask = mask.to_dtype(v[0].dtype())?.to_device(v[0].device())?;
        Ok((form(&v[0], &v[1], &v[2], masked.then_some(&mask))?, 1))
    };
    compared(rig, &["loss", "prediction gradient"], &inputs, 1, &|v| op(v, weighted_mse), &|v| {
        op(v, reference::weighted_mse)
    })
}
