"""Steps that call the project's other commands: doctor, verify-replay."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from megatron_rl_tools.gpu_check.result import Figure, Findings, StepOutcome
from megatron_rl_tools.gpu_check.steps import StepPlace


def doctor(place: StepPlace) -> StepOutcome:
    found, findings = call("doctor", "--quick"), Findings()
    findings.figures = dict(found["counts"])
    for section in found["sections"]:
        for check in section["checks"]:
            if check["status"] != "OK":
                findings.figures[check["name"]] = f"{check['status']}: {check['found']}"
            findings.check(
                check["status"] != "FAIL", f"{check['name']}: {check['found']} -> {check['remedy']}"
            )
    return findings.outcome


def verify_replay(place: StepPlace) -> StepOutcome:
    findings = Findings()
    for mode in ("R3", "R2"):
        for recompute in ("none",) if place.quick else ("none", "full"):
            arguments = ("--device", place.device, "--mode", mode, "--recompute", recompute)
            found = call("verify-replay", *arguments)
            details: dict[str, Figure] = {
                check["name"]: check["detail"] for check in found["checks"]
            }
            findings.figures[f"{mode}, recompute {recompute}"] = {
                "seconds": found["seconds"],
                **details,
            }
            for check in found["checks"]:
                findings.check(
                    check["passed"],
                    f"{mode}, recompute {recompute}: {check['name']}: {check['detail']}",
                )
    return findings.outcome


def call(*arguments: str) -> dict[str, Any]:
    """The JSON object that a command prints with --json; its other output goes to this step's log.

    Raises RuntimeError where it prints none.
    """
    done = subprocess.run(
        [sys.executable, "-m", "megatron_rl.cli", *arguments, "--json"],
        stdout=subprocess.PIPE,
        text=True,
    )
    print(done.stdout)
    start = done.stdout.find("{")
    if start < 0:
        raise RuntimeError(
            f"megatron-rl {arguments[0]}: exit status {done.returncode} without a result"
        )
    return json.loads(done.stdout[start:])
