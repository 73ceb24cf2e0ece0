//! Principal components of many long vectors, the same bits on every run and every number of threads.
//!
//! Second moments are summed in a fixed order (f32 inside a block, f64 across blocks); the leading eigenvectors come
//! from subspace iteration in f64. Threads only share out rows; no sum is ever split between them.

use rayon::prelude::*;

use crate::Result;

/// Columns of a packed panel, and rows of a tile of the moment matrix.
const PANEL: usize = 8;
/// Vectors summed in f32 before they enter the f64 sum.
const BLOCK: usize = 512;
/// Directions iterated beyond those asked for: they speed convergence up and are then dropped.
const EXTRA: usize = 16;

/// First and second moments of vectors.
pub(super) struct Moments {
    dim: usize,
    count: usize,
    /// [dim]
    sum: Vec<f64>,
    /// [dim, dim]; only the panels on and below the diagonal are kept up.
    products: Vec<f64>,
    /// Vectors that wait for their block to fill: a pass over `products` is not worth a few.
    pending: Vec<f32>,
}

impl Moments {
    /// No vectors yet. `dim` must be a multiple of 8.
    pub fn new(dim: usize) -> Self {
        assert!(dim.is_multiple_of(PANEL), "dim {dim} is no multiple of {PANEL}");
        Self { dim, count: 0, sum: vec![0.0; dim], products: vec![0.0; dim * dim], pending: Vec::new() }
    }

    /// Adds vectors [n, dim]. They are summed a block at a time, so how many come in one call changes no bit.
    pub fn add(&mut self, vectors: &[f32]) {
        self.pending.extend_from_slice(vectors);
        let block = BLOCK * self.dim;
        let whole = self.pending.len() / block * block;
        let rest = self.pending.split_off(whole);
        let full = std::mem::replace(&mut self.pending, rest);
        for vectors in full.chunks_exact(block) {
            self.add_block(vectors);
        }
    }

    fn add_block(&mut self, vectors: &[f32]) {
        let dim = self.dim;
        let count = vectors.len() / dim;
        if count == 0 {
            return;
        }
        self.count += count;
        for vector in vectors.chunks_exact(dim) {
            for (sum, value) in self.sum.iter_mut().zip(vector) {
                *sum += f64::from(*value);
            }
        }
        // [dim / PANEL, count, PANEL]: a tile then reads two runs of memory from end to end.
        let mut panels = vec![0.0_f32; count * dim];
        panels.par_chunks_exact_mut(count * PANEL).enumerate().for_each(|(panel, packed)| {
            for (row, vector) in packed.chunks_exact_mut(PANEL).zip(vectors.chunks_exact(dim)) {
                row.copy_from_slice(&vector[panel * PANEL..(panel + 1) * PANEL]);
            }
        });
        let panels: Vec<&[f32]> = panels.chunks_exact(count * PANEL).collect();
        self.products.par_chunks_exact_mut(PANEL * dim).enumerate().for_each(|(left, rows)| {
            for right in 0..=left {
                let tile = tile(panels[left], panels[right]);
                for (row, products) in rows.chunks_exact_mut(dim).zip(&tile) {
                    for (sum, product) in row[right * PANEL..].iter_mut().zip(products) {
                        *sum += f64::from(*product);
                    }
                }
            }
        });
    }

    /// The mean, and the covariance [dim, dim] in full.
    fn covariance(mut self) -> (Vec<f64>, Vec<f64>) {
        let rest = std::mem::take(&mut self.pending);
        self.add_block(&rest);
        let (dim, count) = (self.dim, self.count.max(1) as f64);
        let mean: Vec<f64> = self.sum.iter().map(|sum| sum / count).collect();
        for row in 0..dim {
            for column in 0..=row {
                let value = self.products[row * dim + column] / count - mean[row] * mean[column];
                self.products[row * dim + column] = value;
                self.products[column * dim + row] = value;
            }
        }
        (mean, self.products)
    }
}

/// Products of two panels, summed over the vectors.
fn tile(left: &[f32], right: &[f32]) -> [[f32; PANEL]; PANEL] {
    // Two halves: eight by eight sums do not fit the registers of baseline x86-64.
    let half = |offset: usize| {
        let mut sums = [[0.0_f32; PANEL]; PANEL / 2];
        for (a, b) in left.chunks_exact(PANEL).zip(right.chunks_exact(PANEL)) {
            for row in 0..PANEL / 2 {
                for column in 0..PANEL {
                    sums[row][column] += a[offset + row] * b[column];
                }
            }
        }
        sums
    };
    let (upper, lower) = (half(0), half(PANEL / 2));
    std::array::from_fn(|row| if row < PANEL / 2 { upper[row] } else { lower[row - PANEL / 2] })
}

/// The directions of largest variance.
pub(super) struct Components {
    /// [dim]
    pub mean: Vec<f64>,
    /// [count, dim], orthonormal, by falling variance; the largest entry of each is positive.
    pub directions: Vec<f64>,
    /// [count]
    pub variances: Vec<f64>,
}

