//! The first and the last line: what is watched and how it stands; which keys do what, or what just happened.

use super::super::app::{App, Modal};
use super::super::format;
use super::super::keys;
use super::super::snapshot::Decision;
use super::super::theme::Role;
use super::put;
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;

/// Program, experiment, question, verdict, time; the question gives way first, then the time.
pub fn header(app: &App, area: Rect, buffer: &mut Buffer) {
    let theme = app.theme;
    let Some(snapshot) = &app.snapshot else {
        let x = put(buffer, area.x + 1, area.y, area.right(), "lbva-tui", theme.role(Role::Key));
        put(buffer, x + 2, area.y, area.right(), &super::arms::nothing(app), theme.role(Role::Dim));
        return;
    };
    let (verdict, role) = match &snapshot.verdict {
        Some(verdict) => {
            let role = match verdict.decision {
                Decision::Pending => Role::Text,
                Decision::Better => Role::Good,
                Decision::Worse => Role::Bad,
                Decision::Undecided => Role::Warning,
            };
            (format!("verdict: {}", verdict.headline), role)
        }
        None => (format!("verdict: pending ({} validation points)", points(app)), Role::Dim),
    };
    let clock = format!("{} UTC", format::clock(app.now_ms));
    let width = usize::from(area.width).saturating_sub(2);
    let mut right = vec![(verdict, role)];
    if app.read_only {
        right.push(("read-only".into(), Role::Warning));
    }
    right.push((clock, Role::Dim));
    let taken = |parts: &[(String, Role)]| parts.iter().map(|(text, _)| format::width(text) + 2).sum::<usize>();
    let name = format!("lbva-tui  {}", snapshot.experiment);
    while right.len() > 1 && format::width(&name) + taken(&right) > width {
        right.pop();
    }
    let mut x = put(buffer, area.x + 1, area.y, area.right(), "lbva-tui", theme.role(Role::Key));
    x = put(buffer, x + 2, area.y, area.right(), &format::clean(&snapshot.experiment), theme.role(Role::Strong));
    let room = usize::from(area.right().saturating_sub(x)).saturating_sub(taken(&right) + 5);
    if room >= 16 && !snapshot.question.is_empty() {
        put(
            buffer,
            x + 3,
            area.y,
            area.right(),
            &format::fit_words(&format::clean(&snapshot.question), room),
            theme.role(Role::Dim),
        );
    }
    let mut x = (area.right().saturating_sub(taken(&right) as u16)).max(x + 2);
    for (text, role) in &right {
        let room = usize::from(area.right().saturating_sub(x + 1));
        x = put(buffer, x, area.y, area.right(), &format::fit_words(text, room), theme.role(*role)) + 2;
    }
}

fn points(app: &App) -> String {
    let Some(snapshot) = &app.snapshot else { return String::new() };
    let complete = snapshot.runs.iter().map(|run| distinct_points(run)).min().unwrap_or(0);
    match snapshot.planned_validations {
        0 => complete.to_string(),
        planned => format!("{complete} of {planned}"),
    }
}

fn distinct_points(run: &crate::runlog::RunView) -> usize {
    let mut steps: Vec<u64> = run.validations.iter().map(|point| point.event.step).collect();
    steps.sort_unstable();
    steps.dedup();
    steps.len()
}

/// The outcome of the last deed while it's fresh, else the keys of the pane.
pub fn footer(app: &App, area: Rect, buffer: &mut Buffer) {
    if let Some(notice) = &app.notice {
        let role = if notice.ok { Role::Good } else { Role::Warning };
        let mark = if notice.ok { "✓" } else { "✗" };
        let text = format!("{mark} {}", format::clean(&notice.text));
        let room = usize::from(area.width).saturating_sub(2);
        put(buffer, area.x + 1, area.y, area.right(), &format::fit_words(&text, room), app.theme.role(role));
        return;
    }
    if matches!(app.modal, Modal::Palette { .. } | Modal::Confirm(_) | Modal::Search { .. }) {
        return;
    }
    let entries = keys::footer(app.pane.context(), app.read_only);
    // Help and leaving stay whatever the width; the rest is cut from its end.
    let always = |words: &str| words == "help" || words.starts_with("leave");
    let (last, mut rest): (Vec<_>, Vec<_>) = entries.into_iter().partition(|(_, words)| always(words));
    let short = area.width < 100;
    let last: Vec<(String, &str)> = last
        .into_iter()
        .map(|(keys, words)| (keys, if short { words.split(' ').next().unwrap_or(words) } else { words }))
        .collect();
    let size = |entries: &[(String, &str)]| {
        entries.iter().map(|(keys, words)| format::width(keys) + format::width(words) + 3).sum::<usize>()
    };
    while !rest.is_empty() && size(&rest) + size(&last) > usize::from(area.width).saturating_sub(1) {
        // The deeds are what a person looks for in the footer under stress: drop what comes before them first.
        let least = rest.iter().rposition(|(_, words)| !["arm", "stop", "kill", "resume", "pane"].contains(words));
        rest.remove(least.unwrap_or(rest.len() - 1));
    }
    let mut x = area.x + 1;
    for (keys, words) in rest.iter().chain(&last) {
        x = put(buffer, x, area.y, area.right(), keys, app.theme.role(Role::Key));
        x = put(buffer, x + 1, area.y, area.right(), words, app.theme.role(Role::Dim)) + 2;
    }
}
