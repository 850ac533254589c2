"""The command `megatron-rl convert`: choose a conversion and run it on this process, or on
torchrun's ranks.  options.py parses its arguments.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch

from megatron_rl.checkpoint.folder import LATEST, STATE, latest_checkpoint, read_state
from megatron_rl.checkpoint.folder import CheckpointError as RunCheckpointError
from megatron_rl.checkpoint.torch_dist.chunk_reader import TorchDist
from megatron_rl.config import ParallelConfig
from megatron_rl.distributed import Parallel, make_parallel
from megatron_rl.models.families import make_spec
from megatron_rl.models.fit import tp_sizes
from megatron_rl.models.spec import ModelError, load_hf_config
from megatron_rl.weights.hf.entries import entries
from megatron_rl.weights.hf.files import CheckpointError, HFFiles, is_left_out, listed
from megatron_rl.weights.hf.peft_folder import CONFIG as PEFT
from megatron_rl_tools.convert.comparison import verify
from megatron_rl_tools.convert.conversion import (
    MIB,
    Conversion,
    FileWork,
    hf_to_megatron,
    megatron_to_hf,
    model_of,
)
from megatron_rl_tools.convert.conversion_files import copied_tensors
from megatron_rl_tools.convert.conversion_sides import HFSide, Side
from megatron_rl_tools.convert.options import DTYPES, folder_problem, parse
from megatron_rl_tools.convert.run_adapters import (
    adapters_of_run,
    describe_peft,
    megatron_to_peft,
)


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    if args.command == "info":
        return guarded(lambda: info(args.dir, args.config))
    return guarded(lambda: with_ranks(args))


def convert(source: Path, out: Path, *, config: Path | None = None, dtype: str = "keep") -> None:
    """Convert checkpoint `source` into the other format at `out`: HF becomes torch_dist, torch_dist
    becomes HF.

    config: HF directory with config.json and tokenizer, for torch_dist; default: source/hf, or the
    model.path of a run.
    dtype: that of the written tensors: keep, float32, bfloat16 or float16.
    Collective under torchrun, where ranks share the files.  Raises CheckpointError or ModelError
    for a checkpoint that cannot be converted, and ValueError for another dtype.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype = {dtype!r}: must be one of {', '.join(DTYPES)}")
    if problem := folder_problem(Path(source)):
        raise CheckpointError(problem)
    arguments = (
        ["hf-to-megatron", "--hf"] if is_hf(Path(source)) else ["megatron-to-hf", "--megatron"]
    )
    arguments += [str(source), "--out", str(out), "--dtype", dtype]
    if config is not None and not is_hf(Path(source)):
        arguments += ["--config", str(config)]
    with_ranks(parse(arguments))


def with_ranks(args: argparse.Namespace) -> int:
    """Run a conversion on this process, or on torchrun's ranks."""
    parallel = make_parallel(ParallelConfig(), device="cpu")
    rank = parallel.rank
    work = FileWork(
        rank, parallel.world_size, lambda text: print(text, flush=True) if rank == 0 else None
    )
    try:
        return run_command(args, work, parallel)
    finally:
        parallel.destroy()


def guarded(command: Callable[[], int]) -> int:
    """Run the command and return the exit status; print a user's error as one line."""
    try:
        return command()
    except (CheckpointError, ModelError, RunCheckpointError, OSError) as error:
        print(f"megatron-rl convert: {error}", file=sys.stderr)
        return 2


def run_command(args: argparse.Namespace, work: FileWork, parallel: Parallel) -> int:
    if args.command == "verify":
        return compare_checkpoints(args, work, parallel)
    if args.command == "megatron-to-peft":
        return export_adapters(args, work, parallel)
    file_bytes = int(args.file_gb * 1e9)
    if args.backend == "bridge":
        outcome = convert_with_bridge(args, work, parallel)
    elif args.command == "hf-to-megatron":
        outcome = hf_to_megatron(
            args.hf,
            args.out,
            work,
            dtype=stored_dtype(args),
            file_bytes=file_bytes,
            trust_pickle=args.trust_pickle,
            parallel=parallel,
        )
    else:
        config = config_of(args.megatron, args.config)
        outcome = megatron_to_hf(
            args.megatron,
            config,
            args.out,
            work,
            dtype=stored_dtype(args),
            file_bytes=file_bytes,
            parallel=parallel,
        )
    done = f"{args.out} exists already: nothing to do"
    work.log(done if outcome is None else summary_line(args.out, outcome))
    return 0


def export_adapters(args: argparse.Namespace, work: FileWork, parallel: Parallel) -> int:
    if work.world > 1:
        raise CheckpointError(
            f"megatron-to-peft: started on {work.world} ranks; it works in one process"
        )
    config = config_of(args.megatron, args.config)
    count = megatron_to_peft(args.megatron, config, args.out, work, parallel)
    done = f"{args.out} exists already: nothing to do"
    work.log(done if count is None else f"wrote {args.out}: {count} tensors of adapters")
    return 0


def summary_line(out: Path, outcome: Conversion) -> str:
    rate = outcome.num_bytes / MIB / max(outcome.seconds, 1e-9)
    return (
        f"wrote {out}: {outcome.num_tensors} tensors, {outcome.num_bytes / MIB:.0f} MiB in"
        f" {outcome.seconds:.1f} s ({rate:.0f} MiB/s); peak memory of this process"
        f" {outcome.peak_bytes / MIB:.0f} MiB above its start, largest tensor group"
        f" {outcome.largest_group / MIB:.0f} MiB"
    )


