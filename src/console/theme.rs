//! Colours, line styles and glyphs. Nothing is said by colour alone: states carry a glyph and a word, arms a line
//! style (or a marker letter in ASCII) as well, so `NO_COLOR` and `--ascii` only take away comfort.

use ratatui::buffer::Buffer;
use ratatui::style::{Color, Modifier, Style};

/// How pictures are drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pictures {
    /// Half blocks in 24-bit colour.
    TrueColor,
    /// Half blocks in the 256-colour cube.
    Indexed,
    /// Shades of one colour: without colours or in ASCII.
    Shades,
}

/// Everything the environment decides about looks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Theme {
    /// Dark text on a light background.
    pub light: bool,
    pub color: bool,
    /// Only ASCII characters reach the terminal.
    pub ascii: bool,
    pub pictures: Pictures,
}

/// What the user asked for; `None` lets the environment decide.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ThemeChoice {
    pub light: Option<bool>,
    pub ascii: Option<bool>,
    pub color: Option<bool>,
}

/// Role of a piece of text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    Text,
    Dim,
    Strong,
    Good,
    Warning,
    Bad,
    Accent,
    Border,
    FocusedBorder,
    Key,
}

const ARMS_ON_DARK: [Color; 8] = [
    Color::Cyan,
    Color::Yellow,
    Color::LightMagenta,
    Color::LightGreen,
    Color::LightBlue,
    Color::LightRed,
    Color::White,
    Color::Green,
];
const ARMS_ON_LIGHT: [Color; 8] = [
    Color::Blue,
    Color::Red,
    Color::Magenta,
    Color::Green,
    Color::Cyan,
    Color::DarkGray,
    Color::Black,
    Color::LightBlue,
];

/// Dots drawn and skipped along a line, and the same as a sample for the arms list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LineStyle {
    /// Lengths in dots: on, off, on, off; `[1, 0, 0, 0]` is solid.
    pub dashes: [u8; 4],
    pub sample: &'static str,
    /// Stands for the dots in ASCII.
    pub marker: char,
}

const LINE_STYLES: [LineStyle; 8] = [
    LineStyle { dashes: [1, 0, 0, 0], sample: "━━", marker: '*' },
    LineStyle { dashes: [4, 3, 4, 3], sample: "╍╍", marker: 'o' },
    LineStyle { dashes: [1, 2, 1, 2], sample: "┅┅", marker: '+' },
    LineStyle { dashes: [6, 2, 1, 2], sample: "━·", marker: 'x' },
    LineStyle { dashes: [8, 4, 8, 4], sample: "╸╸", marker: '#' },
    LineStyle { dashes: [2, 2, 2, 2], sample: "┉┉", marker: '@' },
    LineStyle { dashes: [1, 1, 4, 1], sample: "·━", marker: '%' },
    LineStyle { dashes: [1, 3, 1, 3], sample: "··", marker: '=' },
];

impl Theme {
    /// 16 colours on a dark background, Unicode.
    pub const DARK: Self = Self { light: false, color: true, ascii: false, pictures: Pictures::TrueColor };

    /// Decides from the environment: `NO_COLOR`, `TERM`, `COLORTERM`, `COLORFGBG` and the locale variables.
    pub fn detect(choice: ThemeChoice, variable: impl Fn(&str) -> Option<String>) -> Self {
        let set = |name: &str| variable(name).filter(|value| !value.is_empty());
        let term = set("TERM").unwrap_or_default();
        let locale =
            set("LC_ALL").or_else(|| set("LC_CTYPE")).or_else(|| set("LANG")).unwrap_or_default().to_lowercase();
        let utf8 = locale.contains("utf-8") || locale.contains("utf8");
        let ascii = choice.ascii.unwrap_or(!utf8 || term == "linux");
        let light = choice.light.unwrap_or_else(|| {
            // `15;0`: foreground;background, in the 16 colours; 7 and 9..=15 are light ones.
            let background = set("COLORFGBG").and_then(|value| value.rsplit(';').next()?.parse::<u8>().ok());
            background.is_some_and(|background| background == 7 || (9..=15).contains(&background))
        });
        let color = choice.color.unwrap_or_else(|| set("NO_COLOR").is_none());
        let true_color = set("COLORTERM").is_some_and(|value| value == "truecolor" || value == "24bit");
        let pictures = if !color || ascii {
            Pictures::Shades
        } else if true_color {
            Pictures::TrueColor
        } else {
            Pictures::Indexed
        };
        Self { light, color, ascii, pictures }
    }

    /// Style of a role.
    pub fn role(self, role: Role) -> Style {
        let style = Style::default();
        let (good, warning, bad, accent) = if self.light {
            (Color::Green, Color::Magenta, Color::Red, Color::Blue)
        } else {
            (Color::LightGreen, Color::LightYellow, Color::LightRed, Color::LightCyan)
        };
        match role {
            Role::Text => style,
            Role::Dim | Role::Border => style.add_modifier(Modifier::DIM),
            Role::Strong => style.add_modifier(Modifier::BOLD),
            Role::Good => style.fg(good),
            Role::Warning => style.fg(warning),
            Role::Bad => style.fg(bad).add_modifier(Modifier::BOLD),
            Role::Accent | Role::FocusedBorder => style.fg(accent),
            Role::Key => style.fg(accent).add_modifier(Modifier::BOLD),
        }
    }

