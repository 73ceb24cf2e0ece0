//! A GPU's gradients against the reference path's: every parameter of a model, in the regime that a recipe trains in.
//!
//! The oracle is the same model in f64 on the CPU, at the very weights that the regime sees. In f32 the GPU must agree with
//! it closely. In bf16 nothing can: there the reference path computes in bf16 too, and the GPU may be off by at most half
//! as much again as that is. That holds whatever is kept for the backward pass: it is tried with all, half and nothing.
//! Weights are drawn anew, none is zero: a branch that begins at zero would hide its gradients.

use super::gradients::{Gradients, forward_backward};
use super::{Losses, engine};
use crate::config::{DeviceChoice, LingbotRecipe, ParameterFormat, Recipe, TrainConfig, XwamRecipe};
use crate::model::{
    EpisodeInput, EpisodeOutput, LingbotInput, LingbotModel, ParameterSpec, Parameters, Transformer, XwamInput,
    XwamModel, XwamOutput, lingbot_parameter_specs, parameter_specs,
};
use crate::random::{Draw, Purpose};
use crate::{Error, Result};
use candle_core::{DType, Device, Tensor};
use serde::Serialize;
use std::collections::BTreeMap;

/// In f32: relative L2 of a gradient. Sums over thousands of tokens in another order.
const F32_LIMIT: f64 = 1e-5;
/// In bf16: of the reference path's own error, with a floor for tensors that it happens to get almost right.
const BF16_RATIO: f64 = 1.5;
const BF16_FLOOR: f64 = 4e-3;

/// One parameter's gradient.
#[derive(Clone, Debug, Serialize)]
pub struct TensorError {
    pub name: String,
    /// Relative L2 of the GPU's gradient against f64, the worst of what was kept.
    pub gpu: f64,
    /// Of the reference path's in the same regime.
    pub reference: f64,
    pub passed: bool,
}

/// All of a model's.
#[derive(Clone, Debug, Serialize)]
pub struct GradientReport {
    pub device: String,
    pub regime: &'static str,
    pub parameters: usize,
    pub tokens: usize,
    /// Relative difference of the loss from f64's.
    pub loss: f64,
    /// Whether a second pass gave the same bits.
    pub repeats: bool,
    /// Worst first.
    pub tensors: Vec<TensorError>,
    pub passed: bool,
}

impl GradientReport {
    /// The worst `count` tensors and the verdict.
    pub fn to_text(&self, count: usize) -> String {
        let mut text = format!(
            "{}, {}: {} parameters, {} tokens; loss off by {:.1e}; second pass {}\n",
            self.device,
            self.regime,
            crate::words::thousands(self.parameters as u64),
            self.tokens,
            self.loss,
            if self.repeats { "bit-identical" } else { "DIFFERS" },
        );
        text += &format!("  {:<60} {:>9} {:>9}\n", "relative L2 against f64", "GPU", "CPU");
        for tensor in self.tensors.iter().take(count) {
            let mark = if tensor.passed { "" } else { "  FAILED" };
            text += &format!("  {:<60} {:>9.1e} {:>9.1e}{mark}\n", tensor.name, tensor.gpu, tensor.reference);
        }
        let failed = self.tensors.iter().filter(|tensor| !tensor.passed).count();
        text + &match failed {
            0 => format!("  {} gradients, all within bounds", self.tensors.len()),
            _ => format!("  {failed} of {} gradients out of bounds", self.tensors.len()),
        }
    }
}

/// Compares a GPU's gradients with the reference path's, for the model and the regime of a recipe.
///
/// # Errors
/// If there is no GPU, or the program was built without CUDA.
pub fn check(recipe: &Recipe, device: &DeviceChoice, format: ParameterFormat) -> Result<GradientReport> {
    engine::find_gpu(device)?;
    match recipe {
        Recipe::Lingbot(recipe) => lingbot(recipe, device, format),
        Recipe::Xwam(recipe) => xwam(recipe, device, format),
    }
}

