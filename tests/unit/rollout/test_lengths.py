"""What the client does about a fault must not favour short responses: lengths that are returned are
those that were drawn.
"""

import zlib
from typing import Any

import numpy as np

from megatron_rl.config import RolloutConfig
from megatron_rl.records import Prompt
from megatron_rl.rollout.client import request
from megatron_rl.rollout.client.client import RolloutClient
from megatron_rl.rollout.client.sampling import SampleRules
from megatron_rl.trainer.rollout_metrics import discarded_length
from tests.fake_model import END
from tests.fake_server import SPEC, VERSION, FakeServer
from tests.faults.samples import cut_short, make_sample, random_routes

MEAN, PER_REQUEST = 12, 16  # tokens of a response; what a server samples of one before the deadline
PATIENCE = 300.0  # seconds: more than any machine needs for an answer, however busy
PROMPTS = [Prompt(id=f"q{i}", text="", token_ids=(3, 4, 5 + i), label="") for i in range(18)]
GROUP = 8


def geometric(body: dict[str, Any], given: list[int], sample_id: str) -> dict[str, Any]:
    """Every token is the last one with probability 1 / MEAN, however many there were.

    Drawn from what is given and the end of the id, the attempt and the place in its request: the
    same in every run.
    """
    attempt_and_place = sample_id.rpartition(".")[2]
    rng = np.random.default_rng(zlib.crc32(f"{attempt_and_place} {given}".encode()))
    tokens = np.append(rng.integers(2, SPEC.vocab_size, rng.geometric(1 / MEAN) - 1), END)
    routes = random_routes(rng, len(given) + len(tokens) - 1)
    sample = make_sample(body, sample_id, len(given), tokens, -rng.random(len(tokens)), routes)
    sample["meta_info"]["finish_reason"] = {"type": "stop", "matched": END}
    return sample


class Slow(FakeServer):
    """Answers immediately where all samples are short, else when it is aborted, with the first
    tokens of the long ones.
    """

    def behave(self, handler, behaviour, body) -> None:
        is_long = any(
            len(sample["output_ids"]) > PER_REQUEST for sample in self.honest(body).values()
        )
        super().behave(handler, "slow" if is_long else "ok", body)

    def until_aborted(self, samples):
        super().until_aborted(samples)
        return [
            cut_short(s, PER_REQUEST) if len(s["output_ids"]) > PER_REQUEST else s for s in samples
        ]


def test_a_deadline_that_only_long_responses_meet_does_not_make_them_shorter(monkeypatch, clock):
    """A quarter of the responses are longer than what fits into a request; sampled again, until
    they do, there would be none.

    The speed of the machine is without effect: the server decides what is late, and all else waits
    for it.
    """
    monkeypatch.setattr(request, "LATE_FRAC", PATIENCE)
    monkeypatch.setattr(request, "RETURN_SECONDS", PATIENCE)
    with Slow("ok", source=geometric) as server:
        server.patience = PATIENCE
        cfg = RolloutConfig(
            request_timeout_seconds=1.0,
            connect_timeout_seconds=PATIENCE,
            idle_timeout_seconds=PATIENCE,
            max_retries=20,
        )
        client = RolloutClient([server.url], cfg, SampleRules(SPEC, want_routes=True))
        client.clock, server.late = clock, lambda: clock.advance(1.0)
        groups = client.generate(
            PROMPTS,
            GROUP,
            temperature=1.0,
            max_tokens=400,
            stop_token_ids=(END,),
            policy_version=VERSION,
        )
    lengths = np.array([rollout.response_length for group in groups for rollout in group.rollouts])
    expected, spread = MEAN, MEAN * (1 - 1 / MEAN) ** 0.5  # of a geometric distribution
    assert abs(lengths.mean() - expected) < 4 * spread / len(lengths) ** 0.5
    tail = (1 - 1 / MEAN) ** PER_REQUEST
    assert (
        abs((lengths > PER_REQUEST).mean() - tail) < 4 * (tail * (1 - tail) / len(lengths)) ** 0.5
    )
    assert client.counters.failures["timeout"] > 0 == client.counters.redrawn_samples


def test_dropped_responses_are_counted_with_their_length():
    with FakeServer("stale", "ok") as server:
        client = RolloutClient([server.url], RolloutConfig(), SampleRules(SPEC, want_routes=True))
        client.generate(
            PROMPTS[:1], 4, temperature=1.0, max_tokens=8, stop_token_ids=(), policy_version=VERSION
        )
        with FakeServer("reset", "ok") as failing:
            client.set_urls([failing.url])
            client.generate(
                PROMPTS[:1],
                4,
                temperature=1.0,
                max_tokens=8,
                stop_token_ids=(),
                policy_version=VERSION,
            )
    totals = client.counters.totals()
    assert totals["rollout/redrawn_samples_total"] == 1 + 4  # one sample, and a request that broke
    assert totals["rollout/dropped_tokens_total"] == 5
    cancelled = {"rollout/cancelled_samples_total": 1, "rollout/cancelled_tokens_total": 25}
    assert discarded_length(totals | cancelled) == {"rollout/discarded_length_mean": 15.0}
