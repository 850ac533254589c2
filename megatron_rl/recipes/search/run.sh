#!/usr/bin/env bash
# Trains with config.toml of this folder; options are passed on:  bash run.sh [--dry-run] [--section.key value ...]
#
# On several nodes start it on each, with NODE_RANK=0, 1, ... and MASTER_ADDR=the first node's address.
set -euo pipefail
cd "$(dirname "$0")"
: "${GPUS:=8}" "${NNODES:=1}" "${NODE_RANK:=0}" "${MASTER_ADDR:=127.0.0.1}" "${MASTER_PORT:=29500}" # GPUS: of a node
: "${GPU:=}" # the kind that the dry run computes for; empty: h100, or cpu with run.device = cpu
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" # reward.py
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export CUDA_DEVICE_MAX_CONNECTIONS=1 # megatron-core overlaps tensor-parallel communication only with one queue

if [[ " $* " == *" --dry-run "* ]]; then # checks everything and prints memory and seconds; needs no GPU
    exec megatron-rl train --config config.toml --gpus "$((GPUS * NNODES))" ${GPU:+--gpu "$GPU"} "$@"
fi
exec megatron-rl launch --nnodes "$NNODES" --node-rank "$NODE_RANK" --nproc-per-node "$GPUS" \
    --rdzv-backend c10d --rdzv-endpoint "$MASTER_ADDR:$MASTER_PORT" --rdzv-conf "is_host=$((NODE_RANK == 0 ? 1 : 0))" \
    -m megatron_rl.train --config config.toml "$@"
