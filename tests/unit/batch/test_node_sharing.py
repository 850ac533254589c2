"""One copy of a replica's rollouts per node: what the ranks of a node map, and when it ends."""

import gc
import os
import weakref
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_rl.batch.transfer import exchange, in_node_memory, share_groups
from megatron_rl.distributed import node_ranks as module
from megatron_rl.distributed.node_ranks import NodeFile, NodeMemory, NodeRanks, file_of
from megatron_rl.rollout.group import Group
from megatron_rl.rollout.scheduler import Scheduler
from tests.thread_ranks import node_ranks, run_thread_ranks, subgroup
from tests.unit.batch.rollouts import make_groups
from tests.unit.batch.test_replicas import fields_of, fields_of_sample, make_samples


def shared_bytes(monkeypatch):
    """The sizes of all files that are made from now on."""
    sizes = []
    create = NodeFile.create.__func__
    monkeypatch.setattr(
        NodeFile, "create", classmethod(lambda cls, size: sizes.append(size) or create(cls, size))
    )
    return sizes


def inode(array):
    """Return the inode of the file that an array is mapped from."""
    file = file_of(array)
    address = array.__array_interface__["data"][0]
    with open("/proc/self/maps") as maps:
        for line in maps:
            low, high = (int(value, 16) for value in line.split()[0].split("-"))
            if low <= address < high:
                return file is not None and line.split()[4]
    return None


@pytest.mark.parametrize(
    ("firsts", "copies"),
    [((0, 0, 0), 1), ((0, 0, 2), 2), ((0, 1, 1), 2), ((0, 1, 0), 2), ((0, 1, 2), 3)],
)
def test_the_ranks_of_a_node_map_one_copy(firsts, copies):
    groups = make_groups(2, 2)
    prompts = [group.prompt for group in groups]

    def share(group, rank):
        return share_groups(groups if rank == 0 else None, prompts, node_ranks(group, firsts))

    results = run_thread_ranks(share, 3)
    for place in range(2):
        for index in range(2):
            ids = [shared[place].rollouts[index].routed_experts for shared in results]
            files = {
                # alone on its node, the leader needs no file
                "private" if file_of(one) is None else inode(one)
                for one in ids
            }
            assert len(files) == copies
            assert all(np.array_equal(one, ids[0]) for one in ids)
            mapped = [one for one in ids if file_of(one) is not None]
            assert not any(one.flags.writeable for one in mapped)
            # layer-major, so that a rank copies its layers as one piece
            assert all(one.transpose(1, 0, 2).flags.c_contiguous for one in mapped)


def test_routes_that_a_node_shares_are_not_copied_again(monkeypatch):
    (group,) = make_groups(1, 3)
    node = NodeRanks(None, (0, 0), None)
    monkeypatch.setattr(NodeRanks, "is_alone", False)
    first = [in_node_memory(rollout, node) for rollout in group.rollouts]
    assert [fields_of(r) for r in first] == [fields_of(r) for r in group.rollouts]
    renamed = [replace(rollout, id=f"{rollout.id}#2") for rollout in first]
    used = node.memory.used
    again = [in_node_memory(rollout, node) for rollout in renamed]
    assert node.memory.used == used
    assert all(a.routed_experts is b.routed_experts for a, b in zip(first, again, strict=True))
    monkeypatch.setattr(NodeRanks, "is_alone", True)
    assert in_node_memory(group.rollouts[0], node) is group.rollouts[0]


def test_an_episodes_earlier_sequences_are_shared_too(monkeypatch):
    (group,) = make_groups(1, 3)
    last = group.rollouts[2].after(group.rollouts[:2])
    monkeypatch.setattr(NodeRanks, "is_alone", False)
    shared = in_node_memory(last, NodeRanks(None, (0, 0), None))
    assert [fields_of(r) for r in shared.sequences] == [fields_of(r) for r in last.sequences]
    assert all(file_of(r.routed_experts) is not None for r in shared.sequences)


