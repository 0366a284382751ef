#!/usr/bin/env bash
# Passes the tests with the versions at an end of pyproject.toml's ranges. usage: scripts/versions.sh newest|oldest [ARGS]
# newest: what a plain `pip install` brings, Triton with it; oldest: the least that pyproject.toml allows, by uv. Neither
# takes constraints.txt. torch is the build of the package index, with CUDA on Linux (some 3 GB). ARGS go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
end="${1:-}"
case "$end" in
newest) how=(--upgrade) ;;
oldest) how=(--resolution lowest-direct) ;;
*)
    echo "usage: scripts/versions.sh newest|oldest [ARGS for pytest]" >&2
    exit 2
    ;;
esac
shift
venv=".venv-$end"
[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
"$venv/bin/python" -m pip install --quiet uv
"$venv/bin/uv" pip install --quiet --python "$venv/bin/python" "${how[@]}" -e ".[dev]"
"$venv/bin/uv" pip list --quiet --python "$venv/bin/python" >&2
unset PYTHONDONTWRITEBYTECODE
exec "$venv/bin/python" -m pytest -q --numprocesses 2 --dist worksteal "$@"
