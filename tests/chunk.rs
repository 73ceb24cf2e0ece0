//! Predicting a chunk from what the blocks keep of its history, against the training forward over the whole episode.

use candle_core::{Device, Tensor};
use lbva_tui::config::LingbotModelConfig;
use lbva_tui::model::{
    CleanHistory, EpisodeInput, LingbotInput, LingbotModel, Parameters, Transformer, lingbot_parameter_specs,
};
use lbva_tui::random::{Draw, Purpose};

const GRID: [usize; 2] = [4, 6];
const ACTIONS: usize = 3;

fn config(text_len: usize) -> LingbotModelConfig {
    LingbotModelConfig {
        dim: 48,
        ffn_dim: 64,
        num_heads: 2,
        num_layers: 3,
        in_dim: 4,
        out_dim: 4,
        patch_size: [1, 2, 2],
        action_dim: 6,
        freq_dim: 32,
        text_dim: 16,
        text_len,
        eps: 1e-6,
    }
}

fn normal(name: &str, shape: &[usize], scale: f32) -> Tensor {
    let values = Draw::new(5, Purpose::Noise, 0, name).normals(shape.iter().product());
    Tensor::from_vec(values.iter().map(|value| scale * value).collect::<Vec<f32>>(), shape, &Device::Cpu).unwrap()
}

/// Random weights large enough that every token that is seen, or not seen, changes the output.
fn model(config: &LingbotModelConfig) -> LingbotModel {
    let specs = lingbot_parameter_specs(config);
    let tensors = specs
        .iter()
        .map(|spec| {
            let norm = ["norm_q.weight", "norm_k.weight", "norm2.weight"].iter().any(|end| spec.name.ends_with(end));
            let fan_in = spec.shape.iter().skip(1).product::<usize>().max(1) as f32;
            let drawn = normal(&spec.name, &spec.shape, if norm { 0.1 } else { 1.5 / fan_in.sqrt() });
            (spec.name.clone(), if norm { (drawn + 1.0).unwrap() } else { drawn })
        })
        .collect();
    LingbotModel::new(config, &Parameters::from_tensors(&specs, tensors).unwrap()).unwrap()
}

struct Episode {
    video: Tensor,
    action: Tensor,
    prompt: Tensor,
    chunk: usize,
    window: usize,
}

impl Episode {
    fn new(frames: usize, chunk: usize, window: usize, prompt_tokens: usize) -> Self {
        Self {
            video: normal("clean video", &[4, frames, GRID[0], GRID[1]], 1.0),
            action: normal("clean action", &[6, frames, ACTIONS], 1.0),
            prompt: normal("prompt", &[prompt_tokens, 16], 1.0),
            chunk,
            window,
        }
    }

    fn frames(&self) -> usize {
        self.video.dim(1).unwrap()
    }

    fn history(&self, frames: usize) -> CleanHistory {
        CleanHistory {
            video: self.video.narrow(1, 0, frames).unwrap(),
            action: self.action.narrow(1, 0, frames).unwrap(),
            prompt: self.prompt.clone(),
            chunk: self.chunk,
            window: self.window,
        }
    }

    /// The training forward: a noisy copy with levels of its own in every chunk but one, whose frames are at `t`.
    fn trained(&self, model: &LingbotModel, noisy: &Tensor, k: usize, t: f64) -> Tensor {
        let (frames, first) = (self.frames(), k * self.chunk);
        let own = first..(first + self.chunk).min(frames);
        let other = normal("noisy video", &[4, frames, GRID[0], GRID[1]], 1.0);
        let parts = [
            other.narrow(1, 0, own.start).unwrap(),
            noisy.clone(),
            other.narrow(1, own.end, frames - own.end).unwrap(),
        ];
        let parts: Vec<&Tensor> = parts.iter().filter(|part| part.elem_count() > 0).collect();
        let input = LingbotInput {
            episodes: vec![EpisodeInput {
                noisy_video: Tensor::cat(&parts, 1).unwrap(),
                clean_video: self.video.clone(),
                noisy_action: normal("noisy action", &[6, frames, ACTIONS], 1.0),
                clean_action: self.action.clone(),
                t_video: (0..frames).map(|f| if own.contains(&f) { t } else { 37.0 * f as f64 }).collect(),
                t_history: vec![0.0; frames],
                t_action: vec![300.0; frames],
                valid_frames: frames,
                chunk: self.chunk,
                window: self.window,
                prompt: 0,
            }],
            prompts: vec![self.prompt.clone()],
            alignment: 128,
        };
        model.forward(&input).unwrap()[0].video.narrow(1, own.start, own.len()).unwrap()
    }

