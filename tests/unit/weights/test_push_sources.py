"""Several sources send at the same time: what receivers hold, how many bytes each sends, and who
learns of a failure.
"""

import hashlib
import time
import weakref
from collections import Counter, defaultdict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from megatron_rl.distributed.ranks import Ranks
from megatron_rl.models.families import make_spec
from megatron_rl.models.known import find_spec
from megatron_rl.models.spec import load_hf_config
from megatron_rl.weights.hf.entries import entries
from megatron_rl.weights.hf.export import (
    HFTensor,
    RankParameters,
    assign_sources,
    batches,
    elements,
    few_sources,
    order_steps,
)
from megatron_rl.weights.hf.rules import ONE_CALL
from megatron_rl.weights.sync.bucket_order import FAILED, BucketOrder
from megatron_rl.weights.sync.push import WeightPusher, WeightPushError
from megatron_rl.weights.sync.push_records import Sent
from megatron_rl.weights.sync.pushed_weights import PushedWeights
from megatron_rl.weights.sync.servers import ServerAccess
from megatron_rl.weights.sync.transports import TransportSettings
from tests.fake_receiver import fingerprint
from tests.families import family_checkpoint
from tests.thread_ranks import run_thread_ranks

SOURCES, TENSORS, SHAPE = 4, 26, (20, 30)
TENSOR_BYTES = 20 * 30 * 4


@pytest.fixture
def files(tmp_path) -> list[Path]:
    """The weights of versions 0 to 2, in which every tensor has other values; their sources' shares
    are unequal.
    """
    found = []
    for version in range(3):
        torch.manual_seed(version)
        folder = tmp_path / str(version)
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        found.append(folder / "model.safetensors")
        save_file(
            {f"layers.{index:02d}.weight": torch.randn(SHAPE) for index in range(TENSORS)},
            found[-1],
        )
    return found


def export(file: Path, rank: int):
    for index, (name, tensor) in enumerate(sorted(load_file(file).items())):
        source = index % SOURCES
        yield HFTensor(
            name, tuple(tensor.shape), tensor.dtype, source, tensor if rank == source else None
        )


def make_pusher(files, urls, transport, ranks, **settings) -> WeightPusher:
    pusher = WeightPusher(
        ServerAccess(urls, 20),
        PushedWeights(files[0].parent, torch.float32),
        TransportSettings(
            transport,
            bucket_mb=1,
            device=torch.device("cpu"),
            disk_dir=files[0].parent.parent / "push",
        ),
        ranks=ranks,
        **settings,
    )
    pusher.bucket_bytes = 2 * TENSOR_BYTES
    return pusher


def content(file: Path) -> dict[str, str]:
    return {name: fingerprint(tensor) for name, tensor in load_file(file).items()}


def assert_all_hold(servers, file: Path, version: int) -> None:
    for each in servers:
        state = each.state()
        held = {name: value for name, value in state["held"].items() if name != "nothing"}
        assert (held, state["weight_version"], state["paused"]) == (
            content(file),
            str(version),
            False,
        )


@pytest.mark.parametrize("transport", ["distributed", "disk"])
def test_every_receiver_has_every_tensor_and_every_source_sends_its_own(transport, files, servers):
    store = dist.HashStore()

    def push(group, rank):
        pusher = make_pusher(
            files, [each.url for each in servers], transport, Ranks(rank, group, store)
        )
        reports = [
            pusher.push(partial(export, files[version], rank), version) for version in (1, 2)
        ]
        pusher.close()
        return [(report.num_buckets, report.num_bytes, report.sent_bytes) for report in reports]

    found = run_thread_ranks(push, SOURCES)
    assert_all_hold(servers, files[2], 2)
    shares = tuple(TENSOR_BYTES * len(range(rank, TENSORS, SOURCES)) for rank in range(SOURCES))
    assert found == [[(14, TENSORS * TENSOR_BYTES, shares)] * 2] * SOURCES


