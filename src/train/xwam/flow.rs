//! Flow matching for X-WAM: noise levels, noised inputs, velocity targets, masked losses (X-WAM `runner.py`).
//!
//! x_t = (1 - t) x + t n, target v = n - x, t shifted by s(u) = s u / (1 + (s - 1) u). Latent frame 0 of every view and
//! proprio 0 are given clean with timestep 0; actions are clean only in clean-action mode (t = 0).

use crate::config::FlowConfig;
use crate::model::{XwamInput, XwamOutput};
use crate::ops::weighted_mse;
use crate::random::Draw;
use crate::train::Losses;
use candle_core::{Result, Tensor};

/// Clean quantities of a batch.
#[derive(Clone, Debug)]
pub struct CleanBatch {
    /// [B, C, T, V, H, W]
    pub latent: Tensor,
    /// [B, Ta, action_dim] and its mask (1 valid, 0 absent arm)
    pub action: Tensor,
    pub action_mask: Tensor,
    /// [B, Tp, proprio_dim] and its mask
    pub proprio: Tensor,
    pub proprio_mask: Tensor,
    /// [B, S, text_dim]
    pub text: Tensor,
    /// [B, N_g, D_g]
    pub geometry: Option<Tensor>,
}

/// Noise level of one sample, already shifted.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Level {
    pub t_video: f32,
    pub t_action: f32,
    /// Actions and proprio are given clean; no loss on them.
    pub clean_action: bool,
}

impl Level {
    /// The decoupled joint distribution: with probability `clean_action_ratio` actions are clean and u_video is
    /// uniform; else u_action is uniform and u_video = u_action + Beta(1.5, 1) (1 - u_action), so video is never
    /// cleaner than actions.
    pub fn sample(draw: &mut Draw, config: &FlowConfig) -> Self {
        let clean_action = draw.uniform() < config.clean_action_ratio;
        let (u_video, u_action) = if clean_action {
            (draw.uniform(), 0.0)
        } else {
            let u_action = draw.uniform();
            (u_action + draw.beta_a_1(1.5) * (1.0 - u_action), u_action)
        };
        let shift = |u: f64| shifted(u as f32, config.time_shifting as f32);
        Self { t_video: shift(u_video), t_action: shift(u_action), clean_action }
    }
}

/// s u / (1 + (s - 1) u).
pub fn shifted(u: f32, shift: f32) -> f32 {
    shift * u / (1.0 + (shift - 1.0) * u)
}

/// What is regressed and where.
#[derive(Clone, Debug)]
pub struct Targets {
    /// noise - clean, in the layouts of [`CleanBatch`].
    pub video: Tensor,
    pub action: Tensor,
    pub proprio: Tensor,
    /// Masks of the action and proprio losses: valid dims of samples that are not in clean-action mode, proprio 0 out.
    pub action_mask: Tensor,
    pub proprio_mask: Tensor,
}

/// Noise in the layouts of the clean tensors.
#[derive(Clone, Debug)]
pub struct Noise {
    pub latent: Tensor,
    pub action: Tensor,
    pub proprio: Tensor,
}

