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

/// From so many columns on a panel has room for a second value beside the first.
const WIDE: u16 = 34;

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
    let mut values: Vec<(&Arm<'_>, String, bool)> = shown
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
    if metric == Metric::StepTime && inside.width >= WIDE && app.chart.cursor.is_none() {
        // Times compare arms of the same tokens; arms that pack differently need the rate beside it.
        let rate = |arm: &Arm<'_>| arm.run.last_step.as_ref().map_or(f64::NAN, status::tokens_per_second);
        let rates: Vec<String> = values.iter().map(|(arm, ..)| format!("{} tok/s", significant(rate(arm)))).collect();
        let times = values.iter().map(|(_, text, _)| format::width(text)).max().unwrap_or(0).max(7);
        let widest = rates.iter().map(|text| format::width(text)).max().unwrap_or(0);
        for ((_, text, _), rate) in values.iter_mut().zip(&rates) {
            *text = format!("{}  {}", format::pad_left(text, times), format::pad_left(rate, widest));
        }
    }
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
    let facts = selected.and_then(|arm| facts(arm, metric)).unwrap_or_default();
    let lines = flow(&facts, usize::from(inside.width), usize::from(free));
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

/// Facts in lines of `columns`: several in a line where they fit, else one broken between words, and none in part. What
/// does not fit into `rows` is left out.
fn flow(facts: &[String], columns: usize, rows: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for fact in facts {
        if let Some(line) = lines.last_mut()
            && format::width(line) + 3 + format::width(fact) <= columns
        {
            line.push_str(&format!(" · {fact}"));
            continue;
        }
        let more = super::wrap(fact, columns);
        if lines.len() + more.len() <= rows {
            lines.extend(more);
        }
    }
    lines
}

/// More about the selected arm, from its latest step or validation, the most telling first.
fn facts(arm: &Arm<'_>, metric: Metric) -> Option<Vec<String>> {
    let run = arm.run;
    let validation = run.validations.last().map(|point| &point.event);
    let ceiling =
        |metric: Metric, value: f64| value.is_finite().then(|| format!("codec ceiling {}", metric.value(value)));
    let step = run.last_step.as_ref();
    Some(match metric {
        Metric::WristLpips => vec![ceiling(metric, validation?.ceiling_lpips)?],
        Metric::WristPsnr => vec![ceiling(metric, validation?.ceiling_psnr)?],
        Metric::StepTime => {
            let step = step?;
            let share = if step.step_ms > 0.0 { step.data_ms / step.step_ms } else { 0.0 };
            let waits = format!("waits for data {} ({})", percent(share), milliseconds(step.data_ms));
            // The panel of padding waste is full of the packing.
            let rate = step.packing.map(|_| format!("{} tokens/s", significant(status::tokens_per_second(step))));
            let device = step.times.as_ref().map(status::device_times);
            rate.into_iter().chain(device.into_iter().flatten()).chain([waits]).collect()
        }
        Metric::Memory => {
            let memory = step?.memory;
            let peak = format!("peak {} of {}", bytes(memory.peak_bytes as f64), bytes(memory.total_bytes as f64));
            std::iter::once(peak).chain(memory.parts.iter().flat_map(status::memory_parts)).collect()
        }
        Metric::PaddingWaste => {
            let step = step?;
            let rate = significant(status::tokens_per_second(step));
            match &step.packing {
                Some(packing) => {
                    let tokens = format!("{} tokens a step", thousands(step.tokens));
                    status::padding_parts(packing).into_iter().chain([tokens]).collect()
                }
                None => vec![format!("{} tokens a step, {rate}/s", thousands(step.tokens))],
            }
        }
        Metric::Loss => {
            let step = step?;
            let work = step.work.and_then(|work| Some((work, work.warmup_share()?)));
            let work = work.map(|(work, warmup)| {
                let samples = thousands(work.full_lr_samples);
                format!(
                    "full lr {} steps, {samples} samples, warm-up {}",
                    thousands(work.full_lr_steps),
                    percent(warmup)
                )
            });
            let lr = format!("lr {}", significant(step.lr));
            [format!("gradient norm {}", significant(step.grad_norm)), lr].into_iter().chain(work).collect()
        }
        _ => return None,
    })
}

/// Lines in which [`line`] says everything: one, and one for the packing.
pub fn lines_of(arm: &Arm<'_>) -> u16 {
    1 + u16::from(arm.run.last_step.as_ref().is_some_and(|step| step.packing.is_some()))
}

/// The latest values of one arm in a line, its name in `names` columns: what compact and small screens have instead of
/// panels. A second line says the packing; an arm without it has one beside arms that pack.
pub fn line(app: &App, arm: &Arm<'_>, names: usize, area: Rect, buffer: &mut Buffer) {
    let color = app.theme.arm(arm.position);
    let x = put(buffer, area.x + 1, area.y, area.right(), &format::pad(&arm.short, names), color) + 2;
    let room = usize::from(area.right().saturating_sub(x));
    let values = status::value_line(arm.run, room);
    let values =
        if values.is_empty() { status::why(arm.run, arm.state, &arm.reason, app.now_ms, room, true) } else { values };
    let old = status::is_active(arm.state) && status::is_old(arm.run, app.now_ms);
    let style = app.theme.role(if old { Role::Dim } else { Role::Text });
    put(buffer, x, area.y, area.right(), &format::fit_words(&values, room), style);
    if area.height > 1 {
        let tokens = || arm.run.last_step.as_ref().map(|step| format!("{} tokens a step", thousands(step.tokens)));
        let packing = Some(status::packing(arm.run, room, false)).filter(|text| !text.is_empty()).or_else(tokens);
        put(buffer, x, area.y + 1, area.right(), &packing.unwrap_or_default(), style);
    }
}
