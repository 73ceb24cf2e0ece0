//! Each kernel at the sizes of LingBot-VA's 5 B, against a device copy and a large product measured in the same minute.
//!
//! Four episodes of 280 frames in one sequence: N = 80,640 tokens, D = 3072, F = 14,336, 24 heads of 128, chunk 4, window
//! 64, 512 rows of text an episode. bf16 operands. The floor of an op is the time that a copy of as many bytes, or a product
//! of as many FLOPs, would take.

use super::Table;
use super::rig::Rig;
use crate::Result;
use crate::cuda::attention::{Attention, AttentionTables, Gradients, Known};
use crate::cuda::batch::{AttentionLists, segments};
use crate::cuda::device::Gpu;
use crate::cuda::gemm;
use crate::cuda::launch::{Operand, Slice, device_error};
use crate::cuda::ops::{Added, Change, Modulation, Moments, Norm, Ops, Partials, Rows, Segments, Turns};
use crate::cuda::optimizer::{self, NormBuffer, UpdateBuffers, UpdateRule};
use crate::ops::{AttentionPlan, RopeTable};
use crate::pack::sequence::{FrameTokens, PackedEpisode, Sequence};
use cudarc::driver::CudaEvent;
use cudarc::driver::sys::CUevent_flags;
use serde::Serialize;
use std::sync::Arc;

const MEMORY: usize = 9 << 30;
const WIDTH: usize = 3072;
const FFN: usize = 14_336;
const HEADS: usize = 24;
const TEXT: usize = 512;
const EPISODES: usize = 4;
/// Elements of the flat buffers.
const FLAT: usize = 1 << 28;
const REPEATS: usize = 20;

/// What an op must do at least.
#[derive(Clone, Copy, Debug)]
enum Work {
    Bytes(f64),
    Flops(f64),
}

/// One op's median.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Timing {
    pub op: String,
    ms: f64,
    /// GB/s or TFLOP/s.
    rate: f64,
    unit: &'static str,
    /// Of the copy's or the product's rate.
    percent_of_floor: f64,
    /// Why there is no time; empty if there is one.
    pub failure: String,
}

impl Timing {
    pub fn to_line(&self) -> String {
        let Self { op, ms, rate, unit, percent_of_floor, failure } = self;
        match failure.is_empty() {
            true => format!("  {op:<40} {ms:>9.3} {rate:>8.1} {unit:<8} {percent_of_floor:>10.1}\n"),
            false => format!("  {op:<40} FAILED  {failure}\n"),
        }
    }
}

/// Bytes and FLOPs a second.
#[derive(Clone, Copy, Debug)]
struct Floor {
    bytes: f64,
    flops: f64,
}

