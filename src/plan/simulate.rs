//! Tries and hours to the last step, by playing the run many times with lifetimes from the curve.

use super::cost::{Costs, steps_an_attempt};
use super::lifetimes::Lifetime;
use super::survival::{Survival, waves};
use crate::random::{Draw, Purpose};

/// Runs that are played.
const RUNS: usize = 4000;
/// Tries after which a played run is given up: it would never end.
const HOPELESS: u32 = 1000;
/// Samples of the attempts for an interval.
const RESAMPLES: usize = 400;

/// How the played runs went.
#[derive(Clone, Debug, PartialEq)]
pub struct Simulation {
    pub tries_mean: f64,
    /// Wall time from submission to the last durable step, h: half, nine in ten, all but one in a hundred.
    pub wall_h: [f64; 3],
    /// Tries of each run, ascending.
    tries: Vec<u32>,
}

impl Simulation {
    /// Tries that so much of the runs did not exceed.
    pub fn tries(&self, share: f64) -> u32 {
        quantile(&self.tries, share).unwrap_or(0)
    }

    /// Share of the runs that were done within so many tries.
    pub fn done_within(&self, tries: u32) -> f64 {
        self.tries.partition_point(|it| *it <= tries) as f64 / self.tries.len().max(1) as f64
    }

    /// A limit for tries that all but one in a thousand runs keep, with half as many to spare.
    pub fn retry_limit(&self) -> u32 {
        (f64::from(self.tries(0.999)) * 1.5).ceil() as u32
    }
}

/// Plays the run at this save interval.
pub fn simulate(survival: &Survival, costs: &Costs, interval: u64, seed: u64) -> Simulation {
    let mut draw = Draw::new(seed, Purpose::Lifetime, interval, "runs");
    let mut played: Vec<(u32, f64)> = (0..RUNS).map(|_| play(survival, costs, interval, &mut draw)).collect();
    let tries_mean = played.iter().map(|(tries, _)| f64::from(*tries)).sum::<f64>() / RUNS as f64;
    played.sort_by(|left, right| left.1.total_cmp(&right.1));
    let hours: Vec<f64> = played.iter().map(|(_, seconds)| seconds / 3600.0).collect();
    let wall_h = [0.5, 0.9, 0.99].map(|share| quantile(&hours, share).unwrap_or(f64::NAN));
    let mut tries: Vec<u32> = played.into_iter().map(|(tries, _)| tries).collect();
    tries.sort_unstable();
    Simulation { tries_mean, wall_h, tries }
}

/// Tries and wall time in seconds of one run.
fn play(survival: &Survival, costs: &Costs, interval: u64, draw: &mut Draw) -> (u32, f64) {
    let (mut left, mut wall_s) = (costs.steps, 0.0);
    for tries in 1..=HOPELESS {
        wall_s += costs.wait_s;
        let lived_s = survival.draw(draw);
        let needed_s = costs.busy_s(interval, left);
        if lived_s >= needed_s {
            return (tries, wall_s + needed_s);
        }
        wall_s += lived_s;
        left = left.saturating_sub(costs.kept(interval, lived_s)).max(1);
    }
    (HOPELESS, f64::INFINITY)
}

/// 95 % interval of the expected tries: how far the attempts that were seen allow to say it. Preemptions of one minute
/// are drawn together.
pub fn tries_interval(lifetimes: &[Lifetime], costs: &Costs, interval: u64, seed: u64) -> Option<(f64, f64)> {
    let waves = waves(lifetimes);
    let mut draw = Draw::new(seed, Purpose::Lifetime, interval, "attempts");
    let mut tries: Vec<f64> = (0..RESAMPLES)
        .filter_map(|_| {
            let drawn = (0..waves.len()).filter_map(|_| waves.get(draw.below(waves.len())));
            let sample: Vec<Lifetime> = drawn.flatten().copied().collect();
            let survival = Survival::of(&sample).ok()?;
            Some((costs.steps as f64 / steps_an_attempt(&survival, costs, interval)).max(1.0))
        })
        .filter(|tries| tries.is_finite())
        .collect();
    tries.sort_by(f64::total_cmp);
    Some((quantile(&tries, 0.025)?, quantile(&tries, 0.975)?))
}

fn quantile<T: Copy>(sorted: &[T], share: f64) -> Option<T> {
    let rank = (share * sorted.len() as f64).ceil().max(1.0) as usize;
    sorted.get(rank - 1).copied()
}

#[cfg(test)]
mod tests {
    use super::super::cost::tests::{HOUR_S, M1, preempted_ones};
    use super::*;

