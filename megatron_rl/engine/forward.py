"""A pass over megatron-core's pipeline schedule: old-logprob (forward only) or update (forward and
backward), and the micro-batches that it takes.

Shapes: T packed rows of a micro-batch (under context parallelism this rank's, from to_device on).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
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
from megatron_rl.records.on_device import on_device
from megatron_rl.records.packed import PackedBatch, RowState
from megatron_rl.records.row_sets import sets_of_tokens, top_of_rows
from megatron_rl.replay.layout import RankLayout
from megatron_rl.replay.manager import ReplayManager

LossFn = Callable[[int, PackedBatch, Tensor], Tensor]
"""(micro-batch index, micro-batch on the device, model output) -> scalar to differentiate.

It is called on the last stage.  The output is logits [b, t, v], or hidden states [b, t, H], under
sequence parallelism those of this tensor rank."""


@dataclass(frozen=True)
class Pipeline:
    """This rank's stages of the model and the replay of their routers."""

    models: Sequence[nn.Module]
    """The chunks of this pipeline rank; several under interleaved schedules (parallel.vp > 1)."""
    manager: ReplayManager
    padded: bool = False
    """True: sequences lie side by side, [B, T / B]; False: packed into one row, [1, T]."""

    def run(self, micro_batches: Sequence[PackedBatch], loss_fn: LossFn, *, training: bool) -> None:
        """Run every micro-batch through the pipeline once, inside ReplayManager.run_pass.

        Stages exchange the shapes of what they send, so micro-batches may differ in their
        sequences and lengths.
        """
        models = list(self.models)
        # every chunk of a stage sees all micro-batches
        iterators = [iter(enumerate(micro_batches)) for _ in models]
        is_interleaved = len(models) > 1  # core takes lists for these only
        get_forward_backward_func()(
            forward_step_func=partial(forward_step, self.manager, loss_fn, self.padded),
            data_iterator=iterators if is_interleaved else iterators[0],
            model=models if is_interleaved else models[0],
            num_microbatches=len(micro_batches),
            # core requires it, but does not read it: stages exchange shapes
            seq_length=max(batch.num_tokens for batch in micro_batches),
            micro_batch_size=1,
            forward_only=not training,
        )


def forward_step(
    manager: ReplayManager,
    loss_fn: LossFn,
    padded: bool,
    data: Iterator[tuple[int, PackedBatch]],
    model: nn.Module,
) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, dict[str, Tensor]]]]:
    """Run one micro-batch; return its output and its loss function (core's forward_step_func).

    Packed, the model gets one row [1, T] and the bounds of its sequences; padded, a batch
    [B, T / B] (BSHD).
    """
    index, batch = next(data)
    shape = (len(batch.cu_seqlens) - 1 if padded else 1, -1)
    packed = None if padded else packed_parameters(batch, get_model_config(model))
    # tells the routers which micro-batch's routes to use
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
        # the 0 is a token count by which core would divide; finalize_summed_grads ignores it
        return loss, torch.zeros((), dtype=torch.int, device=loss.device), {}

    return output, loss_func


def packed_parameters(batch: PackedBatch, core: TransformerConfig) -> PlannedSeqParams:
    """Return the bounds of a packed micro-batch's sequences, for core's attention and RoPE.

    They are on the device for TransformerEngine, whose kernels read them there, and on the host
    for PackedAttention and for unfused RoPE.
    """
    host = bounds_of(batch.cu_seqlens)
    if core.transformer_impl != "transformer_engine":
        return host
    return replace(
        bounds_of(on_device(batch.cu_seqlens, batch.tokens.device), host.max_seqlen_q),
        on_host=host,
    )


def bounds_of(cu_seqlens: Tensor, longest: int | None = None) -> PlannedSeqParams:
    """Return core's parameters of the sequences at these rows.

    longest: their largest length, where it is known; else it is read from `cu_seqlens`.
    """
    longest = int(cu_seqlens.diff().max()) if longest is None else longest
    return PlannedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def router_padding_mask(pads: Tensor, model: nn.Module) -> Tensor | None:
    """Return GPTModel.forward's padding_mask for `pads`, bool [B, T], True on pads.

    core excludes these rows from auxiliary losses and from the token counts that move an expert
    bias.
    """
    chunk: GPTModel = get_attr_wrapped_model(model, "pre_process", return_model_obj=True)
    if chunk.config.moe_router_enable_expert_bias:
        return None  # core applies the mask of rows to the expert axis here, and fails
    if chunk.pre_process or not chunk.config.sequence_parallel:
        return pads
    # core's first stage cuts the mask as it cuts the embeddings; its later stages (0.16.1, 0.19.2)
    # pass it to routers uncut
    rank_pads = scatter_to_sequence_parallel_region(
        pads.transpose(0, 1).contiguous(), group=chunk.pg_collection.tp
    )
    return rank_pads.transpose(0, 1).contiguous()


def to_device(
    micro_batches: Sequence[PackedBatch],
    layout: RankLayout,
    device: torch.device,
    *,
    with_kept: bool = True,
) -> list[PackedBatch]:
    """Cut micro-batches to the rows that this rank's model computes and copy them to `device`.

    cu_seqlens stays on the host, where it is read without waiting for the device, and has the
    bounds of all T rows, as attention and RoPE expect.
    with_kept: include the kept sets of these rows and their teacher's tokens, which the last
    pipeline stage needs.
    """
    moved = []
    for micro_batch in micro_batches:
        # the same index for every tensor, so that their rows stay aligned
        rows = layout.model_rows(micro_batch.cu_seqlens)
        tensors: dict[str, Any] = {
            name: on_device(value[rows], device)
            for name, value in vars(micro_batch).items()
            if isinstance(value, Tensor) and name != "cu_seqlens"
        }
        kept, masks = None, micro_batch.sampling_masks
        if with_kept and masks is not None and micro_batch.set_index is not None:
            kept = sets_of_tokens(masks, micro_batch.set_index[rows].numpy(), device)
        top, tops = None, micro_batch.teacher_tops
        if with_kept and tops is not None and micro_batch.top_index is not None:
            top = top_of_rows(tops, micro_batch.top_index[rows].numpy(), device)
        # they stay on the host
        tensors |= dict.fromkeys(("sampling_masks", "teacher_tops"))
        moved.append(replace(micro_batch, **tensors, kept=kept, top=top))
    return moved
