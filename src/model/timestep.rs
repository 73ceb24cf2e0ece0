//! Sinusoidal embedding of the timestep, t on the scale 0..1000 -> [cos(t f_0) .. | sin(t f_0) ..], f_i = 10000^(-i / h)
//! with h half the width.
//!
//! The families differ in precision only, and each is served with its own: at t near 1000 a frequency rounded to f32
//! moves the angle by 6e-5, more than anything else in an f32 forward.

use candle_core::{DType, Device, Result, Tensor};

/// X-WAM: in f64, then rounded to `dtype`.
pub(super) fn sinusoid(timesteps: &[f64], width: usize, dtype: DType, device: &Device) -> Result<Tensor> {
    let half = width / 2;
    let mut values = Vec::with_capacity(timesteps.len() * width);
    for &t in timesteps {
        let angle = |i: usize| t * 10000f64.powf(-(i as f64) / half as f64);
        values.extend((0..half).map(|i| angle(i).cos()));
        values.extend((0..half).map(|i| angle(i).sin()));
    }
    Tensor::from_vec(values, (timesteps.len(), width), device)?.to_dtype(dtype)
}

/// LingBot-VA: frequencies, angles and their functions in f32, as its published weights were trained.
pub(super) fn sinusoid_f32(timesteps: &[f64], width: usize, dtype: DType, device: &Device) -> Result<Tensor> {
    let half = width / 2;
    let frequencies: Vec<f32> = (0..half).map(|i| (-(10000f64.ln()) as f32 * i as f32 / half as f32).exp()).collect();
    let mut values = Vec::with_capacity(timesteps.len() * width);
    for &t in timesteps {
        values.extend(frequencies.iter().map(|frequency| (t as f32 * frequency).cos()));
        values.extend(frequencies.iter().map(|frequency| (t as f32 * frequency).sin()));
    }
    Tensor::from_vec(values, (timesteps.len(), width), device)?.to_dtype(dtype)
}
