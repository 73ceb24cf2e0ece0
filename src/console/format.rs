//! Numbers and text for people: thousands separators, three significant digits, units always, no control characters.
//!
//! A value that was not measured (`null` in the log, NaN in memory) is a `-`: a family without poses has no pose error,
//! and that is no failure. Everything that reaches the screen goes through here, so that a value has one look on every panel.

pub use crate::words::{duration, thousands};
use ratatui::text::Span;

/// In place of a value that is not there.
pub const NOTHING: &str = "-";

/// Three significant digits without an exponent where that stays readable: `0.0812`, `4.10`, `30.2`, `1,812`.
pub fn significant(value: f64) -> String {
    significant_digits(value, 3)
}

/// As [`significant`] with a chosen number of digits (at least 1).
pub fn significant_digits(value: f64, digits: usize) -> String {
    if value.is_nan() {
        return NOTHING.into();
    }
    if value.is_infinite() {
        return if value > 0.0 { "+inf".into() } else { "-inf".into() };
    }
    if value == 0.0 {
        return "0".into();
    }
    let digits = digits.max(1) as i32;
    // Round first, so that 9.996 counts as 10.0 and gets one decimal, not two.
    let magnitude = exponent_after_rounding(value.abs(), digits);
    if !(-5..15).contains(&magnitude) {
        return format!("{value:.*e}", (digits - 1) as usize);
    }
    let decimals = (digits - 1 - magnitude).max(0) as usize;
    let text = format!("{:.*}", decimals, value.abs());
    let (whole, fraction) = text.split_once('.').unwrap_or((&text, ""));
    let whole = whole.parse::<u64>().map(thousands).unwrap_or_else(|_| whole.to_owned());
    let sign = if value < 0.0 { "-" } else { "" };
    if fraction.is_empty() { format!("{sign}{whole}") } else { format!("{sign}{whole}.{fraction}") }
}

fn exponent_after_rounding(value: f64, digits: i32) -> i32 {
    let text = format!("{value:.*e}", (digits - 1) as usize);
    text.rsplit_once('e').and_then(|(_, exponent)| exponent.parse().ok()).unwrap_or(0)
}

/// A step's or a save's time, with its own unit: `431 ms`, `4.10 s`, `2 m 03 s`.
pub fn milliseconds(ms: f64) -> String {
    if !ms.is_finite() {
        NOTHING.into()
    } else if ms < 999.5 {
        format!("{} ms", significant(ms.max(0.0)))
    } else if ms < 60_000.0 {
        format!("{} s", significant(ms / 1000.0))
    } else {
        duration(ms as u64)
    }
}

/// Decimal units, as `df -H` and checkpoint sizes are spoken of: `44.8 GB`.
pub fn bytes(count: f64) -> String {
    if !count.is_finite() {
        return NOTHING.into();
    }
    let units = ["B", "kB", "MB", "GB", "TB", "PB"];
    let mut value = count.max(0.0);
    let mut unit = 0;
    while value >= 999.5 && unit + 1 < units.len() {
        value /= 1000.0;
        unit += 1;
    }
    format!("{} {}", significant(value), units.get(unit).copied().unwrap_or("B"))
}

/// A share as percent: `0 %`, `0.04 %`, `2.3 %`, `23 %`. Nothing at all and very little are different findings.
pub fn percent(share: f64) -> String {
    let value = share * 100.0;
    if !value.is_finite() {
        NOTHING.into()
    } else if value == 0.0 {
        "0 %".into()
    } else if value.abs() < 0.095 {
        format!("{value:.2} %")
    } else if value.abs() < 10.0 {
        format!("{value:.1} %")
    } else {
        format!("{value:.0} %")
    }
}

/// A number of things: `1 shape`, `12 shapes`.
pub fn count(number: u64, thing: &str) -> String {
    format!("{} {thing}{}", thousands(number), if number == 1 { "" } else { "s" })
}

/// Wall-clock time of day in UTC: `12:41:07`. UTC because a run's hosts and its reader need not share a time zone.
pub fn clock(unix_ms: u64) -> String {
    let seconds = unix_ms / 1000 % 86_400;
    format!("{:02}:{:02}:{:02}", seconds / 3_600, seconds / 60 % 60, seconds % 60)
}

/// Text from files made safe for a terminal: escape sequences removed, control characters turned into spaces, and of a
/// line rewritten with carriage returns only the last version kept.
pub fn clean(text: &str) -> String {
    let text = text.trim_end_matches(['\r', '\n']);
    let text = text.rsplit('\r').find(|part| !part.trim().is_empty()).unwrap_or(text);
    let mut out = String::with_capacity(text.len());
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        if c == '\u{1b}' {
            skip_escape(&mut chars);
        } else if c.is_control() || ('\u{202a}'..='\u{202e}').contains(&c) || ('\u{2066}'..='\u{2069}').contains(&c) {
            out.push(' ');
        } else {
            out.push(c);
        }
    }
    out
}

fn skip_escape(chars: &mut std::iter::Peekable<std::str::Chars<'_>>) {
    match chars.peek() {
        Some('[') => {
            chars.next();
            for c in chars.by_ref() {
                if ('@'..='~').contains(&c) {
                    break;
                }
            }
        }
        Some(']') => {
            while let Some(c) = chars.next() {
                if c == '\u{7}' {
                    break;
                }
                if c == '\u{1b}' {
                    chars.next();
                    break;
                }
            }
        }
        _ => {
            chars.next();
        }
    }
}

/// Columns that `text` takes on the screen.
pub fn width(text: &str) -> usize {
    Span::raw(text).width()
}

