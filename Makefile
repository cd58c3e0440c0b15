# Two commands: `make demo` and `make test`. `make check` is the gate before a commit.
PYTHON ?= python3.11
VENV   := .venv
BIN    := $(VENV)/bin
# torch and torchvision are pinned for this checkout alone; a user's `pip install vlm-stream` keeps open ranges.
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

# Of tests: one more than cores, for many of them wait for processes and servers.
PROCESSES ?= $(shell echo $$(($$(nproc 2>/dev/null || echo 2) + 1)))

BENCH  := .venv-bench
AUTOMODEL := .venv-automodel
AUDIT  := .venv-audit

.PHONY: demo test fuzz audit lock chaos chaos-quick browser screenshots service trainers trainers-quick parity quickstart check format clean bench bench-full bench-setup automodel-setup docs docs-serve

demo: $(VENV)/.installed-demo
	$(BIN)/python examples/demo.py --out demo-out

test: $(VENV)/.installed-dev $(VENV)/.system
	$(BIN)/python -m pytest -n $(PROCESSES) --dist loadfile --no-loadscope-reorder -m 'not trainers and not slow and not browser'

# The viewer in Debian's Chromium, about a minute; where there is none and it cannot be installed, the tests are skipped.
# `screenshots` also keeps the pictures of docs/viewer.md.
browser screenshots: $(VENV)/.installed-dev
	@command -v chromium chromium-browser google-chrome >/dev/null || \
		{ [ "$$(id -u)" = 0 ] && apt-get update -qq && apt-get install -y -qq chromium; } >/dev/null 2>&1 || \
		echo "chromium is missing and could not be installed: the tests of the viewer in a browser are skipped"
	$(if $(filter screenshots,$@),VLM_STREAM_SCREENSHOTS=docs/images) $(BIN)/python -m pytest -m browser tests/view

# Toy data on disk and on a real S3 server, under faults drawn from a seed: docs/chaos.md. The quick one, part of CI, takes
# about three minutes on two cores; `make chaos MINUTES=60 SEED=7` another one.
MINUTES ?= 25
SEED    ?= 20261118
chaos: $(VENV)/.installed-dev
	$(BIN)/python -m tests.chaos --minutes $(MINUTES) --seed $(SEED)

# Where a run ended in a way that its fault does not explain (exit code 3) all is run once more, and both are printed. What is
# lost, repeated, silent or out of order, and a hang, fail at once.
QUICK = $(BIN)/python -m tests.chaos --minutes 2 --seed $(SEED)
chaos-quick: $(VENV)/.installed-dev
	$(QUICK) || { [ $$? = 3 ] && echo "A run ended that should have gone on, see above. Once more:" && $(QUICK); }

# Each trainer in real processes that are killed and resumed, some 17 minutes on two cores; `trainers-quick`, part of CI,
# leaves out examples from the command line and further ways to start, and takes about half of that.
trainers trainers-quick: $(VENV)/.installed-dev
	@$(MAKE) --no-print-directory $(AUTOMODEL)/.installed || \
		echo "NeMo Automodel could not be installed: the tests with its recipe are skipped"
	$(BIN)/python -m pytest -m 'trainers$(if $(filter %-quick,$@), and not slow)'

# Builders on Ray over longer runs: pools that follow their load, claims held for long, Ray Train; some four minutes.
service: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m 'slow and not trainers'

# Fuzzers of all that is read from outside, each for so many seconds: executions and findings.
SECONDS_EACH ?= 120
fuzz: $(VENV)/.installed-dev
	$(BIN)/python -m tests.fuzz --seconds $(SECONDS_EACH)

# The versions that the tests ran with, names and versions alone: no paths, no hosts.
lock: $(VENV)/.installed-dev
	@{ echo "# The environment of the tests: what 'make lock' found installed by 'make test'. Names and versions alone, also of a CPU torch."; \
		$(BIN)/python -m pip freeze --exclude-editable --disable-pip-version-check | grep -v ' @ ' \
		| grep -iv '^vlm.stream==' | sed 's/+.*//'; } > requirements-dev.lock

# Known vulnerabilities of that environment. It needs the network, for the tool and for the advisories of PyPI.
audit:
	$(PYTHON) -m venv $(AUDIT)
	$(AUDIT)/bin/python -m pip install --quiet --disable-pip-version-check pip-audit
	$(AUDIT)/bin/pip-audit --requirement requirements-dev.lock --no-deps --disable-pip

