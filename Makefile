# `make demo` and `make test` do everything on a fresh machine; PYTHON is any 3.10 to 3.14. CONSTRAINTS is a file of pinned
# versions: constraints-oldest.txt has the oldest that pyproject.toml allows, and `make test CONSTRAINTS=` takes the newest.
PYTHON ?= python3
CONSTRAINTS ?= constraints.txt
# setuptools warns of folders that hide an editable package; none here is called auxhead
QUIETLY = PYTHONWARNINGS='ignore:Editable installation'
INSTALLED = .venv/installed-$(or $(CONSTRAINTS),newest)
# Else each worker of the tests compiles all sources anew: 12 CPU seconds to collect them instead of 6
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test check lint types docs docs-serve mutants sanitizers soak install clean

demo: install
	.venv/bin/auxhead demo

# worksteal: a worker has the tests of a file in a row, so that what they share is made once, and none waits for the last
test: install
	.venv/bin/python -m pytest -n auto --dist worksteal

check: lint types test

lint: install
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .

# mypy reads the package as users install it: an editable install hides the packages from it
types: install
	rm -rf build  # setuptools would put modules that are no more into the package again
	.venv/bin/python -m pip install --quiet --no-deps --upgrade --target build/types .
	cd build/types && ../../.venv/bin/mypy --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache -p auxhead

# The site, in docs/_build/html, all of it anew: warnings are errors, and nothing is fetched
docs: $(INSTALLED)-docs
	.venv/bin/python -m sphinx -q -W --keep-going -E -a -j auto -c docs . docs/_build/html
	@echo "docs/_build/html/index.html is the site; make docs-serve shows it"

# Builds it again whenever a page changes
docs-serve: $(INSTALLED)-docs
	.venv/bin/sphinx-autobuild -c docs . docs/_build/html --watch docs --ignore docs/reference/commands.md --ignore docs/_build --ignore .venv

# Each wait, kept reference, barrier and reset is taken away in turn, which a test has to notice: minutes, and a GPU for all
mutants: install
	.venv/bin/python tests/mutants/waits.py

# Sanitizers over kernels and streams, each of which has to find a planted fault first: minutes, on a GPU with a CUDA toolkit
sanitizers: install
	.venv/bin/python tests/sanitizers/run.py

# A million requests beside others' work, and 100,000 under delays, all compared with eager mode: a GPU and some minutes
soak: install
	PYTHONPATH=tests .venv/bin/python tests/soak/soak.py
	PYTHONPATH=tests .venv/bin/python tests/soak/soak.py --delays

install: $(INSTALLED)

$(INSTALLED): pyproject.toml $(wildcard constraints*.txt)
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	rm -f .venv/installed-*  # of other constraints
	.venv/bin/python -m pip install --quiet --upgrade pip
	$(QUIETLY) .venv/bin/python -m pip install --quiet --upgrade $(addprefix --constraint ,$(CONSTRAINTS)) --editable '.[dev]'
	touch $@

$(INSTALLED)-docs: $(INSTALLED)
	$(QUIETLY) .venv/bin/python -m pip install --quiet $(addprefix --constraint ,$(CONSTRAINTS)) --editable '.[docs]'
	touch $@

clean:
	rm -rf docs/_build .venv build *.egg-info .pytest_cache .mypy_cache .ruff_cache