@pytest.mark.parametrize("failing", [0, 2])
def test_a_source_that_fails_stops_all_and_the_next_push_heals(failing, files, servers):
    """It raises its own error; the others learn which rank it was, and their exports end, too."""
    store, exported = dist.HashStore(), Counter()

    def push(group, rank):
        ranks = Ranks(rank, group, store)
        pusher = make_pusher(files, [each.url for each in servers], "distributed", ranks)

        def damaged():
            for each in export(files[1], rank):
                exported[rank] += 1
                is_damaged = rank == failing and each.name == "layers.12.weight"
                yield each._replace(shape=(1,)) if is_damaged else each

        with pytest.raises(WeightPushError) as error:
            pusher.push(damaged, 1)
        states = [each.state() for each in servers]
        ranks.together(lambda: None, WeightPushError)  # all have seen this
        pusher.push(partial(export, files[2], rank), 2)
        pusher.close()
        return str(error.value), states

    for rank, (text, states) in enumerate(run_thread_ranks(push, SOURCES)):
        assert "exported tensor 'layers.12.weight' has shape (1,)" in text
        assert rank == failing or text.startswith(f"rank {failing}: ")
        assert all(
            state["weight_version"] == "updating to 1" and state["paused"] for state in states
        )
    assert exported == dict.fromkeys(range(SOURCES), TENSORS)
    assert_all_hold(servers, files[2], 2)


def test_digests_that_fail_on_rank_0_stop_all_ranks_after_their_exports(files):
    exported = Counter()

    def run(group, rank):
        pusher = make_pusher(
            files, ["http://127.0.0.1:9"], "distributed", Ranks(rank, group, dist.HashStore())
        )
        del pusher.expected["layers.12.weight"]

        def counted():
            for each in export(files[1], rank):
                exported[rank] += 1
                yield each._replace(source=0, tensor=torch.zeros(SHAPE) if rank == 0 else None)

        with pytest.raises(KeyError if rank == 0 else RuntimeError, match="layers.12.weight"):
            pusher._digests(counted)
        pusher.servers.close()

    run_thread_ranks(run, 3)
    assert exported == dict.fromkeys(range(3), TENSORS)


# The order of buckets -----------------------------------------------------------------------------


def test_buckets_come_in_their_order_whatever_the_order_of_those_who_wait():
    store, loaded = dist.HashStore(), []

    def run(group, rank):
        order = BucketOrder(store, "order", 20)
        for number in range(rank, 12, 3):
            if rank == 0:
                time.sleep(0.01)
            assert order.wait(number)
            loaded.append(number)
            order.done()

    run_thread_ranks(run, 3)
    assert loaded == list(range(12))


def test_a_failure_ends_every_wait():
    order = BucketOrder(dist.HashStore(), "order", 20)
    order.done()
    assert order.wait(1)
    order.fail()
    assert not order.wait(7) and not order.wait(1)
    assert order.store.add("order", 0) == FAILED + 1


def test_a_bucket_that_never_comes_is_named():
    order = BucketOrder(dist.HashStore(), "order", 0.1)
    order.done()
    with pytest.raises(
        WeightPushError,
        match=r"bucket 3 .* waited 0\.1 s for bucket 1: the rank that sends it hangs or died",
    ):
        order.wait(3)


# Who sends what -----------------------------------------------------------------------------------


