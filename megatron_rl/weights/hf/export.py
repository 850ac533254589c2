"""megatron-core shards -> a stream of HF tensors, each complete on one rank: its source.

The sources are one rank for each pipeline stage and expert-parallel rank.  Experts are only
gathered over the ranks that share them (expert tensor parallelism).  The other tensors of a stage
are divided among its sources, so that all have as many bytes.  The stream is collective: every rank
must exhaust it.  No rank has more than one parameter in memory beyond its own.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
import torch.distributed as dist

from megatron_rl.models.spec import ModelSpec
from megatron_rl.weights.hf.entries import Entry, entries
from megatron_rl.weights.hf.mapping import local_parameters, to_hf
from megatron_rl.weights.hf.rules import ONE_CALL

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel

    from megatron_rl.distributed import Parallel


class HFTensor(NamedTuple):
    """A tensor of the HF checkpoint."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    source: int
    """Global rank that has the values."""
    tensor: torch.Tensor | None
    """The values on the source, None on every other rank."""

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


HFStream = Iterator[HFTensor]
"""All tensors of the checkpoint, in the same order on every rank."""


class Batch(NamedTuple):
    """Tensors of one source that travel together."""

    source: int
    tensors: list[HFTensor]
    num_bytes: int


class ExportStep(NamedTuple):
    """One parameter of the export."""

    entry: Entry
    ranks: tuple[int, ...]
    """Ranks that gather its shards, in their order, onto `source`."""
    source: int


@dataclass(frozen=True)
class RankParameters:
    """A rank's place, and the parameters that it has."""

    stage: int
    ep_rank: int
    tp: tuple[int, ...]
    """Global ranks of its tensor-parallel group."""
    etp: tuple[int, ...]
    """Global ranks of its expert-tensor-parallel group."""
    keys: frozenset[int | str]
    """Layers, and names of parameters outside layers."""


def plan_export(
    chunks: Iterable[GPTModel], spec: ModelSpec, parallel: Parallel
) -> list[ExportStep]:
    """Return the order and the sources of an export.  Collective.

    The list is the same on every rank, and serves any weights of this layout.  Each source's
    parameters come in checkpoint order.  Sources alternate so that all of them have sent the same
    fraction of their bytes at any point of the list.
    """
    chunks = list(chunks)
    parameters = local_parameters(chunks, spec, parallel.ep_rank, parallel.ep_size)
    table = [entry.held_by(chunks) for entry in entries(spec)]
    keys = frozenset(entry.place for entry in table if entry.name in parameters)
    tp, etp = (
        tuple(dist.get_process_group_ranks(group))
        for group in (parallel.tp_group, parallel.etp_group)
    )
    place = RankParameters(parallel.pp_rank, parallel.ep_rank, tp, etp, keys)
    # over gloo: no GPU memory for plain data
    places = [place] * parallel.world_size
    dist.all_gather_object(places, place, group=parallel.host_group)
    return order_steps(table, assign_sources(table, places), places)


def assign_sources(table: Sequence[Entry], places: Sequence[RankParameters]) -> dict[str, int]:
    """Return name -> source.

    The source of an expert is the first rank that has it.  The other parameters go to the stage's
    source with the fewest bytes, the largest first.
    """
    sources: dict[tuple[int, int], int] = {}
    for rank, place in enumerate(places):
        sources.setdefault((place.stage, place.ep_rank), rank)
    # layers, embedding and head are each on one stage
    stage_of = {key: place.stage for place in places for key in place.keys}
    ep_size = 1 + max(place.ep_rank for place in places)
    num_experts = max((entry.expert + 1 for entry in table if entry.expert is not None), default=0)
    experts_per_rank = num_experts // ep_size
    assigned, load = dict[str, int](), defaultdict[int, int](int)
    for entry in table:
        if entry.expert is not None:
            ep_rank = entry.expert // experts_per_rank
            assigned[entry.name] = sources[stage_of[entry.place], ep_rank]
            load[assigned[entry.name]] += elements(entry)
    # neighbours that servers need in one call are one unit, and so have one source
    units = [
        list(unit)
        for _, unit in groupby(
            (entry for entry in table if entry.expert is None),
            key=lambda entry: (entry.layer, entry.hf_names[0].endswith(ONE_CALL) or entry.name),
        )
    ]
    # large units first: the small ones then even out the sources
    for unit in sorted(units, key=lambda unit: -sum(map(elements, unit))):
        stage = stage_of[unit[0].place]
        source = min(
            (sources[stage, ep_rank] for ep_rank in range(ep_size)),
            key=lambda rank: (load[rank], rank),
        )
        for entry in unit:
            assigned[entry.name] = source
            load[source] += elements(entry)
    return assigned


