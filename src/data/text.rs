//! Prompts -> text embeddings [text_len, text_dim], zero rows after the prompt.
//!
//! Two sources behind one type: a fixed pseudo-random vector a word (the demo's handful of prompts), or embeddings
//! computed beforehand by UMT5 and read from disk.

use crate::config::{ModelConfig, TextConfig};
use crate::random::{Draw, Purpose};
use crate::{Error, Result};
use candle_core::{DType, Device};
use std::collections::BTreeMap;

/// Embeddings of all prompts of a dataset.
#[derive(Clone, Debug)]
pub struct TextTable {
    /// Prompt -> [text_len * text_dim]; the empty prompt is always there.
    rows: BTreeMap<String, Vec<f32>>,
    /// Prompt -> rows that are not padding.
    lengths: BTreeMap<String, usize>,
}

impl TextTable {
    /// Embeds the prompts and the empty one (for text dropout).
    ///
    /// # Errors
    /// `prompt_too_long`, `text_missing` (the file, or a prompt in it), `text_mismatch` (width).
    pub fn new(config: &TextConfig, model: &ModelConfig, prompts: &[&str]) -> Result<Self> {
        let (mut rows, mut lengths) = (BTreeMap::new(), BTreeMap::new());
        let file = match config {
            TextConfig::HashedWords => None,
            TextConfig::LatentFiles => {
                return Err(Error::refused("text_mismatch", "the text of this dataset is not in its latent files")
                    .in_place("text.kind"));
            }
            TextConfig::Embeddings { path } => Some((
                path,
                candle_core::safetensors::load(path, &Device::Cpu).map_err(|error| {
                    Error::data("text_missing", format!("cannot read the text embeddings: {error}")).at(path)
                })?,
            )),
        };
        for prompt in prompts.iter().copied().chain([""]) {
            let mut values = match &file {
                None => hashed_words(prompt, model.text_dim),
                Some((path, tensors)) => {
                    let tensor = tensors.get(prompt).ok_or_else(|| {
                        Error::data("text_missing", format!("no embedding of the prompt \"{prompt}\"")).at(path)
                    })?;
                    if tensor.rank() != 2 || tensor.dim(1)? != model.text_dim {
                        let what =
                            format!("embedding {:?} where [tokens, {}] is needed", tensor.dims(), model.text_dim);
                        return Err(Error::refused("text_mismatch", what).at(path));
                    }
                    tensor.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?
                }
            };
            let tokens = values.len() / model.text_dim;
            if tokens > model.text_len {
                let what = format!("the prompt \"{prompt}\" has {tokens} tokens, the model takes {}", model.text_len);
                return Err(Error::refused("prompt_too_long", what).in_place("model.text_len"));
            }
            if values.iter().any(|value| !value.is_finite()) {
                return Err(Error::data("text_nonfinite", format!("the embedding of \"{prompt}\" is not finite")));
            }
            values.resize(model.text_len * model.text_dim, 0.0);
            lengths.insert(prompt.to_owned(), tokens);
            rows.insert(prompt.to_owned(), values);
        }
        Ok(Self { rows, lengths })
    }

    /// SHA-256 over all prompts and embeddings: part of a run's identity.
    pub fn hash(&self) -> String {
        let mut bytes = Vec::new();
        for (prompt, row) in &self.rows {
            bytes.extend_from_slice(prompt.as_bytes());
            bytes.push(0);
            bytes.extend(row.iter().flat_map(|value| value.to_le_bytes()));
        }
        super::sha256_hex(&bytes)
    }

    /// Rows of a prompt that are not padding.
    pub fn tokens(&self, prompt: &str) -> usize {
        self.lengths.get(prompt).copied().unwrap_or(0)
    }

    /// The embedding of a prompt, [text_len * text_dim].
    pub fn get(&self, prompt: &str) -> Result<&[f32]> {
        let row = self.rows.get(prompt);
        row.map(Vec::as_slice).ok_or_else(|| Error::crash(format!("prompt \"{prompt}\" was never embedded")))
    }
}

/// One row a word, N(0, 1) by the word alone.
fn hashed_words(prompt: &str, width: usize) -> Vec<f32> {
    prompt
        .split_whitespace()
        .flat_map(|word| Draw::new(0, Purpose::Embedding, 0, &word.to_lowercase()).normals(width))
        .collect()
}
