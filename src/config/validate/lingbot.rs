//! LingBot-VA's recipe: episodes, action channels, per-frame noise, packing.

use super::{Check, LARGEST_SIZE, repeated};
use crate::config::{CodecConfig, LatentSource, LingbotRecipe, PackingKind, TextConfig, Tile, WeightsConfig};

/// Chunks and windows beyond this are slips: an episode has some hundreds of latent frames.
const LONGEST: usize = 100_000;

pub(super) fn check(check: &mut Check, recipe: &LingbotRecipe) {
    data(check, recipe);
    actions(check, recipe);
    check.codec(&recipe.codec);
    text(check, recipe);
    model(check, recipe);
    if let WeightsConfig::Official { path } | WeightsConfig::Wan22 { path } = &recipe.weights {
        check.path("weights.path", path);
    }
    flow(check, recipe);
    packing(check, recipe);
    check.train(&recipe.train);
    validation(check, recipe);
}

fn data(check: &mut Check, recipe: &LingbotRecipe) {
    let data = &recipe.data;
    check.dataset(&data.dataset, &data.views, &data.wrist_view, &data.validation_episodes);
    check.size("data.frame_stride", data.frame_stride);
    check.that(data.tile != Tile::RobotwinTshape || data.views.len() == 3, "data.tile", || {
        format!("robotwin_tshape places three views, found {}", data.views.len())
    });
}

fn actions(check: &mut Check, recipe: &LingbotRecipe) {
    let actions = &recipe.data.actions;
    let count = actions.channels.len();
    check.that(count > 0, "data.actions.channels", || "at least one channel is needed".to_owned());
    if let Some(channel) = repeated(&actions.channels) {
        check.that(false, "data.actions.channels", || format!("channel {channel} stands twice"));
    }
    for channel in &actions.channels {
        check.that(*channel < recipe.model.action_dim, "data.actions.channels", || {
            format!("channel {channel} does not exist: model.action_dim is {}", recipe.model.action_dim)
        });
    }
    // Left xyz, quaternion, gripper, then the right arm's.
    check.that(recipe.data.tile != Tile::RobotwinTshape || count == 16, "data.actions.channels", || {
        format!("robotwin_tshape has 16 elements in a row (two poses and grippers), found {count}")
    });
    for (field, quantiles) in [("data.actions.q01", &actions.q01), ("data.actions.q99", &actions.q99)] {
        check.that(quantiles.len() == count, field, || {
            format!("one number for each of {count} channels is needed, found {}", quantiles.len())
        });
        check.that(quantiles.iter().all(|value| value.is_finite()), field, || "must be finite".to_owned());
    }
    for (index, (low, high)) in actions.q01.iter().zip(&actions.q99).enumerate() {
        check.that(low <= high, "data.actions.q99", || {
            format!("element {index} has its 99 % quantile {high} below its 1 % quantile {low}")
        });
    }
}

fn text(check: &mut Check, recipe: &LingbotRecipe) {
    let published = recipe.data.latents == LatentSource::Official;
    check.that(!published || matches!(recipe.codec, CodecConfig::WanVae { .. }), "codec.kind", || {
        "published latents are the Wan2.2 VAE's: no other codec reads them".to_owned()
    });
    check.text(&recipe.text);
    let from_files = matches!(recipe.text, TextConfig::LatentFiles);
    check.that(!from_files || recipe.data.latents == LatentSource::Official, "text.kind", || {
        "latent_files needs data.latents: official".to_owned()
    });
}

fn model(check: &mut Check, recipe: &LingbotRecipe) {
    let model = &recipe.model;
    for (field, value) in [
        ("model.dim", model.dim),
        ("model.ffn_dim", model.ffn_dim),
        ("model.num_heads", model.num_heads),
        ("model.num_layers", model.num_layers),
        ("model.action_dim", model.action_dim),
        ("model.freq_dim", model.freq_dim),
        ("model.text_dim", model.text_dim),
        ("model.text_len", model.text_len),
    ] {
        check.size(field, value);
    }
    check.trunk(model.dim, model.num_heads, model.freq_dim, model.eps);
    let head = model.dim / model.num_heads.max(1);
    check.that((head / 3).is_multiple_of(2), "model.num_heads", || {
        format!("a third of the head size {head}, rounded down, must be even: rotary positions turn pairs on each axis")
    });
    check.latents(model.in_dim, model.out_dim, model.patch_size);
}

fn flow(check: &mut Check, recipe: &LingbotRecipe) {
    let flow = &recipe.flow;
    check.positive("flow.video_shift", flow.video_shift);
    check.positive("flow.action_shift", flow.action_shift);
    check.that((2..=LARGEST_SIZE).contains(&flow.train_timesteps), "flow.train_timesteps", || {
        format!("expected from 2 to {LARGEST_SIZE}, found {}", flow.train_timesteps)
    });
    check.probability("flow.history_noise", flow.history_noise);
    check.probability("flow.text_dropout", flow.text_dropout);
    for (field, [low, high], least) in [("flow.chunk", flow.chunk, 1), ("flow.window", flow.window, 0)] {
        check.that(least <= low && low <= high && high <= LONGEST, field, || {
            format!("smallest and largest, from {least} to {LONGEST}, found [{low}, {high}]")
        });
    }
}

fn packing(check: &mut Check, recipe: &LingbotRecipe) {
    let packing = &recipe.packing;
    check.size("packing.ranks", packing.ranks);
    check.size("packing.pad_multiple", packing.pad_multiple);
    check.size("packing.pool_factor", packing.pool_factor);
    check.at_least_one("packing.token_budget", packing.token_budget as u64);
    check.size("packing.alignment", packing.alignment);
    let fits = packing.alignment <= packing.token_budget;
    check.that(fits || packing.kind != PackingKind::Budget, "packing.token_budget", || {
        format!("{} tokens are less than one packing.alignment, {}", packing.token_budget, packing.alignment)
    });
}

fn validation(check: &mut Check, recipe: &LingbotRecipe) {
    let validation = &recipe.validation;
    check.sampling(validation.every, validation.clips, validation.sample_steps, validation.strips);
    check.that((1..=LONGEST).contains(&validation.chunk), "validation.chunk", || {
        format!("expected from 1 to {LONGEST} latent frames, found {}", validation.chunk)
    });
    check.that(validation.window <= LONGEST, "validation.window", || {
        format!("expected at most {LONGEST} half-chunks, found {}", validation.window)
    });
}
