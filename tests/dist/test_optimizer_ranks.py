"""core's optimizer on two real ranks: per update the norm of the gradient is computed and the
parameters are gathered once, and Adam's moments exist before the first one, with the weights of
core's plain step bit for bit.
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
    """Weights, norms, calls of core's norm and gathers of parameters after three updates that clip.

    plain: with core's own chain of optimizers, and moments made in the first update.
    """
    import torch.distributed as dist
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup as Buckets
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
    gathers, gather = [], Buckets.start_param_sync
    Buckets.start_param_sync = lambda self, *args, **kwargs: (
        gathers.append(1),
        gather(self, *args, **kwargs),
    )[1]
    batch = random_batch(engine)
    for _ in range(3):
        sums = MetricSums()
        engine.update(batch, engine.old_logprobs(batch, sums, replay="R3"), sums, replay="R3")
        norms.append(sums.reduce(dist.group.WORLD, engine.parallel.device)["optim/grad_norm"])
    optimizer.get_grad_norm_fp32 = norm
    Buckets.start_param_sync = gather
    weights = weights_of(engine)
    engine.parallel.destroy()
    return weights, norms, len(calls), len(gathers)


def once_equals_twice(checkpoint):
    import torch.distributed as dist

    dist.init_process_group("gloo")
    for case in CASES:
        expected, norms, twice, plain_gathers = train(checkpoint, case, plain=True)
        weights, same, once, gathers = train(checkpoint, case, plain=False)
        assert same == norms and min(norms) > 0.01, (case, norms)
        assert all(a.equal(b) for a, b in zip(weights, expected, strict=True)), case
        assert twice == 2 * once and once in (3, 6), (case, once, twice)
        num_optimizers = 1 + ("ep" in case[0])
        # core has a group of buckets for each of its optimizers
        assert gathers == 3 * case[1] * num_optimizers, (case, gathers)
        assert plain_gathers == num_optimizers * gathers, (case, plain_gathers)
    dist.destroy_process_group()


def test_one_norm_and_one_gather_an_update_give_the_same_weights():
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(once_equals_twice, 2, random_checkpoint(Path(folder) / "moe"))
