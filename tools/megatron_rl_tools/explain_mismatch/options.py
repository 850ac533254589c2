"""Why do trainer and server disagree?  The same tokens through both engines, then one difference \
after the other removed.

    megatron-rl explain-mismatch --url http://HOST:PORT --model CHECKPOINT [--config FILE]
    megatron-rl explain-mismatch RUN_DIR            # when it began, and why, from saved rollouts
    megatron-rl explain-mismatch RUN_DIR/batches/step_000012_update_0
Ends with a verdict: cause, evidence, its share of KL(mu, pi_old), what to change.  Exit code: 0
healthy, 1 a cause was named, 2 invalid arguments.  docs/guides/mismatch.md reads the output line by
line.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

COMMAND = "megatron-rl explain-mismatch"
DTYPES = ("float32", "bfloat16")
OF_REQUESTS = {"prompts": 6, "longest": None, "response": 32, "seed": 0, "no_routes": False}
"""Options of the requests to a server -> their defaults; none has an effect with RUN_DIR."""


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=COMMAND, description=(__doc__ or "").partition("\n")[0], allow_abbrev=False
    )
    add = parser.add_argument
    text = "a run with saved rollouts, or a folder of its batches/"
    add("folder", type=Path, nargs="?", metavar="RUN_DIR", help=text)
    add("--url", help="a running SGLang server; needs --model")
    add("--model", type=Path, metavar="CHECKPOINT", help="HF checkpoint that the trainer loads")
    text = "settings of the run: dtype, temperature, API key (default: none)"
    add("--config", type=Path, metavar="FILE", help=text)
    text = "of the trainer (default: that of --config, else the server's)"
    add("--dtype", choices=DTYPES, help=text)
    add("--temperature", type=float, help="of the requests (default: that of --config, else 1)")
    text = "prompts of random token ids, two responses each (default 6)"
    add("--prompts", type=int, metavar="N", help=text)
    text = "the longest prompt (default 160, or what the model allows)"
    add("--longest", type=int, metavar="TOKENS", help=text)
    text = "tokens of a response (default 32)"
    add("--response", type=int, metavar="TOKENS", help=text)
    add("--seed", type=int, help="of the prompts (default 0)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    text = "do not load transformers' model of the checkpoint"
    add("--no-referee", action="store_true", help=text)
    text = "do not compare experts: the server returns none"
    add("--no-routes", action="store_true", default=None, help=text)
    path = Path("explain_mismatch.html")
    add("--output", type=Path, default=path, metavar="FILE", help="the page to write")
    add("--json", action="store_true", help="print the evidence and the verdicts as JSON")
    return parser.parse_args(argv)
