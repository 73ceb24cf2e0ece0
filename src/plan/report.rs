//! A plan in figures and in lines: the same on the command line and in the console.

use super::cost::{Costs, best_interval, daly, steps_an_attempt, young};
use super::lifetimes::Lifetime;
use super::simulate::{Simulation, simulate, tries_interval};
use super::survival::Survival;
use crate::words::{duration, thousands};
use crate::{Error, Result};
use serde::Serialize;

/// No attempt should be able to lose more than this, whatever the curve says, s.
const MOST_LOST_S: f64 = 3600.0;
/// A change of the interval must gain so much to be worth it.
const WORTH: f64 = 1.03;
/// Always shown, beside the present and the best interval.
const INTERVALS: [u64; 5] = [100, 200, 300, 500, 1000];
/// Where the curve is read out, s.
const READ_OUT_S: f64 = 35.0 * 60.0;
const CHART: (usize, usize) = (60, 9);

/// What a save interval leads to.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    pub save_every: u64,
    pub first_durable_s: f64,
    /// Share of the attempts that leave no checkpoint.
    pub leaves_nothing: f64,
    pub steps_an_attempt: f64,
    /// Share of the time that goes into saves.
    pub save_share: f64,
    pub tries_mean: f64,
    pub tries_p90: u32,
    pub hours_p50: f64,
    pub hours_p90: f64,
}

/// A whole plan.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Plan {
    pub attempts: usize,
    pub preempted: usize,
    pub median_s: Option<f64>,
    /// At 35 minutes: the share that lives, and its 95 % interval.
    pub alive_at_35_min: (f64, Option<(f64, f64)>),
    pub rows: Vec<Row>,
    pub best: u64,
    /// Intervals that keep at least 95 % as much.
    pub good: (u64, u64),
    /// The present one where a change would gain less than 3 %, else the shortest of which that can be said.
    pub recommended: u64,
    pub young: Option<f64>,
    pub daly: Option<f64>,
    /// Of the expected tries at the recommended interval, 95 %.
    pub tries_interval: Option<(f64, f64)>,
    pub retry_limit: u32,
    pub done_within_retry_limit: f64,
    /// Median hours at the recommended interval, and on machines that nobody takes away.
    pub hours: f64,
    pub hours_without_preemption: f64,
    #[serde(skip)]
    costs: Costs,
    #[serde(skip)]
    curve: Vec<f64>,
    #[serde(skip)]
    span_s: f64,
}

