//! Attention over plans: packed episodes with padding, three intervals, text with a key bias, everything.

use super::Table;
use super::rig::{BF16_LIMIT, F32_LIMIT, Format, MATRIX_LIMIT, Matrix, Rig, Verdict};
use crate::Result;
use crate::cuda::attention::{Attention, AttentionTables, Gradients};
use crate::cuda::batch::AttentionLists;
use crate::ops::{AttentionPlan, Group};
use crate::pack::sequence::{FrameTokens, PackedEpisode, Sequence};
use rayon::prelude::*;

/// Heads, and how q, k and v lie: each as one of so many parts in wider rows.
#[derive(Clone, Copy, Debug)]
struct Shape {
    heads: usize,
    head_dim: usize,
    parts: [usize; 3],
}

impl Shape {
    fn width(&self) -> usize {
        self.heads * self.head_dim
    }

    fn scale(&self) -> f64 {
        (self.head_dim as f64).sqrt().recip()
    }
}

pub(super) fn all(rig: &mut Rig<'_>, table: &mut Table) {
    let shape = |heads, head_dim, parts| Shape { heads, head_dim, parts };
    // As the trunk has them: keys and queries by themselves, values where the product of all three left them.
    let trunk = [1, 1, 3];
    let cases: [(&'static str, Shape); 9] = [
        ("packed", shape(2, 24, trunk)),
        ("packed", shape(3, 128, trunk)),
        ("text", shape(2, 52, [1, 1, 2])),
        ("text", shape(2, 128, [1, 1, 2])),
        ("three intervals", shape(4, 48, [3, 3, 3])),
        ("three intervals", shape(2, 128, [3, 3, 3])),
        ("everything", shape(1, 32, trunk)),
        ("everything", shape(2, 128, trunk)),
        ("one token", shape(1, 128, [1, 1, 1])),
    ];
    for (kind, shape) in cases {
        let hopper = Attention::new(&rig.ops, shape.head_dim).is_hopper();
        let (op, backward_op) = match hopper {
            true => ("attention, Hopper", "attention gradients, Hopper"),
            false => ("attention, plain", "attention gradients, plain"),
        };
        let strided = if shape.parts.iter().any(|&parts| parts > 1) { ", strided" } else { "" };
        let words = format!("{kind}, {} heads of {}{strided}", shape.heads, shape.head_dim);
        table.case(rig, op, words.clone(), |rig| {
            let plan = plan(rig, kind)?;
            forward(rig, &plan, shape)
        });
        table.case(rig, backward_op, words, |rig| {
            let plan = plan(rig, kind)?;
            backward(rig, &plan, shape)
        });
    }
}

/// Lengths that fill no tile. Random plans differ from seed to seed.
fn plan(rig: &mut Rig<'_>, kind: &str) -> Result<AttentionPlan> {
    match kind {
        "packed" | "text" => {
            let episode = |frames, valid_frames, chunk, window| PackedEpisode { frames, valid_frames, chunk, window };
            let episodes = [episode(5, 5, 2, 4), episode(9, 7, 3, 64), episode(8, 8, 1, 2)];
            let sequence = Sequence::new(&episodes, FrameTokens { grid: [4, 3], actions: 3 }, 16)?;
            if kind == "packed" {
                return Ok(sequence.attention().as_ref().clone());
            }
            // Two episodes share a prompt; the first prompt has fewer real tokens than the model has slots.
            Ok(sequence.cross_attention(&[0, 1, 0], &[9, 150], 150)?.as_ref().clone())
        }
        "three intervals" => {
            let (queries, keys) = (259, 317);
            let mut groups = Vec::new();
            let mut at = 3;
            while at < queries {
                let draw = rig.draw();
                let end = (at + 1 + draw.below(70)).min(queries);
                // The last keys are nobody's.
                let mut cuts: Vec<u32> = (0..6).map(|_| draw.below(keys - 10) as u32).collect();
                cuts.sort_unstable();
                groups.push(Group {
                    queries: at as u32..end as u32,
                    keys: [cuts[0]..cuts[1], cuts[2]..cuts[3], cuts[4]..cuts[5]],
                });
                at = end + draw.below(4);
            }
            let bias = (0..keys).map(|_| rig.draw().normal() as f32).collect();
            Ok(AttentionPlan::new(queries, keys, groups, Some(bias))?)
        }
        "everything" => whole(301, 143),
        _ => whole(1, 1),
    }
}

fn whole(queries: u32, keys: u32) -> Result<AttentionPlan> {
    let group = Group { queries: 0..queries, keys: [0..keys, 0..0, 0..0] };
    Ok(AttentionPlan::new(queries as usize, keys as usize, vec![group], None)?)
}

/// Attention of every head by its definition.
struct Reference<'a> {
    shape: Shape,
    plan: &'a AttentionPlan,
    /// Of each query.
    keys: Vec<Vec<usize>>,
    q: &'a [f64],
    k: &'a [f64],
    v: &'a [f64],
}

