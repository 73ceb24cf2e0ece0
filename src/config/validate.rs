//! What the types cannot say: sizes that divide, ranges, lists that agree.
//!
//! Everything here is decided by the recipe alone. What also needs the dataset (image size, columns, episodes) is
//! checked where the dataset is opened; [`validate_image_size`] is the part of it that is about the model.

use super::types::{CodecConfig, Recipe, RobotLayout, TextConfig};
use crate::Error;

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
    data(&mut check, recipe);
    codec_and_text(&mut check, recipe);
    model(&mut check, recipe);
    geometry(&mut check, recipe);
    flow(&mut check, recipe);
    train(&mut check, recipe);
    validation(&mut check, recipe);
    check.problems
}

/// What is wrong with images of this size (pixels) for this recipe's codec and patches.
pub fn validate_image_size(recipe: &Recipe, height: usize, width: usize) -> Vec<Error> {
    let mut check = Check::default();
    let [_, patch_height, patch_width] = recipe.model.patch_size;
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
}

fn data(check: &mut Check, recipe: &Recipe) {
    let data = &recipe.data;
    check.that(!data.dataset.as_os_str().is_empty(), "data.dataset", || "the path is empty".to_owned());
    check.that(!data.views.is_empty(), "data.views", || "at least one view is needed".to_owned());
    if let Some(view) = repeated(&data.views) {
        check.that(false, "data.views", || format!("{view} stands twice"));
    }
    check.that(data.views.contains(&data.wrist_view), "data.wrist_view", || {
        format!("{} is not one of data.views ({})", data.wrist_view, data.views.join(", "))
    });
    check.that(data.frames >= 5 && data.frames % 4 == 1 && data.frames <= LARGEST_SIZE, "data.frames", || {
        format!(
            "must be 4k + 1 with k of 1 or more (the first frame alone, then groups of four), found {}",
            data.frames
        )
    });
    check.size("data.frame_skip", data.frame_skip);
    check.size("data.clip_stride", data.clip_stride);
    check.that(!data.validation_episodes.is_empty(), "data.validation_episodes", || {
        "at least one episode must be held out".to_owned()
    });
    if let Some(episode) = repeated(&data.validation_episodes) {
        check.that(false, "data.validation_episodes", || format!("episode {episode} stands twice"));
    }
    robot(check, &data.robot);
}

fn robot(check: &mut Check, robot: &RobotLayout) {
    let gripper = &robot.state_gripper;
    check.that(matches!(gripper.len(), 1 | 2), "data.robot.state_gripper", || {
        format!("expected one column, or two whose difference is the opening; found {}", gripper.len())
    });
    if let Some(column) = repeated(gripper) {
        check.that(false, "data.robot.state_gripper", || format!("column {column} stands twice"));
    }
    for (field, column) in [
        ("data.robot.state_position", robot.state_position),
        ("data.robot.state_quaternion_xyzw", robot.state_quaternion_xyzw),
        ("data.robot.action", robot.action),
    ]
    .into_iter()
    .chain(gripper.iter().map(|column| ("data.robot.state_gripper", *column)))
    {
        check.that(column <= LARGEST_SIZE, field, || format!("{column} is no column number"));
    }
    let position = robot.state_position..robot.state_position.saturating_add(3);
    let quaternion = robot.state_quaternion_xyzw..robot.state_quaternion_xyzw.saturating_add(4);
    let apart = position.end <= quaternion.start || quaternion.end <= position.start;
    check.that(apart, "data.robot.state_quaternion_xyzw", || {
        format!("columns {quaternion:?} overlap the position's, {position:?}")
    });
    for column in gripper {
        check.that(!position.contains(column) && !quaternion.contains(column), "data.robot.state_gripper", || {
            format!("column {column} belongs to the position or the quaternion")
        });
    }
}

fn codec_and_text(check: &mut Check, recipe: &Recipe) {
    let (CodecConfig::Linear { path } | CodecConfig::WanVae { path }) = &recipe.codec;
    check.that(!path.as_os_str().is_empty(), "codec.path", || "the path is empty".to_owned());
    match &recipe.text {
        TextConfig::Embeddings { path } => {
            check.that(!path.as_os_str().is_empty(), "text.path", || "the path is empty".to_owned());
        }
        TextConfig::LatentFiles => {
            check.that(false, "text.kind", || "only LingBot-VA has text in its latent files".to_owned())
        }
        TextConfig::HashedWords => {}
    }
}

