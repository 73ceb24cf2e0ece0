//! What to say about a run: its state as glyph and word, why it's in that state, how long it will take.
//!
//! Derived from the run directory's evidence and the clock alone, so the same words come after every restart.

use super::app::App;
use super::format::{bytes, count, duration, join, milliseconds, percent, significant, significant_digits, thousands};
use super::metric::Metric;
use super::theme::Role;
use crate::runlog::{
    AttemptView, MemoryParts, Outcome, PREEMPTED, PackingStep, RunState, RunView, StepEvent, StepTimes,
};
use crate::slurm::{JobState, JobView, restart_words, used_words};

/// Glyph, word and role of a state.
pub fn state_look(state: RunState) -> (&'static str, &'static str, Role) {
    let (glyph, role) = match state {
        RunState::Waiting => ("○", Role::Dim),
        RunState::Queued => ("◔", Role::Accent),
        RunState::Starting => ("◌", Role::Accent),
        RunState::Running => ("●", Role::Good),
        RunState::Stalled => ("◐", Role::Warning),
        RunState::Stopping => ("◑", Role::Warning),
        RunState::Stopped => ("■", Role::Warning),
        RunState::Preempted => ("↯", Role::Warning),
        RunState::Failed => ("✗", Role::Bad),
        RunState::Finished => ("✓", Role::Good),
    };
    (glyph, state.word(), role)
}

/// Is a process of this run at work, as far as anyone can tell?
pub fn is_active(state: RunState) -> bool {
    matches!(state, RunState::Starting | RunState::Running | RunState::Stalled | RunState::Stopping)
}

/// Completed optimizer steps and all of them; `None` before the first attempt.
pub fn progress(run: &RunView) -> Option<(u64, u64)> {
    run.attempt().map(|_| (run.steps_done(), run.total_steps()))
}

/// Is the newest event older than three step times (and 3 s)? Then its numbers are dimmed and say their age.
pub fn is_old(run: &RunView, now_ms: u64) -> bool {
    let limit = (run.median_step_ms().unwrap_or_default() * 3.0).max(3_000.0);
    run.age_ms(now_ms).is_some_and(|age| age as f64 > limit)
}

/// Phase and progress in words: `caching latents 312 of 720 · about 9 s`.
pub fn phase_words(run: &RunView, now_ms: u64) -> Option<String> {
    let view = run.phase?;
    let word = view.phase.words(view.total);
    if view.total == 0 {
        let since = run.since_ms(view.since_ms, now_ms);
        return Some(if since < 2_000 { word.to_owned() } else { format!("{word} · {}", duration(since)) });
    }
    let mut words = format!("{word} {} of {}", thousands(view.done), thousands(view.total));
    let spent = view.time_ms.saturating_sub(view.since_ms);
    if view.done > 0 && view.done < view.total && spent >= 500 {
        let left = spent as f64 / view.done as f64 * (view.total - view.done) as f64;
        words.push_str(&format!(" · about {}", duration(left as u64)));
    }
    Some(words)
}

/// The line under the arm's name: why it's in this state, or how fast it goes, the latter in `columns`. `micro_steps`
/// asks for them too, where nothing else says them.
pub fn why(run: &RunView, state: RunState, reason: &str, now_ms: u64, columns: usize, micro_steps: bool) -> String {
    let attempt = run.attempts.last().map_or(0, |attempt| attempt.started.attempt);
    let again = if attempt > 1 { format!("attempt {attempt} · ") } else { String::new() };
    match state {
        RunState::Running => {
            let mut facts = Vec::new();
            if attempt > 1 {
                facts.push((1, format!("attempt {attempt}")));
            }
            if let Some(phase) = run.phase.and_then(|_| phase_words(run, now_ms)) {
                facts.push((0, phase));
            } else if let Some(ms) = run.median_step_ms() {
                facts.push((0, format!("{}/step", milliseconds(ms))));
                if let Some(step) = &run.last_step {
                    let packing = step.packing.filter(|_| micro_steps);
                    facts.extend(packing.map(|packing| (4, count(packing.micro_steps, "micro-step"))));
                    facts.push((3, format!("{} tok/s", significant(tokens_per_second(step)))));
                }
            }
            if let Some(left) = run.eta_ms() {
                facts.push((0, format!("{} left", duration(left as u64))));
            }
            join(facts, columns)
        }
        RunState::Starting => format!("{again}{}", phase_words(run, now_ms).unwrap_or_else(|| reason.to_owned())),
        RunState::Stalled => {
            let age = run.age_ms(now_ms).map(duration).unwrap_or_default();
            let usual = run.median_step_ms().map(milliseconds).unwrap_or_default();
            format!("{again}silent for {age}, a step takes {usual}")
        }
        _ if reason.is_empty() => again.trim_end_matches(" · ").to_owned(),
        _ => format!("{again}{reason}"),
    }
}

/// Tokens through the trunk in a second of the step's wall time; NaN for a step that took none.
pub fn tokens_per_second(step: &StepEvent) -> f64 {
    if step.step_ms > 0.0 { step.tokens as f64 / step.step_ms * 1000.0 } else { f64::NAN }
}

/// How the newest step's episodes were packed, in `columns`; empty for an arm that packs none. What gives way first is
/// said elsewhere too: beside panels what is padded, else the micro-steps.
pub fn packing(run: &RunView, columns: usize, beside_panels: bool) -> String {
    let Some(packing) = run.last_step.as_ref().and_then(|step| step.packing) else { return String::new() };
    let PackingStep { micro_steps, distinct_shapes, rank_imbalance, .. } = packing;
    let mut facts = vec![(2, count(micro_steps, "micro-step")), (1, count(distinct_shapes, "shape"))];
    facts.push((if beside_panels { 3 } else { 1 }, padding_parts(&packing).join(", ")));
    facts.push((0, format!("imbalance {}", imbalance(rank_imbalance))));
    join(facts, columns)
}

/// The job of an arm in `columns`, and how old the news of it are. Where it waits, the reason above names it already; its
/// node is that of the process.
pub fn job(run: &RunView, job: &JobView, app: &App, columns: usize) -> String {
    let Some(look) = app.snapshot.as_ref().map(|snapshot| &snapshot.slurm) else { return String::new() };
    let age = duration(app.now_ms.saturating_sub(look.seen_ms));
    let mut facts = match job.state {
        JobState::Pending => Vec::new(),
        _ => vec![(0, format!("job {} {}", job.id, job.state)), (1, used_words(job)), (2, restart_words(run, job))],
    };
    match &look.error {
        Some(error) => facts.insert(0, (0, format!("Slurm as of {age} ago: {error}"))),
        None => facts.push((3, format!("Slurm {age} ago"))),
    }
    facts.retain(|(_, fact)| !fact.is_empty());
    join(facts, columns)
}

/// What padding waste is made of, besides text.
pub fn padding_parts(packing: &PackingStep) -> [String; 2] {
    [format!("frames {}", percent(packing.frame_padding)), format!("align {}", percent(packing.alignment_padding))]
}

/// Largest over mean cost of the ranks: `1.003`.
fn imbalance(value: f64) -> String {
    if value.is_finite() { format!("{value:.3}") } else { significant(value) }
}

/// The third line: what is safe, and how old the data are.
pub fn safety(run: &RunView, state: RunState, now_ms: u64) -> String {
    let mut parts = Vec::new();
    if is_active(state)
        && is_old(run, now_ms)
        && let Some(age) = run.age_ms(now_ms)
    {
        parts.push(format!("data {} old", duration(age)));
    }
    match &run.last_save {
        Some(save) => {
            // The folder is there before the log says how long it took.
            let took = if save.ms.is_finite() { format!(", {}", milliseconds(save.ms)) } else { String::new() };
            parts.push(format!(
                "saved step {} {} ago ({}{took})",
                thousands(save.step),
                duration(run.since_ms(save.time_ms, now_ms)),
                bytes(save.bytes as f64),
            ));
        }
        None => match run.attempts.last() {
            Some(attempt) if attempt.started.save_every > 0 && is_active(state) => {
                let every = attempt.started.save_every;
                let next = (progress(run).map_or(0, |(step, _)| step) / every + 1) * every;
                parts.push(format!("nothing saved yet, first at step {}", thousands(next)));
            }
            Some(_) => parts.push("nothing saved".to_owned()),
            None => {}
        },
    }
    if let Some(cost) = run.save_cost().filter(|cost| is_active(state) && cost.share >= 0.0005) {
        parts.push(format!("saves cost {}", percent(cost.share)));
    }
    if run.bad_lines > 0 {
        parts.push(format!("{} unreadable log lines", thousands(run.bad_lines)));
    }
    parts.join(" · ")
}

