//! Sampling a chunk after its clean history: Euler steps of the video's flow, as the public server takes them.
//!
//! Noise levels fall linearly from 1 in `steps` steps and are then shifted (LingBot-VA's flow-matching scheduler); the
//! last step goes to 0. There is no guidance: the velocity under the prompt is taken as it is, which is guidance 1 and half
//! the cost. Starting noise comes from a stream keyed by the chunk, so every validation of every arm starts alike.

use super::levels::sigmas;
use crate::model::{ChunkHistory, LingbotModel};
use crate::random::{Draw, Purpose};
use candle_core::{Device, Result, Tensor};

/// Follows `velocity(x, t)`, t = 1000 sigma, from noise to data.
pub fn denoise(
    noise: Tensor,
    sigmas: &[f64],
    mut velocity: impl FnMut(&Tensor, f64) -> Result<Tensor>,
) -> Result<Tensor> {
    let mut x = noise;
    for levels in sigmas.windows(2) {
        x = (&x + (velocity(&x, 1000.0 * levels[0])? * (levels[1] - levels[0]))?)?;
    }
    Ok(x)
}

/// The noise from which the chunk of this name starts, f32 of this shape.
pub fn starting_noise(chunk: &str, shape: [usize; 4]) -> Result<Tensor> {
    let values = Draw::new(0, Purpose::Validation, 0, &format!("video {chunk}")).normals(shape.iter().product());
    Tensor::from_vec(values, &shape, &Device::Cpu)
}

/// Samples the video latents of a chunk, [C, K, H, W] like its starting noise.
pub fn sample_chunk(
    model: &LingbotModel,
    history: &ChunkHistory,
    noise: Tensor,
    steps: usize,
    shift: f64,
) -> Result<Tensor> {
    denoise(noise, &sigmas(1.0, steps, shift), |x, t| model.chunk_velocity(history, x, t))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_match_the_public_schedule() {
        let times = |steps, shift| -> Vec<f64> {
            sigmas(1.0, steps, shift).iter().map(|sigma| (sigma * 1e6).round() / 1e3).collect()
        };
        assert_eq!(times(5, 5.0), [1000.0, 952.381, 882.353, 769.231, 555.556, 0.0]);
        assert_eq!(times(10, 1.0), [1000.0, 900.0, 800.0, 700.0, 600.0, 500.0, 400.0, 300.0, 200.0, 100.0, 0.0]);
    }

    #[test]
    fn the_straight_flow_to_some_data_ends_there() {
        let noise = starting_noise("episode_000001#2", [2, 3, 1, 2]).expect("noise");
        let data = (noise.sin().expect("sin") * 3.0).expect("data");
        let mut times = Vec::new();
        let found = denoise(noise.clone(), &sigmas(1.0, 4, 5.0), |x, t| {
            times.push(t);
            (x - &data)? / (t / 1000.0)
        });
        let error =
            (found.expect("sampled") - &data).and_then(|d| d.abs()?.max_all()?.to_scalar::<f32>()).expect("f32");
        assert!(error < 1e-5, "{error}");
        assert_eq!((times.len(), times[0]), (4, 1000.0));
    }

    #[test]
    fn noise_is_the_chunks_own() {
        let noise = |chunk| starting_noise(chunk, [1, 2, 3, 4]).and_then(|x| x.flatten_all()?.to_vec1::<f32>());
        assert_eq!(noise("episode_000001#2").expect("noise"), noise("episode_000001#2").expect("noise"));
        assert_ne!(noise("episode_000001#2").expect("noise"), noise("episode_000001#3").expect("noise"));
    }
}
