//! One attempt at training one arm: load or resume, step, validate, save, and leave in order on request.
//!
//! Every loop polls for a stop: a signal or a stop file. On one, the unfinished step is dropped, a checkpoint of the
//! last complete step is written, and the attempt ends as `stopped` (exit 75). Whatever ends the attempt, a save that
//! is under way is waited for and the outcome is on disk before the process leaves, unless the process is killed.

use super::attempts::Past;
use super::checkpoint::{self, TrainerState};
use super::engine::{Engine, EngineSpec, device_name};
use super::forecast;
use super::leave::{Surroundings, Then};
use super::measure::averages;
use super::open::{Opening, open};
use super::peers;
use super::profile::{MicroStepProfile, MicroStepQuota, milliseconds};
use super::saver::{Saver, check_space};
use super::schedule::{count, rate_at};
use super::stop::StopFlag;
use super::task::{Point, StepParts, Task, scalar};
use crate::config::{Recipe, TrainConfig};
use crate::data::{Progress, sha256_hex};
use crate::model::{self, Parameters};
use crate::runlog::{
    Check, Checkpoint, Event, Level, NewAttempt, Outcome, Phase, Retention, RunDir, RunLock, RunReader, RunWriter,
    StepEvent, StepTimes, ValidationEvent, now_ms,
};
use crate::slurm::InsideJob;
use crate::{Error, Exit, Result};
use candle_core::DType;
use crossbeam_channel::RecvTimeoutError;
use serde_json::{Map, Value};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// Between two reports of progress, and between two looks for a stop meanwhile.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(200);

/// What to train and where.
#[derive(Clone, Debug)]
pub struct WorkerSpec {
    pub experiment: String,
    pub arm: String,
    /// Place of this arm among the experiment's arms, and their number: arms that start together begin to fill the
    /// shared latent cache at different clips.
    pub arm_index: (usize, usize),
    pub recipe: Recipe,
    /// Canonical text of the recipe, for arm.yaml.
    pub recipe_text: String,
    pub run: RunDir,
    /// Latents of all arms, keyed by content.
    pub cache: PathBuf,
    /// Stop with a checkpoint after this step, as a preemption would.
    pub stop_after: Option<u64>,
    /// Nobody reads this process's output: it goes to the attempt's worker.log.
    pub detached: bool,
    /// The job that this process is part of, under Slurm.
    pub job: Option<InsideJob>,
    /// Told in the log when the attempt begins.
    pub warnings: Vec<String>,
    pub command_line: Vec<String>,
    pub code_version: String,
    /// Fields in which this attempt may differ from the run's record ([`crate::runlog::check_binding`]).
    pub accepted: Vec<String>,
    /// Runs of the experiment's other arms, if all must be the same function before the first step.
    pub peers: Vec<RunDir>,
}

/// Processes that train one arm together. The record of a run has it, since another number sums in another order.
const WORLD_SIZE: u64 = 1;

/// What is known of an arm's identity before its data are opened.
pub fn known_identity(experiment: &str, arm: &str, code_version: &str) -> Map<String, Value> {
    Map::from_iter([
        ("experiment".to_owned(), experiment.into()),
        ("arm".to_owned(), arm.into()),
        ("code".to_owned(), code_version.into()),
        ("world_size".to_owned(), WORLD_SIZE.into()),
    ])
}

