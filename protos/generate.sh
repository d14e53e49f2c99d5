#!/usr/bin/env bash
# Regenerates refitd/v1 from protos/ with pinned tools, in venvs of their own. Prints nothing when all is well.
# grpcio-tools 1.71.2 stamps protobuf gencode 5.29.0, which loads under protobuf 5, 6 and 7; newer tools do not.
# mypy-protobuf needs a newer protobuf than those tools, hence the second venv.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$(realpath -m "${REFITD_PROTO_VENV:-.venv-protos}")
if [ ! -x "$venv/mypy/bin/protoc-gen-mypy" ]; then
  python3 -m venv "$venv/protoc"
  "$venv/protoc/bin/pip" install -q 'setuptools<81' 'grpcio-tools==1.71.2'
  python3 -m venv "$venv/mypy"
  "$venv/mypy/bin/pip" install -q 'mypy-protobuf==5.1.0'
fi
rm -f refitd/v1/*_pb2*.py refitd/v1/*_pb2*.pyi
PATH="$venv/mypy/bin:$PATH" "$venv/protoc/bin/python" -W ignore -m grpc_tools.protoc -I protos \
  --python_out=. --grpc_python_out=. --mypy_out=quiet:. --mypy_grpc_out=quiet:. protos/refitd/v1/*.proto
