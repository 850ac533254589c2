"""Faults of a pair of engines, injected into a real server, its checkpoint, its answers, or the
trainer's checkpoint.

    OMP_NUM_THREADS=1 python -m tests.mismatch.table [NAME ...]

It takes minutes (make explain-faults).

explain-mismatch must name each, and accuse none of the healthy pairs.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import httpx

from megatron_rl_tools.explain_mismatch.explain_mismatch import main as explain
from tests.mismatch import faults, proxy
from tests.mismatch.faults import Served, Setup, edited, loaded, rope, serve, trainer_config


@dataclass(frozen=True)
class Case:
    """expected: the verdict's name, "" for a healthy pair; in_text: what its cause must name."""

    name: str
    server: str
    setup: Setup
    expected: str = ""
    in_text: str = ""


def healthy(*options: str) -> Setup:
    @contextmanager
    def setup(served: Served) -> Iterator[list[str]]:
        yield ["--url", served.url, "--model", str(served.checkpoint), *options]

    return setup


@contextmanager
def stale_cache(served: Served) -> Iterator[list[str]]:
    """The prompts are in the prefix cache before new weights come without a flush."""
    own = ["--url", served.url]
    run([*own, "--model", str(served.checkpoint), "--no-referee"], served.folder)
    path = served.variant("newer", faults.other_seed)
    served.load(path, flush=False)
    try:
        yield [*own, "--model", str(path)]
    finally:
        served.load(served.checkpoint)


CASES: tuple[Case, ...] = (
    Case("healthy", "qwen3_moe", healthy()),
    Case("healthy, another seed", "qwen3_moe", healthy("--seed", "5")),
    Case("healthy, long prompts", "qwen3_moe", healthy("--longest", "205", "--prompts", "8")),
    Case("healthy, temperature 0.8", "qwen3_moe", healthy("--temperature", "0.8")),
    Case("one wrong tensor", "qwen3_moe", loaded(faults.wrong_tensor), "wrong_tensor",
    "layers.2.self_attn.o_proj"),
    Case("swapped experts", "qwen3_moe", loaded(faults.swapped_experts), "experts_swapped",
    "experts 2 and 5 swapped"),
    Case("rounded routers", "qwen3_moe", loaded(faults.rounded_routers), "router_rounded",
    "gate.weight: rounded to bfloat16"),
    Case("quantised experts", "qwen3_moe", loaded(faults.quantised_experts), "quantised",
    "rounded to fp8"),
    Case("one quantised expert", "qwen3_moe", loaded(faults.one_quantised_expert), "quantised",
    "expert 6 rounded to fp8"),
    Case("experts of two layers swapped", "qwen3_moe", loaded(faults.swapped_layers),
    "tensor_moved", "holds model.layers.1"),
    Case("tied head", "qwen3_moe", loaded(faults.tied_head), "tensor_moved",
    "lm_head.weight: holds model.embed_tokens.weight"),
    Case("query norm", "qwen3_moe", loaded(faults.query_norm), "wrong_tensor",
    "layers.1.self_attn.q_norm"),
    Case("stale weights", "qwen3_moe", loaded(faults.older, is_kept=True), "stale_weights"),
    Case("another checkpoint", "qwen3_moe", loaded(faults.other_seed, is_kept=True),
    "other_checkpoint"),
    Case("stale prefix cache", "qwen3_moe", stale_cache, "stale_cache"),
    Case("rope theta", "qwen3_moe", trainer_config(**rope(1e4)), "config_differs", "rope_theta"),
    Case("rope theta, files hidden", "qwen3_moe", trainer_config(is_hidden=True, **rope(1e4)),
    "rope_theta", "1e+06"),
    Case("norm epsilon", "qwen3_moe", trainer_config(rms_norm_eps=1e-2), "config_differs",
    "rms_norm_eps"),
    Case("norm epsilon, files hidden", "qwen3_moe", trainer_config(is_hidden=True,
    rms_norm_eps=1e-2), "norm_eps", "1e-06"),
    Case("gate normalisation, files hidden", "qwen3_moe", trainer_config(is_hidden=True,
    norm_topk_prob=False),
    "gate_normalisation"),
    Case("routes of the row before", "qwen3_moe", edited(proxy.on_routes(proxy.next_rows, 4, 2)),
    "routes_shifted"),
    Case("routes of the layer before", "qwen3_moe", edited(proxy.on_routes(proxy.next_layers, 4,
    2)), "routes_layers_shifted"),
    Case("routes of another request", "qwen3_moe", edited(proxy.LastRoutes()), "routes_wrong"),
    Case("log-probs of the next token", "qwen3_moe", edited(proxy.next_logprobs),
    "logprobs_shifted"),
    Case("temperature", "qwen3_moe", edited(on_request=proxy.at_temperature_1,
    options=("--temperature", "0.7")), "temperature",
    "temperature 1,"),
    Case("wrong tensor, no checksums", "qwen3_moe", loaded(faults.wrong_tensor, is_blind=True),
    "layer", "MoE layer 2:"),
    Case("swapped experts, no checksums", "qwen3_moe", loaded(faults.swapped_experts,
    is_blind=True), "layer", "MoE layer 2:"),
    Case("tied head, no checksums", "qwen3_moe", loaded(faults.tied_head, is_blind=True),
    "output_head", "output head"),
    Case("healthy, bf16 on both sides", "qwen3_moe_bf16", healthy("--dtype", "bfloat16")),
    Case("bf16 against float32", "qwen3_moe_bf16", healthy("--dtype", "float32"), "precision"),
    Case("one wrong tensor, bf16", "qwen3_moe_bf16", loaded(faults.wrong_tensor), "wrong_tensor",
    "layers.2.self_attn.o_proj"),
    Case("healthy, sigmoid with bias", "glm4_moe", healthy()),
    Case("expert bias missing", "glm4_moe", loaded(faults.no_bias), "bias_missing",
    "e_score_correction_bias"),
    Case("expert bias missing, no checksums", "glm4_moe", loaded(faults.no_bias, is_blind=True),
    "bias_not_used"),
    Case("gate factor", "glm4_moe", trainer_config(routed_scaling_factor=1.0), "config_differs",
    "routed_scaling_factor"),
    Case("gate factor, files hidden", "glm4_moe", trainer_config(is_hidden=True,
    routed_scaling_factor=1.0), "gate_factor",
    "scaled by 2.5,"),
)  # fmt: skip


