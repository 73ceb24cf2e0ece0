#!/usr/bin/env python3
"""The same work in PyTorch as `lbva-tui bench trunk`: LingBot-VA forward and backward over packed episodes on one GPU.

It is meant to be the strongest PyTorch that a user could reasonably write, so that a comparison with it says something:
- modulation per row (a frame of a copy of a kind of token), not per token as in the public code: the time embedders run
  on 9 times fewer rows, and all tokens of a row share it by broadcasting, which needs no index in either direction;
- FlexAttention with its own tiles; the mask reads three numbers a query and one a key from tensors that keep their
  place, and its blocks come from runs of equal tokens, so a new (chunk, window) compiles nothing and costs about 1 ms;
- q, k, v by one product; cross attention dense within an episode (FlashAttention); RoPE in f32 (public code: f64);
- `--mode compile` (default): torch.compile of a whole block with its recomputation inside, so that the compiler fuses both.
  `--mode plain`: eager blocks around compiled FlexAttention.
Kept as in the public code: bf16 parameters and residual, modulation and norms in f32, one activation checkpoint a block,
all tokens through all blocks. Memory that is left can buy time: `--keep N` recomputes nothing of the first N blocks;
`--budget F` has the compiler choose, in every block, what to keep within the fraction F of what it would keep freely. There is no optimizer: a step is zero_grad, the
draw's mask, forward, backward. The published model has one text embedder more, which it never uses; this has not.

One JSON line a configuration on stdout: the keys of `lbva-tui bench trunk --json` and more. `first_s` runs from the start of
the program (of a later configuration: from its own) to the end of the first step, `first_step_s` is that step alone.
Memory in GB of 1e9 bytes.
"""

import time

STARTED = time.perf_counter()  # before torch: what its import takes is part of a first step

import argparse
import gc
import json
import math
import statistics
import subprocess
import sys
from dataclasses import dataclass

import torch
import torch._functorch.config
from torch import nn
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.utils.checkpoint import checkpoint

EPSILON = 1e-6
TILE = 128  # rows and columns of a block of the mask


@dataclass(frozen=True)
class Sizes:
    """The published 5 B model, and the tokens of a frame of two 128x128 views (each is in the sequence twice)."""

    dim: int = 3072
    heads: int = 24
    ffn: int = 14336
    layers: int = 30
    latent: int = 192  # 48 channels x a patch of 1x2x2
    action: int = 30
    text_dim: int = 4096
    text_tokens: int = 512
    frequencies: int = 256
    rows: int = 4  # video tokens of a frame stand in a grid
    columns: int = 8
    actions: int = 4

    @property
    def video(self):
        return self.rows * self.columns

    @property
    def frame(self):
        return self.video + self.actions


