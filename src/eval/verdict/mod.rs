//! The verdict over an experiment: does the candidate arm beat the baseline, by the rule fixed beforehand.
//!
//! Pure statistics over per-clip metrics. Both arms are measured on the same held-out clips with the same seeds, so
//! the difference of each clip is taken before any mean; its spread is then the spread of the effect, not of the clips.

mod bootstrap;
mod fairness;
mod load;
mod text;

pub use fairness::{ArmWork, Record, at_equal_work, confounders, seams, unequal_work};
pub use load::{ArmPoints, Point, load_points};

use crate::config::DecisionRule;
use crate::runlog::ClipMetrics;
use crate::{Error, Result};
use serde::Serialize;
use std::collections::{BTreeMap, BTreeSet};

/// The only metric that decides.
pub const DECISION_METRIC: &str = "wrist_lpips";

/// What was to be measured, known before the first step.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// Steps at which both arms validate, step 0 included.
    pub steps: Vec<u64>,
    /// The arms must be equal at step 0 (the ablated branch starts as a no-op); if they are not, nothing that follows
    /// can be laid to the ablated fields.
    pub equal_start: bool,
    /// What sets the runs apart beside the ablated fields: with any, there is no verdict.
    pub confounders: Vec<String>,
}

impl Plan {
    /// The plan of a run of `total_steps` that validates at step 0, every `every` steps, and at the last step.
    pub fn new(total_steps: u64, every: u64, equal_start: bool) -> Self {
        let mut steps: Vec<u64> =
            (0..=total_steps).step_by(usize::try_from(every.max(1)).unwrap_or(usize::MAX)).collect();
        if steps.last() != Some(&total_steps) {
            steps.push(total_steps);
        }
        Self { steps, equal_start, confounders: Vec::new() }
    }
}

/// What the rule says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Decision {
    /// The whole interval of the difference is below 0 (LPIPS: lower is better).
    Better,
    /// The whole interval is above 0.
    Worse,
    /// The interval holds 0, there are too few episodes, or the arms did not start equal.
    Undecided,
    /// Not all planned points are there in both arms; whatever the difference so far, it does not decide.
    Pending,
}

/// Are the arms the same model before the first step.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum StepZero {
    /// Every field of every clip, bit for bit.
    Equal { clips: usize },
    /// The first difference, by clip.
    Differs { clip: String, field: &'static str, baseline: f64, candidate: f64 },
    /// One arm or both lack step 0.
    Missing,
}

/// Mean over the clips of one point of one arm.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct PointMeans {
    pub wrist_lpips: f64,
    pub wrist_psnr: f64,
    pub wrist_ssim: f64,
    pub trans_l2_norm: f64,
    pub trans_l2_m: f64,
    pub rot_deg: f64,
    pub ceiling_lpips: f64,
    pub ceiling_psnr: f64,
}

/// One validation point of both arms.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct TrajectoryPoint {
    pub step: u64,
    /// `None` where an arm has not measured it.
    pub baseline: Option<PointMeans>,
    pub candidate: Option<PointMeans>,
}

/// Candidate less baseline, averaged over the points after step 0.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Difference {
    /// Over all clips.
    pub mean: f64,
    /// `None` where the episodes are too few to give one.
    pub interval: Option<Interval>,
    pub confidence: f64,
    pub resamples: usize,
    /// Each clip's own difference.
    pub per_clip: Vec<ClipDifference>,
}

/// Bounds that hold the mean with the rule's confidence.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Interval {
    pub low: f64,
    pub high: f64,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ClipDifference {
    pub clip: String,
    pub difference: f64,
}

/// The answer, with all that it rests on.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Verdict {
    pub baseline: String,
    pub candidate: String,
    pub metric: String,
    pub decision: Decision,
    /// Points after step 0 that both arms have, and that were planned.
    pub points_done: usize,
    pub points_planned: usize,
    pub clips: usize,
    /// Episodes that the clips are of: the units of the bootstrap.
    pub episodes: usize,
    /// `None` before the first point after step 0.
    pub difference: Option<Difference>,
    pub step_zero: StepZero,
    pub trajectory: Vec<TrajectoryPoint>,
    /// What each arm's steps add up to, where that was looked at.
    pub work: Vec<ArmWork>,
    /// What a reader must know beside the number, a sentence each.
    pub notes: Vec<String>,
}

