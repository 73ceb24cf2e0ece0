#!/usr/bin/env bash
# Times the demo from a clean state and fails (exit 1) unless, on 2 cores, the first point is on the chart within 20 s,
# the verdict is there within 480 s, and wrist LPIPS of both arms falls by at least 15 % from step 0.
# Usage: bench/demo.sh [further arguments of `lbva-tui demo`]. Works in a copy: runs that are here are not touched.
set -euo pipefail
cd "$(dirname "$0")/.."
cargo build --release --quiet
program=$(realpath "${CARGO_TARGET_DIR:-target}/release/lbva-tui")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/experiments"
cp -r configs "$work/"
cp -r experiments/demo "$work/experiments/"
rm -rf "$work/experiments/demo/runs"
cd "$work"

start=$(date +%s.%N)
"$program" demo --json "$@" | while IFS= read -r line; do
  printf '%s %s\n' "$(date +%s.%N)" "$line"
done > lines.txt
"$program" report experiments/demo | tee report.txt
printf '\nmachine: %s cores, %s\n' "$(nproc)" "$(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1)"
awk -v start="$start" '
  /"event":"validation"/ && !first { first = $1 - start }
  /"event":"verdict"/ { verdict = $1 - start }
  /wrist LPIPS .* at step 0,/ { sub(/.*\(/, ""); sub(/ %.*/, ""); falls++; if ($0 + 0 > -15) short = 1 }
  END {
    printf "first point after %.1f s (limit 20), verdict after %.1f s (limit 480), ", first, verdict
    print (falls == 2 && !short) ? "both arms fell by 15 % or more" : "NOT both arms fell by 15 %"
    exit !(first && first <= 20 && verdict && verdict <= 480 && falls == 2 && !short)
  }' lines.txt report.txt
