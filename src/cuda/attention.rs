//! Attention over a plan on the device: which kernels, with which tiles, and their launches.
//!
//! Heads of 128 in bf16 on Hopper have kernels of their own; everything else goes through the plain ones, which any
//! device and shape can run.

use super::arena::Arena;
use super::batch::{AttentionLists, upload};
use super::launch::{Argument, Grid, Launcher, Slice, TensorMap, device_error, int, long};
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
/// The only head width of the kernels for Hopper.
const HOPPER_HEAD: usize = 128;
/// Threads, and bytes of shared memory of the forward, the query and the key kernel.
const HOPPER_THREADS: u32 = 384;
const HOPPER_SHARED: [u32; 3] = [164_864, 197_632, 164_864];
/// Multiprocessors of an H100 or H200, to which the runs of few keys are cut: on every device alike, so that sums agree.
const HOPPER_MULTIPROCESSORS: usize = 132;

/// The kernels for one operand dtype and head width.
#[derive(Clone, Debug)]
pub(crate) struct Attention {
    suffix: &'static str,
    hopper: bool,
    /// Of the device: the blocks of a kernel for Hopper.
    multiprocessors: usize,
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
    /// Entries of the longest list.
    longest: usize,
}

/// A plan on the device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AttentionTables {
    queries: usize,
    keys: usize,
    row_keys: Slice<i32>,
    pub key_bias: Slice<f32>,
    forward: Lists,
    by_query: Lists,
    by_key: Lists,
}

/// What the gradients are computed from: q, k, v, the output's gradient, log-sum-exp and `delta` [heads, N].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Known {
    pub inputs: [Rows; 3],
    pub out_gradient: Rows,
    pub statistics: Slice<f32>,
    pub delta: Slice<f32>,
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
            longest: lists.start.windows(2).map(|ends| (ends[1] - ends[0]) as usize).max().unwrap_or(0),
        })
    }
}

