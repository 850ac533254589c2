"""model.provider: who is chosen, and what is said where Megatron-Bridge is absent, of another
version, or does not fit.
"""

import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from megatron_rl.config import ModelConfig, ParallelConfig
from megatron_rl.engine import bridge, te_layers
from megatron_rl.engine.bridge import BridgeProvider, moe_layers, open_bridge
from megatron_rl.engine.bridge_package import (
    INSTALL,
    VERSION,
    add_placeholder_transformer_engine,
    check_installed,
    first_line,
)
from megatron_rl.engine.core_fields import has_transformer_engine, reason_of
from megatron_rl.engine.provider import make_provider, provider_of, provider_spec
from megatron_rl.engine.te_attention import local_attention
from megatron_rl.engine.te_layers import TELayerNormColumnParallelLinear, rms_norm
from megatron_rl.models.spec import ModelError
from megatron_rl.weights.hf.export import batches
from megatron_rl.weights.hf.files import CheckpointError
from megatron_rl.weights.sync.pushed_weights import checked_stream, expected_tensors
from tests.bridge_families import HAS_BRIDGE
from tests.tiny import random_checkpoint


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_checkpoint(tmp_path_factory.mktemp("known"))


def test_a_model_on_the_cpu_of_a_machine_with_gpus_is_refused(known, monkeypatch):
    """megatron-core would allocate on a GPU, and fail where tensors of both meet."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    parallel = SimpleNamespace(device=torch.device("cpu"))
    with pytest.raises(
        ValueError, match=r"run\.device = cpu\): torch sees a GPU.*CUDA_VISIBLE_DEVICES=\"\""
    ):
        make_provider(ModelConfig(path=known), ParallelConfig(), parallel, {})


@pytest.fixture
def unknown(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"architectures": ["GptOssForCausalLM"]}')
    return tmp_path


def test_auto_is_native_where_the_native_tables_know_the_architecture(
    known: Path, unknown: Path
) -> None:
    assert ModelConfig(path=known).provider == "native"
    assert [provider_of(ModelConfig(path=path, provider="auto")) for path in (known, unknown)] == [
        "native",
        "bridge",
    ]
    assert provider_of(ModelConfig(path=known, provider="bridge")) == "bridge"
    assert provider_of(ModelConfig(path=unknown)) == "native"
    with pytest.raises(
        ModelError, match=r"GptOssForCausalLM.*not supported.*model\.provider = bridge"
    ):
        provider_spec(ModelConfig(path=unknown))


@pytest.mark.skipif(HAS_BRIDGE, reason="Megatron-Bridge is installed here")
def test_absent_bridge(unknown: Path) -> None:
    with pytest.raises(ModelError) as error:
        provider_spec(ModelConfig(path=unknown, provider="auto"))
    assert f"needs Megatron-Bridge {VERSION}, found: not installed" in str(
        error.value
    ) and INSTALL in str(error.value)


def test_another_version_of_bridge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: {"megatron-bridge": "0.3.1"}[name])
    with pytest.raises(
        ModelError,
        match=f"needs Megatron-Bridge {VERSION}, found: 0.3.1; install it .Python 3.12, here 3",
    ):
        check_installed()
    monkeypatch.setattr(metadata, "version", lambda name: VERSION)
    check_installed()


def test_what_bridge_builds_as_another_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["Ernie4_5_MoeForCausalLM"]}')
    with pytest.raises(
        ModelError,
        match="does not compute Ernie4_5_MoeForCausalLM as published: it routes by sigmoid",
    ):
        open_bridge(tmp_path, te=False)


@pytest.mark.parametrize(
    ("frequency", "layers"), [(1, (0, 1, 2, 3, 4)), (2, (0, 2, 4)), ([0, 1, 1, 0, 1], (1, 2, 4))]
)
def test_layers_with_experts(frequency: int | list[int], layers: tuple[int, ...]) -> None:
    assert moe_layers(frequency, 5) == layers


def provider(tp: int, head_dim: int = 4) -> BridgeProvider:
    self = BridgeProvider.__new__(BridgeProvider)
    self.spec = SimpleNamespace(architecture="X", head_dim=head_dim, is_mla=False)
    self.parallel = SimpleNamespace(tp_size=tp)
    return self


def test_another_model_class_is_refused() -> None:
    with pytest.raises(ModelError, match="builds X as Linear, the engine trains GPTModel only"):
        provider(1)._check(torch.nn.Linear(1, 1))


def test_attention_over_a_window_with_sinks() -> None:
    """Against a softmax written out: query 2 sees keys 1 and 2, and the sink takes its share."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(3, 1, heads, 4, generator=generator) for heads in (2, 1, 1))
    sinks = torch.tensor([0.3, -0.2])
    found = local_attention(query, key, value, 0.5, 2, sinks).view(3, 1, 2, 4)
    for head in range(2):
        scores = torch.stack(
            [query[2, 0, head] @ key[row, 0, 0] * 0.5 for row in (1, 2)] + [sinks[head]]
        )
        expected = sum(share * value[row, 0, 0] for share, row in zip(scores.softmax(0), (1, 2)))  # noqa: B905
        assert torch.allclose(found[2, 0, head], expected, atol=1e-6)
    assert torch.allclose(
        local_attention(query, key, value, 0.5, None, None)[0], value[0].repeat(1, 2, 1).flatten(1)
    )


