"""Every family with TransformerEngine's layers: load, export, save, load, convert, replay hook,
recompute.
"""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from megatron.core.tensor_parallel import checkpoint as recomputed
from megatron.core.transformer.moe import moe_utils
from safetensors.torch import load_file

from megatron_rl.checkpoint.torch_dist.chunk_reader import TorchDist
from megatron_rl.checkpoint.torch_dist.safe_checkpoint import SafeCheckpoint
from megatron_rl.checkpoint.torch_dist.shard_writer import Planner, write_common
from megatron_rl.config import ParallelConfig
from megatron_rl.distributed import make_parallel
from megatron_rl.engine.latent_attention import LATENT_EPS
from megatron_rl.engine.model import moe_routers
from megatron_rl.plan.memory import rank_parameters
from megatron_rl.replay.manager import ReplayManager, Routes
from megatron_rl.weights.hf.load import load_hf
from megatron_rl.weights.hf.mapping import local_parameters
from megatron_rl_tools.convert.convert_hf import main
from tests.dist.launch import run_ranks
from tests.exported import export_hf
from tests.families import FAMILIES, family_checkpoint
from tests.te.layers import build
from tests.unit.plan.test_refusals import rank_of

TE_KEYS = json.loads((Path(__file__).parents[1] / "fixtures/te_keys.json").read_text())
ROWS = 6


@pytest.fixture
def parallel():
    groups = make_parallel(ParallelConfig(), device="cpu", timeout_minutes=2)
    yield groups
    groups.destroy()


def save(chunk, folder, parallel) -> None:
    """As a run saves it."""
    folder.mkdir()
    write_common(folder)
    shards = Planner(parallel.dp_cp_group).plan({"model0": chunk.sharded_state_dict()}, folder)
    shards.stage(copy=False)
    shards.write_metadata([shards.write()])


def same_parameters(one, other, spec) -> None:
    here, there = (local_parameters([chunk], spec, 0, 1) for chunk in (one, other))
    assert (
        here.keys() == there.keys()
        and [name for name in here if not here[name].equal(there[name])] == []
    )


def from_megatron(chunk, folder) -> None:
    chunk.load_state_dict(SafeCheckpoint(folder).load(chunk.sharded_state_dict()))


@pytest.mark.parametrize("name", FAMILIES)
def test_load_export_save_and_load(tmp_path, parallel, name):
    """HF -> TE -> HF; TE -> checkpoint -> TE, local; local -> checkpoint -> TE: bit-exact, under
    the recorded names.
    """
    hf = family_checkpoint(tmp_path / "hf", name)
    (chunk,), spec, config = build(hf, parallel, te=True)
    assert config.transformer_impl == "transformer_engine"
    load_hf([chunk], hf, spec, parallel)
    exported, original = (
        dict(export_hf([chunk], spec, parallel)),
        load_file(hf / "model.safetensors"),
    )
    assert exported.keys() == original.keys()
    assert [key for key, tensor in original.items() if not tensor.equal(exported[key])] == []
    (local,), (empty,) = build(hf, parallel, te=False)[0], build(hf, parallel, te=True)[0]
    save(chunk, tmp_path / "te", parallel)
    assert (
        sorted(
            TorchDist(tmp_path / "te").metadata.state_dict_metadata.keys() - extra(tmp_path / "te")
        )
        == TE_KEYS[name]
    )
    from_megatron(empty, tmp_path / "te")
    same_parameters(chunk, empty, spec)
    from_megatron(local, tmp_path / "te")
    same_parameters(chunk, local, spec)
    save(local, tmp_path / "local", parallel)
    (again,) = build(hf, parallel, te=True)[0]
    from_megatron(again, tmp_path / "local")
    same_parameters(chunk, again, spec)


def extra(folder) -> set[str]:
    return {key for key in TorchDist(folder).metadata.state_dict_metadata if "_extra_state" in key}


