//! Packed attention against what must hold: the public code's predicate on every pair of tokens, a dense oracle in two
//! precisions, text slots folded without a trace, the same bits on any number of threads.

use candle_core::{DType, Device, Result, Tensor, Var};
use lbva_tui::ops::{self, AttentionPlan, Group, reference};
use lbva_tui::pack::sequence::{FrameTokens, PackedEpisode, Sequence, plan, text_rows};
use lbva_tui::random::{Draw, Purpose};
use proptest::prelude::*;
use std::sync::Arc;

// ---------------------------------------------------------------- layout

/// A token as the public code knows it: ids of its sequence, frame and noise, each -1 for padding.
#[derive(Clone, Copy, Debug)]
struct Ids {
    seq: i64,
    frame: i64,
    noise: i64,
    /// What else a token must carry into the sequence: its modulation row and RoPE position.
    row: usize,
    position: [f64; 3],
}

const PADDING: Ids = Ids { seq: -1, frame: -1, noise: -1, row: 0, position: [0.0; 3] };

/// The tokens in source order, written down from its definition.
fn source(episodes: &[PackedEpisode], frame: FrameTokens) -> Vec<Ids> {
    let mut tokens = Vec::new();
    let mut row = 0;
    for action in [false, true] {
        for noise in [0, 1] {
            for (seq, episode) in episodes.iter().enumerate() {
                for f in 0..episode.frames {
                    let id = 2 * (f / episode.chunk) as i64 + i64::from(action);
                    let (seq, id, noise) =
                        if f < episode.valid_frames { (seq as i64, id, noise) } else { (-1, -1, -1) };
                    let token = |position| Ids { seq, frame: id, noise, row, position };
                    if action {
                        let n = frame.actions;
                        let time = |j: usize| f as f64 + (j + 1) as f64 / (n + 1) as f64;
                        tokens.extend((0..n).map(|j| token([time(j), -1.0, -1.0])));
                    } else {
                        for y in 0..frame.grid[0] {
                            for x in 0..frame.grid[1] {
                                tokens.push(token([f as f64, y as f64, x as f64]));
                            }
                        }
                    }
                    row += 1;
                }
            }
        }
    }
    tokens
}

/// Whether query i sees key j in the public code, for the window of their episode.
fn sees(i: Ids, j: Ids, window: usize) -> bool {
    let streams = match (i.noise, j.noise) {
        (1, 1) => j.frame <= i.frame,
        (0, 1) => j.frame < i.frame,
        (0, 0) => j.frame == i.frame,
        _ => false,
    };
    i.seq == j.seq && i.seq >= 0 && i.frame.abs_diff(j.frame) <= window as u64 && streams
}

/// [queries][keys] of a plan.
fn matrix(plan: &AttentionPlan) -> Vec<Vec<bool>> {
    let mut seen = vec![vec![false; plan.keys()]; plan.queries()];
    for group in plan.groups() {
        for query in group.queries.clone() {
            group.intervals().flatten().for_each(|key| seen[query as usize][key] = true);
        }
    }
    seen
}

/// Pairs of a tiled kernel, counted tile by tile.
fn pairs_in_tiles(seen: &[Vec<bool>], [rows, columns]: [usize; 2]) -> u64 {
    let mut pairs = 0;
    for top in (0..seen.len()).step_by(rows) {
        for left in (0..seen[0].len()).step_by(columns) {
            let tile = seen.iter().skip(top).take(rows).flat_map(|row| row.iter().skip(left).take(columns));
            pairs += u64::from(tile.clone().any(|&seen| seen)) * (rows * columns) as u64;
        }
    }
    pairs
}

fn episode() -> impl Strategy<Value = PackedEpisode> {
    let window = prop_oneof![4 => 0..7usize, 1 => Just(64), 1 => Just(usize::MAX)];
    let chunk = prop_oneof![6 => 1..5usize, 1 => Just(11), 1 => Just(usize::MAX)];
    (0..7usize, 0..5usize, chunk, window).prop_map(|(frames, missing, chunk, window)| {
        // Mostly whole; now and then with padding, or nothing but padding.
        let valid_frames = frames.saturating_sub(missing.saturating_sub(2) * 3);
        PackedEpisode { frames, valid_frames, chunk, window }
    })
}

fn frame_tokens() -> impl Strategy<Value = FrameTokens> {
    (0..3usize, 1..3usize, 0..4usize)
        .prop_map(|(rows, columns, actions)| FrameTokens { grid: [rows, columns], actions })
        .prop_filter("a frame has tokens", |frame| frame.both() > 0)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    #[test]
    fn a_packed_sequence_is_the_public_one_in_another_order(
        episodes in prop::collection::vec(episode(), 1..4),
        frame in frame_tokens(),
        alignment in prop::sample::select(vec![1usize, 5, 16]),
        tile in [1..9usize, 1..9usize],
    ) {
        let sequence = Sequence::new(&episodes, frame, alignment).unwrap();
        let source = source(&episodes, frame);
        prop_assert_eq!(sequence.source_len(), source.len());
        prop_assert_eq!(sequence.len(), source.len().next_multiple_of(alignment));
        prop_assert_eq!(sequence.is_empty(), source.is_empty());
        let index = |token: usize| sequence.source_of_token()[token] as usize;

        // Every source token stands in one place, alignment rows after all of them.
        let mut order: Vec<usize> = (0..sequence.len()).map(index).collect();
        prop_assert!(order[source.len()..].iter().all(|&index| index == source.len()));
        order.truncate(source.len());
        order.sort_unstable();
        prop_assert!(order.iter().copied().eq(0..source.len()));

        // The heads find their tokens: gathered and taken back, the noisy segments are what they were.
        let frames: usize = episodes.iter().map(|episode| episode.frames).sum();
        let (video, actions) = (frames * frame.video(), frames * frame.actions);
        prop_assert!(sequence.noisy_video().iter().map(|&at| index(at as usize)).eq(0..video));
        prop_assert!(sequence.noisy_action().iter().map(|&at| index(at as usize)).eq(2 * video..2 * video + actions));

        let tokens: Vec<Ids> = (0..sequence.len()).map(|at| *source.get(index(at)).unwrap_or(&PADDING)).collect();
        prop_assert_eq!(sequence.rows(), 4 * frames);
        prop_assert!(sequence.row_of_token().iter().copied().eq(tokens.iter().map(|token| token.row)));
        prop_assert_eq!(sequence.positions(), tokens.iter().map(|token| token.position).collect::<Vec<_>>());

        // What a token sees is the public predicate, pair by pair.
        let seen = matrix(sequence.attention());
        for (i, row) in tokens.iter().zip(&seen) {
            let window = usize::try_from(i.seq).map_or(0, |seq| episodes[seq].window);
            for (j, &seen) in tokens.iter().zip(row) {
                prop_assert_eq!(seen, sees(*i, *j, window), "{:?} {:?}", i, j);
            }
        }

        // Groups hold the valid tokens, all of them and no others, and two intervals are enough for all.
        let groups = sequence.attention().groups();
        let planned = groups.iter().flat_map(|group| group.queries.clone().map(|query| query as usize));
        prop_assert!(planned.eq((0..tokens.len()).filter(|&at| tokens[at].seq >= 0)));
        prop_assert!(groups.iter().all(|group| (1..=2).contains(&group.intervals().count())));
        let free = plan(&episodes, frame).unwrap();
        prop_assert_eq!((free.groups(), free.queries()), (groups, source.len()));

        let visible = seen.iter().flatten().filter(|&&seen| seen).count() as u64;
        prop_assert_eq!(sequence.attention().visible_pairs(), visible);
        prop_assert_eq!(sequence.attention().computed_pairs(tile[0], tile[1]), pairs_in_tiles(&seen, tile));
    }
}

