"""The command `megatron-rl quantize`: quantise or dequantise tensor by tensor, on the CPU.

options.py parses its arguments.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from megatron_rl.models.spec import ModelError, load_hf_config
from megatron_rl.weights.hf.files import (
    DTYPES,
    CheckpointError,
    HFFiles,
    TensorHeader,
    write_dtype,
    write_index,
)
from megatron_rl.weights.hf.fp8 import (
    BLOCK,
    QuantizeError,
    dequantize_blocks,
    quantize_blocks,
    scales_shape,
)
from megatron_rl_tools.convert.conversion_files import (
    FileWork,
    Job,
    copy_companions,
    fingerprint,
    finish_files,
    open_place,
)
from megatron_rl_tools.convert.shard_writer import Piece, ShardWriter
from megatron_rl_tools.quantize.modelopt_export import export_model
from megatron_rl_tools.quantize.options import parse

SCALE = "_scale_inv"
"""End of the name of a weight's scales."""

Plan = dict[str, list[Piece]]
"""Name of a source tensor -> the tensors that are written for it; [] for scales that are removed.
"""
Change = Callable[[str, Tensor], Iterator[tuple[str, Tensor]]]
HFConfig = dict[str, object]
T = TypeVar("T")


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    try:
        commands = {"blocks": weight_blocks, "dequantize": dequantize, "modelopt": export_model}
        return commands[args.command](args)
    except (CheckpointError, ModelError, QuantizeError, OSError) as error:
        print(f"megatron-rl quantize: {error}", file=sys.stderr)
        return 2


def weight_blocks(args: argparse.Namespace) -> int:
    """Quantise every matrix whose name matches none of --keep."""
    hf = load_hf_config(args.dir)
    if "quantization_config" in hf:
        raise CheckpointError(
            f"{args.dir}: config.json already has a quantization_config; dequantize it first"
        )
    with HFFiles(args.dir) as files:
        kept = [
            name
            for name, header in files.headers.items()
            if len(header.shape) >= 2 and is_kept(name, args.keep)
        ]

        def becomes(name: str, header: TensorHeader) -> list[Piece]:
            if len(header.shape) < 2 or name in kept:
                return [as_stored(header)]
            shape = names_of_weights(name, lambda: scales_shape(header.shape))
            return [
                Piece(name, header.shape, torch.float8_e4m3fn),
                Piece(name + SCALE, shape, torch.float32),
            ]

        def change(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
            values, scales = names_of_weights(name, lambda: quantize_blocks(tensor))
            yield name, values
            yield name + SCALE, scales

        plan = {name: becomes(name, header) for name, header in files.headers.items()}
        quantization = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": sorted(name.removesuffix(".weight") for name in kept),
        }

        def with_quantization(config: HFConfig) -> HFConfig:
            return {**config, "quantization_config": quantization}

        return rewrite(args, files, plan, change, with_quantization)


def names_of_weights(name: str, work: Callable[[], T]) -> T:
    """Return work(), with the tensor's name in its QuantizeError."""
    try:
        return work()
    except QuantizeError as error:
        raise QuantizeError(
            f"cannot quantise {name}: {error} (for this command: --keep)"
        ) from error


