//! Hand-made runs for the console's tests and benchmark: deterministic, and as long as asked.
#![allow(dead_code, reason = "each test program uses its own part")]

use lbva_tui::console::snapshot::{PictureRow, PictureStrip};
use lbva_tui::console::theme::Theme;
use lbva_tui::console::{App, ConsoleSnapshot, Decision, Effect, Msg, VerdictView, view};
use lbva_tui::runlog::*;
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use std::io::Write as _;
use std::path::Path;
use std::sync::Arc;

/// A moment on a fixed day: 12:41:07 UTC.
pub const NOW_MS: u64 = 1_790_000_000_000 - 1_790_000_000_000 % 86_400_000 + 45_667_000;

/// Repeatable noise in 0..1.
pub fn noise(seed: u64) -> f64 {
    let mut x = seed.wrapping_add(0x9E37_79B9_7F4A_7C15);
    x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    ((x ^ (x >> 31)) >> 11) as f64 / (1u64 << 53) as f64
}

pub fn started(arm: &str, attempt: u32, start_step: u64, total_steps: u64) -> AttemptStarted {
    AttemptStarted {
        attempt,
        arm: arm.into(),
        pid: 4_000 + attempt,
        host: "node7".into(),
        start_step,
        total_steps,
        save_every: 100,
        validate_every: 100,
        parameters: 2_345_678,
        device: "cpu".into(),
        threads: 1,
        job: None,
    }
}

pub fn step_event(arm: u64, step: u64) -> StepEvent {
    let loss = 0.08 + 0.9 * (-(step as f64) / 300.0).exp() + 0.05 * (noise((arm * 1_000_003).wrapping_add(step)) - 0.5);
    StepEvent {
        step,
        loss,
        loss_video: loss * 0.8,
        loss_action: loss * 0.15,
        loss_proprio: loss * 0.05,
        grad_norm: 1.0 + noise(step.wrapping_mul(7).wrapping_add(arm)),
        lr: 1e-4,
        step_ms: 400.0 + 30.0 * arm as f64 + 40.0 * noise(step.wrapping_mul(3).wrapping_add(arm)),
        data_ms: 8.0,
        padding_waste: 0.001 + 0.02 * noise(step.wrapping_mul(5).wrapping_add(arm)),
        tokens: 18_432,
        memory: Memory {
            kind: MemoryKind::Rss,
            bytes: 1_200_000_000u64.wrapping_add(step.wrapping_mul(10_000)),
            peak_bytes: 1_400_000_000,
            total_bytes: 16_000_000_000,
            parts: None,
        },
        branch_norm: None,
        packing: None,
        times: None,
        work: None,
    }
}

pub fn validation(arm: u64, step: u64) -> ValidationEvent {
    let fall = (-(step as f64) / 500.0).exp();
    ValidationEvent {
        step,
        clips: 12,
        wrist_lpips: 0.40 - 0.01 * arm as f64
            + 0.28 * fall
            + 0.01 * (noise(step.wrapping_add(31 * arm)) - 0.5) * f64::from(step > 0),
        wrist_psnr: 19.0 + 0.2 * arm as f64 - 5.0 * fall,
        wrist_ssim: 0.7 - 0.3 * fall,
        trans_l2_norm: 0.2 + 0.5 * fall,
        trans_l2_m: 0.02 + 0.05 * fall,
        rot_deg: 3.0 + 10.0 * fall,
        ceiling_lpips: 0.112,
        ceiling_psnr: 26.9,
        wrist_latent_mse: None,
        ms: 2_100.0,
        work: None,
    }
}

pub fn push_steps(run: &mut RunView, arm: u64, attempt: u32, steps: std::ops::RangeInclusive<u64>) {
    push_events(run, attempt, steps.map(|step| step_event(arm, step)));
}

pub fn push_events(run: &mut RunView, attempt: u32, events: impl Iterator<Item = StepEvent>) {
    for event in events {
        run.series.step.push(event.step);
        run.series.attempt.push(attempt);
        run.series.superseded.push(false);
        run.series.loss.push(event.loss as f32);
        run.series.step_ms.push(event.step_ms as f32);
        run.series.memory_bytes.push(event.memory.bytes as f32);
        run.series.padding_waste.push(event.padding_waste as f32);
        run.last_step = Some(event);
    }
}

