//! Whole screens on a test terminal at the sizes that matter, and proof that no size, run or key breaks them.

mod console_fixture;

use console_fixture::*;
use crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use lbva_tui::console::metric::Metric;
use lbva_tui::console::snapshot::LoadProgress;
use lbva_tui::console::theme::{Pictures, Theme};
use lbva_tui::console::{App, Msg};
use lbva_tui::runlog::*;
use proptest::prelude::*;
use ratatui::style::{Color, Modifier};
use std::sync::Arc;

const SIZES: [(u16, u16); 5] = [(200, 50), (120, 40), (80, 24), (60, 15), (40, 10)];
const PLAIN: Theme = Theme { light: false, color: false, ascii: true, pictures: Pictures::Shades };

fn press(app: &mut App, code: KeyCode) {
    for effect in app.update(Msg::Key(KeyEvent::new(code, KeyModifiers::NONE))) {
        answer_strip(app, effect);
    }
}

fn keys(app: &mut App, text: &str) {
    for key in text.chars() {
        press(app, if key == '\t' { KeyCode::Tab } else { KeyCode::Char(key) });
    }
}

fn assert_screens(name: &str, snapshot: impl Fn() -> lbva_tui::console::ConsoleSnapshot) {
    for size in SIZES {
        insta::assert_snapshot!(
            format!("{name}_{}x{}", size.0, size.1),
            text(&console(size, Theme::DARK, snapshot()), size)
        );
    }
}

#[test]
fn two_arms_under_way() {
    assert_screens("demo", demo);
}

#[test]
fn three_ways_to_pack() {
    assert_screens("packing", packing);
    for size in SIZES {
        for selected in ["", "j", "jj"] {
            let screens = [Theme::DARK, Theme { light: true, ..Theme::DARK }].map(|theme| {
                let mut app = console(size, theme, packing());
                keys(&mut app, selected);
                text(&app, size)
            });
            assert_eq!(screens[0], screens[1], "light and dark differ in colour only");
            assert!(!screens[0].contains("NaN"), "{}", screens[0]);
        }
    }
}

/// Where the curves of the three arms lie in the large chart of padding waste: the rows that their colours reach.
fn waste_rows(theme: Theme, least: f64, log_y: bool) -> Vec<std::collections::BTreeSet<u16>> {
    let size = (120, 40);
    let mut app = console(size, theme, packing_with(least));
    keys(&mut app, "]]]]]]]]");
    if log_y {
        keys(&mut app, "y");
    }
    let backend = frame(&app, size);
    let buffer = backend.buffer();
    // Up to the end labels, which are in the arms' colours too.
    let within = |x: u16, y: u16| (58..100).contains(&x) && (2..19).contains(&y);
    let braille = |symbol: &str| symbol.chars().all(|c| ('\u{2801}'..='\u{28ff}').contains(&c));
    (0..3)
        .map(|arm| {
            let cells = (0..size.1).flat_map(|y| (0..size.0).map(move |x| (x, y)));
            let curve = cells.filter(|(x, y)| within(*x, *y) && braille(buffer[(*x, *y)].symbol()));
            curve.filter(|at| Some(buffer[*at].fg) == theme.arm(arm).fg).map(|(_, y)| y).collect()
        })
        .collect()
}

#[test]
fn waste_tells_the_arms_apart_and_nothing_wasted_is_drawn() {
    for theme in [Theme::DARK, Theme { light: true, ..Theme::DARK }] {
        for (least, log_y) in [(0.001, false), (0.001, true), (0.0, false), (0.0, true)] {
            let rows = waste_rows(theme, least, log_y);
            assert!(rows.iter().all(|rows| !rows.is_empty()), "all arms are drawn: {rows:?}");
            for (upper, lower) in [(0, 1), (1, 2)] {
                assert!(rows[upper].last() < rows[lower].first(), "apart with {least} and log y {log_y}: {rows:?}");
            }
        }
    }
}

#[test]
fn before_the_first_step() {
    assert_screens("starting", starting);
}

#[test]
fn eight_arms_in_every_state() {
    assert_screens("eight", eight);
}

