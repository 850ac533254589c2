#!/usr/bin/env bash
# Two teachers and one student: makes three tiny models, and trains the student beside servers of the teachers.
# `make demo-distil` calls this after installing.
#
#   [SEED=0] [STEPS=60] [NAME=demo-distil] [VENV=.venv] bash examples/distil_cpu/run.sh [--section.key value ...]
set -euo pipefail
cd "$(dirname "$0")/../.."

SEED="${SEED:-0}" NAME="${NAME:-demo-distil}" VENV="${VENV:-.venv}"
MODELS=".cache/distil" # as in distil.toml
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

if [[ -e "runs/$NAME" ]]; then # a new run: a finished one would be resumed and end immediately
    previous="runs/$NAME.$(date +%Y%m%d-%H%M%S)"
    mv "runs/$NAME" "$previous"
    echo "runs/$NAME exists: moved to $previous"
fi

echo "demo: two teachers and their student in $MODELS (minutes the first time)"
started="$SECONDS"
make_model() { "$VENV/bin/python" -m megatron_rl_tools.make_tiny_moe "$MODELS/$1" --task "$1" --seed "$SEED" --target-accuracy "$2"; }
{ make_model sums 0.95 && make_model flips 0.95; } &
make_model both 0.3 # beside the teachers: each takes one core
wait $!
mkdir -p "runs/$NAME"
echo "$((SECONDS - started)) $(date +%s)" >"runs/$NAME/.model_seconds" # and when training starts, for times.py

overrides=(--run.name "$NAME" --run.seed "$SEED")
if [[ -n "${STEPS:-}" ]]; then overrides+=(--run.num_steps "$STEPS"); fi
exec "$VENV/bin/torchrun" --standalone --nproc_per_node 2 -m megatron_rl.train --config examples/distil_cpu/distil.toml \
    "${overrides[@]}" "$@"
