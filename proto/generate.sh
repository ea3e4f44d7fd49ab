#!/usr/bin/env bash
# Regenerates the committed stubs. The generator is pinned and lives in a venv of its own: generated code must
# not be newer than the oldest protobuf runtime that vLLM admits, and the generator needs that older runtime.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=.venv-proto
out=${1:-services/common}
if [ ! -x $venv/bin/protoc-gen-mypy ]; then
  "${PYTHON:-python3}" -m venv $venv
  $venv/bin/pip install --quiet 'grpcio-tools==1.76.0' 'mypy-protobuf==3.7.0' 'setuptools<81'
fi
mkdir -p "$out"
rm -rf "$out/stoker/api"
# shellcheck disable=SC2046
PATH="$PWD/$venv/bin:$PATH" $venv/bin/python -m grpc_tools.protoc -Iproto \
  --python_out="$out" --grpc_python_out="$out" --mypy_out=readable_stubs:"$out" --mypy_grpc_out="$out" \
  $(find proto -name '*.proto' -printf '%P\n' | sort)