impl<'a> Reference<'a> {
    fn new(shape: Shape, plan: &'a AttentionPlan, [q, k, v]: [&'a [f64]; 3]) -> Self {
        let mut keys = vec![Vec::new(); plan.queries()];
        for group in plan.groups() {
            let seen: Vec<usize> = group.intervals().flatten().collect();
            for query in group.queries.clone() {
                keys[query as usize].clone_from(&seen);
            }
        }
        Self { shape, plan, keys, q, k, v }
    }

    /// One head of one row.
    fn row<'b>(&self, matrix: &'b [f64], row: usize, head: usize) -> &'b [f64] {
        &matrix[row * self.shape.width() + head * self.shape.head_dim..][..self.shape.head_dim]
    }

    /// Scaled and biased, of the keys that a query sees.
    fn scores(&self, query: usize, head: usize) -> Vec<f64> {
        let q = self.row(self.q, query, head);
        let bias = |key: usize| self.plan.key_bias().map_or(0.0, |bias| f64::from(bias[key]));
        let score = |&key: &usize| self.shape.scale() * dot(q, self.row(self.k, key, head)) + bias(key);
        self.keys[query].iter().map(score).collect()
    }

    /// out [N, D] and log-sum-exp [heads, N].
    fn forward(&self) -> (Vec<f64>, Vec<f64>) {
        let Shape { heads, head_dim, .. } = self.shape;
        let queries = self.plan.queries();
        let of_head = |head: usize| {
            let mut out = vec![0.0; queries * head_dim];
            let mut statistics = vec![f64::NEG_INFINITY; queries];
            for (query, out) in out.chunks_exact_mut(head_dim).enumerate() {
                let scores = self.scores(query, head);
                let highest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let sum: f64 = scores.iter().map(|score| (score - highest).exp()).sum();
                if scores.is_empty() {
                    continue;
                }
                statistics[query] = highest + sum.ln();
                for (score, &key) in scores.iter().zip(&self.keys[query]) {
                    axpy(out, (score - statistics[query]).exp(), self.row(self.v, key, head));
                }
            }
            (out, statistics)
        };
        let parts: Vec<_> = (0..heads).into_par_iter().map(of_head).collect();
        let outs: Vec<Vec<f64>> = parts.iter().map(|(out, _)| out.clone()).collect();
        (self.together(&outs, queries), parts.into_iter().flat_map(|(_, statistics)| statistics).collect())
    }

    /// dq [N, D], dk and dv [S, D] from what the forward pass left and the gradient of its output.
    fn backward(&self, [out, statistics, gradient]: [&[f64]; 3]) -> [Vec<f64>; 3] {
        let Shape { heads, head_dim, .. } = self.shape;
        let (queries, keys, scale) = (self.plan.queries(), self.plan.keys(), self.shape.scale());
        let of_head = |head: usize| {
            let mut dq = vec![0.0; queries * head_dim];
            let [mut dk, mut dv] = [vec![0.0; keys * head_dim], vec![0.0; keys * head_dim]];
            for (query, dq) in dq.chunks_exact_mut(head_dim).enumerate() {
                let gradient = self.row(gradient, query, head);
                let delta = dot(gradient, self.row(out, query, head));
                for (score, &key) in self.scores(query, head).iter().zip(&self.keys[query]) {
                    let p = (score - statistics[head * queries + query]).exp();
                    let ds = scale * p * (dot(gradient, self.row(self.v, key, head)) - delta);
                    let place = key * head_dim..(key + 1) * head_dim;
                    axpy(dq, ds, self.row(self.k, key, head));
                    axpy(&mut dk[place.clone()], ds, self.row(self.q, query, head));
                    axpy(&mut dv[place], p, gradient);
                }
            }
            [dq, dk, dv]
        };
        let parts: Vec<[Vec<f64>; 3]> = (0..heads).into_par_iter().map(of_head).collect();
        [(0, queries), (1, keys), (2, keys)].map(|(which, rows)| {
            let of_heads: Vec<Vec<f64>> = parts.iter().map(|part| part[which].clone()).collect();
            self.together(&of_heads, rows)
        })
    }

    /// [rows, D] of [rows, d] a head.
    fn together(&self, heads: &[Vec<f64>], rows: usize) -> Vec<f64> {
        let d = self.shape.head_dim;
        (0..rows).flat_map(|row| heads.iter().flat_map(move |head| head[row * d..(row + 1) * d].to_vec())).collect()
    }
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// to += factor * from
fn axpy(to: &mut [f64], factor: f64, from: &[f64]) {
    to.iter_mut().zip(from).for_each(|(to, from)| *to += factor * from);
}

