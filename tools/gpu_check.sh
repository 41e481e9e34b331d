#!/usr/bin/env bash
usage() {
  cat <<'USAGE'
usage: tools/gpu_check.sh [--wheels DIR]

Decodes on this machine's GPU, compares every bit with the CPU, then measures. The project is built and installed into
a folder of its own, without a network. Ends within six minutes, whatever hangs; the last lines are a table.

  --wheels DIR  install these wheels beside it: what the Python lacks
  -h, --help    show this

It takes g++, cmake, ninja, and a Python (PYTHON, or python3) from 3.11 on with its headers, pip, CuPy with NVRTC, pytest,
hypothesis, and what pyproject.toml names; the first line says what is missing. With a network, for the GPU's machine:

  pip download --only-binary :all: --no-deps -d DIR --python-version 3.12 --platform manylinux2014_x86_64 \
    --platform manylinux_2_28_x86_64 'zarr>=3.1.5,<4' 'numcodecs>=0.16' 'lmdb>=3.0' donfig google-crc32c msgspec
USAGE
}
set -euo pipefail
wrong() { printf '%s\n' "gpu_check.sh: $*; -h shows the usage" >&2; exit 2; }

wheels=
while [ $# -gt 0 ]; do
  case $1 in
    -h | --help) usage; exit ;;
    --wheels)
      [ $# -gt 1 ] || wrong "--wheels needs a folder"
      wheels=$(cd "$2" 2>/dev/null && pwd) || wrong "--wheels $2: no such folder"
      compgen -G "$wheels/*.whl" >/dev/null || wrong "--wheels $2: no wheels there"
      shift 2
      ;;
    *) wrong "$1: no such argument" ;;
  esac
done
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
command -v "$python" >/dev/null || { echo "missing: $python (PYTHON names another)" >&2; exit 1; }
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "missing: Python 3.11 ($python is older)" >&2; exit 1; }
timeout 60 "$python" tools/gpu_needs.py ${wheels:+"$wheels"} || exit 1

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PYTHONPATH=$work/site${PYTHONPATH:+:$PYTHONPATH}
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PYTHONUNBUFFERED=1

step() { printf '\n=== %s (%ss)\n' "$*" "$SECONDS"; }
# before SECONDS COMMAND...: ends the command when the script has run for so long.
before() {
  local left=$(($1 - SECONDS))
  shift
  timeout -k 5 $((left > 1 ? left : 1)) "$@"
}

step "Build"
install() { before 150 "$python" -m pip install -q --no-index --no-deps --no-cache-dir --target "$work/site" "$@"; }
if [ -n "$wheels" ]; then
  install "$wheels"/*.whl
fi
# Beside what is there: other environments build in build/ as well.
install --no-build-isolation -C build-dir="$work/build" .
before 180 "$python" -P -c 'import kvgpu; from kvgpu.device import current; print(current().describe())'

failed=0
# CuPy and what it imports may warn of what they like.
tests=("$python" -P -m pytest -q -W default -p no:cacheprovider -m gpu)
step "The same bits as the CPU"
before 230 "${tests[@]}" --durations=3 tests/test_gpu_*.py || failed=$?

sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null || true)
for tool in ${sanitizer:+memcheck racecheck}; do
  step "$tool"
  code=0
  before $((SECONDS < 240 ? SECONDS + 30 : 270)) "$sanitizer" --tool "$tool" --report-api-errors no \
    --error-exitcode 99 "${tests[@]}" tests/test_gpu_{decode,fibquant}.py \
    -k 'any_grid and (bfloat16 or fibquant)' || code=$?
  case $code in
    0) ;;
    124 | 137) echo "$tool: no time left to finish" ;;
    *) failed=$code ;;
  esac
done

step "Benchmark"
code=0
before 345 "$python" -P -m kvtools bench --device cuda --reps 3 2>&1 | tee "$work/measured" || code=$?
if [ "$code" != 0 ]; then  # the table that ends it is not there: make one of what was told as it came
  failed=$code
  printf '\n%-28s %s\n' "Measured until then" \
    "ms: upload, decode, total; GB/s: decoded, end to end; ratio: of copy, of raw upload"
  sed -nE 's/^(kvstore: )?(tkv1|kvr1|fibquant), ([0-9,]+ [a-z]+): (.*)/\2, \3\t\4/p' "$work/measured" |
    while IFS=$'\t' read -r what numbers; do
      printf '%-28s %s\n' "$what" "$(sed -E 's/[a-z][a-z ]* ([0-9])/\1/g' <<<"$numbers")"
    done
fi
case $failed in
  0) echo "All as it should be" ;;
  124 | 137) echo "FAILED: something ran out of time; each step's start is above" ;;
  *) echo "FAILED: the lines above say where" ;;
esac
exit "$failed"