def compare_checkpoints(args: argparse.Namespace, work: FileWork, parallel: Parallel) -> int:
    """Return exit status 0 if all tensors of the two checkpoints are equal, also after rounding to
    one of two dtypes, else 1.
    """
    config = (
        args.config
        or next((path for path in args.dirs if is_hf(path)), None)
        or config_of(args.dirs[0], None)
    )
    spec = make_spec(load_hf_config(config))
    with ExitStack() as stack:
        sides: list[Side] = []
        skipped = set[str]()
        for path in args.dirs:
            if is_hf(path):
                files = stack.enter_context(HFFiles(path, trust_pickle=args.trust_pickle))
                files.check(spec)
                sides.append(HFSide(files, spec))
                skipped |= {name for name in files.headers if is_left_out(name, spec)}
            else:
                # the other checkpoint is not the base of a run's adapters
                base = config if adapters_of_run(path) is None else config_of(path, args.config)
                sides.append(model_of(path, base, spec, parallel))
                skipped |= set(copied_tensors(path / "hf", spec).names)
        result = verify(sides[0], sides[1], spec, work)
    for line in result.lines():
        work.log(line)
    if skipped:
        work.log(listed("is not part of the model and was not compared", skipped))
    return int(bool(result.different))


def info(path: Path, config: Path | None) -> int:
    """Print the kind, sizes and possible layouts of a checkpoint, or of the newest one in
    RUN/checkpoints.
    """
    if (path / LATEST).is_file():
        path = latest_checkpoint(path) or path
    if (path / PEFT).is_file():
        print("\n  ".join(describe_peft(path)))
        return 0
    spec = make_spec(load_hf_config(path if is_hf(path) else config_of(path, config)))
    count = sum(torch.Size(shape).numel() for entry in entries(spec) for _, shape in entry.hf)
    experts = f"{spec.num_experts} experts, top {spec.top_k}" if spec.moe_layers else "dense"
    print(f"{path}: {spec.architecture}, {'HF' if is_hf(path) else 'torch_dist'}")
    print(
        f"  {spec.num_layers} layers ({len(spec.moe_layers)} with experts: {experts}),"
        f" {count / 1e6:.1f} M parameters"
    )
    tied = "yes" if spec.tie_embeddings else "no"
    print(f"  vocabulary {spec.vocab_size}, tied embeddings: {tied}")
    ep = f", ep divides {spec.num_experts}" if spec.moe_layers else ""
    print(f"  tp: {', '.join(map(str, tp_sizes(spec))) or 'none'}{ep}")
    if is_hf(path):
        with HFFiles(path) as files:
            files.check(spec)
            headers = files.headers.values()
            dtypes = ", ".join(sorted({header.dtype for header in headers}))
            num_files = len({header.file for header in headers})
            print(f"  {len(headers)} tensors in {num_files} files, {dtypes}")
    else:
        content = TorchDist(path).metadata.state_dict_metadata
        print(f"  {len(content)} keys in {len(list(path.glob('*.distcp')))} files")
    if (path / STATE).is_file():
        state = read_state(path)
        print(
            f"  of a run: {state['step']} steps, saved as {state['layout']} on {state['ranks']}"
            " ranks, with its optimizer"
        )
    if (adapters := adapters_of_run(path)) is not None:
        print(f"  {adapters.describe()}")
    return 0


def stored_dtype(args: argparse.Namespace) -> torch.dtype | None:
    """Return the dtype of the written tensors; None for the stored dtype."""
    return None if args.dtype == "keep" else getattr(torch, args.dtype)


def is_hf(path: Path) -> bool:
    return not (path / ".metadata").is_file()


def config_of(megatron: Path, config: Path | None) -> Path:
    """Return the folder with config.json and tokenizer of a torch_dist checkpoint: `config`, the
    folder beside it, or the model.path of its run.
    """
    if config is not None:
        return config
    if (megatron / "hf" / "config.json").is_file():  # from hf-to-megatron
        return megatron / "hf"
    if (megatron / STATE).is_file():
        trained = Path(str(read_state(megatron)["config"]["model"]["path"]))
        if (trained / "config.json").is_file():
            return trained
        raise CheckpointError(
            f"{megatron}: its model.path = {trained} has no config.json; set --config to that"
            " directory"
        )
    raise CheckpointError(
        f"{megatron}: has no hf/config.json; set --config to the original HF directory"
    )


def convert_with_bridge(
    args: argparse.Namespace, work: FileWork, parallel: Parallel
) -> Conversion | None:
    """Convert with Megatron-Bridge, if it is installed."""
    from megatron_rl_tools.convert.bridge_backend import (
        bridge_hf_to_megatron,
        bridge_megatron_to_hf,
    )

    if work.world > 1:
        raise CheckpointError(
            f"--backend bridge: started on {work.world} ranks; it works in one process"
        )
    dtype = stored_dtype(args)
    if args.command == "hf-to-megatron":
        return bridge_hf_to_megatron(args.hf, args.out, work, dtype=dtype, parallel=parallel)
    config = config_of(args.megatron, args.config)
    return bridge_megatron_to_hf(
        args.megatron, config, args.out, work, dtype=dtype, parallel=parallel
    )


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
