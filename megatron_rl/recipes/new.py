"""The command `megatron-rl new`: copies a recipe into a folder of the user's, for a model and a
number of GPUs.

options.py parses its arguments.
"""

from __future__ import annotations

import difflib
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from megatron_rl.models.known import HUB, RENDERERS, is_known
from megatron_rl.plan.hardware import find_hardware
from megatron_rl.recipes.layout import propose
from megatron_rl.recipes.options import parse_new
from megatron_rl.recipes.toml_values import read_value, with_values

FOLDER = Path(__file__).parent
MODEL, GPUS, GPU = "qwen3-30b-a3b", 8, "h100"
"""What the files of every recipe are for."""
PER_NODE = re.compile(r"(?<=GPUS:=)\d+")
NODES = re.compile(r"(?<=NNODES:=)\d+")
KIND = re.compile(r"(?<=GPU:=)\w*")
LAYOUT = re.compile(r"^# Layout: .*$", re.MULTILINE)
TITLE = re.compile(r"# (?P<name>\S+): (?P<text>.+)")
BLOCK = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)


def main(argv: list[str] | None = None) -> int:
    args = parse_new(argv)
    if args.list:
        print(overview())
        return 0
    try:
        print(make_project(args.folder, args.recipe, args.model, args.gpus, args.gpu, args.lora))
    except (ValueError, OSError) as error:
        print(f"megatron-rl new: {error}", file=sys.stderr)
        return 2
    return 0


def recipes() -> dict[str, Path]:
    """Return name -> folder of every recipe."""
    return {path.parent.name: path.parent for path in sorted(FOLDER.glob("*/config.toml"))}


def overview() -> str:
    """Return a line for every recipe, from the first line of its README."""
    titles = [TITLE.match((path / "README.md").read_text()) for path in recipes().values()]
    named = [match.groups() for match in titles if match]
    width = max(len(name) for name, _ in named) + 2
    return "\n".join(f"{name:<{width}}{text}" for name, text in named)


def make_project(
    folder: Path,
    recipe: str,
    model: str | None,
    gpus: int | None,
    gpu: str = GPU,
    lora: int | None = None,
) -> str:
    """Write the project and return what to do next.  lora: rank of adapters, if they are trained.

    Raises ValueError for an unknown recipe, a folder that is not empty, or a model that does not
    fit; nothing is written then.
    """
    source = find_recipe(recipe)
    check_empty(folder)
    files = {
        path.relative_to(source): path.read_text()
        for path in sorted(source.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }
    text = "the recipe's own layout"
    if model or gpus or gpu != GPU or lora:
        adapters = {} if lora is None else adapter_values(files[Path("config.toml")], lora)
        text = fill_in(files, source, model or MODEL, gpus or GPUS, gpu, adapters)
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    (folder / "run.sh").chmod(0o755)
    return "\n".join([f"{folder}: recipe {recipe}, {text}", "next:", *next_lines(folder, files)])


def find_recipe(name: str) -> Path:
    known = recipes()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]}?" if near else f"recipes: {', '.join(known)}"
        raise ValueError(f"--recipe {name}: no such recipe; {hint}")
    return known[name]


def check_empty(folder: Path) -> None:
    """Raise ValueError unless the folder is missing or empty."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file; name a new folder")
    if folder.is_dir() and (names := sorted(path.name for path in folder.iterdir())):
        more = ", ..." if len(names) > 3 else ""
        raise ValueError(
            f"{folder} is not empty ({', '.join(names[:3])}{more}); name a new folder, nothing is"
            " ever overwritten"
        )


def adapter_values(config: str, rank: int) -> dict[str, object]:
    """Return the settings that train adapters instead of the weights of a recipe: ten times its
    learning rate.
    """
    rate = float(str(read_value(config, "optim.lr")))
    return {"lora.rank": rank, "lora.alpha": 2.0 * rank, "optim.lr": float(f"{10 * rate:.6g}")}


def fill_in(
    files: dict[Path, str],
    source: Path,
    model: str,
    gpus: int,
    gpu: str,
    adapters: Mapping[str, object],
) -> str:
    """Change `files` to this model, these GPUs and the settings of adapters, if there are any;
    return the layout in words.
    """
    hardware = find_hardware(gpu)
    per_node, nodes = min(gpus, hardware.per_node), -(-gpus // hardware.per_node)
    if per_node * nodes != gpus:
        raise ValueError(
            f"--gpus {gpus}: on nodes of {per_node} GPUs it must be at most {per_node} or a"
            " multiple of it, as run.sh starts as many ranks on every node; use"
            f" {(nodes - 1) * per_node} or {nodes * per_node}"
        )
    name = model.lower() if is_known(model) else str(Path(model).resolve())
    path = f"checkpoints/{name}" if is_known(model) else name
    lora = {"rank": adapters["lora.rank"]} if adapters else {}
    layout = propose(source / "config.toml", model, path, gpus, hardware, {"lora": lora})
    config, run, readme = Path("config.toml"), Path("run.sh"), Path("README.md")
    values, line = {**layout.values, **adapters}, f"{name} on {layout.line}"
    if former := read_value(files[config], "agent.renderer"):
        values["agent.renderer"] = RENDERERS.get(name, former)
        if name not in RENDERERS:
            line += f"; agent.renderer = {former} may not be its chat format: set the right one"
    files[config] = with_values(files[config], values)
    if adapters:
        line += f"; adapters of rank {adapters['lora.rank']}"
    files[config] = LAYOUT.sub(lambda _: f"# Layout: {line}", files[config])
    files[run] = PER_NODE.sub(str(per_node), NODES.sub(str(nodes), files[run]))
    if gpu.lower() != GPU:
        files[run] = KIND.sub(gpu.lower(), files[run])
    sized = f" --model.path {name}" if is_known(model) else ""
    files[readme] = files[readme].replace(get_model(MODEL), get_model(model))
    files[readme] = files[readme].replace(f" --model.path {MODEL}", sized)
    return line


def get_model(model: str) -> str:
    """Return the command that gets a known model, with what joins it to the next; nothing for a
    directory.
    """
    if not is_known(model):
        return ""
    name = model.lower()
    return f"hf download {HUB[name]} --local-dir checkpoints/{name} && "


def next_lines(folder: Path, files: dict[Path, str]) -> list[str]:
    """Return the commands of the first code block of the README, after a change of directory."""
    block = BLOCK.search(files[Path("README.md")])
    commands = block[1].splitlines() if block else []
    return [f"  {line}" for line in [f"cd {shlex.quote(str(folder))}", *commands]]
