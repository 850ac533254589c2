"""A saved mini-batch holds all that its update is computed from.

Other layouts: tests/dist/test_saved_batches.py.
"""

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from megatron_rl.batch.split import make_mini_batch
from megatron_rl.checkpoint.batches import bundle as bundle_module
from megatron_rl.checkpoint.batches import bundle_header, bundle_writer
from megatron_rl.checkpoint.batches.bundle import Bundle
from megatron_rl.checkpoint.batches.bundle_header import read_header
from megatron_rl.checkpoint.batches.bundle_sequences import BundleError
from megatron_rl.checkpoint.batches.bundle_writer import BundleNote, results_of, write_bundle
from megatron_rl.checkpoint.folder import CheckpointError
from megatron_rl.metrics.reduce import MetricSums
from tests.dist.engines import make_engine, random_batch
from tests.tiny import random_checkpoint

LOSSES = {"R3": {"kl_coef": 0.1}, "R2": {}, "none": {"name": "rspo", "shift_floor": 0.2}}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The default group of one rank, and a model of two layers."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield random_checkpoint(tmp_path_factory.mktemp("bundle") / "moe", num_hidden_layers=2)
    dist.destroy_process_group()


@pytest.fixture(scope="module", params=LOSSES)
def computed(request, checkpoint):
    """(folder, engine, batch, old-logprob pass, results) of the second update of a step."""
    mode, folder = request.param, checkpoint.parent / request.param / "last"
    engine = make_engine(checkpoint, replay=mode, loss=LOSSES[mode])
    batches = [mini_batch(engine, number) for number in (0, 1)]
    passes = [engine.old_logprobs(batch, MetricSums(), replay=mode) for batch in batches]
    engine.update(batches[0], passes[0], MetricSums(), replay=mode)
    results = compute(engine, batches[1], passes[1])
    write(folder, engine, batches[1], passes[1], results, with_weights=mode == "R3")
    yield folder, engine, batches[1], passes[1], results
    engine.parallel.destroy()


@pytest.fixture
def saved(computed, tmp_path):
    """The same with a copy of the folder."""
    folder, *others = computed
    shutil.copytree(folder, tmp_path / "batches/last")
    return tmp_path / "batches/last", *others


def mini_batch(engine, number):
    """Make a mini-batch whose micro-batches have up to seven sequences."""
    samples = [
        sample for part in random_batch(engine, seed=number, layers=2).samples for sample in part
    ]
    rule, group = engine.pack_rule, engine.parallel.dp_group
    batch = make_mini_batch(samples, max_tokens=64, rule=rule, dp_group=group)
    assert max(map(len, batch.samples)) > 2 and len(batch.samples) > 1
    return replace(batch, index=number, policy_version=5)


def compute(engine, batch, old):
    sums = MetricSums()
    grad_norm = engine.compute_gradient(batch, old, sums, replay=engine.cfg.replay.mode)
    return results_of(engine, sums.reduce(dist.group.WORLD, engine.parallel.device), grad_norm)


def write(folder, engine, batch, old, results, *, with_weights=False):
    note = BundleNote(3, "a test", with_weights, "elsewhere", rollouts_of="runs/other")
    write_bundle(folder, engine, batch, old, results, note)


