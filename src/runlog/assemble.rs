//! Events in order -> [`RunView`]. No files here: the reader feeds it, tests feed it by hand.

use super::event::{AttemptStarted, Event, EventLine, Level, Phase, StepEvent};
use super::parse::StepColumns;
use super::state::progress;
use super::view::{AttemptView, ChangeView, LogLine, PhaseView, RunView, SaveView, ValidationPoint};
use crate::words::duration;

/// Log lines kept in a view.
const LOG_LINES: usize = 2000;
/// A step gets a log line at most this often, so that fast steps leave the log readable.
const STEP_LOG_INTERVAL_MS: u64 = 1000;
/// A phase gets a log line when it begins and then at most this often.
const PHASE_LOG_INTERVAL_MS: u64 = 5000;

/// Builds the view of one run.
#[derive(Debug, Default)]
pub(super) struct Assembler {
    pub view: RunView,
    /// The worker of this attempt said that it saw a wish to stop.
    pub stop_announced: bool,
    /// Lines ever logged, those no longer kept included.
    pub logged: u64,
    attempt: u32,
    /// Step of the newest point that is not superseded.
    newest_step: Option<u64>,
    last_step_log_ms: u64,
    last_phase_log_ms: u64,
}

impl Assembler {
    /// The events that follow are of this attempt (its folder's number).
    pub fn enter_attempt(&mut self, number: u32) {
        self.attempt = number;
        self.view.phase = None;
        self.stop_announced = false;
    }

    /// An attempt that has no first event (yet, or lost): shown from what its folder tells. A later first event replaces it.
    pub fn assume_attempt(&mut self, started: AttemptStarted, started_ms: u64) {
        if !self.has_attempt() {
            self.view.attempts.push(AttemptView { started, started_ms, ended: None, first_step_ms: None });
        }
    }

    pub fn has_attempt(&self) -> bool {
        self.view.attempts.last().is_some_and(|attempt| attempt.started.attempt >= self.attempt)
    }

    /// A step, by its columns only. `logged` asks for a log line too.
    pub fn step(&mut self, columns: &StepColumns, logged: bool) {
        self.supersede_from(columns.step);
        self.newest_step = Some(columns.step);
        let series = &mut self.view.series;
        series.step.push(columns.step);
        series.attempt.push(self.attempt);
        series.superseded.push(false);
        series.loss.push(columns.loss);
        series.step_ms.push(columns.step_ms);
        series.memory_bytes.push(columns.memory_bytes);
        series.padding_waste.push(columns.padding_waste);
        self.view.phase = None;
        if let Some(attempt) = self.view.attempts.last_mut() {
            attempt.first_step_ms.get_or_insert(columns.time_ms);
        }
        self.touch(columns.time_ms);
        if logged && columns.time_ms.saturating_sub(self.last_step_log_ms) >= STEP_LOG_INTERVAL_MS {
            self.last_step_log_ms = columns.time_ms;
            self.log(columns.time_ms, Level::Info, step_text(columns));
        }
    }

    /// The whole event of the newest step.
    pub fn set_last_step(&mut self, step: StepEvent) {
        self.view.last_step = Some(step);
    }