/// Into how many runs the Hopper key kernel cuts each list of `longest` entries, for so many pairs of a key tile and a
/// head: enough to fill the GPU where keys are few. A run costs about 8 entries more than its own.
fn key_splits(pairs: usize, longest: usize) -> usize {
    let cost = |splits: &usize| (pairs * splits).div_ceil(HOPPER_MULTIPROCESSORS) * (longest.div_ceil(*splits) + 8);
    (1..=16).min_by_key(cost).unwrap_or(1)
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
        let hopper = ops.half && head_dim == HOPPER_HEAD && ops.launcher.has("attention_hopper");
        let tiling = match hopper {
            true => Tiling { forward: [128, 128], by_query: [128, 128], by_key: [64, 128] },
            false => Tiling { forward: plain, by_query: plain, by_key: plain },
        };
        let count = cudarc::driver::sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
        let counted = ops.launcher.stream().and_then(|stream| stream.context().attribute(count).ok());
        let multiprocessors = counted.map_or(HOPPER_MULTIPROCESSORS, |count| count.max(1) as usize);
        Self { suffix: if ops.half { "bf16" } else { "f32" }, hopper, multiprocessors, head_dim, tiling }
    }

    /// Whether these are the kernels for Hopper.
    pub fn is_hopper(&self) -> bool {
        self.hopper
    }

    /// What the host has to cut a plan into.
    pub fn tiling(&self) -> &Tiling {
        &self.tiling
    }

    fn scale(&self) -> f32 {
        (self.head_dim as f32).sqrt().recip()
    }

    /// Of the forward (`part` empty), the query or the key kernel.
    fn name(&self, part: &str) -> String {
        match self.hopper {
            true => format!("attention_hopper{part}"),
            false => format!("attention{part}_{}", self.suffix),
        }
    }

    /// Of kernel `number`, as in [`HOPPER_SHARED`].
    fn grid(&self, lists: &Lists, heads: usize, number: usize) -> Grid {
        if self.hopper {
            let blocks = (lists.tiles * heads).min(self.multiprocessors);
            return Grid::new(blocks, HOPPER_THREADS).shared(HOPPER_SHARED[number]);
        }
        let tensors = if number == 0 { 3 } else { 4 };
        // Tiles of f32 padded by one column, and the scores between them.
        let floats = tensors * PLAIN_TILE * (self.head_dim + 1) + 2 * PLAIN_TILE * (PLAIN_TILE + 1);
        Grid::new(lists.tiles * heads, 128).shared((floats * 4) as u32)
    }

    /// The plan's arguments, which come last in every kernel but the one for `delta`.
    fn plan_arguments(&self, tables: &AttentionTables, lists: &Lists, heads: usize) -> Result<Vec<Argument>> {
        let mut arguments = vec![
            tables.row_keys.into(),
            lists.start.into(),
            lists.list.into(),
            lists.order.into(),
            tables.key_bias.into(),
            self.scale().into(),
            int(tables.queries)?,
            int(tables.keys)?,
            int(lists.tiles)?,
        ];
        arguments.push(int(if self.hopper { heads } else { self.head_dim })?);
        Ok(arguments)
    }

    /// How a kernel takes a matrix that it reads, of so many rows.
    fn input(&self, ops: &Ops, matrix_rows: &Rows, rows: usize, heads: usize) -> Result<Vec<Argument>> {
        match self.hopper {
            true => Ok(vec![Argument::Map(tensor_map(&ops.launcher, matrix_rows, rows, heads)?)]),
            false => Ok(matrix(matrix_rows).to_vec()),
        }
    }

    fn inputs(&self, ops: &Ops, [q, k, v]: [Rows; 3], tables: &AttentionTables, heads: usize) -> Result<Vec<Argument>> {
        let mut arguments = self.input(ops, &q, tables.queries, heads)?;
        arguments.extend(self.input(ops, &k, tables.keys, heads)?);
        arguments.extend(self.input(ops, &v, tables.keys, heads)?);
        Ok(arguments)
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
        let mut arguments = self.inputs(ops, inputs, tables, heads)?;
        arguments.extend(matrix(&out));
        arguments.push(statistics.into());
        arguments.extend(self.plan_arguments(tables, &tables.forward, heads)?);
        ops.launcher.launch(&self.name(""), self.grid(&tables.forward, heads, 0), &arguments)
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
        let delta = arena.take(heads * tables.queries)?;
        self.delta(ops, out, out_gradient, delta, tables, heads)?;
        let known = Known { inputs, out_gradient, statistics, delta };
        self.query_gradient(ops, &known, gradients.q, tables, heads)?;
        self.key_gradients(ops, &known, gradients.k, gradients.v, tables, heads, arena)?;
        arena.release(mark);
        Ok(())
    }

    /// Sums over a head of output times its gradient, [heads, N]: what both other parts of the backward pass read.
    pub fn delta(
        &self,
        ops: &Ops,
        out: Rows,
        out_gradient: Rows,
        delta: Slice<f32>,
        tables: &AttentionTables,
        heads: usize,
    ) -> Result<()> {
        let mut arguments: Vec<Argument> = matrix(&out).to_vec();
        arguments.extend(matrix(&out_gradient));
        arguments.extend([delta.into(), int(tables.queries)?, int(heads)?, int(self.head_dim)?]);
        let grid = match self.hopper {
            true => Grid::new(tables.queries.div_ceil(8), 256).shared(32 * heads as u32),
            false => Grid::new((tables.queries * heads).div_ceil(8), 256),
        };
        ops.launcher.launch(&self.name("_delta"), grid, &arguments)
    }

    /// Of the queries alone. On the way it corrects `known.delta` for [`Self::key_gradients`].
    pub fn query_gradient(
        &self,
        ops: &Ops,
        known: &Known,
        gradient: Rows,
        tables: &AttentionTables,
        heads: usize,
    ) -> Result<()> {
        let mut arguments = self.known(ops, known, tables, heads)?;
        arguments.extend(matrix(&gradient));
        arguments.extend(self.plan_arguments(tables, &tables.by_query, heads)?);
        ops.launcher.launch(&self.name("_backward_query"), self.grid(&tables.by_query, heads, 1), &arguments)
    }

    /// Of keys and values, after [`Self::query_gradient`]. `arena` lends room where a tile's queries are split.
    #[allow(clippy::too_many_arguments)]
    pub fn key_gradients(
        &self,
        ops: &Ops,
        known: &Known,
        k: Rows,
        v: Rows,
        tables: &AttentionTables,
        heads: usize,
        arena: &mut Arena,
    ) -> Result<()> {
        let outputs = [matrix(&k), matrix(&v)].concat();
        let mut arguments = self.known(ops, known, tables, heads)?;
        arguments.extend(outputs.iter().copied());
        arguments.extend(self.plan_arguments(tables, &tables.by_key, heads)?);
        let mut grid = self.grid(&tables.by_key, heads, 2);
        if !self.hopper {
            return ops.launcher.launch(&self.name("_backward_key"), grid, &arguments);
        }
        let mark = arena.mark();
        let splits = key_splits(tables.by_key.tiles * heads, tables.by_key.longest);
        let width = heads * HOPPER_HEAD;
        let size = tables.keys * width;
        let partial: Slice<f32> = if splits > 1 { arena.take(splits * 2 * size)? } else { Slice::null() };
        grid.blocks[1] = splits;
        arguments.push(partial.into());
        ops.launcher.launch(&self.name("_backward_key"), grid, &arguments)?;
        if splits > 1 {
            let mut arguments = vec![Argument::from(partial)];
            arguments.extend(outputs);
            arguments.extend([int(tables.keys)?, int(width)?, int(splits)?]);
            ops.launcher.launch("attention_hopper_sum_splits", Grid::plane(size.div_ceil(1024), 2, 256), &arguments)?;
        }
        arena.release(mark);
        Ok(())
    }

    fn known(&self, ops: &Ops, known: &Known, tables: &AttentionTables, heads: usize) -> Result<Vec<Argument>> {
        let mut arguments = self.inputs(ops, known.inputs, tables, heads)?;
        arguments.extend(self.input(ops, &known.out_gradient, tables.queries, heads)?);
        arguments.extend([Argument::from(known.statistics), Argument::from(known.delta)]);
        Ok(arguments)
    }
}

/// A bf16 matrix [rows, heads * 128] as the bulk copy engine reads it: boxes of 64 rows of half a head, swizzled as the
/// matrix units want them, zeros past the last row.
fn tensor_map(launcher: &Launcher, matrix: &Rows, rows: usize, heads: usize) -> Result<TensorMap> {
    use cudarc::driver::sys;
    let mut map = TensorMap(sys::CUtensorMap { opaque: [0; 16] });
    if launcher.stream().is_none() || rows == 0 {
        return Ok(map);
    }
    let dimensions = [HOPPER_HEAD as u64, heads as u64, rows as u64];
    let strides = [2 * HOPPER_HEAD as u64, 2 * matrix.stride as u64];
    let (tile, steps) = ([64u32, 1, 64], [1u32; 3]);
    // SAFETY: the arrays have the announced rank and live through the call; the address is of a live matrix of this size.
    unsafe {
        sys::cuTensorMapEncodeTiled(
            &mut map.0,
            sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            3,
            matrix.data.address() as *mut std::ffi::c_void,
            dimensions.as_ptr(),
            strides.as_ptr(),
            tile.as_ptr(),
            steps.as_ptr(),
            sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
            sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
            sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    }
    .result()
    .map_err(|error| device_error(error, format!("describing {rows} rows of {heads} heads to the copy engine")))?;
    Ok(map)
}

/// A matrix as kernels take it: address and row stride.
fn matrix(rows: &Rows) -> [Argument; 2] {
    [rows.data.into(), long(rows.stride)]
}
