//! `verify packing`: episodes that share a sequence against the same episodes by themselves.
//!
//! The proof that padding is masked, that no episode sees another, and that losses are means over what is real: outputs,
//! losses and every gradient of a packed step are those of its episodes, one after another, on inputs cut to their own
//! frames. It needs a recipe and no data: weights, latents, actions, text and noise are drawn from its seed.

use super::gradients::{Gradients, Pass, forward_backward};
use super::lingbot::flow::{CleanEpisode, EpisodeNoise, EpisodeTargets, Levels, Schedules, Share, losses, noised};
use super::memory;
use super::profile::megabytes;
use super::task::scalar;
use crate::config::LingbotRecipe;
use crate::data::Progress;
use crate::model::{
    EpisodeInput, EpisodeOutput, LingbotInput, LingbotModel, Parameters, Transformer, lingbot_parameter_specs,
};
use crate::pack::cost::{CostModel, visible_pairs};
use crate::pack::draw::ChunkWindow;
use crate::pack::length::{round_up, trunk_tokens};
use crate::pack::sequence::FrameTokens;
use crate::random::{Draw, Purpose};
use crate::words::thousands;
use crate::{Error, Exit, Result};
use candle_core::{Device, Tensor};
use serde::Serialize;
use std::time::Instant;

/// Latent frames of four episodes that never had a length in common.
pub const FRAMES: [usize; 4] = [119, 177, 285, 239];

/// Accepted differences: f32 sums in another order, and no more.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Limits {
    /// Of the largest output of the stream.
    pub output: f64,
    /// Of the loss.
    pub loss: f64,
    /// Of the largest gradient of any parameter.
    pub gradient: f64,
}

/// Those of [`check`].
pub const LIMITS: Limits = Limits { output: 2e-6, loss: 1e-6, gradient: 1e-5 };

/// How the episodes of a case share a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Case {
    /// Of one length, which needs no padding; one draw of levels, chunk and window for all.
    Equal,
    /// Padded to one length as `bucket` does, draws as above.
    Bucket,
    /// One after another as `budget` does, none padded, draws of their own.
    Budget,
}

impl Case {
    const ALL: [Self; 3] = [Self::Equal, Self::Bucket, Self::Budget];

    fn name(self) -> &'static str {
        match self {
            Self::Equal => "equal",
            Self::Bucket => "bucket",
            Self::Budget => "budget",
        }
    }

    /// Latent frames that the episodes have, and those that they take in the sequence.
    fn lengths(self, frames: &[usize], pad_multiple: usize) -> (Vec<usize>, Vec<usize>) {
        let all = |length: Option<&usize>| vec![round_up(length.copied().unwrap_or(1), pad_multiple); frames.len()];
        match self {
            // The length nearest to the shortest that is a multiple already.
            Self::Equal => (all(frames.iter().min()), all(frames.iter().min())),
            Self::Bucket => (frames.to_vec(), all(frames.iter().max())),
            Self::Budget => (frames.to_vec(), frames.to_vec()),
        }
    }
}

/// A number from both sides.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Compared {
    pub packed: f64,
    pub separate: f64,
    /// |packed - separate| / |separate|
    pub error: f64,
}

impl Compared {
    fn of(packed: f64, separate: f64) -> Self {
        let error = if packed == separate { 0.0 } else { (packed - separate).abs() / separate.abs() };
        Self { packed, separate, error }
    }
}

/// The largest difference, over the largest value, and where it is.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Difference {
    pub error: f64,
    pub place: String,
}

/// Milliseconds and memory of one side.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Effort {
    pub tokens: usize,
    /// Forwards and backwards.
    pub ms: f64,
    /// Resident before, and at most meanwhile.
    pub before_bytes: u64,
    pub peak_bytes: u64,
}

/// One case.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CaseReport {
    pub case: Case,
    /// Latent frames of each episode.
    pub frames: Vec<usize>,
    /// Latent frames that each takes in the sequence.
    pub padded_frames: Vec<usize>,
    pub loss_video: Compared,
    pub loss_action: Compared,
    pub output: Difference,
    pub gradient: Difference,
    /// Parameters with a finite gradient, of those that train.
    pub finite_gradients: usize,
    pub trained_parameters: usize,
    pub packed: Effort,
    pub separate: Effort,
    /// What is outside its limit; empty if the case passed.
    pub failures: Vec<String>,
}

