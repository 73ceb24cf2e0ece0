#!/usr/bin/env bash
set -euo pipefail

usage() {
  cat <<'TEXT'
Usage: scripts/setup-cuda.sh [DIR]          (default .cuda)

Puts into DIR what `cargo build --features cuda` needs, for a machine without CUDA, without a GPU, without root:
nvcc 13.0 and its headers from NVIDIA's packages on PyPI (103 MB to fetch, 211 MB on disk), and small libraries to link
with that load the driver, cuBLAS, cuRAND, NVRTC and NCCL only when the program first calls them. A second call does
nothing if DIR is up to date. Then:

    . DIR/env.sh
    cargo build --release --features cuda

Needs x86-64 Linux, cargo, python3 with pip, cc, c++, ar and ld.
Environment: PYTHON    the python3 to use
             PIP_...   pip's own settings, such as PIP_INDEX_URL for a mirror; or PIP_NO_INDEX=1 PIP_FIND_LINKS=FOLDER
                       for packages that were fetched elsewhere
TEXT
}

fail() {
  printf 'setup-cuda: %s\n' "$@" >&2
  exit 1
}

case ${1-} in -h | --help) usage; exit ;; -*) usage >&2; exit 2 ;; esac
[ $# -le 1 ] || { usage >&2; exit 2; }
asked=${1:-.cuda}
python=${PYTHON:-python3}
project=$(cd "$(dirname "$0")/.." && pwd -P)
shims=$project/scripts/cuda-shims

# CUDA 13.0 update 2 and nothing newer: a later nvcc writes a PTX that the driver of CUDA 13.0 (580) refuses.
packages=(
  nvidia-cuda-nvcc==13.0.88    # nvcc, ptxas, cudafe++, fatbinary, nvlink
  nvidia-nvvm==13.0.88         # cicc, libdevice
  nvidia-cuda-crt==13.0.88     # include/crt
  nvidia-cuda-runtime==13.0.96 # headers, libcudart_static.a, libcudadevrt.a
  nvidia-cuda-cccl==13.0.85    # cub, thrust, libcu++
)

# ---- what is there --------------------------------------------------------------------------------------------------
[ "$(uname -sm)" = "Linux x86_64" ] || fail "only x86-64 Linux is supported, this is $(uname -sm)"
for tool in cc c++ ar ld; do
  command -v "$tool" >/dev/null || fail "$tool is not installed: install a C and C++ compiler (Debian, Ubuntu: build-essential) and call again"
done
command -v cargo >/dev/null || fail "cargo is not installed: install Rust (https://rustup.rs) and call again"
command -v "$python" >/dev/null || fail "$python is not installed: install Python 3 with pip, or name one: PYTHON=/path/to/python3 $0"
"$python" -m pip --version >/dev/null 2>&1 ||
  fail "$python has no pip: install it (Debian, Ubuntu: python3-pip), or name another: PYTHON=/path/to/python3 $0"

# The libraries to link with hold the functions that this version of cudarc can call.
cudarc=$(sed -n '/^name = "cudarc"$/{n;s/^version = "\(.*\)"$/\1/p}' "$project/Cargo.lock")
[ "$(wc -w <<<"$cudarc")" = 1 ] || fail "Cargo.lock should name one version of cudarc, it names: ${cudarc:-none}"

# DIR is up to date if it was made from these packages, this cudarc and these files, and lies where it was made.
mkdir -p "$asked" || fail "cannot make the folder $asked"
dir=$(cd "$asked" && pwd -P)
stamp="$dir ${packages[*]} cudarc==$cudarc $(cat "$0" "$shims"/* | sha256sum)"
next() { printf 'setup-cuda: %s\n' "$1" "now:  . $dir/env.sh && cargo build --release --features cuda"; }
if [ "$(cat "$dir/.stamp" 2>/dev/null)" = "$stamp" ] && "$dir/bin/nvcc" --version >/dev/null 2>&1; then
  next "$dir is up to date"
  exit
fi
# What lies in DIR is deleted, so it has to be this script's own.
[ -z "$(ls -A "$dir")" ] || [ -e "$dir/.setup-cuda" ] ||
  fail "$dir holds something else: name a folder that is new or empty"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# ---- the compiler ---------------------------------------------------------------------------------------------------
echo "setup-cuda: fetching ${#packages[@]} packages"
"$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --dest "$work/wheels" "${packages[@]}" ||
  fail "pip could not fetch NVIDIA's packages (its message is above)." \
    "Without a way to PyPI: fetch them where there is one, with the same 'pip download --no-deps' and" \
    "  ${packages[*]}" \
    "then here: PIP_NO_INDEX=1 PIP_FIND_LINKS=FOLDER $0 $asked"

touch "$dir/.setup-cuda"
rm -rf "$dir"/{.stamp,bin,include,lib,lib64,nvvm,env.sh}
# Each package holds a part of one toolkit under nvidia/cu13/; pip would not set the mode bits of programs.
"$python" - "$work/wheels" "$dir" <<'PY'
import glob, os, shutil, sys, zipfile
wheels, toolkit = sys.argv[1:]
prefix = "nvidia/cu13/"
for wheel in sorted(glob.glob(wheels + "/*.whl")):
    with zipfile.ZipFile(wheel) as archive:
        for item in archive.infolist():
            name = item.filename.removeprefix(prefix)
            # libnvvm.so is 63 MB that nvcc does not use; a shared cudart would be linked in place of the static one
            if name == item.filename or item.is_dir() or name.startswith((".metadata/", "lib/libnvvm.so", "lib/libcudart.so")):
                continue
            target = os.path.join(toolkit, name)
            os.makedirs(os.path.dirname(target), exist_ok=True)
            with archive.open(item) as source, open(target, "wb") as copy:
                shutil.copyfileobj(source, copy)
            program = item.external_attr >> 16 & 0o100 or "/bin/" in "/" + name and "." not in os.path.basename(name)
            os.chmod(target, 0o755 if program else 0o644)
PY
[ -x "$dir/bin/nvcc" ] || fail "the packages hold no bin/nvcc: have they another layout now?"
ln -s lib "$dir/lib64"
cp "$dir/lib/libcudart_static.a" "$dir/lib/libcudart.a" # what -lcudart finds
cp "$shims/nvcc-candle" "$dir/bin/"

# ---- libraries to link with -----------------------------------------------------------------------------------------
source_of_cudarc() { find "${CARGO_HOME:-$HOME/.cargo}"/registry/src -maxdepth 2 -name "cudarc-$cudarc" -print -quit 2>/dev/null || true; }
source=$(source_of_cudarc)
if [ -z "$source" ]; then
  cargo fetch --quiet --locked --manifest-path "$project/Cargo.toml" || fail "cargo fetch failed (its message is above): cudarc $cudarc is needed"
  source=$(source_of_cudarc)
fi
[ -n "$source" ] || fail "cudarc $cudarc is not among cargo's sources, though cargo fetch succeeded"

mkdir "$work/shims"
"$python" "$shims/generate.py" "$source" "$work/shims" >"$work/libraries"
while read -r library functions; do
  object=$work/shims/$library
  cc -O2 -fPIC -fvisibility=default -DLIB="$library" -DLIST_H="\"$library.h\"" -I"$work/shims" -c "$shims/lazy.c" -o "$object.c.o"
  cc -c "$object.S" -o "$object.S.o"
  # One object: whoever takes a trampoline takes what fills its slot.
  ld -r -o "$object.o" "$object.S.o" "$object.c.o"
  ar crs "$dir/lib/lib$library.a" "$object.o"
  echo "setup-cuda: lib$library.a loads its library when one of $functions functions is called"
done <"$work/libraries"

# ---- the environment of a build -------------------------------------------------------------------------------------
cat >"$dir/env.sh" <<E
# Source this before \`cargo build --features cuda\`. Made by scripts/setup-cuda.sh.
export CUDA_HOME='$dir' CUDA_PATH='$dir' CUDA_ROOT='$dir' CUDA_TOOLKIT_ROOT_DIR='$dir'
export PATH='$dir/bin':"\$PATH"
# nvcc without candle's quantised kernels
export NVCC='$dir/bin/nvcc-candle'
# machine code inside the binary: 33 MB become 6
export NVCC_APPEND_FLAGS='--compress-mode=size'
# cudarc and candle would ask the machine for these. 80: the oldest architecture, from whose PTX the driver makes the
# code of every later one; 90 would be taken as sm_90a, which no other runs.
export CUDARC_CUDA_VERSION=13000
export CUDA_COMPUTE_CAP=\${CUDA_COMPUTE_CAP:-80}
# candle's build would take half the cores
export CUDAFORGE_THREADS=\${CUDAFORGE_THREADS:-\$(nproc)}
E
"$dir/bin/nvcc" --version | grep '^Cuda compilation tools' || fail "$dir/bin/nvcc does not start"
printf '%s\n' "$stamp" >"$dir/.stamp"
next "done: $(du -sh "$dir" | cut -f1) in $dir"
