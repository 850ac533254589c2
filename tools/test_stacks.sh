#!/usr/bin/env bash
# What must hold on every supported pair of Python and megatron-core, run on those that .venv is not made of.
#   bash tools/test_stacks.sh [3.12 ...]     each in an environment of its own, .venv-3.12; skipped, aloud, without an interpreter
# docs/supported.md says when it last passed, and where.
set -euo pipefail
cd "$(dirname "$0")/.."

TESTS=(
    tests/unit
    tests/dist/test_replay.py tests/dist/test_routers.py tests/dist/test_mismatch.py tests/dist/test_loss.py
    tests/dist/test_model.py tests/dist/test_engine.py tests/dist/test_hf_reference.py tests/dist/test_sharded_logprobs.py
    tests/dist/test_family_layouts.py tests/dist/test_weights.py tests/dist/test_checkpoint.py tests/dist/test_resume.py
    tests/dist/test_referee.py
)

status=0
for version in "${@:-3.12}"; do
    if ! command -v "python$version" >/dev/null || ! "python$version" -c 'import venv, ensurepip' 2>/dev/null; then
        echo "SKIPPED: Python $version: no usable python$version on PATH; install it, or make one that PATH finds" >&2
        continue
    fi
    VENV=".venv-$version" PYTHON="python$version" bash tools/install.sh
    python=".venv-$version/bin/python"
    "$python" -c 'import sys
from importlib.metadata import version
print("Python", sys.version.split()[0], "with megatron-core", version("megatron-core"), "and torch", version("torch"))'
    "$python" -m pytest -m "not slow" "${TESTS[@]}" || status=1
done
exit "$status"
