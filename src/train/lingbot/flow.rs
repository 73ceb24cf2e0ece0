//! Flow matching for LingBot-VA: a noise level for each latent frame, noised copies, targets, weighted losses.
//!
//! x_t = (1 - sigma) x + sigma n, target v = n - x. A frame's video tokens share one level and its action tokens another.
//! The history copy of the video is noised in some steps; clean actions never are. Sources: LingBot-VA `train.py` and
//! its flow-matching scheduler; the formulas stand where they are used.

use crate::config::{LingbotFlowConfig, LossMean};
use crate::eval::levels::shifted;
use crate::model::{EpisodeInput, EpisodeOutput};
use crate::ops::weighted_mse;
use crate::random::Draw;
use crate::train::Losses;
use candle_core::{Device, Result, Tensor};

/// Levels k = 0 .. n-1, from pure noise down: sigma_k = s a / (1 + (s - 1) a) with a = 1 - k/n, t_k = 1000 sigma_k, and
/// the bell weight y_k = exp(-2 ((t_k - 500)/1000)^2), shifted to a minimum of 0 and scaled to a mean of 1. Computed in
/// f64 and rounded to f32, as the public scheduler's tables are.
#[derive(Clone, Debug)]
pub struct Schedule {
    sigma: Vec<f32>,
    timestep: Vec<f32>,
    weight: Vec<f32>,
}

impl Schedule {
    pub fn new(levels: usize, shift: f64) -> Self {
        let sigma: Vec<f64> = (0..levels).map(|k| shifted(1.0 - k as f64 / levels as f64, shift)).collect();
        let bell: Vec<f64> = sigma.iter().map(|sigma| (-2.0 * (sigma - 0.5).powi(2)).exp()).collect();
        let least = bell.iter().copied().fold(f64::INFINITY, f64::min);
        let sum: f64 = bell.iter().map(|y| y - least).sum();
        let weight = bell.iter().map(|y| (levels as f64 * (y - least) / sum) as f32).collect();
        let timestep = sigma.iter().map(|sigma| (1000.0 * sigma) as f32).collect();
        Self { sigma: sigma.into_iter().map(|sigma| sigma as f32).collect(), timestep, weight }
    }

    /// Share of noise at a level, 1 at level 0.
    pub fn sigma(&self, level: usize) -> f32 {
        self.sigma[level]
    }

    /// Timestep as the model takes it, 1000 sigma.
    pub fn timestep(&self, level: usize) -> f64 {
        f64::from(self.timestep[level])
    }

    /// Weight of a frame's loss, 0 at level 0, mean 1.
    pub fn weight(&self, level: usize) -> f64 {
        f64::from(self.weight[level])
    }
}

/// The two streams' schedules.
#[derive(Clone, Debug)]
pub struct Schedules {
    pub video: Schedule,
    pub action: Schedule,
}

impl Schedules {
    pub fn new(flow: &LingbotFlowConfig) -> Self {
        Self {
            video: Schedule::new(flow.train_timesteps, flow.video_shift),
            action: Schedule::new(flow.train_timesteps, flow.action_shift),
        }
    }
}

/// Noise levels of the frames of one episode.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Levels {
    pub video: Vec<usize>,
    pub action: Vec<usize>,
    /// Levels of the history copy, if it is noised.
    pub history: Option<Vec<usize>>,
}

impl Levels {
    /// Uniform levels for each frame and stream; with probability `history_noise` the history is noised at levels from
    /// the cleaner half.
    pub fn sample(draw: &mut Draw, frames: usize, flow: &LingbotFlowConfig) -> Self {
        let levels = flow.train_timesteps;
        let mut uniform = || -> Vec<usize> { (0..frames).map(|_| draw.below(levels)).collect() };
        let (video, action) = (uniform(), uniform());
        let history = (draw.uniform() < flow.history_noise)
            .then(|| (0..frames).map(|_| ((levels as f64 * (0.5 + 0.5 * draw.uniform())) as usize).min(levels - 1)));
        Self { video, action, history: history.map(Iterator::collect) }
    }
}

/// One episode, clean, with what a step draws for it.
#[derive(Clone, Debug)]
pub struct CleanEpisode {
    /// [C, F, H, W]
    pub latent: Tensor,
    /// [A, F, n] and its mask (1 used channel, 0 not)
    pub action: Tensor,
    pub action_mask: Tensor,
    pub valid_frames: usize,
    pub chunk: usize,
    pub window: usize,
    /// Index into the batch's prompts.
    pub prompt: usize,
}

