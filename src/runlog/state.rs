//! What the evidence in a [`RunView`] amounts to: the honest state with its reason in words, pace, and time to go.

use super::event::{Outcome, Phase};
use super::view::{AttemptView, Liveness, OutcomeView, RunState, RunView};

/// Steps whose median is the run's pace.
const PACE_STEPS: usize = 64;
/// Silence longer than this many median steps is a stall ...
const STALL_STEPS: f64 = 5.0;
/// ... but never before this.
const STALL_MINIMUM_MS: f64 = 30_000.0;
/// An outcome `stopped` whose reason begins with this word was the system's doing, not a person's.
pub const PREEMPTED: &str = "preempted";

impl RunView {
    /// The newest attempt.
    pub fn attempt(&self) -> Option<&AttemptView> {
        self.attempts.last()
    }

    /// Completed optimizer steps, as far as they still count: those of the newest step, or of the checkpoint that the
    /// newest attempt resumed from.
    pub fn steps_done(&self) -> u64 {
        if self.stepped_in_this_attempt() {
            return self.series.step.last().copied().unwrap_or_default();
        }
        match self.attempt() {
            Some(attempt) if attempt.started.start_step > 0 || self.series.is_empty() => attempt.started.start_step,
            _ => self.series.step.last().copied().unwrap_or_default(),
        }
    }

    /// Steps of the whole run; 0 before the first attempt.
    pub fn total_steps(&self) -> u64 {
        self.attempt().map_or(0, |attempt| attempt.started.total_steps)
    }

    /// Milliseconds since the newest event, or since the newest attempt's start; `None` before the first attempt.
    pub fn age_ms(&self, now_ms: u64) -> Option<u64> {
        let newest = self.last_event_ms.max(self.attempt().map(|attempt| attempt.started_ms));
        newest.map(|newest| now_ms.saturating_sub(newest))
    }

    /// Median wall time of the newest steps of this attempt, without its first one (which warms up or compiles).
    /// `None` before its second step: there is no pace yet.
    pub fn median_step_ms(&self) -> Option<f64> {
        let number = self.attempt()?.started.attempt;
        let mut own = self.series.attempt.iter().zip(&self.series.step_ms).rev().take_while(|(at, _)| **at == number);
        let mut times: Vec<f32> = own.by_ref().take(PACE_STEPS).map(|(_, ms)| *ms).collect();
        if times.len() < PACE_STEPS || own.next().is_none() {
            times.pop();
        }
        times.retain(|ms| ms.is_finite());
        times.sort_by(f32::total_cmp);
        let middle = times.len() / 2;
        let upper = f64::from(*times.get(middle)?);
        if times.len() % 2 == 1 {
            return Some(upper);
        }
        Some((f64::from(*times.get(middle.checked_sub(1)?)?) + upper) / 2.0)
    }

    /// Steps a second at the present pace, validation and saving left out.
    pub fn steps_per_second(&self) -> Option<f64> {
        self.median_step_ms().filter(|ms| *ms > 0.0).map(|ms| 1000.0 / ms)
    }

    /// Time to the last step: the steps at the present pace, plus the validations and saves still due at the cost of
    /// the latest one (nothing for a kind that has not been measured). `None` without a pace.
    pub fn eta_ms(&self) -> Option<f64> {
        let plan = &self.attempt()?.started;
        let done = self.steps_done();
        let left = plan.total_steps.checked_sub(done)?;
        let due = |every: u64| match every {
            0 => 0.0,
            // A last one is always due at the end, on the interval or not.
            every => (plan.total_steps.div_ceil(every) - (done / every).min(plan.total_steps.div_ceil(every))) as f64,
        };
        let measured = |ms: Option<f64>| ms.filter(|ms| ms.is_finite()).unwrap_or_default();
        let validation_ms = measured(self.validations.last().map(|point| point.event.ms));
        let save_ms = measured(self.last_save.map(|save| save.ms));
        Some(
            left as f64 * self.median_step_ms()?
                + due(plan.validate_every) * validation_ms
                + due(plan.save_every) * save_ms,
        )
    }

    /// State and its reason in words, from the evidence at `now_ms` (Unix time).
    pub fn state(&self, now_ms: u64) -> (RunState, String) {
        let Some(attempt) = self.attempt() else {
            return match &self.outcome {
                Some(outcome) => self.ended(outcome),
                None => (RunState::Waiting, "no attempt has started".to_owned()),
            };
        };
        if let Some(outcome) = &self.outcome {
            return self.ended(outcome);
        }
        if let Some((outcome, reason)) = &attempt.ended {
            let step = self.steps_done();
            return self.ended(&OutcomeView { outcome: *outcome, reason: reason.clone(), exit_code: 0, step });
        }
        if self.liveness == Liveness::Dead {
            return (RunState::Failed, self.silent_death(attempt));
        }
        let age_ms = self.age_ms(now_ms).unwrap_or_default();
        let silent = self.stall_after_ms().is_some_and(|limit| age_ms as f64 > limit);
        if silent {
            return (RunState::Stalled, self.silence(attempt, age_ms));
        }
        if self.stop_requested {
            let doing = match self.phase.map(|phase| phase.phase) {
                Some(Phase::Saving) => "saving a checkpoint before it stops",
                _ => "asked to stop; it will at the next step, with a checkpoint",
            };
            return (RunState::Stopping, doing.to_owned());
        }
        if !self.stepped_in_this_attempt() {
            return (RunState::Starting, self.starting(attempt, age_ms));
        }
        if let Some(phase) = self.phase.filter(|phase| phase.phase != Phase::Training) {
            return (RunState::Running, progress(phase.phase, phase.done, phase.total));
        }
        let reason = match self.median_step_ms() {
            Some(ms) => format!("{} a step", seconds(ms)),
            None => "first step done; no pace yet".to_owned(),
        };
        (RunState::Running, reason)
    }

