//! What the console costs with eight arms of 200,000 steps: a frame at 200x50, a live run's next step, opening from
//! disk.
//!
//! `cargo bench --bench console`. The generator of run directories is `tests/console_fixture`.

#[path = "../tests/console_fixture/mod.rs"]
mod console_fixture;

use console_fixture::*;
use criterion::{Criterion, criterion_group, criterion_main};
use crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use lbva_tui::console::snapshot::ShownRun;
use lbva_tui::console::theme::Theme;
use lbva_tui::console::{App, ConsoleSnapshot, Msg, view};
use lbva_tui::runlog::{ExperimentRuns, RunReader, RunView, poll_all};
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use std::sync::Arc;

const SIZE: (u16, u16) = (200, 50);
const ARMS: u64 = 8;
const STEPS: u64 = 200_000;

/// The most memory that this process ever had resident, MB.
fn peak_mb() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|line| line.starts_with("VmHWM")).unwrap_or_default();
    line.split_whitespace().nth(1).and_then(|kb| kb.parse::<u64>().ok()).unwrap_or(0) / 1000
}

/// Time this thread ran on a processor, ms: unlike wall time it means the same on a busy machine.
fn cpu_ms() -> f64 {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    text.split_whitespace().next().and_then(|ns| ns.parse::<f64>().ok()).unwrap_or(f64::NAN) / 1e6
}

/// The same for all threads of the process, to 10 ms.
fn process_cpu_ms() -> f64 {
    let text = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields: Vec<&str> = text.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    let ticks = |index: usize| fields.get(index).and_then(|field| field.parse::<f64>().ok()).unwrap_or(f64::NAN);
    (ticks(11) + ticks(12)) * 10.0
}

fn bench(criterion: &mut Criterion) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    write_runs(folder.path(), ARMS, STEPS).expect("run directories");
    let runs = ExperimentRuns::new(folder.path());
    let open = || {
        let mut readers: Vec<RunReader> =
            runs.list().expect("runs").iter().map(|run| RunReader::open(run.root())).collect();
        for result in poll_all(&mut readers, NOW_MS) {
            result.expect("readable");
        }
        readers
    };
    let show = |readers: &[RunReader]| {
        let snapshot = ConsoleSnapshot { runs: readers.iter().map(|r| Arc::new(r.view().clone())).collect(), ..demo() };
        console(SIZE, Theme::DARK, snapshot)
    };
    // The first opening, as a person has it: readers and console both alive.
    let (started, processor) = (std::time::Instant::now(), process_cpu_ms());
    let readers = open();
    let mut app = show(&readers);
    let mut terminal = Terminal::new(TestBackend::new(SIZE.0, SIZE.1)).expect("test terminal");
    terminal.draw(|frame| view::draw(&app, frame)).expect("a frame");
    println!(
        "opening {ARMS} x {STEPS} steps from disk to the first full frame: {:?} ({:.0} ms on all processors together)",
        started.elapsed(),
        process_cpu_ms() - processor
    );
    println!("peak memory with the readers, the snapshot and the curves: {} MB", peak_mb());

    let on_processor = |app: &App, terminal: &mut Terminal<TestBackend>, what: &str| {
        let before = cpu_ms();
        for _ in 0..50 {
            terminal.draw(|frame| view::draw(app, frame)).expect("a frame");
        }
        println!("{what}: {:.2} ms on the processor a frame", (cpu_ms() - before) / 50.0);
    };
    on_processor(&app, &mut terminal, "validation chart");

    // A live run: a step is written, read and shown, as the console does up to five times a second.
    let looks = 100;
    let mut reader = RunReader::open(runs.run("arm0_long").root());
    reader.poll(NOW_MS).expect("readable");
    let mut live = console(SIZE, Theme::DARK, demo());
    let mut look = |step: u64, copy: &mut dyn FnMut(&RunView) -> Arc<RunView>| {
        append_step(folder.path(), 0, step).expect("a step");
        let before = cpu_ms();
        reader.poll(NOW_MS).expect("readable");
        let runs = vec![copy(reader.view())];
        live.update(Msg::Snapshot(Arc::new(ConsoleSnapshot { runs, ..demo() })));
        cpu_ms() - before
    };
    let mut shown = ShownRun::default();
    let mut reused = |view: &RunView| {
        shown.replace(view);
        Arc::clone(shown.current())
    };
    let mut measure = |what: &str, from: u64, copy: &mut dyn FnMut(&RunView) -> Arc<RunView>| {
        let times: Vec<f64> = (from..from + looks).map(|step| look(step, copy)).collect();
        let mean = times.iter().skip(10).sum::<f64>() / (looks - 10) as f64;
        println!("one more step of a run of {STEPS}, {what}: {mean:.2} ms on the processor a look");
    };
    measure("copied into fresh memory", STEPS + 1, &mut |view| Arc::new(view.clone()));
    measure("copied as the console does", STEPS + looks + 1, &mut reused);

    let mut group = criterion.benchmark_group("console");
    group.sample_size(20);
    group.bench_function("frame_validation_chart_200x50", |bencher| {
        bencher.iter(|| terminal.draw(|frame| view::draw(&app, frame)).map(|_| ()).expect("a frame"));
    });
    let press = |app: &mut App, key| {
        app.update(Msg::Key(KeyEvent::new(KeyCode::Char(key), KeyModifiers::NONE)));
    };
    for _ in 0..5 {
        press(&mut app, ']');
    }
    group.bench_function("frame_smoothed_loss_chart_200x50", |bencher| {
        bencher.iter(|| terminal.draw(|frame| view::draw(&app, frame)).map(|_| ()).expect("a frame"));
    });
    on_processor(&app, &mut terminal, "smoothed loss chart");
    println!("peak memory with the smoothed loss: {} MB", peak_mb());
    press(&mut app, '+');
    press(&mut app, '+');
    group.bench_function("frame_smoothed_loss_chart_zoomed_200x50", |bencher| {
        bencher.iter(|| terminal.draw(|frame| view::draw(&app, frame)).map(|_| ()).expect("a frame"));
    });
    group.sample_size(10);
    group.bench_function("open_from_disk", |bencher| bencher.iter(|| show(&open())));
    group.finish();
}

criterion_group!(benches, bench);
criterion_main!(benches);
