"""transformers' Qwen3-MoE with the same experts forced gives the same log-probs as this engine
under R3 (float32).

Each model has its own temperature, not 1: log-probs are those of the distribution that
rollout.temperature samples from. The forced ids are unique per (token, MoE layer), and neither
model would choose them.
"""

import numpy as np
import pytest
import torch

from tests.dist.launch import run_ranks
from tests.dist.test_replay import LAYERS, NUM_EXPERTS, TOP_K, make_samples
from tests.tiny import random_checkpoint

LAYOUTS = {1: [{}], 2: [{"tp": 2}, {"pp": 2}, {"cp": 2}, {"ep": 2}]}
MODELS = {
    "plain": {},
    "gates not renormalised, dense layers in between": {
        "norm_topk_prob": False,
        "mlp_only_layers": [0, 3],
    },
}
# model -> (rollout.temperature, model.fused_lm_head): both ways to log-probs divide the logits by
# it
ENGINES = {
    "plain": (0.7, False),
    "gates not renormalised, dense layers in between": (1.3, True),
}
LIMIT = 1e-5


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    root = tmp_path_factory.mktemp("hf")
    paths = {}
    for seed, (name, settings) in enumerate(MODELS.items()):
        layers = LAYERS + len(settings.get("mlp_only_layers", []))
        shape = dict(num_experts=NUM_EXPERTS, num_experts_per_tok=TOP_K, num_hidden_layers=layers)
        paths[name] = random_checkpoint(root / str(seed), seed=seed, **shape, **settings)
    return paths


@pytest.fixture(scope="module")
def references(checkpoints):
    return {name: forced_logprobs(path, ENGINES[name][0]) for name, path in checkpoints.items()}


def forced_logprobs(path, temperature):
    """(rollout, position) -> log-prob of the next token by transformers with forced experts,
    response tokens only.
    """
    from transformers import Qwen3MoeForCausalLM

    model = Qwen3MoeForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    gates = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]
    assert len(gates) == LAYERS
    found, agreement = {}, []
    for sample in make_samples():
        rollout = sample.rollout
        routes = torch.from_numpy(rollout.routed_experts.astype(np.int64))
        hooks = [
            gate.register_forward_hook(force(routes[:, index], agreement))
            for index, gate in enumerate(gates)
        ]
        with torch.no_grad():
            logits = model(torch.from_numpy(rollout.tokens)[None]).logits[0]
        for hook in hooks:
            hook.remove()
        logprobs = (logits / temperature).log_softmax(-1)
        for position in range(rollout.prompt_length - 1, len(rollout.tokens) - 1):
            found[rollout.id, position] = float(logprobs[position, rollout.tokens[position + 1]])
    assert np.mean(agreement) < 0.01, "transformers would have chosen these experts without forcing"
    return found


def force(ids, agreement):
    """A hook that gives rows 0..S-2 of a gate these experts [S - 1, K], with the weights that their
    own scores have.
    """

    def after(gate, inputs, outputs):
        logits, weights, chosen = outputs
        probabilities = logits.softmax(-1, dtype=torch.float)
        forced = probabilities.gather(1, torch.cat([ids, chosen[-1:]]))
        if gate.norm_topk_prob:
            forced = forced / forced.sum(-1, keepdim=True)
        agreement.append(
            float((chosen[:-1].sort().values == ids.sort().values).all(1).float().mean())
        )
        return logits, forced.to(weights.dtype), torch.cat([ids, chosen[-1:]])

    return after


def run_engines(cases, layouts):
    """On a rank: log-probs of an old-logprob pass under R3, per model and layout, and how often
    live routing agreed.
    """
    import torch.distributed as dist

    from megatron_rl.batch.split import make_mini_batch
    from megatron_rl.metrics.reduce import MetricSums
    from megatron_rl_tools.verify_replay.fingerprints import rows_on_rank
    from tests.dist.engines import make_engine

    dist.init_process_group("gloo")
    results = []
    for path, temperature, fused in cases:
        for layout in layouts:
            engine = make_engine(
                path,
                parallel=layout,
                model={"fused_lm_head": fused},
                rollout={"temperature": temperature},
            )
            place = engine.parallel
            mine = make_samples()[place.dp_rank :: place.dp_size]
            batch = make_mini_batch(
                mine, max_tokens=25, rule=engine.pack_rule, dp_group=place.dp_group
            )
            old = engine.old_logprobs(batch, MetricSums(), replay="R3")
            found = {}
            for micro, values in zip(batch.micro_batches, old.logprobs, strict=place.is_last_stage):
                rows = rows_on_rank(micro.cu_seqlens.tolist(), place.cp_rank, place.cp_size)
                for row, value in zip(rows, values.tolist(), strict=True):
                    if micro.loss_mask[row]:
                        found[
                            micro.rollout_ids[micro.sequence_ids[row]], int(micro.positions[row])
                        ] = value
            results.append((found, engine.mismatch([old]).router_mismatch))
            place.destroy()
    dist.destroy_process_group()
    return results


@pytest.mark.parametrize("world", LAYOUTS)
def test_same_experts_same_logprobs(checkpoints, references, world):
    layouts = LAYOUTS[world]
    ranks = run_ranks(
        run_engines, world, [(path, *ENGINES[name]) for name, path in checkpoints.items()], layouts
    )
    cases = [(name, layout) for name in checkpoints for layout in layouts]
    for index, (name, layout) in enumerate(cases):
        reference = references[name]
        found = {key: value for rank in ranks for key, value in rank[index][0].items()}
        assert found.keys() == reference.keys(), (name, layout)
        worst = max(abs(found[key] - reference[key]) for key in reference)
        print(f"{name}, {layout}: largest difference {worst:.2g} over {len(found)} tokens")
        assert worst < LIMIT, (name, layout, worst)
        assert min(rank[index][1] for rank in ranks) > 0.9, (
            "the engine's own routers would have chosen these experts"
        )


def test_other_experts_give_other_logprobs(checkpoints, references):
    """Without forced experts transformers gives very different log-probs, so the comparison can
    fail.
    """
    from transformers import Qwen3MoeForCausalLM

    path, reference = checkpoints["plain"], references["plain"]
    model = Qwen3MoeForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    differences = []
    for sample in make_samples():
        tokens = torch.from_numpy(sample.rollout.tokens)
        with torch.no_grad():
            logprobs = (model(tokens[None]).logits[0] / ENGINES["plain"][0]).log_softmax(-1)
        for position in range(sample.rollout.prompt_length - 1, len(tokens) - 1):
            value = float(logprobs[position, tokens[position + 1]])
            differences.append(abs(value - reference[sample.rollout.id, position]))
    assert np.median(differences) > 100 * LIMIT
