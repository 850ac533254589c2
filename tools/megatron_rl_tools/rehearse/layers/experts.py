"""Kernels around the experts: permutation.py and router.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from megatron_rl_tools.rehearse.layers.costs import kernel, need_cuda, recorder, refuse


class PermuteFunction(Function):
    """_moe_permute_mask_map.  It saves its map of rows, int32 [T, 2 experts + 1]."""

    @staticmethod
    def forward(
        ctx: Any, inp: Tensor, routing_map: Tensor, num_out_tokens: int, probs: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        if not inp.numel():
            ctx.probs = probs
            return inp, inp.new_empty(0), inp.new_empty(0)
        num_tokens, num_experts = routing_map.shape
        row_ids = inp.new_empty(num_tokens, 2 * num_experts + 1, dtype=torch.int32)
        kernel("row id map", routing_map, row_ids, row_ids, row_ids)  # three passes
        out = inp.new_empty(num_out_tokens, inp.shape[1])
        permuted = None if probs is None else probs.new_empty(num_out_tokens)
        kernel("permute", inp, row_ids, probs, out, permuted)
        ctx.shape = inp.shape
        ctx.save_for_backward(row_ids)
        ctx.mark_non_differentiable(row_ids)
        return out, row_ids, permuted

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor, _: Any, probs_grad: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        if not grad.numel():
            return grad, None, None, ctx.probs
        (row_ids,) = ctx.saved_tensors
        dx, dprobs = grad.new_empty(ctx.shape), None
        if probs_grad is not None:
            dprobs = probs_grad.new_empty(len(row_ids), row_ids.shape[1] // 2)
        kernel("unpermute", grad, row_ids, probs_grad, dx, dprobs)
        return dx, None, None, dprobs if ctx.needs_input_grad[3] else None


class UnpermuteFunction(Function):
    """_moe_unpermute_mask_map."""

    @staticmethod
    def forward(
        ctx: Any, inp: Tensor, row_ids: Tensor, merging_probs: Tensor | None, shape: Any
    ) -> Tensor:
        if not inp.numel():
            ctx.merging_probs = merging_probs
            return inp
        out = inp.new_empty(inp.shape if shape is None else shape)
        kernel("unpermute", inp, row_ids, merging_probs, out)
        ctx.num_rows = len(inp)
        # the input is needed for the gradient of the probabilities only
        saved = None if merging_probs is None else inp
        ctx.save_for_backward(saved, row_ids, merging_probs)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if not grad.numel():
            return grad, None, ctx.merging_probs, None
        inp, row_ids, merging_probs = ctx.saved_tensors
        dx = grad.new_empty(ctx.num_rows, grad.shape[1])
        dprobs = None if merging_probs is None else torch.empty_like(merging_probs)
        kernel("permute", grad, inp, row_ids, merging_probs, dx, dprobs)
        return dx, None, dprobs, None


class SortFunction(Function):
    """_moe_chunk_sort.  It saves its map of rows, int32 [T]."""

    @staticmethod
    def forward(
        ctx: Any, inp: Tensor, split_sizes: Tensor, sorted_index: Tensor, probs: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        if not inp.numel():
            return inp, probs
        row_ids = inp.new_empty(len(inp), dtype=torch.int32)
        kernel("chunk sort map", split_sizes, sorted_index, row_ids)
        out, permuted = torch.empty_like(inp), None if probs is None else torch.empty_like(probs)
        kernel("chunk sort", inp, row_ids, probs, out, permuted)
        ctx.save_for_backward(row_ids)
        return out, permuted

    @staticmethod
    def backward(ctx: Any, grad: Tensor, probs_grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if not grad.numel():
            return grad, None, None, probs_grad
        (row_ids,) = ctx.saved_tensors
        dx = torch.empty_like(grad)
        dprobs = None if probs_grad is None else torch.empty_like(probs_grad)
        kernel("chunk sort", grad, row_ids, probs_grad, dx, dprobs)
        return dx, None, None, dprobs


def moe_permute(
    inp: Tensor,
    routing_map: Tensor,
    num_out_tokens: int = -1,
    max_token_num: int = -1,
    map_type: str = "mask",
) -> tuple[Tensor, Tensor]:
    check_permute(inp, routing_map, num_out_tokens, map_type)
    out, row_ids, _ = PermuteFunction.apply(inp, routing_map, int(num_out_tokens), None)
    return out, row_ids


def moe_permute_with_probs(
    inp: Tensor, probs: Tensor, routing_map: Tensor, num_out_tokens: int = -1
) -> tuple[Tensor, Tensor, Tensor]:
    need_cuda("probs of moe_permute", probs)
    check_permute(inp, routing_map, num_out_tokens, "mask")
    out, row_ids, permuted = PermuteFunction.apply(inp, routing_map, int(num_out_tokens), probs)
    return out, permuted, row_ids


def check_permute(inp: Tensor, routing_map: Tensor, num_out_tokens: Any, map_type: str) -> None:
    need_cuda("input of moe_permute", inp)
    need_cuda("routing_map of moe_permute", routing_map)
    if map_type != "mask":
        refuse(f"map_type = {map_type} of moe_permute", "core passes a mask")
    if num_out_tokens is None or num_out_tokens < 0:
        recorder().problem("TransformerEngine's moe_permute needs num_out_tokens")


def moe_unpermute(
    inp: Tensor,
    row_id_map: Tensor,
    merging_probs: Tensor | None = None,
    restore_shape: torch.Size | None = None,
    map_type: str = "mask",
    probs: Tensor | None = None,
) -> Tensor:
    for tensor in (inp, row_id_map, merging_probs):
        need_cuda("input of moe_unpermute", tensor)
    if map_type != "mask":
        refuse(f"map_type = {map_type} of moe_unpermute", "core passes a mask")
    merging_probs = probs if merging_probs is None else merging_probs
    out: Tensor = UnpermuteFunction.apply(inp, row_id_map, merging_probs, restore_shape)
    return out


def moe_sort_chunks_by_index(inp: Tensor, split_sizes: Tensor, sorted_index: Tensor) -> Tensor:
    need_cuda("split_sizes of moe_sort_chunks", split_sizes)
    need_cuda("sorted_index of moe_sort_chunks", sorted_index)
    out: Tensor = SortFunction.apply(inp, split_sizes, sorted_index, None)[0]
    return out


def moe_sort_chunks_by_index_with_probs(
    inp: Tensor, probs: Tensor, split_sizes: Tensor, sorted_index: Tensor
) -> tuple[Tensor, Tensor]:
    need_cuda("split_sizes of moe_sort_chunks", split_sizes)
    need_cuda("sorted_index of moe_sort_chunks", sorted_index)
    need_cuda("probs of moe_sort_chunks", probs)
    out, permuted = SortFunction.apply(inp, split_sizes, sorted_index, probs)
    return out, permuted


class TopkFunction(Function):
    """router.py, FusedTopkScoreFunction: saves the map and the scores, float32."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, expert_bias: Tensor | None) -> tuple[Tensor, Tensor]:
        probs, scores = torch.empty_like(logits), torch.empty_like(logits)
        routing_map = logits.new_empty(logits.view(-1, logits.shape[-1]).shape, dtype=torch.bool)
        kernel("fused topk", logits, expert_bias, probs, scores, routing_map)
        ctx.save_for_backward(routing_map, scores)
        ctx.mark_non_differentiable(routing_map)
        return probs, routing_map

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor, None]:
        out = torch.empty_like(grad, memory_format=torch.contiguous_format)
        kernel("fused topk backward", grad, *ctx.saved_tensors, out)
        return out, None