/// Trains until the last step or a stop. `observe` hears every event as it is recorded.
pub fn run(spec: WorkerSpec, stop: StopFlag, observe: &mut dyn FnMut(&Event)) -> Result<Exit> {
    let mut quota = MicroStepQuota::from_environment()?;
    let lock = RunLock::acquire(spec.run.clone())?;
    let store = crate::runlog::CheckpointStore::new(&spec.run);
    let latest = store.latest_complete(Check::Hashes)?;
    let resumed_from = latest.checkpoint.as_ref().map(|checkpoint| checkpoint.step);
    let start_step = resumed_from.unwrap_or(0);
    let recipe = &spec.recipe;
    let job = spec.job.as_ref();
    let past = past(&spec.run, job, start_step)?;
    let writer = RunWriter::begin_locked(
        lock,
        NewAttempt {
            arm: spec.arm.clone(),
            start_step,
            total_steps: recipe.train().steps,
            save_every: recipe.train().save_every,
            validate_every: recipe.validate_every(),
            parameters: model::count(recipe).total(),
            device: device_name(recipe.device()),
            threads: rayon::current_num_threads(),
            job: job.map(|job| job.identity.clone()),
            command_line: spec.command_line.clone(),
            code_version: spec.code_version.clone(),
            arm_yaml: spec.recipe_text.clone(),
            known_identity: known_identity(&spec.experiment, &spec.arm, &spec.code_version),
            accepted: spec.accepted.clone(),
        },
    )?;
    if spec.detached {
        writer.capture_output()?;
    }
    store.set_aside_newer_than(resumed_from)?;
    if let Some(script) = job.and_then(|job| job.batch_script.as_deref()) {
        keep_script(script, &writer.attempt().batch_script())?;
    }
    let mut journal = Journal { writer, observe, around: Surroundings { job, stop: &stop, past } };
    let mut step = start_step;
    // A bug must not leave a run without an outcome: to whoever watches, that is a death without a word.
    let result = catch_unwind(AssertUnwindSafe(|| {
        for warning in &spec.warnings {
            journal.message(Level::Warning, warning.as_str())?;
        }
        if let Some(warning) = journal.around.check_progress(start_step)? {
            journal.message(Level::Warning, warning)?;
        }
        for warning in &latest.warnings {
            journal.message(Level::Warning, format!("passed over a checkpoint: {warning}"))?;
        }
        train(&spec, &stop, &mut journal, latest.checkpoint, &mut quota, &mut step)
    }))
    .unwrap_or_else(|_| Err(Error::crash("the trainer panicked; the place is in the attempt's worker.log")));
    // A stop that was heard before there was anything to save.
    let result = match result {
        Err(error) if error.exit == Exit::Stopped => journal.leave_early(&error.what, start_step),
        other => other,
    };
    let (outcome, exit, mut reason, mut then, result) = match result {
        Ok(Ended::Finished) => {
            (Outcome::Finished, Exit::Done, format!("all {} steps done", recipe.train().steps), Then::Leave, Ok(()))
        }
        Ok(Ended::Stopped { reason, then }) => (Outcome::Stopped, Exit::Stopped, reason, then, Ok(())),
        Err(error) => {
            let (error, then) = journal.around.failed(error);
            (Outcome::Failed, error.exit, error.to_string(), then, Err(error))
        }
    };
    reason += &journal.around.requeue(&mut then);
    let Journal { writer, observe, around } = journal;
    let recorded = writer.finish(outcome, step, exit, &reason);
    observe(&Event::AttemptEnded { outcome, step, exit_code: exit.code(), reason });
    around.linger(then);
    // The cause comes first: a full disk also keeps the outcome from being recorded.
    result?;
    recorded?;
    Ok(exit)
}

/// What the attempts before this one tell. Logs that cannot be read tell nothing, and keep no run from going on.
fn past(run: &RunDir, job: Option<&InsideJob>, start_step: u64) -> Result<Past> {
    let mut reader = RunReader::open(run.root());
    reader.poll(now_ms())?;
    Ok(Past::of(reader.view(), job.map(|job| job.identity.id), start_step))
}

/// Keeps the batch script beside the attempt that it started; one that is gone by now is no reason not to train.
fn keep_script(script: &Path, kept: &Path) -> Result<()> {
    std::fs::read(script).map_or(Ok(()), |text| crate::files::write_whole(kept, &text))
}

enum Ended {
    Finished,
    /// Early: why, as the outcome says it, and what is to follow.
    Stopped {
        reason: String,
        then: Then,
    },
}

/// Records events and passes them on.
struct Journal<'a> {
    writer: RunWriter,
    observe: &'a mut dyn FnMut(&Event),
    around: Surroundings<'a>,
}

impl Journal<'_> {
    fn emit(&mut self, event: Event) -> Result<()> {
        self.writer.emit(event.clone())?;
        (self.observe)(&event);
        if let Event::Checkpoint { ms, .. } = event {
            self.around.past.save_ms.push(ms);
        }
        Ok(())
    }

    fn message(&mut self, level: Level, text: impl Into<String>) -> Result<()> {
        self.emit(Event::Message { level, text: text.into() })
    }

    fn phase(&mut self, phase: Phase, done: u64, total: u64) -> Result<()> {
        self.emit(Event::Phase { phase, done, total })
    }

    /// Records a save that has become durable meanwhile.
    fn saved(&mut self, saver: &mut Saver) -> Result<()> {
        saver.poll()?.map_or(Ok(()), |event| self.emit(event))
    }

    /// Who asked to stop, if anybody did.
    fn stop_requested(&self, stop: &StopFlag) -> Option<String> {
        let by_file = || self.writer.stop_requested().map(|request| request.by);
        stop.requested().map(str::to_owned).or_else(by_file)
    }

    /// A stop before the first new step: there is nothing to save.
    fn leave_early(&mut self, by: &str, start_step: u64) -> Result<Ended> {
        self.emit(Event::StopRequested { by: by.to_owned() })?;
        let orders = self.around.orders(by, &self.writer);
        let reason = match start_step {
            0 => format!("{} before the first step; nothing to save yet, start again", orders.words),
            _ => format!("{} before a new step; the checkpoint of step {start_step} stands", orders.words),
        };
        Ok(Ended::Stopped { reason, then: orders.then })
    }

    /// The error that ends preparations once somebody asked to stop.
    fn go_on(&self, stop: &StopFlag) -> Result<()> {
        self.stop_requested(stop).map_or(Ok(()), |by| Err(stopped_early(&by)))
    }
}

