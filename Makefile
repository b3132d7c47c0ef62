# make demo   two servers, a subscription, and what it does
# make demo-lake  a publisher, an object store, a Spark cluster, and a lake that is read as of a position
# make check  ruff, mypy and the tests that need no server: under a minute, before each commit
# make test   ruff, mypy and every test but the soak ones
# make soak   the soak tests: kills, faults and random workloads at length
# make docs   the documentation as a site, in build/docs; its reference is written from the code
# make matrix        publishers and targets of all supported versions in pairs, see docs/versions.md
# make conformance   PostgreSQL's own tests of subscriptions, see docs/conformance.md
# make lock   renew the locks (the only target that needs uv, from a throw-away venv)
#
# .venv is made by whichever needs it, and again when a lock, pyproject.toml, this file or what is compiled changed.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input

.PHONY: demo demo-lake lint check test tests soak docs matrix conformance venv lock clean

demo: $(STAMP)
	@$(BIN)/subscriber demo

demo-lake: $(STAMP)
	@$(BIN)/python -m subscriber.demo.lake

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The packages and files whose tests start no server, no Spark and no process.
PURE := tests/architecture tests/apply tests/protocol tests/catalog/test_statements.py tests/connection/test_conninfo.py \
	tests/docs/test_site.py tests/docs/test_walk.py

check: lint
	$(BIN)/pytest -q $(PURE)

# mypy uses one core for half a minute, and the tests wait for servers at that time.
test: $(STAMP)
	@$(MAKE) --no-print-directory -j 2 lint tests

tests: $(STAMP)
	$(BIN)/pytest -q -n 4 --dist loadgroup

soak: $(STAMP)
	$(BIN)/pytest -q -m soak --timeout=1800

docs: $(STAMP)
	@$(BIN)/python -m tools.docs

matrix: $(STAMP)
	$(BIN)/python -m tests.matrix --write

conformance: $(STAMP)
	$(BIN)/python -m tests.conformance --quiet

venv: $(STAMP)

$(STAMP): requirements.lock requirements-spark.lock pyproject.toml Makefile hatch_build.py $(wildcard subscriber/_speedups/*.[ch])
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "subscriber needs Python 3.11 or newer, not " + sys.version.split()[0])'
	@test -x $(BIN)/python || $(PYTHON) -m venv --clear $(VENV)
	@echo "Installing into $(VENV) …"
	@$(PIP) install -q --root-user-action=ignore --no-deps --require-hashes -r requirements.lock
	@$(PIP) install -q --root-user-action=ignore --no-deps --require-hashes -r requirements-spark.lock
	@$(PIP) install -q --root-user-action=ignore --no-build-isolation --no-deps -e .
	@$(BIN)/python -c 'from subscriber._speedups import why_not; why_not and print("Not compiled, so slower:", why_not)'
	@touch $@

UV := $(VENV)-lock/bin/uv
COMPILE = $(UV) pip compile --quiet --upgrade --universal --python-version 3.11 --generate-hashes --no-config \
	--default-index https://pypi.org/simple --no-emit-index-url --custom-compile-command 'make lock' pyproject.toml

lock:
	$(PYTHON) -m venv --clear $(VENV)-lock
	$(VENV)-lock/bin/python -m pip --disable-pip-version-check install -q uv
	$(COMPILE) --extra status --extra demo --extra fast --extra sql --extra docs --extra opentelemetry --extra dev -o requirements.lock
	$(COMPILE) --extra spark --extra lake --extra iceberg --extra object-storage -c requirements.lock -o requirements-spark.lock
	rm -rf $(VENV)-lock

clean:
	rm -rf $(VENV) $(VENV)-lock subscriber/_speedups/_native.*.so build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
