#!/usr/bin/env bash
# The demo: make the tiny checkpoint, then train it with torchrun.  `make demo` calls this after installing.
#
#   [TP=2] [PP=2] [EP=2] [SEED=0] [DTYPE=bfloat16] [STEPS=60] [NAME=demo] [VENV=.venv] \
#       bash examples/tiny_cpu/run.sh [--section.key value ...]
#
# examples/tools_cpu/run.sh sets TASK and CONFIG for the demo with a tool.
set -euo pipefail
if [[ -n "${CONFIG:-}" ]]; then CONFIG="$(realpath "$CONFIG")"; fi # relative to where the script is started
cd "$(dirname "$0")/../.."

TP="${TP:-1}" PP="${PP:-1}" SEED="${SEED:-0}" NAME="${NAME:-demo}" VENV="${VENV:-.venv}"
# two ranks by default: with neither TP nor PP they split the experts
if [[ "$TP" == 1 && "$PP" == 1 ]]; then EP="${EP:-2}"; else EP="${EP:-1}"; fi
RANKS=$((PP * (TP > EP ? TP : EP)))
if ((RANKS < 2)); then RANKS=2; fi

TASK="${TASK:-sums}" CONFIG="${CONFIG:-examples/tiny_cpu/demo.toml}"
# beside the environment, so that checkouts which share one make the model once; its manifest names all that it depends on
CACHE=".cache"
if [[ "$VENV" == */* ]]; then CACHE="$(dirname "$VENV")/.cache"; fi
if [[ "$TASK" == sums ]]; then MODEL="$CACHE/tiny_moe-$SEED"; else MODEL="$CACHE/tiny_moe-$TASK-$SEED"; fi
overrides=(
    --run.name "$NAME" --run.seed "$SEED" --model.path "$MODEL" --data.train "$MODEL/train.jsonl"
    --eval.sets.heldout "$MODEL/heldout.jsonl"
    --parallel.tp "$TP" --parallel.pp "$PP" --parallel.ep "$EP"
)
if ((TP > 1 && EP > 1)); then overrides+=(--parallel.etp 1); fi # complete experts on each rank, not slices
if [[ -n "${DTYPE:-}" ]]; then overrides+=(--rollout.dtype "$DTYPE"); fi
if [[ -n "${STEPS:-}" ]]; then overrides+=(--run.num_steps "$STEPS"); fi

command=("$VENV/bin/torchrun" --standalone --nproc_per_node "$RANKS" -m megatron_rl.train --config "$CONFIG" "${overrides[@]}" "$@")
is_finished() { tail -n 1 "runs/$NAME/events.jsonl" 2>/dev/null | grep -q '"text": "finished"'; }
if [[ -e "runs/$NAME" ]]; then
    if ! is_finished && [[ "$(cat "runs/$NAME/.command" 2>/dev/null)" == "${command[*]}" ]]; then
        echo "demo: runs/$NAME was interrupted: it continues from its last checkpoint"
    else # a new run: a finished one would be resumed and end immediately
        previous="runs/$NAME.$(date +%Y%m%d-%H%M%S)"
        mv "runs/$NAME" "$previous"
        echo "runs/$NAME exists: moved to $previous"
    fi
fi

echo "demo: the tiny model, $MODEL (under a minute the first time)"
started="$SECONDS"
"$VENV/bin/python" -m megatron_rl_tools.make_tiny_moe "$MODEL" --task "$TASK" --seed "$SEED"
mkdir -p "runs/$NAME"
echo "${command[*]}" >"runs/$NAME/.command"
echo "$((SECONDS - started)) $(date +%s)" >"runs/$NAME/.model_seconds" # and when training starts, for times.py
echo "demo: $RANKS ranks and a server: half a minute until the first line"

# exec: Ctrl-C and SIGTERM reach torchrun itself, which stops the ranks; the server dies with rank 0.
# --standalone: torchrun picks a free port.  One thread per rank: two ranks and the server share the cores.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "${command[@]}"