    fn near(what: &str, found: f64, wanted: f64) {
        assert!((found / wanted - 1.0).abs() < 0.03, "{what}: {found} against {wanted}");
    }

    /// Attempts of a laboratory: 58, of which 37 were preempted; the others ended as those did, for another reason.
    fn laboratory() -> Vec<Lifetime> {
        let quantiles = |count: u32, preempted| {
            (0..count).map(move |index| {
                let share = (f64::from(index) + 0.5) / f64::from(count);
                let seconds = 2.04 * HOUR_S * (-(1.0 - share).ln()).powf(1.0 / 0.693);
                Lifetime { seconds, preempted, ended_s: None }
            })
        };
        quantiles(37, true).chain(quantiles(21, false)).collect()
    }

    #[test]
    fn the_laboratorys_tries_and_hours() {
        let table = [
            (100, 6.8, 14.5, 16.0),
            (200, 6.1, 12.8, 14.4),
            (300, 6.0, 12.4, 14.2),
            (400, 6.0, 12.3, 14.4),
            (500, 6.0, 12.2, 14.6),
            (1000, 6.3, 12.9, 16.9),
        ];
        for (interval, tries, half, nine_in_ten) in table {
            let played = simulate(&preempted_ones(), &M1, interval, 7);
            near("tries", played.tries_mean, tries);
            near("median", played.wall_h[0], half);
            near("p90", played.wall_h[1], nine_in_ten);
        }
        // 36 % are never preempted at all.
        let immortal = Survival::weibull(0.693, 2.04 * HOUR_S, 21.0 / 58.0);
        for (interval, tries, half) in [(100, 2.4, 13.1), (400, 2.3, 10.6), (1000, 2.3, 10.2)] {
            let played = simulate(&immortal, &M1, interval, 7);
            near("tries", played.tries_mean, tries);
            near("median", played.wall_h[0], half);
        }
        let beside = Costs { blocked_s: 5.0, ..M1 };
        near("beside, 100", simulate(&preempted_ones(), &beside, 100, 7).wall_h[0], 10.9);
        near("beside, 300", simulate(&preempted_ones(), &beside, 300, 7).wall_h[0], 11.2);
        let m2 = Costs { step_s: 5.6, blocked_s: 172.0, durable_s: 172.0, ..M1 };
        for (interval, half) in [(100, 18.8), (200, 17.1), (300, 16.8), (500, 17.0)] {
            near("second arm", simulate(&preempted_ones(), &m2, interval, 7).wall_h[0], half);
        }
    }

    #[test]
    fn the_laboratorys_retries_and_the_way_without_preemption() {
        let played = simulate(&preempted_ones(), &M1, 100, 7);
        // Five retries are six tries: a coin's toss. Thirty suffice.
        assert!((0.47..0.55).contains(&played.done_within(6)), "{}", played.done_within(6));
        assert!(played.done_within(31) > 0.999);
        assert!(played.retry_limit() >= played.tries(0.999));
        let own = simulate(&Survival::never(), &M1, 500, 7);
        assert_eq!((own.tries_mean, own.tries(0.5)), (1.0, 1));
        near("own", own.wall_h[0], 9.9 + 600.0 / 3600.0);
    }

    #[test]
    fn attempts_that_were_seen_give_the_curve_and_its_width() {
        let seen = laboratory();
        let survival = Survival::of(&seen).unwrap();
        near("median", survival.median_s().unwrap() / HOUR_S, 2.3);
        near("35 min", survival.at(35.0 * 60.0), 0.76);
        let (low, high) = survival.interval(35.0 * 60.0).unwrap();
        assert!((low - 0.62).abs() < 0.005 && (high - 0.85).abs() < 0.005, "{low} {high}");
        near("tries", simulate(&survival, &M1, 400, 7).tries_mean, 3.7);
        let (low, high) = tries_interval(&seen, &M1, 400, 7).unwrap();
        assert!(low < 3.7 && 3.7 < high && high < 8.0, "{low} {high}");
        assert_eq!(tries_interval(&seen, &M1, 400, 7), Some((low, high)), "the same seed says the same");
        assert_eq!(tries_interval(&[], &M1, 400, 7), None);
    }

    #[test]
    fn a_run_that_can_never_end_is_given_up() {
        let short = Survival::weibull(1.0, 1.0, 0.0);
        let played = simulate(&short, &M1, 100, 7);
        assert!(played.wall_h[0].is_infinite() && played.done_within(100) == 0.0);
    }
}
