"""The two passes over the pipeline schedule: old-logprob (forward only) and train (forward +
backward).

Shapes: T packed rows of a micro-batch (under context parallelism this rank's, from to_device on), t
this rank's router rows, L MoE layers, l this stage's, K top-k.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_attr_wrapped_model, get_model_config
from torch import Tensor, nn

from megatron_rl.engine.attention import PlannedSeqParams
from megatron_rl.records import MiniBatch, PackedBatch, RowState
from megatron_rl.records.sampling_mask import sets_of_tokens
from megatron_rl.replay.layout import (
    RankLayout,
    RouteMemory,
    Rows,
    check_local_routes,
    check_routes,
)
from megatron_rl.replay.manager import ReplayManager, ReplayPass, Routes, WatchRouters

LossFn = Callable[[int, PackedBatch, Tensor], Tensor]
"""(micro-batch index, micro-batch on the device, what the model returns) -> scalar to
differentiate; on the last stage.

The model returns logits [b, t, v], or hidden states [b, t, H] (this tensor rank's under sequence
parallelism)."""


def run_schedule(
    models: Sequence[nn.Module],
    manager: ReplayManager,
    micro_batches: Sequence[PackedBatch],
    routes: Sequence[Routes],
    loss_fn: LossFn,
    *,
    training: bool,
    record: bool = False,
    padded: bool = False,
    watch: WatchRouters | None = None,
) -> ReplayPass:
    """Run every micro-batch through the pipeline once, inside one replay pass; sequences side by
    side where `padded`.

    Stages exchange the shapes of what they send, so micro-batches may differ in sequences and
    lengths.
    """
    # every chunk of a stage sees all micro-batches
    iterators = [iter(enumerate(micro_batches)) for _ in models]
    with manager.run_pass(routes, training=training, record=record, watch=watch) as replay_pass:
        get_forward_backward_func()(
            forward_step_func=partial(forward_step, manager, loss_fn, padded),
            data_iterator=iterators
            if len(models) > 1
            else iterators[0],  # core takes a list from interleaved stages only
            model=list(models) if len(models) > 1 else models[0],
            num_microbatches=len(micro_batches),
            # not read: stages exchange shapes
            seq_length=max(batch.num_tokens for batch in micro_batches),
            micro_batch_size=1,
            forward_only=not training,
        )
    return replay_pass


def forward_step(
    manager: ReplayManager,
    loss_fn: LossFn,
    padded: bool,
    data: Iterator[tuple[int, PackedBatch]],
    model: nn.Module,
) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, dict[str, Tensor]]]]:
    """megatron-core's forward_step_func: run one micro-batch, return its output and its loss
    function.

    Packed, the model sees one sequence [1, T] and where its parts begin; padded, a batch [B, T / B]
    (BSHD).
    """
    index, batch = next(data)
    shape = (len(batch.cu_seqlens) - 1 if padded else 1, -1)
    packed = None if padded else packed_parameters(batch, get_model_config(model))
    with manager.forward(index):
        output = model(
            batch.tokens.view(shape),
            batch.positions.view(shape),
            None,
            packed_seq_params=packed,
            padding_mask=router_padding_mask((batch.row_state == RowState.PAD).view(shape), model),
        )

    def loss_func(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        loss = loss_fn(index, batch, output)
        # core would divide by the token count; finalize_summed_grads does not read it
        return loss, torch.zeros((), dtype=torch.int, device=loss.device), {}

    return output, loss_func


def packed_parameters(batch: PackedBatch, core: TransformerConfig) -> PlannedSeqParams:
    """Where the sequences of a packed micro-batch begin, for core's attention and RoPE.

    On the device for TransformerEngine, whose kernels read them there; on the host for
    PackedAttention, and for unfused RoPE.
    """
    host = bounds_of(batch.cu_seqlens)
    if core.transformer_impl != "transformer_engine":
        return host
    return replace(
        bounds_of(batch.cu_seqlens.to(batch.tokens.device), host.max_seqlen_q), on_host=host
    )


def bounds_of(cu_seqlens: Tensor, longest: int | None = None) -> PlannedSeqParams:
    """core's parameters of sequences at these rows.  longest: of their lengths, if it is known."""
    longest = int(cu_seqlens.diff().max()) if longest is None else longest
    return PlannedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def router_padding_mask(pads: Tensor, model: nn.Module) -> Tensor | None:
    """GPTModel.forward's padding_mask for `pads` bool [B, T], True on pads; shaped as its tokens.

    core leaves these rows out of auxiliary losses and of the token counts that move an expert bias.
    """
    chunk: GPTModel = get_attr_wrapped_model(model, "pre_process", return_model_obj=True)
    if chunk.config.moe_router_enable_expert_bias:
        return None  # core applies the mask of rows to the expert axis here, and fails
    if chunk.pre_process or not chunk.config.sequence_parallel:
        return pads
    # core's first stage cuts the mask as it cuts the embeddings; its later stages (0.16.1, 0.19.2)
    # pass it to routers uncut
    mine = scatter_to_sequence_parallel_region(
        pads.transpose(0, 1).contiguous(), group=chunk.pg_collection.tp
    )
    return mine.transpose(0, 1).contiguous()


