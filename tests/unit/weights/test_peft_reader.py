"""Folders of PEFT written by hand: scales by pattern, ranks and what is missing."""

import json
import math
import re

import pytest
import torch
from safetensors.torch import save_file

from megatron_rl.config import ConfigError
from megatron_rl.config.sections import LoraConfig
from megatron_rl.models.families import make_spec
from megatron_rl.models.spec import load_hf_config
from megatron_rl.weights.hf.entries import find_entry
from megatron_rl.weights.hf.peft_reader import PeftFolder
from tests.tiny import random_checkpoint

LAYER = "base_model.model.model.layers.{}."
RANK, HIDDEN, HEADS, KV, EXPERTS, EXPERT = 3, 64, 64, 32, 8, 32
ATTENTION = {
    "self_attn.q_proj": (HEADS, HIDDEN), "self_attn.k_proj": (KV, HIDDEN),
    "self_attn.v_proj": (KV, HIDDEN), "self_attn.o_proj": (HIDDEN, HEADS),
}  # fmt: skip
QKV = "decoder.layers.1.self_attention.linear_qkv.weight"


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    path = random_checkpoint(tmp_path_factory.mktemp("peft") / "base", num_hidden_layers=2)
    return make_spec(load_hf_config(path))


@pytest.fixture
def folder(tmp_path):
    """Return what writes a folder with an adapter of rank 3 for each of some modules."""

    def write(modules, *, rank=RANK, experts=False, **config):
        tensors = {}
        for layer in range(2):
            for name, (rows, columns) in modules.items():
                key = LAYER.format(layer) + name
                tensors[f"{key}.lora_A.weight"] = torch.randn(rank, columns)
                tensors[f"{key}.lora_B.weight"] = torch.randn(rows, rank)
            if experts:  # PEFT wraps gate_up_proj first: it is the other's base_layer
                key = LAYER.format(layer) + "mlp.experts"
                for module, rows, columns in (
                    (f"{key}.base_layer", 2 * EXPERT, HIDDEN), (key, HIDDEN, EXPERT),
                ):  # fmt: skip
                    tensors[f"{module}.lora_A.weight"] = torch.randn(EXPERTS * rank, columns)
                    tensors[f"{module}.lora_B.weight"] = torch.randn(rows, EXPERTS * rank)
        save_file(tensors, tmp_path / "adapter_model.safetensors")
        settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 6.0, "bias": "none"} | config
        if experts:
            settings["target_parameters"] = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
        return tmp_path, tensors

    return write


def lora(**settings):
    return LoraConfig(**{"rank": 9, "alpha": 18.0, "targets": ("attention",)} | settings)


@pytest.mark.parametrize(
    "pattern, module",
    [
        ({"q_proj": 12.0}, "self_attn.q_proj is 4"),
        ({"self_attn.v_proj": 3.0}, "self_attn.v_proj is 1"),
        ({"model.layers.1.self_attn.o_proj": 12.0}, "layers.1.self_attn.o_proj is 4"),
        ({"no_such": 12.0}, ""),
        ({"proj": 12.0}, ""),  # PEFT compares whole parts of a name
    ],
)
def test_a_scale_by_pattern_is_that_of_its_modules(spec, folder, pattern, module):
    path, _ = folder(ATTENTION, alpha_pattern=pattern)
    if not module:
        PeftFolder(path, spec, lora())
        return
    with pytest.raises(ConfigError, match=f"{module}, that of .lora. is 2 .*set lora.alpha = "):
        PeftFolder(path, spec, lora())


@pytest.mark.parametrize("part, base", [("gate_up_proj", ".base_layer"), ("down_proj", "")])
def test_a_scale_by_pattern_of_experts(spec, folder, part, base):
    """Each projection is named by its parameter; a pattern of one is not that of the other."""
    settings = lora(targets=("experts",), rank=RANK, alpha=6.0)
    path, _ = folder({}, experts=True)
    PeftFolder(path, spec, settings)
    path, _ = folder({}, experts=True, alpha_pattern={part: 12.0})
    with pytest.raises(
        ConfigError, match=rf"scale of \S*mlp.experts{base} is 4, .*lora.alpha = 12"
    ):
        PeftFolder(path, spec, settings)


def test_a_scale_by_pattern_of_experts_one_by_one(spec, folder):
    """PEFT compares the module's name: with separate experts, no parameter is fused."""
    modules = {f"mlp.experts.{e}.down_proj": (HIDDEN, EXPERT) for e in range(EXPERTS)}
    settings = lora(targets=("experts",), rank=RANK, alpha=6.0)
    path, _ = folder(modules, alpha_pattern={r"experts\.\d+\.down_proj": 12.0})
    with pytest.raises(ConfigError, match=r"experts.0.down_proj is 4, .*lora.alpha = 12"):
        PeftFolder(path, spec, settings)
    path, _ = folder(modules, alpha_pattern={"down_proj.down_proj": 12.0})
    PeftFolder(path, spec, settings)


def test_the_alpha_that_fits_is_named_with_and_without_rslora(spec, folder):
    path, _ = folder(ATTENTION, use_rslora=True)
    PeftFolder(path, spec, lora(rslora=True, alpha=6.0 / math.sqrt(RANK) * 3.0))
    scale = 6.0 / math.sqrt(RANK)
    for rslora, alpha in ((True, scale * 3), (False, scale * 9)):
        with pytest.raises(ConfigError, match=f"set lora.alpha = {alpha:g}"):
            PeftFolder(path, spec, lora(rslora=rslora, alpha=1.0))