type Launch = Box<dyn FnMut(&mut Rig<'_>) -> Result<()>>;

/// The tables that ops share.
struct Batch {
    sequence: Sequence,
    plan: Arc<AttentionPlan>,
    text_plan: Arc<AttentionPlan>,
    tokens: usize,
    rows: Vec<i32>,
    tokens_by_row: Vec<i32>,
    segment_start: Vec<i32>,
    row_segment_start: Vec<i32>,
}

impl Batch {
    fn new() -> Result<Self> {
        let episode = PackedEpisode { frames: 280, valid_frames: 280, chunk: 4, window: 64 };
        let sequence = Sequence::new(&[episode; EPISODES], FrameTokens { grid: [4, 8], actions: 4 }, 128)?;
        let prompts: Vec<usize> = (0..EPISODES).collect();
        let text_plan = sequence.cross_attention(&prompts, &[TEXT; EPISODES], TEXT)?;
        let (tokens_by_row, segment_start, row_segment_start) = segments(sequence.row_of_token(), sequence.rows());
        let ints = |values: &[usize]| values.iter().map(|&value| value as i32).collect::<Vec<_>>();
        Ok(Self {
            plan: Arc::clone(sequence.attention()),
            text_plan,
            tokens: sequence.len(),
            rows: ints(sequence.row_of_token()),
            tokens_by_row: ints(&tokens_by_row),
            segment_start: ints(&segment_start),
            row_segment_start: ints(&row_segment_start),
            sequence,
        })
    }

    fn row_count(&self) -> usize {
        self.row_segment_start.len() - 1
    }

    fn segment_count(&self) -> usize {
        self.segment_start.len() - 1
    }

    fn stream(&self) -> usize {
        self.tokens * WIDTH
    }

    fn modulation(&self, rig: &mut Rig<'_>) -> Result<Modulation> {
        Ok(Modulation {
            e0: operands(rig, self.row_count() * 6 * WIDTH)?,
            table: operands(rig, 6 * WIDTH)?,
            rows: rig.table(&self.rows)?,
        })
    }

    fn segments(&self, rig: &mut Rig<'_>) -> Result<Segments> {
        Ok(Segments {
            tokens_by_row: rig.table(&self.tokens_by_row)?,
            start: rig.table(&self.segment_start)?,
            of_row: rig.table(&self.row_segment_start)?,
            count: self.segment_count(),
            rows: self.row_count(),
        })
    }
}

/// Random operands; a constant would draw less power, and run faster, than training does.
fn operands(rig: &mut Rig<'_>, len: usize) -> Result<Slice<Operand>> {
    let slice = rig.arena.take(len)?;
    optimizer::fill_normal(rig.launcher(), rig.half(), slice, 0.5, 1, slice.address())?;
    Ok(slice)
}

fn floats(rig: &mut Rig<'_>, len: usize) -> Result<Slice<f32>> {
    let slice: Slice<f32> = rig.arena.take(len)?;
    optimizer::fill_normal(rig.launcher(), false, Slice::new(slice.address(), len), 0.5, 1, slice.address())?;
    Ok(slice)
}

/// Median milliseconds of a launch, by the device's clock.
fn median_ms(rig: &mut Rig<'_>, launch: &mut Launch) -> Result<f64> {
    for _ in 0..3 {
        launch(rig)?;
    }
    let mark = |rig: &Rig<'_>| -> Result<CudaEvent> {
        let event = rig.gpu.stream.record_event(Some(CUevent_flags::CU_EVENT_DEFAULT));
        event.map_err(|error| device_error(error, "recording an event"))
    };
    let mut marks = vec![mark(rig)?];
    for _ in 0..REPEATS {
        launch(rig)?;
        marks.push(mark(rig)?);
    }
    rig.gpu.synchronize()?;
    let span = |pair: &[CudaEvent]| pair[0].elapsed_ms(&pair[1]).map(f64::from);
    let mut times: Vec<f64> = marks
        .windows(2)
        .map(span)
        .collect::<Result<_, _>>()
        .map_err(|error| device_error(error, "reading the device's clock"))?;
    times.sort_by(f64::total_cmp);
    Ok((times[REPEATS / 2 - 1] + times[REPEATS / 2]) / 2.0)
}