/// Where and as what it runs, in `columns`: `pid 4711 on node7 · cpu, 1 thread · 2.35 M parameters`.
pub fn place(run: &RunView, columns: usize) -> String {
    let Some(attempt) = run.attempt() else { return String::new() };
    let started = &attempt.started;
    let threads = if started.threads == 1 { "1 thread".to_owned() } else { format!("{} threads", started.threads) };
    let size = started.parameters as f64 / 1e6;
    let pid = started.pid;
    let facts = vec![
        (0, format!("pid {pid} on {}", started.host)),
        (1, format!("{}, {threads}", started.device)),
        (2, format!("{} M parameters", significant(size))),
    ];
    join(facts, columns)
}

/// What a chart without points waits for.
pub fn waits_for(metric: Metric, runs: &[(&RunView, RunState)], now_ms: u64) -> String {
    let Some((run, _)) = runs.iter().find(|(_, state)| is_active(*state)) else {
        return match runs.iter().find(|(run, _)| !run.attempts.is_empty()) {
            None if runs.is_empty() => "no arm is drawn: mark one with Space".into(),
            None => "no run has started".into(),
            Some(_) if metric.is_validation() => "no validation was reached; R resumes an arm".into(),
            Some(_) => "no step was reached; R resumes an arm".into(),
        };
    };
    let stepping = run.last_step.is_some() && run.phase.is_none();
    if !stepping {
        let phase = phase_words(run, now_ms).unwrap_or_else(|| "the worker starts".into());
        return format!("first point soon: {phase}");
    }
    if !metric.is_validation() {
        return "waiting for the first step".into();
    }
    let Some((step, _)) = progress(run) else { return "the worker starts".into() };
    let every = run.attempts.last().map_or(0, |attempt| attempt.started.validate_every);
    if every == 0 {
        return "the worker announced no validation before the end".into();
    }
    let next = (step / every + 1) * every;
    match run.median_step_ms() {
        Some(ms) => format!(
            "first validation at step {}, about {}",
            thousands(next),
            duration((ms * next.saturating_sub(step) as f64) as u64)
        ),
        None => format!("first validation at step {}", thousands(next)),
    }
}

/// One word for the seam after an attempt: how it ended.
pub fn seam_cause(attempt: &AttemptView) -> &'static str {
    match &attempt.ended {
        None => "died",
        Some((Outcome::Finished, _)) => "finished",
        Some((Outcome::Failed, _)) => "failed",
        Some((Outcome::Stopped, reason)) => {
            let reason = reason.to_lowercase();
            if reason.starts_with(PREEMPTED) {
                "preempted"
            } else if reason.contains("time limit") || reason.contains("timeout") {
                "time limit"
            } else {
                "stopped"
            }
        }
    }
}

/// Fields whose accepted change this attempt brought in, for the seam before it; empty if it brought none.
pub fn changed_fields(run: &RunView, attempt: u32) -> String {
    let fields = run.changes.iter().filter(|change| change.attempt == attempt).map(|change| change.field.as_str());
    fields.collect::<Vec<_>>().join(", ")
}

/// What the run is bound to since its latest accepted change; empty if there was none.
pub fn changes(run: &RunView) -> String {
    let newest = run.changes.last();
    let words = newest
        .map(|newest| format!("changed at step {}: {}", thousands(newest.step), changed_fields(run, newest.attempt)));
    words.unwrap_or_default()
}

