//! Attention over a plan on the device: which kernels, with which tiles, and their launches.
//!
//! Heads of 128 in bf16 on Hopper have kernels of their own; everything else goes through the plain ones, which any
//! device and shape can run.

use super::arena::Arena;
use super::batch::{AttentionLists, upload};
use super::launch::{Argument, Grid, Launcher, Slice, int, long};
use super::ops::{Ops, Rows};
use crate::Result;
use crate::ops::TileLists;

/// (queries, keys) of a tile, by kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tiling {
    pub forward: [usize; 2],
    /// Gradient of queries.
    pub by_query: [usize; 2],
    /// Gradients of keys and values.
    pub by_key: [usize; 2],
}

/// Side of the plain kernels' tiles.
const PLAIN_TILE: usize = 32;

/// The kernels for one operand dtype and head width.
#[derive(Clone, Debug)]
pub(crate) struct Attention {
    suffix: &'static str,
    head_dim: usize,
    tiling: Tiling,
}

/// One kernel's lists on the device.
#[derive(Clone, Copy, Debug)]
struct Lists {
    start: Slice<i32>,
    list: Slice<i32>,
    order: Slice<i32>,
    tiles: usize,
}

/// A plan on the device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AttentionTables {
    queries: usize,
    keys: usize,
    row_keys: Slice<i32>,
    key_bias: Slice<f32>,
    forward: Lists,
    by_query: Lists,
    by_key: Lists,
}

/// Where the gradients go: [N, D], [S, D], [S, D].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Gradients {
    pub q: Rows,
    pub k: Rows,
    pub v: Rows,
}

impl Lists {
    fn upload(lists: &TileLists, launcher: &Launcher, arena: &mut Arena) -> Result<Self> {
        Ok(Self {
            start: upload(launcher, arena, &lists.start)?,
            list: upload(launcher, arena, &lists.list)?,
            order: upload(launcher, arena, &lists.order)?,
            tiles: lists.tiles(),
        })
    }
}

impl AttentionTables {
    pub fn upload(lists: &AttentionLists, launcher: &Launcher, arena: &mut Arena) -> Result<Self> {
        Ok(Self {
            queries: lists.queries,
            keys: lists.keys,
            row_keys: upload(launcher, arena, &lists.row_keys)?,
            key_bias: match &lists.key_bias {
                Some(bias) => upload(launcher, arena, bias)?,
                None => Slice::null(),
            },
            forward: Lists::upload(&lists.forward, launcher, arena)?,
            by_query: Lists::upload(&lists.by_query, launcher, arena)?,
            by_key: Lists::upload(&lists.by_key, launcher, arena)?,
        })
    }
}

impl Attention {
    pub fn new(ops: &Ops, head_dim: usize) -> Self {
        let plain = [PLAIN_TILE; 2];
        Self {
            suffix: if ops.half { "bf16" } else { "f32" },
            head_dim,
            tiling: Tiling { forward: plain, by_query: plain, by_key: plain },
        }
    }

    /// What the host has to cut a plan into.
    pub fn tiling(&self) -> &Tiling {
        &self.tiling
    }

    fn scale(&self) -> f32 {
        (self.head_dim as f32).sqrt().recip()
    }

    fn name(&self, kernel: &str) -> String {
        format!("{kernel}_{}", self.suffix)
    }

    fn grid(&self, lists: &Lists, heads: usize, tensors: usize) -> Grid {
        // Tiles of f32 padded by one column, and the scores between them.
        let floats = tensors * PLAIN_TILE * (self.head_dim + 1) + 2 * PLAIN_TILE * (PLAIN_TILE + 1);
        Grid::new(lists.tiles * heads, 128).shared((floats * 4) as u32)
    }

    /// The plan's arguments, which come last in every kernel but the one for `delta`.
    fn plan_arguments(&self, tables: &AttentionTables, lists: &Lists) -> Result<[Argument; 10]> {
        Ok([
            tables.row_keys.into(),
            lists.start.into(),
            lists.list.into(),
            lists.order.into(),
            tables.key_bias.into(),
            self.scale().into(),
            int(tables.queries)?,
            int(tables.keys)?,
            int(lists.tiles)?,
            int(self.head_dim)?,
        ])
    }

    /// out [N, D] and log-sum-exp [heads, N] of q [N, D], k and v [S, D].
    pub fn forward(
        &self,
        ops: &Ops,
        inputs: [Rows; 3],
        out: Rows,
        statistics: Slice<f32>,
        tables: &AttentionTables,
        heads: usize,
    ) -> Result<()> {
        let mut arguments: Vec<Argument> = inputs.iter().flat_map(matrix).collect();
        arguments.extend(matrix(&out));
        arguments.push(statistics.into());
        arguments.extend(self.plan_arguments(tables, &tables.forward)?);
        ops.launcher.launch(&self.name("attention"), self.grid(&tables.forward, heads, 3), &arguments)
    }

    /// Gradients of q, k and v from that of the output.
    #[allow(clippy::too_many_arguments)]
    pub fn backward(
        &self,
        ops: &Ops,
        inputs: [Rows; 3],
        (out, statistics): (Rows, Slice<f32>),
        out_gradient: Rows,
        gradients: Gradients,
        tables: &AttentionTables,
        heads: usize,
        arena: &mut Arena,
    ) -> Result<()> {
        let mark = arena.mark();
        let delta: Slice<f32> = arena.take(heads * tables.queries)?;
        let mut arguments: Vec<Argument> = matrix(&out).to_vec();
        arguments.extend(matrix(&out_gradient));
        arguments.extend([delta.into(), int(tables.queries)?, int(heads)?, int(self.head_dim)?]);
        let warps = tables.queries * heads;
        ops.launcher.launch(&self.name("attention_delta"), Grid::new(warps.div_ceil(4), 128), &arguments)?;

        let mut shared: Vec<Argument> = inputs.iter().flat_map(matrix).collect();
        shared.extend(matrix(&out_gradient));
        shared.extend([statistics.into(), delta.into()]);
        let arguments = [
            shared.clone(),
            matrix(&gradients.q).to_vec(),
            self.plan_arguments(tables, &tables.by_query)?.to_vec(),
        ]
        .concat();
        let grid = self.grid(&tables.by_query, heads, 4);
        ops.launcher.launch(&self.name("attention_backward_query"), grid, &arguments)?;
        let arguments = [
            shared,
            matrix(&gradients.k).to_vec(),
            matrix(&gradients.v).to_vec(),
            self.plan_arguments(tables, &tables.by_key)?.to_vec(),
        ]
        .concat();
        let grid = self.grid(&tables.by_key, heads, 4);
        ops.launcher.launch(&self.name("attention_backward_key"), grid, &arguments)?;
        arena.release(mark);
        Ok(())
    }
}

/// A matrix as kernels take it: address and row stride.
fn matrix(rows: &Rows) -> [Argument; 2] {
    [rows.data.into(), long(rows.stride)]
}
