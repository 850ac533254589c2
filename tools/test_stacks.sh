#!/usr/bin/env bash
# Unit tests, selected multi-rank tests, the demo and end-to-end tests with a real server on the supported Python and megatron-core that .venv does not have.
#   bash tools/test_stacks.sh [3.12 ...]     each in its own environment, .venv-3.12; skipped with a message without an interpreter
# JOBS: unit tests that run at a time (3).
# Results: docs/reference/versions.md.
set -euo pipefail
cd "$(dirname "$0")/.."

TESTS=(
    tests/dist/test_replay.py tests/dist/test_routers.py tests/dist/test_mismatch.py tests/dist/test_loss.py
    tests/dist/test_model.py tests/dist/test_engine.py tests/dist/test_hf_reference.py tests/dist/test_sharded_logprobs.py
    tests/dist/test_family_layouts.py tests/dist/test_weights.py tests/dist/test_checkpoint.py tests/dist/test_resume.py
    tests/dist/test_referee.py
    tests/e2e/test_rollout.py tests/e2e/test_push.py tests/e2e/test_train.py tests/e2e/test_demo.py
)

status=0
for version in "${@:-3.12}"; do
    if ! command -v "python$version" >/dev/null || ! "python$version" -c 'import venv, ensurepip' 2>/dev/null; then
        echo "SKIPPED: Python $version: no usable python$version on PATH; install it and add it to PATH" >&2
        continue
    fi
    VENV=".venv-$version" PYTHON="python$version" bash tools/install.sh
    python=".venv-$version/bin/python"
    "$python" -c 'import sys
from importlib.metadata import version
print("Python", sys.version.split()[0], "with megatron-core", version("megatron-core"), "and torch", version("torch"))'
    "$python" -m pytest -m "not slow" -n "${JOBS:-3}" tests/unit || status=1
    "$python" -m pytest -m "not slow" "${TESTS[@]}" || status=1
done
exit "$status"
