"""The check of teachers at the start of a run: whose tokens, and do they score."""

from dataclasses import replace

import pytest

from megatron_rl.config import load_config
from megatron_rl.records import Prompt
from megatron_rl.rollout.client import teacher_check
from megatron_rl.rollout.client.teacher_check import check_teachers
from megatron_rl.rollout.server.server_info import ServerError, ServerInfo, tokenizer_digest
from tests.fake_server import SPEC
from tests.fake_teacher import FakeTeacher

PROMPTS = [Prompt("a", "", (3,), ""), Prompt("b", "", (3, 4, 5), "")]


@pytest.fixture
def student(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    return tmp_path


@pytest.fixture
def check(monkeypatch, student):
    """check(urls, prompts, **what the servers report) -> lines for the log."""

    def call(*urls, prompts=PROMPTS, infos=None, **report):
        digest = tokenizer_digest(student)
        fields = dict(
            version="0.5.21", model_path="/models/big", dtype="bfloat16", weight_version="0",
            routed_experts=False, route_width=None, num_layers=9, num_experts=None, top_k=None,
            vocab_size=SPEC.vocab_size, tokenizer=digest,
        )  # fmt: skip
        made = {url: ServerInfo(url=url, **(fields | report)) for url in urls} | (infos or {})

        def server_info(url, headers, *, timeout):
            if isinstance(made[url], Exception):
                raise made[url]
            return made[url]

        monkeypatch.setattr(teacher_check, "server_info", server_info)
        cfg = load_config(None, [], {
            "model": {"path": str(student)}, "data": {"train": "x"},
            "teachers": {"math": {"urls": [*urls]}},
        })  # fmt: skip
        return check_teachers(cfg, SPEC, prompts)

    return call


def test_a_teacher_of_the_students_tokens_scores_the_first_prompt_of_two_tokens(check):
    with FakeTeacher("ok") as teacher:
        (line,) = check(teacher.url)
        assert line.startswith(f"teacher math, {teacher.url}: SGLang 0.5.21, bfloat16, /models/big")
        assert "mean log-prob of a prompt -" in line and "WARNING" not in line
        assert [body["input_ids"] for body in teacher.requests] == [[3, 4, 5]]
        (line,) = check(teacher.url, prompts=PROMPTS[:1])
        assert line.endswith("no prompt of two tokens to score")


@pytest.mark.parametrize(
    ("report", "message"),
    [
        ({"vocab_size": 99}, r"teacher math: .* has vocabulary size = 99, the student .* has 64"),
        ({"tokenizer": "0" * 16}, r"has tokenizer digest = 0{16}, the student .* other text to it"),
    ],
)
def test_other_tokens_are_refused(check, report, message):
    with FakeTeacher("ok") as teacher, pytest.raises(ServerError, match=message):
        check(teacher.url, **report)


def test_what_cannot_be_compared_is_said(check):
    with FakeTeacher("ok") as teacher:
        (line,) = check(teacher.url, tokenizer=None, vocab_size=None)
    assert line.endswith("; WARNING not compared: tokenizer and vocab_size, not readable here")


@pytest.mark.parametrize(
    "fault", ["nan", "other_text", "one_token_less", "no_logprobs", "http_500"]
)
def test_a_teacher_that_cannot_score_is_refused(check, fault):
    with FakeTeacher(fault) as teacher, pytest.raises(ServerError, match=r"teacher math: http"):
        check(teacher.url)


def test_the_error_of_a_server_names_the_teacher_and_its_key(check):
    error = ServerError(
        "SGLang server u refused /model_info: rollout.api_key_env must name its key"
    )
    with pytest.raises(ServerError, match=r"teacher math: .* teachers\.math\.api_key_env must"):
        check("http://u", infos={"http://u": error})


def test_servers_of_one_teacher_are_alike(check):
    with FakeTeacher("ok") as teacher, FakeTeacher("ok") as other:
        check(teacher.url, other.url)
        made = ServerInfo(
            other.url, "0.5.21", "m", "float16", "0", False, None, 9, None, None, 64
        )  # fmt: skip
        with pytest.raises(ServerError, match="teacher math: .* has dtype = float16"):
            check(teacher.url, other.url, infos={other.url: replace(made, tokenizer=None)})


def test_a_key_that_is_not_there_is_named(student, monkeypatch):
    monkeypatch.delenv("TEACHER_API_KEY", raising=False)
    table = {"urls": ["http://a"], "api_key_env": "TEACHER_API_KEY"}
    sections = {"model": {"path": str(student)}, "data": {"train": "x"}, "teachers": {"m": table}}
    with pytest.raises(ValueError, match=r"teachers\.m\.api_key_env = 'TEACHER_API_KEY': that env"):
        check_teachers(load_config(None, [], sections), SPEC, PROMPTS)
