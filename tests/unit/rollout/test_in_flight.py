"""Rollouts in a checkpoint: what is read is what was written; each group reaches the replica of its
prompt.
"""

import json

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from megatron_rl.data.prompts import PromptSource
from megatron_rl.records import Prompt, Rollout
from megatron_rl.rollout.group import Group
from megatron_rl.rollout.group_files import (
    copied,
    file_name,
    find_groups,
    read_groups,
    write_groups,
)

PROMPTS = [Prompt(f"p{n}", "", (n, n + 1), "") for n in range(24)]


def rollout(number: int, index: int, *, cut: bool = False, has_gap: bool = False) -> Rollout:
    rng = np.random.default_rng([number, index])
    size = int(rng.integers(3, 9))
    # layer-major in memory
    routes = rng.integers(0, 200, (3, 1 + size, 2), dtype=np.uint8).transpose(1, 0, 2)
    gaps = np.arange(1 + size) == size // 2
    return Rollout(
        id=f"p{number}/{index}",
        tokens=np.array([number, number + 1, *rng.integers(0, 50, size)]),
        prompt_length=2,
        rollout_logprobs=rng.normal(size=size).astype(np.float32),
        routed_experts=routes,
        finish_reason="abort" if cut else "stop",
        policy_versions=np.sort(rng.integers(0, 3, size)).astype(np.int32),
        missing_routes=gaps if has_gap else None,
    )


def group(number: int) -> Group:
    made = Group(PROMPTS[number], 3)
    made.put(0, rollout(number, 0, has_gap=True))
    made.put(2, rollout(number, 2, cut=True))
    return made


def assert_same(found: Group, expected: Group) -> None:
    assert (found.prompt, found.size) == (expected.prompt, expected.size)
    for mine, theirs in ((found.rollouts, expected.rollouts), (found.prefixes, expected.prefixes)):
        assert mine.keys() == theirs.keys()
        for index, rollout in mine.items():
            for name, value in vars(theirs[index]).items():
                got = getattr(rollout, name)
                same = (
                    np.array_equal(got, value) and got.dtype == value.dtype
                    if isinstance(value, np.ndarray)
                    else got == value
                )
                assert same, name
            assert rollout.routed_experts.transpose(1, 0, 2).flags.c_contiguous, (
                "layer-major, as replay needs it"
            )


@pytest.mark.parametrize("readers", [1, 2, 3, 4, 6])
def test_every_group_reaches_the_replica_that_will_get_its_prompt(readers, tmp_path):
    """Written by 2 replicas, 12 prompts to come; of those some have nothing in flight.

    Prompt i goes to replica i % readers.
    """
    order = [11, 4, 7, 0, 2, 9, 5, 22, 23, 21, 20, 1]
    started = [4, 7, 0, 9, 5, 1]
    for replica in range(2):
        mine = [number for number in order[replica::2] if number in started]
        write_groups(tmp_path / file_name(replica), [group(number) for number in mine], mine)
    found = [
        read_groups(find_groups(tmp_path), PROMPTS, order, slice(r, None, readers))
        for r in range(readers)
    ]
    for replica, groups in enumerate(found):
        assert [each.prompt.id for each in groups] == [
            f"p{n}" for n in order[replica::readers] if n in started
        ]
    for each in (each for groups in found for each in groups):
        assert_same(each, group(int(each.prompt.id[1:])))


def test_a_prompt_that_comes_twice_has_two_groups(tmp_path):
    first, second = Group(PROMPTS[3], 1), Group(PROMPTS[3], 1)
    first.put(0, rollout(3, 0))
    second.put(0, rollout(3, 1))
    write_groups(tmp_path / file_name(0), [first, second], [3, 3])
    both = read_groups(find_groups(tmp_path), PROMPTS, [3, 8, 3], slice(None))
    assert [each.rollouts[0].id for each in both] == ["p3/0", "p3/1"]
    (one,) = read_groups(find_groups(tmp_path), PROMPTS, [3, 8, 3], slice(1, None, 2)) or [None]
    assert one is None


def test_routes_of_another_response_are_refused(tmp_path):
    path = tmp_path / file_name(0)
    write_groups(path, [group(3), group(4)], [3, 4])
    with safe_open(path, "numpy") as file:
        about = file.metadata()
    tensors = load_file(path)
    tensors["0/0:tokens"], tensors["1/0:tokens"] = tensors["1/0:tokens"], tensors["0/0:tokens"]
    save_file(tensors, path, metadata=about)
    with pytest.raises(ValueError, match="rollout p3/0: digest of tokens and routed experts"):
        read_groups(find_groups(tmp_path), PROMPTS, [3, 4], slice(None))


def test_a_file_of_version_0_1_is_read(tmp_path):
    """Lists in place of headers, other names of arrays, routes with layers first."""
    path = tmp_path / file_name(0)
    write_groups(path, [group(4)], [4])
    with safe_open(path, "numpy") as file:
        (about,) = json.loads(file.metadata()["groups"])
    former = {"routed_experts": "routes", "routes_digest": "digest", "missing_routes": "gaps"}
    tensors = {}
    for name, value in load_file(path).items():
        place, kind = name.split(":")
        value = (
            np.ascontiguousarray(value.transpose(1, 0, 2)) if kind == "routed_experts" else value
        )
        tensors[f"{place}:{former.get(kind, kind)}"] = value
    keys = ("index", "id", "prompt_length", "finish_reason", "versions")
    about["responses"] = [[each[key] for key in keys] for each in about["responses"]]
    save_file(tensors, path, metadata={"groups": json.dumps([about])})
    (found,) = read_groups(find_groups(tmp_path), PROMPTS, [4], slice(None))
    assert_same(found, group(4))


def test_a_copy_does_not_change_while_sampling_continues():
    mine = group(5)
    (kept,) = copied([mine, mine])
    mine.put(1, rollout(5, 1))
    mine.put(2, rollout(5, 2))
    assert_same(kept, group(5))


def test_peeking_does_not_move_the_source():
    source = PromptSource(PROMPTS, seed=1, shuffle=True)
    source.load_state_dict(source.state_dict(first=source.take(20)[:3]))
    state, seen = source.state_dict(), source.peek(30)
    assert source.state_dict() == state and source.numbers(source.take(30)) == seen