impl Plan {
    /// Plans a run of `costs` on machines that let attempts live like `lifetimes`; `present` is its save interval.
    ///
    /// # Errors
    /// `no_attempts`, or `bad_value` (exit 2) if a cost is no cost.
    pub fn make(lifetimes: &[Lifetime], costs: Costs, present: Option<u64>, seed: u64) -> Result<Self> {
        let Costs { step_s, blocked_s, durable_s, startup_s, wait_s, steps } = costs;
        let finite = [step_s, blocked_s, durable_s, startup_s, wait_s].iter().all(|it| it.is_finite() && *it >= 0.0);
        if !finite || step_s <= 0.0 || steps == 0 || durable_s < blocked_s {
            let what = "steps and the time of a step must be more than 0, and a save durable no sooner than it lets go";
            return Err(Error::usage("bad_value", what));
        }
        let survival = Survival::of(lifetimes)?;
        let (best, good) = best_interval(&survival, &costs, MOST_LOST_S);
        let kept = |interval| steps_an_attempt(&survival, &costs, interval);
        let enough = |interval: &u64| kept(*interval) * WORTH >= kept(best);
        // A shorter interval leaves something sooner, whatever the curve says of the rest.
        let recommended = present.filter(enough).or_else(|| (good.0..best).find(enough)).unwrap_or(best);
        let mut intervals: Vec<u64> = INTERVALS.into_iter().chain([best, recommended]).chain(present).collect();
        intervals.retain(|interval| *interval <= steps);
        intervals.sort_unstable();
        intervals.dedup();
        let row = |save_every: u64| {
            let played = simulate(&survival, &costs, save_every, seed);
            Row {
                save_every,
                first_durable_s: costs.first_durable_s(save_every),
                leaves_nothing: 1.0 - survival.at(costs.first_durable_s(save_every)),
                steps_an_attempt: kept(save_every),
                save_share: costs.save_share(save_every),
                tries_mean: played.tries_mean,
                tries_p90: played.tries(0.9),
                hours_p50: played.wall_h[0],
                hours_p90: played.wall_h[1],
            }
        };
        let played: Simulation = simulate(&survival, &costs, recommended, seed);
        let retry_limit = played.retry_limit();
        let mean_s = Survival::mean_s(lifetimes);
        let span_s = lifetimes.iter().map(|it| it.seconds).fold(0.0, f64::max);
        let curve = (0..CHART.0).map(|x| survival.at(span_s * x as f64 / (CHART.0 - 1) as f64)).collect();
        Ok(Self {
            attempts: survival.attempts,
            preempted: survival.events,
            median_s: survival.median_s(),
            alive_at_35_min: (survival.at(READ_OUT_S), survival.interval(READ_OUT_S)),
            rows: intervals.into_iter().map(row).collect(),
            best,
            good,
            recommended,
            young: mean_s.map(|mean_s| young(&costs, mean_s) / step_s),
            daly: mean_s.map(|mean_s| daly(&costs, mean_s) / step_s),
            tries_interval: tries_interval(lifetimes, &costs, recommended, seed),
            done_within_retry_limit: played.done_within(retry_limit),
            retry_limit,
            hours: played.wall_h[0],
            hours_without_preemption: simulate(&Survival::never(), &costs, recommended, seed).wall_h[0],
            costs,
            curve,
            span_s,
        })
    }

    /// For people.
    pub fn lines(&self) -> Vec<String> {
        let Costs { step_s, blocked_s, durable_s, startup_s, wait_s, steps } = self.costs;
        let mut lines = vec![format!(
            "{} steps of {step_s:.2} s; a save blocks {blocked_s:.1} s and is durable after {durable_s:.1} s; {startup_s:.0} s \
             to the first step; {wait_s:.0} s in the queue",
            thousands(steps)
        )];
        let (alive, interval) = self.alive_at_35_min;
        let interval = interval.map(|(low, high)| format!(" [{low:.2}, {high:.2}]")).unwrap_or_default();
        let median = self.median_s.map_or("beyond what was seen".to_owned(), |seconds| hours(seconds / 3600.0));
        lines.push(format!(
            "{} attempts, {} preempted{}; half outlive {median}; alive after 35 min: {alive:.2}{interval}",
            self.attempts,
            self.preempted,
            if self.preempted < 10 { " (few data)" } else { "" },
        ));
        lines.push(String::new());
        lines.extend(self.chart());
        lines.push(String::new());
        lines.push(
            "save every  first durable  leaves nothing  steps kept  saves cost   tries (p90)  hours p50    p90"
                .to_owned(),
        );
        for row in &self.rows {
            let mark = if row.save_every == self.recommended { " <" } else { "" };
            lines.push(format!(
                "{:>10}  {:>13}  {:>12.0} %  {:>10.0}  {:>8.1} %  {:>6.1} ({:>4})  {:>9.1}  {:>5.1}{mark}",
                row.save_every,
                duration((row.first_durable_s * 1e3) as u64),
                row.leaves_nothing * 100.0,
                row.steps_an_attempt,
                row.save_share * 100.0,
                row.tries_mean,
                row.tries_p90,
                row.hours_p50,
                row.hours_p90,
            ));
        }
        lines.push(String::new());
        let reference = match (self.young, self.daly) {
            (Some(young), Some(daly)) => format!("; for a constant rate Young says {young:.0}, Daly {daly:.0}"),
            _ => String::new(),
        };
        lines.push(format!(
            "save every {} steps: within 3 % of what {} keeps, which is most; {} to {} keep at least 95 % of it{reference}",
            self.recommended, self.best, self.good.0, self.good.1
        ));
        let interval = self.tries_interval.map(|(low, high)| format!(", expected tries {low:.1} to {high:.1} (95 %)"));
        lines.push(format!(
            "retries: allow {} (done within them in {:.1} % of the runs{})",
            self.retry_limit,
            self.done_within_retry_limit * 100.0,
            interval.unwrap_or_default()
        ));
        let worth = self.hours - self.hours_without_preemption;
        lines.push(format!(
            "without preemption {} instead of {}: worth a wait of up to {}",
            hours(self.hours_without_preemption),
            hours(self.hours),
            hours(worth.max(0.0))
        ));
        lines
    }

