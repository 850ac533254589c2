"""One checkpoint for TransformerEngine's layers and for local ones: the names, and tensors that are
read under any of them.
"""

import json
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject

from megatron_rl.checkpoint.state import adam_step, load_state, sharded_state
from megatron_rl.checkpoint.torch_dist.chunk_reader import check_keys
from megatron_rl.checkpoint.torch_dist.metadata import read_metadata
from megatron_rl.checkpoint.torch_dist.safe_checkpoint import SafeCheckpoint
from megatron_rl.checkpoint.torch_dist.shard_writer import Planner, write_common
from megatron_rl.config import ModelConfig, ParallelConfig
from megatron_rl.distributed import make_parallel
from megatron_rl.engine.model import make_model, make_transformer_config
from megatron_rl.models.families import make_spec
from megatron_rl.models.spec import load_hf_config
from megatron_rl.weights.hf.files import CheckpointError
from megatron_rl.weights.hf.load import load_hf
from megatron_rl.weights.hf.mapping import local_parameters
from megatron_rl.weights.names import NORMS, canonical, spellings
from megatron_rl_tools.convert.conversion import meta_slots
from megatron_rl_tools.convert.convert_hf import main
from tests.dist.engines import make_engine
from tests.families import FAMILIES, family_checkpoint
from tests.tiny import random_checkpoint

TE_KEYS = json.loads((Path(__file__).parents[2] / "fixtures/te_keys.json").read_text())
"""Family -> keys of the tensors that megatron-core 0.19.2 saves with TransformerEngine 2.20.2's
layers.
"""
QUICK = ("qwen3_moe", "deepseek_v3")
SIDES = ("separate", "fused")


def respell(path: Path, side: str) -> int:
    """Give all norms of the checkpoint at `path` the name that they have as modules, or fused; how
    many names changed.
    """
    metadata = read_metadata(path)

    def renamed(key: str) -> str:
        for norm in NORMS:
            if canonical(key).endswith("." + norm.canonical):
                return canonical(key).removesuffix(norm.canonical) + str(getattr(norm, side))
        return key

    content = metadata.state_dict_metadata
    changed = sum(renamed(key) != key for key in content)
    metadata.state_dict_metadata = {renamed(key): value for key, value in content.items()}
    places = metadata.storage_data or {}
    metadata.storage_data = {
        replace(index, fqn=renamed(index.fqn)): place for index, place in places.items()
    }
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    return changed


def test_every_name_becomes_the_canonical_one_and_back() -> None:
    for norm in NORMS:
        for name in (norm.separate, norm.fused):
            for prefix in (
                "decoder.layers.3.",
                "decoder.layers.",
                "optimizer.state.exp_avg.decoder.layers.0.",
            ):
                assert canonical(prefix + name) == prefix + norm.canonical
                assert set(spellings(canonical(prefix + name))) == {
                    prefix + norm.separate,
                    prefix + norm.fused,
                }
    others = [
        "decoder.final_layernorm.weight",
        "decoder.layers.0.mlp.linear_fc1.weight",
        "embedding.word_embeddings.weight",
    ]
    assert [canonical(name) for name in others] == others
    assert [spellings(name) for name in others] == [(name,) for name in others]


@pytest.mark.parametrize("name", FAMILIES)
def test_local_layers_are_saved_and_read_under_the_names_of_transformer_engine(
    tmp_path: Path, name: str
) -> None:
    hf = family_checkpoint(tmp_path / "hf", name)
    spec, parallel = (
        make_spec(load_hf_config(hf)),
        make_parallel(ParallelConfig(), device="cpu", timeout_minutes=2),
    )
    try:
        slots = meta_slots(hf, spec, parallel)
        written = {
            chunk.key
            for key, slot in slots.parameters.items()
            for chunk, _ in slots.cut(key, tuple(slot.data.shape))
        }
        assert sorted(written) == TE_KEYS[name]
    finally:
        parallel.destroy()


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES],
)
def test_a_checkpoint_under_any_names_converts_and_loads_bit_exact(
    tmp_path: Path, name: str
) -> None:
    hf, megatron = family_checkpoint(tmp_path / "hf", name), tmp_path / "megatron"
    assert main(["hf-to-megatron", "--hf", str(hf), "--out", str(megatron)]) == 0
    for side in SIDES:
        assert respell(megatron, side)
        assert main(["verify", str(hf), str(megatron)]) == 0, side
        loads(megatron, hf)


def loads(megatron: Path, hf: Path) -> None:
    """The engine's model gets from `megatron` what it gets from `hf`."""
    parallel = make_parallel(ParallelConfig(), device="cpu", timeout_minutes=2)
    try:
        spec, model = make_spec(load_hf_config(hf)), ModelConfig(path=hf, dtype="float32")
        config = make_transformer_config(spec, model, ParallelConfig(), parallel.device)
        (expected,), (loaded,) = (make_model(spec, model, config, parallel) for _ in range(2))
        load_hf([expected], hf, spec, parallel)
        loaded.load_state_dict(SafeCheckpoint(megatron).load(loaded.sharded_state_dict()))
        here, there = (local_parameters([chunk], spec, 0, 1) for chunk in (expected, loaded))
        assert [key for key in here if not here[key].equal(there[key])] == []
    finally:
        parallel.destroy()


