"""Servers of one checkpoint, their client and a reward pool, for evaluation outside a run.

It needs no process group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from megatron_rl.config import Config
from megatron_rl.config.device_limits import Device
from megatron_rl.metrics.console import Console
from megatron_rl.models.spec import ModelSizes
from megatron_rl.records import Prompt, RolloutGroup
from megatron_rl.reward.pool import RewardPool
from megatron_rl.rollout.agents.runner import make_runner
from megatron_rl.rollout.client.client import RolloutClient, RolloutError
from megatron_rl.rollout.client.sampling import SampleRules, for_evaluation
from megatron_rl.rollout.server.sampling_defaults import check_sampling
from megatron_rl.rollout.server.server_info import (
    ServerInfo,
    accepted_lines,
    auth_headers,
    check_identical,
    check_server,
    check_settings,
    longest_input,
    read_served_config,
    server_info,
    tokenizer_digest,
)
from megatron_rl.rollout.server.server_pool import ServerPool
from megatron_rl.weights.version import read_version_name

PROMPTS_PER_CALL = 512
"""Prompts that are sampled together, and again when a server dies."""


class StandaloneSampler:
    """Samples from servers of one checkpoint; use it as a context manager.

    It starts the servers, or uses those of rollout.urls, and checks them.  version, run: the weight
    version that every server reports and every sample must have.
    """

    def __init__(
        self, cfg: Config, tokenizer: PreTrainedTokenizerBase, *, log_dir: Path, console: Console
    ) -> None:
        self.cfg, self.tokenizer, self.log_dir, self.console = cfg, tokenizer, log_dir, console
        self.spec = served_model(cfg.model.path)
        self.device: Device = (
            "cuda" if torch.cuda.is_available() and cfg.run.device != "cpu" else "cpu"
        )
        self.version, self.run = 0, ""
        self.server_pool: ServerPool | None = None
        self._stack = ExitStack()

    def __enter__(self) -> StandaloneSampler:
        with ExitStack() as stack:
            self.pool = stack.enter_context(
                RewardPool(self.cfg.reward, hidden_env=self.cfg.key_variables)
            )
            if not self.cfg.rollout.urls:
                self.server_pool = stack.enter_context(self._make_server_pool())
            urls = self.cfg.rollout.urls if self.server_pool is None else self.server_pool.take()
            longest = longest_input(self._check(urls))
            episodes = make_runner(self.cfg, self.tokenizer, self.spec.vocab_size, longest)
            self.client = RolloutClient(
                urls,
                self.cfg.rollout,
                SampleRules(self.spec, want_routes=False),
                episodes=episodes,
                run=self.run,
            )
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def sample(self, name: str, prompts: Sequence[Prompt]) -> list[RolloutGroup]:
        """Return eval.samples responses to each prompt, in order.

        A server that was started here is restarted when it dies.
        """
        groups: list[RolloutGroup] = []
        with self.console.progress(f"{name}: sampling", len(prompts), "prompts") as advance:
            while len(groups) < len(prompts):
                part = prompts[len(groups) : len(groups) + PROMPTS_PER_CALL]
                try:
                    groups += self._generate(part, advance)
                except RolloutError:
                    if self.server_pool is None or not (gone := self.server_pool.lost()):
                        raise
                    self.console.log(f"{name}: {', '.join(gone)} died; its part is sampled again")
                    self.client.set_urls(self.server_pool.take(), replaced=True)
        return groups

    def _generate(
        self, prompts: Sequence[Prompt], advance: Callable[[], None]
    ) -> list[RolloutGroup]:
        cfg = self.cfg
        return self.client.generate(
            prompts,
            cfg.eval.samples,
            **for_evaluation(cfg, [self.tokenizer.eos_token_id]),
            policy_version=self.version,
            on_progress=advance,
        )

    def _make_server_pool(self) -> ServerPool:
        self.console.log(
            f"starting {self.cfg.rollout.num_servers} SGLang server(s), log in {self.log_dir}"
        )
        return ServerPool(
            self.cfg.model.path,
            self.cfg.rollout,
            device=self.device,
            log_dir=self.log_dir,
            seed=self.cfg.run.seed,
            want_routes=False,
            log=self.console.log,
            weight_version="0",  # no push follows: the checkpoint's own weights are sampled
        )

    def _check(self, urls: Sequence[str]) -> list[ServerInfo]:
        """Check the servers, note the version of their weights, and return what they report."""
        headers = auth_headers(self.cfg.rollout)
        timeout = self.cfg.rollout.probe_seconds(self.device)
        infos = [server_info(url, headers, timeout=timeout) for url in urls]
        for info in infos:
            check_server(
                info, self.spec, want_routes=False, tokenizer=tokenizer_digest(self.cfg.model.path)
            )
            check_settings(info, self.cfg.rollout, want_routes=False, gets_weights=False)
            check_sampling(
                info.url, self.cfg.rollout, vocab_size=self.spec.vocab_size, device=self.device
            )
        check_identical(infos)
        for line in accepted_lines(infos, self.cfg.rollout, want_routes=False):
            self.console.log(line)
        versions = {info.weight_version for info in infos}
        if len(versions) > 1:
            raise ValueError(
                f"rollout.urls have weight versions {sorted(versions)}, must have one: send the"
                " same weights to all of them"
            )
        (version,) = versions
        try:
            self.version, self.run = read_version_name(version)
        except ValueError as error:
            raise ValueError(
                f"rollout.urls: {error}, which every sample repeats; send weights to them, or start"
                " them with --weight-version 0"
            ) from None
        return infos


def served_model(path: Path) -> ModelSizes:
    """Return the sizes that a client needs, from config.json.  It asks for no routes."""
    config = read_served_config(path)
    if "vocab_size" not in config:
        raise ValueError(
            f"{path}: no config.json with a vocab_size; must be an HF checkpoint directory"
        )
    experts = (
        config.get("num_experts")
        or config.get("num_local_experts")
        or config.get("n_routed_experts")
        or 0
    )
    return ModelSizes(
        num_layers=config["num_hidden_layers"],
        moe_layers=(),
        top_k=config.get("num_experts_per_tok") or 0,
        num_experts=experts,
        vocab_size=config["vocab_size"],
    )
