//! The five convolutions of AlexNet up to each of LPIPS's taps.
//!
//! Activations are channels-last: a patch is then a few contiguous runs, the product of patches and weights is the
//! next activation as it stands, and the channel norm reads neighbours. Measured against candle's `conv2d` on one thread
//! it is the faster form (`docs/metrics.md`).

use crate::{Error, Exit, Result};
use candle_core::{Device, Tensor};
use safetensors::{Dtype, SafeTensors};

/// Activations [count, height, width, channels].
#[derive(Clone)]
pub(super) struct Map {
    pub values: Vec<f32>,
    pub count: usize,
    pub height: usize,
    pub width: usize,
    pub channels: usize,
}

/// One convolution of the network, and the max-pool (3x3, stride 2, floor) in front of it.
struct Shape {
    name: &'static str,
    pooled: bool,
    inputs: usize,
    outputs: usize,
    kernel: usize,
    stride: usize,
    padding: usize,
}

#[rustfmt::skip]
const SHAPES: [Shape; 5] = [
    Shape { name: "features.0",  pooled: false, inputs: 3,   outputs: 64,  kernel: 11, stride: 4, padding: 2 },
    Shape { name: "features.3",  pooled: true,  inputs: 64,  outputs: 192, kernel: 5,  stride: 1, padding: 2 },
    Shape { name: "features.6",  pooled: true,  inputs: 192, outputs: 384, kernel: 3,  stride: 1, padding: 1 },
    Shape { name: "features.8",  pooled: false, inputs: 384, outputs: 256, kernel: 3,  stride: 1, padding: 1 },
    Shape { name: "features.10", pooled: false, inputs: 256, outputs: 256, kernel: 3,  stride: 1, padding: 1 },
];

/// Channels of each tap.
pub(super) const TAP_CHANNELS: [usize; 5] = [64, 192, 384, 256, 256];

/// Smallest picture side: 31 leaves 7, 3 and 1 cells after the first convolution and the two pools.
pub const SMALLEST_SIDE: usize = 31;

/// Patches in one matrix product: bounds the memory of a large picture, and keeps the operand in cache.
const PATCHES: usize = 512;

struct Convolution {
    shape: &'static Shape,
    /// [kernel * kernel * inputs, outputs], rows in the order (ky, kx, input).
    weight: Tensor,
    bias: Vec<f32>,
}

/// The network; its taps are the activations after each ReLU.
pub(super) struct AlexNet {
    convolutions: Vec<Convolution>,
}

impl AlexNet {
    /// From `features.{0,3,6,8,10}.{weight,bias}` (f32, OIHW), torchvision's names.
    pub fn from_safetensors(bytes: &[u8]) -> Result<Self> {
        let file = open(bytes)?;
        let convolutions = SHAPES.iter().map(|shape| {
            let Shape { name, inputs, outputs, kernel, .. } = *shape;
            let weight = tensor_values(&file, &format!("{name}.weight"), &[outputs, inputs, kernel, kernel])?;
            let bias = tensor_values(&file, &format!("{name}.bias"), &[outputs])?;
            let weight = Tensor::from_vec(weight, (outputs, inputs, kernel, kernel), &Device::Cpu)?;
            let weight = weight.permute((2, 3, 1, 0))?.reshape((kernel * kernel * inputs, outputs))?.contiguous()?;
            Ok(Convolution { shape, weight, bias })
        });
        Ok(Self { convolutions: convolutions.collect::<Result<_>>()? })
    }

    /// The five taps of normalised pictures [count, height, width, 3]; the caller has checked [`SMALLEST_SIDE`].
    pub fn taps(&self, pictures: Map) -> Result<Vec<Map>> {
        let mut taps: Vec<Map> = Vec::with_capacity(self.convolutions.len());
        for convolution in &self.convolutions {
            let input = taps.last().unwrap_or(&pictures);
            let tap = match convolution.shape.pooled {
                true => convolution.forward(&max_pool(input))?,
                false => convolution.forward(input)?,
            };
            taps.push(tap);
        }
        Ok(taps)
    }
}

impl Convolution {
    /// Convolution, bias and ReLU.
    fn forward(&self, input: &Map) -> Result<Map> {
        let Shape { outputs, kernel, stride, padding, .. } = *self.shape;
        let height = (input.height + 2 * padding - kernel) / stride + 1;
        let width = (input.width + 2 * padding - kernel) / stride + 1;
        let positions = input.count * height * width;
        let patch_len = kernel * kernel * input.channels;

        let mut values = Vec::with_capacity(positions * outputs);
        for start in (0..positions).step_by(PATCHES) {
            let end = (start + PATCHES).min(positions);
            let mut patches = Vec::with_capacity((end - start) * patch_len);
            for position in start..end {
                let (picture, y, x) = (position / (height * width), position / width % height, position % width);
                push_patch(&mut patches, input, picture, (y * stride, x * stride), kernel, padding);
            }
            let patches = Tensor::from_vec(patches, (end - start, patch_len), &Device::Cpu)?;
            values.extend(patches.matmul(&self.weight)?.flatten_all()?.to_vec1::<f32>()?);
        }
        for cell in values.chunks_exact_mut(outputs) {
            for (value, bias) in cell.iter_mut().zip(&self.bias) {
                *value = (*value + bias).max(0.0);
            }
        }
        Ok(Map { values, count: input.count, height, width, channels: outputs })
    }
}

/// Appends the kernel x kernel patch whose corner is (y, x) in the zero-padded picture.
fn push_patch(
    patches: &mut Vec<f32>,
    input: &Map,
    picture: usize,
    (y, x): (usize, usize),
    kernel: usize,
    padding: usize,
) {
    // Columns of the patch left of the picture, inside it, and right of it.
    let left = padding.saturating_sub(x).min(kernel);
    let inside = (input.width + padding).saturating_sub(x).min(kernel) - left;
    let right = kernel - left - inside;
    for row in y..y + kernel {
        let Some(row) = row.checked_sub(padding).filter(|&row| row < input.height) else {
            patches.resize(patches.len() + kernel * input.channels, 0.0);
            continue;
        };
        let start = ((picture * input.height + row) * input.width + x + left - padding) * input.channels;
        patches.resize(patches.len() + left * input.channels, 0.0);
        patches.extend_from_slice(&input.values[start..start + inside * input.channels]);
        patches.resize(patches.len() + right * input.channels, 0.0);
    }
}

/// 3x3, stride 2, no padding, incomplete windows dropped.
fn max_pool(input: &Map) -> Map {
    let (height, width) = ((input.height - 3) / 2 + 1, (input.width - 3) / 2 + 1);
    let mut values = Vec::with_capacity(input.count * height * width * input.channels);
    let mut cell = vec![0.0f32; input.channels];
    for picture in 0..input.count {
        for y in 0..height {
            for x in 0..width {
                // Activations come out of a ReLU: 0 is below none of them.
                cell.fill(0.0);
                for dy in 0..3 {
                    let start = ((picture * input.height + 2 * y + dy) * input.width + 2 * x) * input.channels;
                    for run in input.values[start..start + 3 * input.channels].chunks_exact(input.channels) {
                        for (best, value) in cell.iter_mut().zip(run) {
                            *best = best.max(*value);
                        }
                    }
                }
                values.extend_from_slice(&cell);
            }
        }
    }
    Map { values, count: input.count, height, width, channels: input.channels }
}

/// Opens a weights file held in memory.
pub(super) fn open(bytes: &[u8]) -> Result<SafeTensors<'_>> {
    SafeTensors::deserialize(bytes)
        .map_err(|error| Error::new(Exit::BadData, "bad_weights", format!("not a safetensors file: {error}")))
}

/// One f32 tensor of the expected shape.
pub(super) fn tensor_values(file: &SafeTensors<'_>, name: &str, shape: &[usize]) -> Result<Vec<f32>> {
    let bad = |what: String| Error::new(Exit::BadData, "bad_weights", what).in_place(name);
    let view = file.tensor(name).map_err(|_| bad("LPIPS weights lack a tensor".into()))?;
    if view.dtype() != Dtype::F32 || view.shape() != shape {
        return Err(bad(format!("LPIPS weights have {:?} {:?}, not F32 {shape:?}", view.dtype(), view.shape())));
    }
    let values = view.data().chunks_exact(4).map(|bytes| f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]));
    Ok(values.collect())
}
