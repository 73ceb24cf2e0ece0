//! Where training happens: parameters, gradients and the optimizer's state of one run, on the CPU or on a GPU.
//!
//! The loop and the families ask for a pass, an update and a snapshot, and do not know which device answers. The CPU's
//! engine is the reference: candle's autograd over the fused CPU ops, AdamW in host memory.

use super::Losses;
use super::checkpoint::{Snapshot, TrainerState};
use super::gradients::{self, DeviceTimes, Timing};
use super::memory;
use super::optimizer::{AdamW, GradientSum};
use crate::config::{DeviceChoice, PrecisionConfig, TrainConfig};
use crate::model::{Parameters, Transformer, TrunkShape};
use crate::runlog::Memory;
use crate::{Error, Exit, Result};
use candle_core::Tensor;
use std::collections::BTreeMap;

#[cfg(feature = "cuda")]
use crate::cuda;

/// One run's state.
#[derive(Debug)]
pub struct Engine(On);

/// On which device.
#[derive(Debug)]
enum On {
    Cpu(Box<Cpu>),
    #[cfg(feature = "cuda")]
    Cuda(Box<cuda::Engine>),
}

/// Training state in host memory.
#[derive(Debug)]
struct Cpu {
    parameters: Parameters,
    optimizer: AdamW,
    /// Of the step that is under way.
    sums: GradientSum,
    recompute: bool,
}

/// What one micro-step gave; its gradients are in the engine.
#[derive(Clone, Debug)]
pub struct MicroStep {
    /// Detached.
    pub losses: Losses,
    pub timing: Timing,
    /// By the device's own clock, if it has one.
    pub device: Option<DeviceTimes>,
}

/// What an engine is made for.
#[derive(Clone, Debug)]
pub struct EngineSpec<'a> {
    pub device: &'a DeviceChoice,
    pub precision: PrecisionConfig,
    pub train: &'a TrainConfig,
    /// Of the model whose parameters it holds.
    pub trunk: TrunkShape,
}

/// What a program built without CUDA says when a GPU is asked for.
pub fn without_cuda() -> Error {
    Error::new(Exit::Unavailable, "no_cuda_build", "this program was built without CUDA")
        .hint("build it with --features cuda; docs/gpu.md has the three commands")
}

/// Name of the GPU that `choice` comes to, or why there is none.
pub fn find_gpu(choice: &DeviceChoice) -> Result<String> {
    let Some(number) = gpu_number(choice) else {
        return Err(Error::new(Exit::Unavailable, "no_gpu", "the CPU is asked for"));
    };
    #[cfg(feature = "cuda")]
    return cuda::find(number).map(|found| found.name);
    #[cfg(not(feature = "cuda"))]
    {
        let _ = number;
        Err(without_cuda())
    }
}

/// The GPU that is asked for, if one is.
fn gpu_number(choice: &DeviceChoice) -> Option<usize> {
    match choice {
        DeviceChoice::Cpu => None,
        DeviceChoice::Auto => Some(0),
        DeviceChoice::Cuda(number) => Some(*number),
    }
}

/// What this choice comes to here, before anything is opened: `cpu`, or a GPU's name; a GPU that is not there as it was asked for.
pub fn device_name(choice: &DeviceChoice) -> String {
    find_gpu(choice).unwrap_or_else(|_| match choice {
        DeviceChoice::Cpu | DeviceChoice::Auto => "cpu".into(),
        DeviceChoice::Cuda(_) => choice.clone().into(),
    })
}

/// Name and bytes of the GPU that this choice comes to here; else of those that people have.
pub fn gpus_to_forecast(choice: &DeviceChoice) -> Vec<(String, u64)> {
    #[cfg(feature = "cuda")]
    if let Some(number) = gpu_number(choice) {
        return match cuda::find(number) {
            Ok(found) => vec![(found.name, found.total_bytes)],
            Err(_) => [("an A100 or H100 of 80 GB", 85_000_000_000), ("an H200", 150_100_000_000)]
                .map(|(name, bytes)| (name.to_owned(), bytes))
                .to_vec(),
        };
    }
    let _ = choice;
    Vec::new()
}

