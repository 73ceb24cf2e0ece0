//! The interval around a mean paired difference: a studentised bootstrap over clips.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};

/// Fixed: the same metrics give the same verdict to the last digit, on every machine.
const SEED: u64 = 0x6c70_6970_735f_6931;

/// Mean of `values` and its two-sided interval (low, high) at `confidence`.
///
/// The bootstrap-t (Efron and Tibshirani 1993, 12.5): each resample gives t* = (mean* - mean) / se*, and the interval
/// is mean - t*(upper) se .. mean - t*(lower) se. With the 16 clips of a validation the plain percentile interval is
/// too narrow (it has no Student correction); this one holds its coverage (see the tests).
///
/// One value says nothing of the spread: its interval is the whole line. `None` without any value.
pub(super) fn mean_interval(values: &[f64], confidence: f64, resamples: usize) -> Option<(f64, f64, f64)> {
    let count = values.len();
    if let [value] = *values {
        return Some((value, f64::NEG_INFINITY, f64::INFINITY));
    }
    let (mean, error) = mean_and_error(values.iter().copied(), count)?;
    if error == 0.0 {
        return Some((mean, mean, mean));
    }
    let mut random = ChaCha8Rng::seed_from_u64(SEED);
    let mut resample = vec![0.0; count];
    let mut ratios: Vec<f64> = Vec::with_capacity(resamples);
    for _ in 0..resamples {
        for slot in &mut resample {
            // Multiply-shift: the bias is below count / 2^32.
            let pick = (u64::from(random.next_u32()) * count as u64) >> 32;
            *slot = values.get(pick as usize).copied().unwrap_or(mean);
        }
        let (resample_mean, resample_error) = mean_and_error(resample.iter().copied(), count)?;
        let offset = resample_mean - mean;
        // All clips the same one: no spread to divide by. Such a resample is as far out as can be.
        ratios.push(if resample_error > 0.0 { offset / resample_error } else { f64::INFINITY.copysign(offset) });
    }
    ratios.sort_by(f64::total_cmp);
    let tail = (1.0 - confidence) / 2.0;
    let (upper, lower) = (quantile(&ratios, 1.0 - tail)?, quantile(&ratios, tail)?);
    Some((mean, mean - upper * error, mean - lower * error))
}

/// Fewest clips with which any paired test can reach `confidence`: all differences of one sign have the two-sided
/// probability 2^(1 - n) under no effect. Six for 0.95.
pub(super) fn fewest_clips(confidence: f64) -> usize {
    (1.0 - (1.0 - confidence).log2()).ceil() as usize
}

/// Mean and standard error of the mean.
fn mean_and_error(values: impl Iterator<Item = f64> + Clone, count: usize) -> Option<(f64, f64)> {
    if count < 2 {
        return None;
    }
    let n = count as f64;
    let mean = values.clone().sum::<f64>() / n;
    let variance = values.map(|value| (value - mean).powi(2)).sum::<f64>() / (n - 1.0);
    Some((mean, (variance / n).sqrt()))
}

/// The value below which a share of the sorted values lies.
fn quantile(sorted: &[f64], share: f64) -> Option<f64> {
    let index = (share * sorted.len() as f64).floor() as usize;
    sorted.get(index.min(sorted.len().checked_sub(1)?)).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A standard normal draw (Box and Muller).
    fn normal(random: &mut ChaCha8Rng) -> f64 {
        let mut unit = || (random.next_u32() as f64 + 0.5) / 4_294_967_296.0;
        (-2.0 * unit().ln()).sqrt() * (std::f64::consts::TAU * unit()).cos()
    }

    /// Share of 600 experiments whose 95 % interval holds the true mean.
    fn coverage(clips: usize, draw: impl Fn(&mut ChaCha8Rng) -> f64, truth: f64) -> f64 {
        let mut random = ChaCha8Rng::seed_from_u64(11);
        let experiments = 600;
        let held = (0..experiments).filter(|_| {
            let values: Vec<f64> = (0..clips).map(|_| draw(&mut random)).collect();
            let (_, low, high) = mean_interval(&values, 0.95, 600).expect("interval");
            low <= truth && truth <= high
        });
        held.count() as f64 / f64::from(experiments)
    }

    #[test]
    fn holds_its_coverage_at_the_sizes_of_a_validation() {
        for clips in [6, 16, 64] {
            let share = coverage(clips, |random| 0.3 + 0.02 * normal(random), 0.3);
            eprintln!("normal, {clips} clips: {share}");
            assert!((0.93..=0.985).contains(&share), "normal, {clips} clips: {share}");
        }
        // Skewed differences (exponential): harder, and what a few hard clips look like.
        let share = coverage(16, |random| -((random.next_u32() as f64 + 0.5) / 4_294_967_296.0).ln(), 1.0);
        eprintln!("skewed, 16 clips: {share}");
        assert!((0.92..=0.985).contains(&share), "skewed, 16 clips: {share}");
    }

    #[test]
    fn is_deterministic_and_contains_the_mean() {
        let values: Vec<f64> = (0..16).map(|i| (f64::from(i) * 1.7).sin()).collect();
        let first = mean_interval(&values, 0.95, 2000).expect("interval");
        assert_eq!(first, mean_interval(&values, 0.95, 2000).expect("interval"));
        assert!(first.1 < first.0 && first.0 < first.2);
        let wider = mean_interval(&values, 0.99, 2000).expect("interval");
        assert!(wider.1 < first.1 && first.2 < wider.2);
    }

    #[test]
    fn knows_when_it_knows_nothing() {
        assert_eq!(mean_interval(&[], 0.95, 100), None);
        assert_eq!(mean_interval(&[1.0], 0.95, 100), Some((1.0, f64::NEG_INFINITY, f64::INFINITY)));
        assert_eq!(mean_interval(&[0.5; 8], 0.95, 100), Some((0.5, 0.5, 0.5)));
        assert_eq!([0.9, 0.95, 0.99].map(fewest_clips), [5, 6, 8]);
    }
}
