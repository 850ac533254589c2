"""Hashes of an export are those of the fused tensors; what cannot be compared is logged, not passed
as equal.
"""

import hashlib
import logging
from types import SimpleNamespace

import httpx
import pytest
import torch

from megatron_rl.models.families import make_spec
from megatron_rl.models.spec import load_hf_config
from megatron_rl.weights.hf.entries import entries
from megatron_rl.weights.sync.checksums import ExportDigests, Verifier, served_place
from megatron_rl.weights.sync.servers import WeightPushError
from tests.families import FAMILIES, family_checkpoint

ATTENTION = "model.layers.0.self_attn."
EXPERTS = "model.layers.0.mlp.experts."


def digest(*tensors: torch.Tensor) -> str:
    """As SGLang hashes a tensor on the CPU (tensor_hash in managers/mm_utils.py, 0.5.21)."""
    joined = torch.cat(tensors)
    number = int.from_bytes(
        hashlib.sha256(joined.view(torch.uint8).numpy().tobytes()).digest()[:8], "big"
    )
    return f"{number:016x}"


@pytest.mark.parametrize("reverse", [False, True])
def test_fused_tensors_are_hashed_part_by_part_in_any_order(reverse):
    torch.manual_seed(0)
    shapes = {
        **{f"{ATTENTION}{part}_proj.weight": 6 if part == "q" else 2 for part in "qkv"},
        **{
            f"{EXPERTS}{e}.{part}_proj.weight": 32
            for e in (0, 1, 10, 2)
            for part in ("up", "gate", "down")
        },
        "model.layers.0.mlp.gate.weight": 4,
    }
    tensors = {name: torch.randn(rows, 32) for name, rows in shapes.items()}
    digests = ExportDigests(tensors)
    for name in sorted(tensors, reverse=reverse):
        assert name not in digests.digests()
        digests.add(name, tensors[name].t().contiguous().t())  # any layout
    order = (0, 1, 2, 10)
    assert digests.digests() == {
        f"{ATTENTION}qkv_proj.weight": digest(
            *(tensors[f"{ATTENTION}{part}_proj.weight"] for part in "qkv")
        ),
        f"{EXPERTS}w13_weight": digest(
            *(tensors[f"{EXPERTS}{e}.{part}_proj.weight"] for e in order for part in ("gate", "up"))
        ),
        f"{EXPERTS}w2_weight": digest(*(tensors[f"{EXPERTS}{e}.down_proj.weight"] for e in order)),
        "model.layers.0.mlp.gate.weight": digest(tensors["model.layers.0.mlp.gate.weight"]),
    }
    assert not digests.waiting


def test_a_tensor_that_servers_on_the_cpu_fill_up_has_no_checksum():
    mlp = "model.layers.0.mlp.shared_expert."
    shapes = {"gate_proj.weight": (40, 4), "up_proj.weight": (40, 4), "down_proj.weight": (4, 40)}
    for units in (40, 64):
        digests = ExportDigests([mlp + name for name in shapes])
        for name, shape in shapes.items():
            digests.add(mlp + name, torch.zeros([units if size == 40 else size for size in shape]))
        assert set(digests.digests()) == (
            set() if units == 40 else {f"{mlp}gate_up_proj.weight", f"{mlp}down_proj.weight"}
        )


def test_an_incomplete_tensor_has_no_checksum():
    digests = ExportDigests([f"{ATTENTION}{part}_proj.weight" for part in "qkv"])
    digests.add(f"{ATTENTION}q_proj.weight", torch.zeros(2, 2))
    digests.add(f"{ATTENTION}v_proj.weight", torch.zeros(2, 2))
    assert digests.digests() == {}


def test_every_tensor_of_every_family_has_one_place(tmp_path):
    for family in FAMILIES:
        spec = make_spec(load_hf_config(family_checkpoint(tmp_path / family, family)))
        names = [name for entry in entries(spec) for name, _ in entry.hf]
        digests = ExportDigests(names)
        assert set(digests.served) == set(names)
        assert sorted(name for parts in digests.parts.values() for name in parts) == sorted(names)
        places = [served_place(name) for name in names]
        assert len(set(places)) == len(places), family