    fn stepped_in_this_attempt(&self) -> bool {
        match (self.attempt(), self.series.attempt.last()) {
            (Some(attempt), Some(&newest)) => attempt.started.attempt == newest,
            _ => false,
        }
    }

    /// Silence that counts as a stall, ms. Validating and saving may take twice as long as the last time.
    /// `None` while there is no pace to judge by (before the second step), if the worker is known to live.
    fn stall_after_ms(&self) -> Option<f64> {
        let Some(median) = self.median_step_ms() else {
            // Whether a silent worker on another host still starts up cannot be seen: ten minutes are its benefit of doubt.
            return (self.liveness != Liveness::Alive).then_some(600_000.0);
        };
        let work_ms = match self.phase.map(|phase| phase.phase) {
            Some(Phase::Saving) => self.last_save.map(|save| save.ms),
            Some(Phase::Validating) => self.validations.last().map(|point| point.event.ms),
            _ => None,
        };
        let work_ms = work_ms.filter(|ms| ms.is_finite()).unwrap_or_default();
        Some((STALL_STEPS * median).max(STALL_MINIMUM_MS).max(2.0 * work_ms))
    }

    fn ended(&self, outcome: &OutcomeView) -> (RunState, String) {
        let reason = &outcome.reason;
        match outcome.outcome {
            Outcome::Finished if outcome.step < self.total_steps() => {
                let (step, total) = (thousands(outcome.step), thousands(self.total_steps()));
                (RunState::Failed, format!("says finished, but at step {step} of {total}: {reason}"))
            }
            Outcome::Finished => (RunState::Finished, reason.clone()),
            Outcome::Failed => (RunState::Failed, reason.clone()),
            Outcome::Stopped => {
                let saved = if self.last_save.is_some() { "" } else { "; no complete checkpoint is on disk" };
                let preempted =
                    reason.get(..PREEMPTED.len()).is_some_and(|start| start.eq_ignore_ascii_case(PREEMPTED));
                let state = if preempted { RunState::Preempted } else { RunState::Stopped };
                (state, format!("{reason}{saved}"))
            }
        }
    }

    fn silent_death(&self, attempt: &AttemptView) -> String {
        let done = self.steps_done();
        let saved = match self.last_save {
            Some(save) if save.step >= done => format!("; nothing lost, step {} is saved", thousands(save.step)),
            Some(save) => {
                format!("; {} steps after the save at {} are lost", thousands(done - save.step), thousands(save.step))
            }
            None => "; no complete checkpoint is on disk".to_owned(),
        };
        format!("worker {} died without a word at step {}{saved}", attempt.started.pid, thousands(done))
    }

    fn silence(&self, attempt: &AttemptView, age_ms: u64) -> String {
        let mut text = format!("no event for {}", duration(age_ms));
        if let Some(median) = self.median_step_ms() {
            text += &format!("; median step {}", seconds(median));
        }
        if self.stop_requested {
            text += "; asked to stop";
        }
        if self.liveness == Liveness::Unknown {
            text += &format!("; host {} cannot be seen from here", attempt.started.host);
        }
        text
    }

    fn starting(&self, attempt: &AttemptView, age_ms: u64) -> String {
        let mut text = match self.phase {
            Some(phase) => progress(phase.phase, phase.done, phase.total),
            None if attempt.started.start_step > 0 => {
                format!("resuming at step {}", thousands(attempt.started.start_step))
            }
            None => "starting".to_owned(),
        };
        if age_ms as f64 > STALL_MINIMUM_MS {
            text += &format!("; no word for {}", duration(age_ms));
        }
        text
    }
}

/// `caching latents 312/720`.
fn progress(phase: Phase, done: u64, total: u64) -> String {
    let words = match phase {
        Phase::LoadingData => "loading data",
        Phase::FittingCodec => "fitting the codec",
        Phase::CachingLatents => "caching latents",
        Phase::BuildingModel => "building the model",
        Phase::Resuming => "resuming from the checkpoint",
        Phase::Training => "waiting for the first step",
        Phase::Validating => "validating",
        Phase::Saving => "saving a checkpoint",
    };
    if total > 1 { format!("{words} {}/{}", thousands(done), thousands(total)) } else { words.to_owned() }
}

/// `4.10 s`.
fn seconds(ms: f64) -> String {
    format!("{:.2} s", ms / 1000.0)
}

/// `45 s`, `3 min 12 s`, `7 h 02 min`, `3 d 4 h`.
fn duration(ms: u64) -> String {
    let seconds = ms / 1000;
    match seconds {
        0..60 => format!("{seconds} s"),
        60..3600 => format!("{} min {:02} s", seconds / 60, seconds % 60),
        3600..86_400 => format!("{} h {:02} min", seconds / 3600, seconds % 3600 / 60),
        _ => format!("{} d {} h", seconds / 86_400, seconds % 86_400 / 3600),
    }
}

/// `12,345`.
fn thousands(value: u64) -> String {
    let digits = value.to_string();
    let mut text = String::with_capacity(digits.len() + digits.len() / 3);
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index) % 3 == 0 {
            text.push(',');
        }
        text.push(digit);
    }
    text
}
