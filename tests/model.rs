//! The model and its ops against what must hold: the public reference's numbers, finite differences, gradients that
//! reach everything, a branch that starts as an exact no-op, recomputation that changes nothing.

use candle_core::{DType, Device, Result, Tensor, Var};
use lbva_tui::config::{GeometryConfig, ModelConfig};
use lbva_tui::model::{Parameters, Transformer, XwamInput, XwamModel, parameter_specs};
use lbva_tui::ops::{self, RopeTable, Rows, reference};
use lbva_tui::random::{Draw, Purpose};
use lbva_tui::train::Losses;
use lbva_tui::train::xwam::flow::{CleanBatch, Level, Noise, losses, noised};
use lbva_tui::train::{
    golden,
    gradients::{Pass, forward_backward},
};
use serde_json::json;
use std::path::Path;

fn golden_path() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/golden/xwam_public.safetensors")
}

#[test]
fn the_public_golden_file_passes() {
    let report = golden::verify(&golden_path()).unwrap();
    assert!(report.passed(), "{}", report.to_text());
    assert!(report.comparisons.len() > 90, "outputs, losses and every gradient are compared");
    assert_eq!(report.parameters, 451_446);
}

#[test]
fn a_golden_file_whose_cfg_describes_no_model_is_refused() {
    let whole = std::fs::read(golden_path()).unwrap();
    let header_end = 8 + u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    let header: serde_json::Value = serde_json::from_slice(&whole[8..header_end]).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("golden.safetensors");
    let verify_with = |field: &str, value: serde_json::Value| {
        let mut header = header.clone();
        let cfg = header["__metadata__"]["cfg"].as_str().unwrap();
        let mut cfg: serde_json::Value = serde_json::from_str(cfg).unwrap();
        cfg[field] = value;
        header["__metadata__"]["cfg"] = cfg.to_string().into();
        let header = header.to_string();
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.bytes());
        bytes.extend(&whole[header_end..]);
        std::fs::write(&path, bytes).unwrap();
        golden::verify(&path)
    };
    assert!(verify_with("num_layers", header_number(&header, "num_layers")).unwrap().passed(), "the surgery is sound");
    for (field, value) in [
        ("num_heads", json!(0)),
        ("num_heads", json!(7)),
        ("num_heads", json!(48)),
        ("dim", json!(0)),
        ("dim", json!(u64::MAX)),
        ("num_layers", json!(u64::MAX)),
        ("ffn_dim", json!(0)),
        ("freq_dim", json!(63)),
        ("patch_size", json!([1, 0, 2])),
        ("patch_size", json!([2, 2, 2])),
        ("action_num", json!(0)),
        ("out_dim", json!(5)),
        ("eps", json!(-1.0)),
    ] {
        let error = verify_with(field, value.clone()).unwrap_err();
        assert_eq!((error.exit.code(), error.code), (65, "golden_sizes"), "{field} {value}: {error}");
        assert!(error.what.contains(field) || error.what.contains("heads"), "{field} {value}: {error}");
        assert!(!error.to_string().contains('\n'));
    }
}

fn header_number(header: &serde_json::Value, field: &str) -> serde_json::Value {
    let cfg: serde_json::Value = serde_json::from_str(header["__metadata__"]["cfg"].as_str().unwrap()).unwrap();
    cfg[field].clone()
}

fn config(geometry: bool) -> ModelConfig {
    ModelConfig {
        dim: 24,
        ffn_dim: 40,
        num_heads: 2,
        num_layers: 3,
        in_dim: 6,
        out_dim: 6,
        patch_size: [1, 2, 2],
        num_views: 2,
        action_dim: 14,
        action_num: 4,
        proprio_dim: 16,
        freq_dim: 16,
        text_dim: 8,
        text_len: 5,
        eps: 1e-6,
        geometry: GeometryConfig {
            enabled: geometry,
            layers: vec![0, 2],
            token_dim: 12,
            grid: [2, 3],
            source_views: 2,
            seed: 5,
        },
    }
}

fn random(shape: &[usize], item: &str) -> Tensor {
    let mut draw = Draw::new(11, Purpose::Noise, 0, item);
    Tensor::from_vec(draw.normals(shape.iter().product()), shape, &Device::Cpu).unwrap()
}

