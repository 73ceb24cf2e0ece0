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
    /// Of a step of packed episodes; no column, but the log line of the step says it.
    pub micro_steps: Option<u64>,
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
        scan.skip_number()?;
    }
    scan.literal(b",\"step_ms\":")?;
    let step_ms = scan.float()?;
    scan.literal(b",\"data_ms\":")?;
    scan.skip_number()?;
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
    if scan.literal(b",\"parts\":{\"state_bytes\":").is_some() {
        scan.integer()?;
        for key in [&b",\"arena_bytes\":"[..], b",\"candle_bytes\":", b",\"host_bytes\":"] {
            scan.literal(key)?;
            scan.integer()?;
        }
        scan.literal(b"}")?;
    }
    scan.literal(b"}")?;
    if scan.literal(b",\"branch_norm\":").is_some() {
        scan.skip_number()?;
    }
    let mut micro_steps = None;
    if scan.literal(b",\"packing\":{\"micro_steps\":").is_some() {
        micro_steps = Some(scan.integer()?);
        scan.literal(b",\"distinct_shapes\":")?;
        scan.integer()?;
        for key in [&b",\"frame_padding\":"[..], b",\"alignment_padding\":", b",\"rank_imbalance\":"] {
            scan.literal(key)?;
            scan.skip_number()?;
        }
        scan.literal(b"}")?;
    }
    if scan.literal(b",\"times\":{\"front_ms\":").is_some() {
        scan.skip_number()?;
        for key in [&b",\"trunk_ms\":"[..], b",\"back_ms\":", b",\"update_ms\":"] {
            scan.literal(key)?;
            scan.skip_number()?;
        }
        if scan.literal(b",\"mfu\":").is_some() {
            scan.skip_number()?;
        }
        scan.literal(b"}")?;
    }
    if scan.literal(b",\"work\":{\"full_lr_steps\":").is_some() {
        scan.integer()?;
        scan.literal(b",\"full_lr_samples\":")?;
        scan.integer()?;
        scan.literal(b",\"warmup_steps\":")?;
        scan.integer()?;
        scan.literal(b"}")?;
    }
    scan.literal(b"}\n")?;
    Some((StepColumns { time_ms, step, loss, step_ms, memory_bytes, padding_waste, micro_steps }, scan.at))
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

    /// One or more digits. Eight bytes at a time: digits are most of a log.
    fn digits(&mut self) -> Option<()> {
        const EACH: u64 = 0x0101_0101_0101_0101;
        let start = self.at;
        while let Some(eight) = self.bytes.get(self.at..).and_then(|rest| rest.first_chunk::<8>()) {
            // Digits become 0..=9; adding 0x76 then sets the top bit of everything above. A carry out of a byte only
            // disturbs later ones, and the first byte that is no digit is all that counts.
            let values = u64::from_le_bytes(*eight) ^ (0x30 * EACH);
            let others = (values.wrapping_add(0x76 * EACH) | values) & (0x80 * EACH);
            if others != 0 {
                self.at += (others.trailing_zeros() / 8) as usize;
                return (self.at > start).then_some(());
            }
            self.at += 8;
        }
        let rest = self.bytes.get(self.at..)?;
        self.at += rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
        (self.at > start).then_some(())
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

    /// A number that is not needed. Only one that is long enough to be out of range is worth the arithmetic.
    fn skip_number(&mut self) -> Option<()> {
        let text = self.number()?;
        let exponent = text.iter().rev().take(4).take_while(|byte| byte.is_ascii_digit()).count();
        let small = text.len() <= 40 && (exponent <= 2 || !text.iter().any(|byte| matches!(byte, b'e' | b'E')));
        (small || finite(text).is_some()).then_some(())
    }

    fn float(&mut self) -> Option<f32> {
        let text = self.number()?;
        if text == b"null" {
            return Some(f32::NAN);
        }
        // Through f64, as the general path does, so that both give the same bits.
        finite(text).map(|value| value as f32)
    }
}

/// A JSON number as f64; `None` if it is out of range, which is no number to the general path either.
fn finite(text: &[u8]) -> Option<f64> {
    std::str::from_utf8(text).ok()?.parse::<f64>().ok().filter(|value| value.is_finite())
}

