//! Where the time of a micro-step goes: waiting for data, forward, backward, update, beside what it worked on.
//!
//! Every micro-step is timed, always: two looks at a clock and one at /proc cost nothing beside it. `profile` runs a few
//! on their own, without a run; `LINGBOT_PROFILE=N` has a run tell its first N in its log.

use super::engine::{Engine, EngineSpec};
use super::open::{Opening, open};
use super::schedule::learning_rate;
use super::stop::StopFlag;
use crate::config::Recipe;
use crate::pack::cost::{CostModel, MeasuredMicroStep};
use crate::runlog::{Memory, Phase};
use crate::words::thousands;
use crate::{Error, Exit, Result};
use serde::Serialize;
use std::cell::Cell;
use std::fmt;
use std::path::Path;
use std::time::{Duration, Instant};

/// One micro-step, measured.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct MicroStepProfile {
    /// Optimizer step, from 1.
    pub step: u64,
    /// Place in the step, from 1, and the number of micro-steps of the step.
    pub micro_step: usize,
    pub micro_steps: usize,
    /// Tokens in the trunk, padding included.
    pub tokens: u64,
    /// Episodes, or clips.
    pub samples: usize,
    /// (query, key) pairs of self-attention.
    pub visible_pairs: u64,
    /// Waiting for the batch; what is made ahead of its use costs nothing here.
    pub data_ms: f64,
    pub forward_ms: f64,
    /// With blocks that are recomputed for it, and adding the gradients to the step's.
    pub backward_ms: f64,
    /// Of the optimizer, after the last micro-step of a step.
    pub update_ms: Option<f64>,
    /// After the micro-step; the peak is the process's so far.
    pub memory: Memory,
}

impl MicroStepProfile {
    /// Forward and backward.
    pub fn compute_ms(&self) -> f64 {
        self.forward_ms + self.backward_ms
    }

    /// Forward and backward of 1,000 tokens.
    pub fn ms_per_1k_tokens(&self) -> f64 {
        1e3 * self.compute_ms() / self.tokens as f64
    }

    fn all_ms(&self) -> f64 {
        self.data_ms + self.compute_ms() + self.update_ms.unwrap_or(0.0)
    }
}

impl fmt::Display for MicroStepProfile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let update = self.update_ms.map_or("-".to_owned(), |ms| format!("{ms:.1}"));
        write!(
            f,
            "profile: step {}, micro-step {} of {}: {} tokens, {} samples, {} pairs; data {:.1}, forward {:.1}, \
             backward {:.1}, update {update} ms; {:.2} ms/1k tokens; resident {} MB, peak {} MB",
            self.step,
            self.micro_step,
            self.micro_steps,
            thousands(self.tokens),
            self.samples,
            thousands(self.visible_pairs),
            self.data_ms,
            self.forward_ms,
            self.backward_ms,
            self.ms_per_1k_tokens(),
            megabytes(self.memory.bytes),
            megabytes(self.memory.peak_bytes),
        )
    }
}

pub(super) fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// Of 10^6 bytes, rounded.
pub fn megabytes(bytes: u64) -> String {
    thousands((bytes + 500_000) / 1_000_000)
}

/// How many micro-steps a run is to tell in its log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MicroStepQuota {
    left: usize,
    /// None has been told.
    first: bool,
}

impl MicroStepQuota {
    const VARIABLE: &str = "LINGBOT_PROFILE";

    /// `LINGBOT_PROFILE=N`: the first N of this attempt. Unset or empty: none.
    ///
    /// # Errors
    /// `bad_variable` if it is no number.
    pub fn from_environment() -> Result<Self> {
        let text = std::env::var_os(Self::VARIABLE).unwrap_or_default();
        Self::parse(&text.to_string_lossy())
    }

    fn parse(text: &str) -> Result<Self> {
        let left = match text.trim() {
            "" => 0,
            number => number.parse().map_err(|_| {
                Error::usage("bad_variable", format!("{number:?} is no number of micro-steps"))
                    .in_place(Self::VARIABLE)
                    .hint("unset it, or set it as in LINGBOT_PROFILE=20")
            })?,
        };
        Ok(Self { left, first: true })
    }

