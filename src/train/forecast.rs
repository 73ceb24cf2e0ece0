//! What a run will take, told before anything is built: memory of the host by part and of a GPU, disk, and the time to its
//! first checkpoint.

use super::saver::kept_at_the_end;
use crate::config::Recipe;
use crate::model::{ParameterSpec, specs};
use candle_core::DType;
use serde::Serialize;

/// Host memory of a worker, in bytes by part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct MemoryForecast {
    /// As forward and backward see them.
    pub parameters: u64,
    /// Sums of a step in f32, and those of a micro-step in the parameters' format.
    pub gradients: u64,
    /// Weights as the optimizer keeps them, f32.
    pub master: u64,
    pub moments: u64,
    /// What a micro-step keeps for its backward pass; absent while the data are not here to tell the size of a batch.
    pub activations: Option<u64>,
    /// The copy that a checkpoint is written from.
    pub snapshot: u64,
}

impl MemoryForecast {
    pub fn total(&self) -> u64 {
        let Self { parameters, gradients, master, moments, activations, snapshot } = *self;
        parameters + gradients + master + moments + activations.unwrap_or(0) + snapshot
    }
}

/// The longest sequences of one micro-step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Sequences of a micro-step, tokens of each, and text rows beside each.
    pub sequences: u64,
    pub tokens: u64,
    pub text_rows: u64,
    /// Of the tokens of a sequence, those that heads read.
    pub read: u64,
    /// Modulation rows of a sequence.
    pub rows: u64,
    /// Whether every step is one micro-step.
    pub alone: bool,
}

/// What a worker takes of a GPU, in bytes.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct GpuForecast {
    /// Of all the GPU's memory.
    pub total: u64,
    /// Parameters, gradients, masters and moments.
    pub state: u64,
    /// With every block run forward again in the backward pass, and with nothing computed again.
    pub least: u64,
    pub most: u64,
    /// The peak as it will be, and what is kept for the backward pass; absent if the batch does not fit.
    pub peak: Option<u64>,
    pub kept: Option<String>,
}

/// What a worker of this recipe takes of a GPU of `total` bytes; `None` if this program was built without GPUs.
///
/// # Errors
/// If the recipe's parameters cannot be laid out.
pub fn gpu(recipe: &Recipe, shape: Shape, total: u64) -> crate::Result<Option<GpuForecast>> {
    #[cfg(not(feature = "cuda"))]
    {
        let _ = (recipe, shape, total);
        Ok(None)
    }
    #[cfg(feature = "cuda")]
    {
        use crate::model::{LingbotModel, XwamModel};
        let trunk = match recipe {
            Recipe::Xwam(recipe) => XwamModel::shape(&recipe.model),
            Recipe::Lingbot(recipe) => LingbotModel::shape(&recipe.model),
        };
        let tensors: Vec<(String, usize, bool)> =
            specs(recipe).iter().map(|spec| (spec.name.clone(), spec.count(), spec.trained)).collect();
        let whole = |part: u64| (shape.sequences * part) as usize;
        let size = crate::cuda::BatchSize {
            tokens: whole(shape.tokens),
            read: whole(shape.read),
            text: whole(shape.text_rows),
            rows: whole(shape.rows),
        };
        let half = recipe.precision().params.dtype() == DType::BF16;
        crate::cuda::forecast(trunk, &tensors, half, (&size, shape.alone), total).map(Some)
    }
}

/// Bytes that a worker of this recipe takes beside the program itself.
pub fn memory(recipe: &Recipe, shape: Option<Shape>) -> MemoryForecast {
    let specs = specs(recipe);
    let count = |trained_only: bool| -> u64 {
        specs.iter().filter(|spec| spec.trained || !trained_only).map(|spec| spec.count() as u64).sum()
    };
    let format = recipe.precision().params.dtype().size_in_bytes() as u64;
    let (all, trained) = (count(false), count(true));
    MemoryForecast {
        parameters: all * format,
        gradients: trained * (4 + format),
        master: trained * 4,
        moments: trained * 8,
        activations: shape.map(|shape| activations(recipe, shape)),
        snapshot: checkpoint_bytes(recipe),
    }
}

