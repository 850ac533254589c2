"""The converter, in this process: every family round trip is bit-exact, core loads it; stops,
damage, pickles, dtypes.
"""

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from safetensors.torch import load_file, save_file

from benchmarks.convert import cases, make_checkpoint
from megatron_rl.checkpoint.checkpointer import Checkpointer, Snapshot
from megatron_rl.checkpoint.torch_dist.chunk_writer import ChunkWriter
from megatron_rl.checkpoint.torch_dist.metadata import read_metadata
from megatron_rl.config import ModelConfig, ParallelConfig
from megatron_rl.distributed import make_parallel
from megatron_rl.engine.model import make_model, make_transformer_config
from megatron_rl.models.families import make_spec
from megatron_rl.models.spec import load_hf_config
from megatron_rl.weights.hf.files import CheckpointError
from megatron_rl.weights.hf.load import load_hf
from megatron_rl.weights.hf.mapping import local_parameters
from megatron_rl.weights.sync.pushed_weights import expected_tensors
from megatron_rl_tools.convert import conversion_files, conversion_sides
from megatron_rl_tools.convert.conversion import cuts
from megatron_rl_tools.convert.convert_hf import convert as convert_hf
from megatron_rl_tools.convert.convert_hf import main
from tests.dist.engines import make_engine
from tests.families import FAMILIES, family_checkpoint

SMALL = ["--file-gb", "0.0001"]


def read(path: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for file in sorted(path.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [
        name
        for name in one
        if one[name].dtype != other[name].dtype or not one[name].equal(other[name])
    ] == []


def convert(hf: Path, root: Path, *options: str) -> tuple[Path, Path]:
    """HF -> torch_dist -> HF; the two directories."""
    megatron, back = root / "megatron", root / "back"
    assert main(["hf-to-megatron", "--hf", str(hf), "--out", str(megatron), *SMALL, *options]) == 0
    assert main(["megatron-to-hf", "--megatron", str(megatron), "--out", str(back), *SMALL]) == 0
    return megatron, back


def core_loads(megatron: Path, hf: Path) -> None:
    """What megatron-core itself loads from `megatron` is what the engine loads from `hf`."""
    parallel = make_parallel(ParallelConfig(), device="cpu", timeout_minutes=2)
    try:
        spec, model = make_spec(load_hf_config(hf)), ModelConfig(path=hf, dtype="float32")
        config = make_transformer_config(spec, model, ParallelConfig(), parallel.device)
        expected, loaded = (make_model(spec, model, config, parallel) for _ in range(2))
        load_hf(expected, hf, spec, parallel)
        state = dist_checkpointing.load({"model": loaded[0].sharded_state_dict()}, str(megatron))
        loaded[0].load_state_dict(state["model"])
        here, there = (local_parameters(chunks, spec, 0, 1) for chunks in (expected, loaded))
        assert [name for name in here if not here[name].equal(there[name])] == []
    finally:
        parallel.destroy()


QUICK = ("qwen2_moe", "deepseek_v3")


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES],
)
def test_the_round_trip_is_bit_exact_and_core_loads_it(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversion_sides, "BLOCK_BYTES", 512)  # a few rows at a time
    hf = family_checkpoint(tmp_path / "hf", name)
    (hf / "tokenizer.json").write_text("{}")
    megatron, back = convert(hf, tmp_path)
    assert_same(read(hf), read(back))
    for file in ("config.json", "generation_config.json", "tokenizer.json"):
        assert (back / file).read_bytes() == (hf / file).read_bytes()
    index = json.loads((back / "model.safetensors.index.json").read_text())
    assert (
        index["weight_map"].keys() == read(hf).keys() and len(set(index["weight_map"].values())) > 1
    )
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in read(hf).values())
    assert {file.stat().st_mode & 0o777 for file in back.iterdir()} == {0o644}
    core_loads(megatron, hf)


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return family_checkpoint(tmp_path_factory.mktemp("hf"), "glm4_moe")


