//! Training state on a GPU, and one micro-step through it.
//!
//! Candle computes embedders and heads under its autograd; between them the trunk computes by hand. The two meet at the
//! embedders' rows, at what each head reads, and at what conditions the blocks: forward, values are copied from one side to
//! the other; backward, cotangents are, and candle goes on from them. Parameters are views into one flat buffer, so the
//! model's tensors and the trunk's addresses are the same memory, and an update of one is seen by the other.

use super::account::{MemoryAccount, islands_bytes, room};
use super::arena::Arena;
use super::batch::{BatchSize, BatchTables};
use super::collective::{Alone, Collective};
use super::device::Gpu;
use super::flat::FlatLayout;
use super::gemm::Gemm;
use super::host::{HostLink, HostRoom};
use super::islands::pull;
use super::launch::{Launcher, Operand, Slice, device_error};
use super::optimizer::{self, NormBuffer, UpdateBuffers, UpdateRule};
use super::trunk::{Condition, KeepPolicy, Needed, Pass, Trunk, adjacent};
use crate::config::ParameterFormat;
use crate::model::{Conditioning, Parameters, Transformer, TrunkShape};
use crate::runlog::{Memory, MemoryKind, MemoryParts};
use crate::train::Losses;
use crate::train::engine::{Keep, Part};
use crate::train::gradients::{DeviceTimes, accumulate, required};
use crate::{Error, Result};
use candle_core::backprop::GradStore;
use candle_core::op::BackpropOp;
use candle_core::{DType, Device, Storage, Tensor, Var};
use cudarc::driver::{CudaEvent, CudaSlice, DevicePtr};
use half::bf16;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

/// Parameters, their gradients and the optimizer's state, all in one order on the device.
#[derive(Debug)]
pub(crate) struct Engine {
    gpu: Gpu,
    launcher: Launcher,
    half: bool,
    flat: FlatLayout,
    parameters: Parameters,
    /// Views into these are never dropped, so neither is the buffer.
    parameter_base: u64,
    gradients: CudaSlice<f32>,
    optimizer: Option<OptimizerState>,
    trunk: Trunk,
    /// Before the arena: what copies from and to that is waited for when this is dropped.
    host: HostLink,
    arena: Option<CudaSlice<u8>>,
    /// Bytes that the arena may take at most; `None`: what the device has free.
    limit: Option<u64>,
    policy: Option<(KeepPolicy, Needed)>,
    planned_for: Option<(BatchSize, bool)>,
    /// A policy that was asked for.
    keep: Option<KeepPolicy>,
    /// Whether the run's first micro-step is to come. That goes without the host's memory, which is pinned meanwhile; since it
    /// is the first of the run and not of the process, a resumed run does each step as one that was never stopped.
    begins: bool,
    /// Of the host's memory, what the micro-steps after the first will need.
    host_later: u64,
    peak_seen: AtomicU64,
    account: MemoryAccount,
    collective: Box<dyn Collective>,
}

/// fp32 masters (of parameters that are no fp32) and moments.
#[derive(Debug)]
struct OptimizerState {
    master: Option<CudaSlice<f32>>,
    first: CudaSlice<f32>,
    second: CudaSlice<f32>,
    /// Squared norm of the gradients, and scratch for its sum.
    norm: CudaSlice<f64>,
}

/// What a micro-step gave; its gradients are in the engine.
#[derive(Debug)]
pub(crate) struct MicroStep {
    pub losses: Losses,
    pub times: DeviceTimes,
}

impl Engine {
    /// An engine over parameters of a model that asks for `shape`. Their values are copied; `with_optimizer` makes room for masters and
    /// moments, which start as the parameters themselves and zero.
    pub fn new(
        gpu: Gpu,
        shape: TrunkShape,
        initial: &Parameters,
        dtype: ParameterFormat,
        with_optimizer: bool,
    ) -> Result<Self> {
        let mut engine = Self::allocate(gpu, shape, initial.shapes(), dtype, with_optimizer)?;
        for (name, variable) in initial.iter() {
            engine.load_parameter(name, variable.as_tensor())?;
        }
        Ok(engine)
    }