/// All cases of one recipe.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PackingReport {
    pub passed: bool,
    /// Values of the model.
    pub parameters: usize,
    /// Rows and columns of the tile in latent cells.
    pub tile: [usize; 2],
    /// Of one copy of a latent frame.
    pub tokens_per_frame: usize,
    pub alignment: usize,
    pub limits: Limits,
    /// Whether each peak is that of its side alone; else peaks are the process's so far.
    pub peaks_are_their_own: bool,
    pub cases: Vec<CaseReport>,
}

/// Computes all cases. `tile`: (rows, columns) in latent cells; `frames`: latent frames of each episode.
///
/// # Errors
/// `too_few_episodes`, `no_frames` and `tile_size` (exit 2) for what cannot be packed; `not_enough_memory` (exit 69)
/// before anything is computed, if the machine has less than this would take.
pub fn check(
    recipe: &LingbotRecipe,
    tile: (usize, usize),
    frames: &[usize],
    progress: Progress<'_>,
) -> Result<PackingReport> {
    if frames.len() < 2 {
        return Err(Error::usage("too_few_episodes", "one episode has nothing to be packed with")
            .in_place("--frames")
            .hint("name at least two lengths, as in --frames 19,33"));
    }
    if frames.contains(&0) {
        return Err(
            Error::usage("no_frames", "an episode needs a latent frame, and 0 was asked for").in_place("--frames")
        );
    }
    let [_, patch_height, patch_width] = recipe.model.patch_size;
    let (height, width) = tile;
    if height == 0 || width == 0 || !height.is_multiple_of(patch_height) || !width.is_multiple_of(patch_width) {
        let what = format!("a tile of {height}x{width} latent cells has no whole {patch_height}x{patch_width} patches");
        return Err(Error::usage("tile_size", what).in_place("--tile"));
    }
    let frame = FrameTokens {
        grid: [height / patch_height, width / patch_width],
        actions: crate::codec::TIME_STRIDE * recipe.data.frame_stride,
    };
    let machine = memory::resident().total_bytes;
    let needed = needed_bytes(recipe, frame, frames);
    if machine > 0 && needed > machine as f64 {
        let gigabytes = |bytes: f64| format!("{:.1} GB", bytes / 1e9);
        let what =
            format!("about {} of memory are needed, this machine has {}", gigabytes(needed), gigabytes(machine as f64));
        return Err(Error::new(Exit::Unavailable, "not_enough_memory", what)
            .in_place("verify packing")
            .hint("name shorter episodes with --frames, a recipe with a smaller model, or a larger machine"));
    }

    let parameters = Parameters::initialise(&lingbot_parameter_specs(&recipe.model), recipe.train.seed, &Device::Cpu)?;
    let model = LingbotModel::new(&recipe.model, &parameters)?;
    let drawn = |case: Case| Episodes::draw(recipe, tile, frame, case, frames);
    let work: Vec<Vec<f64>> = Case::ALL.iter().map(|&case| work(recipe, frame, case, frames)).collect();
    let (total, mut done) = (work.iter().flatten().sum::<f64>(), 0.0);
    let mut cases = Vec::new();
    for (case, work) in Case::ALL.into_iter().zip(&work) {
        let mut pieces = work.iter();
        cases.push(compare(&model, &parameters, recipe, &drawn(case)?, &mut || {
            done += pieces.next().copied().unwrap_or(0.0);
            progress((100.0 * done / total) as u64, 100)
        })?);
    }
    Ok(PackingReport {
        passed: cases.iter().all(|case| case.failures.is_empty()),
        parameters: parameters.count(),
        tile: [height, width],
        tokens_per_frame: frame.both(),
        alignment: recipe.packing.alignment,
        limits: LIMITS,
        peaks_are_their_own: memory::reset_peak(),
        cases,
    })
}

