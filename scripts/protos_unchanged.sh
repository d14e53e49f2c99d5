#!/usr/bin/env bash
# Generates the stubs anew, in a scratch directory, and fails if any differs from what lies in refitd/v1.
set -euo pipefail
cd "$(dirname "$0")/.."
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
mkdir -p .venv-protos "$scratch/refitd/v1"
ln -s "$PWD/.venv-protos" "$scratch/.venv-protos"
cp -r protos "$scratch/protos"
"$scratch/protos/generate.sh"
if ! diff -q <(cd "$scratch/refitd/v1" && cksum *_pb2*) <(cd refitd/v1 && cksum *_pb2*) >/dev/null; then
  for file in "$scratch"/refitd/v1/*_pb2*; do
    cmp -s "$file" "refitd/v1/$(basename "$file")" || echo "refitd/v1/$(basename "$file") is not what protos/ gives" >&2
  done
  echo "run: make protos" >&2
  exit 1
fi
echo "protos: the stubs are what protos/ gives"
