//! What a save interval keeps of an attempt, and the interval that keeps most.

use super::survival::Survival;

/// The longest interval that is looked at, steps.
const LONGEST_INTERVAL: u64 = 3000;
/// An attempt that lives longer than this share of all is not worth counting on.
const NEGLIGIBLE: f64 = 1e-7;
/// Saves counted of one attempt: a curve that never falls must end too.
const MOST_SAVES: u64 = 100_000;

/// What was measured of a run, in seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Costs {
    /// A step without its share of saves.
    pub step_s: f64,
    /// How long training stands still for a save.
    pub blocked_s: f64,
    /// From the beginning of a save until it is durable; at least `blocked_s`.
    pub durable_s: f64,
    /// From the allocation to the first step.
    pub startup_s: f64,
    /// Wait in the queue before each attempt, the delay of a requeue included.
    pub wait_s: f64,
    /// Steps of the whole run, or those left.
    pub steps: u64,
}

impl Costs {
    /// When the `save`-th save of an attempt (from 1) is durable, s after the allocation.
    fn durable_at(&self, interval: u64, save: u64) -> f64 {
        let steps = (save * interval) as f64 * self.step_s;
        self.startup_s + steps + (save - 1) as f64 * self.blocked_s + self.durable_s
    }

    /// Share of the time that goes into saves at this interval, 0 to 1.
    pub fn save_share(&self, interval: u64) -> f64 {
        let steps = interval as f64 * self.step_s;
        self.blocked_s / (steps + self.blocked_s)
    }

    /// First durable save of an attempt, s after the allocation.
    pub fn first_durable_s(&self, interval: u64) -> f64 {
        self.durable_at(interval, 1)
    }

    /// Time that an attempt needs from its allocation to the last durable step, if `left` steps are to be done, s.
    pub fn busy_s(&self, interval: u64, left: u64) -> f64 {
        let saves = left.div_ceil(interval).max(1);
        self.startup_s + left as f64 * self.step_s + (saves - 1) as f64 * self.blocked_s + self.durable_s
    }

    /// Steps that an attempt of `lived_s` has made durable.
    pub fn kept(&self, interval: u64, lived_s: f64) -> u64 {
        let after_first = lived_s - self.first_durable_s(interval);
        if after_first < 0.0 {
            return 0;
        }
        let period = interval as f64 * self.step_s + self.blocked_s;
        // An attempt that is never preempted keeps everything.
        let saves = 1.0 + (after_first / period).floor();
        if saves >= u64::MAX as f64 / interval as f64 { u64::MAX } else { saves as u64 * interval }
    }
}

/// Expected durable steps of an attempt, `k * sum over j of S(tau_j)`: tau_j is when the j-th save is durable.
pub fn steps_an_attempt(survival: &Survival, costs: &Costs, interval: u64) -> f64 {
    let mut sum = 0.0;
    for save in 1..=MOST_SAVES {
        let alive = survival.at(costs.durable_at(interval, save));
        // The run has only so many steps: more cannot be kept.
        if alive < NEGLIGIBLE || (save - 1) * interval > costs.steps.saturating_mul(4) {
            break;
        }
        sum += alive;
    }
    interval as f64 * sum
}

/// The interval that keeps most, and the range around it that keeps at least 95 % as much. Saves must not overtake each
/// other, and `longest_s` bounds what an attempt may lose if the curve is wrong.
pub fn best_interval(survival: &Survival, costs: &Costs, longest_s: f64) -> (u64, (u64, u64)) {
    let least = ((costs.durable_s - costs.blocked_s) / costs.step_s).ceil().max(1.0) as u64;
    let most =
        ((longest_s / costs.step_s) as u64).clamp(least, LONGEST_INTERVAL.max(least)).min(costs.steps.max(least));
    // Coarse steps where intervals are long: the optimum is flat.
    let mut kept: Vec<(u64, f64)> = Vec::new();
    let mut interval = least;
    while interval <= most {
        kept.push((interval, steps_an_attempt(survival, costs, interval)));
        interval += (interval / 100).max(1);
    }
    let best = kept.iter().fold((least, f64::NEG_INFINITY), |best, it| if it.1 > best.1 { *it } else { best });
    let good = || kept.iter().filter(|(_, steps)| *steps >= 0.95 * best.1).map(|(interval, _)| *interval);
    (best.0, (good().min().unwrap_or(best.0), good().max().unwrap_or(best.0)))
}

