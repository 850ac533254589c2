"""Export an HF checkpoint that a recipe of nvidia-modelopt quantises, in modelopt's layout.

hf_quant_config.json beside config.json describes it.  transformers builds the complete model in
memory.  Recipes with fixed scales of activations are calibrated with real prompts.
"""

from __future__ import annotations

import argparse
import difflib
import time
import warnings
from collections import Counter
from collections.abc import Callable
from types import ModuleType

import torch

from megatron_rl.config import DataConfig
from megatron_rl.data.prompts import load_prompts, load_tokenizer
from megatron_rl.weights.hf.files import CheckpointError, read_headers
from megatron_rl_tools.convert.conversion_files import (
    FileWork,
    copy_companions,
    fingerprint,
    finish_files,
    open_place,
)


def export_model(args: argparse.Namespace) -> int:
    """Export the model and return the exit status.

    Raises CheckpointError for an unknown recipe, or one that needs --prompts.
    """
    mtq, export_hf_checkpoint = import_modelopt()
    recipe = find_recipe(mtq, args.recipe)
    if mtq.need_calibration(recipe) and args.prompts is None:
        raise CheckpointError(
            f"--recipe {args.recipe} fixes the scales of activations: set --prompts FILE to measure"
            " them"
        )
    prompts = None
    if args.prompts:
        prompts = [str(args.prompts), args.prompts.stat().st_mtime_ns, args.samples]
    job = {
        "command": "modelopt",
        "source": fingerprint(args.dir),
        "recipe": args.recipe,
        "prompts": prompts,
    }
    place = open_place(args.out, job, FileWork(0, 1, print))
    if place is None:
        print(f"{args.out} exists already: nothing to do")
        return 0
    token_ids = calibration_prompts(args) if args.prompts else []
    model = load_model(args)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers' and modelopt's own deprecations
        mtq.quantize(model, recipe, forward_loop=lambda model: calibrate(model, token_ids))
        export_hf_checkpoint(model, export_dir=place)
    exported = (place / "config.json").read_text()
    copy_companions(args.dir, place)
    (place / "config.json").write_text(exported)
    headers = read_headers(place)
    finish_files(place, args.out, job)
    dtypes = Counter(header.dtype for header in headers.values())
    counts = ", ".join(f"{dtypes[dtype]} tensors {dtype}" for dtype in sorted(dtypes))
    print(f"wrote {args.out}: {args.recipe}, {counts}")
    return 0


def import_modelopt() -> tuple[ModuleType, Callable[..., object]]:
    try:
        import modelopt.torch.quantization as mtq
        from modelopt.torch.export import export_hf_checkpoint
    except ImportError as error:
        raise CheckpointError(
            f"nvidia-modelopt cannot be imported ({error}): pip install nvidia-modelopt, or use"
            " `blocks`, which needs none"
        ) from error
    return mtq, export_hf_checkpoint


def find_recipe(mtq: ModuleType, name: str) -> object:
    recipes = [attribute for attribute in dir(mtq) if attribute.endswith("_CFG")]
    if name not in recipes:
        near = difflib.get_close_matches(name, recipes, n=1)
        meant = f", did you mean {near[0]}" if near else ""
        raise CheckpointError(
            f"--recipe {name}: nvidia-modelopt has no such recipe{meant}; it has"
            f" {', '.join(recipes)}"
        )
    return getattr(mtq, name)


def calibration_prompts(args: argparse.Namespace) -> list[tuple[int, ...]]:
    config = DataConfig(train=args.prompts, on_long_prompt="drop")
    tokenizer = load_tokenizer(args.dir)
    if tokenizer.chat_template is None:
        config = config.model_copy(update={"chat_template": False})
    return [
        tuple(prompt.token_ids)
        for prompt in load_prompts(args.prompts, config, tokenizer).prompts[: args.samples]
    ]


def load_model(args: argparse.Namespace) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    device_map = {"device_map": "auto"} if args.device == "auto" else {}
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(
        args.dir, dtype="auto", use_safetensors=True, **device_map
    )
    return model.eval()


def calibrate(model: torch.nn.Module, prompts: list[tuple[int, ...]]) -> None:
    """Run one prompt at a time: padding would count as an activation."""
    start, device = time.monotonic(), next(model.parameters()).device
    for number, token_ids in enumerate(prompts, 1):
        model(torch.tensor([token_ids], device=device))
        if number % 32 == 0 or number == len(prompts):
            print(
                f"calibrated with {number} of {len(prompts)} prompts,"
                f" {time.monotonic() - start:.1f} s",
                flush=True,
            )