/// Judges both arms by the rule.
///
/// Only planned points that both arms have enter. For each clip the difference (candidate - baseline) of wrist LPIPS
/// is averaged over those after step 0; a bootstrap over the clips' episodes gives the interval.
///
/// # Errors
/// `decision_rule` for a rule that cannot decide; `clip_lists_differ` when two points, of either arm, were not measured on the
/// same clips.
pub fn judge(rule: &DecisionRule, plan: &Plan, baseline: &ArmPoints, candidate: &ArmPoints) -> Result<Verdict> {
    check_rule(rule)?;
    check_clip_lists(baseline, candidate)?;
    let shared: Vec<(u64, &Point, &Point)> = plan
        .steps
        .iter()
        .filter_map(|&step| Some((step, baseline.points.get(&step)?, candidate.points.get(&step)?)))
        .collect();
    let later: Vec<(&Point, &Point)> =
        shared.iter().filter(|(step, ..)| *step > 0).map(|&(_, baseline, candidate)| (baseline, candidate)).collect();
    let difference = paired_difference(rule, &later);
    let step_zero = compare_step_zero(baseline, candidate);
    let first = shared.first().map(|(_, point, _)| &point.clips);
    let clips = first.map_or(0, BTreeMap::len);
    let episodes = first.map_or(0, |clips| clips.keys().map(|clip| episode_of(clip)).collect::<BTreeSet<_>>().len());
    let points_planned = plan.steps.iter().filter(|&&step| step > 0).count();

    let mut notes = Vec::new();
    let decision = if shared.len() < plan.steps.len() || points_planned == 0 {
        if step_zero == StepZero::Missing && later.len() == points_planned {
            notes.push("step 0 was not measured in both arms: their equal start is not shown".into());
        }
        Decision::Pending
    } else if !plan.confounders.is_empty() {
        notes.push(
            "the runs differ in more or less than the ablated fields, so no difference can be laid to these".into(),
        );
        Decision::Undecided
    } else if episodes < bootstrap::fewest_episodes(rule.confidence) {
        let fewest = bootstrap::fewest_episodes(rule.confidence);
        let of = if episodes == 1 { "1 held-out episode is" } else { &format!("{episodes} held-out episodes are") };
        notes.push(format!("{of} too few to decide at this confidence; it takes {fewest}"));
        Decision::Undecided
    } else if plan.equal_start && !matches!(step_zero, StepZero::Equal { .. }) {
        notes.push("the arms were not equal at step 0, so no difference can be laid to the ablated fields".into());
        Decision::Undecided
    } else {
        decide(difference.as_ref())
    };
    if matches!(decision, Decision::Better | Decision::Worse) {
        notes.extend(secondary_notes(&later));
    }
    if difference.is_some() {
        notes.push(SCOPE.to_owned());
    }
    notes.extend(plan.confounders.iter().cloned());
    notes.extend(bad_line_note(baseline, candidate));

    Ok(Verdict {
        baseline: rule.baseline.clone(),
        candidate: rule.candidate.clone(),
        metric: rule.metric.clone(),
        decision,
        points_done: later.len(),
        points_planned,
        clips,
        episodes,
        difference,
        step_zero,
        trajectory: trajectory(plan, baseline, candidate),
        work: Vec::new(),
        notes,
    })
}

fn check_rule(rule: &DecisionRule) -> Result<()> {
    let refuse = |what: String, field: &str| Err(Error::refused("decision_rule", what).in_place(field));
    if rule.metric != DECISION_METRIC {
        return refuse(format!("`{}` cannot decide; only `{DECISION_METRIC}` does", rule.metric), "decision.metric");
    }
    if !(0.5..1.0).contains(&rule.confidence) {
        return refuse(format!("confidence is {}, not in [0.5, 1)", rule.confidence), "decision.confidence");
    }
    // A tail quantile of fewer than five resamples is noise.
    let fewest = (10.0 / (1.0 - rule.confidence)).ceil();
    if (rule.resamples as f64) < fewest {
        return refuse(
            format!("{} resamples are too few; take {fewest} or more", rule.resamples),
            "decision.resamples",
        );
    }
    if rule.baseline == rule.candidate {
        return refuse(format!("`{}` is both baseline and candidate", rule.baseline), "decision.candidate");
    }
    Ok(())
}

