//! Attention over the pairs that a plan shows, and no others.
//!
//! The scores of a block of queries stay in cache and are never stored: the backward pass recomputes them. A kept
//! log-sum-exp would spare it no exponential, only a maximum and a sum, so nothing is kept.
//!
//! Queries whose keys do not touch (episodes, mostly) are independent. The backward pass is parallel over these and the
//! heads, and one after another within, so every sum has one order and no two threads add to one gradient.

use super::attention_plan::{AttentionPlan, Group};
use super::{Element, dispatch, in_float, on_cpu, reference, slice, storage, sum_by, values};
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp3, Layout, Result, Shape, Tensor, bail};
use ndarray::linalg::general_mat_mul;
use ndarray::{Array2, ArrayView2, ArrayViewMut2, Axis, LinalgScalar, s};
use rayon::prelude::*;
use std::ops::Range;
use std::sync::Arc;

/// softmax(q k^T / sqrt(D/heads) + bias) v over the pairs of `plan`: q [L, D], k [S, D], v [S, D] -> [L, D].
///
/// Heads are consecutive slices of D. A query that sees nothing gives 0 and gets no gradient. `k` and `v` are cast to
/// q's dtype.
pub fn planned_attention(
    q_ld: &Tensor,
    k_sd: &Tensor,
    v_sd: &Tensor,
    heads: usize,
    plan: &Arc<AttentionPlan>,
) -> Result<Tensor> {
    in_float(q_ld, |q| {
        let k = k_sd.to_dtype(q.dtype())?.contiguous()?;
        let v = v_sd.to_dtype(q.dtype())?.contiguous()?;
        on_cpu(
            q,
            |q| q.apply_op3(&k, &v, PlannedAttention { heads, plan: Arc::clone(plan) }),
            |q| reference::planned_attention(q, &k, &v, heads, plan),
        )
    })
}

/// Scores of a block, in elements: 256 KiB of f32, a share of a core's second-level cache. A constant, so that the
/// order of every sum depends on the plan alone.
const BLOCK_SCORES: usize = 1 << 16;
/// Fewest and most queries of a block: enough for the products to reach their speed.
const BLOCK_QUERIES: [usize; 2] = [16, 64];

struct PlannedAttention {
    heads: usize,
    plan: Arc<AttentionPlan>,
}

/// Groups of the plan, by index, whose keys no other group sees.
struct Component {
    groups: Vec<usize>,
    /// Spans all keys of the groups.
    keys: Range<usize>,
}

/// The backward pass of one head of one component.
struct Share<'a, T> {
    head: usize,
    /// dq [queries, d] of each group, in the order of the plan.
    groups: Vec<(&'a Group, ArrayViewMut2<'a, T>)>,
    /// The key of the first row of dk and dv.
    first_key: usize,
    dk: ArrayViewMut2<'a, T>,
    dv: ArrayViewMut2<'a, T>,
}

impl PlannedAttention {
    /// Where no key is shared the plan falls apart. Groups that see nothing are in no component.
    fn components(&self) -> Vec<Component> {
        let span = |(index, group): (usize, &Group)| {
            let mut intervals = group.intervals();
            let first = intervals.next()?;
            Some((first.start..intervals.last().map_or(first.end, |last| last.end), index))
        };
        let mut spans: Vec<_> = self.plan.groups().iter().enumerate().filter_map(span).collect();
        spans.sort_by_key(|(keys, index)| (keys.start, *index));
        let mut components: Vec<Component> = Vec::new();
        for (keys, group) in spans {
            match components.last_mut() {
                Some(last) if keys.start < last.keys.end => {
                    last.keys.end = last.keys.end.max(keys.end);
                    last.groups.push(group);
                }
                _ => components.push(Component { groups: vec![group], keys }),
            }
        }
        components
    }

