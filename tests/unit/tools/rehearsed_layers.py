"""Runs TransformerEngine's stand-ins on a pretended GPU and prints their record, as JSON.

A process of its own: the pretended GPU must be loaded before torch is imported.
"""

import json
from typing import Any

from megatron_rl_tools.rehearse import native

library = native.load()
import torch  # noqa: E402

native.install_guard(library)
from megatron_rl_tools.rehearse.compiled import as_kernel  # noqa: E402
from megatron_rl_tools.rehearse.device import PretendedGpu  # noqa: E402
from megatron_rl_tools.rehearse.layers import install  # noqa: E402
from megatron_rl_tools.rehearse.ranks import run_ranks  # noqa: E402
from megatron_rl_tools.rehearse.recorder import Recorder  # noqa: E402
from megatron_rl_tools.rehearse.switchboard import RankFailed  # noqa: E402

recorder = Recorder()
gpu = PretendedGpu(recorder, 80 << 30)
install(recorder)
from transformer_engine.pytorch import (  # noqa: E402
    DotProductAttention,
    GroupedLinear,
    LayerNormLinear,
    Linear,
    RMSNorm,
)
from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb  # noqa: E402
from transformer_engine.pytorch.cpp_extensions import general_gemm  # noqa: E402
from transformer_engine.pytorch.optimizers import FusedAdam  # noqa: E402
from transformer_engine.pytorch.permutation import (  # noqa: E402
    moe_permute_with_probs,
    moe_sort_chunks_by_index,
    moe_unpermute,
)

PACKED = dict(qkv_format="thd", attn_mask_type="padding_causal")
LENGTHS = (96, 32)


def new(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="cuda").requires_grad_()