def fused_topk_with_score_function(
    logits: Tensor,
    topk: int,
    use_pre_softmax: bool,
    num_groups: int | None,
    group_topk: int | None,
    scaling_factor: float | None,
    score_function: str,
    expert_bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    need_cuda("router logits", logits)
    probs, routing_map = TopkFunction.apply(logits, expert_bias)
    return probs, routing_map


class AuxScoreFunction(Function):
    """router.py, FusedComputeScoresForMoEAuxLoss."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> tuple[Tensor, Tensor]:
        rows = logits.view(-1, logits.shape[-1])
        routing_map = rows.new_empty(rows.shape, dtype=torch.bool)
        scores, saved = torch.empty_like(rows), torch.empty_like(rows)
        kernel("fused scores", logits, scores, saved, routing_map)
        ctx.save_for_backward(saved)
        ctx.mark_non_differentiable(routing_map)
        ctx.shape = logits.shape
        return routing_map, scores

    @staticmethod
    def backward(ctx: Any, _: Any, grad: Tensor) -> Tensor:
        out = grad.new_empty(ctx.shape)
        kernel("fused scores backward", grad, *ctx.saved_tensors, out)
        return out


def fused_compute_score_for_moe_aux_loss(
    logits: Tensor, topk: int, score_function: str
) -> tuple[Tensor, Tensor]:
    routing_map, scores = AuxScoreFunction.apply(logits)
    return routing_map, scores


class AuxLossFunction(Function):
    """router.py, FusedAuxLoss."""

    @staticmethod
    def forward(ctx: Any, probs: Tensor, tokens_per_expert: Tensor) -> Tensor:
        out, constant = probs.new_empty(()), probs.new_empty((), dtype=torch.float32)
        kernel("fused aux loss", probs, tokens_per_expert, out)
        ctx.save_for_backward(constant, tokens_per_expert)
        ctx.shape = probs.shape
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        out = grad.new_empty(ctx.shape)
        kernel("fused aux loss backward", *ctx.saved_tensors, out)
        return out, None


def fused_moe_aux_loss(
    probs: Tensor,
    tokens_per_expert: Tensor,
    total_num_tokens: int,
    num_experts: int,
    topk: int,
    coeff: float,
) -> Tensor:
    out: Tensor = AuxLossFunction.apply(probs, tokens_per_expert)
    return out
