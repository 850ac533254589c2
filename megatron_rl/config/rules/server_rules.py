"""Rules about the SGLang servers that a run starts or attaches to."""

from __future__ import annotations

import contextlib
import ipaddress
import shutil
from collections.abc import Sequence
from urllib.parse import urlsplit

from megatron_rl.config.all_sections import AllSections
from megatron_rl.config.rules.server_gpus import check_sizes_of_servers
from megatron_rl.config.sections import RolloutConfig
from megatron_rl.config.sglang_settings import (
    SET_BY_THE_RUN,
    broadcast_problem,
    problems,
    read_options,
)


def check_servers(rollout: RolloutConfig) -> None:
    """Raise ValueError for settings of servers that contradict each other or cannot work."""
    has_key = rollout.api_key_env is not None
    check_server_args(rollout.server_args, has_key=has_key)
    check_urls(rollout.urls, has_key=has_key)
    num_servers, gpus, port = rollout.num_servers, rollout.gpus, rollout.port
    if rollout.urls and (num_servers > 1 or gpus):
        raise ValueError(
            f"num_servers = {num_servers}, gpus = {list(gpus)} have no effect with urls = "
            f"{list(rollout.urls)}: a run starts servers or attaches to running ones; remove urls, "
            "or the other two"
        )
    if len(gpus) % num_servers or len(set(gpus)) != len(gpus):
        raise ValueError(
            f"gpus = {list(gpus)} must be distinct and a multiple of num_servers = {num_servers}: "
            "every server gets equally many"
        )
    check_sizes_of_servers(rollout)
    if not rollout.urls:
        check_host(rollout.host, has_key=has_key)
        # servers use consecutive ports
        if port and port + num_servers > 65536:
            raise ValueError(
                f"port = {port} with num_servers = {num_servers}: the last server's port would be "
                f"{port + num_servers - 1}, above 65535; set port to at most "
                f"{65536 - num_servers}, or 0 for free ones"
            )
    check_colocated(rollout)


def check_server_args(args: Sequence[str], *, has_key: bool) -> None:
    """Raise ValueError for an option that would break a rule of the run (loopback, secret key)."""
    for arg in args:
        name = arg.partition("=")[0].replace("_", "-")
        for option, fix in SET_BY_THE_RUN.items():
            # SGLang's parser takes abbreviations: --ho
            is_same = len(name) > 3 and option.startswith(name)
            # --log-level is refused only with an API key: SGLang logs the key at levels more
            # verbose than warning
            if is_same and (option != "--log-level" or has_key):
                raise ValueError(
                    f"server_args has {name}, which this run sets itself as {option}: remove it; "
                    f"{fix}"
                )


def check_options(rollout: RolloutConfig, *, needs_routes: bool) -> None:
    """Raise ValueError for server_args that may make expert ids, log-probs or weights wrong."""
    values = read_options(rollout.server_args)
    messages = list(problems(values, rollout.allow_unproven, needs_routes=needs_routes))
    if rollout.weight_sync != "disk" and (problem := broadcast_problem(values)):
        messages.append(problem)
    if messages:
        raise ValueError(f"rollout.server_args = {list(rollout.server_args)}: {messages[0]}")


def check_urls(urls: Sequence[str], *, has_key: bool) -> None:
    """Raise ValueError for a bad or repeated address, and for a password beside an API key."""
    for url in urls:
        if not is_url(url):
            raise ValueError(f"urls has {url!r}: must be http://HOST:PORT; {nearest_url(url)}")
        parts = urlsplit(url)
        if has_key and parts.username is not None:
            raise ValueError(
                f"urls has a user and password for {parts.hostname}, and api_key_env is set: a "
                "request has one Authorization header; remove the part before @, or set "
                "api_key_env = null"
            )
    # http://a:1 and http://a:1/ are one server, which would get twice its requests
    servers = [url.rstrip("/") for url in urls]
    if twice := sorted({url for url in urls if servers.count(url.rstrip("/")) > 1}):
        raise ValueError(
            f"urls names {', '.join(twice)} twice: one address for each server; remove one of them"
        )


def is_url(url: str) -> bool:
    """Return True for http://HOST:PORT, perhaps with a path; https and no port pass, too."""
    try:
        parts = urlsplit(url)
        # reading `port` raises for one that is no number up to 65535
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # also for brackets without an IPv6 address
        return False