def servers(*answers, device="cpu", status=200):
    """What the endpoints of SGLang answer: `answers` has, for each server, the checksums of its
    ranks.
    """
    urls = [f"http://server:{index}" for index in range(len(answers))]
    ranks = dict(zip(urls, answers, strict=True))

    def request(method, url, path, body):
        assert (path, body) == ("/weights_checker", {"action": "checksum", "selector": "target"})
        return httpx.Response(
            status, json={"success": True, "ranks": [{"checksums": each} for each in ranks[url]]}
        )

    return SimpleNamespace(
        urls=urls,
        info=lambda url: {"device": device},
        request=request,
        each=lambda function: [function(url) for url in urls],
    )


@pytest.fixture
def export():
    digests = ExportDigests(["model.norm.weight", "model.layers.0.self_attn.o_proj.weight"])
    for name in digests.served:
        digests.add(name, torch.ones(3))
    return digests


def test_a_server_with_several_ranks_is_compared_where_each_rank_has_the_tensor_as_a_whole(
    export, caplog
):
    found = export.digests() | {"model.layers.0.self_attn.o_proj.weight": "a half", "rotary": "1"}
    with caplog.at_level(logging.WARNING):
        assert Verifier().verify(servers([found, found]), export, "version 3") == 1
    assert (
        "1 tensors verified, 2 not comparable: model.layers.0.self_attn.o_proj.weight, rotary"
        in caplog.text
    )
    with pytest.raises(
        WeightPushError,
        match=r"server:1 does not hold the weights of version 3: 1 of 1 tensors.*norm\.weight",
    ):
        Verifier().verify(
            servers([found, found], [found, found | {"model.norm.weight": "x"}]),
            export,
            "version 3",
        )
    with pytest.raises(WeightPushError, match=r"1 of 2 tensors.*o_proj"):
        Verifier().verify(servers([found]), export, "version 3")


def test_a_server_may_keep_routers_in_float32_and_nothing_else():
    gate, norm = "model.layers.0.mlp.gate.weight", "model.norm.weight"
    digests, values = ExportDigests([gate, norm]), torch.randn(4, 32).bfloat16()
    digests.add(gate, values)
    digests.add(norm, values[0])
    stored = {gate: digest(values), norm: digest(values[0])}
    for router in (values, values.float()):
        answer = [stored | {gate: digest(router)}]
        assert Verifier().verify(servers(answer), digests, "version 1") == 2
    for wrong in ({gate: digest(values.float() + 1)}, {norm: digest(values[0].float())}):
        with pytest.raises(WeightPushError, match="1 of 2 tensors"):
            Verifier().verify(servers([stored | wrong]), digests, "version 1")


def test_a_server_whose_tensors_all_have_other_names_is_an_error(export):
    with pytest.raises(
        WeightPushError,
        match=(
            r"http://server:0: none of its 2 tensors can be compared .*: a\.norm, b; .*"
            r" rollout\.verify_push = version"
        ),
    ):
        Verifier().verify(servers([{"a.norm": "1", "b": "2"}]), export, "version 3")


def test_servers_on_gpus_are_compared_with_each_other(export, caplog):
    verifier, found = Verifier(), {"model.norm.weight": "a", "w": "b"}
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert (
                verifier.verify(
                    servers([found, found], [found, found], device="cuda"), export, "version 3"
                )
                == 4
            )
    assert caplog.text.count("between servers only") == 1, "logged once"
    with pytest.raises(
        WeightPushError,
        match=r"server:1 and http://server:0 differ in the weights of version 3.* checksum: w",
    ):
        verifier.verify(servers([found], [found | {"w": "c"}], device="cuda"), export, "version 3")


def test_a_server_without_checksums_is_logged(export, caplog):
    with caplog.at_level(logging.WARNING):
        assert Verifier().verify(servers([{}], status=404), export, "version 3") == 0
    assert (
        "http://server:0: its weights are not verified: /weights_checker answered 404"
        in caplog.text
    )


def test_queries_of_latent_attention_keep_their_name():
    """SGLang fuses them only with keys and values."""
    name = "model.layers.0.self_attn.{}_proj.weight"
    assert ExportDigests([name.format("q")]).parts == {name.format("q"): [name.format("q")]}
    fused = {name.format("qkv"): [name.format(part) for part in "qkv"]}
    assert ExportDigests([name.format(part) for part in "vqk"]).parts == fused
