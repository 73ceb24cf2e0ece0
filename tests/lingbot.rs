//! The LingBot-VA model against the public reference: a recorded training step, and numbers of formula-defined models;
//! and packing against episodes by themselves.

use candle_core::{Device, Tensor};
use lbva_tui::config::{
    Decay, LingbotFlowConfig, LingbotModelConfig, LossMean, PackingConfig, PackingKind, TrainConfig,
};
use lbva_tui::model::{EpisodeOutput, LingbotInput, LingbotModel, Parameters, lingbot_parameter_specs};
use lbva_tui::pack::cost::CostModel;
use lbva_tui::pack::draw::ChunkWindow;
use lbva_tui::pack::sequence::FrameTokens;
use lbva_tui::pack::step::Planner;
use lbva_tui::random::{Draw, Purpose};
use lbva_tui::train::golden;
use lbva_tui::train::gradients::{Gradients, Pass, forward_backward};
use lbva_tui::train::lingbot::flow::{
    CleanEpisode, EpisodeNoise, EpisodeTargets, Levels, Schedule, Schedules, Share, losses, noised,
};
use std::collections::BTreeMap;
use std::path::Path;

#[test]
fn the_public_golden_file_passes() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/golden/lingbot_public.safetensors");
    let report = golden::verify(&path).unwrap();
    assert!(report.passed(), "{}", report.to_text());
    assert_eq!(report.family, "lingbot");
    assert!(report.comparisons.len() > 80, "outputs, losses and every gradient are compared");
}

/// g(i, k) = offset + amplitude sin(0.37 i + 0.11 k) over the row-major index, in f64, stored f32.
fn wave(shape: &[usize], k: usize, amplitude: f64, offset: f64) -> Tensor {
    let count: usize = shape.iter().product();
    let value = |i: usize| (offset + amplitude * (0.37 * i as f64 + 0.11 * k as f64).sin()) as f32;
    Tensor::from_vec((0..count).map(value).collect::<Vec<f32>>(), shape, &Device::Cpu).unwrap()
}

fn config() -> LingbotModelConfig {
    LingbotModelConfig {
        dim: 48,
        ffn_dim: 64,
        num_heads: 2,
        num_layers: 2,
        in_dim: 4,
        out_dim: 4,
        patch_size: [1, 2, 2],
        action_dim: 6,
        freq_dim: 32,
        text_dim: 16,
        text_len: 512,
        eps: 1e-6,
    }
}

fn parameters() -> Parameters {
    let specs = lingbot_parameter_specs(&config());
    let mut names: Vec<(String, Vec<usize>)> = specs.iter().map(|s| (s.name.clone(), s.shape.clone())).collect();
    names.sort();
    assert_eq!(names.len(), 83);
    let tensors: BTreeMap<String, Tensor> = names
        .into_iter()
        .enumerate()
        .map(|(k, (name, shape))| {
            let norm = ["norm_q.weight", "norm_k.weight", "norm2.weight"].iter().any(|end| name.ends_with(end));
            let (amplitude, offset) = match () {
                () if norm => (0.1, 1.0),
                () if name.ends_with("bias") || name.contains("scale_shift") => (0.1, 0.0),
                () => (0.2, 0.0),
            };
            let tensor = wave(&shape, k, amplitude, offset);
            (name, tensor)
        })
        .collect();
    let parameters = Parameters::from_tensors(&specs, tensors).unwrap();
    assert_eq!(parameters.count(), 96_054);
    parameters
}

/// Episode `e` of the formula-defined set: F frames of 4 x 4 latents, two action rows a frame, channels 4 and 5 unused.
struct Formula {
    e: usize,
    frames: usize,
    chunk: usize,
    window: usize,
    history: Option<Vec<usize>>,
}

fn schedules() -> Schedules {
    Schedules { video: Schedule::new(1000, 5.0), action: Schedule::new(1000, 1.0) }
}

impl Formula {
    fn levels(&self) -> Levels {
        let ids =
            |step: usize, shift: usize| (0..self.frames).map(|f| (step * (f + 1) + shift * self.e) % 1000).collect();
        Levels { video: ids(173, 311), action: ids(457, 97), history: self.history.clone() }
    }

    fn text(&self) -> Tensor {
        wave(&[512, 16], 500 + self.e, 1.0, 0.0)
    }