def run(options: list[str], folder: Path) -> dict[str, Any]:
    """What the command prints as JSON."""
    text = StringIO()
    with redirect_stdout(text):
        status = explain(
            [*options, "--json", "--device", "cpu", "--output", str(folder / "page.html")]
        )
    assert status in (0, 1), (status, text.getvalue())
    found: dict[str, Any] = json.loads(text.getvalue())
    assert status == bool(found["verdicts"])
    return found


def check(case: Case, served: Served) -> str:
    """ "" where the verdict is the expected one, else what was found."""
    with case.setup(served) as options:
        found = run(options, served.folder)
    if not case.expected:
        return "" if not found["verdicts"] else f"accused: {found['verdicts']}"
    first = found["verdicts"][0] if found["verdicts"] else {"name": "healthy", "cause": ""}
    if first["name"] == case.expected and case.in_text in first["cause"]:
        return ""
    return f"{found['verdicts']}\n{json.dumps(found['evidence'], indent=1)}\n{found['rungs']}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names", nargs="*", help="only cases or servers with one of these in their names"
    )
    names = parser.parse_args().names
    cases = [
        case
        for case in CASES
        if not names or any(name in f"{case.server}: {case.name}" for name in names)
    ]
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        for kind in dict.fromkeys(case.server for case in cases):
            with serve(kind, Path(folder)) as served:
                for case in (case for case in cases if case.server == kind):
                    started = time.monotonic()
                    try:
                        found = check(case, served)
                    # the others are tried all the same
                    except (AssertionError, httpx.HTTPError) as error:
                        found = f"failed: {type(error).__name__}: {error}"
                    wrong += bool(found)
                    verdict = "ok   " if not found else "WRONG"
                    print(
                        f"{verdict} {time.monotonic() - started:5.1f} s  {kind}: {case.name}:"
                        f" {found}",
                        flush=True,
                    )
    faults = sum(bool(case.expected) for case in cases)
    print(
        f"{len(cases) - wrong} of {len(cases)} right: {faults} faults, {len(cases) - faults}"
        " healthy pairs"
    )
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
