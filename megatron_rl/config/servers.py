"""Rules about the SGLang servers that a run starts or attaches to."""

from __future__ import annotations

from collections.abc import Sequence

OURS = {
    "--host": "set rollout.host",
    "--port": "set rollout.port",
    "--api-key": "set rollout.api_key_env: a command line can be read by every user of the machine",
    "--admin-api-key": "set rollout.api_key_env: a command line can be read by every user of the machine",
    "--config": "name every option in rollout.server_args",
    "--model-path": "set model.path",
    "--weight-version": "the run counts versions itself",
    "--log-level": "set rollout.api_key_env = null: above warning SGLang logs its API key",
}
"""SGLang options that rollout.server_args must not set, and what to do instead."""


def check_server_args(args: Sequence[str], *, has_key: bool) -> None:
    """Raise ValueError for an option that would undo a rule of ours (loopback, secret key).

    SGLang takes abbreviations (--ho) and --option=value, so those are refused too; --log-level only matters with a key.
    """
    for arg in args:
        name = arg.partition("=")[0].replace("_", "-")
        taken = [ours for ours in OURS if len(name) > 3 and ours.startswith(name)]
        for ours in taken:
            if ours != "--log-level" or has_key:
                raise ValueError(f"server_args has {name}, which this run sets itself as {ours}: remove it; {OURS[ours]}")


def check_own_servers(urls: Sequence[str], num_servers: int, gpus: Sequence[int]) -> None:
    """Raise ValueError for settings of servers that this run would start next to `urls`, or GPUs that cannot be dealt out."""
    if urls and (num_servers > 1 or gpus):
        raise ValueError(
            f"num_servers = {num_servers}, gpus = {list(gpus)} have no effect with urls = {list(urls)}: a run starts servers or "
            "attaches to running ones; remove urls, or the other two"
        )
    if len(gpus) % num_servers or len(set(gpus)) != len(gpus):
        raise ValueError(
            f"gpus = {list(gpus)} must be distinct and a multiple of num_servers = {num_servers}: every server gets equally many"
        )
