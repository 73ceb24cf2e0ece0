//! What a comparison is made with: random inputs on both sides, poisoned outputs, two launches, and the difference.
//!
//! Every tensor lies among bytes of 0xFF, which are NaN in every float format: before it, behind it and between its rows. So
//! a kernel that reads what does not count computes NaN, and one that writes where it should not is seen.

use crate::cuda::arena::Arena;
use crate::cuda::batch::upload;
use crate::cuda::device::Gpu;
use crate::cuda::gemm::{self, Gemm};
use crate::cuda::launch::{Element, Launcher, Slice, device_error};
use crate::cuda::ops::{Ops, Rows};
use crate::random::{Draw, Purpose};
use crate::{Error, Result};
use cudarc::driver::{CudaSlice, DevicePtr};
use half::bf16;
use serde::Serialize;
use std::sync::Arc;

/// Relative L2 of a result in f32.
pub(super) const F32_LIMIT: f64 = 1e-5;
/// Of a result in bf16, which keeps 8 bits.
pub(super) const BF16_LIMIT: f64 = 1e-2;
/// Of a sum in f32 of bf16 products: matrix units cut the sum off where f32 arithmetic rounds it.
pub(super) const MATRIX_LIMIT: f64 = 1e-4;
/// The models' own.
pub(super) const EPS: f64 = 1e-6;

const POISON: u8 = 0xFF;
/// Elements behind a tensor that nothing may touch.
const GUARD: usize = 64;

/// How an element lies in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Format {
    Bf16,
    F32,
    F64,
    U64,
}

impl Format {
    fn bytes(self) -> usize {
        match self {
            Self::Bf16 => 2,
            Self::F32 => 4,
            Self::F64 | Self::U64 => 8,
        }
    }

    fn encode(self, value: f64, to: &mut [u8]) {
        match self {
            Self::Bf16 => to.copy_from_slice(&bf16::from_f64(value).to_le_bytes()),
            Self::F32 => to.copy_from_slice(&(value as f32).to_le_bytes()),
            Self::F64 => to.copy_from_slice(&value.to_le_bytes()),
            Self::U64 => to.copy_from_slice(&(value as u64).to_le_bytes()),
        }
    }

    fn decode(self, from: &[u8]) -> f64 {
        let mut bytes = [0u8; 8];
        bytes[..self.bytes()].copy_from_slice(from);
        let [a, b, c, d, ..] = bytes;
        match self {
            Self::Bf16 => bf16::from_le_bytes([a, b]).to_f64(),
            Self::F32 => f64::from(f32::from_le_bytes([a, b, c, d])),
            Self::F64 => f64::from_le_bytes(bytes),
            Self::U64 => u64::from_le_bytes(bytes) as f64,
        }
    }

    /// The value that is stored for `value`.
    pub fn round(self, value: f64) -> f64 {
        let mut bytes = [0u8; 8];
        let bytes = &mut bytes[..self.bytes()];
        self.encode(value, bytes);
        self.decode(bytes)
    }

    fn limit(self) -> f64 {
        match self {
            Self::Bf16 => BF16_LIMIT,
            Self::F32 => F32_LIMIT,
            // Sums of squares of f32 in f64.
            Self::F64 => 1e-12,
            Self::U64 => 0.0,
        }
    }
}

/// A row-major matrix, alone or as one of `parts` that lie side by side in rows of a wider one: then the second.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Matrix {
    pub rows: usize,
    pub columns: usize,
    pub parts: usize,
}

impl Matrix {
    pub fn new(rows: usize, columns: usize) -> Self {
        Self { rows, columns, parts: 1 }
    }

    pub fn part_of(self, parts: usize) -> Self {
        Self { parts, ..self }
    }

    fn stride(&self) -> usize {
        self.columns * self.parts
    }

    /// Elements before the first.
    fn lead(&self) -> usize {
        if self.parts > 1 { self.columns } else { 0 }
    }

    /// Elements of memory, guard included.
    fn extent(&self) -> usize {
        self.rows * self.stride() + GUARD
    }

    /// Where element (row, column) lies.
    fn at(&self, row: usize, column: usize) -> usize {
        self.lead() + row * self.stride() + column
    }

    /// Memory with `values` in their places, or nothing, and poison everywhere else.
    fn image(&self, format: Format, values: Option<&[f64]>) -> Vec<u8> {
        let mut image = vec![POISON; self.extent() * format.bytes()];
        for (index, value) in values.into_iter().flatten().enumerate() {
            let at = self.at(index / self.columns, index % self.columns) * format.bytes();
            format.encode(*value, &mut image[at..at + format.bytes()]);
        }
        image
    }

