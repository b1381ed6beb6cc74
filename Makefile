# Two commands set everything up on a fresh machine: `make demo` runs the main job, `make test` passes the tests.
# TORCH: the PyTorch to install. Leave it empty (make demo TORCH=) to keep whatever the environment already has or pip prefers.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
MINUTES ?= 2
WORKERS ?= 2
# The vendors' own packages, unpacked beside the environment and not into it: installed, torch-npu would make `import torch`
# fail on a machine without CANN. The tests check the Ascend tables against its files, and what `portable info` says when each
# is on the path: torch-npu without CANN, and the placeholder that PyPI holds under the name torch-neuronx.
VENDOR_PACKAGES ?= torch-npu==2.13.0 torch-neuronx==1.0
VENDOR := .vendor

RUN := $(VENV)/bin/python
STAMP := $(VENV)/.installed

.PHONY: demo test lint docs wheel clean

demo: $(STAMP)
	$(VENV)/bin/portable info
	$(RUN) examples/train_gpt.py --minutes $(MINUTES) --out out

test: lint $(VENDOR)/torch_npu
	$(RUN) -m pytest -n $(WORKERS) --dist loadfile -q

lint: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

docs: $(STAMP)
	$(RUN) -m portable.documents docs

wheel: $(STAMP)
	$(VENV)/bin/pip wheel --no-deps --wheel-dir dist .

$(STAMP): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --upgrade pip
	$(if $(TORCH),$(VENV)/bin/pip install --quiet "$(TORCH)")
	$(VENV)/bin/pip install --quiet --editable ".[dev]"
	touch $@

$(VENDOR)/torch_npu: $(STAMP)
	$(VENV)/bin/pip install --quiet --no-deps --target $(VENDOR) $(VENDOR_PACKAGES)

clean:
	rm -rf $(VENV) $(VENDOR) build dist out .pytest_cache .mypy_cache .ruff_cache .hypothesis
