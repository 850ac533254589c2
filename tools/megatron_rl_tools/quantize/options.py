"""Quantise an HF checkpoint for servers, or turn a block-FP8 one into plain weights to train from.
Tensor by tensor, on the CPU.

  megatron-rl quantize blocks     HF_DIR --out DIR [--keep PATTERN ...]
  megatron-rl quantize dequantize HF_DIR --out DIR [--dtype bfloat16]
  megatron-rl quantize modelopt   HF_DIR --out DIR --recipe NAME [--prompts FILE.jsonl] \
[--samples 128]

blocks: e4m3 values and a float32 scale per 128 x 128 block, the layout in which DeepSeek-V3 is
published and that SGLang and transformers load directly.  modelopt: any recipe of nvidia-modelopt
(FP8_DEFAULT_CFG, NVFP4_DEFAULT_CFG, ...), with the complete model in memory.  The output appears
complete or not at all; blocks and dequantize continue where they were stopped.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_rl.config import RolloutConfig

DTYPES = ("bfloat16", "float32", "float16")
OF_DRAFTS = ("*eh_proj*", "*shared_head*")
"""Modules of multi-token prediction that SGLang loads without scales (its *_nextn models)."""


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    keep = (*RolloutConfig().quantize_keep, *OF_DRAFTS)
    for name, text in (
        ("blocks", "to e4m3 with a scale per block"),
        ("dequantize", "from e4m3 with a scale per block"),
        ("modelopt", "by a recipe of nvidia-modelopt"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("dir", type=Path, help="HF checkpoint directory")
        command.add_argument("--out", type=Path, required=True, help="new directory")
        if name == "blocks":
            command.add_argument(
                "--keep",
                nargs="*",
                default=keep,
                help=f"HF names (shell patterns) that are not quantised; default {' '.join(keep)}",
            )
        if name == "dequantize":
            command.add_argument("--dtype", choices=DTYPES, default="bfloat16")
        if name == "modelopt":
            command.add_argument(
                "--recipe",
                required=True,
                help="name of a configuration in modelopt.torch.quantization",
            )
            command.add_argument(
                "--prompts", type=Path, help="jsonl or parquet to calibrate with, as for training"
            )
            command.add_argument(
                "--device",
                choices=("cpu", "auto"),
                default="cpu",
                help="auto: spread by accelerate over GPUs",
            )
            command.add_argument(
                "--samples", type=int, default=128, help="prompts of it that are used"
            )
    args = parser.parse_args(arguments)
    if not args.dir.is_dir():
        parser.error(f"{args.dir}: no such directory")
    return args