/// The values of the latest step in one line of `columns`, for small screens.
pub fn value_line(run: &RunView, columns: usize) -> String {
    let Some(step) = &run.last_step else { return String::new() };
    let mut facts = Vec::new();
    if let Some(point) = run.validations.last().filter(|point| point.event.wrist_lpips.is_finite()) {
        facts.push((1, format!("LPIPS {}", Metric::WristLpips.value(point.event.wrist_lpips))));
        facts.push((5, format!("PSNR {}", significant_digits(point.event.wrist_psnr, 4))));
    }
    facts.push((0, format!("loss {}", Metric::Loss.value(step.loss))));
    facts.push((2, milliseconds(step.step_ms)));
    facts.push((6, format!("{} tok/s", significant(tokens_per_second(step)))));
    facts.push((4, format!("{} {}", memory_kind(run), bytes(step.memory.bytes as f64))));
    facts.push((3, format!("pad {}", percent(step.padding_waste))));
    join(facts, columns)
}

/// Where a step's time went on its device: how well it was used, then its parts.
pub fn device_times(times: &StepTimes) -> Vec<String> {
    let mfu = times.mfu.map(|mfu| format!("MFU {}", percent(mfu)));
    let parts =
        [("front", times.front_ms), ("trunk", times.trunk_ms), ("heads", times.back_ms), ("update", times.update_ms)];
    mfu.into_iter().chain(parts.map(|(part, ms)| format!("{part} {}", milliseconds(ms)))).collect()
}

/// Whose a GPU's memory is: `state 91.2 GB`, `arena 48.4 GB`, ...
pub fn memory_parts(parts: &MemoryParts) -> Vec<String> {
    let MemoryParts { state_bytes, arena_bytes, candle_bytes, host_bytes } = *parts;
    let named =
        [("state", state_bytes), ("arena", arena_bytes), ("candle", candle_bytes), ("host, pinned", host_bytes)];
    named
        .into_iter()
        .filter(|(_, count)| *count > 0)
        .map(|(name, count)| format!("{name} {}", bytes(count as f64)))
        .collect()
}

/// `GPU` or `RSS`: what the memory numbers measure.
pub fn memory_kind(run: &RunView) -> &'static str {
    match run.memory().map(|memory| memory.kind) {
        Some(crate::runlog::MemoryKind::Gpu) => "GPU",
        Some(crate::runlog::MemoryKind::Rss) => "RSS",
        None => "memory",
    }
}

/// Short names for labels on curves: the part before the first `_`, where these differ.
pub fn short_names(arms: &[&str]) -> Vec<String> {
    let short = |arm: &str| arm.split('_').next().unwrap_or(arm).to_owned();
    arms.iter()
        .map(|arm| {
            let name = short(arm);
            let unique = arms.iter().filter(|other| short(other) == name).count() == 1;
            if unique && !name.is_empty() { name } else { (*arm).to_owned() }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_names_stay_apart() {
        assert_eq!(short_names(&["m1_baseline", "m2_geometry"]), ["m1", "m2"]);
        assert_eq!(short_names(&["lr_low", "lr_high"]), ["lr_low", "lr_high"]);
        assert_eq!(short_names(&["_x"]), ["_x"]);
    }

    #[test]
    fn a_gpus_memory_is_told_by_what_it_is_for() {
        let parts = MemoryParts {
            state_bytes: 91_200_000_000,
            arena_bytes: 48_400_000_000,
            candle_bytes: 6_700_000_000,
            host_bytes: 59_600_000_000,
        };
        let words = ["state 91.2 GB", "arena 48.4 GB", "candle 6.70 GB", "host, pinned 59.6 GB"];
        assert_eq!(memory_parts(&parts), words);
        assert_eq!(memory_parts(&MemoryParts { host_bytes: 0, ..parts }).len(), 3, "what is not there is not told");
    }

    #[test]
    fn every_state_has_its_own_glyph_and_word() {
        use RunState::*;
        let all = [Waiting, Starting, Running, Stalled, Stopping, Stopped, Preempted, Failed, Finished];
        let mut glyphs: Vec<_> = all.iter().map(|state| state_look(*state).0).collect();
        let mut words: Vec<_> = all.iter().map(|state| state_look(*state).1).collect();
        glyphs.sort_unstable();
        glyphs.dedup();
        words.sort_unstable();
        words.dedup();
        assert_eq!((glyphs.len(), words.len()), (all.len(), all.len()));
        // Wide glyphs shift everything after them in some terminals.
        assert!(glyphs.iter().all(|glyph| super::super::format::width(glyph) == 1));
    }
}