/// `text` cut to `columns`, with an ellipsis where something was cut.
pub fn fit(text: &str, columns: usize) -> String {
    if width(text) <= columns {
        return text.to_owned();
    }
    if columns == 0 {
        return String::new();
    }
    let mut out = String::new();
    let mut used = 0;
    for c in text.chars() {
        let columns_of_c = width(c.encode_utf8(&mut [0; 4]));
        if used + columns_of_c + 1 > columns {
            break;
        }
        out.push(c);
        used += columns_of_c;
    }
    out.push('…');
    out
}

/// As [`fit`], but sentences are cut between words.
pub fn fit_words(text: &str, columns: usize) -> String {
    let cut = fit(text, columns);
    let Some(kept) = cut.strip_suffix('…').filter(|_| cut != text) else { return cut };
    let ends_a_word = text.get(kept.len()..).is_some_and(|rest| rest.starts_with(' '));
    match kept.rsplit_once(' ') {
        Some((words, _)) if !ends_a_word && !words.trim().is_empty() => format!("{}…", words.trim_end()),
        _ => format!("{}…", kept.trim_end()),
    }
}

/// Facts joined by ` · `. While they are wider than `columns`, the one of the highest rank is left out, the later of
/// two equals first: half a number says less than none.
pub fn join(mut facts: Vec<(u8, String)>, columns: usize) -> String {
    loop {
        let text = facts.iter().map(|(_, fact)| fact.as_str()).collect::<Vec<_>>().join(" · ");
        let last = facts.iter().enumerate().max_by_key(|(_, (rank, _))| *rank).map(|(index, _)| index);
        match last {
            Some(index) if width(&text) > columns && facts.len() > 1 => drop(facts.remove(index)),
            _ => return fit_words(&text, columns),
        }
    }
}

/// `text` in exactly `columns`: cut or padded on the right.
pub fn pad(text: &str, columns: usize) -> String {
    let text = fit(text, columns);
    let missing = columns.saturating_sub(width(&text));
    format!("{text}{}", " ".repeat(missing))
}

/// `text` in exactly `columns`: cut or padded on the left.
pub fn pad_left(text: &str, columns: usize) -> String {
    let text = fit(text, columns);
    let missing = columns.saturating_sub(width(&text));
    format!("{}{text}", " ".repeat(missing))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_keep_three_digits_and_separators() {
        for (value, text) in [
            (0.081_23, "0.0812"),
            (4.1, "4.10"),
            (30.24, "30.2"),
            (9.996, "10.0"),
            (999.6, "1,000"),
            (1_812.4, "1,812"),
            (-0.5, "-0.500"),
            (0.0, "0"),
            (f64::NAN, "-"),
            (f64::INFINITY, "+inf"),
            (1e-9, "1.00e-9"),
            (1e300, "1.00e300"),
        ] {
            assert_eq!(significant(value), text, "{value}");
        }
    }

    #[test]
    fn times_and_sizes_carry_their_unit() {
        assert_eq!(milliseconds(431.2), "431 ms");
        assert_eq!(milliseconds(4_100.0), "4.10 s");
        assert_eq!(milliseconds(999.9), "1.00 s");
        assert_eq!(bytes(44.8e9), "44.8 GB");
        assert_eq!(bytes(999_900.0), "1.00 MB");
        assert_eq!([milliseconds(f64::NAN), bytes(f64::NAN), percent(f64::NAN)], ["-", "-", "-"]);
        assert_eq!((percent(0.0), percent(0.0004)), ("0 %".into(), "0.04 %".into()));
        assert_eq!((count(1, "shape"), count(1_200, "shape")), ("1 shape".into(), "1,200 shapes".into()));
        assert_eq!(percent(0.0012), "0.1 %");
        assert_eq!(percent(0.23), "23 %");
        assert_eq!(clock(1_700_000_000_000), "22:13:20");
    }

    #[test]
    fn text_from_files_cannot_drive_the_terminal() {
        assert_eq!(clean("a\u{1b}[31mred\u{1b}[0m b"), "ared b");
        assert_eq!(clean("\u{1b}]0;title\u{7}after"), "after");
        assert_eq!(clean("10 %\r20 %\r30 %\r\n"), "30 %");
        assert_eq!(clean("tab\there"), "tab here");
        assert_eq!(clean("\u{1b}"), "");
    }

    #[test]
    fn what_does_not_fit_is_left_out_whole() {
        let facts = || vec![(0, "loss 0.1".into()), (2, "PSNR 18.5".into()), (1, "425 ms".into())];
        assert_eq!(join(facts(), 40), "loss 0.1 · PSNR 18.5 · 425 ms");
        assert_eq!(join(facts(), 28), "loss 0.1 · 425 ms");
        assert_eq!(join(facts(), 16), "loss 0.1");
        assert_eq!(join(Vec::new(), 16), "");
        let text = "asked to stop";
        let cut: Vec<String> = [13, 12, 9, 8, 4, 3, 0].map(|columns| fit_words(text, columns)).into();
        assert_eq!(cut, ["asked to stop", "asked to…", "asked to…", "asked…", "ask…", "as…", ""]);
    }

    #[test]
    fn fitting_never_exceeds_the_columns() {
        assert_eq!(fit("m1_baseline", 20), "m1_baseline");
        assert_eq!(fit("m1_baseline", 5), "m1_b…");
        assert_eq!(fit("漢字漢字", 5), "漢字…");
        assert_eq!(fit("abc", 0), "");
        assert_eq!(pad("ab", 4), "ab  ");
        assert_eq!(pad_left("ab", 4), "  ab");
        for columns in 0..12 {
            assert!(width(&pad("漢字漢字 and more", columns)) <= columns);
        }
    }
}
