"""A person answers prompts, or plays an agent's environment, in the model's place.

The prompts, the agent (environment, function or command) and the reward function are those of the
configuration, and run as they do in training.  Only the servers are replaced: a turn's tokens are
what the person typed.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import aiohttp
import numpy as np
from transformers import PreTrainedTokenizerBase

from megatron_rl.config import Config, load_config
from megatron_rl.data.prompt_files import eval_file, train_files
from megatron_rl.data.prompts import load_prompts, load_tokenizer
from megatron_rl.records import Prompt, Rollout, RolloutGroup
from megatron_rl.reward.failures import RewardError
from megatron_rl.reward.pool import RewardPool
from megatron_rl.rollout.agents.runner import EpisodeRunner, make_runner
from megatron_rl.rollout.client.call import Call, GroupCancelled
from megatron_rl.rollout.client.counters import CallStats, RolloutCounters
from megatron_rl.rollout.client.request import RolloutError
from megatron_rl.rollout.client.sampling import Sampling
from megatron_rl.rollout.group import Group
from megatron_rl.rollout.scoring import score_groups
from megatron_rl.rollout.standalone import served_model
from megatron_rl_tools.options import parse_play

DAY = 86_400.0
"""Seconds that an episode may take: a person thinks longer than a model."""
HELP = (
    "You write what the model would write; a line that ends in \\ continues. The end token is"
    " added. Ctrl-D ends."
)


@dataclass
class Person:
    """A person at a terminal, in the place of the servers."""

    tokenizer: PreTrainedTokenizerBase
    end_token: int
    """Token that ends a turn."""
    ask: Callable[[str], str] = input
    shown: tuple[int, ...] = ()
    """Tokens that the person has seen or written, in order."""

    async def sample(self, group: Group) -> None:
        """Fill a group of one response, as RolloutClient does.

        Raises GroupCancelled where the person ends it.
        """
        prompt, limit = tuple(group.prompt.token_ids), group.max_tokens
        assert limit is not None
        if prompt[: len(self.shown)] == self.shown:
            new = prompt[len(self.shown) :]
        else:  # another sequence of the episode
            print("\n--- a sequence with another start")
            new = prompt
        print(visible(self.tokenizer.decode(new)))
        # blocks the event loop, so that Ctrl-C ends the question: nothing else needs the loop now
        ids = [*self.encode(self._text(limit)), self.end_token]
        tokens = (*prompt, *ids[:limit])
        if len(ids) > limit:
            print(f"    cut after {limit} tokens, as a response of the model would be")
        rollout = Rollout(
            id=group.prompt.id,
            tokens=np.array(tokens[group.start :], np.int64),
            prompt_length=len(prompt) - group.start,
            rollout_logprobs=np.zeros(len(tokens) - len(prompt), np.float32),
            routed_experts=None,
            finish_reason="length" if len(ids) > limit else "stop",
            policy_versions=np.zeros(len(tokens) - len(prompt), np.int32),
        )
        self.shown = tokens
        group.put(0, rollout)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _text(self, limit: int) -> str:
        lines, question = [], f"[at most {limit} tokens]> "
        try:
            while (line := self.ask(question)).endswith("\\"):
                lines.append(line[:-1])
                question = "> "
        except (EOFError, KeyboardInterrupt) as end:
            raise GroupCancelled from end
        return "\n".join([*lines, line])


def visible(text: str) -> str:
    """Return text without control characters: prompts and tools must not command a terminal."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def main(argv: Sequence[str] | None = None) -> int:
    args, overrides = parse_play(argv)
    try:
        cfg = load_config(args.config, overrides)
        tokenizer = load_tokenizer(cfg.model.path)
        prompts = prompts_of_set(cfg, tokenizer, args.set)
        if not 1 <= args.first <= len(prompts):
            raise ValueError(f"--first {args.first}: must be from 1 to {len(prompts)}, the prompts")
        # a person cannot be asked again for an episode that failed
        patient = {"episode_timeout_seconds": DAY, "on_error": "stop"}
        cfg = cfg.model_copy(update={"agent": cfg.agent.model_copy(update=patient)})
        runner = make_runner(cfg, tokenizer, served_model(cfg.model.path).vocab_size)
        workers = ExitStack()
        pool = workers.enter_context(RewardPool(cfg.reward, hidden_env=cfg.key_variables))
    except (ValueError, OSError, RewardError) as error:
        print(f"megatron-rl play: {error}", file=sys.stderr)
        return 2
    print(HELP)
    with workers:
        for prompt in prompts[args.first - 1 :]:
            try:
                rollout = asyncio.run(play(cfg, runner, tokenizer, prompt))
                group = RolloutGroup(prompt, (rollout,))
                scored = score_groups([group], pool, tokenizer, for_training=True)
            except (GroupCancelled, KeyboardInterrupt):
                print()
                return 0
            except (RolloutError, RewardError) as error:
                print(f"megatron-rl play: {error}", file=sys.stderr)
                return 1
            print("\n".join(results(*scored)))
    return 0


