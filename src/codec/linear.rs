//! The linear codec: two PCA bases with the geometry of the Wan2.2 VAE, so that nothing has to be downloaded.
//!
//! A latent cell of the first frame codes its 16x16 patch; one of a later latent frame codes the 16x16 patch of four
//! frames. Both project on 48 principal directions, mixed so that each channel carries the same variance, and divide by
//! its standard deviation. The bases are kept in f16, in memory as on disk, so a codec that was just fitted and one that
//! was loaded are the same codec. The file also says which training clips it was fitted to.

use half::f16;
use rayon::prelude::*;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use std::collections::HashMap;
use std::io::ErrorKind;
use std::path::Path;

use super::principal::{Components, Moments, components};
use super::{CHANNELS, Extent, LatentCodec, PictureSource, SPACE_STRIDE, Side, TIME_STRIDE};
use crate::data::{Progress, sha256_hex};
use crate::files::{create_folder, write_whole};
use crate::{Error, Result};

/// Numbers in one frame of a patch: red, green and blue.
const FRAME_VALUES: usize = 3 * SPACE_STRIDE * SPACE_STRIDE;
/// Smallest divisor of a channel; a dataset of still pictures has directions without any variance.
const MIN_DEVIATION: f32 = 1e-4;
/// Clips decoded at a time while fitting.
const CLIPS_AT_A_TIME: usize = 16;

/// How much work a fit does. The default is what `data fit-codec` and a first use take.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FitSettings {
    /// Clips read at most, spread evenly over the training clips.
    pub clips: usize,
    /// Patches of the wrist view taken for each basis, about, at most.
    pub wrist_patches: usize,
    /// For each patch of another view, so many of the wrist view are taken: the wrist view decides the experiment
    /// and, with its moving camera, is the hardest to code. Odd, so that all places in a picture are met.
    pub wrist_emphasis: usize,
    /// Iterations of the eigenvector search.
    pub iterations: usize,
}

impl Default for FitSettings {
    fn default() -> Self {
        Self { clips: 400, wrist_patches: 30_000, wrist_emphasis: 5, iterations: 30 }
    }
}

/// One PCA basis over patches of `frames` frames.
#[derive(Clone, Debug, PartialEq)]
struct Basis {
    frames: usize,
    /// [frames * 768]: colour, frame, row, column.
    mean: Vec<f32>,
    /// [48, frames * 768], as stored.
    stored: Vec<f16>,
    /// The same in f32, for arithmetic.
    directions: Vec<f32>,
    /// [48]
    deviation: Vec<f32>,
}

/// PCA of space-time patches.
#[derive(Clone, Debug, PartialEq)]
pub struct LinearCodec {
    first: Basis,
    group: Basis,
    hash: String,
    /// [`PictureSource::training_key`] of what it was fitted to. Not part of the hash: it decides no latent.
    fitted_to: String,
}

/// Name of [`LinearCodec::fitted_to`] in the file's metadata.
const FITTED_TO: &str = "fitted_to";

impl LinearCodec {
    /// Fits both bases to the training clips of a dataset. The same dataset and settings give the same bits, whatever
    /// the number of threads. `progress` runs over the videos to hash, if any, then over clips and iterations.
    ///
    /// # Errors
    /// Those of [`PictureSource::clip`], for the first clip (in order) that cannot be read; an error of `progress`.
    pub fn fit(source: &dyn PictureSource, settings: FitSettings, progress: Progress<'_>) -> Result<Self> {
        let fitted_to = source.training_key(progress)?;
        let clips = spread(source.clips(Side::Training), settings.clips);
        let latent = source.wrist_extent().latent()?;
        let wrist = source.wrist_view();
        let cells = clips.len() * latent.height * latent.width;
        let mut first = Sampler::new(1, cells, settings);
        let mut group = Sampler::new(TIME_STRIDE, cells * (latent.frames - 1), settings);

        let steps = (clips.len() + 2 * settings.iterations) as u64;
        let mut done = 0;
        for chunk in clips.chunks(CLIPS_AT_A_TIME) {
            let samples: Vec<_> = chunk.par_iter().map(|clip| source.clip(Side::Training, *clip)).collect();
            for sample in samples {
                for (view, frames) in sample?.into_iter().enumerate() {
                    let video = frames.video();
                    for time in 0..frames.extent.latent()?.frames {
                        let sampler = if time == 0 { &mut first } else { &mut group };
                        sampler.take(&video, frames.extent, time, view == wrist);
                    }
                }
                done += 1;
                progress(done, steps)?;
            }
        }
        let first = first.finish(settings.iterations, |iteration| progress(done + iteration as u64, steps))?;
        done += settings.iterations as u64;
        let group = group.finish(settings.iterations, |iteration| progress(done + iteration as u64, steps))?;
        Ok(Self::new(first, group, fitted_to))
    }

