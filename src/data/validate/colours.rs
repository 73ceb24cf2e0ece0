//! Mean colours of what was decoded against those that the dataset's own statistics state: two views of one size that
//! were exchanged show in nothing else.

use serde::Deserialize;
use serde_json::Value;
use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use super::Finding;
use crate::Error;
use crate::data::video::Picture;

/// Mean red, green and blue, each in [0, 1].
type Rgb = [f64; 3];

/// Differences below this, summed over two views, are those of subsampling and of colour conversion.
const NOISE: f64 = 0.03;
/// Exchanged, two views must fit so many times better.
const BETTER: f64 = 3.0;

/// The mean colour of some pictures.
#[derive(Clone, Debug, Default)]
pub(in crate::data) struct MeanColour {
    /// Of Y, U and V.
    sums: [u64; 3],
    /// Of Y; of U and V.
    samples: [u64; 2],
}

impl MeanColour {
    pub fn add(&mut self, picture: &Picture) {
        for (sum, plane) in self.sums.iter_mut().zip([&picture.y, &picture.u, &picture.v]) {
            *sum += plane.iter().map(|value| u64::from(*value)).sum::<u64>();
        }
        self.samples[0] += picture.y.len() as u64;
        self.samples[1] += picture.u.len() as u64;
    }

    /// ITU-R BT.601, limited range; a mean of clipped values may differ a little from it.
    fn rgb(&self) -> Option<Rgb> {
        let mean = |at: usize| self.sums[at] as f64 / self.samples[at.min(1)] as f64;
        let (y, u, v) = ((mean(0) - 16.0) / 219.0, (mean(1) - 128.0) / 224.0, (mean(2) - 128.0) / 224.0);
        let (samples, rgb) = (self.samples[1], [y + 1.402 * v, y - 0.344_136 * u - 0.714_136 * v, y + 1.772 * u]);
        (samples > 0).then_some(rgb)
    }
}

/// The stated mean colour of each view of each episode, by `meta/episodes_stats.jsonl`; what cannot be read is left out.
pub(super) fn stated(root: &Path, views: &[String]) -> HashMap<usize, Vec<Option<Rgb>>> {
    #[derive(Deserialize)]
    struct Line {
        episode_index: usize,
        stats: BTreeMap<String, BTreeMap<String, Value>>,
    }
    // A line at a time: the file has the statistics of every column.
    let Ok(file) = std::fs::File::open(root.join("meta/episodes_stats.jsonl")) else { return HashMap::new() };
    let lines = std::io::BufRead::lines(std::io::BufReader::new(file)).map_while(Result::ok);
    let parsed = lines.filter_map(|line| serde_json::from_str::<Line>(&line).ok());
    let colours = |line: &Line| -> Vec<Option<Rgb>> {
        let mean = |view: &String| line.stats.get(view)?.get("mean").map(numbers)?.try_into().ok();
        views.iter().map(mean).collect()
    };
    parsed.map(|line| (line.episode_index, colours(&line))).collect()
}

/// The numbers in nested lists, in order.
fn numbers(value: &Value) -> Vec<f64> {
    match value {
        Value::Array(values) => values.iter().flat_map(numbers).collect(),
        other => other.as_f64().into_iter().collect(),
    }
}

/// A warning for the first two views that fit each other's statistics far better than their own.
pub(super) fn exchanged(
    episode: usize,
    views: &[String],
    found: &[MeanColour],
    stated: &[Option<Rgb>],
) -> Option<Finding> {
    let known: Vec<(&String, Rgb, Rgb)> = views
        .iter()
        .zip(found)
        .zip(stated)
        .filter_map(|((view, found), stated)| Some((view, found.rgb()?, (*stated)?)))
        .collect();
    let apart = |a: &Rgb, b: &Rgb| a.iter().zip(b).map(|(a, b)| (a - b).abs()).sum::<f64>() / 3.0;
    let pairs =
        known.iter().enumerate().flat_map(|(at, first)| known[at + 1..].iter().map(move |second| (first, second)));
    let suspect = pairs.into_iter().find(|((_, a, stated_a), (_, b, stated_b))| {
        let (as_named, exchanged) = (apart(a, stated_a) + apart(b, stated_b), apart(a, stated_b) + apart(b, stated_a));
        as_named > NOISE && exchanged * BETTER < as_named
    });
    suspect.map(|((first, ..), (second, ..))| {
        let what = format!("in episode {episode}, {first} and {second} have each other's mean colours: exchanged?");
        Finding::warning(Error::data("views_exchanged", what).in_place("meta/episodes_stats.jsonl"))
    })
}