    /// An engine whose parameters nobody has set yet. `tensors` are (name, shape, trained).
    pub fn allocate(
        gpu: Gpu,
        shape: TrunkShape,
        tensors: Vec<(String, Vec<usize>, bool)>,
        dtype: ParameterFormat,
        with_optimizer: bool,
    ) -> Result<Self> {
        let half = dtype == ParameterFormat::Bf16;
        let flat = FlatLayout::new(
            tensors.iter().map(|(name, shape, trained)| (name.as_str(), shape.iter().product(), *trained)),
            &adjacent(&shape.names, shape.depth),
        )?;
        let launcher = gpu.launcher();
        let bytes = if half { 2 } else { 4 };
        let cuda = gpu.device.as_cuda_device()?;
        let allocate = |count: usize, what: &str| -> Result<CudaSlice<f32>> {
            gpu.stream.alloc_zeros::<f32>(count).map_err(|error| {
                let free = gpu.memory().map_or(0, |(free, _)| free);
                device_error(error, format!("allocating {} bytes for {what} with {free} bytes free", 4 * count))
            })
        };
        // f32 elements: the buffer is as aligned as any, and cut by address.
        let parameter_buffer = allocate((flat.len * bytes).div_ceil(4), "parameters")?;
        let parameter_base = parameter_buffer.leak();
        let mut variables = BTreeMap::new();
        for (name, shape, trained) in &tensors {
            let span = flat.span(name)?;
            let address = parameter_base + (span.offset * bytes) as u64;
            // SAFETY: the address is of `span.len` elements in the buffer that was leaked above. The view is leaked
            // too, below, because dropping it would free an address in the middle of that buffer.
            let storage = unsafe {
                match half {
                    true => candle_core::CudaStorage::wrap_cuda_slice(
                        gpu.stream.upgrade_device_ptr::<bf16>(address, span.len),
                        cuda.clone(),
                    ),
                    false => candle_core::CudaStorage::wrap_cuda_slice(
                        gpu.stream.upgrade_device_ptr::<f32>(address, span.len),
                        cuda.clone(),
                    ),
                }
            };
            let tensor = Tensor::from_storage(Storage::Cuda(storage), shape.as_slice(), BackpropOp::none(), true);
            std::mem::forget(tensor.clone());
            variables.insert(name.clone(), (Var::from_tensor(&tensor)?, *trained));
        }
        let gradients = allocate(flat.trained, "gradients")?;
        let optimizer = match with_optimizer {
            false => None,
            true => Some(OptimizerState {
                master: if half { Some(allocate(flat.trained, "master weights")?) } else { None },
                first: allocate(flat.trained, "first moments")?,
                second: allocate(flat.trained, "second moments")?,
                norm: gpu
                    .stream
                    .alloc_zeros::<f64>(NormBuffer::LEN)
                    .map_err(|error| device_error(error, "allocating the gradient norm"))?,
            }),
        };
        let gemm = Arc::new(Gemm::new(Arc::clone(&gpu.stream), Arc::clone(&gpu.timeline), half)?);
        let gradient_base = gradients.device_ptr(&gpu.stream).0;
        // A checkpoint is written from a copy of all but the gradients.
        let snapshot = if with_optimizer { flat.state_bytes(half, true) - 4 * flat.trained as u64 } else { 0 };
        let host = HostLink::open(&gpu, snapshot)?;
        let trunk = Trunk::new(shape, launcher.clone(), gemm, half, &flat, parameter_base, gradient_base)?;
        Ok(Self {
            gpu,
            launcher,
            half,
            flat,
            parameters: Parameters::from_variables(variables),
            parameter_base,
            gradients,
            optimizer,
            trunk,
            host,
            arena: None,
            limit: None,
            policy: None,
            planned_for: None,
            keep: None,
            begins: true,
            host_later: 0,
            peak_seen: AtomicU64::new(0),
            account: MemoryAccount::default(),
            collective: Box::new(Alone),
        })
    }

    /// Has this kept instead of what fits best.
    pub fn keep(&mut self, kept: Keep) {
        self.keep = match kept {
            Keep::WhatFits => None,
            Keep::OutputsOf(blocks) => Some(KeepPolicy::outputs_of(blocks)),
            Keep::AllInHost => Some(KeepPolicy::all_in_host(self.trunk.depth())),
        };
    }

    /// The run has made steps before: what its first micro-step does differently, it has done.
    pub fn goes_on(&mut self) {
        self.begins = false;
    }

    /// At most this many bytes for the arena.
    pub fn limit_arena(&mut self, bytes: u64) {
        self.limit = Some(bytes);
    }