/// What a check takes, in bytes: weights, the gradients of both sides and of the episode at hand, and what is kept
/// between forward and backward of the longest sequence. As counted on models of several sizes, a token keeps 25 vectors
/// of D and 5 of `ffn_dim` in a block, 18 of D and 6 patches outside them; with recomputation there is one block at a
/// time, and the residual stream between all of them.
fn needed_bytes(recipe: &LingbotRecipe, frame: FrameTokens, frames: &[usize]) -> f64 {
    let model = &recipe.model;
    let parameters: f64 = lingbot_parameter_specs(model).iter().map(|spec| spec.count() as f64).sum();
    let longest = Case::ALL
        .iter()
        .map(|case| case.lengths(frames, recipe.packing.pad_multiple).1)
        .map(|padded| padded.into_iter().fold(0, usize::saturating_add))
        .max()
        .unwrap_or(0);
    let tokens = trunk_tokens(longest, frame) as f64;
    let [layers, dim, ffn] = [model.num_layers, model.dim, model.ffn_dim].map(|size| size as f64);
    let patch = (model.in_dim * model.patch_size.iter().product::<usize>()) as f64;
    let (block, outside) = (25.0 * dim + 5.0 * ffn, 18.0 * dim + 6.0 * patch);
    let blocks = if recipe.train.recompute { block + (layers + 1.0) * dim } else { layers * block };
    4.0 * (4.0 * parameters + tokens * (outside + blocks))
}

/// Estimated cost of the packed side and of each episode by itself.
fn work(recipe: &LingbotRecipe, frame: FrameTokens, case: Case, frames: &[usize]) -> Vec<f64> {
    let cost = CostModel::of_model(&recipe.model, recipe.train.recompute);
    let (valid, padded) = case.lengths(frames, recipe.packing.pad_multiple);
    let pairs = |index: usize| visible_pairs(valid[index], mask(recipe, case, index), frame);
    let packed = cost.of(trunk_tokens(padded.iter().sum(), frame), (0..valid.len()).map(pairs).sum());
    let alone = |index: usize| cost.of(trunk_tokens(valid[index], frame), pairs(index));
    std::iter::once(packed).chain((0..valid.len()).map(alone)).collect()
}

/// Key of the draws that episodes share in all cases but `budget`.
fn shared_key(case: Case, index: usize) -> u64 {
    match case {
        Case::Equal => 0,
        Case::Bucket => 1,
        Case::Budget => 2 + index as u64,
    }
}

/// Frames see each other within a chunk and never later ones: padding could only show in a chunk that reaches into it.
/// So where there is padding the chunk is the recipe's largest, which few lengths are multiples of.
fn mask(recipe: &LingbotRecipe, case: Case, index: usize) -> ChunkWindow {
    let drawn = ChunkWindow::draw(recipe.train.seed, shared_key(case, index), &recipe.flow);
    match case {
        Case::Bucket => ChunkWindow { chunk: recipe.flow.chunk[1], ..drawn },
        Case::Equal | Case::Budget => drawn,
    }
}

/// The episodes of a case, packed and by themselves.
struct Episodes {
    case: Case,
    frames: Vec<usize>,
    padded_frames: Vec<usize>,
    packed: (LingbotInput, Vec<EpisodeTargets>),
    alone: Vec<(LingbotInput, EpisodeTargets)>,
    /// The same on both sides: four episodes by themselves then add up to what they are together.
    shares: Vec<Share>,
}

