#!/usr/bin/env bash
# Times the trunk of LingBot-VA, forward and backward, in this program and in PyTorch (bench/torch_peer.py), by turns on
# one GPU that nothing else uses, and writes what came out: every measurement, and a table.
#
# Usage: bench/against_torch.sh PROGRAM [FOLDER]       (FOLDER for the results, default bench/results)
# PROGRAM is lbva-tui built with --features cuda; python3 must have torch. Exit 1 if a side could not be measured.
# Environment, with defaults:
#   FRAMES="280 128"   latent frames of an episode, a configuration each
#   BATCH=4 CHUNK=2 WINDOW=34 REPEATS=5
#   MODES="compile"    what of the peer: compile, plain
#   PEER=""            further options of the peer, such as "--budget 0.4": what it need not recompute
#   OURS=""            further options of lbva-tui bench trunk, such as "--arena 30"
#   ROUNDS=2           turns of each
#   LIMIT_S=480        no measurement is begun after so many seconds, and none goes on for more than 60 s after that
# The first step of the first round starts without compiled kernels on both sides: caches of the driver, of Triton and
# of the compiler lie in a new folder. Later rounds find them.
set -euo pipefail

fail() { printf 'against_torch: %s\n' "$*" >&2; exit 1; }

[ $# -ge 1 ] && [ $# -le 2 ] || { sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0" >&2; exit 2; }
program=$(command -v "$1") || fail "$1 is not a program: give the path of lbva-tui built with --features cuda"
here=$(cd "$(dirname "$0")" && pwd)
results=${2:-$here/results}
read -ra peer <<<"${PEER:-}"
read -ra ours <<<"${OURS:-}"
frames_list=${FRAMES:-280 128} batch=${BATCH:-4} chunk=${CHUNK:-2} window=${WINDOW:-34} repeats=${REPEATS:-5}
modes=${MODES:-compile} rounds=${ROUNDS:-2} limit_s=${LIMIT_S:-480}
python3 -c 'import torch' 2>/dev/null || fail "python3 cannot import torch: $(python3 -c 'import torch' 2>&1 | tail -n 1)"
mkdir -p "$results"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export CUDA_CACHE_PATH=$work/driver TRITON_CACHE_DIR=$work/triton TORCHINDUCTOR_CACHE_DIR=$work/inductor

lines=$work/lines.jsonl
: >"$lines"
# measure NAME ROUND COMMAND...: keeps the JSON lines of its stdout, with the round; a failure is a line too.
measure() {
  local name=$1 round=$2 status=0
  shift 2
  if [ "$SECONDS" -ge "$limit_s" ]; then
    echo "against_torch: $name, round $round: not begun, $limit_s s are over" >&2
    return
  fi
  printf '%4d s  %s\n' "$SECONDS" "$*"
  timeout "$((limit_s - SECONDS + 60))" "$@" >"$work/out" 2>"$work/err" || status=$?
  python3 - "$name" "$round" "$status" "$work" >>"$lines" <<'PY'
import json, sys
name, round_, status, work = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
text, records, at = open(work + "/out", errors="replace").read(), [], 0
while (at := text.find("{", at)) >= 0:  # objects among whatever else was said, on one line or several
    try:
        record, at = json.JSONDecoder().raw_decode(text, at)
        records += [record] if "program" in record else []
    except ValueError:
        at += 1
if status and not any("error" in record for record in records):
    errors = open(work + "/err", errors="replace").read().strip().splitlines()
    records.append({"program": name, "error": f"exit code {status}: {errors[-1] if errors else 'no message'}"})
for record in records:
    print(json.dumps(record | {"round": round_}))
PY
  if [ "$status" != 0 ]; then
    echo "against_torch: $name, round $round: exit code $status" >&2
    tail -n 15 "$work/err" >&2
  fi
}

for frames in $frames_list; do
  shape=(--frames "$frames" --batch "$batch" --chunk "$chunk" --window "$window" --repeats "$repeats")
  for ((round = 1; round <= rounds; round++)); do
    measure lbva-tui "$round" "$program" bench trunk --json "${shape[@]}" "${ours[@]}"
    for mode in $modes; do
      measure "torch $mode" "$round" python3 "$here/torch_peer.py" --mode "$mode" --warmup 1 "${shape[@]}" "${peer[@]}"
    done
  done
done

python3 - "$lines" "$results" "$("$program" --version)" "$batch $chunk $window $repeats" <<'PY'
import datetime, json, platform, re, statistics, subprocess, sys

lines, results, version, shape = sys.argv[1:]
records = [json.loads(line) for line in open(lines)]
batch, chunk, window, repeats = shape.split()


def query(field):
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.split("\n")[0].strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


import torch

now = datetime.datetime.now(datetime.timezone.utc)
about = {
    "date": now.strftime("%Y-%m-%dT%H:%MZ"),
    "device": query("name"),
    "driver": query("driver_version"),
    "power_limit": query("power.limit"),
    "torch": torch.__version__,
    "python": platform.python_version(),
    "lbva_tui": version,
}
stem = f"{results}/{now:%Y-%m-%d-%H%M}-{re.sub('[^a-z0-9]+', '-', about['device'].lower()).strip('-')}"
with open(stem + ".jsonl", "w") as file:
    for record in [{"environment": about}, *records]:
        file.write(json.dumps(record) + "\n")

groups = {}  # (frames, who) -> its records, in the order of the rounds
for record in records:
    if "median_s" in record:
        who = " ".join(filter(None, [record["program"], record.get("mode")]))
        groups.setdefault((record["frames"], who), []).append(record)


def rounds(group, key, digits):
    return ", ".join(f"{record[key]:.{digits}f}" for record in group)


def kept(record):
    if "kept" in record:
        return record["kept"]
    if record.get("budget") is not None:
        return f"{record['budget']} of what the compiler would keep"
    return "block inputs" + (f", all of {record['keep']} blocks" if record.get("keep") else "")


text = [
    f"# LingBot-VA trunk, forward and backward, {about['date']}",
    "",
    f"{about['device']} (power limit {about['power_limit']}), driver {about['driver']}, torch {about['torch']}, {version}.",
    f"{batch} episodes, chunk {chunk}, window {window}, 5 B parameters in bf16, no optimizer; medians of {repeats} steps, one figure a round.",
    "First step: seconds from the program's start to its end; later rounds find compiled kernels. Ratio: median of the rounds",
    "over that of lbva-tui; above 1, lbva-tui is faster. Kept: what is not recomputed in the backward pass.",
    "",
    "| frames | trunk tokens | program | first step s | step s | µs a token | ratio | peak GB | kept |",
    "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
]
problems = [f"{r['program']} {r.get('mode', '')}: {r['error']}".replace(" :", ":") for r in records if "error" in r]
for frames in dict.fromkeys(frames for frames, _ in groups):
    ours = groups.get((frames, "lbva-tui"))
    if not ours:
        problems.append(f"{frames} frames: nothing measured of lbva-tui")
    if ours and not any(f == frames and who != "lbva-tui" for f, who in groups):
        problems.append(f"{frames} frames: nothing measured of the peer")
    for (_, who), group in ((key, group) for key, group in groups.items() if key[0] == frames):
        tokens = {record["tokens"] for record in group}
        if ours and tokens != {ours[0]["tokens"]}:
            problems.append(f"{frames} frames, {who}: {tokens} tokens, lbva-tui {ours[0]['tokens']}: not the same work")
        step = statistics.median(record["median_s"] for record in group)
        ratio = f"{step / statistics.median(r['median_s'] for r in ours):.2f}" if ours else ""
        text.append(
            f"| {frames} | {group[0]['tokens']:,} | {who} | {rounds(group, 'first_s', 1)} | {rounds(group, 'median_s', 3)} "
            f"| {step / group[0]['tokens'] * 1e6:.1f} | {ratio} | {max(r['peak_gb'] for r in group):.1f} | {kept(group[0])} |"
        )
if not groups:
    problems.append("nothing was measured")
text += ["", *(f"- {problem}" for problem in problems)]
text = "\n".join(text).rstrip() + "\n"
with open(stem + ".md", "w") as file:
    file.write(text)
print(text)
print(f"written: {stem}.jsonl and .md")
sys.exit(bool(problems))
PY