    /// At most this many bytes of the host's memory.
    pub fn limit_host(&mut self, bytes: u64) {
        self.host.limit(bytes);
    }

    pub fn parameters(&self) -> &Parameters {
        &self.parameters
    }

    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// The policy of the last micro-step and the bytes that it was predicted to take.
    pub fn policy(&self) -> Option<(KeepPolicy, Needed)> {
        self.policy
    }

    /// Whose the memory of the last micro-step was.
    pub fn account(&self) -> MemoryAccount {
        self.account
    }

    /// Bytes of a parameter, and of an operand of a product.
    fn operand_bytes(&self) -> usize {
        if self.half { 2 } else { 4 }
    }

    /// Bytes of parameters, gradients and the optimizer's state.
    fn state_bytes(&self) -> u64 {
        self.flat.state_bytes(self.half, self.optimizer.is_some())
    }

    /// Bytes of the arena as it is.
    fn arena_bytes(&self) -> u64 {
        self.arena.as_ref().map_or(0, |arena| arena.len() as u64)
    }

    /// What this process takes of the GPU, and the most that it took after any look.
    pub fn memory(&self) -> Result<Memory> {
        let bytes = self.gpu.process_bytes()?;
        let peak = self.peak_seen.fetch_max(bytes, std::sync::atomic::Ordering::Relaxed).max(bytes);
        let parts = MemoryParts {
            state_bytes: self.account.state,
            arena_bytes: self.account.arena,
            candle_bytes: self.account.islands.into_iter().max().unwrap_or(0),
            host_bytes: self.host.pinned_bytes(),
        };
        let total_bytes = self.gpu.total_bytes;
        Ok(Memory { kind: MemoryKind::Gpu, bytes, peak_bytes: peak, total_bytes, parts: Some(parts) })
    }

    /// Sets a parameter, and its master.
    pub fn load_parameter(&mut self, name: &str, values: &Tensor) -> Result<()> {
        let span = self.flat.span(name)?;
        let values = values.flatten_all()?.to_dtype(DType::F32)?;
        let host: Vec<f32> = values.to_vec1()?;
        if host.len() != span.len {
            return Err(Error::crash(format!("{} values for {name} of {}", host.len(), span.len)));
        }
        let rounded: Vec<bf16> =
            if self.half { host.iter().map(|value| bf16::from_f32(*value)).collect() } else { vec![] };
        let stream = &self.gpu.stream;
        let failed = |error| device_error(error, format!("copying {name} to the device"));
        let bytes = self.operand_bytes();
        let address = self.parameter_base + (span.offset * bytes) as u64;
        // SAFETY: the addresses have room for the values; the copies have read pageable memory when they return.
        unsafe {
            match self.half {
                true => cudarc::driver::result::memcpy_htod_async(address, &rounded, stream.cu_stream()),
                false => cudarc::driver::result::memcpy_htod_async(address, &host, stream.cu_stream()),
            }
        }
        .map_err(failed)?;
        if let Some(OptimizerState { master: Some(master), .. }) = &mut self.optimizer
            && span.offset + span.len <= self.flat.trained
        {
            stream.memcpy_htod(&host, &mut master.slice_mut(span.offset..span.offset + span.len)).map_err(failed)?;
        }
        Ok(())
    }

    /// Draws every parameter from a normal distribution on the device: for benchmarks.
    pub fn randomise(&mut self, std: f32, seed: u64) -> Result<()> {
        let parameters = Slice::<Operand>::new(self.parameter_base, self.flat.len);
        optimizer::fill_normal(&self.launcher, self.half, parameters, std, seed, 0)
    }

    /// One forward and backward pass, whose gradients become part of those of the step.
    pub fn micro_step<M: Transformer>(
        &mut self,
        model: &M,
        input: &M::Input,
        part: Part,
        loss: impl Fn(&M::Output) -> candle_core::Result<Losses>,
    ) -> Result<MicroStep> {
        self.gpu.wait_for_kernels();
        let step = self.pass(model, input, part, loss);
        self.begins = false;
        step.map_err(|error| {
            // Sums that may hold anything; after an error of the device nothing helps, and the first error counts.
            if part.alone {
                let _ = self.discard_gradients();
            }
            match error.code {
                "gpu_out_of_memory" => self.out_of_memory(error),
                _ => error,
            }
        })
    }