impl Episodes {
    fn draw(
        recipe: &LingbotRecipe,
        (height, width): (usize, usize),
        frame: FrameTokens,
        case: Case,
        frames: &[usize],
    ) -> Result<Self> {
        /// A sentence.
        const PROMPT: usize = 24;
        let (model, flow, alignment) = (&recipe.model, &recipe.flow, recipe.packing.alignment);
        let (valid, padded) = case.lengths(frames, recipe.packing.pad_multiple);
        let schedules = Schedules::new(flow);
        let draw = |purpose, key, what: &str| {
            Draw::new(recipe.train.seed, purpose, key, &format!("verify packing {} {what}", case.name()))
        };
        let (mut inputs, mut targets, mut prompts) = (Vec::new(), Vec::new(), Vec::new());
        for (index, (&frames, &padded)) in valid.iter().zip(&padded).enumerate() {
            let normals = |what: &str, shape: &[usize]| -> Result<Tensor> {
                let values = draw(Purpose::Noise, index as u64, what).normals(shape.iter().product());
                Ok(Tensor::from_vec(values, shape, &Device::Cpu)?.pad_with_zeros(1, 0, padded - frames)?)
            };
            let video = [model.in_dim, frames, height, width];
            let action = [model.action_dim, frames, frame.actions];
            let used = |channel: usize| f32::from(u8::from(recipe.data.actions.channels.contains(&channel)));
            let rows = frames * frame.actions;
            let used: Vec<f32> = (0..model.action_dim * rows).map(|cell| used(cell / rows)).collect();
            let ChunkWindow { chunk, window } = mask(recipe, case, index);
            let clean = CleanEpisode {
                latent: normals("latent", &video)?,
                action: normals("action", &action)?,
                action_mask: Tensor::from_vec(used, &action, &Device::Cpu)?.pad_with_zeros(1, 0, padded - frames)?,
                valid_frames: frames,
                chunk,
                window,
                prompt: index,
            };
            let noise = EpisodeNoise {
                video: normals("video noise", &video)?,
                history: Some(normals("history noise", &video)?),
                action: normals("action noise", &action)?,
            };
            let mut levels = draw(Purpose::Timestep, shared_key(case, index), "");
            let levels = Levels::sample(&mut levels, padded, flow);
            let (input, target) = noised(&clean, &noise, &levels, &schedules)?;
            inputs.push(input);
            targets.push(target);
            let mut text = draw(Purpose::Embedding, index as u64, "prompt");
            let words = 1 + text.below(PROMPT.min(model.text_len));
            let values = text.normals(words * model.text_dim);
            prompts.push(Tensor::from_vec(values, (words, model.text_dim), &Device::Cpu)?);
        }
        let alone = inputs.iter().zip(&targets).map(|(input, target)| {
            let (episode, target) = cut(input, target)?;
            let prompts = vec![prompts[input.prompt].clone()];
            Ok((LingbotInput { episodes: vec![episode], prompts, alignment }, target))
        });
        let alone = alone.collect::<Result<Vec<_>>>()?;
        let all: usize = valid.iter().sum();
        let share = |&frames: &usize| Share::of_frame(flow.loss_mean, frames, valid.len(), all, 1);
        let shares = valid.iter().map(share).collect();
        let packed = (LingbotInput { episodes: inputs, prompts, alignment }, targets);
        Ok(Self { case, frames: valid, padded_frames: padded, packed, alone, shares })
    }
}

/// An episode without its padding, with a prompt of its own.
fn cut(input: &EpisodeInput, target: &EpisodeTargets) -> Result<(EpisodeInput, EpisodeTargets)> {
    let frames = input.valid_frames;
    let tensor = |tensor: &Tensor| tensor.narrow(1, 0, frames)?.contiguous();
    let times = |times: &[f64]| times[..frames].to_vec();
    let input = EpisodeInput {
        t_video: times(&input.t_video),
        t_history: times(&input.t_history),
        t_action: times(&input.t_action),
        prompt: 0,
        ..input.map(tensor)?
    };
    let target = EpisodeTargets {
        video: tensor(&target.video)?,
        action: tensor(&target.action)?,
        action_mask: tensor(&target.action_mask)?,
        ..target.clone()
    };
    Ok((input, target))
}

/// Outputs, losses (video, action) and gradients of one sequence.
type Step = (Vec<EpisodeOutput>, [f64; 2], Gradients);

