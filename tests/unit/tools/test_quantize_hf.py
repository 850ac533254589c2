"""Quantised checkpoints as others read them: transformers loads our FP8 blocks, nvidia-modelopt's
export holds our weights.
"""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import save_file
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, FineGrainedFP8Config

from megatron_rl.config import RolloutConfig
from megatron_rl.models.families import make_spec
from megatron_rl.models.spec import ModelError, load_hf_config
from megatron_rl.weights.hf.files import HFFiles
from megatron_rl.weights.hf.fp8 import round_to_fp8
from megatron_rl_tools.quantize import quantize_hf as tool
from megatron_rl_tools.quantize.options import parse
from megatron_rl_tools.quantize.quantize_hf import main
from megatron_rl_tools.tiny_text import make_tokenizer
from tests.tiny import random_checkpoint

KEEP = RolloutConfig().quantize_keep
# more than one block, and blocks cut at the border
WIDE = {"hidden_size": 192, "moe_intermediate_size": 160}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return random_checkpoint(
        tmp_path_factory.mktemp("source") / "hf", num_hidden_layers=2, dtype=torch.bfloat16, **WIDE
    )


@pytest.fixture(scope="module")
def blocks(source, tmp_path_factory):
    out = tmp_path_factory.mktemp("blocks") / "hf"
    assert main(["blocks", str(source), "--out", str(out)]) == 0
    return out


def tensors(path) -> dict[str, torch.Tensor]:
    with HFFiles(path) as files:
        return {name: files.read(name) for name in files.headers}


def rounded(path) -> dict[str, torch.Tensor]:
    return {name: round_to_fp8(name, value, KEEP) for name, value in tensors(path).items()}


def test_the_round_trip_gives_the_weights_that_fp8_rollouts_are_sampled_from(
    source, blocks, tmp_path
):
    """float32 output: no second rounding."""
    assert (
        main(["dequantize", str(blocks), "--out", str(tmp_path / "hf"), "--dtype", "float32"]) == 0
    )
    before, after = rounded(source), tensors(tmp_path / "hf")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor.float(), after[name].float()), name
    changed = {
        name
        for name, tensor in tensors(source).items()
        if not torch.equal(tensor.float(), after[name].float())
    }
    # never embedding, head, router or norms
    assert changed == {name for name in before if "proj" in name}
    config = load_hf_config(tmp_path / "hf")
    assert "quantization_config" not in config and config["dtype"] == "float32"
    assert {tensor.dtype for tensor in after.values()} == {torch.float32}


def test_tensors_with_more_precision_than_the_dtype_keep_it(blocks, tmp_path):
    copy = shutil.copytree(blocks, tmp_path / "blocks")
    values = tensors(copy)
    values["model.norm.weight"] = values["model.norm.weight"].float() + 1e-6
    for file in copy.glob("*.safetensors*"):
        file.unlink()
    save_file(values, copy / "model.safetensors", metadata={"format": "pt"})
    assert main(["dequantize", str(copy), "--out", str(tmp_path / "hf")]) == 0
    after = tensors(tmp_path / "hf")
    assert torch.equal(after["model.norm.weight"], values["model.norm.weight"])
    assert {after[name].dtype for name in after if name[-11:] != "norm.weight"} == {torch.bfloat16}


def test_transformers_computes_with_the_rounded_weights(tmp_path):
    """The layout is the one transformers reads: names, shapes of scales, modules that are not
    converted.

    Sizes are multiples of 128: transformers 5.12.1 takes rows // rows of scales for the block,
    which is not 128 where one is cut.
    """
    sizes = {"hidden_size": 256, "moe_intermediate_size": 128, "num_hidden_layers": 2}
    source, blocks = (
        random_checkpoint(tmp_path / "source", dtype=torch.bfloat16, **sizes),
        tmp_path / "blocks",
    )
    assert main(["blocks", str(source), "--out", str(blocks)]) == 0
    assert main(["dequantize", str(blocks), "--out", str(tmp_path / "plain")]) == 0
    ids = torch.arange(24)[None] % 64
    as_fp8 = FineGrainedFP8Config(dequantize=True)
    theirs = AutoModelForCausalLM.from_pretrained(
        blocks, dtype=torch.bfloat16, quantization_config=as_fp8
    )(ids).logits
    assert torch.equal(
        theirs, AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype="auto")(ids).logits
    )
    assert not torch.equal(
        theirs, AutoModelForCausalLM.from_pretrained(source, dtype="auto")(ids).logits
    )