fn model(check: &mut Check, recipe: &Recipe) {
    let model = &recipe.model;
    for (field, value) in [
        ("model.dim", model.dim),
        ("model.ffn_dim", model.ffn_dim),
        ("model.num_heads", model.num_heads),
        ("model.num_layers", model.num_layers),
        ("model.action_dim", model.action_dim),
        ("model.action_num", model.action_num),
        ("model.proprio_dim", model.proprio_dim),
        ("model.freq_dim", model.freq_dim),
        ("model.text_dim", model.text_dim),
        ("model.text_len", model.text_len),
    ] {
        check.size(field, value);
    }
    if model.num_heads > 0 {
        let heads = model.num_heads;
        check.that(model.dim.is_multiple_of(heads), "model.num_heads", || {
            format!("dim {} does not divide by {heads} heads", model.dim)
        });
        let head = model.dim / heads;
        // Rotary positions turn pairs, and each of the three axes needs one.
        check.that(
            !model.dim.is_multiple_of(heads) || (head >= 6 && head.is_multiple_of(2)),
            "model.num_heads",
            || format!("head size {head} (dim {} / {heads} heads) must be even and at least 6", model.dim),
        );
    }
    check.that(model.in_dim == LATENT_CHANNELS, "model.in_dim", || {
        format!("the codec has {LATENT_CHANNELS} latent channels, found {}", model.in_dim)
    });
    check.that(model.out_dim == model.in_dim, "model.out_dim", || {
        format!("the predicted velocity has the channels of the latent: {}, found {}", model.in_dim, model.out_dim)
    });
    let [time, height, width] = model.patch_size;
    // The first latent frame is given and the others are predicted: a patch must not span two of them.
    check.that(time == 1, "model.patch_size", || format!("a patch spans one latent frame, found {time}"));
    check.that(height > 0 && width > 0 && height <= 64 && width <= 64, "model.patch_size", || {
        format!("height and width must be from 1 to 64, found {height} and {width}")
    });
    check.that(model.num_views == recipe.data.views.len(), "model.num_views", || {
        format!("{} is not the number of data.views, {}", model.num_views, recipe.data.views.len())
    });
    check.that(model.action_dim.is_multiple_of(ARM_ACTION_DIM), "model.action_dim", || {
        format!("each arm has {ARM_ACTION_DIM} dims, found {}", model.action_dim)
    });
    check.that(model.proprio_dim.is_multiple_of(ARM_PROPRIO_DIM), "model.proprio_dim", || {
        format!("each arm has {ARM_PROPRIO_DIM} dims, found {}", model.proprio_dim)
    });
    let (action_arms, proprio_arms) = (model.action_dim / ARM_ACTION_DIM, model.proprio_dim / ARM_PROPRIO_DIM);
    check.that(action_arms == proprio_arms, "model.proprio_dim", || {
        format!("room for {proprio_arms} arms, where model.action_dim has room for {action_arms}")
    });
    if model.action_num > 0 {
        check.that(recipe.data.frame_skip.is_multiple_of(model.action_num), "model.action_num", || {
            format!(
                "data.frame_skip {} does not divide into {} actions a frame",
                recipe.data.frame_skip, model.action_num
            )
        });
    }
    check.that(model.freq_dim.is_multiple_of(2), "model.freq_dim", || {
        format!("half cosines, half sines: must be even, found {}", model.freq_dim)
    });
    check.positive("model.eps", model.eps);
}

/// Checked in the arm without the branch too: both arms carry the same fields, and only `enabled` may differ.
fn geometry(check: &mut Check, recipe: &Recipe) {
    let geometry = &recipe.model.geometry;
    let field = "model.geometry.layers";
    check.that(!geometry.layers.is_empty(), field, || "the branch needs at least one block".to_owned());
    for &layer in &geometry.layers {
        check.that(layer < recipe.model.num_layers, field, || {
            format!("block {layer} does not exist: model.num_layers is {}", recipe.model.num_layers)
        });
    }
    check.that(geometry.layers.is_sorted_by(|earlier, later| earlier < later), field, || {
        "must rise, each block once".to_owned()
    });
    check.size("model.geometry.token_dim", geometry.token_dim);
    let [rows, columns] = geometry.grid;
    check.that((1..=4096).contains(&rows) && (1..=4096).contains(&columns), "model.geometry.grid", || {
        format!("rows and columns must be from 1 to 4096, found {rows} and {columns}")
    });
    check.that((1..=64).contains(&geometry.source_views), "model.geometry.source_views", || {
        format!("must be from 1 to 64, found {}", geometry.source_views)
    });
}

fn flow(check: &mut Check, recipe: &Recipe) {
    let flow = &recipe.flow;
    check.positive("flow.time_shifting", flow.time_shifting);
    check.size("flow.train_timesteps", flow.train_timesteps);
    check.probability("flow.clean_action_ratio", flow.clean_action_ratio);
    check.not_negative("flow.action_loss_weight", flow.action_loss_weight);
    check.not_negative("flow.proprio_loss_weight", flow.proprio_loss_weight);
    check.probability("flow.text_dropout", flow.text_dropout);
}

fn train(check: &mut Check, recipe: &Recipe) {
    let train = &recipe.train;
    check.at_least_one("train.steps", train.steps);
    check.size("train.batch_size", train.batch_size);
    check.size("train.accumulate", train.accumulate);
    check.positive("train.lr", train.lr);
    check.not_negative("train.weight_decay", train.weight_decay);
    for beta in train.betas {
        check.that((0.0..1.0).contains(&beta), "train.betas", || {
            format!("must lie between 0 and 1, 1 excluded, found {beta}")
        });
    }
    check.positive("train.adam_eps", train.adam_eps);
    check.positive("train.clip_norm", train.clip_norm);
    check.at_least_one("train.save_every", train.save_every);
    check.at_least_one("train.keep_last", train.keep_last as u64);
}

fn validation(check: &mut Check, recipe: &Recipe) {
    let validation = &recipe.validation;
    check.at_least_one("validation.every", validation.every);
    check.size("validation.clips", validation.clips);
    check.size("validation.sample_steps", validation.sample_steps);
    check.size("validation.action_steps", validation.action_steps);
    check.that(validation.action_steps <= validation.sample_steps, "validation.action_steps", || {
        format!(
            "actions finish first: at most validation.sample_steps {}, found {}",
            validation.sample_steps, validation.action_steps
        )
    });
    check.that(validation.strips <= validation.clips, "validation.strips", || {
        format!("at most validation.clips {}, found {}", validation.clips, validation.strips)
    });
}

/// The first item that stands twice.
pub(super) fn repeated<T: PartialEq>(items: &[T]) -> Option<&T> {
    items
        .iter()
        .enumerate()
        .find(|(index, item)| items.iter().take(*index).any(|other| other == *item))
        .map(|(_, item)| item)
}
