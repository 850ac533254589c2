#!/usr/bin/env bash
# Trains the tiny model that chats to mend small repositories: cold start, rows, SFT, then RL; what is made already stays.
#
#   [VENV=.venv] [MINI=.venv-mini] bash examples/coding_agent/run.sh [--section.key value ...]
#
# MINI: the environment of mini-swe-agent, which then takes the place of agent.py.
set -euo pipefail
cd "$(dirname "$0")/../.."
PATH="$(realpath -s "${VENV:-.venv}")/bin:$PATH"
export PATH OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
name=coding rows=.cache/coding_agent/sft.jsonl agent=()
if [[ -n "${MINI:-}" ]]; then
    name=coding-mini rows=.cache/coding_agent/sft_mini.jsonl
    agent=(--agent.function "" --agent.command "$MINI/bin/python" examples/coding_agent/mini_swe.py
        --agent.preload examples.coding_agent.mini_swe)
fi

python -m megatron_rl_tools.make_tiny_moe .cache/tiny_moe-chat-0 --task chat
python -m examples.coding_agent.prepare .cache/coding_agent
if [[ ! -e "runs/$name-sft/hf" ]]; then
    python -m megatron_rl.cli sft --config examples/coding_agent/sft.toml --run.name "$name-sft" --data.train "$rows"
fi
exec torchrun --standalone --nproc_per_node 1 -m megatron_rl.train --config examples/coding_agent/agent.toml \
    --run.name "$name" --model.path "runs/$name-sft/hf" "${agent[@]}" "$@"
