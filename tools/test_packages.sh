#!/usr/bin/env bash
# Tests of packages that .venv does not have: with requirements-NAME.txt, in .venv-NAME, which sees the packages of VENV
# (default: .venv).
#   bash tools/test_packages.sh NAME TESTS [pytest arguments]
set -euo pipefail
cd "$(dirname "$0")/.."

VENV="${VENV:-.venv}"
name="$1" tests="$2"
own=".venv-$name"
if [[ ! -x "$own/bin/python" ]]; then
    "$VENV/bin/python" -m venv "$own"
    folder() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
    folder "$VENV" >"$(folder "$own")/of_the_project.pth"
fi
"$own/bin/python" -m pip install --disable-pip-version-check --quiet --no-deps -r "requirements-$name.txt"
OMP_NUM_THREADS=1 "$own/bin/python" -m pytest "$tests" "${@:3}"
