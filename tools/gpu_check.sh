#!/usr/bin/env bash
# What needs a GPU: installs the project into a folder of its own, compares decodes with the CPU's, then measures.
# Needs no network and takes less than six minutes; the last lines are a short table.
#
#   tools/gpu_check.sh [--wheels DIR]
#
# Python (PYTHON, or python3) has CuPy with NVRTC, NumPy, pytest, hypothesis, scikit-build-core, nanobind, ninja, rich and
# ml_dtypes. DIR holds wheels of what it lacks, without what they need in turn; for example, made for that Python:
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
export PYTHONPATH=$work/site PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PYTHONUNBUFFERED=1

step() { printf '\n=== %s (%ss)\n' "$*" "$SECONDS"; }

step "Build"
install() { "$python" -m pip install -q --no-index --no-deps --no-cache-dir --target "$work/site" "$@"; }
if [ -n "$wheels" ]; then
  install "$wheels"/*.whl
fi
# Beside what is there: other environments build in build/ as well.
install --no-build-isolation -C build-dir="$work/build" .
"$python" -P -c 'import kvgpu; from kvgpu.device import current; print(current().describe())'

failed=0
step "The same bits as the CPU"
# CuPy and what it imports may warn of what they like.
timeout 150 "$python" -P -m pytest -q -W default -p no:cacheprovider -m gpu --durations=3 tests/test_gpu_*.py || failed=$?

step "Benchmark"
timeout 150 "$python" -P -m kvtools bench --device cuda --reps 3 || failed=$?
[ "$failed" = 0 ] || echo "FAILED: see above"
exit "$failed"
