//! Predicting one chunk of video after its clean history.
//!
//! Clean tokens never see noisy ones, so a history goes through the blocks once and leaves its keys and values there;
//! a sampler step then runs the tokens of the chunk alone. What sees what is read off the plan of training: a chunk is
//! predicted under the very rule under which it was learnt. A shorter history is a prefix of a longer one, so the chunks
//! of an episode share a pass.

use super::{LingbotModel, action_rows};
use crate::model::block::{Conditioning, Memory, Placement, Sight};
use crate::model::timestep::sinusoid_f32;
use crate::ops::{AttentionPlan, Group, RopeTable, Rows};
use crate::pack::sequence::{FrameTokens, PackedEpisode, Sequence};
use candle_core::{Result, Tensor, bail};
use std::sync::Arc;

/// The clean frames before a chunk: all of their episode's from its first.
#[derive(Clone, Debug)]
pub struct CleanHistory {
    /// [C, F, H, W]; whole chunks, or no frame.
    pub video: Tensor,
    /// [A, F, n]
    pub action: Tensor,
    /// Text embedding [r, text_dim] without the zero rows that fill the text slots.
    pub prompt: Tensor,
    /// Latent frames of a chunk.
    pub chunk: usize,
    /// Reach of attention into the past, in half-chunks.
    pub window: usize,
}

/// What the blocks keep of a history.
#[derive(Clone, Debug)]
pub struct EpisodeHistory {
    /// Of the history and one chunk more.
    sequence: Sequence,
    /// Latent frames of the history, and of a chunk.
    frames: usize,
    chunk: usize,
    tokens: FrameTokens,
    /// One a block; none without a history.
    memory: Vec<Memory>,
    /// Embedded text, [1, S, D], and what a token sees of it.
    text: Tensor,
    text_plan: Arc<AttentionPlan>,
}

/// What one chunk sees of the past.
#[derive(Clone, Debug)]
pub struct ChunkHistory {
    /// One a block; none if no token of the past is seen.
    memory: Vec<Memory>,
    /// Tokens of the past that are seen.
    past: usize,
    /// RoPE positions of the video tokens of a whole chunk.
    positions: Vec<[f64; 3]>,
    tokens: FrameTokens,
    text: Tensor,
    text_plan: Arc<AttentionPlan>,
}

impl EpisodeHistory {
    /// What chunk `chunk` sees: all of the history that is before it and within its window.
    ///
    /// # Errors
    /// If the history ends before the chunk begins.
    pub fn before(&self, chunk: usize) -> Result<ChunkHistory> {
        if chunk > self.frames / self.chunk {
            bail!("chunk {chunk} needs a history of {} frames, there are {}", chunk * self.chunk, self.frames);
        }
        let clean = (self.frames + self.chunk) * self.tokens.both();
        let first = clean + chunk * self.chunk * self.tokens.both();
        // The group's last interval is the chunk itself.
        let groups = self.sequence.attention().groups();
        let group = groups.iter().find(|group| group.queries.start as usize == first);
        let Some(group) = group else { bail!("chunk {chunk} has no tokens") };
        let past = group.intervals().next().filter(|keys| keys.start < first).unwrap_or(0..0);
        let memory = if past.is_empty() { &[] } else { &self.memory[..] };
        Ok(ChunkHistory {
            past: past.len(),
            memory: memory.iter().map(|memory| memory.of(past.clone())).collect::<Result<_>>()?,
            positions: self.sequence.positions()[first..][..self.chunk * self.tokens.video()].to_vec(),
            tokens: self.tokens,
            text: self.text.clone(),
            text_plan: Arc::clone(&self.text_plan),
        })
    }
}

/// The plan of `queries` tokens that see all that the plan's tokens see.
fn for_tokens(plan: &AttentionPlan, queries: usize) -> Result<Arc<AttentionPlan>> {
    let bias = plan.key_bias().map(<[f32]>::to_vec);
    everything(queries, plan.keys(), bias).map(Arc::new)
}

fn everything(queries: usize, keys: usize, bias: Option<Vec<f32>>) -> Result<AttentionPlan> {
    let group = Group { queries: 0..queries as u32, keys: [0..keys as u32, 0..0, 0..0] };
    AttentionPlan::new(queries, keys, vec![group], bias)
}

impl LingbotModel {
    /// Runs a clean history through the blocks, at t = 0. Keeps no graph.
    ///
    /// # Errors
    /// If the parts do not fit the model or one another, or the frames are no whole chunks.
    pub fn prefill(&self, history: &CleanHistory) -> Result<EpisodeHistory> {
        let CleanHistory { video, action, prompt, chunk, window } = history;
        let (channels, frames, height, width) = video.dims4()?;
        let (action_channels, action_frames, actions) = action.dims3()?;
        let [patch_t, patch_h, patch_w] = self.config.patch_size;
        if [channels, action_channels] != [self.config.in_dim, self.config.action_dim]
            || patch_t != 1
            || height % patch_h != 0
            || width % patch_w != 0
            || action_frames != frames
            || *chunk == 0
            || frames % chunk != 0
        {
            let (video, action) = (video.dims(), action.dims());
            bail!("video {video:?} and actions {action:?} are no history of whole chunks of {chunk} frames");
        }
        let tokens = FrameTokens { grid: [height / patch_h, width / patch_w], actions };
        let all = frames + chunk;
        let episode = PackedEpisode { frames: all, valid_frames: all, chunk: *chunk, window: *window };
        let sequence = Sequence::new(&[episode], tokens, 1)?;
        let text = self.embedded(std::slice::from_ref(prompt))?.detach();
        let text_plan = sequence.cross_attention(&[0], &[prompt.dim(0)?], self.config.text_len)?;

        let memory = if frames == 0 {
            Vec::new()
        } else {
            let x = self.clean_tokens(history, &sequence, tokens)?;
            self.remember(x, &sequence, all * 2 * tokens.video(), text.clone(), &text_plan)?
        };
        Ok(EpisodeHistory { sequence, frames, chunk: *chunk, tokens, memory, text, text_plan })
    }