    fn input(&self, prompt: usize) -> (lbva_tui::model::EpisodeInput, EpisodeTargets) {
        let video = [4, self.frames, 4, 4];
        let action = [6, self.frames, 2];
        let mask: Vec<f32> = (0..6 * self.frames * 2).map(|i| f32::from(i / (self.frames * 2) < 4)).collect();
        let clean = CleanEpisode {
            latent: wave(&video, 100 + self.e, 1.0, 0.0),
            action: wave(&action, 300 + self.e, 1.0, 0.0),
            action_mask: Tensor::from_vec(mask, &action, &Device::Cpu).unwrap(),
            valid_frames: self.frames,
            chunk: self.chunk,
            window: self.window,
            prompt,
        };
        let noise = EpisodeNoise {
            video: wave(&video, 200 + self.e, 1.0, 0.0),
            history: Some(wave(&video, 601, 1.0, 0.0)),
            action: wave(&action, 400 + self.e, 1.0, 0.0),
        };
        noised(&clean, &noise, &self.levels(), &schedules()).unwrap()
    }
}

/// One forward and backward over episodes packed together: outputs, video and action loss, gradients.
fn run(episodes: &[Formula], alignment: usize, recompute: bool) -> (Vec<EpisodeOutput>, [f64; 2], Gradients) {
    let parameters = parameters();
    let model = LingbotModel::new(&config(), &parameters).unwrap();
    let (inputs, targets): (Vec<_>, Vec<_>) = episodes.iter().enumerate().map(|(i, e)| e.input(i)).unzip();
    let prompts = episodes.iter().map(Formula::text).collect();
    let input = LingbotInput { episodes: inputs, prompts, alignment };
    let all: usize = episodes.iter().map(|e| e.frames).sum();
    let shares: Vec<Share> =
        episodes.iter().map(|e| Share::of_frame(LossMean::Episodes, e.frames, episodes.len(), all, 1)).collect();
    let loss = |output: &Vec<EpisodeOutput>| losses(output, &targets, &shares);
    let Pass { output, losses, gradients, .. } =
        forward_backward(&model, &parameters, &input, recompute, loss).unwrap();
    let value = |t: &Tensor| f64::from(t.to_scalar::<f32>().unwrap());
    (output, [value(&losses.video), value(&losses.action)], gradients)
}

fn values(tensor: &Tensor) -> Vec<f64> {
    tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap().into_iter().map(f64::from).collect()
}

fn norm(tensor: &Tensor) -> f64 {
    values(tensor).iter().map(|v| v * v).sum::<f64>().sqrt()
}

/// Every digit printed: half a unit of the last of seven, or the 1e-5 that f32 leaves.
fn near(what: &str, ours: f64, published: f64) {
    let error = (ours - published).abs() / published.abs().max(0.1);
    assert!(error <= 1e-5, "{what}: {ours} where {published} is published ({error:.1e})");
}

/// Channels of one patch corner, or of one action row.
fn at(tensor: &Tensor, frame: usize, rest: &[usize]) -> Vec<f64> {
    let mut tensor = tensor.narrow(1, frame, 1).unwrap();
    for (dim, &index) in rest.iter().enumerate() {
        tensor = tensor.narrow(dim + 2, index, 1).unwrap();
    }
    values(&tensor)
}

fn check(what: &str, ours: &[f64], published: &[f64]) {
    assert_eq!(ours.len(), published.len(), "{what}");
    ours.iter().zip(published).for_each(|(ours, published)| near(what, *ours, *published));
}

fn mean_and_deviation(tensor: &Tensor) -> [f64; 2] {
    let values = values(tensor);
    let mean = values.iter().sum::<f64>() / values.len() as f64;
    [mean, (values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / values.len() as f64).sqrt()]
}

fn total_norm(gradients: &Gradients) -> f64 {
    gradients.values().map(|g| norm(g).powi(2)).sum::<f64>().sqrt()
}

fn first() -> Formula {
    Formula { e: 0, frames: 3, chunk: 2, window: 4, history: None }
}

fn second() -> Formula {
    Formula { e: 1, frames: 5, chunk: 1, window: 4, history: Some(vec![597, 694, 791, 888, 985]) }
}

