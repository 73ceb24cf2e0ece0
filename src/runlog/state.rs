//! What the evidence in a [`RunView`] amounts to: the honest state with its reason in words, pace, and time to go.

use super::event::{Outcome, Phase};
use super::view::{AttemptView, Liveness, OutcomeView, RunState, RunView, SaveView};
use crate::words::{duration, thousands};

/// Steps whose median is the run's pace.
const PACE_STEPS: usize = 64;
/// Silence longer than this many median steps is a stall ...
const STALL_STEPS: f64 = 5.0;
/// ... but never before this.
const STALL_MINIMUM_MS: f64 = 30_000.0;
/// An outcome `stopped` whose reason begins with this word was the system's doing, not a person's.
pub const PREEMPTED: &str = "preempted";

/// What saves cost, on average.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SaveCost {
    /// How long training stands still for one, ms.
    pub blocked_ms: f64,
    /// From its beginning until it is durable, ms.
    pub durable_ms: f64,
    /// Share of the newest attempt's whole time, from its first step, that went into them; NaN before its first save.
    pub share: f64,
}

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
        newest.map(|newest| self.since_ms(newest, now_ms))
    }

    /// Milliseconds since a moment by the worker's clock; `now_ms` is by this machine's.
    pub fn since_ms(&self, time_ms: u64, now_ms: u64) -> u64 {
        now_ms.saturating_sub(time_ms.saturating_add_signed(self.clock_offset_ms))
    }

    /// Median wall time of the newest steps of any attempt, each but for its first: what a run whose newest attempt has not
    /// stepped yet is known to take.
    pub fn pace_ms(&self) -> Option<f64> {
        let series = &self.series;
        let first = |at: usize| at == 0 || series.attempt.get(at - 1) != series.attempt.get(at);
        let steps = series.step_ms.iter().enumerate().rev().filter(|(at, ms)| !first(*at) && ms.is_finite());
        let mut times: Vec<f32> = steps.take(PACE_STEPS).map(|(_, ms)| *ms).collect();
        times.sort_by(f32::total_cmp);
        times.get(times.len() / 2).map(|ms| f64::from(*ms))
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

    /// What saves cost, over all that were measured; `None` before the first.
    pub fn save_cost(&self) -> Option<SaveCost> {
        let measured = || self.saves.iter().filter(|save| save.ms.is_finite() && save.blocked_ms.is_finite());
        let mean = |of: fn(&SaveView) -> f64| measured().map(of).sum::<f64>() / measured().count() as f64;
        let attempt = self.attempt()?;
        let own: f64 = measured().filter(|it| it.attempt == attempt.started.attempt).map(|save| save.blocked_ms).sum();
        let spent_ms = self.last_event_ms?.saturating_sub(attempt.first_step_ms?) as f64;
        (measured().count() > 0).then(|| SaveCost {
            blocked_ms: mean(|save| save.blocked_ms),
            durable_ms: mean(|save| save.ms),
            // A clock that was set meanwhile tells no share.
            share: if own > 0.0 && own <= spent_ms { own / spent_ms } else { f64::NAN },
        })
    }

    /// Time from an attempt's start to the end of its first step, on average, ms.
    pub fn startup_ms(&self) -> Option<f64> {
        let took = |attempt: &AttemptView| attempt.first_step_ms?.checked_sub(attempt.started_ms);
        let times: Vec<f64> = self.attempts.iter().filter_map(took).map(|ms| ms as f64).collect();
        (!times.is_empty()).then(|| times.iter().sum::<f64>() / times.len() as f64)
    }

    /// Nearly the longest time that a save took until it was durable (95th percentile), ms; `None` before the first.
    pub fn save_p95_ms(&self) -> Option<f64> {
        percentile_95(self.saves.iter().map(|save| save.ms))
    }

    /// Time to the last step: the steps at the present pace, plus the validations and saves still due at the cost of
    /// the latest one (nothing for a kind that has not been measured). `None` without a pace.
    pub fn eta_ms(&self) -> Option<f64> {
        let plan = &self.attempt()?.started;
        let done = self.steps_done();
        let left = plan.total_steps.checked_sub(done)?;
        // Due on multiples of `every` and at the end; `latest` is the step of the last one that is done.
        let due = |every: u64, latest: Option<u64>| {
            let Some(passed) = done.checked_div(every) else { return 0.0 };
            let from = latest.unwrap_or_default().max(passed * every);
            let on_interval = (plan.total_steps / every).saturating_sub(from / every);
            let at_end = from < plan.total_steps && !plan.total_steps.is_multiple_of(every);
            (on_interval + u64::from(at_end)) as f64
        };
        let validation = self.validations.last().map(|point| &point.event);
        let validation_ms = validation.map(|event| event.ms).filter(|ms| ms.is_finite()).unwrap_or_default();
        let save_ms = self.last_save.map(|save| save.ms).filter(|ms| ms.is_finite()).unwrap_or_default();
        let validations_due = due(plan.validate_every, validation.map(|event| event.step));
        let saves_due = due(plan.save_every, self.last_save.map(|save| save.step));
        Some(left as f64 * self.median_step_ms()? + validations_due * validation_ms + saves_due * save_ms)
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

/// The 95th percentile of the finite values, or the largest of few; `None` of none.
pub fn percentile_95(values: impl Iterator<Item = f64>) -> Option<f64> {
    let mut sorted: Vec<f64> = values.filter(|value| value.is_finite()).collect();
    sorted.sort_by(f64::total_cmp);
    let rank = (sorted.len() * 95).div_ceil(100).max(1);
    sorted.get(rank - 1).copied()
}

/// `caching latents 312/720`.
pub(super) fn progress(phase: Phase, done: u64, total: u64) -> String {
    let words = phase.words(total);
    if total > 1 { format!("{words} {}/{}", thousands(done), thousands(total)) } else { words.to_owned() }
}

/// `4.10 s`.
fn seconds(ms: f64) -> String {
    format!("{:.2} s", ms / 1000.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runlog::view::{PhaseView, ValidationPoint};
    use crate::runlog::{AttemptStarted, ValidationEvent};

    const START_MS: u64 = 1_000_000;

    /// Attempts of (number, first step, steps), every step 4.1 s, the first of each attempt 100 s.
    fn view(attempts: &[(u32, u64, u64)], total_steps: u64) -> RunView {
        let mut view = RunView { liveness: Liveness::Alive, last_event_ms: Some(START_MS), ..RunView::default() };
        for &(attempt, start_step, steps) in attempts {
            let started = AttemptStarted {
                attempt,
                arm: "m1".to_owned(),
                pid: 4711,
                host: "node7".to_owned(),
                start_step,
                total_steps,
                save_every: 500,
                validate_every: 500,
                parameters: 1,
                device: "cpu".to_owned(),
                threads: 1,
                job: None,
            };
            view.attempts.push(AttemptView { started, started_ms: START_MS, ended: None, first_step_ms: None });
            for step in 0..steps {
                view.series.step.push(start_step + step + 1);
                view.series.attempt.push(attempt);
                view.series.superseded.push(false);
                view.series.step_ms.push(if step == 0 { 100_000.0 } else { 4096.0 });
                view.series.loss.push(1.0);
                view.series.memory_bytes.push(1.0);
                view.series.padding_waste.push(0.0);
            }
        }
        view
    }

    fn phase(phase: Phase, done: u64, total: u64) -> Option<PhaseView> {
        Some(PhaseView { phase, done, total, since_ms: START_MS, time_ms: START_MS })
    }

    fn said(view: &RunView, silent_ms: u64) -> (RunState, String) {
        view.state(START_MS + silent_ms)
    }

    #[test]
    fn saves_are_charged_to_the_whole_time_since_the_first_step() {
        let mut run = view(&[(1, 0, 20), (2, 20, 20)], 100);
        assert_eq!(run.save_cost(), None);
        assert_eq!(run.startup_ms(), None);
        run.attempts[0].first_step_ms = Some(START_MS + 9_000);
        run.attempts[1].first_step_ms = Some(START_MS + 1_000);
        run.last_event_ms = Some(START_MS + 101_000);
        let save = |attempt, blocked_ms| SaveView { step: 10, bytes: 1, ms: 8000.0, blocked_ms, attempt, time_ms: 0 };
        run.saves = vec![save(1, 1000.0), save(2, 2000.0), save(2, 3000.0), save(0, f64::NAN)];
        let cost = run.save_cost().unwrap();
        assert_eq!((cost.blocked_ms, cost.durable_ms, cost.share), (2000.0, 8000.0, 0.05));
        assert_eq!(run.startup_ms(), Some(5000.0));
    }

    #[test]
    fn a_percentile_of_few_is_the_largest() {
        assert_eq!(percentile_95([f64::NAN].into_iter()), None);
        assert_eq!(percentile_95([3.0, 1.0].into_iter()), Some(3.0));
        assert_eq!(percentile_95((1..=100).map(f64::from)), Some(95.0));
    }

    #[test]
    fn the_pace_leaves_out_the_first_step_and_earlier_attempts() {
        assert_eq!(view(&[(1, 0, 1)], 100).median_step_ms(), None);
        assert_eq!(view(&[(1, 0, 2)], 100).median_step_ms(), Some(4096.0));
        assert_eq!(view(&[(1, 0, 50), (2, 40, 1)], 100).median_step_ms(), None);
        assert_eq!(view(&[(1, 0, 500)], 1000).median_step_ms(), Some(4096.0));
        assert_eq!(
            view(&[(1, 0, 50), (2, 40, 1)], 100).pace_ms(),
            Some(4096.0),
            "what an earlier attempt took is known"
        );
        assert_eq!(view(&[(1, 0, 1), (2, 0, 1)], 100).pace_ms(), None);
        let mut uneven = view(&[(1, 0, 3)], 100);
        uneven.series.step_ms[2] = 4196.0;
        assert_eq!(uneven.median_step_ms(), Some(4146.0));
        uneven.series.step_ms[2] = f32::NAN;
        assert_eq!(uneven.median_step_ms(), Some(4096.0));
    }

    #[test]
    fn the_time_to_go_counts_steps_validations_and_saves() {
        let mut run = view(&[(1, 0, 600)], 1200);
        assert_eq!(run.eta_ms(), Some(600.0 * 4096.0));
        run.last_save =
            Some(SaveView { step: 500, bytes: 1, ms: 9000.0, blocked_ms: 9000.0, attempt: 1, time_ms: START_MS });
        // Saves at 1000 and at the end.
        assert_eq!(run.eta_ms(), Some(600.0 * 4096.0 + 2.0 * 9000.0));
        let event = ValidationEvent {
            step: 500,
            clips: 1,
            wrist_lpips: 0.5,
            wrist_psnr: 1.0,
            wrist_ssim: 1.0,
            trans_l2_norm: 1.0,
            trans_l2_m: 1.0,
            rot_deg: 1.0,
            ceiling_lpips: 1.0,
            ceiling_psnr: 1.0,
            wrist_latent_mse: None,
            ms: 20_000.0,
            work: None,
        };
        run.validations.push(ValidationPoint { attempt: 1, event });
        assert_eq!(run.eta_ms(), Some(600.0 * 4096.0 + 2.0 * 29_000.0));
        let mut done = run.clone();
        done.series = view(&[(1, 0, 1200)], 1200).series;
        assert_eq!(done.eta_ms(), Some(29_000.0), "the last validation and the last save are still to come");
        done.validations[0].event.step = 1200;
        assert_eq!(done.eta_ms(), Some(9000.0));
        assert_eq!(view(&[(1, 0, 60), (2, 50, 0)], 100).eta_ms(), None, "no pace in the new attempt yet");
    }

    #[test]
    fn silence_is_a_stall_by_the_runs_own_pace() {
        let mut run = view(&[(1, 0, 20)], 100);
        assert_eq!(said(&run, 29_999), (RunState::Running, "4.10 s a step".to_owned()));
        assert_eq!(said(&run, 30_000).0, RunState::Running, "at least 30 s");
        assert_eq!(said(&run, 192_000), (RunState::Stalled, "no event for 3 m 12 s; median step 4.10 s".to_owned()));
        run.liveness = Liveness::Unknown;
        assert!(said(&run, 192_000).1.ends_with("host node7 cannot be seen from here"));
        let mut slow = view(&[(1, 0, 20)], 100);
        slow.series.step_ms.fill(60_000.0);
        assert_eq!(said(&slow, 299_000).0, RunState::Running);
        assert_eq!(said(&slow, 301_000).0, RunState::Stalled);
        // A save may take as long as it takes.
        let mut saving = view(&[(1, 0, 20)], 100);
        saving.phase = phase(Phase::Saving, 0, 1);
        saving.last_save =
            Some(SaveView { step: 10, bytes: 1, ms: 60_000.0, blocked_ms: 0.0, attempt: 1, time_ms: START_MS });
        assert_eq!(said(&saving, 119_000), (RunState::Running, "saving a checkpoint".to_owned()));
        assert_eq!(said(&saving, 121_000).0, RunState::Stalled);
    }

    #[test]
    fn a_start_is_never_a_stall_while_the_worker_is_seen_to_live() {
        let mut run = view(&[(1, 0, 0)], 100);
        run.phase = phase(Phase::CachingLatents, 1312, 7200);
        assert_eq!(said(&run, 0), (RunState::Starting, "caching latents 1,312/7,200".to_owned()));
        let silent = "caching latents 1,312/7,200; no word for 1 h 02 m";
        assert_eq!(said(&run, 3_720_000), (RunState::Starting, silent.to_owned()));
        run.liveness = Liveness::Unknown;
        assert_eq!(said(&run, 3_720_000).0, RunState::Stalled);
        run.liveness = Liveness::Dead;
        let dead = "worker 4711 died without a word at step 0; no complete checkpoint is on disk";
        assert_eq!(said(&run, 0), (RunState::Failed, dead.to_owned()));
    }

    #[test]
    fn an_outcome_is_believed_as_far_as_the_evidence_goes() {
        let end = |outcome, step, reason: &str, saved: bool| {
            let mut run = view(&[(1, 0, 20)], 100);
            run.last_save =
                saved.then_some(SaveView { step, bytes: 1, ms: 1.0, blocked_ms: 1.0, attempt: 1, time_ms: START_MS });
            run.outcome = Some(OutcomeView { outcome, reason: reason.to_owned(), exit_code: 0, step });
            said(&run, 0)
        };
        assert_eq!(end(Outcome::Finished, 100, "all done", true), (RunState::Finished, "all done".to_owned()));
        assert_eq!(end(Outcome::Finished, 20, "all done", true).0, RunState::Failed);
        assert_eq!(end(Outcome::Stopped, 20, "by SIGTERM", true), (RunState::Stopped, "by SIGTERM".to_owned()));
        assert!(end(Outcome::Stopped, 20, "stopped", false).1.ends_with("no complete checkpoint is on disk"));
        assert_eq!(end(Outcome::Stopped, 20, "Preempted by job 70112", true).0, RunState::Preempted);
        assert_eq!(end(Outcome::Stopped, 20, "éééééééé", true).0, RunState::Stopped);
        assert_eq!(end(Outcome::Failed, 20, "disk full", true), (RunState::Failed, "disk full".to_owned()));
        // The last event counts if outcome.json is missing.
        let mut run = view(&[(1, 0, 20)], 100);
        run.liveness = Liveness::Dead;
        run.attempts[0].ended = Some((Outcome::Stopped, "stopped".to_owned()));
        assert_eq!(said(&run, 0).0, RunState::Stopped);
    }

    #[test]
    fn a_stop_request_shows_until_the_end() {
        let mut run = view(&[(1, 0, 20)], 100);
        run.stop_requested = true;
        assert_eq!(said(&run, 0).0, RunState::Stopping);
        run.phase = phase(Phase::Saving, 0, 1);
        assert_eq!(said(&run, 0).1, "saving a checkpoint before it stops");
        assert!(said(&run, 60_000).1.contains("asked to stop"));
    }
}
