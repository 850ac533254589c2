"""Every family against transformers (float32): logits, routing, packed and padded; HF -> megatron
-> HF bit by bit.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megatron_rl.batch.pack import Sample
from megatron_rl.batch.split import make_mini_batch
from megatron_rl.config import Config, ModelConfig, ParallelConfig, load_config
from megatron_rl.distributed import Parallel, make_parallel
from megatron_rl.engine.engine import Engine
from megatron_rl.engine.model import make_model, make_transformer_config
from megatron_rl.metrics.reduce import MetricSums
from megatron_rl.models.families import make_spec
from megatron_rl.models.spec import ModelError, load_hf_config
from megatron_rl.records import Rollout
from megatron_rl.replay.compatibility import ReplayIncompatible
from megatron_rl.weights.hf.load import load_hf
from tests.dist.test_model import LENGTHS, run_packed, run_padded
from tests.exported import export_hf
from tests.families import FAMILIES, YARN, check_same, family_checkpoint, reference

TRAINED = ("qwen2_moe", "deepseek_v3")


@pytest.fixture
def parallel() -> Iterator[Parallel]:
    groups = make_parallel(ParallelConfig(), device="cpu", timeout_minutes=2)
    try:
        yield groups
    finally:
        groups.destroy()


def build(path: Path, parallel: Parallel, *, dtype: str = "float32") -> Any:
    model = ModelConfig(path=path, dtype=dtype)
    spec = make_spec(load_hf_config(path))
    config = make_transformer_config(spec, model, ParallelConfig(), parallel.device)
    chunks = make_model(spec, model, config, parallel)
    load_hf(chunks, path, spec, parallel)
    return chunks, spec, config


@pytest.mark.parametrize("name", FAMILIES)
def test_same_logits_same_routes_same_tensors(
    tmp_path: Path, parallel: Parallel, name: str
) -> None:
    path = family_checkpoint(tmp_path, name)
    expected = reference(path, LENGTHS)
    chunks, spec, config = build(path, parallel)
    logits, maps = run_packed(chunks, config, parallel, torch.cat(expected.sequences))
    check_same(logits, maps, expected, slice(None), spec, "packed")
    assert sorted(maps) == list(spec.moe_layers)
    rows = [*range(16), *range(40, 56)]
    logits, maps = run_padded(
        chunks, config, parallel, expected.sequences[0], expected.sequences[4]
    )
    check_same(logits, maps, expected, rows, spec, "padded")

    exported = dict(export_hf(chunks, spec, parallel))
    original = load_file(path / "model.safetensors")
    assert exported.keys() == original.keys()
    assert [key for key, tensor in original.items() if not tensor.equal(exported[key])] == []


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    root = tmp_path_factory.mktemp("configs")
    return {name: load_hf_config(family_checkpoint(root / name, name)) for name in FAMILIES}


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        (
            "qwen3",
            {"attention_bias": True},
            "attention_bias = True: not supported for Qwen3ForCausalLM, only False",
        ),
        ("qwen3", {"use_sliding_window": True}, "use_sliding_window = True"),
        (
            "qwen3",
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types .*only full_attention",
        ),
        (
            "qwen3",
            {"rope_parameters": {"rope_theta": 1e6, "rope_type": "linear", "factor": 2.0}},
            "rope_parameters",
        ),
        (
            "qwen3",
            {"rope_parameters": {"rope_theta": 1e6, "factor": 2.0}},
            "factor would be ignored",
        ),
        ("qwen3", {"attn_logit_cap": 30}, "attn_logit_cap = 30: unknown for Qwen3ForCausalLM"),
        (
            "qwen3_moe",
            {"shared_expert_intermediate_size": 32},
            "shared_expert_intermediate_size = 32: unknown",
        ),
        ("mixtral", {"sliding_window": 4096}, "sliding_window = 4096"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise = 0.1"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv = 8.0"),
        ("olmoe", {"head_dim": 24}, "head_dim = 24: .*must be hidden_size"),
        ("olmoe", {"attention_dropout": 0.1}, "attention_dropout = 0.1"),
        ("qwen2_moe", {"norm_topk_prob": None}, "norm_topk_prob is missing"),
        (
            "qwen3",
            {"partial_rotary_factor": 0.5},
            "partial_rotary_factor = 0.5: .*would be ignored",
        ),
        ("glm4_moe", {"norm_topk_prob": False}, "norm_topk_prob = False"),
        ("glm4_moe", {"first_k_dense_replace": 3}, "no layer of 3 has experts"),
        ("deepseek_v3", {"topk_group": 1}, "topk_group = 1: .*1 groups of 2 experts are too few"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave = False"),
        (
            "deepseek_v3",
            {"rope_parameters": {**YARN, "mscale": None}},
            "yarn rope scaling without 'mscale'",
        ),
        (
            "deepseek_v3",
            {"rope_parameters": {**YARN, "truncate": False}},
            "truncate would be ignored",
        ),
        ("deepseek_v3", {"attention_bias": True}, "attention_bias = True"),
        ("deepseek_v3", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method = 'noaux_tc'"),
        (
            "deepseek_v2_groups",
            {"n_group": 8},
            "topk_group = 2: .*2 groups of 1 experts are too few",
        ),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob = True"),
        (
            "qwen2_moe",
            {"max_window_layers": 2, "use_sliding_window": True},
            "use_sliding_window = True",
        ),
    ],
)
def test_what_would_be_ignored_is_refused(
    configs: dict, name: str, change: dict, said: str
) -> None:
    make_spec(configs[name])
    with pytest.raises(ModelError, match=said):
        make_spec({**configs[name], **change})


@pytest.mark.parametrize(
    ("name", "layout", "said"),
    [
        ("qwen3", {"ep": 2}, r"parallel\.ep = 2: Qwen3ForCausalLM has no experts"),
        (
            "olmoe",
            {"tp": 2},
            r"parallel\.tp = 2: OlmoeForCausalLM normalises queries over all heads",
        ),
        ("deepseek_v3", {"cp": 2}, r"parallel\.cp = 2: latent attention"),
        (
            "deepseek_v3",
            {"tp": 2, "etp": 1, "sequence_parallel": False},
            r"parallel\.sequence_parallel = false .*query norm",
        ),
        ("qwen2_moe", {"tp": 4}, r"parallel\.tp = 4 must divide the model's num_key_value_heads"),
    ],
)
def test_layouts_that_a_family_cannot_have(
    configs: dict, name: str, layout: dict, said: str
) -> None:
    with pytest.raises(ModelError, match=said):
        make_transformer_config(
            make_spec(configs[name]),
            ModelConfig(path="x"),
            ParallelConfig(**layout),
            torch.device("cpu"),
        )


def test_a_dense_model_trains_without_replay_and_refuses_it(
    tmp_path: Path, parallel: Parallel
) -> None:
    path = family_checkpoint(tmp_path, "qwen3")
    for replay, said in (
        ({"mode": "R3"}, "no MoE layer, nothing can be replayed"),
        ({"mode": "none", "measure": True}, "no MoE layer, no routes can be compared"),
    ):
        with pytest.raises(ReplayIncompatible, match=said):
            Engine(engine_config(path, replay), parallel, total_updates=1)
    engine = Engine(
        engine_config(path, {"mode": "none", "measure": False}), parallel, total_updates=1
    )
    before = {name: tensor.clone() for name, tensor in engine.export()}
    batch = make_mini_batch(
        samples(), max_tokens=32, rule=engine.pack_rule, dp_group=parallel.dp_group
    )
    old = engine.old_logprobs(batch, MetricSums(), replay="none")
    engine.update(batch, old, MetricSums(), replay="none")
    after = dict(engine.export())
    assert [name for name in before if before[name].equal(after[name])] == [], (
        "parameters without gradient"
    )
    assert engine.mismatch([old]) is None


@pytest.mark.parametrize(
    "name",
    [
        name if name in TRAINED else pytest.param(name, marks=pytest.mark.slow)
        for name in FAMILIES
        if name != "qwen3"
    ],
)
def test_replay_of_transformers_routes_gives_its_logprobs_and_trains(
    tmp_path: Path, parallel: Parallel, name: str
) -> None:
    check_replay_of_transformers_routes(family_checkpoint(tmp_path, name), parallel)


def check_replay_of_transformers_routes(
    path: Path, parallel: Parallel, provider: str = "native", limit: float = 1e-5
) -> None:
    """R3 with the experts that transformers chose: its log-probs, no mismatch; then an update that
    moves every tensor.
    """
    expected = reference(path, (9, 14, 6))
    batch_samples, logprobs, row = [], {}, 0
    for index, tokens in enumerate(expected.sequences):
        rows = slice(row, row + len(tokens) - 1)
        routes = torch.stack([ids[rows] for ids in expected.experts], dim=1).to(torch.uint8).numpy()
        batch_samples.append(sample(index, tokens.numpy(), routes))
        chosen = expected.logits[rows].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        logprobs |= {(f"r{index}", place): float(chosen[place]) for place in range(2, len(chosen))}
        row += len(tokens)
    engine = Engine(
        engine_config(path, {"mode": "R3"}, provider=provider), parallel, total_updates=1
    )
    before = {key: tensor.clone() for key, tensor in engine.export()}
    batch = make_mini_batch(
        batch_samples, max_tokens=24, rule=engine.pack_rule, dp_group=parallel.dp_group
    )
    old = engine.old_logprobs(batch, MetricSums(), replay="R3")
    found = {}
    for micro, values in zip(batch.micro_batches, old.logprobs, strict=True):
        for index in micro.loss_mask.nonzero()[:, 0].tolist():
            found[micro.rollout_ids[micro.sequence_ids[index]], int(micro.positions[index])] = (
                float(values[index])
            )
    assert found == pytest.approx(logprobs, abs=limit)
    report = engine.mismatch([old])
    assert report is not None and report.router_mismatch == 0.0
    engine.update(batch, old, MetricSums(), replay="R3")
    still = {key for key, tensor in engine.export() if tensor.equal(before[key])}
    unused = {
        key
        for key in still
        if ".experts." in key or key.endswith(("e_score_correction_bias", "expert_bias"))
    }
    assert still == unused, "parameters without gradient"


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["full", "selective"])
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "qwen3"])
def test_recompute_makes_the_same_update(
    tmp_path: Path, parallel: Parallel, name: str, recompute: str
) -> None:
    check_recompute(family_checkpoint(tmp_path, name), parallel, recompute)


def check_recompute(
    path: Path, parallel: Parallel, recompute: str, provider: str = "native"
) -> None:
    updated = []
    for kind in ("none", recompute):
        cfg = engine_config(path, {"mode": "R3"}, recompute=kind, provider=provider)
        engine = Engine(cfg, parallel, total_updates=1)
        spec, generator, batch_samples = engine.spec, torch.Generator().manual_seed(1), []
        for index in range(3):
            scores = torch.rand(
                9 + index, len(spec.moe_layers), spec.num_experts, generator=generator
            )
            routes = scores.topk(spec.top_k).indices.to(torch.uint8).numpy()
            batch_samples.append(sample(index, np.arange(2, 12 + index), routes))
        batch = make_mini_batch(
            batch_samples, max_tokens=24, rule=engine.pack_rule, dp_group=parallel.dp_group
        )
        engine.update(
            batch, engine.old_logprobs(batch, MetricSums(), replay="R3"), MetricSums(), replay="R3"
        )
        updated.append({key: tensor.clone() for key, tensor in engine.export()})
    assert [key for key in updated[0] if not updated[0][key].equal(updated[1][key])] == []


def test_biases_that_select_experts_keep_their_precision_in_a_bf16_model(
    tmp_path: Path, parallel: Parallel
) -> None:
    path = family_checkpoint(tmp_path, "glm4_moe")
    engine = Engine(
        engine_config(path, {"mode": "R3"}, dtype="bfloat16"), parallel, total_updates=1
    )
    original = load_file(path / "model.safetensors")
    exported = dict(engine.export())
    biases = [name for name in original if name.endswith("e_score_correction_bias")]
    assert len(biases) == 2 and exported["model.norm.weight"].dtype is torch.bfloat16
    assert [name for name in biases if not exported[name].equal(original[name])] == []


def engine_config(
    path: Path,
    replay: dict[str, Any],
    dtype: str = "float32",
    recompute: str = "none",
    provider: str = "native",
) -> Config:
    optim = {"lr": 1e-2, "distributed": False}
    sections = {
        "model": {"path": str(path), "dtype": dtype, "recompute": recompute, "provider": provider},
        "data": {"train": "x"},
        "optim": optim,
        "replay": replay,
    }
    return load_config(None, [], sections)


def samples() -> list[Sample]:
    return [sample(index, np.arange(2, 12 + index) + index, None) for index in range(4)]


def sample(index: int, tokens: np.ndarray, routes: np.ndarray | None) -> Sample:
    logprobs = np.full(len(tokens) - 3, -4.0, dtype=np.float32)
    rollout = Rollout(
        id=f"r{index}", tokens=tokens, prompt_length=3, rollout_logprobs=logprobs,
        routed_experts=routes,
        finish_reason="stop", policy_versions=np.zeros(len(logprobs), np.int32),
    )  # fmt: skip
    return Sample(rollout, float(index - 1.5))
