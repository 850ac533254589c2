#!/usr/bin/env bash
# The SGLang servers of one node, one per TP_SIZE GPUs.  Prints their addresses; runs until it is stopped or a server ends.
#
#   SGLANG_API_KEY=... [SERVER_GPUS=4,5,6,7] bash examples/launch/serve.sh MODEL_DIRECTORY [SGLang options ...]
#
# Paths are relative to where it is started.  Variables and exit statuses: docs/guides/launch.md.
set -euo pipefail
ROOT="$(cd "$(dirname "$0")/../.." && pwd)"

MODEL="${1:?usage: serve.sh MODEL_DIRECTORY [SGLang options ...]}"
shift
: "${DEVICE:=cuda}" "${MEM_FRACTION:=0.8}" "${SERVER_GPUS:=0,1,2,3,4,5,6,7}" "${TP_SIZE:=2}" "${DTYPE:=bfloat16}" "${PORT:=30000}"
: "${HOST:=$(hostname -I | awk '{print $1}')}" "${JOB_ID:=megatron_rl}" "${LOG_DIR:=runs/logs}"
if [[ "$HOST" != 127.0.0.1 ]]; then # other machines can reach the servers
    : "${SGLANG_API_KEY:?choose a key; the training ranks need the same one}"
fi
logs="$LOG_DIR/$JOB_ID/servers"
mkdir -p "$logs"

# --enable-return-routed-experts: otherwise SGLang silently omits expert ids, which R3 and replay.measure need
# --skip-tokenizer-init: requests have token ids.  --sleep-on-idle: otherwise an idle server keeps a core busy
options=(
    --model-path "$MODEL" --dtype "$DTYPE" --host "$HOST" --weight-version 0
    --enable-return-routed-experts --skip-tokenizer-init --skip-server-warmup --sleep-on-idle
)
if [[ "$DEVICE" == cpu ]]; then # one server
    gpus=(0) TP_SIZE=1
    export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
    command=("${SGLANG_PYTHON:-$ROOT/.venv/bin/python}" -m megatron_rl.rollout.server.sglang_cpu "${options[@]}")
    command+=(--device cpu --attention-backend torch_native)
    command+=(--max-total-tokens 16384 --max-running-requests 64) # otherwise the KV cache takes most of the memory
else
    IFS=, read -r -a gpus <<<"$SERVER_GPUS"
    command=("${SGLANG_PYTHON:-/opt/sglang/bin/python}" -m sglang.launch_server "${options[@]}" --tp-size "$TP_SIZE")
    # a weight sync allocates nccl's buffers and buckets beside weights and KV cache; SGLang's default may leave 1.5 GiB
    command+=(--mem-fraction-static "$MEM_FRACTION")
    # SGLang's own choice on Blackwell, flashinfer_trtllm, captures no expert ids
    command+=(--moe-runner-backend triton)
fi

# the key is in a file that only this user can read: every user of the node sees command lines,
# and at log level info SGLang prints its arguments, the key included
private="$(mktemp -d)"
quote="'" # YAML doubles a quote inside quotes
echo "log-level: warning" >"$private/server.yaml"
if [[ -n "${SGLANG_API_KEY:-}" ]]; then
    printf "api-key: '%s'\n" "${SGLANG_API_KEY//$quote/$quote$quote}" >>"$private/server.yaml"
fi

servers=()
# shellcheck disable=SC2329  # called by the trap
stop() { # each server's session, by its pid: TERM, then KILL
    trap - EXIT INT TERM
    for server in "${servers[@]}"; do kill -TERM -- "-$server" 2>/dev/null || true; done
    for ((tenths = 0; tenths < 50; tenths++)); do
        alive=0
        for server in "${servers[@]}"; do if kill -0 -- "-$server" 2>/dev/null; then alive=1; fi; done
        if ((alive == 0)); then break; fi
        sleep 0.1
    done
    for server in "${servers[@]}"; do kill -KILL -- "-$server" 2>/dev/null || true; done
    rm -rf "$private"
}
trap stop EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# as in ranks that broadcast weights: both sides of the communicator must have the same values (megatron_rl/launch/nccl.py)
export NCCL_CUMEM_ENABLE="${NCCL_CUMEM_ENABLE:-0}" NCCL_NVLS_ENABLE="${NCCL_NVLS_ENABLE:-0}"
export SGLANG_RETURN_ORIGINAL_LOGPROB=0 # log-probs of the distribution that was sampled, temperature included
for ((first = 0; first + TP_SIZE <= ${#gpus[@]}; first += TP_SIZE)); do
    port=$((PORT + first / TP_SIZE))
    devices="$(IFS=, && echo "${gpus[*]:first:TP_SIZE}")"
    CUDA_VISIBLE_DEVICES="$devices" setsid "${command[@]}" --port "$port" --config "$private/server.yaml" "$@" \
        >>"$logs/${HOST}_$port.log" 2>&1 &
    servers+=("$!")
    if [[ "$HOST" == *:* ]]; then echo "http://[$HOST]:$port"; else echo "http://$HOST:$port"; fi # IPv6
done
if ((${#servers[@]} == 0)); then
    echo "serve.sh: SERVER_GPUS = $SERVER_GPUS are fewer than TP_SIZE = $TP_SIZE" >&2
    exit 2
fi
status=0
wait -n || status=$? # one ended server stops all: training would only wait for it
echo "serve.sh: a server has ended (status $status, logs in $logs); stopping the others" >&2
exit $((status ? status : 1))
