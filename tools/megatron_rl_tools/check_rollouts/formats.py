"""The formats of dumps: detect which trainer saved the rollouts, from the content of the files."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from megatron_rl_tools.check_rollouts import slime_dumps, verl_dumps
from megatron_rl_tools.check_rollouts.foreign import ForeignDump
from megatron_rl_tools.check_rollouts.model_sizes import Sizes
from megatron_rl_tools.check_rollouts.pt_files import load_tensors
from megatron_rl_tools.check_rollouts.run_files import line_files

PICKLE, ZIP = b"\x80", b"PK\x03\x04"
"""The first bytes of a bare pickle, and of a file of torch.save."""


def open_dump(path: Path, name: str | None, sizes: Sizes | None) -> ForeignDump | None:
    """Open the dump in a file or folder, in format `name` or the detected one; None for a run of
    megatron-rl.

    Raises ValueError, which names the file, if it has none of the formats or only foreign code
    could read it.
    """
    is_run = path.is_dir() and bool(line_files(path))
    if name == "megatron_rl" or (name is None and is_run):
        return None
    files, notes = dump_files(path)
    if not files:
        if name is None:
            return None  # then the message is that of a run without rollouts
        raise ValueError(f"{path}: no .pt or .jsonl files, which a dump of {name} would be")
    content = detect(files[0])
    # slime and miles differ little: the reader may name either
    if name is not None and content != name and not {content, name} <= {"slime", "miles"}:
        raise ValueError(f"{files[0]}: its content is of {content}, not {name}; leave --format out")
    name = name or content
    same = tuple(file for file in files if file.suffix == files[0].suffix)
    if len(same) < len(files):
        other = f"{len(files) - len(same)} files other than {files[0].suffix} are not read"
        notes = (*notes, other)
    if name != "verl":
        return ForeignDump(name, same, partial(slime_dumps.read_file, sizes=sizes), notes)
    if files[0].suffix == ".jsonl":
        return ForeignDump(name, same, verl_dumps.read_generations, notes, text_only=True)
    return ForeignDump(name, same, partial(verl_dumps.read_batch, sizes=sizes), notes)


def dump_files(path: Path) -> tuple[list[Path], tuple[str, ...]]:
    """Return (files in the order of their steps, notes).

    Evaluations in a folder are left out: nothing is trained on them.
    """
    if path.is_file():
        return [path], ()
    if not path.is_dir():
        raise ValueError(f"{path}: no such file or folder")
    dumps = (file for file in path.iterdir() if file.suffix in (".pt", ".jsonl"))
    files = sorted(dumps, key=by_step)
    evaluations = [file for file in files if "eval_" in file.name]
    note = f"{len(evaluations)} evaluation files are not read; name one to check it"
    return [file for file in files if file not in evaluations], (note,) if evaluations else ()


def by_step(file: Path) -> tuple[bool, int, str]:
    return file.suffix != ".pt", verl_dumps.number_in(file), file.name


def detect(file: Path) -> str:
    """Return "slime", "miles" or "verl".  Raises ValueError if it is none of them."""
    with open(file, "rb") as opened:
        head = opened.read(4096)
    if head.startswith(PICKLE):
        what = "a pickled DataProto of verl" if b"verl" in head else "a bare pickle"
        raise ValueError(
            f"{file}: {what}, which only code in the file could rebuild; it is never run here. Save"
            f" its tensors: {verl_dumps.EXPORT}"
        )
    if head.startswith(ZIP):
        payload = load_tensors(file)
        if verl_dumps.is_batch(payload):
            return "verl"
        if isinstance(payload, dict) and "samples" in payload:
            return "miles" if slime_dumps.is_miles(payload) else "slime"
    else:
        first = head.partition(b"\n")[0].decode(errors="replace")
        if verl_dumps.is_text(first) or file.suffix == ".jsonl":
            return "verl"
    raise ValueError(
        f"{file}: not a rollout dump of slime, miles or verl; see docs/guides/mismatch.md"
    )