    /// [`PictureSource::training_key`] of the dataset that the codec was fitted to.
    pub fn fitted_to(&self) -> &str {
        &self.fitted_to
    }

    fn new(first: Basis, group: Basis, fitted_to: String) -> Self {
        let mut bytes = b"linear codec 2".to_vec();
        for basis in [&first, &group] {
            bytes.extend(basis.stored_bytes());
            for values in [&basis.mean, &basis.deviation] {
                bytes.extend(values.iter().flat_map(|value| value.to_le_bytes()));
            }
        }
        let hash = sha256_hex(&bytes);
        Self { first, group, hash, fitted_to }
    }

    /// Writes the codec whole.
    ///
    /// # Errors
    /// The disk errors of [`crate::files`] (exit 74).
    pub fn save(&self, path: &Path) -> Result<()> {
        let bytes = self.to_bytes()?;
        if let Some(folder) = path.parent() {
            create_folder(folder)?;
        }
        write_whole(path, &bytes)
    }

    fn to_bytes(&self) -> Result<Vec<u8>> {
        let floats = |values: &[f32]| values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>();
        let mut tensors = Vec::new();
        for (name, basis) in [("first", &self.first), ("group", &self.group)] {
            let dim = basis.mean.len();
            tensors.push((format!("{name}.basis"), Dtype::F16, vec![CHANNELS, dim], basis.stored_bytes()));
            tensors.push((format!("{name}.mean"), Dtype::F32, vec![dim], floats(&basis.mean)));
            tensors.push((format!("{name}.deviation"), Dtype::F32, vec![CHANNELS], floats(&basis.deviation)));
        }
        let crash = |error| Error::crash(format!("the codec cannot be serialised: {error}"));
        let views = tensors
            .iter()
            .map(|(name, dtype, shape, data)| Ok((name, TensorView::new(*dtype, shape.clone(), data).map_err(crash)?)))
            .collect::<Result<Vec<_>>>()?;
        // One entry: the order of several would change from run to run.
        let metadata = HashMap::from([(FITTED_TO.to_owned(), self.fitted_to.clone())]);
        safetensors::serialize(views, Some(metadata)).map_err(crash)
    }

    /// Reads a codec that [`LinearCodec::save`] wrote.
    ///
    /// # Errors
    /// `file_missing`; `not_openable` if it is no linear codec, is cut off or holds a value that is not finite.
    pub fn load(path: &Path) -> Result<Self> {
        let bytes = std::fs::read(path).map_err(|error| match error.kind() {
            ErrorKind::NotFound => Error::data("file_missing", "the codec file is missing")
                .at(path)
                .hint("make it with `lbva-tui data fit-codec`"),
            _ => Error::data("not_openable", format!("the codec cannot be read: {error}")).at(path),
        })?;
        Self::from_bytes(&bytes).map_err(|why| {
            Error::data("not_openable", format!("the codec cannot be read: {why}"))
                .at(path)
                .hint("make it again with `lbva-tui data fit-codec`")
        })
    }

    fn from_bytes(bytes: &[u8]) -> Result<Self, String> {
        let tensors = SafeTensors::deserialize(bytes).map_err(|error| error.to_string())?;
        let (_, header) = SafeTensors::read_metadata(bytes).map_err(|error| error.to_string())?;
        let fitted_to = header.metadata().as_ref().and_then(|metadata| metadata.get(FITTED_TO));
        let fitted_to = fitted_to.ok_or("it does not say what it was fitted to")?.clone();
        let basis = |name: &str, frames: usize| -> Result<Basis, String> {
            let dim = frames * FRAME_VALUES;
            let get = |part: &str, dtype: Dtype, shape: &[usize]| {
                let name = format!("{name}.{part}");
                let view = tensors.tensor(&name).map_err(|error| error.to_string())?;
                if view.dtype() != dtype || view.shape() != shape {
                    return Err(format!("{name} is {:?} {:?}", view.dtype(), view.shape()));
                }
                Ok(view.data().to_vec())
            };
            let floats = |data: Vec<u8>| -> Vec<f32> {
                data.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
            };
            let stored: Vec<f16> = get("basis", Dtype::F16, &[CHANNELS, dim])?
                .chunks_exact(2)
                .map(|b| f16::from_le_bytes([b[0], b[1]]))
                .collect();
            let mean = floats(get("mean", Dtype::F32, &[dim])?);
            let deviation = floats(get("deviation", Dtype::F32, &[CHANNELS])?);
            let basis = Basis::new(frames, mean, stored, deviation);
            let all = || basis.mean.iter().chain(&basis.directions).chain(&basis.deviation);
            if all().any(|value| !value.is_finite()) || basis.deviation.iter().any(|value| *value <= 0.0) {
                return Err(format!("{name} holds a value that is not finite, or a deviation of 0"));
            }
            Ok(basis)
        };
        Ok(Self::new(basis("first", 1)?, basis("group", TIME_STRIDE)?, fitted_to))
    }

