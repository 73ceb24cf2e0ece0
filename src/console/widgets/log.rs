//! The selected arm's log: follows the newest line, scrolls, marks what is searched for.

use super::super::app::{App, Modal, Pane, contains};
use super::super::format::{self, clock, fit_words, thousands};
use super::super::theme::Role;
use super::{explain, frame, put};
use crate::runlog::Level;
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::Modifier;

/// The framed panel.
pub fn draw(app: &App, area: Rect, buffer: &mut Buffer) {
    let theme = app.theme;
    let run = app.selected_run();
    let title = run.map_or_else(|| "Log".to_owned(), |run| format!("Log · {}", run.arm));
    let right = match app.log.above_end {
        0 => "follows".to_owned(),
        lines => format!("{} newer lines below", thousands(lines as u64)),
    };
    let inside = frame(theme, &title, &right, app.pane == Pane::Log, area, buffer);
    let searching = if let Modal::Search { input } = &app.modal { Some(input) } else { None };
    let prompt = u16::from((searching.is_some() || !app.log.pattern.is_empty()) && inside.height > 1);
    let lines = Rect { height: inside.height - prompt, ..inside };
    let Some(run) = run.filter(|run| !run.log.is_empty()) else {
        let text = if run.is_some() { "no message yet" } else { "no arm selected" };
        explain(theme, text, lines, buffer);
        return;
    };
    let end = run.log.len().saturating_sub(app.log.above_end);
    let start = end.saturating_sub(usize::from(lines.height));
    let matches = |text: &str| !app.log.pattern.is_empty() && contains(text, &app.log.pattern);
    for (row, line) in run.log.get(start..end).unwrap_or(&[]).iter().enumerate() {
        let y = lines.y + row as u16;
        let (mark, role) = match line.level {
            Level::Info => (" ", Role::Text),
            Level::Warning => ("!", Role::Warning),
            Level::Error => ("✗", Role::Bad),
        };
        let text = format::clean(&line.text);
        let x = put(buffer, lines.x, y, lines.right(), &clock(line.time_ms), theme.role(Role::Dim));
        let x = put(buffer, x + 1, y, lines.right(), mark, theme.role(role));
        let style = theme.role(role);
        let style = if matches(&text) { style.add_modifier(Modifier::REVERSED) } else { style };
        let room = usize::from(lines.right().saturating_sub(x + 1));
        put(buffer, x + 1, y, lines.right(), &fit_words(&text, room), style);
    }
    if prompt > 0 {
        let found = run.log.iter().filter(|line| matches(&line.text)).count();
        let y = inside.bottom() - 1;
        let (text, hint) = match searching {
            Some(input) => (format!("/{}▏", input.value()), "Enter finds · Esc ends"),
            None => (format!("/{}", app.log.pattern), "n N next · Esc ends"),
        };
        let x = put(buffer, inside.x, y, inside.right(), &format::clean(&text), theme.role(Role::Key));
        put(
            buffer,
            x + 2,
            y,
            inside.right(),
            &format!("{} lines · {hint}", thousands(found as u64)),
            theme.role(Role::Dim),
        );
    }
}
