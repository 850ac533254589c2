"""SGLang servers that run already: their answer, version, model, expert ids, and their clock."""

from __future__ import annotations

import os
import time
from datetime import datetime
from email.utils import parsedate_to_datetime

import httpx

from megatron_rl.tools.doctor.check import Check
from megatron_rl.tools.doctor.check_packages import check_sglang

MOST_SKEW_SECONDS = 5.0  # a server's Date header has whole seconds


def check_url(url: str, api_key_env: str | None, *, wants_routes: bool) -> list[Check]:
    from megatron_rl.rollout.server.server_info import ServerError, server_info  # torch comes with it

    key = os.environ.get(api_key_env, "") if api_key_env else ""
    headers = {"Authorization": f"Bearer {key}"} if key else None
    try:
        info = server_info(url, headers)
    except ServerError as error:
        return [Check("FAIL", "answer", str(error), "is the address right, the server up and not paused, the key set?")]
    checks = [
        check_sglang(info.version, "version"),
        Check("OK", "model", f"{info.model_path} in {info.dtype}, weight version {info.weight_version}"),
        check_clock(url),
    ]
    if info.routed_experts:
        checks.append(Check("OK", "routed experts", f"{info.route_width} ids a token (layers x experts per token)"))
    else:
        remedy = "restart it with --enable-return-routed-experts: R3 and replay.measure need expert ids"
        checks.append(Check("FAIL" if wants_routes else "WARN", "routed experts", "not returned", remedy))
    return checks


def check_clock(url: str) -> Check:
    """The server's clock by the Date of an answer, against this machine's in the middle of the request."""
    before = time.time()
    try:
        date = httpx.get(f"{url.rstrip('/')}/health", timeout=10, trust_env=False).headers.get("date")
    except httpx.HTTPError as error:
        return Check("WARN", "clock", f"no answer: {error!r}", "is it busy or paused?")
    middle = (before + time.time()) / 2
    try:
        theirs: datetime = parsedate_to_datetime(date or "")
    except ValueError:
        return Check("WARN", "clock", f"the answer has no date, {date!r}", "look at the clock of that machine: date")
    skew = theirs.timestamp() + 0.5 - middle  # 0.5: the header is cut to seconds
    found = f"{abs(skew):.1f} s {'ahead of' if skew > 0 else 'behind'} this machine's, to about a second"
    if abs(skew) > MOST_SKEW_SECONDS:
        return Check(
            "WARN", "clock", found, "logs and ages of rollouts will not fit together: run NTP or chrony on both"
        )
    return Check("OK", "clock", found)