/// A batch of two samples: one trains actions, the other has them clean and lacks the second arm.
fn batch(config: &ModelConfig, dtype: DType) -> (XwamInput, lbva_tui::train::xwam::flow::Targets) {
    let of = |shape: &[usize], item: &str| random(shape, item).to_dtype(dtype).unwrap();
    let latent = [2, config.in_dim, 3, config.num_views, 4, 4];
    let ones = |shape: (usize, usize, usize)| Tensor::ones(shape, dtype, &Device::Cpu).unwrap();
    let geometry = &config.geometry;
    let clean = CleanBatch {
        latent: of(&latent, "latent"),
        action: of(&[2, 32, 14], "action"),
        action_mask: ones((2, 32, 14)),
        proprio: of(&[2, 9, 16], "proprio"),
        proprio_mask: ones((2, 9, 16)),
        text: of(&[2, config.text_len, config.text_dim], "text"),
        geometry: geometry.enabled.then(|| of(&[2, 12, geometry.token_dim], "geometry")),
    };
    let noise = Noise {
        latent: of(&latent, "latent noise"),
        action: of(&[2, 32, 14], "action noise"),
        proprio: of(&[2, 9, 16], "proprio noise"),
    };
    let levels = [
        Level { t_video: 0.7, t_action: 0.4, clean_action: false },
        Level { t_video: 0.9, t_action: 0.0, clean_action: true },
    ];
    noised(&clean, &noise, &levels, 1000).unwrap()
}

fn total(
    targets: &lbva_tui::train::xwam::flow::Targets,
) -> impl Fn(&lbva_tui::model::XwamOutput) -> Result<Losses> + '_ {
    |output| losses(output, targets, 1.0, 1.0)
}

/// A branch past its first step: every projection non-zero.
fn trained_branch(config: &ModelConfig) -> Parameters {
    let parameters = Parameters::initialise(&parameter_specs(config), 3, &Device::Cpu).unwrap();
    for (name, variable) in parameters.iter() {
        if name.starts_with("geometry.layers") && name.contains(".o.") {
            variable.set(&(random(variable.dims(), name) * 0.2).unwrap()).unwrap();
        }
    }
    parameters
}

#[test]
fn gradient_reaches_every_parameter_of_both_arms() {
    for geometry in [false, true] {
        let config = config(geometry);
        let parameters = trained_branch(&config);
        let model = XwamModel::new(&config, &parameters).unwrap();
        let (input, targets) = batch(&config, DType::F32);
        let Pass { gradients, .. } = forward_backward(&model, &parameters, &input, false, total(&targets)).unwrap();
        for spec in parameter_specs(&config) {
            let gradient = gradients.get(&spec.name).unwrap_or_else(|| panic!("no gradient for {}", spec.name));
            let values: Vec<f32> = gradient.flatten_all().unwrap().to_vec1().unwrap();
            assert!(values.iter().all(|v| v.is_finite()), "{}", spec.name);
            // The key bias shifts all scores of a query alike only before RMSNorm and RoPE; it does get gradient.
            assert!(values.iter().any(|&v| v != 0.0), "gradient of {} is exactly zero", spec.name);
        }
    }
}

#[test]
fn at_the_start_only_the_output_projections_of_the_branch_get_gradient() {
    let config = config(true);
    let parameters = Parameters::initialise(&parameter_specs(&config), 3, &Device::Cpu).unwrap();
    let model = XwamModel::new(&config, &parameters).unwrap();
    let (input, targets) = batch(&config, DType::F32);
    let Pass { gradients, .. } = forward_backward(&model, &parameters, &input, false, total(&targets)).unwrap();
    for (name, gradient) in gradients.iter().filter(|(name, _)| name.starts_with("geometry.")) {
        let largest = gradient.abs().unwrap().flatten_all().unwrap().max(0).unwrap().to_scalar::<f32>().unwrap();
        assert_eq!(largest > 0.0, name.contains(".o."), "{name}: {largest}");
    }
}

#[test]
fn the_new_branch_is_an_exact_no_op_and_a_trained_one_is_not() {
    let (without, with) = (config(false), config(true));
    let (input, _) = batch(&with, DType::F32);
    let run = |config: &ModelConfig, parameters: &Parameters, input: &XwamInput| {
        let output = XwamModel::new(config, parameters).unwrap().forward(input).unwrap();
        [output.video, output.action, output.proprio].map(|t| t.flatten_all().unwrap().to_vec1::<f32>().unwrap())
    };
    let base = run(&without, &Parameters::initialise(&parameter_specs(&without), 3, &Device::Cpu).unwrap(), &input);
    let started = run(&with, &Parameters::initialise(&parameter_specs(&with), 3, &Device::Cpu).unwrap(), &input);
    assert_eq!(base, started, "every head, every digit");
    let trained = trained_branch(&with);
    let moved = run(&with, &trained, &input);
    for (head, (a, b)) in base.iter().zip(&moved).enumerate() {
        let difference = a.iter().zip(b).fold(0f32, |m, (a, b)| m.max((a - b).abs()));
        assert!(difference > 1e-3, "head {head} hardly moves: {difference}");
    }
    let mut swapped = input.clone();
    swapped.geometry = Some(random(input.geometry.as_ref().unwrap().dims(), "another clip's tokens"));
    assert_ne!(run(&with, &trained, &swapped), moved, "the tokens matter");
}