@pytest.mark.parametrize("distributed", [False, True])
def test_model_and_optimizer_of_a_run_are_read_under_any_names(
    tmp_path: Path, distributed: bool
) -> None:
    """Also where extra states of norms are missing: only TransformerEngine's have them."""
    engine = make_engine(random_checkpoint(tmp_path / "hf"), optim={"distributed": distributed})
    try:
        for chunk in engine.chunks:
            for value in chunk.parameters():
                value.data.copy_(torch.randn_like(value))
        state = sharded_state(engine)
        folder = tmp_path / "saved"
        folder.mkdir()
        write_common(folder)
        shards = Planner(engine.parallel.dp_cp_group).plan(state, folder)
        shards.stage(copy=False)
        shards.write_metadata([shards.write()])
        expected = {name: value.clone() for name, value in engine.chunks[0].named_parameters()}
        for side in SIDES:
            assert respell(folder, side) >= 3  # the weight and two moments
            with torch.no_grad():
                for value in engine.chunks[0].parameters():
                    value.zero_()
            request = sharded_state(engine)
            request["extra"] = ShardedObject(
                "decoder.layers.q_layernorm._extra_state", None, (1,), (0,)
            )
            load_state(engine, SafeCheckpoint(folder).load(request), adam_step=3.0)
            assert adam_step(engine) == 3.0
            assert all(
                value.equal(expected[name]) for name, value in engine.chunks[0].named_parameters()
            ), side
    finally:
        engine.parallel.destroy()


CAUSES = [
    ([], False, ["optim.distributed or model.dtype"]),
    ([], True, ["optim.distributed or model.dtype", "megatron-core"]),
    (["a.weight"], False, ["model.path"]),
    (["a.weight"], True, ["model.path", "megatron-core"]),
]
"""(names only in the model, another version saved it, the causes that are named)."""


def test_a_tensor_of_another_dtype_is_refused_and_converted_only_on_request(tmp_path: Path) -> None:
    """Of a family whose bias of experts stays in float32."""
    hf, parallel = (
        family_checkpoint(tmp_path / "hf", "deepseek_v3"),
        make_parallel(ParallelConfig(), device="cpu", timeout_minutes=2),
    )
    try:
        spec, chunks = make_spec(load_hf_config(hf)), {}
        for dtype in ("bfloat16", "float32"):
            model = ModelConfig(path=hf, dtype=dtype)
            config = make_transformer_config(spec, model, ParallelConfig(), parallel.device)
            (chunks[dtype],) = make_model(spec, model, config, parallel)
        load_hf([chunks["bfloat16"]], hf, spec, parallel)
        folder = tmp_path / "saved"
        folder.mkdir()
        write_common(folder)
        shards = Planner(parallel.dp_cp_group).plan(chunks["bfloat16"].sharded_state_dict(), folder)
        shards.stage(copy=False)
        shards.write_metadata([shards.write()])
        stored = SafeCheckpoint(folder)
        assert stored.load(chunks["bfloat16"].sharded_state_dict())
        other = chunks["float32"]
        refusal = (
            r"saved: \S+ has dtype torch\.bfloat16, the model's has torch\.float32; model\.dtype"
            r" must be"
        )
        with pytest.raises(CheckpointError, match=refusal):
            stored.load(other.sharded_state_dict())
        other.load_state_dict(stored.load(other.sharded_state_dict(), converts=True))
        here, there = (local_parameters([chunk], spec, 0, 1) for chunk in chunks.values())
        assert [key for key in here if not here[key].float().equal(there[key])] == []
    finally:
        parallel.destroy()


def test_a_checkpoint_of_other_layers_says_what_differs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = ["decoder.layers.0.a.weight", "decoder.layers.1.a.weight", "b.weight"]
    stored = ["decoder.layers.a.weight", "b.weight"]
    check_keys("here", wanted, [*wanted, "optimizer.state.exp_avg.b.weight"])
    with pytest.raises(CheckpointError) as error:
        check_keys(
            "F, saved by megatron-core 0.25, loaded by 0.19.2", wanted, stored, other_core=True
        )
    for part in ("saved by megatron-core 0.25", "only in the model: decoder.layers.N.a.weight;",
                 "only in the checkpoint: decoder.layers.a.weight;",
                 "megatron-rl convert megatron-to-hf"):  # fmt: skip
        assert part in str(error.value), error.value
    with pytest.raises(
        CheckpointError,
        match=r"only in the model: optimizer\.x; only in the checkpoint: optimizer\.y",
    ):
        check_keys("here", ["optimizer.x"], ["optimizer.y"])
    for names, other_core, cause in CAUSES:
        with pytest.raises(CheckpointError) as error:
            check_keys(
                "here",
                [*wanted, *names, "optimizer.x"],
                [*wanted, "optimizer.y"],
                other_core=other_core,
            )
        found = str(error.value).partition("optimizer.y; ")[2]
        assert [
            word
            for word in ("model.path", "optim.distributed or model.dtype", "megatron-core")
            if word in found
        ] == cause
    hf, megatron = family_checkpoint(tmp_path / "hf", "qwen3"), tmp_path / "megatron"
    assert main(["hf-to-megatron", "--hf", str(hf), "--out", str(megatron)]) == 0
    metadata = read_metadata(megatron)
    content = metadata.state_dict_metadata
    content["decoder.layers.mlp.up.weight"] = content.pop("decoder.layers.mlp.linear_fc1.weight")
    (megatron / ".metadata").write_bytes(pickle.dumps(metadata))
    assert (
        main(["megatron-to-hf", "--megatron", str(megatron), "--out", str(tmp_path / "back")]) == 2
    )
    found = capsys.readouterr().err
    assert (
        "only in the model: decoder.layers.mlp.linear_fc1.weight; only in the checkpoint:"
        " decoder.layers.mlp.up.weight" in found
    )
