"""A prompt with its response must fit into the servers, and what is sampled ahead into the host's
memory.
"""

from types import SimpleNamespace

import pytest

from megatron_rl.config import load_config
from megatron_rl.models.fit import SERVER_TOKENS, length_problems, queue_problems


@pytest.mark.parametrize(
    ("sections", "positions", "refused"),
    [
        ({"rollout": {"max_total_tokens": 256}}, 4096, ("rollout", "rollout.max_total_tokens")),
        ({}, 256, ("rollout", "the model's max_position_embeddings")),
        # --context-length replaces the positions of the model
        ({"rollout": {"server_args": ["--context-length", "4096"]}}, 256, None),
        ({"rollout": {"urls": ["http://a:1"], "max_total_tokens": 256}}, 256, None),
        (
            {"rollout": {"max_total_tokens": 256, "max_response_tokens": 9},
             "eval": {"max_response_tokens": 100}},
            4096, ("eval", "rollout.max_total_tokens"),
        ),
    ],
)  # fmt: skip
def test_the_longest_prompt_leaves_room_for_a_full_response(sections, positions, refused):
    """SGLang with --max-total-tokens 256 answers 150 tokens with 104 of 200, and no error."""
    base = {"model": {"path": "unused"}, "data": {"train": "unused", "max_prompt_tokens": 150}}
    base["rollout"] = {"max_response_tokens": 100} | sections.get("rollout", {})
    spec = SimpleNamespace(max_positions=positions)

    def problems(prompt):
        data = base["data"] | {"max_prompt_tokens": prompt}
        cfg = load_config(None, [], base | {"data": data, "eval": sections.get("eval", {})})
        return list(length_problems(cfg, spec))

    assert SERVER_TOKENS == 6 and not problems(150)
    if refused is None:
        assert not problems(4000)
        return
    (problem,) = problems(151)
    section, limit = refused
    assert f"data.max_prompt_tokens = 151 and {section}.max_response_tokens = 100" in problem
    assert f"251 tokens must be at most 250, {limit} = 256" in problem


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
