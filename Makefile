# make run    from prompts to a released draft, with the tiny target, on this machine
# make test   the test suite
# make help   the rest
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Only torch needs PyTorch's own index; asking it for every package would cost seconds each.
TORCH := torch==2.13.0+cpu
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
ARGS ?=

.PHONY: help run test test-fast test-soak lint ui bench-transfer bench-datagen bench-train bench-quality install lock clean
help: ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14

run: install ## prompts in, released draft out; ARGS="conf=smollm2 train.lr=3e-4" for another
	$(BIN)/python -m pipeline.run $(ARGS)

test: install ## all tests but the long ones (make test-soak), real engines included
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

test-fast: install ## only tests that start no engine
	$(BIN)/python -m pytest -m "not e2e and not soak" $(ARGS)

test-soak: install ## the long tests: kills at random moments, every stage killed, tensor parallelism; half an hour
	$(BIN)/python -m pytest -m soak $(ARGS)

bench-train: install ## a training step against speculators' own: tokens/s, memory, loss; JSON
	@$(BIN)/python -m benchmarks.train $(ARGS)

bench-quality: install ## drafts of both losses from one corpus, served: ARGS="conf=smollm2 target.path=DIR"; JSON
	@$(BIN)/python -m benchmarks.quality $(ARGS)

lint: install ## ruff, mypy, import directions
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

ui: install ## MLflow on the runs of this folder
	$(BIN)/python -m pipeline.ui $(ARGS)

bench-transfer: install ## how fast stored states reach a batch, against hs_connectors, Mooncake and memcpy; JSON
	@$(BIN)/python -m benchmarks.transfer $(ARGS)

bench-datagen: install ## what answers and states cost beside plain vLLM; JSON
	@$(BIN)/python -m benchmarks.datagen $(ARGS)

install: $(READY) ## the virtual environment alone

$(READY): requirements/cpu.lock pyproject.toml Makefile
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) not found: install Python 3.11, or name another with PYTHON=…"; exit 1; }
	@sh requirements/system.sh
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --no-deps "$(TORCH)" || $(BIN)/pip install --no-deps "$(TORCH)" --index-url $(TORCH_INDEX)
	$(BIN)/pip install --quiet --no-deps --require-hashes -r requirements/cpu.lock
	$(BIN)/pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $(READY)

lock: install ## resolve requirements/*.lock anew (uv is installed into the virtual environment)
	$(BIN)/pip install --quiet uv
	sh requirements/lock.sh $(BIN)/uv "$(TORCH)" $(TORCH_INDEX)

clean: ## forget the virtual environment and all runs
	rm -rf $(VENV) out