#[test]
fn before_anything_is_read() {
    let size = (80, 24);
    let mut app = App::new(Theme::DARK, false, size, NOW_MS);
    insta::assert_snapshot!("nothing_read_80x24", text(&app, size));
    app.update(Msg::Loading(LoadProgress { done: 3, total: 8 }));
    assert!(text(&app, size).contains("reading runs ... 3 of 8"));
    app.update(Msg::LoadFailed("permission denied (runs)".into()));
    assert!(text(&app, size).contains("permission denied (runs)"));
}

#[test]
fn panes_and_modals() {
    for (name, size, typed) in [
        ("log_search", (80, 24), "/step"),
        ("pictures", (80, 24), "\t\t"),
        ("help", (120, 40), "?"),
        ("help_small", (60, 15), "?"),
        ("palette", (80, 24), ":lo"),
        ("stop", (120, 40), "S"),
        ("kill", (80, 24), "Km1_b"),
        ("resume", (80, 24), "jR"),
        ("zoomed_loss_log_y", (120, 40), "]]]]]y++,,"),
        ("one_arm_hidden", (80, 24), "j "),
    ] {
        let mut app = console(size, Theme::DARK, demo());
        keys(&mut app, typed);
        insta::assert_snapshot!(name, text(&app, size));
    }
    for (name, size, typed) in [
        ("packing_waste_80x24", (80, 24), "jj]]]]]]]]"),
        ("packing_waste_log_y_120x40", (120, 40), "j]]]]]]]]y"),
        ("packing_no_poses_120x40", (120, 40), "]]]"),
    ] {
        let mut app = console(size, Theme::DARK, packing());
        keys(&mut app, typed);
        insta::assert_snapshot!(name, text(&app, size));
    }
}

#[test]
fn ascii_screen() {
    let size = (120, 40);
    let screen = text(&console(size, PLAIN, demo()), size);
    assert!(screen.is_ascii());
    insta::assert_snapshot!("ascii_120x40", screen);
}

#[test]
fn without_colour_nothing_is_coloured_but_emphasis_stays() {
    let size = (120, 40);
    let mut emphasis = 0;
    for cell in &frame(&console(size, PLAIN, eight()), size).buffer().content {
        assert_eq!((cell.fg, cell.bg), (Color::Reset, Color::Reset));
        emphasis += usize::from(cell.modifier.contains(Modifier::BOLD));
    }
    assert!(emphasis > 20);
}

#[test]
fn an_arm_has_one_colour_on_every_panel() {
    let size = (120, 40);
    let backend = frame(&console(size, Theme::DARK, demo()), size);
    let buffer = backend.buffer();
    let mut colours = std::collections::BTreeMap::new();
    for y in 0..size.1 {
        for x in 0..size.0 - 1 {
            let (a, b) = (&buffer[(x, y)], &buffer[(x + 1, y)]);
            // The log's title names the arm in the colour of titles.
            if x > 1 && buffer[(x - 2, y)].symbol() == "·" {
                continue;
            }
            let before = x.checked_sub(1).map(|x| buffer[(x, y)].symbol().to_owned()).unwrap_or_default();
            if a.symbol() == "m"
                && ["1", "2"].contains(&b.symbol())
                && [" ", "│", "┊"].contains(&before.as_str())
                && y > 1
                && y < 39
            {
                colours.entry(b.symbol().to_owned()).or_insert_with(Vec::new).push(a.fg);
            }
        }
    }
    for (arm, found) in &colours {
        assert!(found.len() >= 7, "m{arm} appears on every panel: {found:?}");
        assert!(found.iter().all(|colour| *colour == found[0]), "m{arm}: {found:?}");
    }
    assert_ne!(colours["1"][0], colours["2"][0]);
}

