"""What megatron-core must be given on a pretended GPU: counts of tokens per expert, and what it
asks of a driver.

An expert's count decides sizes, and only values decide it.  The counts are invented: balanced, or
with `skew` times the mean for the experts of the first expert-parallel rank.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_rl_tools.rehearse.device import PretendedGpu


def imported(name: str) -> Any:
    """Import a module whose private names are replaced."""
    return importlib.import_module(name)


def install(gpu: PretendedGpu, skew: float) -> None:
    """Patch torch and megatron-core; call it once, after the imports and before ranks start."""
    install_attention(gpu)
    random = imported("megatron.core.tensor_parallel.random")
    random._get_cuda_rng_state = lambda *args, **kwargs: torch.default_generator.get_state()
    random._set_cuda_rng_state = lambda *args, **kwargs: None
    install_dispatcher(gpu, skew)
    install_optimizer(gpu)
    install_pinning(gpu)

    def bytes_of_storage(storage: torch.UntypedStorage) -> Tensor:
        with gpu.fake:  # a pretended storage cannot be given to a new tensor
            view = torch.empty(storage.nbytes(), dtype=torch.uint8, device="cuda")
        gpu.recorder.ignore(view)
        return view

    for name in ("offload", "reference"):
        imported(f"megatron_rl.engine.{name}").bytes_of_storage = bytes_of_storage


def install_optimizer(gpu: PretendedGpu) -> None:
    """Let norms and Adam work as the fused kernels of TransformerEngine or apex: one pass over the
    tensors, without temporary copies of all of them.
    """
    clip = imported("megatron.core.optimizer.clip_grads")
    adam = imported("torch.optim.adam")

    def l2_norm(
        chunk: int, flag: Tensor, lists: Sequence[Sequence[Tensor]], *args: object
    ) -> tuple[Tensor, Tensor]:
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in lists[0])
        gpu.recorder.operation(
            "multi_tensor_l2norm", "memory", flops=0, num_bytes=num_bytes, dtype=torch.float32
        )
        return torch.ones(1, device="cuda"), torch.ones(1, device="cuda")

    clip.l2_norm_impl = l2_norm
    adam._default_to_fused_or_foreach = lambda *args, **kwargs: (False, False)


def install_dispatcher(gpu: PretendedGpu, skew: float) -> None:
    """Invent the tokens per expert of every dispatch, and the sizes that follow from them."""
    module = imported("megatron.core.transformer.moe.token_dispatcher")
    exchange, gather = module.MoEAlltoAllTokenDispatcher, module.MoEAllGatherTokenDispatcher
    preprocess, postprocess = exchange.preprocess, gather.dispatch_postprocess
    rows = 0

    def counts_of(dispatcher: Any, routing_map: Tensor) -> Tensor:
        config = dispatcher.config
        routed = routing_map.shape[0] * config.moe_router_topk
        return token_counts(routed, routing_map.shape[1], config.expert_model_parallel_size, skew)

    def with_counts(self: Any, routing_map: Tensor, *args: Any, **kwargs: Any) -> Any:
        nonlocal rows
        gpu.column_counts = counts_of(self, routing_map)
        rows = int(gpu.column_counts.sum())
        return preprocess(self, routing_map, *args, **kwargs)

    def with_local_counts(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal rows
        # the map of all ranks' rows; this rank permutes those of its experts
        first, last = self.local_expert_indices[0], self.local_expert_indices[-1]
        gpu.column_counts = counts_of(self, self.routing_map)[first : last + 1]
        rows = int(gpu.column_counts.sum())
        return postprocess(self, *args, **kwargs)

    exchange.preprocess, gather.dispatch_postprocess = with_counts, with_local_counts

    def size_of_permuted(name: str, args: Sequence[Any]) -> int | None:
        # core's permute selects each row's experts by its routing map [experts, rows]
        return rows if name in ("masked_select", "index", "nonzero") and rows else None

    gpu.size_rules.append(size_of_permuted)


def token_counts(rows: int, num_experts: int, ep_size: int, skew: float) -> Tensor:
    """Return int64 [experts]: the rows of each expert, `rows` in all.

    The experts of the first expert-parallel rank (one expert without expert parallelism) have
    `skew` times the mean.
    """
    hot = max(1, num_experts // ep_size) if ep_size > 1 else 1
    weights = np.full(num_experts, (num_experts - hot * skew) / max(1, num_experts - hot))
    weights[:hot] = skew
    shares = np.maximum(weights, 0) * rows / num_experts
    counts = np.floor(shares).astype(np.int64)
    remainder = rows - int(counts.sum())
    order = np.argsort(counts - shares, kind="stable")  # the largest remainders first
    counts[order[: max(remainder, 0)]] += 1
    return torch.from_numpy(counts)


def install_attention(gpu: PretendedGpu) -> None:
    """Let torch's attention take the kernel that a GPU would."""
    original = F.scaled_dot_product_attention

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if not query.is_cuda:
            return original(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale,
                enable_gqa=enable_gqa,
            )  # fmt: skip
        if attn_mask is not None:
            kernel = (
                "the math kernel, with all scores in memory" if enable_gqa else "no flash kernel"
            )
            gpu.recorder.problem(f"attention with an explicit mask: {kernel}")
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        output: Tensor = flash(query, key, value, 0.0, is_causal, False, scale=scale)[0]
        return output

    F.scaled_dot_product_attention = attention


def install_pinning(gpu: PretendedGpu) -> None:
    """Let CPU tensors be pinned: they are marked, since only a driver can pin memory."""
    empty = torch.empty

    def mark(tensor: Tensor) -> Tensor:
        tensor.is_pretended_pinned = True  # type: ignore[attr-defined]
        return tensor

    def make_empty(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        tensor = empty(*args, **kwargs)
        return mark(tensor) if pin_memory else tensor

    torch.empty = make_empty  # type: ignore[assignment]
    torch.Tensor.pin_memory = lambda self, *args: mark(self)  # type: ignore[method-assign]
    torch.Tensor.is_pinned = (  # type: ignore[method-assign]
        lambda self, *args: getattr(self, "is_pretended_pinned", False)
    )
