//! One launcher a kernel: shapes in, grid and arguments out. The kernels say what they compute; see `kernels/README.md`.

use super::launch::{Grid, Launcher, Operand, Slice, int, long};
use crate::Result;

/// Rows of a block's partial sum in `bias_gradient`.
const BIAS_ROWS: usize = 512;
/// Rows that `column_sum_first` leaves.
const SCRATCH_ROWS: usize = 64;

/// Launches the kernels of one operand dtype.
#[derive(Clone, Debug)]
pub(crate) struct Ops {
    pub launcher: Launcher,
    /// bf16 operands; f32 otherwise.
    pub half: bool,
    pub eps: f32,
}

/// AdaLN's inputs of a block: `e0` [R, 6, D], the block's table [6, D], and the row of each token [N].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Modulation {
    pub e0: Slice<Operand>,
    pub table: Slice<Operand>,
    pub rows: Slice<i32>,
}

/// What follows a residual add.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Norm {
    None,
    /// LN w + b
    Affine {
        weight: Slice<Operand>,
        bias: Slice<Operand>,
    },
    /// LN (1 + scale) + shift, the parts' numbers
    Modulate {
        shift: i32,
        scale: i32,
    },
}

impl Norm {
    fn kind(&self) -> i32 {
        match self {
            Self::None => 0,
            Self::Affine { .. } => 1,
            Self::Modulate { .. } => 2,
        }
    }

    fn affine(&self) -> (Slice<Operand>, Slice<Operand>) {
        match self {
            Self::Affine { weight, bias } => (*weight, *bias),
            _ => (Slice::null(), Slice::null()),
        }
    }

    fn parts(&self) -> (i32, i32) {
        match self {
            Self::Modulate { shift, scale } => (*shift, *scale),
            _ => (0, 0),
        }
    }
}

/// A normalised row's statistics, [N] each.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Moments {
    pub mean: Slice<f32>,
    pub rstd: Slice<f32>,
}

/// Tokens sorted by modulation row and cut into runs of at most 32.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Segments {
    /// [N]
    pub tokens_by_row: Slice<i32>,
    /// [S + 1]
    pub start: Slice<i32>,
    /// [R + 1]
    pub of_row: Slice<i32>,
    pub count: usize,
    pub rows: usize,
}

/// A result that is to be added: y, the part of the modulation that gates it, or -1, and the table of its block, [6, D].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Added {
    pub y: Slice<Operand>,
    pub gate: i32,
    pub table: Slice<Operand>,
}

impl Added {
    const NOTHING: Self = Self { y: Slice::null(), gate: -1, table: Slice::null() };
}

/// What happens to the residual stream before its norm. The result may lie where the stream lay.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Change {
    Nothing,
    /// The stream plus what is added, into a place.
    Add(Added, Slice<f32>),
    /// The stream less what was added, into a place: the backward pass goes back the way the forward pass came.
    TakeBack(Added, Slice<f32>),
}

/// Rows of a matrix inside a wider one.
pub(crate) type Rows = super::gemm::Rows<Operand>;

/// Turns of each token and pair, [N, pairs] (cos, sin).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Turns {
    pub cos_sin: Slice<f32>,
    pub pairs: usize,
}

/// Sums of a backward pass by segment, [S, D] each.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Partials {
    pub scale: Slice<f32>,
    pub shift: Slice<f32>,
    pub gate: Slice<f32>,
}

impl Ops {
    /// Bytes of an operand.
    pub fn operand_bytes(&self) -> usize {
        if self.half { 2 } else { 4 }
    }

    fn name(&self, kernel: &str) -> String {
        format!("{kernel}_{}", if self.half { "bf16" } else { "f32" })
    }

    /// x1 = x + gate y, or x - gate y, then h = norm(x1).
    #[allow(clippy::too_many_arguments)]
    pub fn residual_norm(
        &self,
        x: Slice<f32>,
        change: Change,
        modulation: &Modulation,
        norm: Norm,
        h: Slice<Operand>,
        moments: Moments,
        tokens: usize,
        width: usize,
    ) -> Result<()> {
        let (added, sign, x_out) = match change {
            Change::Nothing => (Added::NOTHING, 1.0, Slice::null()),
            Change::Add(added, x_out) => (added, 1.0, x_out),
            Change::TakeBack(added, x_out) => (added, -1.0, x_out),
        };
        let (weight, bias) = norm.affine();
        let (shift, scale) = norm.parts();
        self.launcher.launch(
            &self.name("residual_norm"),
            Grid::new(tokens.div_ceil(16), 384),
            &[
                x.into(),
                added.y.into(),
                added.gate.into(),
                added.table.into(),
                modulation.e0.into(),
                modulation.table.into(),
                modulation.rows.into(),
                sign.into(),
                x_out.into(),
                norm.kind().into(),
                weight.into(),
                bias.into(),
                shift.into(),
                scale.into(),
                h.into(),
                moments.mean.into(),
                moments.rstd.into(),
                self.eps.into(),
                long(tokens),
                int(width)?,
            ],
        )
    }