/// Adds an op to the table; its milliseconds.
fn time(
    rig: &mut Rig<'_>,
    table: &mut Table,
    floor: Option<Floor>,
    op: impl Into<String>,
    work: Work,
    prepare: impl FnOnce(&mut Rig<'_>) -> Result<Launch>,
) -> Option<f64> {
    if table.stopped.is_some() {
        return None;
    }
    let op = op.into();
    let begun = rig.begin(table.seed, &op).and_then(|()| prepare(rig));
    let measured = begun.and_then(|mut launch| median_ms(rig, &mut launch));
    table.look(rig, &op, measured.as_ref().err());
    let (ms, failure) = match &measured {
        Ok(ms) => (*ms, String::new()),
        Err(error) => (f64::NAN, error.to_string()),
    };
    let (amount, scale, unit, best) = match work {
        Work::Bytes(bytes) => (bytes, 1e9, "GB/s", floor.map(|floor| floor.bytes)),
        Work::Flops(flops) => (flops, 1e12, "TFLOP/s", floor.map(|floor| floor.flops)),
    };
    let rate = amount / (ms / 1e3);
    let percent_of_floor = 100.0 * rate / best.unwrap_or(rate);
    table.timings.push(Timing { op, ms, rate: rate / scale, unit, percent_of_floor, failure });
    measured.ok()
}

/// Times everything.
pub(super) fn all(gpu: &Gpu, table: &mut Table) -> Result<()> {
    let mut rig = Rig::new(gpu, true, MEMORY)?;
    let batch = Batch::new()?;
    let Some(floor) = floors(&mut rig, table) else { return Ok(()) };
    norms(&mut rig, table, floor, &batch);
    heads(&mut rig, table, floor, &batch);
    pointwise(&mut rig, table, floor, &batch);
    products(&mut rig, table, floor, &batch);
    attention(&mut rig, table, floor, "attention", &batch.plan, 3);
    attention(&mut rig, table, floor, "text attention", &batch.text_plan, 2);
    flat(&mut rig, table, floor);
    Ok(())
}

fn floors(rig: &mut Rig<'_>, table: &mut Table) -> Option<Floor> {
    const COPIED: usize = 1 << 30;
    let bytes = 4.0 * COPIED as f64;
    let copy = time(rig, table, None, "device copy", Work::Bytes(bytes), |rig| {
        let (from, to) = (operands(rig, COPIED)?, operands(rig, COPIED)?);
        Ok(Box::new(move |rig| rig.launcher().copy(from, to, 2)))
    })?;
    const SIDES: [usize; 3] = [16_384, 8192, 8192];
    let flops = 2.0 * SIDES.iter().map(|&side| side as f64).product::<f64>();
    let product = time(rig, table, None, "product 16384 x 8192 x 8192", Work::Flops(flops), |rig| {
        forward_product(rig, SIDES[0], SIDES[1], SIDES[2])
    })?;
    Some(Floor { bytes: bytes / (copy / 1e3), flops: flops / (product / 1e3) })
}

fn forward_product(rig: &mut Rig<'_>, rows: usize, inputs: usize, outputs: usize) -> Result<Launch> {
    let (x, y) = (operands(rig, rows * inputs)?, operands(rig, rows * outputs)?);
    let (weight, bias) = (operands(rig, outputs * inputs)?, operands(rig, outputs)?);
    Ok(Box::new(move |rig| {
        rig.gemm.forward(Rows::new(x, inputs), weight, bias, Rows::new(y, outputs), rows, inputs, outputs)
    }))
}

fn norms(rig: &mut Rig<'_>, table: &mut Table, floor: Floor, batch: &Batch) {
    let (tokens, stream) = (batch.tokens, batch.stream());
    let sums = (batch.segment_count() * WIDTH * 4) as f64;
    /// What is added, and which norm follows.
    #[derive(Clone, Copy)]
    struct Form {
        words: &'static str,
        gate: Option<i32>,
        affine: bool,
        modulated: Option<(i32, i32)>,
        /// Bytes a channel, forward and backward, and partial sums.
        bytes: [f64; 3],
    }
    let forms = [
        Form { words: "modulated", gate: None, affine: false, modulated: Some((0, 1)), bytes: [6.0, 14.0, 2.0] },
        Form { words: "gated y, affine", gate: Some(2), affine: true, modulated: None, bytes: [12.0, 18.0, 3.0] },
        Form {
            words: "y, modulated",
            gate: Some(-1),
            affine: false,
            modulated: Some((3, 4)),
            bytes: [12.0, 16.0, 2.0],
        },
        Form { words: "gated y alone", gate: Some(5), affine: false, modulated: None, bytes: [10.0, 8.0, 1.0] },
    ];
    for form in forms {
        let [forward, backward, partials] = form.bytes;
        let norm = move |rig: &mut Rig<'_>| -> Result<Norm> {
            Ok(match (form.affine, form.modulated) {
                (true, _) => Norm::Affine { weight: operands(rig, WIDTH)?, bias: operands(rig, WIDTH)? },
                (_, Some((shift, scale))) => Norm::Modulate { shift, scale },
                _ => Norm::None,
            })
        };
        let work = Work::Bytes(forward * stream as f64);
        time(rig, table, Some(floor), format!("residual_norm, {}", form.words), work, |rig| {
            let modulation = batch.modulation(rig)?;
            let (x, x1, y) = (floats(rig, stream)?, floats(rig, stream)?, operands(rig, stream)?);
            let (h, norm) = (operands(rig, stream)?, norm(rig)?);
            let moments = Moments { mean: floats(rig, tokens)?, rstd: floats(rig, tokens)? };
            let change =
                form.gate.map_or(Change::Nothing, |gate| Change::Add(Added { y, gate, table: modulation.table }, x1));
            Ok(Box::new(move |rig| rig.ops.residual_norm(x, change, &modulation, norm, h, moments, tokens, WIDTH)))
        });
        let work = Work::Bytes(backward * stream as f64 + partials * sums);
        time(rig, table, Some(floor), format!("residual_norm gradient, {}", form.words), work, |rig| {
            let (modulation, segments) = (batch.modulation(rig)?, batch.segments(rig)?);
            let (dx, x1) = (floats(rig, stream)?, floats(rig, stream)?);
            let (dh, y, dy) = (operands(rig, stream)?, operands(rig, stream)?, operands(rig, stream)?);
            let norm = norm(rig)?;
            let moments = Moments { mean: floats(rig, tokens)?, rstd: floats(rig, tokens)? };
            let count = segments.count * WIDTH;
            let partials =
                Partials { scale: floats(rig, count)?, shift: floats(rig, count)?, gate: floats(rig, count)? };
            let added = form.gate.map(|gate| (Added { y, gate, table: modulation.table }, dy));
            Ok(Box::new(move |rig| {
                let (ops, width) = (&rig.ops, WIDTH);
                ops.residual_norm_backward(dh, dx, x1, moments, norm, added, &modulation, &partials, &segments, width)
            }))
        });
    }
    let work = Work::Bytes(sums + 8.0 * (batch.row_count() * WIDTH) as f64);
    time(rig, table, Some(floor), "reduce_rows", work, |rig| {
        let segments = batch.segments(rig)?;
        let partial = floats(rig, segments.count * WIDTH)?;
        let out = floats(rig, segments.rows * 6 * WIDTH)?;
        Ok(Box::new(move |rig| rig.ops.reduce_rows(partial, &segments, out, 3, WIDTH)))
    });
    time(rig, table, Some(floor), "column_sum of segments", Work::Bytes(sums), |rig| {
        let count = batch.segment_count();
        let (partial, out) = (floats(rig, count * WIDTH)?, floats(rig, WIDTH)?);
        let scratch = floats(rig, Ops::column_scratch(count, WIDTH))?;
        Ok(Box::new(move |rig| rig.ops.column_sum(partial, scratch, out, count, WIDTH)))
    });
}

