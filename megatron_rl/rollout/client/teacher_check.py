"""The check of every teacher's servers at the start of a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import httpx
import numpy as np

from megatron_rl.config import Config
from megatron_rl.config.sections import Teacher
from megatron_rl.models.spec import ModelSizes
from megatron_rl.records import Prompt
from megatron_rl.rollout.client.request import RetryableError
from megatron_rl.rollout.client.score_request import ScoreRequest
from megatron_rl.rollout.server.server_info import (
    ServerError,
    ServerInfo,
    ask,
    auth_headers,
    check_identical,
    server_info,
    tokenizer_digest,
)

PROBE_TOKENS = 64
"""Tokens of a prompt that a teacher scores at the start."""


def check_teachers(cfg: Config, spec: ModelSizes, prompts: Sequence[Prompt]) -> list[str]:
    """Return a line for the log about every teacher's server.

    Each must have the vocabulary and tokenizer of `spec` and cfg.model.path, as far as this machine
    can read its checkpoint, and score the beginning of a prompt of its sources.  Raises ServerError
    otherwise, which names teacher, URL and fix.
    """
    lines: list[str] = []
    for name, teacher in cfg.teachers.with_servers.items():
        text = text_for(cfg, name, prompts)
        setting = f"teachers.{name}.api_key_env"
        try:
            for line in server_lines(cfg, spec, teacher, setting, text):
                lines.append(f"teacher {name}, {line}")
        except ServerError as error:
            of_teacher = str(error).replace("rollout.api_key_env", setting)
            raise ServerError(f"teacher {name}: {of_teacher}") from error
    return lines


def text_for(cfg: Config, name: str, prompts: Sequence[Prompt]) -> Sequence[int] | None:
    """Return the token ids that check a teacher: the beginning of a prompt of its sources.

    None where none of them has two tokens.
    """
    texts = (p.token_ids for p in prompts if cfg.teachers.name_for(p.source) == name)
    return next((ids[:PROBE_TOKENS] for ids in texts if len(ids) > 1), None)


def server_lines(
    cfg: Config, spec: ModelSizes, teacher: Teacher, setting: str, text: Sequence[int] | None
) -> Iterator[str]:
    """Check the servers of one teacher; yield a line for each.

    setting: that of its API key, for messages.  text: token ids to score; None where no prompt has
    two of them.
    """
    if cfg.loss.teacher_top_k > spec.vocab_size:
        raise ServerError(
            f"loss.teacher_top_k = {cfg.loss.teacher_top_k}: must be at most the"
            f" {spec.vocab_size} tokens of the vocabulary; lower it"
        )
    rollout = cfg.rollout.model_copy(update={"api_key_env": teacher.api_key_env})
    headers, timeout = auth_headers(rollout, setting), rollout.probe_seconds("cuda")
    infos = [server_info(url, headers, timeout=timeout) for url in teacher.urls]
    check_identical(infos)
    for info in infos:
        check_tokens(info, cfg, spec)
        mean = "no prompt of two tokens to score"
        if text is not None:
            with httpx.Client(
                base_url=info.url, headers=headers, timeout=timeout, trust_env=False
            ) as http:
                logprobs = probe(http, text, spec, cfg.loss.teacher_top_k)
                mean = f"mean log-prob of a prompt {logprobs.mean():.2f}"
        unread = [key for key in ("tokenizer", "vocab_size") if getattr(info, key) is None]
        warning = f"; WARNING not compared: {' and '.join(unread)}, not readable here"
        yield (
            f"{info.url}: SGLang {info.version}, {info.dtype}, {info.model_path}, {mean}"
            f"{warning if unread else ''}"
        )


def check_tokens(info: ServerInfo, cfg: Config, spec: ModelSizes) -> None:
    """Raise ServerError unless the teacher's tokens are those of the student."""
    for what, theirs, ours in (
        ("vocabulary size", info.vocab_size, spec.vocab_size),
        ("tokenizer digest", info.tokenizer, tokenizer_digest(cfg.model.path)),
    ):
        # None: this machine cannot read it, which the log says
        if theirs is not None and ours is not None and theirs != ours:
            raise ServerError(
                f"{info.url} (model {info.model_path}) has {what} = {theirs}, the student"
                f" {cfg.model.path} has {ours}: token ids would mean other text to it; choose a"
                " teacher with the student's tokenizer"
            )


def probe(http: httpx.Client, text: Sequence[int], spec: ModelSizes, top_k: int = 0) -> np.ndarray:
    """Return the teacher's log-probs of a text, without its first token.

    top_k: loss.teacher_top_k, tokens that it must name in every place.

    Raises ServerError for an answer that scoring would refuse.
    """
    request = ScoreRequest("teacher-check", text, 1, spec.vocab_size, top_k)
    try:
        answer = ask(http, "POST", "/generate", request.body())
        return request.scores(answer, np.arange(len(text) - 1)).logprobs
    except RetryableError as error:
        raise ServerError(
            f"{http.base_url} cannot score a text of {len(text)} tokens, {error}; is it an SGLang"
            " server whose answers nothing changes on their way?"
        ) from error
