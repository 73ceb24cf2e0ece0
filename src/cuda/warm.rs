//! Candle's kernels, compiled before they are needed.
//!
//! They come as PTX, which the driver compiles when a machine meets them for the first time. In one process it compiles one
//! file at a time, however many threads ask. So processes compile the eight files that training uses beside each other: that
//! takes as long as the largest, about 5 s. The results lie in the driver's cache, where everybody on this machine finds them.

use super::launch::device_error;
use crate::{Error, Result};
use candle_core::cuda_backend::kernels::{AFFINE, BINARY, CAST, FILL, INDEXING, Module, REDUCE, TERNARY, UNARY};
use cudarc::driver::CudaContext;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// The files that embedders, heads and sampling use, the slowest first.
const MODULES: [(&str, &Module); 8] = [
    ("binary", &BINARY),
    ("unary", &UNARY),
    ("indexing", &INDEXING),
    ("reduce", &REDUCE),
    ("cast", &CAST),
    ("ternary", &TERNARY),
    ("affine", &AFFINE),
    ("fill", &FILL),
];
/// The driver finds the smallest file in its cache in a few milliseconds, and compiles it in 160.
const FOUND: Duration = Duration::from_millis(60);

/// Processes that compile.
#[derive(Debug, Default)]
pub(super) struct Warming(Vec<Child>);

impl Warming {
    /// Begins to compile for this GPU, unless the driver has done so before. What cannot be begun is left to the driver, which
    /// does it when candle asks.
    pub fn begin(ordinal: usize) -> Self {
        let Ok(context) = CudaContext::new(ordinal) else { return Self::default() };
        let started = Instant::now();
        let known = context.load_module(FILL.ptx().into()).is_ok() && started.elapsed() < FOUND;
        let Some(program) = std::env::current_exe().ok().filter(|_| !known) else { return Self::default() };
        let ordinal = ordinal.to_string();
        let child = |(name, _): &(&str, &Module)| {
            let mut command = Command::new(&program);
            command.args(["compile-kernels", name, &ordinal]);
            command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().ok()
        };
        Self(MODULES.iter().filter(|(name, _)| *name != "fill").filter_map(child).collect())
    }

    /// Waits for all of them.
    pub fn finish(&mut self) {
        for mut child in self.0.drain(..) {
            // One that failed leaves its work to the driver.
            let _ = child.wait();
        }
    }
}

/// Has the driver compile one of candle's files for a GPU: what such a process does.
///
/// # Errors
/// If there is no such file or GPU, or the driver cannot compile it.
pub(crate) fn compile(name: &str, ordinal: usize) -> Result<()> {
    let Some((_, module)) = MODULES.iter().find(|(module, _)| *module == name) else {
        return Err(Error::usage("unknown_kernels", format!("candle has no kernels named {name}")));
    };
    let context = CudaContext::new(ordinal).map_err(|error| device_error(error, format!("opening GPU {ordinal}")))?;
    context.load_module(module.ptx().into()).map_err(|error| device_error(error, format!("compiling {name}")))?;
    Ok(())
}
