"""The evaluation tool as a user runs it: on an HF checkpoint, with a real SGLang server of its
own.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pyarrow
import pyarrow.parquet
import pytest

from megatron_rl_tools.tiny_text import make_tokenizer
from tests.tiny import random_checkpoint


@pytest.mark.slow
def test_a_checkpoint_is_evaluated_on_local_files(tmp_path):
    tokenizer = make_tokenizer()
    model = random_checkpoint(
        tmp_path / "moe",
        vocab_size=len(tokenizer),
        num_hidden_layers=2,
        eos_token_id=tokenizer.eos_token_id,
    )
    tokenizer.save_pretrained(model)
    (tmp_path / "aime.jsonl").write_text(
        "".join(
            json.dumps({"id": n, "problem": f"{n}+1=", "answer": n + 1, "year": "2025"}) + "\n"
            for n in range(10, 30)
        )
    )
    rows = [
        {"prompt": f"{n}+1=", "reward_model": {"style": "rule", "ground_truth": "1"}}
        for n in range(8)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "verl.parquet")
    command = [
        sys.executable, "-m", "megatron_rl.evaluate", "--checkpoint", str(model), "--out",
        str(tmp_path / "out"),
        "--sets", f"aime={tmp_path}/aime.jsonl", f"verl={tmp_path}/verl.parquet", "--samples", "4",
        "--k", "1", "2",
        "--run.device", "cpu", "--data.no_chat_template", "--reward.function",
        "tests.e2e.rewards:parity",
        "--rollout.max_response_tokens", "6", "--rollout.max_total_tokens", "4096",
    ]  # fmt: skip
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "out/results.json").read_text())
    responses = [
        json.loads(line) for line in (tmp_path / "out/responses.jsonl").read_text().splitlines()
    ]
    assert {name: found["num_prompts"] for name, found in results["sets"].items()} == {
        "aime": 20,
        "verl": 8,
    }
    for name, found in results["sets"].items():
        mine = [line for line in responses if line["set"] == name]
        assert len(mine) == 4 * found["num_prompts"]
        rewards = [line["reward"] for line in mine]
        assert all(line["reward"] == sum(map(ord, line["response"])) % 2 for line in mine)
        assert (
            found["avg@4"]
            == pytest.approx(sum(rewards) / len(rewards))
            == pytest.approx(found["pass@1"])
        )
        assert 0 < found["avg@4_low"] < found["avg@4"] < found["avg@4_high"] < 1
        assert found["pass@1"] < found["pass@2"] < found["pass@4"] and found["failed_frac"] == 0
        assert found["response_length_mean"] == pytest.approx(
            sum(line["response_length"] for line in mine) / len(mine)
        )
        assert re.search(
            rf"^{name} +{found['num_prompts']} +{found['avg@4']:.3f} \[", done.stdout, re.MULTILINE
        ), done.stdout
    assert Path(tmp_path / "out/server.log").exists()
    left = [
        p
        for p in psutil.process_iter(["cmdline"])
        if str(model) in " ".join(p.info["cmdline"] or [])
    ]
    assert not left, "the server is stopped"