def places_of(
    spec, *, pp: int, ep: int, tp: int, dp: int = 1, etp: int = 1
) -> list[RankParameters]:
    """In megatron-core's order of ranks: tensor ranks are neighbours, then data, then pipeline;
    experts likewise.
    """
    per_stage = tp * dp
    assert per_stage % (ep * etp) == 0
    layers = [
        range(spec.num_layers * stage // pp, spec.num_layers * (stage + 1) // pp)
        for stage in range(pp)
    ]
    outside = {entry.name for entry in entries(spec) if entry.layer is None}
    places = []
    for rank in range(pp * per_stage):
        stage, local = divmod(rank, per_stage)
        first = stage * per_stage
        tensor = range(first + local // tp * tp, first + local // tp * tp + tp)
        expert = range(first + local // etp * etp, first + local // etp * etp + etp)
        embedding = {name for name in outside if "embedding" in name}
        keys = {
            *layers[stage],
            *(embedding if stage == 0 else ()),
            *(outside - embedding if stage == pp - 1 else ()),
        }
        places.append(
            RankParameters(stage, local // etp % ep, tuple(tensor), tuple(expert), frozenset(keys))
        )
    return places


LAYOUTS = [
    {"pp": 1, "ep": 1, "tp": 2, "etp": 2},
    {"pp": 2, "ep": 1, "tp": 1, "dp": 2},
    {"pp": 4, "ep": 2, "tp": 1, "dp": 4},
    {"pp": 4, "ep": 8, "tp": 2, "dp": 8},
    {"pp": 2, "ep": 4, "tp": 4, "dp": 2, "etp": 2},
]


@pytest.fixture(scope="module")
def specs(tmp_path_factory):
    """The tiny families with 61 layers of 32 experts: as many as make shares comparable."""
    found = {}
    for name in ("qwen3_moe", "deepseek_v3"):
        spec = make_spec(load_hf_config(family_checkpoint(tmp_path_factory.mktemp(name), name)))
        found[name] = replace(spec, num_layers=32, num_experts=32, moe_layers=tuple(range(32)))
    return found


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_tensor_has_one_source_that_holds_it_and_shares_are_equal(family, layout, specs):
    spec = specs[family]
    table, places = list(entries(spec)), places_of(spec, **layout)
    steps = order_steps(table, assign_sources(table, places), places)
    assert sorted(step.entry.name for step in steps) == sorted(entry.name for entry in table)
    sizes, in_order = Counter(), defaultdict(list)
    for entry, ranks, source in steps:
        place = places[source]
        assert entry.place in place.keys and source in ranks
        if entry.rule.is_expert:
            assert entry.expert // (spec.num_experts // layout["ep"]) == place.ep_rank
            assert all(places[rank].ep_rank == place.ep_rank for rank in ranks), (
                "gathered over expert ranks"
            )
        assert len(ranks) == (
            1
            if entry.rule.kind == "replicated"
            else layout.get("etp", 1)
            if entry.rule.is_expert
            else layout["tp"]
        )
        sizes[source] += elements(entry)
        in_order[source].append(table.index(entry))
    assert len(sizes) == layout["pp"] * layout["ep"]
    assert max(sizes.values()) <= 1.1 * sizes.total() / len(sizes)
    assert all(order == sorted(order) for order in in_order.values())


def test_sources_alternate_and_buckets_are_equally_many(specs):
    """So no source waits for others that have sent less; the pair that servers fuse is never
    parted.
    """
    spec = specs["deepseek_v3"]
    table, places = list(entries(spec)), places_of(spec, pp=4, ep=2, tp=1, dp=4)
    steps = order_steps(table, assign_sources(table, places), places)
    stream = [
        HFTensor(name, shape, torch.bfloat16, source, None)
        for entry, _, source in steps
        for name, shape in entry.hf
    ]
    most = sum(each.num_bytes for each in stream) // 8 // 10
    found = list(batches(stream, most))
    assert sorted(each.name for batch in found for each in batch.tensors) == sorted(
        each.name for each in stream
    )
    counts = Counter(batch.source for batch in found)
    assert (
        set(counts) == {step.source for step in steps}
        and max(counts.values()) - min(counts.values()) <= 2
    )
    for batch in found:
        assert {each.source for each in batch.tensors} == {batch.source}
        assert batch.num_bytes == sum(each.num_bytes for each in batch.tensors)
        assert (
            len(batch.tensors) == 1
            or batch.num_bytes <= most + 2 * spec.hidden_size * spec.q_lora_rank
        )
        names = [each.name for each in batch.tensors]
        fused = [name for name in names if name.endswith(ONE_CALL)]
        assert len(fused) % 2 == 0
    rounds = [[batch.source for batch in found[start : start + 8]] for start in range(0, 72, 8)]
    assert all(len(set(each)) >= 6 for each in rounds), "one after the other"


def test_few_sources_are_neighbours_and_rank_0_is_the_last_one_left(specs):
    spec = specs["qwen3_moe"]
    table, places = list(entries(spec)), places_of(spec, pp=4, ep=2, tp=1, dp=2)
    steps = order_steps(table, assign_sources(table, places), places)
    sources = sorted({step.source for step in steps})
    assert sources == list(range(8))
    for most, expected in (
        (1, [0] * 8),
        (2, [0] * 4 + [4] * 4),
        (3, [0, 0, 0, 3, 3, 3, 6, 6]),
        (8, sources),
        (99, sources),
    ):
        assert [few_sources(steps, most)(source) for source in sources] == expected


@pytest.mark.parametrize("ep", [8, 32])
def test_merged_sources_never_part_the_pair_that_servers_fuse(ep):
    """Of the real model: SGLang drops both tensors without an error where two calls bring them."""
    spec = find_spec("deepseek-v3")
    table, places = list(entries(spec)), places_of(spec, pp=8, ep=ep, tp=1, dp=ep)
    steps = order_steps(table, assign_sources(table, places), places)
    sender = few_sources(steps, 16)
    stream = [
        HFTensor(name, shape, torch.bfloat16, sender(source), None)
        for entry, _, source in steps
        for name, shape in entry.hf
    ]
    for most_bytes in (512 * 2**20, 128 * 2**20):
        pairs = Counter()
        for batch in batches(stream, most_bytes, of_one_dtype=True):
            layers = Counter(
                each.name.split("self_attn")[0]
                for each in batch.tensors
                if each.name.endswith(ONE_CALL)
            )
            assert set(layers.values()) <= {2}, "half of a pair"
            pairs.update(layers.keys())
        assert len(pairs) == spec.num_layers and set(pairs.values()) == {1}


def test_the_digest_of_a_receiver_is_of_the_bytes():
    tensor = torch.arange(6.0).view(2, 3)
    assert (
        fingerprint(tensor.t())
        == hashlib.sha256(tensor.t().contiguous().numpy().tobytes()).hexdigest()
    )


def test_a_source_holds_two_buckets_beside_the_model(files):
    """Tensors that were gathered, and what is flattened for the servers: at every send, and while
    the next is gathered.
    """
    pusher = make_pusher(files, ["http://127.0.0.1:9"], "distributed", Ranks())
    live, most = {}, []

    def fresh():
        for name, tensor in sorted(load_file(files[1]).items()):
            copy = tensor.clone()
            live[name] = copy.nbytes
            weakref.finalize(copy, live.pop, name)
            yield HFTensor(name, tuple(copy.shape), copy.dtype, 0, copy)
            del copy, tensor
            most.append(sum(live.values()))

    class Transport:
        def send(self, servers, bucket, version, turn):
            flat = bucket.flat()
            assert turn()
            most.append(sum(live.values()) + flat.nbytes)
            return []

        def release_bucket(self):
            pass

    pusher.transport = Transport()
    sent = Sent()
    assert (
        pusher._send(fresh, 1, BucketOrder(dist.HashStore(), "order", 20), sent)
        == TENSORS * TENSOR_BYTES
    )
    pusher.servers.close()
    assert sent.num_buckets == TENSORS // 2
    assert pusher.bucket_bytes < max(most) <= 2 * pusher.bucket_bytes + TENSOR_BYTES


def test_a_bucket_that_servers_still_read_is_kept_until_they_have_ended(files):
    """The export fails while they load the first bucket; their call ends only after that."""
    pusher = make_pusher(files, ["http://127.0.0.1:9"], "distributed", Ranks())
    order = BucketOrder(dist.HashStore(), "order", 20)
    loading, ended = Future(), []

    def load():
        while order.store.add("order", 0) < FAILED:
            time.sleep(0.01)
        time.sleep(0.3)
        loading.set_result({})

    pusher.transport = SimpleNamespace(
        send=lambda *_: [loading], release_bucket=lambda: ended.append(("sent", loading.done()))
    )

    def failing():
        yield from islice(export(files[1], 0), 0, 3 * SOURCES, SOURCES)
        ended.append(("export", loading.done()))
        raise OSError("the shards are gone")

    with ThreadPoolExecutor(1) as threads:
        server = threads.submit(load)
        with pytest.raises(OSError, match="the shards are gone"):
            pusher._send(failing, 1, order, Sent())
        server.result()
    pusher.servers.close()
    assert ended == [("export", False), ("sent", True)]
