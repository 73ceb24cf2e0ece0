//! Progress as lines: for people, aligned by arm; for machines, one JSON object a line.

use super::output;
use super::verdict::VerdictSummary;
use crate::control::{Progress, SupervisorOutcome};
use crate::runlog::{Level, Outcome};
use crate::{Error, Result};
use serde_json::{Map, Value, json};

/// Prints what happens to the arms of a session.
pub struct Printer {
    json: bool,
    width: usize,
    /// stdout could not be written: said once, and training goes on without it.
    failed: bool,
}

impl Printer {
    pub fn new(json: bool, arms: &[String]) -> Self {
        let width = arms.iter().map(|arm| arm.chars().count()).max().unwrap_or(0);
        Self { json, width, failed: false }
    }

    /// Prints one thing that happened, as far as it concerns this kind of output.
    pub fn progress(&mut self, progress: Progress<'_>) {
        let printed = match (self.json, progress) {
            (false, Progress::Log { arm, line }) => self.text(arm, line.level, &line.text),
            (false, Progress::Control { arm, level, text }) => self.text(arm, level, text),
            (true, Progress::Event { arm, json }) => event(arm, json),
            (true, Progress::Control { arm, level, text }) => {
                object(&json!({"event": "control", "arm": arm, "level": level, "text": text}))
            }
            (false, Progress::Event { .. }) | (true, Progress::Log { .. }) => Ok(()),
        };
        if let (Err(error), false) = (printed, self.failed) {
            self.failed = true;
            output::warn(&error);
        }
    }

    /// How each arm ended.
    pub fn outcomes(&self, outcome: &SupervisorOutcome) -> Result<()> {
        for arm in &outcome.arms {
            let end = &arm.outcome;
            if self.json {
                object(&json!({
                    "event": "outcome", "arm": arm.arm, "outcome": end.outcome, "step": end.step,
                    "exit_code": end.exit_code, "reason": end.reason,
                }))?;
            } else {
                let word = match end.outcome {
                    Outcome::Finished => "finished",
                    Outcome::Stopped => "stopped",
                    Outcome::Failed => "FAILED",
                };
                let text = format!("{word} at step {} (exit code {}): {}", end.step, end.exit_code, end.reason);
                self.text(&arm.arm, Level::Info, &text)?;
            }
        }
        Ok(())
    }

    /// The verdict at the end.
    pub fn verdict(&self, summary: &VerdictSummary) -> Result<()> {
        if self.json {
            let verdict = serde_json::to_value(&summary.verdict)
                .map_err(|error| Error::crash(format!("the verdict cannot be written: {error}")))?;
            return object(&json!({"event": "verdict", "verdict": verdict}));
        }
        output::line("")?;
        output::line(summary.text().trim_end())
    }

    fn text(&self, arm: &str, level: Level, text: &str) -> Result<()> {
        let mark = match level {
            Level::Info => ' ',
            Level::Warning => '!',
            Level::Error => 'E',
        };
        output::line(format!("{arm:width$} {mark} {text}", width = self.width))
    }
}

/// The worker's own line with its arm in front.
fn event(arm: &str, json: &str) -> Result<()> {
    let mut line = Map::from_iter([("arm".to_owned(), Value::from(arm))]);
    if let Ok(Value::Object(fields)) = serde_json::from_str(json) {
        line.extend(fields);
        return object(&Value::Object(line));
    }
    Ok(())
}

fn object(value: &Value) -> Result<()> {
    output::line(value.to_string())
}