    pub fn event(&mut self, line: EventLine, logged: bool) {
        let time_ms = line.time_ms;
        self.touch(time_ms);
        match line.event {
            Event::AttemptStarted(mut started) => {
                started.attempt = self.attempt;
                let (number, pid, start_step) = (self.attempt, started.pid, started.start_step);
                let mut device = format!("{} on host {}", started.device, started.host);
                if let Some(job) = &started.job {
                    device += &format!(", job {} on {}, restart {}", job.id, job.node, job.restart);
                }
                if self.has_attempt() {
                    self.view.attempts.pop();
                }
                self.view.attempts.push(AttemptView { started, started_ms: time_ms, ended: None, first_step_ms: None });
                self.supersede_from(start_step + 1);
                self.log(
                    time_ms,
                    Level::Info,
                    format!("attempt {number} starts at step {start_step}, pid {pid}, {device}"),
                );
            }
            Event::Phase { phase, done, total } => {
                let since_ms = match self.view.phase {
                    Some(current) if current.phase == phase => current.since_ms,
                    _ => time_ms,
                };
                let view = PhaseView { phase, done, total, since_ms, time_ms };
                let began = self.view.phase.replace(view).is_none_or(|before| before.phase != phase);
                self.log_phase(view, began);
            }
            Event::Step(step) => {
                let columns = StepColumns {
                    time_ms,
                    step: step.step,
                    loss: step.loss as f32,
                    step_ms: step.step_ms as f32,
                    memory_bytes: step.memory.bytes as f32,
                    padding_waste: step.padding_waste as f32,
                    micro_steps: step.packing.map(|packing| packing.micro_steps),
                };
                self.step(&columns, logged);
                self.set_last_step(step);
            }
            Event::Validation(event) => {
                let measured = match event.wrist_latent_mse {
                    Some(error) if event.wrist_lpips.is_nan() => format!("wrist latent MSE {error:.4}"),
                    _ => format!(
                        "wrist LPIPS {}, PSNR {}",
                        decimals(event.wrist_lpips, 4, ""),
                        decimals(event.wrist_psnr, 2, " dB")
                    ),
                };
                let mut text = format!("validation at step {}: {measured}, {} clips", event.step, event.clips);
                // A point that an earlier attempt measured is said again without a time.
                if event.ms.is_finite() {
                    text += &format!(", {:.1} s", event.ms / 1000.0);
                }
                // Sorted by step, one point a step: a repetition after a resume takes the place of the earlier copy.
                let points = &mut self.view.validations;
                let at = points.partition_point(|point| point.event.step < event.step);
                let repeated = points.get(at).is_some_and(|point| point.event.step == event.step);
                points.splice(at..at + usize::from(repeated), [ValidationPoint { attempt: self.attempt, event }]);
                self.log(time_ms, Level::Info, text);
            }
            Event::Checkpoint { step, bytes, ms, blocked_ms } => {
                let attempt = self.attempt;
                let blocked = blocked_ms.unwrap_or(ms);
                self.view.saves.push(SaveView { step, bytes, ms, blocked_ms: blocked, attempt, time_ms });
                let seconds = decimals(ms / 1000.0, 1, " s");
                let mut text = format!("saved step {step}: {:.1} MB in {seconds}", bytes as f64 / 1e6);
                if let Some(blocked_ms) = blocked_ms {
                    text += &format!(", {:.2} s of it in the way of training", blocked_ms / 1000.0);
                }
                self.log(time_ms, Level::Info, text);
            }
            Event::Message { level, text } => self.log(time_ms, level, text),
            Event::ChangeAccepted { field, recorded, now } => {
                let step = self.view.attempts.last().map_or(0, |attempt| attempt.started.start_step);
                let word = |value: Option<serde_json::Value>| match value {
                    None => "absent".to_owned(),
                    Some(serde_json::Value::String(text)) => text,
                    Some(other) => other.to_string(),
                };
                let (field, values) = (printable(&field), format!("{} -> {}", word(recorded), word(now)));
                self.log(time_ms, Level::Warning, format!("accepted change at step {step}: {field} {values}"));
                let change = ChangeView { attempt: self.attempt, step, field, values: printable(&values) };
                self.view.changes.push(change);
            }
            Event::StopRequested { by } => {
                self.stop_announced = true;
                self.log(time_ms, Level::Warning, format!("stop requested by {by}"));
            }
            Event::AttemptEnded { outcome, step, exit_code, reason } => {
                let level = if exit_code == 0 { Level::Info } else { Level::Warning };
                let text = format!("attempt {} ended at step {step}, exit code {exit_code}: {reason}", self.attempt);
                self.log(time_ms, level, text);
                self.view.phase = None;
                if let Some(attempt) = self.view.attempts.last_mut() {
                    attempt.ended = Some((outcome, printable(&reason)));
                }
            }
        }
    }

    /// Long work must not look like a hang where only the log is seen. What a line of its own tells when it is over is
    /// left out: saves, and the batches of a validation.
    fn log_phase(&mut self, view: PhaseView, began: bool) {
        let due = match view.phase {
            Phase::Saving | Phase::Training => false,
            Phase::Validating => began,
            _ => began || view.time_ms.saturating_sub(self.last_phase_log_ms) >= PHASE_LOG_INTERVAL_MS,
        };
        if !due {
            return;
        }
        self.last_phase_log_ms = view.time_ms;
        let mut text = progress(view.phase, view.done, view.total);
        let spent_ms = view.time_ms.saturating_sub(view.since_ms);
        if spent_ms > 0 && view.done > 0 && view.done < view.total {
            let per_second = view.done as f64 / spent_ms as f64 * 1000.0;
            let left_ms = (view.total - view.done) as f64 / per_second * 1000.0;
            text += &format!(", {per_second:.1}/s, about {} left", duration(left_ms as u64));
        }
        self.log(view.time_ms, Level::Info, text);
    }

    /// A complete line that is no event.
    pub fn bad_line(&mut self, file: &str, line: u64, why: &str, content: &[u8]) {
        self.view.bad_lines += 1;
        let start: String = String::from_utf8_lossy(content.get(..60).unwrap_or(content)).into_owned();
        let time_ms = self.view.last_event_ms.unwrap_or_default();
        self.log(time_ms, Level::Warning, format!("{file} line {line} is no event ({why}): {start}"));
    }

    pub fn log(&mut self, time_ms: u64, level: Level, text: impl AsRef<str>) {
        self.logged += 1;
        let log = &mut self.view.log;
        log.push(LogLine { time_ms, level, text: printable(text.as_ref()) });
        // Trimmed in blocks: dropping one line for each new one would move the whole log each time.
        if log.len() >= LOG_LINES + LOG_LINES / 4 {
            log.drain(..log.len() - LOG_LINES);
        }
    }

