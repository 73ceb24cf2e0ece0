//! Sinusoidal embedding of the timestep, in f64: in f32 it would be the largest error of the whole forward.

use candle_core::{DType, Device, Result, Tensor};

/// t on the scale 0..1000 -> [cos(t f_0) .. | sin(t f_0) ..], f_i = 10000^(-i / (width/2)), rounded to `dtype`.
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
