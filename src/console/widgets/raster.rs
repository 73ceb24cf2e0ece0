//! Dots finer than characters: eight to a cell in braille, one to a cell in ASCII.
//!
//! Own code instead of ratatui's canvas, because curves need three things it doesn't draw: a faint layer that the
//! line on top of it blots out, dashes, and a marker for each arm in ASCII.

use super::super::theme::LineStyle;
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::Style;

#[derive(Clone, Copy, Default)]
struct Cell {
    faint: u8,
    bold: u8,
    faint_style: Style,
    bold_style: Style,
    marker: Option<char>,
}

/// Which layer a dot goes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layer {
    /// Raw values behind their average.
    Faint,
    Bold,
}

/// How a line looks.
#[derive(Clone, Copy)]
pub struct Pen {
    pub layer: Layer,
    pub style: Style,
    pub line: LineStyle,
}

/// A grid of dots over an area of cells.
pub struct Raster {
    columns: usize,
    /// Dots across and down.
    size: (usize, usize),
    ascii: bool,
    cells: Vec<Cell>,
}

impl Raster {
    /// No dots yet.
    pub fn new(area: Rect, ascii: bool) -> Self {
        let (columns, rows) = (usize::from(area.width), usize::from(area.height));
        let size = if ascii { (columns, rows) } else { (columns * 2, rows * 4) };
        Self { columns, size, ascii, cells: vec![Cell::default(); columns * rows] }
    }

    /// Dots across and down.
    pub fn size(&self) -> (usize, usize) {
        self.size
    }

    /// Sets one dot; outside the grid nothing happens.
    pub fn dot(&mut self, x: i64, y: i64, pen: &Pen) {
        let (width, height) = self.size();
        if x < 0 || y < 0 || x >= width as i64 || y >= height as i64 {
            return;
        }
        let (x, y) = (x as usize, y as usize);
        let (column, row, bit) = if self.ascii { (x, y, 1) } else { (x / 2, y / 4, BRAILLE[y % 4][x % 2]) };
        let Some(cell) = self.cells.get_mut(row * self.columns + column) else { return };
        match pen.layer {
            Layer::Faint => {
                cell.faint |= bit;
                cell.faint_style = pen.style;
                cell.marker.get_or_insert('.');
            }
            Layer::Bold => {
                cell.bold |= bit;
                cell.bold_style = pen.style;
                cell.marker = Some(pen.line.marker);
            }
        }
    }

    /// A visible point: two by two dots.
    pub fn point(&mut self, (x, y): (f64, f64), pen: &Pen) {
        let (x, y) = (x.round() as i64, y.round() as i64);
        let wide = i64::from(!self.ascii);
        for (dx, dy) in [(0, 0), (wide, 0), (0, wide), (wide, wide)] {
            self.dot(x + dx, y + dy, pen);
        }
    }

    /// A line through points in dot coordinates, dashed by the pen; the dashes run on around corners.
    pub fn line(&mut self, points: &[(f64, f64)], pen: &Pen) {
        let (width, height) = self.size();
        // Points outside are pulled to just outside, so that a wild value costs no time.
        let clamp = |(x, y): (f64, f64)| {
            (x.clamp(-2.0, width as f64 + 1.0).round() as i64, y.clamp(-2.0, height as f64 + 1.0).round() as i64)
        };
        let period: usize = pen.line.dashes.iter().map(|length| usize::from(*length)).sum::<usize>().max(1);
        let solid = self.ascii || pen.layer == Layer::Faint || pen.line.dashes[1] == 0;
        let drawn = |phase: usize| {
            let mut rest = phase % period;
            for (index, length) in pen.line.dashes.iter().enumerate() {
                if rest < usize::from(*length) {
                    return index % 2 == 0;
                }
                rest -= usize::from(*length);
            }
            true
        };
        let mut phase = 0;
        if let [only] = points {
            let (x, y) = clamp(*only);
            self.dot(x, y, pen);
        }
        for pair in points.windows(2) {
            let ((x0, y0), (x1, y1)) = (clamp(pair[0]), clamp(pair[1]));
            if solid && x0 == x1 {
                // Dense curves are mostly vertical strokes.
                for y in y0.min(y1)..=y0.max(y1) {
                    self.dot(x0, y, pen);
                }
                continue;
            }
            let steps = (x1 - x0).abs().max((y1 - y0).abs()).max(1);
            for step in 0..=steps {
                if solid || drawn(phase) {
                    let x = x0 as f64 + (x1 - x0) as f64 * step as f64 / steps as f64;
                    let y = y0 as f64 + (y1 - y0) as f64 * step as f64 / steps as f64;
                    self.dot(x.round() as i64, y.round() as i64, pen);
                }
                phase += usize::from(step < steps);
            }
        }
    }

    /// Writes the dots into the cells of `area`; cells without dots stay as they are.
    pub fn render(&self, area: Rect, buffer: &mut Buffer) {
        for (index, cell) in self.cells.iter().enumerate() {
            let (dots, style) =
                if cell.bold != 0 { (cell.bold, cell.bold_style) } else { (cell.faint, cell.faint_style) };
            if dots == 0 {
                continue;
            }
            let (column, row) = ((index % self.columns) as u16, (index / self.columns) as u16);
            let Some(target) = buffer.cell_mut((area.x + column, area.y + row)) else { continue };
            let symbol = match cell.marker {
                Some(marker) if self.ascii => marker,
                _ => char::from_u32(0x2800 + u32::from(dots)).unwrap_or(' '),
            };
            target.set_char(symbol).set_style(style);
        }
    }
}

/// Bit of the dot at (row, column) of a braille cell.
const BRAILLE: [[u8; 2]; 4] = [[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::console::theme::Theme;

    fn draw(ascii: bool, layer: Layer, points: &[(f64, f64)]) -> String {
        let area = Rect::new(0, 0, 4, 2);
        let mut raster = Raster::new(area, ascii);
        let pen = Pen { layer, style: Style::default(), line: Theme::DARK.line(0) };
        raster.line(points, &pen);
        let mut buffer = Buffer::empty(area);
        raster.render(area, &mut buffer);
        (0..2).map(|y| (0..4).map(|x| buffer[(x, y)].symbol().to_owned()).collect::<String>() + "\n").collect()
    }

    #[test]
    fn a_diagonal_in_braille_and_in_ascii() {
        assert_eq!(draw(false, Layer::Bold, &[(0.0, 7.0), (7.0, 0.0)]), "  ⡠⠊\n⡠⠊  \n");
        assert_eq!(draw(true, Layer::Bold, &[(0.0, 1.0), (3.0, 0.0)]), "  **\n**  \n");
        assert_eq!(draw(true, Layer::Faint, &[(0.0, 0.0), (3.0, 0.0)]), "....\n    \n");
    }

    #[test]
    fn wild_points_cost_nothing_and_stay_outside() {
        let wild =
            [(f64::MIN, f64::MAX), (f64::NAN, 1e300), (-1e18, f64::INFINITY), (f64::INFINITY, f64::NEG_INFINITY)];
        let drawn = draw(false, Layer::Bold, &wild);
        assert_eq!(drawn.lines().count(), 2);
    }
}