/// The model's input and targets for given levels and noise.
pub fn noised(
    batch: &CleanBatch,
    noise: &Noise,
    levels: &[Level],
    train_timesteps: usize,
) -> Result<(XwamInput, Targets)> {
    let (frames, actions, proprios) = (batch.latent.dim(2)?, batch.action.dim(1)?, batch.proprio.dim(1)?);
    let device = batch.latent.device();
    let column = |value: fn(&Level) -> f32| -> Result<Tensor> {
        Tensor::from_vec(levels.iter().map(value).collect::<Vec<f32>>(), levels.len(), device)?
            .to_dtype(batch.latent.dtype())
    };
    let (t_video, t_action) = (column(|level| level.t_video)?, column(|level| level.t_action)?);
    let trained = column(|level| if level.clean_action { 0.0 } else { 1.0 })?.reshape(((), 1, 1))?;

    let latent = mix(&batch.latent, &noise.latent, &t_video)?;
    let latent = Tensor::cat(&[&batch.latent.narrow(2, 0, 1)?, &latent.narrow(2, 1, frames - 1)?], 2)?;
    let proprio = mix(&batch.proprio, &noise.proprio, &t_action)?;
    let proprio = Tensor::cat(&[&batch.proprio.narrow(1, 0, 1)?, &proprio.narrow(1, 1, proprios - 1)?], 1)?;

    // The public code multiplies in f32; so does this, before widening.
    let scale = train_timesteps as f32;
    let spread = |level: f32, first: f64, count: usize| {
        (0..count).map(|i| if i == 0 { first } else { (level * scale) as f64 }).collect::<Vec<f64>>()
    };
    let input = XwamInput {
        latent,
        action: mix(&batch.action, &noise.action, &t_action)?,
        proprio,
        text: batch.text.clone(),
        t_video: levels.iter().map(|level| spread(level.t_video, 0.0, frames)).collect(),
        t_action: levels.iter().map(|level| spread(level.t_action, (level.t_action * scale) as f64, actions)).collect(),
        t_proprio: levels.iter().map(|level| spread(level.t_action, 0.0, proprios)).collect(),
        geometry: batch.geometry.clone(),
    };
    let proprio_mask = batch.proprio_mask.broadcast_mul(&trained)?;
    let given = proprio_mask.narrow(1, 0, 1)?.zeros_like()?;
    let targets = Targets {
        video: (&noise.latent - &batch.latent)?,
        action: (&noise.action - &batch.action)?,
        proprio: (&noise.proprio - &batch.proprio)?,
        action_mask: batch.action_mask.broadcast_mul(&trained)?,
        proprio_mask: Tensor::cat(&[&given, &proprio_mask.narrow(1, 1, proprios - 1)?], 1)?,
    };
    Ok((input, targets))
}

/// (1 - t) clean + t noise with one t a sample.
fn mix(clean: &Tensor, noise: &Tensor, t_b: &Tensor) -> Result<Tensor> {
    let mut shape = vec![1; clean.rank()];
    shape[0] = t_b.elem_count();
    let t = t_b.reshape(shape)?;
    clean.broadcast_mul(&(1.0 - &t)?)? + noise.broadcast_mul(&t)?
}

/// Masked MSE, sum / (mask sum + 1e-8) over the batch; latent frame 0 never counts.
pub fn losses(output: &XwamOutput, targets: &Targets, action_weight: f64, proprio_weight: f64) -> Result<Losses> {
    let frames = output.video.dim(2)?;
    let device = output.video.device();
    let moving = |tensor: &Tensor| tensor.to_device(device)?.narrow(2, 1, frames - 1);
    // One weight for everything: as if it were one frame.
    let whole = |prediction: &Tensor, target: &Tensor, mask: Option<&Tensor>| -> Result<Tensor> {
        let flat = |tensor: &Tensor| tensor.to_device(device)?.reshape((1, 1, ()));
        let one = Tensor::ones(1, prediction.dtype(), device)?;
        weighted_mse(&flat(prediction)?, &flat(target)?, &one, mask.map(flat).transpose()?.as_ref())
    };
    let (prediction, target) = (moving(&output.video)?, moving(&targets.video)?);
    let video = (whole(&prediction, &target, None)? / (prediction.elem_count() as f64 + 1e-8))?;
    let masked = |prediction: &Tensor, target: &Tensor, mask: &Tensor| -> Result<Tensor> {
        let mask = mask.to_device(device)?;
        // The mask multiplies the error, so what counts of the square is the mask's square.
        whole(prediction, target, Some(&mask.sqr()?))? / (mask.sum_all()? + 1e-8)?
    };
    let action = masked(&output.action, &targets.action, &targets.action_mask)?;
    let proprio = masked(&output.proprio, &targets.proprio, &targets.proprio_mask)?;
    let total = ((&video + (&action * action_weight)?)? + (&proprio * proprio_weight)?)?;
    Ok(Losses { video, action, proprio: Some(proprio), total })
}
