//! X-WAM's golden files.

use super::{Comparisons, GoldenFile, LOSS, Report, bad_trunk, f32s};
use crate::config::{GeometryConfig, ModelConfig};
use crate::model::{XwamModel, parameter_specs};
use crate::train::Losses;
use crate::train::gradients::{Pass, forward_backward};
use crate::train::xwam::flow::{CleanBatch, Level, Noise, losses, noised, shifted as shifted_level};
use crate::{Error, Result};

#[derive(serde::Deserialize)]
struct XwamConfig {
    dim: usize,
    num_heads: usize,
    num_layers: usize,
    ffn_dim: usize,
    freq_dim: usize,
    text_dim: usize,
    text_len: usize,
    in_dim: usize,
    out_dim: usize,
    patch_size: [usize; 3],
    num_views: usize,
    action_dim: usize,
    action_num: usize,
    proprio_dim: usize,
    eps: f64,
    num_modalities: usize,
}

#[derive(serde::Deserialize)]
struct LossWeights {
    video: f64,
    action: f64,
    proprio: f64,
}

pub(super) fn verify(file: &GoldenFile) -> Result<Report> {
    let refuse = |what| file.refuse(what);
    let config: XwamConfig = file.meta("cfg")?;
    let weights: LossWeights = file.meta("loss_weights")?;
    let (shift, train_timesteps): (f64, usize) = (file.meta("time_shifting")?, file.meta("train_timesteps")?);
    if config.num_modalities != 1 {
        return Err(refuse("the file has a depth branch, which is not part of this model".into()));
    }
    if weights.video != 1.0 {
        return Err(refuse(format!("video loss weight {} where the objective fixes 1", weights.video)));
    }
    let model_config = ModelConfig {
        dim: config.dim,
        ffn_dim: config.ffn_dim,
        num_heads: config.num_heads,
        num_layers: config.num_layers,
        in_dim: config.in_dim,
        out_dim: config.out_dim,
        patch_size: config.patch_size,
        num_views: config.num_views,
        action_dim: config.action_dim,
        action_num: config.action_num,
        proprio_dim: config.proprio_dim,
        freq_dim: config.freq_dim,
        text_dim: config.text_dim,
        text_len: config.text_len,
        eps: config.eps,
        geometry: GeometryConfig {
            enabled: false,
            layers: vec![],
            token_dim: 1,
            grid: [1, 1],
            source_views: 1,
            seed: 0,
        },
    };
    if let Some(what) = bad_size(&model_config) {
        return Err(Error::data("golden_sizes", format!("the file's cfg describes no model: {what}")).at(&file.path));
    }
    let parameters = file.parameters(&parameter_specs(&model_config))?;
    let model = XwamModel::new(&model_config, &parameters)?;

    let shape_error = |error| file.shape_error(error);
    let (t_video, t_action) = (f32s(file, "in.t_video")?, f32s(file, "in.t_action")?);
    let (u_video, u_action) = (f32s(file, "in.u_video")?, f32s(file, "in.u_action")?);
    let clean = f32s(file, "in.clean_action")?;
    let input = |name: &str| file.tensor(&format!("in.{name}")).cloned();
    let samples = input("latent")?.dims().first().copied().unwrap_or(0);
    let draws = [t_video.len(), t_action.len(), u_video.len(), u_action.len(), clean.len()];
    if samples == 0 || draws.iter().any(|count| *count != samples) {
        return Err(refuse(format!("{samples} samples, but {draws:?} draws of levels")));
    }
    let levels: Vec<Level> = (0..samples)
        .map(|b| Level { t_video: t_video[b], t_action: t_action[b], clean_action: clean[b] != 0.0 })
        .collect();
    let batch = CleanBatch {
        latent: input("latent")?,
        action: input("action")?,
        action_mask: input("action_mask")?,
        proprio: input("proprio")?,
        proprio_mask: input("proprio_mask")?,
        text: input("text")?,
        geometry: None,
    };
    let noise =
        Noise { latent: input("latent_noise")?, action: input("action_noise")?, proprio: input("proprio_noise")? };
    let (model_input, targets) = noised(&batch, &noise, &levels, train_timesteps).map_err(shape_error)?;

    let mut comparisons = Comparisons { file, list: Vec::new() };
    let shifted = |u: &[f32]| u.iter().map(|&u| shifted_level(u, shift as f32) as f64).collect::<Vec<_>>();
    // In clean-action mode the action level is 0 whatever u was drawn.
    let t_of_action: Vec<f64> = shifted(&u_action)
        .into_iter()
        .zip(&levels)
        .map(|(t, level)| if level.clean_action { 0.0 } else { t })
        .collect();
    const INPUT: f64 = 5e-7;
    comparisons.values("in.t_video", &shifted(&u_video), INPUT)?;
    comparisons.values("in.t_action", &t_of_action, INPUT)?;
    comparisons.values("in.timesteps_video", &model_input.t_video.concat(), INPUT)?;
    comparisons.values("in.timesteps_action", &model_input.t_action.concat(), INPUT)?;
    comparisons.values("in.timesteps_proprio", &model_input.t_proprio.concat(), INPUT)?;
    comparisons.tensor("in.noisy_latent", &model_input.latent, INPUT)?;
    comparisons.tensor("in.noisy_action", &model_input.action, INPUT)?;
    comparisons.tensor("in.noisy_proprio", &model_input.proprio, INPUT)?;
    comparisons.tensor("target.video", &targets.video, INPUT)?;
    comparisons.tensor("target.action", &targets.action, INPUT)?;
    comparisons.tensor("target.proprio", &targets.proprio, INPUT)?;

    let loss =
        |output: &_| -> candle_core::Result<Losses> { losses(output, &targets, weights.action, weights.proprio) };
    let Pass { output, losses, gradients, .. } =
        forward_backward(&model, &parameters, &model_input, false, loss).map_err(shape_error)?;
    comparisons.tensor("out.video_velocity", &output.video, 5e-6)?;
    comparisons.tensor("out.action_velocity", &output.action, 5e-6)?;
    comparisons.tensor("out.proprio_velocity", &output.proprio, 5e-6)?;
    comparisons.tensor("loss.video", &losses.video, LOSS)?;
    comparisons.tensor("loss.action", &losses.action, LOSS)?;
    comparisons.tensor("loss.proprio", losses.proprio.as_ref().unwrap_or(&losses.total), LOSS)?;
    comparisons.tensor("loss.total", &losses.total, LOSS)?;
    comparisons.gradients(&gradients, |_| 2e-5)?;
    Ok(Report {
        file: file.path.clone(),
        family: "xwam".into(),
        parameters: parameters.count(),
        comparisons: comparisons.list,
    })
}

/// What is wrong with a file's sizes, if anything is.
fn bad_size(config: &ModelConfig) -> Option<String> {
    let [_, patch_height, patch_width] = config.patch_size;
    let sizes = [
        ("dim", config.dim),
        ("ffn_dim", config.ffn_dim),
        ("num_heads", config.num_heads),
        ("num_layers", config.num_layers),
        ("in_dim", config.in_dim),
        ("out_dim", config.out_dim),
        ("patch_size", patch_height),
        ("patch_size", patch_width),
        ("num_views", config.num_views),
        ("action_dim", config.action_dim),
        ("action_num", config.action_num),
        ("proprio_dim", config.proprio_dim),
        ("freq_dim", config.freq_dim),
        ("text_dim", config.text_dim),
        ("text_len", config.text_len),
    ];
    if config.out_dim != config.in_dim {
        return Some(format!("out_dim {} is not in_dim {}", config.out_dim, config.in_dim));
    }
    bad_trunk(&sizes, (config.dim, config.num_heads), config.freq_dim, config.patch_size, config.eps)
}