fn heads(rig: &mut Rig<'_>, table: &mut Table, floor: Floor, batch: &Batch) {
    let (tokens, stream) = (batch.tokens, batch.stream());
    let pairs = WIDTH / HEADS / 2;
    let turn_bytes = (8 * tokens * pairs) as f64;
    for turned in [true, false] {
        let (words, turn_bytes) = if turned { (", turned", turn_bytes) } else { ("", 0.0) };
        let work = Work::Bytes(4.0 * stream as f64 + turn_bytes);
        time(rig, table, Some(floor), format!("rms_norm_rope{words}"), work, |rig| {
            let (x, weight, out) = (operands(rig, 3 * stream)?, operands(rig, WIDTH)?, operands(rig, stream)?);
            let turns = Turns { cos_sin: floats(rig, 2 * tokens * pairs)?, pairs };
            let rstd = floats(rig, tokens)?;
            Ok(Box::new(move |rig| {
                let (x, out) = (Rows::new(x, 3 * WIDTH), Rows::new(out, WIDTH));
                rig.ops.rms_norm_rope(x, weight, turned.then_some(&turns), out, rstd, tokens, WIDTH)
            }))
        });
        let work = Work::Bytes(6.0 * stream as f64 + turn_bytes + (4 * tokens.div_ceil(32) * WIDTH) as f64);
        time(rig, table, Some(floor), format!("rms_norm_rope gradient{words}"), work, |rig| {
            let (dy, x, dx) = (operands(rig, stream)?, operands(rig, 3 * stream)?, operands(rig, 3 * stream)?);
            let (weight, rstd) = (operands(rig, WIDTH)?, floats(rig, tokens)?);
            let turns = Turns { cos_sin: floats(rig, 2 * tokens * pairs)?, pairs };
            let partial = floats(rig, tokens.div_ceil(32) * WIDTH)?;
            Ok(Box::new(move |rig| {
                let [dy, x, dx] = [Rows::new(dy, WIDTH), Rows::new(x, 3 * WIDTH), Rows::new(dx, 3 * WIDTH)];
                let turns = turned.then_some(&turns);
                rig.ops.rms_norm_rope_backward(dy, x, weight, rstd, turns, dx, partial, tokens, WIDTH)
            }))
        });
    }
    let runs = tokens.div_ceil(32);
    time(rig, table, Some(floor), "column_sum of runs of 32", Work::Bytes((4 * runs * WIDTH) as f64), |rig| {
        let (partial, out) = (floats(rig, runs * WIDTH)?, floats(rig, WIDTH)?);
        let scratch = floats(rig, Ops::column_scratch(runs, WIDTH))?;
        Ok(Box::new(move |rig| rig.ops.column_sum(partial, scratch, out, runs, WIDTH)))
    });
    time(rig, table, Some(floor), "rope_table", Work::Bytes(turn_bytes), |rig| {
        let positions = batch.sequence.positions();
        let axes = RopeTable::new(&[], RopeTable::lingbot_axes(WIDTH / HEADS));
        let axis: Vec<i32> = axes.frequencies().iter().map(|(axis, _)| *axis as i32).collect();
        let frequency: Vec<f64> = axes.frequencies().iter().map(|(_, frequency)| *frequency).collect();
        let flat: Vec<f64> = positions.iter().flatten().copied().collect();
        let (flat, axis, frequency) = (rig.table(&flat)?, rig.table(&axis)?, rig.table(&frequency)?);
        let turns = Turns { cos_sin: floats(rig, 2 * tokens * pairs)?, pairs };
        Ok(Box::new(move |rig| rig.ops.rope_table(flat, axis, frequency, &turns, tokens)))
    });
}

