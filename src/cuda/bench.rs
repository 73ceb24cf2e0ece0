//! Timing the whole model on one GPU with weights drawn there: what `bench trunk` prints.
//!
//! The shapes are LingBot-VA's 5 B on two views of 128 x 128: 32 video and 4 action tokens a latent frame and copy, 512
//! rows of text an episode. Random weights give random numbers and the same work.

use super::device::Gpu;
use super::engine::Engine;
use super::gemm::{AlgorithmTime, Gemm};
use super::launch::{Argument, Grid, Operand, Slice, device_error, long};
use super::optimizer::UpdateRule;
use super::timeline::KernelTime;
use crate::config::{LingbotModelConfig, ParameterFormat};
use crate::model::{EpisodeInput, EpisodeOutput, LingbotInput, LingbotModel, Transformer, lingbot_parameter_specs};
use crate::random::{Draw, Purpose};
use crate::train::Losses;
use crate::train::engine::Part;
use crate::train::gradients::DeviceTimes;
use crate::{Error, Result};
use candle_core::{DType, Device, Tensor};
use serde::Serialize;
use std::sync::Arc;
use std::time::Instant;

/// What to time.
#[derive(Clone, Debug)]
pub(crate) struct TrunkBench {
    /// Latent frames of an episode.
    pub frames: usize,
    /// Episodes.
    pub batch: usize,
    /// Latent frames of an attention chunk, and the window in half-chunks; the first is timed, each other once.
    pub draws: Vec<(usize, usize)>,
    pub layers: usize,
    pub warmup: usize,
    pub repeats: usize,
    /// With masters, moments and an update after each pass.
    pub optimizer: bool,
    /// GiB that the arena may take; all that is free without.
    pub arena_gib: Option<u64>,
    /// GiB of the host's memory that may be taken; without, what the machine has to spare.
    pub host_gib: Option<u64>,
    /// One more pass, timed kernel by kernel.
    pub kernels: bool,
}

/// Milliseconds of the parts of a pass.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct PartMs {
    pub front: f64,
    pub trunk_forward: f64,
    pub back: f64,
    pub trunk_backward: f64,
    pub front_backward: f64,
}

/// One configuration's figures; keys are those of the PyTorch peer.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct TrunkFigures {
    pub program: &'static str,
    pub commit: &'static str,
    pub device: String,
    pub frames: usize,
    pub batch: usize,
    pub chunk: usize,
    pub window: usize,
    pub layers: usize,
    pub tokens: usize,
    /// From the start of the measurement to the end of the first pass, weights included.
    pub first_s: f64,
    pub median_s: f64,
    pub min_s: f64,
    pub max_s: f64,
    /// The update alone, if there is one.
    pub update_s: Option<f64>,
    pub peak_gb: f64,
    /// What that was predicted to be.
    pub predicted_gb: f64,
    /// Of it what candle took in front, in heads, and in the backward pass.
    pub islands_gb: [f64; 3],
    /// The arena as it was predicted, GB.
    pub arena_gb: f64,
    /// What was kept in the host's memory, GB.
    pub host_gb: f64,
    pub kept: String,
    pub parts_ms: PartMs,
    /// The model's FLOP, forward and backward, over the time and what the device can do, in per cent.
    pub mfu: Option<f64>,
    /// (chunk, window, first seconds, then the median of the repeats) of other draws.
    pub draws: Vec<(usize, usize, f64, f64)>,
    pub loss: f64,
    /// A pass by kernel, if that was asked for; what is missing to the whole is candle's and the host's.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub kernels: Vec<KernelTime>,
}

const VIDEO_GRID: [usize; 2] = [8, 16];
const ACTIONS: usize = 4;
const TEXT: usize = 512;

fn model_config(layers: usize) -> LingbotModelConfig {
    LingbotModelConfig {
        dim: 3072,
        ffn_dim: 14336,
        num_heads: 24,
        num_layers: layers,
        in_dim: 48,
        out_dim: 48,
        patch_size: [1, 2, 2],
        action_dim: 30,
        freq_dim: 256,
        text_dim: 4096,
        text_len: TEXT,
        eps: 1e-6,
    }
}