    fn basis(&self, time: usize) -> &Basis {
        if time == 0 { &self.first } else { &self.group }
    }
}

impl LatentCodec for LinearCodec {
    fn encode(&self, video: &[f32], extent: Extent) -> Result<Vec<f32>> {
        let latent = extent.latent()?;
        check_length(video.len(), 3 * extent.cells())?;
        let cells = latent.cells();
        let mut latents = vec![0.0; CHANNELS * cells];
        let mut patch = Vec::with_capacity(self.group.mean.len());
        for time in 0..latent.frames {
            let basis = self.basis(time);
            for cell in 0..latent.height * latent.width {
                patch.clear();
                append_patch(&mut patch, video, extent, time, cell);
                for (value, mean) in patch.iter_mut().zip(&basis.mean) {
                    *value -= mean;
                }
                let at = time * latent.height * latent.width + cell;
                let rows = basis.directions.chunks_exact(patch.len()).zip(&basis.deviation);
                for (channel, (direction, deviation)) in rows.enumerate() {
                    latents[channel * cells + at] = dot(&patch, direction) / deviation;
                }
            }
        }
        Ok(latents)
    }

    fn decode(&self, latents: &[f32], extent: Extent) -> Result<Vec<f32>> {
        let pixels = extent.video();
        check_length(latents.len(), CHANNELS * extent.cells())?;
        let mut video = vec![0.0; 3 * pixels.cells()];
        let cells = extent.cells();
        let mut patch = Vec::with_capacity(self.group.mean.len());
        for time in 0..extent.frames {
            let basis = self.basis(time);
            for cell in 0..extent.height * extent.width {
                patch.clear();
                patch.extend_from_slice(&basis.mean);
                let at = time * extent.height * extent.width + cell;
                let rows = basis.directions.chunks_exact(patch.len()).zip(&basis.deviation);
                for (channel, (direction, deviation)) in rows.enumerate() {
                    let code = latents[channel * cells + at] * deviation;
                    for (value, weight) in patch.iter_mut().zip(direction) {
                        *value += code * weight;
                    }
                }
                for (row, values) in patch_rows(pixels, time, cell).zip(patch.chunks_exact(SPACE_STRIDE)) {
                    video[row..row + SPACE_STRIDE].copy_from_slice(values);
                }
            }
        }
        Ok(video)
    }

    fn hash(&self) -> &str {
        &self.hash
    }

    fn codes_groups_alone(&self) -> bool {
        true
    }
}

impl Basis {
    fn new(frames: usize, mean: Vec<f32>, stored: Vec<f16>, deviation: Vec<f32>) -> Self {
        let directions = stored.iter().map(|value| value.to_f32()).collect();
        Self { frames, mean, stored, directions, deviation }
    }

    fn stored_bytes(&self) -> Vec<u8> {
        self.stored.iter().flat_map(|value| value.to_le_bytes()).collect()
    }
}

/// At most `count` of so many clips, evenly spaced.
pub(super) fn spread(clips: usize, count: usize) -> Vec<usize> {
    let count = count.clamp(1, clips.max(1));
    (0..count).map(|index| index * clips / count).filter(|index| *index < clips).collect()
}

/// Collects every n-th patch of one kind.
struct Sampler {
    frames: usize,
    moments: Moments,
    /// One of so many patches is taken, of the wrist view and of the others.
    steps: [usize; 2],
    seen: [usize; 2],
}

impl Sampler {
    /// `available`: patches that the wrist view has.
    fn new(frames: usize, available: usize, settings: FitSettings) -> Self {
        // Odd, so that it shares no factor with the cells of a row.
        let step = (available / settings.wrist_patches.max(1)).max(1) | 1;
        let steps = [step, step * settings.wrist_emphasis.max(1)];
        Self { frames, moments: Moments::new(frames * FRAME_VALUES), steps, seen: [0, 0] }
    }

