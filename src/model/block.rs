//! The transformer block shared by both families: AdaLN self-attention, text cross-attention, FFN (Wan2.2 `model.py`).
//!
//! The residual stream x is f32 (or f64 in tests) and never cast; each Linear casts its own operand.

use super::Parameters;
use super::geometry::GeometryInsertion;
use crate::ops::{
    AttentionPlan, RopeTable, Rows, gated_residual, gelu_tanh, layer_norm_affine, linear, norm_modulate,
    planned_attention, rms_norm, rope, softmax_last_dim,
};
use candle_core::{DType, Result, Tensor};
use std::ops::Range;
use std::sync::Arc;

/// What every block reads besides x.
#[derive(Clone, Debug)]
pub struct Conditioning {
    /// Projected time embedding of each modulation row, [B, R, 6 D].
    pub e0: Tensor,
    /// Un-projected time embedding, [B, R, D], for the head.
    pub e: Tensor,
    /// Embedded text, [B, S, D].
    pub text: Tensor,
    /// Adapted geometry tokens, [B, N_g, D]; only with the branch.
    pub geometry: Option<Tensor>,
}

impl Conditioning {
    /// The tensors through which gradient flows back to the front, in a fixed order.
    pub fn tensors(&self) -> Vec<&Tensor> {
        [&self.e0, &self.e, &self.text].into_iter().chain(&self.geometry).collect()
    }

    /// The same with other tensors, in the order of [`Self::tensors`].
    pub fn with_tensors(&self, tensors: &[Tensor]) -> Self {
        Self {
            e0: tensors[0].clone(),
            e: tensors[1].clone(),
            text: tensors[2].clone(),
            geometry: self.geometry.as_ref().map(|_| tensors[3].clone()),
        }
    }
}

/// The dtype of the residual stream and of predictions for parameters of this dtype: f32, or wider in tests.
pub(super) fn stream_dtype(parameters: DType) -> DType {
    match parameters {
        DType::F64 => DType::F64,
        _ => DType::F32,
    }
}

/// Where the tokens of a forward stand and what they see: the same for every block.
#[derive(Clone, Debug)]
pub struct Placement {
    pub table: RopeTable,
    pub rows: Rows,
    pub sight: Sight,
    /// How many of the L tokens, from the front, the geometry branch reaches.
    pub video_tokens: usize,
    /// Which of the embedders' rows, part after part, each token of the one packed sample is; a number past their end is
    /// padding. `None`: the rows of all samples in their order.
    pub sources: Option<Vec<u32>>,
    /// The tokens that each head reads, in the order in which it reads them; `None`: one reads all. What the last block
    /// computes of others beyond keys and values is nobody's.
    pub read: Option<Vec<Vec<u32>>>,
}

/// Which keys a query sees.
#[derive(Clone, Debug)]
pub enum Sight {
    /// All of its sample, and all of the text.
    Everything,
    /// What the plans say; the batch is one packed sequence.
    Planned { tokens: Arc<AttentionPlan>, text: Arc<AttentionPlan> },
}

impl Sight {
    fn tokens(&self) -> Option<&Arc<AttentionPlan>> {
        match self {
            Self::Everything => None,
            Self::Planned { tokens, .. } => Some(tokens),
        }
    }

    fn text(&self) -> Option<&Arc<AttentionPlan>> {
        match self {
            Self::Everything => None,
            Self::Planned { text, .. } => Some(text),
        }
    }
}

/// What a family calls the parameters of a block.
#[derive(Clone, Copy, Debug)]
pub struct BlockNames {
    pub modulation: &'static str,
    pub self_attention: &'static str,
    pub cross_attention: &'static str,
    pub cross_norm: &'static str,
    pub attention: AttentionNames,
    pub ffn: MlpNames,
}

/// The four Linear layers of an attention.
#[derive(Clone, Copy, Debug)]
pub struct AttentionNames {
    pub q: &'static str,
    pub k: &'static str,
    pub v: &'static str,
    pub o: &'static str,
}

/// The two Linear layers of an MLP.
#[derive(Clone, Copy, Debug)]
pub struct MlpNames {
    pub up: &'static str,
    pub down: &'static str,
}

impl AttentionNames {
    /// Wan2.2's own, and the geometry branch's.
    pub const WAN: Self = Self { q: "q", k: "k", v: "v", o: "o" };
}

/// Weight [out, in] and bias [out].
#[derive(Clone, Debug)]
pub(super) struct Linear {
    weight: Tensor,
    bias: Tensor,
}

impl Linear {
    pub fn load(parameters: &Parameters, name: &str) -> Result<Self> {
        let tensor = |part: &str| parameters.get(&format!("{name}.{part}")).cloned();
        Ok(Self { weight: tensor("weight")?, bias: tensor("bias")? })
    }

    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        linear(x, &self.weight, &self.bias)
    }
}