/// Every point of both arms must have the clips of the first.
fn check_clip_lists(baseline: &ArmPoints, candidate: &ArmPoints) -> Result<()> {
    let points = || [baseline, candidate].into_iter().flat_map(|arm| arm.points.iter().map(move |point| (arm, point)));
    let Some((first_arm, (first_step, first))) = points().next() else { return Ok(()) };
    for (arm, (step, point)) in points() {
        let only =
            |here: &Point, there: &Point| here.clips.keys().find(|clip| !there.clips.contains_key(*clip)).cloned();
        let (missing, extra) = (only(first, point), only(point, first));
        if missing.is_none() && extra.is_none() {
            continue;
        }
        let difference = match (&missing, &extra) {
            (Some(missing), Some(extra)) => format!("lacks {missing} and has {extra}"),
            (Some(missing), None) => format!("lacks {missing}"),
            (None, extra) => format!("has {} besides", extra.as_deref().unwrap_or_default()),
        };
        let counts = format!("{} clips against {}", point.clips.len(), first.clips.len());
        let what = format!(
            "validation points were measured on different clips: {} step {step} {difference} ({counts} in {} step {first_step})",
            arm.arm, first_arm.arm
        );
        let unreadable = point.bad_lines + first.bad_lines;
        let hint = match unreadable {
            0 => "compare only runs with one validation clip list".to_string(),
            lines => format!("{lines} unreadable lines in metrics.jsonl may be the reason"),
        };
        return Err(Error::refused("clip_lists_differ", what).hint(hint));
    }
    Ok(())
}

fn paired_difference(rule: &DecisionRule, later: &[(&Point, &Point)]) -> Option<Difference> {
    let mut sums: BTreeMap<&str, f64> = BTreeMap::new();
    for (baseline, candidate) in later {
        for (clip, metrics) in &baseline.clips {
            *sums.entry(clip).or_default() += candidate.clips.get(clip)?.wrist_lpips - metrics.wrist_lpips;
        }
    }
    let per_clip: Vec<ClipDifference> = sums
        .into_iter()
        .map(|(clip, sum)| ClipDifference { clip: clip.into(), difference: sum / later.len() as f64 })
        .collect();
    let clips = per_clip.iter().map(|clip| (episode_of(&clip.clip), clip.difference));
    let estimate = bootstrap::mean_interval(clips, rule.confidence, rule.resamples)?;
    let interval = estimate.interval.map(|(low, high)| Interval { low, high });
    let (confidence, resamples) = (rule.confidence, rule.resamples);
    Some(Difference { mean: estimate.mean, interval, confidence, resamples, per_clip })
}

/// `episode_000012@32` and `episode_000012_0_110#3` -> `episode_000012`, since segments of an episode resemble each other
/// as its clips do; a clip of another name is an episode of its own.
fn episode_of(clip: &str) -> &str {
    const NAME: &str = "episode_";
    let sample = clip.rsplit_once(['@', '#']).map_or(clip, |(sample, _)| sample);
    let Some(number) = sample.find(NAME).map(|at| at + NAME.len()) else { return sample };
    let digits = sample.bytes().skip(number).take_while(u8::is_ascii_digit).count();
    sample.split_at(number + digits).0
}

fn decide(difference: Option<&Difference>) -> Decision {
    match difference.and_then(|difference| difference.interval) {
        Some(interval) if interval.high < 0.0 => Decision::Better,
        Some(interval) if interval.low > 0.0 => Decision::Worse,
        _ => Decision::Undecided,
    }
}

/// Compares step 0 of both arms, every field of every clip, bit for bit.
pub fn compare_step_zero(baseline: &ArmPoints, candidate: &ArmPoints) -> StepZero {
    let (Some(baseline), Some(candidate)) = (baseline.points.get(&0), candidate.points.get(&0)) else {
        return StepZero::Missing;
    };
    for (clip, a) in &baseline.clips {
        let Some(b) = candidate.clips.get(clip) else { return StepZero::Missing };
        for ((field, a), (_, b)) in fields(a).into_iter().zip(fields(b)) {
            if a.to_bits() != b.to_bits() {
                return StepZero::Differs { clip: clip.clone(), field, baseline: a, candidate: b };
            }
        }
    }
    match (baseline.clips.len(), candidate.clips.len()) {
        (a, b) if a == b && a > 0 => StepZero::Equal { clips: a },
        _ => StepZero::Missing,
    }
}