/// Normal values by name, of any shape.
fn normal(name: &str, shape: &[usize], scale: f64) -> Result<Tensor> {
    let mut draw = Draw::new(5, Purpose::Noise, 0, &format!("verify gradients {name}"));
    let values: Vec<f32> = (0..shape.iter().product()).map(|_| (scale * draw.normal()) as f32).collect();
    Ok(Tensor::from_vec(values, shape, &Device::Cpu)?)
}

/// Weights of fan-in scale, norms' around 1, biases and tables small: nothing is zero.
fn weights(specs: &[ParameterSpec], format: ParameterFormat) -> Result<Parameters> {
    let mut tensors = BTreeMap::new();
    for spec in specs {
        let inputs = spec.shape.last().copied().unwrap_or(1) as f64;
        let values = match spec.shape.len() {
            1 if spec.name.contains("norm") && spec.name.ends_with("weight") => {
                (normal(&spec.name, &spec.shape, 0.1)? + 1.0)?
            }
            1 => normal(&spec.name, &spec.shape, 0.1)?,
            _ => normal(&spec.name, &spec.shape, inputs.sqrt().recip().min(0.3))?,
        };
        tensors.insert(spec.name.clone(), values.to_dtype(format.dtype())?.to_dtype(DType::F32)?);
    }
    Parameters::from_tensors(specs, tensors)
}

/// A model over parameters.
type Bind<M> = Box<dyn Fn(&Parameters) -> Result<M>>;
/// Losses of what a model put out.
type Loss<O> = Box<dyn Fn(&O) -> candle_core::Result<Losses>>;

/// What a family brings to the comparison.
struct Case<M: Transformer> {
    specs: Vec<ParameterSpec>,
    bind: Bind<M>,
    /// The batch in a dtype.
    input: Box<dyn Fn(DType) -> Result<M::Input>>,
    loss: Loss<M::Output>,
}

fn compare<M: Transformer>(
    case: &Case<M>,
    train: &TrainConfig,
    device: &DeviceChoice,
    precision: crate::config::PrecisionConfig,
) -> Result<GradientReport> {
    let initial = weights(&case.specs, precision.params)?;
    let on_cpu = |parameters: &Parameters, dtype: DType| -> Result<(f64, Gradients)> {
        let model = (case.bind)(parameters)?;
        let pass = forward_backward(&model, parameters, &(case.input)(dtype)?, false, &case.loss)?;
        Ok((super::task::scalar(&pass.losses.total)?, pass.gradients))
    };
    let (exact_loss, exact) = on_cpu(&initial.to_dtype(DType::F64)?, DType::F64)?;
    let (_, reference) = on_cpu(&initial.to_dtype(precision.params.dtype())?, DType::F32)?;

    let trunk = (case.bind)(&initial)?.trunk();
    let spec = engine::EngineSpec { device, precision, train, trunk };
    let parameters = initial.count();
    let trained: Vec<String> = initial.trained().map(|(name, _)| name.to_owned()).collect();
    let mut engine = engine::Engine::start(&spec, initial)?;
    let model = (case.bind)(engine.parameters())?;
    let input = (case.input)(DType::F32)?;
    let mut passes = Vec::new();
    // Twice the same, then the same in the memory of the gradients and by way of the host; then with every block run forward
    // again, and with some of them.
    use engine::{Keep, Part};
    let half = Keep::OutputsOf(trunk.depth.div_ceil(2));
    for (kept, alone) in [
        (Keep::WhatFits, false),
        (Keep::WhatFits, false),
        (Keep::WhatFits, true),
        (Keep::AllInHost, true),
        (Keep::OutputsOf(0), false),
        (half, true),
    ] {
        engine.keep(kept);
        let step = engine.micro_step(&model, &input, Part { weight: 1.0, alone }, &case.loss)?;
        passes.push((super::task::scalar(&step.losses.total)?, engine.gradients()?));
        engine.discard_gradients()?;
    }
    let tokens = {
        let layout = model.layout(&input)?;
        let (_, conditioning) = model.front(&input, &layout)?;
        conditioning.text.dim(0)? * model.placement(&layout).rows.of_token.len()
    };
    let [(loss, gradients), same @ .., every, some] = &passes[..] else {
        return Err(Error::crash("fewer passes than were asked for"));
    };
    let mut repeats = same.iter().all(|(other, _)| loss.to_bits() == other.to_bits());
    let mut tensors = Vec::new();
    for name in trained {
        let values = |gradients: &BTreeMap<String, Tensor>| -> Result<Vec<f64>> {
            match gradients.get(&name) {
                Some(gradient) => Ok(gradient.flatten_all()?.to_dtype(DType::F64)?.to_vec1()?),
                None => Err(Error::crash(format!("no gradient reached {name}"))),
            }
        };
        let (exact, on_gpu, in_regime) = (values(&exact)?, values(gradients)?, values(&reference)?);
        for (_, gradients) in same {
            repeats &= on_gpu.iter().zip(values(gradients)?).all(|(a, b)| a.to_bits() == b.to_bits());
        }
        let (mut gpu, reference) = (relative(&on_gpu, &exact), relative(&in_regime, &exact));
        for (_, gradients) in [every, some] {
            gpu = gpu.max(relative(&values(gradients)?, &exact));
        }
        let limit = match precision.params {
            ParameterFormat::F32 => F32_LIMIT,
            ParameterFormat::Bf16 => BF16_FLOOR.max(BF16_RATIO * reference),
        };
        tensors.push(TensorError { name, gpu, reference, passed: gpu <= limit });
    }
    tensors.sort_by(|a, b| b.gpu.total_cmp(&a.gpu));
    Ok(GradientReport {
        device: engine.device(),
        regime: precision.words(),
        parameters,
        tokens,
        loss: (loss - exact_loss).abs() / exact_loss.abs(),
        repeats,
        passed: repeats && tensors.iter().all(|tensor| tensor.passed),
        tensors,
    })
}

