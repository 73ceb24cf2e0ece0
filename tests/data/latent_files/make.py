"""Writes the latent files of this folder, as LingBot-VA publishes them, for the episodes of ../robosuite_tiny_v21.

    pip install torch numpy; python make.py

latents/ has two views of 2x2 cells of every action_config segment, every 4th source frame, and empty_emb.pt. tshape/
has two samples of three views, 4x4 and twice 2x2 cells, whose first encoded frame is the second of the sample.
variants/ has files to put in the place of the first view of episode_000003_79_111: benign/ hold the same numbers in
other ways that torch.save knows; the others are each broken in one way. Made with torch 2.15.0.
"""
import collections, io, json, pathlib, pickle, shutil, struct, zipfile
import numpy, torch

HERE = pathlib.Path(__file__).parent
VIEWS = ["observation.images.agentview_rgb", "observation.images.eye_in_hand_rgb"]
STRIDE, CELLS, CHANNELS, TEXT = 4, 2, 48, (64, 4)


def latent(frames, view, episode, start, cells):
    """Numbers that bf16 and f16 hold exactly; tests compute them again."""
    index = torch.arange(frames * cells * cells * CHANNELS)
    values = ((index * 7 + view * 13 + episode * 31 + start) % 256 - 128) / 64
    return values.reshape(-1, CHANNELS).to(torch.bfloat16)


def text(words):
    """Rows of a prompt: row r of word w holds (its length + 1) / (r + 1) and signs; zeros after it."""
    embedding = torch.zeros(TEXT, dtype=torch.bfloat16)
    for row, word in enumerate(words.split()):
        embedding[row] = torch.tensor([len(word) + 1, -1, 0.5, row / 16])
    return embedding


def sample(view, episode, start, end, words, cells=CELLS, late=0):
    ids = list(range(start + late, end, STRIDE))
    frames = (len(ids) - 1) // 4 + 1
    return {
        "latent": latent(frames, view, episode, start, cells),
        "latent_num_frames": frames,
        "latent_height": cells,
        "latent_width": cells,
        "video_num_frames": len(ids),
        "video_height": cells * 16,
        "video_width": cells * 16,
        "text_emb": text(words),
        "text": words,
        "frame_ids": ids,
        "start_frame": start,
        "end_frame": end,
        "fps": 5.0,
        "ori_fps": 20,
    }


