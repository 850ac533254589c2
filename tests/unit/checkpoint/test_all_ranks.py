"""What ranks tell one another about a save or load, with the other ranks simulated."""

from types import SimpleNamespace

import pytest
import torch.distributed as dist

from megatron_rl.checkpoint import checkpoint_loader
from megatron_rl.checkpoint.all_ranks import (
    gather_on_rank_0,
    gather_values,
    layout_name,
    on_every_rank,
    reason_of_error,
)
from megatron_rl.checkpoint.checkpointer import Checkpointer
from megatron_rl.checkpoint.folder import CheckpointError
from tests.unit.checkpoint.test_manifest import make_checkpoint


def parallel(**changes):
    sizes = dict.fromkeys(
        ("tp_size", "pp_size", "vp_size", "cp_size", "ep_size", "etp_size", "dp_size"), 1
    )
    return SimpleNamespace(**{**sizes, "rank": 0, "world_size": 1, **changes})


def test_a_layout_is_named_by_its_sizes_above_one():
    sizes = {
        "tp_size": 2,
        "pp_size": 3,
        "vp_size": 4,
        "cp_size": 5,
        "ep_size": 6,
        "etp_size": 7,
        "dp_size": 8,
    }
    assert (
        layout_name(SimpleNamespace(parallel=parallel(**sizes))) == "tp2 pp3 vp4 cp5 ep6 etp7 dp8"
    )
    assert layout_name(SimpleNamespace(parallel=parallel(ep_size=2))) == "ep2"
    assert layout_name(SimpleNamespace(parallel=parallel())) == "one rank"


def raised(*errors, explicit):
    """Return the last of the errors; each was raised while the one before was handled."""
    before = None
    for error in errors:
        error.__context__ = before
        error.__cause__ = before if explicit else None
        before = error
    return before


@pytest.mark.parametrize("explicit", [True, False], ids=["from", "while"])
def test_the_reason_of_an_error_is_the_error_of_the_file(explicit):
    full = OSError(28, "No space left on device")
    errors = (ValueError("lost"), full, KeyError("position"), RuntimeError("unexpected position"))
    assert (
        reason_of_error(raised(*errors, explicit=explicit))
        == "OSError: [Errno 28] No space left on device"
    )
    assert (
        reason_of_error(raised(ValueError("a"), RuntimeError("b"), explicit=explicit))
        == "RuntimeError: b"
    )
    assert reason_of_error(full) == "OSError: [Errno 28] No space left on device"


@pytest.fixture
def ranks(monkeypatch):
    """ranks(rank, others): this process is `rank` of three; `others` say what the last two
    gather.
    """

    def made(rank, *others):
        def all_gather(values, value):
            values[:] = [value, *others]

        def gather_object(value, values, dst=0, group=None):
            assert group == "host" and (values is None) == (rank != 0)
            if values is not None:
                values[:] = [value, *others]

        monkeypatch.setattr(dist, "get_rank", lambda: rank)
        monkeypatch.setattr(dist, "get_world_size", lambda: 3)
        monkeypatch.setattr(dist, "all_gather_object", all_gather)
        monkeypatch.setattr(dist, "gather_object", gather_object)

    return made


def test_values_of_all_ranks(ranks):
    ranks(0, "b", "c")
    assert gather_values("a") == gather_on_rank_0("a", "host") == ["a", "b", "c"]
    ranks(1, "b", "c")
    assert gather_on_rank_0("b", "host") == []


def test_an_error_of_any_rank_is_raised_on_all_of_them(ranks):
    ranks(2, None, None)
    assert on_every_rank(lambda: "result") == "result"
    with pytest.raises(CheckpointError, match="^rank 2: OSError: full$"):
        on_every_rank(lambda: write_in_vain())
    ranks(2, None, "rank 1: ValueError: x")
    with pytest.raises(CheckpointError, match="^rank 1: ValueError: x$"):
        on_every_rank(lambda: "result")


def write_in_vain():
    raise OSError("full")


def test_a_background_save_is_completed_once_every_rank_has_written(ranks):
    waited = []
    saver = SimpleNamespace(_pending=None, wait=lambda: waited.append(1))
    ranks(0, True, True)
    Checkpointer.poll(saver)
    saver._pending = SimpleNamespace(outcome=None)
    Checkpointer.poll(saver)
    saver._pending.outcome = "written"
    ranks(0, True, False)
    Checkpointer.poll(saver)
    assert not waited
    ranks(0, True, True)
    Checkpointer.poll(saver)
    assert waited == [1]


def test_every_rank_checks_its_share_of_the_files(ranks, tmp_path, monkeypatch):
    """The large files are spread over the ranks; damage that several found is listed once."""
    path = make_checkpoint(tmp_path)
    shares = []
    monkeypatch.setattr(
        checkpoint_loader,
        "damage",
        lambda path, manifest, names: shares.append(list(names)) or ["a"],
    )
    ranks(0, ["b", "a"], ["c"])
    for rank in (0, 1, 2):
        engine = SimpleNamespace(parallel=parallel(rank=rank, world_size=3))
        manifest, lines = checkpoint_loader.inspect_files(engine, path)
        assert manifest.facts["step"] == 1 and lines == ["a", "b", "c"]
    assert shares == [
        ["__0_0.distcp", "rng_00000.safetensors", "common.pt"],
        ["__0_1.distcp", "state.json", "metadata.json"],
        ["__1_0.distcp", ".metadata"],
    ]
