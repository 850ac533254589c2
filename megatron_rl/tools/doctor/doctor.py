"""Reports what is installed on this machine, what is missing, and how to fix it.

    megatron-rl doctor [--config FILE.toml] [--url http://HOST:PORT ...] [--quick | --build] [--json]
    torchrun --nnodes 2 --nproc_per_node 8 ... -m megatron_rl.cli doctor --ranks    missing ranks, speed of their links

One line per check: OK, WARN (works, with the limit named) or FAIL (does not work), with a remedy.  Exit status 1 if anything is
FAIL.  Without --quick it starts two ranks that connect and one worker that scores two answers, and writes a temporary file of up
to half a GiB where a run would write.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.text import Text

from megatron_rl.tools.doctor.check import STYLES, Check, line
from megatron_rl.tools.doctor.check_machine import check_gpus, check_machine
from megatron_rl.tools.doctor.check_model import check_config, check_reward, check_tokenizer
from megatron_rl.tools.doctor.check_packages import check_packages, check_server_flags, installed_versions
from megatron_rl.tools.doctor.check_ranks import check_local_ranks, check_ranks
from megatron_rl.tools.doctor.check_servers import check_url
from megatron_rl.tools.doctor.check_storage import check_disk, checkpoint_bytes

Sections = Iterator[tuple[str, list[Check]]]


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    is_other_rank = arguments.ranks and os.environ.get("RANK", "0") != "0"  # rank 0 reports, others only their failures
    console = Console(highlight=False, soft_wrap=True)
    counts, sections = dict.fromkeys(STYLES, 0), []
    for title, checks in examine_ranks(arguments.deadline) if arguments.ranks else examine(arguments):
        for check in checks:
            counts[check.status] += 1
        sections.append({"title": title, "checks": [asdict(check) for check in checks]})
        if not arguments.json and (checks or not is_other_rank):
            console.print(Text(f"\n{title}", style="bold"))
            for check in checks:
                console.print(line(check))
    if arguments.json:
        print(json.dumps({"sections": sections, "counts": counts}, indent=1))
    elif not is_other_rank:
        console.print(f"\n{counts['OK']} OK, {counts['WARN']} WARN, {counts['FAIL']} FAIL")
    return 1 if counts["FAIL"] else 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--config", type=Path, help="also check that this configuration can run here")
    parser.add_argument("--url", action="append", default=[], help="also ask this SGLang server; may be repeated")
    parser.add_argument("--api-key-env", help="environment variable with the servers' API key")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    parser.add_argument(
        "--deadline", type=float, default=60.0, help="seconds to wait for all ranks; default: %(default)g"
    )
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--quick", action="store_true", help="start nothing and write nothing")
    kind.add_argument("--build", action="store_true", help="an image is being built: a missing GPU is not a failure")
    kind.add_argument("--ranks", action="store_true", help="only connect ranks: those of torchrun, else two here")
    return parser.parse_args(argv)


def examine_ranks(deadline: float) -> Sections:
    """Ranks that torchrun started, or two of our own."""
    if "RANK" in os.environ:
        yield f"Ranks (WORLD_SIZE = {os.environ['WORLD_SIZE']})", check_ranks(deadline)
    else:
        yield "Ranks (two, on this machine)", check_local_ranks(deadline)


def examine(arguments: argparse.Namespace) -> Sections:
    """Yield (section title, checks), cheap ones first."""
    yield "Machine", check_machine()
    cfg, spec, checks = check_config(arguments.config) if arguments.config else (None, None, [])
    gpus = check_gpus(required=cfg is not None and cfg.run.device == "cuda", building=arguments.build)
    yield "GPUs", gpus
    yield "Packages", check_packages(installed_versions(), has_gpu=len(gpus) > 1 or arguments.build)
    yield "SGLang options", check_server_flags()
    if arguments.config is not None:
        yield f"Configuration {arguments.config}", checks
        if cfg is not None and spec is not None and not any(check.status == "FAIL" for check in checks):
            yield "Tokenizer", check_tokenizer(cfg)
    needed, why = checkpoint_bytes(cfg, spec) if cfg and spec else (0, "")
    yield "Disk", check_disk(cfg.run_dir if cfg else Path("runs"), needed, why, measure=not arguments.quick)
    if not arguments.quick:
        yield "Reward", [check_reward(cfg)]
        yield "Ranks (two, on this machine)", check_local_ranks(arguments.deadline)
    key_name = arguments.api_key_env or (cfg.rollout.api_key_env if cfg else None)
    for url in dict.fromkeys([*arguments.url, *(cfg.rollout.urls if cfg else ())]):
        yield f"Server {url}", check_url(url, key_name, needs_routes=cfg is None or cfg.needs_routes)


if __name__ == "__main__":
    sys.exit(main())