def order_steps(
    table: Sequence[Entry], assigned: dict[str, int], places: Sequence[RankParameters]
) -> list[ExportStep]:
    """Order the steps as `plan_export` says."""
    total, sent = defaultdict[int, int](int), defaultdict[int, int](int)
    for entry in table:
        total[assigned[entry.name]] += elements(entry)
    placed = []
    for entry in table:
        source = assigned[entry.name]
        ranks = places[source].etp if entry.rule.is_expert else places[source].tp
        sent[source] += elements(entry)
        step = ExportStep(entry, (source,) if entry.rule.kind == "replicated" else ranks, source)
        placed.append((sent[source] / total[source], source, step))
        last_names = [step.entry.hf_names[0] for _, _, step in placed[-2:]]
        if len(placed) > 1 and all(name.endswith(ONE_CALL) for name in last_names):
            # one place for both: sources that few_sources merges must have nothing in between
            placed[-2] = (*placed[-1][:2], placed[-2][2])
    # stable: ties stay in checkpoint order
    return [step for _, _, step in sorted(placed, key=lambda item: item[:2])]


def elements(entry: Entry) -> int:
    return sum(math.prod(shape) for _, shape in entry.hf)


def export_planned(
    plan: Sequence[ExportStep], chunks: Iterable[GPTModel], spec: ModelSpec, parallel: Parallel
) -> Iterator[HFTensor]:
    """Yield the tensors in the order of the plan.  Collective.

    They are contiguous, on the device and in the dtype of the model.  A tensor may be a view of the
    live parameter: copy it to keep it beyond the next update.  With `overlap_param_gather`,
    parameters are stale after a step: call start_param_sync(force_sync=True) on the chunks first.
    """
    parameters = local_parameters(chunks, spec, parallel.ep_rank, parallel.ep_size)
    model_dtype = next(iter(parameters.values())).dtype  # all but the float32 rules have it
    # every rank walks the whole plan, and gathers where it takes part
    for entry, ranks, source in plan:
        dtype = torch.float32 if entry.rule.float32 else model_dtype
        tensors: Sequence[torch.Tensor | None] = [None] * len(entry.hf)
        if parallel.rank in ranks:
            group = parallel.etp_group if entry.rule.is_expert else parallel.tp_group
            shards = [weight_values(parameters[entry.name])]
            if len(ranks) > 1:
                shards = gather_shards(shards[0], source, ranks, group)
            if parallel.rank == source:
                tensors = [tensor for _, tensor in to_hf(entry, shards, spec)]
        for (name, shape), tensor in zip(entry.hf, tensors, strict=True):
            yield HFTensor(name, shape, dtype, source, tensor)


class Merges(Protocol):
    """The attribute `adapter` of a weight that has one (engine/lora.py)."""

    def merged(self) -> torch.Tensor:
        """Return the weight with its adapter."""


@torch.no_grad()
def weight_values(parameter: torch.Tensor) -> torch.Tensor:
    """Return what a layer multiplies by: the parameter, with its adapter where it has one."""
    adapter: Merges | None = getattr(parameter, "adapter", None)
    return parameter.detach() if adapter is None else adapter.merged()


