//! Checkpoints beside training: a step waits for a copy of the state, not for the disk.
//!
//! On the CPU the writer works a fifth of the time: matrix products wait for the slowest of their threads, so a core that
//! hashes for a second costs every step of that second. It works at full speed once somebody waits for it.
//!
//! At most one save is under way, so that a slow disk holds training up instead of filling the memory with copies. A
//! save's event exists once it is durable, and its failure is the run's: training on without a safety net would only
//! lose more.

use super::checkpoint::Snapshot;
use super::profile::{megabytes, milliseconds};
use crate::config::TrainConfig;
use crate::files::free_bytes;
use crate::runlog::{Check, CheckpointStore, Event, Retention};
use crate::{Error, Result};
use serde_json::json;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Share of a paced writer's time that it works.
const DUTY: u32 = 5;

/// A writer's rests, which end at once when somebody waits for it.
#[derive(Debug, Default)]
struct Pace {
    hurry: Mutex<bool>,
    told: Condvar,
}

impl Pace {
    fn hurry(&self) {
        // A poisoned lock guards a plain flag: its value is as good as ever.
        *self.hurry.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.told.notify_all();
    }

    /// After `worked`, rests for as long as [`DUTY`] asks.
    fn rest(&self, worked: Duration) {
        let hurry = self.hurry.lock().unwrap_or_else(PoisonError::into_inner);
        drop(self.told.wait_timeout_while(hurry, worked * (DUTY - 1), |hurry| !*hurry));
    }
}

/// Steps within which a save must be durable: a quarter of the interval, so that a kill costs little more than one.
fn grace(save_every: u64) -> u64 {
    (save_every / 4).max(1)
}

/// Writes a run's checkpoints, one at a time, on a thread of its own.
#[derive(Debug)]
pub(super) struct Saver {
    store: CheckpointStore,
    retention: Retention,
    /// Training computes on the same cores.
    paced: bool,
    under_way: Option<UnderWay>,
}

/// A save that is not known to be durable yet.
#[derive(Debug)]
struct UnderWay {
    step: u64,
    /// Bytes and ms of the checkpoint.
    thread: JoinHandle<Result<(u64, f64)>>,
    pace: Arc<Pace>,
    blocked_ms: f64,
}

impl Saver {
    /// `paced` if training computes on the cores that the writer works on.
    pub fn new(store: CheckpointStore, retention: Retention, paced: bool) -> Self {
        Self { store, retention, paced, under_way: None }
    }

    /// Is there a complete checkpoint of this step, and nothing newer?
    pub fn holds(&self, step: u64) -> Result<bool> {
        let newest = self.store.latest_complete(Check::Sizes)?.checkpoint;
        Ok(newest.is_some_and(|checkpoint| checkpoint.step == step))
    }

    pub fn is_busy(&self) -> bool {
        self.under_way.is_some()
    }

    /// Takes the snapshot now and writes it beside whatever comes next. The save before must have been waited for.
    pub fn begin(&mut self, step: u64, take: impl FnOnce() -> Result<Snapshot>) -> Result<()> {
        let started = Instant::now();
        let snapshot = take()?;
        let blocked_ms = milliseconds(started.elapsed());
        let (store, retention) = (self.store.clone(), self.retention);
        let (pace, paced) = (Arc::new(Pace::default()), self.paced);
        let writers = Arc::clone(&pace);
        let write = move || {
            let pause = |worked| {
                if paced {
                    writers.rest(worked)
                }
            };
            let published = store.publish_sealed(step, json!({}), |folder| snapshot.write(folder, &pause))?;
            let ms = milliseconds(started.elapsed());
            // Only now: until the new one is durable, the old ones are what a resume has.
            store.prune(retention)?;
            Ok((published.bytes(), ms))
        };
        let thread = std::thread::Builder::new().name("checkpoint".to_owned()).spawn(write);
        let thread = thread.map_err(|error| Error::crash(format!("cannot start the thread that saves: {error}")))?;
        self.under_way = Some(UnderWay { step, thread, pace, blocked_ms });
        Ok(())
    }

    /// Must training wait for the save that is under way before it goes on after `step`? Some steps before that the writer
    /// is told to hurry.
    pub fn is_late(&self, step: u64, save_every: u64) -> bool {
        let Some(save) = &self.under_way else { return false };
        let (since, grace) = (step.saturating_sub(save.step), grace(save_every));
        if since >= grace - grace / 4 {
            save.pace.hurry();
        }
        since >= grace
    }

    /// The event of a save that has become durable since the last look, or its error.
    pub fn poll(&mut self) -> Result<Option<Event>> {
        match &self.under_way {
            Some(save) if save.thread.is_finished() => self.wait(),
            _ => Ok(None),
        }
    }

    /// Waits for the save that is under way, if one is: its event, or its error.
    pub fn wait(&mut self) -> Result<Option<Event>> {
        let Some(save) = self.under_way.take() else { return Ok(None) };
        save.pace.hurry();
        let waiting = Instant::now();
        let written = save.thread.join().unwrap_or_else(|_| {
            Err(Error::crash("writing a checkpoint panicked; the place is in the attempt's worker.log"))
        });
        let (bytes, ms) = written?;
        let blocked_ms = Some(save.blocked_ms + milliseconds(waiting.elapsed()));
        Ok(Some(Event::Checkpoint { step: save.step, bytes, ms, blocked_ms }))
    }
}

