"""Engines and mini-batches for the multi-rank tests; import on a rank."""

from dataclasses import replace

import numpy as np

from megatron_rl.batch.split import make_mini_batch
from megatron_rl.config import load_config
from megatron_rl.distributed import make_parallel
from megatron_rl.engine.engine import Engine
from megatron_rl.records.token_sets import TokenSets
from megatron_rl_tools.verify_replay.fingerprints import make_sample


def make_engine(
    path, *, parallel=None, model=None, rollout=None, optim=None, loss=None, checkpoint=None,
    lora=None, replay="R3", measure=True,
    total_updates=8, spec=None, megatron=None, run=None,
):  # fmt: skip
    """A float32 CPU engine of the HF checkpoint at `path` in this layout; end with
    engine.parallel.destroy().
    """
    sections = {
        "model": {"path": str(path), "dtype": "float32", **(model or {})},
        "lora": lora or {},
        "data": {"train": "unused"},
        "run": {"num_mini_batches": 2, **(run or {})},  # what loss.router_shift needs
        "rollout": rollout or {},
        "optim": {"lr": 1e-3, "distributed": False, "clip_grad": 0.5, **(optim or {})},
        "parallel": parallel or {},
        "replay": {"mode": replay, "measure": measure},
        "loss": loss or {},
        "checkpoint": checkpoint or {},
        "megatron": megatron or {},
    }
    cfg = load_config(None, [], sections)
    groups = make_parallel(cfg.parallel, device="cpu", timeout_minutes=2)
    return Engine(cfg, groups, total_updates=total_updates, spec=spec)


def random_batch(
    engine,
    *,
    num_sequences=8,
    seed=0,
    num_experts=8,
    top_k=2,
    layers=4,
    with_sets=False,
    episodes=False,
    change=None,
):
    """A mini-batch of random sequences with random routes, this replica's share packed for its
    layout.

    change: (index, sample) -> the sample to take in its place, of the job's samples.
    with_sets: every sampled token has a kept set of 1 to 3 ids.  episodes: two sequences each, with
    an environment's answers.
    """
    rng = np.random.default_rng(seed)
    samples = []
    for index in range(num_sequences):
        shape = (int(rng.integers(5, 13)) - 1, layers, num_experts)
        routes = np.argsort(rng.random(shape), axis=-1)[..., :top_k].astype(np.uint8)
        sample = make_sample(rng, f"r{index}", routes, vocab_size=60)
        sample = with_answer(sample) if episodes else sample
        samples.append(with_kept_sets(sample) if with_sets else sample)
    if episodes:
        samples = [joined(*pair) for pair in zip(samples[::2], samples[1::2], strict=True)]
    parallel = engine.parallel
    samples = [
        sample if change is None else change(index, sample) for index, sample in enumerate(samples)
    ]
    mine = samples[parallel.dp_rank :: parallel.dp_size]
    return make_mini_batch(mine, max_tokens=25, rule=engine.pack_rule, dp_group=parallel.dp_group)


def with_answer(sample):
    """The second token of the response is an environment's, where one follows it."""
    rollout = sample.rollout
    second = rollout.prompt_length + 1
    if second + 1 >= len(rollout.tokens):
        return sample
    columns = {
        name: np.delete(getattr(rollout, name), 1)
        for name in ("rollout_logprobs", "policy_versions")
    }
    changed = replace(rollout, environment=((second, second + 1),), routes_digest=None, **columns)
    return replace(sample, rollout=changed)


def joined(first, last):
    """One episode of two sequences."""
    rollout = last.rollout.with_episode(earlier=(first.rollout,))
    return replace(last, rollout=rollout.named(rollout.id))


def with_kept_sets(sample):
    """The token y with y + 7 and y + 14 (modulo 60), of which the i-th token has the first i %
    3.
    """
    tokens = sample.rollout.tokens[sample.rollout.sampled]
    sets = [
        [token, (token + 7) % 60, (token + 14) % 60][: 1 + i % 3]
        for i, token in enumerate(tokens.tolist())
    ]
    mask = TokenSets.of(np.array([len(own) for own in sets]), np.concatenate(sets))
    return replace(sample, rollout=replace(sample.rollout, sampling_mask=mask))