/// The `count` leading components; `progress` is told each iteration, and ends the search with its error.
pub(super) fn components(
    moments: Moments,
    count: usize,
    iterations: usize,
    progress: impl Fn(usize) -> Result<()>,
) -> Result<Components> {
    let dim = moments.dim;
    let (mean, covariance) = moments.covariance();
    let width = (count + EXTRA).min(dim);
    let mut basis = start(dim, width);
    orthonormalise(&mut basis, dim, width);
    for iteration in 0..iterations {
        basis = multiply(&covariance, &basis, dim, width);
        orthonormalise(&mut basis, dim, width);
        progress(iteration + 1)?;
    }
    // Rayleigh-Ritz: the eigenvectors within the subspace that was found.
    let image = multiply(&covariance, &basis, dim, width);
    let mut small = vec![0.0; width * width];
    for row in 0..dim {
        for a in 0..width {
            for b in 0..width {
                small[a * width + b] += basis[row * width + a] * image[row * width + b];
            }
        }
    }
    let (values, vectors) = jacobi(small, width);
    let mut order: Vec<usize> = (0..width).collect();
    order.sort_by(|a, b| values[*b].total_cmp(&values[*a]).then(a.cmp(b)));
    order.truncate(count);
    let mut directions = Vec::with_capacity(count * dim);
    for index in &order {
        let direction = basis
            .chunks_exact(width)
            .map(|row| (0..width).map(|k| row[k] * vectors[k * width + index]).sum::<f64>())
            .collect::<Vec<_>>();
        // An eigenvector's sign is free: fix it, so that a refit is comparable.
        let largest =
            direction.iter().fold(0.0_f64, |best, value| if value.abs() > best.abs() { *value } else { best });
        let sign = if largest < 0.0 { -1.0 } else { 1.0 };
        directions.extend(direction.into_iter().map(|value| sign * value));
    }
    Ok(Components { mean, directions, variances: order.iter().map(|index| values[*index].max(0.0)).collect() })
}

/// [dim, width] of a fixed pseudo-random pattern (splitmix64): any start that is not orthogonal to the answer serves.
fn start(dim: usize, width: usize) -> Vec<f64> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut value = state;
        value = (value ^ value >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        value = (value ^ value >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (value ^ value >> 31) as i64 as f64 / 2_f64.powi(63)
    };
    (0..dim * width).map(|_| next()).collect()
}

/// Square [dim, dim] times [dim, width].
fn multiply(square: &[f64], basis: &[f64], dim: usize, width: usize) -> Vec<f64> {
    let mut product = vec![0.0; dim * width];
    product.par_chunks_exact_mut(width).zip(square.par_chunks_exact(dim)).for_each(|(out, row)| {
        for (factor, basis_row) in row.iter().zip(basis.chunks_exact(width)) {
            for (sum, value) in out.iter_mut().zip(basis_row) {
                *sum += factor * value;
            }
        }
    });
    product
}

/// Gram-Schmidt on the columns of [dim, width], twice for accuracy. A column that vanishes is left zero.
fn orthonormalise(basis: &mut [f64], dim: usize, width: usize) {
    let mut columns: Vec<Vec<f64>> =
        (0..width).map(|column| (0..dim).map(|row| basis[row * width + column]).collect()).collect();
    for index in 0..width {
        let (before, rest) = columns.split_at_mut(index);
        let Some(column) = rest.first_mut() else { continue };
        for _ in 0..2 {
            for other in before.iter() {
                let overlap: f64 = dot(column, other);
                for (value, other) in column.iter_mut().zip(other) {
                    *value -= overlap * other;
                }
            }
            let norm = dot(column, column).sqrt();
            if norm > 1e-150 {
                column.iter_mut().for_each(|value| *value /= norm);
            }
        }
    }
    for (row, values) in basis.chunks_exact_mut(width).enumerate() {
        for (value, column) in values.iter_mut().zip(&columns) {
            *value = column[row];
        }
    }
}

/// Four running sums: one would wait for each addition before it starts the next.
fn dot(a: &[f64], b: &[f64]) -> f64 {
    let mut sums = [0.0; 4];
    for (a, b) in a.chunks(4).zip(b.chunks(4)) {
        for (sum, (a, b)) in sums.iter_mut().zip(a.iter().zip(b)) {
            *sum += a * b;
        }
    }
    sums.iter().sum()
}

