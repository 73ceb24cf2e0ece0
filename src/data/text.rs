//! Prompts -> text embeddings, [text_len, text_dim] with rows of zeros after the prompt.
//!
//! Two sources behind one type: a fixed pseudo-random vector a word (the demo's handful of prompts), or embeddings
//! computed beforehand by UMT5 and read from disk. Only the real rows are kept: a prompt has some twenty of 512.

use crate::config::TextConfig;
use crate::random::{Draw, Purpose};
use crate::{Error, Result};
use candle_core::{DType, Device};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Embeddings of some prompts.
#[derive(Clone, Debug)]
pub struct TextTable {
    text_len: usize,
    text_dim: usize,
    /// Prompt -> [tokens * text_dim]; the empty prompt is always there.
    rows: BTreeMap<String, Arc<[f32]>>,
}

impl TextTable {
    /// Embeds the prompts and the empty one (for text dropout) for a model of `text_len` rows of `text_dim` numbers.
    ///
    /// # Errors
    /// `prompt_too_long`, `text_missing` (the file, or a prompt in it), `text_mismatch` (width), `text_nonfinite`.
    pub fn new(config: &TextConfig, text_len: usize, text_dim: usize, prompts: &[&str]) -> Result<Self> {
        let mut rows = BTreeMap::new();
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
            let values = match &file {
                None => hashed_words(prompt, text_dim),
                Some((path, tensors)) => {
                    let tensor = tensors.get(prompt).ok_or_else(|| {
                        Error::data("text_missing", format!("no embedding of the prompt \"{prompt}\"")).at(path)
                    })?;
                    if tensor.rank() != 2 || tensor.dim(1)? != text_dim {
                        let what = format!("embedding {:?} where [tokens, {text_dim}] is needed", tensor.dims());
                        return Err(Error::refused("text_mismatch", what).at(path));
                    }
                    real_rows(tensor.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?, text_dim)
                }
            };
            let tokens = values.len() / text_dim;
            if tokens > text_len {
                let what = format!("the prompt \"{prompt}\" has {tokens} tokens, the model takes {text_len}");
                return Err(Error::refused("prompt_too_long", what).in_place("model.text_len"));
            }
            if values.iter().any(|value| !value.is_finite()) {
                return Err(Error::data("text_nonfinite", format!("the embedding of \"{prompt}\" is not finite")));
            }
            rows.insert(prompt.to_owned(), values.into());
        }
        Ok(Self { text_len, text_dim, rows })
    }

    /// A table of the empty prompt alone, for a dataset whose samples bring their own text.
    pub(super) fn of_empty(rows: Vec<f32>, text_len: usize, text_dim: usize) -> Self {
        Self { text_len, text_dim, rows: BTreeMap::from([(String::new(), rows.into())]) }
    }

    /// SHA-256 over all prompts and embeddings: part of a run's identity.
    pub fn hash(&self) -> String {
        let mut hasher = Sha256::new();
        for (prompt, rows) in &self.rows {
            hasher.update(prompt.as_bytes());
            hasher.update([0]);
            let bytes: Vec<u8> = self.padded(rows).iter().flat_map(|value| value.to_le_bytes()).collect();
            hasher.update(bytes);
        }
        super::identity::hex(&hasher.finalize())
    }

    /// Rows of a prompt that are not padding.
    pub fn tokens(&self, prompt: &str) -> usize {
        self.rows.get(prompt).map_or(0, |rows| rows.len() / self.text_dim)
    }

    /// Rows that every prompt is padded to.
    pub fn slots(&self) -> usize {
        self.text_len
    }

    /// The real rows of a prompt, [tokens * text_dim].
    pub fn rows(&self, prompt: &str) -> Result<&Arc<[f32]>> {
        let rows = self.rows.get(prompt);
        rows.ok_or_else(|| Error::crash(format!("prompt \"{prompt}\" was never embedded")))
    }

    /// The embedding of a prompt with its padding, [text_len * text_dim].
    pub fn get(&self, prompt: &str) -> Result<Vec<f32>> {
        Ok(self.padded(self.rows(prompt)?))
    }

    fn padded(&self, rows: &[f32]) -> Vec<f32> {
        let mut padded = rows.to_vec();
        padded.resize(self.text_len * self.text_dim, 0.0);
        padded
    }
}

/// An embedding without the rows of zeros at its end.
pub(super) fn real_rows(mut rows: Vec<f32>, text_dim: usize) -> Vec<f32> {
    let last = rows.iter().rposition(|value| *value != 0.0);
    rows.truncate(last.map_or(0, |last| (last / text_dim.max(1) + 1) * text_dim));
    rows
}

/// One row a word, N(0, 1) by the word alone.
fn hashed_words(prompt: &str, width: usize) -> Vec<f32> {
    prompt
        .split_whitespace()
        .flat_map(|word| Draw::new(0, Purpose::Embedding, 0, &word.to_lowercase()).normals(width))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trailing_rows_of_zeros_are_padding_and_others_are_not() {
        assert_eq!(real_rows(vec![0.0, 0.0, 0.0, 2.0, 0.0, 0.0], 2), [0.0, 0.0, 0.0, 2.0]);
        assert_eq!(real_rows(vec![0.0; 6], 2), [0.0; 0]);
        assert_eq!(real_rows(vec![1.0, 0.0], 2), [1.0, 0.0]);
    }

    #[test]
    fn a_prompt_has_its_real_rows_and_its_padded_ones() {
        let table = TextTable::new(&TextConfig::HashedWords, 4, 3, &["lift it"]).unwrap();
        assert_eq!((table.tokens("lift it"), table.tokens(""), table.slots()), (2, 0, 4));
        let padded = table.get("lift it").unwrap();
        assert_eq!(padded.len(), 12);
        assert_eq!(padded[..6], table.rows("lift it").unwrap()[..]);
        assert_eq!(padded[6..], [0.0; 6]);
        assert!(table.rows("").unwrap().is_empty());
        assert!(table.rows("never").is_err());
    }
}
