"""HF -> megatron -> HF is bit-exact in every layout; written checkpoints; the converter; errors
name the damage.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.dist.launch import build, run_ranks
from tests.tiny import random_checkpoint


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint(
        tmp_path_factory.mktemp("odd"), seed=1, dtype=torch.bfloat16,
        vocab_size=63, tie_word_embeddings=True, mlp_only_layers=[1], num_experts=4, head_dim=32,
    )  # fmt: skip


def test_two_ranks(plain: Path, odd: Path) -> None:
    layouts = [
        {"tp": 2},
        {"ep": 2},
        {"pp": 2},
        {"pp": 2, "vp": 2},
        {"tp": 2, "ep": 2, "etp": 1},
        {},
    ]
    cases = [
        *((plain, layout, "float32") for layout in layouts),
        (odd, {"tp": 2}, "bfloat16"),
        (odd, {"pp": 2}, "bfloat16"),
    ]
    run_ranks(check_round_trip, 2, cases)


def test_four_ranks(plain: Path, odd: Path) -> None:
    layouts = [{"tp": 2, "pp": 2, "ep": 2, "etp": 1}, {"tp": 2, "ep": 2, "etp": 2}]
    cases = [
        *((plain, layout, "float32") for layout in layouts),
        (odd, {"tp": 2, "pp": 2}, "bfloat16"),
    ]
    run_ranks(check_round_trip, 4, cases)


def check_round_trip(cases: list[tuple[Path, dict, str]]) -> None:
    from megatron_rl.distributed.ranks import Ranks
    from megatron_rl.weights.hf.entries import entries
    from megatron_rl.weights.hf.write import write_hf_checkpoint
    from tests.exported import export_hf

    for number, (path, layout, dtype) in enumerate(cases):
        chunks, spec, _, parallel = build(path, dtype=dtype, **layout)
        names = [
            name
            for name, tensor in export_hf(chunks, spec, parallel)
            if (tensor is None) == (parallel.rank > 0)
        ]
        assert sorted(names) == sorted(name for entry in entries(spec) for name in entry.hf_names)
        out = path / "out" / str(number)
        stream = parts(chunks, spec, parallel)
        write_hf_checkpoint(stream, path, out, Ranks.of(parallel), max_shard_bytes=100_000)
        if parallel.rank == 0:
            written = read_weights(out)
            original = read_weights(path)
            assert set(written) == set(original), layout
            different = [
                name for name, tensor in original.items() if not torch.equal(tensor, written[name])
            ]
            assert not different, f"{layout}: {different[:3]}"
        parallel.destroy()


def parts(chunks, spec, parallel):
    """The export with a source for each pipeline stage and expert-parallel rank."""
    from megatron_rl.weights.hf.export import export_planned, plan_export

    return export_planned(plan_export(chunks, spec, parallel), chunks, spec, parallel)


def read_weights(path: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for file in path.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


def test_one_rank(plain: Path, tmp_path: Path) -> None:
    run_ranks(check_files_and_errors, 1, plain, tmp_path)


def check_files_and_errors(path: Path, scratch: Path) -> None:
    from megatron.core import dist_checkpointing

    from megatron_rl.checkpoint.torch_dist import chunk_reader
    from megatron_rl.distributed.ranks import Ranks
    from megatron_rl.weights.hf.files import CheckpointError
    from megatron_rl.weights.hf.load import load_hf
    from megatron_rl.weights.hf.write import write_hf_checkpoint
    from megatron_rl_tools.convert import conversion_sides
    from megatron_rl_tools.convert.convert_hf import main

    (path / "tokenizer.json").write_text("{}")
    (path / "optimizer.bin").write_text("weights are not copied")
    chunks, spec, _, parallel = build(path)
    out = scratch / "exported"
    for _ in range(2):  # the second replaces the first
        write_hf_checkpoint(parts(chunks, spec, parallel), path, out, Ranks.of(parallel))
    assert sorted(file.name for file in out.iterdir()) == sorted(
        [
            "config.json",
            "generation_config.json",
            "tokenizer.json",
            "model-00001.safetensors",
            "model.safetensors.index.json",
        ]
    )
    assert (out / "config.json").read_bytes() == (path / "config.json").read_bytes()
    assert {file.stat().st_mode & 0o777 for file in out.iterdir()} == {0o644}
    assert [entry.name for entry in scratch.iterdir()] == ["exported"], (
        "temporary directories remain"
    )
    load_hf(chunks, out, spec, parallel)
    with pytest.raises(CheckpointError, match="lm_head"):
        most = [each for each in parts(chunks, spec, parallel) if each.name != "lm_head.weight"]
        write_hf_checkpoint(most, path, scratch / "partial", Ranks.of(parallel))
    assert not (scratch / "partial").exists()

    weights = read_weights(path)
    name = "model.layers.2.mlp.experts.3.up_proj.weight"
    nan = weights[name].clone()
    nan[5, 7] = float("nan")
    for damage, message in (
        ({name: None}, "missing"),
        ({"model.layers.9.extra": torch.ones(1)}, "model.layers.9.extra is not part"),
        ({name: weights[name].T.contiguous()}, "shape"),
        ({name: nan}, "not finite"),
        ({name: weights[name].to(torch.float8_e4m3fn)}, "F8_E4M3"),
    ):
        bad = scratch / "bad"
        bad.mkdir(exist_ok=True)
        damaged = {key: tensor for key, tensor in (weights | damage).items() if tensor is not None}
        save_file(damaged, bad / "model.safetensors")
        with pytest.raises(CheckpointError, match=message) as error:
            load_hf(chunks, bad, spec, parallel)
        assert name in str(error.value) or "extra" in str(error.value)
    (bad / "model.safetensors").rename(bad / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="pickle"):
        load_hf(chunks, bad, spec, parallel)

    load_hf(chunks, path, spec, parallel)
    (scratch / "saved").mkdir()
    dist_checkpointing.save({"model": chunks[0].sharded_state_dict()}, str(scratch / "saved"))
    parallel.destroy()
    command = [
        "megatron-to-hf",
        "--megatron",
        str(scratch / "saved"),
        "--config",
        str(path),
        "--out",
        str(scratch / "hf"),
    ]
    # a few rows at a time of what core itself saved, never a complete chunk
    conversion_sides.BLOCK_BYTES = 512
    chunk_reader._create_file_view = None
    assert main(command) == 0
    written = read_weights(scratch / "hf")
    original = read_weights(path)
    assert written.keys() == original.keys()
    assert [key for key, tensor in original.items() if not tensor.equal(written[key])] == [], (
        "what core itself saved"
    )


def test_converted_on_two_ranks_it_loads_in_every_layout(odd: Path, tmp_path: Path) -> None:
    """Both ranks write; megatron-core loads the result, with its padded vocabulary and tied
    embeddings; and back.
    """
    run_ranks(check_converter, 2, odd, tmp_path, [{"tp": 2}, {"ep": 2}, {"pp": 2}])


def check_converter(path: Path, scratch: Path, layouts: list[dict]) -> None:
    import torch.distributed as dist
    from megatron.core import dist_checkpointing

    from megatron_rl_tools.convert import conversion_sides
    from megatron_rl_tools.convert.convert_hf import main
    from tests.exported import export_hf

    conversion_sides.BLOCK_BYTES = 512  # a few rows at a time
    dist.init_process_group("gloo")  # kept: the tool would end one of its own
    original, size = read_weights(path), ["--file-gb", "0.0001"]
    assert (
        main(["hf-to-megatron", "--hf", str(path), "--out", str(scratch / "megatron"), *size]) == 0
    )
    for layout in layouts:
        chunks, spec, _, parallel = build(path, dtype="bfloat16", load=False, **layout)
        state = dist_checkpointing.load(
            {"model": chunks[0].sharded_state_dict()}, str(scratch / "megatron")
        )
        chunks[0].load_state_dict(state["model"])
        for name, tensor in export_hf(chunks, spec, parallel):
            assert tensor is None or tensor.equal(original[name]), f"{layout}: {name}"
        parallel.destroy()
    assert (
        main(
            [
                "megatron-to-hf",
                "--megatron",
                str(scratch / "megatron"),
                "--out",
                str(scratch / "hf"),
                *size,
            ]
        )
        == 0
    )
    written = read_weights(scratch / "hf")
    assert written.keys() == original.keys()
    assert [name for name, tensor in original.items() if not tensor.equal(written[name])] == []
    assert main(["verify", str(path), str(scratch / "megatron")]) == 0


@pytest.mark.slow
def test_what_core_saves_in_a_layout_becomes_hf(plain: Path, odd: Path, tmp_path: Path) -> None:
    run_ranks(check_saved_by_core, 2, plain, odd, tmp_path)


def check_saved_by_core(plain: Path, odd: Path, scratch: Path) -> None:
    import torch.distributed as dist
    from megatron.core import dist_checkpointing

    from megatron_rl_tools.convert import conversion_sides
    from megatron_rl_tools.convert.convert_hf import main

    conversion_sides.BLOCK_BYTES = 512
    for number, (path, layout) in enumerate(
        [(odd, {"tp": 2}), (plain, {"tp": 2, "ep": 2, "etp": 1}), (plain, {"pp": 2})]
    ):
        chunks, _, _, parallel = build(
            path, dtype="bfloat16" if path == odd else "float32", **layout
        )
        megatron, hf = scratch / f"megatron{number}", scratch / f"hf{number}"
        if parallel.rank == 0:
            megatron.mkdir()
        dist.barrier()
        dist_checkpointing.save({"model": chunks[0].sharded_state_dict()}, str(megatron))
        parallel.destroy()
        command = [
            "megatron-to-hf",
            "--megatron",
            str(megatron),
            "--config",
            str(path),
            "--out",
            str(hf),
        ]
        assert main(command) == 0
        original, written = read_weights(path), read_weights(hf)
        assert written.keys() == original.keys()
        assert [
            name for name, tensor in original.items() if not tensor.equal(written[name])
        ] == [], layout
