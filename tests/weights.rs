//! Published weight files: the list of tensors.

use candle_core::Device;
use lbva_tui::config::{LingbotModelConfig, Recipe};
use lbva_tui::model::{Parameters, lingbot_parameter_specs};
use lbva_tui::train::optimizer::{AdamW, GradientSum};
use std::collections::{BTreeMap, BTreeSet};

/// The published 5B sizes.
fn large() -> LingbotModelConfig {
    LingbotModelConfig {
        dim: 3072,
        ffn_dim: 14336,
        num_heads: 24,
        num_layers: 30,
        in_dim: 48,
        out_dim: 48,
        patch_size: [1, 2, 2],
        action_dim: 30,
        freq_dim: 256,
        text_dim: 4096,
        text_len: 512,
        eps: 1e-6,
    }
}

/// Sizes that differ from each other wherever two could be confused.
fn tiny() -> LingbotModelConfig {
    LingbotModelConfig {
        dim: 48,
        ffn_dim: 64,
        num_heads: 2,
        num_layers: 2,
        in_dim: 4,
        out_dim: 4,
        action_dim: 6,
        freq_dim: 32,
        text_dim: 16,
        ..large()
    }
}

fn values(parameters: &Parameters) -> BTreeMap<String, Vec<f32>> {
    let flat = |variable: &candle_core::Var| variable.flatten_all().unwrap().to_vec1().unwrap();
    parameters.iter().map(|(name, variable)| (name.to_owned(), flat(variable))).collect()
}

#[test]
fn the_parameters_are_those_of_the_published_checkpoint() {
    let mut published = BTreeMap::new();
    for line in include_str!("data/lingbot-va-transformer-tensors.tsv").lines() {
        let (name, shape) = line.split_once('\t').unwrap();
        let shape: Vec<usize> = shape.split(',').map(|size| size.parse().unwrap()).collect();
        assert!(published.insert(name.to_owned(), shape).is_none(), "{name} twice in the list");
    }
    let specs = lingbot_parameter_specs(&large());
    let ours: BTreeMap<_, _> = specs.iter().map(|spec| (spec.name.clone(), spec.shape.clone())).collect();
    assert_eq!(ours, published);
    assert_eq!((specs.len(), specs.iter().map(|spec| spec.count()).sum::<usize>()), (839, 5_088_872_670));

    // The reference's own count for the sizes of its golden numbers.
    let specs = lingbot_parameter_specs(&tiny());
    assert_eq!((specs.len(), specs.iter().map(|spec| spec.count()).sum::<usize>()), (83, 96_054));
}

#[test]
fn what_nothing_depends_on_is_neither_trained_nor_decayed() {
    let specs = lingbot_parameter_specs(&tiny());
    let parameters = Parameters::initialise(&specs, 5, &Device::Cpu).unwrap();
    let all: BTreeSet<&str> = parameters.iter().map(|(name, _)| name).collect();
    let trained: BTreeSet<&str> = parameters.trained().map(|(name, _)| name).collect();
    let idle: Vec<&str> = all.difference(&trained).copied().collect();
    let text = "condition_embedder_action.text_embedder";
    assert_eq!(
        idle,
        ["1.bias", "1.weight", "2.bias", "2.weight"].map(|part| format!("{text}.linear_{part}")),
        "only the copy that no stream reads"
    );

    let before = values(&parameters);
    let mut gradients = GradientSum::default();
    let zeros =
        parameters.trained().map(|(name, variable)| (name.to_owned(), variable.zeros_like().unwrap())).collect();
    gradients.add(&zeros, 1.0).unwrap();
    let recipe: Recipe = serde_yaml::from_str(include_str!("../configs/xwam_demo.yaml")).unwrap();
    let mut config = recipe.train().clone();
    config.weight_decay = 0.5;
    let mut optimizer = AdamW::new(&parameters).unwrap();
    optimizer.update(&parameters, &gradients, &config, 0.1, 1).unwrap();
    // With gradients of zero only the decay moves a value: p <- p (1 - 0.1 x 0.5).
    for (name, after) in values(&parameters) {
        let factor = if idle.contains(&name.as_str()) { 1.0 } else { 0.95 };
        let expected: Vec<f32> = before[&name].iter().map(|value| value * factor).collect();
        assert_eq!(after, expected, "{name}");
    }
    let kept = optimizer.to_tensors(&parameters).unwrap();
    assert_eq!(kept.len(), 3 * trained.len(), "moments of trained parameters only");
    AdamW::from_tensors(&parameters, &kept).unwrap();
    // A trained parameter that gradient does not reach is a fault of the model, and said so.
    let error = optimizer.update(&parameters, &GradientSum::default(), &config, 0.1, 2).unwrap_err();
    assert!(error.what.contains("no gradient reached"), "{error}");
}
