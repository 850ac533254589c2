"""The two passes over the pipeline schedule: old-logprob (forward only) and train (forward + backward).

Shapes: T packed rows of a micro-batch (under context parallelism this rank's, from to_device on), t this rank's router
rows, L MoE layers, l this stage's, K top-k.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region
from megatron.core.utils import get_attr_wrapped_model, get_model_config
from torch import Tensor

from megatron_rl.engine.attention import PlannedSeqParams
from megatron_rl.records import MiniBatch, PackedBatch, RowState
from megatron_rl.replay.layout import RankLayout, Rows, check_local_routes, check_routes
from megatron_rl.replay.manager import PassReport, ReplayManager, Routes

LossFn = Callable[[int, PackedBatch, Tensor], Tensor]
"""(micro-batch index, micro-batch on the device, what the model returns) -> scalar to differentiate; on the last stage.

The model returns logits [b, t, v], or hidden states [b, t, H] (this tensor rank's under sequence parallelism)."""


def run_schedule(
    models: Sequence[Any],
    manager: ReplayManager,
    micro_batches: Sequence[PackedBatch],
    routes: Sequence[Routes],
    loss_fn: LossFn,
    *,
    training: bool,
    record: bool = False,
    padded: bool = False,
) -> PassReport:
    """Run every micro-batch through the pipeline once, inside one replay pass; sequences side by side where `padded`.

    Stages exchange the shapes of what they send, so micro-batches may differ in sequences and lengths.
    """
    with manager.run_pass(routes, training=training, record=record) as reports:
        get_forward_backward_func()(
            forward_step_func=partial(forward_step, manager, loss_fn, padded),
            data_iterator=[iter(enumerate(micro_batches)) for _ in models]
            if len(models) > 1
            else iter(enumerate(micro_batches)),
            model=list(models) if len(models) > 1 else models[0],
            num_microbatches=len(micro_batches),
            seq_length=max(batch.num_tokens for batch in micro_batches),  # not read: see the shapes above
            micro_batch_size=1,
            forward_only=not training,
        )
    return reports[0]


def forward_step(
    manager: ReplayManager, loss_fn: LossFn, padded: bool, data: Iterator[tuple[int, PackedBatch]], model: Any
) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, dict[str, Tensor]]]]:
    """megatron-core's forward_step_func: run one micro-batch, return its output and its loss function.

    Packed, the model sees one sequence [1, T] and where its parts begin; padded, a batch [B, T / B] (BSHD).
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
        return loss, torch.zeros((), dtype=torch.int, device=loss.device), {}  # the count is not used: see engine.optim

    return output, loss_func


def packed_parameters(batch: PackedBatch, core: Any) -> PlannedSeqParams:
    """Where the sequences of a packed micro-batch begin, for core's attention and RoPE.

    On the device for TransformerEngine, whose kernels read them there; on the host for PackedAttention.
    """
    cu_seqlens = batch.cu_seqlens
    longest = int(cu_seqlens.diff().max())
    if core.transformer_impl == "transformer_engine":
        cu_seqlens = cu_seqlens.to(batch.tokens.device)
    return PlannedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def router_padding_mask(pads: Tensor, model: Any) -> Tensor | None:
    """What GPTModel.forward takes as padding_mask for `pads` bool [B, T], True on pads; shaped as its tokens.

    Core leaves these rows out of auxiliary losses and of the token counts that move an expert bias.  Its first stage cuts
    the mask for sequence parallelism, as it does the embeddings; later stages (0.16.1 and 0.19.2) hand it to their routers
    whole, so it is cut here.  None with an expert bias: there core masks the expert axis by rows, and fails.
    """
    chunk = get_attr_wrapped_model(model, "pre_process", return_model_obj=True)
    if chunk.config.moe_router_enable_expert_bias:
        return None
    if chunk.pre_process or not chunk.config.sequence_parallel:
        return pads
    mine = scatter_to_sequence_parallel_region(pads.transpose(0, 1).contiguous(), group=chunk.pg_collection.tp)
    return mine.transpose(0, 1).contiguous()


def make_routes(
    batch: PackedBatch,
    layout: RankLayout,
    device: torch.device,
    *,
    replay: bool,
    compare: bool,
    num_layers: int,
    check: bool = True,
    memory: np.ndarray | None = None,
) -> Routes:
    """This rank's share of a micro-batch's rollout routes: what to replay and/or what to compare with.

    `memory`: where the ids may stay while they are used (see RankLayout.local_routes).  Raises ValueError when
    routes are wanted and the batch has none, or, with `check`, they break a rule.
    """
    if not (replay or compare):
        return Routes()
    if batch.routed_experts is None:
        raise ValueError(
            f"replay.mode = R3 or replay.measure needs routed experts, but rollout {batch.rollout_ids[0]} carries none: "
            "start the server with --enable-return-routed-experts"
        )
    rows = layout.rows(batch.cu_seqlens)
    state = batch.row_state[rows]
    if check:
        check_routes(
            batch.routed_experts,
            batch.rollout_ids,
            num_layers=num_layers,
            num_experts=layout.num_experts,
            top_k=layout.top_k,
        )
    ids = layout.local_routes(batch.routed_experts, batch.cu_seqlens, memory)
    if check:
        check_local_routes(ids, state, layout.layers, layout.num_experts, partial(name_row, batch, rows))
    local = torch.from_numpy(ids).to(device)
    return Routes(
        replay=local if replay else None,
        live_rows=(state == RowState.LIVE).nonzero().squeeze(1).to(device) if replay else None,
        reference=local if compare else None,
        compared=(state == RowState.REPLAYED).to(device) if compare else None,
    )


def name_row(batch: PackedBatch, rows: Rows, row: int) -> str:
    """Rollout and position of this rank's router row, for people."""
    packed = int(torch.arange(batch.num_tokens)[rows][row])
    return f"rollout {batch.rollout_ids[int(batch.sequence_ids[packed])]}, row {int(batch.positions[packed])}"


def to_device(batch: MiniBatch, layout: RankLayout, device: torch.device) -> list[PackedBatch]:
    """Micro-batches cut to the rows that this rank's model computes, on the device, without routes (see make_routes).

    Everything per row is cut by the one index; cu_seqlens stays that of all T rows, which attention and RoPE expect, and
    on the host, where they are read without waiting for the device.
    """
    moved = []
    for micro_batch in batch.micro_batches:
        rows = layout.model_rows(micro_batch.cu_seqlens)
        values = {name: value for name, value in vars(micro_batch).items() if name != "routed_experts"}
        for name, value in values.items():
            if isinstance(value, Tensor):
                values[name] = value if name == "cu_seqlens" else value[rows].to(device)
        moved.append(PackedBatch(**values, routed_experts=None))
    return moved