/// Values that autograd keeps of a block, counted from its forward pass (`model/block.rs`): 20 of the width and 2 of the
/// feed-forward's a token, in the f32 of the residual stream. Attention without a plan keeps 7 more of the width and, twice, a
/// score for each head and pair. Recomputation keeps each block's input and one block's insides.
fn activations(recipe: &Recipe, shape: Shape) -> u64 {
    let Shape { sequences, tokens, text_rows, .. } = shape;
    let (width, ffn, heads, layers, dense) = match recipe {
        Recipe::Xwam(recipe) => {
            let model = &recipe.model;
            (model.dim, model.ffn_dim, model.num_heads, model.num_layers, true)
        }
        Recipe::Lingbot(recipe) => {
            let model = &recipe.model;
            (model.dim, model.ffn_dim, model.num_heads, model.num_layers, false)
        }
    };
    let [width, ffn, heads, layers] = [width, ffn, heads, layers].map(|size| size as u64);
    let scores = if dense { 7 * width + 2 * heads * (tokens + text_rows) } else { 0 };
    let block = sequences * (tokens * (20 * width + 2 * ffn + scores) + text_rows * 3 * width);
    let inputs = sequences * tokens * width * layers;
    4 * if recipe.train().recompute { inputs + block } else { layers * block }
}

/// Bytes of a checkpoint of this recipe, known before there is one; at most some KB more than it will have.
pub fn checkpoint_bytes(recipe: &Recipe) -> u64 {
    checkpoint_bytes_of(&specs(recipe), recipe.precision().params.dtype())
}

/// The same of parameters kept as `dtype`.
pub(super) fn checkpoint_bytes_of(specs: &[ParameterSpec], dtype: DType) -> u64 {
    // An entry of a header: name, dtype, shape and offsets, about 100 bytes beside the name.
    let header = |spec: &ParameterSpec| spec.name.len() + 128;
    let weights: usize = specs.iter().map(|spec| spec.count() * dtype.size_in_bytes() + header(spec)).sum();
    // Two moments, and the masters of weights that are no fp32.
    let parts = if dtype == DType::F32 { 2 } else { 3 };
    let moments = |spec: &ParameterSpec| parts * (spec.count() * DType::F32.size_in_bytes() + header(spec));
    let moments: usize = specs.iter().filter(|spec| spec.trained).map(moments).sum();
    (weights + moments + 4096) as u64
}

/// Bytes on the disk at the fullest moment of a run: all checkpoints that it keeps, and one that is being written.
pub fn disk_bytes(recipe: &Recipe) -> u64 {
    checkpoint_bytes(recipe).saturating_mul(kept_at_the_end(recipe.train()).saturating_add(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recipe(name: &str) -> Recipe {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("configs").join(name);
        serde_yaml::from_str(&std::fs::read_to_string(path).expect("read")).expect("a recipe")
    }

    #[test]
    fn the_5b_recipe_is_forecast_by_its_published_count() {
        let recipe = recipe("xwam_5b.yaml");
        let count = 5_037_748_446;
        let forecast = memory(&recipe, None);
        assert_eq!((forecast.parameters, forecast.master), (2 * count, 4 * count));
        assert_eq!((forecast.gradients, forecast.moments, forecast.activations), (6 * count, 8 * count, None));
        // bf16 weights, f32 masters and moments: 14 bytes a parameter.
        let checkpoint = checkpoint_bytes(&recipe);
        assert!((14 * count..14 * count + 2_000_000).contains(&checkpoint), "{checkpoint}");
        // Two kept, one being written.
        assert_eq!(disk_bytes(&recipe), 3 * checkpoint);
        assert_eq!(forecast.total(), 20 * count + checkpoint);
    }

    #[test]
    fn recomputation_keeps_one_block_and_the_inputs_of_all() {
        let Recipe::Xwam(mut demo) = recipe("xwam_demo.yaml") else { panic!("X-WAM") };
        (demo.model.dim, demo.model.ffn_dim, demo.model.num_heads, demo.model.num_layers) = (10, 20, 2, 3);
        let shape = Shape { sequences: 2, tokens: 7, text_rows: 5, read: 7, rows: 1, alone: true };
        // 20 x 10 + 2 x 20 + 7 x 10 + 2 x 2 x (7 + 5) values a token, 3 x 10 a text row.
        let block = 2 * (7 * 358 + 5 * 30);
        demo.train.recompute = false;
        assert_eq!(activations(&Recipe::Xwam(demo.clone()), shape), 4 * 3 * block);
        demo.train.recompute = true;
        assert_eq!(activations(&Recipe::Xwam(demo), shape), 4 * (2 * 7 * 10 * 3 + block));
    }
}