    fn take(&mut self, video: &[f32], extent: Extent, time: usize, wrist: bool) {
        let kind = usize::from(!wrist);
        let cells = (extent.height / SPACE_STRIDE) * (extent.width / SPACE_STRIDE);
        let mut patches = Vec::new();
        for cell in 0..cells {
            if (self.seen[kind] + cell).is_multiple_of(self.steps[kind]) {
                append_patch(&mut patches, video, extent, time, cell);
            }
        }
        self.seen[kind] += cells;
        self.moments.add(&patches);
    }

    fn finish(self, iterations: usize, progress: impl Fn(usize) -> Result<()>) -> Result<Basis> {
        let Components { mean, directions, variances } = components(self.moments, CHANNELS, iterations, progress)?;
        let (directions, variance) = mix(&directions, &variances);
        Ok(Basis::new(
            self.frames,
            mean.into_iter().map(|value| value as f32).collect(),
            directions.into_iter().map(f16::from_f64).collect(),
            vec![(variance.sqrt() as f32).max(MIN_DEVIATION); CHANNELS],
        ))
    }
}

/// Turns principal directions into 48 others of the same span, each carrying the same variance (their mean).
///
/// Principal coordinates divided by their deviations would weigh a detail that no eye sees like the brightness of the
/// whole patch, and a loss over them would mostly be about details that nobody can predict. Mixed by an orthogonal
/// matrix of equal entries and divided by one number, errors in latents are errors in pixels.
fn mix(directions: &[f64], variances: &[f64]) -> (Vec<f64>, f64) {
    let dim = directions.len() / CHANNELS;
    let mut mixed = vec![0.0; directions.len()];
    for (channel, row) in mixed.chunks_exact_mut(dim).enumerate() {
        for (component, direction) in directions.chunks_exact(dim).enumerate() {
            let weight = hadamard(channel, component) / (CHANNELS as f64).sqrt();
            for (value, direction) in row.iter_mut().zip(direction) {
                *value += weight * direction;
            }
        }
    }
    (mixed, variances.iter().sum::<f64>() / CHANNELS as f64)
}

/// Entry of a Hadamard matrix of order 48: Paley's of order 12 (residues modulo 11), doubled twice by Sylvester.
fn hadamard(row: usize, column: usize) -> f64 {
    let paley = |row: usize, column: usize| match (row, column) {
        (0, _) => 1.0,
        (_, 0) => -1.0,
        _ if row == column => 1.0,
        _ if [1, 3, 4, 5, 9].contains(&((row + 11 - column) % 11)) => 1.0,
        _ => -1.0,
    };
    let sylvester = if ((row / 12) & (column / 12)).count_ones().is_multiple_of(2) { 1.0 } else { -1.0 };
    sylvester * paley(row % 12, column % 12)
}

/// Where the 16-pixel rows of a patch start in a video [3, T, H, W], in the order colour, frame, row.
fn patch_rows(extent: Extent, time: usize, cell: usize) -> impl Iterator<Item = usize> {
    let Extent { frames, height, width } = extent;
    let columns = width / SPACE_STRIDE;
    let (top, left) = (cell / columns * SPACE_STRIDE, cell % columns * SPACE_STRIDE);
    let (first, last) = if time == 0 { (0, 0) } else { ((time - 1) * TIME_STRIDE + 1, time * TIME_STRIDE) };
    (0..3).flat_map(move |colour| {
        (first..=last).flat_map(move |frame| {
            (0..SPACE_STRIDE).map(move |row| ((colour * frames + frame) * height + top + row) * width + left)
        })
    })
}

fn append_patch(patches: &mut Vec<f32>, video: &[f32], extent: Extent, time: usize, cell: usize) {
    for row in patch_rows(extent, time, cell) {
        patches.extend_from_slice(&video[row..row + SPACE_STRIDE]);
    }
}

fn check_length(length: usize, expected: usize) -> Result<()> {
    if length == expected {
        return Ok(());
    }
    Err(Error::refused("bad_extent", format!("{length} numbers where the extent needs {expected}")))
}

/// Eight running sums, which become two vector registers. Lengths are multiples of 8.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0_f32; 8];
    for (a, b) in a.chunks_exact(8).zip(b.chunks_exact(8)) {
        for lane in 0..8 {
            sums[lane] += a[lane] * b[lane];
        }
    }
    sums.iter().sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mixing_matrix_is_orthogonal() {
        for a in 0..CHANNELS {
            for b in 0..CHANNELS {
                let product: f64 = (0..CHANNELS).map(|i| hadamard(a, i) * hadamard(b, i)).sum();
                assert_eq!(product, if a == b { CHANNELS as f64 } else { 0.0 }, "rows {a} and {b}");
            }
        }
    }
}