    /// The values, and whether a byte outside of them differs from `before`.
    fn values(&self, format: Format, image: &[u8], before: &[u8]) -> (Vec<f64>, bool) {
        let bytes = format.bytes();
        let mut values = Vec::with_capacity(self.rows * self.columns);
        let (mut stray, mut end) = (false, 0);
        for row in 0..self.rows {
            let start = self.at(row, 0) * bytes;
            stray |= image[end..start] != before[end..start];
            end = start + self.columns * bytes;
            values.extend(image[start..end].chunks_exact(bytes).map(|element| format.decode(element)));
        }
        (values, stray || image[end..] != before[end..])
    }
}

/// A matrix in device memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    base: u64,
    format: Format,
    matrix: Matrix,
}

impl Place {
    /// From its first element on.
    pub fn slice<E>(&self) -> Slice<E> {
        let len = self.matrix.rows * self.matrix.stride();
        Slice::new(self.base + (self.matrix.lead() * self.format.bytes()) as u64, len)
    }

    /// As operands.
    pub fn rows(&self) -> Rows {
        Rows::new(self.slice(), self.matrix.stride())
    }

    /// As f32.
    pub fn float_rows(&self) -> gemm::Rows<f32> {
        gemm::Rows::new(self.slice(), self.matrix.stride())
    }
}

/// What a kernel reads: the same values on both sides.
#[derive(Clone, Debug)]
pub(super) struct Input {
    pub values: Vec<f64>,
    pub place: Place,
}

/// What a kernel writes.
#[derive(Clone, Debug)]
pub(super) struct Output {
    name: &'static str,
    pub place: Place,
    /// Memory before a launch.
    image: Vec<u8>,
    limit: f64,
}

impl Output {
    /// The values in `image`, and whether anything beside them changed.
    fn values(&self, image: &[u8]) -> (Vec<f64>, bool) {
        self.place.matrix.values(self.place.format, image, &self.image)
    }

    /// With another bound than its format's.
    pub fn within(self, limit: f64) -> Self {
        Self { limit, ..self }
    }
}

/// One output against its reference.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Check {
    pub output: &'static str,
    /// Relative L2; infinite if a value is not finite that should be, or the other way round.
    pub error: f64,
    pub limit: f64,
    /// Whether memory outside of the output changed.
    pub stray: bool,
}

impl Check {
    pub fn passed(&self) -> bool {
        self.error <= self.limit && !self.stray
    }
}

/// An op's outputs, and whether two launches gave the same bits.
#[derive(Clone, Debug)]
pub(super) struct Verdict {
    pub checks: Vec<Check>,
    pub repeats: bool,
}

/// One GPU with kernels of one operand format.
pub(super) struct Rig<'g> {
    pub gpu: &'g Gpu,
    pub ops: Ops,
    pub gemm: Gemm,
    pub arena: Arena,
    pub operand: Format,
    memory: CudaSlice<u8>,
    draw: Draw,
}

impl<'g> Rig<'g> {
    /// With `bytes` of memory for one op's tensors.
    pub fn new(gpu: &'g Gpu, half: bool, bytes: usize) -> Result<Self> {
        // SAFETY: a case poisons the memory before it reads any.
        let memory = unsafe { gpu.stream.alloc::<u8>(bytes) }
            .map_err(|error| device_error(error, format!("allocating {bytes} bytes for tensors")))?;
        let operand = if half { Format::Bf16 } else { Format::F32 };
        let base = memory.device_ptr(&gpu.stream).0;
        Ok(Self {
            gpu,
            ops: Ops { launcher: gpu.launcher(), half, eps: EPS as f32 },
            gemm: Gemm::new(Arc::clone(&gpu.stream), Arc::clone(&gpu.timeline), half)?,
            arena: Arena::new(base, bytes as u64, operand.bytes()),
            operand,
            memory,
            draw: Draw::new(0, Purpose::Noise, 0, ""),
        })
    }

    pub fn half(&self) -> bool {
        self.operand == Format::Bf16
    }

    pub fn launcher(&self) -> &Launcher {
        &self.ops.launcher
    }