    fn noisy(&self, k: usize) -> Tensor {
        let count = self.chunk.min(self.frames() - k * self.chunk);
        normal(&format!("chunk {k}"), &[4, count, GRID[0], GRID[1]], 1.0)
    }
}

fn relative(a: &Tensor, b: &Tensor) -> f64 {
    assert_eq!(a.dims(), b.dims());
    let norm = |x: &Tensor| f64::from(x.sqr().unwrap().sum_all().unwrap().to_scalar::<f32>().unwrap()).sqrt();
    norm(&(a - b).unwrap()) / norm(b)
}

#[test]
fn a_chunk_after_its_history_is_what_training_predicts() {
    let config = config(12);
    let model = model(&config);
    for (frames, chunk, window, prompt_tokens) in [
        (7, 2, 64, 5),
        (7, 2, 1, 5),
        (7, 2, 0, 5),
        (8, 2, 3, 12),
        (5, 1, 4, 0),
        (9, 4, 2, 5),
        (6, 3, 5, 5),
        (3, 5, 4, 5),
    ] {
        let episode = Episode::new(frames, chunk, window, prompt_tokens);
        let whole = model.prefill(&episode.history((frames - 1) / chunk * chunk)).unwrap();
        for k in 0..frames.div_ceil(chunk) {
            let noisy = episode.noisy(k);
            let t = 1000.0 / (1.0 + k as f64);
            let trained = episode.trained(&model, &noisy, k, t);
            let what = format!("chunk {k} of {frames} frames, chunks of {chunk}, window {window}");
            let shared = model.chunk_velocity(&whole.before(k).unwrap(), &noisy, t).unwrap();
            let error = relative(&shared, &trained);
            assert!(error <= 1e-5, "{what}: {error:e}");
            // By itself, a history ends where its chunk begins; sharing a longer one must not show.
            let alone = model.prefill(&episode.history(k * chunk)).unwrap().before(k).unwrap();
            let error = relative(&model.chunk_velocity(&alone, &noisy, t).unwrap(), &shared);
            assert!(error <= 1e-6, "{what}, its own history: {error:e}");
        }
    }
}

#[test]
fn history_window_time_and_text_matter() {
    let config = config(12);
    let model = model(&config);
    let velocity = |episode: &Episode, t: f64| {
        let history = model.prefill(&episode.history(6)).unwrap().before(3).unwrap();
        model.chunk_velocity(&history, &episode.noisy(3), t).unwrap()
    };
    let base = velocity(&Episode::new(8, 2, 4, 5), 500.0);
    for (what, other, t) in [
        ("another window", Episode::new(8, 2, 2, 5), 500.0),
        ("another prompt", Episode::new(8, 2, 4, 4), 500.0),
        ("another time", Episode::new(8, 2, 4, 5), 400.0),
        (
            "other actions",
            Episode { action: (Episode::new(8, 2, 4, 5).action * 0.5).unwrap(), ..Episode::new(8, 2, 4, 5) },
            500.0,
        ),
    ] {
        let change = relative(&velocity(&other, t), &base);
        assert!(change > 1e-3, "{what}: {change:e}");
    }
    let mut unseen = Episode::new(8, 2, 4, 5);
    let early = (unseen.video.narrow(1, 0, 2).unwrap() * 3.0).unwrap();
    unseen.video = Tensor::cat(&[&early, &unseen.video.narrow(1, 2, 6).unwrap()], 1).unwrap();
    unseen.window = 2;
    let seen = Episode::new(8, 2, 2, 5);
    // Chunk 3 sees only chunk 2 at its own depth, but chunk 2's keys have seen chunk 1, and these chunk 0: three blocks
    // reach it, through the attention of earlier blocks.
    assert!(relative(&velocity(&unseen, 500.0), &velocity(&seen, 500.0)) > 1e-4);
}

#[test]
fn what_does_not_fit_is_refused() {
    let config = config(12);
    let model = model(&config);
    let episode = Episode::new(8, 2, 4, 5);
    assert!(model.prefill(&episode.history(5)).is_err(), "no whole chunks");
    assert!(model.prefill(&CleanHistory { chunk: 0, ..episode.history(4) }).is_err());
    assert!(model.prefill(&CleanHistory { action: episode.history(2).action, ..episode.history(4) }).is_err());
    let history = model.prefill(&episode.history(4)).unwrap();
    assert!(history.before(3).is_err(), "chunk 3 needs 6 frames");
    let history = history.before(2).unwrap();
    for shape in [[4, 3, 4, 6], [4, 2, 4, 4], [3, 2, 4, 6]] {
        assert!(model.chunk_velocity(&history, &normal("x", &shape, 1.0), 500.0).is_err(), "{shape:?}");
    }
}
