#!/usr/bin/env bash
# The tests of model.provider = bridge and of convert --backend bridge, in an environment with Megatron-Bridge (Python 3.12).
#   bash tools/test_bridge.sh [pytest arguments]     in .venv-bridge; skipped with a message without python3.12
# BRIDGE_PYTHON names an interpreter that has it already.
# Results: results/families.md.
set -euo pipefail
cd "$(dirname "$0")/.."

TESTS=(
    tests/unit/engine/test_provider.py tests/unit/engine/test_check_routers.py tests/unit/tools/test_bridge.py
    tests/dist/test_bridge_provider.py tests/e2e/test_bridge_served.py
)

python="${BRIDGE_PYTHON:-}"
if [[ -z "$python" ]]; then
    if ! command -v python3.12 >/dev/null || ! python3.12 -c 'import venv, ensurepip' 2>/dev/null; then
        echo "SKIPPED: Megatron-Bridge needs Python 3.12: no usable python3.12 on PATH; install it and add it to PATH" >&2
        exit 0
    fi
    VENV=.venv-bridge PYTHON=python3.12 bash tools/install.sh
    python=.venv-bridge/bin/python
    "$python" -m pip install --disable-pip-version-check --quiet --no-deps -r requirements-bridge.txt
fi
"$python" -c 'import sys
from importlib.metadata import version
print("Python", sys.version.split()[0], *(f"{name} {version(name)}" for name in ("megatron-bridge", "megatron-core", "torch")))'
OMP_NUM_THREADS=1 "$python" -m pytest "${TESTS[@]}" "$@"