def rezip(data, change, compression=zipfile.ZIP_STORED):
    """Writes a file of torch.save again, with `change` of (name, bytes) -> bytes, or None to leave an entry out."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w", compression) as new:
        for name in old.namelist():
            content = change(name.split("/", 1)[1], old.read(name))
            if content is not None:
                new.writestr(name, content)
    return out.getvalue()


def saved(value):
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


def with_pickle(code):
    return rezip(saved(one), lambda name, content: code if name == "data.pkl" else content)


def write(path, data):
    path = HERE / path
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


for old in ["latents", "tshape", "variants"]:
    shutil.rmtree(HERE / old, ignore_errors=True)
for line in open(HERE / "../robosuite_tiny_v21/meta/episodes.jsonl"):
    record = json.loads(line)
    episode = record["episode_index"]
    for segment in record["action_config"]:
        start, end = segment["start_frame"], segment["end_frame"]
        for place, view in enumerate(VIEWS):
            name = f"latents/chunk-000/{view}/episode_{episode:06}_{start}_{end}.pth"
            write(name, saved(sample(place, episode, start, end, segment["action_text"])))
for episode, start, end in [(1, 0, 75), (3, 79, 111)]:
    for place, (view, cells) in enumerate([("head", 4), ("left", 2), ("right", 2)]):
        name = f"tshape/chunk-000/{view}/episode_{episode:06}_{start}_{end}.pth"
        write(name, saved(sample(place, episode, start, end, "x", cells, late=1)))
write("empty_emb.pt", saved(text("x")))

one = sample(0, 3, 79, 111, "carry the can to the other bin and let go")
variant = lambda **changes: saved({**one, **changes})

# The same numbers, otherwise.
write("variants/benign/f16.pth", variant(latent=one["latent"].half(), text_emb=one["text_emb"].half()))
write("variants/benign/f32.pth", variant(latent=one["latent"].float()))
write("variants/benign/transposed.pth", variant(latent=one["latent"].T.contiguous().T))
both = torch.cat([one["latent"].flatten(), one["text_emb"].flatten()])
parts = both.split([one["latent"].numel(), one["text_emb"].numel()])
write("variants/benign/shared_storage.pth", variant(latent=parts[0].view(-1, CHANNELS), text_emb=parts[1].view(TEXT)))
write("variants/benign/repeated_rows.pth", variant(text_emb=one["text_emb"], text=one["text_emb"][:1].expand(3, 4)))
write("variants/benign/ordered_dict.pth", saved(collections.OrderedDict(one)))
bare = lambda name, content: content if name == "data.pkl" or name.startswith("data/") else None
write("variants/benign/no_version_or_byteorder.pth", rezip(saved(one), bare))

# Code, which must not run.
class Call:
    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


import os

write("variants/refused/os.pth", variant(text=Call(os.system, "touch /tmp/lbva-was-here")))
write("variants/refused/eval.pth", variant(text=Call(eval, "1")))
write("variants/refused/numpy.pth", variant(frame_ids=[numpy.int64(i) for i in one["frame_ids"]]))

# One field wrong.
nan, text_nan = one["latent"].clone(), one["text_emb"].clone()
nan[3, 5] = float("nan")
text_nan[0, 1] = float("inf")
write("variants/wrong/latent_nonfinite.pth", variant(latent=nan))
write("variants/wrong/text_nonfinite.pth", variant(text_emb=text_nan))
write("variants/wrong/latent_size.pth", variant(latent_height=1, latent_width=4))
write("variants/wrong/latent_shape.pth", variant(latent=one["latent"][:-1]))
write("variants/wrong/latent_shape.channels.pth", variant(latent=one["latent"][:, :47]))
write("variants/wrong/latent_shape.rank.pth", variant(latent=one["latent"].reshape(2, 2, 2, 48)))
ids = one["frame_ids"]
write("variants/wrong/latent_frames.pth", saved(sample(0, 3, 79, 95, one["text"])))
write("variants/wrong/latent_frames.ids.pth", variant(frame_ids=ids[:4]))
write("variants/wrong/latent_frames.none.pth", variant(frame_ids=[]))
write("variants/wrong/latent_stride.pth", variant(frame_ids=ids[:3] + [i + 1 for i in ids[3:]]))
write("variants/wrong/text_mismatch.pth", variant(text_emb=one["text_emb"][:, :3]))

# No file of torch.save at all, or one that lies.
out = io.BytesIO()
torch.save(one, out, _use_new_zipfile_serialization=False)
write("variants/corrupt/legacy.pth", out.getvalue())
write("variants/corrupt/empty.pth", b"")
write("variants/corrupt/text.pth", b"not an archive\n")
write("variants/corrupt/compressed.pth", rezip(saved(one), lambda name, content: content, zipfile.ZIP_DEFLATED))
big = lambda name, content: b"big" if name == "byteorder" else content
write("variants/corrupt/big_endian.pth", rezip(saved(one), big))
write("variants/corrupt/no_data.pth", rezip(saved(one), lambda name, content: content if name == "data.pkl" else None))
short = lambda name, content: content[:-2] if name == "data/0" else content
write("variants/corrupt/short_storage.pth", rezip(saved(one), short))
write("variants/corrupt/no_latent.pth", saved({k: v for k, v in one.items() if k != "latent"}))
write("variants/corrupt/no_dict.pth", saved([1, 2, 3]))
write("variants/corrupt/integers.pth", variant(latent=one["latent"].to(torch.int64)))
write("variants/corrupt/negative.pth", variant(latent_num_frames=-2))
write("variants/corrupt/words.pth", variant(frame_ids=["a"]))
write("variants/corrupt/huge_repeated.pth", variant(latent=one["latent"][:1, :1].expand(1 << 30, 48)))
code = lambda body: with_pickle(b"\x80\x02" + body + b".")
write("variants/corrupt/empty_pickle.pth", with_pickle(b""))
write("variants/corrupt/long_text.pth", code(b"X" + struct.pack("<I", 0xFFFFFFFF) + b"x"))
write("variants/corrupt/long_number.pth", code(b"\x8a\xff" + b"\x01" * 255))
write("variants/corrupt/deep.pth", code(b")" + b"\x85" * 60_000))
write("variants/corrupt/doubling.pth", code(b")q\x00" + b"h\x00h\x00\x86q\x00" * 400))
write("variants/corrupt/short_tensor.pth", code(b"ctorch._utils\n_rebuild_tensor_v2\n)R"))
write("variants/corrupt/unknown_opcode.pth", code(b"\xff"))
