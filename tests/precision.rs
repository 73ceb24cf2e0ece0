//! The bf16 training regime on a CPU: what is rounded, what never is, and that both families train in it.

use candle_core::{DType, Device, Tensor};
use lbva_tui::config::{self, LossMean, Recipe};
use lbva_tui::model::{
    LingbotInput, LingbotModel, Parameters, Transformer, XwamModel, lingbot_parameter_specs, parameter_specs,
};
use lbva_tui::random::{Draw, Purpose};
use lbva_tui::train::gradients::{Gradients, Pass, forward_backward};
use lbva_tui::train::lingbot::flow as lingbot;
use lbva_tui::train::optimizer::{AdamW, GradientSum};
use lbva_tui::train::xwam::flow as xwam;
use std::path::Path;

fn random(shape: &[usize], item: &str) -> Tensor {
    let mut draw = Draw::new(11, Purpose::Noise, 0, item);
    Tensor::from_vec(draw.normals(shape.iter().product()), shape, &Device::Cpu).unwrap()
}

fn fixture(name: &str) -> Recipe {
    config::load(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)).unwrap()
}

/// One step of X-WAM with the branch on, parameters in this dtype.
fn xwam_pass(dtype: DType) -> (Pass<lbva_tui::model::XwamOutput>, Parameters) {
    let mut config = fixture("recipe.yaml").xwam("the test").unwrap().model.clone();
    (config.dim, config.ffn_dim, config.num_heads, config.num_layers) = (48, 64, 2, 2);
    config.geometry.layers = vec![0, 1];
    config.geometry.enabled = true;
    let master = Parameters::initialise(&parameter_specs(&config), 3, &Device::Cpu).unwrap();
    for (name, variable) in master.iter().filter(|(name, _)| name.contains("geometry.layers") && name.contains(".o.")) {
        variable.set(&(random(variable.dims(), name) * 0.2).unwrap()).unwrap();
    }
    let parameters = master.to_dtype(dtype).unwrap();
    let ones = |shape: (usize, usize, usize)| Tensor::ones(shape, DType::F32, &Device::Cpu).unwrap();
    let latent = [1, 48, 3, 3, 4, 4];
    let geometry = config.geometry.source_views * config.geometry.grid[0] * config.geometry.grid[1];
    let clean = xwam::CleanBatch {
        latent: random(&latent, "latent"),
        action: random(&[1, 32, 14], "action"),
        action_mask: ones((1, 32, 14)),
        proprio: random(&[1, 9, 16], "proprio"),
        proprio_mask: ones((1, 9, 16)),
        text: random(&[1, config.text_len, config.text_dim], "text"),
        geometry: Some(random(&[1, geometry, config.geometry.token_dim], "geometry")),
    };
    let noise = xwam::Noise {
        latent: random(&latent, "latent noise"),
        action: random(&[1, 32, 14], "action noise"),
        proprio: random(&[1, 9, 16], "proprio noise"),
    };
    let levels = [xwam::Level { t_video: 0.7, t_action: 0.4, clean_action: false }];
    let (input, targets) = xwam::noised(&clean, &noise, &levels, 1000).unwrap();
    let model = XwamModel::new(&config, &parameters).unwrap();
    let loss = |output: &_| xwam::losses(output, &targets, 1.0, 1.0);
    (forward_backward(&model, &parameters, &input, true, loss).unwrap(), parameters)
}

