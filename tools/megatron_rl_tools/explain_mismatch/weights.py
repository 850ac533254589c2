"""The weights of both sides, tensor by tensor: does the server hold what the trainer exports?

A server returns checksums, not values.  If they differ, the trainer's values are changed in known
ways until one has the server's checksum: then the change is proven, not guessed.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from megatron_rl.weights.hf.files import HFFiles
from megatron_rl.weights.hf.fp8 import dequantize_blocks, quantize_blocks
from megatron_rl.weights.sync.checksums import (
    HEX_DIGITS,
    PADDED,
    ROWS,
    WHOLE_ON_EVERY_RANK,
    ExportDigests,
)
from megatron_rl_tools.explain_mismatch.trainer_side import TrainerSide

MOST_EXPLAINED = 6
"""The most served tensors that are searched for a known change."""
CHANGED_FILE = "changed.safetensors"
MOST_BYTES = 4 << 30
"""The most bytes that are hashed in a search for two experts that changed places."""
Parts = list[Tensor]
"""The HF tensors of a served tensor, in its order, in the server's dtype."""


@dataclass(frozen=True)
class Comparison:
    """The result of the comparison; served tensors are named as on the server."""

    compared: int = 0
    """Number of served tensors with a checksum on both sides."""
    wrong: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Served tensor that differs -> names of its HF tensors."""
    changes: Mapping[str, str] = field(default_factory=dict)
    """Wrong tensor -> the change that gives the server's checksum, e.g. "rounded to bfloat16"."""
    relative: Mapping[str, float] = field(default_factory=dict)
    """Wrong tensor -> |server - trainer| / |trainer|, if the server holds its checkpoint's values
    and that checkpoint is here."""
    is_loaded: bool = False
    """`relative` has all wrong tensors."""
    dtypes: Mapping[str, str] = field(default_factory=dict)
    """Served tensor -> its dtype, if it is another than the server's or only the trainer rounds."""
    unnamed: int = 0
    """Number of tensors that were searched without finding a known change."""
    replaced: Mapping[str, Tensor] = field(default_factory=dict)
    """HF tensor with a known change -> its values on the server."""


def compare_weights(
    trainer: TrainerSide,
    ranks: Sequence[Mapping[str, str]],
    dtype: torch.dtype,
    loaded: Path | None,
) -> Comparison:
    """Compare the trainer's export with the checksums of a server's ranks.

    dtype: of the server.  loaded: the server's checkpoint, or None if it is not here.
    """
    if not ranks:
        return Comparison()
    tensors = {name: tensor.detach().to("cpu") for name, tensor in trainer.export()}
    ours = digests_of_model(tensors, dtype)
    our_digests = ours.digests()
    known = {
        name
        for name in our_digests
        if name in ranks[0] and (len(ranks) == 1 or WHOLE_ON_EVERY_RANK.search(name))
    }
    wrong, dtypes = list[str](), dict[str, str]()
    for name in sorted(known):
        if all(rank.get(name) == our_digests[name] for rank in ranks):
            continue
        parts = [tensors[part] for part in ours.parts[name]]
        if (
            dtype != torch.float32
            and digest_of_tensor(name, parts, torch.float32) == ranks[0][name]
        ):
            dtypes[name] = "float32"  # routers and their biases, in some models
        else:
            wrong.append(name)
    # a trainer in bfloat16 rounds a float32 checkpoint that the server has loaded as it is
    source, narrow = trainer.cfg.model.path, getattr(torch, trainer.cfg.model.dtype)
    if wrong and narrow.itemsize < dtype.itemsize:
        rounded = rounded_by_trainer(
            wrong, ranks[0], ours, tensors, source, dtype=dtype, narrow=narrow
        )
        dtypes |= dict.fromkeys(rounded, trainer.cfg.model.dtype)
        wrong = [name for name in wrong if name not in rounded]
    changes, replaced = explain_weights(wrong, ranks[0], ours, our_digests, tensors, dtype)
    relative = relative_differences(wrong, ranks[0], ours, tensors, dtype, loaded)
    return Comparison(
        compared=len(known),
        wrong={name: ours.parts[name] for name in wrong},
        changes=changes,
        relative=relative,
        is_loaded=bool(wrong) and len(relative) == len(wrong),
        dtypes=dtypes,
        unnamed=sum(name not in changes for name in searched(wrong, ranks[0], our_digests)),
        replaced=replaced,
    )


