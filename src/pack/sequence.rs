//! Where each token of a packed LingBot-VA sequence stands and what it sees.
//!
//! The public code lays a batch out as [noisy video | clean video | noisy action | clean action] and evaluates a
//! predicate on every pair of tokens. Everything but attention is per token, so tokens may stand in any order, and in
//! the order (episode, clean before noisy, frame id) whatever a token sees is at most two intervals: history, which is
//! clean, and for noisy tokens the own group. A frame id is 2 (f div chunk) for video and one more for actions; the
//! window counts frame ids. Episodes of a pack have lengths, chunks and windows of their own.

use crate::ops::{AttentionPlan, Group};
use candle_core::{Result, bail};
use std::ops::Range;
use std::sync::Arc;

/// Tokens of one latent frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameTokens {
    /// Video tokens: rows, columns after patching.
    pub grid: [usize; 2],
    /// Action tokens, n.
    pub actions: usize,
}

impl FrameTokens {
    /// Video tokens of a frame.
    pub fn video(self) -> usize {
        self.grid[0] * self.grid[1]
    }

    /// Tokens of a frame, one copy.
    pub fn both(self) -> usize {
        self.video() + self.actions
    }
}

/// One episode of a pack. Frames from `valid_frames` on are padding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PackedEpisode {
    pub frames: usize,
    pub valid_frames: usize,
    /// Latent frames of a chunk; the last chunk may be shorter.
    pub chunk: usize,
    /// How far back a token sees, in frame ids: two for each chunk.
    pub window: usize,
}

impl PackedEpisode {
    /// A chunk longer than the episode is the episode: no product below overflows.
    fn chunk(&self) -> usize {
        self.chunk.min(self.frames.max(1))
    }

    /// Valid tokens, both copies.
    fn valid_tokens(&self, frame: FrameTokens) -> usize {
        2 * self.valid_frames * frame.both()
    }

    /// `frames` cut at chunk borders.
    fn chunks(&self, frames: Range<usize>) -> impl Iterator<Item = Range<usize>> {
        let chunk = self.chunk();
        (frames.start / chunk..frames.end.div_ceil(chunk))
            .map(move |k| frames.start.max(k * chunk)..frames.end.min((k + 1) * chunk))
            .filter(|frames| !frames.is_empty())
    }
}

/// The four segments of the source order.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Segment {
    NoisyVideo,
    CleanVideo,
    NoisyAction,
    CleanAction,
}

impl Segment {
    fn is_video(self) -> bool {
        matches!(self, Self::NoisyVideo | Self::CleanVideo)
    }

    /// Where the segment starts in the source order, in tokens, for a pack of `frames` frames.
    fn start(self, frames: usize, frame: FrameTokens) -> usize {
        let (video, actions) = (frames * frame.video(), frames * frame.actions);
        match self {
            Self::NoisyVideo => 0,
            Self::CleanVideo => video,
            Self::NoisyAction => 2 * video,
            Self::CleanAction => 2 * video + actions,
        }
    }
}

/// One frame of one segment: its tokens are consecutive in the source order and in the sequence.
struct Run {
    segment: Segment,
    /// Index in its episode.
    frame: usize,
    /// Index in the pack, over all episodes.
    frame_of_pack: usize,
}

/// Visits all runs in sequence order: valid ones by (episode, clean before noisy, frame id), then padding likewise.
fn visit_runs(episodes: &[PackedEpisode], mut visit: impl FnMut(Run)) {
    for padding in [false, true] {
        let mut before = 0;
        for episode in episodes {
            let frames = if padding { episode.valid_frames..episode.frames } else { 0..episode.valid_frames };
            for segments in [[Segment::CleanVideo, Segment::CleanAction], [Segment::NoisyVideo, Segment::NoisyAction]] {
                for chunk in episode.chunks(frames.clone()) {
                    for segment in segments {
                        for frame in chunk.clone() {
                            visit(Run { segment, frame, frame_of_pack: before + frame });
                        }
                    }
                }
            }
            before += episode.frames;
        }
    }
}

/// Tokens of a pack before alignment, or why it is none.
fn token_count(episodes: &[PackedEpisode], frame: FrameTokens) -> Result<usize> {
    for (index, episode) in episodes.iter().enumerate() {
        if episode.chunk == 0 || episode.valid_frames > episode.frames {
            bail!("pack: episode {index} needs a chunk and at most as many valid frames as frames: {episode:?}");
        }
    }
    if frame.grid.contains(&0) && frame.actions == 0 {
        bail!("pack: a frame has no token: {frame:?}");
    }
    let count = || {
        let frames = episodes.iter().try_fold(0usize, |sum, episode| sum.checked_add(episode.frames))?;
        let per_frame = frame.grid[0].checked_mul(frame.grid[1])?.checked_add(frame.actions)?;
        frames.checked_mul(2)?.checked_mul(per_frame).filter(|&tokens| tokens <= u32::MAX as usize)
    };
    match count() {
        Some(tokens) => Ok(tokens),
        None => bail!("pack: {} episodes of {frame:?} have more than {} tokens", episodes.len(), u32::MAX),
    }
}

