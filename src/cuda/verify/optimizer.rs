//! What passes over flat buffers: norm, update, sums of gradients, the search for a bad one, random values.

use super::Table;
use super::rig::{Format, Matrix, Rig, Verdict};
use crate::Result;
use crate::cuda::launch::Slice;
use crate::cuda::optimizer::{self, NormBuffer, UpdateBuffers, UpdateRule};
use crate::random::Draw;

const RULE: UpdateRule = UpdateRule { clip_norm: 2.0, betas: [0.9, 0.95], eps: 1e-8, weight_decay: 0.1 };
/// Large, so that parameters are mostly what the updates made of them.
const RATE: f64 = 1e-2;
const STEPS: u64 = 4;

pub(super) fn all(rig: &mut Rig<'_>, table: &mut Table) {
    for count in [3, 10_007, 1_200_000] {
        let shape = format!("{count} elements");
        table.case(rig, "adamw", format!("{shape}, {STEPS} steps"), |rig| adamw(rig, count));
        table.case(rig, "accumulate", shape.clone(), |rig| accumulate(rig, count));
        table.case(rig, "fill_normal", shape.clone(), |rig| fill_normal(rig, count, 0));
        if !rig.half() {
            table.case(rig, "square_sum", shape.clone(), |rig| square_sum(rig, count, None));
        }
    }
    table
        .case(rig, "fill_normal", "10007 elements from 2^40 + 3".into(), |rig| fill_normal(rig, 10_007, (1 << 40) + 3));
    table.case(rig, "fill_normal, moments", "1200000 elements".into(), moments);
    table.case(rig, "adamw", "10007 elements, NaN in the norm".into(), |rig| adamw_of_nan(rig, 10_007));
    if !rig.half() {
        for bad in [f64::NAN, f64::INFINITY] {
            table.case(rig, "square_sum", format!("10007 elements, {bad} among them"), |rig| {
                square_sum(rig, 10_007, Some(bad))
            });
        }
        for count in [7, 1_200_003] {
            table.case(rig, "first_non_finite", format!("{count} elements, the last"), |rig| {
                first_non_finite(rig, count, &[count - 1])
            });
        }
        table.case(rig, "first_non_finite", "1200003 elements, three".into(), |rig| {
            let mut places: Vec<usize> = (0..3).map(|_| rig.draw().below(1_200_003)).collect();
            places.sort_unstable();
            first_non_finite(rig, 1_200_003, &places)
        });
        table.case(rig, "first_non_finite", "10007 elements, none".into(), |rig| first_non_finite(rig, 10_007, &[]));
    }
}

/// One parameter's state in f64.
#[derive(Clone, Copy, Debug)]
struct State {
    master: f64,
    first: f64,
    second: f64,
}

impl State {
    /// The update of `train::optimizer`, with its constants rounded to f32 as they are there.
    fn update(&mut self, gradient: f64, norm: f64, rule: &UpdateRule, lr: f64, step: u64) {
        let narrow = |value: f64| f64::from(value as f32);
        let scale = if norm > rule.clip_norm { rule.clip_norm / norm } else { 1.0 };
        let [exact1, exact2] = rule.betas;
        let [beta1, beta2] = rule.betas.map(narrow);
        let correction1 = 1.0 - exact1.powi(step as i32);
        let root_correction2 = 1.0 / (1.0 - exact2.powi(step as i32)).sqrt();
        let gradient = gradient * scale;
        self.first = beta1 * self.first + (1.0 - beta1) * gradient;
        self.second = beta2 * self.second + (1.0 - beta2) * gradient * gradient;
        self.master = self.master * (1.0 - lr * rule.weight_decay)
            - lr / correction1 * self.first / (self.second.sqrt() * root_correction2 + rule.eps);
    }
}

/// Norm and update, several steps of the same gradients, by turns larger and smaller.
fn adamw(rig: &mut Rig<'_>, count: usize) -> Result<Verdict> {
    let row = Matrix::new(1, count);
    let half = rig.half();
    let initial = rig.floats(row, 0.02)?.values;
    let gradients = rig.floats(row, 1.0)?;
    let weights: Vec<f32> = (1..=STEPS).map(|step| if step % 2 == 0 { 0.25 } else { 1.0 }).collect();
    let mut states: Vec<State> = initial.iter().map(|&master| State { master, first: 0.0, second: 0.0 }).collect();
    let square: f64 = gradients.values.iter().map(|g| g * g).sum();
    for (step, &weight) in (1..).zip(&weights) {
        let weight = f64::from(weight);
        let norm = weight * square.sqrt();
        for (state, gradient) in states.iter_mut().zip(&gradients.values) {
            state.update(weight * gradient, norm, &RULE, RATE, step);
        }
    }
    let pick = |pick: fn(&State) -> f64| -> Vec<f64> { states.iter().map(pick).collect() };
    let (master, first, second) = (pick(|s| s.master), pick(|s| s.first), pick(|s| s.second));
    let zeros = vec![0.0; count];

    let parameters = rig.changed("parameters", rig.operand, row, &initial)?;
    let master_out = rig.changed("masters", Format::F32, row, &initial)?;
    let first_out = rig.changed("first moments", Format::F32, row, &zeros)?;
    let second_out = rig.changed("second moments", Format::F32, row, &zeros)?;
    let gradient_out = rig.changed("gradients", Format::F32, row, &zeros)?;
    let mut outputs = vec![
        (&parameters, master.as_slice()),
        (&first_out, &first),
        (&second_out, &second),
        // Zero after an update.
        (&gradient_out, &zeros),
    ];
    if half {
        outputs.push((&master_out, &master));
    }
    let buffers = UpdateBuffers {
        parameters: parameters.place.slice(),
        master: if half { master_out.place.slice() } else { Slice::null() },
        first: first_out.place.slice(),
        second: second_out.place.slice(),
        gradients: gradient_out.place.slice(),
    };
    rig.compare(&outputs, |rig| {
        let norm = NormBuffer(rig.arena.take(NormBuffer::LEN)?);
        let launcher = rig.launcher().clone();
        for (step, &weight) in (1..).zip(&weights) {
            // Gradients are f32 whatever the operands are.
            optimizer::accumulate(&launcher, false, gradients.place.slice(), buffers.gradients, weight)?;
            optimizer::square_sum(&launcher, buffers.gradients, norm)?;
            optimizer::adamw(&launcher, half, &buffers, norm, &RULE, RATE, step)?;
        }
        Ok(())
    })
}

/// Nothing at all is written.
fn adamw_of_nan(rig: &mut Rig<'_>, count: usize) -> Result<Verdict> {
    let row = Matrix::new(1, count);
    let half = rig.half();
    let mut state = |name, format| -> Result<_> {
        let values = rig.normal(format, row, 1.0, 0.0)?.values;
        Ok((rig.changed(name, format, row, &values)?.within(0.0), values))
    };
    let parameters = state("parameters", if half { Format::Bf16 } else { Format::F32 })?;
    let master = state("masters", Format::F32)?;
    let first = state("first moments", Format::F32)?;
    let second = state("second moments", Format::F32)?;
    let mut gradients = state("gradients", Format::F32)?.1;
    gradients[count / 2] = f64::NAN;
    let gradient_out = rig.changed("gradients", Format::F32, row, &gradients)?.within(0.0);
    let buffers = UpdateBuffers {
        parameters: parameters.0.place.slice(),
        master: if half { master.0.place.slice() } else { Slice::null() },
        first: first.0.place.slice(),
        second: second.0.place.slice(),
        gradients: gradient_out.place.slice(),
    };
    let states = [&parameters, &master, &first, &second];
    let mut outputs: Vec<_> = states.into_iter().map(|(output, values)| (output, values.as_slice())).collect();
    outputs.push((&gradient_out, &gradients));
    rig.compare(&outputs, |rig| {
        let norm = NormBuffer(rig.arena.take(NormBuffer::LEN)?);
        let launcher = rig.launcher().clone();
        optimizer::square_sum(&launcher, buffers.gradients, norm)?;
        optimizer::adamw(&launcher, half, &buffers, norm, &RULE, RATE, 1)
    })
}

