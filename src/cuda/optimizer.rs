//! Launchers of the kernels that pass over flat buffers: norm, update, sums of gradients, random values.
//!
//! They know nothing of parameters' names; the engine cuts buffers, and `verify kernels` calls these very functions.

use super::launch::{Argument, Grid, Launcher, Operand, Slice, int, long};
use crate::Result;
use crate::config::TrainConfig;

/// Blocks of a pass that reads everything once: eight for each multiprocessor of an H200.
pub(crate) const BLOCKS: usize = 1056;

/// What an update depends on beside rate and step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct UpdateRule {
    /// Gradient norm above which gradients are scaled down.
    pub clip_norm: f64,
    pub betas: [f64; 2],
    pub eps: f64,
    pub weight_decay: f64,
}

impl From<&TrainConfig> for UpdateRule {
    fn from(config: &TrainConfig) -> Self {
        let &TrainConfig { clip_norm, betas, adam_eps, weight_decay, .. } = config;
        Self { clip_norm, betas, eps: adam_eps, weight_decay }
    }
}

/// What an update reads and writes, of one length.
#[derive(Clone, Copy, Debug)]
pub(crate) struct UpdateBuffers {
    pub parameters: Slice<Operand>,
    /// Of parameters that are no f32; null otherwise.
    pub master: Slice<f32>,
    pub first: Slice<f32>,
    pub second: Slice<f32>,
    /// Zero after the update.
    pub gradients: Slice<f32>,
}

/// The squared norm of gradients and scratch for its sum: `[1 + BLOCKS]`, the norm first.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NormBuffer(pub Slice<f64>);

impl NormBuffer {
    /// Elements.
    pub const LEN: usize = 1 + BLOCKS;

    pub fn total(&self) -> Slice<f64> {
        self.0.part(0, 1, 8)
    }
}

/// Name of a kernel for bf16 or f32.
fn name(kernel: &str, half: bool) -> String {
    format!("{kernel}_{}", if half { "bf16" } else { "f32" })
}

/// The squared norm of `gradients`; a NaN or an infinity shows in it.
pub(crate) fn square_sum(launcher: &Launcher, gradients: Slice<f32>, norm: NormBuffer) -> Result<()> {
    let partial = norm.0.part(1, BLOCKS, 8);
    let arguments = [gradients.into(), partial.into(), long(gradients.len())];
    launcher.launch("square_sum", Grid::new(BLOCKS, 256), &arguments)?;
    let arguments = [partial.into(), int(BLOCKS)?, norm.total().into()];
    launcher.launch("square_sum_finish", Grid::new(1, 256), &arguments)
}

/// One AdamW update, the `step`-th (from 1), of bf16 parameters if `half`; none if the norm is not finite.
pub(crate) fn adamw(
    launcher: &Launcher,
    half: bool,
    buffers: &UpdateBuffers,
    norm: NormBuffer,
    rule: &UpdateRule,
    lr: f64,
    step: u64,
) -> Result<()> {
    let count = buffers.gradients.len();
    let [beta1, beta2] = rule.betas;
    let power = step.min(i32::MAX as u64) as i32;
    let correction1 = 1.0 - beta1.powi(power);
    let root_correction2 = 1.0 / (1.0 - beta2.powi(power)).sqrt();
    let arguments: [Argument; 15] = [
        buffers.parameters.into(),
        buffers.master.into(),
        buffers.first.into(),
        buffers.second.into(),
        buffers.gradients.into(),
        norm.total().into(),
        (rule.clip_norm as f32).into(),
        (lr as f32).into(),
        (beta1 as f32).into(),
        (beta2 as f32).into(),
        (rule.eps as f32).into(),
        (rule.weight_decay as f32).into(),
        (correction1 as f32).into(),
        (root_correction2 as f32).into(),
        long(count),
    ];
    launcher.launch(&name("adamw", half), Grid::new(count.div_ceil(1024), 256), &arguments)
}

/// to += weight * from; `half`: from is bf16, else f32.
pub(crate) fn accumulate(
    launcher: &Launcher,
    half: bool,
    from: Slice<Operand>,
    to: Slice<f32>,
    weight: f32,
) -> Result<()> {
    let arguments = [from.into(), to.into(), weight.into(), long(to.len())];
    launcher.launch(&name("accumulate", half), Grid::new(to.len().div_ceil(2048), 256), &arguments)
}

/// The smaller of `index` and that of the first NaN or infinity.
pub(crate) fn first_non_finite(launcher: &Launcher, gradients: Slice<f32>, index: Slice<u64>) -> Result<()> {
    let arguments = [gradients.into(), long(gradients.len()), index.into()];
    launcher.launch("first_non_finite", Grid::new(BLOCKS, 256), &arguments)
}

/// Normal values, element i a function of `seed` and `offset` + i alone.
pub(crate) fn fill_normal(
    launcher: &Launcher,
    half: bool,
    out: Slice<Operand>,
    std: f32,
    seed: u64,
    offset: u64,
) -> Result<()> {
    let arguments =
        [out.into(), std.into(), Argument::Long(seed as i64), Argument::Long(offset as i64), long(out.len())];
    launcher.launch(&name("fill_normal", half), Grid::new(out.len().div_ceil(1024) + 1, 256), &arguments)
}