/// Young's interval in seconds (CACM 17(9), 1974) for a mean time between preemptions.
pub fn young(costs: &Costs, mean_s: f64) -> f64 {
    (2.0 * costs.blocked_s * mean_s).sqrt()
}

/// Daly's (Future Gener. Comput. Syst. 22, 2006), which still holds when saves are not short against the mean.
pub fn daly(costs: &Costs, mean_s: f64) -> f64 {
    if costs.blocked_s >= 2.0 * mean_s {
        return mean_s;
    }
    let x = costs.blocked_s / (2.0 * mean_s);
    young(costs, mean_s) * (1.0 + x.sqrt() / 3.0 + x / 9.0) - costs.blocked_s
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A laboratory's first arm: 4.1 s a step, 8000 steps, a save of 45 GB that blocks for 155 s.
    pub const M1: Costs =
        Costs { step_s: 4.1, blocked_s: 155.0, durable_s: 155.0, startup_s: 300.0, wait_s: 600.0, steps: 8000 };
    pub const HOUR_S: f64 = 3600.0;

    /// The curve that fits the 37 preempted attempts of that laboratory.
    pub fn preempted_ones() -> Survival {
        Survival::weibull(0.693, 2.04 * HOUR_S, 0.0)
    }

    #[test]
    fn the_laboratorys_intervals() {
        let survival = preempted_ones();
        let published =
            [(50, 1240.0), (100, 1564.0), (200, 1778.0), (300, 1841.0), (400, 1858.0), (500, 1855.0), (700, 1822.0)];
        for (interval, wanted) in published {
            let kept = steps_an_attempt(&survival, &M1, interval);
            assert!((kept / wanted - 1.0).abs() < 0.03, "{interval}: {kept} against {wanted}");
        }
        let (best, (from, to)) = best_interval(&survival, &M1, 3.0 * HOUR_S);
        assert!((400..=455).contains(&best), "{best}");
        assert!(from <= 200 && to >= 700, "flat from {from} to {to}");
        // Saving every 100 steps is too often while a save blocks for 155 s ...
        assert!(steps_an_attempt(&survival, &M1, 100) < 0.95 * steps_an_attempt(&survival, &M1, best));
        // ... and costs 27 % of the time. When it blocks for 9 s, it is right.
        assert!((M1.save_share(100) - 0.274).abs() < 0.001);
        let cheap = Costs { blocked_s: 9.0, durable_s: 9.0, ..M1 };
        let (best, _) = best_interval(&survival, &cheap, HOUR_S);
        assert!((85..=125).contains(&best), "{best}");
    }

    #[test]
    fn young_and_daly() {
        for (mean_h, wanted_young, wanted_daly) in [(2.6, 415.0, 390.0), (1.73, 339.0, 314.0)] {
            let near = |seconds: f64, steps: f64| (seconds / M1.step_s - steps).abs() < 1.0;
            assert!(near(young(&M1, mean_h * HOUR_S), wanted_young), "{mean_h}");
            assert!(near(daly(&M1, mean_h * HOUR_S), wanted_daly), "{mean_h}");
        }
        assert_eq!(daly(&M1, 50.0), 50.0);
        // For a constant rate the curve's own optimum is Daly's.
        for mean in [HOUR_S, 4.0 * HOUR_S] {
            let costs = Costs { startup_s: 0.0, ..M1 };
            let (best, _) = best_interval(&Survival::weibull(1.0, mean, 0.0), &costs, 3.0 * HOUR_S);
            let daly = daly(&costs, mean) / costs.step_s;
            assert!((best as f64 / daly - 1.0).abs() < 0.05, "{best} against {daly}");
        }
    }

    #[test]
    fn what_an_attempt_keeps() {
        assert_eq!(M1.first_durable_s(100), 300.0 + 410.0 + 155.0);
        assert_eq!([864.0, 865.0, 1429.0, 1430.0].map(|lived| M1.kept(100, lived)), [0, 100, 100, 200]);
        assert_eq!(M1.kept(100, f64::INFINITY), u64::MAX);
        assert_eq!(M1.busy_s(500, 8000), 300.0 + 8000.0 * 4.1 + 16.0 * 155.0);
        // A save that is written beside training must be durable before the next begins.
        let beside = Costs { blocked_s: 5.0, ..M1 };
        assert!(best_interval(&preempted_ones(), &beside, HOUR_S).0 >= 37);
    }
}