/// Every number of a clip. Destructured, so that a new field cannot be forgotten in the comparison.
fn fields(metrics: &ClipMetrics) -> [(&'static str, f64); 9] {
    let ClipMetrics {
        clip: _,
        wrist_lpips,
        wrist_psnr,
        wrist_ssim,
        trans_l2_norm,
        trans_l2_m,
        rot_deg,
        ceiling_lpips,
        ceiling_psnr,
        wrist_latent_mse,
    } = *metrics;
    [
        ("wrist_lpips", wrist_lpips),
        ("wrist_psnr", wrist_psnr),
        ("wrist_ssim", wrist_ssim),
        ("trans_l2_norm", trans_l2_norm),
        ("trans_l2_m", trans_l2_m),
        ("rot_deg", rot_deg),
        ("ceiling_lpips", ceiling_lpips),
        ("ceiling_psnr", ceiling_psnr),
        ("wrist_latent_mse", wrist_latent_mse.unwrap_or(f64::NAN)),
    ]
}

fn trajectory(plan: &Plan, baseline: &ArmPoints, candidate: &ArmPoints) -> Vec<TrajectoryPoint> {
    let means = |arm: &ArmPoints, step| arm.points.get(&step).and_then(point_means);
    let rows = plan.steps.iter().map(|&step| TrajectoryPoint {
        step,
        baseline: means(baseline, step),
        candidate: means(candidate, step),
    });
    rows.filter(|row| row.baseline.is_some() || row.candidate.is_some()).collect()
}

fn point_means(point: &Point) -> Option<PointMeans> {
    let count = point.clips.len();
    let mean = |get: fn(&ClipMetrics) -> f64| point.clips.values().map(get).sum::<f64>() / count as f64;
    (count > 0).then(|| PointMeans {
        wrist_lpips: mean(|clip| clip.wrist_lpips),
        wrist_psnr: mean(|clip| clip.wrist_psnr),
        wrist_ssim: mean(|clip| clip.wrist_ssim),
        trans_l2_norm: mean(|clip| clip.trans_l2_norm),
        trans_l2_m: mean(|clip| clip.trans_l2_m),
        rot_deg: mean(|clip| clip.rot_deg),
        ceiling_lpips: mean(|clip| clip.ceiling_lpips),
        ceiling_psnr: mean(|clip| clip.ceiling_psnr),
    })
}

/// What the interval does not hold, said wherever it is shown.
pub const SCOPE: &str = "one run an arm was compared: the interval covers the clips, not other training seeds";

/// PSNR spread below which the arms are not told apart by it.
const PSNR_SPREAD_DB: f64 = 0.5;

/// Where PSNR or SSIM rank the arms the other way than LPIPS does, over the points after step 0.
fn secondary_notes(later: &[(&Point, &Point)]) -> Vec<String> {
    let gain = |get: fn(&PointMeans) -> f64| {
        let gains: Vec<f64> = later
            .iter()
            .filter_map(|(baseline, candidate)| Some(get(&point_means(candidate)?) - get(&point_means(baseline)?)))
            .collect();
        gains.iter().sum::<f64>() / gains.len().max(1) as f64
    };
    let lpips = gain(|means| means.wrist_lpips);
    let (psnr, ssim) = (gain(|means| means.wrist_psnr), gain(|means| means.wrist_ssim));
    // LPIPS falls as pictures get better, the other two rise. What is shown as 0 ranks nothing.
    let reverses = |gain: f64, shown: f64| gain.abs() >= shown && gain * lpips > 0.0;
    let mut notes = Vec::new();
    if reverses(psnr, 0.0005) {
        let weight = if psnr.abs() < PSNR_SPREAD_DB { ", too little to tell the arms apart" } else { "" };
        notes.push(format!(
            "wrist PSNR ranks the arms the other way ({psnr:+.3} dB{weight}); it is shown and does not decide"
        ));
    }
    if reverses(ssim, 0.000_05) {
        notes.push(format!("wrist SSIM ranks the arms the other way ({ssim:+.4}); it is shown and does not decide"));
    }
    notes
}

fn bad_line_note(baseline: &ArmPoints, candidate: &ArmPoints) -> Option<String> {
    let arms = [baseline, candidate].into_iter();
    let lines: usize = arms.flat_map(|arm| arm.points.values()).map(|point| point.bad_lines).sum();
    (lines > 0).then(|| format!("{lines} lines of metrics.jsonl could not be read and were left out"))
}

#[cfg(test)]
mod tests;
