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
# the extras' own requirements: those of the project are there, and may not be replaced
"$own/bin/python" -c 'import tomllib
extras = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]
print(*(need for name in ("wandb", "mlflow", "trackio") for need in extras[name]), sep="\n")' >"$own/requirements.txt"
"$own/bin/python" -m pip install --disable-pip-version-check --quiet -r "$own/requirements.txt"
OMP_NUM_THREADS=1 "$own/bin/python" -m pytest tests/unit/metrics/test_tracker_packages.py "$@"
