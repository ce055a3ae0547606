# The commands that people need daily. `make help` lists them, and `python3 tools/suites.py` lists all test suites,
# stress runs and benchmarks; `make NAME` runs one of these. Each target first installs what it needs.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready
READY_TEST := .venv/ready-test

.PHONY: serve chat test check demo docs clean help

serve: $(READY)  ## start a server; ARGS="MODEL --port 9000" passes arguments on
	@exec $(BIN)/headrace serve $(ARGS)

chat: $(READY)  ## chat in the terminal
	@exec $(BIN)/headrace chat $(ARGS)

# Two tests at a time, because tests wait for processes more than they compute; one worker takes all tests of a file.
test: $(READY_TEST)  ## run the tests (minutes); `make test-all` runs the long ones, too
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

check: $(READY_TEST)  ## run the linters, the type checker and the house rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tools.plain_words
	$(BIN)/python -m pytest tests/test_house.py

demo: $(READY)  ## show progress, a resumed stream and a killed engine
	@$(BIN)/python tools/demo.py

docs:  ## build the documentation as a site, in build/site
	@$(PYTHON) tools/suites.py docs

clean:  ## remove everything that was installed and built
	rm -rf .venv build src/*.egg-info

help:
	@sed -n 's/^\([a-z]*\):.*## /  make \1\t/p' Makefile
	@$(PYTHON) tools/suites.py

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) tools/install.py .
	@touch $@

$(READY_TEST): $(READY)
	@$(PYTHON) tools/install.py '.[test,bench]'
	@touch $@

# Every other name is a suite.
.DEFAULT:
	@$(PYTHON) tools/suites.py $@