fn pointwise(rig: &mut Rig<'_>, table: &mut Table, floor: Floor, batch: &Batch) {
    let count = batch.tokens * FFN;
    time(rig, table, Some(floor), "gelu", Work::Bytes(4.0 * count as f64), |rig| {
        let (u, a) = (operands(rig, count)?, operands(rig, count)?);
        Ok(Box::new(move |rig| rig.ops.gelu(u, a, count)))
    });
    time(rig, table, Some(floor), "gelu gradient", Work::Bytes(6.0 * count as f64), |rig| {
        let (u, da) = (operands(rig, count)?, operands(rig, count)?);
        Ok(Box::new(move |rig| rig.ops.gelu_backward(u, da, count)))
    });
}

fn products(rig: &mut Rig<'_>, table: &mut Table, floor: Floor, batch: &Batch) {
    let layers = [
        ("qkv", batch.tokens, WIDTH, 3 * WIDTH),
        ("out", batch.tokens, WIDTH, WIDTH),
        ("up", batch.tokens, WIDTH, FFN),
        ("down", batch.tokens, FFN, WIDTH),
        ("text kv", EPISODES * TEXT, WIDTH, 2 * WIDTH),
    ];
    for (name, rows, inputs, outputs) in layers {
        let work = Work::Flops(2.0 * rows as f64 * inputs as f64 * outputs as f64);
        let floor = Some(floor);
        time(rig, table, floor, format!("product with bias, {name}"), work, |rig| {
            forward_product(rig, rows, inputs, outputs)
        });
        if name == "text kv" {
            time(rig, table, floor, format!("input gradient, summed, {name}"), work, |rig| {
                let (dy, dx) = (operands(rig, rows * outputs)?, floats(rig, rows * inputs)?);
                let weight = operands(rig, outputs * inputs)?;
                Ok(Box::new(move |rig| {
                    let (dy, dx) = (Rows::new(dy, outputs), gemm::Rows::new(dx, inputs));
                    rig.gemm.input_gradient_sum(dy, weight, dx, rows, inputs, outputs)
                }))
            });
        } else {
            time(rig, table, floor, format!("input gradient, {name}"), work, |rig| {
                let (dy, dx) = (operands(rig, rows * outputs)?, operands(rig, rows * inputs)?);
                let weight = operands(rig, outputs * inputs)?;
                Ok(Box::new(move |rig| {
                    let (dy, dx) = (Rows::new(dy, outputs), Rows::new(dx, inputs));
                    rig.gemm.input_gradient(dy, weight, dx, rows, inputs, outputs)
                }))
            });
        }
        time(rig, table, floor, format!("weight gradient, {name}"), work, |rig| {
            let (dy, x) = (operands(rig, rows * outputs)?, operands(rig, rows * inputs)?);
            let gradient = floats(rig, outputs * inputs)?;
            Ok(Box::new(move |rig| {
                let (dy, x) = (Rows::new(dy, outputs), Rows::new(x, inputs));
                rig.gemm.weight_gradient(dy, x, gradient, rows, inputs, outputs)
            }))
        });
        let work = Work::Bytes(2.0 * rows as f64 * outputs as f64);
        time(rig, table, floor, format!("bias gradient, {name}"), work, |rig| {
            let (dy, gradient) = (operands(rig, rows * outputs)?, floats(rig, outputs)?);
            let scratch = floats(rig, Ops::column_scratch(rows, outputs))?;
            Ok(Box::new(move |rig| rig.ops.bias_gradient(Rows::new(dy, outputs), scratch, gradient, rows, outputs)))
        });
    }
}

