# Two commands do the main jobs, set-up included: `make serve` and `make test`.
PYTHON ?= python3
VENV ?= .venv
# Optional dependencies to install, e.g. EXTRAS=test,cuda12 on a machine with an NVIDIA GPU.
EXTRAS ?= test
# Flags for serve.py, e.g. make serve ARGS='--port=8001'.
ARGS ?=
# Arguments for pytest, e.g. make test TESTS=tests/control
TESTS ?=
# Processes that share the tests, 4 GiB of memory each.
WORKERS ?= 2

PY := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed-$(EXTRAS)

.PHONY: serve test test-slow test-prometheus test-browser gpu-build oracle clients bench clean

serve: $(INSTALLED)
	$(PY) scripts/serve.py --model=demo $(ARGS)

# Everything that needs neither torch nor a model hub.
test: $(INSTALLED)
	$(PY) -m pytest -n $(WORKERS) --dist loadfile -m "not slow and not gpu_build and not prometheus and not clients and not browser" $(TESTS)

test-slow: $(INSTALLED)
	$(PY) -m pytest -m slow $(TESTS)

# /metrics and its dashboards under a real Prometheus (apt-get install prometheus).
test-prometheus: $(INSTALLED)
	$(PY) -m pytest -m prometheus tests/server/test_prometheus.py

# /dashboard in a headless browser (apt-get install chromium); screenshots stay in /tmp/pytest-of-USER/pytest-current.
test-browser: $(INSTALLED)
	$(PY) -m pytest -m browser tests/server/test_dashboard_browser.py

# The GPU kernels and step functions, compiled for GPUs on any machine: tests of their machine code. A virtual environment of
# its own, since JAX looks for a GPU at every start once the CUDA plugin is installed.
gpu-build:
	$(MAKE) VENV=$(VENV)-gpu_build EXTRAS=test,gpu-build gpu-build-tests

gpu-build-tests: $(INSTALLED)
	JAX_PLATFORMS=cpu $(PY) -m pytest -m gpu_build $(TESTS)

# Comparisons with transformers' torch models. Installs torch (see pyproject.toml).
oracle: $(INSTALLED)
	$(PY) -m pip install --quiet -e '.[oracle]'
	$(PY) -m pytest -m "not slow and not gpu_build and not prometheus and not clients and not browser" $(or $(TESTS),$(shell find tests -name 'test_*_torch.py' | sort))

# Other people's programs against a server on the demo model, lm-eval's numbers beside transformers'. Installs torch.
clients: $(INSTALLED)
	$(PY) -m pip install --quiet -e '.[clients,oracle]'
	$(PY) -m pytest -m clients $(TESTS)

# The benchmarks at the settings that have targets, on an idle machine: some 25 minutes. With -k one goes on after a
# target that was missed. One alone, with its flags: make bench-throughput ARGS='--quick --batch_sizes=1'
bench: bench-throughput bench-prefix_sharing bench-decode_loop

bench-%: $(INSTALLED)
	$(PY) -m pip install --quiet -e '.[oracle,plot,load]'
	$(PY) scripts/bench_$*.py $(ARGS)

$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit(f"jaxkv needs Python 3.11 or newer, this is {v[0]}.{v[1]}: try make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	@echo "Installing jaxkv and what it needs into $(VENV) (1 to 3 minutes) ..."
	$(PY) -m pip install --quiet --disable-pip-version-check -e '.[$(EXTRAS)]'
	@touch $@

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache
