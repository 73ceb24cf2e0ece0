//! LPIPS v0.1 with AlexNet (Zhang et al. 2018): the perceptual distance that decides the experiment.
//!
//! The weights are compiled in, so a measurement needs no file, and two binaries of one version cannot disagree about
//! them. Features of the ground truth never change in a run: compute them once a clip and keep them.

mod alexnet;

use super::pictures::{SIGNED, read_pictures, size_mismatch};
use crate::{Error, Exit, Result};
use alexnet::{AlexNet, Map, TAP_CHANNELS, open, tensor_values};
use candle_core::Tensor;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

pub use alexnet::SMALLEST_SIDE;

const BACKBONE: &[u8] = include_bytes!("../weights/alexnet_features.safetensors");
const LINEAR: &[u8] = include_bytes!("../weights/lpips_lin_alex_v0.1.safetensors");

/// The scaling layer in front of the network, for inputs in [-1, 1]: (x - shift) / scale for each channel.
const SHIFT: [f32; 3] = [-0.030, -0.088, -0.188];
const SCALE: [f32; 3] = [0.458, 0.448, 0.450];
/// Added to the norm of a cell's channels, outside the root as in the lpips package.
const NORM_EPS: f32 = 1e-10;

/// The metric with its weights. Costs about 10 MB; make one and share it.
pub struct Lpips {
    network: AlexNet,
    /// Weight of each channel, a tap each.
    linear: Vec<Vec<f32>>,
    backbone_sha256: String,
    linear_sha256: String,
}

/// Channel-normalised activations of a stack of pictures: all that a distance needs (0.6 MB for a 128x128 picture).
#[derive(Clone)]
pub struct Features {
    taps: Vec<Map>,
    count: usize,
    height: usize,
    width: usize,
}

impl Features {
    /// Pictures in the stack.
    pub fn count(&self) -> usize {
        self.count
    }
}

/// What a number depends on besides the pictures: with another backbone, other weights or another input size it is
/// another metric.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LpipsIdentity {
    /// `lpips v0.1`.
    pub metric: String,
    /// `alexnet`.
    pub backbone: String,
    /// SHA-256 of the weight files, hex.
    pub backbone_sha256: String,
    pub linear_sha256: String,
    /// `f32 in [-1, 1]`.
    pub input: String,
    /// (height, width) measured at, without resizing.
    pub input_size: [usize; 2],
}

impl Lpips {
    /// The standard metric, from the weights compiled in.
    ///
    /// # Errors
    /// None in a binary built from intact sources; the weights are checked all the same.
    pub fn new() -> Result<Self> {
        Self::from_safetensors(BACKBONE, LINEAR)
    }

    /// The same network with other weights: `features.{0,3,6,8,10}.{weight,bias}` and `lin{0..4}.model.1.weight`.
    ///
    /// # Errors
    /// `bad_weights`: not safetensors, or a tensor that is absent or has another shape or dtype.
    pub fn from_safetensors(backbone: &[u8], linear: &[u8]) -> Result<Self> {
        let file = open(linear)?;
        let layers = TAP_CHANNELS.iter().enumerate();
        let layers = layers
            .map(|(tap, &channels)| tensor_values(&file, &format!("lin{tap}.model.1.weight"), &[1, channels, 1, 1]));
        Ok(Self {
            network: AlexNet::from_safetensors(backbone)?,
            linear: layers.collect::<Result<_>>()?,
            backbone_sha256: sha256_hex(backbone),
            linear_sha256: sha256_hex(linear),
        })
    }

    /// What the values of pictures of this size depend on.
    pub fn identity(&self, height: usize, width: usize) -> LpipsIdentity {
        LpipsIdentity {
            metric: "lpips v0.1".into(),
            backbone: "alexnet".into(),
            backbone_sha256: self.backbone_sha256.clone(),
            linear_sha256: self.linear_sha256.clone(),
            input: "f32 in [-1, 1]".into(),
            input_size: [height, width],
        }
    }

    /// Features of pictures, f32 in [-1, 1], [3, H, W] or [N, 3, H, W].
    ///
    /// # Errors
    /// A dtype other than f32, another shape, a pixel outside [-1, 1], a side below [`SMALLEST_SIDE`].
    pub fn features(&self, pictures: &Tensor) -> Result<Features> {
        let pictures = read_pictures(pictures, "lpips", SIGNED)?;
        let (count, height, width) = (pictures.count, pictures.height, pictures.width);
        if height.min(width) < SMALLEST_SIDE {
            let what =
                format!("lpips takes pictures of at least {SMALLEST_SIDE} pixels a side and got {width}x{height}");
            return Err(Error::new(Exit::BadData, "picture_too_small", what));
        }
        let plane = pictures.plane_len();
        let mut values = Vec::with_capacity(pictures.pixels.len());
        for picture in pictures.pixels.chunks_exact(pictures.picture_len()) {
            for position in 0..plane {
                for (channel, (shift, scale)) in SHIFT.iter().zip(SCALE).enumerate() {
                    values.push((picture[channel * plane + position] - shift) / scale);
                }
            }
        }
        let mut taps = self.network.taps(Map { values, count, height, width, channels: 3 })?;
        taps.iter_mut().for_each(normalise_channels);
        Ok(Features { taps, count, height, width })
    }

    /// Distance of each picture of one stack to its partner in the other: 0 for equal pictures, lower is nearer.
    ///
    /// # Errors
    /// `size_mismatch` when the stacks differ in count or size.
    pub fn distance(&self, a: &Features, b: &Features) -> Result<Vec<f64>> {
        Ok(self.tap_distances(a, b)?.iter().map(|taps| taps.iter().sum()).collect())
    }

    /// The share of each of the five taps in each picture's distance.
    ///
    /// # Errors
    /// As [`Lpips::distance`].
    pub fn tap_distances(&self, a: &Features, b: &Features) -> Result<Vec<[f64; 5]>> {
        if (a.count, a.height, a.width) != (b.count, b.height, b.width) {
            return Err(size_mismatch("lpips", (a.count, a.height, a.width), (b.count, b.height, b.width)));
        }
        let mut distances = vec![[0.0; 5]; a.count];
        for (tap, ((a, b), weights)) in a.taps.iter().zip(&b.taps).zip(&self.linear).enumerate() {
            let cells = a.height * a.width;
            let length = cells * a.channels;
            let pictures = a.values.chunks_exact(length).zip(b.values.chunks_exact(length));
            for (picture, (a_values, b_values)) in distances.iter_mut().zip(pictures) {
                let pairs = a_values.chunks_exact(a.channels).zip(b_values.chunks_exact(a.channels));
                let sum: f64 = pairs.map(|(a, b)| f64::from(weighted_square(a, b, weights))).sum();
                picture[tap] = sum / cells as f64;
            }
        }
        Ok(distances)
    }
}

/// Sum over the channels of one cell; a few hundred terms of one sign, so f32 is enough.
fn weighted_square(a: &[f32], b: &[f32], weights: &[f32]) -> f32 {
    a.iter().zip(b).zip(weights).map(|((a, b), weight)| weight * (a - b) * (a - b)).sum()
}

fn normalise_channels(map: &mut Map) {
    for cell in map.values.chunks_exact_mut(map.channels) {
        let norm = cell.iter().map(|value| value * value).sum::<f32>().sqrt() + NORM_EPS;
        cell.iter_mut().for_each(|value| *value /= norm);
    }
}

fn sha256_hex(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}