/// Two chunks of two and one frames, one video and one action token each, window of one chunk.
#[test]
fn a_sequence_written_out_by_hand() {
    let frame = FrameTokens { grid: [1, 1], actions: 1 };
    let episode = PackedEpisode { frames: 4, valid_frames: 3, chunk: 2, window: 2 };
    let sequence = Sequence::new(&[episode], frame, 10).unwrap();
    // Source: noisy video 0-3, clean video 4-7, noisy action 8-11, clean action 12-15; frame 3 is padding.
    let order = [4, 5, 12, 13, 6, 14, 0, 1, 8, 9, 2, 10, 7, 15, 3, 11, 16, 16, 16, 16];
    assert_eq!(sequence.source_of_token(), order);
    assert_eq!(sequence.noisy_video(), [6, 7, 10, 14]);
    assert_eq!(sequence.noisy_action(), [8, 9, 11, 15]);
    let groups: Vec<_> =
        sequence.attention().groups().iter().map(|group| (group.queries.clone(), group.keys.clone())).collect();
    let none = 0..0;
    assert_eq!(
        groups,
        [
            (0..2, [0..2, none.clone(), none.clone()]),
            (2..4, [0..4, none.clone(), none.clone()]),
            (4..5, [0..5, none.clone(), none.clone()]),
            (5..6, [2..6, none.clone(), none.clone()]),
            (6..8, [6..8, none.clone(), none.clone()]),
            (8..10, [0..2, 8..10, none.clone()]),
            (10..11, [0..4, 10..11, none.clone()]),
            (11..12, [2..5, 11..12, none]),
        ]
    );
    assert_eq!(sequence.positions()[3], [1.5, -1.0, -1.0]);
}

#[test]
fn packs_that_cannot_be_are_refused() {
    let frame = FrameTokens { grid: [2, 2], actions: 2 };
    let whole = PackedEpisode { frames: 3, valid_frames: 3, chunk: 2, window: 4 };
    for (episode, frame, alignment, why) in [
        (PackedEpisode { chunk: 0, ..whole }, frame, 1, "needs a chunk"),
        (PackedEpisode { valid_frames: 4, ..whole }, frame, 1, "valid frames"),
        (PackedEpisode { frames: usize::MAX, ..whole }, frame, 1, "more than 4294967295 tokens"),
        (whole, FrameTokens { grid: [usize::MAX, 2], actions: 0 }, 1, "more than 4294967295 tokens"),
        (PackedEpisode { frames: 1 << 30, ..whole }, frame, 1, "more than 4294967295 tokens"),
        (whole, FrameTokens { grid: [3, 0], actions: 0 }, 1, "no token"),
        (whole, frame, 0, "aligned to 0"),
        (whole, frame, usize::MAX, "aligned to"),
    ] {
        let error = Sequence::new(&[episode], frame, alignment).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    }
    let sequence = Sequence::new(&[whole, whole], frame, 1).unwrap();
    for (prompts, real, why) in [
        (vec![0], vec![3], "1 prompts for 2 episodes"),
        (vec![0, 1], vec![3], "prompt 1 of 1"),
        (vec![0, 0], vec![9], "does not fit 8 slots"),
    ] {
        let error = sequence.cross_attention(&prompts, &real, 8).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    }
}