/// `what` is who asked.
fn stopped_early(by: &str) -> Error {
    Error::new(Exit::Stopped, "stopped", by)
}

fn train(
    spec: &WorkerSpec,
    stop: &StopFlag,
    journal: &mut Journal<'_>,
    from: Option<Checkpoint>,
    quota: &mut MicroStepQuota,
    completed: &mut u64,
) -> Result<Ended> {
    let recipe = &spec.recipe;
    let mut task = open(recipe, &spec.cache, &mut Logged { journal, stop })?;

    journal.phase(Phase::BuildingModel, 0, 1)?;
    let (initial, provenance) =
        with_progress(journal, stop, Phase::BuildingModel, |progress| task.initialise(progress))?;
    if let Some(from) = &provenance {
        journal.message(Level::Info, format!("weights: {}", from.description))?;
    }
    let identity = identity(spec, stop, task.as_ref(), &initial, provenance.map(|from| from.hash), journal)?;
    journal.writer.bind_identity(&identity)?;
    // Later differences are changes that somebody accepted, and the report tells them.
    if from.is_none() && spec.accepted.is_empty() {
        peers::check_identity(&identity, &spec.peers)?;
    }
    let engine_spec = EngineSpec {
        device: recipe.device(),
        precision: recipe.precision(),
        train: recipe.train(),
        trunk: task.trunk(),
    };
    // The initial weights are given up either way: at 5 B parameters they are 20 GB that nothing reads again.
    let (mut engine, position) = match &from {
        None => (Engine::start(&engine_spec, initial)?, TrainerState::default()),
        Some(checkpoint) => {
            drop(initial);
            journal.phase(Phase::Resuming, 0, 1)?;
            let (parameters, optimizer, position) = checkpoint::read(checkpoint, |weights| task.restore(weights))?;
            journal.message(Level::Info, format!("resumed from the checkpoint of step {}", position.step))?;
            if optimizer.is_none() {
                let updates = recipe.train().resume_warmup;
                let warning =
                    format!("the checkpoint has no moments: the learning rate rises again over {updates} updates");
                journal.message(Level::Warning, warning)?;
            }
            (Engine::resume(&engine_spec, parameters, optimizer.as_ref())?, position)
        }
    };
    if position.step > 0 {
        engine.goes_on();
    }
    task.bind(engine.parameters())?;
    let store = journal.writer.checkpoints();
    let present = store.complete()?.iter().map(Checkpoint::bytes).sum();
    let folder = journal.writer.run().checkpoints();
    if let Some(warning) = check_space(forecast::checkpoint_bytes(recipe), recipe.train(), &folder, present)? {
        journal.message(Level::Warning, warning)?;
    }
    let TrainConfig { keep_last, keep_every, .. } = *recipe.train();
    let paced = engine.device() == "cpu";
    let saver = Saver::new(store, Retention { last: keep_last, every: keep_every }, paced);
    let mut state = State { engine, saver, position, completed };
    let ended = advance(spec, stop, journal, task.as_mut(), &mut state, quota);
    // What ended the steps is told before a save that failed meanwhile.
    let settled = state.settle(journal);
    let ended = ended?;
    settled.map(|()| ended)
}

/// What the steps change.
struct State<'c> {
    engine: Engine,
    saver: Saver,
    position: TrainerState,
    /// The position's step, for whoever ends the attempt.
    completed: &'c mut u64,
}