#[test]
fn the_first_formula_defined_step_matches_the_reference() {
    let (input, _) = first().input(0);
    check("t video", &input.t_video, &[959.8422, 904.3141, 822.5034]);
    check("t action", &input.t_action, &[543.0, 86.0, 629.0]);
    check("noisy video", &at(&input.noisy_video, 0, &[0, 0]), &[-0.048653, 0.828113, 0.815286, -0.073356]);

    let (output, [video, action], gradients) = run(&[first()], 128, false);
    let output = &output[0];
    check("video 0", &at(&output.video, 0, &[0, 0]), &[3.894768, 1.767153, -2.235149, -3.847155]);
    check("video 2", &at(&output.video, 2, &[3, 2]), &[3.882972, 2.941547, -1.199494, -4.058215]);
    check("mean, deviation", &mean_and_deviation(&output.video), &[0.054724, 2.631617]);
    let published = [-0.345302, -1.298557, -0.804610, 0.630596, 1.479570, 0.832235];
    check("action 0", &at(&output.action, 0, &[0]), &published);
    let published = [-0.032809, -1.152556, -0.981943, 0.320428, 1.369762, 1.040748];
    check("action 2", &at(&output.action, 2, &[1]), &published);
    near("video loss", video, 4.145048);
    near("action loss", action, 1.765859);
    near("gradient norm", total_norm(&gradients), 37.90202);
    for (name, published) in [
        ("patch_embedding_mlp.weight", 3.506213),
        ("action_embedder.weight", 1.876052),
        ("blocks.0.attn1.to_q.weight", 0.03607496),
        ("blocks.0.attn1.to_v.weight", 2.229521),
        ("blocks.1.attn1.norm_k.weight", 0.01725874),
        ("blocks.0.attn2.to_v.weight", 19.37742),
        ("blocks.1.ffn.net.2.weight", 3.728281),
        ("blocks.0.scale_shift_table", 2.464051),
        ("scale_shift_table", 2.471259),
        ("condition_embedder.time_proj.weight", 3.270397),
        ("condition_embedder.text_embedder.linear_1.weight", 0.7510969),
        ("condition_embedder_action.time_embedder.linear_1.weight", 2.617841),
        ("proj_out.weight", 3.986202),
        ("action_proj_out.bias", 1.169929),
    ] {
        let ours = norm(&gradients[name]);
        assert!((ours - published).abs() / published <= 1e-5, "{name}: {ours} where {published} is published");
    }
    assert!(gradients.keys().all(|name| !name.starts_with("condition_embedder_action.text_embedder")));
}

#[test]
fn the_second_formula_defined_step_with_noised_history_matches_the_reference() {
    let (input, _) = second().input(0);
    check("t video", &input.t_video, &[842.0366, 723.0186, 505.9524, 999.3986, 959.0316]);
    check("t action", &input.t_action, &[446.0, 989.0, 532.0, 75.0, 618.0]);
    check("t history", &input.t_history, &[771.4396, 687.9497, 569.1721, 386.7404, 70.7547]);

    let (output, [video, action], gradients) = run(&[second()], 128, false);
    let output = &output[0];
    check("video 0", &at(&output.video, 0, &[0, 0]), &[1.163959, -2.516117, -3.469612, -0.706699]);
    check("video 4", &at(&output.video, 4, &[3, 2]), &[-0.812468, -3.734710, -2.684653, 1.243144]);
    check("mean, deviation", &mean_and_deviation(&output.video), &[-0.021542, 2.586496]);
    let published = [0.018140, -1.056203, -0.943692, 0.259486, 1.275094, 1.014049];
    check("action 0", &at(&output.action, 0, &[0]), &published);
    let published = [-0.079117, -1.136696, -0.920952, 0.361031, 1.346360, 0.978480];
    check("action 4", &at(&output.action, 4, &[1]), &published);
    near("video loss", video, 6.677499);
    near("action loss", action, 1.477164);
    near("gradient norm", total_norm(&gradients), 64.05939);
    for (name, published) in [
        ("blocks.0.attn1.to_q.weight", 0.1346514),
        ("patch_embedding_mlp.weight", 5.150884),
        ("scale_shift_table", 4.104393),
        ("condition_embedder.time_proj.weight", 11.67641),
    ] {
        let ours = norm(&gradients[name]);
        assert!((ours - published).abs() / published <= 1e-5, "{name}: {ours} where {published} is published");
    }
}

fn largest_difference(a: &Tensor, b: &Tensor) -> f64 {
    values(a).iter().zip(values(b)).fold(0.0, |most, (a, b)| f64::max(most, (a - b).abs()))
}