/// Event kinds this program knows; others belong to a newer writer and are no errors.
const KNOWN_KINDS: [&str; 9] = [
    "attempt_started",
    "phase",
    "step",
    "validation",
    "checkpoint",
    "message",
    "change_accepted",
    "stop_requested",
    "attempt_ended",
];

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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runlog::{Event, Level, Memory, MemoryKind, MemoryParts, PackingStep, StepEvent, StepTimes, Work};
    use proptest::prelude::*;

    prop_compose! {
        fn step()(
            numbers in prop::collection::vec(any::<f64>(), 9),
            counts in prop::array::uniform5(any::<u64>()),
            gpu in any::<bool>(),
            parts in prop::option::of(any::<[u64; 4]>()),
            branch_norm in prop::option::of(-1e9..1e9f64),
            packing in prop::option::of((any::<[u64; 2]>(), any::<[f64; 3]>())),
            work in prop::option::of(any::<[u64; 3]>()),
            times in prop::option::of((prop::array::uniform4(0.0..1e9f64), prop::option::of(0.0..1f64))),
        ) -> StepEvent {
            StepEvent {
                step: counts[0],
                loss: numbers[0],
                loss_video: numbers[1],
                loss_action: numbers[2],
                loss_proprio: numbers[3],
                grad_norm: numbers[4],
                lr: numbers[5],
                step_ms: numbers[6],
                data_ms: numbers[7],
                padding_waste: numbers[8],
                tokens: counts[1],
                memory: Memory {
                    kind: if gpu { MemoryKind::Gpu } else { MemoryKind::Rss },
                    bytes: counts[2],
                    peak_bytes: counts[3],
                    total_bytes: counts[4],
                    parts: parts.map(|[state_bytes, arena_bytes, candle_bytes, host_bytes]| MemoryParts {
                        state_bytes,
                        arena_bytes,
                        candle_bytes,
                        host_bytes,
                    }),
                },
                branch_norm,
                packing: packing.map(|(counts, numbers)| PackingStep {
                    micro_steps: counts[0],
                    distinct_shapes: counts[1],
                    frame_padding: numbers[0],
                    alignment_padding: numbers[1],
                    rank_imbalance: numbers[2],
                }),
                times: times.map(|([front_ms, trunk_ms, back_ms, update_ms], mfu)| StepTimes {
                    front_ms,
                    trunk_ms,
                    back_ms,
                    update_ms,
                    mfu,
                }),
                work: work.map(|[full_lr_steps, full_lr_samples, warmup_steps]| Work {
                    full_lr_steps,
                    full_lr_samples,
                    warmup_steps,
                }),
            }
        }
    }

    fn line_of(step: StepEvent, time_ms: u64) -> Vec<u8> {
        serde_json::to_vec(&EventLine { v: 1, time_ms, event: Event::Step(step) }).unwrap()
    }

    fn bits(value: f32) -> u64 {
        if value.is_nan() { u64::MAX } else { u64::from(value.to_bits()) }
    }

    /// The columns by the general path; `None` if it takes the line for no step.
    fn general(line: &[u8]) -> Option<([u64; 6], Option<u64>)> {
        let Line::Event(line) = any_line(line) else { return None };
        let Event::Step(step) = line.event else { return None };
        let [loss, step_ms, padding_waste] =
            [step.loss, step.step_ms, step.padding_waste].map(|value| bits(value as f32));
        let columns = [line.time_ms, step.step, loss, step_ms, bits(step.memory.bytes as f32), padding_waste];
        Some((columns, step.packing.map(|packing| packing.micro_steps)))
    }

    fn fast(line: &[u8]) -> Option<([u64; 6], Option<u64>)> {
        let (columns, length) = step_line(line)?;
        assert!(line[..length].ends_with(b"}\n"));
        let StepColumns { time_ms, step, loss, step_ms, memory_bytes, padding_waste, micro_steps } = columns;
        Some(([time_ms, step, bits(loss), bits(step_ms), bits(memory_bytes), bits(padding_waste)], micro_steps))
    }

    proptest! {
        #[test]
        fn the_fast_path_takes_every_step_line_and_reads_it_like_the_general_one(step in step(), time_ms in any::<u64>()) {
            let mut line = line_of(step, time_ms);
            let expected = general(&line);
            prop_assert!(expected.is_some());
            prop_assert_eq!(fast(&line), None, "no newline yet");
            line.push(b'\n');
            prop_assert_eq!(fast(&line), expected);
        }

        #[test]
        fn the_fast_path_accepts_nothing_that_the_general_one_refuses(
            step in step(), at in any::<prop::sample::Index>(), byte in any::<u8>(), cut in any::<bool>(),
        ) {
            let mut line = line_of(step, 1);
            let at = at.index(line.len());
            if cut {
                line.remove(at);
            } else {
                line[at] = byte;
            }
            line.push(b'\n');
            if let Some(columns) = fast(&line) {
                prop_assert_eq!(Some(columns), general(&line));
            }
        }
    }

    #[test]
    fn every_kind_that_is_written_is_known() {
        let line = EventLine { v: 1, time_ms: 1, event: Event::Message { level: Level::Info, text: String::new() } };
        let text = serde_json::to_string(&line).unwrap().replace("\"message\"", "\"no_such_kind\"");
        // serde names all kinds when it meets an unknown one.
        let error = serde_json::from_str::<EventLine>(&text).unwrap_err().to_string();
        let named: Vec<&str> = error.split('`').skip(3).step_by(2).collect();
        assert_eq!(named, KNOWN_KINDS, "{error}");
        assert_eq!(any_line(text.as_bytes()), Line::Skipped);
    }
}
