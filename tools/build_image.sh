#!/usr/bin/env bash
# The steps of the GPU images; their Dockerfiles call them one by one.  Those of Dockerfile also run outside an image build:
#   PYTHON=/path/to/python SGLANG=/tmp/sglang bash tools/build_image.sh all
# SERVER_NCCL: a package for the servers in place of their NCCL; CHECK_NCCL=0: no comparison; ABSENT: packages that
# the base image need not have.
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

shared() { # Dockerfile.sglang: one environment, and the servers' interpreter at the path that all scripts name
    local sglang wanted
    wanted="$(sed -n 's/^sglang==//p' requirements-sglang.txt)"
    sglang="$("$PYTHON" -c 'import importlib.metadata as m; print(m.version("sglang"))')"
    # an image built from a checkout may name a commit after the version
    [[ "$sglang" == "$wanted" || "$sglang" == "$wanted"[+.]* ]] || {
        echo "build_image: the base image has sglang $sglang, requirements-sglang.txt names $wanted: set SGLANG_TAG" >&2
        exit 1
    }
    mkdir -p "$SGLANG/bin" # not a link: a virtual environment's Python finds its packages only at its own path
    printf '#!/bin/sh\nexec %s "$@"\n' "$(command -v "$PYTHON")" >"$SGLANG/bin/python"
    chmod +x "$SGLANG/bin/python"
}

engine() { # Dockerfile.sglang: TransformerEngine, whose extension must see the image's torch
    "$PYTHON" tools/image_packages.py --absent transformer-engine apex >constraints.txt
    "${pip[@]}" pybind11 ninja
    "${pip[@]}" -c constraints.txt --no-build-isolation -r requirements-te.txt
}

trainer() { # the image's core packages are frozen: a requirement that would replace one fails
    local absent
    read -r -a absent <<<"${ABSENT:+--absent $ABSENT}"
    "$PYTHON" tools/image_packages.py "${absent[@]}" >constraints.txt
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
for step in "${@:?name a step: system servers shared engine trainer project check, or all}"; do
    case "$step" in
        system | servers | shared | engine | trainer | project | check) echo "build_image: $step" && "$step" ;;
        *) echo "build_image: unknown step $step; steps: system servers shared engine trainer project check" >&2 && exit 2 ;;
    esac
done
