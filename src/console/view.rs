//! Which parts are where. Chosen by the size alone, so a resize never loses state.

use super::app::{App, Arm, Pane};
use super::format;
use super::metric::Metric;
use super::theme::Role;
use super::widgets::{arms, bars, chart, log, modal, pictures, put, values};
use ratatui::Frame;
use ratatui::buffer::Buffer;
use ratatui::layout::{Constraint, Layout, Rect};

/// Everything at once.
const FULL: (u16, u16) = (120, 30);
/// Arms, one pane, one line of values.
const COMPACT: (u16, u16) = (80, 20);
/// Arms and a line of values each.
const SMALL: (u16, u16) = (60, 15);

/// Draws one frame.
pub fn draw(app: &App, frame: &mut Frame<'_>) {
    let area = frame.area();
    render(app, area, frame.buffer_mut());
}

/// Draws into a buffer; any size down to nothing is fine.
pub fn render(app: &App, area: Rect, buffer: &mut Buffer) {
    if area.is_empty() {
        return;
    }
    let list = app.arms();
    let holds = |(width, height): (u16, u16)| area.width >= width && area.height >= height;
    if holds(FULL) {
        full(app, &list, area, buffer);
    } else if holds(COMPACT) {
        compact(app, &list, area, buffer);
    } else if holds(SMALL) {
        small(app, &list, area, buffer);
    } else {
        let (width, height) = SMALL;
        let text = format!("needs {width}x{height}, has {}x{} (q leaves)", area.width, area.height);
        let text = format::fit(&text, usize::from(area.width));
        put(buffer, area.x, area.y, area.right(), &text, app.theme.role(Role::Text));
    }
    if holds(SMALL) {
        modal::draw(app, area, buffer);
    }
    app.theme.restrict(buffer);
}

fn full(app: &App, list: &[Arm<'_>], area: Rect, buffer: &mut Buffer) {
    let wide = area.width >= 170;
    let rest = area.height - 2;
    let panels_height = (rest / 5).clamp(6, 10);
    let bottom_height = ((rest - panels_height) * 2 / 5).max(8);
    let [header, top, panels, bottom, footer] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Fill(1),
        Constraint::Length(panels_height),
        Constraint::Length(bottom_height),
        Constraint::Length(1),
    ])
    .areas(area);
    bars::header(app, header, buffer);
    let arms_width = if wide { 58 } else { 50 };
    let [left, right] = Layout::horizontal([Constraint::Length(arms_width), Constraint::Fill(1)]).areas(top);
    arms::draw(app, list, left, buffer);
    let metric = app.chart.metric;
    let focused = app.pane == Pane::Chart;
    // The second curve of the question is always in view: PSNR beside LPIPS, LPIPS beside everything else.
    let other = if metric == Metric::WristLpips { Metric::WristPsnr } else { Metric::WristLpips };
    let mut small = [other, Metric::Loss, Metric::StepTime, Metric::Memory, Metric::PaddingWaste];
    if wide {
        let [one, two] = Layout::horizontal([Constraint::Fill(1), Constraint::Fill(1)]).areas(right);
        chart::draw(app, list, metric, focused, one, buffer);
        chart::draw(app, list, other, false, two, buffer);
        small[0] = Metric::PositionError;
    } else {
        chart::draw(app, list, metric, focused, right, buffer);
    }
    // Not every family has poses: a panel of what is measured says more.
    if small[0] == metric || !measured(app, list, small[0]) {
        small[0] = if metric == Metric::WristSsim { Metric::WristPsnr } else { Metric::WristSsim };
    }
    for (metric, area) in small.iter().zip(Layout::horizontal([Constraint::Fill(1); 5]).areas::<5>(panels)) {
        values::panel(app, list, *metric, area, buffer);
    }
    let [left, right] = Layout::horizontal([Constraint::Fill(3), Constraint::Fill(2)]).areas(bottom);
    pictures::draw(app, list, left, buffer);
    log::draw(app, right, buffer);
    bars::footer(app, footer, buffer);
}

/// Does an arm have a value of it, or none a say yet?
fn measured(app: &App, list: &[Arm<'_>], metric: Metric) -> bool {
    let mut curves = list.iter().filter_map(|arm| Some((arm.run, app.curve(&arm.run.arm, metric)?)));
    curves.clone().any(|(run, curve)| curve.last(run).is_some()) || curves.all(|(_, curve)| curve.non_finite() == 0)
}

fn compact(app: &App, list: &[Arm<'_>], area: Rect, buffer: &mut Buffer) {
    let count = list.len().max(1) as u16;
    let selected = list.iter().find(|arm| arm.selected);
    // Without the packing line of the values, the chart keeps at least ten rows; what is left decides how many lines an
    // arm gets.
    let room = area.height.saturating_sub(3 + 2 + 10);
    let each = arms::lines_each(list.len(), room).min(3);
    let [header, top, pane, line, footer] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length((count * each).min(room.max(1)) + 2),
        Constraint::Fill(1),
        Constraint::Length(list.iter().map(values::lines_of).max().unwrap_or(1)),
        Constraint::Length(1),
    ])
    .areas(area);
    bars::header(app, header, buffer);
    arms::draw(app, list, top, buffer);
    match app.pane {
        Pane::Arms | Pane::Chart => chart::draw(app, list, app.chart.metric, app.pane == Pane::Chart, pane, buffer),
        Pane::Pictures => pictures::draw(app, list, pane, buffer),
        Pane::Log => log::draw(app, pane, buffer),
    }
    if let Some(arm) = selected {
        values::line(app, arm, format::width(&arm.short), line, buffer);
    }
    bars::footer(app, footer, buffer);
}

fn small(app: &App, list: &[Arm<'_>], area: Rect, buffer: &mut Buffer) {
    let [header, body, footer] =
        Layout::vertical([Constraint::Length(1), Constraint::Fill(1), Constraint::Length(1)]).areas(area);
    bars::header(app, header, buffer);
    if app.pane == Pane::Log {
        log::draw(app, body, buffer);
    } else {
        let count = list.len() as u16;
        let lines = count.min(body.height.saturating_sub(2) / 2);
        let [top, values_area] = Layout::vertical([Constraint::Fill(1), Constraint::Length(lines)]).areas(body);
        arms::draw(app, list, top, buffer);
        let selected = list.iter().position(|arm| arm.selected).unwrap_or(0);
        let first = (selected + 1).saturating_sub(usize::from(lines));
        let names = list.iter().map(|arm| format::width(&arm.short)).max().unwrap_or(0).min(12);
        for (row, arm) in list.iter().skip(first).take(usize::from(lines)).enumerate() {
            let line = Rect { y: values_area.y + row as u16, height: 1, ..values_area };
            values::line(app, arm, names, line, buffer);
        }
    }
    bars::footer(app, footer, buffer);
}