    /// The survival curve: share of attempts alive over hours.
    fn chart(&self) -> Vec<String> {
        let rows = CHART.1;
        let height = |alive: f64| ((alive * (rows - 1) as f64).round() as usize).min(rows - 1);
        let mut lines: Vec<String> = (0..rows)
            .rev()
            .map(|row| {
                let label = if row == rows - 1 {
                    "100 %"
                } else if row == 0 {
                    "  0 %"
                } else {
                    "     "
                };
                let cells: String =
                    self.curve.iter().map(|alive| if height(*alive) == row { '*' } else { ' ' }).collect();
                format!("{label} |{}", cells.trim_end())
            })
            .collect();
        lines.push(format!("      +{}", "-".repeat(CHART.0)));
        let end = hours(self.span_s / 3600.0);
        lines.push(format!("       0{}{end}", " ".repeat(CHART.0.saturating_sub(1 + end.len()))));
        lines
    }
}

fn hours(hours: f64) -> String {
    if hours.is_finite() { format!("{hours:.1} h") } else { "no end".to_owned() }
}

#[cfg(test)]
mod tests {
    use super::super::cost::tests::M1;
    use super::*;

    fn seen() -> Vec<Lifetime> {
        (1..=40)
            .map(|index| Lifetime {
                seconds: f64::from(index * index) * 20.0,
                preempted: index % 3 != 0,
                ended_s: None,
            })
            .collect()
    }

    #[test]
    fn a_plan_says_what_it_rests_on_and_keeps_an_interval_that_is_good_enough() {
        let plan = Plan::make(&seen(), M1, Some(100), 1).unwrap();
        let text = plan.lines().join("\n");
        assert!(text.contains("40 attempts, 27 preempted; half outlive"), "{text}");
        assert!(text.contains("8,000 steps of 4.10 s; a save blocks 155.0 s"), "{text}");
        assert_ne!(plan.recommended, 100, "saves cost too much there");
        let near = plan.good.0.midpoint(plan.best);
        let kept = Plan::make(&seen(), M1, Some(plan.best + 10), 1).unwrap();
        assert_eq!(kept.recommended, plan.best + 10, "no change for so little ({near})");
        assert!(plan.rows.iter().any(|row| row.save_every == 100));
        assert!(plan.hours > plan.hours_without_preemption);
    }

    #[test]
    fn a_flat_optimum_is_taken_from_its_short_side() {
        let plan = Plan::make(&seen(), M1, None, 1).unwrap();
        let survival = Survival::of(&seen()).unwrap();
        let kept = |interval| steps_an_attempt(&survival, &M1, interval);
        assert!(plan.recommended <= plan.best && kept(plan.recommended) * WORTH >= kept(plan.best));
        assert!((plan.good.0..plan.recommended).all(|shorter| kept(shorter) * WORTH < kept(plan.best)));
    }

    #[test]
    fn costs_that_are_none_are_refused() {
        for costs in [
            Costs { step_s: 0.0, ..M1 },
            Costs { steps: 0, ..M1 },
            Costs { durable_s: 1.0, ..M1 },
            Costs { wait_s: f64::NAN, ..M1 },
            Costs { startup_s: -1.0, ..M1 },
        ] {
            assert_eq!(Plan::make(&seen(), costs, None, 1).expect_err("no cost").code, "bad_value");
        }
        assert_eq!(Plan::make(&[], M1, None, 1).expect_err("nothing").code, "no_attempts");
    }
}
