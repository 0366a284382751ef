#!/usr/bin/env bash
# Everything that needs a CUDA GPU, in one command of at most nine minutes: the CUDA tests, triforce doctor's checks, and
# the benchmark with the device capped to 24 GB and with all on it. Results: one JSON file. Run again, it goes on where
# it was cut off. Needs python3 with torch, transformers and safetensors, this repository, and no network.
# usage: scripts/gpu_bench.sh [FOLDER FOR RESULTS] [arguments of benchmarks/gpu.py]
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out="${1:-benchmarks/results}"
[ $# -gt 0 ] && shift
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
export PYTHONPATH="$PWD" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TRIFORCE_CACHE_DIR="$work/cache"
mkdir -p "$out"
timeout 530 python3 benchmarks/gpu.py --out "$out/gpu.json" --work "$work/models" --minutes 8 "$@"
