#!/usr/bin/env bash
# Sets everything up and runs the main job: continue a long real text with the embedded demo pair. Arguments go to
# `triforce generate`, e.g. scripts/demo.sh --temperature 0 --offload weights,kv --link-gbps 2
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/env.sh" run
exec triforce generate --prompt-file examples/persuasion.txt --max-tokens 200 --stats "$@"