    /// From dh and the gradient of x1 so far: the gradient of x1 in all (in place), dy if wanted, and partial sums.
    #[allow(clippy::too_many_arguments)]
    pub fn residual_norm_backward(
        &self,
        dh: Slice<Operand>,
        dx: Slice<f32>,
        x1: Slice<f32>,
        moments: Moments,
        norm: Norm,
        added: Option<(Added, Slice<Operand>)>,
        modulation: &Modulation,
        partials: &Partials,
        segments: &Segments,
        width: usize,
    ) -> Result<()> {
        let (Added { y, gate, table }, dy) = added.unwrap_or((Added::NOTHING, Slice::null()));
        let gate_partials = if gate < 0 { Slice::null() } else { partials.gate };
        let (scale_partials, shift_partials) = match norm {
            Norm::None => (Slice::null(), Slice::null()),
            Norm::Affine { .. } | Norm::Modulate { .. } => (partials.scale, partials.shift),
        };
        self.launcher.launch(
            &self.name("residual_norm_backward"),
            Grid::new(segments.count, 384),
            &[
                dh.into(),
                dx.into(),
                x1.into(),
                moments.mean.into(),
                moments.rstd.into(),
                norm.kind().into(),
                norm.affine().0.into(),
                y.into(),
                gate.into(),
                table.into(),
                modulation.e0.into(),
                modulation.table.into(),
                modulation.rows.into(),
                norm.parts().1.into(),
                dy.into(),
                scale_partials.into(),
                shift_partials.into(),
                gate_partials.into(),
                segments.tokens_by_row.into(),
                segments.start.into(),
                int(segments.count)?,
                int(width)?,
            ],
        )
    }

    /// Adds partial sums [S, D] to part `part` of `e0_gradient` [R, 6, D].
    pub fn reduce_rows(
        &self,
        partial: Slice<f32>,
        segments: &Segments,
        e0_gradient: Slice<f32>,
        part: i32,
        width: usize,
    ) -> Result<()> {
        self.launcher.launch(
            "reduce_rows",
            Grid::plane(segments.rows, width.div_ceil(1024), 256),
            &[
                partial.into(),
                segments.of_row.into(),
                e0_gradient.into(),
                part.into(),
                int(segments.rows)?,
                int(width)?,
            ],
        )
    }

    /// Adds the sum over rows of `partial` [rows, width] to `out` [width].
    pub fn column_sum(
        &self,
        partial: Slice<f32>,
        scratch: Slice<f32>,
        out: Slice<f32>,
        rows: usize,
        width: usize,
    ) -> Result<()> {
        let left = SCRATCH_ROWS.min(rows);
        self.launcher.launch(
            "column_sum_first",
            Grid::plane(width.div_ceil(1024), left, 256),
            &[partial.into(), scratch.into(), int(rows)?, int(width)?],
        )?;
        self.column_sum_second(scratch, out, left, width)
    }

    fn column_sum_second(&self, scratch: Slice<f32>, out: Slice<f32>, rows: usize, width: usize) -> Result<()> {
        self.launcher.launch(
            "column_sum_second",
            Grid::new(width.div_ceil(64), 256),
            &[scratch.into(), out.into(), int(rows)?, int(width)?],
        )
    }

    /// Floats of scratch that [`Self::column_sum`] and [`Self::bias_gradient`] need.
    pub fn column_scratch(rows: usize, width: usize) -> usize {
        SCRATCH_ROWS.max(rows.div_ceil(BIAS_ROWS)) * width
    }

    /// RMSNorm over the whole width, then RoPE if there are turns.
    #[allow(clippy::too_many_arguments)]
    pub fn rms_norm_rope(
        &self,
        x: Rows,
        weight: Slice<Operand>,
        turns: Option<&Turns>,
        out: Rows,
        rstd: Slice<f32>,
        tokens: usize,
        width: usize,
    ) -> Result<()> {
        let (cos_sin, pairs) = turns.map_or((Slice::null(), 0), |turns| (turns.cos_sin, turns.pairs));
        self.launcher.launch(
            &self.name("rms_norm_rope"),
            Grid::new(tokens.div_ceil(8), 256),
            &[
                x.data.into(),
                int(x.stride)?,
                weight.into(),
                cos_sin.into(),
                int(pairs)?,
                out.data.into(),
                int(out.stride)?,
                rstd.into(),
                self.eps.into(),
                long(tokens),
                int(width)?,
            ],
        )
    }

    /// dx, and partial sums of the weight's gradient, [ceil(N / 32), D].
    #[allow(clippy::too_many_arguments)]
    pub fn rms_norm_rope_backward(
        &self,
        dy: Rows,
        x: Rows,
        weight: Slice<Operand>,
        rstd: Slice<f32>,
        turns: Option<&Turns>,
        dx: Rows,
        partial: Slice<f32>,
        tokens: usize,
        width: usize,
    ) -> Result<()> {
        let (cos_sin, pairs) = turns.map_or((Slice::null(), 0), |turns| (turns.cos_sin, turns.pairs));
        self.launcher.launch(
            &self.name("rms_norm_rope_backward"),
            Grid::new(tokens.div_ceil(32), 384),
            &[
                dy.data.into(),
                int(dy.stride)?,
                x.data.into(),
                int(x.stride)?,
                weight.into(),
                rstd.into(),
                cos_sin.into(),
                int(pairs)?,
                dx.data.into(),
                int(dx.stride)?,
                partial.into(),
                long(tokens),
                int(width)?,
            ],
        )
    }

