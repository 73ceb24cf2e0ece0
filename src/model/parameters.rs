//! Every parameter by name: the list follows from the configuration alone, under the public reference's names.
//!
//! Initial values are drawn from a stream keyed by the parameter's name, so the geometry branch (its own seed) changes
//! nothing else, and the order of construction does not matter. A model family is a list of [`ParameterSpec`]s here;
//! what is done with the list is the same for all of them.

use crate::config::ModelConfig;
use crate::random::{Draw, Purpose};
use candle_core::{DType, Device, Result, Tensor, Var};
use rayon::prelude::*;
use std::collections::BTreeMap;

/// How a parameter starts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Initialiser {
    Zero,
    One,
    /// N(0, std).
    Normal(f64),
    /// Orthonormal columns (rows, if there are fewer rows) over the flattened trailing dimensions: nothing of the input
    /// is lost or hard to get back.
    Orthonormal,
    /// Uniform in +-sqrt(6 / (fan_in + fan_out)): Wan's Linear layers.
    Xavier,
}

/// Name, shape and start of one parameter.
#[derive(Clone, Debug, PartialEq)]
pub struct ParameterSpec {
    pub name: String,
    pub shape: Vec<usize>,
    pub initialiser: Initialiser,
    /// Seed to draw from in place of the run's: a branch that is added must not depend on it.
    pub seed: Option<u64>,
    /// Whether any output depends on it. What does not is kept and saved as it is, and no gradient is expected.
    pub trained: bool,
}

impl ParameterSpec {
    /// Number of scalars.
    pub fn count(&self) -> usize {
        self.shape.iter().product()
    }

    /// The values at step 0 of a run with this seed, row-major.
    pub fn initial_values(&self, seed: u64) -> Vec<f32> {
        let count = self.count();
        let mut draw = Draw::new(self.seed.unwrap_or(seed), Purpose::Initialise, 0, &self.name);
        match self.initialiser {
            Initialiser::Zero => vec![0.0; count],
            Initialiser::One => vec![1.0; count],
            Initialiser::Normal(std) => (0..count).map(|_| (std * draw.normal()) as f32).collect(),
            Initialiser::Orthonormal => orthonormal(self.shape[0], count / self.shape[0], &mut draw),
            Initialiser::Xavier => {
                let fan_out = self.shape[0];
                let bound = (6.0 / (count / fan_out + fan_out) as f64).sqrt();
                (0..count).map(|_| (bound * (2.0 * draw.uniform() - 1.0)) as f32).collect()
            }
        }
    }
}

/// All parameters of the model, in a fixed order: trunk and codecs under X-WAM's names, then `geometry.*` if enabled.
///
/// Initialisation follows Wan2.2 `WanModel.init_weights` and X-WAM `init_new_weights`, but for two things that only
/// matter to a model trained from nothing. Wan starts `head.head.weight` at zero, which would make every prediction of
/// an untrained model exactly zero and the comparison of two arms at step 0 empty; here it is N(0, 0.02). And the patch
/// embedding is orthonormal instead of Xavier: a velocity contains the noise of every latent value, so the head has to
/// undo this map, and a random one that is nearly square is nearly singular.
pub fn parameter_specs(config: &ModelConfig) -> Vec<ParameterSpec> {
    let mut list = SpecList::default();
    let (dim, codec) = (config.dim, Initialiser::Normal(0.02));
    let [_, patch_h, patch_w] = config.patch_size;
    let patch = [dim, config.in_dim, config.patch_size[0], patch_h, patch_w];
    list.add("patch_embedding.weight", &patch, Initialiser::Orthonormal);
    list.add("patch_embedding.bias", &[dim], Initialiser::Zero);
    list.add("view_embedding.weight", &[config.num_views, dim], codec);
    list.mlp("text_embedding", config.text_dim, dim, dim, codec);
    list.mlp("time_embedding", config.freq_dim, dim, dim, codec);
    list.linear("time_projection.1", dim, 6 * dim, Initialiser::Xavier);
    list.mlp("action_encoder", config.action_dim, dim, dim, codec);
    list.mlp("proprio_encoder", config.proprio_dim, dim, dim, codec);
    for layer in 0..config.num_layers {
        let block = format!("blocks.{layer}");
        list.add(&format!("{block}.modulation"), &[1, 6, dim], Initialiser::Normal((dim as f64).sqrt().recip()));
        list.attention(&format!("{block}.self_attn"), ["q", "k", "v", "o"], dim, Initialiser::Xavier);
        list.add(&format!("{block}.norm3.weight"), &[dim], Initialiser::One);
        list.add(&format!("{block}.norm3.bias"), &[dim], Initialiser::Zero);
        list.attention(&format!("{block}.cross_attn"), ["q", "k", "v", "o"], dim, Initialiser::Xavier);
        list.mlp(&format!("{block}.ffn"), dim, config.ffn_dim, dim, Initialiser::Xavier);
    }
    list.add("head.modulation", &[1, 2, dim], Initialiser::Normal((dim as f64).sqrt().recip()));
    list.linear("head.head", dim, config.patch_size.iter().product::<usize>() * config.out_dim, codec);
    list.mlp("action_decoder", dim, dim, config.action_dim, codec);
    list.mlp("proprio_decoder", dim, dim, config.proprio_dim, codec);
    let geometry = &config.geometry;
    if geometry.enabled {
        list.seed = Some(geometry.seed);
        list.add("geometry.adapter.norm.weight", &[geometry.token_dim], Initialiser::One);
        list.add("geometry.adapter.norm.bias", &[geometry.token_dim], Initialiser::Zero);
        list.linear("geometry.adapter.proj", geometry.token_dim, dim, Initialiser::Xavier);
        list.add("geometry.adapter.view_embedding.weight", &[geometry.source_views, dim], codec);
        for layer in &geometry.layers {
            list.attention(&format!("geometry.layers.{layer}"), ["q", "k", "v", "o"], dim, Initialiser::Zero);
        }
    }
    list.specs
}