/// Noise in the layouts of [`CleanEpisode`].
#[derive(Clone, Debug)]
pub struct EpisodeNoise {
    /// [C, F, H, W]
    pub video: Tensor,
    /// [C, F, H, W]; read only if the history is noised.
    pub history: Option<Tensor>,
    /// [A, F, n]
    pub action: Tensor,
}

/// What is regressed, and how much each frame counts.
#[derive(Clone, Debug)]
pub struct EpisodeTargets {
    /// noise - clean, [C, F, H, W]
    pub video: Tensor,
    /// (noise - clean) mask, [A, F, n]
    pub action: Tensor,
    pub action_mask: Tensor,
    /// Weight of each valid frame; their number is that of the valid frames.
    pub video_weights: Vec<f64>,
    pub action_weights: Vec<f64>,
}

/// The model's input and the targets of one episode for given levels and noise. `levels` covers every frame, padding
/// included.
pub fn noised(
    clean: &CleanEpisode,
    noise: &EpisodeNoise,
    levels: &Levels,
    schedules: &Schedules,
) -> Result<(EpisodeInput, EpisodeTargets)> {
    let device = clean.latent.device();
    let dtype = clean.latent.dtype();
    let sigmas = |schedule: &Schedule, levels: &[usize]| -> Result<Tensor> {
        let sigmas: Vec<f32> = levels.iter().map(|&level| schedule.sigma(level)).collect();
        Tensor::from_vec(sigmas, levels.len(), device)?.to_dtype(dtype)
    };
    let times = |schedule: &Schedule, levels: &[usize]| -> Vec<f64> {
        levels.iter().map(|&level| schedule.timestep(level)).collect()
    };
    let weights = |schedule: &Schedule, levels: &[usize]| -> Vec<f64> {
        levels.iter().take(clean.valid_frames).map(|&level| schedule.weight(level)).collect()
    };
    let (video, action) = (&schedules.video, &schedules.action);
    let clean_action = (&clean.action * &clean.action_mask)?;
    let (clean_video, t_history) = match (&levels.history, &noise.history) {
        (None, _) => (clean.latent.clone(), vec![0.0; levels.video.len()]),
        (Some(history), Some(noise)) => (mix(&clean.latent, noise, &sigmas(video, history)?)?, times(video, history)),
        (Some(_), None) => candle_core::bail!("the history is to be noised and there is no noise for it"),
    };
    let input = EpisodeInput {
        noisy_video: mix(&clean.latent, &noise.video, &sigmas(video, &levels.video)?)?,
        clean_video,
        noisy_action: (mix(&clean.action, &noise.action, &sigmas(action, &levels.action)?)? * &clean.action_mask)?,
        clean_action,
        t_video: times(video, &levels.video),
        t_history,
        t_action: times(action, &levels.action),
        valid_frames: clean.valid_frames,
        chunk: clean.chunk,
        window: clean.window,
        prompt: clean.prompt,
    };
    let targets = EpisodeTargets {
        video: (&noise.video - &clean.latent)?,
        action: ((&noise.action - &clean.action)? * &clean.action_mask)?,
        action_mask: clean.action_mask.clone(),
        video_weights: weights(video, &levels.video),
        action_weights: weights(action, &levels.action),
    };
    Ok((input, targets))
}

/// (1 - sigma_f) clean + sigma_f noise, frames in dimension 1.
fn mix(clean: &Tensor, noise: &Tensor, sigma_f: &Tensor) -> Result<Tensor> {
    let mut shape = vec![1; clean.rank()];
    shape[1] = sigma_f.elem_count();
    let sigma = sigma_f.reshape(shape)?;
    clean.broadcast_mul(&(1.0 - &sigma)?)? + noise.broadcast_mul(&sigma)?
}

/// What an episode's loss is divided by, so that the sum over a step is the mean wanted.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Share(f64);

impl Share {
    /// Weight of one frame of an episode with `valid_frames` frames, in a micro-batch of `batch_frames` valid frames,
    /// one of `micro_batches` micro-batches of a step over `episodes` episodes. The sum over a step is the mean.
    pub fn of_frame(
        mean: LossMean,
        valid_frames: usize,
        episodes: usize,
        batch_frames: usize,
        micro_batches: usize,
    ) -> Self {
        Self(match mean {
            LossMean::Episodes => 1.0 / (valid_frames.max(1) * episodes) as f64,
            LossMean::Frames => 1.0 / (batch_frames.max(1) * micro_batches) as f64,
        })
    }
}

