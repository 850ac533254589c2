"""Rejection sampling: the saved rollouts of a run (rollout.save_tensors) as rows of SFT."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedTokenizerBase

from megatron_rl.batch.codec import arrays_in_file
from megatron_rl.config.redact import HIDDEN
from megatron_rl.config.run_paths import RunFolder
from megatron_rl.config.sections import SftConfig
from megatron_rl.data.demonstrations import Demonstration, DemonstrationFile, make_demonstration
from megatron_rl.data.rows import DataError
from megatron_rl.rollout.saved.recorded_rollouts import RecordedRollout, read_episodes, to_rollout

WITHOUT_ROUTES = ("tokens", "logprobs", "environment")
"""Kinds of tensors that a row needs."""


def demonstrations_of_run(
    folder: Path, sft: SftConfig, tokenizer: PreTrainedTokenizerBase, source: str = ""
) -> DemonstrationFile:
    """Return the sampled sequences of `folder` whose reward is at least sft.min_reward.

    Left out and counted: responses without a reward or with less, those that were cut off at the
    length limit, those longer than sft.max_row_tokens, and groups whose tokens were not saved.
    Every sequence of an episode is a row.
    Raises DataError for a folder without such rollouts, and for rollouts of another tokenizer.
    """
    rows: list[Demonstration] = []
    counts = {"below the reward": 0, "cut off": 0, "longer than sft.max_row_tokens": 0}
    unsaved = "without saved tokens"
    counts[unsaved] = 0
    # rewards are float32, recorded without rounding: 0.7 is 0.699999988 in a line
    least = np.float32(-math.inf if sft.min_reward is None else sft.min_reward)
    for step, record, tokens, learned in saved_sequences(folder):
        if tokens is None:
            counts[unsaved] += 1
            continue
        # NaN, of a response that could not be scored, is not at least anything
        is_below = record.reward is None or not record.reward >= least
        is_long = len(tokens) > sft.max_row_tokens
        assert learned is not None
        flags = (is_below, record.finish_reason != "stop", is_long)
        if any(flags):
            counts[list(counts)[flags.index(True)]] += 1
            continue
        check_text(folder, record, tokens, tokenizer)
        name = f"{source or folder.name}:{step}:{record.id}"
        rows.append(make_demonstration(name, tokens, learned, source))
    note = ", ".join(f"{count} {why}" for why, count in counts.items() if count)
    if not rows:
        raise DataError(
            f"{folder}: no saved rollouts to learn from ({note or 'none with tokens'}): record them"
            " with rollout.save_tensors = true, or lower sft.min_reward ="
            f" {'none' if sft.min_reward is None else f'{sft.min_reward:g}'}"
        )
    return DemonstrationFile(folder, rows, f"left out: {note}" if note else "")


def saved_sequences(
    folder: Path,
) -> Iterator[tuple[int, RecordedRollout, np.ndarray | None, np.ndarray | None]]:
    """Yield (step, line, tokens int64 [S], learned bool [S]) of every sequence, in the order of
    replicas, steps and lines; None for the arrays that were not saved (rollout.save_tensors).
    """
    run = RunFolder(folder)
    for lines in run.line_files("rollouts"):
        for step, episodes in read_episodes(lines.path).items():
            path = run.tensors_of("rollouts", step, lines.dp_rank)
            records = [line for episode in episodes.values() for line in episode]
            if not path.exists():  # a share of the groups was saved, and none of this replica's
                yield from ((step, record, None, None) for record in records)
                continue
            try:
                with safe_open(path, framework="numpy") as file:
                    names = set(file.keys())
                    for record in records:
                        if f"{record.id}:tokens" not in names:
                            yield step, record, None, None
                            continue
                        needed = {n for n in names if n.rpartition(":")[2] in WITHOUT_ROUTES}
                        rollout = to_rollout(record, arrays_in_file(file, needed, record.id))
                        learned = np.zeros(len(rollout.tokens), bool)
                        learned[rollout.sampled] = True
                        yield step, record, rollout.tokens, learned
            except (OSError, SafetensorError) as error:
                raise DataError(
                    f"{path}: no tensors that can be read ({error}): SFT needs tokens; record with"
                    " rollout.save_tensors = true"
                ) from error


def check_text(
    folder: Path, record: RecordedRollout, tokens: np.ndarray, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Raise DataError where the tokens are not the recorded text, as with another tokenizer."""
    text = tokenizer.decode(tokens[record.prompt_length :], skip_special_tokens=True)
    # secrets were replaced in recorded texts
    if record.response and HIDDEN not in record.response and text != record.response:
        raise DataError(
            f"{folder}: rollout {record.id} reads {text[:40]!r} with the tokenizer of model.path,"
            f" and {record.response[:40]!r} where it was sampled: must be one tokenizer; set"
            " model.path to a model that has it"
        )
