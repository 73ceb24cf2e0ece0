//! `bench`: how fast the engine is on this machine's GPU.

use super::arguments::{Bench, BenchArguments, Global};
use crate::{Exit, Result};

/// Times what was asked for and prints it.
pub fn bench(arguments: &BenchArguments, global: &Global) -> Result<Exit> {
    match &arguments.what {
        Bench::Trunk(arguments) => trunk(arguments, global),
        Bench::Gemm { tokens } => gemm(*tokens, global),
    }
}

#[cfg(not(feature = "cuda"))]
fn gemm(_: usize, _: &Global) -> Result<Exit> {
    Err(crate::train::engine::without_cuda())
}

#[cfg(feature = "cuda")]
fn gemm(tokens: usize, global: &Global) -> Result<Exit> {
    use super::output;
    let times = crate::cuda::gemm_times(tokens)?;
    if global.json {
        output::document(&times)?;
        return Ok(Exit::Done);
    }
    output::line("product                  in ->    out   the first proposal, and the fastest by number")?;
    for of_product in times.chunk_by(|a, b| (&a.product, a.inputs, a.outputs) == (&b.product, b.inputs, b.outputs)) {
        let first = &of_product[0];
        let mut fastest: Vec<_> = of_product.iter().collect();
        fastest.sort_by(|a, b| a.ms.total_cmp(&b.ms));
        let fastest: Vec<String> =
            fastest.iter().take(4).map(|time| format!("{}: {:.2} ms", time.choice, time.ms)).collect();
        output::line(format!(
            "{:<20} {:>6} -> {:<6} {:>6.2} ms, {:.0} TFLOP/s; {}",
            first.product,
            first.inputs,
            first.outputs,
            first.ms,
            first.tflops,
            fastest.join(", ")
        ))?;
    }
    Ok(Exit::Done)
}

#[cfg(not(feature = "cuda"))]
fn trunk(_: &super::arguments::TrunkBenchArguments, _: &Global) -> Result<Exit> {
    Err(crate::train::engine::without_cuda())
}

#[cfg(feature = "cuda")]
fn trunk(arguments: &super::arguments::TrunkBenchArguments, global: &Global) -> Result<Exit> {
    use super::output;
    let others = arguments.draws.iter().map(|draw| draw.0);
    let bench = crate::cuda::TrunkBench {
        frames: arguments.frames,
        batch: arguments.batch,
        draws: std::iter::once((arguments.chunk, arguments.window)).chain(others).collect(),
        layers: arguments.layers,
        warmup: arguments.warmup,
        repeats: arguments.repeats,
        optimizer: arguments.optimizer,
        arena_gib: arguments.arena,
        host_gib: arguments.host,
        kernels: arguments.kernels,
    };
    let figures = crate::cuda::trunk(&bench, &mut |what| output::note(format!("{what} ...")))?;
    if global.json {
        output::document(&figures)?;
        return Ok(Exit::Done);
    }
    let crate::cuda::TrunkFigures { median_s, min_s, max_s, tokens, first_s, mfu, .. } = &figures;
    let parts = &figures.parts_ms;
    output::line(format!(
        "{}: {} x {} frames, chunk {}, window {}, {tokens} tokens, {} blocks",
        figures.device, figures.batch, figures.frames, figures.chunk, figures.window, figures.layers
    ))?;
    let mfu = mfu.map_or_else(String::new, |mfu| format!(", {mfu:.1} % MFU"));
    output::line(format!("forward + backward {median_s:.3} s (median; {min_s:.3} to {max_s:.3}){mfu}"))?;
    output::line(format!(
        "  front {:.0} ms, trunk forward {:.0}, heads {:.0}, trunk backward {:.0}, front backward {:.0}",
        parts.front, parts.trunk_forward, parts.back, parts.trunk_backward, parts.front_backward
    ))?;
    if let Some(update) = figures.update_s {
        output::line(format!("update {:.1} ms", 1e3 * update))?;
    }
    for time in &figures.kernels {
        output::line(format!("  {:>8.1} ms {:>5} x {}", time.ms, time.calls, time.name))?;
    }
    for (chunk, window, first, median) in &figures.draws {
        output::line(format!("chunk {chunk}, window {window}: first {first:.3} s, then {median:.3} s"))?;
    }
    output::line(format!(
        "first pass done {first_s:.1} s after the start; peak {:.1} GB (predicted {:.1}), of it {:.1} GB arena; {:.1} GB in the \
         host's memory; kept: {}",
        figures.peak_gb, figures.predicted_gb, figures.arena_gb, figures.host_gb, figures.kept
    ))?;
    Ok(Exit::Done)
}

#[cfg(not(feature = "cuda"))]
pub fn compile_kernels(_: &str, _: usize) -> Result<Exit> {
    Err(crate::train::engine::without_cuda())
}

/// What the processes do that a program starts on a GPU whose driver has not met candle's kernels yet.
#[cfg(feature = "cuda")]
pub fn compile_kernels(name: &str, gpu: usize) -> Result<Exit> {
    crate::cuda::compile_kernels(name, gpu).map(|()| Exit::Done)
}
