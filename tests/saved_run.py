"""Training without a server: a tiny model with a tokenizer, prompts, and a run directory of saved
rollouts to train on.
"""

import json
from pathlib import Path

import numpy as np

from megatron_rl.config import dump_config, load_config
from megatron_rl.records import Prompt, RolloutGroup
from megatron_rl.rollout.saved.rollout_recorder import Recorder
from megatron_rl_tools.tiny_text import make_tokenizer
from tests.tiny import random_checkpoint
from tests.unit.batch.rollouts import make_rollout

LAYERS = 4
PROMPTS, GROUP = 4, 2


def make_material(
    folder: Path, *, steps: int, layers: int = LAYERS, experts: int = 8, top_k: int = 2
) -> Path:
    """`folder`/moe, `folder`/train.jsonl, and `folder`/live with rollouts of `steps` steps; returns
    `folder`.
    """
    tokenizer = make_tokenizer()
    random_checkpoint(
        folder / "moe", vocab_size=len(tokenizer), num_hidden_layers=layers,
        eos_token_id=tokenizer.eos_token_id,
        num_experts=experts, num_experts_per_tok=top_k,
    )  # fmt: skip
    tokenizer.save_pretrained(folder / "moe")
    rows = [{"prompt": f"{n}+1=", "label": str(n + 1)} for n in range(13)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    live = load_config(None, [], sections(folder, folder, steps=steps))
    recorder = Recorder(folder / "live", save_tensors=True)
    for step in range(steps):
        recorder.record(
            step + 1,
            make_step(step, len(tokenizer), layers=layers, num_experts=experts, top_k=top_k),
        )
    (folder / "live/config.toml").write_text(dump_config(live))
    return folder


def make_step(
    step: int, vocab_size: int, *, layers: int = LAYERS, **routes: int
) -> list[RolloutGroup]:
    rng = np.random.default_rng(step)
    groups = []
    for p in range(PROMPTS):
        length = int(rng.integers(2, 6))
        rollouts = tuple(
            make_rollout(
                f"p{p}/{k}",
                length,
                int(rng.integers(2, 9)),
                layers=layers,
                seed=100 * step + 10 * p + k,
                **routes,
            )
            for k in range(GROUP)
        )
        assert max(rollout.tokens.max() for rollout in rollouts) < vocab_size
        prompt = Prompt(f"p{p}", f"text {p}", tuple(rollouts[0].tokens[:length].tolist()), "1")
        groups.append(RolloutGroup(prompt, rollouts, rng.random(GROUP).astype(np.float32)))
    return groups


def sections(material: Path, work: Path, *, steps: int, **more) -> dict:
    """Configuration of a float32 CPU run named "run" in `work`; `more` adds keys and sections."""
    base = {
        "run": {
            "dir": str(work), "device": "cpu", "num_steps": steps, "prompts_per_step": PROMPTS,
            "group_size": GROUP,
            "max_tokens_per_micro_batch": 32, "collective_timeout_minutes": 2.0,
        },
        "model": {"path": str(material / "moe"), "dtype": "float32"},
        "data": {"train": str(material / "train.jsonl"), "chat_template": False},
        "rollout": {"dtype": "float32"},
        "optim": {"lr": 1e-3, "distributed": False, "schedule": "linear", "warmup_updates": 1},
    }  # fmt: skip
    return {name: base.get(name, {}) | more.get(name, {}) for name in base | more}
