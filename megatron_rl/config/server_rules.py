"""Rules about the SGLang servers that a run starts or attaches to."""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import Sequence
from urllib.parse import urlsplit

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
                raise ValueError(
                    f"server_args has {name}, which this run sets itself as {ours}: remove it; {OURS[ours]}"
                )


def check_urls(urls: Sequence[str]) -> None:
    """Raise ValueError for an address that is not http://HOST:PORT, or that comes twice."""
    for url in urls:
        try:
            parts = urlsplit(url)
            is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
        except ValueError:  # a port that is no number
            is_address = False
        if not is_address:
            raise ValueError(f"urls has {url!r}: must be http://HOST:PORT; write http://{url.rpartition('//')[2]}")
    twice = sorted({url for url in urls if [each.rstrip("/") for each in urls].count(url.rstrip("/")) > 1})
    if twice:
        raise ValueError(f"urls names {', '.join(twice)} twice: one address for each server; remove one of them")


def check_host(host: str, *, has_key: bool) -> None:
    """Refuse to listen beyond this machine without an API key: SGLang's admin endpoints load code and weights."""
    if has_key or host == "localhost":
        return
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(host).is_loopback:
            return
    raise ValueError(
        f"rollout.host = {host!r} can be reached from other machines: set rollout.api_key_env to the name of an "
        "environment variable that holds an API key, or use 127.0.0.1"
    )


def check_ports(port: int, num_servers: int) -> None:
    """Raise ValueError where the last of consecutive ports does not exist."""
    if port and port + num_servers > 65536:
        raise ValueError(
            f"port = {port} with num_servers = {num_servers}: the last server's port would be {port + num_servers - 1}, above "
            f"65535; set port to at most {65536 - num_servers}, or 0 for free ones"
        )


def check_managed_servers(urls: Sequence[str], num_servers: int, gpus: Sequence[int]) -> None:
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


def check_colocated(weight_sync: str, release_memory: bool, urls: Sequence[str], host: str, port: int) -> None:
    """Raise ValueError for a push by reference to memory, or a release of memory, that cannot work with these servers."""
    if weight_sync != "colocated":
        if release_memory:
            raise ValueError(
                f"release_memory = true needs weight_sync = colocated, got {weight_sync}: servers on other GPUs than "
                "the trainer's have no use for it, and a broadcast cannot fill released memory; remove it, or set "
                "weight_sync = colocated"
            )
        return
    if urls or not (host == "localhost" or host.startswith("127.") or host == "::1"):
        place = f"urls = {list(urls)}" if urls else f"host = {host!r}"
        raise ValueError(
            f"weight_sync = colocated cannot be used with {place}: it sends references to this machine's memory, only to "
            "servers that this run starts itself on 127.0.0.1; remove that key, or set weight_sync = distributed or disk"
        )
    if release_memory and port:
        raise ValueError(
            f"release_memory = true needs port = 0, got {port}: a replaced server has released nothing, and must not be "
            "taken for the one that has"
        )


def check_can_release(release_memory: bool, device: str) -> None:
    """Raise ValueError where SGLang cannot give memory back: `device` is what the run runs on."""
    if release_memory and device == "cpu":
        raise ValueError(
            "rollout.release_memory = true needs a GPU: SGLang's --enable-memory-saver remaps CUDA memory, on the CPU its "
            "servers answer and keep what they have; remove the key"
        )