/// One step of LingBot-VA over two episodes, parameters in this dtype.
fn lingbot_pass(dtype: DType) -> (Pass<Vec<lbva_tui::model::EpisodeOutput>>, Parameters) {
    let recipe = fixture("lingbot_tiny.yaml");
    let recipe = recipe.lingbot("the test").unwrap();
    let config = &recipe.model;
    let specs = lingbot_parameter_specs(config);
    let parameters = Parameters::initialise(&specs, 3, &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
    let schedules = lingbot::Schedules::new(&recipe.flow);
    let (mut episodes, mut targets) = (Vec::new(), Vec::new());
    for (frames, chunk) in [(3, 2), (5, 1)] {
        let (video, action) = ([48, frames, 4, 4], [config.action_dim, frames, 4]);
        let clean = lingbot::CleanEpisode {
            latent: random(&video, "latent"),
            action: random(&action, "action"),
            action_mask: Tensor::ones(&action, DType::F32, &Device::Cpu).unwrap(),
            valid_frames: frames,
            chunk,
            window: 4,
            prompt: 0,
        };
        let noise = lingbot::EpisodeNoise {
            video: random(&video, "noise"),
            history: None,
            action: random(&action, "action noise"),
        };
        let levels = lingbot::Levels { video: vec![600; frames], action: vec![500; frames], history: None };
        let (input, target) = lingbot::noised(&clean, &noise, &levels, &schedules).unwrap();
        episodes.push(input);
        targets.push(target);
    }
    let input = LingbotInput { episodes, prompts: vec![random(&[6, config.text_dim], "text")], alignment: 8 };
    let shares = [3, 5].map(|frames| lingbot::Share::of_frame(LossMean::Episodes, frames, 2, 8, 1));
    let model = LingbotModel::new(config, &parameters).unwrap();
    let loss = |output: &Vec<_>| lingbot::losses(output, &targets, &shares);
    (forward_backward(&model, &parameters, &input, true, loss).unwrap(), parameters)
}

fn values(tensor: &Tensor) -> Vec<f64> {
    tensor.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// |a - b| / |b| over all values.
fn distance(a: &Tensor, b: &Tensor) -> f64 {
    let (a, b) = (values(a), values(b));
    let square = |values: &mut dyn Iterator<Item = f64>| values.map(|value| value * value).sum::<f64>();
    (square(&mut a.iter().zip(&b).map(|(a, b)| a - b)) / square(&mut b.iter().copied())).sqrt()
}

/// Close to f32 as far as bf16 can be, and not f32 in disguise.
fn rounded(what: &str, ours: &Tensor, full: &Tensor) {
    assert_eq!(ours.dtype(), DType::F32, "{what} is kept in f32");
    let distance = distance(ours, full);
    assert!(distance < 0.03, "{what} is {distance:.1e} from f32");
    assert!(distance > 1e-5, "{what} was not computed in bf16: {distance:.1e} from f32");
}

fn gradients(ours: &Gradients, full: &Gradients) {
    assert_eq!(ours.keys().collect::<Vec<_>>(), full.keys().collect::<Vec<_>>());
    let all = |gradients: &Gradients| Tensor::cat(&gradients.values().map(flat).collect::<Vec<_>>(), 0).unwrap();
    let distance = distance(&all(ours), &all(full));
    assert!((1e-5..0.05).contains(&distance), "gradients are {distance:.1e} from f32");
}

fn flat(tensor: &Tensor) -> Tensor {
    tensor.flatten_all().unwrap().to_dtype(DType::F32).unwrap()
}

#[test]
fn both_families_compute_in_bf16_and_keep_f32_where_it_counts() {
    let ((ours, _), (full, _)) = (xwam_pass(DType::BF16), xwam_pass(DType::F32));
    rounded("X-WAM's video", &ours.output.video, &full.output.video);
    rounded("X-WAM's actions", &ours.output.action, &full.output.action);
    rounded("X-WAM's proprioception", &ours.output.proprio, &full.output.proprio);
    assert_eq!(ours.losses.total.dtype(), DType::F32);
    gradients(&ours.gradients, &full.gradients);

    let ((ours, _), (full, _)) = (lingbot_pass(DType::BF16), lingbot_pass(DType::F32));
    for (ours, full) in ours.output.iter().zip(&full.output) {
        rounded("LingBot-VA's video", &ours.video, &full.video);
        rounded("LingBot-VA's actions", &ours.action, &full.action);
    }
    assert_eq!(ours.losses.total.dtype(), DType::F32);
    gradients(&ours.gradients, &full.gradients);
}

#[test]
fn the_residual_stream_is_f32_between_blocks() {
    let recipe = fixture("lingbot_tiny.yaml");
    let recipe = recipe.lingbot("the test").unwrap();
    let specs = lingbot_parameter_specs(&recipe.model);
    let parameters = Parameters::initialise(&specs, 3, &Device::Cpu).unwrap().to_dtype(DType::BF16).unwrap();
    let model = LingbotModel::new(&recipe.model, &parameters).unwrap();
    let episode = lbva_tui::model::EpisodeInput {
        noisy_video: random(&[48, 2, 4, 4], "a"),
        clean_video: random(&[48, 2, 4, 4], "b"),
        noisy_action: random(&[recipe.model.action_dim, 2, 4], "c"),
        clean_action: random(&[recipe.model.action_dim, 2, 4], "d"),
        t_video: vec![500.0; 2],
        t_history: vec![0.0; 2],
        t_action: vec![300.0; 2],
        valid_frames: 2,
        chunk: 1,
        window: 4,
        prompt: 0,
    };
    let prompts = vec![random(&[3, recipe.model.text_dim], "text")];
    let input = LingbotInput { episodes: vec![episode], prompts, alignment: 1 };
    let layout = model.layout(&input).unwrap();
    let (rows, conditioning) = model.front(&input, &layout).unwrap();
    let mut x = model.sequence(&rows, &layout).unwrap();
    assert_eq!(x.dtype(), DType::F32, "after the embedders");
    for layer in 0..model.depth() {
        x = model.block(layer, &x, &conditioning, &layout).unwrap();
        assert_eq!(x.dtype(), DType::F32, "after block {layer}");
    }
}

/// 100 updates, each far below half a unit of bf16's last place: kept in bf16 alone they would all be lost.
#[test]
fn the_master_weights_collect_what_bf16_would_lose() {
    let mut train = fixture("recipe.yaml").train().clone();
    (train.weight_decay, train.clip_norm) = (0.0, 1e9);
    let specs = lingbot_parameter_specs(&fixture("lingbot_tiny.yaml").lingbot("the test").unwrap().model);
    let initial = Parameters::initialise(&specs, 3, &Device::Cpu).unwrap();
    let mut optimizer = AdamW::new(&initial).unwrap();
    let parameters = initial.to_dtype(DType::BF16).unwrap();
    let name = "blocks.0.norm2.weight";
    let before = values(parameters.get(name).unwrap());
    assert!(before.iter().all(|value| *value == 1.0));
    for step in 1..=100 {
        let mut sum = GradientSum::default();
        let ones = parameters.trained().map(|(name, variable)| {
            (name.to_owned(), Tensor::ones(variable.shape(), DType::BF16, &Device::Cpu).unwrap())
        });
        sum.add(&ones.collect(), 1.0).unwrap();
        optimizer.update(&parameters, &sum, &train, 1e-4, step).unwrap();
    }
    let after = values(parameters.get(name).unwrap());
    assert!(after.iter().all(|value| (value - 0.99).abs() < 0.004), "100 steps of 1e-4 are 0.01: {:?}", &after[..3]);
    assert_eq!(parameters.get(name).unwrap().dtype(), DType::BF16);
}
