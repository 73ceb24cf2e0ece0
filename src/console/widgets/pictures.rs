//! The pictures of one held-out clip: the truth above each arm's prediction, in half blocks.

use super::super::app::{App, Arm, Pane};
use super::super::format;
use super::super::metric::Metric;
use super::super::snapshot::PictureStrip;
use super::super::status;
use super::super::theme::{Pictures, Role};
use super::{explain, frame, put};
use image::RgbImage;
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::{Color, Style};

/// The framed panel.
pub fn draw(app: &App, arms: &[Arm<'_>], area: Rect, buffer: &mut Buffer) {
    let focused = app.pane == Pane::Pictures;
    match &app.strip {
        Some(Ok(strip)) if !strip.rows.is_empty() => {
            let title = format!("step {} · {} · wrist", format::thousands(strip.step), format::clean(&strip.clip));
            let right = format!("clip {} of {}", strip.index + 1, strip.count);
            let inside = frame(app.theme, &title, &right, focused, area, buffer);
            rows(app, arms, strip, inside, buffer);
        }
        Some(Ok(_)) => {
            let inside = frame(app.theme, "Pictures", "", focused, area, buffer);
            explain(app.theme, "this validation kept no pictures", inside, buffer);
        }
        Some(Err(why)) => {
            let inside = frame(app.theme, "Pictures", "", focused, area, buffer);
            explain(app.theme, &format::clean(why), inside, buffer);
        }
        None => {
            let inside = frame(app.theme, "Pictures", "", focused, area, buffer);
            let runs: Vec<_> = arms.iter().map(|arm| (arm.run, arm.state)).collect();
            let validated = arms.iter().any(|arm| arm.selected && !arm.run.validations.is_empty());
            let text = if app.snapshot.is_none() {
                super::arms::nothing(app)
            } else if validated {
                "reading the pictures".into()
            } else {
                status::waits_for(Metric::WristLpips, &runs, app.now_ms)
            };
            explain(app.theme, &text, inside, buffer);
        }
    }
}

fn rows(app: &App, arms: &[Arm<'_>], strip: &PictureStrip, area: Rect, buffer: &mut Buffer) {
    let arm_of = |name: &str| arms.iter().find(|arm| arm.run.arm == name);
    let label = |arm: &Option<String>| match arm {
        None => "truth".to_owned(),
        Some(name) => arm_of(name).map_or_else(|| name.clone(), |arm| arm.short.clone()),
    };
    let labels = strip.rows.iter().map(|row| format::width(&label(&row.arm))).max().unwrap_or(0).min(10) as u16;
    // As many rows as are at least two cells high; the truth stays.
    let fit = usize::from((area.height / 2).max(1)).min(strip.rows.len());
    let height = (area.height / fit as u16).max(1);
    let room = Rect { x: area.x + labels + 1, width: area.width.saturating_sub(labels + 1), ..area };
    let mut y = area.y;
    for row in strip.rows.iter().take(fit) {
        let style = match &row.arm {
            None => app.theme.role(Role::Strong),
            Some(name) => arm_of(name).map_or(app.theme.role(Role::Text), |arm| app.theme.arm(arm.position)),
        };
        put(buffer, area.x, y, area.x + labels, &format::fit(&label(&row.arm), usize::from(labels)), style);
        let target = Rect { y, height: height.min(area.bottom().saturating_sub(y)), ..room };
        let used = match &row.picture {
            Ok(picture) => half_blocks(app.theme.pictures, picture, target, buffer),
            Err(why) => {
                explain(app.theme, &format::clean(why), target, buffer);
                target.height
            }
        };
        y += used.max(1).min(height);
    }
    let hidden = strip.rows.len() - fit;
    if hidden > 0 && y < area.bottom() {
        put(
            buffer,
            area.x,
            y,
            area.right(),
            &format!("{hidden} more arms: enlarge the terminal"),
            app.theme.role(Role::Dim),
        );
    }
}

/// Draws a picture as large as fits, two pixels a cell one above the other; returns the rows used.
fn half_blocks(mode: Pictures, picture: &RgbImage, area: Rect, buffer: &mut Buffer) -> u16 {
    let (width, height) = picture.dimensions();
    if width == 0 || height == 0 || area.width == 0 || area.height == 0 {
        return 0;
    }
    let scale = (f64::from(area.width) / f64::from(width)).min(f64::from(area.height) * 2.0 / f64::from(height));
    let columns = ((f64::from(width) * scale).round() as u32).clamp(1, u32::from(area.width));
    let lines = ((f64::from(height) * scale).round() as u32).clamp(1, u32::from(area.height) * 2);
    let rows = lines.div_ceil(2);
    for row in 0..rows {
        for column in 0..columns {
            let upper = mean(picture, column, columns, row * 2, rows * 2);
            let lower = mean(picture, column, columns, row * 2 + 1, rows * 2);
            let Some(cell) = buffer.cell_mut((area.x + column as u16, area.y + row as u16)) else { continue };
            match mode {
                Pictures::TrueColor => {
                    let color = |[r, g, b]: [u8; 3]| Color::Rgb(r, g, b);
                    cell.set_char('▀').set_style(Style::default().fg(color(upper)).bg(color(lower)));
                }
                Pictures::Indexed => {
                    cell.set_char('▀').set_style(Style::default().fg(cube(upper)).bg(cube(lower)));
                }
                Pictures::Shades => {
                    cell.set_char(shade(upper, lower));
                }
            }
        }
    }
    rows as u16
}

/// Mean colour of the part of the picture under one half cell.
fn mean(picture: &RgbImage, column: u32, columns: u32, row: u32, rows: u32) -> [u8; 3] {
    let (width, height) = picture.dimensions();
    let span = |index: u32, count: u32, size: u32| {
        let start = (u64::from(index) * u64::from(size) / u64::from(count)) as u32;
        let end = (u64::from(index + 1) * u64::from(size)).div_ceil(u64::from(count)) as u32;
        (start.min(size - 1), end.clamp(start.min(size - 1) + 1, size))
    };
    let ((left, right), (top, bottom)) = (span(column, columns, width), span(row, rows, height));
    let mut sum = [0u64; 3];
    let mut count = 0u64;
    for y in top..bottom {
        for x in left..right {
            for (total, value) in sum.iter_mut().zip(picture.get_pixel(x, y).0) {
                *total += u64::from(value);
            }
            count += 1;
        }
    }
    sum.map(|total| (total / count.max(1)) as u8)
}

/// The nearest colour of the 6x6x6 cube, or of its grey ramp for greys.
fn cube([r, g, b]: [u8; 3]) -> Color {
    let (low, high) = (r.min(g).min(b), r.max(g).max(b));
    if high - low < 12 {
        let level = (u16::from(r) + u16::from(g) + u16::from(b)) / 3;
        return match level {
            0..=4 => Color::Indexed(16),
            244.. => Color::Indexed(231),
            _ => Color::Indexed(232 + ((level.saturating_sub(8)) / 10).min(23) as u8),
        };
    }
    // The cube's levels are 0, 95, 135, 175, 215, 255.
    let level = |value: u8| {
        if value < 48 {
            0
        } else if value < 115 {
            1
        } else {
            (value - 35) / 40
        }
    };
    Color::Indexed(16 + 36 * level(r) + 6 * level(g) + level(b))
}

/// Brightness of a cell as a shade.
fn shade(upper: [u8; 3], lower: [u8; 3]) -> char {
    let brightness = |[r, g, b]: [u8; 3]| (299 * u32::from(r) + 587 * u32::from(g) + 114 * u32::from(b)) / 1000;
    let level = (brightness(upper) + brightness(lower)) / 2;
    [' ', '░', '▒', '▓', '█'][(level as usize * 5 / 256).min(4)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn colours_land_on_their_neighbours_in_the_cube() {
        assert_eq!(cube([255, 0, 0]), Color::Indexed(196));
        assert_eq!(cube([0, 0, 0]), Color::Indexed(16));
        assert_eq!(cube([255, 255, 255]), Color::Indexed(231));
        assert_eq!(cube([95, 135, 175]), Color::Indexed(67));
    }

    #[test]
    fn any_picture_fits_any_area() {
        for (width, height) in [(1, 1), (1, 500), (900, 1), (64, 48)] {
            let picture = RgbImage::from_pixel(width, height, image::Rgb([10, 200, 30]));
            for (columns, rows) in [(1, 1), (3, 2), (80, 20)] {
                let area = Rect::new(0, 0, columns, rows);
                let mut buffer = Buffer::empty(area);
                assert!(half_blocks(Pictures::TrueColor, &picture, area, &mut buffer) <= rows);
                assert_eq!(buffer[(0, 0)].fg, Color::Rgb(10, 200, 30));
            }
        }
    }
}