/// Builds a family's list; `seed` and `trained` hold for what is added next.
#[derive(Debug)]
pub(super) struct SpecList {
    pub specs: Vec<ParameterSpec>,
    pub seed: Option<u64>,
    pub trained: bool,
}

impl Default for SpecList {
    fn default() -> Self {
        Self { specs: Vec::new(), seed: None, trained: true }
    }
}

impl SpecList {
    pub fn add(&mut self, name: &str, shape: &[usize], initialiser: Initialiser) {
        let (name, shape) = (name.to_owned(), shape.to_vec());
        self.specs.push(ParameterSpec { name, shape, initialiser, seed: self.seed, trained: self.trained });
    }

    /// `weight` [outputs, inputs] and `bias` [outputs].
    pub fn linear(&mut self, name: &str, inputs: usize, outputs: usize, weight: Initialiser) {
        self.add(&format!("{name}.weight"), &[outputs, inputs], weight);
        self.add(&format!("{name}.bias"), &[outputs], Initialiser::Zero);
    }

    /// Linear layers `0` and `2`, as a sequence with an activation between them numbers them.
    fn mlp(&mut self, name: &str, inputs: usize, hidden: usize, outputs: usize, weight: Initialiser) {
        self.linear(&format!("{name}.0"), inputs, hidden, weight);
        self.linear(&format!("{name}.2"), hidden, outputs, weight);
    }

    /// `projections` are the names of query, key, value and output.
    pub fn attention(&mut self, name: &str, projections: [&str; 4], dim: usize, output: Initialiser) {
        let [query, key, value, last] = projections;
        for operand in [query, key, value] {
            self.linear(&format!("{name}.{operand}"), dim, dim, Initialiser::Xavier);
        }
        self.linear(&format!("{name}.{last}"), dim, dim, output);
        self.add(&format!("{name}.norm_q.weight"), &[dim], Initialiser::One);
        self.add(&format!("{name}.norm_k.weight"), &[dim], Initialiser::One);
    }
}

/// The variables by name, iterated in name order.
#[derive(Clone, Debug)]
pub struct Parameters {
    variables: BTreeMap<String, Slot>,
}

#[derive(Clone, Debug)]
struct Slot {
    variable: Var,
    trained: bool,
}

impl Parameters {
    /// Draws the initial values; each spec may have a seed of its own.
    pub fn initialise(specs: &[ParameterSpec], seed: u64, device: &Device) -> Result<Self> {
        let slot = |spec: &ParameterSpec| {
            let variable = Var::from_vec(spec.initial_values(seed), spec.shape.as_slice(), device)?;
            Ok((spec.name.clone(), Slot { variable, trained: spec.trained }))
        };
        Ok(Self { variables: specs.par_iter().map(slot).collect::<Result<_>>()? })
    }