/// Which part of an optimizer step a micro-step is.
#[derive(Clone, Copy, Debug)]
pub struct Part {
    /// Its gradients count so many times.
    pub weight: f64,
    /// The step has no other: the sums are empty before it, and a GPU uses their memory until they are written.
    pub alone: bool,
}

/// What a pass on a GPU keeps for its backward half.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keep {
    /// As much as there is room for, on the device and the host.
    WhatFits,
    /// What so many blocks add to the residual stream, and nothing else.
    OutputsOf(usize),
    /// Everything, and by way of the host wherever that can be.
    AllInHost,
}

impl Engine {
    /// An engine whose parameters begin as `initial`, in f32, with moments of zero.
    ///
    /// # Errors
    /// If a GPU is asked for by number and cannot be used; `auto` falls back to the CPU only where there is none.
    pub fn start(spec: &EngineSpec<'_>, initial: Parameters) -> Result<Self> {
        #[cfg(feature = "cuda")]
        if let Some(gpu) = open_gpu(spec.device)? {
            let engine = cuda::Engine::new(gpu, spec.trunk, &initial, spec.precision.params, true)?;
            return Ok(Self(On::Cuda(Box::new(engine))));
        }
        refuse_gpu(spec.device)?;
        // Masters are the initial weights themselves; what the model sees may be a rounding of them.
        let optimizer = AdamW::new(&initial)?;
        let parameters = initial.to_dtype(spec.precision.params.dtype())?;
        Ok(Self(On::Cpu(Box::new(Cpu::new(parameters, optimizer, spec.train)))))
    }

    /// An engine that goes on from a checkpoint: parameters in their own dtype, and the optimizer's tensors. Without
    /// these the parameters are their own masters, and moments begin at zero.
    pub fn resume(
        spec: &EngineSpec<'_>,
        parameters: Parameters,
        optimizer: Option<&BTreeMap<String, Tensor>>,
    ) -> Result<Self> {
        #[cfg(feature = "cuda")]
        if let Some(gpu) = open_gpu(spec.device)? {
            let mut engine = cuda::Engine::new(gpu, spec.trunk, &parameters, spec.precision.params, true)?;
            if let Some(tensors) = optimizer {
                engine.load_optimizer(tensors)?;
            }
            return Ok(Self(On::Cuda(Box::new(engine))));
        }
        refuse_gpu(spec.device)?;
        let optimizer = match optimizer {
            Some(tensors) => AdamW::from_tensors(&parameters, tensors)?,
            None => AdamW::new(&parameters)?,
        };
        Ok(Self(On::Cpu(Box::new(Cpu::new(parameters, optimizer, spec.train)))))
    }

    /// `cpu`, or the GPU's name.
    pub fn device(&self) -> String {
        match &self.0 {
            On::Cpu(_) => "cpu".into(),
            #[cfg(feature = "cuda")]
            On::Cuda(engine) => engine.gpu().name.clone(),
        }
    }

    /// The parameters as forward passes see them; a model bound to them sees every update.
    pub fn parameters(&self) -> &Parameters {
        match &self.0 {
            On::Cpu(engine) => &engine.parameters,
            #[cfg(feature = "cuda")]
            On::Cuda(engine) => engine.parameters(),
        }
    }

    /// One forward and backward pass of `model`, which must be bound to [`Self::parameters`]; its gradients become part of
    /// those of the step.
    pub fn micro_step<M: Transformer>(
        &mut self,
        model: &M,
        input: &M::Input,
        part: Part,
        loss: impl Fn(&M::Output) -> candle_core::Result<Losses>,
    ) -> Result<MicroStep> {
        match &mut self.0 {
            On::Cpu(engine) => engine.micro_step(model, input, part.weight, loss),
            #[cfg(feature = "cuda")]
            On::Cuda(engine) => {
                let step = engine.micro_step(model, input, part, loss)?;
                Ok(MicroStep { losses: step.losses, timing: step.times.timing(), device: Some(step.times) })
            }
        }
    }

    /// One update from the step's gradients, the `step`-th (from 1), which forgets them. Returns their norm before it
    /// was clipped.
    pub fn update(&mut self, train: &TrainConfig, lr: f64, step: u64) -> Result<f64> {
        match &mut self.0 {
            On::Cpu(engine) => {
                let sums = std::mem::take(&mut engine.sums);
                engine.optimizer.update(&engine.parameters, &sums, train, lr, step)
            }
            #[cfg(feature = "cuda")]
            On::Cuda(engine) => engine.update(&train.into(), lr, step),
        }
    }