def test_norms_whose_weight_is_stored_less_one() -> None:
    x, weight = torch.tensor([[3.0, 4.0]]), torch.tensor([0.5, -0.25])
    plain = torch.nn.functional.rms_norm(x, (2,), eps=1e-6)
    assert torch.allclose(rms_norm(x, weight, 1e-6, True), plain * (weight + 1))
    assert torch.allclose(rms_norm(x, weight, 1e-6, False), plain * weight)
    # what Bridge looks for
    assert "LayerNormColumnParallelLinear" in TELayerNormColumnParallelLinear.__name__


def test_the_layers_of_a_process_are_chosen_once(monkeypatch: pytest.MonkeyPatch) -> None:
    installed: list[bool] = []
    monkeypatch.setattr(te_layers, "install_layers", lambda: installed.append(True))
    for te in (True, False):
        monkeypatch.setattr(te_layers, "_with_te", [])
        installed.clear()
        te_layers.choose_layers(te=te)
        te_layers.choose_layers(te=te)
        assert installed == ([] if te else [True])
        with pytest.raises(
            ModelError,
            match=r"model\.provider = bridge: this process was set up for .* another process",
        ):
            te_layers.choose_layers(te=not te)


@pytest.mark.parametrize(
    ("device", "te"), [(torch.device("cuda"), True), (torch.device("cpu"), False), (None, False)]
)
def test_sizes_are_read_with_the_layers_of_the_run(
    known: Path, monkeypatch: pytest.MonkeyPatch, device: torch.device | None, te: bool
) -> None:
    asked: list[bool] = []

    def package(*, te: bool) -> None:
        asked.append(te)
        raise InterruptedError

    monkeypatch.setattr(bridge, "open_package", package)
    monkeypatch.setattr("megatron_rl.engine.model.has_transformer_engine", lambda: True)
    with pytest.raises(InterruptedError):
        provider_spec(ModelConfig(path=known, provider="bridge"), device)
    assert asked == [te]


def test_the_placeholder_is_not_taken_for_transformer_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        monkeypatch.setitem(sys.modules, name, None)  # restored at the end
    add_placeholder_transformer_engine()
    assert not has_transformer_engine()
    assert reason_of(TypeError("None < 2")) == "it needs TransformerEngine (None < 2)"
    monkeypatch.setattr("megatron_rl.engine.core_fields.has_transformer_engine", lambda: True)
    assert reason_of(TypeError("None < 2")) == "None < 2"


def test_an_error_without_text_is_named_by_its_class() -> None:
    assert first_line(AssertionError()) == "AssertionError"
    assert first_line(KeyError("\n a \n b")) == r"'\n a \n b'"
    assert first_line(ValueError("\n\u26a0 no such model\nhelp")) == "no such model"


def exporting(path: Path, tensors: dict[str, torch.Tensor]) -> BridgeProvider:
    """A provider whose Bridge yields these tensors in this order."""
    self = provider(1)
    self.spec = SimpleNamespace(vocab_size=6, q_lora_rank=0)
    self.parallel.rank, self.model, self._vocabulary = 0, SimpleNamespace(path=path), set()
    self.bridge = SimpleNamespace(export_hf_weights=lambda chunks, **options: iter(tensors.items()))
    return self


def test_what_servers_need_in_one_call_is_together_although_bridge_sorts_names(
    tmp_path: Path,
) -> None:
    """Apart, SGLang keeps the old values of both without an error: buckets, however small, must not
    part them.
    """
    sorted_by_bridge = ["kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "q_a_proj", "q_b_proj"]
    names = [
        f"model.layers.{layer}.self_attn.{part}.weight"
        for layer in (0, 1)
        for part in sorted_by_bridge
    ]
    (tmp_path / "config.json").write_text("{}")
    self = exporting(tmp_path, {name: torch.full((2, 2), float(i)) for i, name in enumerate(names)})
    self.spec.q_lora_rank = 2
    found = list(batches(self.export([], 1), most_bytes=1))
    exported = [each for batch in found for each in batch.tensors]
    assert sorted(each.name for each in exported) == sorted(names)
    assert all(
        each.tensor is not None and each.tensor[0, 0] == names.index(each.name) for each in exported
    )
    pairs = [
        [each.name.split(".")[4] for each in batch.tensors]
        for batch in found
        if len(batch.tensors) > 1
    ]
    assert pairs == [["kv_a_proj_with_mqa", "q_a_proj"]] * 2


def test_bridges_copy_of_a_tied_head_is_not_exported(tmp_path: Path) -> None:
    """Bridge yields it where the checkpoint has one; the weight sync would refuse it as unknown."""
    (tmp_path / "config.json").write_text('{"tie_word_embeddings": true}')
    tensors = {"model.embed_tokens.weight": torch.ones(6, 2), "lm_head.weight": torch.ones(6, 2)}
    save_file(
        {name: tensor.clone() for name, tensor in tensors.items()}, tmp_path / "model.safetensors"
    )
    stream = exporting(tmp_path, tensors).export([], 1)
    expected = expected_tensors(tmp_path, torch.float32)
    assert [each.name for each in checked_stream(stream, expected, tmp_path)] == [
        "model.embed_tokens.weight"
    ]


class Stopped(RuntimeError):
    """As launch.signals.StoppedBySignal."""


@pytest.mark.parametrize(
    "error", [SafetensorError("header"), OSError("no file"), RuntimeError("size"), Stopped()]
)
def test_damaged_files_differ_from_a_stop(error: Exception) -> None:
    def load(chunks: object) -> None:
        raise error

    self = provider(1)
    self.model, self.bridge = SimpleNamespace(path="here"), SimpleNamespace(load_hf_weights=load)
    expected = Stopped if isinstance(error, Stopped) else CheckpointError
    with pytest.raises(
        expected,
        match="" if expected is Stopped else f"here: Megatron-Bridge cannot load it: {error}",
    ):
        self.load([])
