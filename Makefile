# make demo     the main job on this machine: tiny MoE, Megatron ranks, an SGLang server, routing replay, rising reward
# make test     all tests except the slow ones
# Both first install their requirements into .venv.  `make help` lists eight targets, `make help-all` all and their variables.

PYTHON ?=
INSTALLER ?=
PYTEST_ARGS ?=
VENV ?= .venv
JOBS ?= 3
INSTALLED := $(VENV)/.installed
RUN := $(VENV)/bin/python -m

# without bytecode in .venv every rank and server compiles what it imports again: 10 s of CPU each
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help help-all install browser demo demo-tools demo-agent demo-distil gpu-check paper-tiny paper-tiny-smoke paper-long paper-long-smoke figures check test test-slow test-layouts test-stacks test-te test-bridge test-trackers test-recipes test-clients faults explain-faults kills mutants linters lint format docs doctor viewer viewer-screenshots rehearse rehearse-whole clean FORCE

define HELP
make install    .venv with everything for the CPU   [PYTHON=python3.12] [VENV=.venv-3.12] [INSTALLER=pip]
make demo       the main job, end to end, on the CPU (8 minutes); continues where it was interrupted
                [TP=2] [PP=2] [EP=2] [SEED=0] [DTYPE=bfloat16|float32] [STEPS=60] [NAME=demo] [ARGS='--section.key value']
make doctor     checks this machine and its packages   [ARGS='--config F.toml --quick']
make gpu-check  what a first GPU must show, step by step; results in runs/gpu_check   [ARGS='--quick --device cpu']
make check      the linters, and the unit tests of what the branch changed (minutes)   [BASE=main] [JOBS=3]
make format     ruff's automatic fixes: format, order of imports
make test       every test except the slow ones; unit tests three at a time, others two   [PYTEST_ARGS=-x] [JOBS=3]
make docs       the documentation site, in build/site; fails on a broken link
endef

define HELP_ALL
make browser    Chromium, for tests and pictures of the viewer
make demo-tools the demo with a tool: the tiny model learns to call a calculator (40 steps; same variables)
make demo-agent an unmodified program of the openai package learns to use its tool on the tiny model that chats (15 steps)
make demo-distil a student learns two tasks from two teachers, without rewards (60 steps)
make paper-tiny the paper's experiments in miniature; hours, resumes where it stopped   [ARGS='--tables n8 --seeds 0']
make paper-tiny-smoke  five short cells of it, as a test (minutes)
make paper-long the same questions with answers of 60 to 160 tokens
make paper-long-smoke  four short cells of it
make figures    every table and picture of these experiments again, from the results in the repository, and what the
                documents quote from results/ (a minute)
make lint       what every change must pass beside make test: the linters, and the tests of texts, packaging and scripts
make linters    ruff (rules and format), mypy, import-linter, shellcheck, hadolint
make test-slow  the slow tests
make test-layouts  routing replay in every parallel layout, on up to 8 ranks (minutes; part of test-slow)
make test-stacks  unit, selected multi-rank and end-to-end tests on Python 3.12 and megatron-core 0.19.2   [STACKS=3.12] [JOBS=3]
make test-bridge  models that Megatron-Bridge builds, in an environment of their own (about 20 minutes)   [PYTEST_ARGS='-k logits']
make test-te    TransformerEngine's layers: load, export, save, convert, replay hook; without a GPU too   [VENV=ENVIRONMENT with TE]
make test-trackers  W&B, MLflow and trackio for real, offline, in an environment of their own (minutes)
make test-clients  the endpoint with litellm, langgraph, pydantic-ai, textarena, NeMo Gym and others, in environments of
                their own (minutes)
make test-recipes  the recipe reasoning-gym with its package, in an environment of its own (minutes; needs a C compiler)
make rehearse   the recipes on pretended GPUs, at full width with two layers (minutes)   [ARGS='-- --skew 2']
make rehearse-whole  the same with all layers (an hour)
make faults     faults of rollout servers and payloads (minutes)   [ARGS='--seeds 3']
make explain-faults  does explain-mismatch name every fault of a pair of engines, and accuse no healthy one? (minutes)   [ARGS=rope]
make kills      kills a run of two ranks 60 times and resumes it (about 10 minutes)   [ARGS='--mode teacher --kills 24']
                these three write results/NAME.json, unless they have ARGS