def record(function: Any, *inputs: torch.Tensor) -> dict[str, Any]:
    """Run forward and backward: shapes, dtypes, kernels, and the bytes that stay after each."""
    recorder.events.clear()
    recorder.problems.clear()
    start = recorder.live
    outputs = function(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    result: dict[str, Any] = {
        "shapes": [list(output.shape) for output in outputs],
        "dtypes": [str(output.dtype).removeprefix("torch.") for output in outputs],
        "kept": recorder.live - start,
    }
    trained = [output for output in outputs if output.requires_grad]
    gradients = [torch.empty_like(output) for output in trained]
    begin = recorder.peak = recorder.live
    torch.autograd.backward(trained, gradients)
    result["backward_peak"] = recorder.peak - begin
    del outputs, trained, gradients
    result["after"] = recorder.live - start
    result["kernels"] = [
        (event[2].removeprefix("te."), event[4], event[5])
        for event in recorder.events
        if event[0] == "op" and event[2].startswith("te.")
    ]
    result["calls"] = [event[3]["operation"] for event in recorder.events if event[0] == "post"]
    result["problems"] = [problem for _, problem, _ in recorder.problems]
    return result


def bounds(device: str = "cuda", dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor([0, LENGTHS[0], sum(LENGTHS)], dtype=dtype).to(device)


def attend(layer: Any, cu_seqlens: torch.Tensor, longest: Any = LENGTHS[0]) -> Any:
    return lambda q, k, v: layer(
        q, k, v, cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens, max_seqlen_q=longest,
        max_seqlen_kv=longest, **PACKED,
    )  # fmt: skip


def compiled_function() -> dict[str, Any]:
    """The operations of a compiled function that calls another one, and the growth of the peak."""
    inner = as_kernel(gpu, torch.sigmoid)

    def gated(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return inner(x) * y + x

    x, y = (torch.empty(1024, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    recorder.events.clear()
    begin = recorder.peak = recorder.live
    out = as_kernel(gpu, gated)(x, y)
    operations = [(event[2], event[4], event[6]) for event in recorder.events]
    return {"operations": operations, "peak": recorder.peak - begin, "shape": list(out.shape)}


def without_groups(world: Any) -> dict[str, Any]:
    bf16 = dict(params_dtype=torch.bfloat16)
    x, rows = new(64, 2, 256), new(128, 256)
    start = recorder.live
    Linear(256, 512, bias=False, **bf16)(x)
    GroupedLinear(1, 256, 512, bias=False, **bf16)(rows, [128])
    workspaces = recorder.live - start
    fused = Linear(256, 512, bias=False, fuse_wgrad_accumulation=True, **bf16)
    fused.weight.main_grad = torch.empty(512, 256, device="cuda")
    fused.weight.grad_added_to_main_grad = False
    normed = LayerNormLinear(256, 512, bias=False, normalization="RMSNorm", **bf16)
    grouped = GroupedLinear(4, 256, 512, bias=False, **bf16)
    heads = (new(128, 8, 64), new(128, 2, 64), new(128, 2, 32))
    attention = DotProductAttention(8, (64, 32), num_gqa_groups=2)
    window = DotProductAttention(8, (64, 32), num_gqa_groups=2, window_size=(15, 0))
    sinks = DotProductAttention(8, (64, 32), num_gqa_groups=2, softmax_type="learnable")
    padded = (new(64, 2, 8, 64), new(64, 2, 2, 64), new(64, 2, 2, 64))
    chosen = torch.zeros(128, 16, dtype=torch.bool, device="cuda")
    sizes = torch.tensor([64, 64])
    order = torch.tensor([1, 0])
    results: dict[str, Any] = {
        "workspaces": workspaces,
        "compiled": compiled_function(),
        "norm": record(RMSNorm(hidden_size=256, **bf16), x),
        "norm of a view": record(RMSNorm(hidden_size=128, **bf16), x[..., :128]),
        "linear": record(Linear(256, 512, bias=True, **bf16), x),
        "fused gradient": record(fused, x),
        "norm and linear": record(normed, x),
        "grouped": record(lambda t: grouped(t, [32, 32, 60, 4]), rows),
        "attention": record(attend(attention, bounds()), *heads),
        "window": record(attend(window, bounds()), *heads),
        "sinks": record(attend(sinks, bounds()), *heads),
        "padded": record(DotProductAttention(8, 64, num_gqa_groups=2), *padded),
        "rope": record(
            lambda t: apply_rotary_pos_emb(
                t, torch.empty(96, 1, 1, 64, device="cuda"), "thd", cu_seqlens=bounds()
            ),
            heads[0],
        ),
        "permute": record(
            lambda t, p: moe_permute_with_probs(t, p, chosen, 256)[:2],
            rows,
            new(128, 16, dtype=torch.float32),
        ),
        "unpermute": record(
            lambda t: moe_unpermute(
                t, torch.empty(128, 33, dtype=torch.int32, device="cuda"), restore_shape=rows.shape
            ),
            new(256, 256),
        ),
        "sort": record(
            lambda t: moe_sort_chunks_by_index(t, sizes.to("cuda"), order.to("cuda")), rows
        ),
        # what TransformerEngine refuses
        "host bounds": record(attend(attention, bounds("cpu", torch.int64)), *heads),
        "longest as a tensor": record(attend(attention, bounds(), torch.tensor(96)), *heads),
        "host sizes": record(lambda t: moe_sort_chunks_by_index(t, sizes, order), rows),
        "float32 input": record(
            Linear(256, 512, bias=False, **bf16), new(64, 256, dtype=torch.float32)
        ),
        "splits": record(lambda t: grouped(t, [32, 32, 60, 5]), rows),
    }
    results["fused gradient"]["added"] = fused.weight.grad_added_to_main_grad
    results["adam"] = adam()
    results["short adam"] = adam(
        torch.bfloat16, master_weights=True, use_decoupled_grad=True, store_param_remainders=True,
        exp_avg_dtype=torch.bfloat16, exp_avg_sq_dtype=torch.bfloat16,
    )  # fmt: skip
    results["gemm"] = {
        layout: list(general_gemm(new(*a), new(*b), torch.float32, layout=layout)[0].shape)
        for layout, a, b in (
            ("TN", (16, 256), (128, 256)),
            ("NN", (16, 256), (128, 16)),
            ("NT", (128, 256), (128, 16)),
        )
    }
    return results


def adam(dtype: torch.dtype = torch.float32, **settings: Any) -> dict[str, int]:
    parameter = torch.nn.Parameter(torch.empty(1024, dtype=dtype, device="cuda"))
    name = "decoupled_grad" if settings else "grad"
    setattr(parameter, name, torch.empty(1024, device="cuda"))
    start, optimizer = recorder.live, FusedAdam([parameter], **settings)
    recorder.peak = recorder.live
    optimizer.step()
    return {"state": recorder.live - start, "peak": recorder.peak - start}


def with_groups(world: Any) -> dict[str, Any]:
    group, ranks = torch.distributed.group.WORLD, list(range(world.size))
    parallel = dict(bias=False, sequence_parallel=True, tp_group=group, params_dtype=torch.bfloat16)
    column = LayerNormLinear(256, 512, normalization="RMSNorm", parallel_mode="column", **parallel)
    row = Linear(256, 512, parallel_mode="row", **parallel)
    rows = sum(LENGTHS) // world.size
    heads = (new(rows, 8, 64), new(rows, 2, 64), new(rows, 2, 64))
    ring = DotProductAttention(8, 64, num_gqa_groups=2, cp_group=group, cp_global_ranks=ranks)
    row(new(64, 2, 256 // world.size))  # makes the workspaces
    return {
        "column": record(column, new(32, 2, 256)),
        "row": record(row, new(64, 2, 256 // world.size)),
        "ring": record(attend(ring, bounds()), *heads),
    }


def main() -> None:
    results: dict[str, Any] = {}
    for size in (1, 2, 4):
        program = without_groups if size == 1 else with_groups
        ranks = run_ranks(range(size), size, program, gpu)
        for result in ranks.values():
            if isinstance(result, RankFailed):
                raise SystemExit(result.trace)
        results[str(size)] = [ranks[rank] for rank in range(size)]
    from megatron.core.extensions import transformer_engine as core
    from megatron.core.optimizer import Adam

    results["core"] = {
        "have": core.HAVE_TE,
        "grouped": issubclass(core.TEColumnParallelGroupedLinear, GroupedLinear),
        "attention": issubclass(core.TEDotProductAttention, DotProductAttention),
        "permute": core.fused_permute_with_probs is moe_permute_with_probs,
        "adam": Adam is FusedAdam,
    }
    print(json.dumps(results))


if __name__ == "__main__":
    main()