@pytest.mark.parametrize("firsts", [(0, 0), (0, 1)])
def test_samples_of_another_replica_arrive_once_on_a_node(firsts, monkeypatch):
    """Two replicas of two ranks; each is on one node, or on two."""
    samples = [make_samples(5, 1), make_samples(4, 2, kind="missing")]
    to = [[0, 1, 1, 0, 1], [1, 0, 1, 0]]

    def deal(world, rank):
        replica, place = divmod(rank, 2)
        replicas = subgroup(world, [place, 2 + place], f"place {place}")
        ranks = subgroup(world, [2 * replica, 2 * replica + 1], f"replica {replica}")
        node = node_ranks(ranks, firsts)
        # as the samples of its replica are the same on every rank
        return exchange(samples[replica], to[replica], replicas, node)

    sizes = shared_bytes(monkeypatch)
    results = run_thread_ranks(deal, 4)
    for replica, (first, second) in enumerate((results[:2], results[2:])):
        other = 1 - replica
        expected = [
            [s for s, where in zip(samples[o], to[o], strict=True) if where == replica]
            for o in range(2)
        ]
        for arrived in (first, second):
            assert [[fields_of_sample(s) for s in part] for part in arrived] == [
                [fields_of_sample(s) for s in part] for part in expected
            ]
        routes = [part[other][0].rollout.routed_experts for part in (first, second)]
        one_node = firsts == (0, 0)
        assert [file_of(one) is not None for one in routes] == [one_node] * 2
        assert (inode(routes[0]) == inode(routes[1]) is not False) == one_node
    arriving = [size for size in sizes if size > 100]  # smaller ones tell the places
    assert len(arriving) == (2 if firsts == (0, 0) else 0)


def test_memory_ends_with_the_last_array_and_has_no_name():
    gc.collect()  # files of earlier tests
    before, names = len(os.listdir("/proc/self/fd")), os.listdir("/dev/shm")
    memory = NodeMemory()
    array = memory.copy(np.arange(10))
    mapped = NodeFile.open(memory.file.place)
    other = mapped.array(0, np.int64, (10,))
    assert os.listdir("/dev/shm") == names
    del memory, mapped
    gc.collect()
    assert array.tolist() == other.tolist() == list(range(10))
    with pytest.raises(ValueError, match="read-only"):
        other[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1
    del array, other
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_files_are_filled_one_after_the_other(monkeypatch):
    monkeypatch.setattr(module, "FILE_BYTES", 200)
    sizes, memory = shared_bytes(monkeypatch), NodeMemory()
    arrays = [np.full(size, size % 256, np.uint8) for size in (100, 65, 1, 300, 8)]
    copies = [memory.copy(array) for array in arrays]
    assert sizes == [200, 200, 300, 200]
    assert [copy.tolist() for copy in copies] == [array.tolist() for array in arrays]
    assert all(copy.ctypes.data % 64 == 0 for copy in copies)


def test_a_file_that_cannot_be_mapped_names_the_setting(monkeypatch):
    file = NodeFile.create(10)
    pid, fd, number, size = file.place
    for place, why in (
        ((pid, fd, number + 1, size), "is another file"),
        ((pid, 10_000, number, size), "No such file"),
    ):
        with pytest.raises(RuntimeError, match=f"{why}.*parallel.share_host_memory = false"):
            NodeFile.open(place)

    def too_many(name):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", too_many)
    with pytest.raises(RuntimeError, match="Too many open files.*ulimit -n.*share_host_memory"):
        NodeFile.create(10)


def test_ranks_of_one_machine_are_a_node():
    assert module.node_name() == module.node_name() and len(module.node_name()) == 8
    assert module.firsts_of([b"a", b"b", b"a", b"b", b"c"]) == (0, 1, 0, 1, 4)


@pytest.mark.parametrize("is_alone", [True, False])
def test_a_group_that_closes_moves_its_routes_once(is_alone, monkeypatch):
    """The scheduler keeps the group, and a checkpoint of an abandoned step saves it."""
    monkeypatch.setattr(NodeRanks, "is_alone", is_alone)
    (of_step,) = make_groups(1, 3)
    group = Group(of_step.prompt, 3, dict(enumerate(of_step.rollouts)))
    private = [weakref.ref(rollout.routed_experts) for rollout in of_step.rollouts]
    scheduler = Scheduler(*[None] * 6)
    scheduler.parallel = SimpleNamespace(node=NodeRanks(None, (0, 0), None))
    closed, expected = scheduler.rollout_group(group), [fields_of(r) for r in of_step.rollouts]
    assert [fields_of(r) for r in closed.rollouts] == expected
    for index, rollout in enumerate(closed.rollouts):
        assert group.rollouts[index] is rollout
        assert (file_of(rollout.routed_experts) is None) == is_alone
    del of_step, rollout, closed
    assert [array() is None for array in private] == [not is_alone] * 3
    group.scored = "scored"
    assert scheduler.rollout_group(group) == "scored"