def rounded_by_trainer(
    wrong: Sequence[str],
    theirs: Mapping[str, str],
    ours: ExportDigests,
    tensors: Mapping[str, Tensor],
    source: Path,
    *,
    dtype: torch.dtype,
    narrow: torch.dtype,
) -> set[str]:
    """Return the wrong tensors that differ only because the trainer rounds its checkpoint's values
    to `narrow`: the server holds them unrounded.
    """
    rounded = set[str]()
    with HFFiles(source) as files:
        for name in wrong:
            names = ours.parts[name]
            if not all(part in files.headers for part in names):
                continue
            values = [files.read(part) for part in names]
            exported = [tensors[part] for part in names]
            is_rounded = all(
                torch.equal(v.to(narrow).to(ours_in_dtype.dtype), ours_in_dtype)
                for v, ours_in_dtype in zip(values, exported, strict=True)
            )
            if is_rounded and digest_of_tensor(name, values, dtype) == theirs[name]:
                rounded.add(name)
    return rounded


def digests_of_model(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> ExportDigests:
    digests = ExportDigests(tensors)
    for name, tensor in tensors.items():
        digests.add(name, tensor.to(dtype))
    return digests


def digest_of_tensor(name: str, parts: Sequence[Tensor], dtype: torch.dtype) -> str:
    """Return the checksum of a served tensor made of these parts."""
    value = hashlib.sha256()
    for part in parts:
        part = part.to(dtype).contiguous()
        value.update(part.reshape(-1).view(torch.uint8).numpy().data)
        if name.endswith(PADDED):
            value.update(bytes(-len(part) % ROWS * part[0].nbytes))
    return value.hexdigest()[:HEX_DIGITS]


# Known changes


def fp8(tensor: Tensor) -> Tensor:
    return dequantize_blocks(*quantize_blocks(tensor)) if tensor.dim() == 2 else tensor


CHANGES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "rounded to bfloat16": lambda tensor: tensor.bfloat16(),
    "rounded to float16": lambda tensor: tensor.half(),
    "rounded to fp8 in blocks": fp8,
    "zeros": torch.zeros_like,
    "ones": torch.ones_like,
    "transposed": lambda tensor: tensor.T if tensor.dim() == 2 else tensor,
}
"""Changes that apply to every part of a served tensor alike."""


