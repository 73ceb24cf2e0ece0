//! When the queue is looked at again: rarely, since every look is a load on a controller that all users share.

use std::time::{Duration, Instant};

/// In steady state.
const STEADY: Duration = Duration::from_secs(60);
/// Nobody may ask for automatic looks more often than this.
const FLOOR: Duration = Duration::from_secs(30);
/// While a job is young, or somebody has just done something to it ...
const YOUNG: Duration = Duration::from_secs(15);
/// ... which lasts this long.
const YOUTH: Duration = Duration::from_secs(120);
/// After errors the wait doubles up to this.
const LONGEST: Duration = Duration::from_secs(600);
/// Two looks are never closer, whatever is pressed.
const CLOSEST: Duration = Duration::from_secs(10);

/// The pace of one program's looks.
#[derive(Clone, Debug)]
pub struct Pace {
    steady: Duration,
    young_until: Option<Instant>,
    last: Option<Instant>,
    errors: u32,
    /// Somebody wants to see it now.
    asked: bool,
    /// Some job of ours is not over.
    alive: bool,
}

impl Pace {
    /// `seconds` between looks, at least 30; 60 without it.
    pub fn new(seconds: Option<u64>) -> Self {
        let steady = seconds.map_or(STEADY, |seconds| Duration::from_secs(seconds).max(FLOOR));
        Self { steady, young_until: None, last: None, errors: 0, asked: false, alive: true }
    }

    /// Something was submitted, signalled or asked for: look soon, and closely for a while.
    pub fn stir(&mut self, now: Instant) {
        self.young_until = Some(now + YOUTH);
        self.asked = true;
        self.alive = true;
    }

    /// Time until the next look; `None` when there is nothing left to look for.
    pub fn wait(&self, now: Instant) -> Option<Duration> {
        let Some(last) = self.last else { return Some(Duration::ZERO) };
        if !self.alive && !self.asked {
            return None;
        }
        Some((last + self.interval(now)).saturating_duration_since(now))
    }

    /// How old an answer may be that somebody else was given, to serve as this look.
    pub fn tolerance(&self, now: Instant) -> Duration {
        match self.last {
            Some(_) if !self.asked => self.interval(now) * 3 / 4,
            _ => Duration::ZERO,
        }
    }

    fn interval(&self, now: Instant) -> Duration {
        let young = self.young_until.is_some_and(|until| now < until);
        match self.errors {
            0 if self.asked => CLOSEST,
            0 if young => YOUNG,
            0 => self.steady,
            errors => (self.steady * 2u32.saturating_pow(errors)).min(LONGEST),
        }
    }

    /// A look that worked; `alive` says whether a job of ours is not over yet.
    pub fn looked(&mut self, now: Instant, alive: bool) {
        (self.last, self.errors, self.asked, self.alive) = (Some(now), 0, false, alive);
    }

    /// A look that failed.
    pub fn failed(&mut self, now: Instant) {
        self.last = Some(now);
        self.asked = false;
        self.errors = self.errors.saturating_add(1).min(10);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seconds(wait: Option<Duration>) -> Option<u64> {
        wait.map(|wait| wait.as_secs())
    }

    #[test]
    fn looks_are_rare_closer_after_a_deed_and_rarer_after_errors() {
        let start = Instant::now();
        let at = |s: u64| start + Duration::from_secs(s);
        let mut pace = Pace::new(None);
        assert_eq!(seconds(pace.wait(start)), Some(0), "the first at once");
        pace.looked(start, true);
        assert_eq!(seconds(pace.wait(at(10))), Some(50));
        pace.stir(at(20));
        assert_eq!(seconds(pace.wait(at(20))), Some(0), "ten seconds after the last, at once");
        pace.looked(at(20), true);
        assert_eq!(seconds(pace.wait(at(20))), Some(15));
        pace.stir(at(21));
        assert_eq!(seconds(pace.wait(at(21))), Some(9), "never closer than ten seconds");
        pace.looked(at(150), true);
        assert_eq!(seconds(pace.wait(at(150))), Some(60), "no longer young");
        for wait in [120, 240, 480, 600, 600] {
            pace.failed(at(200));
            assert_eq!(seconds(pace.wait(at(200))), Some(wait));
        }
        pace.looked(at(900), false);
        assert_eq!(pace.wait(at(900)), None, "nothing to look for");
        pace.stir(at(1000));
        assert_eq!(seconds(pace.wait(at(1000))), Some(0));
    }

    #[test]
    fn steady_state_costs_at_most_two_looks_a_minute() {
        let start = Instant::now();
        let mut pace = Pace::new(Some(1));
        pace.looked(start, true);
        assert_eq!(pace.wait(start), Some(FLOOR));
    }
}
