"""The servers that a plan proposes, as settings and as options of the command line."""

from __future__ import annotations

from megatron_rl.config import Config, RolloutConfig
from megatron_rl.config.rules.rollout_rules import check_rollout
from megatron_rl.models.spec import ModelSpec
from megatron_rl.plan.hardware import HARDWARE, Assumptions, Hardware
from megatron_rl.plan.server_time import DecodeModel, ServerPlan, propose_servers


def with_servers(
    spec: ModelSpec,
    cfg: Config,
    devices: int,
    hardware: Hardware,
    assumed: Assumptions,
    *,
    ranks: int | None,
    option: str,
) -> Config:
    """Return `cfg` with servers of the smallest size on `devices`, unless it names servers itself.

    They alternate with the trainer on its GPUs if these are in one node; else they are attached.
    ranks: GPUs that train and may serve in alternation; None: servers have GPUs of their own.
    option: the command's option that gives more devices, for messages.
    Raises ValueError if the devices are too few for one server.
    """
    rollout = cfg.rollout
    has_servers = rollout.urls or rollout.gpus or rollout.num_servers > 1
    if has_servers or rollout.weight_sync != "distributed":
        return cfg
    server_pool = propose_servers(spec, devices, hardware, assumed, option)
    servers = DecodeModel(spec, server_pool, hardware, assumed)
    num, size = server_pool.num, server_pool.devices
    chosen: dict[str, object]
    if is_shared(ranks, servers):
        cached = int(servers.cached_tokens()) // 1024 * 1024
        chosen = {
            "num_servers": num,
            "gpus": tuple(range(num * size)),
            "weight_sync": "colocated",
            "release_memory": True,
        }
        chosen |= {"max_server_restarts": 0, "max_total_tokens": max(cached, 1024)}
    else:
        chosen = {"urls": tuple(f"http://server{number}:30000" for number in range(num))}
    proposed = RolloutConfig.model_validate(rollout.model_dump() | chosen)
    check_rollout(proposed)
    return cfg.model_copy(update={"rollout": proposed})


def is_shared(ranks: int | None, servers: DecodeModel) -> bool:
    """Return whether rank 0 can start the servers on the trainer's GPUs: it starts them only on its
    host.
    """
    is_gpu = servers.hardware.name != HARDWARE["cpu"].name
    return is_gpu and ranks is not None and ranks <= servers.hardware.per_node


def server_options(cfg: Config, server_pool: ServerPlan, per_node: int) -> str:
    """Return the options of the command line for the plan's servers."""
    rollout = cfg.rollout
    if rollout.urls:
        is_one_node = server_pool.devices <= per_node
        how = "SGLang's --nnodes: more than a node has"
        if is_one_node:
            how = f"serve.sh with TP_SIZE={server_pool.devices}"
        return (
            f"--rollout.urls and the addresses of {len(rollout.urls)} servers of"
            f" {server_pool.devices} GPUs ({how})"
        )
    options = (
        f"--rollout.num_servers {rollout.num_servers} --rollout.weight_sync {rollout.weight_sync}"
    )
    options += f" --rollout.gpus {' '.join(map(str, rollout.gpus))}" if rollout.gpus else ""
    if rollout.release_memory:
        options += " --rollout.release_memory --rollout.max_server_restarts 0"
    return f"{options} --rollout.max_total_tokens {rollout.max_total_tokens}"