fn limit(rig: &Rig<'_>) -> f64 {
    if rig.half() { BF16_LIMIT } else { F32_LIMIT }
}

fn forward(rig: &mut Rig<'_>, plan: &AttentionPlan, shape: Shape) -> Result<Verdict> {
    let attention = Attention::new(&rig.ops, shape.head_dim);
    let (queries, keys) = (Matrix::new(plan.queries(), shape.width()), Matrix::new(plan.keys(), shape.width()));
    let q = rig.operands(queries.part_of(shape.parts[0]), 2.0)?;
    let k = rig.operands(keys.part_of(shape.parts[1]), 1.0)?;
    let v = rig.operands(keys.part_of(shape.parts[2]), 1.0)?;
    let (expected, statistics) = Reference::new(shape, plan, [&q.values, &k.values, &v.values]).forward();
    let out = rig.output("out", rig.operand, queries)?.within(limit(rig));
    let lse = rig.output("log-sum-exp", Format::F32, Matrix::new(shape.heads, plan.queries()))?;
    let lse = if rig.half() { lse.within(MATRIX_LIMIT) } else { lse };
    let lists = AttentionLists::new(plan, attention.tiling());
    let tables = AttentionTables::upload(&lists, &rig.ops.launcher, &mut rig.arena)?;
    rig.compare(&[(&out, expected.as_slice()), (&lse, &statistics)], |rig| {
        let inputs = [q.place.rows(), k.place.rows(), v.place.rows()];
        attention.forward(&rig.ops, inputs, out.place.rows(), lse.place.slice(), &tables, shape.heads)
    })
}

