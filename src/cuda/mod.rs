//! Training on an NVIDIA GPU: the trunk by hand, on kernels of our own and cuBLASLt, between candle's embedders and heads.
//!
//! This is the only room with `unsafe` launches. Models, plans and losses know nothing of it; it knows their names and
//! shapes. Each kernel in `kernels/` has one launcher here and one reference on the CPU in `crate::ops`.

mod account;
mod arena;
mod attention;
mod batch;
mod bench;
mod collective;
mod device;
mod engine;
mod flat;
mod gemm;
mod host;
mod islands;
mod kernels;
mod launch;
mod memory;
mod ops;
mod optimizer;
mod spare;
mod timeline;
mod trunk;
mod verify;
mod warm;

pub(crate) use account::forecast;
pub(crate) use batch::BatchSize;
pub(crate) use bench::{TrunkBench, TrunkFigures, gemm as gemm_times, trunk};
pub(crate) use device::{Gpu, find, list};
pub(crate) use engine::Engine;
pub(crate) use islands::{norm_modulate, weighted_mse};
pub(crate) use launch::device_error;
pub(crate) use verify::kernels as verify_kernels;
pub(crate) use warm::compile as compile_kernels;