#[test]
fn an_accepted_change_is_a_seam_of_its_own_and_a_word_beside_the_arm() {
    let mut snapshot = demo();
    let change = |field: &str| ChangeView { attempt: 2, step: 700, field: field.into(), values: "1 -> 2".into() };
    Arc::make_mut(&mut snapshot.runs[0]).changes.extend([change("train.lr"), change("code")]);
    let size = (200, 50);
    let screen = text(&console(size, Theme::DARK, snapshot), size);
    assert!(screen.contains("m1 changed: train.lr, code") && screen.contains('╎'), "{screen}");
    assert!(screen.contains("changed at step 700: train.lr, code"), "{screen}");
    assert!(!screen.contains("m1 stopped"), "{screen}");
}

#[test]
fn old_data_are_dimmed_and_say_their_age() {
    let size = (120, 40);
    let mut app = console(size, Theme::DARK, demo());
    assert!(!text(&app, size).contains(" old"));
    app.update(Msg::Tick { now_ms: NOW_MS + 20_000 });
    let screen = text(&app, size);
    assert!(screen.contains("data 20 s old"), "{screen}");
}

fn any_run() -> impl Strategy<Value = RunView> {
    let value = prop_oneof![
        6 => (0.0f64..1e3).boxed(),
        1 => prop_oneof![Just(f64::NAN), Just(f64::INFINITY), Just(-1e300), Just(0.0), Just(1e-300)].boxed(),
    ];
    let step = prop_oneof![8 => 0u64..5_000, 1 => any::<u64>()];
    (
        prop_oneof![Just(String::new()), "[a-z_0-9]{1,12}", "\\PC{1,40}", Just("\u{1b}[2J漢字".to_owned())],
        prop::collection::vec((step.clone(), 0u32..4, any::<bool>(), value.clone()), 0..60),
        prop::collection::vec((step, 0u32..4, value.clone()), 0..12),
        prop::collection::vec((any::<u64>(), "\\PC{0,60}"), 0..20),
        (0u32..4, any::<bool>(), any::<u64>(), prop::option::of(0u64..3_000), 0u64..3, any::<u64>()),
        value,
    )
        .prop_map(|(arm, steps, points, lines, (attempts, ended, time_ms, phase, bad_lines, total), ms)| {
            let mut run = RunView { arm: arm.clone(), bad_lines, ..RunView::default() };
            for attempt in 1..=attempts {
                let ended = (ended && attempt < attempts).then(|| (Outcome::Stopped, "preempted".to_owned()));
                let started = started(&arm, attempt, u64::from(attempt) * 400, total);
                run.attempts.push(AttemptView { started, started_ms: time_ms, ended, first_step_ms: None });
            }
            for (step, attempt, superseded, value) in steps {
                run.series.step.push(step);
                run.series.attempt.push(attempt);
                run.series.superseded.push(superseded);
                run.series.loss.push(value as f32);
                run.series.step_ms.push((value * 3.0) as f32);
                run.series.memory_bytes.push((value * 1e7) as f32);
                run.series.padding_waste.push((value / 1e3) as f32);
                let packing = (attempt > 1).then_some(PackingStep {
                    micro_steps: step,
                    distinct_shapes: step / 2,
                    frame_padding: value,
                    alignment_padding: ms,
                    rank_imbalance: value,
                });
                let event = StepEvent { loss: value, step_ms: ms, loss_proprio: value, packing, ..step_event(1, step) };
                run.last_step = Some(event);
            }
            for (step, attempt, value) in points {
                let event = ValidationEvent {
                    wrist_lpips: value,
                    wrist_psnr: -value,
                    trans_l2_m: value,
                    ..validation(1, step)
                };
                run.validations.push(ValidationPoint { attempt, event });
            }
            run.log = lines.into_iter().map(|(time_ms, text)| LogLine { time_ms, level: Level::Error, text }).collect();
            run.phase = phase.map(|done| PhaseView {
                phase: Phase::Validating,
                done,
                total: 700,
                since_ms: time_ms,
                time_ms: time_ms / 2,
            });
            run.last_event_ms = attempts.checked_sub(1).map(|_| time_ms);
            run.last_save =
                ended.then_some(SaveView { step: total, bytes: u64::MAX, ms, blocked_ms: ms, attempt: 0, time_ms });
            run.liveness = if ended { Liveness::Alive } else { Liveness::Unknown };
            run
        })
}

fn any_key() -> impl Strategy<Value = KeyEvent> {
    use KeyCode::*;
    let code = prop_oneof![
        20 => prop::sample::select("hjklgGsyzSRKqnN?:/+-,. []a1漢".chars().collect::<Vec<_>>()).prop_map(Char),
        10 => prop::sample::select(vec![Up, Down, Left, Right, Tab, BackTab, Enter, Esc, Backspace, Delete, Home, End, PageUp, PageDown, F(1), F(5)]),
    ];
    let modifiers =
        prop_oneof![9 => Just(KeyModifiers::NONE), 1 => Just(KeyModifiers::CONTROL), 1 => Just(KeyModifiers::SHIFT)];
    (code, modifiers).prop_map(|(code, modifiers)| KeyEvent::new(code, modifiers))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(160))]

    #[test]
    fn no_size_run_or_key_panics(
        width in prop_oneof![1u16..30, 30u16..130, 130u16..260],
        height in prop_oneof![1u16..16, 16u16..60],
        runs in prop::collection::vec(any_run(), 0..5),
        later in prop::collection::vec(any_run(), 0..5),
        pressed in prop::collection::vec(any_key(), 0..40),
        theme in prop_oneof![Just(Theme::DARK), Just(PLAIN), Just(Theme { light: true, pictures: Pictures::Indexed, ..Theme::DARK })],
        now_ms in prop_oneof![Just(NOW_MS), any::<u32>().prop_map(u64::from)],
    ) {
        let snapshot = |runs: Vec<RunView>| lbva_tui::console::ConsoleSnapshot {
            runs: runs.into_iter().map(Arc::new).collect(),
            ..demo()
        };
        let mut app = console((width, height), theme, snapshot(runs));
        app.update(Msg::Tick { now_ms });
        for (index, key) in pressed.into_iter().enumerate() {
            if index == 15 {
                for effect in app.update(Msg::Snapshot(Arc::new(snapshot(later.clone())))) {
                    answer_strip(&mut app, effect);
                }
            }
            for effect in app.update(Msg::Key(key)) {
                answer_strip(&mut app, effect);
            }
            if index % 5 == 0 {
                frame(&app, (width, height));
            }
        }
        let screen = text(&app, (width, height));
        prop_assert!(!screen.contains('\u{1b}'), "an escape sequence reached the screen");
    }
}

/// A family without a pose, and one whose latents cannot be decoded.
#[test]
fn what_is_not_measured_is_a_dash_and_no_failure() {
    for decoded in [true, false] {
        let mut run = running("packed", 0, 700, 2_000);
        for point in &mut run.validations {
            let event = &mut point.event;
            (event.trans_l2_norm, event.trans_l2_m, event.rot_deg) = (f64::NAN, f64::NAN, f64::NAN);
            if !decoded {
                (event.wrist_lpips, event.wrist_psnr, event.wrist_ssim) = (f64::NAN, f64::NAN, f64::NAN);
                (event.ceiling_lpips, event.ceiling_psnr) = (f64::NAN, f64::NAN);
            }
        }
        let snapshot = lbva_tui::console::ConsoleSnapshot {
            runs: vec![Arc::new(run)],
            verdict: None,
            slurm: lbva_tui::slurm::Look::default(),
            submits: false,
            planned_validations: 0,
            ..demo()
        };
        for size in SIZES {
            let mut app = console(size, Theme::DARK, snapshot.clone());
            for _ in Metric::ALL {
                assert!(!text(&app, size).contains("NaN"), "{}", text(&app, size));
                press(&mut app, KeyCode::Char(']'));
            }
        }
        let screen = text(&console((200, 50), Theme::DARK, snapshot), (200, 50));
        assert_eq!(screen.contains("not measured"), !decoded, "{screen}");
    }
}

#[test]
fn every_size_down_to_one_cell() {
    let app = console((80, 24), Theme::DARK, eight());
    for width in 1..=130 {
        for height in [1, 2, 3, 9, 14, 15, 16, 19, 20, 24, 29, 30, 33] {
            frame(&app, (width, height));
        }
    }
}
