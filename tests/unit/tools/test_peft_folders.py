"""Adapters of a run as a PEFT folder that the real peft package loads, the way back, and merged."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from megatron_rl.checkpoint.checkpointer import Checkpointer, Snapshot
from megatron_rl.config import ConfigError
from megatron_rl.weights.hf.peft_folder import CONFIG, TENSORS
from megatron_rl_tools.convert.convert_hf import main
from tests.dist.engines import make_engine
from tests.families import FAMILIES, family_checkpoint, load_reference

LORA = {"rank": 3, "alpha": 6.0}
EVERY = {"targets": ["all", "embedding", "lm_head"]}
LIMIT = 1e-6  # relative, of float64 logits of weights that are rounded to float32


@torch.no_grad()
def trained(engine):
    """Fill A and B with random values, and return the merged HF tensors."""
    generator = torch.Generator().manual_seed(3)
    for adapter in engine.adapters.all:
        for factor in (adapter.a, adapter.b):
            factor.copy_(torch.randn(factor.shape, generator=generator) * 0.2)
    return {name: tensor.clone() for name, tensor in engine.export()}


def exported(base: Path, root: Path, lora=None, dtype="float32"):
    """Merged HF tensors of a run with random adapters, its checkpoint, and their PEFT folder."""
    engine = make_engine(base, lora=LORA | (lora or {}), measure=False, replay="none",
                         model={"dtype": dtype})  # fmt: skip
    merged = trained(engine)
    Checkpointer(engine, root / "run").save(Snapshot(1, {}))
    engine.parallel.destroy()
    run, out = root / "run" / "step_000001", root / "peft"
    assert main(["megatron-to-peft", "--megatron", str(run), "--out", str(out)]) == 0
    return merged, run, out


def refused(base: Path, message: str, lora, **options) -> None:
    """The engine is not made; the process groups of the attempt end."""
    with pytest.raises(ConfigError, match=message):
        make_engine(base, lora=LORA | lora, measure=False, replay="none", **options)
    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def logits_of(model) -> torch.Tensor:
    tokens = torch.randint(0, 61, (2, 13), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model(tokens, use_cache=False).logits


def loaded_by_peft(base: Path, folder: Path):
    """transformers' model with the adapter, by the peft package, in float64."""
    from peft import PeftModel

    model = load_reference(base, torch.float64)
    return PeftModel.from_pretrained(model, folder, autocast_adapter_dtype=False).double().eval()


def check_logits(base: Path, folder: Path, merged: dict[str, torch.Tensor], tensors=None) -> None:
    """tensors: number of the model's adapter tensors; default: those of the file."""
    expected = load_reference(base, torch.float64)
    before = logits_of(expected)
    model = loaded_by_peft(base, folder)
    logits = logits_of(model)
    names = {name for name, _ in model.named_parameters() if ".lora_" in name}
    assert len(names) == (tensors or len(load_file(folder / TENSORS))), "peft has all of the file"
    folded = folder.parent / "folded"
    if not folded.exists():
        folded.mkdir()
        for file in base.glob("*.json"):
            (folded / file.name).write_bytes(file.read_bytes())
        save_file(merged, folded / "model.safetensors", {"format": "pt"})
    expected = logits_of(load_reference(folded, torch.float64))
    moved = float((expected - before).norm())
    assert float((logits - expected).norm()) < LIMIT * moved
    assert moved > 0.1 * float(before.norm()), "the adapters change the logits"


@pytest.mark.parametrize("family", FAMILIES)
def test_peft_computes_the_logits_of_the_merged_weights(family: str, tmp_path: Path) -> None:
    base = family_checkpoint(tmp_path / "base", family)
    merged, _, folder = exported(base, tmp_path)
    check_logits(base, folder, merged)


@pytest.mark.parametrize(
    "targets",
    [["attention"], ["experts"], ["linear_fc1"], ["mlp"], ["embedding"], ["output_layer"]],
)
def test_some_targets_alone(targets: list[str], tmp_path: Path) -> None:
    """Among them one parameter of the experts without the other, which peft names otherwise."""
    base = family_checkpoint(tmp_path / "base", "qwen2_moe")
    merged, _, folder = exported(base, tmp_path, {"targets": targets})
    check_logits(base, folder, merged)
    lora = LORA | {"targets": targets, "path": str(folder)}
    engine = make_engine(base, lora=lora, measure=False, replay="none")
    assert all(tensor.equal(merged[name]) for name, tensor in engine.export())
    engine.parallel.destroy()


