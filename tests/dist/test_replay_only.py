"""examples/replay_only: replay in a plain megatron-core job, with the model on one rank and over
two.
"""

import runpy
from pathlib import Path

import numpy as np
import pytest

from tests.dist.launch import run_ranks

EXAMPLE = Path(__file__).parents[2] / "examples/replay_only/replay_only.py"


def replay_and_watch():
    """On a rank: what every router chose, per number of ranks that share the experts; and the
    errors of incomplete passes.
    """
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.router import TopKRouter

    from megatron_rl.replay.manager import Routes

    example = runpy.run_path(str(EXAMPLE))
    dist.init_process_group("gloo")
    rng = np.random.default_rng(dist.get_rank())
    shape = (example["LAYERS"], example["EXPERTS"])
    batches = [torch.from_numpy(rng.integers(0, example["VOCABULARY"], size)) for size in (16, 24)]
    routes = [
        rng.random((len(row) - 1, *shape)).argsort(-1)[..., : example["TOP_K"]] for row in batches
    ]
    routes = [ids.astype(np.uint8) for ids in routes]
    results = {}
    for ranks in (1, 2):
        model = example["make_model"](ranks)
        manager, layout = example["install"](model, ranks)
        chosen = []
        for router in (module for module in model.modules() if isinstance(module, TopKRouter)):
            router.register_forward_hook(
                lambda _, __, out, chosen=chosen: chosen.append(out[1].numpy())
            )
        losses = example["train_pass"](model, manager, layout, batches, routes)
        local_experts = {name for name, _ in model.named_parameters() if ".local_experts." in name}
        gradients = [
            p.grad.abs().sum().item()
            for name, p in model.named_parameters()
            if ".router.weight" in name
        ]
        replayed, chosen[:] = chosen[:], []
        with torch.no_grad():
            # outside a pass: the routers' own choice
            model(batches[0][None], torch.arange(16)[None], None)
        errors = []
        for forwards in ((0,), (0, 0)):
            try:
                with torch.no_grad(), manager.run_pass([Routes(), Routes()], training=False):
                    for index in forwards:
                        with manager.forward(index):
                            model(batches[index][None], torch.arange(16)[None], None)
            except RuntimeError as error:
                errors.append(str(error))
        results[ranks] = (replayed, chosen[:2], losses, gradients, len(local_experts), errors)
        parallel_state.destroy_model_parallel()
    return routes, results


@pytest.fixture(scope="module")
def of_ranks():
    return run_ranks(replay_and_watch, 2)


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_router_uses_the_given_experts(of_ranks, ranks):
    for routes, results in of_ranks:
        replayed, live, losses, gradients, *_ = results[ranks]
        layers = routes[0].shape[1]
        assert len(replayed) == layers * len(routes)
        for call, used in enumerate(replayed):
            given = routes[call // layers][:, call % layers]
            expected = np.zeros(used.shape, bool)
            np.put_along_axis(expected[:-1], given.astype(np.int64), True, 1)
            np.testing.assert_array_equal(used[:-1], expected[:-1])
            assert used[-1].sum() == given.shape[1]  # the last token: the router's own choice
        assert any((own[:-1] != used[:-1]).any() for own, used in zip(live, replayed, strict=False))
        assert np.isfinite(losses).all() and all(value > 0 for value in gradients)


def test_the_experts_are_spread_over_the_ranks(of_ranks):
    for _, results in of_ranks:
        assert results[1][4] == 2 * results[2][4] > 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_route_that_is_not_consumed_exactly_once_raises(of_ranks, ranks):
    for _, results in of_ranks:
        missing, twice = results[ranks][5]
        assert (
            "routes not consumed in this pass: (micro-batch, MoE layer) [(1, 0), (1, 1)]" in missing
        )
        assert "routes of micro-batch 0, MoE layer 0 were requested twice in one pass" in twice
