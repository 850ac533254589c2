"""The plan's memory and seconds beside those of a rehearsal, over layouts of several models.

    python benchmarks/rehearsed_plans.py [--only TEXT] [--skew 1.0]

Every layout has two layers (more where pipeline stages need them) and is rehearsed on the ranks
that differ.  Nothing is measured on a GPU; both figures are computed, from different sides.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECIPE = ROOT / "examples/qwen3_30b_a3b/off_policy_n4_r3.toml"
DENSE = {
    "architectures": ["Qwen3ForCausalLM"], "hidden_size": 5120, "intermediate_size": 25_600,
    "num_attention_heads": 64, "num_hidden_layers": 64, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 40_960, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    "vocab_size": 151_936, "tie_word_embeddings": False, "attention_bias": False,
}  # fmt: skip
"""Sizes of Qwen3-32B."""
LAYOUTS = {
    "qwen3-30b-a3b": (
        (8, "tp 2 cp 4 ep 8"), (8, "tp 2 cp 4 ep 8; recompute none"),
        (8, "tp 2 cp 4 ep 8; recompute selective"), (8, "tp 2 cp 4 ep 8; fused_lm_head true"),
        (8, "tp 4 cp 2 ep 8"), (8, "tp 1 cp 8 ep 8"), (8, "tp 2 cp 4 ep 4 etp 2"),
        (8, "tp 2 cp 4 ep 8; mode R2"), (8, "tp 2 cp 4 ep 8; mode none"),
        (16, "tp 2 cp 4 pp 2 ep 8"), (16, "tp 2 cp 4 ep 16"), (64, "tp 2 cp 4 ep 8"),
        (64, "tp 2 cp 2 pp 2 ep 8; recompute none"), (32, "tp 4 cp 8 ep 8"),
    ),
    "qwen3-235b-a22b": (
        (64, "tp 4 cp 4 ep 8"), (64, "tp 4 cp 4 pp 4 ep 16"), (128, "tp 4 cp 2 pp 4 ep 8"),
        (128, "tp 4 cp 8 ep 32"), (64, "tp 4 cp 4 pp 2 ep 8; recompute none"),
        (128, "tp 2 cp 8 pp 2 ep 16; recompute selective"), (64, "tp 4 cp 4 ep 8; mode R2"),
        (64, "tp 4 cp 4 ep 4 etp 4"),
    ),
    "deepseek-v3": (
        (128, "tp 8 cp 1 ep 32"), (128, "tp 8 cp 1 pp 2 ep 32"), (256, "tp 8 cp 1 pp 4 ep 16"),
        (128, "tp 8 cp 1 ep 32; recompute none"), (128, "tp 8 cp 1 ep 32; recompute selective"),
        (128, "tp 4 cp 1 ep 64"), (128, "tp 8 cp 1 ep 32; mode none"),
        (128, "tp 8 cp 1 ep 32; fused_lm_head true"),
    ),
    "kimi-k2": (
        (128, "tp 8 cp 1 pp 4 ep 32"), (128, "tp 8 cp 1 ep 64"), (256, "tp 4 cp 1 pp 2 ep 64"),
        (128, "tp 8 cp 1 ep 64; recompute none"),
    ),
    "dense": (
        (8, "tp 8 cp 1 ep 1"), (16, "tp 4 cp 4 ep 1"), (32, "tp 4 cp 2 pp 4 ep 1"),
        (16, "tp 8 cp 2 ep 1; recompute none"), (16, "tp 4 cp 4 ep 1; recompute selective"),
        (16, "tp 2 cp 8 ep 1; fused_lm_head true"),
    ),
}  # fmt: skip
SECTIONS = {"recompute": "model", "fused_lm_head": "model", "mode": "replay"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="layouts with this text in their name")
    parser.add_argument("--skew", default="1.0")
    args = parser.parse_args()
    rows = []
    print("model, GPUs, layout: planned GiB, rehearsed GiB, difference; the same of an update's ms")
    with tempfile.TemporaryDirectory() as folder:
        for model, layouts in LAYOUTS.items():
            for gpus, layout in layouts:
                if args.only in f"{model} {gpus} {layout}":
                    row = rehearse(model, gpus, layout, args.skew, Path(folder))
                    rows.append(row)
                    print(*row.values(), sep="  ", flush=True)
    for kind in ("memory", "seconds"):
        values = [row[f"{kind}_percent"] for row in rows if f"{kind}_percent" in row]
        if values:
            print(f"{kind}: worst {max(values, key=abs):+.1f} % of {len(values)} layouts")
    return 0


def rehearse(
    model: str, gpus: int, layout: str, skew: str, folder: Path
) -> dict[str, str | int | float]:
    """Return the figures of one layout, or its error."""
    sizes, _, settings = layout.partition("; ")
    words = sizes.split()
    # a dense model has no experts to shard in another way than the rest
    etp = words[1] if model == "dense" else "1"
    options = ["--parallel.pp", "1", "--parallel.etp", etp]
    for name, value in zip(words[::2], words[1::2], strict=True):
        options += [f"--parallel.{name}", value]
    if settings:
        name, value = settings.split()
        options += [f"--{SECTIONS[name]}.{name}", value]
        if value == "none" and name == "mode":
            options += ["--replay.measure", "false"]
    where = model
    if model == "dense":
        where = str(folder / "dense")
        Path(where).mkdir(exist_ok=True)
        (Path(where) / "config.json").write_text(json.dumps(DENSE))
        options += ["--replay.mode", "none", "--replay.measure", "false"]
    row: dict[str, str | int | float] = {"model": model, "gpus": gpus, "layout": layout}
    try:
        found = run_rehearsal(
            folder, ["--model", where, "--gpus", str(gpus), "--skew", skew, *options]
        )
    except RuntimeError as error:
        return row | {"refused": str(error)}
    if not found["memory"] or not found["phases"]:
        return row | {"error": found["errors"][0][:300]}
    _, _, peak, planned, percent = max(found["memory"], key=lambda item: item[2])
    seconds = sum(found["phases"][f"{name}, second"] for name in ("gradient", "optimizer"))
    computed = found["planned_seconds"]["update"]
    return row | {
        "planned_gib": round(planned / 2**30, 2),
        "rehearsed_gib": round(peak / 2**30, 2),
        "memory_percent": round(percent, 1),
        "planned_ms": round(1000 * computed, 1),
        "rehearsed_ms": round(1000 * seconds, 1),
        "seconds_percent": round(100 * (computed - seconds) / seconds, 1),
        "errors": len(found["errors"]),
    }


def run_rehearsal(folder: Path, options: list[str]) -> dict[str, Any]:
    """Rehearse the recipe with these options; return rehearsal.json.

    Raises RuntimeError with the message of a refusal.
    """
    out = folder / "out"
    command = [sys.executable, "-m", "megatron_rl.cli", "rehearse", "--config", str(RECIPE)]
    done = subprocess.run(
        [*command, "--out", str(out), *options], capture_output=True, text=True, check=False
    )
    if done.returncode > 1:
        raise RuntimeError(done.stderr.strip()[-300:])
    found: dict[str, Any] = json.loads((out / "rehearsal.json").read_text())
    return found


if __name__ == "__main__":
    sys.exit(main())
