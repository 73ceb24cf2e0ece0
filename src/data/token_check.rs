//! What a cache of geometry tokens must be before a branch is trained on it: whole, finite, repeatable, and encoded
//! from all source views together.
//!
//! The encoder is another program. What it does shows in what it wrote: encoding again must give the same bits, and encoding
//! with one view replaced must change the tokens of the others, or each view was encoded by itself.

use super::geometry::{GeometryCache, GeometryInfo};
use super::identity::{self, sha256_hex};
use crate::{Error, Result};
use rayon::prelude::*;
use serde::Serialize;
use std::path::Path;

/// Relative change of the untouched views' tokens below which views were encoded apart. A joint encoder was measured at
/// 28.4 %; rounding alone stays far below this.
const COUPLING_FLOOR: f64 = 1e-3;

/// What a cache holds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TokenSummary {
    pub info: GeometryInfo,
    pub episodes: usize,
    /// Cached frames of all episodes.
    pub frames: usize,
    /// Over every token file, by its name: two caches of one content have one hash, wherever they lie.
    pub sha256: String,
}

/// Tokens of a cache against those of another that should be the same.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Repeat {
    /// Frames that both caches have; one may have more.
    pub frames: usize,
    /// Largest absolute difference of a number.
    pub largest: f64,
}

/// Tokens of a cache against those of one that was made with one view's pictures replaced.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Coupling {
    pub replaced: String,
    pub frames: usize,
    /// Of each other view, |a - b| / |a| over all its tokens.
    pub change: Vec<(String, f64)>,
}

/// Reads every row of every file of a dataset's cache: the summary, and what is wrong, one error a file; `token_checksum` if
/// all can be read and are not what was written.
///
/// # Errors
/// `geometry_missing` without a cache; those of its `info.json`.
pub fn inspect(dataset: &Path) -> Result<(TokenSummary, Vec<Error>)> {
    let cache = open(dataset)?;
    let episodes = cache.episodes()?;
    let read = |&episode: &usize| -> Result<(usize, String)> {
        let file = cache.open_file(episode)?;
        let frames = file.frames()?;
        frames.iter().try_for_each(|&frame| file.row(frame).map(drop))?;
        Ok((frames.len(), format!("{episode:06} {}\n", file.sha256())))
    };
    let files: Vec<Result<(usize, String)>> = episodes.par_iter().map(read).collect();
    let (mut frames, mut list, mut problems) = (0, String::new(), Vec::new());
    for file in files {
        match file {
            Ok((rows, line)) => {
                frames += rows;
                list += &line;
            }
            Err(problem) => problems.push(problem),
        }
    }
    let info = cache.info().clone();
    if problems.is_empty() {
        let found = identity::sha256_files(episodes.iter().map(|&episode| cache.file(episode)))?;
        if found != info.sha256_of_files {
            let what = format!("the files' SHA-256 is {found}, sha256_of_files says {}", info.sha256_of_files);
            let hint = "a file was changed, lost or added since: copy or make the cache again";
            problems.push(Error::data("token_checksum", what).at(cache.folder().join("info.json")).hint(hint));
        }
    }
    let summary = TokenSummary { info, episodes: episodes.len(), frames, sha256: sha256_hex(list.as_bytes()) };
    Ok((summary, problems))
}

/// Compares with a cache that the same encoder made again of the same pictures.
///
/// # Errors
/// `tokens_not_repeatable` at the first number that differs in any bit; `tokens_not_comparable`.
pub fn repeat(dataset: &Path, again: &Path) -> Result<Repeat> {
    let (cache, other) = pair(dataset, again)?;
    let mut found = Repeat { frames: 0, largest: 0.0 };
    let mut first = None;
    each_shared_row(&cache, &other, |episode, frame, left, right| {
        found.frames += 1;
        for (at, (a, b)) in left.iter().zip(right).enumerate() {
            if a.to_bits() != b.to_bits() {
                found.largest = found.largest.max(f64::from((a - b).abs()));
                first.get_or_insert((episode, frame, at));
            }
        }
    })?;
    match first {
        None => Ok(found),
        Some((episode, frame, at)) => {
            let what = format!(
                "encoding again gave other tokens, by up to {:e}, first at frame {frame}, number {at}",
                found.largest
            );
            Err(Error::data("tokens_not_repeatable", what)
                .at(other.file(episode))
                .hint("seed the encoder, or switch its dropout and its choice of algorithms off"))
        }
    }
}

