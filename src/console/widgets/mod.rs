//! The parts of the screen. Each draws itself from the [`App`](super::app::App) into an area of any size, and says what
//! it waits for instead of staying empty.

pub mod arms;
pub mod bars;
pub mod chart;
pub mod log;
pub mod modal;
pub mod pictures;
pub mod raster;
pub mod values;

use super::format;
use super::theme::{Role, Theme};
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::Style;
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, BorderType, Widget};

/// A framed area with a title on the left and one on the right (dropped first when it's narrow); returns the inside.
pub fn frame(theme: Theme, title: &str, right: &str, focused: bool, area: Rect, buffer: &mut Buffer) -> Rect {
    let border = theme.role(if focused { Role::FocusedBorder } else { Role::Border });
    let room = usize::from(area.width).saturating_sub(4);
    let title = format::fit(title, room.saturating_sub(2));
    let mut block = Block::bordered().border_type(BorderType::Rounded).border_style(border);
    let title_role = if focused { Role::Key } else { Role::Strong };
    let used = format::width(&title) + 2;
    if !title.is_empty() {
        block = block.title_top(Line::from(Span::styled(format!(" {title} "), theme.role(title_role))));
    }
    if !right.is_empty() && used + format::width(right) + 3 <= room {
        block = block.title_top(Line::from(Span::styled(format!(" {right} "), theme.role(Role::Dim))).right_aligned());
    }
    let inside = block.inner(area);
    block.render(area, buffer);
    inside
}

/// Writes text cut to the rest of the row; returns the column after it. Outside the buffer nothing happens.
pub fn put(buffer: &mut Buffer, x: u16, y: u16, end: u16, text: &str, style: Style) -> u16 {
    let end = end.min(buffer.area.right());
    if y < buffer.area.top() || y >= buffer.area.bottom() || x < buffer.area.left() || x >= end {
        return x;
    }
    buffer.set_stringn(x, y, text, usize::from(end - x), style).0
}

/// Dim text in the middle of an area, wrapped by words: what an otherwise empty panel says.
pub fn explain(theme: Theme, text: &str, area: Rect, buffer: &mut Buffer) {
    let lines = wrap(text, usize::from(area.width));
    let shown = lines.len().min(usize::from(area.height));
    let top = area.y + (area.height - shown as u16) / 2;
    for (row, line) in lines.iter().take(shown).enumerate() {
        let indent = area.width.saturating_sub(format::width(line) as u16) / 2;
        put(buffer, area.x + indent, top + row as u16, area.right(), line, theme.role(Role::Dim));
    }
}

/// Breaks text at spaces into lines of at most `columns`.
pub fn wrap(text: &str, columns: usize) -> Vec<String> {
    if columns == 0 {
        return Vec::new();
    }
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        let word = format::fit(word, columns);
        match lines.last_mut() {
            Some(line) if format::width(line) + 1 + format::width(&word) <= columns => {
                line.push(' ');
                line.push_str(&word);
            }
            _ => lines.push(word),
        }
    }
    lines
}