    /// What is to be told of the micro-steps of a step.
    pub fn lines(&mut self, micro_steps: Vec<MicroStepProfile>) -> Vec<String> {
        let told = micro_steps.into_iter().take(self.left);
        let lines: Vec<String> = told
            .map(|micro_step| match std::mem::take(&mut self.first) {
                true => format!("{micro_step}; the first: caches are cold"),
                false => micro_step.to_string(),
            })
            .collect();
        self.left -= lines.len();
        lines
    }
}

/// What was measured.
#[derive(Clone, Debug, Serialize)]
pub struct Profile {
    /// Values of the model.
    pub parameters: usize,
    pub micro_steps: Vec<MicroStepProfile>,
    /// Of all but the first; absent unless there are two.
    pub summary: Option<Summary>,
    /// Who ended it early, if somebody did.
    pub stopped: Option<String>,
}

/// Micro-steps but the first, which meets cold caches and memory that was never touched.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Summary {
    pub micro_steps: usize,
    /// Medians.
    pub tokens: f64,
    pub data_ms: f64,
    pub forward_ms: f64,
    pub backward_ms: f64,
    /// Of those with an update, if there are any.
    pub update_ms: Option<f64>,
    pub ms_per_1k_tokens: f64,
    /// All tokens over all time: data, forward, backward and updates.
    pub tokens_per_s: f64,
    /// Of the process.
    pub peak_bytes: u64,
    /// Milliseconds of forward and backward, by least squares; absent if the micro-steps are too much alike.
    pub measured_cost: Option<CostModel>,
    /// Root of the mean square of what the fit leaves.
    pub residual_ms: Option<f64>,
    /// FLOP of forward and backward by the sizes of the model; of LingBot-VA alone.
    pub flop: Option<CostModel>,
    /// FLOP by the sizes of the model, over the time of forward and backward.
    pub gflop_per_s: Option<f64>,
}

impl Summary {
    /// `None` of fewer than two micro-steps.
    pub fn of(micro_steps: &[MicroStepProfile], flop: Option<CostModel>) -> Option<Self> {
        let rest = micro_steps.get(1..).filter(|rest| !rest.is_empty())?;
        let over = |value: fn(&MicroStepProfile) -> f64| median(rest.iter().map(value).collect());
        let sum = |value: fn(&MicroStepProfile) -> f64| rest.iter().map(value).sum::<f64>();
        let updates: Vec<f64> = rest.iter().filter_map(|micro_step| micro_step.update_ms).collect();
        let measured: Vec<MeasuredMicroStep> = rest
            .iter()
            .map(|micro_step| MeasuredMicroStep {
                tokens: micro_step.tokens as usize,
                visible_pairs: micro_step.visible_pairs,
                ms: micro_step.compute_ms(),
            })
            .collect();
        let measured_cost = CostModel::fit(&measured).ok();
        let residual_ms = measured_cost.map(|cost| {
            let square = |step: &MeasuredMicroStep| (cost.of(step.tokens, step.visible_pairs) - step.ms).powi(2);
            (measured.iter().map(square).sum::<f64>() / measured.len() as f64).sqrt()
        });
        let compute_ms = sum(MicroStepProfile::compute_ms);
        let gflop_per_s = flop.map(|flop| {
            measured.iter().map(|step| flop.of(step.tokens, step.visible_pairs)).sum::<f64>() / compute_ms / 1e6
        });
        Some(Self {
            micro_steps: rest.len(),
            tokens: over(|micro_step| micro_step.tokens as f64),
            data_ms: over(|micro_step| micro_step.data_ms),
            forward_ms: over(|micro_step| micro_step.forward_ms),
            backward_ms: over(|micro_step| micro_step.backward_ms),
            update_ms: (!updates.is_empty()).then(|| median(updates)),
            ms_per_1k_tokens: over(MicroStepProfile::ms_per_1k_tokens),
            tokens_per_s: 1e3 * sum(|micro_step| micro_step.tokens as f64) / sum(MicroStepProfile::all_ms),
            peak_bytes: micro_steps.iter().map(|micro_step| micro_step.memory.peak_bytes).max().unwrap_or(0),
            measured_cost,
            residual_ms,
            flop,
            gflop_per_s,
        })
    }
}

