# make demo, make test: both set up what they need in .venv and leave the machine alone.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.ready
JOBS   ?= 2
# What the module in C++ stands in for is tested without it as well.
IN_PYTHON := tests/follow tests/record tests/tensors/test_starting.py tests/tensors/test_summarizer.py \
	tests/overflow/test_short_way.py tests/overflow/test_later.py tests/overflow/test_masks.py tests/overflow/test_overflow.py

.PHONY: help setup demo test test-all test-versions test-npu test-ray test-s3 test-timm docs torch-names check wheel web screenshots clean

help:
	@echo "make demo      the whole story on built-in data"
	@echo "make test      the fast test set"
	@echo "make test-all  the full matrix"
	@echo "make test-versions VERSIONS='2.1.0 2.7.1'  the compatibility set with other versions of torch"
	@echo "make test-npu VERSION=2.7.1  the NPU story on the real torch_npu, without an NPU"
	@echo "make test-ray, make test-s3   compare --engine ray; captures at s3://, of a server of moto's"
	@echo "make check     ruff, mypy --strict, import directions"
	@echo "make test-timm  a model of timm recorded, in an environment of its own"
	@echo "make docs      build/site, the pages as a site; in an environment of its own"
	@echo "make web       src/tensorprobe/report/page, built from web/ (Node 20)"
	@echo "make screenshots  docs/pictures, made anew (Chromium)"
	@echo "make wheel     dist/tensorprobe-*.whl, with the C library in it"

setup: $(STAMP)

NATIVE := $(wildcard src/tensorprobe/native/*.h src/tensorprobe/native/*.cpp)

$(STAMP): pyproject.toml constraints.txt requirements-dev.txt src/tensorprobe/tensors/tally.c $(NATIVE)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[torch]" -r requirements-dev.txt
	-$(BIN)/python -m tensorprobe.native.build
	@touch $@

demo: setup
	$(BIN)/python -m tensorprobe demo

test: setup
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || \
		echo "no Chromium: the tests of the page in a browser are skipped (apt-get install chromium)"
	$(BIN)/python -m pytest -q -n $(JOBS) -m "not slow and not gpu"
	TENSORPROBE_NATIVE=0 $(BIN)/python -m pytest -q -n $(JOBS) -m "not slow and not gpu" $(IN_PYTHON)

test-all: setup
	$(BIN)/python -m pytest -q -n $(JOBS) -m "not gpu"
	TENSORPROBE_NATIVE=0 $(BIN)/python -m pytest -q -n $(JOBS) -m "not gpu" $(IN_PYTHON)

# An environment a version, outside of the tree; writes docs/versions.md. Without VERSIONS: all.
test-versions: setup
	$(BIN)/python tests/versions/run_versions.py $(VERSIONS)

# The real torch_npu on libraries that stand in for CANN, in an environment outside of the tree.
VERSION ?= 2.7.1
test-npu: setup
	$(BIN)/python tests/npu/run_npu.py --version $(VERSION)

# Each in an environment of its own, without torch. Not in test-all: Ray and moto are large.
EXTRA_TEST = -m pytest -q -p no:cacheprovider -c tests/extras/pytest.ini --rootdir tests/extras --timeout 500

test-ray:
	$(PYTHON) -m venv .venv-ray
	.venv-ray/bin/python -m pip install --quiet -e ".[ray]" pytest pytest-timeout
	.venv-ray/bin/python $(EXTRA_TEST) tests/extras/test_ray_engine.py

test-s3:
	$(PYTHON) -m venv .venv-s3
	.venv-s3/bin/python -m pip install --quiet -e ".[s3]" "moto[server]" pytest pytest-timeout
	.venv-s3/bin/python $(EXTRA_TEST) tests/extras/test_object_storage.py

# torchvision of PyPI is built for a torch with CUDA; without its C library timm works as well.
test-timm:
	$(PYTHON) -m venv .venv-timm
	.venv-timm/bin/python -m pip install --quiet -e ".[torch]" -c constraints.txt timm==1.0.31 \
		pytest pytest-timeout
	.venv-timm/bin/python $(EXTRA_TEST) tests/extras/test_timm.py

# Which versions of torch have the names that src touches, from the wheels on the index.
torch-names: setup
	$(BIN)/python tests/versions/torch_names.py

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_imports.py

wheel: setup
	rm -f dist/*.whl
	$(BIN)/python -m hatchling build -t wheel -d dist
	@case "$$(ls dist/*.whl)" in *-none-any.whl) \
		echo "the wheel has no C library: it takes a C compiler (CC, or cc)" >&2; exit 1;; esac

# Strict: a link that leads nowhere, or a page that is in no list, ends it.
docs: setup
	test -x .venv-docs/bin/mkdocs || $(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install --quiet -r web/site/requirements.txt
	$(BIN)/python web/site/pages.py build/docs
	.venv-docs/bin/mkdocs build --quiet --strict -f web/site/mkdocs.yml
	@echo "build/site/index.html"

web:
	cd web && npm ci && npm run build

screenshots: setup
	$(BIN)/python web/screenshots.py

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache
