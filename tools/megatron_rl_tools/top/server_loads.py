"""Ask SGLang servers for their load.  The trainer is not involved."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx

TIMEOUT_SECONDS = 1.5


@dataclass(frozen=True)
class Load:
    """The load of a server, summed over its data-parallel ranks; None for unknown values."""

    url: str
    version: str = ""
    """Version of its weights."""
    tokens_per_second: float | None = None
    running: int | None = None
    waiting: int | None = None
    kv_used: float | None = None
    """Share of its KV cache, the largest of its ranks."""
    memory: float | None = None
    """GB of weights, KV cache and graphs."""
    problem: str = ""
    """Why nothing is known."""


def ask_servers(urls: Sequence[str], api_key_env: str | None) -> list[Load]:
    """Ask all servers at the same time for their load.

    api_key_env: the variable with the key.  The user names it, because the folder of another
    person's run may name any server and any variable.
    """
    if not urls:
        return []
    key = os.environ.get(api_key_env or "", "")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with ThreadPoolExecutor(min(16, len(urls))) as pool:
        return list(pool.map(partial(ask_load, headers=headers), urls))


def ask_load(url: str, headers: dict[str, str]) -> Load:
    """Ask a server at /v1/loads, which does not interrupt its scheduler."""
    try:
        with httpx.Client(
            base_url=url, headers=headers, timeout=TIMEOUT_SECONDS, trust_env=False
        ) as http:
            version = http.get("/model_info").raise_for_status().json()["weight_version"]
            loads = http.get("/v1/loads").raise_for_status().json()["loads"]
        return read_load(url, str(version), loads)
    except httpx.HTTPStatusError as error:
        return Load(url, problem=f"answers {error.response.status_code}")
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return Load(url, problem=f"does not answer from here ({type(error).__name__})")
    # whatever another program at this address may answer
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return Load(url, problem="answers no load")


def read_load(url: str, version: str, loads: Sequence[dict[str, Any]]) -> Load:
    return Load(
        url,
        version=version,
        tokens_per_second=total_load(loads, "gen_throughput"),
        running=round(total_load(loads, "num_running_reqs")),
        waiting=round(total_load(loads, "num_waiting_reqs")),
        kv_used=max((float(load.get("token_usage", 0.0)) for load in loads), default=0.0),
        memory=sum(
            float(load["memory"][part])
            for load in loads
            if load.get("memory")
            for part in ("weight_gb", "kv_cache_gb", "graph_gb")
        ),
    )


def total_load(loads: Sequence[dict[str, Any]], name: str) -> float:
    return sum(float(load.get(name, 0)) for load in loads)
