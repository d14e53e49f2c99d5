# The commands of this repository. `make demo` and `make test` make .venv themselves if it is missing.
#
#   make demo    trains with Megatron-Core, serves every version from vLLM; DEMO="--steps 20 --every 2" passes options
#   make test    all tests; PYTEST="tests/unit -k digest" picks
#   make test-gpu  the tests that need a CUDA device
#   make check   what a change must pass beside the tests
#   make bench   speed against one memcpy of the same bytes
#   make bench-checkpoints  what a trainer waits for beside a slow checkpoint save
#   make bench-NAME  NAME: install, many, own, plan, trace, transport (tests/bench/bench_NAME.py)
#   make architectures  proves the loaders of all models and writes docs/architectures.md
#   make dev     the tests' environment and a daemon in the foreground

VENV ?= .venv
BIN := $(VENV)/bin
PYTEST ?= tests
ON_OLDEST := tests/integration/test_megatron_source.py tests/integration/test_names_real.py tests/integration/test_fresh.py tests/integration/test_own_slices.py \
  "tests/integration/test_matrix.py::test_each_state_is_found_and_three_publishes_in_it_disturb_nothing" \
  "tests/integration/test_checkpoint_fence.py::test_a_checkpoint_holds_the_bytes_of_its_step_whatever_goes_on_beside_it[temporal]"
DEMO ?=
BENCH ?=

# Two training ranks, an engine and a daemon share the machine; OpenMP's default would start as many threads for each.
export OMP_NUM_THREADS ?= 1

.PHONY: help setup check format test test-gpu demo bench bench-checkpoints architectures protos dev clean

help:
	@sed -n 's/^#   make/  make/p' Makefile

setup:
	@scripts/setup.sh $(VENV)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	cd protos && ../$(BIN)/buf lint
	scripts/protos_unchanged.sh

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The Megatron tests run on the newest Megatron-Core and once more on the oldest.
test: setup
	$(BIN)/python -m pytest $(PYTEST)
ifeq ($(PYTEST),tests)
	REFITD_TEST_MEGATRON_PATH=$(abspath $(VENV))/oldest-megatron $(BIN)/python -m pytest $(ON_OLDEST)
endif

test-gpu: setup
	$(BIN)/python -m pytest tests/gpu -m gpu

demo: setup
	@$(BIN)/refitd demo $(DEMO)

bench: setup
	@$(BIN)/python tests/bench/bench.py $(BENCH)

bench-checkpoints: setup
	@$(BIN)/python tests/bench/slow_save.py $(BENCH)

bench-%: setup
	@$(BIN)/python tests/bench/bench_$*.py $(BENCH)

architectures: setup
	@$(BIN)/python tests/vllm_arch/table.py docs/architectures.md

protos:
	protos/generate.sh

dev: setup
	$(BIN)/refitd serve

clean:
	rm -rf .venv .venv-protos dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