/// Runs both sides; `done` is told after each forward and backward.
fn compare(
    model: &LingbotModel,
    parameters: &Parameters,
    recipe: &LingbotRecipe,
    episodes: &Episodes,
    done: &mut dyn FnMut() -> Result<()>,
) -> Result<CaseReport> {
    let step = |input: &LingbotInput, targets: &[EpisodeTargets], shares: &[Share]| -> Result<Step> {
        let loss = |output: &Vec<_>| losses(output, targets, shares);
        let Pass { output, losses, gradients, .. } =
            forward_backward(model, parameters, input, recipe.train.recompute, loss)?;
        Ok((output, [scalar(&losses.video)?, scalar(&losses.action)?], gradients))
    };
    let (input, targets) = &episodes.packed;
    let mut meter = Meter::start();
    let (packed_outputs, packed_losses, packed_gradients) = step(input, targets, &episodes.shares)?;
    let packed = meter.stop(model.layout(input)?.tokens());
    done()?;

    meter = Meter::start();
    let (mut outputs, mut sums, mut gradients, mut tokens) = (Vec::new(), [0.0; 2], Gradients::new(), 0);
    for ((input, target), share) in episodes.alone.iter().zip(&episodes.shares) {
        let (output, losses, own) = step(input, std::slice::from_ref(target), std::slice::from_ref(share))?;
        outputs.extend(output);
        sums = [sums[0] + losses[0], sums[1] + losses[1]];
        for (name, gradient) in own {
            let sum = match gradients.get(&name) {
                Some(earlier) => (earlier + gradient)?,
                None => gradient,
            };
            gradients.insert(name, sum);
        }
        tokens += model.layout(input)?.tokens();
        done()?;
    }
    let separate = meter.stop(tokens);

    let trained: Vec<&str> = parameters.trained().map(|(name, _)| name).collect();
    let finite = |name: &&&str| {
        let values = packed_gradients.get(**name).map(values);
        matches!(values, Some(Ok(values)) if values.iter().all(|value| value.is_finite()))
    };
    let mut report = CaseReport {
        case: episodes.case,
        frames: episodes.frames.clone(),
        padded_frames: episodes.padded_frames.clone(),
        loss_video: Compared::of(packed_losses[0], sums[0]),
        loss_action: Compared::of(packed_losses[1], sums[1]),
        output: output_difference(&packed_outputs, &outputs)?,
        gradient: gradient_difference(&trained, &packed_gradients, &gradients)?,
        finite_gradients: trained.iter().filter(finite).count(),
        trained_parameters: trained.len(),
        packed,
        separate,
        failures: Vec::new(),
    };
    report.failures = report.judge();
    Ok(report)
}

/// Time and memory from here on.
struct Meter {
    started: Instant,
    before_bytes: u64,
}

impl Meter {
    fn start() -> Self {
        memory::reset_peak();
        Self { started: Instant::now(), before_bytes: memory::resident().bytes }
    }

    fn stop(&self, tokens: usize) -> Effort {
        let ms = super::profile::milliseconds(self.started.elapsed());
        Effort { tokens, ms, before_bytes: self.before_bytes, peak_bytes: memory::resident().peak_bytes }
    }
}

fn values(tensor: &Tensor) -> Result<Vec<f32>> {
    Ok(tensor.flatten_all()?.to_vec1()?)
}

/// max |a - b| and max |b|; a number that is none, or another count of them, is infinitely far.
fn distance(a: &[f32], b: &[f32]) -> (f64, f64) {
    if a.len() != b.len() || a.iter().chain(b).any(|value| !value.is_finite()) {
        return (f64::INFINITY, 0.0);
    }
    let far = a.iter().zip(b).fold(0.0, |most: f64, (a, b)| most.max((f64::from(*a) - f64::from(*b)).abs()));
    (far, b.iter().fold(0.0, |most: f64, b| most.max(f64::from(b.abs()))))
}

/// The largest of some distances over the largest of some sizes.
fn largest(distances: Vec<(String, f64)>, size: f64) -> Difference {
    let worst = distances.into_iter().max_by(|(_, a), (_, b)| a.total_cmp(b));
    match worst {
        Some((_, 0.0)) => Difference { error: 0.0, place: "none: all bits are the same".to_owned() },
        Some((place, far)) => Difference { error: far / size, place },
        None => Difference { error: f64::INFINITY, place: "nothing was compared".to_owned() },
    }
}