/// This micro-batch's part of the step's losses: sums over its episodes and valid frames of share x weight x error, with
/// a frame's video error sum((p - v)^2) / (C H W + 1e-6) and action error sum(m (p - v)^2) / (sum m + 1e-6).
pub fn losses(output: &[EpisodeOutput], targets: &[EpisodeTargets], shares: &[Share]) -> Result<Losses> {
    let (mut video_parts, mut action_parts) = (Vec::new(), Vec::new());
    for ((output, target), share) in output.iter().zip(targets).zip(shares) {
        let (channels, _, height, width) = output.video.dims4()?;
        let cells = (channels * height * width) as f64 + 1e-6;
        let device = output.video.device();
        let frames = target.video_weights.len();
        let weigh = |weights: &[f64], by: f64| -> Result<Tensor> {
            let weights: Vec<f64> = weights.iter().map(|weight| weight * share.0 / by).collect();
            Tensor::from_vec(weights, frames, &Device::Cpu)?.to_dtype(output.video.dtype())?.to_device(device)
        };
        let valid = |tensor: &Tensor| tensor.to_device(device)?.narrow(1, 0, frames);
        let grid = |tensor: &Tensor| valid(tensor)?.flatten_from(2);
        let weights = weigh(&target.video_weights, cells)?;
        video_parts.push(weighted_mse(&grid(&output.video)?, &grid(&target.video)?, &weights, None)?);
        let mask = valid(&target.action_mask)?;
        let weights = (weigh(&target.action_weights, 1.0)? / (mask.sum((0, 2))? + 1e-6)?)?;
        action_parts.push(weighted_mse(&valid(&output.action)?, &valid(&target.action)?, &weights, Some(&mask))?);
    }
    let sum = |parts: Vec<Tensor>| Tensor::stack(&parts, 0)?.sum_all();
    let (video, action) = (sum(video_parts)?, sum(action_parts)?);
    let total = (&video + &action)?;
    Ok(Losses { video, action, proprio: None, total })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values of the executed public scheduler.
    #[test]
    fn schedules_match_the_public_tables() {
        let near = |a: f64, b: f64| assert!((a - b).abs() <= 1e-5 * b.abs().max(1.0), "{a} is not {b}");
        let at = [0, 1, 250, 500, 750, 998, 999];
        for (shift, times, weights) in [
            (
                5.0,
                [1000.0, 999.7998, 937.5, 833.3333, 625.0, 9.92064, 4.98008],
                [0.0, 0.001281, 0.397952, 1.024862, 1.914043, 0.063499, 0.031879],
            ),
            (
                1.0,
                [1000.0, 999.0, 750.0, 500.0, 250.0, 2.0, 1.0],
                [0.0, 0.00487, 1.107882, 1.579605, 1.107882, 0.00974, 0.00487],
            ),
            (
                0.05,
                [999.99976, 980.3731, 130.4348, 47.619, 16.3934, 0.10019, 0.05005],
                [0.0, 0.232249, 1.50736, 0.56204, 0.194017, 0.001183, 0.000589],
            ),
        ] {
            let schedule = Schedule::new(1000, shift);
            for ((&level, time), weight) in at.iter().zip(times).zip(weights) {
                near(schedule.timestep(level), time);
                near(schedule.weight(level), weight);
            }
            let mean = (0..1000).map(|level| schedule.weight(level)).sum::<f64>() / 1000.0;
            near(mean, 1.0);
        }
        let most = |shift| {
            (0..1000).max_by(|&a, &b| {
                let weight = |level| Schedule::new(1000, shift).weight(level);
                weight(a).total_cmp(&weight(b))
            })
        };
        assert_eq!((most(5.0), most(1.0), most(0.05)), (Some(833), Some(500), Some(48)));
    }

    #[test]
    fn history_is_noised_half_of_the_time_from_the_cleaner_half() {
        let flow = LingbotFlowConfig {
            video_shift: 5.0,
            action_shift: 1.0,
            train_timesteps: 1000,
            history_noise: 0.5,
            chunk: [1, 4],
            window: [4, 64],
            loss_mean: LossMean::Episodes,
            text_dropout: 0.0,
        };
        let mut noised = 0;
        for item in 0..2000 {
            let mut draw = Draw::new(1, crate::random::Purpose::Timestep, item, "");
            let levels = Levels::sample(&mut draw, 7, &flow);
            assert_eq!((levels.video.len(), levels.action.len()), (7, 7));
            assert!(levels.video.iter().chain(&levels.action).all(|&level| level < 1000));
            if let Some(history) = levels.history {
                noised += 1;
                assert!(history.len() == 7 && history.iter().all(|&level| (500..1000).contains(&level)));
            }
        }
        assert!((900..1100).contains(&noised), "{noised}");
    }
}
