# Two targets do everything on a fresh machine: `make serve` and `make test`.
.PHONY: serve test check models bench docs sglang clean
.DEFAULT_GOAL := help

# Where Python may not write bytecode, as in many images, each start of an engine compiles 20 s anew.
unexport PYTHONDONTWRITEBYTECODE

BIN := .venv/bin
READY := .venv/ready

help:
	@echo "make serve   set up, then serve the embedded model on http://127.0.0.1:8000"
	@echo "make test    set up, then all tests (T=path or options for some)"
	@echo "make check   set up, then format, lint, types, directions of imports, features without a test"
	@echo "make models  set up, then the small models that tests ask"
	@echo "make bench   set up, then the benchmarks, beside vllm serve and Ray Serve LLM"
	@echo "make docs    write the generated pages of docs/ anew"
	@echo "make sglang  set up, then an environment in which tests run SGLang on a CPU"
	@echo "make clean   remove everything that set-up and runs made"

$(READY): pyproject.toml constraints.txt $(wildcard scripts/*)
	@scripts/setup
	@touch $@

serve: $(READY)
	@$(BIN)/penstock serve $(ARGS)

PYTEST := $(BIN)/python -m pytest

ifdef T
test: $(READY)
	$(PYTEST) $(T)
else
# Two workers, while the models are made. Those on Ray after them and alone: two at a time take longer in all.
test: $(READY)
	@$(MAKE) models >/dev/null 2>&1 &
	@$(PYTEST) --durations=12 -n 2 --dist loadscope --no-loadscope-reorder tests/unit tests/http tests/engine; first=$$?; \
	$(PYTEST) --durations=12 tests/mission tests/ray && exit $$first
endif

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/python -m pytest -q tests/unit/test_directions.py
	$(BIN)/python -m tests.features --check

models: $(READY)
	@$(BIN)/python -m recipes all

bench: $(READY)
	$(BIN)/python -m benchmarks.online $(ARGS)

docs: $(READY)
	$(BIN)/python -m penstock.config.document > docs/configuration.md
	$(BIN)/python -m tests.features

sglang: $(READY)
	@scripts/sglang

clean:
	rm -rf .venv .venv-sglang build dist .pytest_cache .ruff_cache src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
