//! `verify noop`: the new branch changes nothing before it is trained, and something afterwards, in the very regime that
//! trains.
//!
//! "Zero means pass" is only worth something beside a control that is not zero, and only where training computes: the
//! recipe's parameter format, its recomputation, the trainer's forward and backward, a batch of its own loader. A check
//! that passed in f32 while training ran in bf16 once cost two arms.

use super::gradients::{Pass, forward_backward};
use super::open::{Opening, clips};
use super::xwam::{batches, flow};
use crate::config::{PrecisionConfig, XwamRecipe};
use crate::model::{Parameters, XwamInput, XwamModel, XwamOutput, parameter_specs};
use crate::random::{Draw, Purpose};
use crate::runlog::Phase;
use crate::{Error, Result};
use candle_core::{DType, Device, Tensor};
use serde::Serialize;
use std::path::Path;

/// Least change of a head's output, over its root mean square, that counts as one: far above what rounding does.
pub const FLOOR: f64 = 1e-3;
/// Scale of the output projections in the positive control, as if some training had been done.
const CONTROL: f64 = 0.05;

/// One check, of every head.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct NoopCheck {
    pub name: &'static str,
    pub wanted: &'static str,
    /// (head, largest difference over the head's root mean square)
    pub heads: Vec<(&'static str, f64)>,
    pub passed: bool,
}

/// All checks, and where they hold.
#[derive(Clone, Debug, Serialize)]
pub struct NoopReport {
    pub precision: PrecisionConfig,
    /// Blocks are recomputed in the backward pass.
    pub recompute: bool,
    /// Insertion points of the branch.
    pub layers: Vec<usize>,
    pub checks: Vec<NoopCheck>,
}

impl NoopReport {
    pub fn passed(&self) -> bool {
        self.checks.iter().all(|check| check.passed)
    }

    /// As lines for a terminal.
    pub fn to_text(&self) -> String {
        let recompute = if self.recompute { "blocks recomputed" } else { "nothing recomputed" };
        let mut lines = vec![
            if self.passed() { "PASS" } else { "FAIL" }.to_owned(),
            format!("  regime   {}; {recompute}; branch at blocks {:?}", self.precision.words(), self.layers),
        ];
        for check in &self.checks {
            let heads: Vec<String> = check.heads.iter().map(|(head, value)| format!("{head} {value:.2e}")).collect();
            let mark = if check.passed { "ok  " } else { "FAIL" };
            lines.push(format!("  {mark}     {}: {} ({})", check.name, heads.join(", "), check.wanted));
        }
        lines.push("  A pass counts for this regime alone.".to_owned());
        lines.join("\n")
    }
}

/// Runs the checks on the first two training batches of `with`, whose arm has the branch; `without` is the other arm.
///
/// # Errors
/// `no_branch` unless the arms differ in just having the branch; those of opening the data and of the passes.
pub fn check(without: &XwamRecipe, with: &XwamRecipe, cache: &Path, opening: &mut impl Opening) -> Result<NoopReport> {
    check_started(without, with, cache, opening, &|_| Ok(()))
}

