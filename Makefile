PYTHON   ?= python3
VENV     ?= .venv
PIP_ARGS ?=
ARGS     ?=
BIN      := $(VENV)/bin

OLDEST   ?= .venv-oldest
NEWEST   ?= .venv-newest

.PHONY: demo bench test test-all test-oldest test-newest lint parity docs package tag clean

demo: $(VENV)/.installed-parity
	$(BIN)/penstock demo $(ARGS)

# Penstock beside its peers on this machine, in bench/; other libraries are compared where they are installed in $(VENV).
bench: $(VENV)/.installed-parity
	$(BIN)/penstock bench $(ARGS)

parity: $(VENV)/.installed-parity
	$(BIN)/penstock parity $(ARGS)

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest -q -n 2 --dist loadgroup $(ARGS)

# Also what `make test` deselects: the rows that are marked exhaustive. XLA compiles as it does for users, and not fast.
test-all: $(VENV)/.installed-test
	XLA_FLAGS=--xla_force_host_platform_device_count=8 $(BIN)/python -m pytest -q -n 2 --dist loadgroup -m "" $(ARGS)

# The specification and both frontends with the oldest supported versions, and with the newest that $(PYTHON) can have. What the
# audits find (registers, bytes in flight, the order of instructions) is that of the Triton in constraints.txt.
FRONTENDS := tests/core tests/torch_frontend tests/jax_frontend --ignore=tests/torch_frontend/integrations
test-oldest: $(OLDEST)/.installed-both
	$(OLDEST)/bin/python -m pytest -q -n 2 --dist loadgroup $(FRONTENDS) $(ARGS)

test-newest: $(NEWEST)/.installed-both
	$(NEWEST)/bin/python -m pytest -q -n 2 --dist loadgroup $(FRONTENDS) --ignore-glob='*/triton/test_*audit.py' $(ARGS)

lint: $(VENV)/.installed-lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pyright --pythonpath $(BIN)/python

# The site, in build/site. Material's advice about its successor is not about this site.
docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 JAX_PLATFORMS=cpu $(BIN)/mkdocs build --strict $(ARGS)

# sdist and wheel in dist/, each installed in an environment outside of this folder and used, once with each framework.
PYTHONS ?= $(BIN)/python
package: $(VENV)/.installed-package
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/python .ci/smoke.py $(PYTHONS)

# Whether TAG may be published: it is the version, and the changelog has it with a date.
tag:
	$(PYTHON) .ci/tag.py "$(TAG)"

clean:
	rm -rf $(VENV) $(OLDEST) $(NEWEST) build dist

# One stamp an extra: a target installs what it needs, once, and again when the requirements change.
$(VENV)/.installed-%: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt $(PIP_ARGS) -e '.[$*]'
	touch $@

FOR_FRONTENDS := -e '.[torch,jax]' pytest pytest-xdist hypothesis rich 'triton; sys_platform == "linux"'

$(OLDEST)/.installed-both: pyproject.toml constraints-oldest.txt
	test -x $(OLDEST)/bin/python || $(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python -m pip install -q -c constraints-oldest.txt $(PIP_ARGS) $(FOR_FRONTENDS)
	touch $@

$(NEWEST)/.installed-both: pyproject.toml
	test -x $(NEWEST)/bin/python || $(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install -q -U $(PIP_ARGS) $(FOR_FRONTENDS)
	touch $@
