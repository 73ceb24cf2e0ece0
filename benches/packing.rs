//! What the packings waste on lengths like those of the published packed training, and what planning costs.
//!
//! `CARGO_PROFILE_DEV_OPT_LEVEL=3 cargo bench --profile dev --bench packing`: prints the statistics of 1,280 episodes
//! and of 100,000, the time that takes, and times the planning of one step of 128 episodes with the attention of every
//! sequence.

#[path = "../tests/packing_fixture/mod.rs"]
mod packing_fixture;

use criterion::{Criterion, criterion_group, criterion_main};
use lbva_tui::cli::data_pack::{PackInputs, pack, report};
use lbva_tui::config::PackingKind;
use lbva_tui::pack::cost::CostModel;
use lbva_tui::pack::length::round_up;
use lbva_tui::pack::sequence::FrameTokens;
use lbva_tui::pack::step::Planner;
use packing_fixture::*;
use std::hint::black_box;
use std::time::Instant;

/// Time of all threads on processors, to 10 ms: unlike wall time it means the same on a busy machine.
fn process_cpu_s() -> f64 {
    let text = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields: Vec<&str> = text.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    let ticks = |index: usize| fields.get(index).and_then(|field| field.parse::<f64>().ok()).unwrap_or(f64::NAN);
    (ticks(11) + ticks(12)) / 100.0
}

fn bench(criterion: &mut Criterion) {
    let (packing, train, flow, model) = (packing(), train(), flow(), model());
    let inputs = |name, lengths, text, frame| PackInputs {
        name,
        lengths,
        frame,
        packing: &packing,
        train: &train,
        flow: &flow,
        model: &model,
        real_text_tokens: Some(text),
    };

    let lab = lengths(1_280, 7);
    let text = vec![20; lab.len()];
    pack(&inputs("1,280 episodes, 18 tokens a frame", &lab, text.as_slice(), FRAME), false).expect("statistics");
    let random: (usize, usize) = lengths(128_000, 7).chunks(4).fold((0, 0), |(real, padded), batch| {
        (real + batch.iter().sum::<usize>(), padded + 4 * round_up(*batch.iter().max().unwrap_or(&0), 8))
    });
    println!("random batches of 4 padded to 8: {:.2} % padding\n", 100.0 * (1.0 - random.0 as f64 / random.1 as f64));
    // What a frame of two 128 x 128 views and four actions has.
    let frame = FrameTokens { grid: [4, 8], actions: 4 };
    pack(&inputs("1,280 episodes, 36 tokens a frame", &lab, text.as_slice(), frame), false).expect("statistics");

    let many = lengths(100_000, 7);
    let text = vec![20; many.len()];
    let (began, cpu) = (Instant::now(), process_cpu_s());
    let figures = report(&inputs("100,000 episodes", &many, text.as_slice(), FRAME)).expect("statistics");
    let (seconds, cpu) = (began.elapsed().as_secs_f64(), process_cpu_s() - cpu);
    let imbalance = figures.budget.map_or(f64::NAN, |budget| budget.imbalance_mean);
    println!(
        "\n100,000 episodes: the three packings in {seconds:.2} s ({cpu:.2} s of processors); budget imbalance {imbalance:.4}"
    );

    let cost = CostModel::of_model(&model, train.recompute);
    let planner = Planner::new(PackingKind::Budget, &lab, FRAME, &packing, &train, &flow, cost).expect("a planner");
    let plan = |step: u64| planner.step(step % 1_000 + 1).expect("a plan");
    // One after the other, as a trainer needs them.
    let attention = |step: u64| {
        for micro_batch in plan(step).ranks.iter().flatten() {
            black_box(micro_batch.attention(FRAME).expect("an attention plan"));
        }
    };
    let cpu = process_cpu_s();
    (0..1_000).for_each(attention);
    println!("step of 128: {:.2} ms of a processor with its attention plans", process_cpu_s() - cpu);
    let mut step = 0..;
    let mut next = || step.next().unwrap_or(0);
    criterion.bench_function("step of 128: deal and cut", |bencher| bencher.iter(|| plan(next())));
    criterion
        .bench_function("step of 128: deal, cut and attention plans", |bencher| bencher.iter(|| attention(next())));
}

criterion_group!(benches, bench);
criterion_main!(benches);