/// [`check`], with the branch's initial weights as `start` leaves them.
fn check_started(
    without: &XwamRecipe,
    with: &XwamRecipe,
    cache: &Path,
    opening: &mut impl Opening,
    start: &dyn Fn(&Parameters) -> Result<()>,
) -> Result<NoopReport> {
    if without.model.geometry.enabled || !with.model.geometry.enabled {
        return Err(Error::refused("no_branch", "the baseline must lack the geometry branch, the candidate have it")
            .in_place("model.geometry.enabled"));
    }
    if without.precision != with.precision || without.train.recompute != with.train.recompute {
        return Err(Error::refused("no_branch", "the arms do not train in one regime").in_place("precision"));
    }
    let store = clips(with, cache, opening)?;
    let batch = batches::build(&store, with, 1, 0)?;
    let other = batches::build(&store, with, 2, 0)?;
    opening.begin(Phase::BuildingModel)?;
    let parameters = |recipe: &XwamRecipe| -> Result<Parameters> {
        let initial = Parameters::initialise(&parameter_specs(&recipe.model), recipe.train.seed, &Device::Cpu)?;
        Ok(initial.to_dtype(recipe.precision.params.dtype())?)
    };
    let (plain, branch) = (parameters(without)?, parameters(with)?);
    let run = |recipe: &XwamRecipe, parameters: &Parameters, input: &XwamInput| -> Result<Pass<XwamOutput>> {
        let model = XwamModel::new(&recipe.model, parameters)?;
        let weights = (recipe.flow.action_loss_weight, recipe.flow.proprio_loss_weight);
        let loss = |output: &XwamOutput| flow::losses(output, &batch.targets, weights.0, weights.1);
        Ok(forward_backward(&model, parameters, input, recipe.train.recompute, loss)?)
    };
    start(&branch)?;
    let base = run(without, &plain, &batch.input)?;
    let started = run(with, &branch, &batch.input)?;
    let again = run(with, &branch, &batch.input)?;

    for (name, variable) in branch.iter().filter(|(name, _)| is_output(name)) {
        let mut draw = Draw::new(with.model.geometry.seed, Purpose::Initialise, 1, name);
        let values: Vec<f32> = (0..variable.elem_count()).map(|_| (CONTROL * draw.normal()) as f32).collect();
        variable.set(&Tensor::from_vec(values, variable.shape(), &Device::Cpu)?.to_dtype(variable.dtype())?)?;
    }
    let trained = run(with, &branch, &batch.input)?;
    let mut swapped = batch.input.clone();
    swapped.geometry = other.input.geometry.clone();
    let elsewhere = run(with, &branch, &swapped)?;

    let zero = |name, a: &Pass<XwamOutput>, b: &Pass<XwamOutput>| -> Result<NoopCheck> {
        let heads = differences(&a.output, &b.output)?;
        let passed = heads.iter().all(|(_, difference)| *difference == 0.0);
        Ok(NoopCheck { name, wanted: "exactly 0", heads, passed })
    };
    let above = |name, a: &Pass<XwamOutput>, b: &Pass<XwamOutput>| -> Result<NoopCheck> {
        let heads = differences(&a.output, &b.output)?;
        let passed = heads.iter().all(|(_, difference)| *difference > FLOOR);
        Ok(NoopCheck { name, wanted: "above 1e-3 on every head", heads, passed })
    };
    let mut reached = Vec::new();
    for (name, gradient) in started.gradients.iter().filter(|(name, _)| is_output(name) && name.ends_with("weight")) {
        let largest = gradient.to_dtype(DType::F32)?.abs()?.flatten_all()?.max(0)?.to_scalar::<f32>()?;
        reached.push((name.clone(), f64::from(largest)));
    }
    let least = reached.iter().map(|(_, value)| *value).fold(f64::INFINITY, f64::min);
    let checks = vec![
        zero("repeat control, the same pass twice", &started, &again)?,
        zero("no-op, the branch before training against none", &started, &base)?,
        NoopCheck {
            name: "the branch learns, least gradient of its output projections",
            wanted: "above 0",
            heads: vec![("any insertion", least)],
            passed: reached.len() == with.model.geometry.layers.len() && least > 0.0 && least.is_finite(),
        },
        above("positive control, the branch as if trained", &trained, &started)?,
        above("another clip's tokens", &elsewhere, &trained)?,
    ];
    Ok(NoopReport {
        precision: with.precision,
        recompute: with.train.recompute,
        layers: with.model.geometry.layers.clone(),
        checks,
    })
}

/// Is this the last Linear of an insertion point, which starts at zero?
fn is_output(name: &str) -> bool {
    name.starts_with("geometry.layers.") && name.contains(".o.")
}