    /// Takes given tensors, which must be exactly those that the model asks for; the error names the first that is
    /// missing, unexpected or of another shape.
    pub fn from_tensors(specs: &[ParameterSpec], mut tensors: BTreeMap<String, Tensor>) -> crate::Result<Self> {
        let mut variables = BTreeMap::new();
        for spec in specs {
            let refuse = |what: String| crate::Error::refused("weights_mismatch", what).in_place(&spec.name);
            let Some(tensor) = tensors.remove(&spec.name) else {
                return Err(refuse("the file lacks a parameter of this model".into()));
            };
            if tensor.dims() != spec.shape {
                return Err(refuse(format!("shape {:?} where the model has {:?}", tensor.dims(), spec.shape)));
            }
            let slot = Slot { variable: Var::from_tensor(&tensor)?, trained: spec.trained };
            variables.insert(spec.name.clone(), slot);
        }
        match tensors.keys().next() {
            None => Ok(Self { variables }),
            Some(name) => Err(crate::Error::refused("weights_mismatch", "the file has a tensor that this model lacks")
                .in_place(name)
                .hint(format!("{} such tensors in all", tensors.len()))),
        }
    }

    /// The variable of this name; absence is a programming error, reported as one.
    pub fn get(&self, name: &str) -> Result<&Tensor> {
        match self.variables.get(name) {
            Some(slot) => Ok(slot.variable.as_tensor()),
            None => candle_core::bail!("no parameter named {name}"),
        }
    }

    /// (name, variable) in name order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Var)> {
        self.variables.iter().map(|(name, slot)| (name.as_str(), &slot.variable))
    }

    /// [`iter`](Self::iter) over those that gradient reaches.
    pub fn trained(&self) -> impl Iterator<Item = (&str, &Var)> {
        self.variables.iter().filter(|(_, slot)| slot.trained).map(|(name, slot)| (name.as_str(), &slot.variable))
    }

    /// Takes variables as they are: (variable, trained) by name.
    pub fn from_variables(variables: BTreeMap<String, (Var, bool)>) -> Self {
        let slots = variables.into_iter().map(|(name, (variable, trained))| (name, Slot { variable, trained }));
        Self { variables: slots.collect() }
    }

    /// (name, shape, trained) in name order.
    pub fn shapes(&self) -> Vec<(String, Vec<usize>, bool)> {
        let shape = |(name, slot): (&String, &Slot)| (name.clone(), slot.variable.dims().to_vec(), slot.trained);
        self.variables.iter().map(shape).collect()
    }

    /// Number of scalars.
    pub fn count(&self) -> usize {
        self.iter().map(|(_, variable)| variable.elem_count()).sum()
    }

    /// All parameters in another dtype (the training regime is bf16, tests run the model in f64).
    pub fn to_dtype(&self, dtype: DType) -> Result<Self> {
        let variables = self
            .variables
            .iter()
            .map(|(name, slot)| {
                let variable = Var::from_tensor(&slot.variable.to_dtype(dtype)?)?;
                Ok((name.clone(), Slot { variable, trained: slot.trained }))
            })
            .collect::<Result<_>>()?;
        Ok(Self { variables })
    }
}

/// Random [rows, columns] with orthonormal columns, or rows if there are fewer of them (Gram-Schmidt in f64, twice).
fn orthonormal(rows: usize, columns: usize, draw: &mut Draw) -> Vec<f32> {
    let (length, number) = (rows.max(columns), rows.min(columns));
    let mut vectors: Vec<Vec<f64>> = Vec::with_capacity(number);
    for _ in 0..number {
        let mut vector: Vec<f64> = (0..length).map(|_| draw.normal()).collect();
        for _ in 0..2 {
            for earlier in &vectors {
                let along: f64 = vector.iter().zip(earlier).map(|(a, b)| a * b).sum();
                vector.iter_mut().zip(earlier).for_each(|(value, earlier)| *value -= along * earlier);
            }
        }
        let norm = vector.iter().map(|value| value * value).sum::<f64>().sqrt();
        vector.iter_mut().for_each(|value| *value /= norm);
        vectors.push(vector);
    }
    let at = |row: usize, column: usize| if rows >= columns { vectors[column][row] } else { vectors[row][column] };
    (0..rows * columns).map(|index| at(index / columns, index % columns) as f32).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orthonormal_columns_are() {
        for (rows, columns) in [(7, 4), (4, 7), (5, 5)] {
            let matrix = orthonormal(rows, columns, &mut Draw::new(1, Purpose::Initialise, 0, ""));
            let at =
                |i: usize, k: usize| if rows >= columns { matrix[k * columns + i] } else { matrix[i * columns + k] };
            for (a, b) in (0..rows.min(columns)).flat_map(|a| (0..=a).map(move |b| (a, b))) {
                let product: f32 = (0..rows.max(columns)).map(|k| at(a, k) * at(b, k)).sum();
                assert!(
                    (product - f32::from(u8::from(a == b))).abs() < 1e-6,
                    "{rows} x {columns}: {a}, {b}: {product}"
                );
            }
        }
    }
}
