"""Convert between an HF checkpoint and a megatron-core distributed checkpoint (torch_dist), \
tensor by tensor, on CPU.

  megatron-rl convert hf-to-megatron --hf DIR --out DIR
  megatron-rl convert megatron-to-hf --megatron DIR [--config HF_DIR] --out DIR
  megatron-rl convert megatron-to-peft --megatron DIR [--config HF_DIR] --out DIR
  megatron-rl convert verify DIR DIR [--config HF_DIR]
  megatron-rl convert info DIR

One process converts for any layout: a torch_dist checkpoint loads in every tp, pp, ep.  Under
torchrun the ranks share the files.  A stopped conversion continues where it was; a complete one is
not repeated.  A checkpoint of a run is torch_dist, too: megatron-to-hf, verify and info read its
model part; adapters ([lora]) are merged into their base, or written as a PEFT folder
(megatron-to-peft).  See docs/guides/checkpoints.md.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from megatron_rl.config.run_paths import RunFolder

DTYPES = ("keep", "float32", "bfloat16", "float16")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    forward = commands.add_parser("hf-to-megatron", help="HF -> torch_dist")
    forward.add_argument("--hf", type=Path, required=True, help="HF checkpoint directory")
    back = commands.add_parser("megatron-to-hf", help="torch_dist -> HF safetensors")
    peft = commands.add_parser("megatron-to-peft", help="adapters of a run -> PEFT folder")
    for command in (back, peft):
        command.add_argument(
            "--megatron", type=Path, required=True, help="torch_dist directory (with .metadata)"
        )
    peft.add_argument("--out", type=Path, required=True)
    check = commands.add_parser(
        "verify", help="compare two checkpoints, of either kind, tensor by tensor"
    )
    check.add_argument("dirs", type=Path, nargs=2)
    about = commands.add_parser("info", help="describe a checkpoint")
    about.add_argument("dir", type=Path)
    for command in (back, peft, check, about):
        where = "default: DIR/hf, or the model.path of a run"
        command.add_argument(
            "--config", type=Path, help=f"HF directory with config.json and tokenizer; {where}"
        )
    for command in (forward, check):
        command.add_argument(
            "--trust-pickle",
            action="store_true",
            help="read pytorch_model*.bin (tensors only, no code)",
        )
    for command in (forward, back):
        command.add_argument("--out", type=Path, required=True)
        command.add_argument("--dtype", choices=DTYPES, default="keep", help="default: as stored")
        command.add_argument("--file-gb", type=gigabytes, default=5.0, help="size of output files")
        command.add_argument("--backend", choices=("own", "bridge"), default="own")
    args = parser.parse_args(arguments)
    folders = [getattr(args, name, None) for name in ("hf", "megatron", "config", "dir")]
    for path in folders + getattr(args, "dirs", []):
        if path is not None and (problem := folder_problem(path)):
            parser.error(problem)
    return args


def folder_problem(path: Path) -> str | None:
    """Return why `path` cannot be the folder of a checkpoint; for that of a run, with the
    checkpoints in it.
    """
    if not path.is_dir():
        return f"{path}: no such directory"
    run = RunFolder(path)
    if not run.config.is_file():
        return None
    models = [run.hf] if run.hf.is_dir() else []
    names = [str(folder) for folder in [*sorted(run.checkpoints.glob("step_*")), *models]]
    choice = f"name one of {', '.join(names)}" if names else "there is no checkpoint in it yet"
    return f"{path}: the folder of a run, not of a checkpoint; {choice}"


def gigabytes(text: str) -> float:
    """Parse a size.  Raises ArgumentTypeError for one that no file has."""
    try:
        size = float(text)
    except ValueError:
        size = math.nan
    if not (0 < size < math.inf):
        raise argparse.ArgumentTypeError(f"{text}: must be a number above 0, in gigabytes")
    return size