pub fn log(run: &mut RunView, ago_ms: u64, level: Level, text: &str) {
    run.log.push(LogLine { time_ms: NOW_MS - ago_ms, level, text: text.into() });
}

/// A run that is alive at `step` of `total`.
pub fn running(name: &str, arm: u64, step: u64, total: u64) -> RunView {
    let mut run =
        RunView { arm: name.into(), directory: format!("/experiments/demo/runs/{name}").into(), ..RunView::default() };
    run.attempts.push(AttemptView {
        started: started(name, 1, 0, total),
        started_ms: NOW_MS - 900_000,
        ended: None,
        first_step_ms: None,
    });
    push_steps(&mut run, arm, 1, 1..=step);
    for point in (0..=step).step_by(100) {
        run.validations.push(ValidationPoint { attempt: 1, event: validation(arm, point) });
    }
    if step >= 100 {
        run.last_save = Some(SaveView {
            step: step / 100 * 100,
            bytes: 29_000_000,
            ms: 180.0,
            blocked_ms: 20.0,
            attempt: 1,
            time_ms: NOW_MS - 44_000,
        });
    }
    run.last_event_ms = Some(NOW_MS - 400);
    run.liveness = Liveness::Alive;
    log(&mut run, 46_000, Level::Info, &format!("step {} loss 0.0815 0.42 s", step.saturating_sub(12)));
    log(&mut run, 44_000, Level::Info, &format!("saved step {} 180 ms, 29.0 MB", step / 100 * 100));
    log(&mut run, 22_000, Level::Warning, "step time 1.4x the median for 12 steps");
    log(&mut run, 400, Level::Info, &format!("step {step} loss 0.0809 0.41 s"));
    run
}

/// The two arms of the demo: one stopped once and was resumed, the other was preempted.
pub fn demo() -> ConsoleSnapshot {
    let baseline = {
        let mut run = running("m1_baseline", 0, 1_240, 2_000);
        run.attempts[0].ended = Some((Outcome::Stopped, "stopped by ctrl-c".into()));
        run.attempts.push(AttemptView {
            started: started("m1_baseline", 2, 700, 2_000),
            started_ms: NOW_MS - 300_000,
            ended: None,
            first_step_ms: None,
        });
        for (step, attempt) in run.series.step.iter().zip(&mut run.series.attempt) {
            if *step > 700 {
                *attempt = 2;
            }
        }
        run
    };
    let geometry = {
        let mut run = running("m2_geometry", 1, 1_105, 2_000);
        run.attempts[0].ended = Some((Outcome::Stopped, "preempted: the machine was taken away".into()));
        run.outcome = Some(OutcomeView {
            outcome: Outcome::Stopped,
            reason: "preempted: the machine was taken away".into(),
            exit_code: 75,
            step: 1_105,
        });
        run.liveness = Liveness::Dead;
        run.last_event_ms = Some(NOW_MS - 190_000);
        run
    };
    ConsoleSnapshot {
        experiment: "experiments/demo".into(),
        question: "Do geometry tokens help the wrist view?".into(),
        runs: vec![Arc::new(baseline), Arc::new(geometry)],
        verdict: Some(VerdictView {
            note: String::new(),
            headline: "pending, 12 of 21 points".into(),
            decision: Decision::Pending,
        }),
        slurm: lbva_tui::slurm::Look::default(),
        submits: false,
        planned_validations: 21,
        loaded_ms: NOW_MS,
    }
}

