"""Random conversations over all protocols and several chat formats, and the violations of what the
endpoint promises.

    OMP_NUM_THREADS=1 python -m tests.conversations [--num 10000] [--seed 0]

A violation is a sampled token that its client read and that is not learned from exactly once, with
its log-prob and experts, after the tokens that the model had read; or one that no client read and
that is learned from.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections import Counter
from dataclasses import replace

from transformers import PreTrainedTokenizerFast

from megatron_rl.config import AgentConfig, RolloutConfig
from megatron_rl.models.spec import ModelSizes
from megatron_rl.records import Prompt, Rollout
from megatron_rl.rollout.agents.runner import EpisodeRunner
from megatron_rl.rollout.client.client import RolloutClient
from megatron_rl.rollout.client.sampling import SampleRules
from tests.conversations.model import FORMATS, RandomModel, universal_tokenizer
from tests.conversations.proof import PROGRAMS, Program, violations
from tests.fake_server import SPEC, VERSION, FakeServer

MOST_SHOWN, MOST_TURNS = 10, 200
LONGEST = 4000


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--formats", nargs="+", default=FORMATS)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    counts, wrong = run(arguments.num, arguments.seed, tuple(arguments.formats))
    for name, count in sorted(counts.items()):
        print(f"{name:28s} {count:10,}")
    print(f"{'violations':28s} {len(wrong):10,}")
    print("\n".join(wrong[:MOST_SHOWN]))
    return bool(wrong)


def run(num: int, seed: int, formats: tuple[str, ...] = FORMATS) -> tuple[Counter[str], list[str]]:
    """Return counts and violations of `num` conversations, in turn in each of the formats."""
    tokenizer = universal_tokenizer(formats)
    counts: Counter[str] = Counter()
    wrong: list[str] = []
    for index, name in enumerate(formats):
        model = RandomModel(tokenizer)
        with FakeServer("ok", source=model.sample) as server:
            client = client_of(server.url, name, tokenizer)
            for number in range(seed + index, seed + num, len(formats)):
                texts, _ = converse(client, model, Program(number, model), counts)
                wrong += [f"{name}, seed {number}: {text}" for text in texts]
                server.requests.clear()
                server.served.clear()
    counts["conversations"] = num
    return counts, wrong


def converse(
    client: RolloutClient, model: RandomModel, program: Program, counts: Counter[str]
) -> tuple[list[str], Rollout | None]:
    """Return the violations of one conversation, and what is learned from it."""
    model.answers, model.seed = {}, program.seed
    token_ids = tuple(model.tokenizer.encode("hi"))
    prompt = Prompt(id=str(program.seed), text="hi", token_ids=token_ids, label="")
    PROGRAMS[prompt.id] = program
    try:
        (group,) = client.generate(
            [prompt],
            1,
            policy_version=VERSION,
            temperature=1.0,
            max_tokens=LONGEST,
            stop_token_ids=(),
        )
        rollout = group.rollouts[0]
    # whatever an episode fails with is a violation, and the next conversations are still tried
    except Exception as error:
        return [f"{type(error).__name__}: {error}"], None
    finally:
        del PROGRAMS[prompt.id]
    counts.update(program.counts)
    counts["sequences"] += len(rollout.sequences) - program.counts["sequences"]
    counts["turns that were read"] += len(program.read)
    return list(violations(rollout, program)), rollout


def client_of(
    url: str,
    renderer: str,
    tokenizer: PreTrainedTokenizerFast,
    function: str = "tests.conversations.proof:converse",
    spec: ModelSizes = SPEC,
) -> RolloutClient:
    if spec is SPEC:
        spec = replace(SPEC, vocab_size=len(tokenizer))
    agent = AgentConfig(renderer=renderer, function=function, max_turns=MOST_TURNS)
    cfg = RolloutConfig(max_retries=1, idle_timeout_seconds=20.0)
    runner = EpisodeRunner(
        agent, tokenizer, len(tokenizer), 1, (LONGEST, "the test"), hidden_env=[]
    )
    return RolloutClient([url], cfg, SampleRules(spec, want_routes=True), episodes=runner)


if __name__ == "__main__":
    sys.exit(main())
