//! What lies over the screen: help, palette, confirmation.

use super::super::app::{App, Confirm, Deed, Modal};
use super::super::format::{self, pad};
use super::super::keys::{self, BINDINGS, Context};
use super::super::theme::Role;
use super::{frame, put, wrap};
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::Modifier;
use ratatui::widgets::{Clear, Widget};

/// Draws the open modal, if any. The log's search prompt draws itself in the log.
pub fn draw(app: &App, area: Rect, buffer: &mut Buffer) {
    match &app.modal {
        Modal::None | Modal::Search { .. } => {}
        Modal::Help { scroll } => help(app, *scroll, area, buffer),
        Modal::Palette { input, selected } => palette(app, input.value(), *selected, area, buffer),
        Modal::Confirm(confirm) => question(app, confirm, area, buffer),
        Modal::Plan { arm, lines, scroll } => plan(app, arm, lines, *scroll, area, buffer),
    }
}

fn centred(area: Rect, width: u16, height: u16) -> Rect {
    let (width, height) = (width.min(area.width), height.min(area.height));
    Rect { x: area.x + (area.width - width) / 2, y: area.y + (area.height - height) / 2, width, height }
}

fn help(app: &App, scroll: u16, area: Rect, buffer: &mut Buffer) {
    let mut lines: Vec<(String, String)> = Vec::new();
    for context in [Context::Everywhere, Context::Chart, Context::Pictures, Context::Log] {
        if !lines.is_empty() {
            lines.push((String::new(), String::new()));
        }
        lines.push((context.heading().to_owned(), String::new()));
        for binding in BINDINGS.iter().filter(|binding| binding.context == context) {
            let off = if binding.acts_on_run && app.read_only { " - off: read-only" } else { "" };
            lines.push((binding.label.to_owned(), format!("{}{off}", binding.words)));
        }
    }
    let area = centred(area, 72, lines.len() as u16 + 2);
    Clear.render(area, buffer);
    let visible = usize::from(area.height.saturating_sub(2));
    let most = lines.len().saturating_sub(visible);
    let hint = if most > 0 { "↑↓ scroll · any other key closes" } else { "any key closes" };
    let inside = frame(app.theme, "Keys", hint, true, area, buffer);
    for (row, (keys, words)) in lines.iter().skip(usize::from(scroll).min(most)).take(visible).enumerate() {
        let y = inside.y + row as u16;
        if words.is_empty() {
            put(buffer, inside.x + 1, y, inside.right(), keys, app.theme.role(Role::Strong));
        } else {
            put(buffer, inside.x + 1, y, inside.right(), &format::pad_left(keys, 8), app.theme.role(Role::Key));
            put(buffer, inside.x + 11, y, inside.right(), words, app.theme.role(Role::Text));
        }
    }
}

fn plan(app: &App, arm: &str, lines: &[String], scroll: u16, area: Rect, buffer: &mut Buffer) {
    let widest = lines.iter().map(|line| format::width(line)).max().unwrap_or(0).clamp(56, 110) as u16;
    let area = centred(area, widest + 4, lines.len().max(3) as u16 + 2);
    Clear.render(area, buffer);
    let room = usize::from(area.width.saturating_sub(4));
    let waiting = ["asking Slurm, and playing the run some thousand times ...".to_owned()];
    let lines = if lines.is_empty() { &waiting } else { lines };
    let lines: Vec<String> = lines
        .iter()
        .flat_map(|line| if line.is_empty() { vec![String::new()] } else { wrap_table(line, room) })
        .collect();
    let visible = usize::from(area.height.saturating_sub(2));
    let most = lines.len().saturating_sub(visible);
    let hint = if most > 0 { "↑↓ scroll · any other key closes" } else { "any key closes" };
    let inside = frame(app.theme, &format!("Plan of {arm}"), hint, true, area, buffer);
    for (row, line) in lines.iter().skip(usize::from(scroll).min(most)).take(visible).enumerate() {
        let y = inside.y + row as u16;
        put(buffer, inside.x + 1, y, inside.right(), &format::clean(line), app.theme.role(Role::Text));
    }
}

