//! How many attempts live longer than t.
//!
//! Kaplan and Meier's estimate (J. Am. Stat. Assoc. 53, 1958): attempts that ended for another reason than preemption say
//! only that they lived at least so long. The width is Greenwood's, on log(-log S), which stays between 0 and 1.

use super::lifetimes::Lifetime;
use crate::random::Draw;
use crate::{Error, Result};

/// Fewer preemptions than this say little.
const FEW: usize = 10;
/// Two-sided 95 %.
const Z: f64 = 1.959_964;
/// Preemptions in the same minute are one decision of the scheduler.
const WAVE_S: u64 = 60;

/// A survival curve over seconds since the allocation.
#[derive(Clone, Debug, PartialEq)]
pub struct Survival {
    shape: Shape,
    /// Preemptions, and attempts in all; 0 of a curve that was not estimated.
    pub events: usize,
    pub attempts: usize,
}

#[derive(Clone, Debug, PartialEq)]
enum Shape {
    /// Steps (time, S, Greenwood's sum) by time, and beyond `last_s` an exponential tail.
    Estimated {
        steps: Vec<(f64, f64, f64)>,
        last_s: f64,
        tail_per_s: f64,
    },
    Weibull {
        shape: f64,
        scale_s: f64,
        immortal: f64,
    },
    Never,
}

impl Survival {
    /// Estimates the curve.
    ///
    /// # Errors
    /// `no_attempts` (exit 65) if there is none.
    pub fn of(lifetimes: &[Lifetime]) -> Result<Self> {
        let mut sorted: Vec<&Lifetime> =
            lifetimes.iter().filter(|it| it.seconds.is_finite() && it.seconds > 0.0).collect();
        if sorted.is_empty() {
            return Err(Error::data("no_attempts", "there is no attempt to learn from")
                .hint("look at more days, or another partition"));
        }
        sorted.sort_by(|left, right| left.seconds.total_cmp(&right.seconds));
        let events = sorted.iter().filter(|it| it.preempted).count();
        let exposure_s: f64 = sorted.iter().map(|it| it.seconds).sum();
        let (mut survival, mut variance, mut steps) = (1.0, 0.0, Vec::new());
        let mut at = 0;
        while let Some(first) = sorted.get(at) {
            let same = sorted.iter().skip(at).take_while(|it| it.seconds <= first.seconds);
            let (tied, died) = same.fold((0, 0), |(tied, died), it| (tied + 1, died + usize::from(it.preempted)));
            let at_risk = (sorted.len() - at) as f64;
            if died > 0 {
                let died = died as f64;
                survival *= 1.0 - died / at_risk;
                variance += died / (at_risk * (at_risk - died));
                steps.push((first.seconds, survival, variance));
            }
            at += tied;
        }
        // Few data: one more preemption in one more hour, so that none seen is not none to come.
        let tail_per_s = match events < FEW {
            true => (events as f64 + 1.0) / (exposure_s + 3600.0),
            false => events as f64 / exposure_s,
        };
        let last_s = sorted.last().map_or(0.0, |it| it.seconds);
        let shape = Shape::Estimated { steps, last_s, tail_per_s };
        Ok(Self { shape, events, attempts: sorted.len() })
    }

    /// Weibull's curve, `exp(-(t/scale)^shape)`, for the share of attempts that is mortal at all.
    pub fn weibull(shape: f64, scale_s: f64, immortal: f64) -> Self {
        Self { shape: Shape::Weibull { shape, scale_s, immortal }, events: 0, attempts: 0 }
    }

    /// Nothing is ever preempted.
    pub fn never() -> Self {
        Self { shape: Shape::Never, events: 0, attempts: 0 }
    }

    /// Are there too few preemptions to trust the curve?
    pub fn is_sparse(&self) -> bool {
        self.attempts > 0 && self.events < FEW
    }

