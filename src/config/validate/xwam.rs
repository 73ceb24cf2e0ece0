//! X-WAM's recipe: clips, the robot's columns, the geometry branch.

use super::{ARM_ACTION_DIM, ARM_PROPRIO_DIM, Check, LARGEST_SIZE, repeated};
use crate::config::{RobotLayout, TextConfig, XwamRecipe};

pub(super) fn check(check: &mut Check, recipe: &XwamRecipe) {
    data(check, recipe);
    check.codec(&recipe.codec);
    check.text(&recipe.text);
    let kind = matches!(recipe.text, TextConfig::LatentFiles);
    check.that(!kind, "text.kind", || "only LingBot-VA has text in its latent files".to_owned());
    model(check, recipe);
    geometry(check, recipe);
    flow(check, recipe);
    check.train(&recipe.train);
    validation(check, recipe);
}

fn data(check: &mut Check, recipe: &XwamRecipe) {
    let data = &recipe.data;
    check.dataset(&data.dataset, &data.views, &data.wrist_view, &data.validation_episodes);
    check.that(data.frames >= 5 && data.frames % 4 == 1 && data.frames <= LARGEST_SIZE, "data.frames", || {
        format!(
            "must be 4k + 1 with k of 1 or more (the first frame alone, then groups of four), found {}",
            data.frames
        )
    });
    check.size("data.frame_skip", data.frame_skip);
    check.size("data.clip_stride", data.clip_stride);
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

fn model(check: &mut Check, recipe: &XwamRecipe) {
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
    check.trunk(model.dim, model.num_heads, model.freq_dim, model.eps);
    check.latents(model.in_dim, model.out_dim, model.patch_size);
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
}

/// Checked in the arm without the branch too: both arms carry the same fields, and only `enabled` may differ.
fn geometry(check: &mut Check, recipe: &XwamRecipe) {
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

fn flow(check: &mut Check, recipe: &XwamRecipe) {
    let flow = &recipe.flow;
    check.positive("flow.time_shifting", flow.time_shifting);
    check.size("flow.train_timesteps", flow.train_timesteps);
    check.probability("flow.clean_action_ratio", flow.clean_action_ratio);
    check.not_negative("flow.action_loss_weight", flow.action_loss_weight);
    check.not_negative("flow.proprio_loss_weight", flow.proprio_loss_weight);
    check.probability("flow.text_dropout", flow.text_dropout);
}

fn validation(check: &mut Check, recipe: &XwamRecipe) {
    let validation = &recipe.validation;
    check.sampling(validation.every, validation.clips, validation.sample_steps, validation.strips);
    check.size("validation.action_steps", validation.action_steps);
    check.that(validation.action_steps <= validation.sample_steps, "validation.action_steps", || {
        format!(
            "actions finish first: at most validation.sample_steps {}, found {}",
            validation.sample_steps, validation.action_steps
        )
    });
}
