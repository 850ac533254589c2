"""Random rollouts whose arrays carry their identity, for the batch tests."""

from dataclasses import replace

import numpy as np

from megatron_rl.records import Prompt, Rollout, RolloutGroup


def make_rollout(
    name, prompt_length, response_length, *, layers=3, top_k=2, num_experts=8, seed=0, routes=True
):
    rng = np.random.default_rng([seed, prompt_length, response_length])
    size = prompt_length + response_length
    experts = np.argsort(rng.random((size - 1, layers, num_experts)), axis=-1)[..., :top_k]
    experts = experts.astype(np.uint8 if num_experts <= 256 else np.int16)
    return Rollout(
        id=name,
        tokens=rng.integers(1, 60, size),
        prompt_length=prompt_length,
        rollout_logprobs=-rng.random(response_length).astype(np.float32) - 0.1,
        routed_experts=experts if routes else None,
        finish_reason="stop",
        policy_versions=np.sort(rng.integers(0, 3, response_length)).astype(np.int32),
    )


def make_groups(num_groups, group_size, *, seed=0, routes=True):
    rng = np.random.default_rng(seed)
    groups = []
    for p in range(num_groups):
        prompt_length = int(rng.integers(1, 6))
        rollouts = tuple(
            make_rollout(
                f"p{p}/{k}",
                prompt_length,
                int(rng.integers(1, 9)),
                seed=1000 * p + k,
                routes=routes,
            )
            for k in range(group_size)
        )
        rewards = rng.random(group_size).astype(np.float32)
        prompt = Prompt(f"p{p}", "", tuple(range(prompt_length)), "")
        groups.append(RolloutGroup(prompt, rollouts, rewards, rewards - rewards.mean()))
    return groups


def make_tree(name, *, seed=0, routes=True):
    """An episode of three sequences; the prompts of the last two hold tokens that the first one
    sampled.
    """
    first = make_rollout("", 3, 9, seed=seed, routes=False)
    parts = []
    for number, (cut, size) in enumerate([(3, 9), (8, 4), (8, 6)]):
        own = make_rollout(
            f"{name}/{number}", cut, size, seed=seed + 10 * number + 10, routes=routes
        )
        tokens = np.concatenate([first.tokens[:cut], own.tokens[cut:]])
        parts.append(
            replace(own, tokens=first.tokens if number == 0 else tokens, routes_digest=None)
        )
    *earlier, last = parts
    return replace(last, id=name).with_episode(earlier=tuple(earlier), reward=0.5)
