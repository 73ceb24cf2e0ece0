//! The state machine: which message leads to which effect, and what is refused.

mod console_fixture;

use console_fixture::*;
use crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use lbva_tui::console::app::{Modal, Pane, Target};
use lbva_tui::console::metric::Metric;
use lbva_tui::console::theme::Theme;
use lbva_tui::console::{App, ConsoleSnapshot, Effect, Leave, Msg};
use lbva_tui::runlog::*;
use std::sync::Arc;

const SIZE: (u16, u16) = (120, 40);

fn app() -> App {
    console(SIZE, Theme::DARK, demo())
}

fn press(app: &mut App, code: KeyCode) -> Vec<Effect> {
    app.update(Msg::Key(KeyEvent::new(code, KeyModifiers::NONE)))
}

fn keys(app: &mut App, text: &str) -> Vec<Effect> {
    text.chars().flat_map(|key| press(app, KeyCode::Char(key))).collect()
}

fn notice(app: &App) -> (bool, String) {
    app.notice.as_ref().map(|notice| (notice.ok, notice.text.clone())).unwrap_or_default()
}

/// The demo with its first arm changed.
fn with_first(change: impl FnOnce(&mut RunView)) -> Msg {
    let mut snapshot = demo();
    let mut run = (*snapshot.runs[0]).clone();
    change(&mut run);
    snapshot.runs[0] = Arc::new(run);
    Msg::Snapshot(Arc::new(snapshot))
}

fn deeds(effects: Vec<Effect>) -> Vec<Effect> {
    effects.into_iter().filter(|effect| !matches!(effect, Effect::LoadStrip(_))).collect()
}

#[test]
fn a_stop_is_asked_first_and_bound_to_the_attempt() {
    let mut app = app();
    assert!(keys(&mut app, "S").is_empty(), "the key alone does nothing");
    assert!(matches!(app.modal, Modal::Confirm(_)));
    let effects = press(&mut app, KeyCode::Enter);
    let run = demo().runs[0].clone();
    assert_eq!(effects, vec![Effect::Stop(Target::of(&run, RunState::Running, None))]);
    assert_eq!(Target::of(&run, RunState::Running, None).attempt, 2);
    assert!(matches!(app.modal, Modal::None));
    app.update(Msg::EffectResult { ok: true, text: "m1_baseline: saved step 1,241 and left".into() });
    assert_eq!(notice(&app), (true, "m1_baseline: saved step 1,241 and left".into()));
}

#[test]
fn a_stop_hits_the_arm_it_was_asked_for_even_if_the_rows_moved() {
    let mut app = app();
    keys(&mut app, "S");
    let mut moved = demo();
    moved.runs.reverse();
    app.update(Msg::Snapshot(Arc::new(moved)));
    let effects = deeds(press(&mut app, KeyCode::Enter));
    assert!(matches!(effects.as_slice(), [Effect::Stop(target)] if target.arm == "m1_baseline"), "{effects:?}");
}

#[test]
fn a_newer_attempt_is_not_stopped_by_an_older_question() {
    for key in ["S", "Km1_baseline"] {
        let mut app = app();
        keys(&mut app, key);
        app.update(with_first(|run| {
            run.attempts.push(AttemptView {
                started: started("m1_baseline", 3, 1_200, 2_000),
                started_ms: NOW_MS,
                ended: None,
                first_step_ms: None,
            });
        }));
        assert!(deeds(press(&mut app, KeyCode::Enter)).is_empty());
        let (ok, text) = notice(&app);
        assert!(!ok && text.contains("attempt 3") && text.contains("nothing was done"), "{text}");
    }
}

#[test]
fn a_run_that_ended_meanwhile_or_vanished_is_left_alone() {
    let mut app = app();
    keys(&mut app, "S");
    app.update(with_first(|run| {
        run.outcome = Some(OutcomeView {
            outcome: Outcome::Finished,
            reason: "all steps done".into(),
            exit_code: 0,
            step: 2_000,
        });
    }));
    assert!(deeds(press(&mut app, KeyCode::Enter)).is_empty());
    assert!(notice(&app).1.contains("nothing was done"));

    let mut app = self::app();
    keys(&mut app, "S");
    app.update(Msg::Snapshot(Arc::new(ConsoleSnapshot { runs: vec![], ..demo() })));
    assert!(deeds(press(&mut app, KeyCode::Enter)).is_empty());
    assert!(notice(&app).1.contains("gone"));
}

