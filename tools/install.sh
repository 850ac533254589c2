#!/usr/bin/env bash
# Make .venv with everything for the CPU demo and the tests.  Called by `make install`.  PYTHON=... selects the interpreter,
# VENV=... the folder, so that several Pythons can have one each.  INSTALLER=uv or pip; by default uv, which pip installs into
# the environment first, and pip where there is no uv.  An interrupted installation continues when it is started again.
set -euo pipefail
cd "$(dirname "$0")/.."

VENV="${VENV:-.venv}"
SGLANG="$(grep '^sglang==' requirements-sglang.txt)"
TORCH="$(grep '^torch==' requirements-cpu.txt)"
UV="uv==0.13.9"
CPU_WHEELS="https://download.pytorch.org/whl/cpu"
INSTALLER="${INSTALLER:-}"
ticker=""
# Ctrl-C may have ended the ticker: a command that fails here would change the exit status
trap '[[ -z "$ticker" ]] || kill "$ticker" 2>/dev/null || true' EXIT
trap 'exit 130' INT # pip catches it and fails, which must not look like a package that cannot be installed
trap 'exit 143' TERM

part() { # part NAME COMMAND...: run the command, say every ten seconds that it runs, and how long it took
    local name="$1" started="$SECONDS" status=0
    shift
    echo "make install: $name"
    # its sleep must not hold the output open
    while sleep 10 >/dev/null 2>&1; do echo "make install: $name: $((SECONDS - started)) s"; done &
    ticker=$!
    "$@" || status=$?
    kill "$ticker" 2>/dev/null || true
    wait "$ticker" 2>/dev/null || true
    ticker=""
    if ((status)); then return "$status"; fi
    if ((SECONDS - started >= 5)); then echo "make install: $name: done in $((SECONDS - started)) s"; fi
}

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
    [[ -n "${PIP_INDEX_URL:-}${PIP_EXTRA_INDEX_URL:-}${UV_INDEX:-}${UV_DEFAULT_INDEX:-}${UV_INDEX_URL:-}" ]] ||
        "$VENV/bin/pip" config list 2>/dev/null | grep -qE '(index-url|no-index)='
}

choose_installer() { # set `install` to the command that installs packages, and say which it is
    local line options why="INSTALLER=pip"
    install=("$VENV/bin/python" -m pip install --disable-pip-version-check --quiet)
    case "$INSTALLER" in
    "" | uv) ;;
    pip) echo "make install: with pip ($why)" && return ;;
    *) echo "make install: INSTALLER=$INSTALLER: must be uv or pip" >&2 && exit 1 ;;
    esac
    if [[ ! -x "$VENV/bin/uv" ]] && ! part "$UV" "${install[@]}" "$UV"; then
        why="uv cannot be installed"
    elif ! options="$("$VENV/bin/python" tools/uv_options.py)"; then
        why="uv cannot follow this configuration of pip, see above"
    else
        install=("$VENV/bin/uv" pip install --quiet --python "$VENV/bin/python")
        while IFS= read -r line; do
            case "$line" in
            "") ;;
            --*) install+=("$line") ;;
            *) export "${line?}" ;;
            esac
        done <<<"$options"
        echo "make install: with $("$VENV/bin/uv" --version | cut -d' ' -f1,2); INSTALLER=pip takes pip"
        return
    fi
    if [[ "$INSTALLER" == uv ]]; then
        echo "make install: INSTALLER=uv: $why" >&2
        exit 1
    fi
    echo "make install: with pip, which takes minutes longer: $why"
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
    part "the environment" "$python" -m venv --clear "$VENV"
elif [[ -n "$chosen" && "$(minor_of "$chosen")" != "$(minor_of "$VENV/bin/python")" ]]; then
    echo "make install: $VENV has Python $(minor_of "$VENV/bin/python"), but PYTHON=$PYTHON is $(minor_of "$chosen")" >&2
    echo "  make clean first, or keep both: make install VENV=.venv-$(minor_of "$chosen") PYTHON=$PYTHON" >&2
    exit 1
fi

choose_installer
if ! "$VENV/bin/python" -c 'import torch' 2>/dev/null && ! index_is_configured; then
    # PyPI's Linux build of torch brings gigabytes of CUDA libraries that this environment never loads
    part "$TORCH, CPU build" "${install[@]}" --index-url "$CPU_WHEELS" "$TORCH" ||
        echo "make install: no CPU build from $CPU_WHEELS; taking the default index's (larger) instead" >&2
fi
part "packages (about 1 GB to download the first time)" "${install[@]}" -r requirements-cpu.txt
# of several indexes uv takes a version from the first, even a build of soundfile without its library
"$VENV/bin/python" -c 'import soundfile' 2>/dev/null ||
    part "soundfile, by pip" "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check \
        --force-reinstall --no-deps "$(grep '^soundfile==' requirements-cpu.txt)"
part "$SGLANG (without its CUDA dependencies)" "${install[@]}" --no-deps "$SGLANG"
part "this project" "${install[@]}" --no-deps -e . -e ./tools -e ./viewer
echo "$SECONDS" >"$VENV/.install_seconds"
echo "make install: done in $SECONDS s"
