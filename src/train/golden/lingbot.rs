//! LingBot-VA's golden files: samples of equal length, one set of noise levels, one chunk and window for all.

use super::{Comparisons, GoldenFile, LOSS, Report, bad_trunk};
use crate::config::{LingbotModelConfig, LossMean};
use crate::model::{LingbotInput, LingbotModel, lingbot_parameter_specs};
use crate::train::gradients::{Pass, forward_backward};
use crate::train::lingbot::flow::{CleanEpisode, EpisodeNoise, Levels, Schedule, Schedules, Share, losses, noised};
use crate::{Error, Result};
use candle_core::{DType, Tensor};

/// Names of the public config.json.
#[derive(serde::Deserialize)]
struct Config {
    num_attention_heads: usize,
    attention_head_dim: usize,
    num_layers: usize,
    ffn_dim: usize,
    freq_dim: usize,
    text_dim: usize,
    in_channels: usize,
    out_channels: usize,
    action_dim: usize,
    patch_size: [usize; 3],
    eps: f64,
}

/// Levels of a schedule; the files do not state it.
const LEVELS: usize = 1000;

pub(super) fn verify(file: &GoldenFile) -> Result<Report> {
    let config: Config = file.meta("cfg")?;
    let (chunk, window): (usize, usize) = (file.meta("chunk")?, file.meta("window")?);
    let (shift_video, shift_action): (f64, f64) = (file.meta("shift_video")?, file.meta("shift_action")?);
    let history_noised = match file.metadata.get("history_noised").map(String::as_str) {
        Some("True") => true,
        Some("False") => false,
        other => return Err(file.refuse(format!("metadata history_noised is {other:?}, not True or False"))),
    };
    let text = file.tensor("in.text")?;
    let text_len = text.dims().get(1).copied().unwrap_or(0);
    let sizes = [
        ("num_attention_heads", config.num_attention_heads),
        ("attention_head_dim", config.attention_head_dim),
        ("num_layers", config.num_layers),
        ("ffn_dim", config.ffn_dim),
        ("freq_dim", config.freq_dim),
        ("text_dim", config.text_dim),
        ("in_channels", config.in_channels),
        ("action_dim", config.action_dim),
        ("patch_size", config.patch_size[1]),
        ("patch_size", config.patch_size[2]),
        ("chunk", chunk),
        ("text length", text_len),
    ];
    let dim = config.num_attention_heads.saturating_mul(config.attention_head_dim);
    let wrong = bad_trunk(&sizes, (dim, config.num_attention_heads), config.freq_dim, config.patch_size, config.eps)
        .or_else(|| {
            let (out, channels) = (config.out_channels, config.in_channels);
            (out != channels).then(|| format!("out_channels {out} is not in_channels {channels}"))
        })
        .or_else(|| {
            let head = config.attention_head_dim;
            (!(head / 3).is_multiple_of(2)).then(|| format!("a third of attention_head_dim {head} is odd"))
        })
        .or_else(|| {
            let right = [shift_video, shift_action].iter().all(|shift| *shift > 0.0 && shift.is_finite());
            (!right).then(|| format!("shifts {shift_video} and {shift_action} are not above 0"))
        });
    if let Some(what) = wrong {
        return Err(Error::data("golden_sizes", format!("the file's cfg describes no model: {what}")).at(&file.path));
    }
    let model_config = LingbotModelConfig {
        dim,
        ffn_dim: config.ffn_dim,
        num_heads: config.num_attention_heads,
        num_layers: config.num_layers,
        in_dim: config.in_channels,
        out_dim: config.out_channels,
        patch_size: config.patch_size,
        action_dim: config.action_dim,
        freq_dim: config.freq_dim,
        text_dim: config.text_dim,
        text_len,
        eps: config.eps,
    };
    let parameters = file.parameters(&lingbot_parameter_specs(&model_config))?;
    let model = LingbotModel::new(&model_config, &parameters)?;

    let shape_error = |error| file.shape_error(error);
    let latent = file.tensor("in.latent")?;
    let (samples, frames) = match latent.dims() {
        &[samples, _, frames, _, _] if samples > 0 && frames > 0 => (samples, frames),
        other => return Err(file.refuse(format!("in.latent {other:?} is not [B, C, F, H, W]"))),
    };
    let levels = Levels {
        video: levels(file, "in.level_video", frames)?,
        action: levels(file, "in.level_action", frames)?,
        history: if history_noised { Some(levels(file, "in.level_history", frames)?) } else { None },
    };
    let schedules =
        Schedules { video: Schedule::new(LEVELS, shift_video), action: Schedule::new(LEVELS, shift_action) };
    let (mut episodes, mut targets, mut prompts) = (Vec::new(), Vec::new(), Vec::new());
    for sample in 0..samples {
        let of = |name: &str| {
            let tensor = file.tensor(&format!("in.{name}"))?;
            tensor.get(sample).map_err(shape_error)
        };
        // The trailing 1 of the reference's action layout.
        let action = |name: &str| of(name)?.squeeze(3).map_err(shape_error);
        let clean = CleanEpisode {
            latent: of("latent")?,
            action: action("action")?,
            action_mask: action("action_mask")?,
            valid_frames: frames,
            chunk,
            window,
            prompt: sample,
        };
        let noise = EpisodeNoise {
            video: of("latent_noise")?,
            history: if history_noised { Some(of("history_noise")?) } else { None },
            action: action("action_noise")?,
        };
        let (input, target) = noised(&clean, &noise, &levels, &schedules).map_err(shape_error)?;
        episodes.push(input);
        targets.push(target);
        prompts.push(without_zero_rows(&of("text")?).map_err(shape_error)?);
    }
    let input = LingbotInput { episodes, prompts, alignment: 1 };
    let shares = vec![Share::of_frame(LossMean::Episodes, frames, samples, frames * samples, 1); samples];
    let loss = |output: &Vec<_>| losses(output, &targets, &shares);
    let Pass { output, losses, gradients, .. } =
        forward_backward(&model, &parameters, &input, false, loss).map_err(shape_error)?;

    let mut comparisons = Comparisons { file, list: Vec::new() };
    const OUTPUT: f64 = 1e-5;
    let stack = |tensors: Vec<Tensor>| Tensor::stack(&tensors, 0).map_err(shape_error);
    let video = stack(output.iter().map(|episode| episode.video.clone()).collect())?;
    let action = stack(output.iter().map(|episode| episode.action.clone()).collect())?;
    comparisons.tensor("out.video_velocity", &video, OUTPUT)?;
    comparisons.tensor("out.action_velocity", &action, OUTPUT)?;
    comparisons.tensor("loss.video", &losses.video, LOSS)?;
    comparisons.tensor("loss.action", &losses.action, LOSS)?;
    // Cross-attention over mostly equal keys: its gradients are small sums of large terms.
    let cross = |name: &str| name.contains(".attn2.") || name.contains(".norm2.");
    comparisons.gradients(&gradients, |name| if cross(name) { 2e-4 } else { 5e-5 })?;
    Ok(Report {
        file: file.path.clone(),
        family: "lingbot".into(),
        parameters: parameters.count(),
        comparisons: comparisons.list,
    })
}

fn levels(file: &GoldenFile, name: &str, frames: usize) -> Result<Vec<usize>> {
    let shape_error = |error| file.shape_error(error);
    let tensor = file.tensor(name)?.flatten_all().and_then(|t| t.to_dtype(DType::I64)).map_err(shape_error)?;
    let values: Vec<i64> = tensor.to_vec1().map_err(shape_error)?;
    let levels: Vec<usize> = values.iter().filter_map(|&level| usize::try_from(level).ok()).collect();
    if levels.len() != frames || values.len() != frames || levels.iter().any(|&level| level >= LEVELS) {
        return Err(file.refuse(format!("{name} is not one level of 0 .. {} for each of {frames} frames", LEVELS - 1)));
    }
    Ok(levels)
}

/// Text [S, width] without the zero rows at its end, which the model folds into one key.
fn without_zero_rows(text: &Tensor) -> candle_core::Result<Tensor> {
    let rows: Vec<Vec<f32>> = text.to_dtype(DType::F32)?.to_vec2()?;
    let real = rows.iter().rposition(|row| row.iter().any(|&value| value != 0.0)).map_or(0, |last| last + 1);
    text.narrow(0, 0, real)
}