def test_it_gives_loss_gradient_and_metrics_again(saved):
    folder, engine, batch, _, results = saved
    bundle = Bundle(folder, engine)
    assert bundle.is_same_layout and bundle.is_exact and bundle.replay == engine.cfg.replay.mode
    again, old_again = bundle.load()
    sizes = ("index", "num_responses", "num_response_tokens", "policy_version")
    assert [getattr(again, name) for name in sizes] == [getattr(batch, name) for name in sizes]
    ids = [
        [[sample.rollout.id for sample in part] for part in loaded.samples]
        for loaded in (again, batch)
    ]
    assert ids[0] == ids[1]
    assert (
        compute(engine, again, old_again) == results
        and results.loss == results.metrics["train/loss"]
    )
    text = (folder / "bundle.json").read_text()
    header = json.loads(text)
    assert text == json.dumps(header, indent=1) + "\n", "people read it, too"
    assert (header["step"], header["update"], header["reason"]) == (3, 1, "a test")
    assert header["rollouts_of"] == "runs/other"
    assert header["loss"] == results.loss and header["grad_norm"] == results.grad_norm
    assert header["metrics"] == results.metrics and header["gradients"] == results.gradients
    assert header["config"]["replay"]["mode"] == engine.cfg.replay.mode
    has_weights = (folder / "weights/model.safetensors.index.json").exists() or (
        folder / "weights/config.json"
    ).exists()
    assert has_weights == (header["weights"] == "weights") == (engine.cfg.replay.mode == "R3")
    assert header["weights"] in ("weights", "elsewhere") and [
        path.name for path in folder.parent.iterdir()
    ] == ["last"]


def test_in_another_layout_it_is_packed_again(saved):
    """The header says another layout; R2's record is then replayed as R3 replays a rollout's."""
    folder, engine, batch, _, results = saved
    header = json.loads((folder / "bundle.json").read_text())
    (folder / "bundle.json").write_text(json.dumps(header | {"layout": "tp2"}))
    bundle = Bundle(folder, engine)
    mode = engine.cfg.replay.mode
    assert (
        not bundle.is_same_layout
        and not bundle.is_exact
        and bundle.replay == ("R3" if mode == "R2" else mode)
    )
    again, old_again = bundle.load()
    assert (again.index, again.policy_version, again.num_responses) == (1, 5, batch.num_responses)
    sums = MetricSums()
    grad_norm = engine.compute_gradient(again, old_again, sums, replay=bundle.replay)
    metrics = sums.reduce(dist.group.WORLD, engine.parallel.device)
    assert grad_norm == pytest.approx(results.grad_norm, rel=1e-5)
    assert metrics["train/loss"] == pytest.approx(results.loss, rel=1e-5, abs=1e-7)
    rollouts = [
        {s.rollout.id: s.rollout for part in b.samples for s in part} for b in (batch, again)
    ]
    assert rollouts[0].keys() == rollouts[1].keys()
    for name, rollout in rollouts[0].items():
        assert (rollouts[1][name].tokens == rollout.tokens).all()
        if mode == "R3":
            assert np.array_equal(rollouts[1][name].routed_experts, rollout.routed_experts)


def test_the_same_layout_has_the_same_stages_and_sequence_parallelism(saved):
    folder, engine, *_ = saved
    header = json.loads((folder / "bundle.json").read_text())
    for change in ({"layers_per_stage": [1, 1], "pp": 2}, {"sequence_parallel": True, "tp": 2}):
        config = header["config"] | {"parallel": header["config"]["parallel"] | change}
        (folder / "bundle.json").write_text(json.dumps(header | {"config": config}))
        assert not Bundle(folder, engine).is_same_layout
    (folder / "bundle.json").write_text(json.dumps(header | {"ranks": 2}))
    assert not Bundle(folder, engine).is_same_layout
    (folder / "bundle.json").write_text(json.dumps(header | {"device": "another GPU"}))
    assert Bundle(folder, engine).is_same_layout and not Bundle(folder, engine).is_exact


def test_it_replaces_the_one_before_and_leaves_nothing_where_it_fails(saved, monkeypatch):
    folder, engine, batch, old, results = saved
    (folder / "old").write_text("")
    part = folder.parent / ".last.part"
    part.mkdir()
    (part / "of a write that was killed").write_text("")
    write(folder, engine, batch, old, replace(results, grad_norm=7.0))
    assert read_header(folder)["grad_norm"] == 7.0
    names = {path.name for path in folder.iterdir()}
    assert names == {"bundle.json", "replica_00000.safetensors", "rank_00000.safetensors"}
    write_rank = bundle_writer.write_rank

    def on_a_full_disk(*args):
        write_rank(*args)
        Path("/dev/full").write_text("x")

    with pytest.raises(CheckpointError, match="rank 0: .*Not a directory"):
        write(folder / "bundle.json/last", engine, batch, old, results)
    monkeypatch.setattr(bundle_writer, "write_rank", on_a_full_disk)
    with pytest.raises(CheckpointError, match="rank 0: OSError.*No space"):
        write(folder, engine, batch, old, results)
    assert read_header(folder)["grad_norm"] == 7.0 and [
        path.name for path in folder.parent.iterdir()
    ] == ["last"]