    /// Forgets the last case's tensors, poisons all memory, and draws from a stream of the case's own.
    pub fn begin(&mut self, seed: u64, case: &str) -> Result<()> {
        self.draw = Draw::new(seed, Purpose::Noise, 0, case);
        let base = self.memory.device_ptr(&self.gpu.stream).0;
        let bytes = self.memory.len();
        self.arena = Arena::new(base, bytes as u64, self.operand.bytes());
        // SAFETY: the buffer has these bytes, and nothing but this rig uses it.
        unsafe { cudarc::driver::result::memset_d8_async(base, POISON, bytes, self.gpu.stream.cu_stream()) }
            .map_err(|error| device_error(error, "poisoning memory"))
    }

    pub fn draw(&mut self) -> &mut Draw {
        &mut self.draw
    }

    fn place(&mut self, format: Format, matrix: Matrix) -> Result<Place> {
        let bytes = matrix.extent() * format.bytes();
        Ok(Place { base: self.arena.take::<u64>(bytes.div_ceil(8))?.address(), format, matrix })
    }

    fn write(&self, place: &Place, image: &[u8]) -> Result<()> {
        // SAFETY: the place has the image's bytes; a copy from pageable memory has read it when the call returns.
        unsafe { cudarc::driver::result::memcpy_htod_async(place.base, image, self.gpu.stream.cu_stream()) }
            .map_err(|error| device_error(error, format!("copying {} bytes to the device", image.len())))
    }

    fn read(&self, place: &Place, bytes: usize) -> Result<Vec<u8>> {
        let mut image = vec![0u8; bytes];
        // SAFETY: the place has these bytes, and the vector lives until the stream was waited for.
        unsafe { cudarc::driver::result::memcpy_dtoh_async(&mut image, place.base, self.gpu.stream.cu_stream()) }
            .map_err(|error| device_error(error, format!("reading {bytes} bytes")))?;
        self.gpu.synchronize()?;
        Ok(image)
    }

    /// Given values, rounded to the format.
    pub fn given(&mut self, format: Format, matrix: Matrix, values: Vec<f64>) -> Result<Input> {
        if values.len() != matrix.rows * matrix.columns {
            return Err(Error::crash(format!("{} values for {matrix:?}", values.len())));
        }
        let place = self.place(format, matrix)?;
        self.write(&place, &matrix.image(format, Some(&values)))?;
        Ok(Input { values: values.into_iter().map(|value| format.round(value)).collect(), place })
    }

    /// mean + scale * normal.
    pub fn normal(&mut self, format: Format, matrix: Matrix, scale: f64, mean: f64) -> Result<Input> {
        let values = (0..matrix.rows * matrix.columns).map(|_| mean + scale * self.draw.normal()).collect();
        self.given(format, matrix, values)
    }

    /// Normal values in the operands' format.
    pub fn operands(&mut self, matrix: Matrix, scale: f64) -> Result<Input> {
        self.normal(self.operand, matrix, scale, 0.0)
    }

    /// Normal values in f32.
    pub fn floats(&mut self, matrix: Matrix, scale: f64) -> Result<Input> {
        self.normal(Format::F32, matrix, scale, 0.0)
    }

    /// A table of the batch.
    pub fn table<T: Element + cudarc::driver::DeviceRepr>(&mut self, values: &[T]) -> Result<Slice<T>> {
        upload(&self.ops.launcher, &mut self.arena, values)
    }

    /// Poison, to be written.
    pub fn output(&mut self, name: &'static str, format: Format, matrix: Matrix) -> Result<Output> {
        let place = self.place(format, matrix)?;
        Ok(Output { name, place, image: matrix.image(format, None), limit: format.limit() })
    }

    /// Values of `before`, to be changed in place.
    pub fn changed(&mut self, name: &'static str, format: Format, matrix: Matrix, before: &[f64]) -> Result<Output> {
        let output = self.output(name, format, matrix)?;
        Ok(Output { image: matrix.image(format, Some(before)), ..output })
    }

    /// Launches twice from the same memory; the outputs' memory after the first, and whether the second left the same.
    fn twice(
        &mut self,
        outputs: &[&Output],
        mut launch: impl FnMut(&mut Self) -> Result<()>,
    ) -> Result<(Vec<Vec<u8>>, bool)> {
        let mut pass = || -> Result<Vec<Vec<u8>>> {
            for output in outputs {
                self.write(&output.place, &output.image)?;
            }
            let mark = self.arena.mark();
            launch(self)?;
            self.arena.release(mark);
            self.gpu.synchronize()?;
            outputs.iter().map(|output| self.read(&output.place, output.image.len())).collect()
        };
        let first = pass()?;
        let repeats = pass()? == first;
        Ok((first, repeats))
    }

