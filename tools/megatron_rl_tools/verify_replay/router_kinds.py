"""Kinds of routers: the choice and the gate weights of each, computed from its definition, not by
megatron-core.

Shapes: t rows of a router call, E experts, K top-k, G groups of experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_rl.models.spec import RouterKind


def router_kind(name: str, *, num_experts: int, top_k: int) -> RouterKind:
    """Make one of options.KINDS.

    Group-limited routers keep half of their groups, and on average two experts of a kept group.
    Raises ValueError if the experts do not fall into such groups.
    """
    if name == "softmax":
        return RouterKind()
    if name == "pre-softmax":
        return RouterKind(pre_softmax=True)
    if name == "sigmoid":
        return RouterKind("sigmoid", expert_bias=True, scaling_factor=2.446)
    kept = top_k // 2
    if top_k % 2 or num_experts % (2 * kept) or num_experts // (2 * kept) < 2:
        raise ValueError(
            f"--router {name}: {num_experts} experts, top-{top_k}: needs an even top-k, and experts"
            " that fall into top-k groups of two or more; set --experts to a multiple of --topk"
        )
    if name == "softmax-groups":
        return RouterKind(
            pre_softmax=True, num_groups=2 * kept, group_topk=kept, scaling_factor=16.0
        )
    assert name == "sigmoid-groups"
    return RouterKind(
        "sigmoid", expert_bias=True, num_groups=2 * kept, group_topk=kept, scaling_factor=2.5
    )


def set_expert_bias(routers: Sequence[tuple[int, Any]]) -> None:
    """Give routers that have a bias one that changes most choices: by layer, equal on all ranks."""
    for layer, router in routers:
        if router.expert_bias is not None:
            noise = torch.randn(
                router.expert_bias.shape, generator=torch.Generator().manual_seed(layer)
            )
            router.expert_bias.copy_(0.3 * noise)


def live_choice(logits: Tensor, kind: RouterKind, bias: Tensor | None, top_k: int) -> Tensor:
    """Return the live choice for logits [t, E]: expert ids int64 [t, K], ascending."""
    scores = selection_scores(logits, kind, bias)
    if kind.num_groups is not None and kind.group_topk is not None:
        groups = scores.unflatten(1, (kind.num_groups, -1))
        best = groups.sort(descending=True).values[..., : kind.group_best].sum(-1)
        rank = best.argsort(descending=True).argsort()  # of each group in its row
        scores = groups.masked_fill(rank[..., None] >= kind.group_topk, -torch.inf).flatten(1)
    return scores.argsort(descending=True)[:, :top_k].sort().values


def selection_scores(logits: Tensor, kind: RouterKind, bias: Tensor | None) -> Tensor:
    """Return the scores [t, E] by which a router selects, before it limits groups."""
    scores = logits.sigmoid() if kind.score_function == "sigmoid" else logits
    if kind.pre_softmax:
        scores = logits.softmax(-1)
    return scores if bias is None else scores + bias


def gate_weights(logits: Tensor, chosen: Tensor, kind: RouterKind) -> Tensor:
    """Return the gate weights [t, E] of the chosen experts (bool [t, E]), 0 elsewhere.

    softmax: over the chosen experts, or over all of them (pre_softmax).
    sigmoid: shares of the sum of the chosen scores, without the expert bias.
    """
    if kind.score_function == "sigmoid":
        scores = logits.sigmoid() * chosen
        weights = scores / scores.sum(1, keepdim=True)
    elif kind.pre_softmax:
        weights = logits.exp() * chosen / logits.exp().sum(1, keepdim=True)
    else:
        weights = logits.exp() * chosen / (logits.exp() * chosen).sum(1, keepdim=True)
    return weights * (kind.scaling_factor or 1.0)