/// Self-attention of a pack without alignment rows, in time that does not depend on the tokens of a frame.
///
/// # Errors
/// If an episode has no chunk or more valid frames than frames, a frame no token, or the pack more than 2^32 - 1.
pub fn plan(episodes: &[PackedEpisode], frame: FrameTokens) -> Result<AttentionPlan> {
    plan_of_length(episodes, frame, token_count(episodes, frame)?)
}

fn plan_of_length(episodes: &[PackedEpisode], frame: FrameTokens, length: usize) -> Result<AttentionPlan> {
    let ids = |episode: &PackedEpisode| 2 * episode.valid_frames.div_ceil(episode.chunk());
    let mut groups = Vec::with_capacity(episodes.iter().map(|episode| 2 * ids(episode)).sum());
    let mut add = |queries: Range<u32>, [first, second]: [Range<u32>; 2]| {
        let keys = if first.is_empty() { [second, 0..0, 0..0] } else { [first, second, 0..0] };
        if !queries.is_empty() {
            groups.push(Group { queries, keys });
        }
    };
    // Where each frame id starts in either copy of an episode, and the copy's end.
    let mut starts = Vec::new();
    let mut clean = 0;
    for episode in episodes {
        starts.clear();
        for frames in episode.chunks(0..episode.valid_frames) {
            let video = (frames.start * frame.both()) as u32;
            starts.extend([video, video + (frames.len() * frame.video()) as u32]);
        }
        let copy = (episode.valid_frames * frame.both()) as u32;
        starts.push(copy);
        let noisy = clean + copy;
        let oldest = |id: usize| clean + starts[id.saturating_sub(episode.window)];
        for (id, own) in starts.windows(2).enumerate() {
            add(clean + own[0]..clean + own[1], [oldest(id)..clean + own[1], 0..0]);
        }
        for (id, own) in starts.windows(2).enumerate() {
            let queries = noisy + own[0]..noisy + own[1];
            add(queries.clone(), [oldest(id)..clean + own[0], queries]);
        }
        clean = noisy + copy;
    }
    AttentionPlan::new(length, length, groups, None)
}

/// Key rows of each prompt in [`Sequence::cross_attention`]: its real tokens, then one folded row if it has fewer than
/// `slots`. Prompts follow one another.
pub fn text_rows(real_tokens: &[usize], slots: usize) -> Vec<Range<usize>> {
    let mut start = 0;
    let rows = |&real: &usize| {
        let range = start..start + real + usize::from(real < slots);
        start = range.end;
        range
    };
    real_tokens.iter().map(rows).collect()
}

/// Where each token of a packed sequence stands and what it sees.
#[derive(Clone, Debug)]
pub struct Sequence {
    episodes: Vec<PackedEpisode>,
    frame: FrameTokens,
    source_len: usize,
    source_of_token: Vec<u32>,
    noisy_video: Vec<u32>,
    noisy_action: Vec<u32>,
    row_of_token: Vec<usize>,
    attention: Arc<AttentionPlan>,
}

impl Sequence {
    /// The sequence of some episodes, its length rounded up to a multiple of `alignment`.
    ///
    /// # Errors
    /// As [`plan`], or if the alignment is 0.
    pub fn new(episodes: &[PackedEpisode], frame: FrameTokens, alignment: usize) -> Result<Self> {
        let source_len = token_count(episodes, frame)?;
        let aligned = source_len.checked_next_multiple_of(alignment).filter(|&len| len <= u32::MAX as usize);
        let Some(len) = aligned else { bail!("pack: {source_len} tokens cannot be aligned to {alignment}") };
        let frames = episodes.iter().map(|episode| episode.frames).sum::<usize>();
        let mut source_of_token = Vec::with_capacity(len);
        let mut row_of_token = Vec::with_capacity(len);
        let mut noisy_video = vec![0; frames * frame.video()];
        let mut noisy_action = vec![0; frames * frame.actions];
        visit_runs(episodes, |run| {
            let tokens = if run.segment.is_video() { frame.video() } else { frame.actions };
            let source = run.segment.start(frames, frame) + run.frame_of_pack * tokens;
            let heads = match run.segment {
                Segment::NoisyVideo => &mut noisy_video[..],
                Segment::NoisyAction => &mut noisy_action[..],
                Segment::CleanVideo | Segment::CleanAction => &mut [],
            };
            let position = source_of_token.len() as u32;
            for (at, position) in heads.iter_mut().skip(run.frame_of_pack * tokens).take(tokens).zip(position..) {
                *at = position;
            }
            source_of_token.extend(source as u32..(source + tokens) as u32);
            let row = run.segment as usize * frames + run.frame_of_pack;
            row_of_token.resize(row_of_token.len() + tokens, row);
        });
        source_of_token.resize(len, source_len as u32);
        row_of_token.resize(len, 0);
        let attention = Arc::new(plan_of_length(episodes, frame, len)?);
        let episodes = episodes.to_vec();
        Ok(Self { episodes, frame, source_len, source_of_token, noisy_video, noisy_action, row_of_token, attention })
    }

