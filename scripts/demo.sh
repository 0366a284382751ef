#!/usr/bin/env bash
# Sets everything up, then continues the first 5,000 tokens of a novel with the demo pair, and again without speculation.
# Its KV cache is behind a link of 1 GB/s, which is to two CPU cores what PCIe is to a GPU. Arguments go to `triforce
# generate`, e.g. scripts/demo.sh --max-tokens 200 --stats
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/env.sh" run
head -n 65 examples/persuasion.txt |
    triforce generate --max-tokens 64 --temperature 0 --offload kv --link-gbps 1 --compare "$@"
echo "The whole text, 32,000 tokens, takes minutes: scripts/demo.sh --prompt-file examples/persuasion.txt" >&2