/// Compares with a cache that was made with the pictures of the view `replaced` exchanged for others.
///
/// # Errors
/// `tokens_not_joint` if the tokens of another view hardly changed; `unknown_view`; `tokens_not_comparable`.
pub fn coupling(dataset: &Path, replaced: &str, exchanged: &Path) -> Result<Coupling> {
    let (cache, other) = pair(dataset, exchanged)?;
    let views = cache.info().views.clone();
    if !views.iter().any(|view| view == replaced) {
        let what = format!("the token cache has no view {replaced}; it has {}", views.join(", "));
        return Err(Error::usage("unknown_view", what));
    }
    if views.len() < 2 {
        return Err(Error::refused("tokens_not_comparable", "one view alone cannot be encoded jointly").at(dataset));
    }
    let each = cache.tokens_per_frame() / views.len() * cache.info().dim;
    let mut sums = vec![(0.0f64, 0.0f64); views.len()];
    let mut frames = 0;
    each_shared_row(&cache, &other, |_, _, left, right| {
        frames += 1;
        for ((sum, a), b) in sums.iter_mut().zip(left.chunks(each)).zip(right.chunks(each)) {
            for (a, b) in a.iter().zip(b) {
                let (a, b) = (f64::from(*a), f64::from(*b));
                *sum = (sum.0 + (a - b).powi(2), sum.1 + a.powi(2));
            }
        }
    })?;
    let change = views.iter().zip(&sums).filter(|(view, _)| *view != replaced);
    let change: Vec<(String, f64)> = change
        .map(|(view, (difference, norm))| (view.clone(), (difference / norm.max(f64::MIN_POSITIVE)).sqrt()))
        .collect();
    match change.iter().find(|(_, change)| *change < COUPLING_FLOOR) {
        None => Ok(Coupling { replaced: replaced.to_owned(), frames, change }),
        Some((view, change)) => {
            let what = format!(
                "with {replaced} replaced, the tokens of {view} change by {change:.1e} of their size (floor {COUPLING_FLOOR:e}): \
                 the views were encoded apart"
            );
            Err(Error::data("tokens_not_joint", what).at(exchanged).hint("encode all views of a frame in one pass"))
        }
    }
}

fn open(dataset: &Path) -> Result<GeometryCache> {
    GeometryCache::open(dataset)?.ok_or_else(|| {
        Error::data("geometry_missing", "the dataset has no cache of geometry tokens")
            .at(dataset.join("geometry/info.json"))
    })
}

fn pair(dataset: &Path, other: &Path) -> Result<(GeometryCache, GeometryCache)> {
    let (cache, second) = (open(dataset)?, open(other)?);
    let differences = cache.info().differences(second.info());
    if !differences.is_empty() {
        let what = format!("the caches were not made alike: {}", differences.join("; "));
        return Err(Error::refused("tokens_not_comparable", what).at(other.join("geometry/info.json")));
    }
    Ok((cache, second))
}

/// Calls `see` with episode, frame and both rows of every frame that both caches have.
fn each_shared_row(
    cache: &GeometryCache,
    other: &GeometryCache,
    mut see: impl FnMut(usize, usize, &[f32], &[f32]),
) -> Result<()> {
    let (ours, theirs) = (cache.episodes()?, other.episodes()?);
    let mut shared = 0;
    for episode in ours.into_iter().filter(|episode| theirs.contains(episode)) {
        let (left, right) = (cache.open_file(episode)?, other.open_file(episode)?);
        let there = right.frames()?;
        for frame in left.frames()?.into_iter().filter(|frame| there.contains(frame)) {
            see(episode, frame, &left.row(frame)?, &right.row(frame)?);
            shared += 1;
        }
    }
    if shared == 0 {
        return Err(Error::refused("tokens_not_comparable", "the caches have no frame in common"));
    }
    Ok(())
}

impl GeometryCache {
    /// Numbers of the episodes that have a token file, ascending.
    fn episodes(&self) -> Result<Vec<usize>> {
        let mut episodes = Vec::new();
        for chunk in names(self.folder())?.into_iter().filter(|name| name.starts_with("chunk-")) {
            let files = names(&self.folder().join(chunk))?;
            let number = |name: &String| name.strip_prefix("episode_")?.strip_suffix(".safetensors")?.parse().ok();
            episodes.extend(files.iter().filter_map(number).filter(|&episode| self.file(episode).is_file()));
        }
        episodes.sort_unstable();
        Ok(episodes)
    }
}

fn names(folder: &Path) -> Result<Vec<String>> {
    let entries = std::fs::read_dir(folder).and_then(|entries| {
        entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect::<std::io::Result<_>>()
    });
    entries.map_err(|error| Error::data("not_openable", format!("folder cannot be read: {error}")).at(folder))
}