    /// What was taken when memory ran out.
    fn out_of_memory(&self, error: Error) -> Error {
        let free = self.gpu.memory().map_or(0, |(free, _)| free);
        let arena = self.arena_bytes();
        let kept = self.policy.map_or_else(|| "nothing yet".to_owned(), |(policy, _)| policy.to_string());
        let what = format!(
            "{}; {free} bytes are free beside {} of parameters, gradients and optimizer and {arena} of arena (kept: {kept})",
            error.what,
            self.state_bytes()
        );
        Error { what, ..error }
    }

    fn pass<M: Transformer>(
        &mut self,
        model: &M,
        input: &M::Input,
        part: Part,
        loss: impl Fn(&M::Output) -> candle_core::Result<Losses>,
    ) -> Result<MicroStep> {
        let mut clock = Clock::default();
        clock.tick(&self.gpu)?;
        self.gpu.take_peak()?;
        let layout = model.layout(input)?;
        let (rows, front) = model.front(input, &layout)?;
        let placement = model.placement(&layout);
        let width = model.trunk().width;
        let (batch, text_rows, _) = front.text.dims3()?;
        let embedded = rows.iter().map(Tensor::elem_count).sum::<usize>() / width;
        let tables = BatchTables::new(placement, batch, text_rows, embedded, self.trunk.attention().tiling())?;
        let tokens = tables.tokens() / batch;
        clock.tick(&self.gpu)?;

        let depth = self.trunk.depth();
        let flop = 3.0 * self.trunk.forward_flop(&tables);
        let (policy, needed) = self.fit(&tables, part.alone)?;
        self.policy = Some((policy, needed));
        self.account.state = self.state_bytes();
        self.account.arena = self.arena_bytes();
        let beside = self.account.state + self.account.arena;
        let islands = |gpu: &Gpu| gpu.take_peak().map(|peak| peak.saturating_sub(beside));
        let Some(memory) = &self.arena else { return Err(Error::crash("no arena")) };
        let base = memory.device_ptr(&self.gpu.stream).0;
        let operand = self.operand_bytes();
        let shared: Vec<Var> = front
            .tensors()
            .into_iter()
            .map(|tensor| Var::from_tensor(&tensor.detach()))
            .collect::<candle_core::Result<_>>()?;
        let conditioning: Conditioning =
            front.with_tensors(&shared.iter().map(|var| var.as_tensor().clone()).collect::<Vec<_>>());
        let e0 = conditioning.e0.contiguous()?;
        let text = conditioning.text.contiguous()?;
        let condition = Condition { e0: operand_slice(&e0, &self.gpu)?, text: operand_slice(&text, &self.gpu)? };
        let mut pass = Pass::begin(
            &self.trunk,
            Arena::new(base, needed.device, operand),
            &tables,
            condition,
            (&policy, part.alone),
            Some(&self.host),
        )?;
        let copy_in = |tensor: &Tensor, to: Slice<f32>| -> Result<()> {
            let tensor = tensor.contiguous()?;
            self.launcher.copy(float_slice(&tensor, &self.gpu)?, to, operand)
        };
        let copy_out = |from: Slice<f32>, shape: &[usize]| -> Result<Tensor> {
            let tensor = uninitialised(shape, false, &self.gpu)?;
            self.launcher.copy(from, float_slice(&tensor, &self.gpu)?, operand)?;
            Ok(tensor)
        };
        // A stream as a variable, without copying it twice.
        let variable = |from: Slice<f32>, shape: &[usize]| -> Result<Var> {
            let tensor = uninitialised(shape, true, &self.gpu)?;
            self.launcher.copy(from, float_slice(&tensor, &self.gpu)?, operand)?;
            Ok(Var::from_tensor(&tensor)?)
        };
        let stream_shape = [batch, tokens, width];

        let rows = rows.iter().map(Tensor::contiguous).collect::<candle_core::Result<Vec<_>>>()?;
        let parts = rows.iter().map(|part| operand_slice(part, &self.gpu)).collect::<Result<Vec<_>>>()?;
        pass.embed(&parts)?;
        let mut insertion_inputs: BTreeMap<usize, Tensor> = BTreeMap::new();
        for layer in 0..depth {
            if let (Some(branch), Some(geometry)) = (model.insertion(layer), &conditioning.geometry) {
                pass.settle(layer)?;
                let x = copy_out(pass.input(layer), &stream_shape)?;
                let inserted = branch.forward(&x, &geometry.detach(), model.placement(&layout).video_tokens)?;
                copy_in(&inserted, pass.input(layer))?;
                insertion_inputs.insert(layer, x);
            }
            pass.forward(layer)?;
        }
        clock.tick(&self.gpu)?;
        self.account.islands[0] = islands(&self.gpu)?;

        let (output_stream, output_gradient) = pass.output();
        // What each head reads, and where its gradient goes.
        let mut read = Vec::new();
        let mut first = 0;
        for tokens in &tables.read_by_head {
            let part = |slice: Slice<f32>| slice.part(first * width, tokens * width, operand);
            read.push((variable(part(output_stream), &[batch, tokens / batch, width])?, part(output_gradient)));
            first += tokens;
        }
        let tensors: Vec<Tensor> = read.iter().map(|(variable, _)| variable.as_tensor().clone()).collect();
        let output = model.back(&tensors, &conditioning, &layout)?;
        let losses = loss(&output)?;
        let store = (&losses.total * part.weight)?.backward()?;
        let collect = |store: &GradStore| {
            collect(&self.parameters, &self.flat, &self.gradients, store, &self.gpu, &self.launcher)
        };
        collect(&store)?;
        let mut cotangents: Vec<Option<Tensor>> = vec![None; shared.len()];
        accumulate(&store, &shared, &mut cotangents)?;
        for (variable, gradient) in &read {
            copy_in(&required(&store, variable)?, *gradient)?;
        }
        drop((store, read, tensors));
        let losses = losses.detach();
        drop(output);
        clock.tick(&self.gpu)?;
        self.account.islands[1] = islands(&self.gpu)?;

        for layer in (0..depth).rev() {
            pass.backward(layer)?;
            if let (Some(branch), Some(x), Some(geometry)) =
                (model.insertion(layer), insertion_inputs.remove(&layer), &conditioning.geometry)
            {
                let (stream, gradient) = pass.between();
                copy_in(&x, stream)?;
                let x = Var::from_tensor(&x)?;
                let y = branch.forward(x.as_tensor(), geometry, model.placement(&layout).video_tokens)?;
                let cotangent = copy_out(gradient, &stream_shape)?;
                let store = pull(&y, cotangent)?.backward()?;
                collect(&store)?;
                accumulate(&store, &shared, &mut cotangents)?;
                copy_in(&required(&store, &x)?, gradient)?;
            }
        }
        clock.tick(&self.gpu)?;

        let e0_gradient = copy_out(pass.e0_gradient, e0.dims())?.to_dtype(e0.dtype())?;
        let text_gradient = copy_out(pass.text_gradient, text.dims())?.to_dtype(text.dtype())?;
        // The first and third of the shared tensors are read by the trunk alone.
        for (place, gradient) in [(0, e0_gradient), (2, text_gradient)] {
            cotangents[place] = Some(match cotangents[place].take() {
                Some(earlier) => (earlier + gradient)?,
                None => gradient,
            });
        }
        let gradients = rows.iter().map(Tensor::zeros_like).collect::<candle_core::Result<Vec<_>>>()?;
        let parts = gradients.iter().map(|part| operand_slice(part, &self.gpu)).collect::<Result<Vec<_>>>()?;
        pass.embed_backward(&parts)?;
        let mut seeds = Vec::new();
        for (part, gradient) in rows.iter().zip(gradients) {
            seeds.push(pull(part, gradient)?);
        }
        for (tensor, cotangent) in front.tensors().into_iter().zip(cotangents) {
            if let Some(cotangent) = cotangent {
                seeds.push(pull(tensor, cotangent)?);
            }
        }
        collect(&Tensor::stack(&seeds, 0)?.sum_all()?.backward()?)?;
        clock.tick(&self.gpu)?;
        self.account.islands[2] = islands(&self.gpu)?;
        // Everything is asked for: from here on pinning is in nobody's way.
        self.host.reserve(self.host_later);
        self.gpu.synchronize()?;
        let times = DeviceTimes { flop, peak: if self.half { self.gpu.peak_flops } else { None }, ..clock.times()? };
        Ok(MicroStep { losses, times })
    }