    /// The gradients of the step so far, by parameter, in host memory and f32.
    pub fn gradients(&self) -> Result<BTreeMap<String, Tensor>> {
        match &self.0 {
            On::Cpu(engine) => engine.sums.to_tensors(&engine.parameters),
            #[cfg(feature = "cuda")]
            On::Cuda(engine) => engine.gradients(),
        }
    }

    /// On a GPU: has the next passes keep this for their backward half. Gradients are the same within rounding.
    pub fn keep(&mut self, kept: Keep) {
        match &mut self.0 {
            // Its recomputation is the recipe's.
            On::Cpu(_) => _ = kept,
            #[cfg(feature = "cuda")]
            On::Cuda(engine) => engine.keep(kept),
        }
    }

    /// The run has made steps before this attempt; on a GPU its first micro-step differs from the others.
    pub fn goes_on(&mut self) {
        match &mut self.0 {
            On::Cpu(_) => {}
            #[cfg(feature = "cuda")]
            On::Cuda(engine) => engine.goes_on(),
        }
    }

    /// Forgets the gradients of an unfinished step.
    pub fn discard_gradients(&mut self) -> Result<()> {
        match &mut self.0 {
            On::Cpu(engine) => {
                engine.sums = GradientSum::default();
                Ok(())
            }
            #[cfg(feature = "cuda")]
            On::Cuda(engine) => engine.discard_gradients(),
        }
    }

    /// Copies the whole state into host memory that nothing else writes to.
    pub fn snapshot(&self, state: TrainerState) -> Result<Snapshot> {
        match &self.0 {
            On::Cpu(engine) => {
                Snapshot::take(&engine.parameters, engine.optimizer.to_tensors(&engine.parameters)?, state)
            }
            #[cfg(feature = "cuda")]
            On::Cuda(engine) => Snapshot::take(engine.parameters(), engine.optimizer_tensors()?, state),
        }
    }

    /// Memory of the run where it trains: resident, or this process's share of the GPU.
    pub fn memory(&self) -> Result<Memory> {
        match &self.0 {
            On::Cpu(_) => Ok(memory::resident()),
            #[cfg(feature = "cuda")]
            On::Cuda(engine) => engine.memory(),
        }
    }
}

impl Cpu {
    fn new(parameters: Parameters, optimizer: AdamW, train: &TrainConfig) -> Self {
        Self { parameters, optimizer, sums: GradientSum::default(), recompute: train.recompute }
    }

    fn micro_step<M: Transformer>(
        &mut self,
        model: &M,
        input: &M::Input,
        weight: f64,
        loss: impl Fn(&M::Output) -> candle_core::Result<Losses>,
    ) -> Result<MicroStep> {
        let pass = gradients::forward_backward(model, &self.parameters, input, self.recompute, loss)?;
        let adding = std::time::Instant::now();
        self.sums.add(&pass.gradients, weight as f32)?;
        let Timing { forward, backward } = pass.timing;
        let timing = Timing { forward, backward: backward + adding.elapsed() };
        Ok(MicroStep { losses: pass.losses, timing, device: None })
    }
}

/// The GPU that `choice` comes to.
#[cfg(feature = "cuda")]
fn open_gpu(choice: &DeviceChoice) -> Result<Option<cuda::Gpu>> {
    match choice {
        DeviceChoice::Cpu => Ok(None),
        DeviceChoice::Cuda(number) => cuda::Gpu::open(*number).map(Some),
        DeviceChoice::Auto => match cuda::list() {
            Ok(found) if !found.is_empty() => cuda::Gpu::open(0).map(Some),
            _ => Ok(None),
        },
    }
}

/// A GPU that was asked for by number is never replaced by the CPU.
fn refuse_gpu(choice: &DeviceChoice) -> Result<()> {
    match choice {
        DeviceChoice::Cuda(_) => Err(without_cuda()),
        DeviceChoice::Auto | DeviceChoice::Cpu => Ok(()),
    }
}