    /// Launches twice, and compares what is there with what is expected.
    pub fn compare(
        &mut self,
        expected: &[(&Output, &[f64])],
        launch: impl FnMut(&mut Self) -> Result<()>,
    ) -> Result<Verdict> {
        let outputs: Vec<&Output> = expected.iter().map(|(output, _)| *output).collect();
        let (images, repeats) = self.twice(&outputs, launch)?;
        let check = |((output, reference), image): (&(&Output, &[f64]), &Vec<u8>)| {
            let (values, stray) = output.values(image);
            Check { output: output.name, error: relative(&values, reference), limit: output.limit, stray }
        };
        Ok(Verdict { checks: expected.iter().zip(&images).map(check).collect(), repeats })
    }

    /// Launches twice; the values, and a verdict on the bits alone.
    pub fn measure(
        &mut self,
        output: &Output,
        launch: impl FnMut(&mut Self) -> Result<()>,
    ) -> Result<(Vec<f64>, Verdict)> {
        let (images, repeats) = self.twice(&[output], launch)?;
        let (values, stray) = images.first().map(|image| output.values(image)).unwrap_or_default();
        let finite = values.iter().all(|value| value.is_finite());
        let error = if finite { 0.0 } else { f64::INFINITY };
        Ok((values, Verdict { checks: vec![Check { output: output.name, error, limit: 0.0, stray }], repeats }))
    }
}

/// ||a - b|| / ||b||, the plain norm of a if b is zero. What is not finite in b must be the same in a, and nothing else may
/// be: infinite otherwise.
pub(super) fn relative(a: &[f64], b: &[f64]) -> f64 {
    if a.len() != b.len() {
        return f64::INFINITY;
    }
    let (mut difference, mut norm) = (0.0, 0.0);
    for (&a, &b) in a.iter().zip(b) {
        if b.is_finite() && a.is_finite() {
            difference += (a - b) * (a - b);
            norm += b * b;
        } else if a != b && !(a.is_nan() && b.is_nan()) {
            return f64::INFINITY;
        }
    }
    if norm > 0.0 { (difference / norm).sqrt() } else { difference.sqrt() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_that_should_not_be_there_is_an_infinite_error() {
        assert_eq!(relative(&[1.0, 2.0], &[1.0, 2.0]), 0.0);
        assert!((relative(&[3.0, 4.5], &[3.0, 4.0]) - 0.1).abs() < 1e-15);
        assert_eq!(relative(&[0.5, 0.0], &[0.0, 0.0]), 0.5);
        let (infinite, nan) = (f64::INFINITY, f64::NAN);
        assert_eq!(relative(&[nan, 1.0], &[0.0, 1.0]), infinite);
        assert_eq!(relative(&[1.0], &[nan]), infinite);
        assert_eq!(relative(&[infinite], &[-infinite]), infinite);
        assert_eq!(relative(&[1.0], &[1.0, 2.0]), infinite);
        assert_eq!(relative(&[-infinite, nan, 2.0], &[-infinite, nan, 2.0]), 0.0);
    }

    #[test]
    fn memory_outside_of_a_matrix_is_watched_and_its_values_come_back() {
        for format in [Format::Bf16, Format::F32, Format::F64] {
            for matrix in [Matrix::new(3, 8), Matrix::new(2, 8).part_of(3)] {
                let values: Vec<f64> = (0..matrix.rows * matrix.columns).map(|i| i as f64 - 5.0).collect();
                let before = matrix.image(format, None);
                let mut after = matrix.image(format, Some(&values));
                assert_eq!(matrix.values(format, &after, &before), (values, false));
                let last = after.len() - 1;
                after[last] = 0;
                assert!(matrix.values(format, &after, &before).1, "behind the end");
                let mut after = before.clone();
                after[matrix.at(1, 0) * format.bytes() - 1] = 0;
                let stray = matrix.values(format, &after, &before).1;
                assert_eq!(stray, matrix.parts > 1, "between rows, if anything is there");
            }
        }
        assert_eq!(Format::Bf16.round(1.0 + 2f64.powi(-9)), 1.0);
        assert_eq!(Format::U64.round(u64::MAX as f64), u64::MAX as f64);
    }
}
