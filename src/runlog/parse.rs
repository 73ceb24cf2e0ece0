//! Bytes of an event log -> events. Step lines, nearly all of a log, take a fast path that allocates nothing.

use super::event::{EVENT_VERSION, EventLine};
use serde::Deserialize;

/// What the columns of [`Series`](super::Series) need of a step line.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct StepColumns {
    pub time_ms: u64,
    pub step: u64,
    pub loss: f32,
    pub step_ms: f32,
    pub memory_bytes: f32,
    pub padding_waste: f32,
}

/// Parses a step line written by this program's own [`EventLine`] serialiser at the start of `bytes`, and returns it
/// with its length, newline included. `None` for everything else, valid or not: that goes through [`any_line`].
pub(super) fn step_line(bytes: &[u8]) -> Option<(StepColumns, usize)> {
    let mut scan = Scan { bytes, at: 0 };
    scan.literal(b"{\"v\":1,\"time_ms\":")?;
    let time_ms = scan.integer()?;
    scan.literal(b",\"event\":\"step\",\"step\":")?;
    let step = scan.integer()?;
    scan.literal(b",\"loss\":")?;
    let loss = scan.float()?;
    for key in [&b",\"loss_video\":"[..], b",\"loss_action\":", b",\"loss_proprio\":", b",\"grad_norm\":", b",\"lr\":"]
    {
        scan.literal(key)?;
        scan.number()?;
    }
    scan.literal(b",\"step_ms\":")?;
    let step_ms = scan.float()?;
    scan.literal(b",\"data_ms\":")?;
    scan.number()?;
    scan.literal(b",\"padding_waste\":")?;
    let padding_waste = scan.float()?;
    scan.literal(b",\"tokens\":")?;
    scan.integer()?;
    scan.literal(b",\"memory\":{\"kind\":\"")?;
    scan.literal(b"rss").or_else(|| scan.literal(b"gpu"))?;
    scan.literal(b"\",\"bytes\":")?;
    let memory_bytes = scan.integer()? as f32;
    scan.literal(b",\"peak_bytes\":")?;
    scan.integer()?;
    scan.literal(b",\"total_bytes\":")?;
    scan.integer()?;
    scan.literal(b"}")?;
    if scan.literal(b",\"branch_norm\":").is_some() {
        scan.number()?;
    }
    scan.literal(b"}\n")?;
    Some((StepColumns { time_ms, step, loss, step_ms, memory_bytes, padding_waste }, scan.at))
}

struct Scan<'b> {
    bytes: &'b [u8],
    at: usize,
}

impl<'b> Scan<'b> {
    fn literal(&mut self, expected: &[u8]) -> Option<()> {
        let end = self.at + expected.len();
        (self.bytes.get(self.at..end)? == expected).then(|| self.at = end)
    }

    fn digits(&mut self) -> Option<()> {
        let rest = self.bytes.get(self.at..)?;
        let count = rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
        self.at += count;
        (count > 0).then_some(())
    }

    fn integer(&mut self) -> Option<u64> {
        let start = self.at;
        self.digits()?;
        let digits = self.bytes.get(start..self.at)?;
        if digits.len() > 1 && digits.first() == Some(&b'0') {
            return None;
        }
        digits.iter().try_fold(0u64, |value, &digit| value.checked_mul(10)?.checked_add(u64::from(digit - b'0')))
    }

    /// The text of a JSON number or of `null`.
    fn number(&mut self) -> Option<&'b [u8]> {
        let start = self.at;
        if self.literal(b"null").is_some() {
            return self.bytes.get(start..self.at);
        }
        let _ = self.literal(b"-");
        if self.literal(b"0").is_none() {
            self.digits()?;
        }
        if self.literal(b".").is_some() {
            self.digits()?;
        }
        if self.literal(b"e").or_else(|| self.literal(b"E")).is_some() {
            let _ = self.literal(b"-").or_else(|| self.literal(b"+"));
            self.digits()?;
        }
        self.bytes.get(start..self.at)
    }

    fn float(&mut self) -> Option<f32> {
        let text = self.number()?;
        if text == b"null" {
            return Some(f32::NAN);
        }
        // Through f64, as the general path does, so that both give the same bits.
        std::str::from_utf8(text).ok()?.parse::<f64>().ok().filter(|value| value.is_finite()).map(|value| value as f32)
    }
}

/// Event kinds this program knows; others belong to a newer writer and are no errors.
const KNOWN_KINDS: [&str; 8] =
    ["attempt_started", "phase", "step", "validation", "checkpoint", "message", "stop_requested", "attempt_ended"];

/// What a line turned out to be.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Line {
    Event(Box<EventLine>),
    /// Blank, or of a kind or a version that this program does not know.
    Skipped,
    /// Why it is no event.
    Bad(String),
}

/// Parses any complete line, without its newline.
pub(super) fn any_line(bytes: &[u8]) -> Line {
    #[derive(Deserialize)]
    struct Head {
        v: u32,
        event: String,
    }
    if bytes.iter().all(u8::is_ascii_whitespace) {
        return Line::Skipped;
    }
    match serde_json::from_slice::<EventLine>(bytes) {
        Ok(line) => Line::Event(Box::new(line)),
        Err(error) => match serde_json::from_slice::<Head>(bytes) {
            Ok(head) if head.v > EVENT_VERSION || !KNOWN_KINDS.contains(&head.event.as_str()) => Line::Skipped,
            _ => Line::Bad(error.to_string()),
        },
    }
}
