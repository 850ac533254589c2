"""Propose layouts: which parallel sizes let this model train on so many GPUs, by the memory model of --dry-run.

    python -m tools.plan --gpus 64 --model CHECKPOINT_DIR [--gpu-gib 80] [--reserve-gib 8] [--gpus-per-node 8] [--top 8]
                         [--config FILE.toml] [--section.key value ...]

Only config.json of the checkpoint is read.  Sizes are computed, not measured (docs/scaling.md); speed is not modelled: layouts
are in the order of what keeps tensor, context and expert traffic inside a node, then less recompute, then fewer ranks per
sequence.  Try the first ones.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megatron_rl.config import ConfigError, load_config
from megatron_rl.models.families import make_spec
from megatron_rl.models.spec import load_hf_config
from megatron_rl.plan import grid
from megatron_rl.plan.memory import GIB
from megatron_rl.plan.report import gib
from megatron_rl.plan.search import Candidate, candidates


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--gpu-gib", type=float, default=80.0)
    parser.add_argument("--reserve-gib", type=float, default=8.0, help="for CUDA, nccl and fragments")
    parser.add_argument("--gpus-per-node", type=int, default=8)
    parser.add_argument("--top", type=int, default=8)
    parser.add_argument("--config", type=Path)
    args, overrides = parser.parse_known_args()
    try:
        sections = {"model": {"path": str(args.model)}, **({} if args.config else {"data": {"train": "unused.jsonl"}})}
        cfg = load_config(args.config, overrides, sections)
        spec = make_spec(load_hf_config(args.model))
    except (ConfigError, ValueError) as error:
        print(f"tools.plan: {error}", file=sys.stderr)
        return 2
    limit = (args.gpu_gib - args.reserve_gib) * GIB
    found = candidates(spec, cfg, args.gpus, limit, gpus_per_node=args.gpus_per_node)
    rows = cfg.run.max_tokens_per_micro_batch
    print(f"{spec.architecture} on {args.gpus} GPUs, {rows:,} rows a micro-batch: {len(found)} layouts fit in {gib(int(limit))}")
    if not found:
        print("none fits: more GPUs, fewer run.max_tokens_per_micro_batch, or model.fused_lm_head = true", file=sys.stderr)
        return 1
    Console(width=130, highlight=False).print(table(found[: args.top], args.gpus))
    return 0


def table(found: list[Candidate], gpus: int) -> Table:
    kinds = ("weights", "gradients", "optimizer", "activations", "working", "total")
    out = Table("tp", "cp", "pp", "ep", "etp", "dp", "recompute", *kinds, box=None)
    for each in found:
        p, used = each.parallel, each.memory
        sizes = (p.tp, p.cp, p.pp, p.ep, p.expert_tp, grid.dp_size(p, gpus))
        out.add_row(*map(str, sizes), each.recompute, *(gib(getattr(used, kind)) for kind in kinds))
    return out


if __name__ == "__main__":
    raise SystemExit(main())
