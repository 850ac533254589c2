#!/usr/bin/env bash
# SGLang servers of one rollout node, one per TP_SIZE GPUs.  Prints their addresses and runs until stopped.   NOT RUN.
#
#   SGLANG_API_KEY=... bash examples/qwen3_30b_a3b/serve.sh checkpoints/qwen3_30b_a3b_cold_start
set -euo pipefail

MODEL="${1:?usage: serve.sh MODEL_DIRECTORY [SGLang options ...]}"
shift
: "${SGLANG_API_KEY:?choose a key; the training ranks need the same one}"
: "${SGLANG_PYTHON:=/opt/sglang/bin/python}" "${GPUS_PER_NODE:=8}" "${TP_SIZE:=2}" "${PORT:=30000}"
: "${HOST:=$(hostname -I | awk '{print $1}')}"

# the key goes through a file that only this user can read: a command line is visible to everybody on the node,
# and at log level info SGLang prints its arguments, key included
private="$(mktemp -d)"
printf 'api-key: "%s"\nlog-level: warning\n' "$SGLANG_API_KEY" >"$private/server.yaml"

servers=()
stop() {
    trap - EXIT INT TERM
    for server in "${servers[@]}"; do kill -TERM -- "-$server" 2>/dev/null || true; done
    rm -rf "$private"
}
trap stop EXIT
trap 'exit 130' INT TERM

for ((first = 0; first + TP_SIZE <= GPUS_PER_NODE; first += TP_SIZE)); do
    port=$((PORT + first / TP_SIZE))
    gpus="$(seq -s, "$first" $((first + TP_SIZE - 1)))"
    # --enable-return-routed-experts: without it expert ids are left out silently; R3 and replay.measure need them
    # --skip-tokenizer-init: the trainer speaks token ids
    CUDA_VISIBLE_DEVICES="$gpus" setsid "$SGLANG_PYTHON" -m sglang.launch_server \
        --model-path "$MODEL" --dtype bfloat16 --tp-size "$TP_SIZE" --host "$HOST" --port "$port" \
        --enable-return-routed-experts --skip-tokenizer-init --weight-version 0 \
        --config "$private/server.yaml" "$@" &
    servers+=("$!")
    echo "http://$HOST:$port"
done
wait -n || true # any server that ends ends all: training would only wait for it
echo "serve.sh: a server has stopped; stopping the others" >&2
exit 1
