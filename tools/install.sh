#!/usr/bin/env bash
# Make .venv with everything for the CPU demo and the tests.  Called by `make install`.  PYTHON=... selects the interpreter,
# VENV=... the folder, so that several Pythons can have one each.
set -euo pipefail
cd "$(dirname "$0")/.."

VENV="${VENV:-.venv}"
SGLANG="$(grep '^sglang==' requirements-sglang.txt)"
TORCH="$(grep '^torch==' requirements-cpu.txt)"
CPU_WHEELS="https://download.pytorch.org/whl/cpu"

is_usable() { # an interpreter that runs, has the right version and can make virtual environments
    "$1" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' >/dev/null 2>&1
}

minor_of() {
    "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])'
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.11 python3.12}; do
        if is_usable "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    echo "make install: no usable Python among: ${PYTHON:-python3 python3.11 python3.12}" >&2
    echo "  needed: 3.11 or 3.12 with the venv module (Debian, Ubuntu: apt install python3-venv)" >&2
    echo "  or name one: make install PYTHON=/path/to/python3.11" >&2
    exit 1
}

index_is_configured() { # the user configured a package index: do not bypass it
    [[ -n "${PIP_INDEX_URL:-}${PIP_EXTRA_INDEX_URL:-}" ]] ||
        "$VENV/bin/pip" config list 2>/dev/null | grep -qE '(index-url|no-index)='
}

if [[ "$(uname -s)" != Linux ]]; then
    echo "make install: Linux only (SGLang's CPU server and triton have no other builds); use a container or WSL" >&2
    exit 1
fi
chosen=""
[[ -z "${PYTHON:-}" ]] || chosen="$(find_python)"
if [[ ! -x "$VENV/bin/python" ]] || ! is_usable "$VENV/bin/python"; then
    python="${chosen:-$(find_python)}"
    echo "make install: $VENV from $("$python" -V) ($(command -v "$python"))"
    "$python" -m venv --clear "$VENV"
elif [[ -n "$chosen" && "$(minor_of "$chosen")" != "$(minor_of "$VENV/bin/python")" ]]; then
    echo "make install: $VENV has Python $(minor_of "$VENV/bin/python"), but PYTHON=$PYTHON is $(minor_of "$chosen")" >&2
    echo "  make clean first, or keep both: make install VENV=.venv-$(minor_of "$chosen") PYTHON=$PYTHON" >&2
    exit 1
fi

pip=("$VENV/bin/python" -m pip install --disable-pip-version-check --quiet)
if ! "$VENV/bin/python" -c 'import torch' 2>/dev/null && ! index_is_configured; then
    # PyPI's Linux build of torch brings gigabytes of CUDA libraries that this environment never loads
    echo "make install: $TORCH, CPU build"
    "${pip[@]}" --index-url "$CPU_WHEELS" "$TORCH" ||
        echo "make install: no CPU build from $CPU_WHEELS; taking the default index's (larger) instead" >&2
fi
echo "make install: requirements-cpu.txt (about 1 GB to download the first time)"
"${pip[@]}" -r requirements-cpu.txt
echo "make install: $SGLANG (without its CUDA dependencies)"
"${pip[@]}" --no-deps "$SGLANG"
"${pip[@]}" --no-deps -e . -e ./tools -e ./viewer

# The viewer's browser tests run in the system's Chromium
if ! command -v chromium chromium-browser google-chrome >/dev/null; then
    if [[ "$(id -u)" == 0 ]] && command -v apt-get >/dev/null; then
        echo "make install: chromium, for the viewer's browser tests"
        { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium; } >/dev/null ||
            echo "make install: apt-get could not install chromium; the viewer's browser tests are skipped" >&2
    else
        echo "make install: no chromium (apt-get install chromium): the viewer's browser tests are skipped" >&2
    fi
fi
echo "make install: done"
