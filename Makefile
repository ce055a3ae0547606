# Every target installs what it needs, and no more; a second run starts at once.
PYTHON ?= python3
BIN := .venv/bin
ROOFLINE_MODEL ?= build/qwen3-0.6b
READY := .venv/ready
READY_TEST := .venv/ready-test
READY_BENCH := .venv/ready-bench
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: serve looks environments package sbom audit test test-all test-agents test-batches test-arm64 test-clients test-cluster test-durable test-gateways kill-replicas test-embed test-gguf test-histories test-image test-kernels test-llama-cpp test-models test-open-webui test-package test-slow test-structure test-trained test-upgrade test-web test-ops check simulate simulate-placements chaos chaos-cluster attack soak corrupt recording demo roofline peers llama-gap clean kill-adapters test-peft

serve: $(READY)
	@exec $(BIN)/headrace serve $(ARGS)

# two at a time, each file by one worker: tests wait for processes more than they compute
test: $(READY_TEST)
	$(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

# the files that take long, too: what CI runs
test-all: $(READY_TEST)
	$(BIN)/python -m pytest -n 2 --dist loadfile --all $(ARGS)

# the JSON Schema test suite, which lies in the sources of jsonschema
JSONSCHEMA := jsonschema-$(shell sed -n 's/^jsonschema==//p' constraints.txt)
SUITE := build/$(JSONSCHEMA)/json/tests/draft2020-12
$(SUITE): $(READY_TEST)
	$(BIN)/pip download --quiet --no-deps --no-binary jsonschema -d build $(subst jsonschema-,jsonschema==,$(JSONSCHEMA))
	tar -xzf build/$(JSONSCHEMA).tar.gz -C build
	touch $@

SCHEMAS ?= 500
KILL_AFTER ?= [$(shell seq -s, 60)]
test-structure: $(READY_TEST) $(SUITE)
	SCHEMAS=$(SCHEMAS) KILL_AFTER="$(KILL_AFTER)" SCHEMA_SUITE=$(SUITE) \
		$(BIN)/python -m pytest -s --timeout 3000 \
		tests/test_structure.py tests/test_schema_suite.py tests/e2e/test_structure.py $(ARGS)

# all of the tests of several models, and 10,000 made-up histories of who comes in and who leaves
test-models: $(READY_TEST)
	MANY_LOADS=1 HEADRACE_SCHEDULES=10000 $(BIN)/python -m pytest --timeout 1800 \
		tests/fleet/test_memory_policy.py tests/e2e/test_models.py $(ARGS)

# made-up histories of conversations that began at other providers
HISTORIES ?= 2000
test-histories: $(READY_TEST)
	HISTORIES=$(HISTORIES) SEED=$(SEED) $(BIN)/python -m pytest --timeout 1800 \
		tests/protocols/test_histories.py $(ARGS)

# what would take the suite over its ten minutes
test-slow: $(READY_TEST)
	$(BIN)/python -m pytest --all -m slow $(ARGS)

# the suite as on a processor that runs none of our kernels
test-kernels: $(READY_TEST)
	NUMBA_CPU_NAME=generic NUMBA_CPU_FEATURES=+sse2 $(BIN)/python -m pytest -n 2 --dist loadfile --all $(ARGS)

# 64-bit ARM, emulated, in a Debian tree of its own: the check of every kernel, and a model's answers
ARM64_TESTS ?= tests/kernels/test_choose.py tests/equality/test_kernels.py tests/test_llm.py
test-arm64: $(READY_TEST)
	command -v debootstrap qemu-aarch64-static update-binfmts || (apt-get update -q && \
		apt-get install -y -q --no-install-recommends debootstrap qemu-user-static binfmt-support)
	tools/arm64_tree.sh build/arm64 python3 -m pytest -p no:cacheprovider --timeout 3000 $(ARM64_TESTS)

# OPEN_WEBUI=no leaves out Open WebUI, which takes minutes and 1.1 GB to install; so does naming clients
test-clients: $(READY)
	$(BIN)/python -m tests.clients.run $(ARGS)
	$(if $(ARGS)$(OPEN_WEBUI),,$(MAKE) test-open-webui)

# coding agents from npm, in build/agents, against a slow server; LONG=1: a prompt of seven minutes
test-agents: $(READY_TEST)
	LONG=$(LONG) timeout $(if $(LONG),3600,900) $(BIN)/python -m pytest -p no:cacheprovider --timeout 1800 \
		tests/agents $(if $(LONG),-k seven) $(ARGS)

# the tests of the protocol Durable Streams from npm, and its client over kills of engines and servers
DURABLE := build/durable
# a batch of LINES over KILLS of engine and server: each line once, each text as if it were asked alone
test-batches: LINES ?= 10000
test-batches: KILLS ?= 20
test-batches: $(READY_TEST)
	LINES=$(LINES) KILLS=$(KILLS) $(BIN)/python -m pytest -p no:cacheprovider --timeout 7200 -s \
		tests/e2e/test_batch_kills.py $(ARGS)

test-durable: $(READY_TEST) $(DURABLE)/ready
	PYTHONPATH=src:. timeout 900 $(BIN)/python -m tests.durable.conformance
	PYTHONPATH=src:. timeout 1800 $(BIN)/python -m tests.durable.kills --kills $(KILLS) $(ARGS)

$(DURABLE)/ready: Makefile
	command -v npm || (apt-get update -q && apt-get install -y -q --no-install-recommends npm)
	mkdir -p $(DURABLE)
	npm install --prefix $(DURABLE) --no-save --no-audit --no-fund \
		@durable-streams/server-conformance-tests@0.3.6 @durable-streams/client@0.2.7 vitest@4.1.12
	touch $@

# Debian's Prometheus scrapes a server; where it cannot be had, this fails
test-ops: $(READY_TEST)
	(command -v prometheus && command -v promtool && command -v systemd-analyze) || \
		(apt-get update -q && apt-get install -y -q --no-install-recommends prometheus systemd)
	timeout 600 $(BIN)/python -m pytest -p no:cacheprovider --timeout 300 tests/ops $(ARGS)

# sentence-transformers in an environment of its own, which finds our packages beside it
EMBED := build/embed-venv
SITE := -c 'import site; print(site.getsitepackages()[0])'
test-embed: $(READY_TEST) $(EMBED)/ready
	PYTHONPATH=src:. $(EMBED)/bin/python -m pytest -c tests/clients/pytest.ini \
		tests/clients/test_sentence_transformers.py $(ARGS)

$(EMBED)/ready: constraints.txt
	test -x $(EMBED)/bin/python || $(PYTHON) -m venv $(EMBED)
	$(abspath $(BIN))/python $(SITE) > "$$($(EMBED)/bin/python $(SITE))/headrace.pth"
	$(EMBED)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt \
		sentence-transformers
	touch $@

# Open WebUI on both of its connections, without what its own models need: 1.1 GB in build, and
# minutes to install, so CI leaves it out; it needs Python 3.11 or 3.12
WEBUI := build/open-webui-venv
WEBUI_LEFT_OUT := accelerate|einops|faster-whisper|opencv-python-headless|rapidocr|sentence-transformers|soundfile|transformers
test-open-webui: $(READY_TEST) $(WEBUI)/ready
	PYTHONPATH=src:. timeout 1200 $(BIN)/python -m pytest -c tests/clients/pytest.ini \
		-o faulthandler_timeout=600 tests/clients/test_open_webui.py $(ARGS)

$(WEBUI)/ready: Makefile
	test -x $(WEBUI)/bin/python || $(PYTHON) -m venv $(WEBUI)
	$(WEBUI)/bin/pip install --quiet --disable-pip-version-check --no-deps open-webui==0.12.4
	$(WEBUI)/bin/python -c 'import importlib.metadata as it; print(*it.requires("open-webui"), sep="\n")' | \
		grep -v extra | grep -vE '^($(WEBUI_LEFT_OUT))\b' > $(WEBUI)/needed.txt
	$(WEBUI)/bin/pip install --quiet --disable-pip-version-check -r $(WEBUI)/needed.txt
	touch $@

# adapters against PEFT itself, which lies beside the environment's other packages
PEFT := build/peft
test-peft: $(READY_TEST) $(PEFT)/ready
	PYTHONPATH=$(PEFT) $(BIN)/python -m pytest --timeout 900 tests/equality/test_peft.py $(ARGS)

$(PEFT)/ready: Makefile
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --target $(PEFT) \
		peft==0.21.2 accelerate==1.15.0 psutil==7.2.2
	touch $@

# 50 engine kills while adapters come and go
kill-adapters: $(READY_TEST)
	KILLS=50 $(BIN)/python -m pytest --timeout 1800 -s tests/e2e/test_adapters.py -k kills $(ARGS)

# Ray in an environment of its own, which finds our packages beside it; two nodes on this machine
CLUSTER := build/cluster-venv
test-cluster: $(READY_TEST) $(CLUSTER)/ready test-gateways
	PYTHONPATH=$(abspath src):$(CURDIR) timeout 1800 $(CLUSTER)/bin/python -m pytest -p no:cacheprovider \
		--timeout 600 --ignore tests/cluster/test_gateways.py tests/cluster $(ARGS)

# servers on Debian's Redis, behind Debian's HAProxy; where they cannot be had, this fails
HAVE_GATEWAYS = (command -v redis-server && command -v haproxy) || \
	(apt-get update -q && apt-get install -y -q --no-install-recommends redis-server haproxy)
test-gateways: $(READY_TEST)
	$(HAVE_GATEWAYS)
	NEEDS_REDIS=1 timeout 900 $(BIN)/python -m pytest -p no:cacheprovider --timeout 300 \
		tests/streams/stores/test_stores.py tests/streams/stores/test_store_machine.py \
		tests/streams/stores/test_redis.py tests/cluster/test_gateways.py $(ARGS)

# a cluster of two nodes, Redis and two gateways, and KILLS of all of these in runs of 50
CLUSTER_KILLS := PYTHONPATH=$(abspath src):$(CURDIR) $(CLUSTER)/bin/python -m stress.cluster.kills
chaos-cluster: $(READY_TEST) $(CLUSTER)/ready
	$(HAVE_GATEWAYS)
	$(CLUSTER_KILLS) --kills $(KILLS) --seed $(SEED) $(ARGS)

# engines, agents and nodes only
kill-replicas: $(READY_TEST) $(CLUSTER)/ready
	$(HAVE_GATEWAYS)
	$(CLUSTER_KILLS) --kills $(KILLS) --seed $(SEED) --kinds engine,actor,node $(ARGS)

$(CLUSTER)/ready: constraints.txt
	test -x $(CLUSTER)/bin/python || $(PYTHON) -m venv $(CLUSTER)
	$(abspath $(BIN))/python $(SITE) > "$$($(CLUSTER)/bin/python $(SITE))/headrace.pth"
	$(CLUSTER)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt ray
	touch $@

# a wheel and a source archive, in build/dist
VERSION := $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' src/headrace_common/version.py)
WHEEL := build/dist/headrace-$(VERSION)-py3-none-any.whl
package: $(WHEEL)
$(WHEEL): build/dist-venv/ready MANIFEST.in LICENSE $(shell git ls-files pyproject.toml README.md src)
	rm -rf build/dist
	build/dist-venv/bin/python -m build --outdir build/dist .

build/dist-venv/ready: constraints.txt
	test -x build/dist-venv/bin/python || $(PYTHON) -m venv build/dist-venv
	build/dist-venv/bin/pip install --quiet --disable-pip-version-check -c constraints.txt build cyclonedx-bom pip-audit
	touch $@

# the wheel, put into an empty environment by pip alone, as another user has it who may not write there.
# Only torch is pinned: of the newest a package index may have no build for CPUs, which is gigabytes less
test-package: $(READY_TEST) build/package-venv/ready build/gateway-venv/ready
	timeout 900 $(BIN)/python -m pytest -p no:cacheprovider --timeout 300 tests/package/test_package.py \
		tests/package/test_gateway.py $(ARGS)

# the gateway's side alone, without PyTorch
build/gateway-venv/ready: constraints.txt deploy/gateway/pyproject.toml $(shell git ls-files src)
	$(PYTHON) -m venv --clear build/gateway-venv
	build/gateway-venv/bin/pip install --quiet --disable-pip-version-check -c constraints.txt ./deploy/gateway
	touch $@

build/package-venv/ready: $(WHEEL)
	$(PYTHON) -m venv --clear build/package-venv
	grep ^torch== constraints.txt > build/torch.txt
	build/package-venv/bin/pip install --quiet --disable-pip-version-check -c build/torch.txt $(WHEEL)
	touch $@

# what the wheel brings with it, in the format of CycloneDX; and whether a flaw of that is known, which asks
# PyPI: exit code 1 if one is, 2 if it did not answer for all packages
sbom: build/package-venv/ready
	build/dist-venv/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible \
		--output-file build/sbom.json build/package-venv/bin/python

audit: build/package-venv/ready
	build/dist-venv/bin/python tools/audit.py build/dist-venv/bin/pip-audit "$$(build/package-venv/bin/python $(SITE))"

# each step of deploy/Dockerfile in a Debian tree, and then what the image would run; needs root
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
test-image:
	command -v debootstrap || (apt-get update -q && apt-get install -y -q --no-install-recommends debootstrap)
	timeout 1800 unshare --mount $(PYTHON) tools/run_dockerfile.py deploy/Dockerfile build/image \
		TORCH_INDEX=$(TORCH_INDEX)

# a server of version 0.1 and one of this, in turn, over the same folders
test-upgrade: $(READY_TEST)
	$(BIN)/python -m pytest -p no:cacheprovider --timeout 600 tests/package/test_upgrade.py $(ARGS)

# llama.cpp, built here for this processor (minutes), in an environment of its own; and its server,
# from a wheel that is built for any processor
LLAMA := build/llama-venv
test-llama-cpp: $(READY_TEST) $(LLAMA)/ready
	PYTHONPATH=src:. timeout 1200 $(LLAMA)/bin/python -m pytest -p no:cacheprovider \
		tests/llama $(ARGS)

$(LLAMA)/ready: constraints.txt
	test -x $(LLAMA)/bin/python || $(PYTHON) -m venv $(LLAMA)
	$(abspath $(BIN))/python $(SITE) > "$$($(LLAMA)/bin/python $(SITE))/headrace.pth"
	$(LLAMA)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt llama-cpp-python
	$(LLAMA)/bin/pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt xllamacpp
	touch $@

# trained models out of packages, beside transformers, sentence-transformers and llama.cpp
TRAINED := build/trained-venv
test-trained: $(READY_TEST) $(TRAINED)/ready
	PYTHONPATH=$(abspath src):$(CURDIR) TRANSFORMERS_VERBOSITY=error timeout 1800 $(TRAINED)/bin/python -m pytest \
		-p no:cacheprovider -n 2 --dist loadfile -rP --timeout 600 \
		-m "slow or not slow" tests/trained $(ARGS)

$(TRAINED)/ready: constraints.txt tests/trained/models.txt
	test -x $(TRAINED)/bin/python || $(PYTHON) -m venv $(TRAINED)
	$(abspath $(BIN))/python $(SITE) > "$$($(TRAINED)/bin/python $(SITE))/headrace.pth"
	$(TRAINED)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt \
		accelerate sentence-transformers
	$(TRAINED)/bin/pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt xllamacpp
	$(TRAINED)/bin/pip install --quiet --disable-pip-version-check --no-deps --require-hashes \
		-r tests/trained/models.txt
	touch $@

# the same file by llama-server and by lane llama-cpp, in turn
llama-gap: $(LLAMA)/ready $(ROOFLINE_MODEL)
	PYTHONPATH=src:. $(LLAMA)/bin/python -m benchmarks.beside llama $(ROOFLINE_MODEL) $(ARGS)

# damaged GGUF files in larger numbers than the suite has
MUTATIONS ?= 1000
test-gguf: $(READY_TEST)
	MUTATIONS=$(MUTATIONS) $(BIN)/python -m pytest --timeout 1800 -k damaged \
		tests/checkpoints/test_gguf.py $(ARGS)

WEB := build/web-venv
AXE := $(WEB)/node_modules/axe-core/axe.min.js
test-web: $(READY_TEST) $(WEB)/ready $(AXE) $(if $(filter firefox,$(BROWSER)),$(WEB)/firefox)
	BROWSER=$(BROWSER) timeout 900 $(WEB)/bin/python -m pytest -p no:cacheprovider --confcutdir tests/web --timeout 150 tests/web $(ARGS)

$(WEB)/firefox: | $(WEB)/ready
	command -v firefox-esr || (apt-get update -q && apt-get install -y -q --no-install-recommends firefox-esr)
	touch $@

# every state of the page, at two widths, light and dark: pictures for a person who looks
looks: $(READY_TEST) $(WEB)/ready $(AXE)
	mkdir -p build/looks
	LOOKS=build/looks $(WEB)/bin/python -m pytest -p no:cacheprovider --confcutdir tests/web --timeout 150 tests/web/test_states.py $(ARGS)

screenshots: $(READY) $(WEB)/ready
	$(WEB)/bin/python -m tests.web.screenshots

# Debian's browser; where it cannot be had, this fails
$(WEB)/ready: constraints.txt
	command -v chromium chromedriver || \
		(apt-get update -q && apt-get install -y -q --no-install-recommends chromium chromium-driver)
	test -x $(WEB)/bin/python || $(PYTHON) -m venv $(WEB)
	$(WEB)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt \
		selenium pytest pytest-timeout
	touch $@

# looks for what keeps people out; the tests alone need it
$(AXE): | $(WEB)/ready
	command -v npm || (apt-get update -q && apt-get install -y -q --no-install-recommends npm)
	npm install --prefix $(WEB) --no-save --no-audit --no-fund --ignore-scripts axe-core@4.14.1

# the environments of several targets, for CI to make them beside other work
environments: build/package-venv/ready build/gateway-venv/ready $(TRAINED)/ready $(WEB)/ready $(AXE)

check: $(READY_TEST)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest tests/test_house.py

N ?= 10000
simulate: $(READY)
	$(BIN)/python -m stress.simulator -n $(N) $(ARGS)

# requests dealt out over replicas: places, order, prefixes
simulate-placements: $(READY)
	$(BIN)/python -m stress.simulator.placements -n $(N) $(ARGS)

KILLS ?= 50
SEED ?= 0
chaos: $(READY_TEST)
	$(BIN)/python -m stress.chaos --kills $(KILLS) --seed $(SEED) $(ARGS)

SECONDS ?= 120
attack: $(READY_TEST)
	$(BIN)/python -m stress.attack --seconds $(SECONDS) --seed $(SEED) $(ARGS)

soak: $(READY_TEST)
	$(BIN)/python -m stress.attack.soak --seed $(SEED) $(ARGS) \
		--seconds $(if $(filter file,$(origin SECONDS)),600,$(SECONDS))

CORRUPTIONS ?= 1000
SERVERS ?= 30
corrupt: $(READY_TEST)
	$(BIN)/python -m stress.attack.corruption -n $(CORRUPTIONS) --servers $(SERVERS) \
		--seed $(SEED) $(ARGS)

# the answers of CODE to a fixed list of requests, in RECORDING; `python -m stress.recording compare`
# shows what differs between two of these
CODE ?= .
RECORDING ?= build/recording.jsonl
recording: $(READY_TEST)
	mkdir -p $(dir $(RECORDING))
	$(BIN)/python -m stress.recording --code $(CODE) record $(RECORDING)

demo: $(READY)
	@$(BIN)/python tools/demo.py

roofline: $(READY_BENCH) $(ROOFLINE_MODEL)
	$(BIN)/python benchmarks/roofline.py --model $(ROOFLINE_MODEL) $(ARGS)

# beside OpenVINO GenAI and llama.cpp, in environments of their own
peers: $(READY_BENCH)
	PYTHONPATH=src:. $(BIN)/python -m benchmarks.peers $(ARGS)

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