    /// Makes sure that the arena and the host's memory hold this batch, and says under which policy.
    fn fit(&mut self, tables: &BatchTables, alone: bool) -> Result<(KeepPolicy, Needed)> {
        // A pass that ended in an error may have left copies behind.
        self.host.synchronize()?;
        let held = self.arena_bytes();
        self.account.predicted_islands = islands_bytes(&tables.batch_size(), self.trunk.width());
        let budget = self.budget()?;
        let room = self.host.room();
        let (mut policy, mut needed) = self.plan(tables, budget, alone, room)?;
        let mut bytes = needed.device;
        let without_host = self.begins && needed.host > 0 && self.keep.is_none();
        self.host_later = if without_host { needed.host } else { 0 };
        if without_host {
            (policy, needed) = self.trunk.policy_within(tables, budget, (HostRoom::default(), None), alone)?;
            // Room for the passes after this one, too.
            bytes = bytes.max(needed.device);
        }
        self.host.reserve(needed.host);
        if let Err(error) = self.host.wait_for(needed.host) {
            tracing::warn!("{error}; what would have been there is computed again");
            self.host.limit(0);
            (policy, needed) = self.plan(tables, budget, alone, HostRoom::default())?;
            bytes = needed.device;
        }
        self.planned_for = (self.keep.is_none() && !without_host).then(|| (tables.batch_size(), alone));
        if bytes > budget.max(held) {
            let what = format!("a batch of {} tokens needs {bytes} bytes, {budget} are free", tables.tokens());
            return Err(Error::new(crate::Exit::Unavailable, "gpu_out_of_memory", what).hint(
                "even with nothing kept for the backward pass; take a smaller batch (train.batch_size, \
                 packing.token_budget)",
            ));
        }
        if bytes > held {
            self.arena = None;
            self.gpu.synchronize()?;
            // A little more, so that batches of slightly more tokens do not ask again.
            let bytes = (bytes + bytes / 16).min(budget);
            // SAFETY: whatever is read from the arena was written before.
            let memory = unsafe { self.gpu.stream.alloc::<u8>(bytes as usize) }.map_err(|error| {
                let what = format!("allocating {bytes} bytes of arena of {budget} that are free, policy: {policy}");
                device_error(error, what)
            })?;
            self.arena = Some(memory);
        }
        Ok((policy, needed))
    }

