//! The arms: who is alive, how far, why in this state, what is safe.

use super::super::app::{App, Arm, Pane};
use super::super::format::{self, pad, pad_left, thousands};
use super::super::status;
use super::super::theme::Role;
use super::{explain, frame, put, wrap};
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::{Modifier, Style};

/// Lines that an arm takes when there is room for `height` lines in all.
pub fn lines_each(arms: usize, height: u16) -> u16 {
    (height / (arms.max(1) as u16)).clamp(1, 6)
}

/// The framed list. Scrolls so that the selected arm is in view; the frame says what is out of view or not drawn.
pub fn draw(app: &App, arms: &[Arm<'_>], area: Rect, buffer: &mut Buffer) {
    let height = area.height.saturating_sub(2);
    let each = lines_each(arms.len(), height);
    let visible = usize::from((height / each).max(1));
    let selected = arms.iter().position(|arm| arm.selected).unwrap_or(0);
    let first = (selected + 1).saturating_sub(visible).min(arms.len().saturating_sub(visible));
    let drawn = arms.iter().filter(|arm| arm.drawn).count();
    let mut facts = Vec::new();
    if drawn < arms.len() {
        facts.push(format!("{drawn} of {} drawn", arms.len()));
    }
    if visible < arms.len() {
        facts.push(format!("{}–{} of {}", first + 1, (first + visible).min(arms.len()), arms.len()));
    }
    let inside = frame(app.theme, "Arms", &facts.join(" · "), app.pane == Pane::Arms, area, buffer);
    if arms.is_empty() {
        explain(app.theme, &nothing(app), inside, buffer);
        return;
    }
    let area = inside;
    let names = arms.iter().map(|arm| format::width(&arm.run.arm)).max().unwrap_or(0);
    for (row, arm) in arms.iter().skip(first).take(visible).enumerate() {
        let y = area.y + row as u16 * each;
        let rows = Rect { y, height: each.min(area.bottom().saturating_sub(y)), ..area };
        entry(app, arm, names, rows, buffer);
    }
}

/// What to say when there is no arm at all.
pub fn nothing(app: &App) -> String {
    if let Some(error) = &app.load_error {
        return error.clone();
    }
    match (&app.snapshot, app.loading.total) {
        (Some(_), _) => "no runs here yet: lbva-tui run starts one".into(),
        (None, 0) => "reading runs ...".into(),
        (None, total) => format!("reading runs ... {} of {total}", app.loading.done),
    }
}

fn entry(app: &App, arm: &Arm<'_>, names: usize, area: Rect, buffer: &mut Buffer) {
    let theme = app.theme;
    let (glyph, word, role) = status::state_look(arm.state);
    let color = theme.arm(arm.position);
    let strong = if arm.selected { Modifier::BOLD } else { Modifier::empty() };
    let bar = if arm.selected { "▌" } else { " " };
    let old = status::is_active(arm.state) && status::is_old(arm.run, app.now_ms);
    let numbers = if old { theme.role(Role::Dim) } else { Style::default() };
    for y in area.top()..area.bottom().min(area.top() + 5) {
        put(buffer, area.x, y, area.right(), bar, color);
    }
    let sample = if arm.drawn { theme.sample(arm.position) } else { "  ".to_owned() };
    let (y, end) = (area.y, area.right());
    let mut x = put(buffer, area.x + 1, y, end, glyph, theme.role(role));
    x = put(buffer, x + 1, y, end, &sample, color);
    let progress = status::progress(arm.run).map(|(step, total)| {
        let width = thousands(total).len();
        let share = if total == 0 { 0.0 } else { step as f64 / total as f64 };
        (format!("{}/{}", pad_left(&thousands(step), width), thousands(total)), pad_left(&percent_whole(share), 5))
    });
    let numbers_width = progress.as_ref().map_or(0, |(steps, share)| steps.len() + share.len() + 2);
    // Name, word and numbers share the rest: the name gives way first.
    let rest = usize::from(end.saturating_sub(x + 1));
    let name = names.min(rest.saturating_sub(12 + numbers_width)).max(6);
    x = put(buffer, x + 1, y, end, &pad(&arm.run.arm, name), color.add_modifier(strong));
    x = put(buffer, x + 1, y, end, &pad(word, 9), theme.role(role));
    let mut free_until = end;
    if let Some((steps, share)) = progress {
        let start = end.saturating_sub(numbers_width as u16 - 1).max(x + 1);
        let after = put(buffer, start, y, end, &steps, numbers);
        put(buffer, after + 1, y, end, &share, numbers);
        free_until = start.saturating_sub(1);
    }
    if area.height == 1 {
        // Room for the reason is left in this line, or nowhere.
        let room = usize::from(free_until.saturating_sub(x + 1));
        let why = format::clean(&status::why(arm.run, arm.state, &arm.reason, app.now_ms, room, false));
        if room >= 12 {
            put(buffer, x + 1, y, free_until, &format::fit_words(&why, room), theme.role(Role::Dim));
        }
    }
    let indent = area.x + 3;
    let room = usize::from(end.saturating_sub(indent));
    let below = usize::from(area.height.min(5)).saturating_sub(1);
    // With two lines, how it goes and what is safe come first; where the packing has a line, it is said only there.
    let packing = if below > 2 { status::packing(arm.run, room, true) } else { String::new() };
    let why = status::why(arm.run, arm.state, &arm.reason, app.now_ms, room, packing.is_empty());
    let why = format::clean(&why);
    let why_style = if role == Role::Bad { theme.role(Role::Bad) } else { numbers };
    // How a run ended is worth a second line; how it goes fits into one.
    let mut lines = if status::is_active(arm.state) { vec![why] } else { wrap(&why, room) };
    if lines.len() > 2 {
        lines[1] = lines[1..].join(" ");
        lines.truncate(2);
    }
    let mut lines: Vec<(String, Style)> = lines.into_iter().map(|line| (line, why_style)).collect();
    let dim = theme.role(Role::Dim);
    lines.push((status::safety(arm.run, arm.state, app.now_ms), dim));
    lines.push((format::clean(&status::changes(arm.run)), theme.role(Role::Warning)));
    lines.push((packing, numbers));
    if let Some(job) = arm.job.filter(|job| job.is_live()) {
        // While Slurm does not answer, that is the first thing to know.
        let is_blind = app.snapshot.as_ref().is_some_and(|snapshot| snapshot.slurm.error.is_some());
        let line = format::clean(&status::job(arm.run, job, app, room));
        match is_blind {
            true => lines.insert(1.min(lines.len()), (line, theme.role(Role::Warning))),
            false => lines.push((line, dim)),
        }
    }
    lines.push((format::clean(&status::place(arm.run, room)), dim));
    lines.retain(|(text, _)| !text.is_empty());
    let gauge_row = (lines.len() < below).then_some(y + 1 + lines.len() as u16);
    for (row, (text, style)) in lines.iter().take(below).enumerate() {
        put(buffer, indent, y + 1 + row as u16, end, &format::fit_words(text, room), *style);
    }
    if let Some(row) = gauge_row {
        gauge(app, arm, (indent, row), (room as u16).saturating_sub(1), buffer);
    }
}

/// A bar of the steps done over `width` columns.
fn gauge(app: &App, arm: &Arm<'_>, (x, y): (u16, u16), width: u16, buffer: &mut Buffer) {
    let Some((step, total)) = status::progress(arm.run).filter(|(_, total)| *total > 0) else { return };
    let done = ((step as f64 / total as f64).clamp(0.0, 1.0) * f64::from(width)) as usize;
    let rest = usize::from(width).saturating_sub(done);
    let after = put(buffer, x, y, x + width, &"━".repeat(done), app.theme.arm(arm.position));
    put(buffer, after, y, x + width, &"┈".repeat(rest), app.theme.role(Role::Dim));
}

/// Whole percent, rounded down: 100 % only when all is done.
fn percent_whole(share: f64) -> String {
    format!("{} %", (share * 100.0).floor())
}
