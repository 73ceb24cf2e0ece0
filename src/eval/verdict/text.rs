//! The verdict as text: one line for a status bar, a table for a terminal.

use super::{ArmWork, Decision, Interval, PointMeans, StepZero, TrajectoryPoint, Verdict};

/// A column group of the trajectory: heading, digits after the point, and the value.
type Column = (&'static str, usize, fn(&PointMeans) -> f64);

/// In order of weight: a narrow terminal loses the last ones.
const COLUMNS: [Column; 5] = [
    ("LPIPS", 4, |means| means.wrist_lpips),
    ("PSNR dB", 2, |means| means.wrist_psnr),
    ("SSIM", 4, |means| means.wrist_ssim),
    ("trans m", 4, |means| means.trans_l2_m),
    ("rot deg", 2, |means| means.rot_deg),
];
/// Columns of the terminal that one value takes, its gap included.
const CELL: usize = 9;
const STEP: usize = 8;

impl Verdict {
    /// One line: `m2_geometry better (16 of 16 points, one run each): wrist LPIPS difference -0.0130 [-0.0210, -0.0040]`.
    pub fn headline(&self) -> String {
        let decision = match self.decision {
            Decision::Better => "better",
            Decision::Worse => "worse",
            Decision::Undecided => "undecided",
            Decision::Pending => "pending",
        };
        let points = format!("{} of {} points, one run each", self.points_done, self.points_planned);
        let difference = match &self.difference {
            None => "no difference measured yet".to_string(),
            Some(difference) => {
                let so_far = if self.decision == Decision::Pending { " so far" } else { "" };
                let interval = match difference.interval {
                    Some(Interval { low, high }) => format!("[{low:+.4}, {high:+.4}]"),
                    None => "without an interval".to_owned(),
                };
                format!("wrist LPIPS difference{so_far} {:+.4} {interval}", difference.mean)
            }
        };
        format!("{} {decision} ({points}): {difference}", self.candidate)
    }

    /// What was found at step 0, in one sentence.
    pub fn step_zero_line(&self) -> String {
        match &self.step_zero {
            StepZero::Equal { clips } => {
                format!("step 0: both arms equal in every digit of every metric ({clips} clips)")
            }
            StepZero::Differs { clip, field, baseline, candidate } => {
                format!("step 0: THE ARMS DIFFER, first in {field} of {clip}: {baseline} and {candidate}")
            }
            StepZero::Missing => "step 0: not measured in both arms yet".to_string(),
        }
    }

    /// The whole verdict for a terminal of `width` columns; lines are no longer than that if it is at least 30.
    pub fn render_text(&self, width: usize) -> String {
        let mut lines = wrap(&self.headline(), width);
        lines.extend(wrap(&self.step_zero_line(), width));
        if let Some(difference) = &self.difference {
            let interval = match difference.interval {
                Some(_) => {
                    format!(
                        "{} % interval from {} bootstrap resamples of the clips' {} episodes",
                        difference.confidence * 100.0,
                        difference.resamples,
                        self.episodes
                    )
                }
                None => "too few episodes for an interval".to_owned(),
            };
            let grounds = format!(
                "difference = {} - {}, lower is better: mean over {} clips of the mean over {} points after step 0; {interval}",
                self.candidate, self.baseline, self.clips, self.points_done
            );
            lines.extend(wrap(&grounds, width));
        }
        let falls = [
            self.fall_line(&self.baseline, |point| point.baseline),
            self.fall_line(&self.candidate, |point| point.candidate),
        ];
        lines.extend(falls.iter().flatten().flat_map(|line| wrap(line, width)));
        lines.extend(self.work.iter().filter_map(ArmWork::line).flat_map(|line| wrap(&line, width)));
        if !self.trajectory.is_empty() {
            lines.push(String::new());
            lines.extend(self.table(width));
            lines.extend(self.ceiling_line().iter().flat_map(|line| wrap(line, width)));
            lines.push(String::new());
            lines.extend(wrap(
                "Predicted frames of the wrist view. LPIPS decides; PSNR, SSIM and pose are shown and never decide.",
                width,
            ));
        }
        for note in &self.notes {
            lines.extend(wrap(&format!("note: {note}"), width));
        }
        lines.join("\n") + "\n"
    }

    /// A sign of life: how far the decision metric has come since step 0.
    fn fall_line(&self, arm: &str, get: fn(&TrajectoryPoint) -> Option<PointMeans>) -> Option<String> {
        let points: Vec<(u64, f64)> =
            self.trajectory.iter().filter_map(|point| Some((point.step, get(point)?.wrist_lpips))).collect();
        let (&(0, first), &(step, last)) = (points.first()?, points.last()?) else { return None };
        (step > 0 && first > 0.0).then(|| {
            let change = 100.0 * (last / first - 1.0);
            format!("{arm}: wrist LPIPS {first:.4} at step 0, {last:.4} at step {step} ({change:+.1} %)")
        })
    }

    /// What the codec alone loses on the same frames: no model over it can do better than this on average.
    fn ceiling_line(&self) -> Option<String> {
        let means = self.trajectory.iter().find_map(|point| point.baseline.or(point.candidate))?;
        (means.ceiling_lpips.is_finite() && means.ceiling_psnr.is_finite()).then(|| {
            format!(
                "codec's own ceiling on these frames: LPIPS {:.4}, PSNR {:.2} dB",
                means.ceiling_lpips, means.ceiling_psnr
            )
        })
    }

    /// Two lines of headings, then a line a point: both arms side by side under each metric.
    fn table(&self, width: usize) -> Vec<String> {
        let fitting = (width.saturating_sub(STEP) / (2 * CELL)).clamp(1, COLUMNS.len());
        let columns = COLUMNS.iter().take(fitting);
        let (baseline, candidate) = labels(&self.baseline, &self.candidate);
        let mut metrics = format!("{:>STEP$}", "");
        let mut arms = format!("{:>STEP$}", "step");
        for (heading, ..) in columns.clone() {
            metrics.push_str(&format!("{heading:>0$}", 2 * CELL));
            arms.push_str(&format!("{baseline:>CELL$}{candidate:>CELL$}"));
        }
        let mut lines = vec![metrics, arms];
        for point in &self.trajectory {
            let mut line = format!("{:>STEP$}", point.step);
            for (_, digits, get) in columns.clone() {
                for means in [&point.baseline, &point.candidate] {
                    let value = means.as_ref().map(get).filter(|value| value.is_finite());
                    let cell = value.map_or("-".into(), |value| format!("{value:.digits$}"));
                    line.push_str(&format!("{cell:>CELL$}"));
                }
            }
            lines.push(line);
        }
        lines
    }
}

/// Both arms' names at most a cell wide: as they are, or up to their first `_` or `-` if that tells them apart, or
/// their ends.
fn labels<'a>(a: &'a str, b: &'a str) -> (&'a str, &'a str) {
    let length = |name: &str| name.chars().count();
    let fits = |name: &str| length(name) < CELL;
    let head = |name: &'a str| name.split(['_', '-']).next().unwrap_or(name);
    let tail = |name: &'a str| {
        let cut = length(name).saturating_sub(CELL - 1);
        name.char_indices().nth(cut).map_or(name, |(start, _)| name.split_at(start).1)
    };
    match (head(a), head(b)) {
        _ if fits(a) && fits(b) => (a, b),
        (a, b) if a != b && fits(a) && fits(b) => (a, b),
        _ => (tail(a), tail(b)),
    }
}

/// Breaks at spaces; a word longer than the width stays whole.
fn wrap(text: &str, width: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split(' ') {
        match lines.last_mut() {
            Some(line) if line.chars().count() + 1 + word.chars().count() <= width => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_string()),
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arm_names_are_shortened_but_kept_apart() {
        assert_eq!(labels("m1", "m2"), ("m1", "m2"));
        assert_eq!(labels("m1_baseline", "m2_geometry"), ("m1", "m2"));
        assert_eq!(labels("geometry_off", "geometry_on"), ("etry_off", "metry_on"));
        assert_eq!(labels("ääääääääää", "b"), ("ääääääää", "b"));
    }

    #[test]
    fn wrapping_keeps_every_word() {
        let text = "one two three four-and-more five";
        assert_eq!(wrap(text, 10), ["one two", "three", "four-and-more", "five"]);
        assert_eq!(wrap(text, 200), [text]);
    }
}