#[test]
fn packed_episodes_of_unequal_length_give_what_each_gives_alone() {
    let third = || Formula { e: 2, frames: 2, chunk: 3, window: 64, history: None };
    let (packed, together, _) = run(&[first(), second(), third()], 128, false);
    let mut alone = [0.0; 2];
    for (index, episode) in [first(), second(), third()].into_iter().enumerate() {
        let (output, losses, _) = run(&[episode], 1, false);
        // Outputs reach 4: 2e-6 of the largest is their last digits in f32.
        let scale = values(&output[0].video).iter().fold(0.0, |most, v| f64::max(most, v.abs()));
        assert!(largest_difference(&packed[index].video, &output[0].video) <= 2e-6 * scale, "episode {index}");
        assert!(largest_difference(&packed[index].action, &output[0].action) <= 2e-6 * scale, "episode {index}");
        alone = [alone[0] + losses[0] / 3.0, alone[1] + losses[1] / 3.0];
    }
    for (together, alone) in together.iter().zip(alone) {
        assert!((together - alone).abs() <= 1e-6 * alone, "{together} together, {alone} alone");
    }
}

#[test]
fn recomputing_blocks_gives_the_same_gradients() {
    let (_, kept_losses, kept) = run(&[first(), second()], 128, false);
    let (_, losses, recomputed) = run(&[first(), second()], 128, true);
    assert_eq!(kept_losses, losses);
    assert_eq!(kept.keys().collect::<Vec<_>>(), recomputed.keys().collect::<Vec<_>>());
    let most = kept.values().map(norm).fold(0.0, f64::max);
    for (name, kept) in &kept {
        let difference = largest_difference(kept, &recomputed[name]);
        assert!(difference <= 1e-6 * most, "{name}: {difference:e}");
    }
}

#[test]
fn the_mask_matters() {
    let with = |chunk, window| {
        let (output, ..) = run(&[Formula { chunk, window, history: None, ..second() }], 1, false);
        output[0].video.clone()
    };
    let base = with(1, 4);
    assert!(largest_difference(&base, &with(2, 4)) > 0.05, "another chunk");
    assert!(largest_difference(&base, &with(1, 64)) > 0.02, "another window");
}