/// Linear, GELU-tanh, Linear.
#[derive(Clone, Debug)]
pub(super) struct Mlp {
    up: Linear,
    down: Linear,
}

impl Mlp {
    pub fn load(parameters: &Parameters, name: &str, names: MlpNames) -> Result<Self> {
        Ok(Self {
            up: Linear::load(parameters, &format!("{name}.{}", names.up))?,
            down: Linear::load(parameters, &format!("{name}.{}", names.down))?,
        })
    }

    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.down.forward(&gelu_tanh(&self.up.forward(x)?)?)
    }
}

/// Multi-head attention with RMSNorm of q and k over the full width.
#[derive(Clone, Debug)]
pub(super) struct Attention {
    q: Linear,
    k: Linear,
    v: Linear,
    o: Linear,
    norm_q: Tensor,
    norm_k: Tensor,
    heads: usize,
    eps: f64,
}

impl Attention {
    pub fn load(parameters: &Parameters, name: &str, names: AttentionNames, heads: usize, eps: f64) -> Result<Self> {
        let part = |part: &str| Linear::load(parameters, &format!("{name}.{part}"));
        let norm = |part: &str| parameters.get(&format!("{name}.{part}.weight")).cloned();
        Ok(Self {
            q: part(names.q)?,
            k: part(names.k)?,
            v: part(names.v)?,
            o: part(names.o)?,
            norm_q: norm("norm_q")?,
            norm_k: norm("norm_k")?,
            heads,
            eps,
        })
    }

    /// Queries from x [B, L, D], keys and values from `memory` [B, S, D]; RoPE on both if `table` is given. Without a
    /// plan every query sees every key of its sample; a plan is for one packed sequence, B = 1.
    pub fn forward(
        &self,
        x: &Tensor,
        memory: &Tensor,
        table: Option<&RopeTable>,
        plan: Option<&Arc<AttentionPlan>>,
    ) -> Result<Tensor> {
        self.attend(&self.queries(x, table)?, &self.keys_values(memory, table)?, plan)
    }

    /// x [B, L, D] -> q [B, L, D].
    fn queries(&self, x: &Tensor, table: Option<&RopeTable>) -> Result<Tensor> {
        placed(rms_norm(&self.q.forward(x)?, &self.norm_q, self.eps)?, table)
    }

    /// What there is to see of `memory` [B, S, D].
    fn keys_values(&self, memory: &Tensor, table: Option<&RopeTable>) -> Result<KeysValues> {
        let keys = placed(rms_norm(&self.k.forward(memory)?, &self.norm_k, self.eps)?, table)?;
        Ok(KeysValues { keys, values: self.v.forward(memory)? })
    }

    fn attend(&self, q: &Tensor, seen: &KeysValues, plan: Option<&Arc<AttentionPlan>>) -> Result<Tensor> {
        let KeysValues { keys: k, values: v } = seen;
        if let Some(plan) = plan {
            let attended = planned_attention(&q.squeeze(0)?, &k.squeeze(0)?, &v.squeeze(0)?, self.heads, plan)?;
            return self.o.forward(&attended.unsqueeze(0)?);
        }
        let (batch, tokens, width) = q.dims3()?;
        let head_dim = width / self.heads;
        let split = |t: &Tensor| t.reshape((batch, t.dim(1)?, self.heads, head_dim))?.transpose(1, 2)?.contiguous();
        let (q, k, v) = (split(&(q * (head_dim as f64).sqrt().recip())?)?, split(k)?, split(v)?);
        let scores = q.matmul(&k.transpose(2, 3)?.contiguous()?)?;
        let attended = softmax_last_dim(&scores)?.matmul(&v)?;
        self.o.forward(&attended.transpose(1, 2)?.contiguous()?.reshape((batch, tokens, width))?)
    }
}

fn placed(x: Tensor, table: Option<&RopeTable>) -> Result<Tensor> {
    match table {
        Some(table) => rope(&x, table),
        None => Ok(x),
    }
}

/// Keys, after their norm and RoPE, and values: [B, S, D] each.
#[derive(Clone, Debug)]
pub(super) struct KeysValues {
    keys: Tensor,
    values: Tensor,
}

impl KeysValues {
    /// `self` before `later`.
    fn then(&self, later: &Self) -> Result<Self> {
        Ok(Self {
            keys: Tensor::cat(&[&self.keys, &later.keys], 1)?,
            values: Tensor::cat(&[&self.values, &later.values], 1)?,
        })
    }

    /// `part` of both, without the graph behind them.
    fn map(&self, part: impl Fn(Tensor) -> Result<Tensor>) -> Result<Self> {
        Ok(Self { keys: part(self.keys.detach())?, values: part(self.values.detach())? })
    }
}

/// What a block has seen, for tokens that come later.
#[derive(Clone, Debug)]
pub(super) struct Memory {
    tokens: KeysValues,
    text: KeysValues,
}

impl Memory {
    /// Of some of the tokens, and the whole text; without the graph behind them.
    pub fn of(&self, tokens: Range<usize>) -> Result<Self> {
        Ok(Self { tokens: self.tokens.map(|x| x.narrow(1, tokens.start, tokens.len()))?, text: self.text.map(Ok)? })
    }
}

/// One trunk block, with the geometry branch on its input if this block carries one.
#[derive(Clone, Debug)]
pub struct Block {
    modulation: Tensor,
    self_attention: Attention,
    cross_norm: (Tensor, Tensor),
    cross_attention: Attention,
    ffn: Mlp,
    geometry: Option<GeometryInsertion>,
    eps: f64,
}

impl Block {
    pub(super) fn load(
        parameters: &Parameters,
        layer: usize,
        names: &BlockNames,
        geometry: Option<GeometryInsertion>,
        heads: usize,
        eps: f64,
    ) -> Result<Self> {
        let name = format!("blocks.{layer}");
        let tensor = |part: &str| parameters.get(&format!("{name}.{part}")).cloned();
        let attention =
            |part: &str| Attention::load(parameters, &format!("{name}.{part}"), names.attention, heads, eps);
        Ok(Self {
            modulation: tensor(names.modulation)?,
            self_attention: attention(names.self_attention)?,
            cross_norm: (
                tensor(&format!("{}.weight", names.cross_norm))?,
                tensor(&format!("{}.bias", names.cross_norm))?,
            ),
            cross_attention: attention(names.cross_attention)?,
            ffn: Mlp::load(parameters, &format!("{name}.ffn"), names.ffn)?,
            geometry,
            eps,
        })
    }

    /// The geometry branch on its input, if this block carries one.
    pub fn insertion(&self) -> Option<&GeometryInsertion> {
        self.geometry.as_ref()
    }

    /// x [B, L, D] -> [B, L, D].
    pub fn forward(&self, x: &Tensor, conditioning: &Conditioning, placement: &Placement) -> Result<Tensor> {
        self.forward_after(x, conditioning, placement, None).map(|(x, _)| x)
    }

    /// The same for tokens that also see `past`: its rows come before those of x in the plan's keys, and its text
    /// takes the place of the conditioning's. Returns what there is to see of x, too.
    pub(super) fn forward_after(
        &self,
        x: &Tensor,
        conditioning: &Conditioning,
        placement: &Placement,
        past: Option<&Memory>,
    ) -> Result<(Tensor, Memory)> {
        let x = match (&self.geometry, &conditioning.geometry) {
            (Some(branch), Some(tokens)) => branch.forward(x, tokens, placement.video_tokens)?,
            (None, _) => x.clone(),
            (Some(_), None) => candle_core::bail!("the geometry branch is built but the batch has no geometry tokens"),
        };
        let (batch, row_count, _) = conditioning.e0.dims3()?;
        let (width, rows, sight) = (x.dim(2)?, &placement.rows, &placement.sight);
        // Added in the stream's dtype: a sum of two bf16 numbers would be rounded before it scales anything.
        let stream = |tensor: &Tensor| tensor.to_dtype(x.dtype());
        let modulation = stream(&conditioning.e0)?
            .reshape((batch, row_count, 6, width))?
            .broadcast_add(&stream(&self.modulation)?.unsqueeze(0)?)?;
        let part = |i: usize| modulation.narrow(2, i, 1)?.squeeze(2);

        let normed = norm_modulate(&x, &part(0)?, &part(1)?, rows, self.eps)?;
        let table = Some(&placement.table);
        let tokens = self.self_attention.keys_values(&normed, table)?;
        let seen = past.map(|past| past.tokens.then(&tokens)).transpose()?;
        let q = self.self_attention.queries(&normed, table)?;
        let attended = self.self_attention.attend(&q, seen.as_ref().unwrap_or(&tokens), sight.tokens())?;
        let x = gated_residual(&x, &attended, &part(2)?, rows)?;

        let normed = layer_norm_affine(&x, &self.cross_norm.0, &self.cross_norm.1, self.eps)?;
        let text = match past {
            Some(past) => past.text.clone(),
            None => self.cross_attention.keys_values(&conditioning.text, None)?,
        };
        let attended =
            self.cross_attention.attend(&self.cross_attention.queries(&normed, None)?, &text, sight.text())?;
        let x = (&x + attended.to_dtype(x.dtype())?)?;

        let normed = norm_modulate(&x, &part(3)?, &part(4)?, rows, self.eps)?;
        Ok((gated_residual(&x, &self.ffn.forward(&normed)?, &part(5)?, rows)?, Memory { tokens, text }))
    }
}
