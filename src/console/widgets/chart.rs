//! Curves of all drawn arms over steps: raw values faint, their average on top, each labelled where it ends.

use super::super::app::{App, Arm};
use super::super::format::{self, thousands};
use super::super::metric::Metric;
use super::super::series::Point;
use super::super::status;
use super::super::theme::Role;
use super::raster::{Layer, Pen, Raster};
use super::{explain, frame, put};
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::{Modifier, Style};

/// One arm's lines within the window, at most two points a dot column.
struct Lines<'a> {
    arm: &'a Arm<'a>,
    faint: Vec<Vec<Point>>,
    bold: Vec<Vec<Point>>,
}

/// How much a line shows.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Detail {
    /// Extremes of every column, and the moving average if there is one.
    Every,
    /// The mean of every column: small panels.
    Means,
}

/// How values become heights.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Axis {
    Linear,
    Log,
    /// `log10(1 + value / even_below)`: decades far above `even_below`, even near 0, which it shows. A logarithm alone
    /// would leave out exactly the arm that wastes nothing.
    LogFromZero {
        even_below: f64,
    },
}

impl Axis {
    fn of(metric: Metric, log_y: bool) -> Self {
        match metric.even_below() {
            Some(even_below) if log_y => Self::LogFromZero { even_below },
            _ if log_y => Self::Log,
            _ => Self::Linear,
        }
    }

    /// `None` for what the axis can't show.
    fn height(self, value: f64) -> Option<f64> {
        match self {
            Self::Linear => Some(value),
            Self::Log => (value > 0.0).then(|| value.log10()),
            Self::LogFromZero { even_below } => (value >= 0.0).then(|| (1.0 + value / even_below).log10()),
        }
    }

    fn value(self, height: f64) -> f64 {
        match self {
            Self::Linear => height,
            Self::Log => 10f64.powf(height),
            Self::LogFromZero { even_below } => ((10f64.powf(height) - 1.0) * even_below).max(0.0),
        }
    }
}

/// The vertical axis between the heights `low` and `high`.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Scale {
    low: f64,
    high: f64,
    axis: Axis,
}