impl State<'_> {
    /// Begins a checkpoint of the last complete step, unless it has one already.
    fn save(&mut self, journal: &mut Journal<'_>) -> Result<()> {
        let (step, position) = (self.position.step, self.position);
        self.settle(journal)?;
        if self.saver.holds(step)? {
            return Ok(());
        }
        journal.phase(Phase::Saving, 0, 1)?;
        self.saver.begin(step, || self.engine.snapshot(position))
    }

    /// Waits until everything saved is durable.
    fn settle(&mut self, journal: &mut Journal<'_>) -> Result<()> {
        if self.saver.is_busy() {
            journal.phase(Phase::Saving, 0, 1)?;
        }
        self.saver.wait()?.map_or(Ok(()), |event| journal.emit(event))
    }

    /// Leaves, with a durable checkpoint of the last complete step if there is time for it.
    fn stop(&mut self, by: &str, journal: &mut Journal<'_>) -> Result<Ended> {
        journal.emit(Event::StopRequested { by: by.to_owned() })?;
        let orders = journal.around.orders(by, &journal.writer);
        // A save that is under way is worth more than one that has not begun.
        self.settle(journal)?;
        let reason = match journal.around.may_save(&orders) {
            Ok(()) => {
                self.save(journal)?;
                self.settle(journal)?;
                format!("{} with a checkpoint", orders.words)
            }
            Err(why) => {
                journal.message(Level::Warning, format!("no checkpoint of step {}: {why}", self.completed))?;
                format!("{} without a new checkpoint: {why}", orders.words)
            }
        };
        Ok(Ended::Stopped { reason, then: orders.then })
    }
}

/// From the cache to the last step, or to a stop.
fn advance(
    spec: &WorkerSpec,
    stop: &StopFlag,
    journal: &mut Journal<'_>,
    task: &mut dyn Task,
    state: &mut State<'_>,
    quota: &mut MicroStepQuota,
) -> Result<Ended> {
    let recipe = &spec.recipe;
    if let Some(by) = fill_cache(spec, stop, journal, task)? {
        return state.stop(&by, journal);
    }
    task.prepare_validation(&mut |done, total| {
        journal.go_on(stop)?;
        journal.phase(Phase::Validating, done, total)
    })?;

    let train = recipe.train();
    let early_save = journal.around.past.first_save_after(train.save_every).map(|after| *state.completed + after);
    loop {
        let step = state.position.step;
        // Before the validation, which may take longer than all the steps between two saves.
        if step > 0 && (step.is_multiple_of(train.save_every) || step == train.steps || Some(step) == early_save) {
            state.save(journal)?;
        }
        if validation_due(recipe, step)
            && let Some(clips) = journal.writer.read_clip_metrics(step)?
        {
            // Measured by an earlier attempt, which may have died before it could say so in its log.
            let mean = averages(step, &clips, f64::NAN);
            journal.emit(Event::Validation(ValidationEvent { work: Some(state.position.work), ..mean }))?;
        } else if validation_due(recipe, step) {
            match validate(task, step, journal, stop, &mut state.saver)? {
                Some(mean) => {
                    let mean = ValidationEvent { work: Some(state.position.work), ..mean };
                    journal.emit(Event::Validation(mean))?;
                }
                None => {
                    let by = journal.stop_requested(stop).unwrap_or_else(|| "request".into());
                    return state.stop(&by, journal);
                }
            }
        }
        if step == 0 {
            peers::check_start(&spec.run, &spec.peers)?;
        }
        if step >= train.steps {
            return Ok(Ended::Finished);
        }
        if spec.stop_after.is_some_and(|last| step >= last) {
            return state.stop(&format!("--stop-after {step}"), journal);
        }
        let interrupted = || journal.stop_requested(stop).is_some();
        match optimizer_step(task, state, recipe, &interrupted)? {
            Some((event, micro_steps)) => {
                for line in quota.lines(micro_steps) {
                    journal.message(Level::Info, line)?;
                }
                journal.emit(Event::Step(event))?;
                *state.completed = state.position.step;
            }
            None => {
                let by = journal.stop_requested(stop).unwrap_or_else(|| "request".into());
                return state.stop(&by, journal);
            }
        }
        journal.saved(&mut state.saver)?;
        if state.saver.is_late(state.position.step, train.save_every) {
            state.settle(journal)?;
        }
    }
}

/// Opening as an attempt shows it: in its log.
struct Logged<'a, 'j> {
    journal: &'a mut Journal<'j>,
    stop: &'a StopFlag,
}

impl Opening for Logged<'_, '_> {
    fn begin(&mut self, phase: Phase) -> Result<()> {
        self.journal.phase(phase, 0, 1)
    }

