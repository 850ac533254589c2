#!/usr/bin/env bash
# The training ranks of one node.  Start it on every training node, with the same variables and a NODE_RANK each:
#
#   NNODES=4 NODE_RANK=0 MASTER_ADDR=10.0.0.1 ROLLOUT_URLS="http://10.0.0.5:30000 http://10.0.0.5:30001" \
#   bash examples/launch/train.sh CONFIG.toml [--resume] [--section.key value ...]
#
# Paths, those in CONFIG.toml too, are relative to where it is started.  Variables, exit statuses and restarts:
# docs/guides/launch.md.
set -euo pipefail
ROOT="$(cd "$(dirname "$0")/../.." && pwd)"

CONFIG="${1:?usage: train.sh CONFIG.toml [--resume] [--section.key value ...]}"
shift
: "${NNODES:=1}" "${NODE_RANK:=0}" "${RANKS_PER_NODE:=8}" "${MASTER_ADDR:=127.0.0.1}"
if ((NNODES == 1)); then : "${MASTER_PORT:=0}" "${LOCAL_ADDR:=127.0.0.1}"; else : "${MASTER_PORT:=29500}"; fi # 0: a free one
: "${JOB_ID:=megatron_rl}" "${MAX_RESTARTS:=0}" "${JOIN_SECONDS:=600}" "${LOG_DIR:=runs/logs}"
: "${ROLLOUT_URLS:=}" "${LOCAL_ADDR:=}" "${PYTHON:=}"
if [[ -z "$PYTHON" ]]; then # .venv if there is one, else the container's Python
    if [[ -x "$ROOT/.venv/bin/python" ]]; then PYTHON="$ROOT/.venv/bin/python"; else PYTHON=python; fi
fi
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}" # the package where it is not installed, and the rewards of examples/
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export CUDA_DEVICE_MAX_CONNECTIONS=1 # megatron-core overlaps tensor-parallel communication only with one queue
export TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE="[rank \${rank}]: "

is_host=$((NODE_RANK == 0 ? 1 : 0)) # node 0 hosts the rendezvous, whatever the nodes' names are
options=(
    --nnodes "$NNODES" --nproc-per-node "$RANKS_PER_NODE" --max-restarts "$MAX_RESTARTS"
    --rdzv-backend c10d --rdzv-id "$JOB_ID" --rdzv-endpoint "$MASTER_ADDR:$MASTER_PORT"
    --rdzv-conf "is_host=$is_host,join_timeout=$JOIN_SECONDS"
    --signals-to-handle "SIGTERM,SIGINT,SIGUSR1" # passed to the ranks, which save and exit with 85
    --log-dir "$LOG_DIR/$JOB_ID/node$NODE_RANK" --redirects 3 --tee 3
)
if [[ -n "$LOCAL_ADDR" ]]; then options+=(--local-addr "$LOCAL_ADDR"); fi
read -r -d "" -a urls <<<"$ROLLOUT_URLS" || true # on one line, or on several as serve.sh prints them
if ((${#urls[@]})); then set -- --rollout.urls "${urls[@]}" "$@"; fi

# torchrun itself waits a minute for node 0, then prints a stack instead of the reason
rendezvous="/dev/tcp/$MASTER_ADDR/$MASTER_PORT"
until ((NODE_RANK == 0)) || timeout 5 bash -c ": <$rendezvous" 2>/dev/null; do
    if ((SECONDS >= JOIN_SECONDS)); then
        echo "train.sh: node 0 does not answer at $MASTER_ADDR:$MASTER_PORT after $SECONDS s; is train.sh running there?" >&2
        exit 1
    fi
    sleep 1
done

# exec: signals reach the launcher itself, which stops its ranks by pid and exits with their status
exec "$PYTHON" -m megatron_rl.launch "${options[@]}" -m megatron_rl.train --config "$CONFIG" "$@"
