"""Steps that call the project's other commands: doctor, verify-replay."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from megatron_rl_tools.gpu_check.result import Figure, Findings, StepOutcome
from megatron_rl_tools.gpu_check.steps import StepPlace


def doctor(place: StepPlace) -> StepOutcome:
    report, findings = call("doctor", "--quick"), Findings()
    findings.figures = dict(report["counts"])
    for section in report["sections"]:
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
            report = call("verify-replay", *arguments)
            name, checks = f"{mode}, recompute {recompute}", report["checks"]
            details: dict[str, Figure] = {check["name"]: check["detail"] for check in checks}
            findings.figures[name] = {"seconds": report["seconds"], **details}
            for check in checks:
                text = f"{name}: {check['name']}: {check['detail']}"
                findings.check(check["passed"], text)
    return findings.outcome


def call(*arguments: str) -> dict[str, Any]:
    """Return the JSON object that a command prints with --json; its other output goes to this
    step's log.

    Raises RuntimeError if it prints none.
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