fn square_sum(rig: &mut Rig<'_>, count: usize, bad: Option<f64>) -> Result<Verdict> {
    let row = Matrix::new(1, count);
    let mut values = rig.floats(row, 1.0)?.values;
    if let Some(bad) = bad {
        values[count / 3] = bad;
    }
    let gradients = rig.given(Format::F32, row, values)?;
    let square: f64 = gradients.values.iter().map(|g| g * g).sum();
    let total = rig.output("norm squared", Format::F64, Matrix::new(1, 1))?;
    rig.compare(&[(&total, &[square])], |rig| {
        let norm = NormBuffer(rig.arena.take(NormBuffer::LEN)?);
        optimizer::square_sum(rig.launcher(), gradients.place.slice(), norm)?;
        rig.launcher().copy(norm.total(), total.place.slice(), 8)
    })
}

/// dst += weight src.
fn accumulate(rig: &mut Rig<'_>, count: usize) -> Result<Verdict> {
    const WEIGHT: f32 = 0.3;
    let row = Matrix::new(1, count);
    let (half, from) = (rig.half(), rig.operands(row, 1.0)?);
    let before = rig.floats(row, 1.0)?.values;
    let to = rig.changed("sums", Format::F32, row, &before)?;
    let add = |(before, from): (&f64, &f64)| before + f64::from(WEIGHT) * from;
    let expected: Vec<f64> = before.iter().zip(&from.values).map(add).collect();
    rig.compare(&[(&to, &expected)], |rig| {
        optimizer::accumulate(rig.launcher(), half, from.place.slice(), to.place.slice(), WEIGHT)
    })
}

/// `bad`: ascending places of NaN and infinities.
fn first_non_finite(rig: &mut Rig<'_>, count: usize, bad: &[usize]) -> Result<Verdict> {
    let row = Matrix::new(1, count);
    let mut values = rig.floats(row, 1.0)?.values;
    for (&place, value) in bad.iter().zip([f64::NEG_INFINITY, f64::NAN, f64::INFINITY]) {
        values[place] = value;
    }
    let gradients = rig.given(Format::F32, row, values)?;
    let none = u64::MAX as f64;
    let index = rig.changed("index", Format::U64, Matrix::new(1, 1), &[none])?;
    let expected = bad.first().map_or(none, |&place| place as f64);
    rig.compare(&[(&index, &[expected])], |rig| {
        optimizer::first_non_finite(rig.launcher(), gradients.place.slice(), index.place.slice())
    })
}

/// Philox4x32 of 10 rounds (Salmon et al., 2011).
fn philox(counter: u64, seed: u64) -> [u32; 4] {
    let mut words = [counter as u32, (counter >> 32) as u32, 0, 0];
    let mut key = [seed as u32, (seed >> 32) as u32];
    for _ in 0..10 {
        let wide = [u64::from(words[0]) * 0xD251_1F53, u64::from(words[2]) * 0xCD9E_8D57];
        let [high0, high1] = wide.map(|wide| (wide >> 32) as u32);
        let [low0, low1] = wide.map(|wide| wide as u32);
        words = [high1 ^ words[1] ^ key[0], low1, high0 ^ words[3] ^ key[1], low0];
        key = [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)];
    }
    words
}

/// Elements `offset` .. `offset` + `count` of a seed's stream: two words are a pair of normals.
fn normals(seed: u64, offset: u64, count: usize) -> Vec<f64> {
    let element = |index: u64| {
        let words = philox(index / 4, seed);
        let pair = (index % 4 / 2) as usize;
        let unit = 2f64.powi(-32);
        let radius = (-2.0 * (f64::from(words[2 * pair]) * unit + 0.5 * unit).ln()).sqrt();
        let angle = std::f64::consts::TAU * f64::from(words[2 * pair + 1]) * unit;
        if index.is_multiple_of(2) { radius * angle.cos() } else { radius * angle.sin() }
    };
    (offset..offset + count as u64).map(element).collect()
}

fn seed(draw: &mut Draw) -> u64 {
    (draw.uniform() * 2f64.powi(53)) as u64
}