#[test]
fn the_branch_shifts_no_other_initial_weight() {
    let base = Parameters::initialise(&parameter_specs(&config(false)), 3, &Device::Cpu).unwrap();
    let branch = Parameters::initialise(&parameter_specs(&config(true)), 3, &Device::Cpu).unwrap();
    for (name, variable) in base.iter() {
        let other = branch.get(name).unwrap();
        let difference = (variable.as_tensor() - other).unwrap().abs().unwrap().sum_all().unwrap();
        assert_eq!(difference.to_scalar::<f32>().unwrap(), 0.0, "{name}");
    }
}

#[test]
fn the_branch_is_drawn_from_a_seed_of_its_own() {
    let drawn = |config: &ModelConfig, seed: u64| -> Vec<(String, Vec<f32>)> {
        parameter_specs(config).iter().map(|spec| (spec.name.clone(), spec.initial_values(seed))).collect()
    };
    let here = config(true);
    let mut elsewhere = here.clone();
    elsewhere.geometry.seed += 1;
    let (base, other_run, other_branch) = (drawn(&here, 3), drawn(&here, 4), drawn(&elsewhere, 3));
    let differ = |a: &[(String, Vec<f32>)], b: &[(String, Vec<f32>)]| -> Vec<bool> {
        let branch = |name: &str| name.starts_with("geometry.");
        a.iter().zip(b).filter(|(a, b)| a != b).map(|(a, _)| branch(&a.0)).collect()
    };
    let (by_run, by_branch) = (differ(&base, &other_run), differ(&base, &other_branch));
    assert!(!by_run.is_empty() && by_run.iter().all(|branch| !branch), "the run's seed moves the branch");
    assert!(!by_branch.is_empty() && by_branch.iter().all(|branch| *branch), "the branch's seed moves the trunk");
}

#[test]
fn recomputing_blocks_gives_the_same_gradients() {
    let config = config(true);
    let parameters = trained_branch(&config).to_dtype(DType::F64).unwrap();
    let model = XwamModel::new(&config, &parameters).unwrap();
    let (input, targets) = batch(&config, DType::F64);
    let Pass { losses: kept_losses, gradients: kept, .. } =
        forward_backward(&model, &parameters, &input, false, total(&targets)).unwrap();
    let Pass { losses, gradients: again, .. } =
        forward_backward(&model, &parameters, &input, true, total(&targets)).unwrap();
    let scalar = |t: &Tensor| t.to_scalar::<f64>().unwrap();
    assert_eq!(scalar(&kept_losses.total), scalar(&losses.total));
    assert_eq!(kept.keys().collect::<Vec<_>>(), again.keys().collect::<Vec<_>>());
    for (name, gradient) in &kept {
        let difference = (gradient - &again[name]).unwrap().abs().unwrap().flatten_all().unwrap().max(0).unwrap();
        assert!(scalar(&difference) < 1e-12, "{name}: {}", scalar(&difference));
    }
}

#[test]
fn the_gradient_agrees_with_finite_differences_in_f64() {
    let config = config(true);
    let parameters = trained_branch(&config).to_dtype(DType::F64).unwrap();
    let model = XwamModel::new(&config, &parameters).unwrap();
    let (input, targets) = batch(&config, DType::F64);
    let Pass { gradients, .. } = forward_backward(&model, &parameters, &input, false, total(&targets)).unwrap();
    let loss = || {
        let output = model.forward(&input).unwrap();
        losses(&output, &targets, 1.0, 1.0).unwrap().total.to_scalar::<f64>().unwrap()
    };
    for (name, variable) in parameters.iter() {
        let direction = random(variable.dims(), name).to_dtype(DType::F64).unwrap();
        let at = variable.as_tensor().copy().unwrap();
        let step = 1e-6;
        variable.set(&(&at + (&direction * step).unwrap()).unwrap()).unwrap();
        let above = loss();
        variable.set(&(&at - (&direction * step).unwrap()).unwrap()).unwrap();
        let below = loss();
        variable.set(&at).unwrap();
        let numeric = (above - below) / (2.0 * step);
        let analytic = (&gradients[name] * &direction).unwrap().sum_all().unwrap().to_scalar::<f64>().unwrap();
        let tolerance = 1e-5 * (numeric.abs() + analytic.abs()) + 1e-8;
        assert!(
            (numeric - analytic).abs() < tolerance,
            "{name}: finite difference {numeric:.9}, gradient {analytic:.9}"
        );
    }
}

