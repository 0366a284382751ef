#!/usr/bin/env bash
# Makes .venv with triforce in it, once; sourced by demo.sh and test.sh. usage: . scripts/env.sh run|dev
# Versions are the tested ones of constraints.txt. torch is the build for this machine: with CUDA where there is an
# NVIDIA GPU, else the much smaller one for CPUs.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
purpose="$1" # run: the program alone; dev: its tests too. Given always: without, a sourced script sees its caller's arguments
torch_version=2.13.0
venv="${TRIFORCE_VENV:-.venv}"

find_python() {
    local name
    for name in python3 python3.14 python3.13 python3.12 python3.11 python; do
        if command -v "$name" >/dev/null && "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$name"
            return
        fi
    done
    echo "error: no Python 3.11 or later found; install one and run this again" >&2
    exit 2
}

install_torch() {
    local pip=("$venv/bin/python" -m pip install --quiet)
    if command -v nvidia-smi >/dev/null && nvidia-smi >/dev/null 2>&1; then
        "${pip[@]}" "torch==$torch_version"
    elif [ "$(uname -s)" = Linux ] && ! "${pip[@]}" "torch==$torch_version+cpu" 2>/dev/null; then
        # Not among this machine's package sources: uv knows where the CPU builds are.
        "${pip[@]}" uv
        "$venv/bin/uv" pip install --quiet --python "$venv/bin/python" --torch-backend cpu "torch==$torch_version" ||
            "${pip[@]}" "torch==$torch_version"
    elif [ "$(uname -s)" != Linux ]; then
        "${pip[@]}" "torch==$torch_version"
    fi
}

is_older() { # the environment than what it is made from, the sources of the compiled kernels among it
    local source
    for source in pyproject.toml constraints.txt setup.py offload/native/*.{cpp,h}; do
        if [ "$source" -nt "$stamp" ]; then
            return 0
        fi
    done
    return 1
}

stamp="$venv/.installed-$purpose"
if is_older; then
    echo "setting up $venv (once; a few minutes)" >&2
    [ -x "$venv/bin/python" ] || "$(find_python)" -m venv "$venv"
    "$venv/bin/python" -c "import torch; assert torch.__version__.startswith('$torch_version')" 2>/dev/null || install_torch
    "$venv/bin/python" -m pip install --quiet -c constraints.txt -e "$([ "$purpose" = dev ] && echo ".[dev]" || echo .)"
    if [ -e offload/native/unbuilt.txt ]; then
        echo "note: the CPU's kernels were not built: $(cat offload/native/unbuilt.txt)" >&2
    fi
    touch "$stamp"
fi
PATH="$PWD/$venv/bin:$PATH"
[ "${venv#/}" = "$venv" ] || PATH="$venv/bin:$PATH"
export PATH
