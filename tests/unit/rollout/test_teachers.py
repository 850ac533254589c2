"""Teachers in the client: which numbers a response gets, when a group is complete, and what happens
to every wrong answer.
"""

import asyncio
import threading
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest

from megatron_rl.config import RolloutConfig
from megatron_rl.config.sections import Teacher
from megatron_rl.records import Prompt, Rollout
from megatron_rl.rollout.client.client import RolloutClient, RolloutError
from megatron_rl.rollout.client.request import RetryableError
from megatron_rl.rollout.client.sampling import SampleRules, Sampling
from megatron_rl.rollout.client.score_request import ScoreRequest
from megatron_rl.rollout.client.teachers import Teachers
from megatron_rl.rollout.group import Group
from tests.fake_server import SPEC, VERSION, FakeServer, wait_for
from tests.fake_teacher import (
    TEACHER_ANSWERS,
    TOP_ANSWERS,
    FakeTeacher,
    expected_logprobs,
    honest,
    top_of,
)
from tests.unit.batch.rollouts import make_rollout

PROMPTS = [Prompt(f"q{i}", "", (3, 4, 5 + i), "") for i in range(4)]
SAMPLING = Sampling(1.0, 6, (1,), VERSION)
SHORT = {"request_timeout_seconds": 0.3, "idle_timeout_seconds": 0.3, "connect_timeout_seconds": 1}


def teachers_of(*urls: str, name: str = "math", top_k: int = 0, **settings) -> Teachers:
    cfg = RolloutConfig(**settings)
    return Teachers({name: Teacher(urls=urls)}, cfg, SPEC.vocab_size, top_k)


def client_of(server: FakeServer, teachers: Teachers, **settings) -> RolloutClient:
    cfg = RolloutConfig(**settings)
    return RolloutClient([server.url], cfg, SampleRules(SPEC, want_routes=True), teachers=teachers)


def score(teachers: Teachers, group: Group) -> None:
    async def run() -> None:
        async with teachers.serving():
            await teachers.score(group)

    asyncio.run(run())


def sampled(*rollouts: Rollout) -> Group:
    group = Group(PROMPTS[0], len(rollouts), teacher="math")
    for index, rollout in enumerate(rollouts):
        group.put(index, rollout)
    return group


def assert_taught(rollout: Rollout) -> None:
    for sequence in rollout.sequences:
        places = sequence.sampled
        np.testing.assert_array_equal(
            sequence.teacher_logprobs, expected_logprobs(sequence.tokens, places)
        )
        assert sequence.teacher_logprobs.dtype == np.float32


def test_groups_are_complete_when_their_teacher_has_scored_them():
    with FakeServer("ok") as student, FakeTeacher("ok") as teacher:
        client = client_of(student, teachers_of(teacher.url))
        groups = [Group(prompt, 2, teacher="math") for prompt in PROMPTS[:3]]
        groups[2].teacher = ""
        complete = []
        client.fill(
            groups,
            SAMPLING,
            on_progress=lambda: complete.append(sum(group.is_complete for group in groups)),
        )
        # a group is complete when it is reported; others may be, too
        assert len(complete) == 3 and all(map(int.__ge__, complete, (1, 2, 3)))
        for group in groups[:2]:
            for rollout in group.rollout_group().rollouts:
                assert_taught(rollout)
        assert all(r.teacher_logprobs is None for r in groups[2].rollout_group().rollouts)
        # one request per response, which asks for the tokens after the prompt and for nothing new
        assert len(teacher.requests) == 4
        for body in teacher.requests:
            assert body["logprob_start_len"] == 2 and body["input_ids"][:2] == [3, 4]
            assert body["sampling_params"] == {"max_new_tokens": 0, "temperature": 1.0}
        totals = client.teachers.totals()
        assert totals["teacher/requests_total"] == 4
        assert len(client.teachers.take_seconds()) == 4 and not client.teachers.take_seconds()


