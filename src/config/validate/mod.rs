//! What the types cannot say: sizes that divide, ranges, lists that agree.
//!
//! Everything here is decided by the recipe alone. What also needs the dataset (image size, columns, episodes) is
//! checked where the dataset is opened; [`validate_image_size`] is the part of it that is about the model.

mod lingbot;
mod xwam;

use super::types::{CodecConfig, Recipe, TextConfig, TrainConfig};
use crate::Error;
use std::path::Path;

/// Latent channels of the Wan2.2 VAE and of the linear codec, which has its geometry.
const LATENT_CHANNELS: usize = 48;
/// Pixels an edge of a latent cell, for both codecs.
const LATENT_STRIDE: usize = 16;
/// Dims of one arm: delta xyz, delta axis-angle, gripper.
const ARM_ACTION_DIM: usize = 7;
/// Dims of one arm: xyz, quaternion, gripper.
const ARM_PROPRIO_DIM: usize = 8;
/// No size of a model is near this; larger numbers are slips that would overflow the arithmetic of shapes.
const LARGEST_SIZE: usize = 1_000_000;

/// All that is wrong with a recipe's values, in the order of its fields. Each problem's place is the dotted field.
pub fn validate(recipe: &Recipe) -> Vec<Error> {
    let mut check = Check::default();
    match recipe {
        Recipe::Xwam(recipe) => xwam::check(&mut check, recipe),
        Recipe::Lingbot(recipe) => lingbot::check(&mut check, recipe),
    }
    check.problems
}

/// What is wrong with images of this size (pixels) for the codecs and patches of `patch_size`.
pub fn validate_image_size(patch_size: [usize; 3], height: usize, width: usize) -> Vec<Error> {
    let mut check = Check::default();
    let [_, patch_height, patch_width] = patch_size;
    for (name, pixels, patch) in [("height", height, patch_height), ("width", width, patch_width)] {
        let step = LATENT_STRIDE.saturating_mul(patch);
        check.that(pixels > 0 && step > 0 && pixels.is_multiple_of(step), "model.patch_size", || {
            format!(
                "image {name} {pixels} is no multiple of {step} (latent cells of {LATENT_STRIDE} pixels, {patch} a patch)"
            )
        });
    }
    check.problems
}

#[derive(Default)]
struct Check {
    problems: Vec<Error>,
}

impl Check {
    fn that(&mut self, holds: bool, field: &str, otherwise: impl FnOnce() -> String) {
        if !holds {
            self.problems.push(Error::refused("bad_value", format!("{field}: {}", otherwise())).in_place(field));
        }
    }

    fn size(&mut self, field: &str, value: usize) {
        self.that((1..=LARGEST_SIZE).contains(&value), field, || {
            format!("expected a size from 1 to {LARGEST_SIZE}, found {value}")
        });
    }

    fn at_least_one(&mut self, field: &str, value: u64) {
        self.that(value >= 1, field, || "must be at least 1".to_owned());
    }

    fn positive(&mut self, field: &str, value: f64) {
        self.that(value > 0.0 && value.is_finite(), field, || format!("must be greater than 0, found {value}"));
    }

    fn not_negative(&mut self, field: &str, value: f64) {
        self.that(value >= 0.0 && value.is_finite(), field, || format!("must be 0 or greater, found {value}"));
    }

    fn probability(&mut self, field: &str, value: f64) {
        self.that((0.0..=1.0).contains(&value), field, || format!("must lie between 0 and 1, found {value}"));
    }

    /// A path that must not be empty.
    fn path(&mut self, field: &str, path: &Path) {
        self.that(!path.as_os_str().is_empty(), field, || "the path is empty".to_owned());
    }

    fn dataset(&mut self, dataset: &Path, views: &[String], wrist_view: &String, held_out: &[usize]) {
        self.path("data.dataset", dataset);
        self.that(!views.is_empty(), "data.views", || "at least one view is needed".to_owned());
        if let Some(view) = repeated(views) {
            self.that(false, "data.views", || format!("{view} stands twice"));
        }
        self.that(views.contains(wrist_view), "data.wrist_view", || {
            format!("{wrist_view} is not one of data.views ({})", views.join(", "))
        });
        self.that(!held_out.is_empty(), "data.validation_episodes", || {
            "at least one episode must be held out".to_owned()
        });
        if let Some(episode) = repeated(held_out) {
            self.that(false, "data.validation_episodes", || format!("episode {episode} stands twice"));
        }
    }

