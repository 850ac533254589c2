"""optim/grad_cosine on two real ranks equals the cosine of the gradients that the engine saves, and
offload frees and restores the copy.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.dist.launch import run_ranks
from tests.tiny import random_checkpoint

CASES = [
    ({}, False, "float32"),
    ({"tp": 2}, True, "float32"),
    ({"ep": 2}, True, "bfloat16"),  # core chains an optimizer of the experts, in another group
    ({"pp": 2}, False, "float32"),
]


def train(folder: Path) -> dict[int, list[float | None]]:
    """Case -> the cosine of three updates; their gradients go to files."""
    import torch.distributed as dist

    from megatron_rl.metrics.reduce import MetricSums
    from tests.dist.engines import make_engine, random_batch
    from tests.dist.test_referee import save_gradients

    dist.init_process_group("gloo")
    found = {}
    for index, (layout, distributed, dtype) in enumerate(CASES):
        optim = {"distributed": distributed, "clip_grad": 0.01, "lr": 1e-2, "measure_cosine": True}
        engine = make_engine(folder / "model", parallel=layout, model={"dtype": dtype}, optim=optim)
        cosines = []
        for update in range(3):
            batch, sums = random_batch(engine, seed=update), MetricSums()
            old = engine.old_logprobs(batch, sums, replay="R3")
            norm = engine.compute_gradient(batch, old, sums, replay="R3")
            if not distributed:
                save_gradients(engine, folder / f"{index}-{update}")
            cosines.append(engine.apply_gradient(norm, batch, sums).cosine)
            before = [copy.clone() for copy in engine.optimizer.cosine.last]
            engine.offload.free_training()
            assert all(not copy.untyped_storage().nbytes() for copy in engine.optimizer.cosine.last)
            engine.offload.restore()
            pairs = zip(before, engine.optimizer.cosine.last, strict=True)
            assert before and all(a.equal(b) for a, b in pairs)
        found[index] = cosines
        engine.parallel.destroy()
    dist.destroy_process_group()
    return found


def test_it_is_the_cosine_of_complete_gradients(tmp_path: Path) -> None:
    random_checkpoint(tmp_path / "model")
    first, second = run_ranks(train, 2, tmp_path)
    assert first == second, "every rank has the same number"
    for index, (_, distributed, _) in enumerate(CASES):
        none, *cosines = first[index]
        assert none is None and len(set(cosines)) == 2 and all(-1 < c < 1 for c in cosines)
        if distributed:
            continue
        saved = [load_file(tmp_path / f"{index}-{update}") for update in range(3)]
        whole = [torch.cat([g.double().flatten() for g in part.values()]) for part in saved]
        for update in range(2):
            a, b = whole[update], whole[update + 1]
            assert cosines[update] == pytest.approx(float(a @ b / (a.norm() * b.norm())), rel=1e-4)
    # the same gradients in another layout, cut another way
    assert first[1][1:] == pytest.approx(first[3][1:], rel=1e-3)