fn backward(rig: &mut Rig<'_>, plan: &AttentionPlan, shape: Shape) -> Result<Verdict> {
    let attention = Attention::new(&rig.ops, shape.head_dim);
    let (queries, keys) = (Matrix::new(plan.queries(), shape.width()), Matrix::new(plan.keys(), shape.width()));
    let q = rig.operands(queries.part_of(shape.parts[0]), 2.0)?;
    let k = rig.operands(keys.part_of(shape.parts[1]), 1.0)?;
    let v = rig.operands(keys.part_of(shape.parts[2]), 1.0)?;
    let gradient = rig.operands(queries, 1.0)?;
    let reference = Reference::new(shape, plan, [&q.values, &k.values, &v.values]);
    // What the forward pass leaves, in the format that it has there.
    let (out, statistics) = reference.forward();
    let out = rig.given(rig.operand, queries, out)?;
    let lse = rig.given(Format::F32, Matrix::new(shape.heads, plan.queries()), statistics)?;
    let [dq, dk, dv] = reference.backward([&out.values, &lse.values, &gradient.values]);
    let dq_out = rig.output("dq", rig.operand, queries.part_of(shape.parts[0]))?;
    let dk_out = rig.output("dk", rig.operand, keys.part_of(shape.parts[1]))?;
    let dv_out = rig.output("dv", rig.operand, keys.part_of(shape.parts[2]))?;
    let lists = AttentionLists::new(plan, attention.tiling());
    let tables = AttentionTables::upload(&lists, &rig.ops.launcher, &mut rig.arena)?;
    rig.compare(&[(&dq_out, dq.as_slice()), (&dk_out, &dk), (&dv_out, &dv)], |rig| {
        attention.backward(
            &rig.ops,
            [q.place.rows(), k.place.rows(), v.place.rows()],
            (out.place.rows(), lse.place.slice()),
            gradient.place.rows(),
            Gradients { q: dq_out.place.rows(), k: dk_out.place.rows(), v: dv_out.place.rows() },
            &tables,
            shape.heads,
            &mut rig.arena,
        )
    })
}

#[cfg(test)]
mod tests {
    use super::super::rig::relative;
    use super::*;
    use crate::ops::planned_attention;
    use crate::random::{Draw, Purpose};
    use candle_core::{Device, Tensor, Var};
    use std::sync::Arc;

    #[test]
    fn attention_and_its_gradients_are_those_of_the_op() -> candle_core::Result<()> {
        let groups = vec![
            Group { queries: 0..3, keys: [0..2, 3..5, 6..7] },
            Group { queries: 4..6, keys: [1..8, 0..0, 0..0] },
            Group { queries: 6..7, keys: [0..0, 0..0, 0..0] },
        ];
        let bias = (0..9).map(|i| i as f32 / 4.0).collect();
        let plan = Arc::new(AttentionPlan::new(8, 9, groups, Some(bias))?);
        let shape = Shape { heads: 2, head_dim: 6, parts: [1; 3] };
        let draw = |name: &str, rows: usize| -> Vec<f64> {
            let mut draw = Draw::new(3, Purpose::Noise, 0, name);
            (0..rows * shape.width()).map(|_| draw.normal()).collect()
        };
        let (q, k, v, gradient) = (draw("q", 8), draw("k", 9), draw("v", 9), draw("gradient", 8));
        let reference = Reference::new(shape, &plan, [&q, &k, &v]);
        let (out, statistics) = reference.forward();
        let gradients = reference.backward([&out, &statistics, &gradient]);
        assert!(statistics[3].is_infinite() && statistics[8 + 6].is_infinite(), "queries that see nothing");

        let variable = |values: &[f64], rows: usize| {
            Var::from_tensor(&Tensor::from_slice(values, (rows, shape.width()), &Device::Cpu)?)
        };
        let variables = [variable(&q, 8)?, variable(&k, 9)?, variable(&v, 9)?];
        let y = planned_attention(&variables[0], &variables[1], &variables[2], shape.heads, &plan)?;
        assert!(relative(&out, &y.flatten_all()?.to_vec1::<f64>()?) < 1e-12);
        let weights = Tensor::from_slice(&gradient, (8, shape.width()), &Device::Cpu)?;
        let store = (y * weights)?.sum_all()?.backward()?;
        for (name, (variable, ours)) in ["dq", "dk", "dv"].iter().zip(variables.iter().zip(&gradients)) {
            let theirs: Vec<f64> = store.get(variable).expect("a gradient").flatten_all()?.to_vec1()?;
            assert!(relative(ours, &theirs) < 1e-12, "{name}");
        }
        Ok(())
    }
}