fn output_difference(packed: &[EpisodeOutput], alone: &[EpisodeOutput]) -> Result<Difference> {
    let mut worst: Option<Difference> = None;
    for (stream, of) in
        [("video", (|output| &output.video) as fn(&EpisodeOutput) -> &Tensor), ("action", |output| &output.action)]
    {
        let (mut distances, mut size) = (Vec::new(), 0.0f64);
        for (index, (packed, alone)) in packed.iter().zip(alone).enumerate() {
            let alone = of(alone);
            let valid = of(packed).narrow(1, 0, alone.dim(1)?)?;
            let (far, most) = distance(&values(&valid)?, &values(alone)?);
            distances.push((format!("{stream} of episode {}", index + 1), far));
            size = size.max(most);
        }
        let difference = largest(distances, size);
        if worst.as_ref().is_none_or(|worst| difference.error.total_cmp(&worst.error).is_gt()) {
            worst = Some(difference);
        }
    }
    Ok(worst.unwrap_or_else(|| largest(Vec::new(), 0.0)))
}

fn gradient_difference(trained: &[&str], packed: &Gradients, alone: &Gradients) -> Result<Difference> {
    let (mut distances, mut size) = (Vec::new(), 0.0f64);
    for &name in trained {
        let (far, most) = match (packed.get(name), alone.get(name)) {
            (Some(packed), Some(alone)) => distance(&values(packed)?, &values(alone)?),
            _ => (f64::INFINITY, 0.0),
        };
        distances.push((name.to_owned(), far));
        size = size.max(most);
    }
    Ok(largest(distances, size))
}

impl CaseReport {
    /// What is outside its limit. A NaN is: no comparison with it is true.
    fn judge(&self) -> Vec<String> {
        let mut failures = Vec::new();
        let mut within = |what: String, error: f64, accepted: f64| {
            if error <= accepted {
                return;
            }
            failures.push(format!("{}: {what} differs by {error:.2e}, accept {accepted:.0e}", self.case.name()));
        };
        within("video loss".to_owned(), self.loss_video.error, LIMITS.loss);
        within("action loss".to_owned(), self.loss_action.error, LIMITS.loss);
        within(format!("output, {},", self.output.place), self.output.error, LIMITS.output);
        within(format!("gradient of {}", self.gradient.place), self.gradient.error, LIMITS.gradient);
        if self.finite_gradients != self.trained_parameters {
            let (finite, all) = (self.finite_gradients, self.trained_parameters);
            failures.push(format!("{}: {finite} of {all} gradients are finite", self.case.name()));
        }
        failures
    }
}

impl PackingReport {
    /// What failed, in all cases.
    pub fn failures(&self) -> impl Iterator<Item = &String> {
        self.cases.iter().flat_map(|case| &case.failures)
    }