    /// Share of attempts that live longer than `seconds`.
    pub fn at(&self, seconds: f64) -> f64 {
        match &self.shape {
            Shape::Never => 1.0,
            Shape::Weibull { shape, scale_s, immortal } => {
                immortal + (1.0 - immortal) * (-(seconds.max(0.0) / scale_s).powf(*shape)).exp()
            }
            Shape::Estimated { steps, last_s, tail_per_s } => {
                let passed = steps.partition_point(|(time, ..)| *time <= seconds);
                let survival = passed.checked_sub(1).and_then(|index| steps.get(index)).map_or(1.0, |(_, s, _)| *s);
                survival * (-tail_per_s * (seconds - last_s).max(0.0)).exp()
            }
        }
    }

    /// The 95 % interval of [`at`](Self::at); `None` of a curve that was not estimated, and where nothing died yet.
    pub fn interval(&self, seconds: f64) -> Option<(f64, f64)> {
        let Shape::Estimated { steps, .. } = &self.shape else { return None };
        let passed = steps.partition_point(|(time, ..)| *time <= seconds);
        let (_, survival, variance) = *steps.get(passed.checked_sub(1)?)?;
        if survival <= 0.0 || !variance.is_finite() {
            return None;
        }
        let theta = Z * variance.sqrt() / survival.ln().abs();
        Some((survival.powf(theta.exp()), survival.powf((-theta).exp())))
    }

    /// Time that half of the attempts outlive; `None` if more than half outlive everything that was seen.
    pub fn median_s(&self) -> Option<f64> {
        match &self.shape {
            Shape::Estimated { steps, .. } => steps.iter().find(|(_, s, _)| *s <= 0.5).map(|(time, ..)| *time),
            Shape::Weibull { .. } => Some(self.outlived_by(0.5)).filter(|time| time.is_finite()),
            Shape::Never => None,
        }
    }

    /// Mean time until preemption with censoring, exposure over events, s; `None` without a preemption.
    pub fn mean_s(lifetimes: &[Lifetime]) -> Option<f64> {
        let events = lifetimes.iter().filter(|it| it.preempted).count();
        let exposure: f64 = lifetimes.iter().map(|it| it.seconds).sum();
        (events > 0).then(|| exposure / events as f64)
    }

    /// A lifetime drawn from the curve, s.
    pub fn draw(&self, draw: &mut Draw) -> f64 {
        // 1 - u is in (0, 1]: the share that outlives it.
        self.outlived_by(1.0 - draw.uniform())
    }

    /// The time at which the curve falls to `share`; infinite if it never does.
    fn outlived_by(&self, share: f64) -> f64 {
        match &self.shape {
            Shape::Never => f64::INFINITY,
            Shape::Weibull { immortal, .. } if share <= *immortal => f64::INFINITY,
            Shape::Weibull { shape, scale_s, immortal } => {
                scale_s * (-((share - immortal) / (1.0 - immortal)).ln()).powf(1.0 / shape)
            }
            Shape::Estimated { steps, last_s, tail_per_s } => {
                let found = steps.partition_point(|(_, s, _)| *s > share);
                match (steps.get(found), steps.last()) {
                    (Some((time, ..)), _) => *time,
                    (None, last) => {
                        let survival = last.map_or(1.0, |(_, s, _)| *s);
                        last_s + (survival / share).ln() / tail_per_s
                    }
                }
            }
        }
    }
}