    /// L, a multiple of the alignment.
    pub fn len(&self) -> usize {
        self.source_of_token.len()
    }

    /// Whether there is no token.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Tokens of the source order: noisy video of all episodes, clean video, noisy action, clean action, each episode
    /// frame-major ((f, y, x) or (f, j)), padding frames included.
    pub fn source_len(&self) -> usize {
        self.source_len
    }

    /// Source index of each token in sequence order; alignment rows have `source_len()`, a zero row that the caller
    /// appends.
    pub fn source_of_token(&self) -> &[u32] {
        &self.source_of_token
    }

    /// Sequence positions of the noisy video tokens, in source order.
    pub fn noisy_video(&self) -> &[u32] {
        &self.noisy_video
    }

    /// Sequence positions of the noisy action tokens, in source order.
    pub fn noisy_action(&self) -> &[u32] {
        &self.noisy_action
    }

    /// Modulation row of each token in sequence order: [noisy video (episode, frame) | clean video | noisy action |
    /// clean action]. Alignment rows use row 0.
    pub fn row_of_token(&self) -> &[usize] {
        &self.row_of_token
    }

    /// Modulation rows: four for each frame.
    pub fn rows(&self) -> usize {
        4 * self.episodes.iter().map(|episode| episode.frames).sum::<usize>()
    }

    /// RoPE position (time, height, width) of each token in sequence order: video (f, y, x), action j of n at
    /// (f + (j+1)/(n+1), -1, -1), clean and noisy alike, alignment rows 0.
    pub fn positions(&self) -> Vec<[f64; 3]> {
        let [rows, columns] = self.frame.grid;
        let mut positions = Vec::with_capacity(self.len());
        visit_runs(&self.episodes, |run| {
            let f = run.frame as f64;
            if run.segment.is_video() {
                let cells = (0..rows).flat_map(|y| (0..columns).map(move |x| [f, y as f64, x as f64]));
                positions.extend(cells);
            } else {
                let n = self.frame.actions;
                positions.extend((1..=n).map(|j| [f + j as f64 / (n + 1) as f64, -1.0, -1.0]));
            }
        });
        positions.resize(self.len(), [0.0; 3]);
        positions
    }

    /// What each token sees of the sequence.
    pub fn attention(&self) -> &Arc<AttentionPlan> {
        &self.attention
    }

    /// What each token sees of the text; key rows as [`text_rows`] has them.
    ///
    /// `prompt_of_episode[e]` indexes `real_tokens`, which may serve several episodes. The model attends all `slots` of
    /// a text, and those after its `real_tokens` are zeros, hence one constant vector after the text MLP: together they
    /// are exactly one key with ln(count) added to its score.
    ///
    /// # Errors
    /// If the episodes do not each have a prompt, or a prompt has more real tokens than slots.
    pub fn cross_attention(
        &self,
        prompt_of_episode: &[usize],
        real_tokens: &[usize],
        slots: usize,
    ) -> Result<Arc<AttentionPlan>> {
        if prompt_of_episode.len() != self.episodes.len() {
            bail!("pack: {} prompts for {} episodes", prompt_of_episode.len(), self.episodes.len());
        }
        if let Some(real) = real_tokens.iter().find(|&&real| real > slots) {
            bail!("pack: a prompt of {real} tokens does not fit {slots} slots");
        }
        let rows = text_rows(real_tokens, slots);
        let keys = rows.last().map_or(0, |last| last.end);
        if keys > u32::MAX as usize {
            bail!("pack: {keys} text rows are more than {}", u32::MAX);
        }
        let mut groups = Vec::with_capacity(self.episodes.len());
        let mut start = 0;
        for (episode, &prompt) in self.episodes.iter().zip(prompt_of_episode) {
            let Some(text) = rows.get(prompt) else { bail!("pack: prompt {prompt} of {}", rows.len()) };
            let end = start + episode.valid_tokens(self.frame);
            groups.push(Group {
                queries: start as u32..end as u32,
                keys: [text.start as u32..text.end as u32, 0..0, 0..0],
            });
            start = end;
        }
        let mut bias = vec![0f32; keys];
        for (text, &real) in rows.iter().zip(real_tokens).filter(|(_, real)| **real < slots) {
            bias[text.end - 1] = ((slots - real) as f64).ln() as f32;
        }
        let folded = real_tokens.iter().any(|&real| real < slots);
        Ok(Arc::new(AttentionPlan::new(self.len(), keys, groups, folded.then_some(bias))?))
    }
}
