#!/usr/bin/env bash
# Trains the tiny model that chats to mend small repositories: cold start, rows, SFT, then RL; what is made already stays.
#
#   [VENV=.venv] bash examples/coding_agent/run.sh [--section.key value ...]
set -euo pipefail
cd "$(dirname "$0")/../.."
PATH="$(realpath -s "${VENV:-.venv}")/bin:$PATH"
export PATH OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

python -m megatron_rl_tools.make_tiny_moe .cache/tiny_moe-chat-0 --task chat
python -m examples.coding_agent.prepare .cache/coding_agent
if [[ ! -e runs/coding-sft/hf ]]; then python -m megatron_rl.cli sft --config examples/coding_agent/sft.toml; fi
exec torchrun --standalone --nproc_per_node 1 -m megatron_rl.train --config examples/coding_agent/agent.toml "$@"
