//! The worker's clock against the reader's: events carry the time of the machine that trains, and "silent for a minute"
//! is said by the machine that watches. A node that is minutes off must not look dead, nor a dead one alive.

/// Clocks that Slurm's credentials still work between are at most this far apart, ms. More, in a log that is read for the
/// first time, is its age, or that of a copy.
const FIRST_LOOK_MS: u64 = 300_000;
/// A smaller difference may as well be a network file system that shows lines late, ms.
const WORTH_TELLING_MS: u64 = 90_000;

/// What the clocks are known to differ by: a line that was not there at one look and is there at the next was written in
/// between. Both looks are by the reader's clock, so the line's own time can be held against them.
#[derive(Debug, Default)]
pub(super) struct WorkerClock {
    /// The look before, Unix ms of the reader.
    looked_ms: Option<u64>,
    told: bool,
}

impl WorkerClock {
    /// What is to be added to the worker's times, given what was added so far. `newest_ms` is the time of the newest line;
    /// `modified_ms` is when its file was written to, the earliest moment at a first look; `grew` says whether lines came since the last one.
    pub fn offset_ms(&mut self, known_ms: i64, newest_ms: u64, modified_ms: u64, grew: bool, now_ms: u64) -> i64 {
        let before = self.looked_ms.replace(now_ms);
        if !grew {
            return known_ms;
        }
        let from = before.or((modified_ms.saturating_sub(newest_ms) <= FIRST_LOOK_MS).then_some(modified_ms));
        let latest = difference(now_ms, newest_ms);
        let earliest = from.map_or(i64::MIN, |from| difference(from, newest_ms)).min(latest);
        known_ms.clamp(earliest, latest)
    }

    /// Words for the log, once, if the clocks differ by more than a file system's delay.
    pub fn words(&mut self, offset_ms: i64, host: &str) -> Option<String> {
        if self.told || offset_ms.unsigned_abs() < WORTH_TELLING_MS {
            return None;
        }
        self.told = true;
        let side = if offset_ms > 0 { "behind" } else { "ahead of" };
        let difference = crate::words::duration(offset_ms.unsigned_abs());
        Some(format!("the clock of {host} is {difference} {side} this machine's; ages are told by this machine's"))
    }
}

fn difference(left_ms: u64, right_ms: u64) -> i64 {
    i64::try_from(i128::from(left_ms) - i128::from(right_ms)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW_MS: u64 = 1_000_000_000;

    #[test]
    fn lines_between_two_looks_tell_the_difference() {
        let mut clock = WorkerClock::default();
        // A first look at a log of a node whose clock is four minutes slow: the file was written to a second ago.
        assert_eq!(clock.offset_ms(0, NOW_MS - 241_000, NOW_MS - 1000, true, NOW_MS), 240_000);
        // A line of now: between 238 s and 239 s would do, so the nearer of what is known.
        assert_eq!(clock.offset_ms(240_000, NOW_MS - 238_000, 0, true, NOW_MS + 1000), 239_000);
        assert_eq!(
            clock.offset_ms(239_000, NOW_MS - 238_000, 0, false, NOW_MS + 900_000),
            239_000,
            "silence tells nothing"
        );
        // The clock was set: at the next line it is known.
        assert_eq!(clock.offset_ms(239_000, NOW_MS + 900_500, 0, true, NOW_MS + 901_000), 500);
    }

    #[test]
    fn a_clock_ahead_shows_at_once_and_one_that_is_right_stays_so() {
        let mut clock = WorkerClock::default();
        assert_eq!(clock.offset_ms(0, NOW_MS + 90_000, NOW_MS, true, NOW_MS), -90_000);
        let mut clock = WorkerClock::default();
        assert_eq!(clock.offset_ms(0, NOW_MS - 5000, NOW_MS - 5000, true, NOW_MS), 0);
        // A reader that slept for an hour cannot know when in that hour a line was written.
        assert_eq!(clock.offset_ms(0, NOW_MS + 60_000, 0, true, NOW_MS + 3_600_000), 0);
    }

    #[test]
    fn an_old_log_or_a_copy_of_one_is_old() {
        let mut clock = WorkerClock::default();
        assert_eq!(clock.offset_ms(0, NOW_MS - 7_200_000, NOW_MS - 1000, true, NOW_MS), 0, "a copy");
        let mut clock = WorkerClock::default();
        assert_eq!(clock.offset_ms(0, NOW_MS - 7_200_000, NOW_MS - 7_200_000, true, NOW_MS), 0);
    }

    #[test]
    fn a_difference_is_told_once_and_only_if_it_is_one() {
        let mut clock = WorkerClock::default();
        assert_eq!(clock.words(60_000, "gpu1"), None);
        let wanted = "the clock of gpu1 is 4 m 00 s behind this machine's; ages are told by this machine's";
        assert_eq!(clock.words(240_000, "gpu1").as_deref(), Some(wanted));
        assert_eq!(clock.words(-240_000, "gpu1"), None);
        let words = WorkerClock::default().words(-240_000, "gpu1").unwrap();
        assert!(words.contains("4 m 00 s ahead of this machine's"), "{words}");
    }
}