class RolloutRoutes:
    """Cuts the routes that rollouts carry to the rows and layers of this rank.

    num_layers: MoE layers of the model.  Host memory is used again by every pass: see RouteMemory.
    """

    def __init__(self, layout: RankLayout, num_layers: int, device: torch.device) -> None:
        self.layout, self.num_layers, self.device = layout, num_layers, device
        self._memory = RouteMemory()

    def of(
        self, batch: MiniBatch, *, replay: bool, compare: bool, check: bool = True
    ) -> list[Routes]:
        """Of each micro-batch: what to replay and/or what to compare with.  On a CPU valid until
        the next call.

        Raises ValueError where the batch has no routes, or, with `check`, where they break a rule.
        """
        if not (replay or compare):
            return [Routes() for _ in batch.micro_batches]
        return [
            self._routes(index, part, replay, compare, check)
            for index, part in enumerate(batch.micro_batches)
        ]

    def _routes(
        self, index: int, batch: PackedBatch, replay: bool, compare: bool, check: bool
    ) -> Routes:
        layout, experts = self.layout, batch.routed_experts
        if experts is None:
            raise ValueError(
                "replay.mode = R3 or replay.measure needs routed experts, but rollout"
                f" {batch.rollout_ids[0]} carries none: start the server with"
                " --enable-return-routed-experts"
            )
        rows = layout.rows(batch.cu_seqlens)
        state = batch.row_state[rows]
        if check:  # before cutting, which takes the shape for granted
            check_routes(
                experts,
                batch.rollout_ids,
                num_layers=self.num_layers,
                num_experts=layout.num_experts,
                top_k=layout.top_k,
            )
        size = len(layout.layers) * layout.num_rows(batch.num_tokens) * layout.top_k
        ids = layout.local_routes(
            experts, batch.cu_seqlens, self._memory.take(index, size, experts[0].dtype)
        )
        # after cutting: each rank checks the values that it will use, so no value is checked twice
        if check:
            check_local_routes(
                ids, state, layout.layers, layout.num_experts, partial(name_row, batch, rows)
            )
        local = torch.from_numpy(ids).to(self.device)
        return Routes(
            replay=local if replay else None,
            live_rows=(state == RowState.LIVE).nonzero().squeeze(1).to(self.device)
            if replay
            else None,
            reference=local if compare else None,
            compared=(state == RowState.REPLAYED).to(self.device) if compare else None,
        )


def name_row(batch: PackedBatch, rows: Rows, row: int) -> str:
    """Rollout and position of this rank's router row, for messages."""
    packed = int(torch.arange(batch.num_tokens)[rows][row])
    return (
        f"rollout {batch.rollout_ids[int(batch.sequence_ids[packed])]}, row"
        f" {int(batch.positions[packed])}"
    )


def to_device(
    batch: MiniBatch, layout: RankLayout, device: torch.device, *, with_kept: bool = True
) -> list[PackedBatch]:
    """Micro-batches cut to the rows that this rank's model computes, on the device, without routes
    (see RolloutRoutes).

    with_kept: with the kept sets of these rows, where they were sampled with some; the last
    pipeline stage needs them.

    cu_seqlens stays that of all T rows, which attention and RoPE expect, and on the host, where
    they are read without waiting for the device.
    """
    moved = []
    for micro_batch in batch.micro_batches:
        rows = layout.model_rows(
            micro_batch.cu_seqlens
        )  # one index for everything per row: nothing can get out of step
        tensors: dict[str, Any] = {
            name: value[rows].to(device)
            for name, value in vars(micro_batch).items()
            if isinstance(value, Tensor) and name != "cu_seqlens"
        }
        kept, masks = None, micro_batch.sampling_masks
        if with_kept and masks is not None and micro_batch.mask_tokens is not None:
            kept = sets_of_tokens(masks, micro_batch.mask_tokens[rows].numpy(), device)
        moved.append(
            replace(micro_batch, routed_experts=None, sampling_masks=None, kept=kept, **tensors)
        )
    return moved