    /// The columns of one head of a [rows, D].
    fn head<'a, T>(&self, head: usize, x: ArrayView2<'a, T>) -> ArrayView2<'a, T> {
        let width = x.ncols() / self.heads;
        x.slice_move(s![.., head * width..(head + 1) * width])
    }

    /// The rows of one head of a transposed [D, rows].
    fn head_t<'a, T>(&self, head: usize, x_t: ArrayView2<'a, T>) -> ArrayView2<'a, T> {
        let width = x_t.nrows() / self.heads;
        x_t.slice_move(s![head * width..(head + 1) * width, ..])
    }

    /// Softmax of the scores of queries q [n, d] of a group against all it sees of k_t [d, S]: p [n, keys].
    fn probabilities<T: Real>(&self, group: &Group, q: &ArrayView2<T>, k_t: &ArrayView2<T>, p: &mut [T]) -> Result<()> {
        let shape = (q.nrows(), group.key_count());
        let scale = T::from_f64((q.ncols() as f64).sqrt().recip());
        for (columns, keys) in columns(group) {
            let mut scores = matrix_mut(p, shape)?.slice_move(s![.., columns]);
            general_mat_mul(scale, q, &k_t.slice(s![.., keys]), T::zero(), &mut scores);
        }
        for row in p.chunks_exact_mut(shape.1) {
            if let Some(bias) = self.plan.key_bias() {
                let bias = group.intervals().flat_map(|keys| &bias[keys]);
                row.iter_mut().zip(bias).for_each(|(score, &bias)| *score += T::from_f64(bias as f64));
            }
            softmax(row);
        }
        Ok(())
    }

    fn forward<T: Real>(&self, [q, k, v]: [ArrayView2<T>; 3]) -> Result<Vec<T>> {
        let mut out = vec![T::zero(); q.len()];
        let mut out_ld = matrix_mut(&mut out, q.dim())?;
        let k_t = transposed(k);
        let blocks: Vec<_> = self.plan.groups().iter().flat_map(|g| blocks(g).map(move |block| (g, block))).collect();
        let work: Vec<_> = out_ld
            .axis_chunks_iter_mut(Axis(1), q.ncols() / self.heads)
            .enumerate()
            .flat_map(|(head, out)| {
                let parts = split_rows(out, blocks.iter().map(|(_, block)| block.clone()));
                blocks.iter().zip(parts).map(move |(block, out)| (head, block, out))
            })
            .collect();
        work.into_par_iter().try_for_each_init(Vec::new, |p, (head, (group, block), mut out)| {
            let (q, k_t, v) = (self.head(head, q), self.head_t(head, k_t.view()), self.head(head, v));
            p.resize(block.len() * group.key_count(), T::zero());
            self.probabilities(group, &q.slice(s![block.clone(), ..]), &k_t, p)?;
            let p = matrix(p, (block.len(), group.key_count()))?;
            for (columns, keys) in columns(group) {
                general_mat_mul(T::one(), &p.slice(s![.., columns]), &v.slice(s![keys, ..]), T::one(), &mut out);
            }
            Ok::<(), candle_core::Error>(())
        })?;
        Ok(out)
    }

    /// dq, dk, dv from q, k, v, the output and its gradient.
    fn backward<T: Real>(&self, [q, k, v, out, grad]: [ArrayView2<T>; 5]) -> Result<[Vec<T>; 3]> {
        let mut gradients = [q, k, v].map(|x| vec![T::zero(); x.len()]);
        let [dq, dk, dv] = &mut gradients;
        let (k_t, v_t) = (transposed(k), transposed(v));
        let components = self.components();
        let (mut dq, mut dk, mut dv) = (matrix_mut(dq, q.dim())?, matrix_mut(dk, k.dim())?, matrix_mut(dv, v.dim())?);
        let width = q.ncols() / self.heads;
        let keys = || components.iter().map(|component| component.keys.clone());
        let mut shares = Vec::with_capacity(self.heads * components.len());
        for (head, ((dq, dk), dv)) in (dq.axis_chunks_iter_mut(Axis(1), width))
            .zip(dk.axis_chunks_iter_mut(Axis(1), width))
            .zip(dv.axis_chunks_iter_mut(Axis(1), width))
            .enumerate()
        {
            let queries = self.plan.groups().iter().map(|group| range(&group.queries));
            let mut dq: Vec<_> = split_rows(dq, queries).into_iter().map(Some).collect();
            for ((component, dk), dv) in components.iter().zip(split_rows(dk, keys())).zip(split_rows(dv, keys())) {
                let groups = component.groups.iter().filter_map(|&i| Some((&self.plan.groups()[i], dq[i].take()?)));
                shares.push(Share { head, groups: groups.collect(), first_key: component.keys.start, dk, dv });
            }
        }
        shares.into_par_iter().try_for_each_init(Default::default, |scratch, share| {
            let inputs = [q, k, out, grad].map(|x| self.head(share.head, x));
            let transposed = [&k_t, &v_t].map(|x| self.head_t(share.head, x.view()));
            self.backward_share(inputs, transposed, share, scratch)
        })?;
        Ok(gradients)
    }

    fn backward_share<T: Real>(
        &self,
        [q, k, out, grad]: [ArrayView2<T>; 4],
        [k_t, v_t]: [ArrayView2<T>; 2],
        mut share: Share<T>,
        [p, ds]: &mut [Vec<T>; 2],
    ) -> Result<()> {
        let scale = T::from_f64((q.ncols() as f64).sqrt().recip());
        for (group, dq) in share.groups {
            for (block, mut dq) in blocks(group).zip(dq.into_axis_chunks_iter_mut(Axis(0), block_rows(group))) {
                let [q, out, grad] = [&q, &out, &grad].map(|x| x.slice(s![block.clone(), ..]));
                let shape = (block.len(), group.key_count());
                p.resize(shape.0 * shape.1, T::zero());
                ds.resize(shape.0 * shape.1, T::zero());
                self.probabilities(group, &q, &k_t, p)?;
                for (columns, keys) in columns(group) {
                    let mut dp = matrix_mut(ds, shape)?.slice_move(s![.., columns]);
                    general_mat_mul(T::one(), &grad, &v_t.slice(s![.., keys]), T::zero(), &mut dp);
                }
                let rows = ds.chunks_exact_mut(shape.1).zip(p.chunks_exact(shape.1));
                for ((ds, p), (out, grad)) in rows.zip(out.rows().into_iter().zip(grad.rows())) {
                    let inner = sum_by(out.len(), |i| out[i] * grad[i]);
                    for (ds, &p) in ds.iter_mut().zip(p) {
                        *ds = scale * p * (*ds - inner);
                    }
                }
                let (p, ds) = (matrix(p, shape)?, matrix(ds, shape)?);
                for (columns, keys) in columns(group) {
                    let (p, ds) = (p.slice(s![.., columns.clone()]), ds.slice(s![.., columns]));
                    general_mat_mul(T::one(), &ds, &k.slice(s![keys.clone(), ..]), T::one(), &mut dq);
                    let keys = keys.start - share.first_key..keys.end - share.first_key;
                    let [mut dk, mut dv] = [&mut share.dk, &mut share.dv].map(|x| x.slice_mut(s![keys.clone(), ..]));
                    general_mat_mul(T::one(), &ds.t(), &q, T::one(), &mut dk);
                    general_mat_mul(T::one(), &p.t(), &grad, T::one(), &mut dv);
                }
            }
        }
        Ok(())
    }
}