@pytest.mark.parametrize("name", FAMILIES)
def test_convert(tmp_path, name):
    """A checkpoint of TransformerEngine's layers -> HF; HF -> checkpoint -> TransformerEngine's
    layers: bit-exact.
    """
    hf, megatron, back = (
        family_checkpoint(tmp_path / "hf", name),
        tmp_path / "te",
        tmp_path / "back",
    )
    groups = make_parallel(ParallelConfig(), device="cpu", timeout_minutes=2)
    try:
        (chunk,), spec, _ = build(hf, groups, te=True)
        load_hf([chunk], hf, spec, groups)
        save(chunk, megatron, groups)
    finally:
        groups.destroy()
    assert (
        main(
            ["megatron-to-hf", "--megatron", str(megatron), "--config", str(hf), "--out", str(back)]
        )
        == 0
    )
    original, found = (load_file(next(folder.glob("*.safetensors"))) for folder in (hf, back))
    assert original.keys() == found.keys()
    assert [key for key, tensor in original.items() if not tensor.equal(found[key])] == []
    shutil.rmtree(megatron)
    assert main(["hf-to-megatron", "--hf", str(hf), "--out", str(megatron)]) == 0
    groups = make_parallel(ParallelConfig(), device="cpu", timeout_minutes=2)
    try:
        (loaded,), _, _ = build(hf, groups, te=True)
        from_megatron(loaded, megatron)
        same_parameters(chunk, loaded, spec)
    finally:
        groups.destroy()


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "qwen3"])
def test_replay_hook_and_recompute(tmp_path, parallel, monkeypatch, name):
    """Routers of TransformerEngine's MoE layers use the replayed experts, in the forward and when
    they run again.

    Their logits are torch's here: TransformerEngine's matrix product needs a GPU.
    """
    monkeypatch.setattr(moe_utils, "te_general_gemm", None)
    hf = family_checkpoint(tmp_path / "hf", name)
    chunks, spec, config = build(hf, parallel, te=True, recompute="selective")
    assert (
        config.moe_permute_fusion
        and config.moe_grouped_gemm
        and config.recompute_modules == ["moe"]
    )
    load_hf(chunks, hf, spec, parallel)
    routers = list(enumerate(router for _, router in moe_routers(chunks)))
    assert [layer for layer, _ in moe_routers(chunks)] == list(spec.moe_layers)
    manager = ReplayManager(routers, num_experts=spec.num_experts)
    given = (
        torch.rand(len(routers), ROWS, spec.num_experts)
        .argsort(-1)[..., : spec.top_k]
        .to(torch.uint8)
    )
    hidden = torch.randn(ROWS, 1, spec.hidden_size, requires_grad=True)
    calls: list[tuple[int, torch.Tensor]] = []

    def route(index: int, router: torch.nn.Module):
        def forward(rows: torch.Tensor) -> torch.Tensor:
            gates, used = router(rows)
            calls.append((index, used))
            return gates

        return forward

    with manager.run_pass([Routes(replay=given)], training=True):
        with manager.forward(0):
            gates = [recomputed(route(index, router), False, hidden) for index, router in routers]
        sum(gate.square().sum() for gate in gates).backward()
    assert sorted(index for index, _ in calls) == sorted(2 * list(range(len(routers)))), (
        "each router runs twice"
    )
    for index, used in calls:
        assert used.equal(torch.zeros_like(used).scatter(1, given[index].long(), True))
    assert all(router.weight.grad is not None for _, router in routers) and hidden.grad is not None


@pytest.mark.parametrize(
    "name", [name for name in FAMILIES if "deepseek" in name or name == "moonlight"]
)
def test_latent_norms_have_the_epsilon_of_transformers(tmp_path, parallel, name):
    (chunk,), spec, _ = build(
        family_checkpoint(tmp_path / "hf", name, rms_norm_eps=1e-5), parallel, te=True
    )
    for layer in chunk.decoder.layers:
        attention = layer.self_attention
        ups = [
            attention.linear_kv_up_proj,
            *([attention.linear_q_up_proj] if spec.q_lora_rank else []),
        ]
        assert [up.eps for up in ups] == [LATENT_EPS] * len(ups)
        assert layer.input_layernorm.eps == spec.rms_eps == 1e-5


def sharded(hf, folder):
    """On each of two tensor ranks: HF -> TE -> HF, and the checkpoint that both save loads into
    local layers on both.
    """
    groups = make_parallel(layout := ParallelConfig(tp=2), device="cpu", timeout_minutes=2)
    (chunk,), spec, _ = build(hf, groups, layout, te=True)
    load_hf([chunk], hf, spec, groups)
    original = load_file(hf / "model.safetensors")
    for key, tensor in export_hf([chunk], spec, groups):
        assert tensor is None or tensor.equal(original[key]), key
    if groups.rank == 0:
        folder.mkdir()
        write_common(folder)
    torch.distributed.barrier()
    shards = Planner(groups.dp_cp_group).plan({"model0": chunk.sharded_state_dict()}, folder)
    shards.stage(copy=False)
    results = [None, None]
    torch.distributed.all_gather_object(results, shards.write())
    if groups.rank == 0:
        shards.write_metadata(results)
    torch.distributed.barrier()
    (local,), _, _ = build(hf, groups, layout, te=False)
    from_megatron(local, folder)
    for key, tensor in export_hf([local], spec, groups):
        assert tensor is None or tensor.equal(original[key]), key
    duplicated = chunk.decoder.layers[0].self_attention.linear_kv_down_proj.weight
    assert (
        duplicated.shape[0] == spec.kv_lora_rank + spec.qk_rope_dim
        and not duplicated.tensor_model_parallel
    )
    assert duplicated.sequence_parallel  # core then sums its gradient over the tensor ranks
    groups.destroy()


def test_down_projections_are_complete_on_every_tensor_rank(tmp_path):
    run_ranks(sharded, 2, family_checkpoint(tmp_path / "hf", "deepseek_v3"), tmp_path / "saved")


@pytest.mark.parametrize("name", ["deepseek_v3", "deepseek_v2", "qwen3_moe"])
def test_the_planner_counts_the_parameters_that_core_makes(tmp_path, name):
    """Down-projections of latent attention are on every tensor rank."""
    path = family_checkpoint(tmp_path, name)
    for tp in (1, 2):
        sizes = ParallelConfig(tp=tp, ep=tp, etp=1)
        with rank_of(tp, 0, SimpleNamespace(parallel=sizes)) as one:
            (chunk,), spec, _ = build(path, one, sizes, te=True)
        planned = rank_parameters(spec, sizes, 0, te=True)
        assert planned.total == sum(weight.numel() for weight in chunk.parameters()), (name, tp)
