#!/usr/bin/env bash
# Fails where the committed stubs are not what proto/ generates.
set -euo pipefail
cd "$(dirname "$0")/.."
fresh=$(mktemp -d)
trap 'rm -rf "$fresh"' EXIT
proto/generate.sh "$fresh"
if ! diff -r --brief --exclude=__pycache__ "$fresh/stoker/api" services/common/stoker/api; then
  printf 'error: the committed stubs are stale\nnext:  run `make proto` and commit the result\n' >&2
  exit 1
fi
