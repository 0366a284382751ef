#!/usr/bin/env bash
# Sets everything up and passes the tests: style, types, then all tests. Arguments go to pytest.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/env.sh" dev
ruff check .
ruff format --check .
mypy
exec pytest -q "$@"