impl Scale {
    /// Holds the smoothed lines whole, and the raw ones but for their outermost hundredth: a single spike must not
    /// flatten everything else.
    fn of(lines: &[Lines<'_>], axis: Axis) -> Option<Self> {
        let usable = |value: f32| axis.height(f64::from(value));
        let bold: Vec<f64> =
            lines.iter().flat_map(|line| line.bold.iter().flatten()).filter_map(|point| usable(point.1)).collect();
        let mut faint: Vec<f64> =
            lines.iter().flat_map(|line| line.faint.iter().flatten()).filter_map(|point| usable(point.1)).collect();
        faint.sort_by(f64::total_cmp);
        let trim = if faint.len() >= 50 { faint.len() / 100 } else { 0 };
        let faint = faint.get(trim..faint.len() - trim).unwrap_or(&[]);
        let values = bold.iter().chain(faint);
        let low = values.clone().copied().fold(f64::INFINITY, f64::min);
        let high = values.copied().fold(f64::NEG_INFINITY, f64::max);
        if low > high {
            return None;
        }
        let margin = if high > low { (high - low) * 0.04 } else { (high.abs() * 0.05).max(1e-6) };
        Some(Self { low: low - margin, high: high + margin, axis })
    }

    /// 0 at the bottom, 1 at the top; `None` for what the axis can't show.
    fn position(self, value: f64) -> Option<f64> {
        Some((self.axis.height(value)? - self.low) / (self.high - self.low))
    }

    /// Round values within the axis, at most `count` (at least 2 asked for).
    fn ticks(self, count: usize) -> Vec<f64> {
        let (low, high) = (self.axis.value(self.low), self.axis.value(self.high));
        if self.axis != Axis::Linear && self.high - self.low >= 1.0 {
            let (zero, least) = match self.axis {
                Axis::LogFromZero { even_below } => ((self.low <= 0.0).then_some(0.0), low.max(even_below)),
                _ => (None, low),
            };
            // Rounded up a hair below the next decade: 0.001 is -2.9999999999999996.
            let first = (least.log10() - 1e-9).ceil() as i32;
            let decades = (first..=high.log10().floor() as i32).map(|decade| 10f64.powi(decade));
            let decades: Vec<f64> = zero.into_iter().chain(decades).collect();
            let every = decades.len().div_ceil(count.max(1)).max(1);
            return decades.into_iter().step_by(every).collect();
        }
        let step = round_step((high - low) / count.max(1) as f64);
        if !step.is_finite() || step <= 0.0 {
            return Vec::new();
        }
        let first = (low / step).ceil();
        (0..=count + 1).map(|index| (first + index as f64) * step).take_while(|tick| *tick <= high).collect()
    }
}

/// The next of 1, 2, 5 times a power of ten at or above `least`.
fn round_step(least: f64) -> f64 {
    let power = 10f64.powf(least.log10().floor());
    [1.0, 2.0, 5.0, 10.0].into_iter().map(|factor| factor * power).find(|step| *step >= least * 0.999).unwrap_or(power)
}

fn gather<'a>(app: &App, arms: &'a [Arm<'a>], metric: Metric, dots: usize, detail: Detail) -> Vec<Lines<'a>> {
    let (from, to) = app.window();
    let mut lines: Vec<Lines<'a>> = arms
        .iter()
        .filter(|arm| arm.drawn)
        .filter_map(|arm| {
            let curve = app.curve(&arm.run.arm, metric)?;
            let raw = match detail {
                Detail::Every => curve.trace(arm.run, false, from, to, dots),
                Detail::Means => curve.means(arm.run, from, to, dots),
            };
            let (faint, bold) = if curve.is_smoothed() && detail == Detail::Every {
                (raw, curve.trace(arm.run, true, from, to, dots))
            } else {
                (Vec::new(), raw)
            };
            // Validation points are far apart: the line crosses a seam, which is drawn anyway.
            let join = |lines: Vec<Vec<Point>>| {
                if metric.is_validation() { vec![lines.into_iter().flatten().collect()] } else { lines }
            };
            Some(Lines { arm, faint: join(faint), bold: join(bold) })
        })
        .filter(|lines| lines.bold.iter().any(|line| !line.is_empty()))
        .collect();
    // The selected arm lies on top.
    lines.sort_by_key(|line| line.arm.selected);
    lines
}

/// Draws the lines into `area`, without axes.
fn plot(app: &App, metric: Metric, lines: &[Lines<'_>], scale: Scale, area: Rect, buffer: &mut Buffer) {
    let mut raster = Raster::new(area, app.theme.ascii);
    let (width, height) = raster.size();
    let (from, to) = app.window();
    let span = to.saturating_sub(from).max(1) as f64;
    let place = |(step, value): &Point| -> Option<(f64, f64)> {
        let x = (*step as f64 - from as f64) / span * (width.saturating_sub(1)) as f64;
        Some((x, (1.0 - scale.position(f64::from(*value))?) * height.saturating_sub(1) as f64))
    };
    for layer in [Layer::Faint, Layer::Bold] {
        for line in lines {
            let style = app.theme.arm(line.arm.position);
            let style = if layer == Layer::Faint { style.add_modifier(Modifier::DIM) } else { style };
            let pen = Pen { layer, style, line: app.theme.line(line.arm.position) };
            for points in if layer == Layer::Faint { &line.faint } else { &line.bold } {
                let placed: Vec<(f64, f64)> = points.iter().filter_map(place).collect();
                raster.line(&placed, &pen);
                if metric.is_validation() && layer == Layer::Bold && placed.len() <= width / 4 {
                    for point in placed.iter().filter(|(x, _)| *x >= 0.0 && *x < width as f64) {
                        raster.point(*point, &pen);
                    }
                }
            }
        }
    }
    raster.render(area, buffer);
}

/// Column of a step within `area`; `None` outside the window.
fn column(app: &App, step: u64, area: Rect) -> Option<u16> {
    let (from, to) = app.window();
    if !(from..=to).contains(&step) || area.width == 0 {
        return None;
    }
    let share = (step - from) as f64 / to.saturating_sub(from).max(1) as f64;
    Some(area.x + (share * f64::from(area.width - 1)).round() as u16)
}

/// A vertical line behind the dots.
fn vertical(buffer: &mut Buffer, x: u16, area: Rect, symbol: &str, style: Style) {
    for y in area.top()..area.bottom() {
        if let Some(cell) = buffer.cell_mut((x, y))
            && cell.symbol() == " "
        {
            cell.set_symbol(symbol).set_style(style);
        }
    }
}

/// Curves without axes for a small panel; draws nothing if there are no points.
pub fn sparkline(app: &App, arms: &[Arm<'_>], metric: Metric, area: Rect, buffer: &mut Buffer) {
    if area.width < 2 || area.height == 0 {
        return;
    }
    let lines = gather(app, arms, metric, usize::from(area.width), Detail::Means);
    let Some(scale) = Scale::of(&lines, Axis::Linear) else { return };
    plot(app, metric, &lines, scale, area, buffer);
    if let Some(x) = app.chart.cursor.and_then(|cursor| column(app, cursor, area)) {
        vertical(buffer, x, area, "│", app.theme.role(Role::Accent));
    }
}

/// The labels at the ends of the curves, names and values in columns of their own.
fn labels<'l>(app: &App, lines: &'l [Lines<'l>], metric: Metric) -> Vec<(&'l Lines<'l>, String, bool)> {
    let ends: Vec<_> = lines.iter().filter_map(|line| Some((line, end_of(app, line.arm, metric)?))).collect();
    let names = ends.iter().map(|(line, _)| format::width(&line.arm.short)).max().unwrap_or(0);
    let values = ends.iter().filter(|(_, (_, bad))| !bad).map(|(_, (text, _))| format::width(text)).max().unwrap_or(0);
    ends.into_iter()
        .map(|(line, (text, bad))| {
            let missing = if bad { 0 } else { values.saturating_sub(format::width(&text)) };
            (line, format!("{} {}{text}", format::pad(&line.arm.short, names), " ".repeat(missing)), bad)
        })
        .collect()
}

/// What stands at the end of an arm's curve: its value, at the cursor if there is one.
fn end_of(app: &App, arm: &Arm<'_>, metric: Metric) -> Option<(String, bool)> {
    let curve = app.curve(&arm.run.arm, metric)?;
    let step = app.chart.cursor.unwrap_or(app.window().1);
    // Points went before: it diverged. Without any, the family does not measure this.
    if let (Some(since), None) = (curve.non_finite_since(), app.chart.cursor) {
        return Some((format!("NaN since {}", thousands(since)), true));
    }
    let (_, value) = curve.at(arm.run, step)?;
    Some((metric.value(f64::from(value)), false))
}

/// A chart with axes, seams, labels and its frame.
pub fn draw(app: &App, arms: &[Arm<'_>], metric: Metric, focused: bool, area: Rect, buffer: &mut Buffer) {
    let theme = app.theme;
    let title = format!("{}{}", metric.title(), metric.arrow());
    let (from, to) = app.window();
    let mut facts = Vec::new();
    if let Some(cursor) = app.chart.cursor {
        facts.push(format!("at step {}", thousands(cursor)));
    }
    let smoothed = arms.iter().any(|arm| arm.drawn && app.curve(&arm.run.arm, metric).is_some_and(|c| c.is_smoothed()));
    if smoothed {
        let weight = if metric.is_validation() { app.chart.validation_weight } else { app.chart.step_weight };
        facts.push(format!("EMA {weight}"));
    }
    if app.chart.log_y {
        facts.push("log y".into());
    }
    if app.chart.window.is_some() {
        facts.push(format!("steps {}–{}", thousands(from), thousands(to)));
    }
    let inside = frame(theme, &title, &facts.join(" · "), focused, area, buffer);
    if inside.width < 8 || inside.height < 3 {
        explain(theme, "too small for a chart", inside, buffer);
        return;
    }
    let lines = gather(app, arms, metric, usize::from(inside.width) * 2, Detail::Every);
    let Some(scale) = Scale::of(&lines, Axis::of(metric, app.chart.log_y)) else {
        let runs: Vec<_> = arms.iter().filter(|arm| arm.drawn).map(|arm| (arm.run, arm.state)).collect();
        let text = if app.snapshot.is_none() {
            super::arms::nothing(app)
        } else if !lines.is_empty() {
            "no positive value for a logarithmic axis: y goes back".to_owned()
        } else if arms.iter().any(|arm| app.curve(&arm.run.arm, metric).is_some_and(|c| c.non_finite() > 0)) {
            format!("{} was not measured", metric.title())
        } else if app.chart.window.is_some() {
            "no point in these steps: z shows all".to_owned()
        } else {
            status::waits_for(metric, &runs, app.now_ms)
        };
        explain(theme, &text, inside, buffer);
        return;
    };
    let labels = labels(app, &lines, metric);
    let gutter = labels.iter().map(|(_, text, _)| format::width(text) as u16 + 1).max().unwrap_or(0);
    let gutter = gutter.min(inside.width / 3);
    let ticks = scale.ticks(usize::from(inside.height / 3).max(2));
    let tick_texts: Vec<String> = ticks.iter().map(|tick| metric.tick(*tick)).collect();
    let axis = tick_texts.iter().map(|text| format::width(text) as u16).max().unwrap_or(0).min(inside.width / 4) + 1;
    let bottom = if inside.height >= 6 { 2 } else { 1 };
    let area = Rect {
        x: inside.x + axis,
        y: inside.y,
        width: inside.width.saturating_sub(axis + gutter),
        height: inside.height - bottom,
    };
    plot(app, metric, &lines, scale, area, buffer);
    seams(app, arms, area, buffer);
    if let Some(x) = app.chart.cursor.and_then(|cursor| column(app, cursor, area)) {
        vertical(buffer, x, area, "│", theme.role(Role::Accent));
    }
    y_axis(app, scale, &ticks, &tick_texts, inside.x, area, buffer);
    x_axis(app, area, inside, buffer);
    end_labels(app, scale, &labels, area, inside.right(), buffer);
}

fn y_axis(app: &App, scale: Scale, ticks: &[f64], texts: &[String], left: u16, area: Rect, buffer: &mut Buffer) {
    let style = app.theme.role(Role::Dim);
    for y in area.top()..area.bottom() {
        put(buffer, area.x - 1, y, area.x, "│", style);
    }
    for (tick, text) in ticks.iter().zip(texts) {
        let Some(position) = scale.position(*tick) else { continue };
        let y = area.y
            + ((1.0 - position) * f64::from(area.height - 1)).round().clamp(0.0, f64::from(area.height - 1)) as u16;
        let room = area.x - 1 - left;
        put(buffer, left, y, area.x - 1, &format::pad_left(text, usize::from(room)), style);
        put(buffer, area.x - 1, y, area.x, "┤", style);
    }
}

fn x_axis(app: &App, area: Rect, inside: Rect, buffer: &mut Buffer) {
    let style = app.theme.role(Role::Dim);
    let y = area.bottom();
    put(buffer, area.x - 1, y, area.x, "└", style);
    for x in area.left()..area.right() {
        put(buffer, x, y, area.right(), "─", style);
    }
    let (from, to) = app.window();
    let labels_fit = inside.bottom() > y + 1;
    let widest = thousands(to).len() as f64 + 3.0;
    let most = (f64::from(area.width) / widest).floor().max(1.0);
    let step = round_step((to.saturating_sub(from).max(1) as f64 / most).max(1.0)).round().max(1.0) as u64;
    let mut free_from = inside.x;
    let mut tick = from.div_ceil(step).saturating_mul(step);
    while tick <= to {
        if let Some(x) = column(app, tick, area) {
            put(buffer, x, y, area.right(), "┬", style);
            let text = thousands(tick);
            let start = x.saturating_sub(text.len() as u16 / 2).max(inside.x);
            if labels_fit && start >= free_from && start + text.len() as u16 <= area.right() {
                free_from = put(buffer, start, y + 1, area.right(), &text, style) + 1;
            }
        }
        let Some(next) = tick.checked_add(step) else { break };
        tick = next;
    }
    if labels_fit && free_from < inside.right().saturating_sub(5) {
        put(buffer, inside.right().saturating_sub(4), y + 1, inside.right(), "step", style);
    }
    if let (Some(cursor), true) = (app.chart.cursor, labels_fit)
        && let Some(x) = column(app, cursor, area)
    {
        let text = format!(" {} ", thousands(cursor));
        let start =
            x.saturating_sub(text.len() as u16 / 2).clamp(inside.x, inside.right().saturating_sub(text.len() as u16));
        put(buffer, start, y + 1, inside.right(), &text, app.theme.role(Role::Key).add_modifier(Modifier::REVERSED));
    }
}

/// Where attempts were joined, and how the one before ended.
fn seams(app: &App, arms: &[Arm<'_>], area: Rect, buffer: &mut Buffer) {
    let mut taken: Vec<(u16, u16, u16)> = Vec::new();
    for arm in arms.iter().filter(|arm| arm.drawn) {
        for pair in arm.run.attempts.windows(2) {
            let step = pair[1].started.start_step;
            let Some(x) = column(app, step, area) else { continue };
            // A resume from nothing has no line to join.
            if step == 0 {
                continue;
            }
            let changed = status::changed_fields(arm.run, pair[1].started.attempt);
            // What was accepted by name is no mere interruption: the curve goes on as something else.
            let (symbol, style) = match changed.is_empty() {
                true => ("┊", app.theme.arm(arm.position).add_modifier(Modifier::DIM)),
                false => ("╎", app.theme.role(Role::Warning)),
            };
            vertical(buffer, x, area, symbol, style);
            let text = match changed.is_empty() {
                true => format!("{} {}", arm.short, status::seam_cause(&pair[0])),
                false => format::fit_words(&format!("{} changed: {changed}", arm.short), usize::from(area.width / 2)),
            };
            let width = format::width(&text) as u16;
            let start = if x + 1 + width <= area.right() { x + 1 } else { x.saturating_sub(width).max(area.x) };
            let free = |row: u16| {
                let y = area.bottom().saturating_sub(1 + row);
                !taken.iter().any(|(of, a, b)| *of == row && start < *b && *a < start + width)
                    && (start..start + width).all(|x| buffer.cell((x, y)).is_some_and(|cell| cell.symbol() == " "))
            };
            if let Some(row) = (0..area.height.min(6)).find(|row| free(*row)) {
                put(buffer, start, area.bottom() - 1 - row, area.right(), &text, style);
                taken.push((row, start, start + width + 1));
            }
        }
    }
}

fn end_labels(
    app: &App,
    scale: Scale,
    labels: &[(&Lines<'_>, String, bool)],
    area: Rect,
    right: u16,
    buffer: &mut Buffer,
) {
    let mut placed: Vec<(f64, &Lines<'_>, &str, bool)> = labels
        .iter()
        .map(|(line, text, bad)| {
            let end = line.bold.iter().flatten().last().and_then(|(_, value)| scale.position(f64::from(*value)));
            let row = (1.0 - end.unwrap_or(0.0).clamp(0.0, 1.0)) * f64::from(area.height.saturating_sub(1));
            (row, *line, text.as_str(), *bad)
        })
        .collect();
    placed.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.arm.position.cmp(&b.1.arm.position)));
    placed.truncate(usize::from(area.height));
    // Downwards so that none overlap, then upwards from the bottom where they ran over it.
    let mut rows: Vec<u16> = Vec::with_capacity(placed.len());
    for (row, ..) in &placed {
        let least = rows.last().map_or(0, |before| before + 1);
        rows.push((row.round() as u16).max(least));
    }
    let mut most = area.height.saturating_sub(1);
    for row in rows.iter_mut().rev() {
        *row = (*row).min(most);
        most = row.saturating_sub(1);
    }
    for (row, (_, line, text, bad)) in rows.iter().zip(&placed) {
        let style = if *bad { app.theme.role(Role::Bad) } else { app.theme.arm(line.arm.position) };
        let style = if line.arm.selected { style.add_modifier(Modifier::BOLD) } else { style };
        put(buffer, area.right() + 1, area.y + row, right, text, style);
    }
}

/// The values of a small panel: one line an arm, at the cursor if there is one.
pub fn value_of(app: &App, arm: &Arm<'_>, metric: Metric) -> Option<(String, bool)> {
    let curve = app.curve(&arm.run.arm, metric)?;
    let value = curve.at(arm.run, app.chart.cursor.unwrap_or(u64::MAX));
    match (curve.non_finite_since(), app.chart.cursor, value) {
        (Some(_), None, Some(_)) => Some(("NaN".into(), true)),
        (.., Some((_, value))) => Some((metric.value(f64::from(value)), false)),
        (.., None) => (curve.non_finite() > 0).then(|| (format::NOTHING.into(), false)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tick_texts(scale: Scale, count: usize) -> Vec<String> {
        scale.ticks(count).iter().map(|tick| format::significant(*tick)).collect()
    }

    #[test]
    fn ticks_are_round_and_inside() {
        let linear = Scale { low: 0.41, high: 0.69, axis: Axis::Linear };
        assert_eq!(tick_texts(linear, 3), ["0.500", "0.600"]);
        let log = Scale { low: -3.2, high: 2.1, axis: Axis::Log };
        assert_eq!(tick_texts(log, 8), ["0.00100", "0.0100", "0.100", "1.00", "10.0", "100"]);
        let narrow = Scale { low: 0.0, high: 0.5, axis: Axis::Log };
        assert_eq!(tick_texts(narrow, 3), ["1.00", "2.00", "3.00"]);
        assert!(Scale { low: 1.0, high: 1.0, axis: Axis::Linear }.ticks(4).len() <= 6);
    }

    #[test]
    fn a_logarithmic_axis_of_shares_goes_down_to_zero() {
        let axis = Axis::of(Metric::PaddingWaste, true);
        let scale = Scale { low: -0.1, high: axis.height(0.3).unwrap(), axis };
        let ticks: Vec<String> = scale.ticks(6).iter().map(|tick| Metric::PaddingWaste.tick(*tick)).collect();
        assert_eq!(ticks, ["0 %", "0.1 %", "1.0 %", "10 %"]);
        let heights: Vec<f64> = [0.0, 0.001, 0.04, 0.2].iter().map(|share| scale.position(*share).unwrap()).collect();
        assert!(heights.windows(2).all(|pair| pair[1] - pair[0] > 0.1), "a tenth of the chart apart: {heights:?}");
        assert_eq!(scale.position(-0.1), None);
        for share in [0.0, 0.0004, 0.2, 1.0] {
            assert!((axis.value(axis.height(share).unwrap()) - share).abs() < 1e-12);
        }
        assert_eq!(Axis::of(Metric::Loss, true).height(0.0), None);
        // Less than a decade: round steps, as on any axis.
        let narrow = Scale { low: axis.height(0.15).unwrap(), high: axis.height(0.35).unwrap(), axis };
        assert_eq!(narrow.ticks(4).len(), 4);
    }

    #[test]
    fn steps_of_the_axis_are_one_two_five() {
        assert_eq!(round_step(0.07), 0.1);
        assert_eq!(round_step(13.0), 20.0);
        assert_eq!(round_step(300.0), 500.0);
        assert_eq!(round_step(1.0), 1.0);
    }
}
