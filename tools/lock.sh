#!/usr/bin/env bash
# Writes constraints.txt: the versions that CI installs. Run from the project's venv.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${VENV:-.venv}
"$venv/bin/python" -m pip install --quiet 'uv>=0.9,<1'
{
  echo "# The versions that CI installs, by \`make lock\`. numpy is left to the engine: vLLM's numba admits a narrow range."
  # Constraints of other platforms than Linux say nothing here.
  "$venv/bin/uv" pip compile --quiet pyproject.toml --extra dev --extra local --universal --python-version 3.11 \
    --no-header --no-annotate --no-emit-index-url --no-emit-find-links |
    grep -v -E "^(numpy|colorama)==|== 'emscripten'$"
} >constraints.txt