def test_each_rank_writes_its_part_and_rank_0_what_is_of_all(saved, tmp_path, monkeypatch):
    folder, engine, batch, old, results = saved
    monkeypatch.setattr(engine, "parallel", replace(engine.parallel, rank=1))
    # safetensors takes contiguous tensors alone
    strided = [value.repeat_interleave(2)[::2] for value in old.logprobs]
    bundle_writer.write_rank(tmp_path, engine, batch, replace(old, logprobs=strided))
    assert [path.name for path in tmp_path.glob("*.safetensors")] == ["rank_00001.safetensors"], (
        "not a replica's leader"
    )
    calls = []
    bundle_writer.call_on_rank_0(lambda: calls.append(0))
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    bundle_writer.call_on_rank_0(lambda: calls.append(1))
    assert calls == [0]
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(bundle_writer, "write_rank", lambda *args: 1 / 0)
    with pytest.raises(CheckpointError, match="ZeroDivisionError"):
        write(folder, engine, batch, old, results)
    assert (folder.parent / ".last.part").exists(), "rank 0 removes it"


def test_a_stage_without_logits_or_routers_loads_none(saved, monkeypatch):
    folder, engine, *_ = saved
    header = json.loads((folder / "bundle.json").read_text())
    (folder / "bundle.json").write_text(json.dumps(header | {"layout": "tp2"}))
    last = Bundle(folder, engine).load()[1]
    parallel = replace(engine.parallel)
    object.__setattr__(parallel, "pp_size", 2)
    monkeypatch.setattr(engine, "parallel", parallel)
    first = Bundle(folder, engine).load()[1]
    assert last.logprobs and not first.logprobs and first.reference is None
    assert (last.reference is None) == (engine.cfg.loss.kl_coef == 0)
    if engine.cfg.loss.switches.router_shift:
        assert len(first.router.kept) == len(last.router.kept) > 0
        monkeypatch.setattr(engine, "layout", SimpleNamespace(layers=()))
        assert Bundle(folder, engine)._router_record([[], []], 2).kept == {}


@pytest.mark.parametrize("layout", ["one rank", "tp2"])
def test_counts_are_those_of_the_header(saved, layout):
    """Of all replicas."""
    folder, engine, *_ = saved
    header = json.loads((folder / "bundle.json").read_text())
    changes = {
        "layout": layout,
        "update": 7,
        "num_responses": 99,
        "num_response_tokens": 999,
        "policy_version": 8,
    }
    (folder / "bundle.json").write_text(json.dumps(header | changes))
    batch, _ = Bundle(folder, engine).load()
    counts = [batch.index, batch.num_responses, batch.num_response_tokens, batch.policy_version]
    assert counts == [7, 99, 999, 8]


def test_what_belongs_to_routers_has_their_rows(saved):
    """Sequence-parallel ranks have other rows there."""
    folder, *_ = saved
    layout = SimpleNamespace(
        model_rows=lambda bounds: ("model", bounds), router_rows=lambda bounds: ("router", bounds)
    )
    bundle = Bundle(folder, SimpleNamespace(layout=layout))
    kinds = ("logprobs", "reference", "flips", "recorded 3", "router_ids 3", "router_logprobs 3")
    assert [bundle._rows(kind, 7) for kind in kinds] == [("model", 7)] * 3 + [("router", 7)] * 3


