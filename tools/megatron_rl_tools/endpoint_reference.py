"""Write the fields of the endpoint's protocols into docs/guides/agents.md, between two markers.

    python -m megatron_rl_tools.endpoint_reference

They are those of the tables by which requests are checked.  A test checks that the page is current.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path

from megatron_rl.rollout.agents.completions import CompletionRequest
from megatron_rl.rollout.agents.fields import ANY_TEXT, FULL_SOFTMAX, RequestFields
from megatron_rl.rollout.agents.messages import MessagesRequest
from megatron_rl.rollout.agents.responses import ResponsesRequest
from megatron_rl.rollout.agents.text_completions import TextCompletionRequest
from megatron_rl_tools.settings_reference import wrapped

PAGE = Path(__file__).resolve().parents[2] / "docs/guides/agents.md"
BEGIN, END = (f"<!-- fields of the endpoint: {place} -->" for place in ("begin", "end"))
DOORS: dict[str, type[RequestFields]] = {
    "`/v1/chat/completions`": CompletionRequest,
    "`/v1/completions`": TextCompletionRequest,
    "`/v1/responses`": ResponsesRequest,
    "`/v1/messages`": MessagesRequest,
}
Row = tuple[str, str, str]
"""Field, what is done with it, and its meaning or the reason."""


def page(text: str) -> str:
    """Return the page `text` with the fields as they are now.  Raises ValueError without one pair
    of markers.
    """
    pattern = re.compile(f"{BEGIN}.*?{END}", re.DOTALL)
    if len(pattern.findall(text)) != 1:
        raise ValueError(f"{PAGE}: must have {BEGIN!r} before {END!r} once")
    return pattern.sub(lambda _: f"{BEGIN}\n\n{section()}\n\n{END}", text)


def section() -> str:
    """Return the fields as lists: those that are the same in every protocol, then the others."""
    tables = {name: list(rows(door)) for name, door in DOORS.items()}
    first, *others = tables.values()
    same = [row for row in first if all(row in table for table in others)]
    blocks = ["In every protocol:"]
    blocks.append(listed([*same, *common_rows()]))
    for name, table in tables.items():
        blocks += [f"In {name}:", listed(row for row in table if row not in same)]
    return "\n\n".join(blocks)


def common_rows() -> Iterator[Row]:
    """Yield the fields that are checked against their only value."""
    for name in FULL_SOFTMAX:
        yield name, "served", "Only the run's, of the same name in `[rollout]`."
    for name, (value, *_) in ANY_TEXT.items():
        yield name, "served", f"Only `{json.dumps(value)}`."
    yield "any field that no list names", "refused", "Its name is not known."


def rows(door: type[RequestFields]) -> Iterator[Row]:
    """Yield the fields of one protocol, those that are read first."""
    for name, field in door.model_fields.items():
        yield name, "served", " ".join((field.description or "").split())
    for kind, table in (("no effect", door.without_effect), ("refused", door.refused)):
        for name, why in table.items():
            yield name, kind, f"{why[0].upper()}{why[1:]}."


def listed(fields: Iterable[Row]) -> str:
    """Return a list: served fields with their meaning, those with the same meaning together, then
    the names without effect and the refused ones, whose refusal gives the reason.
    """
    items = []
    for (kind, why), same in groupby(
        fields, key=lambda row: (row[1], row[2] * (row[1] == "served"))
    ):
        names = ", ".join(name if " " in name else f"`{name}`" for name, _, _ in same)
        text = f"- {names}: {why}" if kind == "served" else f"- {kind.capitalize()}: {names}."
        items.append(wrapped(text, "  "))
    return "\n".join(items)


def main() -> int:
    PAGE.write_text(page(PAGE.read_text()))
    print(PAGE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