#[test]
fn a_kill_needs_the_name() {
    let mut app = app();
    keys(&mut app, "Km1_baselin");
    assert!(press(&mut app, KeyCode::Enter).is_empty());
    assert!(matches!(app.modal, Modal::Confirm(_)), "still asking");
    keys(&mut app, "e");
    assert!(matches!(press(&mut app, KeyCode::Enter).as_slice(), [Effect::Kill(target)] if target.pid == 4_002));
}

#[test]
fn escape_leaves_the_run_alone() {
    for key in ["S", "K", "jR"] {
        let mut app = app();
        keys(&mut app, key);
        assert!(press(&mut app, KeyCode::Esc).is_empty());
        assert!(matches!(app.modal, Modal::None));
        assert!(notice(&app).1.contains("left as it is"));
    }
}

#[test]
fn what_makes_no_sense_is_refused_with_a_reason() {
    for (key, words) in [("R", "nothing to resume"), ("jS", "no process to stop"), ("jK", "no process to kill")] {
        let mut app = app();
        keys(&mut app, key);
        assert!(matches!(app.modal, Modal::None), "{key}");
        assert!(notice(&app).1.contains(words), "{key}: {:?}", notice(&app));
    }
    let mut app = app();
    keys(&mut app, "jR");
    let effects = press(&mut app, KeyCode::Enter);
    assert_eq!(effects, vec![Effect::Resume { arm: "m2_geometry".into() }]);
    app.update(with_first(|run| run.liveness = Liveness::Unknown));
    keys(&mut app, "kK");
    assert!(notice(&app).1.contains("kill it there"));
}

#[test]
fn read_only_refuses_every_deed_also_from_the_palette() {
    let mut app = App::new(Theme::DARK, true, SIZE, NOW_MS);
    app.update(Msg::Snapshot(Arc::new(demo())));
    for key in ["S", "K", "jR"] {
        assert!(deeds(keys(&mut app, key)).is_empty());
        assert!(matches!(app.modal, Modal::None));
        assert!(notice(&app).1.contains("read-only"), "{key}");
    }
    keys(&mut app, ":resume or start");
    assert!(deeds(press(&mut app, KeyCode::Enter)).is_empty());
    assert!(matches!(app.modal, Modal::None));
}

#[test]
fn leaving_quits_and_touches_no_run() {
    let mut app = app();
    assert_eq!(keys(&mut app, "q"), vec![Effect::Quit(Leave::ByUser)]);
    keys(&mut app, "K");
    let control_c = Msg::Key(KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL));
    assert_eq!(app.update(control_c), vec![Effect::Quit(Leave::ByUser)], "also from inside a question");
    assert_eq!(press(&mut app, KeyCode::Esc), vec![], "Esc never leaves");
    assert_eq!(app.update(Msg::Signal(15)), vec![Effect::Quit(Leave::Signal(15))]);
    let died = Msg::WorkerDied { thread: "runs".into(), message: "index".into() };
    assert_eq!(app.update(died), vec![Effect::Quit(Leave::Crash("runs".into(), "index".into()))]);
}

#[test]
fn typed_letters_are_text_inside_a_prompt() {
    let mut app = app();
    keys(&mut app, "/qSK");
    assert!(matches!(&app.modal, Modal::Search { input } if input.value() == "qSK"));
    press(&mut app, KeyCode::Esc);
    keys(&mut app, "Kq");
    assert!(matches!(&app.modal, Modal::Confirm(confirm) if confirm.typed.value() == "q"));
}

#[test]
fn nothing_is_drawn_when_nothing_changed() {
    let mut app = app();
    assert!(app.take_dirty());
    assert!(!app.take_dirty());
    app.update(Msg::Tick { now_ms: NOW_MS + 100 });
    assert!(!app.take_dirty(), "same second");
    app.update(Msg::Tick { now_ms: NOW_MS + 1_000 });
    assert!(app.take_dirty(), "ages moved on");
    app.update(Msg::EffectResult { ok: true, text: "done".into() });
    app.take_dirty();
    app.update(Msg::Tick { now_ms: NOW_MS + 60_000 });
    assert!(app.notice.is_none(), "notices end");
}