/// A batch of random episodes.
fn batch(
    bench: &TrunkBench,
    config: &LingbotModelConfig,
    (chunk, window): (usize, usize),
    device: &Device,
) -> Result<LingbotInput> {
    let mut draw = Draw::new(1, Purpose::Noise, 0, "bench");
    let mut normal = |shape: &[usize]| -> Result<Tensor> {
        // A long period of normal numbers is as good as new ones, and drawing 10^8 takes seconds.
        let period: Vec<f32> = (0..65_521).map(|_| draw.normal() as f32).collect();
        let count: usize = shape.iter().product();
        Ok(Tensor::from_vec(period.iter().copied().cycle().take(count).collect::<Vec<_>>(), shape, &Device::Cpu)?)
    };
    let [height, width] = VIDEO_GRID;
    let episodes = (0..bench.batch)
        .map(|prompt| {
            let video = [config.in_dim, bench.frames, height, width];
            let action = [config.action_dim, bench.frames, ACTIONS];
            let times = |offset: usize| {
                (0..bench.frames).map(|frame| ((frame * 37 + offset) % 1000) as f64).collect::<Vec<_>>()
            };
            Ok(EpisodeInput {
                noisy_video: normal(&video)?,
                clean_video: normal(&video)?,
                noisy_action: normal(&action)?,
                clean_action: normal(&action)?,
                t_video: times(prompt),
                t_history: vec![0.0; bench.frames],
                t_action: times(prompt + 500),
                valid_frames: bench.frames,
                chunk,
                window,
                prompt,
            })
        })
        .collect::<Result<_>>()?;
    let prompts = (0..bench.batch).map(|_| normal(&[TEXT, config.text_dim])).collect::<Result<_>>()?;
    // On the device, as the peer's: data are no part of what is timed.
    let input = LingbotInput { episodes, prompts, alignment: 128 };
    Ok(input.map(|tensor| tensor.to_device(device)?.to_dtype(DType::BF16))?)
}

/// Mean square of the predictions: a loss without targets to carry.
#[allow(clippy::ptr_arg)] // the model's output type, as `micro_step` hands it over
fn loss(output: &Vec<EpisodeOutput>) -> candle_core::Result<Losses> {
    let mean = |pick: fn(&EpisodeOutput) -> &Tensor| -> candle_core::Result<Tensor> {
        let parts =
            output.iter().map(|episode| pick(episode).sqr()?.mean_all()).collect::<candle_core::Result<Vec<_>>>()?;
        Tensor::stack(&parts, 0)?.mean_all()
    };
    let (video, action) = (mean(|e| &e.video)?, mean(|e| &e.action)?);
    let total = (&video + &action)?;
    Ok(Losses { video, action, proprio: None, total })
}

