"""JSON of commands: every parser must read it."""

import json
import math
from types import SimpleNamespace

from megatron_rl_tools.explain_mismatch import explain_mismatch
from megatron_rl_tools.explain_mismatch.evidence import Evidence
from megatron_rl_tools.explain_mismatch.ladder import Explanation
from megatron_rl_tools.json_output import json_text


def refuse(name: str) -> float:
    raise AssertionError(f"{name} is not JSON")


def test_what_json_does_not_have_is_null():
    values = {"a": [math.nan, (1.5, -math.inf)], "b": {"c": math.inf}, "d": [True, None, "NaN", 3]}
    expected = {"a": [None, [1.5, None]], "b": {"c": None}, "d": [True, None, "NaN", 3]}
    assert json.loads(json_text(values), parse_constant=refuse) == expected


def test_evidence_that_is_not_a_number_is_printed_as_null(tmp_path, monkeypatch, capsys):
    """KL is NaN where no log-ratio is finite."""
    evidence = Evidence({"kl.live": math.nan, "diff.live": 0.25})
    monkeypatch.setattr(explain_mismatch, "of_server", lambda _: Explanation(evidence, (), ()))
    monkeypatch.setattr(explain_mismatch, "write_page", lambda *_, **__: SimpleNamespace())
    arguments = ["--url", "http://x", "--json", "--output", str(tmp_path / "page.html")]
    assert explain_mismatch.main(arguments) == 0
    printed = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert printed["evidence"] == {"kl.live": None, "diff.live": 0.25}