def dequantize(args: argparse.Namespace) -> int:
    """Write every quantised weight as value * scale of its block, in --dtype; other tensors are
    written in it where it holds all their values, else unchanged.
    """
    method = load_hf_config(args.dir).get("quantization_config") or {}
    size = method.get("weight_block_size") or []
    if method.get("quant_method") != "fp8" or len(size) != 2 or size[0] != size[1]:
        raise CheckpointError(
            f"{args.dir}: quantization_config = {method or None}: only quant_method = fp8 with a"
            " square weight_block_size is read"
        )
    dtype = getattr(torch, args.dtype)
    with HFFiles(args.dir) as files:
        scaled = {name.removesuffix(SCALE) for name in files.headers if name.endswith(SCALE)}
        check_pairs(args.dir, files.headers, scaled, size[0])

        def becomes(name: str, header: TensorHeader) -> list[Piece]:
            if name.endswith(SCALE):
                return []
            # a tensor of more precision is unchanged: biases that select experts
            if name not in scaled and not (
                header.dtype in DTYPES and torch.promote_types(header.torch_dtype(), dtype) == dtype
            ):
                return [as_stored(header)]
            return [Piece(name, header.shape, dtype)]

        def change(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
            if name in scaled:
                scales = files.read(name + SCALE).float()
                tensor = dequantize_blocks(tensor, scales, size[0])
            yield name, tensor.to(dtype)

        plan = {name: becomes(name, header) for name, header in files.headers.items()}

        def without(config: HFConfig) -> HFConfig:
            return {key: value for key, value in config.items() if key != "quantization_config"}

        return rewrite(args, files, plan, change, without, dtype)


def check_pairs(path: Path, headers: dict[str, TensorHeader], scaled: set[str], block: int) -> None:
    """Raise CheckpointError unless every e4m3 tensor has scales of the right shape, and every scale
    has its tensor.
    """
    bare = {name for name, header in headers.items() if header.dtype == "F8_E4M3"} ^ scaled
    if bare:
        raise CheckpointError(
            f"{path}: {sorted(bare)[0]}: an e4m3 weight and its {SCALE} must come together"
        )
    for name in sorted(scaled):
        expected, stored = scales_shape(headers[name].shape, block), headers[name + SCALE].shape
        if expected != stored:
            raise CheckpointError(
                f"{path}: {name}{SCALE} has shape {list(stored)}; blocks of {block} need"
                f" {list(expected)}"
            )


def rewrite(
    args: argparse.Namespace,
    files: HFFiles,
    plan: Plan,
    change: Change,
    new_config: Callable[[HFConfig], HFConfig],
    dtype: torch.dtype | None = None,
) -> int:
    """Write the tensors of each source file, changed if `plan` says so, to a file of the same name
    under --out.
    """
    job: Job = {
        "command": args.command,
        "source": fingerprint(args.dir),
        "keep": list(getattr(args, "keep", ())),
        "dtype": str(dtype),
    }
    place = open_place(args.out, job, FileWork(0, 1, print))
    if place is None:
        print(f"{args.out} exists already: nothing to do")
        return 0
    start, shards = time.monotonic(), by_file(files.headers)
    for number, (file, names) in enumerate(shards.items(), 1):
        done = place / "journal" / file
        if not done.exists():
            write_shard(place / file, names, files, plan, change)
            done.touch()
        print(f"[{number}/{len(shards)}] {file}  {time.monotonic() - start:.1f} s", flush=True)
    copy_companions(args.dir, place)
    if dtype is not None:
        write_dtype(place, dtype)
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps(new_config(config), indent=2) + "\n")
    size = sum(piece.nbytes for pieces in plan.values() for piece in pieces)
    write_index(
        place,
        {piece.name: file for file, names in shards.items() for n in names for piece in plan[n]},
        size,
    )
    finish_files(place, args.out, job)
    before = sum(as_stored(header).nbytes for header in files.headers.values())
    print(f"wrote {args.out}: {before / 2**20:.1f} -> {size / 2**20:.1f} MiB")
    return 0


def write_shard(
    file: Path, names: Sequence[str], files: HFFiles, plan: Plan, change: Change
) -> None:
    writer = ShardWriter(file, [piece for name in names for piece in plan[name]])
    for name in names:
        if not plan[name]:
            continue
        tensor = files.read(name)
        unchanged = plan[name] == [as_stored(files.headers[name])]
        for written, values in [(name, tensor)] if unchanged else change(name, tensor):
            writer.write(written, [values])
    writer.close()


def by_file(headers: dict[str, TensorHeader]) -> dict[str, list[str]]:
    """Return file name -> its tensors in the order of their bytes, so that files are read from
    front to back.
    """
    shards: dict[str, list[str]] = {}
    for name in sorted(
        headers, key=lambda tensor: (headers[tensor].file.name, headers[tensor].start)
    ):
        shards.setdefault(headers[name].file.name, []).append(name)
    return shards


def as_stored(header: TensorHeader) -> Piece:
    return Piece(header.name, header.shape, header.torch_dtype())


def is_kept(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