/// Tensors of one attention; values and their gradient are the last of so many parts of wider rows.
#[derive(Clone, Debug)]
struct Attended {
    attention: Attention,
    tables: AttentionTables,
    out: Rows,
    known: Known,
    gradients: Gradients,
}

impl Attended {
    /// After a forward pass.
    fn new(rig: &mut Rig<'_>, plan: &AttentionPlan, parts: usize) -> Result<Self> {
        let attention = Attention::new(&rig.ops, WIDTH / HEADS);
        let lists = AttentionLists::new(plan, attention.tiling());
        let tables = AttentionTables::upload(&lists, &rig.ops.launcher, &mut rig.arena)?;
        let (queries, keys) = (plan.queries(), plan.keys());
        let narrow =
            |rig: &mut Rig<'_>, rows: usize| -> Result<Rows> { Ok(Rows::new(operands(rig, rows * WIDTH)?, WIDTH)) };
        let wide = |rig: &mut Rig<'_>| -> Result<Rows> {
            let all = operands(rig, keys * parts * WIDTH)?;
            let offset = (parts - 1) * WIDTH;
            Ok(Rows::new(all.part(offset, all.len() - offset, 2), parts * WIDTH))
        };
        let inputs = [narrow(rig, queries)?, narrow(rig, keys)?, wide(rig)?];
        let (out, out_gradient) = (narrow(rig, queries)?, narrow(rig, queries)?);
        let (statistics, delta) = (floats(rig, HEADS * queries)?, floats(rig, HEADS * queries)?);
        let gradients = Gradients { q: narrow(rig, queries)?, k: narrow(rig, keys)?, v: wide(rig)? };
        attention.forward(&rig.ops, inputs, out, statistics, &tables, HEADS)?;
        attention.delta(&rig.ops, out, out_gradient, delta, &tables, HEADS)?;
        let known = Known { inputs, out_gradient, statistics, delta };
        Ok(Self { attention, tables, out, known, gradients })
    }
}

