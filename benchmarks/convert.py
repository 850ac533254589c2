"""Conversion between HF and torch_dist against the speed of disk and memory, in one run, with the
peak memory of each.

    python benchmarks/convert.py [--layers 8] [--experts 32] [--repeats 3] [--dir /data/scratch] \
[--bridge]

Makes a Qwen3-MoE checkpoint of random bf16 weights (real proportions, fewer layers and experts).
Then, alternating: copies the same number of bytes in memory, writes them as plain files, converts
to torch_dist, converts back.  The time includes fsync of each output.  The source was just written,
so it is read from the page cache if it fits there. --bridge, with an interpreter that has
megatron-bridge (docs/guides/checkpoints.md): Megatron-Bridge converts the same files in the same
rounds, and the ratios are printed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

from megatron_rl.config import ParallelConfig
from megatron_rl.distributed import Parallel, make_parallel
from megatron_rl.models.families import make_spec
from megatron_rl.weights.hf.entries import entries
from megatron_rl_tools.convert.conversion import MIB, Conversion, hf_to_megatron, megatron_to_hf
from megatron_rl_tools.convert.conversion_files import FileWork
from megatron_rl_tools.convert.shard_writer import Piece, ShardWriter

FILE_BYTES = 256 * MIB
WORK = FileWork(0, 1, lambda _: None)
BRIDGE = "Megatron-Bridge, "


def main() -> None:
    args = parse()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    root = Path(tempfile.mkdtemp(prefix="convert.", dir=args.dir))
    parallel = make_parallel(ParallelConfig(), device="cpu")
    try:
        hf, size = make_checkpoint(root / "hf", args.layers, args.experts)
        count = sum(1 for _ in hf.glob("*.safetensors"))
        print(
            f"{size / MIB:.0f} MiB in {count} files, bf16, {args.layers} layers of {args.experts}"
            f" experts, {args.repeats} rounds"
        )
        rates: dict[str, list[float]] = {}
        work: dict[str, list[float]] = {}
        peaks: dict[str, Conversion] = {}
        for _ in range(args.repeats):
            runs = cases(root, hf, size, parallel) | (
                bridge_cases(root, hf, parallel) if args.bridge else {}
            )
            for name, run in runs.items():
                start, worked = time.perf_counter(), time.process_time()
                outcome = run()
                rates.setdefault(name, []).append(size / MIB / (time.perf_counter() - start))
                work.setdefault(name, []).append((time.process_time() - worked) / size * 2**30)
                if outcome is not None:
                    peaks[name] = outcome
            for used in (
                "plain",
                "megatron",
                "back",
                *(("bridge", "bridge-back") if args.bridge else ()),
            ):
                shutil.rmtree(root / used)
        report(rates, work, peaks)
    finally:
        parallel.destroy()
        shutil.rmtree(root)


def cases(
    root: Path, hf: Path, size: int, parallel: Parallel
) -> dict[str, Callable[[], Conversion | None]]:
    return {
        "memcpy": lambda: copy_memory(size),
        "disk write": lambda: write_plain(root / "plain", size),
        "HF -> torch_dist": lambda: hf_to_megatron(
            hf,
            root / "megatron",
            WORK,
            dtype=None,
            file_bytes=FILE_BYTES,
            trust_pickle=False,
            parallel=parallel,
        ),
        "torch_dist -> HF": lambda: megatron_to_hf(
            root / "megatron",
            hf,
            root / "back",
            WORK,
            dtype=None,
            file_bytes=FILE_BYTES,
            parallel=parallel,
        ),
    }


def bridge_cases(
    root: Path, hf: Path, parallel: Parallel
) -> dict[str, Callable[[], Conversion | None]]:
    from megatron_rl_tools.convert.bridge_backend import (
        bridge_hf_to_megatron,
        bridge_megatron_to_hf,
    )

    return {
        f"{BRIDGE}HF -> torch_dist": lambda: bridge_hf_to_megatron(
            hf, root / "bridge", WORK, dtype=None, parallel=parallel
        ),
        f"{BRIDGE}torch_dist -> HF": lambda: bridge_megatron_to_hf(
            root / "megatron", hf, root / "bridge-back", WORK, dtype=None, parallel=parallel
        ),
    }


def report(
    rates: dict[str, list[float]], work: dict[str, list[float]], peaks: dict[str, Conversion]
) -> None:
    disk = statistics.median(rates["disk write"])
    print(
        "| what | MiB/s, median (least - most) | of the disk's rate | CPU s per GiB | peak memory,"
        " MiB | largest group, MiB |"
    )
    print("|---|---|---|---|---|---|")
    for name, rate in rates.items():
        middle = statistics.median(rate)
        outcome = peaks.get(name)
        memory = (
            "- | -"
            if outcome is None
            else f"{outcome.peak_bytes / MIB:.0f} | {outcome.largest_group / MIB:.0f}"
        )
        spent = statistics.median(work[name])
        print(
            f"| {name} | {middle:.0f} ({min(rate):.0f} - {max(rate):.0f}) | {middle / disk:.2f} |"
            f" {spent:.2f} | {memory} |"
        )
    for name in rates:
        if name.startswith(BRIDGE):
            backend = name.removeprefix(BRIDGE)
            faster = statistics.median(
                one / other for one, other in zip(rates[backend], rates[name], strict=True)
            )
            less = peaks[name].peak_bytes / max(peaks[backend].peak_bytes, 1)
            print(
                f"{backend}: {faster:.1f} times as fast as Megatron-Bridge (median of rounds),"
                f" {less:.0f} times less peak memory"
            )


def make_checkpoint(path: Path, layers: int, experts: int) -> tuple[Path, int]:
    """Make a checkpoint of Qwen3-30B-A3B's proportions with random bits of finite bf16, and return
    its bytes.
    """
    path.mkdir()
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "dtype": "bfloat16",
        "hidden_size": 2048,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": experts,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "vocab_size": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 4096,
    }
    (path / "config.json").write_text(json.dumps(config))
    pieces = [
        Piece(name, shape, torch.bfloat16)
        for entry in entries(make_spec(config))
        for name, shape in entry.hf
    ]
    files: list[list[Piece]] = [[]]
    for piece in pieces:
        if sum(member.nbytes for member in files[-1]) + piece.nbytes > FILE_BYTES and files[-1]:
            files.append([])
        files[-1].append(piece)
    index = {}
    for number, part in enumerate(files):
        name = f"model-{number:05d}.safetensors"
        writer = ShardWriter(path / name, part)
        for piece in part:
            writer.write(piece.name, [torch.randn(piece.shape, dtype=torch.bfloat16)])
            index[piece.name] = name
        writer.close()
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return path, sum(piece.nbytes for piece in pieces)


def copy_memory(size: int) -> None:
    source, target = (
        torch.ones(32 * MIB, dtype=torch.uint8),
        torch.zeros(32 * MIB, dtype=torch.uint8),
    )
    for _ in range(size // (32 * MIB)):
        target.copy_(source)


def write_plain(folder: Path, size: int) -> None:
    folder.mkdir()
    block = os.urandom(16 * MIB)
    for number in range(-(-size // FILE_BYTES)):
        with (folder / str(number)).open("wb") as stream:
            for _ in range(min(FILE_BYTES, size - number * FILE_BYTES) // len(block)):
                stream.write(block)
            stream.flush()
            os.fsync(stream.fileno())


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--bridge", action="store_true", help="convert with Megatron-Bridge, too")
    parser.add_argument("--dir", type=Path, help="where to write; default: the temporary directory")
    return parser.parse_args()


if __name__ == "__main__":
    main()