def test_q_k_and_v_with_an_a_each_need_the_sum_of_their_ranks(spec, folder):
    path, tensors = folder(ATTENTION)
    small = PeftFolder(path, spec, lora(rank=8, alpha=16.0))
    with pytest.raises(ConfigError, match="needs rank 9, for 3 matrices A of .*lora.rank = 8"):
        small.factors(find_entry(QKV, spec), torch.zeros(8, HIDDEN))
    first = torch.randn(12, HIDDEN)
    a, rows = PeftFolder(path, spec, lora(rank=12, alpha=24.0)).factors(
        find_entry(QKV, spec), first
    )
    assert a.shape == (12, HIDDEN) and a[9:].equal(first[9:])
    for name, b in zip("qkv", rows, strict=True):
        key = LAYER.format(1) + f"self_attn.{name}_proj"
        expected = tensors[f"{key}.lora_B.weight"] @ tensors[f"{key}.lora_A.weight"]
        torch.testing.assert_close(b @ a, expected)


def test_one_a_that_is_too_large_is_named_so(spec, folder):
    path, _ = folder({"self_attn.o_proj": ATTENTION["self_attn.o_proj"]})
    reader = PeftFolder(path, spec, lora(rank=2, alpha=4.0))
    entry = find_entry("decoder.layers.0.self_attention.linear_proj.weight", spec)
    with pytest.raises(ConfigError, match="needs rank 3, for its A of .*lora.rank = 2"):
        reader.factors(entry, torch.zeros(2, HEADS))


@pytest.mark.parametrize("rslora, alpha", [(False, 18), (True, 2 * math.sqrt(3) * 3)])
def test_a_larger_rank_is_advised_with_the_alpha_that_keeps_the_scale(spec, folder, rslora, alpha):
    """alpha grows with the rank, or under rslora with its square root."""
    path, _ = folder(ATTENTION, use_rslora=rslora)
    scale = 6.0 / (math.sqrt(RANK) if rslora else RANK)
    few = lora(rank=4, rslora=rslora, alpha=scale * (2 if rslora else 4))
    with pytest.raises(ConfigError) as refusal:
        PeftFolder(path, spec, few).factors(find_entry(QKV, spec), torch.zeros(4, HIDDEN))
    advised = re.search(r"raise it to (\d+), and lora.alpha to ([\d.]+),", str(refusal.value))
    assert advised[1] == "9" and float(advised[2]) == pytest.approx(alpha, rel=1e-4)
    assert lora(rank=9, rslora=rslora, alpha=float(alpha)).scale == pytest.approx(scale)
    PeftFolder(path, spec, lora(rank=9, rslora=rslora, alpha=float(alpha)))


def test_what_the_folder_lacks_begins_as_in_a_new_run(spec, folder):
    path, _ = folder({"self_attn.o_proj": ATTENTION["self_attn.o_proj"]})
    reader = PeftFolder(path, spec, lora())
    first = torch.randn(9, HIDDEN)
    a, rows = reader.factors(find_entry(QKV, spec), first)
    assert a.equal(first) and [len(b) for b in rows] == [HEADS, KV, KV]
    assert not any(b.any() for b in rows)


def test_experts_of_one_projection_alone(spec, folder):
    """Without down_proj among the parameters, gate_up_proj has no base_layer."""
    path, tensors = folder({}, experts=True)
    config = json.loads((path / "adapter_config.json").read_text())
    config["target_parameters"] = ["mlp.experts.down_proj"]
    (path / "adapter_config.json").write_text(json.dumps(config))
    alone = {name: t for name, t in tensors.items() if "base_layer" not in name}
    save_file(alone, path / "adapter_model.safetensors")
    reader = PeftFolder(path, spec, lora(targets=("experts",), rank=RANK, alpha=6.0))
    a_of = {name: pairs for name, pairs in reader.pairs.items() if any(pairs)}
    assert a_of and all("linear_fc2" in name for name in a_of)


def test_an_expert_with_an_adapter_of_its_gate_alone(spec, folder):
    modules = {f"mlp.experts.{e}.gate_proj": (EXPERT, HIDDEN) for e in range(EXPERTS)}
    path, tensors = folder(modules)
    reader = PeftFolder(path, spec, lora(targets=("experts",), rank=RANK, alpha=6.0))
    entry = find_entry("decoder.layers.1.mlp.experts.linear_fc1.weight3", spec)
    a, (gate, up) = reader.factors(entry, torch.zeros(RANK, HIDDEN))
    key = LAYER.format(1) + "mlp.experts.3.gate_proj"
    assert a.equal(tensors[f"{key}.lora_A.weight"]) and not up.any()
    assert gate.equal(tensors[f"{key}.lora_B.weight"])


def test_a_folder_without_a_digest_names_its_base(spec, folder, tmp_path):
    path, _ = folder(ATTENTION, base_model_name_or_path="some/base")
    (note, *_) = PeftFolder(path, spec, lora()).check_base("0" * 16, torch.bfloat16, tmp_path)
    assert "no digest of its base (some/base)" in note
