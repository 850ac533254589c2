"""Servers on one checkpoint, a client of them and a reward pool: what evaluation needs outside a run.  No process group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from megatron_rl.config import Config
from megatron_rl.metrics.console import Console
from megatron_rl.models.spec import ModelSizes
from megatron_rl.records import Prompt, RolloutGroup
from megatron_rl.reward.pool import RewardPool
from megatron_rl.rollout.client.client import RolloutClient, RolloutError
from megatron_rl.rollout.server.sampling_defaults import check_sampling
from megatron_rl.rollout.server.server_info import (
    auth_headers,
    check_identical,
    check_server,
    read_config,
    server_info,
    tokenizer_digest,
)
from megatron_rl.rollout.server.server_pool import ServerPool

PROMPTS_AT_ONCE = 512  # what a server's death costs at most


class StandaloneSampler:
    """Use as a context manager: it starts the servers, or finds those of rollout.urls, and checks them.

    `version`: the weight version that every server reports, which every sample must then be of.
    """

    def __init__(self, cfg: Config, tokenizer: Any, *, log_dir: Path, console: Console) -> None:
        self.cfg, self.tokenizer, self.log_dir, self.console = cfg, tokenizer, log_dir, console
        self.spec = served_model(cfg.model.path)
        self.version = 0
        self.server_pool: ServerPool | None = None
        self._stack = ExitStack()

    def __enter__(self) -> StandaloneSampler:
        with ExitStack() as stack:
            self.pool = stack.enter_context(RewardPool(self.cfg.reward, hidden_env=self.cfg.rollout.api_key_env))
            if not self.cfg.rollout.urls:
                self.server_pool = stack.enter_context(self._make_server_pool())
            urls = self.cfg.rollout.urls if self.server_pool is None else self.server_pool.take()
            self._check(urls)
            self.client = RolloutClient(urls, self.cfg.rollout, spec=self.spec, want_routes=False)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def sample(self, name: str, prompts: Sequence[Prompt]) -> list[RolloutGroup]:
        """eval.samples responses to each prompt, in order.  A server of ours that dies is replaced, as in a run."""
        groups: list[RolloutGroup] = []
        with self.console.progress(name, total=len(prompts)) as advance:
            while len(groups) < len(prompts):
                part = prompts[len(groups) : len(groups) + PROMPTS_AT_ONCE]
                try:
                    groups += self._generate(part, advance)
                except RolloutError:
                    if self.server_pool is None or not (gone := self.server_pool.lost()):
                        raise
                    self.console.log(f"{name}: {', '.join(gone)} died; its part is sampled again")
                    self.client.set_urls(self.server_pool.take())
        return groups

    def _generate(self, prompts: Sequence[Prompt], advance: Callable[[], None]) -> list[RolloutGroup]:
        cfg = self.cfg
        return self.client.generate(
            prompts,
            cfg.eval.samples,
            temperature=cfg.eval.temperature,
            max_tokens=cfg.eval.max_response_tokens or cfg.rollout.max_response_tokens,
            stop_token_ids=[self.tokenizer.eos_token_id],
            policy_version=self.version,
            on_progress=lambda group: advance(),
        )

    def _make_server_pool(self) -> ServerPool:
        device: Literal["cpu", "cuda"] = "cuda" if torch.cuda.is_available() and self.cfg.run.device != "cpu" else "cpu"
        self.console.log(f"starting {self.cfg.rollout.num_servers} SGLang server(s), log in {self.log_dir}")
        return ServerPool(
            self.cfg.model.path,
            self.cfg.rollout,
            device=device,
            log_dir=self.log_dir,
            seed=self.cfg.run.seed,
            want_routes=False,
            log=self.console.log,
            weight_version="0",
        )

    def _check(self, urls: Sequence[str]) -> None:
        infos = [server_info(url, auth_headers(self.cfg.rollout)) for url in urls]
        for info in infos:
            check_server(info, self.spec, want_routes=False, tokenizer=tokenizer_digest(self.cfg.model.path))
            check_sampling(info.url, self.cfg.rollout, vocab_size=self.spec.vocab_size)
        check_identical(infos)
        versions = {info.weight_version for info in infos}
        if len(versions) > 1:
            raise ValueError(
                f"rollout.urls hold weight versions {sorted(versions)}, rule: one; push one to all of them"
            )
        (version,) = versions
        if not version.isdecimal():
            raise ValueError(
                f"rollout.urls hold weight version {version!r}, rule: a number, which every sample must repeat; push weights to "
                "them, or start them with --weight-version 0"
            )
        self.version = int(version)


def served_model(path: Path) -> ModelSizes:
    """What config.json of a checkpoint says that a client must know: no routes are asked for."""
    config = read_config(path)
    if "vocab_size" not in config:
        raise ValueError(f"{path}: no config.json with a vocab_size in it, rule: an HF checkpoint directory")
    experts = config.get("num_experts") or config.get("num_local_experts") or config.get("n_routed_experts") or 0
    return ModelSizes(
        num_layers=config["num_hidden_layers"],
        moe_layers=(),
        top_k=config.get("num_experts_per_tok") or 0,
        num_experts=experts,
        vocab_size=config["vocab_size"],
    )


def score_groups(groups: Sequence[RolloutGroup], pool: RewardPool, tokenizer: Any) -> list[RolloutGroup]:
    """Fill texts and rewards: the task's alone, NaN where a response could not be scored."""
    with_texts = [with_text(group, tokenizer) for group in groups]
    items = [(g.prompt.text, r.response_text, g.prompt.label) for g in with_texts for r in g.rollouts]
    rewards = iter(pool.score(items, shaped=False, failed=float("nan")))
    return [replace(g, rewards=np.array([next(rewards) for _ in g.rollouts], np.float32)) for g in with_texts]


def with_text(group: RolloutGroup, tokenizer: Any) -> RolloutGroup:
    """Fill `response_text`."""
    texts = tokenizer.batch_decode([r.tokens[r.prompt_length :] for r in group.rollouts], skip_special_tokens=True)
    rollouts = tuple(replace(r, response_text=text) for r, text in zip(group.rollouts, texts, strict=True))
    return replace(group, rollouts=rollouts)
