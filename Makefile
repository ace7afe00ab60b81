# make setup | run [MODEL=rlt|transformer_xl] | test | check | clean
PYTHON ?= python3
MODEL ?= rlt
VENV := .venv
READY := $(VENV)/.ready

.PHONY: setup run test check clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "Python 3.11 or newer is needed; make setup PYTHON=..."'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --constraint constraints.txt --editable '.[dev,megatron,mpi,triton]'
	touch $(READY)

run: $(READY)
	launch/main_job.sh $(MODEL)

# One thread a process: two workers and the ranks they start share the cores already.
test: $(READY)
	OMP_NUM_THREADS=1 $(VENV)/bin/pytest --numprocesses 2 --dist worksteal

check: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/pytest tests/test_layering.py

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis
