#!/usr/bin/env bash
# Training ranks of one node; start it on every training node.   NOT RUN.
#
#   ROLLOUT_URLS="http://10.0.0.5:30000 http://10.0.0.5:30001" SGLANG_API_KEY=... NNODES=4 NODE_RANK=0 \
#   MASTER_ADDR=10.0.0.1 bash examples/qwen3_30b_a3b/train.sh examples/qwen3_30b_a3b/off_policy_n4_r3.toml [--section.key value ...]
set -euo pipefail
cd "$(dirname "$0")/../.."

CONFIG="${1:?usage: train.sh CONFIG.toml [--section.key value ...]}"
shift
: "${ROLLOUT_URLS:?addresses of the SGLang servers, separated by spaces (serve.sh prints them)}"
: "${SGLANG_API_KEY:?the key that serve.sh was started with}"
: "${NNODES:=4}" "${NODE_RANK:=0}" "${MASTER_ADDR:=127.0.0.1}" "${MASTER_PORT:=29500}" "${GPUS_PER_NODE:=8}"
export SGLANG_API_KEY
export CUDA_DEVICE_MAX_CONNECTIONS=1 # megatron-core overlaps tensor-parallel communication only with one queue
read -r -a urls <<<"$ROLLOUT_URLS"

exec torchrun --nnodes "$NNODES" --node_rank "$NODE_RANK" --nproc_per_node "$GPUS_PER_NODE" \
    --master_addr "$MASTER_ADDR" --master_port "$MASTER_PORT" \
    -m megatron_rl.train --config "$CONFIG" --rollout.urls "${urls[@]}" "$@"
