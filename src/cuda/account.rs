//! Whose the memory of a GPU is in a micro-step, and how much it will be before there is a GPU.
//!
//! State and arena are exact: the one is counted, the other is the program itself run without a device. What candle takes in
//! embedders and heads ("islands"), and the driver for itself, are measured figures.

use super::batch::{BatchSize, BatchTables};
use super::flat::FlatLayout;
use super::gemm::Gemm;
use super::host::HostRoom;
use super::launch::Launcher;
use super::trunk::{KeepPolicy, Trunk, adjacent};
use crate::Result;
use crate::model::TrunkShape;
use crate::train::forecast::GpuForecast;
use std::sync::Arc;

/// What driver and libraries hold of a GPU before anything is allocated: 1.0 GB on an H200 with driver 580.
const CONTEXT: u64 = 1 << 30;
/// Left free when the arena is sized, for libraries and for what candle's tensors of many sizes leave between them: with
/// 0.5 GiB candle finds no place for one, with 1.3 it does.
const RESERVE: u64 = 1536 << 20;

/// Bytes of a micro-step by whom they belong to.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct MemoryAccount {
    /// Parameters, gradients and the optimizer's.
    pub state: u64,
    /// The arena as it was allocated.
    pub arena: u64,
    /// The most that candle had beside these: until the trunk began, in the heads, and in the backward pass of trunk and
    /// embedders.
    pub islands: [u64; 3],
    /// What `islands` was predicted to be at most.
    pub predicted_islands: u64,
}

impl MemoryAccount {
    /// The most that was allocated at once.
    pub fn peak(&self) -> u64 {
        self.state + self.arena + self.islands.into_iter().max().unwrap_or(0)
    }

    /// What that was predicted to be.
    pub fn predicted(&self) -> u64 {
        self.state + self.arena + self.predicted_islands
    }
}

/// Bytes that candle takes at most in embedders and heads, which is in the embedders' backward pass. Measured with
/// `bench trunk` (`islands_gb`): 24 bytes a token and channel and 0.75 GB at 18 tokens a modulation row, of which 5 are for six
/// parts a row, a few times over. That is of LingBot-VA, whose heads read half of the tokens; for heads that read every token,
/// as X-WAM's, their part counts twice, which is an estimate.
pub(super) fn islands_bytes(size: &BatchSize, width: usize) -> u64 {
    let [tokens, read, rows, width] = [size.tokens, size.read, size.rows, width].map(|count| count as u64);
    (13 * tokens + 12 * read + 6 * 16 * rows) * width + (768 << 20) * width / 3072
}

/// What may go into the arena of `unused` bytes.
pub(super) fn room(unused: u64, islands: u64) -> u64 {
    unused.saturating_sub(RESERVE + islands)
}

/// What training a model with these tensors (name, elements, trained) on batches of this size, `alone` in their steps or not, takes of
/// a GPU of `total` bytes. How much of the host's memory there will be nobody knows yet, so nothing is kept there.
pub(crate) fn forecast(
    shape: TrunkShape,
    tensors: &[(String, usize, bool)],
    half: bool,
    (size, alone): (&BatchSize, bool),
    total: u64,
) -> Result<GpuForecast> {
    let tensors = tensors.iter().map(|(name, len, trained)| (name.as_str(), *len, *trained));
    let flat = FlatLayout::new(tensors, &adjacent(&shape.names, shape.depth))?;
    let state = flat.state_bytes(half, true);
    let trunk = Trunk::new(shape, Launcher::counting(), Arc::new(Gemm::counting()), half, &flat, 0, 0)?;
    let tables = BatchTables::sized(size, trunk.rotary_pairs(), trunk.attention().tiling())?;
    let islands = islands_bytes(size, shape.width);
    let beside = CONTEXT + state + islands;
    let least = trunk.predict(&tables, &KeepPolicy::NOTHING, alone)?.device;
    let most = trunk.predict(&tables, &KeepPolicy::everything(shape.depth), alone)?.device;
    let budget = room(total.saturating_sub(CONTEXT + state), islands);
    let fits = if least <= budget {
        Some(trunk.policy_within(&tables, budget, (HostRoom::default(), None), alone)?)
    } else {
        None
    };
    let (peak, kept) = fits.map(|(policy, needed)| (beside + needed.device, policy.to_string())).unzip();
    Ok(GpuForecast { total, state, least: beside + least, most: beside + most, peak, kept })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Recipe;
    use crate::model::{LingbotModel, lingbot_parameter_specs};

    /// What one H200 did: with the optimizer, 4 episodes of 280 latent frames fit, and those of 400 do not.
    #[test]
    fn the_5b_trunk_fits_an_h200_as_measured() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/configs/furniture_all_e128.yaml");
        let recipe = serde_yaml::from_str(&std::fs::read_to_string(path).expect("read")).expect("a recipe");
        let Recipe::Lingbot(recipe) = recipe else { panic!("{path} is of LingBot-VA") };
        let shape = LingbotModel::shape(&recipe.model);
        let specs = lingbot_parameter_specs(&recipe.model);
        let tensors: Vec<(String, usize, bool)> =
            specs.iter().map(|spec| (spec.name.clone(), spec.count(), spec.trained)).collect();
        let of = |frames: usize, alone: bool| {
            let size = BatchSize { tokens: 288 * frames, read: 144 * frames, text: 2048, rows: 16 * frames };
            forecast(shape, &tensors, true, (&size, alone), 150_100_000_000).expect("a forecast")
        };
        let fits = of(280, false);
        assert!((91.0e9..92.5e9).contains(&(fits.state as f64)), "{fits:?}");
        assert!(fits.least < fits.most && fits.peak.is_some_and(|peak| peak <= 150_100_000_000));
        assert!(of(400, false).peak.is_none());
        let lent = of(128, false).most - of(128, true).most;
        assert!((10_000_000_000..20_000_000_000).contains(&lent), "{lent}");
    }
}