def test_tokens_without_a_route_leave_the_loss_where_that_is_configured(saved, monkeypatch):
    folder, engine, *_ = saved
    packed = []

    def pack(samples, rows, **how):
        packed.append(how)
        return pack_as_ever(samples, rows, **how)

    pack_as_ever = bundle_module.pack
    monkeypatch.setattr(bundle_module, "pack", pack)
    for mask in (False, True):
        monkeypatch.setattr(
            engine, "pack_rule", replace(engine.pack_rule, mask_missing_routes=mask)
        )
        packed.clear()
        assert len(Bundle(folder, engine).load()[0].micro_batches) == len(packed)
        assert packed == [{"mask_missing_routes": mask}] * len(packed)


def test_what_is_no_complete_bundle_is_named(saved):
    folder, engine, *_ = saved
    header, text = (
        json.loads((folder / "bundle.json").read_text()),
        (folder / "bundle.json").read_text(),
    )

    def refused(message, load=lambda: read_header(folder)):
        with pytest.raises(BundleError, match=message):
            load()

    (folder / "bundle.json").write_text(json.dumps(header | {"version": 9}))
    refused(r"bundle\.json: version 9, must be 1; use the program that wrote it")
    (folder / "bundle.json").write_text(
        json.dumps({key: header[key] for key in header if key != "loss"})
    )
    refused(r"bundle.json: keys are missing: loss; save the mini-batch again")
    (folder / "bundle.json").write_text("{")
    refused("not a saved mini-batch.*name a folder of RUN/batches")
    without_age = {key: header[key] for key in header if key != "policy_version"}
    (folder / "bundle.json").write_text(json.dumps(without_age))
    assert Bundle(folder, engine).load()[0].policy_version is None, "an earlier version wrote none"
    (folder / "bundle.json").write_text(json.dumps(header | {"layout": "tp2"}))
    values = load_file(folder / "rank_00000.safetensors")
    if engine.cfg.loss.switches.router_shift:
        kept = {
            key: value
            for key, value in values.items()
            if not key.endswith((":router_ids", ":router_logprobs"))
        }
        save_file(kept, folder / "rank_00000.safetensors")
        refused(
            "no router probabilities, which loss.router_shift = true needs",
            Bundle(folder, engine).load,
        )
        (folder / "bundle.json").write_text(text)
        refused(
            "no router probabilities, which loss.router_shift = true needs",
            Bundle(folder, engine).load,
        )
    if engine.cfg.replay.mode == "R2":
        save_file(
            {key: value for key, value in values.items() if "recorded" not in key},
            folder / "rank_00000.safetensors",
        )
        refused("no recorded experts; replay.mode = R2 needs them", Bundle(folder, engine).load)
    (folder / "rank_00000.safetensors").unlink()
    for layout in ("tp2", header["layout"]):
        (folder / "bundle.json").write_text(json.dumps(header | {"layout": layout}))
        refused(
            r"rank_00000.safetensors: cannot be read.*copy it again", Bundle(folder, engine).load
        )


def test_the_digest_of_gradients_is_of_every_bit(saved):
    _, engine, *_ = saved
    content = hashlib.blake2b(digest_size=16)
    for parameter in (weight for model in engine.models for weight in model.parameters()):
        content.update(parameter.main_grad.numpy().tobytes())
    before = results_of(engine, {}, 1.0).gradients
    assert before == [content.hexdigest()]
    parameter = next(iter(engine.models[0].parameters()))
    parameter.main_grad.view(-1)[3] += torch.finfo(torch.float32).tiny
    assert results_of(engine, {}, 1.0).gradients != before
    assert results_of(engine, {"x": float("nan"), "a": 1.0}, float("inf")).metrics == {
        "a": 1.0,
        "x": None,
    }
    assert results_of(engine, {}, float("inf")).grad_norm is None


def test_the_device_is_named_by_its_model(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"model of {device}")
    names = [
        bundle_header.device_name(
            SimpleNamespace(parallel=SimpleNamespace(device=torch.device(name)))
        )
        for name in ("cpu", "cuda:1")
    ]
    assert names == ["cpu", "model of cuda:1"]
