"""The rollouts that verl saves, as of verl b178a3c.

1. trainer.rollout_data_dir: STEP.jsonl of input, output, gts, score, step and what the reward
   function added (verl/trainer/ppo/ray_trainer.py).  Text only: neither token ids nor log-probs nor
   expert ids.
2. A batch: DataProto.save_to_disk (verl/protocol.py) pickles the object, which only its own code
   could rebuild; it is refused. `torch.save(data.batch.to_dict(), "STEP.pt")` saves the same
   tensors as plain data.  They are padded: prompts [B, P] at the left, responses [B, R] at the
   right, routed_experts [B, P + R, L, K] with zeros where nothing was sent
   (verl/experimental/agent_loop/agent_loop.py).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from megatron_rl_tools.check_rollouts.dumped import Finding
from megatron_rl_tools.check_rollouts.foreign import (
    ForeignRollout,
    make_record,
    or_zeros,
    without_dense,
    zero_layers,
)
from megatron_rl_tools.check_rollouts.model_sizes import Sizes
from megatron_rl_tools.check_rollouts.pt_files import is_tensor, load_tensors, to_numpy

LINE = ("input", "output", "gts", "score", "step")
NEEDED = ("prompts", "responses", "attention_mask")
OPTIONAL = ("input_ids", "response_mask", "rollout_log_probs", "routed_experts")
EXPORT = 'in verl: torch.save(data.batch.to_dict(), "STEP.pt")'


def is_batch(payload: object) -> bool:
    """Return whether these are the tensors of a DataProto's batch."""
    return isinstance(payload, dict) and all(is_tensor(payload.get(name)) for name in NEEDED)


def is_text(line: str) -> bool:
    """Return whether this is a line of STEP.jsonl."""
    try:
        fields = json.loads(line)
    except ValueError:
        return False
    return isinstance(fields, dict) and fields.keys() >= set(LINE)


def read_generations(path: Path, findings: list[Finding]) -> Iterator[ForeignRollout]:
    """Yield an empty rollout for every line, and add what is wrong with a line to `findings`."""
    step = number_in(path)

    def add(where: str, text: str, cause: str) -> None:
        findings.append(Finding("files", where, text, cause))

    # of bytes: splitlines of a text also splits at other characters, which JSON need not escape
    for index, line in enumerate(path.read_bytes().splitlines()):
        where = f"step {step} {path.name}#{index}"
        try:
            fields = json.loads(line)
        except ValueError as error:
            add(where, f"not JSON: {error}", "the file is truncated or damaged")
            continue
        missing = [name for name in LINE if not isinstance(fields, dict) or name not in fields]
        if missing:
            add(where, f"the line has no {missing}", "another file, or another version")
            continue
        score = fields["score"]
        if not isinstance(score, int | float) or not math.isfinite(score):
            add(where, f"score is {score}, must be a finite number", "the reward function")
        if fields["step"] != step:
            add(where, f"step {fields['step']} in {path.name}", "files of two runs mixed")
        nothing = np.zeros(0, np.int64)
        record = make_record(path, index, step, nothing, 0)
        yield ForeignRollout(record, nothing, or_zeros(None, 0), None, has_logprobs=False)


def read_batch(
    path: Path, findings: list[Finding], sizes: Sizes | None
) -> Iterator[ForeignRollout]:
    """Yield the sequences of a batch without their padding.

    Raises ValueError if the file is not a batch.
    """
    payload = load_tensors(path)
    if not is_batch(payload):
        raise ValueError(
            f"{path}: no tensors {', '.join(NEEDED)}: not the batch of a DataProto; {EXPORT}"
        )
    assert isinstance(payload, dict)
    batch = {
        name: to_numpy(payload[name], f"{path}: {name}")
        for name in (*NEEDED, *OPTIONAL)
        if is_tensor(payload.get(name))
    }
    step = number_in(path)
    routes = batch.get("routed_experts")
    dense = 0
    if routes is not None and routes.ndim == 4:
        dense = zero_layers(routes.reshape(-1, *routes.shape[2:]))
    if bad := wrong_sizes(batch):
        raise ValueError(f"{path}: {bad}")
    for index in range(len(batch["prompts"])):
        row = {
            name: values[index]
            for name, values in batch.items()
            if values.ndim and len(values) > index
        }
        where = f"step {step} {path.name}#{index}"
        problems = list(check_padding(row))
        findings += [Finding(check, where, text, cause) for check, text, cause in problems]
        if any(check == "length" for check, *_ in problems):
            continue  # it is not known where its tokens begin and end
        yield unpad(path, index, step, row, sizes, dense)


