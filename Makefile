# Every target installs what it needs, and no more; a second run starts at once.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready
READY_TEST := .venv/ready-test
READY_BENCH := .venv/ready-bench
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: serve test test-clients test-structure test-web check simulate chaos attack corrupt demo roofline clean

serve: $(READY)
	@exec $(BIN)/headrace serve $(ARGS)

test: $(READY_TEST)
	$(BIN)/python -m pytest $(ARGS)

SCHEMAS ?= 500
KILL_AFTER ?= [1, 2, 3, 5, 8, 13, 21, 34, 55]
test-structure: $(READY_TEST)
	SCHEMAS=$(SCHEMAS) KILL_AFTER="$(KILL_AFTER)" $(BIN)/python -m pytest -s --timeout 1800 \
		tests/test_structure.py tests/e2e/test_structure.py $(ARGS)

test-clients: $(READY)
	$(BIN)/python -m tests.clients.run $(ARGS)

WEB := build/web-venv
test-web: $(READY) $(WEB)/ready
	timeout 300 $(WEB)/bin/python -m pytest -p no:cacheprovider --timeout 150 web_tests $(ARGS)

screenshots: $(READY) $(WEB)/ready
	$(WEB)/bin/python -m web_tests.screenshots

# Debian's browser; where it cannot be had, this fails
$(WEB)/ready: constraints.txt
	command -v chromium chromedriver || \
		(apt-get update -q && apt-get install -y -q --no-install-recommends chromium chromium-driver)
	test -x $(WEB)/bin/python || $(PYTHON) -m venv $(WEB)
	$(WEB)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt \
		selenium pytest pytest-timeout
	touch $@

check: $(READY_TEST)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest tests/test_house.py

N ?= 10000
simulate: $(READY)
	$(BIN)/python -m simulator -n $(N) $(ARGS)

KILLS ?= 50
SEED ?= 0
chaos: $(READY_TEST)
	$(BIN)/python -m chaos --kills $(KILLS) --seed $(SEED) $(ARGS)

SECONDS ?= 120
attack: $(READY_TEST)
	$(BIN)/python -m attack --seconds $(SECONDS) --seed $(SEED) $(ARGS)

CORRUPTIONS ?= 1000
SERVERS ?= 30
corrupt: $(READY_TEST)
	$(BIN)/python -m attack.corruption -n $(CORRUPTIONS) --servers $(SERVERS) \
		--seed $(SEED) $(ARGS)

demo: $(READY)
	@$(BIN)/python tools/demo.py

ROOFLINE_MODEL ?= build/qwen3-0.6b
roofline: $(READY_BENCH) $(ROOFLINE_MODEL)
	$(BIN)/python benchmarks/roofline.py --model $(ROOFLINE_MODEL) $(ARGS)

build/qwen3-0.6b: $(READY)
	$(BIN)/python tools/make_random_model.py --shape qwen3-0.6b --out $@

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(INSTALL) torch
	$(INSTALL) -e .
	touch $@

$(READY_TEST): $(READY)
	$(INSTALL) -e '.[test,bench]'
	touch $@

$(READY_BENCH): $(READY)
	$(INSTALL) -e '.[bench]'
	touch $@

clean:
	rm -rf .venv build src/*.egg-info