    fn codec(&mut self, codec: &CodecConfig) {
        let (CodecConfig::Linear { path } | CodecConfig::WanVae { path }) = codec;
        self.path("codec.path", path);
    }

    fn text(&mut self, text: &TextConfig) {
        if let TextConfig::Embeddings { path } = text {
            self.path("text.path", path);
        }
    }

    /// What the shared blocks need of their sizes.
    fn trunk(&mut self, dim: usize, heads: usize, freq_dim: usize, eps: f64) {
        if heads > 0 {
            self.that(dim.is_multiple_of(heads), "model.num_heads", || {
                format!("dim {dim} does not divide by {heads} heads")
            });
            let head = dim / heads;
            // Rotary positions turn pairs, and each of the three axes needs one.
            self.that(!dim.is_multiple_of(heads) || (head >= 6 && head.is_multiple_of(2)), "model.num_heads", || {
                format!("head size {head} (dim {dim} / {heads} heads) must be even and at least 6")
            });
        }
        self.that(freq_dim.is_multiple_of(2), "model.freq_dim", || {
            format!("half cosines, half sines: must be even, found {freq_dim}")
        });
        self.positive("model.eps", eps);
    }

    fn latents(&mut self, in_dim: usize, out_dim: usize, [time, height, width]: [usize; 3]) {
        self.that(in_dim == LATENT_CHANNELS, "model.in_dim", || {
            format!("the codec has {LATENT_CHANNELS} latent channels, found {in_dim}")
        });
        self.that(out_dim == in_dim, "model.out_dim", || {
            format!("the predicted velocity has the channels of the latent: {in_dim}, found {out_dim}")
        });
        // A latent frame has one noise level: a patch must not span two of them.
        self.that(time == 1, "model.patch_size", || format!("a patch spans one latent frame, found {time}"));
        self.that(height > 0 && width > 0 && height <= 64 && width <= 64, "model.patch_size", || {
            format!("height and width must be from 1 to 64, found {height} and {width}")
        });
    }

    fn train(&mut self, train: &TrainConfig) {
        self.at_least_one("train.steps", train.steps);
        self.size("train.batch_size", train.batch_size);
        self.size("train.accumulate", train.accumulate);
        self.positive("train.lr", train.lr);
        self.not_negative("train.weight_decay", train.weight_decay);
        for beta in train.betas {
            self.that((0.0..1.0).contains(&beta), "train.betas", || {
                format!("must lie between 0 and 1, 1 excluded, found {beta}")
            });
        }
        self.positive("train.adam_eps", train.adam_eps);
        self.positive("train.clip_norm", train.clip_norm);
        self.at_least_one("train.save_every", train.save_every);
        self.at_least_one("train.keep_last", train.keep_last as u64);
        // Between two saves there is nothing to keep: fewer would stay than the recipe says.
        self.that(
            train.save_every == 0 || train.keep_every.is_multiple_of(train.save_every),
            "train.keep_every",
            || format!("must be 0 or a multiple of train.save_every {}, found {}", train.save_every, train.keep_every),
        );
    }

    fn sampling(&mut self, every: u64, clips: usize, sample_steps: usize, strips: usize) {
        self.at_least_one("validation.every", every);
        self.size("validation.clips", clips);
        self.size("validation.sample_steps", sample_steps);
        self.that(strips <= clips, "validation.strips", || format!("at most validation.clips {clips}, found {strips}"));
    }
}

/// The first item that stands twice.
pub(in crate::config) fn repeated<T: PartialEq>(items: &[T]) -> Option<&T> {
    items
        .iter()
        .enumerate()
        .find(|(index, item)| items.iter().take(*index).any(|other| other == *item))
        .map(|(_, item)| item)
}