/// What `ndarray`'s products need besides [`Element`].
trait Real: Element + LinalgScalar {}
impl Real for f32 {}
impl Real for f64 {}

fn range(range: &Range<u32>) -> Range<usize> {
    range.start as usize..range.end as usize
}

/// Where each interval of a group stands among the columns of its scores.
fn columns(group: &Group) -> impl Iterator<Item = (Range<usize>, Range<usize>)> {
    group.intervals().scan(0, |end, keys| {
        let start = *end;
        *end += keys.len();
        Some((start..*end, keys))
    })
}

/// Queries of a group's blocks.
fn block_rows(group: &Group) -> usize {
    (BLOCK_SCORES / group.key_count().max(1)).clamp(BLOCK_QUERIES[0], BLOCK_QUERIES[1])
}

/// A group's queries in blocks whose scores fit the cache; none if it sees nothing.
fn blocks(group: &Group) -> impl Iterator<Item = Range<usize>> + use<> {
    let (Range { start, end }, rows) = (range(&group.queries), block_rows(group));
    let end = if group.key_count() == 0 { start } else { end };
    (start..end).step_by(rows).map(move |first| first..end.min(first + rows))
}

fn matrix<T>(values: &[T], shape: (usize, usize)) -> Result<ArrayView2<'_, T>> {
    ArrayView2::from_shape(shape, values).map_err(candle_core::Error::wrap)
}

fn matrix_mut<T>(values: &mut [T], shape: (usize, usize)) -> Result<ArrayViewMut2<'_, T>> {
    ArrayViewMut2::from_shape(shape, values).map_err(candle_core::Error::wrap)
}

