//! Parameters of a model by part, from its shapes alone: what `check` prints before any weight exists.

use super::parameter_specs;
use crate::config::ModelConfig;
use crate::words::thousands;
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

/// Counts the parameters of a model that [`validate`](crate::config::validate()) has no objection to.
pub fn count(model: &ModelConfig) -> ParameterCount {
    let specs = parameter_specs(model);
    let of = |prefixes: &[&str]| -> u64 {
        let belongs = |name: &str| prefixes.iter().any(|prefix| name.starts_with(prefix));
        specs.iter().filter(|spec| belongs(&spec.name)).map(|spec| spec.count() as u64).sum()
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
            repeated("insertion points", "geometry.layers.", model.geometry.layers.len()),
        ]
    } else {
        Vec::new()
    };
    ParameterCount { base, geometry }
}
