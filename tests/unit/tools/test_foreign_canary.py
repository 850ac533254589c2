"""The canary on dumps of slime, miles and verl: routes that are the model's own pass, wrong but
valid ones are named.

What is dumped are the choices of real megatron-core routers, of a model whose second layer is
dense.
"""

import json
import re
from contextlib import redirect_stdout
from io import StringIO

import numpy as np
import pytest

from megatron_rl_tools.check_rollouts.check_rollouts import main
from tests.dist.launch import run_ranks
from tests.tiny import random_checkpoint
from tests.unit.tools.test_foreign_dumps import (
    EXPERTS,
    LAYERS,
    PROMPT,
    RESPONSE,
    SAVE,
    TOOL,
    TOP_K,
    every,
    save_batch,
)

DENSE = 1
MOE = [layer for layer in range(LAYERS) if layer != DENSE]


def own_sequences(checkpoint, count=6):
    """(tokens, log-probs, mask, routes [S - 1, layers, K] with zeros for the dense layer): the
    model's own choices.
    """
    from megatron_rl.config import ModelConfig
    from megatron_rl.models.families import make_spec
    from megatron_rl.models.spec import load_hf_config
    from megatron_rl_tools.check_rollouts.canary_forward import live_routes

    rng = np.random.default_rng(0)
    tokens = [rng.integers(2, 40, PROMPT + RESPONSE) for _ in range(count)]
    spec = make_spec(load_hf_config(checkpoint))
    assert list(spec.moe_layers) == MOE
    sequences = []
    for row, chosen in zip(
        tokens,
        live_routes(ModelConfig(path=checkpoint, dtype="float32"), spec, tokens),
        strict=True,
    ):
        logprobs, mask = -rng.random(RESPONSE) - 0.01, np.ones(RESPONSE, int)
        logprobs[TOOL], mask[TOOL] = 0, 0
        routes = np.zeros((len(row) - 1, LAYERS, TOP_K), np.int32)
        routes[:, MOE] = chosen
        sequences.append((row, logprobs, mask, routes))
    return sequences


def with_routes(sequences, change):
    return [(*rest, np.ascontiguousarray(change(routes))) for *rest, routes in sequences]


def exchanged(routes):
    return routes[:, [2, 1, 0, 3]]


CHANGES = {
    "sound": (lambda routes: routes, None),
    "late": (lambda routes: np.roll(routes, 1, 0), r"row j has the experts of token j - 1"),
    "layers": (exchanged, "exchanged: MoE layer 0 has those of 1; 1 has those of 0"),
}


def reports(root, checkpoint):
    """On a rank: name -> what check-rollouts --model prints for every dump."""
    sequences = own_sequences(checkpoint)
    found = {}
    # two calls of the same weights
    versions = {"change": every("weight_versions", lambda _: ["3", "3"])}
    for trainer, save in SAVE.items():
        settings = {} if trainer == "verl" else versions
        for name, (change, _) in CHANGES.items():
            save(root / f"{trainer} {name}", sequences=with_routes(sequences, change), **settings)
    SAVE["slime"](root / "slime two versions", sequences=sequences)
    save_batch(root / "verl no routes", lambda batch: batch.pop("routed_experts"), sequences)
    (root / "verl text").mkdir()
    line = {"input": "1+1?", "output": "2", "gts": "2", "score": 1.0, "step": 5}
    (root / "verl text/5.jsonl").write_text(json.dumps(line) + "\n")
    for folder in root.iterdir():
        with redirect_stdout(StringIO()) as output:
            status = main([str(folder), "--json", "--model", str(checkpoint)])
        found[folder.name] = status, json.loads(output.getvalue())
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    sizes = dict(
        num_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        num_hidden_layers=LAYERS,
        mlp_only_layers=[DENSE],
    )
    checkpoint = random_checkpoint(tmp_path_factory.mktemp("model") / "moe", **sizes)
    return run_ranks(reports, 1, tmp_path_factory.mktemp("dumps"), checkpoint)[0]


@pytest.mark.parametrize("trainer", SAVE)
def test_the_canary_names_what_is_wrong(trainer, found):
    status, report = found[f"{trainer} sound"]
    assert status == 0 and report["canary"]["0"] > 0.99 > 0.7 > max(
        report["canary"]["-1"], report["canary"]["+1"]
    )
    assert "canary" in report["checks"] and "canary" not in report["unchecked"]
    for name, (_, message) in CHANGES.items():
        if message:
            status, report = found[f"{trainer} {name}"]
            canary = [finding for finding in report["findings"] if finding["check"] == "canary"]
            assert status == 1 and canary, name
            assert all(re.search(message, finding["cause"]) for finding in canary), canary


@pytest.mark.parametrize(
    ("dump", "reason"),
    [
        ("slime two versions", "needs rollouts of one weight version"),
        ("verl no routes", "the dump has no expert ids"),
        ("verl text", "the files hold text only, no token ids"),
    ],
)
def test_where_it_is_not_possible_that_is_said(dump, reason, found):
    status, report = found[dump]
    assert status == 0 and report["canary"] is None
    assert "canary" in report["checks"] and reason in report["unchecked"]["canary"]
