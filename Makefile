# Every target sets up what it needs: a virtual environment in .venv with pinned versions.
# The machine needs python >= 3.11 with venv or pip, and make.

PYTHON ?= python3
PYTEST_WORKERS ?= 2
CPU_TRITON := 3.6.0
BIN := .venv/bin
PACKAGE := .venv/.package
STAMP := .venv/.installed
VLLM := tests/serve/vllm/requirements.txt

.PHONY: demo test lint bench report browser-test gpu-test serve-test clean

demo: $(PACKAGE)  ## quantize the embedded model and measure what it cost
	$(BIN)/quantmla quantize nano -o out/nano-c4r4 --overwrite
	$(BIN)/quantmla eval out/nano-c4r4 --baseline nano

test: lint  ## what CI runs
	$(BIN)/python -m pytest -n $(PYTEST_WORKERS) -m "not gpu and not browser"

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(STAMP)  ## the quality table of the embedded model, to benchmarks/results
	$(BIN)/python benchmarks/bench_quality.py --work out/bench

report: $(STAMP)  ## one run of quantize on nano, recorded, and docs/nano_report.html
	$(BIN)/quantmla quantize nano -o out/nano-c4r4 --overwrite
	$(BIN)/python benchmarks/record_run.py out/nano-c4r4
	$(BIN)/python docs/make_report.py

# pip brings no browser: on Debian `apt-get install chromium` does
browser-test: $(STAMP)  ## the report in a real browser
	@command -v chromium >/dev/null || command -v google-chrome >/dev/null \
		|| { echo "browser-test: no chromium on the PATH; apt-get install chromium" >&2; exit 1; }
	$(BIN)/python -m pytest -m browser tests/report/test_browser.py

# A GPU's torch is the machine's own: the pinned environment may hold a CPU build. Only files with
# GPU tests are collected, so that the machine need not have what the others import. Those of the
# vLLM plugin are serve-test's.
SEES_A_GPU = $(PYTHON) -c "import torch; raise SystemExit(not torch.cuda.is_available())" 2>/dev/null \
	|| { echo "$@: $(PYTHON) has no torch that sees a CUDA GPU; set PYTHON=..." >&2; exit 1; }

gpu-test:
	@$(SEES_A_GPU)
	$(PYTHON) -m pytest -m gpu $$(grep -rl "mark\.gpu" tests --include="test_*.py" \
		--exclude-dir=vllm)

serve-test:  ## vLLM's answers, from Python and over HTTP, on Hopper GPUs
	@$(SEES_A_GPU)
	@$(PYTHON) -c "import vllm" 2>/dev/null \
		|| { echo "serve-test: $(PYTHON) has no vllm; set PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m pytest -m gpu $$(grep -rl "mark\.gpu" tests/serve/vllm --include="test_*.py")

# venv without pip where Debian's python3-venv is not installed: then pip installs itself into it.
# torch comes first and alone, at its exact version, so that the extras cannot pull another build.
$(PACKAGE): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv || { $(PYTHON) -m venv --without-pip .venv \
		&& $(PYTHON) -m pip --python $(BIN)/python install pip; }
	$(BIN)/python -m pip install torch==$$(sed -n 's/^torch==//p' constraints.txt)
	$(BIN)/python -m pip install -c constraints.txt -e .
	touch $(PACKAGE)

# A CUDA build brings its own Triton; a CPU build brings none, and gets one whose interpreter runs
# the kernels' tests.
$(STAMP): $(PACKAGE) $(VLLM)
	$(BIN)/python -m pip install -c constraints.txt -e ".[dev]"
	$(BIN)/python -c "import importlib.util as u; raise SystemExit(u.find_spec('triton') is None)" \
		|| $(BIN)/python -m pip install triton==$(CPU_TRITON)
	$(BIN)/python -m pip install --no-deps -r $(VLLM)
	touch $(STAMP)

clean:
	rm -rf .venv build dist out .pytest_cache .mypy_cache .ruff_cache .hypothesis