    /// a = gelu(u).
    pub fn gelu(&self, u: Slice<Operand>, a: Slice<Operand>, count: usize) -> Result<()> {
        self.launcher.launch(&self.name("gelu_tanh"), flat(count), &[u.into(), a.into(), long(count)])
    }

    /// da becomes du.
    pub fn gelu_backward(&self, u: Slice<Operand>, da: Slice<Operand>, count: usize) -> Result<()> {
        let arguments = [u.into(), da.into(), da.into(), long(count)];
        self.launcher.launch(&self.name("gelu_tanh_backward"), flat(count), &arguments)
    }

    /// Adds the column sums of dy [N, F] to `gradient` [F].
    pub fn bias_gradient(
        &self,
        dy: Rows,
        scratch: Slice<f32>,
        gradient: Slice<f32>,
        tokens: usize,
        width: usize,
    ) -> Result<()> {
        let blocks = tokens.div_ceil(BIAS_ROWS);
        self.launcher.launch(
            &self.name("bias_gradient"),
            Grid::plane(width.div_ceil(256), blocks, 256),
            &[dy.data.into(), int(dy.stride)?, scratch.into(), long(tokens), int(width)?, int(BIAS_ROWS)?],
        )?;
        self.column_sum_second(scratch, gradient, blocks, width)
    }

    /// Takes from the rows of each of `spans` [P, 2] their mean, by weights exp(`bias`) [S] if there is one; x [S, D].
    pub fn center_rows(&self, x: Slice<Operand>, bias: Slice<f32>, spans: Slice<i32>, width: usize) -> Result<()> {
        let grid = Grid::plane(width.div_ceil(64), spans.len() / 2, 256);
        self.launcher.launch(&self.name("center_rows"), grid, &[x.into(), bias.into(), spans.into(), int(width)?])
    }

    /// Row `index[i]` of x, of `bytes` bytes each (a multiple of 16), becomes row i of y.
    pub fn take_rows<E>(&self, x: Slice<E>, index: Slice<i32>, y: Slice<E>, bytes: usize) -> Result<()> {
        self.move_rows("take_rows", x, index, y, bytes)
    }

    /// Row i of x becomes row `index[i]` of y; other rows of y stay.
    pub fn put_rows<E>(&self, x: Slice<E>, index: Slice<i32>, y: Slice<E>, bytes: usize) -> Result<()> {
        self.move_rows("put_rows", x, index, y, bytes)
    }

    /// Rows [count, D] become rows `place[i]` of the stream x, or rows i without places.
    pub fn embed_rows(&self, rows: Slice<Operand>, place: Slice<i32>, x: Slice<f32>, width: usize) -> Result<()> {
        let count = rows.len() / width;
        let arguments = [rows.into(), place.into(), x.into(), int(width)?, long(count)];
        self.launcher.launch(&self.name("embed_rows"), Grid::new(rows.len().div_ceil(1024), 256), &arguments)
    }

    /// The gradient of [`Self::embed_rows`].
    pub fn embed_rows_backward(
        &self,
        dx: Slice<f32>,
        place: Slice<i32>,
        d_rows: Slice<Operand>,
        width: usize,
    ) -> Result<()> {
        let count = d_rows.len() / width;
        let arguments = [dx.into(), place.into(), d_rows.into(), int(width)?, long(count)];
        self.launcher.launch(&self.name("embed_rows_backward"), Grid::new(d_rows.len().div_ceil(1024), 256), &arguments)
    }

    fn move_rows<E>(&self, kernel: &str, x: Slice<E>, index: Slice<i32>, y: Slice<E>, bytes: usize) -> Result<()> {
        let (vectors, count) = (bytes / 16, index.len());
        let arguments = [x.into(), index.into(), y.into(), int(vectors)?, long(count)];
        self.launcher.launch(kernel, Grid::new((count * vectors).div_ceil(256), 256), &arguments)
    }

    /// The turns of `positions` [N, 3] (f64) for pairs of `axis` and `frequency` [P].
    pub fn rope_table(
        &self,
        positions: Slice<f64>,
        axis: Slice<i32>,
        frequency: Slice<f64>,
        turns: &Turns,
        tokens: usize,
    ) -> Result<()> {
        let count = tokens * turns.pairs;
        self.launcher.launch(
            "rope_table",
            Grid::new(count.div_ceil(256), 256),
            &[positions.into(), axis.into(), frequency.into(), turns.cos_sin.into(), long(count), int(turns.pairs)?],
        )
    }
}

/// Blocks of the kernels that take an element each.
fn flat(count: usize) -> Grid {
    Grid::new(count.div_ceil(4096), 256)
}