/// Largest difference of each head over the root mean square of `b`'s; infinite if a value is not finite.
fn differences(a: &XwamOutput, b: &XwamOutput) -> Result<Vec<(&'static str, f64)>> {
    let heads = [("video", &a.video, &b.video), ("action", &a.action, &b.action), ("proprio", &a.proprio, &b.proprio)];
    heads
        .into_iter()
        .map(|(head, a, b)| {
            let values =
                |tensor: &Tensor| -> Result<Vec<f64>> { Ok(tensor.to_dtype(DType::F64)?.flatten_all()?.to_vec1()?) };
            let (a, b) = (values(a)?, values(b)?);
            if a.iter().chain(&b).any(|value| !value.is_finite()) {
                return Ok((head, f64::INFINITY));
            }
            let largest = a.iter().zip(&b).fold(0.0, |most: f64, (a, b)| most.max((a - b).abs()));
            let square = b.iter().map(|value| value * value).sum::<f64>() / b.len().max(1) as f64;
            // Two heads that say nothing at all differ by nothing, and pass no control.
            Ok((head, if largest == 0.0 { 0.0 } else { largest / square.sqrt() }))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::{FitSettings, LinearCodec};
    use crate::config::{CodecConfig, ParameterFormat};
    use crate::data::{Dataset, Progress};

    struct Silent;

    impl Opening for Silent {
        fn begin(&mut self, _: Phase) -> Result<()> {
            Ok(())
        }

        fn warn(&mut self, _: String) -> Result<()> {
            Ok(())
        }

        fn watch<T: Send>(&mut self, _: Phase, work: impl FnOnce(Progress<'_>) -> Result<T> + Send) -> Result<T> {
            work(&|_, _| Ok(()))
        }
    }

    /// The two arms over the tiny dataset.
    fn arms(folder: &Path, params: ParameterFormat) -> [XwamRecipe; 2] {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let loaded = crate::config::load(&root.join("configs/xwam_demo.yaml")).unwrap();
        let mut recipe = loaded.xwam("the test").unwrap().clone();
        recipe.data.dataset = root.join("tests/data/robosuite_tiny_v21");
        recipe.data.validation_episodes = vec![3];
        recipe.precision.params = params;
        recipe.train.recompute = true;
        let model = &mut recipe.model;
        (model.dim, model.ffn_dim, model.num_layers, model.num_heads) = (48, 64, 2, 2);
        model.geometry.layers = vec![0, 1];
        let path = folder.join("codec.safetensors");
        if !path.exists() {
            let dataset = Dataset::open(&recipe.data, &recipe.model).unwrap();
            let settings = FitSettings { clips: 4, wrist_patches: 500, wrist_emphasis: 5, iterations: 2 };
            LinearCodec::fit(&dataset, settings, &|_, _| Ok(())).unwrap().save(&path).unwrap();
        }
        recipe.codec = CodecConfig::Linear { path };
        let mut with = recipe.clone();
        with.model.geometry.enabled = true;
        [recipe, with]
    }

    #[test]
    fn the_branch_is_a_no_op_in_every_regime_and_a_trace_of_it_is_found() {
        let folder = tempfile::tempdir().unwrap();
        let cache = folder.path().join("cache");
        for params in [ParameterFormat::F32, ParameterFormat::Bf16] {
            let [without, with] = arms(folder.path(), params);
            let report = check(&without, &with, &cache, &mut Silent).unwrap();
            assert!(report.passed(), "{}", report.to_text());
            assert!(report.to_text().contains(with.precision.words()));

            // The least that bf16 holds beside a residual stream of about 1, in one number of one insertion.
            let trace = |parameters: &Parameters| {
                let (_, bias) = parameters.iter().find(|(name, _)| *name == "geometry.layers.1.o.bias").unwrap();
                let mut values = vec![0f32; bias.elem_count()];
                values[0] = 1e-4;
                Ok(bias.set(&Tensor::from_vec(values, bias.shape(), &Device::Cpu)?.to_dtype(bias.dtype())?)?)
            };
            let report = check_started(&without, &with, &cache, &mut Silent, &trace).unwrap();
            let failed: Vec<&str> = report.checks.iter().filter(|c| !c.passed).map(|c| c.name).collect();
            assert_eq!(failed, ["no-op, the branch before training against none"], "{}", report.to_text());
        }
        let [without, with] = arms(folder.path(), ParameterFormat::F32);
        assert_eq!(check(&with, &without, &cache, &mut Silent).unwrap_err().code, "no_branch");
        let mut rounded = with;
        rounded.precision.params = ParameterFormat::Bf16;
        assert_eq!(check(&without, &rounded, &cache, &mut Silent).unwrap_err().code, "no_branch");
    }
}