/// Times forward and backward of the model; `tell` hears of each phase.
pub(crate) fn trunk(bench: &TrunkBench, tell: &mut dyn FnMut(&str)) -> Result<TrunkFigures> {
    let started = Instant::now();
    let Some(&(chunk, window)) = bench.draws.first() else { return Err(Error::crash("nothing to time")) };
    tell("opening the GPU");
    let gpu = Gpu::open(0)?;
    let config = model_config(bench.layers);
    let specs = lingbot_parameter_specs(&config);
    tell("drawing weights");
    let tensors = specs.iter().map(|spec| (spec.name.clone(), spec.shape.clone(), spec.trained)).collect();
    let shape = LingbotModel::shape(&config);
    let mut engine = Engine::allocate(gpu, shape, tensors, ParameterFormat::Bf16, bench.optimizer)?;
    if let Some(gib) = bench.arena_gib {
        engine.limit_arena(gib << 30);
    }
    if let Some(gib) = bench.host_gib {
        engine.limit_host(gib << 30);
    }
    engine.randomise(0.02, 1)?;
    for spec in specs.iter().filter(|spec| spec.name.contains("norm")) {
        let value = if spec.name.ends_with("weight") { 1f32 } else { 0.0 };
        engine.load_parameter(&spec.name, &Tensor::full(value, spec.shape.as_slice(), &Device::Cpu)?)?;
    }
    let input = batch(bench, &config, (chunk, window), &engine.gpu().device)?;
    let model = LingbotModel::new(&config, engine.parameters())?;
    tell("first pass");
    let rule = UpdateRule { clip_norm: 2.0, betas: [0.9, 0.95], eps: 1e-8, weight_decay: 0.1 };
    let mut updates = Vec::new();
    let mut pass = |engine: &mut Engine, input: &LingbotInput| -> Result<(f64, DeviceTimes, f64)> {
        let begun = Instant::now();
        let step = engine.micro_step(&model, input, Part { weight: 1.0, alone: true }, loss)?;
        let took = begun.elapsed().as_secs_f64();
        let value = f64::from(step.losses.total.to_scalar::<f32>()?);
        if bench.optimizer {
            let begun = Instant::now();
            engine.update(&rule, 1e-6, 1)?;
            updates.push(begun.elapsed().as_secs_f64());
        }
        Ok((took, step.times, value))
    };
    let (_, _, value) = pass(&mut engine, &input)?;
    let first_s = started.elapsed().as_secs_f64();
    for _ in 0..bench.warmup {
        pass(&mut engine, &input)?;
    }
    tell("timing");
    let mut times = Vec::new();
    let mut parts = DeviceTimes::default();
    for _ in 0..bench.repeats.max(1) {
        let (took, last, _) = pass(&mut engine, &input)?;
        times.push(took);
        parts = last;
    }
    let mut kernels = Vec::new();
    if bench.kernels {
        tell("a pass by kernel");
        engine.gpu().timeline.begin();
        pass(&mut engine, &input)?;
        kernels = engine.gpu().timeline.end()?;
    }
    let mut draws = Vec::new();
    for &(chunk, window) in &bench.draws[1..] {
        tell(&format!("chunk {chunk}, window {window}"));
        let input = batch(bench, &config, (chunk, window), &engine.gpu().device)?;
        let (first, _, _) = pass(&mut engine, &input)?;
        let mut others = Vec::new();
        for _ in 0..3 {
            others.push(pass(&mut engine, &input)?.0);
        }
        draws.push((chunk, window, first, median(&mut others)));
    }
    let median_s = median(&mut times);
    let layout = model.layout(&input)?;
    let tokens = layout.tokens();
    let (kept, arena, host) = engine
        .policy()
        .map_or((String::new(), 0, 0), |(policy, needed)| (policy.to_string(), needed.device, needed.host));
    let ms = |duration: std::time::Duration| duration.as_secs_f64() * 1e3;
    Ok(TrunkFigures {
        program: "lbva-tui",
        commit: env!("LBVA_COMMIT"),
        device: engine.gpu().name.clone(),
        frames: bench.frames,
        batch: bench.batch,
        chunk,
        window,
        layers: bench.layers,
        tokens,
        first_s,
        median_s,
        min_s: times.iter().copied().fold(f64::INFINITY, f64::min),
        max_s: times.iter().copied().fold(0.0, f64::max),
        update_s: if updates.is_empty() { None } else { Some(median(&mut updates)) },
        peak_gb: engine.account().peak() as f64 / 1e9,
        predicted_gb: engine.account().predicted() as f64 / 1e9,
        islands_gb: engine.account().islands.map(|bytes| bytes as f64 / 1e9),
        arena_gb: arena as f64 / 1e9,
        host_gb: host as f64 / 1e9,
        kept,
        parts_ms: PartMs {
            front: ms(parts.front),
            trunk_forward: ms(parts.trunk_forward),
            back: ms(parts.back),
            trunk_backward: ms(parts.trunk_backward),
            front_backward: ms(parts.front_backward),
        },
        mfu: parts.peak.map(|peak| 100.0 * parts.flop / median_s / peak),
        draws,
        loss: value,
        kernels,
    })
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Times the products of the trunk's Linear layers at `tokens` rows, with each algorithm that the library proposes.
pub(crate) fn gemm(tokens: usize) -> Result<Vec<AlgorithmTime>> {
    let gpu = Gpu::open(0)?;
    let (width, ffn) = (3072, 14336);
    let launcher = gpu.launcher();
    let allocate = |count: usize| -> Result<Slice<Operand>> {
        let failed = |error| device_error(error, "allocating matrices");
        let buffer = gpu.stream.alloc_zeros::<u16>(count).map_err(failed)?;
        let slice = Slice::new(buffer.leak(), count);
        // Products of zeros run faster than any others.
        let arguments = [slice.into(), 1f32.into(), Argument::Long(1), Argument::Long(0), long(count)];
        launcher.launch("fill_normal_bf16", Grid::new(count.div_ceil(1024) + 1, 256), &arguments)?;
        Ok(slice)
    };
    let gemm = Gemm::new(Arc::clone(&gpu.stream), Arc::clone(&gpu.timeline), true)?;
    let (x, y) = (allocate(tokens * ffn)?, allocate(tokens * ffn)?);
    let (w, spare) = (allocate(width * ffn)?, allocate(tokens * ffn)?);
    let wide =
        gpu.stream.alloc_zeros::<f32>(width * ffn).map_err(|error| device_error(error, "allocating matrices"))?;
    let wide = Slice::new(wide.leak(), width * ffn);
    let mut times = Vec::new();
    for (inputs, outputs) in [(width, 3 * width), (width, width), (width, ffn), (ffn, width)] {
        times.extend(gemm.time_algorithms((inputs, outputs, tokens), x, y, w, wide, spare)?);
    }
    Ok(times)
}