/// Sentences are wrapped; the rows of a table and of the chart, which begin with blanks or hold columns, are cut.
fn wrap_table(line: &str, room: usize) -> Vec<String> {
    if line.contains("   ") || line.starts_with(' ') { vec![format::fit(line, room)] } else { wrap(line, room) }
}

fn palette(app: &App, query: &str, selected: usize, area: Rect, buffer: &mut Buffer) {
    let found = keys::matching(query, app.read_only);
    let area = centred(area, 66, 16);
    Clear.render(area, buffer);
    let inside = frame(app.theme, "Actions", "Enter does it · Esc closes", true, area, buffer);
    put(
        buffer,
        inside.x + 1,
        inside.y,
        inside.right(),
        &format!(":{}▏", format::clean(query)),
        app.theme.role(Role::Key),
    );
    let rows = usize::from(inside.height.saturating_sub(1));
    if found.is_empty() {
        put(buffer, inside.x + 1, inside.y + 1, inside.right(), "no action has these words", app.theme.role(Role::Dim));
    }
    let first = (selected + 1).saturating_sub(rows.max(1));
    for (row, (index, binding)) in found.iter().enumerate().skip(first).take(rows).enumerate() {
        let y = inside.y + 1 + row as u16;
        let style = app.theme.role(Role::Text);
        let style = if index == selected { style.add_modifier(Modifier::REVERSED) } else { style };
        let where_ = if binding.context == Context::Everywhere { "" } else { binding.context.heading() };
        let words = if where_.is_empty() {
            binding.words.to_owned()
        } else {
            format!("{} ({})", binding.words, where_.to_lowercase())
        };
        put(buffer, inside.x + 1, y, inside.right(), &format::pad_left(binding.label, 7), app.theme.role(Role::Key));
        let room = usize::from(inside.right().saturating_sub(inside.x + 10));
        put(buffer, inside.x + 10, y, inside.right(), &pad(&words, room.saturating_sub(1)), style);
    }
}

fn question(app: &App, confirm: &Confirm, area: Rect, buffer: &mut Buffer) {
    let (heading, body) = app.question(confirm);
    let width = area.width.min(76);
    let lines: Vec<String> = body.iter().flat_map(|line| wrap(line, usize::from(width.saturating_sub(4)))).collect();
    let typed = u16::from(confirm.deed == Deed::Kill);
    let area = centred(area, width, lines.len() as u16 + typed + 4);
    Clear.render(area, buffer);
    let inside = frame(app.theme, &heading, "", true, area, buffer);
    let (left, end) = (inside.x + 1, inside.right().saturating_sub(1));
    let mut y = inside.y;
    for line in &lines {
        put(buffer, left, y, end, line, app.theme.role(Role::Text));
        y += 1;
    }
    if typed > 0 {
        let role = if confirm.is_ready() { Role::Bad } else { Role::Key };
        put(buffer, left, y, end, &format!("> {}▏", format::clean(confirm.typed.value())), app.theme.role(role));
    }
    // The last row is the answer's, whatever the height.
    let keep = match confirm.deed {
        Deed::Stop | Deed::Kill => "Esc  keep running",
        Deed::Resume => "Esc  leave it",
    };
    let go =
        if confirm.is_ready() { format!("Enter  {}", confirm.deed.word()) } else { "Enter  (name first)".to_owned() };
    let buttons = [format!("[ {keep} ]"), format!("[ {go} ]")];
    let total = buttons.iter().map(|text| format::width(text) as u16).sum::<u16>() + 2;
    let mut x = end.saturating_sub(total).max(left);
    let y = inside.bottom().saturating_sub(1);
    for (index, button) in buttons.iter().enumerate() {
        let role = if index == 1 && !confirm.is_ready() { Role::Dim } else { Role::Key };
        x = put(buffer, x, y, end, button, app.theme.role(role)) + 2;
    }
}
