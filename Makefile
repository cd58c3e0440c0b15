# Two commands: `make demo` and `make test`. `make check` is the gate before a commit.
PYTHON ?= python3.11
VENV   := .venv
BIN    := $(VENV)/bin
# torch and torchvision are pinned for this checkout alone; a user's `pip install vlm-stream` keeps open ranges.
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

BENCH  := .venv-bench
AUTOMODEL := .venv-automodel

.PHONY: demo test trainers trainers-quick parity check format clean bench bench-full bench-setup automodel-setup

demo: $(VENV)/.installed-demo
	$(BIN)/python -m vlm_stream.testing.demo --out demo-out

test: $(VENV)/.installed-dev $(VENV)/.system
	$(BIN)/python -m pytest -n auto --dist loadfile -m 'not trainers'

# Each trainer in real processes that are killed and resumed, some 17 minutes on two cores; `trainers-quick`, part of CI,
# leaves out examples from the command line and further ways to start, and takes about half of that.
trainers trainers-quick: $(VENV)/.installed-dev
	@$(MAKE) --no-print-directory $(AUTOMODEL)/.installed || \
		echo "NeMo Automodel could not be installed: the tests with its recipe are skipped"
	$(BIN)/python -m pytest -m 'trainers$(if $(filter %-quick,$@), and not slow)'

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

# Loaders compared: a few minutes; the long one writes benchmarks/RESULTS.md and the README's table.
bench: $(BENCH)/.installed
	$(BENCH)/bin/python -m benchmarks.peers

bench-full: $(BENCH)/.installed
	$(BENCH)/bin/python -m benchmarks.peers --full
	$(BENCH)/bin/python -m benchmarks.peers --report

bench-setup: $(BENCH)/.installed

automodel-setup: $(AUTOMODEL)/.installed

clean:
	rm -rf $(VENV) $(BENCH) $(AUTOMODEL) demo-out .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

# Every process of an environment, workers too, must be able to import torchvision beside a CPU torch.
$(VENV)/bin/python $(BENCH)/bin/python $(AUTOMODEL)/bin/python: %/bin/python:
	$(PYTHON) -m venv $* || python3 -m venv $*
	@site=$$($@ -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
		cp vlm_stream/testing/torchvision_shim.py $$site/_torchvision_shim.py && \
		echo "import _torchvision_shim; _torchvision_shim.install()" > $$site/torchvision_shim.pth

# Debian's FFmpeg libraries for torchcodec, openssl for a test certificate; what cannot be installed skips its tests.
$(VENV)/.system: | $(VENV)/bin/python
	@{ command -v ffmpeg && command -v openssl; } >/dev/null || \
		{ [ "$$(id -u)" = 0 ] && apt-get update -qq && apt-get install -y -qq ffmpeg openssl; } >/dev/null 2>&1 || \
		echo "ffmpeg or openssl is missing and could not be installed: tests that need it are skipped or fail"
	@touch $@

$(VENV)/.installed-demo: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) -e '.[video]'
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
