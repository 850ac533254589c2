"""Griffe extension: aligned lists in docstrings (name, two spaces or more, meaning) are shown as
they are written.
"""

import re
from typing import Any

from griffe import Extension, Object


class Preformatted(Extension):
    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            paragraphs = re.split(r"\n\s*\n", obj.docstring.value)
            obj.docstring.value = "\n\n".join(map(as_text, paragraphs))


def as_text(paragraph: str) -> str:
    """Return the paragraph, as a code block if it is indented or two of its lines are aligned."""
    lines = paragraph.split("\n")
    aligned = sum(bool(re.match(r"\S+(, \S+)* {2,}\S", line)) for line in lines)
    is_block = aligned > 1 or all(line.startswith("    ") for line in lines)
    return f"```text\n{paragraph}\n```" if is_block else paragraph
