"""What the ranks of a replica know about its tokens comes together on the leader, each value once.

The ranks are simulated in this process, one after the other, the leader last: tensor x pipeline
parallel, with and without sequence parallelism.  Real ranks: tests/dist/test_token_data.py.
"""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_rl.batch.pack import pack
from megatron_rl.config import load_config
from megatron_rl.records.packed import Sample
from megatron_rl.replay.layout import RankLayout, indices
from megatron_rl.trainer.recording import token_recorder
from megatron_rl.trainer.recording.token_files import Table
from megatron_rl.trainer.recording.token_recorder import Part, TokenRecorder
from tests.unit.batch.rollouts import make_rollout
from tests.unit.trainer.recorded import Calls, Recorded

LAYERS, E, K, TP = (1, 2, 4, 5), 8, 2, 2
STAGES = ((0, 1), (2, 3))
BATCHES = [
    [("a", False), ("b", True), ("c", False), ("d", True)],
    [("e", False), ("f", False)],
    [("g", True)],
]
"""The micro-batches of two mini-batches, two in the first: sequences, and whether their tensors are
chosen.
"""


class Exchange:
    """dist.gather and dist.reduce to the leader, whose turn is the last."""

    def __init__(self, monkeypatch, group):
        self.gathered, self.reduced, self.group = [], [], group
        monkeypatch.setattr(token_recorder.dist, "gather", self.gather)
        monkeypatch.setattr(token_recorder.dist, "reduce", self.reduce)

    def gather(self, tensor, every, leader, *, group):
        assert leader == 0 and group is self.group
        self.gathered.append(tensor.clone())
        if every is not None:
            for place, part in zip(every, self.gathered, strict=True):
                place.copy_(part)

    def reduce(self, tensor, leader, *, group):
        """Micro-batch by micro-batch; those without chosen sequences are left out alike by all."""
        assert leader == 0 and group is self.group
        self.reduced.append(tensor.clone())
        if len(self.gathered) == group.size() - 1:  # the leader's
            per_rank = (
                len(self.reduced) // group.size() if len(self.reduced) % group.size() == 0 else 2
            )
            number = len(self.reduced) - 1 - per_rank * (group.size() - 1)
            tensor += sum(
                self.reduced[rank * per_rank + number] for rank in range(group.size() - 1)
            )


def make_engine(tp_rank, stage, sequence_parallel, group, *, tp_size=TP, is_leader=None):
    layout = RankLayout(
        layers=STAGES[stage], tp_rank=tp_rank, tp_size=tp_size, sequence_parallel=sequence_parallel,
        num_experts=E,
        top_k=K, ep_size=1,
    )  # fmt: skip
    parallel = SimpleNamespace(
        device=torch.device("cpu"), tp_rank=tp_rank, is_last_stage=stage == 1, replica_group=group,
        replica_leader=0, dp_rank=1,
        dp_size=2, is_replica_leader=(tp_rank, stage) == (0, 0) if is_leader is None else is_leader,
    )  # fmt: skip
    manager = SimpleNamespace(id_dtype=torch.uint8)
    spec, rule = (
        SimpleNamespace(moe_layers=LAYERS, top_k=K),
        SimpleNamespace(mask_missing_routes=False),
    )
    return SimpleNamespace(
        layout=layout, parallel=parallel, manager=manager, spec=spec, pack_rule=rule
    )


def micro_batch(names):
    samples = [
        Sample(make_rollout(name, 3, 4 + n), 1.0, save_tokens=chosen)
        for n, (name, chosen) in enumerate(names)
    ]
    lengths = [len(sample.rollout.tokens) for sample in samples]
    return samples, pack(samples, [*lengths, TP + sum(lengths) % TP])  # the last: pads


class Truth:
    """Random values of every row of a micro-batch, as one rank would have them."""

    def __init__(self, samples, batch, seed):
        random = torch.Generator().manual_seed(seed)
        rows = batch.num_tokens
        self.samples, self.batch = samples, batch
        self.ids = torch.randint(E, (len(LAYERS), rows, K), generator=random)
        self.margins = torch.randint(100, (len(LAYERS), rows), generator=random) / 4
        self.flips = torch.rand(len(LAYERS), rows, generator=random) < 0.5
        self.compared = torch.rand(rows, generator=random) < 0.8
        self.values = torch.rand(len(Table.VALUES), rows, generator=random)
        self.sums = torch.rand(
            len(samples) + 1, token_recorder.NUM_SUMS - 2, generator=random, dtype=torch.float64
        )
        self.maxima = torch.rand(
            len(samples) + 1, token_recorder.NUM_MAXIMA, generator=random, dtype=torch.float64
        )

    def part(self, engine):
        """What a rank has of it after the update."""
        part = Part(engine, self.batch, self.samples)
        rows = indices(engine.layout.router_rows(self.batch.cu_seqlens))
        for local, layer in enumerate(engine.layout.layers):
            part.add_routes(
                local, self.ids[layer, rows], self.margins[layer, rows], self.flips[layer, rows]
            )
        part.has_routes = True
        part.add_flips(self.flips[list(engine.layout.layers)].sum(0)[rows], self.compared[rows])
        if engine.parallel.is_last_stage:  # every tensor rank has all of them
            part.values = self.values[:, part.sampled.index]
            part.sums[:, :-2], part.maxima = self.sums.clone(), self.maxima.clone()
        return part

    def check(self, sequences, *, has_routes=True):
        starts = self.batch.cu_seqlens.tolist()
        inputs, predicts = [], []
        for sample, start in zip(self.samples, starts, strict=False):
            if sample.save_tokens:
                inputs += [start + n for n in range(len(sample.rollout.tokens) - 1)]
                predicts += (start + sample.rollout.sampled - 1).tolist()
        for number, (each, sample, start) in enumerate(
            zip(sequences, self.samples, starts, strict=False)
        ):
            assert each.sample is sample
            rows = slice(start, start + len(sample.rollout.tokens))
            flips = self.flips[:, rows].sum(), self.compared[rows].sum() * len(LAYERS)
            if not has_routes:
                flips = 0, 0
            assert each.summary == [
                *self.sums[number].tolist(),
                *map(float, flips),
                *self.maxima[number].tolist(),
            ]
            if not inputs:
                assert each.table is None
                continue
            table = each.table
            assert np.array_equal(table.values, self.values[:, predicts])
            layers = range(len(LAYERS)) if has_routes else []
            assert table.own_experts.dtype == np.uint8
            assert np.array_equal(table.own_experts, self.ids[list(layers)][:, inputs])
            assert np.array_equal(table.margins, self.margins[list(layers)][:, inputs])
            assert np.array_equal(table.flipped, self.flips[list(layers)][:, inputs])