/// Eigenvalues and eigenvectors (columns) of a symmetric [n, n] matrix, by cyclic Jacobi rotations.
fn jacobi(mut matrix: Vec<f64>, n: usize) -> (Vec<f64>, Vec<f64>) {
    let mut vectors = vec![0.0; n * n];
    for index in 0..n {
        vectors[index * n + index] = 1.0;
    }
    // Convergence is quadratic: a matrix of this size needs about 8 sweeps.
    for _ in 0..30 {
        let mut off = 0.0;
        let mut total = 0.0;
        for row in 0..n {
            for column in 0..n {
                let square = matrix[row * n + column].powi(2);
                total += square;
                off += if row == column { 0.0 } else { square };
            }
        }
        if off <= 1e-28 * total {
            break;
        }
        for p in 0..n {
            for q in p + 1..n {
                rotate(&mut matrix, &mut vectors, n, p, q);
            }
        }
    }
    ((0..n).map(|index| matrix[index * n + index]).collect(), vectors)
}

fn rotate(matrix: &mut [f64], vectors: &mut [f64], n: usize, p: usize, q: usize) {
    let apq = matrix[p * n + q];
    if apq == 0.0 {
        return;
    }
    let theta = (matrix[q * n + q] - matrix[p * n + p]) / (2.0 * apq);
    let t = if theta >= 0.0 { 1.0 } else { -1.0 } / (theta.abs() + (theta * theta + 1.0).sqrt());
    let c = 1.0 / (t * t + 1.0).sqrt();
    let s = t * c;
    for k in 0..n {
        let (a, b) = (matrix[k * n + p], matrix[k * n + q]);
        matrix[k * n + p] = c * a - s * b;
        matrix[k * n + q] = s * a + c * b;
    }
    for k in 0..n {
        let (a, b) = (matrix[p * n + k], matrix[q * n + k]);
        matrix[p * n + k] = c * a - s * b;
        matrix[q * n + k] = s * a + c * b;
    }
    for k in 0..n {
        let (a, b) = (vectors[k * n + p], vectors[k * n + q]);
        vectors[k * n + p] = c * a - s * b;
        vectors[k * n + q] = s * a + c * b;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Vectors with variance 9, 4, 1 along three known orthonormal directions around a mean.
    fn vectors(dim: usize, count: usize) -> (Vec<f32>, Vec<Vec<f64>>) {
        let mut basis = start(dim, 3);
        orthonormalise(&mut basis, dim, 3);
        let directions: Vec<Vec<f64>> =
            (0..3).map(|column| basis.chunks_exact(3).map(|row| row[column]).collect()).collect();
        let noise = start(count, 3);
        let mut vectors = Vec::new();
        for sample in noise.chunks_exact(3) {
            for row in basis.chunks_exact(3) {
                // Uniform in [-1, 1] has variance 1/3.
                let value = (0..3).map(|k| (3 - k) as f64 * 3_f64.sqrt() * sample[k] * row[k]).sum::<f64>();
                vectors.push((value + 0.25) as f32);
            }
        }
        (vectors, directions)
    }

    #[test]
    fn known_directions_and_variances_are_found() {
        let (dim, count) = (64, 5000);
        let (vectors, directions) = vectors(dim, count);
        let mut moments = Moments::new(dim);
        moments.add(&vectors);
        let found = components(moments, 3, 20, |_| Ok(())).unwrap();
        for (index, expected) in [9.0, 4.0, 1.0].into_iter().enumerate() {
            let variance = found.variances[index];
            assert!((variance / expected - 1.0).abs() < 0.05, "variance {variance}, expected {expected}");
            let overlap = dot(&found.directions[index * dim..(index + 1) * dim], &directions[index]).abs();
            assert!(overlap > 0.999, "direction {index} overlaps {overlap}");
        }
        assert!(found.mean.iter().all(|mean| (mean - 0.25).abs() < 0.1));
    }

    #[test]
    fn moments_are_those_of_the_definition() {
        let dim = 16;
        let vectors: Vec<f32> = start(300, dim).into_iter().map(|value| value as f32).collect();
        let mut moments = Moments::new(dim);
        moments.add(&vectors[..100 * dim]);
        moments.add(&vectors[100 * dim..]);
        let (mean, covariance) = moments.covariance();
        let average = |of: &dyn Fn(&[f32]) -> f64| vectors.chunks_exact(dim).map(of).sum::<f64>() / 300.0;
        for a in 0..dim {
            assert!((mean[a] - average(&|vector| f64::from(vector[a]))).abs() < 1e-6);
            for b in 0..dim {
                let expected = average(&|vector| (f64::from(vector[a]) - mean[a]) * (f64::from(vector[b]) - mean[b]));
                assert!((covariance[a * dim + b] - expected).abs() < 1e-6);
            }
        }
    }

    #[test]
    fn the_number_of_threads_changes_no_bit() {
        let (vectors, _) = vectors(64, 700);
        let run = |threads: usize| {
            rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap().install(|| {
                let mut moments = Moments::new(64);
                moments.add(&vectors);
                components(moments, 8, 5, |_| Ok(())).unwrap().directions
            })
        };
        let one: Vec<u64> = run(1).iter().map(|value| value.to_bits()).collect();
        let three: Vec<u64> = run(3).iter().map(|value| value.to_bits()).collect();
        assert_eq!(one, three);
    }
}