    /// Bytes that the arena may have beside what candle is predicted to take, those that it has included.
    fn budget(&self) -> Result<u64> {
        let held = self.arena_bytes();
        let (free, _) = self.gpu.memory()?;
        // Where embedders have run, what they hold is part of candle's share already.
        let embedded = self.gpu.used_bytes()?.saturating_sub(self.state_bytes() + held);
        let unused = free + self.gpu.unused_bytes()? + held + embedded;
        let room = room(unused, self.account.predicted_islands);
        Ok(self.limit.map_or(room, |limit| limit.min(room)))
    }

    /// What to keep of a batch within `budget` bytes of the device and the host's room, and where.
    fn plan(&self, tables: &BatchTables, budget: u64, alone: bool, host: HostRoom) -> Result<(KeepPolicy, Needed)> {
        if let Some(policy) = self.keep {
            return Ok((policy, self.trunk.predict(tables, &policy, alone)?));
        }
        // A batch as large as the last goes as the last did: the search takes the host some milliseconds.
        if let Some((policy, _)) = self.policy
            && self.planned_for == Some((tables.batch_size(), alone))
        {
            let needed = self.trunk.predict(tables, &policy, alone)?;
            if needed.device <= budget.min(self.arena_bytes()) && needed.host <= host.bytes {
                return Ok((policy, needed));
            }
        }
        self.trunk.policy_within(tables, budget, (host, self.gpu.peak_flops), alone)
    }

    /// The norm of the step's gradients, then one update, the `step`-th (from 1); gradients are zero afterwards. Returns
    /// the norm before clipping.
    pub fn update(&mut self, rule: &UpdateRule, lr: f64, step: u64) -> Result<f64> {
        let Some(state) = &self.optimizer else { return Err(Error::crash("an update without an optimizer")) };
        let stream = &self.gpu.stream;
        let count = self.flat.trained;
        let at = |slice: &CudaSlice<f32>| Slice::<f32>::new(slice.device_ptr(stream).0, count);
        let gradients = at(&self.gradients);
        self.collective.sum_gradients(gradients)?;
        let norm = NormBuffer(Slice::new(state.norm.device_ptr(stream).0, NormBuffer::LEN));
        optimizer::square_sum(&self.launcher, gradients, norm)?;
        let buffers = UpdateBuffers {
            parameters: Slice::new(self.parameter_base, count),
            master: state.master.as_ref().map_or(Slice::null(), at),
            first: at(&state.first),
            second: at(&state.second),
            gradients,
        };
        optimizer::adamw(&self.launcher, self.half, &buffers, norm, rule, lr, step)?;
        let squared = stream
            .clone_dtoh(&state.norm.slice(0..1))
            .map_err(|error| device_error(error, "reading the gradient norm"))?;
        let norm = squared.first().copied().unwrap_or(f64::NAN).sqrt();
        match norm.is_finite() {
            true => Ok(norm),
            false => {
                let name = self.first_non_finite()?.unwrap_or_else(|| "an overflowing norm".into());
                Err(Error::crash(format!("gradient is not finite at step {step}, first in {name}"))
                    .hint("the last checkpoint is intact; lower train.lr or look at the data of this step"))
            }
        }
    }

