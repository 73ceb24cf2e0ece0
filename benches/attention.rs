//! What planned attention saves over masked dense attention, and what a plan costs.
//!
//! `CARGO_PROFILE_DEV_OPT_LEVEL=3 cargo bench --profile dev --bench attention` builds only this crate again; plain
//! `cargo bench --bench attention` builds everything. Dense and planned alternate within one run, so the ratio of their
//! medians holds on a busy machine.

use candle_core::{Device, Result, Tensor, Var};
use criterion::{Criterion, criterion_group, criterion_main};
use lbva_tui::ops::{self, AttentionPlan, reference};
use lbva_tui::pack::sequence::{FrameTokens, PackedEpisode, Sequence, plan};
use lbva_tui::random::{Draw, Purpose};
use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

const HEADS: usize = 2;
const WIDTH: usize = 48;
const ROUNDS: usize = 9;

type Attention = fn(&Tensor, &Tensor, &Tensor, usize, &Arc<AttentionPlan>) -> Result<Tensor>;

fn random(rows: usize, item: &str) -> Var {
    let values = Draw::new(1, Purpose::Noise, 0, item).normals(rows * WIDTH);
    let tensor = Tensor::from_vec(values, (rows, WIDTH), &Device::Cpu).expect("a tensor");
    Var::from_tensor(&tensor).expect("a variable")
}

fn median(mut times: Vec<Duration>) -> f64 {
    times.sort();
    times[times.len() / 2].as_secs_f64() * 1e3
}

/// Forward and backward at one shape: dense against planned.
fn compare(frame: FrameTokens, chunk: usize, window: usize) {
    let episode = PackedEpisode { frames: 120, valid_frames: 120, chunk, window };
    let sequence = Sequence::new(&[episode], frame, 128).expect("a sequence");
    let plan = sequence.attention();
    let [q, k, v, weights] = ["q", "k", "v", "weights"].map(|item| random(sequence.len(), item));
    let time = |attention: Attention| {
        let started = Instant::now();
        let out = attention(&q, &k, &v, HEADS, plan).expect("attention");
        let forward = started.elapsed();
        black_box((out * weights.as_tensor()).and_then(|y| y.sum_all()?.backward()).expect("gradients"));
        (forward, started.elapsed())
    };
    let (mut dense, mut planned, mut forward) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..=ROUNDS {
        let times = (time(reference::planned_attention), time(ops::planned_attention));
        if round > 0 {
            dense.push(times.0.1);
            planned.push(times.1.1);
            forward.push(times.1.0);
        }
    }
    let (dense, planned, forward) = (median(dense), median(planned), median(forward));
    let pairs = plan.visible_pairs() as f64;
    println!(
        "{} tokens, chunk {chunk}, window {window}: {:.1} % of pairs visible; dense {dense:.1} ms, planned {planned:.1} \
         ms (forward {forward:.1}): {:.1} x; {:.2} ns a visible pair and head",
        sequence.len(),
        100.0 * pairs / (sequence.len() as f64).powi(2),
        dense / planned,
        planned * 1e6 / pairs / HEADS as f64
    );
}

fn bench(criterion: &mut Criterion) {
    let frame = FrameTokens { grid: [4, 4], actions: 2 };
    let mut draw = Draw::new(1, Purpose::Order, 0, "global batch");
    let mut episode = || {
        let frames = 103 + draw.below(260);
        PackedEpisode { frames, valid_frames: frames, chunk: 1 + draw.below(4), window: 4 + draw.below(61) }
    };
    let episodes: Vec<PackedEpisode> = (0..128).map(|_| episode()).collect();
    let planned = plan(&episodes, frame).expect("a plan");
    // The best of many: shorter than a time slice, it is seldom interrupted. Packs as they are trained hold a few
    // episodes each; one plan of all is 2 MB of fresh memory, and half its time goes to the kernel's page faults.
    for size in [4, episodes.len()] {
        let time = || {
            let started = Instant::now();
            episodes.chunks(size).for_each(|pack| drop(black_box(plan(pack, frame).expect("a plan"))));
            started.elapsed()
        };
        let best = (0..300).map(|_| time()).min().unwrap_or_default();
        let groups = planned.groups().len();
        println!("plans of 128 episodes, {size} to a sequence, {groups} groups: {best:.2?} at best");
    }

    for grid in [[2, 2], [4, 4]] {
        for (chunk, window) in [(4, 64), (2, 16)] {
            compare(FrameTokens { grid, actions: 2 }, chunk, window);
        }
    }
    let mut group = criterion.benchmark_group("128_episodes");
    group.sample_size(20);
    group.bench_function("plan", |bencher| bencher.iter(|| plan(&episodes, frame).expect("a plan")));
    group.bench_function("computed_pairs", |bencher| bencher.iter(|| planned.computed_pairs(128, 64)));
    group.bench_function("sequence", |bencher| bencher.iter(|| Sequence::new(&episodes, frame, 128).expect("it")));
    group.finish();
}

criterion_group!(benches, bench);
criterion_main!(benches);