# The documentation: site/index.html; strict, and without any request to the network.
docs docs-serve: $(VENV)/.installed-dev
	$(BIN)/mkdocs $(if $(filter %-serve,$@),serve,build --clean)

# A new user's way through docs/quickstart.md: a clean environment, the wheel, every block, timed; some minutes, by pip.
quickstart: $(VENV)/.installed-dev
	$(BIN)/python -m docs.scripts.quickstart

# NeMo Automodel as oracle: every public name of its map-style data modules against ours, two minutes.
# docs/parity.md is the outcome; `python -m tests.parity --write` in that environment writes it anew.
parity: $(VENV)/.installed-dev
	@if $(MAKE) --no-print-directory $(AUTOMODEL)/.installed; \
		then $(AUTOMODEL)/bin/python -m pytest -q tests/parity; \
		else echo "NeMo Automodel could not be installed: the comparison with it is skipped"; fi

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Loaders compared: about five minutes; the long one (40) writes benchmarks/RESULTS.md and the README's table. One that
# was ended goes on with: .venv-bench/bin/python -m benchmarks.peers --full --missing
bench: $(BENCH)/.installed
	$(BENCH)/bin/python -m benchmarks.peers

bench-full: $(BENCH)/.installed
	$(BENCH)/bin/python -m benchmarks.peers --full
	$(BENCH)/bin/python -m benchmarks.peers --report

bench-setup: $(BENCH)/.installed

automodel-setup: $(AUTOMODEL)/.installed

clean:
	rm -rf $(VENV) $(BENCH) $(AUTOMODEL) $(AUDIT) demo-out site .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

# Every process of an environment, workers too, must be able to import torchvision beside a CPU torch.
$(VENV)/bin/python $(BENCH)/bin/python $(AUTOMODEL)/bin/python: %/bin/python:
	$(PYTHON) -m venv $* || python3 -m venv $*
	@site=$$($@ -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
		cp vlm_stream/testing/torchvision_shim.py $$site/_torchvision_shim.py && \
		echo "import _torchvision_shim; _torchvision_shim.install()" > $$site/torchvision_shim.pth

# Debian's FFmpeg libraries for torchcodec, openssl for a test certificate, an Azure server; what cannot be installed skips its tests.
$(VENV)/.system: | $(VENV)/bin/python
	@{ command -v ffmpeg && command -v openssl; } >/dev/null || \
		{ [ "$$(id -u)" = 0 ] && apt-get update -qq && apt-get install -y -qq ffmpeg openssl; } >/dev/null 2>&1 || \
		echo "ffmpeg or openssl is missing and could not be installed: tests that need it are skipped or fail"
	@{ command -v npm && timeout 120 npm install --no-audit --no-fund --prefix $(VENV) azurite@3; } >/dev/null 2>&1 || \
		echo "Azurite could not be installed by npm: tests with an Azure server are skipped"
	@touch $@

$(VENV)/.installed-demo: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) -e '.[video,view]'
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) -e '.[dev]'
	@touch $@ $(VENV)/.installed-demo

# One peer pins older releases of what the others need and works with the newer ones: it comes without dependencies.
$(BENCH)/.installed: benchmarks/peers/requirements.txt benchmarks/peers/requirements-no-deps.txt | $(BENCH)/bin/python
	$(BENCH)/bin/python -m pip install --quiet --disable-pip-version-check -r benchmarks/peers/requirements.txt -e '.[video]'
	$(BENCH)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r benchmarks/peers/requirements-no-deps.txt
	@touch $@

# NeMo Automodel pins releases that other trainers do not work with: it stands in an environment of its own, without its
# dependencies, and sees those of the first. What its VLM recipe cannot be imported without comes with it.
$(AUTOMODEL)/.installed: tests/integrations/requirements-automodel.txt | $(VENV)/.installed-dev $(AUTOMODEL)/bin/python
	$(AUTOMODEL)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r $<
	@purelib='import sysconfig; print(sysconfig.get_path("purelib"))' && \
		{ $(BIN)/python -c "$$purelib"; pwd; } > "$$($(AUTOMODEL)/bin/python -c "$$purelib")/first_environment.pth"
	@touch $@
