"""core's optimizer on two real ranks: the norm of a gradient is computed once per update, and
Adam's moments exist before the first one, with the weights of core's plain step bit for bit.
"""

import tempfile
from pathlib import Path

from tests.dist.launch import run_ranks
from tests.tiny import random_checkpoint

CASES = [
    ({}, False, "float32"),
    ({}, True, "float32"),
    ({"tp": 2}, False, "bfloat16"),
    ({"ep": 2}, True, "bfloat16"),  # core chains an optimizer of the experts, in another group
]


def train(checkpoint, case, *, plain):
    """Weights, norms and calls of core's norm after three updates that clip.

    plain: with core's own chain of optimizers, and moments made in the first update.
    """
    import torch.distributed as dist
    from megatron.core.optimizer import ChainedOptimizer, optimizer

    from megatron_rl.checkpoint.state import make_moments
    from megatron_rl.metrics.reduce import MetricSums
    from tests.dist.engines import make_engine, random_batch
    from tests.dist.test_engine import weights_of

    layout, distributed, dtype = case
    optim = {"distributed": distributed, "clip_grad": 0.01}
    engine = make_engine(checkpoint, parallel=layout, model={"dtype": dtype}, optim=optim)
    calls, norm, norms = [], optimizer.get_grad_norm_fp32, []
    if plain:
        core = ChainedOptimizer(engine.optimizer.core.chained_optimizers)
        core.measure = lambda: (core.prepare_grads(), float(core.get_grad_norm()))[1]
        engine.optimizer.core = core
    else:
        make_moments(engine)
    optimizer.get_grad_norm_fp32 = lambda *args, **kwargs: calls.append(1) or norm(*args, **kwargs)
    batch = random_batch(engine)
    for _ in range(3):
        sums = MetricSums()
        engine.update(batch, engine.old_logprobs(batch, sums, replay="R3"), sums, replay="R3")
        norms.append(sums.reduce(dist.group.WORLD, engine.parallel.device)["optim/grad_norm"])
    optimizer.get_grad_norm_fp32 = norm
    weights = weights_of(engine)
    engine.parallel.destroy()
    return weights, norms, len(calls)


def once_equals_twice(checkpoint):
    import torch.distributed as dist

    dist.init_process_group("gloo")
    for case in CASES:
        expected, norms, twice = train(checkpoint, case, plain=True)
        weights, same, once = train(checkpoint, case, plain=False)
        assert same == norms and min(norms) > 0.01, (case, norms)
        assert all(a.equal(b) for a, b in zip(weights, expected, strict=True)), case
        assert twice == 2 * once and once in (3, 6), (case, once, twice)
    dist.destroy_process_group()


def test_one_norm_an_update_gives_the_same_weights():
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(once_equals_twice, 2, random_checkpoint(Path(folder) / "moe"))
