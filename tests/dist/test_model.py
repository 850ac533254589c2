"""Logits and routing of the megatron model against transformers, padded and packed, in several
layouts (fp32).
"""

import os
from pathlib import Path

import pytest
import torch

from tests.dist.launch import build, run_ranks
from tests.tiny import random_checkpoint

LENGTHS = (16, 3, 9, 12, 16, 8)  # packed: 64 tokens; two of 16 also as a padded batch


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_reference(random_checkpoint(tmp_path_factory.mktemp("plain")))


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything unusual: tied embeddings, vocabulary not divisible by tp, a dense layer, top-k not
    renormalised.
    """
    settings = {
        "vocab_size": 63,
        "tie_word_embeddings": True,
        "mlp_only_layers": [1],
        "norm_topk_prob": False,
    }
    return make_reference(random_checkpoint(tmp_path_factory.mktemp("odd"), seed=1, **settings))


def make_reference(path: Path) -> Path:
    """Save token ids, transformers' logits [sum S, V] and router logits of each MoE layer [sum S,
    E] beside it.
    """
    from transformers import Qwen3MoeForCausalLM

    model = Qwen3MoeForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    sequences = [
        torch.randint(0, model.config.vocab_size, (length,), generator=generator)
        for length in LENGTHS
    ]
    with torch.no_grad():
        outputs = [model(tokens[None], output_router_logits=True) for tokens in sequences]
    torch.save(
        {
            "tokens": torch.cat(sequences),
            "logits": torch.cat([out.logits[0] for out in outputs]),
            "router": [
                torch.cat(layer)
                for layer in zip(*(out.router_logits for out in outputs), strict=True)
            ],
        },
        path / "reference.pt",
    )
    return path


def test_one_rank(plain: Path, odd: Path) -> None:
    run_ranks(check_parity, 1, [(plain, {}), (odd, {})])


def test_two_ranks(plain: Path, odd: Path) -> None:
    layouts = [{"tp": 2}, {"ep": 2}, {"pp": 2}, {"pp": 2, "vp": 2}]
    run_ranks(check_parity, 2, [*((plain, layout) for layout in layouts), (odd, {"tp": 2})])


def test_four_ranks(odd: Path) -> None:
    run_ranks(check_parity, 4, [(odd, {"tp": 2, "pp": 2, "ep": 2, "etp": 1})])


def check_parity(cases: list[tuple[Path, dict]]) -> None:
    for path, layout in cases:
        reference = torch.load(path / "reference.pt", weights_only=True)
        chunks, spec, config, parallel = build(path, **layout)
        packed = run_packed(chunks, config, parallel, reference["tokens"])
        compare(packed, reference, slice(None), spec, parallel, f"{layout} packed")
        padded = run_padded(
            chunks, config, parallel, reference["tokens"][:16], reference["tokens"][40:56]
        )
        compare(padded, reference, [*range(16), *range(40, 56)], spec, parallel, f"{layout} padded")
        parallel.destroy()


def compare(outputs: tuple, reference: dict, rows: object, spec, parallel, what: str) -> None:
    """outputs: (logits [t, padded V] or None, {global layer: routing map [t, E]})."""
    logits, maps = outputs
    if logits is not None:
        assert (logits[:, : spec.vocab_size] - reference["logits"][rows]).abs().max() < 1e-5, what
    for layer, chosen in maps.items():
        router_logits = reference["router"][spec.moe_layers.index(layer)][rows]
        expected = torch.zeros_like(chosen).scatter(1, router_logits.topk(spec.top_k).indices, True)
        assert chosen.equal(expected), f"{what}: expert sets of layer {layer}"
    per_stage = spec.num_layers // parallel.pp_size
    assert len(maps) >= per_stage - 1, f"{what}: routers seen {sorted(maps)}"


def run_packed(chunks: list, config, parallel, tokens: torch.Tensor) -> tuple:
    from megatron_rl.engine.attention import PlannedSeqParams

    cu_seqlens = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)], dtype=torch.int32)
    params = PlannedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=max(LENGTHS),
        max_seqlen_kv=max(LENGTHS),
    )
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    return run_forward(chunks, config, parallel, tokens[None], positions, params)


def run_padded(chunks: list, config, parallel, *sequences: torch.Tensor) -> tuple:
    tokens = torch.stack(sequences)
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    logits, maps = run_forward(chunks, config, parallel, tokens, positions, None)
    # the router sees [S, B]
    order = torch.arange(tokens.numel()).view(tokens.shape[1], -1).T.flatten()
    return logits, {layer: chosen[order] for layer, chosen in maps.items()}


def run_forward(
    chunks: list, config, parallel, tokens: torch.Tensor, positions: torch.Tensor, packed
) -> tuple:
    """One forward over the pipeline: logits [B * S, V] on the last stage, else None; routing maps
    in router order.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megatron_rl.engine.model import moe_routers

    maps: dict[int, torch.Tensor] = {}
    hooks = [
        router.register_forward_hook(
            lambda module, args, output, layer=layer: maps.update(
                {layer: gather(output[1], parallel.tp_group, 0)}
            )
        )
        for layer, router in moe_routers(chunks)
    ]

    def forward_step(iterator, chunk):
        output = chunk(tokens, positions, None, packed_seq_params=packed)
        return output, lambda out, non_loss_data: out

    with torch.no_grad():
        outputs = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[None] * len(chunks) if len(chunks) > 1 else None,
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=parallel.pp_size,
            seq_length=tokens.numel() // len(tokens),
            micro_batch_size=len(tokens),
            forward_only=True,
            collect_non_loss_data=True,
        )
    for hook in hooks:
        hook.remove()
    if not parallel.is_last_stage:
        return None, maps
    return gather(outputs[0], parallel.tp_group, -1).flatten(0, 1), maps


def gather(tensor: torch.Tensor, group, dim: int) -> torch.Tensor:
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    torch.distributed.all_gather(parts, tensor.contiguous(), group=group)
    return torch.cat(parts, dim)


def test_layouts_in_one_process_leave_no_groups() -> None:
    """megatron-core forgets its groups without ending them; each would keep three threads of
    gloo.
    """
    threads = run_ranks(count_threads, 2, 6)
    for counts in threads:
        assert max(counts[1:]) <= counts[0] + 6, f"threads after each layout: {counts}"


def count_threads(rounds: int) -> list[int]:
    import torch.distributed as dist

    from megatron_rl.config import ParallelConfig
    from megatron_rl.distributed import make_parallel

    dist.init_process_group("gloo")
    counts = []
    for _ in range(rounds):
        parallel = make_parallel(ParallelConfig(tp=2), device="cpu", timeout_minutes=1)
        dist.all_reduce(torch.ones(1), group=parallel.tp_group)
        parallel.destroy()
        counts.append(len(os.listdir("/proc/self/task")))
    dist.destroy_process_group()
    return counts