class Sequence:
    """Where the tokens of `batch` episodes of `frames` latent frames stand, and what each sees.

    Order: episode, copy (noisy, clean), frame, kind (video, action). So every frame is `sizes.frame` tokens in a row,
    and the mask touches only 2 % more tiles (chunk 2, window 34) than if tokens were sorted by what they see.
    """

    def __init__(self, sizes, batch, frames, device):
        self.batch, self.frames, self.device = batch, frames, device
        self.tokens = batch * 2 * frames * sizes.frame
        self.cos, self.sin = (t.repeat(batch * 2, 1) for t in rotary(sizes, frames, device))  # [tokens, head_dim / 2]
        # A run: the tokens of one frame, copy and kind. They see and are seen alike.
        self.lengths = torch.tensor([sizes.video, sizes.actions], device=device).repeat(batch * 2 * frames)
        ends = self.lengths.cumsum(0)
        tiles = -(-self.tokens // TILE)
        first = torch.arange(tiles, device=device) * TILE
        # [runs, tiles]: which run has tokens in which tile
        self.touches = ((ends - self.lengths)[:, None] < first + TILE) & (ends[:, None] > first)
        self.touches = self.touches.float()
        self.whole = first + TILE <= self.tokens
        # Read by the mask at run time; a draw changes their values, never the tensors.
        code, low, high = (torch.empty(self.tokens, dtype=torch.int32, device=device) for _ in range(3))
        self.per_token = (code, low, high)

        def sees(_batch, _head, query, key):
            key_code = code[key]
            return (key_code == code[query]) | ((key_code >= low[query]) & (key_code <= high[query]))

        self.sees = sees

    def draw(self, chunk, window):
        """The mask of a draw. With id = 2 * (frame // chunk), + 1 for actions, and |difference of ids| <= window: a clean
        token sees clean ones of ids up to its own; a noisy one clean ones of lower ids, and noisy ones of its id."""
        count = dict(dtype=torch.int32, device=self.device)
        stride = 2 * self.frames + 2
        ids = 2 * (torch.arange(self.frames, **count) // chunk)[:, None] + torch.arange(2, **count)  # [frames, kinds]
        copies = (torch.arange(self.batch * 2, **count) * stride).view(self.batch, 2, 1, 1)
        clean = copies[:, 1:]
        noisy_sees_less = torch.tensor([1, 0], **count).view(1, 2, 1, 1)
        runs = [copies + ids, (clean + (ids - window).clamp_min(0)).expand(-1, 2, -1, -1), clean + ids - noisy_sees_less]
        code, low, high = runs = [run.reshape(-1) for run in runs]
        for place, run in zip(self.per_token, runs):
            place.copy_(run.repeat_interleave(self.lengths, output_size=self.tokens))

        visible = (code == code[:, None]) | ((code >= low[:, None]) & (code <= high[:, None]))  # [runs, runs]
        seen = self.touches.T @ visible.float() @ self.touches  # pairs of runs that see each other, in each tile pair
        held = self.touches.sum(0)
        full = (seen == held[:, None] * held) & self.whole[:, None] & self.whole
        partial = (seen > 0) & ~full
        self.visible = visible
        return BlockMask.from_kv_blocks(
            *listed(partial), *listed(full), BLOCK_SIZE=TILE, mask_mod=self.sees, seq_lengths=(self.tokens, self.tokens)
        )

    def visible_pairs(self):
        lengths = self.lengths.double()
        return int(lengths @ self.visible.double() @ lengths)


def listed(tiles):
    """A matrix of tile pairs as FlexAttention wants it: how many a row has, and which, those first."""
    order = tiles.int().argsort(dim=-1, descending=True, stable=True).int()
    return tiles.sum(-1, dtype=torch.int32)[None, None], order[None, None]


def rotary(sizes, frames, device):
    """cos and sin [frames * tokens of a frame, head_dim / 2] f32: time, height, width in parts of about 44, 42, 42 of 128."""
    head = sizes.dim // sizes.heads
    side = 2 * (head // 6)
    frame = torch.arange(frames, dtype=torch.float64, device=device)
    grid = torch.cartesian_prod(
        *(torch.arange(n, dtype=torch.float64, device=device) for n in (sizes.rows, sizes.columns))
    )
    video = torch.cat([frame[:, None, None].expand(-1, sizes.video, -1), grid.expand(frames, -1, -1)], -1)
    step = torch.arange(1, sizes.actions + 1, dtype=torch.float64, device=device) / (sizes.actions + 1)
    action = (frame[:, None] + step)[..., None]
    action = torch.cat([action, -torch.ones_like(action), -torch.ones_like(action)], -1)
    position = torch.cat([video, action], 1).flatten(0, 1)  # [tokens, 3]
    angles = []
    for axis, width in enumerate((head - 2 * side, side, side)):
        frequency = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64, device=device) / width)
        angles.append(position[:, axis : axis + 1] * frequency)
    angles = torch.cat(angles, -1).float()
    return angles.cos(), angles.sin()


def rotate(x, cos, sin):
    """x [tokens, heads, head_dim]; adjacent elements are a pair."""
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2).to(x.dtype)