/// Every element against the formula.
fn fill_normal(rig: &mut Rig<'_>, count: usize, offset: u64) -> Result<Verdict> {
    const STD: f32 = 0.02;
    let seed = seed(rig.draw());
    let out = rig.output("values", rig.operand, Matrix::new(1, count))?;
    let expected: Vec<f64> = normals(seed, offset, count).into_iter().map(|value| f64::from(STD) * value).collect();
    let half = rig.half();
    rig.compare(&[(&out, &expected)], |rig| {
        optimizer::fill_normal(rig.launcher(), half, out.place.slice(), STD, seed, offset)
    })
}

/// Mean, variance and fourth moment of the formula itself, which the device was held to above.
fn moments(rig: &mut Rig<'_>) -> Result<Verdict> {
    const COUNT: usize = 1_200_000;
    let seed = seed(rig.draw());
    let half = rig.half();
    let out = rig.output("values", rig.operand, Matrix::new(1, COUNT))?;
    let launch = |rig: &mut Rig<'_>| optimizer::fill_normal(rig.launcher(), half, out.place.slice(), 1.0, seed, 0);
    let (values, mut verdict) = rig.measure(&out, launch)?;
    let mean = |power: i32| values.iter().map(|value| value.powi(power)).sum::<f64>() / COUNT as f64;
    // Six standard deviations of each estimate: sqrt(1, 2, 96 over the count).
    for (output, error, spread) in
        [("mean", mean(1), 1.0), ("variance", mean(2) - 1.0, 2.0), ("kurtosis", mean(4) - 3.0, 96.0)]
    {
        let limit = 6.0 * f64::sqrt(spread / COUNT as f64);
        // Rounding to bf16 moves the moments by less than it does a value.
        let rounding = if half { 2e-4 } else { 0.0 };
        verdict.checks.push(super::rig::Check { output, error: error.abs(), limit: limit + rounding, stray: false });
    }
    Ok(verdict)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Parameters;
    use crate::train::optimizer::{AdamW, GradientSum};
    use candle_core::{Device, Tensor, Var};

    #[test]
    fn an_update_is_that_of_the_optimizer() -> crate::Result<()> {
        let initial = [0.02f32, -0.5, 1.0, 0.0];
        let gradients = [3.0f32, -0.01, 0.5, 1e-3];
        let variable = Var::from_tensor(&Tensor::new(&initial, &Device::Cpu)?)?;
        let parameters = Parameters::from_variables([("w".to_owned(), (variable, true))].into());
        let mut optimizer = AdamW::new(&parameters)?;
        let recipe = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/recipe.yaml");
        let train = crate::config::load(&recipe)?.train().clone();
        let rule = UpdateRule::from(&train);
        let mut states = initial.map(|master| State { master: master.into(), first: 0.0, second: 0.0 });
        let norm = gradients.iter().map(|&g| f64::from(g) * f64::from(g)).sum::<f64>().sqrt();
        for step in 1..=3 {
            let mut sum = GradientSum::default();
            sum.add(&[("w".to_owned(), Tensor::new(&gradients, &Device::Cpu)?)].into(), 1.0)?;
            optimizer.update(&parameters, &sum, &train, RATE, step)?;
            for (state, &gradient) in states.iter_mut().zip(&gradients) {
                state.update(gradient.into(), norm, &rule, RATE, step);
            }
        }
        let theirs: Vec<f32> = parameters.get("w")?.to_vec1()?;
        for (state, theirs) in states.iter().zip(theirs) {
            assert!((state.master - f64::from(theirs)).abs() < 1e-6, "{state:?} {theirs}");
        }
        Ok(())
    }

    #[test]
    fn philox_gives_the_published_words_and_normals_are_normal() {
        // Known answers of Random123's test vectors for philox4x32-10 with counter and key 0.
        assert_eq!(philox(0, 0), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        let values = normals(7, 3, 40_000);
        assert_eq!(values[1..], normals(7, 4, 39_999), "an element does not depend on where the stream begins");
        let mean = values.iter().sum::<f64>() / 4e4;
        let square = values.iter().map(|value| value * value).sum::<f64>() / 4e4;
        assert!(mean.abs() < 0.03 && (square - 1.0).abs() < 0.04, "{mean} {square}");
    }
}
