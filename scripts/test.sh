#!/usr/bin/env bash
# Sets everything up and passes the tests: style, types, then all tests, on three processes, since some of them wait.
# Arguments go to pytest; --deep tries every case instead of a few of each kind.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/env.sh" dev
unset PYTHONDONTWRITEBYTECODE # else each process compiles all tests anew, which takes it six seconds
ruff check .
ruff format --check .
mypy
exec pytest -q --numprocesses 3 --dist worksteal "$@"
