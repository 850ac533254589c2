"""A made-up run with all files that the viewer reads, consistent in itself: no model, no server,
milliseconds.

python -m tests.viewer_run DIR [STEPS]        a run to look at
"""

import json
import math
import sys
import time
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models

from megatron_rl.config import dump_config, load_config

LAYERS, EXPERTS, TOP_K = 4, 8, 2
PROMPTS, GROUP = 4, 4
FLIP_FRAC = 0.1
WORDS = (
    "sum",
    "of",
    "two",
    "numbers",
    "is",
    "the",
    "carry",
    "then",
    "add",
    "check",
    "so",
    "answer",
    "maybe",
    "wait",
)
VOCABULARY = "?0123456789+=<>"
FINISH = ("stop", "stop", "stop", "length")


def write_run(
    folder: Path, *, steps: int = 6, tokenizer: bool = True, replicas: int = 1, tensors: bool = True
) -> Path:
    """Write the run and return its folder; `tokenizer` also writes hf/ with one token per
    letter.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_config(folder, steps)
    if tokenizer:
        (folder / "hf").mkdir(exist_ok=True)
        vocabulary = {letter: token for token, letter in enumerate(VOCABULARY)}
        Tokenizer(models.WordLevel(vocabulary, unk_token="?")).save(
            str(folder / "hf/tokenizer.json")
        )
        (folder / "hf/config.json").write_text(
            json.dumps({"num_experts": EXPERTS, "num_experts_per_tok": TOP_K})
        )
    for step in range(1, steps + 1):
        add_step(folder, step, replicas=replicas, tensors=tensors)
    add_events(folder, {"step": steps, "kind": "stop", "text": "the last step is finished"})
    return folder


def write_config(folder: Path, steps: int) -> None:
    sections = {
        "run": {"dir": str(folder.parent), "name": folder.name, "num_steps": steps,
        "prompts_per_step": PROMPTS,
                "group_size": GROUP, "device": "cpu"},
        "model": {"path": str(folder / "hf")},
        "data": {"train": "train.jsonl"},
    }  # fmt: skip
    (folder / "config.toml").write_text(dump_config(load_config(None, [], sections)))


def add_step(folder: Path, step: int, *, replicas: int = 1, tensors: bool = True) -> None:
    """The files of one step, in the order in which a run writes them."""
    for replica in range(replicas):
        add_rollouts(folder, step, replica, replicas, tensors)
    add_metrics(folder, step)
    add_events(
        folder,
        {
            "step": step,
            "kind": "weight_sync",
            "text": f"weights of version {step}",
            "seconds": 0.25,
        },
    )


def add_rollouts(folder: Path, step: int, replica: int, replicas: int, tensors: bool) -> None:
    name = "rollouts" if replica == 0 else f"rollouts.dp{replica}"
    trained_name = name.replace("rollouts", "trained")
    of_server, of_trainer, lines, trained = {}, {}, [], []
    for prompt in range(replica, PROMPTS, replicas):
        for k in range(GROUP):
            line, server, line_of_trainer, trainer = make_rollout(
                step, f"Q{prompt}/{k}", trained_name, name
            )
            lines.append(line)
            trained.append(line_of_trainer)
            of_server |= {f"{line['id']}:{kind}": array for kind, array in server.items()}
            of_trainer |= {f"{line['id']}:{kind}": array for kind, array in trainer.items()}
    append(folder / f"{name}.jsonl", lines)
    if tensors:
        save_file(of_server, folder / f"{name}_{step:06d}.safetensors", metadata={"schema": "1"})
        save_file(
            of_trainer, folder / f"{trained_name}_{step:06d}.safetensors", metadata={"schema": "1"}
        )
        append(folder / f"{trained_name}.jsonl", trained)


def make_rollout(step: int, name: str, trained_name: str, sampled_by: str):
    """(line, tensors of the server's half, line, tensors of the trainer's half).  Every value of
    every token is unique in its rollout, so that one at the wrong token is noticed."""
    prompt, k = int(name[1:].split("/")[0]), int(name.split("/")[1])
    rng = np.random.default_rng([step, prompt, k])
    prompt_length, sampled = 4 + prompt, int(rng.integers(6, 14))
    environment = [[prompt_length + 3, prompt_length + 5]] if k == 1 else []
    length = prompt_length + sampled + 2 * len(environment)
    mu, old, new = fingerprint(sampled, 0.1), fingerprint(sampled, 0.11), fingerprint(sampled, 0.12)
    flags = np.where(np.arange(sampled) % 5 == 2, 1, 0).astype(np.uint8)
    server = np.argsort(rng.random((length - 1, LAYERS, EXPERTS)), -1)[..., :TOP_K].astype(np.uint8)
    own = server.copy()
    flips = rng.random((length - 1, LAYERS)) < FLIP_FRAC
    for row, layer in np.argwhere(flips):
        own[row, layer, -1] = next(e for e in range(EXPERTS) if e not in server[row, layer])
    words = " ".join(WORDS[int(i)] for i in rng.integers(0, len(WORDS), 8))
    reward = float(rng.random() < 0.3 + 0.1 * step)
    line = {
        "step": step, "id": name, "prompt_id": f"Q{prompt}", "prompt": f"{prompt + 10}+{step}=",
        "label": str(prompt + 10 + step),
        "response": f"<script>alert({k})</script> {words} {prompt + 10 + step}", "reward": reward,
        "advantage": reward - 0.5,
        "prompt_length": prompt_length, "response_length": sampled, "finish_reason": FINISH[k],
        "policy_versions": [[step - 1, sampled - 2], [step, 2]],
        "environment_length": 2 * len(environment),
        "episode": "", "num_turns": 1 + len(environment),
    }  # fmt: skip
    of_server = {
        "tokens": rng.integers(1, len(VOCABULARY), length),
        "logprobs": mu,
        "routed_experts": server,
    }
    if environment:
        of_server["environment"] = np.array(environment, np.int64)
    of_trainer = {
        "old_logprobs": old, "logprobs": new[None], "ratio": np.exp(new - old),
        "weight": np.exp(new - mu),
        "flags": flags, "advantage": np.array([reward - 0.5], np.float32),
        "entropy": -fingerprint(sampled, 0.2),
        "loss": fingerprint(sampled, 0.3), "own_experts": own, "margin": np.where(flips, 0.001,
        0.5).astype(np.float16),
        "flips": np.packbits(flips, axis=1, bitorder="little"), "rank": np.arange(sampled,
        dtype=np.int32),
    }  # fmt: skip
    trained = {
        "schema": 1, "step": step, "id": name, "sampled_by": sampled_by, "key": name,
        "tensors": f"{trained_name}_{step:06d}.safetensors",
        "mini_batch": prompt % 2, "kl": float(np.mean(mu - old)), "kl_k3": 1e-4,
        "max_log_ratio": float(np.abs(old - mu).max()),
        "max_staleness": float(np.abs(new - old).max()),
        "clipped_frac": float(flags.mean()), "weight_mean": 1.0, "entropy_mean": 0.5,
        "flip_frac": float(flips.mean()),
        "loss": 0.1,
    }  # fmt: skip
    return line, of_server, trained, of_trainer


def fingerprint(count: int, scale: float) -> np.ndarray:
    """float32 [count], all different and negative."""
    return (-scale * (1 + np.arange(count) / 64)).astype(np.float32)


def add_metrics(folder: Path, step: int, **more: float) -> None:
    metrics = {
        "rollout/reward_mean": 0.3 + 0.1 * step, "train/kl_mu_pi": 1e-3, "train/kl_mu_pi_k3": 1e-3,
        "train/entropy": 1.0,
        "first_order/total_p95": 0.01, "optim/grad_norm": 2.0, "optim/skipped_updates": 0.0,
        "time/step": 4.0,
        "routing/router_mismatch": FLIP_FRAC,
    }  # fmt: skip
    per_layer = {"routing/flip_rate": [FLIP_FRAC + layer / 100 for layer in range(LAYERS)]}
    append(
        folder / "metrics.jsonl",
        [{"step": step, "policy_version": step, **metrics, **more, "per_layer": per_layer}],
    )


def add_events(folder: Path, *events: dict) -> None:
    append(folder / "events.jsonl", [{"time": time.time(), **event} for event in events])


def append(path: Path, lines: list[dict]) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.write("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))


def write_many(folder: Path, rollouts: int, *, per_step: int = 512, characters: int = 400) -> Path:
    """A run of that many rollouts without tensors, to measure with."""
    folder.mkdir(parents=True, exist_ok=True)
    steps = math.ceil(rollouts / per_step)
    write_config(folder, steps)
    rng = np.random.default_rng(0)
    words = np.array(WORDS)
    for step in range(1, steps + 1):
        count = min(per_step, rollouts - (step - 1) * per_step)
        lengths = rng.integers(1, 9000, count)
        rewards = rng.random(count)
        lines, trained = [], []
        for n in range(count):
            name = f"Q{n // 8}/{n % 8}"
            response = " ".join(words[rng.integers(0, len(words), characters // 6)].tolist())
            lines.append({
                "step": step, "id": name, "prompt_id": f"Q{n // 8}", "prompt": f"{n}+{step}=",
                "response": f"{response} {n}",
                "label": "1", "reward": round(float(rewards[n]), 3),
                "advantage": round(float(rewards[n]) - 0.5, 3),
                "prompt_length": 9, "response_length": int(lengths[n]),
                "finish_reason": FINISH[n % 4],
                "policy_versions": [[step - 1, int(lengths[n])]], "environment_length": 0,
                "episode": "", "num_turns": 1,
            })  # fmt: skip
            trained.append({"schema": 1, "step": step, "id": name, "sampled_by": "rollouts",
            "tensors": None,
                            "kl": float(rewards[n]) / 1e3, "max_log_ratio": float(rewards[n]),
                            "clipped_frac": 0.01,
                            "flip_frac": 0.02})  # fmt: skip
        append(folder / "rollouts.jsonl", lines)
        append(folder / "trained.jsonl", trained)
        add_metrics(folder, step)
    return folder


if __name__ == "__main__":
    print(write_run(Path(sys.argv[1]), steps=int(sys.argv[2]) if len(sys.argv) > 2 else 6))