def test_tokens_of_an_environment_are_not_scored_and_every_sequence_of_an_episode_is():
    first = replace(make_rollout("r/0", 3, 6), environment=((5, 7),))
    first = replace(
        first,
        rollout_logprobs=first.rollout_logprobs[:4],
        policy_versions=first.policy_versions[:4],
    )
    last = make_rollout("r", 4, 3)
    episode = last.with_episode(earlier=(first,))
    group = sampled(episode)
    with FakeTeacher("ok") as teacher:
        score(teachers_of(teacher.url), group)
        assert [len(body["input_ids"]) for body in teacher.requests] == [9, 7]
    taught = group.rollouts[0]
    assert taught.is_taught and len(taught.sequences[0].teacher_logprobs) == 4
    assert_taught(taught)
    # the digest of the episode covers the teacher's numbers, and was made again
    assert taught.episode.digest != episode.episode.digest


REASONS = {
    "nan": "value", "null": "value", "infinite": "value", "positive": "value",
    "other_text": "text", "one_token_less": "count", "one_token_more": "count",
    "a_text": "body", "no_logprobs": "body", "not_entries": "body", "another_request": "body",
    "a_list": "body", "html": "body", "cut_json": "body", "empty": "body", "huge": "body",
    "http_500": "http", "http_503": "http", "http_429": "http",
    "reset": "connection", "close@mid_body": "connection", "hang": "timeout", "drip": "timeout",
}  # fmt: skip


def test_the_last_id_of_the_vocabulary_is_named_0_by_a_real_server():
    """And by no other: 0 for another id is another text."""
    last = SPEC.vocab_size - 1
    request = ScoreRequest("r", [3, 4, last, 5], 2, SPEC.vocab_size)
    answer = honest(request.body())
    entries = answer["meta_info"]["input_token_logprobs"]
    entries[1][1] = 0
    scores = request.scores(answer, np.arange(2))
    assert scores.logprobs.tolist() == np.float32([e[0] for e in entries[1:]]).tolist()
    entries[2][1] = 0
    with pytest.raises(RetryableError, match="other_text: token 2 after the prompt is 0, not 5"):
        request.scores(answer, np.arange(2))


def test_the_table_has_every_wrong_answer():
    assert set(TEACHER_ANSWERS) <= set(REASONS)


@pytest.mark.parametrize(("fault", "reason"), REASONS.items())
def test_a_wrong_answer_is_counted_and_asked_again(fault, reason):
    limits = SHORT if reason == "timeout" else {}
    with FakeTeacher(fault, "ok") as teacher:
        teachers, group = teachers_of(teacher.url, **limits), sampled(make_rollout("r", 3, 4))
        score(teachers, group)
        assert_taught(group.rollouts[0])
    totals = {name: count for name, count in teachers.totals().items() if count}
    assert totals == {
        "teacher/requests_total": 2,
        "teacher/retries_total": 1,
        f"teacher/faults_{reason}_total": 1,
    }


TOP_REASONS = {
    "top_of_fewer_tokens": "count", "fewer_in_top": "count", "no_top": "body", "top_cut": "body",
    "top_no_base64": "body", "top_beyond_the_vocabulary": "body", "top_negative_id": "body",
    "top_id_twice": "body", "top_nan": "value", "top_infinite": "value", "top_positive": "value",
    "top_of_other_places": "text", "top_of_another_text": "text",
}  # fmt: skip


def assert_has_top(sequence: Rollout, k: int) -> None:
    top = sequence.teacher_top
    ids, values = top_of(sequence.tokens.tolist(), sequence.sampled.tolist(), k)
    order = np.argsort(ids, axis=1)
    found = top.sets.ids().reshape(-1, k)
    np.testing.assert_array_equal(found, np.take_along_axis(ids, order, 1))
    np.testing.assert_array_equal(top.logprobs.reshape(-1, k), np.take_along_axis(values, order, 1))


def test_the_most_probable_tokens_are_those_of_the_sampled_places():
    first = replace(make_rollout("r", 3, 6), environment=((5, 7),))
    first = replace(
        first,
        rollout_logprobs=first.rollout_logprobs[:4],
        policy_versions=first.policy_versions[:4],
    )
    group = sampled(first, make_rollout("s", 2, 1))
    with FakeTeacher("ok") as teacher:
        score(teachers_of(teacher.url, top_k=3), group)
    for rollout in group.rollouts.values():
        assert_taught(rollout)
        assert_has_top(rollout, 3)