    fn warn(&mut self, text: String) -> Result<()> {
        self.journal.message(Level::Warning, text)
    }

    fn watch<T: Send>(&mut self, phase: Phase, work: impl FnOnce(Progress<'_>) -> Result<T> + Send) -> Result<T> {
        with_progress(self.journal, self.stop, phase, work)
    }
}

/// Runs `work` on another thread and records its progress from this one, at most a few times a second. A stop ends the
/// work at its next word of progress, with [`stopped_early`].
fn with_progress<T: Send>(
    journal: &mut Journal<'_>,
    stop: &StopFlag,
    phase: Phase,
    work: impl FnOnce(Progress<'_>) -> Result<T> + Send,
) -> Result<T> {
    journal.go_on(stop)?;
    let (sender, receiver) = crossbeam_channel::bounded::<(u64, u64)>(1);
    let ended = OnceLock::<Error>::new();
    std::thread::scope(|scope| {
        let ended = &ended;
        let task = scope.spawn(move || {
            work(&|done, total| {
                // A full channel means that the reader has news enough.
                let _ = sender.try_send((done, total));
                ended.get().map_or(Ok(()), |error| Err(error.clone()))
            })
        });
        let mut last: Option<Instant> = None;
        loop {
            let news = receiver.recv_timeout(PROGRESS_INTERVAL);
            if let Err(RecvTimeoutError::Disconnected) = news {
                break;
            }
            let mut heard = journal.go_on(stop);
            if let (Ok((done, total)), true) = (news, last.is_none_or(|last| last.elapsed() >= PROGRESS_INTERVAL)) {
                heard = heard.and(journal.phase(phase, done, total));
                last = Some(Instant::now());
            }
            if let Err(error) = heard {
                let _ = ended.set(error); // the first error is the one to tell
            }
        }
        task.join().unwrap_or_else(|_| Err(Error::crash("a worker thread panicked; its message stands above")))
    })
}

/// Encodes every sample that the cache lacks. Returns who asked to stop, if anybody did meanwhile.
fn fill_cache(
    spec: &WorkerSpec,
    stop: &StopFlag,
    journal: &mut Journal<'_>,
    task: &dyn Task,
) -> Result<Option<String>> {
    let mut missing = Vec::new();
    for sample in 0..task.samples() {
        // The first look at a sample of an episode hashes its videos.
        if let Some(by) = journal.stop_requested(stop) {
            return Ok(Some(by));
        }
        if !task.is_cached(sample)? {
            missing.push(sample);
        }
    }
    let (index, count) = spec.arm_index;
    let first = index * missing.len() / count.max(1);
    let mut reported = Instant::now();
    for done in 0..missing.len() {
        if let Some(by) = journal.stop_requested(stop) {
            return Ok(Some(by));
        }
        if done == 0 || reported.elapsed().as_millis() >= 200 {
            journal.phase(Phase::CachingLatents, done as u64, missing.len() as u64)?;
            reported = Instant::now();
        }
        let sample = missing[(first + done) % missing.len()];
        if !task.is_cached(sample)? {
            task.cache(sample)?;
        }
    }
    Ok(None)
}

/// Everything a later attempt must share with this run.
fn identity(
    spec: &WorkerSpec,
    stop: &StopFlag,
    task: &dyn Task,
    initial: &Parameters,
    provenance: Option<String>,
    journal: &mut Journal<'_>,
) -> Result<Value> {
    let parts = with_progress(journal, stop, Phase::LoadingData, |progress| task.identity(progress))?;
    let mut weights = Vec::new();
    for (name, variable) in initial.iter().filter(|(name, _)| !name.starts_with("geometry.")) {
        weights.extend_from_slice(name.as_bytes());
        let values: Vec<f32> = variable.flatten_all()?.to_vec1()?;
        weights.extend(values.iter().flat_map(|value| value.to_le_bytes()));
    }
    let mut identity = known_identity(&spec.experiment, &spec.arm, &spec.code_version);
    identity.extend(parts);
    identity.insert("initial_shared_weights".into(), sha256_hex(&weights).into());
    if let Some(provenance) = provenance {
        identity.insert("weights".into(), provenance.into());
    }
    Ok(identity.into())
}

/// Step 0, every `validation.every` steps, and the last step.
pub fn validation_due(recipe: &Recipe, step: u64) -> bool {
    step.is_multiple_of(recipe.validate_every()) || step == recipe.train().steps
}

fn validate(
    task: &mut dyn Task,
    step: u64,
    journal: &mut Journal<'_>,
    stop: &StopFlag,
    saver: &mut Saver,
) -> Result<Option<ValidationEvent>> {
    let strips = journal.writer.run().strips(step);
    crate::files::create_folder(&strips)?;
    let watch = journal.writer.stop_watch();
    let mut go_on = |done, total| {
        journal.phase(Phase::Validating, done, total)?;
        journal.saved(saver)?;
        Ok(stop.requested().is_none() && watch.requested().is_none())
    };
    let Some(Point { clips, mean }) = task.measure(step, &strips, &mut go_on)? else { return Ok(None) };
    journal.writer.write_clip_metrics(step, &clips)?;
    Ok(Some(mean))
}

/// Gradients and update of the next step, and its micro-steps; `None` if it was interrupted and dropped.
fn optimizer_step(
    task: &mut dyn Task,
    state: &mut State<'_>,
    recipe: &Recipe,
    interrupted: &dyn Fn() -> bool,
) -> Result<Option<(StepEvent, Vec<MicroStepProfile>)>> {
    let started = Instant::now();
    let train = recipe.train();
    let State { engine, position, .. } = state;
    let TrainerState { moments_from, .. } = *position;
    let step = position.step + 1;
    let mut micro_steps = Vec::new();
    let mut done = |micro_step| {
        micro_steps.push(micro_step);
        Ok(())
    };
    let Some(parts) = task.gradients(engine, step, interrupted, &mut done)? else { return Ok(None) };
    if !parts.loss.is_finite() {
        let culprit = culprit(engine.parameters(), &parts)?;
        return Err(Error::crash(format!("the loss is {} at step {step}: {culprit}", parts.loss))
            .hint("the last checkpoint is intact; lower train.lr or look at the data of this step"));
    }
    let lr = rate_at(train, moments_from, step);
    let updating = Instant::now();
    let grad_norm = engine.update(train, lr, step - moments_from)?;
    let update_ms = milliseconds(updating.elapsed());
    if let Some(last) = micro_steps.last_mut() {
        last.update_ms = Some(update_ms);
    }
    let times = parts.times.map(|times| StepTimes { update_ms, ..times });
    let samples = recipe.samples_per_step() as u64;
    position.step = step;
    position.samples_seen += samples;
    count(&mut position.work, train, moments_from, step, samples);
    let event = StepEvent {
        step,
        loss: parts.loss,
        loss_video: parts.loss_video,
        loss_action: parts.loss_action,
        loss_proprio: parts.loss_proprio,
        grad_norm,
        lr,
        step_ms: started.elapsed().as_secs_f64() * 1e3,
        data_ms: parts.data_ms,
        padding_waste: parts.padding as f64 / (parts.tokens + parts.text_rows) as f64,
        tokens: parts.tokens,
        memory: engine.memory()?,
        branch_norm: branch_norm(engine.parameters())?,
        packing: parts.packing,
        times,
        work: Some(position.work),
    };
    Ok(Some((event, micro_steps)))
}

/// What made a loss that is not finite: a parameter that training has ruined, or else the part of the loss.
fn culprit(parameters: &Parameters, parts: &StepParts) -> Result<String> {
    for (name, variable) in parameters.iter() {
        let values: Vec<f32> = variable.flatten_all()?.to_dtype(DType::F32)?.to_vec1()?;
        if let Some(at) = values.iter().position(|value| !value.is_finite()) {
            return Ok(format!("the first tensor that is not finite is {name}, value {at} of {}", values.len()));
        }
    }
    // What a family lacks is NaN by rights, and no reason.
    let losses = [("video", parts.loss_video), ("action", parts.loss_action), ("proprioception", parts.loss_proprio)];
    let broken = losses.iter().filter(|(_, loss)| !loss.is_finite()).map(|(name, loss)| format!("{name} {loss}"));
    Ok(format!("all parameters are finite; losses: {}", broken.collect::<Vec<_>>().join(", ")))
}

/// Norm over all output projections of the geometry branch: one that stays at zero is a null result of another kind.
fn branch_norm(parameters: &Parameters) -> Result<Option<f64>> {
    let mut square = None;
    for (name, variable) in parameters.iter() {
        if name.starts_with("geometry.layers.") && (name.ends_with(".o.weight") || name.ends_with(".o.bias")) {
            *square.get_or_insert(0.0) += scalar(&variable.sqr()?.sum_all()?)?;
        }
    }
    Ok(square.map(f64::sqrt))
}
