//! Whole screens on a test terminal, at the sizes that matter.

mod console_fixture;

use console_fixture::*;
use lbva_tui::console::theme::Theme;

const SIZES: [(u16, u16); 5] = [(200, 50), (120, 40), (80, 24), (60, 15), (40, 10)];

#[test]
fn look() {
    for size in SIZES {
        println!("=== {size:?}\n{}", text(&console(size, Theme::DARK, demo()), size));
    }
}