/// Three ways to pack the same episodes: one that says nothing of packing and pads a fifth, one that was resumed and pads
/// a thirtieth, one that pads `least`. The family has no proprioception and no poses.
pub fn packing_with(least: f64) -> ConsoleSnapshot {
    let arm = |name: &str, arm: u64, last: u64, change: &dyn Fn(&mut StepEvent)| {
        let mut run = running(name, arm, 0, 1_000);
        (run.series, run.last_step, run.validations, run.log) = Default::default();
        let events = (1..=last).map(|step| {
            let mut event = step_event(0, step);
            event.loss_proprio = f64::NAN;
            change(&mut event);
            event
        });
        push_events(&mut run, 1, events);
        for step in (0..=last).step_by(100) {
            let event = validation(arm, step);
            let nan = f64::NAN;
            let event = ValidationEvent { trans_l2_norm: nan, trans_l2_m: nan, rot_deg: nan, ..event };
            run.validations.push(ValidationPoint { attempt: 1, event });
        }
        run.last_save = Some(SaveView {
            step: 400,
            bytes: 29_000_000,
            ms: 180.0,
            blocked_ms: 20.0,
            attempt: 1,
            time_ms: NOW_MS - 44_000,
        });
        run
    };
    let packed = |micro_steps, distinct_shapes, frame_padding, alignment_padding, rank_imbalance| {
        Some(PackingStep { micro_steps, distinct_shapes, frame_padding, alignment_padding, rank_imbalance })
    };
    let unpacked = arm("unpacked", 0, 412, &|event| {
        event.step_ms *= 2.2;
        event.padding_waste = 0.17 + 3.0 * event.padding_waste;
    });
    let mut bucket = arm("bucket", 1, 655, &|event| {
        event.step_ms *= 1.4;
        event.tokens = 16_128;
        event.padding_waste += 0.025;
        event.packing = packed(4, 37, 0.021, 0.0042, 1.148);
    });
    bucket.attempts[0].ended = Some((Outcome::Stopped, "stopped by the console".into()));
    let started = started("bucket", 2, 300, 1_000);
    bucket.attempts.push(AttemptView { started, started_ms: NOW_MS - 300_000, ended: None, first_step_ms: None });
    for (step, attempt) in bucket.series.step.iter().zip(&mut bucket.series.attempt) {
        *attempt += u32::from(*step > 300);
    }
    let budget = arm("budget", 2, 910, &|event| {
        event.tokens = 15_744;
        event.padding_waste = least;
        event.packing = packed(3, 112, 0.0, least * 0.4, 1.003);
    });
    let mut runs = [unpacked, bucket, budget];
    for (run, text) in runs.iter_mut().zip([
        "step 412 loss 0.3051 0.91 s",
        "step 655 loss 0.1812 0.58 s, 4 micro-steps, 3.6 % padding",
        "step 910 loss 0.1209 0.42 s, 3 micro-steps, 0.1 % padding",
    ]) {
        log(run, 400, Level::Info, text);
    }
    ConsoleSnapshot {
        experiment: "experiments/packing".into(),
        question: "Does packing change the curve, or only the time?".into(),
        runs: runs.into_iter().map(Arc::new).collect(),
        ..demo()
    }
}

/// As [`packing_with`], the least padding being a thousandth.
pub fn packing() -> ConsoleSnapshot {
    packing_with(0.001)
}

/// Before the first step: one arm caches latents, the other hasn't started.
pub fn starting() -> ConsoleSnapshot {
    let mut first = running("m1_baseline", 0, 0, 2_000);
    first.validations.clear();
    first.last_step = None;
    first.phase = Some(PhaseView {
        phase: Phase::CachingLatents,
        done: 312,
        total: 720,
        since_ms: NOW_MS - 6_000,
        time_ms: NOW_MS - 200,
    });
    first.log.clear();
    log(&mut first, 6_000, Level::Info, "caching latents of 720 clips");
    let second = RunView {
        arm: "m2_geometry".into(),
        directory: "/experiments/demo/runs/m2_geometry".into(),
        ..RunView::default()
    };
    ConsoleSnapshot { runs: vec![Arc::new(first), Arc::new(second)], verdict: None, ..demo() }
}

/// Eight arms in every state there is.
pub fn eight() -> ConsoleSnapshot {
    let mut runs: Vec<RunView> =
        (0..8).map(|arm| running(&format!("arm{arm}_variant"), arm, 300 + 170 * arm, 2_000)).collect();
    let end = |run: &mut RunView, outcome, reason: &str, step| {
        run.outcome = Some(OutcomeView { outcome, reason: reason.into(), exit_code: 1, step });
        run.attempts[0].ended = Some((outcome, reason.into()));
        run.liveness = Liveness::Dead;
    };
    runs[1].last_event_ms = Some(NOW_MS - 95_000);
    runs[2].stop_requested = true;
    end(&mut runs[3], Outcome::Stopped, "stopped by the console", 810);
    end(&mut runs[4], Outcome::Failed, "loss is NaN since step 912 (clip episode_000012@32)", 980);
    let len = runs[4].series.len();
    runs[4].series.loss[len - 68..].fill(f32::NAN);
    runs[5].liveness = Liveness::Dead;
    end(&mut runs[6], Outcome::Finished, "all steps done", 2_000);
    push_steps(&mut runs[6], 6, 1, 1_321..=2_000);
    runs[7] = RunView { arm: "arm7_variant".into(), ..RunView::default() };
    ConsoleSnapshot { runs: runs.into_iter().map(Arc::new).collect(), ..demo() }
}

