//! Parameters of a model by part, from its shapes alone: what `check` prints before any weight exists.

use super::{ParameterSpec, lingbot_parameter_specs, parameter_specs};
use crate::config::{LingbotModelConfig, ModelConfig, Recipe};
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

/// Counts the parameters of a recipe that [`validate`](crate::config::validate()) has no objection to.
pub fn count(recipe: &Recipe) -> ParameterCount {
    match recipe {
        Recipe::Xwam(recipe) => count_xwam(&recipe.model),
        Recipe::Lingbot(recipe) => count_lingbot(&recipe.model),
    }
}

/// Every parameter of a recipe's model.
pub fn specs(recipe: &Recipe) -> Vec<ParameterSpec> {
    match recipe {
        Recipe::Xwam(recipe) => parameter_specs(&recipe.model),
        Recipe::Lingbot(recipe) => lingbot_parameter_specs(&recipe.model),
    }
}

/// Sums over parameters whose names start alike.
struct Counter(Vec<ParameterSpec>);

impl Counter {
    fn of(&self, prefixes: &[&str]) -> u64 {
        let belongs = |name: &str| prefixes.iter().any(|prefix| name.starts_with(prefix));
        self.0.iter().filter(|spec| belongs(&spec.name)).map(|spec| spec.count() as u64).sum()
    }

    fn part(&self, name: &'static str, detail: &str, prefixes: &[&str]) -> Part {
        Part { name, detail: detail.to_owned(), parameters: self.of(prefixes) }
    }

    fn repeated(&self, name: &'static str, prefix: &str, times: usize) -> Part {
        let parameters = self.of(&[prefix]);
        let detail = format!("{times} x {}", thousands(parameters / times.max(1) as u64));
        Part { name, detail, parameters }
    }
}

fn count_lingbot(model: &LingbotModelConfig) -> ParameterCount {
    let counter = Counter(lingbot_parameter_specs(model));
    let unused = "condition_embedder_action.text_embedder.";
    let base = vec![
        counter.part("patch embedding", "latent patches to tokens", &["patch_embedding_mlp."]),
        counter.part("text embedding", "prompt to context", &["condition_embedder.text_embedder."]),
        counter.part("video time", "timestep to modulation", &["condition_embedder.time_"]),
        counter.part("action time", "timestep to modulation", &["condition_embedder_action.time_"]),
        counter.part("unused text", "in every checkpoint, read by nothing", &[unused]),
        counter.part("action codec", "rows to tokens and back", &["action_embedder.", "action_proj_out."]),
        counter.repeated("blocks", "blocks.", model.num_layers),
        counter.part("video head", "tokens to velocities", &["proj_out.", "scale_shift_table"]),
    ];
    ParameterCount { base, geometry: Vec::new() }
}

fn count_xwam(model: &ModelConfig) -> ParameterCount {
    let counter = Counter(parameter_specs(model));
    let part = |name, detail: &str, prefixes: &[&str]| counter.part(name, detail, prefixes);
    let repeated = |name, prefix: &str, times| counter.repeated(name, prefix, times);
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