def modulated(x, scale, shift):
    """LayerNorm without weights in f32, scaled and shifted; x in bf16."""
    return (functional.layer_norm(x.float(), x.shape[-1:], eps=EPSILON) * (1 + scale) + shift).to(x.dtype)


class Block(nn.Module):
    def __init__(self, sizes, attend):
        super().__init__()
        dim = sizes.dim
        self.sizes, self.attend, self.recompute = sizes, attend, True
        self.table = nn.Parameter(torch.empty(6, dim))
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.norm_q, self.norm_k = nn.RMSNorm(dim, EPSILON), nn.RMSNorm(dim, EPSILON)
        self.norm2 = nn.LayerNorm(dim, EPSILON)
        self.cross_q, self.cross_kv, self.cross_out = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)
        self.cross_norm_q, self.cross_norm_k = nn.RMSNorm(dim, EPSILON), nn.RMSNorm(dim, EPSILON)
        self.up, self.down = nn.Linear(dim, sizes.ffn), nn.Linear(sizes.ffn, dim)

    def forward(self, x, modulation, text, cos, sin, mask):
        if not self.recompute:
            return self.body(x, modulation, text, cos, sin, mask)
        return checkpoint(
            self.body, x, modulation, text, cos, sin, mask, use_reentrant=False, preserve_rng_state=False
        )

    def body(self, x, modulation, text, cos, sin, mask):
        """x [tokens, dim]; modulation [frames of all copies, 2 kinds, 6, dim]; text [episodes, text tokens, dim]."""
        sizes = self.sizes
        # Tokens of a frame in groups of one kind: 8 of video and 1 of actions if they are 32 and 4.
        group = math.gcd(sizes.video, sizes.actions)
        parts = modulation.float() + self.table.float()
        parts = torch.cat(
            [
                parts[:, :1].expand(-1, sizes.video // group, -1, -1),
                parts[:, 1:].expand(-1, sizes.actions // group, -1, -1),
            ],
            1,
        )
        shift_attention, scale_attention, gate_attention, shift_ffn, scale_ffn, gate_ffn = parts[:, :, None].unbind(3)
        x = x.view(modulation.shape[0], -1, group, sizes.dim)

        attention = self.self_attention(modulated(x, scale_attention, shift_attention).flatten(0, 2), cos, sin, mask)
        x = (x.float() + gate_attention * attention.view_as(x).float()).to(x.dtype)
        x = x + self.cross_attention(self.norm2(x).flatten(0, 2), text).view_as(x)
        ffn = self.down(functional.gelu(self.up(modulated(x, scale_ffn, shift_ffn)), approximate="tanh"))
        x = (x.float() + gate_ffn * ffn.float()).to(x.dtype)
        return x.flatten(0, 2)

    def self_attention(self, x, cos, sin, mask):
        heads = self.sizes.heads
        q, k, v = self.qkv(x).chunk(3, -1)
        q = rotate(self.norm_q(q).unflatten(-1, (heads, -1)), cos, sin)
        k = rotate(self.norm_k(k).unflatten(-1, (heads, -1)), cos, sin)
        q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v.unflatten(-1, (heads, -1))))
        return self.out(self.attend(q, k, v, block_mask=mask)[0].transpose(0, 1).flatten(1))

    def cross_attention(self, x, text):
        """Every token sees the whole text of its episode."""
        heads = self.sizes.heads
        q = self.cross_norm_q(self.cross_q(x)).view(text.shape[0], -1, heads, self.sizes.dim // heads)
        k, v = self.cross_kv(text).chunk(2, -1)
        k, v = (t.unflatten(-1, (heads, -1)) for t in (self.cross_norm_k(k), v))
        seen = functional.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)))
        return self.cross_out(seen.transpose(1, 2).reshape(x.shape))


