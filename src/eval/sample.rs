//! Sampling a clip from its first frame: Euler steps of the flow, video and actions on schedules of their own.
//!
//! Noise levels fall linearly from 0.999 to 0 and are then shifted (X-WAM 4.2). Action and proprio finish first, in
//! `action_steps`; from then on the video goes on alone with their time at 0. Latent frame 0 and proprio 0 are given.
//! Starting noise comes from a stream keyed by the clip, so every validation of every arm starts alike.

use super::levels::sigmas;
use crate::config::{FlowConfig, ValidationConfig};
use crate::model::{Transformer, XwamInput, XwamModel};
use crate::random::{Draw, Purpose};
use candle_core::{Result, Tensor};

/// What is given: the whole clean clip; only its first frame, first proprio, text and geometry are read.
#[derive(Clone, Debug)]
pub struct Condition {
    /// [B, C, T, V, H, W]
    pub latent: Tensor,
    /// [B, Tp, proprio_dim]
    pub proprio: Tensor,
    /// [B, Ta, action_dim]: shape only.
    pub action: Tensor,
    /// [B, S, text_dim]
    pub text: Tensor,
    /// [B, N_g, D_g]
    pub geometry: Option<Tensor>,
    /// Names of the clips, which seed their noise.
    pub clips: Vec<String>,
}

/// What was predicted, in the layouts of the condition.
#[derive(Clone, Debug)]
pub struct Prediction {
    pub latent: Tensor,
    pub proprio: Tensor,
    pub action: Tensor,
}

/// The public schedule does not begin in pure noise.
const FIRST_LEVEL: f64 = 0.999;

/// Samples all clips of the condition; f32 throughout.
pub fn sample(
    model: &XwamModel,
    condition: &Condition,
    flow: &FlowConfig,
    validation: &ValidationConfig,
) -> Result<Prediction> {
    let noise = |like: &Tensor, what: &str| -> Result<Tensor> {
        let each = like.elem_count() / condition.clips.len();
        let values = condition
            .clips
            .iter()
            .flat_map(|clip| Draw::new(0, Purpose::Validation, 0, &format!("{what} {clip}")).normals(each))
            .collect();
        Tensor::from_vec(values, like.shape(), like.device())
    };
    let (given_frame, given_proprio) = (condition.latent.narrow(2, 0, 1)?, condition.proprio.narrow(1, 0, 1)?);
    let (batch, frames) = (condition.latent.dim(0)?, condition.latent.dim(2)?);
    let (actions, proprios) = (condition.action.dim(1)?, condition.proprio.dim(1)?);
    let with_frame = |latent: Tensor| Tensor::cat(&[&given_frame, &latent.narrow(2, 1, frames - 1)?], 2);
    let with_proprio = |proprio: Tensor| Tensor::cat(&[&given_proprio, &proprio.narrow(1, 1, proprios - 1)?], 1);

    let mut latent = with_frame(noise(&condition.latent, "video")?)?;
    let mut proprio = with_proprio(noise(&condition.proprio, "proprio")?)?;
    let mut action = noise(&condition.action, "action")?;
    let video_levels = sigmas(FIRST_LEVEL, validation.sample_steps, flow.time_shifting);
    let action_levels = sigmas(FIRST_LEVEL, validation.action_steps, flow.time_shifting);
    let scale = flow.train_timesteps as f64;
    for step in 0..validation.sample_steps {
        let level = |levels: &[f64], at: usize| levels.get(at).copied().unwrap_or(0.0);
        let (video_now, action_now) = (level(&video_levels, step), level(&action_levels, step));
        let after_first = |time: f64, count: usize| {
            let mut times = vec![time * scale; count];
            times[0] = 0.0;
            vec![times; batch]
        };
        let input = XwamInput {
            latent: latent.clone(),
            action: action.clone(),
            proprio: proprio.clone(),
            text: condition.text.clone(),
            t_video: after_first(video_now, frames),
            t_action: vec![vec![action_now * scale; actions]; batch],
            t_proprio: after_first(action_now, proprios),
            geometry: condition.geometry.clone(),
        };
        let velocity = model.forward(&input)?;
        let advance = |x: &Tensor, v: &Tensor, by: f64| x.detach() + (v.detach().to_device(x.device())? * by)?;
        latent = with_frame(advance(&latent, &velocity.video, level(&video_levels, step + 1) - video_now)?)?;
        if step < validation.action_steps {
            let by = level(&action_levels, step + 1) - action_now;
            action = advance(&action, &velocity.action, by)?;
            proprio = with_proprio(advance(&proprio, &velocity.proprio, by)?)?;
        }
    }
    Ok(Prediction { latent, proprio, action })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_match_the_public_schedule() {
        // X-WAM's integer model times for 10 steps: linear 0.999 .. 0 without the end, shifted by 5, times 1000.
        let times: Vec<i64> = sigmas(FIRST_LEVEL, 10, 5.0)[..10].iter().map(|sigma| (sigma * 1000.0) as i64).collect();
        assert_eq!(times, [999, 978, 952, 920, 882, 833, 768, 681, 555, 356]);
        assert_eq!(sigmas(FIRST_LEVEL, 10, 5.0)[10], 0.0);
    }
}