    /// The parameter of the first NaN or infinite gradient.
    fn first_non_finite(&self) -> Result<Option<String>> {
        let stream = &self.gpu.stream;
        let failed = |error| device_error(error, "looking for the first bad gradient");
        let index = stream.clone_htod(&[u64::MAX]).map_err(failed)?;
        let gradients = Slice::new(self.gradients.device_ptr(stream).0, self.flat.trained);
        optimizer::first_non_finite(&self.launcher, gradients, Slice::new(index.device_ptr(stream).0, 1))?;
        let index = stream.clone_dtoh(&index).map_err(failed)?;
        Ok(index.first().and_then(|index| self.flat.name_at(*index as usize)).map(str::to_owned))
    }

    /// Forgets the gradients of an unfinished step.
    pub fn discard_gradients(&mut self) -> Result<()> {
        let gradients = Slice::<f32>::new(self.gradients.device_ptr(&self.gpu.stream).0, self.gradients.len());
        self.launcher.zero(gradients, 4)
    }

    /// The step's gradients so far, by parameter, in host memory.
    pub fn gradients(&self) -> Result<BTreeMap<String, Tensor>> {
        self.by_name(&self.gradients, "gradients")
    }

    /// Tensors of a flat f32 buffer over trained parameters, in host memory.
    fn by_name(&self, buffer: &CudaSlice<f32>, what: &str) -> Result<BTreeMap<String, Tensor>> {
        let stream = &self.gpu.stream;
        let mut tensors = BTreeMap::new();
        for (name, variable) in self.parameters.trained() {
            let span = self.flat.span(name)?;
            let values = stream
                .clone_dtoh(&buffer.slice(span.offset..span.offset + span.len))
                .map_err(|error| device_error(error, format!("reading {what}")))?;
            tensors.insert(name.to_owned(), Tensor::from_vec(values, variable.shape(), &Device::Cpu)?);
        }
        Ok(tensors)
    }

    /// Moments `first.<name>`, `second.<name>`, and masters `master.<name>` of weights that are no fp32, in host memory.
    pub fn optimizer_tensors(&self) -> Result<BTreeMap<String, Tensor>> {
        let Some(state) = &self.optimizer else { return Ok(BTreeMap::new()) };
        let parts = [("first", Some(&state.first)), ("second", Some(&state.second)), ("master", state.master.as_ref())];
        let mut tensors = BTreeMap::new();
        for (part, buffer) in parts {
            let Some(buffer) = buffer else { continue };
            tensors.extend(self.by_name(buffer, part)?.into_iter().map(|(name, t)| (format!("{part}.{name}"), t)));
        }
        Ok(tensors)
    }

    /// Moments and masters back from [`Self::optimizer_tensors`]; the error names the first that is missing.
    pub fn load_optimizer(&mut self, tensors: &BTreeMap<String, Tensor>) -> Result<()> {
        let Some(state) = &mut self.optimizer else { return Err(Error::crash("no optimizer to restore")) };
        let stream = &self.gpu.stream;
        for (name, variable) in self.parameters.trained() {
            let span = self.flat.span(name)?;
            let parts = [
                ("first", Some(&mut state.first)),
                ("second", Some(&mut state.second)),
                ("master", state.master.as_mut()),
            ];
            for (part, buffer) in parts {
                let Some(buffer) = buffer else { continue };
                let key = format!("{part}.{name}");
                let Some(tensor) = tensors.get(&key).filter(|tensor| tensor.dims() == variable.dims()) else {
                    return Err(Error::refused("optimizer_mismatch", "the checkpoint lacks a moment of this model")
                        .in_place(key));
                };
                let values: Vec<f32> = tensor.flatten_all()?.to_vec1()?;
                stream
                    .memcpy_htod(&values, &mut buffer.slice_mut(span.offset..span.offset + span.len))
                    .map_err(|error| device_error(error, format!("copying {key} to the device")))?;
            }
        }
        Ok(())
    }
}