def test_training_from_fp8_is_refused_with_the_remedy(blocks):
    with pytest.raises(ModelError, match="quantization_config.*megatron-rl quantize dequantize"):
        make_spec(load_hf_config(blocks))


def test_a_stopped_run_continues_and_a_finished_one_is_not_repeated(
    source, tmp_path, monkeypatch, capsys
):
    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    model.save_pretrained(tmp_path / "shards", max_shard_size="300KB")
    written, write = [], tool.write_shard

    def stops_at_the_third(file, *rest):
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(file.name)
        write(file, *rest)

    arguments = ["blocks", str(tmp_path / "shards"), "--out", str(tmp_path / "out")]
    monkeypatch.setattr(tool, "write_shard", stops_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        main(arguments)
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(
        tool, "write_shard", lambda file, *rest: (written.append(file.name), write(file, *rest))
    )
    assert main(arguments) == 0
    assert (
        len(written)
        == len(set(written))
        == len(list((tmp_path / "shards").glob("*.safetensors")))
        > 3
    )
    one = tensors(tmp_path / "out")
    assert main(["blocks", str(source), "--out", str(tmp_path / "unstopped")]) == 0
    for name, tensor in tensors(tmp_path / "unstopped").items():
        assert torch.equal(tensor.view(torch.uint8), one[name].view(torch.uint8)), name
    capsys.readouterr()
    assert main(arguments) == 0 and "nothing to do" in capsys.readouterr().out


@pytest.mark.parametrize(
    "break_it, message",
    [
        (lambda hf: hf.pop("quantization_config"), "only quant_method = fp8"),
        (
            lambda hf: hf["quantization_config"].update(weight_block_size=[64, 64]),
            r"blocks of 64 need \[",
        ),
        (
            lambda hf: hf["quantization_config"].update(weight_block_size=None),
            "square weight_block_size",
        ),
    ],
)
def test_what_is_not_block_fp8_is_refused(blocks, tmp_path, capsys, break_it, message):
    shutil.copytree(blocks, tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    break_it(config)
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    assert main(["dequantize", str(tmp_path / "hf"), "--out", str(tmp_path / "out")]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


def test_quantising_twice_is_refused(blocks, tmp_path, capsys):
    assert main(["blocks", str(blocks), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("megatron-rl quantize: ") and "dequantize it first" in error


# nvidia-modelopt ----------------------------------------------------------------------------------


def test_an_unknown_recipe_names_the_nearest(source, tmp_path, capsys):
    pytest.importorskip("modelopt")
    assert (
        main(
            ["modelopt", str(source), "--out", str(tmp_path / "out"), "--recipe", "FP8_DEFALT_CFG"]
        )
        == 2
    )
    assert "did you mean FP8_DEFAULT_CFG" in capsys.readouterr().err


def test_modelopts_fp8_is_the_checkpoint_rounded_with_activations_seen(source, tmp_path, capsys):
    """Every projection of every expert is e4m3 within half a step of the source; router, head and
    embedding bit for bit.
    """
    pytest.importorskip("modelopt")
    arguments = [
        "modelopt",
        str(source),
        "--out",
        str(tmp_path / "out"),
        "--recipe",
        "FP8_DEFAULT_CFG",
    ]
    assert main(arguments) == 2
    assert "set --prompts" in capsys.readouterr().err
    make_tokenizer().save_pretrained(source)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        "".join(
            json.dumps({"prompt": f"{n}+{n}=", "label": str(2 * n)}) + "\n" for n in range(10, 14)
        )
    )
    assert main([*arguments, "--prompts", str(prompts)]) == 0
    before, after = tensors(source), tensors(tmp_path / "out")
    assert (
        json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())["quantization"][
            "quant_algo"
        ]
        == "FP8"
    )
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    for name, tensor in before.items():
        if "proj" not in name:
            assert torch.equal(tensor, after[name]), name
            continue
        assert after[name].dtype == torch.float8_e4m3fn
        assert after[name.replace(".weight", ".input_scale")] > 0
        scale = after[name.replace(".weight", ".weight_scale")]
        assert_close(
            after[name].float() * scale, tensor.float(), rtol=2**-4, atol=float(scale) * 2**-10
        )


def test_drafts_modules_without_scales_are_kept(source):
    """SGLang's layers of multi-token prediction load eh_proj and shared_head as plain weights."""
    keep = parse(["blocks", str(source), "--out", "b"]).keep
    assert set(KEEP) < set(keep)
    for name in ("eh_proj.weight", "shared_head.head.weight"):
        value = torch.randn(128, 128)
        assert torch.equal(round_to_fp8(f"model.layers.3.{name}", value, keep), value)
