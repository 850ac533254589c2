"""Convert between an HF checkpoint and a megatron-core dist_checkpointing (torch_dist) directory, on CPU or GPU.

python tools/convert_hf.py to-megatron --hf DIR --out DIR
python tools/convert_hf.py to-hf --megatron DIR --hf-config DIR --out DIR
A torch_dist directory loads in every parallel layout, so the layout here only spreads the work: start it with
`torchrun --nproc_per_node N` and --tp / --pp / --ep where the model does not fit one process.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing

from megatron_rl.config import ModelConfig, ParallelConfig
from megatron_rl.engine.model import load_hf_config, make_model, make_spec, make_transformer_config
from megatron_rl.engine.parallel import Parallel, make_parallel
from megatron_rl.weights.export import export_hf, write_hf_checkpoint
from megatron_rl.weights.load import load_hf


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    parallel_cfg = ParallelConfig(tp=args.tp, pp=args.pp, ep=args.ep, etp=args.etp)
    parallel = make_parallel(parallel_cfg, device=args.device)
    try:
        if args.command == "to-megatron":
            to_megatron(args.hf, args.out, args.dtype, parallel_cfg, parallel)
        else:
            to_hf(args.megatron, args.hf_config, args.out, args.dtype, parallel_cfg, parallel)
        dist.barrier()
        if parallel.rank == 0:
            print(f"wrote {args.out}")
    finally:
        parallel.destroy()


def to_megatron(hf: Path, out: Path, dtype: str | None, cfg: ParallelConfig, parallel: Parallel) -> None:
    """Write the model part of a megatron checkpoint into the new or empty directory `out`."""
    chunks, spec = build(hf, dtype, cfg, parallel)
    load_hf(chunks, hf, spec, parallel)
    if parallel.rank == 0:
        out.mkdir(parents=True, exist_ok=True)
        if any(out.iterdir()):
            raise SystemExit(f"--out {out}: is not empty; give a new directory")
    dist.barrier()
    dist_checkpointing.save(sharded_state(chunks), str(out))


def to_hf(
    megatron: Path, hf_config: Path, out: Path, dtype: str | None, cfg: ParallelConfig, parallel: Parallel
) -> None:
    """Write an HF checkpoint with the weights of `megatron` and the config and tokenizer files of `hf_config`."""
    chunks, spec = build(hf_config, dtype, cfg, parallel)
    state = dist_checkpointing.load(sharded_state(chunks), str(megatron))
    for name, chunk in zip(chunk_names(chunks), chunks, strict=True):
        chunk.load_state_dict(state[name])
    write_hf_checkpoint(export_hf(chunks, spec, parallel), hf_config, out)


def build(path: Path, dtype: str | None, cfg: ParallelConfig, parallel: Parallel) -> tuple[list[Any], Any]:
    hf = load_hf_config(path)
    dtype = dtype or hf.get("dtype") or hf.get("torch_dtype") or "bfloat16"
    model = ModelConfig(path=path, dtype=dtype)  # type: ignore[arg-type]  # validated there
    spec = make_spec(hf)
    config = make_transformer_config(spec, model, cfg, parallel.device)
    return make_model(spec, model, config, parallel), spec


def sharded_state(chunks: list[Any]) -> dict[str, Any]:
    return {name: chunk.sharded_state_dict() for name, chunk in zip(chunk_names(chunks), chunks, strict=True)}


def chunk_names(chunks: list[Any]) -> list[str]:
    """Megatron-LM's spelling: `model`, or model0, model1 ... for virtual pipeline stages."""
    return ["model"] if len(chunks) == 1 else [f"model{index}" for index in range(len(chunks))]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    forward = commands.add_parser("to-megatron", help="HF safetensors -> torch_dist")
    forward.add_argument("--hf", type=Path, required=True, help="HF checkpoint directory")
    back = commands.add_parser("to-hf", help="torch_dist -> HF safetensors")
    back.add_argument("--megatron", type=Path, required=True, help="dist_checkpointing directory (with metadata.json)")
    back.add_argument("--hf-config", type=Path, required=True, help="original config.json and tokenizer")
    for command in (forward, back):
        command.add_argument("--out", type=Path, required=True)
        command.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: as config.json says")
        command.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
        for size in ("tp", "pp", "ep"):
            command.add_argument(f"--{size}", type=int, default=1)
        command.add_argument("--etp", type=int, default=None, help="default: tp")
    args = parser.parse_args(arguments)
    for name in ("hf", "megatron", "hf_config"):
        path = getattr(args, name, None)
        if path is not None and not path.is_dir():
            parser.error(f"--{name.replace('_', '-')} {path}: no such directory")
    return args


if __name__ == "__main__":
    main(sys.argv[1:])