def nearest_url(text: str) -> str:
    """Return what to write in place of `text`, which is no URL of a server."""
    address = text.rpartition("//")[2]
    host, _, port = address.rpartition(":")
    choices = [f"http://{address}"]
    with contextlib.suppress(ValueError):  # what is no IPv6 address needs no brackets
        choices.append(f"http://[{ipaddress.IPv6Address(host)}]:{port}")
    for url in filter(is_url, choices):
        return f"write {url}"
    return "write a host name or address, an IPv6 one in brackets, and a port from 1 to 65535"


def check_host(host: str, *, has_key: bool) -> None:
    """Raise ValueError where servers would listen beyond this machine without an API key.

    SGLang's admin endpoints load code and weights.
    """
    if has_key or host == "localhost":
        return
    with contextlib.suppress(ValueError):  # a host name is not an address
        if ipaddress.ip_address(host).is_loopback:
            return
    raise ValueError(
        f"rollout.host = {host!r} can be reached from other machines: set rollout.api_key_env to "
        "the name of an environment variable that holds an API key, or use 127.0.0.1"
    )


def check_python(rollout: RolloutConfig) -> None:
    """Raise ValueError for an interpreter of the servers that is not on this machine."""
    if rollout.python is not None and shutil.which(rollout.python) is None:
        raise ValueError(
            f"rollout.python = {rollout.python}: no such program on this machine; name the Python "
            "that has SGLang, such as /opt/sglang/bin/python"
        )


def check_colocated(rollout: RolloutConfig) -> None:
    """Raise ValueError for shared or released memory that cannot work with these servers."""
    host, is_colocated = rollout.host, rollout.weight_sync == "colocated"
    # only a colocated sync writes into memory that was released
    if rollout.release_memory and not is_colocated:
        raise ValueError(
            f"release_memory = true needs weight_sync = colocated, got {rollout.weight_sync}: "
            "servers on other GPUs than the trainer's have no use for it, and a broadcast cannot "
            "fill released memory; remove it, or set weight_sync = colocated"
        )
    # handles of GPU memory are valid on one machine only
    if is_colocated and (rollout.urls or not is_local(host)):
        place = f"urls = {list(rollout.urls)}" if rollout.urls else f"host = {host!r}"
        raise ValueError(
            f"weight_sync = colocated cannot be used with {place}: it sends references to this "
            "machine's memory, only to servers that this run starts itself on 127.0.0.1; remove "
            "that key, or set weight_sync = distributed or disk"
        )
    # with port 0 a replacement has another address than the dead server
    if rollout.release_memory and rollout.port:
        raise ValueError(
            f"release_memory = true needs port = 0, got {rollout.port}: a replaced server has "
            "released nothing, and must not be mistaken for the one that has"
        )
    # a replacement claims its memory when it starts
    if rollout.release_memory and rollout.max_server_restarts:
        raise ValueError(
            "release_memory = true needs max_server_restarts = 0, got "
            f"{rollout.max_server_restarts}: a replacement would start at any time, also while the "
            "trainer has the GPU's memory; set it to 0 (restart the run instead: MAX_RESTARTS of "
            "examples/launch/train.sh)"
        )


def is_local(host: str) -> bool:
    """Return True if servers on `host` can be reached from this machine only.

    The name is not looked up, as its address may change later.
    """
    return host in ("localhost", "::1") or host.startswith("127.")


def is_reachable(host: str) -> bool:
    """Return True if ranks on other machines reach servers on `host` under that name.

    A loopback address, and the unspecified one (0.0.0.0, ::), lead each machine to itself.
    """
    with contextlib.suppress(ValueError):  # a host name is not an address
        if ipaddress.ip_address(host).is_unspecified:
            return False
    return not is_local(host)


def check_can_release(cfg: AllSections, device: str) -> None:
    """Raise ValueError for a device on which SGLang cannot release memory."""
    sections = ["rollout"] if cfg.rollout.release_memory else []
    sections += [f"teachers.{name}" for name in cfg.teachers.time_shared]
    if sections and device == "cpu":
        raise ValueError(
            f"{sections[0]}.release_memory = true needs a GPU: SGLang's --enable-memory-saver"
            " remaps CUDA memory, on the CPU its servers answer and keep what they have; remove"
            " the key"
        )