make mutants    changes the code in one place at a time and checks that a unit test fails (hours; continues where it
                stopped)   [ARGS='loss rollout/client --sample 200 --minutes 20 --jobs 2']
make viewer     the pages of `megatron-rl view`, from viewer/web into viewer/megatron_rl_viewer/static (Node 20)
make viewer-screenshots  their pictures in docs/assets (Chromium)   [NAME=demo]
make clean      remove .venv and caches (never runs/)
endef

help:
	$(info $(HELP))
	@echo "all others: make help-all"

help-all:
	$(info $(HELP))
	$(info $(HELP_ALL))
	@:

install: $(INSTALLED)

$(INSTALLED): requirements-cpu.txt requirements-sglang.txt pyproject.toml tools/pyproject.toml viewer/pyproject.toml tools/install.sh $(if $(PYTHON),FORCE)
	@PYTHON="$(PYTHON)" VENV="$(VENV)" INSTALLER="$(INSTALLER)" bash tools/install.sh
	@touch $@

browser:
	@bash tools/install_browser.sh

demo: install
	@TP="$(TP)" PP="$(PP)" EP="$(EP)" SEED="$(SEED)" DTYPE="$(DTYPE)" STEPS="$(STEPS)" NAME="$(NAME)" VENV="$(VENV)" \
		bash examples/tiny_cpu/run.sh $(ARGS)
	@$(VENV)/bin/python examples/tiny_cpu/times.py runs/$(or $(NAME),demo) $(VENV)

demo-tools: install
	@TP="$(TP)" PP="$(PP)" EP="$(EP)" SEED="$(SEED)" DTYPE="$(DTYPE)" STEPS="$(STEPS)" NAME="$(NAME)" VENV="$(VENV)" \
		bash examples/tools_cpu/run.sh $(ARGS)
	@$(VENV)/bin/python examples/tiny_cpu/times.py runs/$(or $(NAME),demo-tools) $(VENV)

demo-agent: install
	@TP="$(TP)" PP="$(PP)" EP="$(EP)" SEED="$(SEED)" DTYPE="$(DTYPE)" STEPS="$(STEPS)" NAME="$(NAME)" VENV="$(VENV)" \
		bash examples/agent_cpu/run.sh $(ARGS)
	@$(VENV)/bin/python examples/tiny_cpu/times.py runs/$(or $(NAME),demo-agent) $(VENV)

demo-distil: install
	@SEED="$(SEED)" STEPS="$(STEPS)" NAME="$(NAME)" VENV="$(VENV)" bash examples/distil_cpu/run.sh $(ARGS)
	@$(VENV)/bin/python examples/tiny_cpu/times.py runs/$(or $(NAME),demo-distil) $(VENV)

paper-tiny paper-long: install
	OMP_NUM_THREADS=1 $(RUN) examples.experiments.run $(subst -,_,$@) $(ARGS); status=$$?; \
		$(RUN) examples.experiments.analyse $(subst -,_,$@) && $(RUN) examples.experiments.lead_times $(subst -,_,$@) && exit $$status

figures: install
	for name in paper_tiny paper_long; do \
		$(RUN) examples.experiments.analyse $$name && $(RUN) examples.experiments.lead_times $$name || exit 1; done
	$(RUN) examples.dose_map.map
	$(RUN) benchmarks.exact_bias.figures
	$(RUN) benchmarks.results quote

paper-tiny-smoke: SMOKE = --tables on_policy n4 --lines minirl no_clip r2 r3 --run.num_steps 4
paper-long-smoke: SMOKE = --tables on_policy n8 --lines minirl r3 --run.num_steps 2
paper-tiny-smoke paper-long-smoke: install
	rm -rf runs/$(subst -,_,$@)
	OMP_NUM_THREADS=1 $(RUN) examples.experiments.run $(subst -,_,$(@:-smoke=)) $(SMOKE) --seeds 0 \
		--results runs/$(subst -,_,$@)/cells --run.dir runs/$(subst -,_,$@) $(ARGS)
	$(RUN) examples.experiments.analyse $(subst -,_,$(@:-smoke=)) --results runs/$(subst -,_,$@)