#[test]
fn selection_and_marks_follow_the_arm_not_the_row() {
    let mut app = app();
    keys(&mut app, "j ");
    let mut moved = demo();
    moved.runs.reverse();
    app.update(Msg::Snapshot(Arc::new(moved)));
    assert_eq!(app.selected_run().unwrap().arm, "m2_geometry");
    let drawn: Vec<_> = app.arms().into_iter().filter(|arm| arm.drawn).map(|arm| arm.run.arm.clone()).collect();
    assert_eq!(drawn, ["m1_baseline"]);
}

#[test]
fn smoothing_is_kept_apart_for_validations_and_steps() {
    let mut app = app();
    assert_eq!(app.weight(), 0.0, "few exact points: off");
    keys(&mut app, "s");
    assert_eq!(app.weight(), 0.3);
    while app.chart.metric != Metric::Loss {
        keys(&mut app, "]");
    }
    assert_eq!(app.weight(), 0.9, "many noisy points: on");
    assert!(app.curve("m1_baseline", Metric::Loss).unwrap().is_smoothed());
    assert!(!app.curve("m1_baseline", Metric::StepTime).unwrap().is_smoothed(), "only the shown chart costs memory");
}

#[test]
fn zoom_pan_and_cursor_stay_inside_the_data() {
    let mut app = app();
    press(&mut app, KeyCode::Tab);
    assert_eq!(app.pane, Pane::Chart);
    press(&mut app, KeyCode::Left);
    assert!(notice(&app).1.contains("zooms in"));
    keys(&mut app, "++");
    let (from, to) = app.window();
    assert_eq!((to, to - from), (1_240, 310), "towards the newest step");
    app.update(with_first(|run| push_steps(run, 0, 2, 1_241..=1_250)));
    assert_eq!(app.window(), (940, 1_250), "which stays in view");
    app.update(Msg::Snapshot(Arc::new(demo())));
    keys(&mut app, "z++");
    for _ in 0..40 {
        press(&mut app, KeyCode::Left);
    }
    assert_eq!(app.window(), (0, 310));
    for _ in 0..40 {
        press(&mut app, KeyCode::Right);
    }
    assert_eq!(app.window().1, 1_240);
    keys(&mut app, ",,");
    assert_eq!(app.chart.cursor, Some(1_200), "from validation to validation");
    for _ in 0..60 {
        keys(&mut app, "+");
    }
    let (from, to) = app.window();
    assert!((from..=to).contains(&1_200) && to - from >= 8);
    keys(&mut app, "z");
    assert_eq!(app.window(), app.extent());
    press(&mut app, KeyCode::Esc);
    assert_eq!(app.chart.cursor, None);
}

#[test]
fn the_log_stays_where_it_was_scrolled_while_lines_arrive() {
    let mut app = app();
    keys(&mut app, "\t");
    while app.pane != Pane::Log {
        press(&mut app, KeyCode::Tab);
    }
    press(&mut app, KeyCode::Up);
    assert_eq!(app.log.above_end, 1);
    app.update(with_first(|run| {
        log(run, 200, Level::Info, "step 1,241");
        log(run, 100, Level::Info, "step 1,242");
    }));
    assert_eq!(app.log.above_end, 3);
    keys(&mut app, "G");
    assert_eq!(app.log.above_end, 0);
    keys(&mut app, "/saved");
    press(&mut app, KeyCode::Enter);
    let run = app.selected_run().unwrap();
    let bottom = run.log.len() - app.log.above_end - 1;
    assert!(run.log[bottom].text.starts_with("saved"));
    keys(&mut app, "N");
    assert!(notice(&app).1.contains("no earlier line"));
}

#[test]
fn pictures_are_asked_for_once_and_late_answers_are_dropped() {
    let mut app = App::new(Theme::DARK, false, SIZE, NOW_MS);
    let effects = app.update(Msg::Snapshot(Arc::new(demo())));
    let [Effect::LoadStrip(first)] = effects.as_slice() else { panic!("{effects:?}") };
    assert_eq!((first.step, first.arms.len()), (1_200, 1), "m2 has no validation at 1,200");
    assert!(app.update(Msg::Snapshot(Arc::new(demo()))).is_empty(), "asked already");
    let effects = press(&mut app, KeyCode::Char('j'));
    assert!(
        matches!(effects.as_slice(), [Effect::LoadStrip(second)] if second.step == 1_100 && second.arms.len() == 2)
    );
    app.update(Msg::Strip(first.clone(), Ok(strip(1_200, &["m1_baseline"]))));
    assert!(app.strip.is_none(), "the answer to the old question");
}
