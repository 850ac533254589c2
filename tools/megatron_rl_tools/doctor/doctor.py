"""The command `megatron-rl doctor`: run the checks and print one line for each.

options.py parses its arguments.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.text import Text

from megatron_rl_tools.doctor.check import STYLES, Check, check_line
from megatron_rl_tools.doctor.check_machine import check_machine, check_visible_gpus
from megatron_rl_tools.doctor.check_model import check_model_config, check_reward, check_tokenizer
from megatron_rl_tools.doctor.check_packages import (
    check_packages,
    check_server_flags,
    installed_versions,
)
from megatron_rl_tools.doctor.check_ranks import check_local_ranks, check_ranks
from megatron_rl_tools.doctor.check_servers import check_url
from megatron_rl_tools.doctor.check_storage import check_disk, kept_bytes
from megatron_rl_tools.doctor.options import parse
from megatron_rl_tools.json_output import json_text

Sections = Iterator[tuple[str, list[Check]]]


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    # rank 0 reports, others only their failures
    is_other_rank = arguments.ranks and os.environ.get("RANK", "0") != "0"
    console = Console(highlight=False, soft_wrap=True)
    counts, sections = dict.fromkeys(STYLES, 0), []
    parts = examine_ranks(arguments.deadline) if arguments.ranks else examine_machine(arguments)
    for title, checks in parts:
        for check in checks:
            counts[check.status] += 1
        sections.append({"title": title, "checks": [asdict(check) for check in checks]})
        if not arguments.json and (checks or not is_other_rank):
            console.print(Text(f"\n{title}", style="bold"))
            for check in checks:
                console.print(check_line(check))
    if arguments.json:
        print(json_text({"sections": sections, "counts": counts}))
    elif not is_other_rank:
        console.print(f"\n{counts['OK']} OK, {counts['WARN']} WARN, {counts['FAIL']} FAIL")
    return 1 if counts["FAIL"] else 0


def examine_ranks(deadline: float) -> Sections:
    """Check ranks that torchrun started, or two that are started here."""
    if "RANK" in os.environ:
        yield f"Ranks (WORLD_SIZE = {os.environ['WORLD_SIZE']})", check_ranks(deadline)
    else:
        yield "Ranks (two, on this machine)", check_local_ranks(deadline)


def examine_machine(arguments: argparse.Namespace) -> Sections:
    """Yield (section title, checks), cheap ones first."""
    yield "Machine", check_machine()
    cfg, spec, checks = (
        check_model_config(arguments.config) if arguments.config else (None, None, [])
    )
    gpus = check_visible_gpus(
        required=cfg is not None and cfg.run.device == "cuda", building=arguments.build
    )
    yield "GPUs", gpus
    yield "Packages", check_packages(installed_versions(), has_gpu=len(gpus) > 1 or arguments.build)
    yield "SGLang options", check_server_flags()
    if arguments.config is not None:
        yield f"Configuration {arguments.config}", checks
        has_failed = any(check.status == "FAIL" for check in checks)
        if cfg is not None and spec is not None and not has_failed:
            yield "Tokenizer", check_tokenizer(cfg)
    needed, why = kept_bytes(cfg, spec) if cfg and spec else (0, "")
    folder = cfg.run_dir if cfg else Path("runs")
    yield "Disk", check_disk(folder, needed, why, measure=not arguments.quick)
    if not arguments.quick:
        if cfg is None or not cfg.is_sft:
            yield "Reward", [check_reward(cfg)]
        yield "Ranks (two, on this machine)", check_local_ranks(arguments.deadline)
    key_name = arguments.api_key_env or (cfg.rollout.api_key_env if cfg else None)
    needs_routes = cfg is None or cfg.needs_routes
    urls = cfg.rollout.urls if cfg and not cfg.is_sft else ()
    for url in dict.fromkeys([*arguments.url, *urls]):
        yield f"Server {url}", check_url(url, key_name, needs_routes=needs_routes)


if __name__ == "__main__":
    sys.exit(main())
