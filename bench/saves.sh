#!/usr/bin/env bash
# Times steps while a checkpoint of some hundred MB is written beside them, and fails (exit 1) unless the median of those steps is
# at most 1.2 times the median of the others. Usage: PROGRAM=path/to/lbva-tui bench/saves.sh [further arguments of `run`].
set -euo pipefail
cd "$(dirname "$0")/.."
program=$(realpath "${PROGRAM:-${CARGO_TARGET_DIR:-target}/release/lbva-tui}")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/experiments"
cp -r configs "$work/"
cp -r experiments/demo "$work/experiments/"
rm -rf "$work/experiments/demo/runs"
cd "$work"
"$program" --no-ui run experiments/demo --arm m1_baseline --steps 64 --set model.dim=768 --set model.ffn_dim=1536 \
  --set model.num_heads=12 --set model.num_layers=6 --set train.batch_size=1 --set train.accumulate=1 --set train.save_every=40 \
  --set validation.every=1000 --set validation.clips=2 --set validation.strips=1 "$@" > /dev/null
log=experiments/demo/runs/m1_baseline/attempts/0001/events.jsonl
grep '"event":"checkpoint"' "$log" | head -n 1 | sed 's/^{"v":1,//; s/,"event"[^}]*"ms":/ /; s/,"blocked_ms":/ /; s/"time_ms"://; s/}//' > save.txt
read -r end took blocked < save.txt
grep '"event":"step"' "$log" | sed 's/.*"time_ms":\([0-9]*\).*"step":\([0-9]*\).*"step_ms":\([0-9.]*\).*/\1 \2 \3/' |
  awk -v end="$end" -v took="$took" -v blocked="$blocked" '
    function median(values, count,   i, j, t) {
      for (i = 2; i <= count; i++) for (j = i; j > 1 && values[j] < values[j-1]; j--) { t = values[j]; values[j] = values[j-1]; values[j-1] = t }
      return count % 2 ? values[(count + 1) / 2] : (values[count / 2] + values[count / 2 + 1]) / 2
    }
    $2 > 1 { if ($1 - $3 < end && $1 > end - took) beside[++b] = $3; else other[++o] = $3 }
    END {
      m = median(other, o); s = median(beside, b)
      printf "save: %.1f s, training stood still %.0f ms; step alone %.0f ms (%d), beside the save %.0f ms (%d): %.2f times\n",
        took / 1000, blocked, m, o, s, b, s / m
      exit !(b >= 3 && s <= 1.2 * m)
    }'