def explain_weights(
    wrong: Sequence[str],
    theirs: Mapping[str, str],
    ours: ExportDigests,
    our_digests: Mapping[str, str],
    tensors: Mapping[str, Tensor],
    dtype: torch.dtype,
) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return (wrong tensor -> change, HF tensor -> its values after the change).

    Tensors that hold another tensor of the trainer come first, because that costs no hashing.
    """
    owners = {value: name for name, value in our_digests.items()}
    changes, replaced = dict[str, str](), dict[str, Tensor]()
    for name in wrong:
        if theirs[name] in owners:
            owner = owners[theirs[name]]
            changes[name] = f"holds {owner}"
            replaced |= {
                part: tensors[other]
                for part, other in zip(ours.parts[name], ours.parts[owner], strict=False)
            }
    for name in searched(wrong, theirs, our_digests):
        parts = [tensors[part] for part in ours.parts[name]]
        for change, changed in candidates(name, parts):
            if digest_of_tensor(name, changed, dtype) == theirs[name]:
                changes[name] = change
                replaced |= dict(zip(ours.parts[name], changed, strict=True))
                break
    return changes, replaced


def searched(
    wrong: Sequence[str], theirs: Mapping[str, str], our_digests: Mapping[str, str]
) -> list[str]:
    """Return the wrong tensors that a known change is searched for."""
    return [name for name in wrong if theirs[name] not in our_digests.values()][:MOST_EXPLAINED]


def candidates(name: str, parts: Parts) -> Iterator[tuple[str, Parts]]:
    """Yield (change, parts after it) for the served tensor `name`."""
    for change, apply in CHANGES.items():
        yield change, [apply(part) for part in parts]
    if len(parts) < 4:
        yield from (
            (f"parts {a} and {b} swapped", swapped(parts, a, b, 1)) for a, b in pairs(len(parts))
        )
        return
    parts_per_expert = 2 if name.endswith("w13_weight") else 1  # gate and up of every expert
    experts = len(parts) // parts_per_expert
    yield "experts rolled by one", parts[parts_per_expert:] + parts[:parts_per_expert]
    yield "experts rolled by one", parts[-parts_per_expert:] + parts[:-parts_per_expert]
    if parts_per_expert == 2:
        yield "gate and up swapped", [parts[number ^ 1] for number in range(len(parts))]
    # every candidate hashes the whole tensor, and there are experts^2 / 2 pairs
    budget = MOST_BYTES // max(1, sum(part.nbytes for part in parts))
    for a, b in itertools.islice(pairs(experts), budget):
        yield f"experts {a} and {b} swapped", swapped(parts, a, b, parts_per_expert)
    for change, expert in itertools.product(
        ("rounded to fp8 in blocks", "zeros"), range(min(experts, budget))
    ):
        of_expert = range(expert * parts_per_expert, (expert + 1) * parts_per_expert)
        apply = CHANGES[change]
        changed = [apply(part) if at in of_expert else part for at, part in enumerate(parts)]
        yield f"expert {expert} {change}", changed


def pairs(count: int) -> Iterator[tuple[int, int]]:
    return itertools.combinations(range(count), 2)


def swapped(parts: Parts, a: int, b: int, size: int) -> Parts:
    order = list(range(len(parts)))
    for number in range(size):
        order[a * size + number], order[b * size + number] = b * size + number, a * size + number
    return [parts[number] for number in order]


def relative_differences(
    wrong: Sequence[str],
    theirs: Mapping[str, str],
    ours: ExportDigests,
    tensors: Mapping[str, Tensor],
    dtype: torch.dtype,
    loaded: Path | None,
) -> dict[str, float]:
    """Return |server - trainer| / |trainer| of each wrong tensor that the server holds exactly as
    its checkpoint `loaded` has it.
    """
    if loaded is None or not wrong:
        return {}
    relative = {}
    with HFFiles(loaded) as files:
        for name in wrong:
            names = ours.parts[name]
            if not all(part in files.headers for part in names):
                continue
            values = [files.read(part) for part in names]
            if digest_of_tensor(name, values, dtype) != theirs[name]:
                continue
            pairs_of = [
                (tensors[part].double(), value.double())
                for part, value in zip(names, values, strict=True)
            ]
            if all(exported.shape == value.shape for exported, value in pairs_of):
                squares = ((value - exported).square().sum() for exported, value in pairs_of)
                difference = sum(map(float, squares))
                size = sum(float(exported.square().sum()) for exported, _ in pairs_of)
                relative[name] = (difference / max(size, 1e-30)) ** 0.5
    return relative


def changed_checkpoint(folder: Path, source: Path, replaced: Mapping[str, Tensor]) -> Path:
    """Make a checkpoint in `folder` with these tensors in a new file and links to the others in
    `source`.
    """
    folder.mkdir(parents=True)
    with HFFiles(source) as files:
        shapes = {name: header.shape for name, header in files.headers.items()}
        dtypes = {name: header.torch_dtype() for name, header in files.headers.items()}
        places = {name: header.file.name for name, header in files.headers.items()}
    for file in source.iterdir():
        if not file.name.endswith(".index.json"):
            (folder / file.name).symlink_to(file.resolve())
    changed = {
        name: tensor.to(dtypes[name]).reshape(shapes[name]).contiguous().clone()
        for name, tensor in replaced.items()
        if name in places
    }
    save_file(changed, folder / CHANGED_FILE, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": places | dict.fromkeys(changed, CHANGED_FILE)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder
