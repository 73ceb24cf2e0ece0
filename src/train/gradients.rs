//! Gradients of the loss for every parameter, with or without keeping the blocks' intermediates.
//!
//! With recomputation only the residual stream at block boundaries is kept: each block runs again in the backward pass
//! and the cotangent is pulled through it alone (a segmented vector-Jacobian product). Boundaries are `Var`s, because
//! candle prunes everything that leads to no variable.

use super::Losses;
use crate::model::{Conditioning, Parameters, Transformer};
use candle_core::backprop::GradStore;
use candle_core::{Result, Tensor, Var};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Gradient of each parameter that the loss depends on, by name.
pub type Gradients = BTreeMap<String, Tensor>;

/// Wall time of one forward and backward pass. On the CPU an operation is done when it returns.
#[derive(Clone, Copy, Debug, Default)]
pub struct Timing {
    /// To the loss.
    pub forward: Duration,
    /// Blocks that are computed again for it count here.
    pub backward: Duration,
}

/// Parts of a pass by the clock of a device that runs behind its host.
#[derive(Clone, Copy, Debug, Default)]
pub struct DeviceTimes {
    pub front: Duration,
    pub trunk_forward: Duration,
    /// Heads and losses, forward and backward.
    pub back: Duration,
    pub trunk_backward: Duration,
    pub front_backward: Duration,
    /// FLOP of forward and backward, without what is recomputed.
    pub flop: f64,
    /// FLOP a second that the device can do, if that is known.
    pub peak: Option<f64>,
}

impl DeviceTimes {
    /// Up to the loss and its gradient, and from there.
    pub fn timing(&self) -> Timing {
        Timing {
            forward: self.front + self.trunk_forward + self.back,
            backward: self.trunk_backward + self.front_backward,
        }
    }
}

/// What one forward and backward pass gives; output and losses are detached.
#[derive(Clone, Debug)]
pub struct Pass<O> {
    pub output: O,
    pub losses: Losses,
    /// Of `losses.total`.
    pub gradients: Gradients,
    pub timing: Timing,
}

/// One forward and backward pass.
pub fn forward_backward<M: Transformer>(
    model: &M,
    parameters: &Parameters,
    input: &M::Input,
    recompute: bool,
    loss: impl Fn(&M::Output) -> Result<Losses>,
) -> Result<Pass<M::Output>> {
    let mut gradients = Gradients::new();
    let started = Instant::now();
    let (output, losses, forward) = if recompute {
        recomputed(model, parameters, input, &loss, &mut gradients, started)?
    } else {
        let output = model.forward(input)?;
        let losses = loss(&output)?;
        let forward = started.elapsed();
        collect(parameters, &losses.total.backward()?, &mut gradients)?;
        (output, losses, forward)
    };
    let timing = Timing { forward, backward: started.elapsed().saturating_sub(forward) };
    Ok(Pass { output: M::detach(&output), losses: losses.detach(), gradients, timing })
}

fn recomputed<M: Transformer>(
    model: &M,
    parameters: &Parameters,
    input: &M::Input,
    loss: &impl Fn(&M::Output) -> Result<Losses>,
    gradients: &mut Gradients,
    started: Instant,
) -> Result<(M::Output, Losses, Duration)> {
    let layout = model.layout(input)?;
    let (rows, front_conditioning) = model.front(input, &layout)?;
    let front_x = model.sequence(&rows, &layout)?;
    let shared: Vec<Var> = front_conditioning
        .tensors()
        .into_iter()
        .map(|tensor| Var::from_tensor(&tensor.detach()))
        .collect::<Result<_>>()?;
    let conditioning: Conditioning =
        front_conditioning.with_tensors(&shared.iter().map(|var| var.as_tensor().clone()).collect::<Vec<_>>());

    let mut boundaries = vec![front_x.detach()];
    for layer in 0..model.depth() {
        let x = model.block(layer, &boundaries[layer], &conditioning, &layout)?.detach();
        boundaries.push(x);
    }

    let last = Var::from_tensor(&boundaries[model.depth()])?;
    let output = model.back(&model.read(last.as_tensor(), &layout)?, &conditioning, &layout)?;
    let losses = loss(&output)?;
    let forward = started.elapsed();
    let store = losses.total.backward()?;
    collect(parameters, &store, gradients)?;
    let mut cotangent = required(&store, &last)?;
    let mut shared_cotangents: Vec<Option<Tensor>> = vec![None; shared.len()];
    accumulate(&store, &shared, &mut shared_cotangents)?;

    for layer in (0..model.depth()).rev() {
        let x = Var::from_tensor(&boundaries[layer])?;
        let y = model.block(layer, x.as_tensor(), &conditioning, &layout)?;
        let store = (y * &cotangent)?.sum_all()?.backward()?;
        collect(parameters, &store, gradients)?;
        accumulate(&store, &shared, &mut shared_cotangents)?;
        cotangent = required(&store, &x)?;
    }

    let mut surrogate = (front_x * cotangent)?.sum_all()?;
    for (tensor, cotangent) in front_conditioning.tensors().into_iter().zip(shared_cotangents) {
        if let Some(cotangent) = cotangent {
            // Only its gradient counts, so a value that overflows its format does no harm.
            surrogate = (&surrogate + (tensor * cotangent)?.sum_all()?.to_dtype(surrogate.dtype())?)?;
        }
    }
    collect(parameters, &surrogate.backward()?, gradients)?;
    Ok((output, losses, forward))
}

/// Adds the store's parameter gradients to `gradients`.
fn collect(parameters: &Parameters, store: &GradStore, gradients: &mut Gradients) -> Result<()> {
    for (name, variable) in parameters.iter() {
        let Some(gradient) = store.get(variable) else { continue };
        let sum = match gradients.get(name) {
            Some(earlier) => (earlier + gradient)?,
            None => gradient.clone(),
        };
        gradients.insert(name.to_owned(), sum);
    }
    Ok(())
}

/// Adds the gradients of variables that blocks share to their totals.
pub(crate) fn accumulate(store: &GradStore, shared: &[Var], totals: &mut [Option<Tensor>]) -> Result<()> {
    for (variable, total) in shared.iter().zip(totals) {
        if let Some(gradient) = store.get(variable) {
            *total = Some(match total.take() {
                Some(earlier) => (earlier + gradient)?,
                None => gradient.clone(),
            });
        }
    }
    Ok(())
}

/// The gradient of a block boundary, which an op that drops gradients would keep away.
pub(crate) fn required(store: &GradStore, variable: &Var) -> Result<Tensor> {
    match store.get(variable) {
        Some(gradient) => Ok(gradient.clone()),
        None => candle_core::bail!("no gradient reached a block boundary: an op on the way drops it"),
    }
}
