//! Small panels: each arm's latest value of one metric beside its curve, and one fact about the selected arm.

use super::super::app::{App, Arm};
use super::super::format::{self, bytes, milliseconds, percent, significant, thousands};
use super::super::metric::Metric;
use super::super::status;
use super::super::theme::Role;
use super::chart::{sparkline, value_of};
use super::{explain, frame, put};
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::Modifier;

/// A panel of one metric.
pub fn panel(app: &App, arms: &[Arm<'_>], metric: Metric, area: Rect, buffer: &mut Buffer) {
    let selected = arms.iter().find(|arm| arm.selected);
    let title = match metric {
        Metric::Memory => format!("{} memory", selected.map_or("", |arm| status::memory_kind(arm.run)))
            .replace("memory memory", "memory"),
        _ => format!("{}{}", metric.title(), metric.arrow()),
    };
    // With little room the selected arm comes first, then the others in their order.
    let rows = usize::from(area.height.saturating_sub(2));
    let mut shown: Vec<&Arm<'_>> = arms.iter().filter(|arm| arm.drawn || arm.selected).collect();
    let mut part = String::new();
    if shown.len() > rows {
        part = format!("{rows} of {}", shown.len());
        shown.sort_by_key(|arm| !arm.selected);
    }
    let inside = frame(app.theme, title.trim(), &part, false, area, buffer);
    if inside.width < 6 || inside.height == 0 {
        return;
    }
    let values: Vec<(&Arm<'_>, String, bool)> = shown
        .iter()
        .filter_map(|arm| value_of(app, arm, metric).map(|(text, bad)| (*arm, text, bad)))
        .take(usize::from(inside.height))
        .collect();
    if values.is_empty() {
        let text = match arms {
            [] => "comes with the first run",
            _ if metric.is_validation() => "comes with the first validation",
            _ => "comes with the first step",
        };
        explain(app.theme, text, inside, buffer);
        return;
    }
    let names = values.iter().map(|(arm, ..)| format::width(&arm.short)).max().unwrap_or(0).min(8);
    let widest = values.iter().map(|(_, text, _)| format::width(text)).max().unwrap_or(0).max(7);
    let left = (names + 1 + widest).min(usize::from(inside.width)) as u16;
    for (row, (arm, text, bad)) in values.iter().enumerate() {
        let y = inside.y + row as u16;
        let color = app.theme.arm(arm.position);
        let x = put(buffer, inside.x, y, inside.right(), &format::pad(&arm.short, names), color);
        let old = status::is_active(arm.state) && status::is_old(arm.run, app.now_ms);
        let style = match (bad, old) {
            (true, _) => app.theme.role(Role::Bad),
            (_, true) => app.theme.role(Role::Dim),
            _ if arm.selected => app.theme.role(Role::Text).add_modifier(Modifier::BOLD),
            _ => app.theme.role(Role::Text),
        };
        put(buffer, x + 1, y, inside.right(), &format::pad_left(text, widest), style);
    }
    let free = inside.height.saturating_sub(values.len() as u16);
    let fact = selected.and_then(|arm| fact(arm, metric)).filter(|_| free > 0);
    let lines = fact.map(|fact| super::wrap(&fact, usize::from(inside.width))).unwrap_or_default();
    let lines = &lines[..lines.len().min(usize::from(free))];
    for (row, line) in lines.iter().enumerate() {
        let y = inside.bottom() - lines.len() as u16 + row as u16;
        put(buffer, inside.x, y, inside.right(), line, app.theme.role(Role::Dim));
    }
    let plot = Rect {
        x: inside.x + left + 1,
        width: inside.width.saturating_sub(left + 1),
        height: inside.height - lines.len() as u16,
        ..inside
    };
    if plot.width >= 4 {
        sparkline(app, arms, metric, plot, buffer);
    }
}

/// One more fact about the selected arm, from its latest step or validation.
fn fact(arm: &Arm<'_>, metric: Metric) -> Option<String> {
    let run = arm.run;
    let validation = run.validations.last().map(|point| &point.event);
    let ceiling =
        |metric: Metric, value: f64| value.is_finite().then(|| format!("codec ceiling {}", metric.value(value)));
    let step = run.last_step.as_ref();
    Some(match metric {
        Metric::WristLpips => ceiling(metric, validation?.ceiling_lpips)?,
        Metric::WristPsnr => ceiling(metric, validation?.ceiling_psnr)?,
        Metric::StepTime => {
            let step = step?;
            let share = if step.step_ms > 0.0 { step.data_ms / step.step_ms } else { 0.0 };
            format!("waits for data {} ({})", percent(share), milliseconds(step.data_ms))
        }
        Metric::Memory => {
            let memory = step?.memory;
            format!("peak {} of {}", bytes(memory.peak_bytes as f64), bytes(memory.total_bytes as f64))
        }
        Metric::PaddingWaste => {
            let step = step?;
            let rate = if step.step_ms > 0.0 { step.tokens as f64 / step.step_ms * 1000.0 } else { 0.0 };
            format!("{} tokens a step, {}/s", thousands(step.tokens), significant(rate))
        }
        Metric::Loss => {
            let step = step?;
            format!("gradient norm {} · lr {}", significant(step.grad_norm), significant(step.lr))
        }
        _ => return None,
    })
}

/// The latest values of one arm in a line: what compact and small screens have instead of panels.
pub fn line(app: &App, arm: &Arm<'_>, area: Rect, buffer: &mut Buffer) {
    let color = app.theme.arm(arm.position);
    let x = put(buffer, area.x + 1, area.y, area.right(), &arm.short, color);
    let values = status::value_line(arm.run);
    let values = if values.is_empty() { status::why(arm.run, arm.state, &arm.reason, app.now_ms) } else { values };
    let old = status::is_active(arm.state) && status::is_old(arm.run, app.now_ms);
    let style = app.theme.role(if old { Role::Dim } else { Role::Text });
    let room = usize::from(area.right().saturating_sub(x + 2));
    put(buffer, x + 2, area.y, area.right(), &format::fit(&values, room), style);
}
