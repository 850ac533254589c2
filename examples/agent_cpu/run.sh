#!/usr/bin/env bash
# The demo with a program of the openai package: the script of the demo with another model and another configuration.
# `make demo-agent` calls this.
#
#   [the variables of examples/tiny_cpu/run.sh] bash examples/agent_cpu/run.sh [--section.key value ...]
set -euo pipefail
cd "$(dirname "$0")/../.."
PATH="$(realpath -s "${VENV:-.venv}")/bin:$PATH" # `python` of agent.command: the one that has the openai package
export PATH
TASK=chat CONFIG=examples/agent_cpu/agent.toml NAME="${NAME:-demo-agent}" exec bash examples/tiny_cpu/run.sh "$@"