def prompts_of_set(cfg: Config, tokenizer: PreTrainedTokenizerBase, name: str) -> list[Prompt]:
    """Return the prompts of data.train, or of the evaluation set or source `name`.

    Raises ValueError where there is no such set.
    """
    sources = train_files(cfg.data)
    if name in cfg.eval.sets:
        places = [eval_file(cfg, name)]
    elif name in ("train", *sources):
        places = [place for source, place in sources.items() if name in ("train", source)]
    else:
        known = ", ".join(sorted({"train", *sources, *cfg.eval.sets} - {""}))
        raise ValueError(f"--set {name}: must be one of {known}")
    return [
        prompt
        for path, config, source in places
        for prompt in load_prompts(path, config, tokenizer, source).prompts
    ]


async def play(
    cfg: Config, runner: EpisodeRunner | None, tokenizer: PreTrainedTokenizerBase, prompt: Prompt
) -> Rollout:
    """Return the episode, or the response, that the person made of the prompt.

    Raises GroupCancelled where the person ended it, and RolloutError where the agent failed.
    """
    # asyncio's handler would only cancel this task, and `input` would continue
    signal.signal(signal.SIGINT, signal.default_int_handler)
    limit = cfg.rollout.max_response_tokens
    sampling = Sampling(cfg.rollout.temperature, limit, [tokenizer.eos_token_id], 0)
    person = Person(tokenizer, tokenizer.eos_token_id)
    print(f"\n--- prompt {visible(prompt.id)}, label {visible(prompt.label)}")
    group = Group(prompt, 1, max_tokens=limit)
    if runner is None:
        await person.sample(group)
        return group.rollouts[0]
    if runner.chat is not None and runner.chat.stop_token_ids:
        person = replace(person, end_token=runner.chat.stop_token_ids[0])
    stats = CallStats()
    async with aiohttp.ClientSession() as http, runner.serving():
        call = Call(http, sampling, lambda: stats, RolloutCounters(), keeps_parts=False)
        await runner.call(runner.adapt(sampling), person.sample, call).fill(group)
    return group.rollouts[0]


def results(group: RolloutGroup) -> list[str]:
    """Return what the run would record of the response."""
    (rollout,) = group.rollouts
    assert group.rewards is not None
    source = "the reward function" if rollout.episode.reward is None else "the episode"
    turns = sum(sequence.num_spans for sequence in rollout.sequences)
    lines = [
        f"    reward {group.rewards[0]:g}, of {source}; turns {turns}, tokens"
        f" {rollout.episode_length}, ended by {rollout.finish_reason}"
    ]
    for prefix, metrics in (
        ("reward", rollout.reward_metrics),
        ("episode", rollout.episode.metrics),
    ):
        lines += [f"    {prefix}/{name} {value:g}" for name, value in metrics.items()]
    return lines


if __name__ == "__main__":
    sys.exit(main())
