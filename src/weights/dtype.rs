//! The floating-point formats in which weights are published, and f32 in between.

use clap::ValueEnum;
use half::{bf16, f16};
use safetensors::Dtype;
use serde::Serialize;

/// How a weight is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum WeightDtype {
    /// Half the bytes; what is published, and what inference loads.
    Bf16,
    /// Half the bytes, three more bits of precision, and no value above 65504.
    F16,
    /// Exact.
    F32,
}

impl WeightDtype {
    /// `None` for what is no floating-point format of weights.
    pub(super) fn of(stored: Dtype) -> Option<Self> {
        match stored {
            Dtype::BF16 => Some(Self::Bf16),
            Dtype::F16 => Some(Self::F16),
            Dtype::F32 => Some(Self::F32),
            _ => None,
        }
    }

    pub(super) fn stored(self) -> Dtype {
        match self {
            Self::Bf16 => Dtype::BF16,
            Self::F16 => Dtype::F16,
            Self::F32 => Dtype::F32,
        }
    }

    /// Bytes of one number.
    pub(super) fn bytes(self) -> usize {
        match self {
            Self::Bf16 | Self::F16 => 2,
            Self::F32 => 4,
        }
    }

    /// Appends the numbers that little-endian `bytes` hold.
    pub(super) fn decode(self, bytes: &[u8], values: &mut Vec<f32>) {
        let halves = bytes.chunks_exact(2).map(|b| [b[0], b[1]]);
        match self {
            Self::Bf16 => values.extend(halves.map(|b| bf16::from_le_bytes(b).to_f32())),
            Self::F16 => values.extend(halves.map(|b| f16::from_le_bytes(b).to_f32())),
            Self::F32 => values.extend(bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))),
        }
    }

    /// Appends the numbers as little-endian bytes, rounded to nearest even; whether all of them stayed finite.
    pub(super) fn encode(self, values: &[f32], bytes: &mut Vec<u8>) -> bool {
        match self {
            Self::Bf16 => {
                bytes.extend(values.iter().flat_map(|&value| bf16::from_f32(value).to_le_bytes()));
                values.iter().all(|&value| bf16::from_f32(value).is_finite())
            }
            Self::F16 => {
                bytes.extend(values.iter().flat_map(|&value| f16::from_f32(value).to_le_bytes()));
                values.iter().all(|&value| f16::from_f32(value).is_finite())
            }
            Self::F32 => {
                bytes.extend(values.iter().flat_map(|value| value.to_le_bytes()));
                values.iter().all(|value| value.is_finite())
            }
        }
    }
}

impl std::fmt::Display for WeightDtype {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
            Self::F32 => "f32",
        })
    }
}