/// The address of a contiguous tensor's elements. The tensor must live until what uses it is in the stream.
fn address(tensor: &Tensor, gpu: &Gpu) -> Result<u64> {
    let (storage, layout) = tensor.storage_and_layout();
    let Storage::Cuda(storage) = &*storage else { return Err(Error::crash("a tensor is not on the GPU")) };
    if layout.contiguous_offsets().is_none() {
        return Err(Error::crash("a tensor is not contiguous"));
    }
    let offset = (layout.start_offset() * tensor.dtype().size_in_bytes()) as u64;
    let base = match tensor.dtype() {
        DType::BF16 => storage.as_cuda_slice::<bf16>()?.device_ptr(&gpu.stream).0,
        DType::F32 => storage.as_cuda_slice::<f32>()?.device_ptr(&gpu.stream).0,
        other => return Err(Error::crash(format!("{other:?} has no place in the trunk"))),
    };
    Ok(base + offset)
}

fn float_slice(tensor: &Tensor, gpu: &Gpu) -> Result<Slice<f32>> {
    match tensor.dtype() {
        DType::F32 => Ok(Slice::new(address(tensor, gpu)?, tensor.elem_count())),
        other => Err(Error::crash(format!("the residual stream is f32, not {other:?}"))),
    }
}

fn operand_slice(tensor: &Tensor, gpu: &Gpu) -> Result<Slice<Operand>> {
    Ok(Slice::new(address(tensor, gpu)?, tensor.elem_count()))
}

/// An f32 tensor whose elements somebody else will write.
fn uninitialised(shape: &[usize], is_variable: bool, gpu: &Gpu) -> Result<Tensor> {
    let cuda = gpu.device.as_cuda_device()?;
    // SAFETY: every element is written before it is read: the caller copies into it at once.
    let slice = unsafe { cuda.alloc::<f32>(shape.iter().product()) }?;
    let storage = candle_core::CudaStorage::wrap_cuda_slice(slice, cuda.clone());
    Ok(Tensor::from_storage(Storage::Cuda(storage), shape, BackpropOp::none(), is_variable))
}

/// Adds the store's parameter gradients to the flat buffer.
fn collect(
    parameters: &Parameters,
    flat: &FlatLayout,
    gradients: &CudaSlice<f32>,
    store: &GradStore,
    gpu: &Gpu,
    launcher: &Launcher,
) -> Result<()> {
    let base = gradients.device_ptr(&gpu.stream).0;
    for (name, variable) in parameters.trained() {
        let Some(gradient) = store.get(variable) else { continue };
        let span = flat.span(name)?;
        let gradient = gradient.contiguous()?;
        let from = Slice::new(address(&gradient, gpu)?, span.len);
        let to = Slice::new(base + 4 * span.offset as u64, span.len);
        optimizer::accumulate(launcher, gradient.dtype() == DType::BF16, from, to, 1.0)?;
    }
    Ok(())
}

/// Marks in the stream, read when everything is done.
#[derive(Default)]
struct Clock {
    marks: Vec<CudaEvent>,
}

impl Clock {
    fn tick(&mut self, gpu: &Gpu) -> Result<()> {
        let flags = cudarc::driver::sys::CUevent_flags::CU_EVENT_DEFAULT;
        let mark = gpu.stream.record_event(Some(flags));
        self.marks.push(mark.map_err(|error| device_error(error, "recording an event"))?);
        Ok(())
    }

    fn times(&self) -> Result<DeviceTimes> {
        let mut spans = [Duration::ZERO; 5];
        for (span, pair) in spans.iter_mut().zip(self.marks.windows(2)) {
            let milliseconds =
                pair[0].elapsed_ms(&pair[1]).map_err(|error| device_error(error, "reading the device's clock"))?;
            *span = Duration::from_secs_f64(f64::from(milliseconds.max(0.0)) / 1e3);
        }
        let [front, trunk_forward, back, trunk_backward, front_backward] = spans;
        Ok(DeviceTimes { front, trunk_forward, back, trunk_backward, front_backward, ..DeviceTimes::default() })
    }
}