/// The middle of some numbers, or the mean of the two middle ones.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let (low, high) = (values.len().saturating_sub(1) / 2, values.len() / 2);
    match (values.get(low), values.get(high)) {
        (Some(low), Some(high)) => (low + high) / 2.0,
        _ => f64::NAN,
    }
}

/// Hears of each micro-step, in order, once its update, if it has one, is done.
pub type Observe<'a> = &'a mut dyn FnMut(&MicroStepProfile) -> Result<()>;

/// Runs the first `count` micro-steps of a recipe on its own data, with the updates between them, and keeps nothing of
/// it but latents in the folder `cache`. A stop ends it between two micro-steps, with what was measured.
///
/// # Errors
/// Those of opening the data, of starting weights, and of a step.
pub fn profile(
    recipe: &Recipe,
    cache: &Path,
    count: usize,
    stop: &StopFlag,
    opening: &mut impl Opening,
    observe: Observe<'_>,
) -> Result<Profile> {
    let mut recipe = recipe.clone();
    let flop = match &mut recipe {
        Recipe::Xwam(recipe) => {
            recipe.train.steps = recipe.train.steps.max(count as u64);
            None
        }
        Recipe::Lingbot(recipe) => {
            // A step has at least one micro-step: there are enough of them now.
            recipe.train.steps = recipe.train.steps.max(count as u64);
            Some(CostModel::of_model(&recipe.model, recipe.train.recompute))
        }
    };
    let mut profile = Profile { parameters: 0, micro_steps: Vec::new(), summary: None, stopped: None };
    match measure(&recipe, cache, count, stop, opening, &mut profile, observe) {
        // Somebody asked to stop before there was anything to measure.
        Err(error) if error.exit == Exit::Stopped => {}
        measured => measured?,
    }
    if profile.micro_steps.len() < count {
        profile.stopped = stop.requested().map(str::to_owned);
    }
    profile.summary = Summary::of(&profile.micro_steps, flop);
    Ok(profile)
}

