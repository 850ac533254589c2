"""Running SGLang servers: their answer, version, model, expert ids and clock."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from email.utils import parsedate_to_datetime

import httpx

from megatron_rl.config.sglang_settings import Values, reason, shown, unusual, verdict
from megatron_rl_tools.doctor.check import Check, fail_if, warn_if
from megatron_rl_tools.doctor.check_packages import check_sglang

MOST_SKEW_SECONDS = 5.0  # a server's Date header has whole seconds


def check_url(url: str, api_key_env: str | None, *, needs_routes: bool) -> list[Check]:
    from megatron_rl.rollout.server.server_info import ServerError, server_info  # imports torch

    key = os.environ.get(api_key_env, "") if api_key_env else ""
    headers = {"Authorization": f"Bearer {key}"} if key else None
    try:
        info = server_info(url, headers)
    except ServerError as error:
        return [
            Check(
                "FAIL",
                "answer",
                str(error),
                "is the address right, the server up and not paused, the key set?",
            )
        ]
    remedy = "restart it with --enable-return-routed-experts: R3 and replay.measure need expert ids"
    found = (
        f"{info.route_width} ids a token (layers x experts per token)"
        if info.routed_experts
        else "not returned"
    )
    return [
        check_sglang(info.version, "version"),
        Check(
            "OK",
            "model",
            f"{info.model_path} in {info.dtype}, weight version {info.weight_version}",
        ),
        check_clock(url),
        (fail_if if needs_routes else warn_if)(
            not info.routed_experts, "routed experts", found, remedy
        ),
        *check_server_settings(info.settings, needs_routes=needs_routes),
    ]


def check_server_settings(settings: Values, *, needs_routes: bool) -> Iterator[Check]:
    """Settings that a run refuses, or refuses unless rollout.allow_unproven names them."""
    for setting, value in unusual(settings, needs_routes=needs_routes):
        if setting.name != "version" and (kind := verdict(setting, value)) != "proven":
            found = f"{setting.name} = {shown(value)} is {kind}: {reason(setting, value)}"
            name = f'rollout.allow_unproven = ["{setting.name}"]'
            remedy = "start the server without it" + (
                f", or set {name}" if kind == "unproven" else ""
            )
            yield Check("FAIL" if kind == "refused" else "WARN", "setting", found, remedy)


def check_clock(url: str) -> Check:
    """The server's clock by the Date of an answer, compared with this machine's in the middle of
    the request.
    """
    before = time.time()
    try:
        date = httpx.get(f"{url.rstrip('/')}/health", timeout=10, trust_env=False).headers.get(
            "date"
        )
    except httpx.HTTPError as error:
        return Check("WARN", "clock", f"no answer: {error!r}", "is it busy or paused?")
    middle = (before + time.time()) / 2
    try:
        theirs = parsedate_to_datetime(date or "").timestamp()
    except ValueError:
        return Check(
            "WARN",
            "clock",
            f"the answer has no date, {date!r}",
            "check the clock of that machine: date",
        )
    skew = theirs + 0.5 - middle  # 0.5: the header is truncated to seconds
    found = (
        f"{abs(skew):.1f} s {'ahead of' if skew > 0 else 'earlier than'} this machine's, to about a"
        " second"
    )
    remedy = "logs and ages of rollouts will not match: run NTP or chrony on both"
    return warn_if(abs(skew) > MOST_SKEW_SECONDS, "clock", found, remedy)
