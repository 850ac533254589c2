"""Secrets in every form that a run meets them, and innocent text that stays as it is."""

import json
import logging
import sys
import threading
import tomllib

import pytest

from megatron_rl.config import dump_config, load_config, plain_values
from megatron_rl.config.redact import HIDDEN, Redactor
from megatron_rl.launch.errors import report_error
from megatron_rl.launch.log_lines import LogLines

SECRET = "s3cr3t-Va1ue.9"


@pytest.mark.parametrize(
    "text",
    [
        f"http://user:{SECRET}@host:30000/path",
        f"urls = ['https://user:p@{SECRET}@10.0.0.1']",
        f"http://host/x?write_token={SECRET}&page=2",
        f"https://bucket/key?X-Amz-Date=2026&X-Amz-Signature={SECRET}",
        f"x-api-key: {SECRET}",
        f"Authorization: Bearer {SECRET}",
        f"{{'Authorization': 'Basic {SECRET}'}}",
        f'"authorization", "{SECRET}"',
        f"bearer {SECRET}",
        f"--hf-token {SECRET} --tp-size 2",
        f"--admin-api-key={SECRET}",
        f'["--ssl-keyfile-password", "{SECRET}"]',
    ],
)
def test_a_secret_does_not_stay(text):
    shown = Redactor().text(text)
    assert SECRET not in shown and HIDDEN in shown


@pytest.mark.parametrize(
    "text",
    [
        "--max-total-tokens 16384 --tokenizer-path DIR --skip-tokenizer-init",
        "the bearer of news", "key, value, rule and fix", "prompt_key = question", "http://10.0.0.2:30000/model_info",
        "2 tokens masked; token 17 of step 3", "mail@example.org",
    ],
)  # fmt: skip
def test_innocent_text_stays(text):
    assert Redactor().text(text) == text


def test_values_of_the_environment(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    monkeypatch.setenv("SERVERS", "of-another-name")
    monkeypatch.setenv("MONKEY", "banana-split")
    monkeypatch.setenv("MAX_TOKENS", "16384000")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/etc/keys/key.json")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "/wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY")
    assert Redactor().text("is /wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY") == f"is {HIDDEN}"
    text = f"{SECRET} of-another-name banana-split 16384000 /etc/keys/key.json"
    assert (
        Redactor().text(text)
        == f"{HIDDEN} of-another-name banana-split 16384000 /etc/keys/key.json"
    )
    assert Redactor(hidden=["SERVERS", None]).text("of-another-name") == HIDDEN


def test_known_forms_of_tokens():
    for token in ("hf_" + "a" * 34, "sk-proj-" + "b" * 40, "ghp_" + "c" * 36, "AKIA" + "D" * 16):
        assert Redactor().text(f"it is {token}.") == f"it is {HIDDEN}."


def test_a_tree():
    tree = {
        "rollout": {"server_args": ["--hf-token", SECRET, "--tp-size", "2"], "api_key_env": "NAME"},
        "password": SECRET,
    }
    tree |= {"label_key": "label", "numbers": (1, 2.5, None)}
    assert Redactor().tree(tree) == {
        "rollout": {"server_args": ["--hf-token", HIDDEN, "--tp-size", "2"], "api_key_env": "NAME"},
        "password": HIDDEN, "label_key": "label", "numbers": (1, 2.5, None),
    }  # fmt: skip


ACCESS = {
    "a key": ("--rollout.api_key_env", "MY_SERVERS", "--rollout.urls", "http://10.0.0.2:30000"),
    "a password": ("--rollout.urls", f"http://me:{SECRET}@10.0.0.2:30000"),
}
"""Ways to identify oneself at the servers."""


@pytest.fixture(params=ACCESS)
def config(request, monkeypatch):
    monkeypatch.setenv("MY_SERVERS", SECRET)
    return load_config(
        None,
        [
            *("--model.path", "m", "--data.train", "t", *ACCESS[request.param]),
            *(
                "--rollout.server_args",
                "--hf-token",
                SECRET,
                "--tool-server",
                f"Authorization: Bearer {SECRET}",
            ),
        ],
    )


def test_config_toml_and_what_a_checkpoint_keeps(config):
    text = dump_config(config)
    assert SECRET not in text
    rollout = tomllib.loads(text)["rollout"]
    assert rollout.get("api_key_env") == config.rollout.api_key_env
    assert rollout["urls"] == [
        "http://10.0.0.2:30000" if config.rollout.api_key_env else "http://***@10.0.0.2:30000"
    ]
    assert SECRET not in json.dumps(plain_values(config))


def test_lines_errors_and_tracebacks(config, tmp_path, capsys):
    lines = LogLines("text", hidden=(config.rollout.api_key_env,))
    said = f" {SECRET}" if config.rollout.api_key_env else ""
    report_error(RuntimeError(f"{config.rollout.urls[0]} refused{said}"), tmp_path, lines=lines)
    lines.catch_warnings()
    logging.getLogger("megatron_rl.somewhere").warning("cannot reach %s", config.rollout.urls[0])
    written = capsys.readouterr().err + (tmp_path / "logs/error_rank0.txt").read_text()
    assert SECRET not in written
    assert ("refused ***" if said else "cannot reach http://***@10.0.0.2:30000") in written


def test_standard_error_of_other_code(capsys, monkeypatch):
    """Threads and libraries write there without asking."""
    monkeypatch.setenv("SOME_API_KEY", "s3cr3t-Va1ue.9")
    # pytest has one of its own
    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)
    before = sys.stderr
    with LogLines().clean_stderr():
        thread = threading.Thread(target=lambda: {}["s3cr3t-Va1ue.9"], name="of a library")
        thread.start()
        thread.join()
        print("http://me:passw0rd@a:1", file=sys.stderr, flush=True)
        assert not sys.stderr.closed, "as the stream itself"
    assert sys.stderr is before
    text = capsys.readouterr().err
    assert "s3cr3t" not in text and "passw0rd" not in text
    assert "KeyError: '***'" in text and "http://***@a:1" in text


def test_warnings_are_json_lines_too(capsys):
    LogLines("json").catch_warnings()
    logging.getLogger("megatron_rl.somewhere").warning("cut a line")
    LogLines().catch_warnings()  # as it was for the tests that follow
    (row,) = map(json.loads, capsys.readouterr().err.splitlines())
    assert (row["event"], row["text"], row["logger"]) == (
        "warning",
        "cut a line",
        "megatron_rl.somewhere",
    )


def test_tokens_of_a_tokenizer_are_no_secrets():
    """They would be read back from config.toml as ***."""
    values = {"bos_token": "<s>", "max_token": "100", "hub": {"pad-token": "<pad>"}}
    assert Redactor().tree(values) == values
    assert Redactor().tree({"hf_token": "abc"}) == {"hf_token": "***"}