    /// A quantity a line, a case a column, as lines for a terminal.
    pub fn to_text(&self) -> String {
        let count = |value: usize| thousands(value as u64);
        let error = |error: f64| format!("{error:.1e}");
        type Show<'a> = &'a dyn Fn(&CaseReport) -> String;
        let accept = |limit: f64| format!("{limit:.0e}");
        let peak = |effort: &Effort| {
            let above = effort.peak_bytes.saturating_sub(effort.before_bytes);
            format!("{} MB (+{})", megabytes(effort.peak_bytes), megabytes(above))
        };
        let none = String::new;
        let quantities: [(&str, Show, String); 15] = [
            ("latent frames", &|c| alike(&c.frames), none()),
            (
                "padded to",
                &|c| if c.frames == c.padded_frames { "-".to_owned() } else { alike(&c.padded_frames) },
                none(),
            ),
            ("tokens packed", &|c| count(c.packed.tokens), none()),
            ("tokens separate", &|c| count(c.separate.tokens), none()),
            ("video loss, packed", &|c| format!("{:.6}", c.loss_video.packed), none()),
            ("video loss, difference", &|c| error(c.loss_video.error), accept(self.limits.loss)),
            ("action loss, packed", &|c| format!("{:.6}", c.loss_action.packed), none()),
            ("action loss, difference", &|c| error(c.loss_action.error), accept(self.limits.loss)),
            ("largest output difference", &|c| error(c.output.error), accept(self.limits.output)),
            ("largest gradient difference", &|c| error(c.gradient.error), accept(self.limits.gradient)),
            ("finite gradients", &|c| format!("{} of {}", c.finite_gradients, c.trained_parameters), "all".to_owned()),
            ("peak memory, packed", &|c| peak(&c.packed), none()),
            ("peak memory, separate", &|c| peak(&c.separate), none()),
            (
                "time, packed and separate",
                &|c| format!("{:.1} s, {:.1} s", c.packed.ms / 1e3, c.separate.ms / 1e3),
                none(),
            ),
            ("result", &|c| if c.failures.is_empty() { "pass" } else { "FAIL" }.to_owned(), none()),
        ];
        let mut rows = vec![vec![none()]];
        rows[0].extend(self.cases.iter().map(|case| case.case.name().to_owned()));
        rows[0].push("accept".to_owned());
        for (label, show, accepted) in quantities {
            let cells = self.cases.iter().map(show);
            rows.push(std::iter::once(label.to_owned()).chain(cells).chain([accepted]).collect());
        }
        let widths: Vec<usize> = (0..rows[0].len())
            .map(|column| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0))
            .collect();
        let [height, width] = self.tile;
        let mut lines = vec![format!(
            "packed against separate: {} ({} weights in f32; tile {height}x{width}, {} tokens a frame, twice; aligned to {})",
            if self.passed { "PASS" } else { "FAIL" },
            count(self.parameters),
            self.tokens_per_frame,
            self.alignment
        )];
        for row in rows {
            let cells = row.iter().zip(&widths).enumerate().map(|(column, (cell, &width))| match column {
                0 => format!("{cell:width$}"),
                _ => format!("{cell:>width$}"),
            });
            lines.push(format!("  {}", cells.collect::<Vec<_>>().join("  ")).trim_end().to_owned());
        }
        let own = if self.peaks_are_their_own { "while that side ran" } else { "since the process began" };
        lines.push(format!(
            "  peak memory: resident set of the process, largest {own} (+ above what was resident before)"
        ));
        for case in &self.cases {
            let (name, output, gradient) = (case.case.name(), &case.output.place, &case.gradient.place);
            lines.push(format!("  {name}, where they differ most: outputs, {output}; gradients, {gradient}"));
        }
        lines.extend(self.failures().map(|failure| format!("  FAIL {failure}")));
        lines.join("\n")
    }
}