check: linters
	OMP_NUM_THREADS=1 $(RUN) tests.check $(BASE) -n $(JOBS)

test: install browser
	$(RUN) pytest -m "not slow" -n $(JOBS) tests/unit $(PYTEST_ARGS)
	$(RUN) pytest -m "not slow" -n 2 --dist loadfile --no-loadscope-reorder tests/e2e tests/dist tests/te $(PYTEST_ARGS)

test-slow: install browser
	$(RUN) pytest -m slow $(PYTEST_ARGS)

test-layouts: install
	$(RUN) pytest tests/dist/test_layout_matrix.py $(PYTEST_ARGS)

test-stacks:
	@JOBS="$(JOBS)" bash tools/test_stacks.sh $(STACKS)

test-bridge:
	@bash tools/test_bridge.sh $(PYTEST_ARGS)

test-trackers: install
	@VENV="$(VENV)" bash tools/test_packages.sh trackers tests/unit/metrics/test_tracker_packages.py $(PYTEST_ARGS)

test-clients: install
	@VENV="$(VENV)" bash tools/test_packages.sh clients tests/unit/rollout/test_client_packages.py $(PYTEST_ARGS)
	@OMP_NUM_THREADS=1 OWN_ENVIRONMENTS=.venv-own $(RUN) pytest tests/unit/rollout/test_own_environments.py $(PYTEST_ARGS)

test-recipes: install
	@VENV="$(VENV)" bash tools/test_packages.sh recipes tests/unit/recipes/test_reasoning_gym.py $(PYTEST_ARGS)

test-te:
	@if $(VENV)/bin/python -c 'import torch, transformer_engine.pytorch' 2>/dev/null; then \
		OMP_NUM_THREADS=1 $(RUN) pytest tests/te $(PYTEST_ARGS); \
	else \
		echo "SKIPPED: test-te: $(VENV) cannot import transformer_engine.pytorch; set VENV to an environment that has it"; \
	fi

# $(call measure,NAME,MODULE): without ARGS its output is kept in results/NAME.json, and quoted by the documents
measure = OMP_NUM_THREADS=1 $(RUN) $(if $(ARGS),$(2) $(ARGS),benchmarks.results save $(1) python -m $(2) && $(RUN) benchmarks.results quote)

faults: install
	$(call measure,faults,tests.faults.table)

explain-faults: install
	$(call measure,explain_faults,tests.mismatch.table)

kills: install
	$(call measure,kills,tests.kills)

mutants: install
	OMP_NUM_THREADS=1 $(RUN) tests.mutants $(ARGS)

linters: install
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports
	$(VENV)/bin/shellcheck .ci/run examples/*/*.sh examples/*/*.sbatch megatron_rl/recipes/*/*.sh tools/*.sh
	$(VENV)/bin/hadolint Dockerfile Dockerfile.sglang

lint: linters
	$(RUN) pytest tests/repo

format: install
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

docs: install
	NO_MKDOCS_2_WARNING=1 $(RUN) mkdocs build --strict

viewer:
	cd viewer/web && npm ci --ignore-scripts --no-audit --no-fund && npm run build

viewer-screenshots: install browser
	$(RUN) tests.viewer_pictures runs/$(or $(NAME),demo) docs/assets

gpu-check:  # without install: it also runs in an image, with the image's own Python
	$(if $(wildcard $(VENV)/bin/python),$(VENV)/bin/python,python) -m megatron_rl.cli gpu-check $(ARGS)

RECIPES := $(wildcard examples/qwen3_30b_a3b/*.toml megatron_rl/recipes/*/config.toml)
rehearse: install
	$(RUN) megatron_rl_tools.rehearse.batch --model qwen3-30b-a3b --gpus 8 $(RECIPES) $(ARGS)

rehearse-whole: install
	$(RUN) megatron_rl_tools.rehearse.batch --model qwen3-30b-a3b --gpus 8 $(RECIPES) -- --whole

doctor: install
	$(RUN) megatron_rl.cli doctor $(ARGS)

clean:
	rm -rf .venv .venv-3.* .venv-bridge .venv-trackers .venv-recipes .venv-clients .cache build viewer/web/node_modules *.egg-info */*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -not -path './runs/*' -prune -exec rm -rf {} +