/// However training ends, a save that has begun gets to its end: what it holds is good.
impl Drop for Saver {
    fn drop(&mut self) {
        if let Some(save) = self.under_way.take() {
            save.pace.hurry();
            let _ = save.thread.join();
        }
    }
}

/// Compares what the run's checkpoints of `size` bytes will take with what the disk under `folder` has left, `present`
/// being what earlier attempts left there. `Some` is a warning.
///
/// # Errors
/// `disk_too_small` (exit 74) if not even two fit: a new one is written before an old one goes.
pub(super) fn check_space(size: u64, train: &TrainConfig, folder: &Path, present: u64) -> Result<Option<String>> {
    judge_space(size, train, free_bytes(folder)?.saturating_add(present)).map_err(|error| error.at(folder))
}

fn judge_space(size: u64, train: &TrainConfig, room: u64) -> Result<Option<String>> {
    let copies = kept_at_the_end(train).saturating_add(1);
    let (two, all) = (size.saturating_mul(2), size.saturating_mul(copies));
    let (each, room_mb) = (megabytes(size), megabytes(room));
    if room < two {
        let what = format!(
            "checkpoints do not fit on the disk: two of {each} MB need {} MB, {room_mb} MB can be had; a new one is \
             written before an old one goes",
            megabytes(two)
        );
        return Err(Error::disk("disk_too_small", what)
            .hint("free space, move the experiment to a larger disk, or lower the sizes under model"));
    }
    Ok((room < all).then(|| {
        format!(
            "the disk will not hold all checkpoints: {copies} of {each} MB (train.keep_last {}, train.keep_every {}, one \
             being written) need {} MB, {room_mb} MB can be had; free space, or begin anew with a lower \
             train.keep_last or a higher train.keep_every",
            train.keep_last,
            train.keep_every,
            megabytes(all)
        )
    }))
}

/// Checkpoints that [`Retention`] leaves of a run that saves at its intervals and at its end.
pub(super) fn kept_at_the_end(train: &TrainConfig) -> u64 {
    let saves = train.steps.div_ceil(train.save_every.max(1));
    let last = (train.keep_last.max(1) as u64).min(saves);
    let older_steps = (saves - last).saturating_mul(train.save_every);
    last + older_steps.checked_div(train.keep_every).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn train(steps: u64, save_every: u64, keep_last: usize, keep_every: u64) -> TrainConfig {
        let text = format!(
            "{{seed: 1, steps: {steps}, batch_size: 1, accumulate: 1, lr: 0.5, warmup_steps: 4, decay: constant, \
             weight_decay: 0, betas: [0.9, 0.999], adam_eps: 1e-8, clip_norm: 1, save_every: {save_every}, \
             keep_last: {keep_last}, keep_every: {keep_every}, resume_warmup: 0, recompute: false}}"
        );
        serde_yaml::from_str(&text).expect("a train section")
    }

    proptest! {
        #[test]
        fn the_count_of_kept_checkpoints_is_what_retention_leaves(
            steps in 1u64..300, save_every in 1u64..20, last in 1usize..6, times in 0u64..6,
        ) {
            let every = save_every * times;
            let mut saves: Vec<u64> = (1..=steps).filter(|step| step.is_multiple_of(save_every)).collect();
            if saves.last() != Some(&steps) {
                saves.push(steps);
            }
            let gone = Retention { last, every }.surplus(&saves).len();
            prop_assert_eq!(kept_at_the_end(&train(steps, save_every, last, every)), (saves.len() - gone) as u64);
        }
    }

    #[test]
    fn a_rest_is_four_times_the_work_and_ends_when_somebody_waits() {
        let pace = Pace::default();
        let started = Instant::now();
        pace.rest(Duration::from_millis(10));
        assert!(started.elapsed() >= Duration::from_millis(40));
        let pace = Arc::new(pace);
        let resting = std::thread::spawn({
            let pace = Arc::clone(&pace);
            move || pace.rest(Duration::from_secs(100))
        });
        pace.hurry();
        resting.join().expect("woken");
        pace.rest(Duration::from_secs(100)); // and no rest any more
        assert_eq!([1, 2, 7, 8, 100].map(grace), [1, 1, 1, 2, 25]);
    }

    #[test]
    fn two_checkpoints_must_fit_and_all_should() {
        // The newest of 900 and 1000, the milestones 200, 400, 600 and 800, and one that is being written.
        let config = train(1000, 100, 2, 200);
        assert_eq!(kept_at_the_end(&config), 6);
        assert_eq!(judge_space(1_000_000, &config, 7_000_000), Ok(None));
        let warning = judge_space(1_000_000, &config, 6_999_999).expect("it may run").expect("a warning");
        assert!(warning.contains("7 of 1 MB") && warning.contains("train.keep_last 2"), "{warning}");
        assert!(judge_space(1_000_000, &config, 2_000_000).expect("it may run").is_some());
        let error = judge_space(1_000_000, &config, 1_400_000).expect_err("refused");
        assert_eq!((error.exit, error.code), (crate::Exit::Disk, "disk_too_small"));
        assert!(error.what.contains("two of 1 MB need 2 MB, 1 MB can be had"), "{error}");
    }
}