    /// The embedded clean tokens of the history, [1, N, D] in the order of the sequence, where they come first.
    fn clean_tokens(&self, history: &CleanHistory, sequence: &Sequence, tokens: FrameTokens) -> Result<Tensor> {
        let frames = history.video.dim(1)?;
        let all = frames + history.chunk;
        let device = self.head_modulation.device();
        let source = Tensor::cat(
            &[
                self.patch_embedding.forward(&self.patches(&history.video.to_device(device)?)?)?,
                self.action_embedder.forward(&action_rows(&history.action.to_device(device)?)?)?,
            ],
            0,
        )?;
        // The sequence counts [noisy video | clean video | noisy action | clean action] of `all` frames.
        let (noisy_video, noisy_action) = (all * tokens.video(), all * tokens.actions);
        let order: Vec<u32> = sequence.source_of_token()[..frames * tokens.both()]
            .iter()
            .map(|&source| match (source as usize).checked_sub(2 * noisy_video + noisy_action) {
                Some(action) => (frames * tokens.video() + action) as u32,
                None => source - noisy_video as u32,
            })
            .collect();
        source.index_select(&Tensor::from_slice(&order, order.len(), source.device())?, 0)?.unsqueeze(0)
    }

    /// What each block keeps of clean tokens x [1, N, D], the first N of the sequence; those from `first_action` on in
    /// its source order are actions.
    fn remember(
        &self,
        x: Tensor,
        sequence: &Sequence,
        first_action: usize,
        text: Tensor,
        text_plan: &AttentionPlan,
    ) -> Result<Vec<Memory>> {
        let count = x.dim(1)?;
        let groups = sequence.attention().groups().iter().filter(|group| group.queries.end as usize <= count);
        let plan = AttentionPlan::new(count, count, groups.cloned().collect(), None)?;
        let is_action = |source: &u32| usize::from(*source as usize >= first_action);
        let placement = Placement {
            table: self.rope_table(&sequence.positions()[..count]),
            rows: Rows::new(sequence.source_of_token()[..count].iter().map(is_action).collect(), 2),
            sight: Sight::Planned { tokens: Arc::new(plan), text: for_tokens(text_plan, count)? },
            video_tokens: 0,
            sources: None,
            read: None,
        };
        let now = sinusoid_f32(&[0.0], self.config.freq_dim, self.head_modulation.dtype(), x.device())?;
        let (video, action) = (self.video_time.forward(&now)?, self.action_time.forward(&now)?);
        let conditioning = Conditioning {
            e: Tensor::cat(&[video.0, action.0], 0)?.unsqueeze(0)?.detach(),
            e0: Tensor::cat(&[video.1, action.1], 0)?.unsqueeze(0)?.detach(),
            text,
            geometry: None,
        };
        let mut x = self.stream(&x)?.detach();
        let mut memories = Vec::with_capacity(self.blocks.len());
        for block in &self.blocks {
            let (y, memory) = block.forward_after(&x, &conditioning, &placement, None)?;
            memories.push(memory.of(0..count)?);
            x = y.detach();
        }
        Ok(memories)
    }

    /// Velocity (noise - data) of the noisy video of a chunk, [C, K, H, W] at timestep `t` of 0..1000; K may be less than
    /// a whole chunk. Keeps no graph; the answer is where the question was.
    ///
    /// # Errors
    /// If the video does not fit the model or the history's chunk.
    pub fn chunk_velocity(&self, history: &ChunkHistory, noisy: &Tensor, t: f64) -> Result<Tensor> {
        let (channels, frames, height, width) = noisy.dims4()?;
        let [_, patch_h, patch_w] = self.config.patch_size;
        let [h, w] = history.tokens.grid;
        let count = frames * history.tokens.video();
        if [channels, height, width] != [self.config.in_dim, h * patch_h, w * patch_w]
            || frames == 0
            || count > history.positions.len()
        {
            bail!("video {:?} is no chunk after its history", noisy.dims());
        }
        let placement = Placement {
            table: self.rope_table(&history.positions[..count]),
            rows: Rows::new(vec![0; count], 1),
            sight: Sight::Planned {
                tokens: Arc::new(everything(count, history.past + count, None)?),
                text: for_tokens(&history.text_plan, count)?,
            },
            video_tokens: 0,
            sources: None,
            read: None,
        };
        let now =
            sinusoid_f32(&[t], self.config.freq_dim, self.head_modulation.dtype(), self.head_modulation.device())?;
        let (e, e0) = self.video_time.forward(&now)?;
        let conditioning = Conditioning {
            e0: e0.unsqueeze(0)?.detach(),
            e: e.unsqueeze(0)?.detach(),
            text: history.text.clone(),
            geometry: None,
        };
        let device = self.head_modulation.device();
        let mut x = self
            .stream(&self.patch_embedding.forward(&self.patches(&noisy.to_device(device)?)?)?.unsqueeze(0)?)?
            .detach();
        for (layer, block) in self.blocks.iter().enumerate() {
            x = block.forward_after(&x, &conditioning, &placement, history.memory.get(layer))?.0.detach();
        }
        let velocity = self.unpatched(&self.head(&x, &conditioning.e, &self.video_head)?, frames, [h, w])?;
        velocity.detach().to_device(noisy.device())
    }

    fn rope_table(&self, positions: &[[f64; 3]]) -> RopeTable {
        RopeTable::new(positions, RopeTable::lingbot_axes(self.config.dim / self.config.num_heads))
    }
}
