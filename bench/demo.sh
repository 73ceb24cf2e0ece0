#!/usr/bin/env bash
# Times the demo from a clean state: first point on the chart, verdict, and how far wrist LPIPS falls in each arm.
# Usage: bench/demo.sh [further arguments of `lbva-tui demo`]. Must reach: first point <= 20 s, verdict <= 480 s,
# LPIPS of both arms down by >= 15 %, on 2 cores. Works in a copy: runs that are here are not touched.
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
awk -v start="$start" '
  / "?.*"event":"validation"/ && !first { first = $1 - start }
  /"event":"verdict"/ { verdict = $1 - start }
  END { printf "first point after %.1f s, verdict after %.1f s\n", first, verdict }' lines.txt
"$program" report experiments/demo
printf 'machine: %s cores, %s\n' "$(nproc)" "$(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -n 1)"
