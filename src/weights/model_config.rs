//! `config.json` beside published weights: does it describe the recipe's model, and the one that is written.
//!
//! Most of it shows in the shapes of the tensors, but not the number of heads, and eps: weights that fit in every shape
//! could still be another model.

use crate::config::LingbotModelConfig;
use crate::{Error, Result};
use serde_json::{Value, json};
use std::io::ErrorKind;
use std::path::Path;

/// Name of the file.
pub(super) const CONFIG: &str = "config.json";

/// diffusers' version under which the reference writes this file.
const DIFFUSERS: &str = "0.36.0";

/// A key of the file and its value for the recipe's model.
pub(super) type Field = (&'static str, Value);

/// The fields of LingBot-VA's file that decide what the model computes, in its order.
///
/// `attn_mode` names the kernel that the reference would use, `rope_max_seq_len` and `pos_embed_seq_len` are stored and
/// used by nothing: they are not among them.
pub(super) fn lingbot_fields(config: &LingbotModelConfig) -> Vec<Field> {
    vec![
        ("patch_size", json!(config.patch_size)),
        ("num_attention_heads", json!(config.num_heads)),
        ("attention_head_dim", json!(config.dim.checked_div(config.num_heads))),
        ("in_channels", json!(config.in_dim)),
        ("out_channels", json!(config.out_dim)),
        ("action_dim", json!(config.action_dim)),
        ("text_dim", json!(config.text_dim)),
        ("freq_dim", json!(config.freq_dim)),
        ("ffn_dim", json!(config.ffn_dim)),
        ("num_layers", json!(config.num_layers)),
        ("cross_attn_norm", json!(true)),
        ("eps", json!(config.eps)),
    ]
}

/// The same of Wan2.2's file.
pub(super) fn wan_fields(config: &LingbotModelConfig) -> Vec<Field> {
    vec![
        ("dim", json!(config.dim)),
        ("ffn_dim", json!(config.ffn_dim)),
        ("freq_dim", json!(config.freq_dim)),
        ("in_dim", json!(config.in_dim)),
        ("out_dim", json!(config.out_dim)),
        ("num_heads", json!(config.num_heads)),
        ("num_layers", json!(config.num_layers)),
        ("eps", json!(config.eps)),
    ]
}

/// The file's content, or nothing if there is none.
pub(super) fn read(folder: &Path) -> Result<Option<Value>> {
    let path = folder.join(CONFIG);
    let broken = |why: &dyn std::fmt::Display| {
        Error::data("config_broken", format!("the model's configuration cannot be read: {why}")).at(&path)
    };
    match std::fs::read(&path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(broken(&error)),
        Ok(text) => {
            let value: Value = serde_json::from_slice(&text).map_err(|error| broken(&error))?;
            if value.is_object() { Ok(Some(value)) } else { Err(broken(&"it is no JSON object")) }
        }
    }
}

/// `num_layers is 30 in the file, 2 in the recipe`, for each field that the file states otherwise.
pub(super) fn differences(file: &Value, fields: &[Field], ours: &str) -> Vec<String> {
    let differs = |(key, expected): &Field| {
        let stated = file.get(*key)?;
        // 1 and 1.0 are one number.
        let same = stated == expected || (stated.is_number() && stated.as_f64() == expected.as_f64());
        (!same).then(|| format!("{key} is {stated} in the file, {expected} in {ours}"))
    };
    fields.iter().filter_map(differs).collect()
}

/// Refuses weights whose file, if there is one, describes another model.
pub(super) fn check(folder: &Path, fields: &[Field]) -> Result<()> {
    let Some(file) = read(folder)? else { return Ok(()) };
    match differences(&file, fields, "the recipe") {
        differences if differences.is_empty() => Ok(()),
        differences => Err(Error::refused("config_differs", differences.join("; ")).at(folder.join(CONFIG))),
    }
}

/// The file for weights of this model, with sorted keys, as diffusers writes it.
pub(super) fn to_text(config: &LingbotModelConfig) -> Result<String> {
    let mut fields = lingbot_fields(config);
    fields.extend([
        ("_class_name", json!("WanTransformer3DModel")),
        ("_diffusers_version", json!(DIFFUSERS)),
        ("attn_mode", json!("torch")),
        ("pos_embed_seq_len", Value::Null),
        ("rope_max_seq_len", json!(1024)),
    ]);
    fields.sort_by_key(|(key, _)| *key);
    let document: serde_json::Map<String, Value> =
        fields.into_iter().map(|(key, value)| (key.to_owned(), value)).collect();
    let text = serde_json::to_string_pretty(&document);
    text.map(|text| text + "\n").map_err(|error| Error::crash(format!("{CONFIG}: {error}")))
}