    /// The newest event is the last one written, whatever its clock says: after one that was set back, the largest time
    /// lies in the future, and silence would not be seen before it has come.
    fn touch(&mut self, time_ms: u64) {
        self.view.last_event_ms = Some(time_ms);
    }

    /// Marks points at `step` and later: the run went on from before them. Active points ascend, so the newest one
    /// tells whether there are any.
    fn supersede_from(&mut self, step: u64) {
        if self.newest_step.is_none_or(|newest| newest < step) {
            return;
        }
        let series = &mut self.view.series;
        self.newest_step = None;
        for (&at, superseded) in series.step.iter().zip(&mut series.superseded).rev() {
            if at >= step {
                *superseded = true;
            } else if !*superseded {
                self.newest_step = Some(at);
                break;
            }
        }
    }
}

/// A step in few words; of packed episodes also in how many sequences, and how much of them is padding.
fn step_text(columns: &StepColumns) -> String {
    let loss = decimals(f64::from(columns.loss), 4, "");
    let seconds = decimals(f64::from(columns.step_ms) / 1000.0, 2, " s");
    let text = format!("step {} loss {loss} {seconds}", columns.step);
    let Some(micro_steps) = columns.micro_steps else { return text };
    let plural = if micro_steps == 1 { "" } else { "s" };
    let waste = decimals(f64::from(columns.padding_waste) * 100.0, 1, " %");
    format!("{text}, {micro_steps} micro-step{plural}, {waste} padding")
}

/// A number with its unit, or `-` for one that was not measured.
fn decimals(value: f64, decimals: usize, unit: &str) -> String {
    if value.is_finite() { format!("{value:.decimals$}{unit}") } else { "-".to_owned() }
}

/// Control characters (escape sequences of a library's output, say) must not reach a terminal.
fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_says_its_packing_and_nothing_says_nan() {
        let columns = StepColumns {
            time_ms: 1,
            step: 12,
            loss: 0.5,
            step_ms: 430.0,
            memory_bytes: 0.0,
            padding_waste: 0.0123,
            micro_steps: None,
        };
        assert_eq!(step_text(&columns), "step 12 loss 0.5000 0.43 s");
        let packed = StepColumns { micro_steps: Some(8), ..columns };
        assert_eq!(step_text(&packed), "step 12 loss 0.5000 0.43 s, 8 micro-steps, 1.2 % padding");
        let unknown = StepColumns { micro_steps: Some(1), loss: f32::NAN, padding_waste: f32::NAN, ..columns };
        assert_eq!(step_text(&unknown), "step 12 loss - 0.43 s, 1 micro-step, - padding");

        let mut assembler = Assembler::default();
        let mut say = |event| assembler.event(EventLine { v: 1, time_ms: 1, event }, true);
        let lines = [
            r#"{"event":"validation","step":4,"clips":2,"wrist_lpips":null,"wrist_psnr":18.5,"wrist_ssim":null,
                "trans_l2_norm":null,"trans_l2_m":null,"rot_deg":null,"ceiling_lpips":null,"ceiling_psnr":null,"ms":null}"#,
            r#"{"event":"checkpoint","step":4,"bytes":1500000,"ms":null}"#,
        ];
        lines.into_iter().for_each(|line| say(serde_json::from_str(line).unwrap()));
        let texts: Vec<&str> = assembler.view.log.iter().map(|line| line.text.as_str()).collect();
        assert_eq!(texts, ["validation at step 4: wrist LPIPS -, PSNR 18.50 dB, 2 clips", "saved step 4: 1.5 MB in -"]);
    }

    #[test]
    fn long_phases_are_logged_when_they_begin_and_now_and_then() {
        let mut assembler = Assembler::default();
        let mut say = |time_ms: u64, phase, done, total| {
            let line = EventLine { v: 1, time_ms, event: Event::Phase { phase, done, total } };
            assembler.event(line, true);
        };
        say(1_000, Phase::LoadingData, 0, 1);
        say(2_000, Phase::FittingCodec, 0, 0);
        say(2_100, Phase::FittingCodec, 0, 0);
        for second in 0..12 {
            say(3_000 + second * 1000, Phase::CachingLatents, second * 20, 720);
        }
        say(15_000, Phase::Validating, 0, 16);
        say(25_000, Phase::Validating, 4, 16);
        say(30_000, Phase::Saving, 0, 1);
        let texts: Vec<&str> = assembler.view.log.iter().map(|line| line.text.as_str()).collect();
        assert_eq!(
            texts,
            [
                "loading data",
                "waiting for another process to fit the codec",
                "caching latents 0/720",
                "caching latents 100/720, 20.0/s, about 31 s left",
                "caching latents 200/720, 20.0/s, about 26 s left",
                "validating 0/16",
            ]
        );
    }
}
