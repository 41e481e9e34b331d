#!/usr/bin/env bash
# What needs a GPU: installs the project into a folder of its own, compares decodes with the CPU's, then measures.
# Needs no network and ends within six minutes, whatever hangs; the last lines are a short table.
#
#   tools/gpu_check.sh [--wheels DIR]
#
# It takes g++, a Python (PYTHON, or python3) with its headers, and in that CuPy with NVRTC, NumPy, pytest, hypothesis,
# scikit-build-core, nanobind, ninja, rich and ml_dtypes. DIR holds wheels of what it lacks, without what they need in
# turn; for example, made for that Python:
#   pip download --no-deps -d DIR 'zarr>=3.1.5,<4' 'numcodecs>=0.16' 'lmdb>=3.0' donfig google-crc32c
set -euo pipefail
cd "$(dirname "$0")/.."

wheels=
while [ $# -gt 0 ]; do
  case $1 in
    --wheels) wheels=${2:?--wheels needs a folder}; shift 2 ;;
    *) echo "usage: $0 [--wheels DIR]" >&2; exit 2 ;;
  esac
done
python=${PYTHON:-python3}
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
    --error-exitcode 99 "${tests[@]}" tests/test_gpu_decode.py -k 'any_grid and bfloat16' || code=$?
  case $code in
    0) ;;
    124 | 137) echo "$tool: no time left to finish" ;;
    *) failed=$code ;;
  esac
done

step "Benchmark"
before 345 "$python" -P -m kvtools bench --device cuda --reps 3 || failed=$?
[ "$failed" = 0 ] || echo "FAILED: see above"
exit "$failed"
