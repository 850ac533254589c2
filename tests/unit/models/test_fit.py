"""What is sampled ahead must fit into the host's memory."""

from types import SimpleNamespace

import pytest

from megatron_rl.config import load_config
from megatron_rl.models.fit import queue_problems


@pytest.mark.parametrize(("num_experts", "id_bytes"), [(256, 1), (257, 2)])
def test_a_queue_larger_than_the_memory_is_refused_with_its_size(num_experts, id_bytes):
    sections = {
        "run": {"prompts_per_step": 4, "group_size": 2, "num_steps": 9},
        "model": {"path": "unused"},
        "data": {"train": "unused", "max_prompt_tokens": 100},
        "rollout": {"max_staleness": 3, "max_response_tokens": 900},
    }
    cfg = load_config(None, [], sections)
    spec = SimpleNamespace(moe_layers=range(5), top_k=8, num_experts=num_experts)
    size = (3 + 1) * 4 * 2 * 1000 * (16 + 5 * 8 * id_bytes)  # steps, prompts, responses, tokens
    assert not list(queue_problems(cfg, spec, 1.0, size)) and not list(
        queue_problems(cfg, spec, 0.5, size // 2)
    )
    (problem,) = queue_problems(cfg, spec, 1.0, size - 1)
    assert (
        "rollout.max_staleness = 3 keeps up to 4 steps" in problem
        and "lower rollout.max_staleness" in problem
    )
    synchronous = cfg.model_copy(
        update={"rollout": cfg.rollout.model_copy(update={"max_staleness": 0})}
    )
    assert not list(queue_problems(synchronous, spec, 1.0, 1))
