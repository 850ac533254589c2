"""Checks of running SGLang servers: their answer, version, model, expert ids and clock."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from email.utils import parsedate_to_datetime

import httpx

from megatron_rl.config.sglang_settings import Values, reason, shown, unusual, verdict
from megatron_rl_tools.doctor.check import Check, fail_if, warn_if
from megatron_rl_tools.doctor.check_packages import check_sglang

MOST_SKEW_SECONDS = 5.0
"""The most by which clocks may differ; a server's Date header has whole seconds."""


def check_url(url: str, api_key_env: str | None, *, needs_routes: bool) -> list[Check]:
    from megatron_rl.rollout.server.server_info import ServerError, server_info  # imports torch

    key = os.environ.get(api_key_env, "") if api_key_env else ""
    headers = {"Authorization": f"Bearer {key}"} if key else None
    try:
        info = server_info(url, headers)
    except ServerError as error:
        remedy = "is the address right, the server up and not paused, the key set?"
        return [Check("FAIL", "answer", str(error), remedy)]
    remedy = "restart it with --enable-return-routed-experts: R3 and replay.measure need expert ids"
    result = "not returned"
    if info.routed_experts:
        result = f"{info.route_width} ids a token (layers x experts per token)"
    model = f"{info.model_path} in {info.dtype}, weight version {info.weight_version}"
    check_routes = fail_if if needs_routes else warn_if
    return [
        check_sglang(info.version, "version"),
        Check("OK", "model", model),
        check_clock(url),
        check_routes(not info.routed_experts, "routed experts", result, remedy),
        *check_server_settings(info.settings, needs_routes=needs_routes),
    ]


def check_server_settings(settings: Values, *, needs_routes: bool) -> Iterator[Check]:
    """Yield settings that a run refuses, always or unless rollout.allow_unproven names them."""
    for setting, value in unusual(settings, needs_routes=needs_routes):
        if setting.name != "version" and (kind := verdict(setting, value)) != "proven":
            result = f"{setting.name} = {shown(value)} is {kind}: {reason(setting, value)}"
            name = f'rollout.allow_unproven = ["{setting.name}"]'
            or_allow = f", or set {name}" if kind == "unproven" else ""
            remedy = f"start the server without it{or_allow}"
            yield Check("FAIL" if kind == "refused" else "WARN", "setting", result, remedy)


def check_clock(url: str) -> Check:
    """Compare the server's clock, by the Date of an answer, with this machine's in the middle of
    the request.
    """
    before = time.time()
    try:
        answer = httpx.get(f"{url.rstrip('/')}/health", timeout=10, trust_env=False)
    except httpx.HTTPError as error:
        return Check("WARN", "clock", f"no answer: {error!r}", "is it busy or paused?")
    middle, date = (before + time.time()) / 2, answer.headers.get("date")
    try:
        theirs = parsedate_to_datetime(date or "").timestamp()
    except ValueError:
        result = f"the answer has no date, {date!r}"
        return Check("WARN", "clock", result, "check the clock of that machine: date")
    skew = theirs + 0.5 - middle  # 0.5: the header is truncated to seconds
    side = "ahead of" if skew > 0 else "earlier than"
    result = f"{abs(skew):.1f} s {side} this machine's, to about a second"
    remedy = "logs and ages of rollouts will not match: run NTP or chrony on both"
    return warn_if(abs(skew) > MOST_SKEW_SECONDS, "clock", result, remedy)