#[test]
fn episodes_see_their_prompt_and_padding_sees_none() {
    let frame = FrameTokens { grid: [1, 2], actions: 1 };
    let episode = |frames, valid_frames| PackedEpisode { frames, valid_frames, chunk: 2, window: 4 };
    let sequence = Sequence::new(&[episode(2, 1), episode(1, 1), episode(2, 2)], frame, 8).unwrap();
    let plan = sequence.cross_attention(&[1, 0, 1], &[4, 2], 4).unwrap();
    assert_eq!(text_rows(&[4, 2], 4), [0..4, 4..7], "a full prompt has no folded row");
    let groups: Vec<_> = plan.groups().iter().map(|group| (group.queries.clone(), group.keys[0].clone())).collect();
    assert_eq!(groups, [(0..6, 4..7), (6..12, 0..4), (12..24, 4..7)], "valid tokens of both copies, in one group");
    assert_eq!((plan.queries(), plan.keys()), (sequence.len(), 7));
    assert_eq!(plan.key_bias().unwrap(), [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 2f32.ln()]);
    assert_eq!(sequence.cross_attention(&[0, 0, 0], &[4], 4).unwrap().key_bias(), None);
}

// ---------------------------------------------------------------- op

type Attention = fn(&Tensor, &Tensor, &Tensor, usize, &Arc<AttentionPlan>) -> Result<Tensor>;

fn random(shape: [usize; 2], dtype: DType, item: &str) -> Tensor {
    let values = Draw::new(3, Purpose::Noise, 0, item).normals(shape[0] * shape[1]);
    Tensor::from_vec(values, &shape[..], &Device::Cpu).unwrap().to_dtype(dtype).unwrap()
}

fn inputs(plan: &AttentionPlan, width: usize, dtype: DType) -> [Tensor; 3] {
    let (queries, keys) = (plan.queries(), plan.keys());
    [("q", queries), ("k", keys), ("v", keys)].map(|(item, rows)| random([rows, width], dtype, item))
}

/// Output and the gradients of q, k, v of a weighted sum of it.
fn run(attention: Attention, inputs: &[Tensor; 3], heads: usize, plan: &Arc<AttentionPlan>) -> [Tensor; 4] {
    let [q, k, v] = inputs.each_ref().map(|tensor| Var::from_tensor(tensor).unwrap());
    let out = attention(&q, &k, &v, heads, plan).unwrap();
    let weights = random([plan.queries(), q.dim(1).unwrap()], out.dtype(), "weights");
    let gradients = (&out * weights).unwrap().sum_all().unwrap().backward().unwrap();
    let gradient = |of: &Var| gradients.get(of).expect("gradient reaches every input").clone();
    [out.clone(), gradient(&q), gradient(&k), gradient(&v)]
}

