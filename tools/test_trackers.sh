#!/usr/bin/env bash
# The tests of W&B, MLflow and trackio, with the packages of the extras wandb, mlflow and trackio, offline.
#   bash tools/test_trackers.sh [pytest arguments]     in .venv-trackers, which sees the packages of VENV (default: .venv)
set -euo pipefail
cd "$(dirname "$0")/.."

VENV="${VENV:-.venv}"
own=.venv-trackers
if [[ ! -x "$own/bin/python" ]]; then
    "$VENV/bin/python" -m venv "$own"
    folder() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
    folder "$VENV" >"$(folder "$own")/of_the_project.pth"
fi
"$own/bin/python" -m pip install --disable-pip-version-check --quiet --no-deps -r requirements-trackers.txt
OMP_NUM_THREADS=1 "$own/bin/python" -m pytest tests/unit/metrics/test_tracker_packages.py "$@"