@pytest.fixture
def recorder(tmp_path):
    """recorder(engine, parts of both mini-batches): (the TokenRecorder, what it writes)."""
    run = {"dir": str(tmp_path)}
    keys = {
        "model": {"path": "m"},
        "data": {"train": "d"},
        "run": run,
        "rollout": {"save_tensors": 0.5},
    }
    cfg = load_config(None, [], keys)

    def make(engine, parts, cfg=cfg):
        made, calls = TokenRecorder(cfg, engine, None), Calls()
        made.files = Recorded(calls, "files")
        made._parts = {1: parts[2:], 0: parts[:2]}
        return made, calls

    return make


def check_written(calls, truths, **options):
    ((step, sequences), _) = calls.named("files.write")[0]
    assert step == 5 and [each.mini_batch for each in sequences] == [0] * 6 + [1]
    for truth, first in zip(truths, (0, 4, 6), strict=True):
        truth.check(sequences[first : first + len(truth.samples)], **options)


@pytest.mark.parametrize(("tp", "sequence_parallel"), [(1, False), (2, False), (2, True)])
def test_the_leader_writes_every_value_once(monkeypatch, recorder, tp, sequence_parallel):
    ranks = [(stage, tp_rank) for stage in (1, 0) for tp_rank in reversed(range(tp))]
    group = SimpleNamespace(size=lambda: len(ranks))
    exchange = Exchange(monkeypatch, group)
    truths = [Truth(*micro_batch(names), seed) for seed, names in enumerate(BATCHES)]
    for stage, tp_rank in ranks:
        engine = make_engine(tp_rank, stage, sequence_parallel, group, tp_size=tp)
        made, calls = recorder(engine, [truth.part(engine) for truth in truths])
        made.finish(5)
        assert made._parts == {} and len(calls) == engine.parallel.is_replica_leader
        made.finish(6)
        assert len(calls) == engine.parallel.is_replica_leader, "nothing is left of the step"
    assert len(exchange.gathered) == len(ranks) and len(exchange.reduced) == 2 * len(ranks)
    check_written(calls, truths)


def test_a_replica_of_one_rank_sends_nothing(monkeypatch, recorder):
    for name in ("gather", "reduce"):
        monkeypatch.setattr(
            token_recorder.dist, name, lambda *_, **__: pytest.fail("there is no other rank")
        )
    group = SimpleNamespace(size=lambda: 1)
    engine = make_engine(0, 1, False, group, tp_size=1, is_leader=True)
    engine.layout = replace(engine.layout, layers=(0, 1, 2, 3))
    truths = [Truth(*micro_batch(names), seed) for seed, names in enumerate(BATCHES)]
    for has_routes in (True, False):
        parts = [truth.part(engine) for truth in truths]
        for part in parts if not has_routes else ():
            part.has_routes = False  # replay.measure = false
            part.sums[:, -2:] = 0
        made, calls = recorder(engine, parts)
        made.finish(5)
        check_written(calls, truths, has_routes=has_routes)


def test_routes_are_recorded_where_they_were_compared(recorder):
    engine = make_engine(0, 1, False, SimpleNamespace(size=lambda: 1), tp_size=1)
    truth = Truth(*micro_batch(BATCHES[0]), 0)
    flips, compared = truth.flips[2:].sum(0), truth.compared
    for mismatch in (None, SimpleNamespace(flips=[flips], compared=[compared])):
        part = Part(engine, truth.batch, truth.samples)
        made, _ = recorder(engine, [part])
        observe = made.observer(0, mismatch)
        assert part.has_routes == (mismatch is not None)
        rows = truth.batch.sequence_ids
        expected = [
            [int(flips[rows == n].sum()), 2 * int(compared[rows == n].sum())] for n in range(4)
        ]
        assert part.sums[:4, -2:].tolist() == (expected if mismatch else [[0, 0]] * 4)
        seen = []
        part.add_tokens = seen.append
        observe(tokens := SimpleNamespace(index=0))
        assert seen == [tokens]


def test_without_save_tensors_nothing_is_recorded(recorder):
    cfg = load_config(None, [], {"model": {"path": "m"}, "data": {"train": "d"}})
    engine = make_engine(0, 1, False, SimpleNamespace(size=lambda: 1), tp_size=1)
    made, calls = recorder(engine, [], cfg)
    made._parts = {}
    with made.old_pass("a batch that is not looked at"):
        pass
    assert made.observer(0, "its mismatch") is None
    made.finish(5)
    assert calls == [] and made._parts == {}
