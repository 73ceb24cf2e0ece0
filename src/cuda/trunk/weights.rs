//! The tensors of a block by name, in parameters and in gradients alike.

use crate::Result;
use crate::cuda::flat::{FlatLayout, Span};
use crate::cuda::launch::{Element, Slice};
use crate::model::BlockNames;

/// A Linear layer, or several that read the same input and lie together.
#[derive(Clone, Copy, Debug)]
pub(super) struct Linear<E> {
    /// [outputs, inputs]
    pub weight: Slice<E>,
    /// [outputs]
    pub bias: Slice<E>,
    pub inputs: usize,
    pub outputs: usize,
}

/// One block's tensors: parameters or their gradients.
#[derive(Clone, Copy, Debug)]
pub(super) struct BlockTensors<E> {
    /// [6, D]
    pub table: Slice<E>,
    /// Query, key and value, [3 D, D].
    pub qkv: Linear<E>,
    pub norm_q: Slice<E>,
    pub norm_k: Slice<E>,
    pub out: Linear<E>,
    pub cross_norm_weight: Slice<E>,
    pub cross_norm_bias: Slice<E>,
    pub cross_q: Linear<E>,
    pub cross_norm_q: Slice<E>,
    pub cross_norm_k: Slice<E>,
    /// Key and value of the text, [2 D, D].
    pub cross_kv: Linear<E>,
    pub cross_out: Linear<E>,
    pub up: Linear<E>,
    pub down: Linear<E>,
}

/// The names that must lie together in the flat buffers.
pub(crate) fn adjacent(names: &BlockNames, depth: usize) -> Vec<Vec<String>> {
    (0..depth)
        .flat_map(|layer| {
            ["weight", "bias"].into_iter().flat_map(move |part| {
                let name = move |attention: &str, linear: &str| format!("blocks.{layer}.{attention}.{linear}.{part}");
                let linears = names.attention;
                [
                    [linears.q, linears.k, linears.v].map(|linear| name(names.self_attention, linear)).to_vec(),
                    [linears.k, linears.v].map(|linear| name(names.cross_attention, linear)).to_vec(),
                ]
            })
        })
        .collect()
}

impl<E: Element> BlockTensors<E> {
    /// Block `layer` in a flat buffer at `base`.
    pub fn at(
        flat: &FlatLayout,
        names: &BlockNames,
        layer: usize,
        width: usize,
        base: u64,
        operand: usize,
    ) -> Result<Self> {
        let slice = |span: Span| Slice::new(base + (span.offset * E::bytes(operand)) as u64, span.len);
        let tensor = |name: String| flat.span(&format!("blocks.{layer}.{name}")).map(slice);
        // `first` of `count` layers that lie together.
        let linear = |first: String, count: usize| -> Result<Linear<E>> {
            let weight = flat.span(&format!("blocks.{layer}.{first}.weight"))?;
            let bias = flat.span(&format!("blocks.{layer}.{first}.bias"))?;
            Ok(Linear {
                weight: slice(Span { len: weight.len * count, ..weight }),
                bias: slice(Span { len: bias.len * count, ..bias }),
                inputs: weight.len / bias.len,
                outputs: bias.len * count,
            })
        };
        let (own, cross, linears) = (names.self_attention, names.cross_attention, names.attention);
        let blocks = Self {
            table: tensor(names.modulation.to_owned())?,
            qkv: linear(format!("{own}.{}", linears.q), 3)?,
            norm_q: tensor(format!("{own}.norm_q.weight"))?,
            norm_k: tensor(format!("{own}.norm_k.weight"))?,
            out: linear(format!("{own}.{}", linears.o), 1)?,
            cross_norm_weight: tensor(format!("{}.weight", names.cross_norm))?,
            cross_norm_bias: tensor(format!("{}.bias", names.cross_norm))?,
            cross_q: linear(format!("{cross}.{}", linears.q), 1)?,
            cross_norm_q: tensor(format!("{cross}.norm_q.weight"))?,
            cross_norm_k: tensor(format!("{cross}.norm_k.weight"))?,
            cross_kv: linear(format!("{cross}.{}", linears.k), 2)?,
            cross_out: linear(format!("{cross}.{}", linears.o), 1)?,
            up: linear(format!("ffn.{}", names.ffn.up), 1)?,
            down: linear(format!("ffn.{}", names.ffn.down), 1)?,
        };
        debug_assert_eq!(blocks.qkv.inputs, width);
        Ok(blocks)
    }
}
