"""Convert an HF checkpoint into a torch_dist one and back, a unit of tensors at a time.

A unit is a sequence of parameters that becomes one output file.  Units depend only on the model and
the file size, so any number of ranks can share them, and a stopped conversion continues with the
units that are not in its journal.  Journal and files are in a hidden directory beside the output,
which is renamed when it is complete.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import hashlib
import json
import resource
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_rl.checkpoint.folder import write_text
from megatron_rl.checkpoint.torch_dist.chunk_reader import TorchDist
from megatron_rl.checkpoint.torch_dist.chunk_writer import ChunkWriter, write_metadata
from megatron_rl.checkpoint.torch_dist.chunks import Chunk, Slots, Stored
from megatron_rl.config import ModelConfig, ParallelConfig
from megatron_rl.distributed import Parallel
from megatron_rl.engine.model import make_model, make_transformer_config
from megatron_rl.metrics.console import clock
from megatron_rl.models.families import make_spec
from megatron_rl.models.spec import ModelSpec, load_hf_config
from megatron_rl.weights.hf.entries import Entry, entries, shard_shape
from megatron_rl.weights.hf.files import (
    CheckpointError,
    HFFiles,
    dtype_name,
    listed,
    write_dtype,
    write_index,
)
from megatron_rl_tools.convert.conversion_files import (
    FileWork,
    barrier,
    copied_tensors,
    copy_companions,
    fingerprint,
    finish_files,
    gather_digests,
    open_place,
    shard_name,
)
from megatron_rl_tools.convert.conversion_sides import (
    HFSide,
    MegatronSide,
    Side,
    checked_shape,
    columns,
)
from megatron_rl_tools.convert.run_adapters import MergedSide, adapters_of_run
from megatron_rl_tools.convert.shard_writer import Piece, ShardWriter

MIB = 2**20
NO_MTP = (
    "WARNING {path}: its config.json has {count} layers of multi-token prediction, of which no"
    " tensors are there: none are written; set --config to the HF directory that has them"
)
MTP_FILE = "mtp.safetensors"
"""The file in DIR/hf with the tensors that a torch_dist checkpoint does not have."""


@dataclass(frozen=True)
class Conversion:
    """Sizes and speed of a finished conversion."""

    num_tensors: int
    num_bytes: int
    """Bytes of all tensors, on all ranks."""
    seconds: float
    peak_bytes: int
    """Peak memory of this process above its level before the first tensor."""
    largest_group: int
    """Bytes of the largest group of HF tensors that make up a parameter."""


def hf_to_megatron(
    hf: Path,
    out: Path,
    work: FileWork,
    *,
    dtype: torch.dtype | None,
    file_bytes: int,
    trust_pickle: bool,
    parallel: Parallel,
) -> Conversion | None:
    """Write the torch_dist checkpoint of `hf` at `out`; returns None if it exists.  Collective."""
    spec = make_spec(load_hf_config(hf))
    with HFFiles(hf, trust_pickle=trust_pickle) as files:
        files.check(spec)
        slots, source = meta_slots(hf, spec, parallel), HFSide(files, spec)

        def size(entry: Entry) -> int:
            return group_bytes(entry, written_dtype(source, entry, dtype))

        units = split_units(entries(spec), size, file_bytes)
        job = {"to": "megatron", "from": fingerprint(hf), "dtype": str(dtype)} | cuts(units)
        place = open_place(out, job, work)
        if place is None:
            return None

        def convert(index: int, unit: Sequence[Entry], bad: set[str]) -> list[Stored]:
            writer = ChunkWriter(place / f"__0_{index}.distcp")
            for entry in unit:
                kept = written_dtype(source, entry, dtype)
                for chunk, first in slots.cut(entry.name, shard_shape(entry, 1)):
                    rows = torch.Size(chunk.sizes).numel() // columns(entry)
                    values = source.parameter(entry, first, first + rows)
                    writer.write(chunk, kept, checked_shape(values, kept, bad))
            writer.close()
            return writer.stored

        outcome = run_units(units, convert, place, work, size)
    if work.rank == 0:
        write_metadata(place, read_journal(place, len(units)), slots.extra_states)
        copy_companions(hf, place / "hf")
        copied = copied_tensors(hf, spec, trust_pickle=trust_pickle)
        copied.copy_to(place / "hf" / MTP_FILE)
        finish_files(place, out, job)
    barrier()
    return outcome


def megatron_to_hf(
    megatron: Path,
    config: Path,
    out: Path,
    work: FileWork,
    *,
    dtype: torch.dtype | None,
    file_bytes: int,
    parallel: Parallel,
) -> Conversion | None:
    """Write the HF checkpoint of `megatron` at `out` with the companions (config, tokenizer) of
    `config`; returns None if it exists.  Collective.

    Tensors of `config` that are not trained (multi-token prediction) are copied unchanged.
    """
    spec = make_spec(load_hf_config(config))
    source = model_of(megatron, config, spec, parallel)
    copied = copied_tensors(config, spec)
    if spec.mtp_layers and not copied.pieces:
        work.log(NO_MTP.format(path=config, count=spec.mtp_layers))

    def pieces(entry: Entry) -> list[Piece]:
        return [Piece(name, shape, written_dtype(source, entry, dtype)) for name, shape in entry.hf]

    def size(entry: Entry) -> int:
        return group_bytes(entry, written_dtype(source, entry, dtype))

    units = split_units(entries(spec), size, file_bytes)
    total = len(units) + bool(copied.pieces)
    job = {
        "to": "hf",
        "from": fingerprint(megatron),
        "config": fingerprint(config),
        "dtype": str(dtype),
        "units": total,
    } | cuts(units)
    place = open_place(out, job, work)
    if place is None:
        return None

    def convert(index: int, unit: Sequence[Entry], bad: set[str]) -> list[Stored]:
        content = [piece for entry in unit for piece in pieces(entry)]
        writer = ShardWriter(place / shard_name(index, total), content)
        for entry in unit:
            for number, piece in enumerate(pieces(entry)):
                values = source.tensor(entry, number)
                writer.write(piece.name, checked_shape(values, piece.dtype, bad))
        writer.close()
        return []

    outcome = run_units(units, convert, place, work, size)
    if work.rank == 0:
        copied.copy_to(place / (last := shard_name(total - 1, total)))
        files = files_of_tensors(units, total) | dict.fromkeys(copied.names, last)
        write_index(place, files, outcome.num_bytes + copied.num_bytes)
        copy_companions(config, place)
        write_common_dtype(place, source, dtype, spec, work)
        finish_files(place, out, job)
    barrier()
    return outcome


def write_common_dtype(
    place: Path, source: Side, dtype: torch.dtype | None, spec: ModelSpec, work: FileWork
) -> None:
    """Write the dtype of the model's tensors into config.json; where they have several, it keeps
    its own, and a line says so.
    """
    kept = {
        written_dtype(source, entry, dtype) for entry in entries(spec) if not entry.rule.float32
    }
    if len(kept) == 1:
        write_dtype(place, kept.pop())
    else:
        names = ", ".join(sorted(map(dtype_name, kept)))
        work.log(f"WARNING its tensors are {names}; config.json keeps the dtype that it names")


def model_of(megatron: Path, config: Path, spec: ModelSpec, parallel: Parallel) -> Side:
    """Return the weights of a checkpoint; those of a run with adapters are merged into `config`,
    which must be their base.
    """
    adapters = adapters_of_run(megatron)
    if adapters is None:
        return MegatronSide(TorchDist(megatron), meta_slots(config, spec, parallel), spec)
    files = HFFiles(config)
    files.check(spec)
    adapters.check_base(files, spec)
    return MergedSide(files, spec, adapters, adapters.read(config, spec, parallel))


def files_of_tensors(units: Sequence[Sequence[Entry]], total: int) -> dict[str, str]:
    """Return HF name -> file for the tensors of all units; total: number of files."""
    return {
        name: shard_name(index, total)
        for index, unit in enumerate(units)
        for entry in unit
        for name in entry.hf_names
    }


def meta_slots(config: Path, spec: ModelSpec, parallel: Parallel) -> Slots:
    """Return the parts of core's checkpoint of this model, from a model on the meta device in the
    layout of one rank.
    """
    model = ModelConfig(path=config, dtype="float32")
    core = make_transformer_config(spec, model, ParallelConfig(), torch.device("cpu"))
    core.perform_initialization = False
    with torch.device("meta"):
        on_meta = dataclasses.replace(parallel, device=torch.device("meta"))
        (chunk,) = make_model(spec, model, core, on_meta)
    return Slots(chunk)


# Units --------------------------------------------------------------------------------------------


def cuts(units: Sequence[Sequence[Entry]]) -> dict[str, str]:
    """Return a digest of the parameters of each unit, by which a stopped conversion is known."""
    names = json.dumps([[entry.name for entry in unit] for unit in units])
    return {"cuts": hashlib.sha256(names.encode()).hexdigest()}


def split_units(
    items: Iterable[Entry], size: Callable[[Entry], int], file_bytes: int
) -> list[list[Entry]]:
    """Split the entries into units of at most `file_bytes`, or of one entry."""
    units: list[list[Entry]] = []
    left = 0
    for entry in items:
        needed = size(entry)
        if not units or needed > left:
            units.append([])
            left = file_bytes
        units[-1].append(entry)
        left -= needed
    return units


def run_units(
    units: Sequence[Sequence[Entry]],
    convert: Callable[[int, Sequence[Entry], set[str]], list[Stored]],
    place: Path,
    work: FileWork,
    size: Callable[[Entry], int],
) -> Conversion:
    """Convert this rank's units that are not in the journal.

    Raises one CheckpointError that names every non-finite tensor.
    """
    sizes = [sum(size(entry) for entry in unit) for unit in units]
    before, start, bad = reset_peak(), time.monotonic(), set[str]()
    for index, unit in enumerate(units):
        journal = place / "journal" / f"{index:05d}.json"
        # units belong to ranks by index; the journal has those that earlier attempts finished
        if index % work.world != work.rank or journal.is_file():
            continue
        num_bad = len(bad)
        stored = convert(index, unit, bad)
        if len(bad) == num_bad:
            # after the file is on the disk: the journal must not name an incomplete one
            write_text(journal, json.dumps([dataclasses.astuple(item) for item in stored]))
        done, total = (sum(part) / MIB for part in (sizes[: index + 1], sizes))
        rate = done / max(time.monotonic() - start, 1e-9)
        left = clock((total - done) / max(rate, 1e-9))
        work.log(
            f"  {index + 1}/{len(units)} files, {done:.0f} of {total:.0f} MiB, {rate:.0f} MiB/s,"
            f" {left} left"
        )
    bad = set[str]().union(*gather_digests(bad))
    if bad:
        raise CheckpointError(
            f"{listed('has values that are not finite', bad)}; the checkpoint is damaged; nothing"
            " was written"
        )
    every = [entry for unit in units for entry in unit]
    tensors = sum(len(entry.hf) for entry in every)
    largest = max(size(entry) for entry in every)
    seconds, peak = time.monotonic() - start, max(resident_peak() - before, 0)
    return Conversion(tensors, sum(sizes), seconds, peak, largest)


def read_journal(place: Path, num_units: int) -> Iterator[Stored]:
    for index in range(num_units):
        for chunk, *fields in json.loads((place / "journal" / f"{index:05d}.json").read_text()):
            key, *shape = chunk
            yield Stored(Chunk(key, *(tuple(sizes) for sizes in shape)), *fields)


def group_bytes(entry: Entry, dtype: torch.dtype) -> int:
    """Return the bytes of the HF tensors that make up a parameter, in this dtype."""
    return sum(torch.Size(shape).numel() for _, shape in entry.hf) * dtype.itemsize


def written_dtype(source: Side, entry: Entry, dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype in which a parameter is written.

    Biases that select experts keep theirs: rounded, they would select other experts.
    """
    return source.dtype(entry) if dtype is None or entry.rule.float32 else dtype


def reset_peak() -> int:
    """Reset this process's peak of resident bytes, and return the bytes that are resident now."""
    # return freed memory to the system: glibc keeps it, which would hide later allocations
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return resident_peak()


def resident_peak() -> int:
    """Return the peak of resident bytes since reset_peak(), with mapped pages of the source."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