def test_experts_that_share_a_pair_have_equal_copies_of_it(tmp_path: Path) -> None:
    """They are read back into one pair, or into one each; others into one each alone."""
    base = family_checkpoint(tmp_path / "base", "qwen2_moe")
    merged, run, folder = exported(base, tmp_path, {"shared_pairs": True})
    check_logits(base, folder, merged)
    for name, tensor in load_file(folder / TENSORS).items():
        if ".experts" in name:
            copies = tensor.chunk(8) if "lora_A" in name else tensor.unflatten(1, (3, 8)).unbind(2)
            assert all(copy.equal(copies[0]) for copy in copies), name
    assert main(["megatron-to-hf", "--megatron", str(run), "--out", str(tmp_path / "hf")]) == 0
    (file,) = (tmp_path / "hf").glob("*.safetensors")
    converted = load_file(file)
    assert all(converted[name].equal(tensor) for name, tensor in merged.items())
    for shared in (True, False):
        lora = LORA | {"path": str(folder), "shared_pairs": shared}
        engine = make_engine(base, lora=lora, measure=False, replay="none")
        pairs = {id(a.b) for a in engine.adapters.all if ".mlp.experts." in a.entry.name}
        assert len(pairs) == (2 if shared else 16) * 2, "of two MoE layers"
        assert all(tensor.equal(merged[name]) for name, tensor in engine.export())
        engine.parallel.destroy()
    (tmp_path / "other").mkdir()
    _, _, folder = exported(base, tmp_path / "other")
    message = r"experts of .*linear_fc1.weight have different adapters"
    refused(base, message, {"path": str(folder), "shared_pairs": True})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_back_into_a_run_and_merged_are_bit_equal(dtype: str, tmp_path: Path) -> None:
    base = family_checkpoint(tmp_path / "base", "deepseek_v3", dtype=getattr(torch, dtype))
    merged, run, folder = exported(base, tmp_path, {"rslora": True} | EVERY, dtype)
    if dtype == "float32":
        check_logits(base, folder, merged)
    lora = LORA | {"rslora": True, "path": str(folder)} | EVERY
    engine = make_engine(base, lora=lora, measure=False, replay="none", model={"dtype": dtype})
    again = {name: tensor.clone() for name, tensor in engine.export()}
    engine.parallel.destroy()
    whole = tmp_path / "whole"
    assert main(["megatron-to-hf", "--megatron", str(run), "--out", str(whole)]) == 0
    converted = {}
    for file in whole.glob("*.safetensors"):
        converted |= load_file(file)
    for tensors in (again, converted):
        assert tensors.keys() == merged.keys()
        assert [name for name in merged if not tensors[name].equal(merged[name])] == []
    assert main(["verify", str(run), str(whole)]) == main(["verify", str(whole), str(run)]) == 0
    assert main(["verify", str(base), str(run)]) == 1, "the base is not the merged model"


def test_info_describes_adapters(folder_of_one, capsys) -> None:
    base, folder = folder_of_one
    run = folder.parent / "run" / "step_000001"
    assert main(["info", str(run)]) == 0
    adapters = capsys.readouterr().out.splitlines()[-1].strip()
    digest = json.loads((run / "state.json").read_text())["base"]
    assert adapters == (
        f"adapters of rank 3, scale 2, on all; without their base (digest {digest})"
    )
    assert main(["info", str(folder)]) == 0
    title, sizes, targets, of = capsys.readouterr().out.splitlines()
    values = load_file(folder / TENSORS).values()
    millions = sum(value.numel() for value in values) / 1e6
    assert title == f"{folder}: PEFT, LORA"
    assert sizes == f"  rank 3, alpha 6.0; {len(values)} tensors, {millions:.1f} M parameters"
    assert "q_proj" in targets and "experts" in targets
    assert of == f"  base {base}, digest {digest}"
    (folder / TENSORS).rename(folder / "elsewhere")
    assert main(["info", str(folder)]) == 2
    assert "no PEFT folder that can be read" in capsys.readouterr().err
    (folder / "elsewhere").rename(folder / TENSORS)