fn attention(rig: &mut Rig<'_>, table: &mut Table, floor: Floor, name: &str, plan: &AttentionPlan, parts: usize) {
    let flops = |a_pair: f64| Work::Flops(a_pair * WIDTH as f64 * plan.visible_pairs() as f64);
    let floor = Some(floor);
    time(rig, table, floor, name, flops(4.0), |rig| {
        let Attended { attention, tables, out, known, .. } = Attended::new(rig, plan, parts)?;
        Ok(Box::new(move |rig| attention.forward(&rig.ops, known.inputs, out, known.statistics, &tables, HEADS)))
    });
    let work = Work::Bytes(4.0 * plan.queries() as f64 * WIDTH as f64);
    time(rig, table, floor, format!("{name}, delta"), work, |rig| {
        let Attended { attention, tables, out, known, .. } = Attended::new(rig, plan, parts)?;
        Ok(Box::new(move |rig| attention.delta(&rig.ops, out, known.out_gradient, known.delta, &tables, HEADS)))
    });
    time(rig, table, floor, format!("{name}, dQ"), flops(6.0), |rig| {
        let Attended { attention, tables, known, gradients, .. } = Attended::new(rig, plan, parts)?;
        Ok(Box::new(move |rig| attention.query_gradient(&rig.ops, &known, gradients.q, &tables, HEADS)))
    });
    time(rig, table, floor, format!("{name}, dK and dV"), flops(8.0), |rig| {
        let Attended { attention, tables, known, gradients, .. } = Attended::new(rig, plan, parts)?;
        Ok(Box::new(move |rig| {
            let (ops, arena) = (&rig.ops, &mut rig.arena);
            attention.key_gradients(ops, &known, gradients.k, gradients.v, &tables, HEADS, arena)
        }))
    });
}

fn flat(rig: &mut Rig<'_>, table: &mut Table, floor: Floor) {
    let bytes = |an_element: f64| Work::Bytes(an_element * FLAT as f64);
    let floor = Some(floor);
    time(rig, table, floor, "square_sum", bytes(4.0), |rig| {
        let (gradients, norm) = (floats(rig, FLAT)?, NormBuffer(rig.arena.take(NormBuffer::LEN)?));
        Ok(Box::new(move |rig| optimizer::square_sum(rig.launcher(), gradients, norm)))
    });
    time(rig, table, floor, "adamw", bytes(34.0), |rig| {
        let rule = UpdateRule { clip_norm: 2.0, betas: [0.9, 0.95], eps: 1e-8, weight_decay: 0.1 };
        let norm = NormBuffer(rig.arena.take(NormBuffer::LEN)?);
        let buffers = UpdateBuffers {
            parameters: operands(rig, FLAT)?,
            master: floats(rig, FLAT)?,
            first: floats(rig, FLAT)?,
            second: floats(rig, FLAT)?,
            gradients: floats(rig, FLAT)?,
        };
        optimizer::square_sum(rig.launcher(), buffers.gradients, norm)?;
        Ok(Box::new(move |rig| optimizer::adamw(rig.launcher(), true, &buffers, norm, &rule, 1e-6, 9)))
    });
    time(rig, table, floor, "accumulate", bytes(10.0), |rig| {
        let (from, to) = (operands(rig, FLAT)?, floats(rig, FLAT)?);
        Ok(Box::new(move |rig| optimizer::accumulate(rig.launcher(), true, from, to, 0.5)))
    });
    time(rig, table, floor, "first_non_finite", bytes(4.0), |rig| {
        let (gradients, index) = (floats(rig, FLAT)?, rig.table(&[u64::MAX])?);
        Ok(Box::new(move |rig| optimizer::first_non_finite(rig.launcher(), gradients, index)))
    });
    time(rig, table, floor, "fill_normal", bytes(2.0), |rig| {
        let out = operands(rig, FLAT)?;
        Ok(Box::new(move |rig| optimizer::fill_normal(rig.launcher(), true, out, 1.0, 7, 0)))
    });
}
