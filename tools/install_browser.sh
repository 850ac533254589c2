#!/usr/bin/env bash
# The viewer's browser tests run in the system's Chromium: install it where that is possible.  Called by `make test`.
set -euo pipefail

if command -v chromium chromium-browser google-chrome >/dev/null; then
    exit 0
fi
if [[ "$(id -u)" == 0 ]] && command -v apt-get >/dev/null; then
    echo "make test: chromium, for the viewer's browser tests"
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium; } >/dev/null ||
        echo "make test: apt-get could not install chromium; the viewer's browser tests are skipped" >&2
else
    echo "make test: no chromium (apt-get install chromium): the viewer's browser tests are skipped" >&2
fi