/// `4 x 120`, or `119+177+285+239`.
fn alike(frames: &[usize]) -> String {
    match frames {
        [first, rest @ ..] if rest.iter().all(|other| other == first) => format!("{} x {first}", frames.len()),
        _ => frames.iter().map(usize::to_string).collect::<Vec<_>>().join("+"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Recipe, load};
    use std::path::Path;

    const TILE: (usize, usize) = (4, 4);

    fn recipe() -> LingbotRecipe {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/lingbot_tiny.yaml");
        match load(&path).unwrap() {
            Recipe::Lingbot(recipe) => recipe,
            Recipe::Xwam(_) => unreachable!("the fixture is a LingBot-VA recipe"),
        }
    }

    /// The report of one case with `change` made to what is compared.
    fn changed(case: Case, change: impl FnOnce(&mut Episodes)) -> CaseReport {
        let recipe = recipe();
        let specs = lingbot_parameter_specs(&recipe.model);
        let parameters = Parameters::initialise(&specs, 1, &Device::Cpu).unwrap();
        let model = LingbotModel::new(&recipe.model, &parameters).unwrap();
        let frame = FrameTokens { grid: [2, 2], actions: 8 };
        let mut episodes = Episodes::draw(&recipe, TILE, frame, case, &[3, 9, 5]).unwrap();
        change(&mut episodes);
        compare(&model, &parameters, &recipe, &episodes, &mut || Ok(())).unwrap()
    }

    #[test]
    fn every_case_passes_as_it_is() {
        for case in Case::ALL {
            let report = changed(case, |_| ());
            assert_eq!(report.failures, Vec::<String>::new());
            assert_eq!(report.finite_gradients, report.trained_parameters);
            // Sums over tokens have another order; the sides are not one computation.
            assert!(report.gradient.error > 0.0, "{report:?}");
        }
    }

    #[test]
    fn a_frame_of_padding_that_counts_is_found() {
        let report = changed(Case::Bucket, |episodes| episodes.packed.0.episodes[0].valid_frames += 1);
        assert!(report.output.error > LIMITS.output && report.output.place.ends_with("of episode 1"), "{report:?}");
        // As many weights as frames: the loss takes one frame of padding more, whose target is zero.
        let report = changed(Case::Bucket, |episodes| {
            let target = &mut episodes.packed.1[0];
            target.video_weights.push(1.0);
            target.action_weights.push(1.0);
        });
        assert!(report.failures.iter().any(|failure| failure.contains("video loss")), "{report:?}");
        assert!(report.output.error <= LIMITS.output, "{report:?}");
    }

    #[test]
    fn another_window_prompt_or_share_is_found() {
        let report = changed(Case::Budget, |episodes| episodes.packed.0.episodes[1].window = 0);
        assert!(report.output.error > LIMITS.output && report.output.place.ends_with("episode 2"), "{report:?}");
        let report = changed(Case::Budget, |episodes| episodes.packed.0.episodes[2].prompt = 0);
        assert!(report.output.error > LIMITS.output && report.output.place.ends_with("episode 3"), "{report:?}");
        // An average over frames instead of episodes.
        let report = changed(Case::Budget, |episodes| {
            episodes.shares = vec![Share::of_frame(crate::config::LossMean::Frames, 0, 3, 17, 1); 3];
            let first = &mut episodes.alone[0].1;
            first.action_weights.iter_mut().for_each(|weight| *weight *= 1.001);
        });
        assert!(report.failures.iter().any(|failure| failure.contains("action loss")), "{report:?}");
        assert!(report.failures.iter().any(|failure| failure.contains("gradient of")), "{report:?}");
    }

    #[test]
    fn a_gradient_that_is_missing_or_none_is_found() {
        let tensor = |value: f32| Tensor::from_slice(&[value, 1.0], 2, &Device::Cpu).unwrap();
        let gradients = |list: &[(&str, f32)]| -> Gradients {
            list.iter().map(|(name, value)| ((*name).to_owned(), tensor(*value))).collect()
        };
        let alone = gradients(&[("a", 4.0), ("b", 0.5)]);
        let difference = |packed: &Gradients| gradient_difference(&["a", "b"], packed, &alone).unwrap();
        assert_eq!(difference(&alone).error, 0.0);
        let near = difference(&gradients(&[("a", 4.0), ("b", 0.75)]));
        assert_eq!((near.error, near.place.as_str()), (0.0625, "b"));
        assert_eq!(difference(&gradients(&[("a", 4.0)])).error, f64::INFINITY);
        assert_eq!(difference(&gradients(&[("a", f32::NAN), ("b", 0.5)])).place, "a");
    }

    #[test]
    fn lengths_of_the_cases_are_the_published_ones() {
        let lengths = |case: Case| case.lengths(&FRAMES, 8);
        assert_eq!(lengths(Case::Equal), (vec![120; 4], vec![120; 4]));
        assert_eq!(lengths(Case::Bucket), (FRAMES.to_vec(), vec![288; 4]));
        assert_eq!(lengths(Case::Budget), (FRAMES.to_vec(), FRAMES.to_vec()));
        assert_eq!((alike(&[120; 4]), alike(&FRAMES)), ("4 x 120".to_owned(), "119+177+285+239".to_owned()));
    }

    #[test]
    fn memory_is_asked_for_before_it_is_taken() {
        let mut large = recipe();
        (large.model.dim, large.model.ffn_dim, large.model.num_layers) = (3072, 14336, 30);
        large.model.num_heads = 24;
        let frame = FrameTokens { grid: [12, 10], actions: 16 };
        large.packing.pad_multiple = 1;
        // 5.09e9 weights, four times in f32, and 544 tokens.
        let needed = needed_bytes(&large, frame, &[1, 1]);
        assert!((85e9..95e9).contains(&needed), "{needed:e}");
        let kept = needed_bytes(&large, frame, &FRAMES);
        large.train.recompute = true;
        let recomputed = needed_bytes(&large, frame, &FRAMES);
        assert!(recomputed > needed && recomputed < kept / 5.0, "{recomputed:e}");
        large.model.num_layers = 3000;
        let error = check(&large, (24, 20), &FRAMES, &|_, _| Ok(())).unwrap_err();
        assert_eq!((error.code, error.exit), ("not_enough_memory", Exit::Unavailable));
    }
}
