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
use std::time::Instant;

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
    let began = Instant::now();
    let figures = report(&inputs("100,000 episodes", &many, text.as_slice(), FRAME)).expect("statistics");
    let seconds = began.elapsed().as_secs_f64();
    let imbalance = figures.budget.map_or(f64::NAN, |budget| budget.imbalance_mean);
    println!("\n100,000 episodes: the three packings in {seconds:.2} s; budget imbalance {imbalance:.4}");

    let cost = CostModel::of_model(&model, train.recompute);
    let planner = Planner::new(PackingKind::Budget, &lab, FRAME, &packing, &train, &flow, cost).expect("a planner");
    let mut step = 0;
    criterion.bench_function("step of 128: deal and cut", |bencher| {
        bencher.iter(|| {
            step = step % 1_000 + 1;
            planner.step(step).expect("a plan")
        })
    });
    criterion.bench_function("step of 128: deal, cut and attention plans", |bencher| {
        bencher.iter(|| {
            step = step % 1_000 + 1;
            let plan = planner.step(step).expect("a plan");
            let plans = plan.ranks.iter().flatten().map(|micro_batch| micro_batch.attention(FRAME));
            plans.collect::<Result<Vec<_>, _>>().expect("attention plans")
        })
    });
}

criterion_group!(benches, bench);
criterion_main!(benches);