/// Fused op against its composed reference: value and the gradient of every input, in f64.
fn agree(
    name: &str,
    inputs: &[Tensor],
    fused: impl Fn(&[&Tensor]) -> Result<Tensor>,
    composed: impl Fn(&[&Tensor]) -> Result<Tensor>,
) {
    let variables: Vec<Var> =
        inputs.iter().map(|t| Var::from_tensor(&t.to_dtype(DType::F64).unwrap()).unwrap()).collect();
    let arguments: Vec<&Tensor> = variables.iter().map(|v| v.as_tensor()).collect();
    let (a, b) = (fused(&arguments).unwrap(), composed(&arguments).unwrap());
    let weights = random(a.dims(), name).to_dtype(DType::F64).unwrap();
    let close = |what: &str, a: &Tensor, b: &Tensor| {
        let difference = (a - b).unwrap().abs().unwrap().flatten_all().unwrap().max(0).unwrap();
        let difference = difference.to_scalar::<f64>().unwrap();
        assert!(difference < 1e-6, "{name}, {what}: differs by {difference:.2e}");
    };
    close("value", &a, &b);
    let grads = |y: &Tensor| (y * &weights).unwrap().sum_all().unwrap().backward().unwrap();
    let (da, db) = (grads(&a), grads(&b));
    for (i, variable) in variables.iter().enumerate() {
        let fused = da.get(variable).unwrap_or_else(|| panic!("{name}: no gradient reaches input {i}"));
        close(&format!("gradient of input {i}"), fused, db.get(variable).unwrap());
    }
}

#[test]
fn every_fused_op_agrees_with_its_reference_and_passes_gradient_on() {
    let x = random(&[2, 7, 12], "x");
    let rows = Rows::new(vec![0, 0, 1, 1, 1, 2, 0], 3);
    let (shift, scale) = (random(&[2, 3, 12], "shift"), random(&[2, 3, 12], "scale"));
    let (weight, bias) = (random(&[12], "weight"), random(&[12], "bias"));
    let table = RopeTable::new(&(0..7).map(|i| [i as f64, 0.5 * i as f64, 2.0]).collect::<Vec<_>>(), [2, 2, 2]);
    agree(
        "layer_norm",
        std::slice::from_ref(&x),
        |t| ops::layer_norm(t[0], 1e-6),
        |t| reference::layer_norm(t[0], 1e-6),
    );
    agree(
        "norm_modulate",
        &[x.clone(), shift.clone(), scale.clone()],
        |t| ops::norm_modulate(t[0], t[1], t[2], &rows, 1e-6),
        |t| reference::norm_modulate(t[0], t[1], t[2], &rows, 1e-6),
    );
    agree(
        "layer_norm_affine",
        &[x.clone(), weight.clone(), bias.clone()],
        |t| ops::layer_norm_affine(t[0], t[1], t[2], 1e-6),
        |t| reference::layer_norm_affine(t[0], t[1], t[2], 1e-6),
    );
    agree(
        "gated_residual",
        &[x.clone(), random(&[2, 7, 12], "y"), scale.clone()],
        |t| ops::gated_residual(t[0], t[1], t[2], &rows),
        |t| reference::gated_residual(t[0], t[1], t[2], &rows),
    );
    agree(
        "rms_norm",
        &[x.clone(), weight.clone()],
        |t| ops::rms_norm(t[0], t[1], 1e-6),
        |t| reference::rms_norm(t[0], t[1], 1e-6),
    );
    agree("gelu_tanh", std::slice::from_ref(&x), |t| ops::gelu_tanh(t[0]), |t| reference::gelu_tanh(t[0]));
    agree("softmax", std::slice::from_ref(&x), |t| ops::softmax_last_dim(t[0]), |t| reference::softmax_last_dim(t[0]));
    agree("rope", std::slice::from_ref(&x), |t| ops::rope(t[0], &table), |t| reference::rope(t[0], &table));
    agree(
        "linear",
        &[x, random(&[5, 12], "w"), random(&[5], "b")],
        |t| ops::linear(t[0], t[1], t[2]),
        |t| reference::linear(t[0], t[1], t[2]),
    );
}

#[test]
fn the_residual_stream_stays_f32_when_parameters_are_bf16() {
    let x = random(&[1, 3, 8], "x");
    let (w, b) =
        (random(&[8, 8], "w").to_dtype(DType::BF16).unwrap(), random(&[8], "b").to_dtype(DType::BF16).unwrap());
    let y = ops::linear(&x, &w, &b).unwrap();
    assert_eq!(y.dtype(), DType::BF16, "a Linear computes in its weight's dtype");
    let gate = random(&[1, 1, 8], "gate");
    let out = ops::gated_residual(&x, &y, &gate, &Rows::single(3)).unwrap();
    assert_eq!(out.dtype(), DType::F32, "the add keeps the stream's dtype");
}