def wrong_sizes(batch: Mapping[str, np.ndarray]) -> str | None:
    """Return which shape of the batch does not fit the others, as text, or None."""
    for name in ("prompts", "responses"):
        if batch[name].ndim != 2:
            return f"{name} is {list(batch[name].shape)}, must have two dimensions"
    size, prompt = len(batch["prompts"]), batch["prompts"].shape[1]
    response = batch["responses"].shape[1]
    expected = {
        "responses": (size, response),
        "attention_mask": (size, prompt + response),
        "input_ids": (size, prompt + response),
        "response_mask": (size, response),
        "rollout_log_probs": (size, response),
        "routed_experts": (size, prompt + response),
    }
    for name, shape in expected.items():
        if name in batch and batch[name].shape[:2] != shape:
            return f"{name} is {list(batch[name].shape)}, must begin with {list(shape)}"
    return None


def check_padding(row: Mapping[str, np.ndarray]) -> Iterator[tuple[str, str, str]]:
    """Yield (check, found, cause) of one sequence: "length" if its tokens are not one run around
    the end of the prompt.
    """
    width = len(row["prompts"])
    attention = row["attention_mask"] != 0
    prompt, response = attention[:width], attention[width:]
    if (np.diff(prompt.astype(int)) < 0).any() or (np.diff(response.astype(int)) > 0).any():
        yield (
            "length",
            "attention_mask has a hole, must be left padding, tokens, right padding",
            "packed or moved tokens",
        )
        return
    ids = row.get("input_ids")
    joined = np.concatenate([row["prompts"], row["responses"]])
    if ids is not None and (ids != joined)[attention].any():
        text = "input_ids are not prompts followed by responses"
        yield "files", text, "the rows of two batches were joined"
    mask = row.get("response_mask")
    if mask is not None and mask[~response].any():
        text = f"{int((mask[~response] != 0).sum())} entries on padding are not 0"
        yield "loss_mask", text, "the mask was shifted or padded with 1"
    routes = row.get("routed_experts")
    if routes is not None and routes[~attention].any():
        count = int(routes[~attention].reshape(int((~attention).sum()), -1).any(1).sum())
        text = f"{count} rows of expert ids lie on padding"
        yield "shape", text, "placed at another position than their tokens"


def unpad(
    path: Path,
    index: int,
    step: int,
    row: Mapping[str, np.ndarray],
    sizes: Sizes | None,
    dense: int,
) -> ForeignRollout:
    width = len(row["prompts"])
    attention = row["attention_mask"] != 0
    tokens = np.concatenate([row["prompts"], row["responses"]])[attention].astype(np.int64)
    length = int(attention[width:].sum())
    routes = row.get("routed_experts")
    # an engine may send a row for the last token, which was never an input; else verl fills it
    # with 0
    known = None if routes is None else without_dense(routes[attention][:-1], sizes, dense)
    mask, logprobs = row.get("response_mask"), row.get("rollout_log_probs")
    return ForeignRollout(
        make_record(path, index, step, tokens, length),
        tokens,
        or_zeros(logprobs, length)[:length],
        routes=known,
        loss_mask=None if mask is None else mask[:length],
        has_logprobs=logprobs is not None,
        dense=dense if sizes is None else 0,
    )


def number_in(path: Path) -> int:
    """Return the number in the file's name, or 0 if it has none."""
    number = re.search(r"\d+", path.stem)
    return int(number.group()) if number else 0