fn measure(
    recipe: &Recipe,
    cache: &Path,
    count: usize,
    stop: &StopFlag,
    opening: &mut impl Opening,
    profile: &mut Profile,
    observe: Observe<'_>,
) -> Result<()> {
    let mut task = open(recipe, cache, opening)?;
    let (initial, _) = opening.watch(Phase::BuildingModel, |progress| task.initialise(progress))?;
    profile.parameters = initial.count();
    let engine_spec = EngineSpec {
        device: recipe.device(),
        precision: recipe.precision(),
        train: recipe.train(),
        trunk: task.trunk(),
    };
    let mut engine = Engine::start(&engine_spec, initial)?;
    task.bind(engine.parameters())?;
    // A run encodes everything before its first step; here, what will be asked for is enough.
    let samples = task.first_samples(count)?;
    opening.watch(Phase::CachingLatents, |progress| {
        for (done, &sample) in samples.iter().enumerate() {
            progress(done as u64, samples.len() as u64)?;
            if !task.is_cached(sample)? {
                task.cache(sample)?;
            }
        }
        Ok(())
    })?;

    let train = recipe.train();
    let begun = Cell::new(0);
    let interrupted = || {
        let last = stop.requested().is_some() || begun.get() == count;
        begun.set(begun.get() + usize::from(!last));
        last
    };
    for step in 1.. {
        // The last one is held back until it is known whether an update follows.
        let mut held: Option<MicroStepProfile> = None;
        let micro_steps = &mut profile.micro_steps;
        let mut tell = |micro_step: MicroStepProfile| {
            observe(&micro_step)?;
            micro_steps.push(micro_step);
            Ok(())
        };
        let parts = task.gradients(&mut engine, step, &interrupted, &mut |micro_step| {
            held.replace(micro_step).map_or(Ok(()), &mut tell)
        })?;
        if parts.is_some() {
            let updating = Instant::now();
            engine.update(train, learning_rate(train, step), step)?;
            if let Some(last) = &mut held {
                last.update_ms = Some(milliseconds(updating.elapsed()));
            }
        }
        held.map_or(Ok(()), tell)?;
        if parts.is_none() || profile.micro_steps.len() == count {
            break;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runlog::MemoryKind;

    fn micro_step(index: u64, update_ms: Option<f64>) -> MicroStepProfile {
        let tokens = 1_000 + 100 * (index * 5 % 7);
        let visible_pairs = 50_000 * (1 + index * index % 5);
        let compute_ms = 0.02 * tokens as f64 + 1e-4 * visible_pairs as f64 + 3.0;
        MicroStepProfile {
            step: 1,
            micro_step: 2,
            micro_steps: 4,
            tokens,
            samples: 3,
            visible_pairs,
            data_ms: 1.0,
            forward_ms: compute_ms / 4.0,
            backward_ms: compute_ms * 3.0 / 4.0,
            update_ms,
            memory: Memory {
                kind: MemoryKind::Rss,
                bytes: 5_499_999,
                peak_bytes: 1_000_000 * index,
                total_bytes: 1_000_000_000,
                parts: None,
            },
        }
    }

    #[test]
    fn a_summary_leaves_out_the_first_and_finds_what_the_times_are_made_of() {
        let mut micro_steps: Vec<_> = (0..12).map(|index| micro_step(index, (index == 7).then_some(8.0))).collect();
        micro_steps[0].forward_ms = 1e6;
        let flop = CostModel { per_token: 2e6, per_pair: 1e4, per_micro_batch: 0.0 };
        let summary = Summary::of(&micro_steps, Some(flop)).unwrap();
        assert_eq!((summary.micro_steps, summary.data_ms, summary.update_ms), (11, 1.0, Some(8.0)));
        assert_eq!(summary.peak_bytes, 11_000_000);
        let cost = summary.measured_cost.unwrap();
        assert!((cost.per_token - 0.02).abs() < 1e-9 && (cost.per_pair - 1e-4).abs() < 1e-12, "{cost:?}");
        assert!((cost.per_micro_batch - 3.0).abs() < 1e-6 && summary.residual_ms.unwrap() < 1e-6, "{cost:?}");
        // FLOP are 1e8 a millisecond of what depends on tokens and pairs: 100 GFLOP/s, less the 3 ms overhead.
        let rest = &micro_steps[1..];
        let compute: f64 = rest.iter().map(MicroStepProfile::compute_ms).sum();
        let expected = 100.0 * (compute - 33.0) / compute;
        assert!((summary.gflop_per_s.unwrap() - expected).abs() < 1e-6, "{summary:?}");
        let tokens: u64 = rest.iter().map(|micro_step| micro_step.tokens).sum();
        let expected = 1e3 * tokens as f64 / (compute + 11.0 + 8.0);
        assert!((summary.tokens_per_s - expected).abs() < 1e-6, "{summary:?}");
        assert_eq!(Summary::of(&micro_steps[..1], None), None);
        let alike = vec![micro_steps[3].clone(); 5];
        assert_eq!(Summary::of(&alike, None).unwrap().measured_cost, None);
    }

    #[test]
    fn medians_are_the_middle() {
        assert_eq!(median(vec![3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(vec![4.0, 1.0, 2.0, 9.0]), 3.0);
        assert!(median(vec![]).is_nan());
    }

    #[test]
    fn a_run_tells_its_first_micro_steps_over_several_steps() {
        let mut quota = MicroStepQuota::parse(" 3 ").unwrap();
        let step = || vec![micro_step(1, None), micro_step(2, Some(1.25))];
        let first = quota.lines(step());
        assert_eq!(
            first[0],
            "profile: step 1, micro-step 2 of 4: 1,500 tokens, 3 samples, 100,000 pairs; data 1.0, forward 10.8, \
             backward 32.2, update - ms; 28.67 ms/1k tokens; resident 5 MB, peak 1 MB; the first: caches are cold"
        );
        assert!(first[1].contains("update 1.2 ms") && first[1].ends_with("peak 2 MB"), "{}", first[1]);
        assert_eq!((first.len(), quota.lines(step()).len(), quota.lines(step()).len()), (2, 1, 0));
        assert_eq!(MicroStepQuota::parse("").unwrap().lines(step()), Vec::<String>::new());
        for text in ["many", "-1", "1.5"] {
            assert_eq!(MicroStepQuota::parse(text).unwrap_err().code, "bad_variable");
        }
    }
}