def adapter_of_peft(base: Path, folder: Path, modules: list[str], **settings):
    """An adapter that the peft package made, with random values; the merged HF weights."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, lora_alpha=8, target_modules=modules, **settings)
    model = get_peft_model(load_reference(base), config)
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    model.save_pretrained(folder)
    return model.merge_and_unload().state_dict()


def test_an_adapter_of_peft_with_an_a_for_each_of_q_and_v(tmp_path: Path) -> None:
    """Their A are stacked: twice the rank, and alpha, gives the same weights."""
    base = family_checkpoint(tmp_path / "base", "qwen3_moe")
    expected = adapter_of_peft(base, tmp_path / "peft", ["q_proj", "v_proj", "o_proj"])
    lora = {"rank": 5, "alpha": 20.0, "targets": ["attention"], "path": str(tmp_path / "peft")}
    engine = make_engine(base, lora=lora, measure=False, replay="none")
    start = load_file(base / "model.safetensors")
    for name, tensor in engine.export():
        if ".self_attn." in name:
            assert torch.allclose(tensor, expected[name], atol=1e-6), name
            assert tensor.equal(start[name]) == (name.endswith(("k_proj.weight", "norm.weight")))
    engine.parallel.destroy()
    message = r"needs rank 4, for 2 matrices A of .*q_proj"
    refused(base, message, lora | {"rank": 3, "alpha": 12.0})


@pytest.mark.parametrize(("pattern", "scale"), [("up_proj", 4), ("up_proj.weight", 8)])
def test_an_alpha_by_pattern_of_a_parameter(tmp_path: Path, pattern: str, scale: int) -> None:
    """peft compares a pattern with the name of the parameter, which ends in .weight."""
    base = family_checkpoint(tmp_path / "base", "qwen2_moe")
    shared = [f"shared_expert.{name}_proj.weight" for name in ("gate", "up", "down")]
    settings = {"target_parameters": shared, "alpha_pattern": {pattern: 16}}
    expected = adapter_of_peft(base, tmp_path / "peft", [], **settings)
    targets = ["shared_experts.linear_fc1", "shared_experts.linear_fc2"]
    lora = {"rank": 4, "alpha": 16.0, "targets": targets, "path": str(tmp_path / "peft")}
    if scale != 4:
        refused(base, rf"scale of \S*up_proj is {scale}, that of .lora. is 4", lora)
        return
    engine = make_engine(base, lora=lora, measure=False, replay="none")
    of_shared = {name: t for name, t in engine.export() if ".shared_expert." in name}
    engine.parallel.destroy()
    assert of_shared
    for name, tensor in of_shared.items():
        assert torch.allclose(tensor, expected[name], atol=1e-6), name


def test_an_adapter_of_peft_with_the_base_of_embedding_and_lm_head(tmp_path: Path) -> None:
    """peft saves these two weights beside their adapters: they must be those of model.path."""
    base = family_checkpoint(tmp_path / "base", "qwen3_moe")
    modules = ["embed_tokens", "lm_head", "o_proj"]
    expected = adapter_of_peft(base, tmp_path / "peft", modules)
    names = load_file(tmp_path / "peft" / TENSORS).keys()
    assert sum(name.endswith("base_layer.weight") for name in names) == 2
    targets = ["linear_proj", "embedding", "lm_head"]
    lora = {"rank": 2, "alpha": 8.0, "targets": targets, "path": str(tmp_path / "peft")}
    engine = make_engine(base, lora=lora, measure=False, replay="none")
    for name, tensor in engine.export():
        assert ".experts." in name or torch.allclose(tensor, expected[name], atol=1e-6), name
    engine.parallel.destroy()
    other = family_checkpoint(tmp_path / "other", "qwen3_moe", seed=1)
    refused(other, r"embed_tokens.base_layer.weight is not model.embed_tokens.weight", lora)


def test_an_adapter_with_experts_one_by_one(tmp_path: Path) -> None:
    """peft wrote such files for transformers 4."""
    base = family_checkpoint(tmp_path / "base", "mixtral")
    merged, _, folder = exported(base, tmp_path, {"targets": ["experts"]})
    tensors, old = load_file(folder / TENSORS), {}
    for name, tensor in tensors.items():
        module, _, factor = name.removesuffix(".weight").rpartition(".")
        parent = module.removesuffix(".base_layer").replace(".mlp.", ".block_sparse_moe.")
        for expert in range(8):
            part = tensor.chunk(8)[expert] if factor == "lora_A" else tensor[:, expert::8]
            halves = {"w2": part}
            if module.endswith("base_layer"):
                both = (part, part) if factor == "lora_A" else part.chunk(2)
                halves = dict(zip(("w1", "w3"), both, strict=True))
            for half, values in halves.items():
                old[f"{parent}.{expert}.{half}.{factor}.weight"] = values.clone()
    config = json.loads((folder / CONFIG).read_text())
    config |= {"target_modules": ["w1", "w2", "w3"], "target_parameters": None}
    save_file(old, folder / TENSORS, {"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(config))
    lora = LORA | {"targets": ["experts"], "path": str(folder)}
    engine = make_engine(base, lora=lora, measure=False, replay="none")
    assert all(tensor.equal(merged[name]) for name, tensor in engine.export())
    engine.parallel.destroy()
    check_logits(base, folder, merged, tensors=len(tensors))


@pytest.mark.parametrize(
    ("lora", "change", "message"),
    [
        ({"rank": 2}, {}, r"scale of .* is 2, that of \[lora\] is 3 .*set lora.alpha = 4"),
        ({"rank": 2, "alpha": 4.0}, {}, r"needs rank 3, .* lora.rank = 2: raise it"),
        ({"targets": ["attention"]}, {}, r"tensors are of no weight .*lora.targets = \['attention"),
        ({}, {"use_dora": True}, r"use_dora = True .*merge it into its base"),
        ({}, {"bias": "all"}, r"bias = 'all'"),
        ({}, {"init_lora_weights": "pissa_niter_4"}, r"init_lora_weights = 'pissa_niter_4'"),
        ({}, {"init_lora_weights": "OLoRA"}, r"init_lora_weights = 'OLoRA'"),
        ({}, {"modules_to_save": ["lm_head"]}, r"modules_to_save"),
        ({}, {"peft_type": "IA3"}, r"peft_type = IA3"),
        ({"path": "nowhere"}, {}, r"lora.path = nowhere: adapter_config.json cannot be read"),
        ({"rank": 0}, {}, r"lora.rank = 0, as no adapter is trained"),
    ],
)
def test_what_cannot_be_continued_is_named(folder_of_one, lora, change, message, tmp_path) -> None:
    base, folder = folder_of_one
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / TENSORS).write_bytes((folder / TENSORS).read_bytes())
    config = json.loads((folder / CONFIG).read_text()) | change
    (copy / CONFIG).write_text(json.dumps(config))
    refused(base, message, {"path": str(copy)} | lora)


@pytest.fixture(scope="module")
def folder_of_one(tmp_path_factory):
    root = tmp_path_factory.mktemp("peft")
    base = family_checkpoint(root / "base", "qwen3_moe")
    return base, exported(base, root)[2]


def test_the_adapter_of_another_base_is_refused(folder_of_one, tmp_path, caplog) -> None:
    _, folder = folder_of_one
    other = family_checkpoint(tmp_path / "other", "qwen3_moe", seed=1)
    refused(other, "belongs to other weights", {"path": str(folder)})
    narrow = family_checkpoint(tmp_path / "narrow", "qwen3_moe", hidden_size=32)
    refused(narrow, "of another base than model.path", {"path": str(folder)})
    # without a digest only shapes can be compared, which is said
    with safe_open(folder / TENSORS, "pt") as file:
        assert file.metadata()["base_dtype"] == "float32"
    unsigned = tmp_path / "unsigned"
    unsigned.mkdir()
    (unsigned / CONFIG).write_bytes((folder / CONFIG).read_bytes())
    save_file(load_file(folder / TENSORS), unsigned / TENSORS, {"format": "pt"})
    lora = LORA | {"path": str(unsigned)}
    engine = make_engine(other, lora=lora, replay="none", measure=False)
    engine.parallel.destroy()
    assert "has no digest of its base" in caplog.text and "rounded" not in caplog.text
    half = {"lora": lora, "replay": "none", "measure": False, "model": {"dtype": "bfloat16"}}
    engine = make_engine(other, **half)
    engine.parallel.destroy()
    assert "its values are float32; they are rounded to bfloat16" in caplog.text
    values = {name: tensor.half() for name, tensor in load_file(unsigned / TENSORS).items()}
    save_file(values, unsigned / TENSORS, {"format": "pt"})
    engine = make_engine(other, **half)
    engine.parallel.destroy()
    assert "its values are float16; they are rounded to bfloat16" in caplog.text


def test_an_incomplete_folder_and_a_run_without_adapters_are_refused(
    folder_of_one, tmp_path, capsys
) -> None:
    base, folder = folder_of_one
    short = tmp_path / "short"
    short.mkdir()
    (short / CONFIG).write_bytes((folder / CONFIG).read_bytes())
    tensors = load_file(folder / TENSORS)
    del tensors[next(name for name in tensors if name.endswith("lora_B.weight"))]
    save_file(tensors, short / TENSORS)
    refused(base, "it is incomplete", {"path": str(short)})
    engine = make_engine(base, replay="none", measure=False)
    Checkpointer(engine, tmp_path / "run").save(Snapshot(1, {}))
    engine.parallel.destroy()
    run = str(tmp_path / "run" / "step_000001")
    assert main(["megatron-to-peft", "--megatron", run, "--out", str(tmp_path / "out")]) == 2
    assert "holds no adapters" in capsys.readouterr().err


def test_merging_into_another_base_is_refused(tmp_path, capsys) -> None:
    base = family_checkpoint(tmp_path / "base", "qwen3")
    run = exported(base, tmp_path)[1]
    other = family_checkpoint(tmp_path / "other", "qwen3", seed=1)
    options = ["--megatron", str(run), "--config", str(other), "--out", str(tmp_path / "out")]
    for command in ("megatron-to-hf", "megatron-to-peft"):
        assert main([command, *options]) == 2
        assert "belong to other weights" in capsys.readouterr().err