def gather_shards(
    tensor: torch.Tensor, source: int, ranks: Sequence[int], group: dist.ProcessGroup
) -> list[torch.Tensor]:
    """Return the shards of all ranks of the group on `source`, none elsewhere.

    gloo sends wrong data for tensors with gaps.
    """
    shards = [torch.empty_like(tensor) for _ in ranks] if dist.get_rank() == source else []
    # None: torch takes a list on the destination only
    dist.gather(tensor.contiguous(), shards or None, dst=source, group=group)
    return shards


def on_rank_0(
    stream: Iterable[HFTensor], rank: int, device: torch.device
) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Yield (name, tensor) with all tensors on rank 0; None elsewhere.  Collective."""
    moved = forwarded(stream, lambda source: 0, rank, device)
    return ((exported.name, exported.tensor) for exported in moved)


def few_sources(plan: Sequence[ExportStep], most: int) -> Callable[[int], int]:
    """Return source -> the one that sends for it.

    There are at most `most` senders; each is the first of the neighbours in number that it sends
    for.
    """
    sources = sorted({step.source for step in plan})
    count = min(most, len(sources))
    groups = [index * count // len(sources) for index in range(len(sources))]
    return {
        source: sources[groups.index(group)] for source, group in zip(sources, groups, strict=True)
    }.__getitem__


def forwarded(
    stream: Iterable[HFTensor], sender: Callable[[int], int], rank: int, device: torch.device
) -> HFStream:
    """Yield the same stream, in which sender(source) is the source.  Collective.

    `rank` is this one, and `device` that of its tensors.
    """
    for exported in stream:
        source, tensor = exported.source, exported.tensor
        target = sender(source)
        if target != source and tensor is not None:
            dist.send(tensor.contiguous(), dst=target)
            tensor = None
        elif target != source and rank == target:
            tensor = torch.empty(exported.shape, dtype=exported.dtype, device=device)
            dist.recv(tensor, src=source)
        yield exported._replace(source=target, tensor=tensor)


def with_pairs_together(stream: Iterable[HFTensor]) -> HFStream:
    """Yield the same tensors, so that `batches` does not part those that servers need in one call.

    Both of ONE_CALL come where the second of them was.  For a stream in another order than the
    tables'.
    """
    waiting: dict[str, HFTensor] = {}
    for exported in stream:
        name = exported.name
        module = next((name.removesuffix(end) for end in ONE_CALL if name.endswith(end)), None)
        if module is None:
            yield exported
        elif module in waiting:
            yield from (waiting.pop(module), exported)
        else:
            waiting[module] = exported
    yield from waiting.values()


def batches(
    stream: Iterable[HFTensor], most_bytes: int, *, of_one_dtype: bool = False
) -> Iterator[Batch]:
    """Yield tensors of one source each, of at most `most_bytes` (but at least one tensor).

    The batches are the same on every rank, and come in the order in which they are complete.  A
    rank that waits for something of an earlier batch never waits in vain: what that needs was
    earlier in the stream.
    """
    tensors: dict[int, list[HFTensor]] = {}  # by source, as `sizes`
    sizes: dict[int, int] = {}
    for exported in stream:
        source, size = exported.source, exported.num_bytes
        collected = tensors.get(source)
        if collected:
            last = collected[-1]
            is_full = sizes[source] + size > most_bytes or (
                of_one_dtype and last.dtype != exported.dtype
            )
            is_pair = exported.name.endswith(ONE_CALL) and last.name.endswith(ONE_CALL)
            if is_full and not is_pair:
                yield Batch(source, collected, sizes[source])
                collected = None
        if not collected:
            collected = tensors[source] = []
            sizes[source] = 0
        collected.append(exported)
        sizes[source] += size
    yield from (Batch(source, tensors[source], sizes[source]) for source in sorted(tensors))
