"""The share of the bfloat16 weights of servers that changes from one weight sync to the next, in a
real run.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node 2 benchmarks/delta_density.py record
    FOLDER \
        --config examples/tiny_cpu/demo.toml --run.name density --run.num_steps 15 [--optim.lr 1e-6]
    python benchmarks/delta_density.py report FOLDER

record trains, and compares on every source each bucket's bfloat16 image with that of the weight
sync before, bit by bit.  report prints for each weight sync: the share of weights that changed; the
share of tensors without a change; and the bytes of two exact deltas as shares of the full image:
one bit per weight and the changed values (mask), and the gaps between changed positions in 7 bits
per byte and the changed values (gaps).  expected: the mean of min(1, |change of the float32 weight|
/ spacing of bfloat16 there), which rounding to nearest gives for independent positions: other
learning rates and weights can be estimated with it.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

KINDS = {"experts": "expert", "mlp.gate": "router", "norm": "norm", "self_attn": "attention"}
MANTISSA = 8
"""Bits of bfloat16's mantissa, with the implied one."""


def kind_of(name: str) -> str:
    return next((kind for word, kind in KINDS.items() if word in name), "embedding and head")


def gap_bytes(positions: Tensor) -> int:
    """Return the bytes of the gaps between positions, with 7 bits in a byte."""
    gaps = positions.diff(prepend=positions.new_tensor([-1]))
    return int(sum((gaps >= 128**power).sum() for power in range(1, 5))) + len(gaps)


def compare(name: str, before: Tensor, after: Tensor) -> Counter[str]:
    """Count one tensor's changes from its float32 weights before and after, whose images are
    compared.
    """
    old, new = before.bfloat16(), after.bfloat16()
    positions = (old.view(torch.int16) != new.view(torch.int16)).nonzero().reshape(-1)
    _, exponent = torch.frexp(before)
    spacing = torch.ldexp(torch.ones_like(before), exponent - MANTISSA)
    changed, values = len(positions), len(after)
    return Counter(
        {
            "values": values,
            "changed": changed,
            "expected": float((after - before).abs().div(spacing).clamp(max=1).sum()),
            "tensors": 1,
            "unchanged_tensors": int(changed == 0),
            "mask_bytes": -(-values // 8) + 2 * changed,
            "gaps_bytes": gap_bytes(positions) + 2 * changed,
            f"values of {kind_of(name)}": values,
            f"changed of {kind_of(name)}": changed,
        }
    )


def record(folder: Path, argv: list[str]) -> int:
    """Train, and write a line for each weight sync.  Runs on every rank."""
    from megatron_rl.train import main as train
    from megatron_rl.weights.sync.push import WeightPusher

    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"rank_{os.environ.get('RANK', '0')}.jsonl"
    file.write_text("")
    previous: dict[str, Tensor] = {}
    counts: Counter[str] = Counter()
    make_bucket, push = WeightPusher._bucket, WeightPusher.push

    def compared(self: WeightPusher, number: int, batch: Any) -> Any:
        bucket = make_bucket(self, number, batch)
        for name, part in zip(bucket.names, bucket.parts, strict=True):
            weights = part.to("cpu", torch.float32).reshape(-1).clone()
            if name in previous:
                counts.update(compare(name, previous[name], weights))
            previous[name] = weights
        return bucket

    def pushed(self: WeightPusher, export: Any, version: int, **options: Any) -> Any:
        report = push(self, export, version, **options)
        with file.open("a") as out:
            out.write(json.dumps({"version": version, **counts}) + "\n")
        counts.clear()
        return report

    WeightPusher._bucket, WeightPusher.push = compared, pushed  # type: ignore[method-assign]
    return train(argv)


def report(folder: Path) -> int:
    versions: dict[int, Counter[str]] = {}
    for file in sorted(folder.glob("rank_*.jsonl")):
        for line in file.read_text().splitlines():
            row = json.loads(line)
            versions.setdefault(row.pop("version"), Counter()).update(row)
    total: Counter[str] = Counter()
    print(
        "version  changed  expected  tensors without a change  mask  gaps (of the full image's"
        " bytes)"
    )
    for version, counts in sorted(versions.items()):
        if not counts["values"]:
            continue  # the first one
        total.update(counts)
        print(f"{version:7}  {shares(counts)}")
    print(f"    all  {shares(total)}")
    for kind in sorted(
        key.removeprefix("values of ") for key in total if key.startswith("values of ")
    ):
        print(f"  {kind}: {total[f'changed of {kind}'] / total[f'values of {kind}']:.3%} changed")
    return 0


def shares(counts: Counter[str]) -> str:
    values, unchanged = counts["values"], counts["unchanged_tensors"] / counts["tensors"]
    mask, gaps = (counts[f"{way}_bytes"] / (2 * values) for way in ("mask", "gaps"))
    return (
        f"{counts['changed'] / values:7.3%}  {counts['expected'] / values:8.3%}  {unchanged:24.1%} "
        f" {mask:4.1%}  {gaps:4.1%}"
    )


def main() -> int:
    if len(sys.argv) < 3 or sys.argv[1] not in ("record", "report"):
        print(__doc__, file=sys.stderr)
        return 2
    folder = Path(sys.argv[2])
    return record(folder, sys.argv[3:]) if sys.argv[1] == "record" else report(folder)


if __name__ == "__main__":
    sys.exit(main())