/// `arms` arms with `steps` steps each and no log.
pub fn long(arms: u64, steps: u64) -> ConsoleSnapshot {
    let runs = (0..arms).map(|arm| Arc::new(running(&format!("arm{arm}_long"), arm, steps, steps * 2)));
    ConsoleSnapshot { runs: runs.collect(), ..demo() }
}

/// Pictures with a gradient and a moving bar, eight frames side by side.
pub fn strip(step: u64, arms: &[&str]) -> PictureStrip {
    let picture = |shift: u32| {
        Arc::new(image::RgbImage::from_fn(8 * 64, 64, |x, y| {
            let (frame, x) = (x / 64, x % 64);
            let bar = (x + 64 - frame * 6 - shift) % 64 < 10 && y > 20;
            if bar { image::Rgb([230, 60, 40]) } else { image::Rgb([(x * 3) as u8, (y * 3) as u8, 120]) }
        }))
    };
    let mut rows = vec![PictureRow { arm: None, picture: Ok(picture(0)) }];
    for (index, arm) in arms.iter().enumerate() {
        rows.push(PictureRow { arm: Some((*arm).into()), picture: Ok(picture(3 + index as u32)) });
    }
    PictureStrip { step, clip: "episode_000012@32".into(), index: 0, count: 4, rows }
}

/// A console that has seen `snapshot`, with pictures if any arm was validated.
pub fn console(size: (u16, u16), theme: Theme, snapshot: ConsoleSnapshot) -> App {
    let mut app = App::new(theme, false, size, NOW_MS);
    app.update(Msg::Tick { now_ms: NOW_MS });
    for effect in app.update(Msg::Snapshot(Arc::new(snapshot))) {
        answer_strip(&mut app, effect);
    }
    app
}

/// Answers a request for pictures as the loader would.
pub fn answer_strip(app: &mut App, effect: Effect) {
    if let Effect::LoadStrip(request) = effect {
        let arms: Vec<&str> = request.arms.iter().map(|(arm, _)| arm.as_str()).collect();
        let answer = strip(request.step, &arms);
        app.update(Msg::Strip(request.clone(), Ok(answer)));
    }
}

/// One frame as a buffer.
pub fn frame(app: &App, (width, height): (u16, u16)) -> TestBackend {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal.draw(|frame| view::draw(app, frame)).unwrap();
    terminal.backend().clone()
}

/// One frame as text.
pub fn text(app: &App, size: (u16, u16)) -> String {
    frame(app, size).to_string().lines().map(|line| line.trim_matches('"').trim_end().to_owned() + "\n").collect()
}

/// Writes an experiment folder with run directories of `arms` arms with `steps` steps each.
pub fn write_runs(experiment: &Path, arms: u64, steps: u64) -> std::io::Result<()> {
    for arm in 0..arms {
        let name = format!("arm{arm}_long");
        let attempt = experiment.join("runs").join(&name).join("attempts/0001");
        std::fs::create_dir_all(&attempt)?;
        let mut file = std::io::BufWriter::new(std::fs::File::create(attempt.join("events.jsonl"))?);
        let mut time_ms = NOW_MS - steps * 400;
        let mut line = |event: Event| -> std::io::Result<()> {
            time_ms += 400;
            serde_json::to_writer(&mut file, &EventLine { v: EVENT_VERSION, time_ms, event })?;
            file.write_all(b"\n")
        };
        line(Event::AttemptStarted(started(&name, 1, 0, steps * 2)))?;
        for step in 1..=steps {
            line(Event::Step(step_event(arm, step)))?;
            if step % (steps / 20).max(1) == 0 {
                line(Event::Validation(validation(arm, step)))?;
            }
        }
    }
    Ok(())
}

/// Appends one more step to a run of [`write_runs`].
pub fn append_step(experiment: &Path, arm: u64, step: u64) -> std::io::Result<()> {
    let log = experiment.join(format!("runs/arm{arm}_long/attempts/0001/events.jsonl"));
    let event = Event::Step(step_event(arm, step));
    let line = serde_json::to_string(&EventLine { v: EVENT_VERSION, time_ms: NOW_MS, event })?;
    std::fs::OpenOptions::new().append(true).open(log)?.write_all((line + "\n").as_bytes())
}
