#!/usr/bin/env bash
# Puts a fault back into a copy of the sources, one at a time, and holds the suite to it: the test named here, which passes in
# `cargo test`, must fail in the words given here. Each is a fault that cost a training run somewhere. Every fault costs a build of
# this crate. Usage: tests/mutations.sh [name ...]. The copy and what is built of it stay in the target folder.
set -euo pipefail
cd "$(dirname "$0")/.."
export CARGO_TARGET_DIR=$(realpath -m "${CARGO_TARGET_DIR:-target}") INSTA_UPDATE=no
tree=$CARGO_TARGET_DIR/mutations
mkdir -p "$tree"
# With new times: what an interrupted run left mutated would look built already.
git ls-files -z --cached --others --exclude-standard | tar --null -T - -cf - | tar -xmf - -C "$tree"

# mutate NAME FILE FROM TO TEST... -- WORDS: FROM and TO are fixed strings, FROM stands once in FILE.
failures=0
wanted=("$@")
mutate() {
  local name=$1 file=$2 from=$3 to=$4 test=() words count
  shift 4
  while [ "$1" != -- ]; do test+=("$1"); shift; done
  words=$2
  if [ ${#wanted[@]} -gt 0 ] && [[ " ${wanted[*]} " != *" $name "* ]]; then return; fi
  count=$(grep -cF -- "$from" "$file" || true)
  if [ "$count" != 1 ]; then
    echo "$name: what it replaces stands $count times in $file: write the mutation anew" >&2
    exit 1
  fi
  echo "== $name: ${test[*]}"
  FROM=$from TO=$to awk 'BEGIN { from = ENVIRON["FROM"]; to = ENVIRON["TO"] }
    { at = index($0, from); if (at) $0 = substr($0, 1, at - 1) to substr($0, at + length(from)); print }' "$file" > "$tree/$file"
  if (cd "$tree" && cargo test -q "${test[@]}" > "$tree.log" 2>&1); then
    echo "   NOT CAUGHT" >&2
    failures=$((failures + 1))
  elif ! grep -F -m 1 -- "$words" "$tree.log" | cut -c 1-200; then
    tail -n 40 "$tree.log" >&2
    echo "   caught by other words than: $words" >&2
    failures=$((failures + 1))
  fi
  cat "$file" > "$tree/$file"
}

# The branch's first Linear got the f32 stream while its weight was bf16, and a check in f32 had passed.
mutate operand_cast src/ops/bias.rs 'x.to_dtype(weight.dtype())?.contiguous()?' 'x.contiguous()?' \
  --lib the_branch_is_a_no_op_in_every_regime_and_a_trace_of_it_is_found \
  -- 'dtype mismatch in matmul, lhs: F32, rhs: BF16'

# PSNR took bf16 while LPIPS took f32.
mutate metric_in_bf16 src/train/xwam/validation.rs 'psnr(&frames, &truth.frames)?' \
  'psnr(&frames.to_dtype(candle_core::DType::BF16)?, &truth.frames)?' \
  --test train the_arms_are_equal_at_step_0_and_differ_afterwards -- 'psnr takes f32 and got bf16'
mutate metric_that_converts src/eval/pictures.rs 'if tensor.dtype() != DType::F32 {' \
  'let tensor = &tensor.to_dtype(DType::F32)?; if tensor.dtype() != DType::F32 {' \
  --lib refuses_every_dtype_but_f32 -- 'refused'

# The engine cast every module to bf16, the metric's network included.
mutate lpips_network_cast src/eval/lpips/alexnet.rs 'f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])' \
  'half::bf16::from_le_bytes([bytes[2], bytes[3]]).to_f32()' \
  --test metrics the_network_is_right_without_its_trained_weights -- 'LPIPS share of a tap, hash weights of'

# Drawing the branch's weights moved the random stream that everything after it drew from.
mutate branch_seed src/model/parameters.rs 'list.seed = Some(geometry.seed);' 'list.seed = None;' \
  --test model the_branch_is_drawn_from_a_seed_of_its_own -- "the run's seed moves the branch"
mutate shared_stream src/random.rs 'hash.update(item.as_bytes());' \
  'static DRAWN: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0); hash.update(DRAWN.fetch_add(1, std::sync::atomic::Ordering::SeqCst).to_le_bytes()); let _ = item;' \
  --test model the_branch_shifts_no_other_initial_weight -- 'action_decoder.0.weight'

[ $failures = 0 ] || { echo "$failures faults went through" >&2; exit 1; }
echo "every fault was caught in its own words"
