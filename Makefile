# `make demo` and `make test` do everything on a fresh machine; PYTHON is any 3.10 to 3.14.
PYTHON ?= python3
PACKAGES = auxhead.kernels auxhead.model auxhead.autotune auxhead.plots

.PHONY: demo test check lint types mutants-logic install clean

demo: install
	.venv/bin/auxhead demo

test: install
	.venv/bin/python -m pytest -n auto

check: lint types test

lint: install
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

# mypy reads the package as users install it: an editable install hides a namespace from it
types: install
	rm -rf build  # setuptools would put modules that are no more into the package again
	.venv/bin/python -m pip install --quiet --no-deps --upgrade --target build/types .
	cd build/types && ../../.venv/bin/mypy --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache $(addprefix -p ,$(PACKAGES))

# Single changes of modules that are cheap to test, each of which a test has to notice: half an hour or more
mutants-logic: install
	.venv/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[mutants]'
	.venv/bin/python tests/mutants/logic.py

install: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --upgrade pip
	.venv/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch .venv/installed

clean:
	rm -rf .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache
