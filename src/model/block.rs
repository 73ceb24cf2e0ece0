//! The transformer block shared by both families: AdaLN self-attention, text cross-attention, FFN (Wan2.2 `model.py`).
//!
//! The residual stream x is f32 (or f64 in tests) and never cast; each Linear casts its own operand.

use super::Parameters;
use super::geometry::GeometryInsertion;
use crate::config::ModelConfig;
use crate::ops::{
    RopeTable, Rows, gated_residual, gelu_tanh, layer_norm_affine, linear, norm_modulate, rms_norm, rope,
    softmax_last_dim,
};
use candle_core::{Result, Tensor};

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

/// Linear, GELU-tanh, Linear; names `.0` and `.2`.
#[derive(Clone, Debug)]
pub(super) struct Mlp {
    up: Linear,
    down: Linear,
}

impl Mlp {
    pub fn load(parameters: &Parameters, name: &str) -> Result<Self> {
        Ok(Self {
            up: Linear::load(parameters, &format!("{name}.0"))?,
            down: Linear::load(parameters, &format!("{name}.2"))?,
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
    pub fn load(parameters: &Parameters, name: &str, config: &ModelConfig) -> Result<Self> {
        let part = |part: &str| Linear::load(parameters, &format!("{name}.{part}"));
        let norm = |part: &str| parameters.get(&format!("{name}.{part}.weight")).cloned();
        Ok(Self {
            q: part("q")?,
            k: part("k")?,
            v: part("v")?,
            o: part("o")?,
            norm_q: norm("norm_q")?,
            norm_k: norm("norm_k")?,
            heads: config.num_heads,
            eps: config.eps,
        })
    }

    /// Queries from x [B, L, D], keys and values from `memory` [B, S, D]; RoPE on both if `table` is given.
    pub fn forward(&self, x: &Tensor, memory: &Tensor, table: Option<&RopeTable>) -> Result<Tensor> {
        let mut q = rms_norm(&self.q.forward(x)?, &self.norm_q, self.eps)?;
        let mut k = rms_norm(&self.k.forward(memory)?, &self.norm_k, self.eps)?;
        let v = self.v.forward(memory)?;
        if let Some(table) = table {
            q = rope(&q, table)?;
            k = rope(&k, table)?;
        }
        let (batch, tokens, width) = q.dims3()?;
        let head_dim = width / self.heads;
        let split = |t: &Tensor| t.reshape((batch, t.dim(1)?, self.heads, head_dim))?.transpose(1, 2)?.contiguous();
        let (q, k, v) = (split(&(q * (head_dim as f64).sqrt().recip())?)?, split(&k)?, split(&v)?);
        let scores = q.matmul(&k.transpose(2, 3)?.contiguous()?)?;
        let attended = softmax_last_dim(&scores)?.matmul(&v)?;
        self.o.forward(&attended.transpose(1, 2)?.contiguous()?.reshape((batch, tokens, width))?)
    }
}

/// One trunk block, with the geometry branch on its input if this block carries one.
#[derive(Clone, Debug)]
pub struct Block {
    modulation: Tensor,
    self_attention: Attention,
    norm3: (Tensor, Tensor),
    cross_attention: Attention,
    ffn: Mlp,
    geometry: Option<GeometryInsertion>,
    eps: f64,
}

impl Block {
    pub(super) fn load(parameters: &Parameters, layer: usize, config: &ModelConfig) -> Result<Self> {
        let name = format!("blocks.{layer}");
        let branch = config.geometry.enabled && config.geometry.layers.contains(&layer);
        Ok(Self {
            modulation: parameters.get(&format!("{name}.modulation"))?.clone(),
            self_attention: Attention::load(parameters, &format!("{name}.self_attn"), config)?,
            norm3: (
                parameters.get(&format!("{name}.norm3.weight"))?.clone(),
                parameters.get(&format!("{name}.norm3.bias"))?.clone(),
            ),
            cross_attention: Attention::load(parameters, &format!("{name}.cross_attn"), config)?,
            ffn: Mlp::load(parameters, &format!("{name}.ffn"))?,
            geometry: if branch { Some(GeometryInsertion::load(parameters, layer, config)?) } else { None },
            eps: config.eps,
        })
    }

    /// x [B, L, D] -> [B, L, D]. `video_tokens` = how many of the L tokens, from the front, are video.
    pub fn forward(
        &self,
        x: &Tensor,
        conditioning: &Conditioning,
        table: &RopeTable,
        rows: &Rows,
        video_tokens: usize,
    ) -> Result<Tensor> {
        let x = match (&self.geometry, &conditioning.geometry) {
            (Some(branch), Some(tokens)) => branch.forward(x, tokens, video_tokens)?,
            (None, _) => x.clone(),
            (Some(_), None) => candle_core::bail!("the geometry branch is built but the batch has no geometry tokens"),
        };
        let (batch, row_count, _) = conditioning.e0.dims3()?;
        let width = x.dim(2)?;
        let modulation =
            conditioning.e0.reshape((batch, row_count, 6, width))?.broadcast_add(&self.modulation.unsqueeze(0)?)?;
        let part = |i: usize| modulation.narrow(2, i, 1)?.squeeze(2);

        let normed = norm_modulate(&x, &part(0)?, &part(1)?, rows, self.eps)?;
        let attended = self.self_attention.forward(&normed, &normed, Some(table))?;
        let x = gated_residual(&x, &attended, &part(2)?, rows)?;

        let normed = layer_norm_affine(&x, &self.norm3.0, &self.norm3.1, self.eps)?;
        let x = (&x + self.cross_attention.forward(&normed, &conditioning.text, None)?.to_dtype(x.dtype())?)?;

        let normed = norm_modulate(&x, &part(3)?, &part(4)?, rows, self.eps)?;
        gated_residual(&x, &self.ffn.forward(&normed)?, &part(5)?, rows)
    }
}