/// ||a - b|| / ||b||; infinite if a is not finite.
fn relative(a: &[f64], b: &[f64]) -> f64 {
    let square = |values: &mut dyn Iterator<Item = f64>| values.map(|value| value * value).sum::<f64>();
    let difference = square(&mut a.iter().zip(b).map(|(a, b)| a - b));
    let norm = square(&mut b.iter().copied());
    match difference.is_finite() {
        true if norm > 0.0 => (difference / norm).sqrt(),
        true => difference.sqrt(),
        false => f64::INFINITY,
    }
}

/// Sum of products with fixed random tensors: every output element counts, each differently.
fn weighed(parts: &[(&str, &Tensor)]) -> candle_core::Result<Losses> {
    let mut sums = Vec::with_capacity(parts.len());
    for (name, tensor) in parts {
        let weights = normal(name, tensor.dims(), 1.0).map_err(candle_core::Error::wrap)?;
        let weights = weights.to_dtype(tensor.dtype())?.to_device(tensor.device())?;
        sums.push(((*tensor * weights)?.sum_all()? / (tensor.elem_count() as f64).sqrt())?);
    }
    let total = Tensor::stack(&sums, 0)?.sum_all()?;
    Ok(Losses { video: total.clone(), action: total.clone(), proprio: None, total })
}

