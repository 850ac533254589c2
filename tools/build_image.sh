#!/usr/bin/env bash
# The steps of the GPU image; the Dockerfile calls them one by one.  They also run outside an image build:
#   PYTHON=/path/to/python SGLANG=/tmp/sglang bash tools/build_image.sh all
# SERVER_NCCL: a package for the servers in place of their NCCL; CHECK_NCCL=0: no comparison.
# PYTHON is the training ranks' interpreter, SGLANG the folder of the servers' environment.  docs/install.md: what was run.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON="${PYTHON:-python}"
SGLANG="${SGLANG:-/opt/sglang}"
# PIP_CONSTRAINT is NGC's list for its own Python.  It must apply neither to the servers' environment nor to build isolation,
# and the training ranks have constraints of their own.
pip=(env -u PIP_CONSTRAINT "$PYTHON" -m pip install --disable-pip-version-check --no-cache-dir)

system() { # python3-venv: the image's Python cannot make environments without it
    "$PYTHON" -c 'import ensurepip, venv' 2>/dev/null && return
    apt-get update
    apt-get install -y --no-install-recommends python3-venv
    rm -rf /var/lib/apt/lists/*
}

servers() { # an environment of their own: SGLang pins its torch exactly
    "$PYTHON" -m venv "$SGLANG"
    env -u PIP_CONSTRAINT "$SGLANG/bin/python" -m pip install --disable-pip-version-check --no-cache-dir \
        -r requirements-sglang.txt
    [[ -z "${SERVER_NCCL:-}" ]] || # another NCCL than torch's own: see tools/nccl_versions.py
        env -u PIP_CONSTRAINT "$SGLANG/bin/python" -m pip install --no-cache-dir --no-deps "$SERVER_NCCL"
}

trainer() { # the image's core packages are frozen: a requirement that would replace one fails
    "$PYTHON" tools/image_packages.py >constraints.txt
    "${pip[@]}" -c constraints.txt -r requirements.txt
    "$PYTHON" tools/image_packages.py --same constraints.txt
}

project() {
    "${pip[@]}" --no-deps -e . -e ./tools -e ./viewer
}

check() { # a build has no GPU: the doctor warns and continues.  Run it again where the image runs.
    [[ "${CHECK_NCCL:-1}" == 0 ]] || "$PYTHON" tools/nccl_versions.py "$PYTHON" "$SGLANG/bin/python"
    "$PYTHON" -m megatron_rl.cli doctor --build
}

[[ "${1:-}" == all ]] && set -- system servers trainer project check
for step in "${@:?name a step: system servers trainer project check, or all}"; do
    case "$step" in
        system | servers | trainer | project | check) echo "build_image: $step" && "$step" ;;
        *) echo "build_image: unknown step $step; steps: system servers trainer project check" >&2 && exit 2 ;;
    esac
done
