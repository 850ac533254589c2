#!/usr/bin/env bash
# The demo with a tool: the script of the demo with another model and another configuration.  `make demo-tools` calls this.
#
#   [the variables of examples/tiny_cpu/run.sh] bash examples/tools_cpu/run.sh [--section.key value ...]
set -euo pipefail
cd "$(dirname "$0")/../.."
TASK=tools CONFIG=examples/tools_cpu/tools.toml NAME="${NAME:-demo-tools}" exec bash examples/tiny_cpu/run.sh "$@"