/// Preemptions in one minute count once: they were one decision. For the width of an interval, not for the curve.
pub(super) fn waves(lifetimes: &[Lifetime]) -> Vec<Vec<Lifetime>> {
    let mut waves: Vec<(Option<u64>, Vec<Lifetime>)> = Vec::new();
    for lifetime in lifetimes {
        let wave = lifetime.ended_s.filter(|_| lifetime.preempted).map(|ended| ended / WAVE_S);
        match waves.iter_mut().find(|(known, _)| wave.is_some() && *known == wave) {
            Some((_, members)) => members.push(*lifetime),
            None => waves.push((wave, vec![*lifetime])),
        }
    }
    waves.into_iter().map(|(_, members)| members).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::Purpose;

    fn lived(seconds: f64, preempted: bool) -> Lifetime {
        Lifetime { seconds, preempted, ended_s: None }
    }

    #[test]
    fn the_textbook_example_of_kaplan_and_meier() {
        // Deaths at 1, 3, 4, 10; lost at 2, 5, 6, 9 (of eight at the start).
        let data = [
            (1.0, true),
            (2.0, false),
            (3.0, true),
            (4.0, true),
            (5.0, false),
            (6.0, false),
            (9.0, false),
            (10.0, true),
        ];
        let survival = Survival::of(&data.map(|(at, died)| lived(at, died))).unwrap();
        let expected =
            [(0.5, 1.0), (1.0, 7.0 / 8.0), (3.0, 7.0 / 8.0 * 5.0 / 6.0), (4.0, 7.0 / 8.0 * 5.0 / 6.0 * 4.0 / 5.0)];
        for (at, wanted) in expected {
            assert!((survival.at(at) - wanted).abs() < 1e-12, "{at}");
        }
        assert_eq!(survival.at(10.0), 0.0);
        assert!(survival.is_sparse());
        // Greenwood at 3: S^2 (1/(8*7) + 1/(6*5)), on log(-log S).
        let s: f64 = 7.0 / 8.0 * 5.0 / 6.0;
        let theta = Z * (1.0_f64 / 56.0 + 1.0 / 30.0).sqrt() / s.ln().abs();
        let (low, high) = survival.interval(3.0).unwrap();
        assert!((low - s.powf(theta.exp())).abs() < 1e-12 && (high - s.powf((-theta).exp())).abs() < 1e-12);
        assert_eq!(survival.interval(0.5), None);
    }

    #[test]
    fn beyond_what_was_seen_the_whole_rate_goes_on() {
        let data: Vec<Lifetime> = (0..40).map(|index| lived(100.0 + f64::from(index), index % 2 == 0)).collect();
        let survival = Survival::of(&data).unwrap();
        let rate = 20.0 / data.iter().map(|it| it.seconds).sum::<f64>();
        let end = survival.at(139.0);
        assert!((survival.at(639.0) - end * (-rate * 500.0).exp()).abs() < 1e-12);
        let never_seen = Survival::of(&[lived(7200.0, false)]).unwrap();
        assert!((never_seen.at(7200.0 + 10_800.0) - (-1.0_f64).exp()).abs() < 1e-9, "one in three hours at the most");
        assert_eq!(Survival::of(&[]).expect_err("nothing").code, "no_attempts");
        assert_eq!(Survival::of(&[lived(f64::NAN, true), lived(0.0, true)]).expect_err("nothing").code, "no_attempts");
    }

    #[test]
    fn draws_follow_the_curve() {
        let curve = Survival::weibull(0.693, 7344.0, 0.25);
        let mut draw = Draw::new(1, Purpose::Lifetime, 0, "test");
        let drawn: Vec<f64> = (0..20_000).map(|_| curve.draw(&mut draw)).collect();
        for at in [600.0, 3600.0, 36_000.0] {
            let share = drawn.iter().filter(|time| **time > at).count() as f64 / 20_000.0;
            assert!((share - curve.at(at)).abs() < 0.012, "{at}: {share} against {}", curve.at(at));
        }
        let estimated = Survival::of(&[lived(10.0, true), lived(20.0, true), lived(30.0, false)]).unwrap();
        assert_eq!([0.9, 0.6, 0.5].map(|share| estimated.outlived_by(share)), [10.0, 20.0, 20.0]);
        assert!(estimated.outlived_by(0.1) > 30.0);
    }

    #[test]
    fn preemptions_of_one_minute_are_one_wave() {
        let at = |ended_s, preempted| Lifetime { seconds: 5.0, preempted, ended_s: Some(ended_s) };
        let found =
            waves(&[at(60, true), at(119, true), at(120, true), at(60, false), lived(5.0, true), lived(5.0, true)]);
        assert_eq!(found.iter().map(Vec::len).collect::<Vec<_>>(), [2, 1, 1, 1, 1]);
    }
}