    /// Colour of the arm at `position` in its experiment: the same on every panel and after every restart.
    pub fn arm(self, position: usize) -> Style {
        let palette = if self.light { &ARMS_ON_LIGHT } else { &ARMS_ON_DARK };
        Style::default().fg(palette.get(position % palette.len()).copied().unwrap_or(Color::Reset))
    }

    /// Line style of the arm at `position`. Beyond eight arms the pairing of colour and line shifts, so that arms 1
    /// and 9 differ.
    pub fn line(self, position: usize) -> LineStyle {
        let index = (position + position / LINE_STYLES.len()) % LINE_STYLES.len();
        LINE_STYLES.get(index).copied().unwrap_or(LINE_STYLES[0])
    }

    /// Two columns that show an arm's line in a list: the line itself, or its marker in ASCII.
    pub fn sample(self, position: usize) -> String {
        let line = self.line(position);
        if self.ascii { format!("{0}{0}", line.marker) } else { line.sample.to_owned() }
    }

    /// Applies `--ascii` and `NO_COLOR` to a finished frame: the one place where both hold for every widget.
    pub fn restrict(self, buffer: &mut Buffer) {
        if self.color && !self.ascii {
            return;
        }
        for cell in &mut buffer.content {
            if !self.color {
                cell.fg = Color::Reset;
                cell.bg = Color::Reset;
            }
            if self.ascii && !cell.symbol().is_ascii() {
                let replacement = ascii(cell.symbol());
                cell.set_symbol(replacement);
            }
        }
    }
}

/// The nearest ASCII character.
fn ascii(symbol: &str) -> &'static str {
    match symbol.chars().next().unwrap_or(' ') {
        '━' => "=",
        '─' | '╌' | '╍' | '┅' | '┉' | '╸' | '╺' | '—' | '–' => "-",
        '┈' => ".",
        '│' | '┃' | '┊' | '╎' | '▏' | '▐' => "|",
        '╭' | '╮' | '╰' | '╯' | '┌' | '┐' | '└' | '┘' | '┬' | '┴' | '┼' | '┤' | '├' => "+",
        '▌' | '▶' | '›' | '→' => ">",
        '‹' | '←' => "<",
        '●' => "*",
        '◌' | '○' => "o",
        '◐' | '◑' => "~",
        '✓' => "v",
        '✗' | '×' => "x",
        '↯' => "!",
        '■' => "#",
        '↓' => "v",
        '↑' => "^",
        '…' => "~",
        '·' => ".",
        '°' => "d",
        '█' => "#",
        '▓' => "%",
        '▒' => "=",
        '░' => "-",
        '▀' => "\"",
        '▁'..='▇' => "_",
        '\u{2800}' => " ",
        _ => "?",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn detect(variables: &[(&str, &str)], choice: ThemeChoice) -> Theme {
        Theme::detect(choice, |name| variables.iter().find(|(n, _)| *n == name).map(|(_, value)| (*value).to_owned()))
    }

    #[test]
    fn the_environment_decides_unless_the_user_does() {
        let utf8 = ("LANG", "en_US.UTF-8");
        let plain = detect(&[utf8, ("TERM", "xterm-256color")], ThemeChoice::default());
        assert_eq!(plain, Theme { light: false, color: true, ascii: false, pictures: Pictures::Indexed });
        assert!(detect(&[("LANG", "C")], ThemeChoice::default()).ascii);
        assert!(detect(&[utf8, ("LC_ALL", "C")], ThemeChoice::default()).ascii, "LC_ALL wins over LANG");
        assert!(detect(&[utf8, ("TERM", "linux")], ThemeChoice::default()).ascii);
        assert!(!detect(&[("TERM", "linux")], ThemeChoice { ascii: Some(false), ..ThemeChoice::default() }).ascii);
        assert!(!detect(&[utf8, ("NO_COLOR", "1")], ThemeChoice::default()).color);
        assert!(detect(&[utf8, ("NO_COLOR", "")], ThemeChoice::default()).color, "empty means unset");
        let never = ThemeChoice { color: Some(false), ..ThemeChoice::default() };
        let plain = detect(&[utf8, ("COLORTERM", "truecolor")], never);
        assert!(!plain.color && plain.pictures == Pictures::Shades, "pictures follow: {plain:?}");
        assert!(detect(&[utf8, ("NO_COLOR", "1")], ThemeChoice { color: Some(true), ..never }).color);
        assert!(detect(&[utf8, ("COLORFGBG", "0;15")], ThemeChoice::default()).light);
        assert!(!detect(&[utf8, ("COLORFGBG", "15;0")], ThemeChoice::default()).light);
        assert!(detect(&[utf8], ThemeChoice { light: Some(true), ..ThemeChoice::default() }).light);
    }

    #[test]
    fn arms_differ_in_colour_and_line() {
        for light in [false, true] {
            let theme = Theme { light, ..Theme::DARK };
            for a in 0..16 {
                for b in 0..a {
                    assert_ne!((theme.arm(a), theme.line(a)), (theme.arm(b), theme.line(b)), "arms {a} and {b}");
                }
            }
        }
    }
}
