# What a person types. Every target that needs the environment makes it first; once it is there,
# comparing the age of four files is all that is left of it.

.DEFAULT_GOAL := help
.PHONY: help up demo check lint types units units-a-c units-d-z test long floors chaos contain objects stale fuzz load security bench compose-env containers lock release clean

BIN := .venv/bin
STAMP := .venv/.stamp
# The first of these that runs and is new enough makes .venv. A pyenv shim may exist and not run.
PYTHON ?= python3.13 python3.12 python3.11 python3

# Where it is set, every process that a test starts would compile the whole product for itself.
unexport PYTHONDONTWRITEBYTECODE

up demo bench: export MUSTER_DATA_DIR ?= $(CURDIR)/.muster
# A job's "python" is then the one that has muster.
up demo bench: export PATH := $(CURDIR)/$(BIN):$(PATH)

help: ## print this list
	@sed -n 's/^\([a-z]*\):.*## /make \1\t/p' $(MAKEFILE_LIST) | expand -t 14

up: $(STAMP) ## run the API and the coordinator here, until Ctrl-C (ARGS=-d: until muster down)
	$(BIN)/muster up $(ARGS)

demo: $(STAMP) ## train, kill a rank in the middle, compare the bits
	$(BIN)/muster demo $(ARGS)

# Under a minute, so that it is run before every commit: what needs a
# server, processes of its own or much time is left to `make test`.
# Types are looked at beside the tests, where one core would idle. Two
# processes of pytest need half the time of two workers of xdist, which
# both collect all tests and report each of them to a third process.
check: lint ## format, lint, layers, types, unit tests: stops at the first failure
	+$(MAKE) --no-print-directory --jobs 3 types units

lint: $(STAMP)
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/lint-imports

types: $(STAMP)
	$(BIN)/mypy

units: units-a-c units-d-z

units-a-c units-d-z: units-%: $(STAMP)
	$(BIN)/pytest -q -m 'not postgres and not slow and not long' $(wildcard tests/unit/[$*]*) $(if $(filter d-z,$*),tests/promises)

# Integration tests wait for half of their time, so two cores have room for three workers. They
# differ much in length, so an idle worker takes over half of what another still has to do; until
# then neighbours stay together and share their module's fixtures.
test: $(STAMP) ## the tests, the whole system included (ARGS='-k name' to choose)
	$(BIN)/pytest -n 3 --dist worksteal --durations 10 -m 'not long' $(ARGS)

long: $(STAMP) ## what make test leaves out: variants of its tests, and harnesses: 5 min
	$(BIN)/pytest -n 3 --dist worksteal -m long $(ARGS)

# On packages that people may have, not those of the lock.
FLOORS := -q -m 'not slow and not long' tests/unit tests/promises tests/integration \
	tests/acceptance/test_programs.py tests/acceptance/test_elastic.py
OLDEST ?= python3.11
NEWEST ?= python3.13
floors: $(STAMP) ## tests with the oldest packages, then with the newest: 15 min (OLDEST=… NEWEST=a Python)
	.ci/floors $(OLDEST) lowest-direct $(FLOORS)
	.ci/floors $(NEWEST) highest $(FLOORS)

# Each harness can be run alone, longer and with another seed; docs/reliability.md lists them all,
# also those without a target (detection, outage, log_gaps).
chaos: $(STAMP) ## faults in every process, then random kills of ranks: 10 to 30 min (ARGS='--faults 50')
	$(BIN)/python -m stress.chaos $(ARGS)
	$(BIN)/python -m stress.random_kills
	$(BIN)/python -m stress.elastic_schedules

contain: $(STAMP) ## 500 ranks that leave processes behind, and lookalikes: 5 to 10 min (ARGS='TRIALS SEED')
	$(BIN)/python -m stress.containment $(ARGS)

objects: $(STAMP) ## 10 000 operations on checkpoints in a failing S3 store: 15 to 30 min (ARGS='OPERATIONS SEED')
	$(BIN)/python -m stress.objects $(ARGS)

stale: $(STAMP) ## 200 ranks of frozen hosts resume after a takeover: 10 to 20 min (ARGS='WAKINGS SEED')
	$(BIN)/python -m stress.stale $(ARGS)

fuzz: $(STAMP) ## 20 000 requests made from the API's document: 10 to 15 min (ARGS='--cases N --seed S')
	$(BIN)/python -m stress.security.fuzz_api $(ARGS)

load: $(STAMP) ## many readers, submissions, jobs, keys: 5 to 10 min
	$(BIN)/python -m stress.load.streams
	$(BIN)/python -m stress.load.answers
	$(BIN)/python -m stress.lost_replies --keys 1000 --duplicates 8 --kills 25

security: $(STAMP) ## attacks on the API, path traversal, leaks of secrets: 5 min
	$(BIN)/python -m stress.security.overload
	$(BIN)/python -m stress.security.strangers
	$(BIN)/python -m stress.security.injection
	$(BIN)/python -m stress.security.canaries

bench: $(STAMP) ## run every benchmark and print its figures
	$(BIN)/python -m bench

compose-env: ## write .secrets with random passwords and keys, for docker compose and Kubernetes
	@if [ -e .secrets ]; then echo ".secrets exists; remove it to make new ones" >&2; exit 1; fi
	@umask 077; mkdir .secrets; cd .secrets; \
	for name in muster_token postgres_password s3_access_key s3_secret_key; do \
		od -An -N24 -tx1 /dev/urandom | tr -d ' \n' > $$name; done; \
	echo "postgresql+psycopg://muster:$$(cat postgres_password)@postgres/muster" > database_url; \
	chmod 444 *
	@# Each container sees its own files, as its own user; on this machine the directory is yours alone.
	@echo "wrote .secrets; now: docker compose up -d, or docs/kubernetes.md"

containers: $(STAMP) ## build the images, run docker-compose.yml, kill its services: 10 min (ARGS='--build 0')
	$(BIN)/python -m stress.containers $(ARGS)

lock: $(STAMP) ## write requirements.lock from pyproject.toml (ARGS=--upgrade for newer versions)
	$(BIN)/python bootstrap.py uv pip compile --quiet --universal --python-version 3.11 \
		--generate-hashes --no-emit-index-url --no-emit-find-links --no-header --extra dev --extra kubernetes \
		pyproject.toml -o requirements.lock $(ARGS)

release: $(STAMP) ## build dist: the wheel, and what it depends on as CycloneDX
	rm -rf dist
	$(BIN)/hatchling build -t wheel
	$(BIN)/python .ci/sbom.py > "$$(ls dist/*.whl | sed 's/-py3-none-any.whl$$/.cdx.json/')"

clean: ## remove .venv and all caches; .muster, where your jobs are, stays
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): bootstrap.py pyproject.toml requirements.lock $(BIN)/python
	@for python in $(PYTHON); do \
		if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; \
		then exec $$python bootstrap.py; fi; \
	done; \
	echo "Muster needs Python 3.11 or newer, and none of these is: $(PYTHON)." \
		"Install one, or name it with \`make PYTHON=...\`" >&2; exit 1

# Missing, or a link to a Python that is gone: then the stamp is worth nothing.
$(BIN)/python: ;
