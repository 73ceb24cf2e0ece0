//! Parameters of a model from its shapes alone: what `check` prints before any weight exists.
//!
//! The names and shapes are those of the public X-WAM / Wan2.2 checkpoints (and of this program's), so the list also
//! serves to compare a checkpoint file with a recipe.

use super::types::{GeometryConfig, ModelConfig};
use serde::Serialize;

/// One part of the model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Part {
    pub name: &'static str,
    /// `30 x 163,656,704`, or what the part is; for people.
    pub detail: String,
    pub parameters: u64,
}

/// Parameters by part.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ParameterCount {
    /// The trunk with its embedders and heads.
    pub base: Vec<Part>,
    /// The geometry branch; empty if it is switched off.
    pub geometry: Vec<Part>,
}

impl ParameterCount {
    /// Without the geometry branch: the number that checkpoints of both arms share.
    pub fn base_total(&self) -> u64 {
        self.base.iter().map(|part| part.parameters).sum()
    }

    /// Of the geometry branch; 0 if it is switched off.
    pub fn geometry_total(&self) -> u64 {
        self.geometry.iter().map(|part| part.parameters).sum()
    }

    /// All trained parameters.
    pub fn total(&self) -> u64 {
        self.base_total() + self.geometry_total()
    }
}

/// Counts the parameters of a model that [`validate`](super::validate()) has no objection to.
pub fn count(model: &ModelConfig) -> ParameterCount {
    let shapes = parameter_shapes(model);
    let of = |prefixes: &[&str]| -> u64 {
        let belongs = |name: &str| prefixes.iter().any(|prefix| name.starts_with(prefix));
        shapes.iter().filter(|(name, _)| belongs(name)).map(|(_, shape)| elements(shape)).sum()
    };
    let part =
        |name, detail: &str, prefixes: &[&str]| Part { name, detail: detail.to_owned(), parameters: of(prefixes) };
    let repeated = |name, prefix: &str, times: usize| {
        let parameters = of(&[prefix]);
        let detail = format!("{times} x {}", thousands(parameters / times.max(1) as u64));
        Part { name, detail, parameters }
    };
    let base = vec![
        part("patch embedding", "latent patches to tokens", &["patch_embedding."]),
        part("view embedding", "one vector a view", &["view_embedding."]),
        part("text embedding", "prompt to context", &["text_embedding."]),
        part("time embedding", "timestep to modulation", &["time_embedding.", "time_projection."]),
        part("action codec", "encoder and decoder", &["action_encoder.", "action_decoder."]),
        part("proprio codec", "encoder and decoder", &["proprio_encoder.", "proprio_decoder."]),
        repeated("blocks", "blocks.", model.num_layers),
        part("video head", "tokens to velocities", &["head."]),
    ];
    let geometry = if model.geometry.enabled {
        vec![
            part("token adapter", "norm, projection, source views", &["geometry.adapter."]),
            repeated("insertion points", "geometry.points.", model.geometry.layers.len()),
        ]
    } else {
        Vec::new()
    };
    ParameterCount { base, geometry }
}

/// Name and shape of each parameter, Linear weights as [out, in]; the geometry branch's only if it is enabled.
pub fn parameter_shapes(model: &ModelConfig) -> Vec<(String, Vec<usize>)> {
    let mut shapes = Shapes::default();
    let ModelConfig { dim, ffn_dim, .. } = *model;
    let [patch_time, patch_height, patch_width] = model.patch_size;
    let patch = patch_time * patch_height * patch_width;
    shapes.add("patch_embedding.weight", &[dim, model.in_dim, patch_time, patch_height, patch_width]);
    shapes.add("patch_embedding.bias", &[dim]);
    shapes.add("view_embedding.weight", &[model.num_views, dim]);
    shapes.two_linears("text_embedding", model.text_dim, dim, dim);
    shapes.two_linears("time_embedding", model.freq_dim, dim, dim);
    shapes.linear("time_projection.1", dim, 6 * dim);
    for (name, width) in [("action", model.action_dim), ("proprio", model.proprio_dim)] {
        shapes.two_linears(&format!("{name}_encoder"), width, dim, dim);
        shapes.two_linears(&format!("{name}_decoder"), dim, dim, width);
    }
    for index in 0..model.num_layers {
        let block = format!("blocks.{index}");
        shapes.add(format!("{block}.modulation"), &[1, 6, dim]);
        shapes.attention(&format!("{block}.self_attn"), dim);
        shapes.attention(&format!("{block}.cross_attn"), dim);
        shapes.add(format!("{block}.norm3.weight"), &[dim]);
        shapes.add(format!("{block}.norm3.bias"), &[dim]);
        shapes.two_linears(&format!("{block}.ffn"), dim, ffn_dim, dim);
    }
    shapes.add("head.modulation", &[1, 2, dim]);
    shapes.linear("head.head", dim, patch * model.out_dim);
    if model.geometry.enabled {
        geometry_shapes(&mut shapes, &model.geometry, dim);
    }
    shapes.list
}

/// The branch: LayerNorm over a token, projection to the trunk's width, a vector a source view; at each insertion
/// point q, k, v, o and the RMSNorm of q and k. The norm of the trunk's tokens has no weights.
fn geometry_shapes(shapes: &mut Shapes, geometry: &GeometryConfig, dim: usize) {
    shapes.add("geometry.adapter.norm.weight", &[geometry.token_dim]);
    shapes.add("geometry.adapter.norm.bias", &[geometry.token_dim]);
    shapes.linear("geometry.adapter.projection", geometry.token_dim, dim);
    shapes.add("geometry.adapter.source_embedding.weight", &[geometry.source_views, dim]);
    for layer in &geometry.layers {
        shapes.attention(&format!("geometry.points.{layer}"), dim);
    }
}

#[derive(Default)]
struct Shapes {
    list: Vec<(String, Vec<usize>)>,
}

impl Shapes {
    fn add(&mut self, name: impl Into<String>, shape: &[usize]) {
        self.list.push((name.into(), shape.to_vec()));
    }

    fn linear(&mut self, name: &str, input: usize, output: usize) {
        self.add(format!("{name}.weight"), &[output, input]);
        self.add(format!("{name}.bias"), &[output]);
    }

    /// Linear, activation, Linear, numbered as in a `Sequential`.
    fn two_linears(&mut self, name: &str, input: usize, hidden: usize, output: usize) {
        self.linear(&format!("{name}.0"), input, hidden);
        self.linear(&format!("{name}.2"), hidden, output);
    }

    fn attention(&mut self, name: &str, dim: usize) {
        for projection in ["q", "k", "v", "o"] {
            self.linear(&format!("{name}.{projection}"), dim, dim);
        }
        self.add(format!("{name}.norm_q.weight"), &[dim]);
        self.add(format!("{name}.norm_k.weight"), &[dim]);
    }
}

fn elements(shape: &[usize]) -> u64 {
    shape.iter().map(|&size| size as u64).product()
}

/// `5037748446` -> `5,037,748,446`.
pub(crate) fn thousands(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}
