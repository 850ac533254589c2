"""What the scripts prepare.py of recipes share: read, check and write the prompt files that
config.toml names.

    SOURCES = {"train": Source("openai/gsm8k", FILE, COLUMNS, convert), "test": Source(...)}
    main(SOURCES, solution)

Nothing is left out without a line that says so.  Nothing is written where rows are broken, or where
the reward function does not tell right answers from wrong ones.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from megatron_rl.config import Config, DataConfig, load_config
from megatron_rl.data.prompt_files import train_files
from megatron_rl.data.prompts import check_chat_template, load_tokenizer, prompt_text
from megatron_rl.data.rows import DataError, prompt_messages
from megatron_rl.recipes.formats import Row
from megatron_rl.recipes.labels import check_rewards
from megatron_rl.recipes.prompt_set import PromptSet, Source, plain, read_file, read_set
from megatron_rl.reward.pool import RewardError

__all__ = ["Row", "Source", "main"]

TRAIN = "train"
"""The set that is trained on; all others are for evaluation."""
INSTRUCTIONS = ("system", "developer")
"""Roles of messages without which a prompt of training is still one of an evaluation set."""


def main(
    sources: Mapping[str, Source],
    solution: Callable[[Row], str] | None = None,
    argv: Sequence[str] | None = None,
) -> int:
    """Prepare the sets, in the folder of config.toml.

    solution: a response to a prepared row that the reward function must accept; None where none is
    known.  Returns the exit status: 1 for data that cannot be used, or settings that are wrong.
    """
    args = parse(sources, argv)
    try:
        cfg = load_config(args.config, ["--model.path", str(args.model)] if args.model else ())
        files = files_of(args.files, sources)
        names = [name for name in sources if not files or name in files]
        sets = {
            name: read_set(name, sources[name], files.get(name), data_of(cfg, name))
            for name in names
        }
        leave_out_overlap(sets, earlier_sets(args.out, sources.keys() - sets.keys()))
        unchecked = leave_out_long(sets, cfg)
        lines = [line for prompts in sets.values() for line in prompts.lines()] + unchecked
        if solution:
            lines += check_rewards(sets[names[0]].rows, solution, cfg.reward)
        lines += [prompts.write(args.out) for prompts in sets.values()]
    except (ValueError, OSError, RewardError) as error:
        print(f"prepare.py: {error}\nprepare.py: nothing was written", file=sys.stderr)
        return 1
    print("\n".join(lines))
    trained = [("data.train", path) for path, *_ in train_files(cfg.data).values()]
    for key, path in (*trained, *eval_paths(cfg).items()):
        if not path.is_file():
            print(f"not there yet: {key} = {path}")
    return 0


def parse(sources: Mapping[str, Source], argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=f"Prepare the prompts of this folder's config.toml; sets: {', '.join(sources)}",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--from",
        nargs="+",
        default=[],
        dest="files",
        metavar="[SET=]FILE",
        help="local files, jsonl or parquet, instead of a download; without SET=: train",
    )
    add("--out", type=Path, default=Path("data"), metavar="DIR", help="default: %(default)s")
    add("--config", type=Path, default=Path("config.toml"), metavar="FILE")
    add("--model", type=Path, metavar="DIR", help="its tokenizer counts; default: model.path")
    return parser.parse_args(argv)


def files_of(arguments: Sequence[str], sources: Mapping[str, Source]) -> dict[str, Path]:
    """Return set -> local file.  Raises DataError for unknown sets and for one file as two sets."""
    files: dict[str, Path] = {}
    for argument in arguments:
        name, equals, path = argument.partition("=")
        if not equals:
            name, path = TRAIN, argument
        if name not in sources:
            raise DataError(f"--from {argument}: no set {name!r}; sets: {', '.join(sources)}")
        if name in files:
            raise DataError(f"--from: two files for {name}, {files[name]} and {path}; join them")
        files[name] = Path(path)
    contents: dict[bytes, str] = {}
    for name, file in files.items():
        if file.is_file():
            other = contents.setdefault(file.read_bytes(), name)
            if other != name:
                raise DataError(
                    f"--from: {files[other]} for {other} and {file} for {name} have the same"
                    " content; an evaluation on the training prompts measures what was memorised"
                )
    return files


def data_of(cfg: Config, name: str) -> DataConfig:
    return cfg.data if name == TRAIN else cfg.eval_data


def eval_paths(cfg: Config) -> dict[str, Path]:
    return {f"eval.sets.{name}": path for name, path in cfg.eval.sets.items()}


def earlier_sets(folder: Path, names: Iterable[str]) -> dict[str, PromptSet]:
    """Return the sets that an earlier call wrote."""
    paths = {name: folder / f"{name}.jsonl" for name in sorted(names)}
    return {
        name: PromptSet(name, str(path), list(read_file(path)))
        for name, path in paths.items()
        if path.is_file()
    }


def leave_out_overlap(sets: Mapping[str, PromptSet], earlier: Mapping[str, PromptSet]) -> None:
    """Leave out prompts of training that are also in an evaluation set, with any instructions.

    Raises DataError where the training set was written before and is not prepared now.
    """
    evaluated = {
        plain(row["prompt"], INSTRUCTIONS): name
        for name, prompts in {**earlier, **sets}.items()
        if name != TRAIN
        for row in prompts.rows
    }

    def reason(row: Row) -> str | None:
        name = evaluated.get(plain(row["prompt"], INSTRUCTIONS))
        return f"its prompt is also in the evaluation set {name}" if name else None

    if TRAIN in sets:
        sets[TRAIN].keep(reason)
    elif TRAIN in earlier:
        train = earlier[TRAIN]
        if count := sum(reason(row) is not None for row in train.rows):
            raise DataError(
                f"{count:,} prompts of {train.origin} are in these evaluation sets; prepare both in"
                " one call: --from train=FILE SET=FILE ..."
            )


def leave_out_long(sets: Mapping[str, PromptSet], cfg: Config) -> list[str]:
    """Leave out prompts that are longer than data.max_prompt_tokens, where the model's tokenizer is
    here; else return a line that says that lengths were not checked.
    """
    limit = cfg.data.max_prompt_tokens
    if not cfg.model.path.is_dir():
        return [
            f"NOT CHECKED: lengths in tokens, as model.path = {cfg.model.path} is not here; prepare"
            f" again with --model DIR, or the run stops at a prompt of more than {limit:,}"
        ]
    tokenizer = load_tokenizer(cfg.model.path)
    for name, prompts in sets.items():
        data = data_of(cfg, name)
        check_chat_template(cfg.model.path, data, tokenizer)
        texts = [
            prompt_text(prompt_messages({"prompt": row["prompt"]}, "prompt", data), data, tokenizer)
            for row in prompts.rows
        ]
        ids = tokenizer(texts, add_special_tokens=False)["input_ids"]
        # by the prompt, which is in a set once; ids may be equal
        texts = [plain(row["prompt"]) for row in prompts.rows]
        lengths = dict(zip(texts, map(len, ids), strict=True))
        prompts.notes.append(f"longest prompt: {max(lengths.values()):,} tokens")
        prompts.keep(partial(too_long, lengths, limit))
    return []


def too_long(lengths: Mapping[str, int], limit: int, row: Row) -> str | None:
    """Return the reason for leaving out a row with a long prompt, or None.

    lengths: text of a prompt, as `plain` returns it -> tokens.
    """
    if lengths[plain(row["prompt"])] <= limit:
        return None
    return f"its prompt has more than data.max_prompt_tokens = {limit} tokens"