def test_a_stopped_conversion_continues(
    hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    megatron = tmp_path / "megatron"
    command = ["hf-to-megatron", "--hf", str(hf), "--out", str(megatron), *SMALL]
    monkeypatch.setattr(ChunkWriter, "close", stop_after(3, ChunkWriter.close))
    with pytest.raises(KeyboardInterrupt):
        main(command)
    monkeypatch.undo()
    assert not megatron.exists() and (tmp_path / ".megatron.partial").is_dir()
    capsys.readouterr()
    other = [word if word != SMALL[-1] else f"{1.5 * float(word):g}" for word in command]
    assert main(other) == 0, "with files of another size it starts over"
    assert "continuing" not in capsys.readouterr().out
    assert main(["verify", str(hf), str(megatron)]) == 0
    shutil.rmtree(megatron)
    monkeypatch.setattr(ChunkWriter, "close", stop_after(3, ChunkWriter.close))
    with pytest.raises(KeyboardInterrupt):
        main(command)
    monkeypatch.undo()
    capsys.readouterr()
    assert main(command) == 0
    assert "continuing" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["megatron"]
    core_loads(megatron, hf)
    before = {path: path.stat().st_mtime_ns for path in megatron.rglob("*")}
    assert main(command) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert before == {path: path.stat().st_mtime_ns for path in megatron.rglob("*")}
    assert main([*command, "--dtype", "bfloat16"]) == 2
    assert "has other content" in capsys.readouterr().err
    assert main(["verify", str(hf), str(megatron)]) == 0


def test_a_conversion_that_is_killed_while_it_finishes_starts_again(
    hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["hf-to-megatron", "--hf", str(hf), "--out", str(tmp_path / "megatron"), *SMALL]

    def killed(path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(conversion_files, "sync", killed)
    with pytest.raises(KeyboardInterrupt):
        main(command)
    monkeypatch.undo()
    # as a kill after the last of its steps but the rename leaves it
    shutil.rmtree(tmp_path / ".megatron.partial" / "journal", ignore_errors=True)
    assert main(command) == 0
    assert main(["verify", str(hf), str(tmp_path / "megatron")]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["megatron"]


def test_as_many_files_with_other_cuts_are_another_conversion() -> None:
    units: list[Any] = [[SimpleNamespace(name=name)] for name in "abc"]
    a, b, c = units
    assert cuts([a + b, c]) == cuts([a + b, c]) != cuts([a, b + c])


def stop_after(count: int, close: Callable[..., Any]) -> Callable[..., Any]:
    def stop(self: Any) -> None:
        nonlocal count
        count -= 1
        if not count:
            raise KeyboardInterrupt
        close(self)

    return stop


def test_every_bad_tensor_is_named_in_one_error(
    hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = read(hf)
    gate, up, bias = (
        f"model.layers.2.mlp.experts.3.{part}_proj.weight" for part in ("gate", "up", "down")
    )
    del weights[gate]
    weights[up] = weights[up].T.contiguous()
    weights[bias] = weights[bias].to(torch.int32)
    weights["model.layers.7.extra"] = torch.ones(2)
    bad = copy_with(hf, tmp_path / "bad", weights)
    command = ["hf-to-megatron", "--hf", str(bad), "--out", str(tmp_path / "out")]
    assert main(command) == 2
    message = capsys.readouterr().err
    for part in (
        f"{gate} is missing",
        "model.layers.7.extra is not part",
        f"{up} [48, 32], not [32, 48]",
        f"{bias} I32",
    ):
        assert part in message, message
    weights = read(hf)
    for name in (gate, up):
        weights[name][3, 4] = float("nan")
    copy_with(hf, bad, weights)
    assert main(command) == 2
    message = capsys.readouterr().err
    assert gate in message and up in message and "not finite" in message
    assert not (tmp_path / "out").exists()


def copy_with(hf: Path, folder: Path, weights: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_bytes((hf / "config.json").read_bytes())
    return folder


@pytest.mark.parametrize("size", ["nan", "inf", "-1", "0", "large"])
def test_a_size_of_files_that_no_file_has_is_refused(
    hf: Path, tmp_path: Path, size: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["hf-to-megatron", "--hf", str(hf), "--out", str(tmp_path), f"--file-gb={size}"])
    assert f"--file-gb: {size}: must be a number above 0" in capsys.readouterr().err


def test_the_folder_of_a_run_is_refused_with_its_checkpoints(
    hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text("")
    for command in (["info", str(run)], ["verify", str(hf), str(run)]):
        with pytest.raises(SystemExit):
            main(command)
        assert (
            "folder of a run, not of a checkpoint; there is no checkpoint in it"
            in capsys.readouterr().err
        )
    checkpoint = run / "checkpoints/step_000002"
    for folder in (checkpoint, run / "hf"):
        folder.mkdir(parents=True)
    with pytest.raises(SystemExit):
        main(["info", str(run)])
    choice = f"name one of {checkpoint}, {run}/hf"
    assert f"{run}: the folder of a run, not of a checkpoint; {choice}" in capsys.readouterr().err


def test_config_json_of_other_types_is_named(
    hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = read(hf) | {"model.layers.shared.weight": torch.ones(2)}
    other = copy_with(hf, tmp_path / "other", weights)
    for command in (["info", str(other)], ["verify", str(hf), str(other)]):
        assert main(command) == 2
        assert "model.layers.shared.weight is not part of the model" in capsys.readouterr().err
    change_config(other, vocab_size="61")
    assert main(["info", str(other)]) == 2
    assert "config.json vocab_size = '61': must be a whole number of at least 1" in (
        capsys.readouterr().err
    )


def test_dtype_and_multi_token_prediction(hf: Path, tmp_path: Path) -> None:
    """Biases that select experts keep their precision; tensors that are not part of the model are
    copied from the original.
    """
    weights = read(hf)
    weights["model.layers.3.eh_proj.weight"] = torch.randn(4, 4)
    config = json.loads((hf / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    original = copy_with(hf, tmp_path / "hf", weights)
    (original / "config.json").write_text(json.dumps(config))
    megatron, _ = convert(original, tmp_path)
    out = tmp_path / "half"
    command = [
        "megatron-to-hf",
        "--megatron",
        str(megatron),
        "--config",
        str(original),
        "--out",
        str(out),
    ]
    assert main([*command, "--dtype", "bfloat16"]) == 0
    kept = ("e_score_correction_bias", "eh_proj.weight")
    assert_same(read(out), {n: t if n.endswith(kept) else t.bfloat16() for n, t in weights.items()})
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    assert main(["verify", str(original), str(out)]) == 0
    rounded, again = tmp_path / "rounded", tmp_path / "again"
    assert (
        main(
            ["hf-to-megatron", "--hf", str(original), "--out", str(rounded), "--dtype", "bfloat16"]
        )
        == 0
    )
    assert (
        main(
            [
                "megatron-to-hf",
                "--megatron",
                str(rounded),
                "--config",
                str(original),
                "--out",
                str(again),
            ]
        )
        == 0
    )
    assert_same(read(again), read(out))
    assert "model.layers.3.eh_proj.weight" not in expected_tensors(original, torch.float32), (
        "it would never be pushed"
    )


def with_prediction(hf: Path, folder: Path) -> Path:
    """The model with a layer of multi-token prediction, whose tensors are bfloat16."""
    weights = read(hf)
    weights["model.layers.3.eh_proj.weight"] = torch.randn(4, 4).bfloat16()
    weights["model.layers.3.enorm.weight"] = torch.randn(4).bfloat16()
    copy_with(hf, folder, weights)
    change_config(folder, num_nextn_predict_layers=1)
    return folder


def change_config(folder: Path, **values: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_layers_of_prediction_come_back_without_the_original(
    hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    original = with_prediction(hf, tmp_path / "hf")
    megatron, back = convert(original, tmp_path)
    assert_same(read(back), read(original))
    index = json.loads((back / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in read(original).values())
    capsys.readouterr()
    for pair in ([original, megatron], [megatron, original], [megatron, megatron]):
        assert main(["verify", *map(str, pair)]) == 0
        assert capsys.readouterr().out.splitlines()[1:] == [
            "tensor model.layers.3.eh_proj.weight, model.layers.3.enorm.weight is not part of the"
            " model and was not compared"
        ]
    for file in (megatron / "hf").glob("*.safetensors"):  # as of an earlier version
        file.unlink()
    command = ["megatron-to-hf", "--megatron", str(megatron), "--out", str(tmp_path / "out")]
    assert main(command) == 0
    assert (
        "1 layers of multi-token prediction, of which no tensors are there: none are written"
        in (capsys.readouterr().out)
    )
    assert_same(read(tmp_path / "out"), read(hf))


def test_layers_of_prediction_in_pickles_come_back(hf: Path, tmp_path: Path) -> None:
    original = with_prediction(hf, tmp_path / "hf")
    weights = read(original)
    (original / "model.safetensors").unlink()
    torch.save(weights, original / "pytorch_model.bin")
    _, back = convert(original, tmp_path, "--trust-pickle")
    assert_same(read(back), weights)


def test_config_json_names_the_dtype_of_what_is_written(
    hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Loaders round to it."""
    original = copy_with(hf, tmp_path / "hf", read(hf))
    change_config(original, dtype="bfloat16")  # its tensors are float32
    _, back = convert(original, tmp_path)
    assert json.loads((back / "config.json").read_text())["dtype"] == "float32"
    assert "WARNING" not in capsys.readouterr().out
    weights = {name: value if "norm" in name else value.half() for name, value in read(hf).items()}
    shutil.rmtree(tmp_path / "megatron")
    shutil.rmtree(back)
    _, back = convert(copy_with(original, tmp_path / "mixed", weights), tmp_path)
    assert json.loads((back / "config.json").read_text())["dtype"] == "bfloat16"
    assert "WARNING its tensors are float16, float32; config.json keeps" in capsys.readouterr().out


def test_verify_tells_rounded_tensors_from_equal_ones_in_either_order(
    hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = read(hf)
    halves = {name: value.bfloat16() for name, value in weights.items()}
    folders = {
        "half": halves,
        "widened": {name: value.float() for name, value in halves.items()},
        "other": halves | {"model.norm.weight": halves["model.norm.weight"] * 1.01},
        "float16": {name: value.half() for name, value in weights.items()},
    }
    paths = {name: copy_with(hf, tmp_path / name, value) for name, value in folders.items()}
    paths["hf"] = hf
    capsys.readouterr()
    cases = [
        ("half", "widened", 0, [f"{len(weights)} tensors are the same"]),
        (
            "hf",
            "half",
            0,
            ["are equal after rounding to bfloat16 (stored as bfloat16 and float32)"],
        ),
        ("hf", "other", 1, ["1 of ", "are equal after rounding to bfloat16"]),
        ("half", "float16", 1, [" tensors differ"]),
    ]
    for one, other, status, expected in cases:
        printed = []
        for pair in ([one, other], [other, one]):
            assert main(["verify", *(str(paths[name]) for name in pair)]) == status, pair
            printed.append(capsys.readouterr().out)
        assert printed[0] == printed[1]
        for line, part in zip(printed[0].splitlines(), expected, strict=False):
            assert part in line


def test_verify_names_what_differs(
    hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = read(hf)
    weights["model.norm.weight"][5] += 1e-6
    other = copy_with(hf, tmp_path / "other", weights)
    assert main(["verify", str(hf), str(other)]) == 1
    assert "1 of" in (message := capsys.readouterr().out) and "model.norm.weight" in message
    assert main(["info", str(hf)]) == 0
    assert "Glm4MoeForCausalLM, HF" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("family", "line"), [("olmoe", "tp: 1, ep divides 8"), ("qwen3_moe", "tp: 1, 2, ep divides 8")]
)
def test_info_names_the_layouts_that_training_allows(family, line, tmp_path, capsys) -> None:
    """OLMoE normalises queries over all heads: tp > 1 is refused."""
    base = family_checkpoint(tmp_path / "base", family)
    assert main(["info", str(base)]) == 0
    assert line in [text.strip() for text in capsys.readouterr().out.splitlines()]


def test_the_config_of_a_smaller_model_is_refused(
    hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its tensors fit into the stored ones: a part of each was written as the whole."""
    megatron, smaller, out = (tmp_path / name for name in ("megatron", "smaller", "out"))
    assert main(["hf-to-megatron", "--hf", str(hf), "--out", str(megatron)]) == 0
    config = json.loads((hf / "config.json").read_text())
    smaller.mkdir()
    (smaller / "config.json").write_text(json.dumps(config | {"moe_intermediate_size": 16}))
    assert (
        main(
            [
                "megatron-to-hf",
                "--megatron",
                str(megatron),
                "--config",
                str(smaller),
                "--out",
                str(out),
            ]
        )
        == 2
    )
    assert "is config.json of this checkpoint?" in capsys.readouterr().err and not out.exists()


def test_a_checkpoint_of_a_run_is_described_and_becomes_hf(
    hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """config.json comes from the run's model.path; of a folder of checkpoints the newest is
    described.
    """
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        engine = make_engine(hf)
        Checkpointer(engine, tmp_path / "checkpoints").save(Snapshot(7, {}))
        engine.parallel.destroy()
    finally:
        dist.destroy_process_group()
    path = tmp_path / "checkpoints/step_000007"
    for named in (path, path.parent):
        assert main(["info", str(named)]) == 0
        text = capsys.readouterr().out
        assert f"{path}: Glm4MoeForCausalLM, torch_dist" in text
        assert "of a run: 7 steps, saved as one rank on 1 ranks" in text
    assert main(["megatron-to-hf", "--megatron", str(path), "--out", str(tmp_path / "out")]) == 0
    assert main(["verify", str(hf), str(tmp_path / "out")]) == 0
    state = json.loads((path / "state.json").read_text())
    state["config"]["model"]["path"] = str(tmp_path / "gone")
    (path / "state.json").write_text(json.dumps(state))
    assert main(["info", str(path)]) == 2
    assert "gone has no config.json; set --config" in capsys.readouterr().err
    assert main(["info", str(path), "--config", str(hf)]) == 0


def test_pickles_need_trust_and_run_no_code(
    hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "pickled"
    folder.mkdir()
    (folder / "config.json").write_bytes((hf / "config.json").read_bytes())
    torch.save(read(hf), folder / "pytorch_model.bin")
    command = ["hf-to-megatron", "--hf", str(folder), "--out", str(tmp_path / "out")]
    assert main(command) == 2
    assert "only pickle weights (pytorch_model.bin), which can run code" in capsys.readouterr().err
    assert main([*command, "--trust-pickle"]) == 0
    assert main(["verify", str(hf), str(tmp_path / "out")]) == 0
    torch.save({"model.norm.weight": Hostile(tmp_path / "touched")}, folder / "pytorch_model.bin")
    (tmp_path / "out").rename(tmp_path / "before")
    assert main([*command, "--trust-pickle"]) == 2
    assert "not a file of tensors and plain values alone" in capsys.readouterr().err
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize("hostile", ["call", "dotted"])
def test_metadata_that_pickles_anything_else_is_refused(tmp_path: Path, hostile: str) -> None:
    target = tmp_path / "touched"
    data = pickle.dumps(Hostile(target))
    if hostile == "dotted":  # a name inside an admitted module
        data = b"\x80\x04\x8c\x28torch.distributed.checkpoint.filesystem\x8c\x09os.getcwd\x93)R."
        data = data.replace(
            b"\x8c\x28", bytes([0x8C, len("torch.distributed.checkpoint.filesystem")])
        )
    (tmp_path / ".metadata").write_bytes(data)
    with pytest.raises(CheckpointError, match="which checkpoint metadata does not need"):
        read_metadata(tmp_path)
    assert not target.exists()


class Hostile:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return Path.touch, (self.target,)


def test_bridge_is_refused_where_it_is_not_installed(
    hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [
        "hf-to-megatron",
        "--hf",
        str(hf),
        "--out",
        str(tmp_path / "out"),
        "--backend",
        "bridge",
    ]
    assert main(command) == 2
    assert "megatron.bridge is not installed" in capsys.readouterr().err


@pytest.mark.slow
def test_memory_is_that_of_a_few_blocks_not_of_a_tensor(tmp_path: Path) -> None:
    hf, size = make_checkpoint(tmp_path / "hf", layers=2, experts=16)
    parallel = make_parallel(ParallelConfig(), device="cpu")
    try:
        runs = cases(tmp_path, hf, size, parallel)
        for name in ("HF -> torch_dist", "torch_dist -> HF"):
            outcome = runs[name]()
            assert outcome is not None and outcome.num_bytes == size > 4 * outcome.largest_group
            assert outcome.peak_bytes < outcome.largest_group / 4, f"{name}: {outcome}"
    finally:
        parallel.destroy()


def test_the_api_converts_in_both_directions(hf: Path, tmp_path: Path) -> None:
    convert_hf(hf, tmp_path / "megatron")
    convert_hf(tmp_path / "megatron", tmp_path / "back", config=hf)
    assert_same(read(hf), read(tmp_path / "back"))
    with pytest.raises(CheckpointError, match="none: no such directory"):
        convert_hf(tmp_path / "none", tmp_path / "out")
    with pytest.raises(ValueError, match="dtype = 'int8': must be one of keep, float32"):
        convert_hf(hf, tmp_path / "out", dtype="int8")