def test_the_table_has_every_wrong_answer_about_most_probable_tokens():
    assert set(TOP_ANSWERS) == set(TOP_REASONS)


@pytest.mark.parametrize(("fault", "reason"), TOP_REASONS.items())
def test_wrong_most_probable_tokens_are_counted_and_asked_again(fault, reason):
    with FakeTeacher(fault, "ok") as teacher:
        teachers, group = teachers_of(teacher.url, top_k=3), sampled(make_rollout("r", 3, 4))
        score(teachers, group)
        assert_has_top(group.rollouts[0], 3)
    totals = {name: count for name, count in teachers.totals().items() if count}
    assert totals == {
        "teacher/requests_total": 2,
        "teacher/retries_total": 1,
        f"teacher/faults_{reason}_total": 1,
    }


@pytest.mark.parametrize("fault", ["nan", "other_text", "http_500", "die"])
def test_a_teacher_that_stays_wrong_stops_the_run_and_leaves_no_number(fault):
    group = sampled(make_rollout("r", 3, 4), make_rollout("s", 3, 5))
    with FakeTeacher(fault) as teacher:
        with pytest.raises(RolloutError, match=r"teacher math did not score rollout .* in 3 req"):
            score(teachers_of(teacher.url, max_retries=2, **SHORT), group)
    assert not any(rollout.is_taught for rollout in group.rollouts.values())
    assert group.is_sampled and not group.is_complete


def test_a_refusal_is_not_asked_again():
    group = sampled(make_rollout("r", 3, 4))
    with FakeTeacher("http_401") as teacher:
        with pytest.raises(RolloutError, match=r"teacher math: http\S+ refused .*401.*api_key_env"):
            score(teachers_of(teacher.url), group)
        assert len(teacher.requests) == 1


def test_another_server_of_the_teacher_takes_over():
    with FakeTeacher("die") as dead, FakeTeacher("ok") as well:
        teachers = teachers_of(dead.url, well.url)
        group = sampled(*(make_rollout(f"r{i}", 3, 4) for i in range(6)))
        score(teachers, group)
        assert group.is_complete and len(well.requests) == 6


def test_a_response_that_became_too_old_is_not_put_back():
    group = sampled(make_rollout("r", 3, 4))
    with FakeTeacher("ok") as teacher:
        teachers = teachers_of(teacher.url)
        client = teachers.clients["math"]
        scored = client.score

        async def dropped_meanwhile(rollout):
            taught = await scored(rollout)
            group.rollouts.clear()
            return taught

        client.score = dropped_meanwhile
        score(teachers, group)
    assert not group.rollouts


def test_an_error_of_a_teacher_ends_the_call_and_a_later_call_scores_what_was_sampled():
    with FakeServer("ok") as student, FakeTeacher("nan") as teacher:
        client = client_of(student, teachers_of(teacher.url, max_retries=0), max_retries=0)
        groups = [Group(PROMPTS[0], 2, teacher="math")]
        with pytest.raises(RolloutError, match="teacher math did not score"):
            client.fill(groups, SAMPLING)
        assert groups[0].is_sampled and not groups[0].is_complete
        before, requests = dict(groups[0].rollouts), len(student.requests)
        teacher.script = ["ok"]
        client.fill(groups, SAMPLING)
        assert len(student.requests) == requests  # nothing is sampled again
        for index, rollout in groups[0].rollouts.items():
            assert_taught(rollout)
            np.testing.assert_array_equal(rollout.tokens, before[index].tokens)


def test_other_groups_are_sampled_while_a_teacher_computes():
    """With one slot: the teacher's time does not hold it."""
    with FakeServer("ok") as student, FakeTeacher("hang") as teacher:
        client = client_of(student, teachers_of(teacher.url), max_concurrency=1)
        groups = [Group(prompt, 2, teacher="math") for prompt in PROMPTS]

        def fill() -> None:
            with suppress(asyncio.CancelledError):
                client.fill(groups, SAMPLING)

        thread = threading.Thread(target=fill, daemon=True)
        thread.start()
        assert wait_for(lambda: all(group.is_sampled for group in groups), 10)
        assert not any(group.is_complete for group in groups)
        assert teacher.url in client.waiting_for()
        client.stop()
        thread.join(10)
        assert not thread.is_alive()