fn values(tensor: &Tensor) -> Vec<f64> {
    tensor.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// The largest difference as a share of the largest value.
fn difference(a: &Tensor, b: &Tensor) -> f64 {
    assert_eq!(a.dims(), b.dims());
    let (a, b) = (values(a), values(b));
    assert!(a.iter().all(|x| x.is_finite()));
    let scale = b.iter().fold(1.0f64, |m, x| m.max(x.abs()));
    a.iter().zip(&b).fold(0.0f64, |m, (a, b)| m.max((a - b).abs())) / scale
}

const NAMES: [&str; 4] = ["output", "gradient of q", "gradient of k", "gradient of v"];

fn assert_close(a: &[Tensor; 4], b: &[Tensor; 4], tolerance: f64) {
    for (name, (a, b)) in NAMES.iter().zip(a.iter().zip(b)) {
        let difference = difference(a, b);
        assert!(difference < tolerance, "{name}: differs by {difference:.2e}");
    }
}

/// Any plan at all: gaps between groups, up to three intervals, groups that see nothing, with and without bias.
fn any_plan() -> impl Strategy<Value = AttentionPlan> {
    let group = (0..4u32, 1..90u32, prop::collection::vec(0..40u32, 6), 0..4usize);
    (prop::collection::vec(group, 1..6), 1..40u32, any::<bool>()).prop_map(|(parts, keys, biased)| {
        let mut end = 0;
        let mut groups = Vec::new();
        for (gap, count, mut borders, intervals) in parts {
            borders.iter_mut().for_each(|border| *border %= keys + 1);
            borders.sort_unstable();
            let keys = [0, 1, 2].map(|i| if i < intervals { borders[2 * i]..borders[2 * i + 1] } else { 0..0 });
            groups.push(Group { queries: end + gap..end + gap + count, keys });
            end += gap + count;
        }
        let bias = biased.then(|| Draw::new(5, Purpose::Noise, 0, "bias").normals(keys as usize));
        AttentionPlan::new(end as usize + 2, keys as usize, groups, bias).unwrap()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    #[test]
    fn planned_attention_is_masked_dense_attention(plan in any_plan(), heads in 1..4usize, head_dim in 1..10usize) {
        let plan = Arc::new(plan);
        for (dtype, tolerance) in [(DType::F64, 1e-12), (DType::F32, 1e-5)] {
            let inputs = inputs(&plan, heads * head_dim, dtype);
            let planned = run(ops::planned_attention, &inputs, heads, &plan);
            assert_close(&planned, &run(reference::planned_attention, &inputs, heads, &plan), tolerance);
            // Where nothing is seen, exact zeros.
            let seen = matrix(&plan);
            for tensor in &planned[..2] {
                for (row, _) in seen.iter().enumerate().filter(|(_, row)| !row.contains(&true)) {
                    prop_assert!(values(&tensor.get(row).unwrap()).iter().all(|&x| x == 0.0));
                }
            }
        }
    }
}

fn packed() -> Sequence {
    let episode = |frames, valid_frames, chunk, window| PackedEpisode { frames, valid_frames, chunk, window };
    let episodes = [episode(40, 38, 4, 16), episode(13, 13, 1, 64), episode(7, 0, 2, 4), episode(20, 20, 3, 1)];
    Sequence::new(&episodes, FrameTokens { grid: [2, 3], actions: 2 }, 128).unwrap()
}

#[test]
fn a_packed_sequence_attends_as_the_dense_oracle_does() {
    let plan = packed().attention().clone();
    for (dtype, tolerance) in [(DType::F64, 1e-12), (DType::F32, 1e-5)] {
        let inputs = inputs(&plan, 16, dtype);
        let planned = run(ops::planned_attention, &inputs, 2, &plan);
        assert_close(&planned, &run(reference::planned_attention, &inputs, 2, &plan), tolerance);
        for tensor in &planned {
            assert!(values(tensor).iter().any(|&x| x != 0.0));
        }
    }
}

#[test]
fn the_number_of_threads_changes_no_bit() {
    let sequence = packed();
    let cross = sequence.cross_attention(&[0, 1, 1, 0], &[5, 9], 32).unwrap();
    for plan in [sequence.attention(), &cross] {
        let inputs = inputs(plan, 24, DType::F32);
        let bits = |threads| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let tensors = pool.install(|| run(ops::planned_attention, &inputs, 3, plan));
            let bits = |tensor: &Tensor| tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            tensors.map(|tensor| bits(&tensor).into_iter().map(f32::to_bits).collect::<Vec<_>>())
        };
        let alone = bits(1);
        assert_eq!(alone, bits(2));
        assert_eq!(alone, bits(7));
    }
}

/// 512 slots of which those after the prompt hold one vector, against the prompt and one key for all the others.
#[test]
fn folded_text_slots_leave_no_trace() {
    const SLOTS: usize = 512;
    let (real, prompt_of_episode) = ([11, SLOTS, 0, 7], [3, 0, 1, 2]);
    let sequence = packed();
    let folded = sequence.cross_attention(&prompt_of_episode, &real, SLOTS).unwrap();
    let rows = text_rows(&real, SLOTS);
    // Slot -> folded row, and for each slot what the f32 bias of its folded row is off by.
    let (mut row_of_slot, mut residue) = (Vec::new(), Vec::new());
    for (text, real) in rows.iter().zip(real) {
        row_of_slot.extend((0..SLOTS).map(|slot| text.start as u32 + slot.min(real) as u32));
        let exact = ((SLOTS - real) as f64).ln();
        let off = folded.key_bias().unwrap()[text.end - 1] as f64 - exact;
        residue.extend((0..SLOTS).map(|slot| if slot < real { 0.0 } else { off as f32 }));
    }
    let groups = folded.groups().iter().map(|group| {
        let prompt = rows.iter().position(|text| text.start == group.keys[0].start as usize).unwrap();
        let keys = [(prompt * SLOTS) as u32..((prompt + 1) * SLOTS) as u32, 0..0, 0..0];
        Group { queries: group.queries.clone(), keys }
    });
    let groups: Vec<Group> = groups.collect();
    let keys = real.len() * SLOTS;
    let slots = |bias| Arc::new(AttentionPlan::new(sequence.len(), keys, groups.clone(), bias).unwrap());
    let index = Tensor::new(row_of_slot, &Device::Cpu).unwrap();
    let inputs = inputs(&folded, 16, DType::F64);
    let [q, k, v] = &inputs;
    let spread = [q.clone(), k.index_select(&index, 0).unwrap(), v.index_select(&index, 0).unwrap()];
    let few = run(ops::planned_attention, &inputs, 2, &folded);
    // The gradient of a folded row is the sum over its slots: what index_select's backward adds up.
    let gather = |[out, dq, dk, dv]: [Tensor; 4]| {
        let sum = |slots: Tensor| k.zeros_like().unwrap().index_add(&index, &slots, 0).unwrap();
        [out, dq, sum(dk), sum(dv)]
    };
    let many = run(ops::planned_attention, &spread, 2, &slots(None));
    assert_close(&few, &gather(many), 1e-6);
    // Not even in f64, once the 512 slots share the rounding of ln(count) to f32.
    let many = run(ops::planned_attention, &spread, 2, &slots(Some(residue)));
    assert_close(&few, &gather(many), 1e-12);
}

#[test]
fn half_precision_computes_in_f32_and_returns_as_it_came() {
    let plan = packed().attention().clone();
    for dtype in [DType::BF16, DType::F16] {
        let inputs = inputs(&plan, 16, dtype);
        let wide = inputs.each_ref().map(|tensor| tensor.to_dtype(DType::F32).unwrap());
        let half = ops::planned_attention(&inputs[0], &inputs[1], &inputs[2], 2, &plan).unwrap();
        let float = ops::planned_attention(&wide[0], &wide[1], &wide[2], 2, &plan).unwrap();
        assert_eq!(half.dtype(), dtype);
        assert_eq!(values(&half), values(&float.to_dtype(dtype).unwrap()));
        assert!(run(ops::planned_attention, &inputs, 2, &plan).iter().all(|tensor| tensor.dtype() == dtype));
    }
}

#[test]
fn tensors_that_do_not_fit_the_plan_are_refused() {
    let group = Group { queries: 0..2, keys: [0..3, 0..0, 0..0] };
    let plan = Arc::new(AttentionPlan::new(2, 3, vec![group], None).unwrap());
    let tensor = |rows, width| random([rows, width], DType::F32, "x");
    let call = |q, k, v, heads| {
        ops::planned_attention(&q, &k, &v, heads, &plan).map_err(|error| error.to_string()).map(|_| ())
    };
    assert!(call(tensor(2, 4), tensor(3, 4), tensor(3, 4), 2).is_ok());
    for (q, k, v, heads) in [
        (tensor(3, 4), tensor(3, 4), tensor(3, 4), 2),
        (tensor(2, 4), tensor(2, 4), tensor(3, 4), 2),
        (tensor(2, 4), tensor(3, 4), tensor(3, 6), 2),
        (tensor(2, 4), tensor(3, 4), tensor(3, 4), 3),
        (tensor(2, 4), tensor(3, 4), tensor(3, 4), 0),
    ] {
        assert!(call(q, k, v, heads).unwrap_err().contains("planned_attention"));
    }
}
