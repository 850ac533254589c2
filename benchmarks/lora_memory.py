"""Computed memory of a GPU with adapters, by rank and targets, beside training every weight:

    python -m benchmarks.lora_memory

Qwen3-30B-A3B on 8 and Qwen3-235B-A22B on 16 GPUs, in one layout each, with sequences of at most
8,192 tokens and recompute = full; the fullest pipeline stage, in GiB.  Nothing is measured: these
are the planner's numbers.
"""

from __future__ import annotations

from megatron_rl.config import Config, load_config
from megatron_rl.models.known import find_spec
from megatron_rl.plan.hardware import GIB
from megatron_rl.plan.memory import rank_memory, trained_parameters

LAYOUTS = {
    "qwen3-30b-a3b": (8, {"tp": 2, "ep": 8, "etp": 1}),
    "qwen3-235b-a22b": (16, {"tp": 4, "ep": 8, "etp": 1, "pp": 2}),
}
TARGETS = (("attention",), ("experts",), ("all",))
RANKS = (1, 8, 16, 64, 128)
TOKENS = 8192


def settings(model: str, rank: int, targets: tuple[str, ...]) -> Config:
    sections = {
        "run": {"device": "cuda", "max_tokens_per_micro_batch": TOKENS},
        "model": {
            "path": model,
            "dtype": "bfloat16",
            "recompute": "full",
            "layer_spec": "transformer_engine",
        },
        "data": {"train": "unused", "max_prompt_tokens": 1024},
        "rollout": {"max_response_tokens": TOKENS - 1024},
        "optim": {"distributed": True},
        "parallel": LAYOUTS[model][1],
        "lora": {"rank": rank, "targets": targets},
    }
    return load_config(None, [], sections)


def main() -> None:
    for model, (gpus, parallel) in LAYOUTS.items():
        layout = ", ".join(f"{name} {size}" for name, size in parallel.items())
        print(f"{model} on {gpus} GPUs: {layout}\n")
        print("| targets | rank | trained on a GPU | weights | gradients, optimizer | all |")
        print("|---|---|---|---|---|---|")
        rows = [(0, ("every weight",)), *((r, t) for t in TARGETS for r in RANKS)]
        for rank, targets in rows:
            cfg, spec = settings(model, rank, targets if rank else ("all",)), find_spec(model)
            memory, stage = max(
                ((rank_memory(spec, cfg, gpus, pp), pp) for pp in range(cfg.parallel.pp)),
                key=lambda pair: pair[0].total,
            )
            trained = trained_parameters(spec, cfg, stage).total
            state = memory.gradients + memory.optimizer
            print(
                f"| {targets[0]} | {rank or ''} | {trained / 1e6:,.1f} M |"
                f" {memory.weights / GIB:.1f} | {state / GIB:.1f} | {memory.total / GIB:.1f} |"
            )
        print()


if __name__ == "__main__":
    main()