class TimeEmbedder(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        dim, half = sizes.dim, sizes.frequencies // 2
        self.register_buffer("frequency", torch.exp(-math.log(10000) * torch.arange(half, dtype=torch.float32) / half))
        self.first, self.second, self.project = (
            nn.Linear(sizes.frequencies, dim),
            nn.Linear(dim, dim),
            nn.Linear(dim, 6 * dim),
        )

    def forward(self, time):
        """time [...] in 0..1000 -> e [..., dim] for the head, modulation [..., 6, dim] for the blocks."""
        phase = time[..., None] * self.frequency
        wave = torch.cat([phase.cos(), phase.sin()], -1).to(self.first.weight.dtype)
        e = self.second(functional.silu(self.first(wave)))
        return e, self.project(functional.silu(e)).unflatten(-1, (6, -1))


class LingBot(nn.Module):
    def __init__(self, sizes, mode, keep, compile_options):
        super().__init__()
        dim = sizes.dim
        self.sizes = sizes
        self.video_in, self.action_in = nn.Linear(sizes.latent, dim), nn.Linear(sizes.action, dim)
        self.text_in = nn.Sequential(nn.Linear(sizes.text_dim, dim), nn.GELU("tanh"), nn.Linear(dim, dim))
        self.video_time, self.action_time = TimeEmbedder(sizes), TimeEmbedder(sizes)
        self.table = nn.Parameter(torch.empty(2, dim))
        self.video_out, self.action_out = nn.Linear(dim, sizes.latent), nn.Linear(dim, sizes.action)
        attend = torch.compile(flex_attention, **compile_options) if mode == "plain" else flex_attention
        self.blocks = nn.ModuleList(Block(sizes, attend) for _ in range(sizes.layers))
        for index, block in enumerate(self.blocks):
            block.recompute = index >= keep
            if mode == "compile":
                block.compile(**compile_options)

    @torch.no_grad()
    def draw_parameters(self):
        for name, parameter in self.named_parameters():
            if "norm" in name and name.endswith("weight"):
                parameter.fill_(1.0)
            else:
                parameter.normal_(std=0.02)

    def forward(self, batch, sequence, mask):
        """Loss: mean over frames of the weighted squares of both kinds' errors, noisy copies only."""
        sizes = self.sizes
        x = torch.cat([self.video_in(batch.video), self.action_in(batch.action)], 3)  # [B, 2, frames, tokens, dim]
        text = self.text_in(batch.text)
        e_video, video = self.video_time(batch.time[0])
        e_action, action = self.action_time(batch.time[1])
        modulation = torch.stack([video, action], 3).flatten(0, 2)  # [B * 2 * frames, kinds, 6, dim]
        shape, x = x.shape, x.flatten(0, 3)
        for block in self.blocks:
            x = block(x, modulation, text, sequence.cos, sequence.sin, mask)
        noisy = x.view(shape)[:, 0]
        video = self.predict(noisy[:, :, : sizes.video], e_video, self.video_out)
        action = self.predict(noisy[:, :, sizes.video :], e_action, self.action_out)
        return weighted(video, batch.video_target, batch.weight[0]) + weighted(
            action, batch.action_target, batch.weight[1]
        )

    def predict(self, x, e, project):
        shift, scale = (self.table + e[:, 0, :, None, None]).unbind(-2)  # each [B, frames, 1, dim]
        return project(modulated(x, scale, shift))


def weighted(prediction, target, weight):
    """prediction, target [B, frames, tokens, channels]; weight [B, frames]."""
    return ((prediction.float() - target.float()).square().mean((2, 3)) * weight).mean()


class Batch:
    """Inputs of the right shapes, normally distributed: time of no operation depends on them."""

    def __init__(self, sizes, episodes, frames, device, dtype):
        def normal(*shape):
            return torch.randn(shape, device=device, dtype=dtype)

        self.video = normal(episodes, 2, frames, sizes.video, sizes.latent)
        self.action = normal(episodes, 2, frames, sizes.actions, sizes.action)
        self.text = normal(episodes, sizes.text_tokens, sizes.text_dim)
        self.time = torch.rand(2, episodes, 2, frames, device=device, dtype=torch.float32) * 1000  # kind, episode, copy, frame
        self.time[:, :, 1] = 0  # clean
        self.weight = torch.rand(2, episodes, frames, device=device, dtype=torch.float32)
        self.video_target = normal(episodes, frames, sizes.video, sizes.latent)
        self.action_target = normal(episodes, frames, sizes.actions, sizes.action)


def seconds(work):
    """By CUDA events."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000


def first_seconds(work):
    """By the clock: what a first call costs lies on the CPU too."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def median_after(warmup, repeats, work):
    for _ in range(warmup):
        work()
    times = [seconds(work) for _ in range(repeats)]
    return statistics.median(times), min(times), max(times)


def bench_trunk(arguments, frames, device, started):
    sizes = Sizes(layers=arguments.layers)
    keep = arguments.keep
    if arguments.budget is not None:
        torch._functorch.config.activation_memory_budget = arguments.budget
        keep = sizes.layers  # no checkpoints: the compiler decides in their place
    with torch.device(device):
        model = LingBot(sizes, arguments.mode, keep, compile_options(arguments))
    model.draw_parameters()
    batch = Batch(sizes, arguments.batch, frames, device, torch.bfloat16)
    sequence = Sequence(sizes, arguments.batch, frames, device)
    losses = []

    def step(chunk, window):
        model.zero_grad(set_to_none=True)
        loss = model(batch, sequence, sequence.draw(chunk, window))
        loss.backward()
        losses[:] = [loss.detach()]

    draw = (arguments.chunk, arguments.window)
    result = {"tokens": sequence.tokens, "parameters": sum(p.numel() for p in model.parameters())}
    result["first_step_s"] = first_seconds(lambda: step(*draw))
    result["first_s"] = time.perf_counter() - started
    median, low, high = median_after(arguments.warmup, arguments.repeats, lambda: step(*draw))
    result |= {"median_s": median, "min_s": low, "max_s": high, "loss": losses[0].item()}
    if not math.isfinite(result["loss"]):
        raise RuntimeError(f"the loss is {result['loss']}")
    result["draws"] = []
    for chunk, window in arguments.draws:
        first = first_seconds(lambda: step(chunk, window))
        steady = median_after(1, min(arguments.repeats, 3), lambda: step(chunk, window))[0]
        result["draws"].append({"chunk": chunk, "window": window, "first_s": first, "steady_s": steady})
    return result


def bench_attention(arguments, frames, device, _started):
    sizes = Sizes()
    sequence = Sequence(sizes, arguments.batch, frames, device)
    attend = torch.compile(flex_attention, **compile_options(arguments))
    shape = (1, sizes.heads, sequence.tokens, sizes.dim // sizes.heads)
    q, k, v = (torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    gradient = torch.randn(shape, device=device, dtype=torch.bfloat16)
    draws = []
    for chunk, window in [(arguments.chunk, arguments.window), *arguments.draws]:
        mask = sequence.draw(chunk, window)

        def forward():
            with torch.no_grad():
                attend(q, k, v, block_mask=mask)

        def both():
            torch.autograd.grad(attend(q, k, v, block_mask=mask), (q, k, v), gradient)

        timing = {"first_s": first_seconds(both), "first_forward_s": first_seconds(forward)}
        timing["forward_s"] = median_after(arguments.warmup, arguments.repeats, forward)[0]
        timing["median_s"], timing["min_s"], timing["max_s"] = median_after(arguments.warmup, arguments.repeats, both)
        timing["mask_s"] = median_after(1, arguments.repeats, lambda: sequence.draw(chunk, window))[0]
        pairs = sequence.visible_pairs()
        # 2 products forward, 5 backward; only pairs that are visible count
        timing["forward_tflops"] = 4 * sizes.dim * pairs / timing["forward_s"] / 1e12
        timing["tflops"] = 14 * sizes.dim * pairs / timing["median_s"] / 1e12
        draws.append({"chunk": chunk, "window": window, "visible_pairs": pairs, **timing})
    return {"tokens": sequence.tokens, **draws[0], "draws": draws[1:]}


def compile_options(arguments):
    return {"mode": "max-autotune-no-cudagraphs"} if arguments.autotune else {}


def driver():
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.split("\n")[0].strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def pairs(text):
    try:
        found = [tuple(int(number) for number in pair.split(":")) for pair in text.split(",")]
    except ValueError:
        found = [()]
    if any(len(pair) != 2 or pair[0] < 1 or pair[1] < 0 for pair in found):
        raise argparse.ArgumentTypeError(f"{text!r} is not CHUNK:WINDOW,..., as in 4:64,1:8")
    return found


def positive(text):
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--mode", choices=["compile", "plain"], default="compile")
    add("--attention", action="store_true", help="FlexAttention alone: forward, and forward with backward")
    add("--frames", type=positive, nargs="+", default=[280], help="latent frames of an episode; a configuration each")
    add("--batch", type=positive, default=4, help="episodes in the sequence")
    add("--chunk", type=positive, default=2, help="latent frames")
    add("--window", type=int, default=34, help="half-chunks")
    add("--layers", type=positive, default=30)
    add("--repeats", type=positive, default=5)
    add("--warmup", type=int, default=2, help="steps after the first and before the timed ones")
    add("--draws", type=pairs, default=[], metavar="CHUNK:WINDOW,...", help="further draws: first and steady step")
    add("--keep", type=int, default=0, help="blocks whose activations are kept instead of recomputed")
    add("--budget", type=float, metavar="F", help="0 to 1, with --mode compile: see above")
    add("--autotune", action="store_true", help="let the compiler try more kernels: minutes more at the first step")
    arguments = parser.parse_args()
    if arguments.budget is not None and not (0 <= arguments.budget <= 1 and arguments.mode == "compile" and not arguments.keep):
        parser.error("--budget is 0 to 1, with --mode compile and without --keep")
    return arguments


def main():
    arguments = parse()
    if not torch.cuda.is_available():
        sys.exit("torch_peer: no CUDA device: torch.cuda.is_available() is false")
    device = torch.device("cuda", 0)
    torch.set_default_dtype(torch.bfloat16)
    about = {"torch": torch.__version__, "device": torch.cuda.get_device_name(device), "driver": driver()}
    failed = False
    started = STARTED
    for frames in arguments.frames:
        line = {
            "program": "torch",
            "mode": "attention" if arguments.attention else arguments.mode,
            "frames": frames,
            "batch": arguments.batch,
            "chunk": arguments.chunk,
            "window": arguments.window,
        }
        if not arguments.attention:
            line |= {"layers": arguments.layers, "keep": arguments.keep, "budget": arguments.budget}
        torch.manual_seed(0)
        torch._dynamo.reset()  # each configuration compiles its own shapes, and first_s says what that costs
        torch.cuda.reset_peak_memory_stats()
        try:
            line |= (bench_attention if arguments.attention else bench_trunk)(arguments, frames, device, started)
        except torch.OutOfMemoryError as error:
            failed = True
            line["error"] = "out of memory: " + str(error).split("\n")[0]
        line["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
        line["reserved_gb"] = torch.cuda.max_memory_reserved() / 1e9
        print(json.dumps(line | about), flush=True)
        gc.collect()
        torch.cuda.empty_cache()
        started = time.perf_counter()
    sys.exit(failed)


if __name__ == "__main__":
    main()