/// The products read their right side along its rows: transposed once, it is read in order by every block.
fn transposed<T: Real>(x: ArrayView2<T>) -> Array2<T> {
    x.t().as_standard_layout().into_owned()
}

/// Disjoint ranges of rows, which must be in order.
fn split_rows<'a, T>(
    mut rest: ArrayViewMut2<'a, T>,
    ranges: impl Iterator<Item = Range<usize>>,
) -> Vec<ArrayViewMut2<'a, T>> {
    let (mut parts, mut start) = (Vec::new(), 0);
    for range in ranges {
        let (part, tail) = rest.split_at(Axis(0), range.start - start).1.split_at(Axis(0), range.len());
        parts.push(part);
        (rest, start) = (tail, range.end);
    }
    parts
}

/// Softmax in place, maximum subtracted first.
fn softmax<T: Element>(row: &mut [T]) {
    let maximum = maximum(row);
    for x in row.iter_mut() {
        *x = (*x - maximum).exp();
    }
    let inverse = sum_by(row.len(), |i| row[i]).recip();
    for x in row.iter_mut() {
        *x *= inverse;
    }
}

/// Largest of some numbers, in eight interleaved lanes: one after another waits for each comparison.
fn maximum<T: Element>(row: &[T]) -> T {
    let (lanes, rest) = row.as_chunks::<8>();
    let larger = |a: T, b: T| if b > a { b } else { a };
    let mut largest = [T::neg_infinity(); 8];
    for lane in lanes {
        largest = std::array::from_fn(|i| larger(largest[i], lane[i]));
    }
    largest.iter().chain(rest).copied().fold(T::neg_infinity(), larger)
}

impl CustomOp3 for PlannedAttention {
    fn name(&self) -> &'static str {
        "planned_attention"
    }

    fn cpu_fwd(
        &self,
        q: &CpuStorage,
        q_layout: &Layout,
        k: &CpuStorage,
        k_layout: &Layout,
        v: &CpuStorage,
        v_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        fn kernel<T: Real>(op: &PlannedAttention, inputs: [(&CpuStorage, &Layout); 3]) -> Result<(CpuStorage, Shape)> {
            let [q, k, v] = inputs;
            let view = |(x, layout)| matrix(slice::<T>(x, layout)?, layout.shape().dims2()?);
            let out = op.forward([view(q)?, view(k)?, view(v)?])?;
            Ok(storage(out, q.1.shape()))
        }
        let (queries, width) = q_layout.shape().dims2()?;
        let memory = (self.plan.keys(), width);
        if self.heads == 0 || width == 0 || !width.is_multiple_of(self.heads) {
            bail!("planned_attention: {width} channels do not split into {} heads", self.heads);
        }
        if queries != self.plan.queries() || k_layout.shape().dims2()? != memory || v_layout.shape().dims2()? != memory
        {
            bail!(
                "planned_attention: q {:?}, k {:?}, v {:?} do not fit a plan of {} queries and {} keys",
                q_layout.shape(),
                k_layout.shape(),
                v_layout.shape(),
                self.plan.queries(),
                self.plan.keys()
            );
        }
        dispatch!(q.dtype(), "planned_attention", kernel(self, [(q, q_layout), (k, k_layout), (v, v_layout)]))
    }

    fn bwd(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        out: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        fn kernel<T: Real>(op: &PlannedAttention, tensors: [&Tensor; 5]) -> Result<[Tensor; 3]> {
            let [q, k, v, out, grad] = tensors;
            let values = [values::<T>(q)?, values::<T>(k)?, values::<T>(v)?, values::<T>(out)?, values::<T>(grad)?];
            let view = |i: usize| matrix(&values[i], tensors[i].dims2()?);
            let [dq, dk, dv] = op.backward([view(0)?, view(1)?, view(2)?, view(3)?, view(4)?])?;
            let tensor = |gradient, like: &Tensor| Tensor::from_vec(gradient, like.shape(), like.device());
            Ok([tensor(dq, q)?, tensor(dk, k)?, tensor(dv, v)?])
        }
        let [dq, dk, dv] = dispatch!(q.dtype(), "planned_attention backward", kernel(self, [q, k, v, out, grad]))?;
        Ok((Some(dq), Some(dk), Some(dv)))
    }
}
