"""explain-mismatch against a real server: causes that are injected are named, a healthy pair is not
accused.

The full table is `make explain-faults` (tests/mismatch/table.py); here are two of its cases on the
shared server.
"""

from pathlib import Path

import pytest

from megatron_rl_tools.explain_mismatch.explain_mismatch import main
from tests.mismatch.faults import SERVERS, Served, serve
from tests.mismatch.proxy import no_routes, proxy
from tests.mismatch.table import CASES, check
from tests.tiny import random_checkpoint

CHEAP = ("healthy", "swapped experts")
ON_SHARED = {case.name: case for case in CASES if case.server == "qwen3_moe"}


@pytest.fixture(scope="module")
def served(
    sglang_server, tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Served:
    return Served(sglang_server.url, tiny_checkpoint, tmp_path_factory.mktemp("explain"))


@pytest.mark.parametrize("name", CHEAP)
def test_the_cause_is_named(name, served):
    assert check(ON_SHARED[name], served) == ""
    page = (served.folder / "page.html").read_text()
    assert ("Healthy" in page) == (name == "healthy") and page.count("data:image/png") == 3


@pytest.mark.slow
@pytest.mark.parametrize("kind", SERVERS)
def test_the_whole_table(kind, tmp_path):
    with serve(kind, tmp_path) as served:
        wrong = {
            case.name: found
            for case in CASES
            if case.server == kind and (found := check(case, served))
        }
    assert not wrong
    assert (
        sum(bool(case.expected) for case in CASES) >= 15
        and sum(not case.expected for case in CASES) >= 5
    )


def test_bad_input_names_what_to_change(served, tmp_path, capsys):
    """Nothing listens there; the checkpoint of another model; something drops the routes; prompts
    that do not fit.
    """
    other = random_checkpoint(tmp_path / "other", num_hidden_layers=2)
    model = str(served.checkpoint)
    with proxy(served.url, no_routes) as without_routes:
        cases = {
            ("--url", "http://127.0.0.1:9", "--model", model): "--url http://127.0.0.1:9",
            ("--url", served.url, "--model", str(other)): "has layers = 4, this run needs 2",
            (
                "--url",
                without_routes,
                "--model",
                model,
            ): "restart it with --enable-return-routed-experts",
            (
                "--url",
                served.url,
                "--model",
                model,
                "--longest",
                "5000",
            ): "--longest 5000, --response 32: together they must",
        }
        for options, message in cases.items():
            assert main(list(options)) == 2
            assert message in capsys.readouterr().err, options
