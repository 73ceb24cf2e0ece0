//! Numbers as people read them, wherever the program speaks: check, console, log.

/// `5037748446` -> `5,037,748,446`.
pub fn thousands(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// `44 s`, `3 m 12 s`, `7 h 02 m`, `2 d 03 h`; below a second `0 s`.
pub fn duration(ms: u64) -> String {
    let seconds = ms / 1000;
    match seconds {
        0..60 => format!("{seconds} s"),
        60..3_600 => format!("{} m {:02} s", seconds / 60, seconds % 60),
        3_600..86_400 => format!("{} h {:02} m", seconds / 3_600, seconds / 60 % 60),
        _ => format!("{} d {:02} h", thousands(seconds / 86_400), seconds / 3_600 % 24),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_read_well() {
        assert_eq!([0, 999, 1000, 1_234_567].map(thousands), ["0", "999", "1,000", "1,234,567"]);
        assert_eq!(thousands(u64::MAX), "18,446,744,073,709,551,615");
        let spans = [999, 44_000, 60_000, 192_000, 3_599_000, 25_320_000, 86_400_000, 97_200_000].map(duration);
        assert_eq!(spans, ["0 s", "44 s", "1 m 00 s", "3 m 12 s", "59 m 59 s", "7 h 02 m", "1 d 00 h", "1 d 03 h"]);
        assert_eq!(duration(u64::MAX), "213,503,982,334 d 14 h");
    }
}
