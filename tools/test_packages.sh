#!/usr/bin/env bash
# Tests of packages that .venv does not have: with requirements-NAME.txt, in .venv-NAME, which sees the packages of VENV
# (default: .venv).
#   bash tools/test_packages.sh NAME TESTS [pytest arguments]
set -euo pipefail
cd "$(dirname "$0")/.."

VENV="${VENV:-.venv}"
name="$1" tests="$2"
environment=".venv-$name"
if [[ ! -x "$environment/bin/python" ]]; then
    "$VENV/bin/python" -m venv "$environment"
    folder() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
    folder "$VENV" >"$(folder "$environment")/of_the_project.pth"
fi
"$environment/bin/python" -m pip install --disable-pip-version-check --quiet --no-deps -r "requirements-$name.txt"
OMP_NUM_THREADS=1 "$environment/bin/python" -m pytest "$tests" "${@:3}"
