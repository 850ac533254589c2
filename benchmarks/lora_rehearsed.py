"""Adapters against full training, rehearsed: Qwen3-30B-A3B on 8 H100s, `tp 2 cp 4 ep 8`, 4 layers.

    python -m benchmarks.lora_rehearsed

The largest memory of a rank, and the seconds of an update of 2 micro-batches as a rehearsal makes
them up of bytes and FLOPs.  Nothing is measured on a GPU.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from benchmarks.rehearsed_plans import run_rehearsal
from benchmarks.rehearsed_settings import GIB, LAYOUT, MODEL, peak, update

RANK = ["--lora.rank", "16", "--lora.targets"]
CASES = {
    "every weight": [],
    "attention": [*RANK, "attention"],
    "experts": [*RANK, "experts"],
    "experts, shared pairs": [*RANK, "experts", "--lora.shared_pairs", "true"],
    "all": [*RANK, "all"],
    "all, embedding, LM head": [*RANK, "all", "embedding", "lm_head"],
}


def main() -> int:
    print("| trained, rank 16 | GiB | gradients, ms | optimizer, ms |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for name, options in CASES.items():
            words = ["--gpus", "8", "--layers", "4", *LAYOUT, *options]
            found = run_rehearsal(Path(folder), ["--model", MODEL, *words])
            gradient, optimizer = (1000 * seconds for seconds in update(found))
            print(
                f"| {name} | {peak(found) / GIB:.2f} | {gradient:.1f} | {optimizer:.1f} |",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
