//! AdamW with fp32 master weights and moments, global-norm clipping, gradient accumulation in fp32.
//!
//! Decoupled weight decay on every trained parameter (one group, norms and biases included; what no output depends on
//! is left as it is):
//! p <- p (1 - lr wd) - lr m^ / (sqrt(v^) + eps), with bias-corrected moments.

use crate::config::TrainConfig;
use crate::model::Parameters;
use crate::train::gradients::Gradients;
use crate::{Error, Result};
use candle_core::{DType, Device, Tensor};
use rayon::prelude::*;
use std::collections::BTreeMap;

/// Sum of the micro-steps' gradients of one optimizer step, fp32, by parameter.
#[derive(Debug, Default)]
pub struct GradientSum {
    sums: BTreeMap<String, Vec<f32>>,
}

impl GradientSum {
    /// Adds `weight` times the gradients of one micro-step.
    pub fn add(&mut self, gradients: &Gradients, weight: f32) -> Result<()> {
        for (name, gradient) in gradients {
            let values: Vec<f32> = gradient.flatten_all()?.to_dtype(DType::F32)?.to_vec1()?;
            match self.sums.get_mut(name) {
                Some(sum) => sum.iter_mut().zip(&values).for_each(|(sum, value)| *sum += weight * value),
                None => {
                    self.sums.insert(name.clone(), values.into_iter().map(|value| weight * value).collect());
                }
            }
        }
        Ok(())
    }

    /// The sums by parameter, row-major.
    pub fn sums(&self) -> &BTreeMap<String, Vec<f32>> {
        &self.sums
    }

    /// The sums in the shape of their parameters.
    pub fn to_tensors(&self, parameters: &Parameters) -> Result<BTreeMap<String, Tensor>> {
        let tensor = |(name, values): (&String, &Vec<f32>)| {
            Ok((name.clone(), Tensor::from_slice(values, parameters.get(name)?.shape(), &Device::Cpu)?))
        };
        self.sums.iter().map(tensor).collect()
    }

    /// Euclidean norm over all parameters, accumulated in f64 in name order.
    pub fn norm(&self) -> f64 {
        let square = |values: &Vec<f32>| values.iter().map(|&v| v as f64 * v as f64).sum::<f64>();
        self.sums.values().map(square).sum::<f64>().sqrt()
    }

    /// Name of the first parameter with a NaN or infinite gradient.
    pub fn first_non_finite(&self) -> Option<&str> {
        let broken = |values: &Vec<f32>| values.iter().any(|v| !v.is_finite());
        self.sums.iter().find(|(_, values)| broken(values)).map(|(name, _)| name.as_str())
    }
}

/// fp32 master weight and moments of one parameter.
#[derive(Debug)]
struct Slot {
    master: Vec<f32>,
    first: Vec<f32>,
    second: Vec<f32>,
}

/// The optimizer's state.
#[derive(Debug)]
pub struct AdamW {
    slots: BTreeMap<String, Slot>,
}

impl AdamW {
    /// Zero moments around the present weights.
    pub fn new(parameters: &Parameters) -> Result<Self> {
        let slots = parameters
            .trained()
            .map(|(name, variable)| {
                let master: Vec<f32> = variable.flatten_all()?.to_dtype(DType::F32)?.to_vec1()?;
                let zeros = vec![0.0; master.len()];
                Ok((name.to_owned(), Slot { master, first: zeros.clone(), second: zeros }))
            })
            .collect::<Result<_>>()?;
        Ok(Self { slots })
    }

    /// One update, the `step`-th (from 1); gradients are scaled down to `clip_norm` first. Returns the norm before.
    pub fn update(
        &mut self,
        parameters: &Parameters,
        gradients: &GradientSum,
        config: &TrainConfig,
        lr: f64,
        step: u64,
    ) -> Result<f64> {
        let norm = gradients.norm();
        if !norm.is_finite() {
            let name = gradients.first_non_finite().unwrap_or("an overflowing norm");
            return Err(Error::crash(format!("gradient is not finite at step {step}, first in {name}"))
                .hint("the last checkpoint is intact; lower train.lr or look at the data of this step"));
        }
        let scale = if norm > config.clip_norm { (config.clip_norm / norm) as f32 } else { 1.0 };
        let [beta1, beta2] = config.betas;
        let correction1 = 1.0 - beta1.powi(step.min(i32::MAX as u64) as i32);
        let correction2 = 1.0 - beta2.powi(step.min(i32::MAX as u64) as i32);
        let (beta1, beta2, eps) = (beta1 as f32, beta2 as f32, config.adam_eps as f32);
        let decay = (1.0 - lr * config.weight_decay) as f32;
        let rate = (lr / correction1) as f32;
        let root_correction = (1.0 / correction2.sqrt()) as f32;

        for (name, variable) in parameters.trained() {
            let (Some(slot), Some(gradient)) = (self.slots.get_mut(name), gradients.sums.get(name)) else {
                return Err(Error::crash(format!("no gradient reached {name} at step {step}")));
            };
            slot.master
                .par_iter_mut()
                .zip(slot.first.par_iter_mut())
                .zip(slot.second.par_iter_mut())
                .zip(gradient.par_iter())
                .with_min_len(16 * 1024)
                .for_each(|(((master, first), second), &gradient)| {
                    let gradient = gradient * scale;
                    *first = beta1 * *first + (1.0 - beta1) * gradient;
                    *second = beta2 * *second + (1.0 - beta2) * gradient * gradient;
                    *master = *master * decay - rate * *first / (second.sqrt() * root_correction + eps);
                });
            let master = Tensor::from_slice(&slot.master, variable.shape(), variable.device())?;
            variable.set(&master.to_dtype(variable.dtype())?)?;
        }
        Ok(norm)
    }

    /// Moments as tensors `first.<name>`, `second.<name>`, for a checkpoint; and masters `master.<name>` of weights that
    /// are no fp32. An fp32 weight is its own master, and saving it twice would make a checkpoint a third larger.
    pub fn to_tensors(&self, parameters: &Parameters) -> Result<BTreeMap<String, Tensor>> {
        let mut tensors = BTreeMap::new();
        for (name, variable) in parameters.iter() {
            let Some(slot) = self.slots.get(name) else { continue };
            let master = (variable.dtype() != DType::F32).then_some(("master", &slot.master));
            for (part, values) in [("first", &slot.first), ("second", &slot.second)].into_iter().chain(master) {
                tensors.insert(format!("{part}.{name}"), Tensor::from_slice(values, variable.shape(), &Device::Cpu)?);
            }
        }
        Ok(tensors)
    }

    /// Back from a checkpoint's tensors; the error names the first that is missing or of another size.
    pub fn from_tensors(parameters: &Parameters, tensors: &BTreeMap<String, Tensor>) -> Result<Self> {
        let mut slots = BTreeMap::new();
        for (name, variable) in parameters.trained() {
            let part = |part: &str| -> Result<Vec<f32>> {
                let key = format!("{part}.{name}");
                match tensors.get(&key) {
                    Some(tensor) if tensor.dims() == variable.dims() => Ok(tensor.flatten_all()?.to_vec1()?),
                    _ => Err(Error::refused("optimizer_mismatch", "the checkpoint lacks a moment of this model")
                        .in_place(key)),
                }
            };
            let master = match variable.dtype() {
                DType::F32 => variable.flatten_all()?.to_vec1()?,
                _ => part("master")?,
            };
            slots.insert(name.to_owned(), Slot { master, first: part("first")?, second: part("second")? });
        }
        Ok(Self { slots })
    }
}
