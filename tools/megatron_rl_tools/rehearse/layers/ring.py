"""Attention under context parallelism: context_parallel.py, AttnFuncWithCPAndKVP2P.

Keys and values go around the ring of ranks in cp steps.  Each rank has two chunks of every
sequence; see Scores.tile for the three kinds of steps.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from megatron_rl_tools.rehearse.layers.costs import kernel
from megatron_rl_tools.rehearse.layers.scores import Scores, attend, attend_backward


class RingFunction(Function):
    """Saves queries, output, logsumexp, and the keys and values that arrived last."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, bounds: Tensor | None, scores: Scores,
        layout: str, group: Any, ranks: list[int],
    ) -> Tensor:  # fmt: skip
        size, rank, ctx.shapes = group.size(), group.rank(), (k.shape, v.shape)
        buffers = [torch.cat((k.reshape(-1), v.reshape(-1)))]  # all of them live to the end
        work: list[Any] = []
        outs, sums = [], []
        used: list[Tensor | None] = [None, None]
        for step in range(size):
            wait(work)
            work = []
            if step < size - 1:
                buffers.append(torch.empty_like(buffers[0]))
                work = exchange(buffers[step], buffers[step + 1], group, ranks, 1)
            section = section_of(scores, is_earlier=step <= rank, is_own=step == 0)
            q_part = half(q, 1, layout) if section == "upper" else q
            keys, values = parts(buffers[step], ctx.shapes, section, layout)
            used[step % 2] = q_part  # the inputs of two steps stay alive
            out, logsumexp = attend(q_part, keys, values, scores.tile(size, section))
            outs.append(out)
            sums.append(heads_first(logsumexp, layout))
        total = sums[0].clone()
        out = q.new_zeros(*q.shape[:-1], v.shape[-1])
        for partial, logsumexp in zip(outs, sums, strict=True):
            kernel("ring output correction", partial, logsumexp, out)
        states = [q.new_empty(2, dtype=torch.int64) for _ in range(size)]
        if bounds is not None:  # those of the halves, and of queries and keys in every step
            states += [torch.empty_like(bounds) for _ in range(2 + 2 * size)]
        ctx.save_for_backward(q, buffers[-1], out, total, *states)
        ctx.scores, ctx.layout, ctx.group, ctx.ranks = scores, layout, group, ranks
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, last, out, total, *_ = ctx.saved_tensors
        scores, layout, group = ctx.scores, ctx.layout, ctx.group
        size, rank, grad = group.size(), group.rank(), grad.contiguous()
        upper = heads_last(total[:, ::2]) if scores.is_causal and rank < size - 1 else total
        total, dq = heads_last(total), torch.empty_like(q)
        # keys and values with their gradients so far, here and as they arrive
        buffers = [last.new_empty((2, last.numel())) for _ in range(2)]
        buffers[0][0].copy_(last)
        work: list[Any] = []
        for step in range(size):
            wait(work)
            here, there = buffers[step % 2], buffers[(step + 1) % 2]
            moved = slice(int(step == size - 1), 1 if step == 0 else 2)
            work = exchange(here[moved], there[moved], group, ctx.ranks, -1)
            section = section_of(
                scores, is_earlier=step >= size - rank - 1, is_own=step == size - 1
            )
            keys, values = parts(here[0], ctx.shapes, section, layout)
            is_upper = section == "upper"
            rows = [half(x, 1, layout) if is_upper else x for x in (q, out, grad)]
            q_part, out_part, grad_part = rows
            gradients = attend_backward(
                grad_part, q_part, keys, values, out_part, upper if is_upper else total,
                scores.tile(size, section),
            )  # fmt: skip
            kernel("ring dq correction", gradients[0], dq)
            wait(work)
            work = []
            kernel("ring dkv correction", *gradients[1:], there[1])
            del gradients
        dk, dv = split(buffers[size % 2][1], ctx.shapes)
        return dq, dk, dv, None, None, None, None, None


def section_of(scores: Scores, *, is_earlier: bool, is_own: bool) -> str:
    """Return which scores a step computes: the keys are of an earlier rank, or of this one."""
    if not scores.is_causal:
        return "all"
    return "diagonal" if is_own else "lower" if is_earlier else "upper"


def split(buffer: Tensor, shapes: tuple[torch.Size, torch.Size]) -> tuple[Tensor, Tensor]:
    """Return keys and values, as views."""
    keys, values = buffer.split([shape.numel() for shape in shapes])
    return keys.view(shapes[0]), values.view(shapes[1])


def parts(
    buffer: Tensor, shapes: tuple[torch.Size, torch.Size], section: str, layout: str
) -> tuple[Tensor, Tensor]:
    """Return the keys and values of a step: of an earlier rank's, the first halves."""
    keys, values = split(buffer, shapes)
    if section == "lower":
        return half(keys, 0, layout), half(values, 0, layout)
    return keys, values


def half(tensor: Tensor, index: int, layout: str) -> Tensor:
    """Return one half of every sequence: a copy for packed sequences, else a view."""
    if layout != "thd":
        return tensor.chunk(2, layout.index("s"))[index]
    out = tensor.new_empty(len(tensor) // 2, *tensor.shape[1:])
    kernel("thd_read_half_tensor", out, out)
    return out


def heads_first(logsumexp: Tensor, layout: str) -> Tensor:
    """Return [heads, T] for [T, heads, 1], as flash-attention has it; padded ones stay."""
    flat = logsumexp.squeeze(-1)
    return flat.transpose(0, 1).contiguous() if layout == "thd" else flat


def heads_last(logsumexp: Tensor) -> Tensor:
    return logsumexp.transpose(0, 1).contiguous().unsqueeze(-1)


def wait(work: list[Any]) -> None:
    for request in work:
        request.wait()


def exchange(sent: Tensor, arrives: Tensor, group: Any, ranks: list[int], step: int) -> list[Any]:
    """flash_attn_p2p_communicate: send to the rank `step` further on, receive from the other side.

    Two ranks send in a batch (on GPUs before Blackwell); else even ranks send first.
    """
    size, rank = group.size(), group.rank()
    send = (dist.isend, sent, ranks[(rank + step) % size])
    receive = (dist.irecv, arrives, ranks[(rank - step) % size])
    order = (send, receive) if rank % 2 == 0 else (receive, send)
    if size == 2:
        return dist.batch_isend_irecv(
            [dist.P2POp(operation, tensor, peer, group) for operation, tensor, peer in order]
        )
    return [operation(tensor, peer, group) for operation, tensor, peer in order]
