//! LingBot-VA's parameters, under the names and in the shapes of its published checkpoints (diffusers' style).
//!
//! One set of blocks serves both streams; each stream has its embedder of time, its projection in and its projection
//! out. The published layout has a text embedder for each stream as well, but both streams read the video's.

use super::parameters::{Initialiser, ParameterSpec, SpecList};
use crate::config::LingbotModelConfig;

/// All parameters in a fixed order: 29 outside the blocks, 27 in each.
///
/// Initialisation follows the same choices as [`parameter_specs`](super::parameter_specs): Wan2.2's, but for heads that
/// are not zero and a patch embedding with orthonormal columns. `condition_embedder_action.text_embedder.*` is in every
/// published checkpoint and used by nothing, so it is not trained.
pub fn lingbot_parameter_specs(config: &LingbotModelConfig) -> Vec<ParameterSpec> {
    let mut list = SpecList::default();
    let (dim, codec) = (config.dim, Initialiser::Normal(0.02));
    let table = Initialiser::Normal((dim as f64).sqrt().recip());
    let cells = config.patch_size.iter().product::<usize>();
    list.add("patch_embedding_mlp.weight", &[dim, config.in_dim * cells], Initialiser::Orthonormal);
    list.add("patch_embedding_mlp.bias", &[dim], Initialiser::Zero);
    list.linear("action_embedder", config.action_dim, dim, codec);
    for embedder in ["condition_embedder", "condition_embedder_action"] {
        list.linear(&format!("{embedder}.time_embedder.linear_1"), config.freq_dim, dim, codec);
        list.linear(&format!("{embedder}.time_embedder.linear_2"), dim, dim, codec);
        list.linear(&format!("{embedder}.time_proj"), dim, 6 * dim, Initialiser::Xavier);
        list.trained = embedder == "condition_embedder";
        list.linear(&format!("{embedder}.text_embedder.linear_1"), config.text_dim, dim, codec);
        list.linear(&format!("{embedder}.text_embedder.linear_2"), dim, dim, codec);
        list.trained = true;
    }
    for layer in 0..config.num_layers {
        let block = format!("blocks.{layer}");
        list.add(&format!("{block}.scale_shift_table"), &[1, 6, dim], table);
        for attention in ["attn1", "attn2"] {
            let projections = ["to_q", "to_k", "to_v", "to_out.0"];
            list.attention(&format!("{block}.{attention}"), projections, dim, Initialiser::Xavier);
        }
        list.add(&format!("{block}.norm2.weight"), &[dim], Initialiser::One);
        list.add(&format!("{block}.norm2.bias"), &[dim], Initialiser::Zero);
        list.linear(&format!("{block}.ffn.net.0.proj"), dim, config.ffn_dim, Initialiser::Xavier);
        list.linear(&format!("{block}.ffn.net.2"), config.ffn_dim, dim, Initialiser::Xavier);
    }
    list.linear("proj_out", dim, cells * config.out_dim, codec);
    list.linear("action_proj_out", dim, config.action_dim, codec);
    list.add("scale_shift_table", &[1, 2, dim], table);
    list.specs
}