/// Three packed episodes of unequal length, one with padding frames; two share a prompt.
fn lingbot(recipe: &LingbotRecipe, device: &DeviceChoice, format: ParameterFormat) -> Result<GradientReport> {
    const FRAMES: [(usize, usize, usize, usize, usize); 3] = [(5, 5, 2, 4, 0), (9, 7, 3, 64, 1), (6, 6, 1, 2, 0)];
    let model = recipe.model.clone();
    let alignment = recipe.packing.alignment;
    let config = model.clone();
    let input = move |dtype: DType| -> Result<LingbotInput> {
        let [_, patch_h, patch_w] = config.patch_size;
        let tensor =
            |name: String, shape: &[usize]| -> Result<Tensor> { Ok(normal(&name, shape, 1.0)?.to_dtype(dtype)?) };
        let episodes = FRAMES
            .iter()
            .enumerate()
            .map(|(index, &(frames, valid_frames, chunk, window, prompt))| {
                let video = [config.in_dim, frames, 4 * patch_h, 2 * patch_w];
                let action = [config.action_dim, frames, 4];
                let times = |offset: usize| (0..frames).map(|f| ((f * 97 + offset) % 1000) as f64).collect::<Vec<_>>();
                Ok(EpisodeInput {
                    noisy_video: tensor(format!("noisy {index}"), &video)?,
                    clean_video: tensor(format!("clean {index}"), &video)?,
                    noisy_action: tensor(format!("noisy action {index}"), &action)?,
                    clean_action: tensor(format!("clean action {index}"), &action)?,
                    t_video: times(3 * index),
                    t_history: times(100),
                    t_action: times(400 + index),
                    valid_frames,
                    chunk,
                    window,
                    prompt,
                })
            })
            .collect::<Result<_>>()?;
        let prompts = [3, config.text_len.min(40)]
            .iter()
            .map(|&words| tensor(format!("prompt of {words}"), &[words, config.text_dim]))
            .collect::<Result<_>>()?;
        Ok(LingbotInput { episodes, prompts, alignment })
    };
    let loss = |output: &Vec<EpisodeOutput>| {
        let names: Vec<[String; 2]> =
            (0..output.len()).map(|i| [format!("w video {i}"), format!("w action {i}")]).collect();
        let parts: Vec<(&str, &Tensor)> = output
            .iter()
            .zip(&names)
            .flat_map(|(episode, [video, action])| {
                [(video.as_str(), &episode.video), (action.as_str(), &episode.action)]
            })
            .collect();
        weighed(&parts)
    };
    let case = Case {
        specs: lingbot_parameter_specs(&model),
        bind: Box::new(move |parameters| Ok(LingbotModel::new(&model, parameters)?)),
        input: Box::new(input),
        loss: Box::new(loss),
    };
    let precision = crate::config::PrecisionConfig { params: format, ..recipe.precision };
    compare(&case, &recipe.train, device, precision)
}

/// Two clips of the recipe's shape, with the geometry branch if the recipe has it.
fn xwam(recipe: &XwamRecipe, device: &DeviceChoice, format: ParameterFormat) -> Result<GradientReport> {
    const BATCH: usize = 2;
    let model = recipe.model.clone();
    let config = model.clone();
    let input = move |dtype: DType| -> Result<XwamInput> {
        let (frames, actions, proprios) = (3, 4 * config.action_num, 3);
        let [_, patch_h, patch_w] = config.patch_size;
        let tensor = |name: &str, shape: &[usize]| -> Result<Tensor> { Ok(normal(name, shape, 1.0)?.to_dtype(dtype)?) };
        let times = |count: usize, offset: usize| -> Vec<Vec<f64>> {
            (0..BATCH).map(|b| (0..count).map(|i| ((i * 131 + b * 17 + offset) % 1000) as f64).collect()).collect()
        };
        let geometry = &config.geometry;
        Ok(XwamInput {
            latent: tensor("latent", &[BATCH, config.in_dim, frames, config.num_views, 3 * patch_h, 2 * patch_w])?,
            action: tensor("action", &[BATCH, actions, config.action_dim])?,
            proprio: tensor("proprio", &[BATCH, proprios, config.proprio_dim])?,
            text: tensor("text", &[BATCH, config.text_len, config.text_dim])?,
            t_video: times(frames, 0),
            t_action: times(actions, 300),
            t_proprio: times(proprios, 600),
            geometry: match geometry.enabled {
                true => {
                    let count = geometry.source_views * geometry.grid[0] * geometry.grid[1];
                    Some(tensor("geometry", &[BATCH, count, geometry.token_dim])?)
                }
                false => None,
            },
        })
    };
    let loss = |output: &XwamOutput| {
        weighed(&[("w video", &output.video), ("w action", &output.action), ("w proprio", &output.proprio)])
    };
    let case = Case {
        specs: parameter_specs(&model),
        bind: Box::new(move |parameters| Ok(XwamModel::new(&model, parameters)?)),
        input: Box::new(input),
        loss: Box::new(loss),
    };
    let precision = crate::config::PrecisionConfig { params: format, ..recipe.precision };
    compare(&case, &recipe.train, device, precision)
}
