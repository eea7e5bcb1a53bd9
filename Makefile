# The few commands people type. Each sets itself up in .venv; none needs nvcc or a GPU.
PYTHON ?= python3
VENV := .venv
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check --quiet
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
# One architecture where nvcc is present: enough to prove that the CUDA sources compile.
export TORCH_CUDA_ARCH_LIST ?= 9.0a

.PHONY: demo test lint format peft-data clean clean-build gtest

demo: $(VENV)/built
	python -m loramux demo

# From scratch: the package, then gtest over the C++ alone, then pytest over everything.
test: gtest clean-build $(VENV)/built
	cmake -S . -B build/tests -G Ninja -DPython_EXECUTABLE="$(CURDIR)/$(VENV)/bin/python" \
	  -DLORAMUX_TESTS=ON -DCMAKE_CUDA_ARCHITECTURES=90a-real
	cmake --build build/tests --target cpp_tests
	build/tests/cpp_tests --gtest_brief=1
	python -m pytest

lint: $(VENV)/tools
	ruff check .
	ruff format --check .
	mypy
	clang-format --dry-run --Werror $$(find csrc tests/cpp -type f)

format: $(VENV)/tools
	ruff check --fix .
	ruff format .
	clang-format -i $$(find csrc tests/cpp -type f)

# Rewrites tests/data/peft with the old PEFTs it is of, each in a venv (Python 3.10 to 3.12).
peft-data:
	for versions in "peft==0.10.0 transformers==4.40.2" "peft==0.15.2 transformers==4.51.3"; do \
	  $(PYTHON) -m venv --clear build/peft && \
	  build/peft/bin/python -m pip --disable-pip-version-check --quiet install \
	    $$(grep ^torch== requirements-dev.txt) $$versions && \
	  HF_HUB_OFFLINE=1 PYTHONHASHSEED=0 \
	    build/peft/bin/python tests/peft_cases.py tests/data/peft || exit 1; \
	done

clean-build:
	rm -rf build $(VENV)/built python/loramux/*.so

clean: clean-build
	rm -rf $(VENV)

# Debian's GoogleTest; elsewhere install the distribution's own package first.
gtest:
	@[ -e /usr/include/gtest/gtest.h ] || [ -e /usr/local/include/gtest/gtest.h ] || \
	  { root=$$([ "$$(id -u)" = 0 ] || echo sudo); \
	    $$root apt-get update -qq && $$root apt-get install -y -qq libgtest-dev; }

$(VENV)/tools: requirements-dev.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --upgrade pip
	$(PIP) install -r requirements-dev.txt
	@touch $@

$(VENV)/built: $(VENV)/tools CMakeLists.txt setup.py pyproject.toml $(shell find csrc -type f)
	$(PIP) install --no-build-isolation --no-deps --editable .
	@touch $@
