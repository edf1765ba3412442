# Two targets do everything on a fresh machine: `make serve` and `make test`.
.PHONY: serve test test-all test-gpu test-ray test-vllm fuzz mutants coverage check models fast-models bench docs sglang clients clean
.DEFAULT_GOAL := help

# Where Python may not write bytecode, as in many images, each start of an engine compiles 20 s anew.
unexport PYTHONDONTWRITEBYTECODE

BIN := .venv/bin
READY := .venv/ready

help:
	@echo "make serve     set up, then serve the embedded model on http://127.0.0.1:8000"
	@echo "make test      set up, then the tests of the fast tier (T=path or options for some)"
	@echo "make test-all  set up, then all tests"
	@echo "make test-gpu  set up, then the tests of what a GPU changes, on one NVIDIA GPU, in ten minutes"
	@echo "make test-ray RAY=2.57.1   set up, then tests of serving and batch jobs with that version of Ray"
	@echo "make test-vllm VLLM=0.31.0   set up, then the engine's tests with that version of vLLM"
	@echo "make fuzz      set up, then odd requests, bytes and batch jobs for MINUTES=30"
	@echo "make mutants   set up, then changes of single lines of what decides most: which does no test notice?"
	@echo "make coverage  set up, then the lines of src/ that the fast tier runs (FULL=1: all tests)"
	@echo "make check     set up, then format, lint, types, directions of imports, features without a test, the manual"
	@echo "make models    set up, then the small models that tests use"
	@echo "make bench     set up, then the benchmarks, beside vllm serve and Ray Serve LLM"
	@echo "make docs      set up, then the generated pages of docs/, and the manual in build/site"
	@echo "make sglang    set up, then an environment in which tests run SGLang on a CPU"
	@echo "make clients   set up, then an environment with client libraries, which tests run"
	@echo "make clean     remove everything that set-up and runs made"

$(READY): pyproject.toml $(wildcard constraints/*.txt) scripts/setup scripts/torchvision_beside_cpu_torch.py
	@scripts/setup
	@touch $@

serve: $(READY)
	@$(BIN)/penstock serve $(ARGS)

PYTEST := $(BIN)/python -m pytest
# Two workers. Tests that share an engine or the Ray cluster run in one of them, in the order of their cost.
WORKERS := -n 2 --dist loadscope --no-loadscope-reorder
ifdef T
test: $(READY)
	$(PYTEST) $(T)
else
test: $(READY)
	@$(MAKE) fast-models >/dev/null 2>&1 &
	$(PYTEST) $(WORKERS)
endif

test-all: $(READY) sglang clients
	@$(MAKE) models >/dev/null 2>&1 &
	$(PYTEST) --full --write-costs $(WORKERS)

# On a machine without a GPU it says so; the same tests are in `make test-all`, on the CPU.
test-gpu: $(READY) fast-models
	@nvidia-smi -L || { echo "There is no GPU here. On the CPU: make test T=tests/gpu/test_tokens.py" >&2; exit 1; }
	@mkdir -p build
	$(BIN)/python -m tests.gpu --report build/gpu.jsonl $(T)

RAY_TESTS := tests/unit/test_config_against_ray.py tests/ray/test_server.py tests/ray/test_control.py \
	tests/ray/test_death.py tests/ray/test_autoscaling.py tests/ray/test_update.py tests/ray/test_cli_serve.py \
	tests/ray/test_batch_engines.py tests/ray/test_batch_app.py tests/ray/test_data_processor.py
test-ray: $(READY)
	@scripts/ray $(RAY)
	.venv-ray-$(RAY)/bin/python -m pytest $(or $(T),$(RAY_TESTS))

# Another version of vLLM, in an environment of its own beside .venv: what its engine promises, and a batch.
VLLM := 0.31.0
VLLM_TESTS := tests/unit/test_vllm_capabilities.py tests/engine/test_contract.py tests/engine/test_control.py \
	tests/engine/test_lane.py tests/engine/test_gather.py tests/engine/test_inside.py \
	tests/engine/test_responses.py tests/engine/test_assistant.py tests/engine/test_pooling.py \
	tests/engine/test_vision.py tests/engine/test_adapters.py tests/engine/test_prepared.py \
	tests/engine/test_forced_tools.py tests/engine/test_structured.py tests/engine/test_messages.py \
	tests/engine/test_speech.py tests/engine/test_parallel.py tests/engine/test_gang.py \
	tests/engine/test_data_own.py tests/engine/test_vllm_versions.py
test-vllm: $(READY)
	@scripts/vllm $(VLLM)
	.venv-vllm-$(VLLM)/bin/python -m pytest -k "not sim and not sglang" $(or $(T),$(VLLM_TESTS))

FUZZ := $(wildcard tests/*/test_*fuzz.py) tests/http/test_batch_bucket.py tests/http/test_settled_kills.py
MINUTES := 30
fuzz: $(READY)
	end=$$(($$(date +%s) + 60 * $(MINUTES))); while [ $$(date +%s) -lt $$end ]; do \
		INTERLEAVING_SEED=$$(date +%s) $(BIN)/python -m tests.interleaving -x || exit 1; \
		$(PYTEST) -x -q --timeout 0 --hypothesis-profile fuzz $(T) $(FUZZ) || exit 1; done

mutants: $(READY)
	$(BIN)/python -m tests.mutants $(ARGS)

# Every process that tests start is measured, but for those that are killed.
coverage: export COVERAGE_FILE := $(CURDIR)/build/coverage/data
coverage: $(READY)
	rm -rf build/coverage && mkdir -p build/coverage
	$(BIN)/python -m coverage run -m pytest $(if $(FULL),--full) $(WORKERS)
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage report --skip-covered --sort=miss

SITE := NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict
check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/python -m pytest -q tests/unit/test_directions.py
	$(BIN)/python -m tests.features --check
	$(SITE)

models: $(READY)
	@$(BIN)/python -m recipes all

fast-models: $(READY)
	@$(BIN)/python -m recipes adapters assistant embedder vision

bench: $(READY)
	$(BIN)/python -m benchmarks.online $(ARGS)

docs: $(READY)
	$(BIN)/python -m scripts.reference_pages
	$(BIN)/python -m tests.features
	$(SITE)

sglang: $(READY)
	@scripts/sglang

clients: $(READY)
	@scripts/clients

clean:
	rm -rf .venv .venv-clients .venv-sglang .venv-ray-* .venv-vllm-* build dist .pytest_cache .ruff_cache src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
