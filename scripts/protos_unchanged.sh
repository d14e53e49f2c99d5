#!/usr/bin/env bash
# Regenerates the stubs and fails if any differs from what lies in refitd/v1.
set -euo pipefail
cd "$(dirname "$0")/.."
before=$(mktemp -d)
trap 'rm -rf "$before"' EXIT
cp refitd/v1/*_pb2* "$before/"
protos/generate.sh
for file in refitd/v1/*_pb2*; do
  cmp -s "$file" "$before/$(basename "$file")" || { echo "$file was not what protos/ gives; it is regenerated now" >&2; exit 1; }
done
[ "$(ls refitd/v1/*_pb2* | wc -l)" = "$(ls "$before" | wc -l)" ] || { echo "refitd/v1 held other files than protos/ gives" >&2; exit 1; }
echo "protos: the stubs are what protos/ gives"