/// A tiny model, 128 episodes of 1 to 6 frames, and everything drawn for them by episode: the gradients of one step
/// under a packing.
fn step_gradients(kind: PackingKind, loss_mean: LossMean) -> (Gradients, f64, usize) {
    let model_config = LingbotModelConfig {
        dim: 24,
        ffn_dim: 32,
        num_heads: 2,
        num_layers: 2,
        freq_dim: 16,
        text_dim: 8,
        text_len: 12,
        ..config()
    };
    let specs = lingbot_parameter_specs(&model_config);
    let parameters = Parameters::initialise(&specs, 5, &Device::Cpu).unwrap();
    let model = LingbotModel::new(&model_config, &parameters).unwrap();
    let normals = |episode: usize, what: &str, shape: &[usize]| {
        let mut draw = Draw::new(1, Purpose::Noise, episode as u64, what);
        Tensor::from_vec(draw.normals(shape.iter().product()), shape, &Device::Cpu).unwrap()
    };
    let lengths: Vec<usize> = (0..128).map(|e| 1 + Draw::new(2, Purpose::Noise, e, "length").below(6)).collect();
    let packing = PackingConfig { kind, ranks: 2, pad_multiple: 4, pool_factor: 4, token_budget: 400, alignment: 128 };
    let flow = LingbotFlowConfig {
        video_shift: 5.0,
        action_shift: 1.0,
        train_timesteps: 1000,
        history_noise: 0.5,
        chunk: [1, 4],
        window: [1, 9],
        loss_mean,
        text_dropout: 0.0,
    };
    let train = TrainConfig {
        seed: 3,
        steps: 1,
        batch_size: 4,
        accumulate: 16,
        lr: 1e-3,
        warmup_steps: 0,
        decay: Decay::Constant,
        weight_decay: 0.1,
        betas: [0.9, 0.95],
        adam_eps: 1e-8,
        clip_norm: 2.0,
        save_every: 1,
        keep_last: 1,
        keep_every: 0,
        resume_warmup: 50,
        recompute: false,
    };
    let frame = FrameTokens { grid: [2, 2], actions: 2 };
    let cost = CostModel::of_model(&model_config, false);
    let planner = Planner::new(kind, &lengths, frame, &packing, &train, &flow, cost).unwrap();
    let micro_batches: Vec<_> = planner.step(1).unwrap().ranks.into_iter().flatten().collect();
    let mut seen: Vec<usize> = micro_batches.iter().flat_map(|m| m.episodes.iter().map(|e| e.episode)).collect();
    seen.sort_unstable();
    assert_eq!(seen, (0..128).collect::<Vec<_>>(), "{kind:?} trains every episode once");

    let (mut sum, mut total) = (Gradients::new(), 0.0);
    for micro_batch in &micro_batches {
        let batch_frames = micro_batch.episodes.iter().map(|e| e.valid_frames).sum();
        let (mut inputs, mut targets, mut shares, mut prompts) = (vec![], vec![], vec![], vec![]);
        for planned in &micro_batch.episodes {
            let (e, f) = (planned.episode, planned.valid_frames);
            let padded = |tensor: Tensor| match planned.frames - f {
                0 => tensor,
                padding => tensor.pad_with_zeros(1, 0, padding).unwrap(),
            };
            let mut draw = Draw::new(4, Purpose::Timestep, e as u64, "");
            let levels = Levels::sample(&mut draw, f, &flow);
            let pad = |levels: Vec<usize>| levels.into_iter().chain(vec![7; planned.frames - f]).collect();
            let levels =
                Levels { video: pad(levels.video), action: pad(levels.action), history: levels.history.map(pad) };
            let mask = ChunkWindow::draw(6, e as u64, &flow);
            let clean = CleanEpisode {
                latent: padded(normals(e, "latent", &[4, f, 4, 4])),
                action: padded(normals(e, "action", &[6, f, 2])),
                action_mask: padded(Tensor::ones((6, f, 2), candle_core::DType::F32, &Device::Cpu).unwrap()),
                valid_frames: f,
                chunk: mask.chunk,
                window: mask.window,
                prompt: prompts.len(),
            };
            let noise = EpisodeNoise {
                video: padded(normals(e, "noise", &[4, f, 4, 4])),
                history: Some(padded(normals(e, "history", &[4, f, 4, 4]))),
                action: padded(normals(e, "action noise", &[6, f, 2])),
            };
            let (input, target) = noised(&clean, &noise, &levels, &schedules()).unwrap();
            inputs.push(input);
            targets.push(target);
            shares.push(Share::of_frame(loss_mean, f, 128, batch_frames, micro_batches.len()));
            prompts.push(normals(e, "text", &[1 + e % 5, 8]));
        }
        let input = LingbotInput { episodes: inputs, prompts, alignment: packing.alignment };
        let loss = |output: &Vec<EpisodeOutput>| losses(output, &targets, &shares);
        let Pass { losses, gradients, .. } = forward_backward(&model, &parameters, &input, false, loss).unwrap();
        total += f64::from(losses.total.to_scalar::<f32>().unwrap());
        for (name, gradient) in gradients {
            let added = match sum.get(&name) {
                Some(earlier) => (earlier + gradient).unwrap(),
                None => gradient,
            };
            sum.insert(name, added);
        }
    }
    (sum, total, micro_batches.len())
}

#[test]
fn gradients_do_not_depend_on_the_packing() {
    let (unpacked, loss, count) = step_gradients(PackingKind::Unpacked, LossMean::Episodes);
    assert_eq!(count, 128);
    let largest = unpacked.values().map(norm).fold(0.0, f64::max);
    for kind in [PackingKind::Bucket, PackingKind::Budget] {
        let (packed, packed_loss, count) = step_gradients(kind, LossMean::Episodes);
        assert!(count < 50, "{kind:?} has {count} micro-batches");
        assert!((packed_loss - loss).abs() <= 1e-6 * loss, "{kind:?}: loss {packed_loss} where {loss} is right");
        assert_eq!(packed.keys().collect::<Vec<_>>(), unpacked.keys().collect::<Vec<_>>());
        for (name, gradient) in &unpacked {
            let difference = largest_difference(gradient, &packed[name]);
            assert!(difference <= 2e-6 * largest, "{kind:?} {name}: {difference:e} of {largest}");
        }
    }
}

#[test]
fn averaging_over_frames_is_another_objective() {
    let (_, by_episode, _) = step_gradients(PackingKind::Bucket, LossMean::Episodes);
    let (_, by_frame, _) = step_gradients(PackingKind::Bucket, LossMean::Frames);
    assert!((by_episode - by_frame).abs() > 1e-4 * by_episode, "{by_episode} and {by_frame}");
}
