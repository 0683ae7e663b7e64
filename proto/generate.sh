#!/usr/bin/env bash
# Regenerates *_pb2*.py(i) from the .proto files. Run in the development environment; commit what it writes.
# `fuse_cache/proto=proto` makes protoc see the files under their import name, so that generated imports come out right.
set -euo pipefail
cd "$(dirname "$0")/.."
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
PATH="$(dirname "$(command -v "${PYTHON:-python}")"):$PATH" "${PYTHON:-python}" -m grpc_tools.protoc -Ifuse_cache/proto=proto \
  --python_out="$out" --mypy_out="$out" --grpc_python_out="$out" --mypy_grpc_out="$out" proto/*.proto
cp "$out"/fuse_cache/proto/*_pb2*.py* proto/
