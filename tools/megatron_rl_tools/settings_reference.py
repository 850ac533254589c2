"""Write docs/reference/settings.md from the config classes.

    python -m megatron_rl_tools.settings_reference

Defaults and meanings are those that `megatron-rl settings` prints.  A test checks that the page is
current.
"""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from pathlib import Path

from pydantic.fields import FieldInfo

from megatron_rl.config.schema import MODELS, SECTIONS, TABLES, schemas
from megatron_rl.config.settings import default_text, meaning, summary, type_text

PAGE = Path(__file__).resolve().parents[2] / "docs/reference/settings.md"
WIDTH = 100
HEAD = """# Settings

`key = default` (type, if the default does not show it; limits): meaning. A key without a default is
not set. Limits `> 0` and `>= 0` are left out, and a number is finite unless `inf` is named. In a
TOML file `run.num_steps` is

```toml
[run]
num_steps = 100
```

The command line overrides the file: `--run.num_steps 100`. `megatron-rl settings run.num_steps`
explains a setting, also a switch of the loss.

Written by `python -m megatron_rl_tools.settings_reference`.
"""
SIMPLE = "integer|number|boolean|text|path"
SHORTER = (  # (pattern, shorter text) for the text of a type
    (r"\btrue or false\b", "boolean"),
    (r'"(\w+)" or (?=")', r'"\1", '),
    (r'"(\w+)"', r"`\1`"),
    (r" or None\b", ""),
    (r"number((?:, (?:greater than|at least) \S+)?)$", r"number\1 or `inf`"),
    (r", finite\b", ""),
    (r",? greater than ", " > "),
    (r",? at least ", " >= "),
    (r" (?:>|>=) 0(?![.\d]|,)", ""),
    (r" less than ", " < "),
    (r" at most ", " <= "),
    (r"list of: table of [\w, ]+", "list of tables"),
    (r"of: ", "of "),
    (r"and: ", "and "),
)


def page() -> str:
    """Return the whole page."""
    return "\n".join([HEAD, *map(section_text, SECTIONS)])


def section_text(section: str) -> str:
    """Return a section: its summary, then its settings."""
    blocks = [f"## {section}", wrapped(linked(summary(section)))]
    if not SECTIONS[section].model_fields:
        # an open section: its docstring says which names it takes
        paragraphs = (inspect.getdoc(SECTIONS[section]) or "").split("\n\n")[1:]
        blocks += [wrapped(linked(text)) for text in paragraphs]
    for name in (section, *(table for table in TABLES if table.startswith(f"{section}."))):
        fields = MODELS[name].model_fields
        if fields:
            blocks.append("\n".join(wrapped(text, "  ") for text in entries(name, fields)))
    return "\n\n".join(blocks) + "\n"


def entries(section: str, fields: dict[str, FieldInfo]) -> list[str]:
    """Return one text for each setting, then one for each type of the switches of the loss.

    A switch has no meaning here: the page that its section names explains it by its equation.
    """
    switches: dict[str, list[str]] = {}
    explained = []
    for key, field in fields.items():
        text = entry(section, key, field)
        if "description" in schemas(section)[key]:
            explained.append(text)
        else:
            name, _, kind = text.removeprefix("- ").partition(" ")
            switches.setdefault(kind, []).append(name)
    return explained + [f"- {', '.join(names)} {kind}" for kind, names in switches.items()]


def entry(section: str, key: str, field: FieldInfo) -> str:
    """Return a setting with default, type, limits and meaning."""
    schema, is_set = schemas(section)[key], field.get_default(call_default_factory=True) is not None
    kind = short_type(type_text(schema))
    if field.is_required():
        name, kind = f"{section}.{key}", f"required, {kind}"
    elif is_set:  # the default shows the type
        name, kind = (
            f"{section}.{key} = {default_text(field)}",
            re.sub(rf"^({SIMPLE})(, | |$)(?!or )", "", kind),
        )
    else:
        name = f"{section}.{key}"
    text = f": {linked(meaning(section, key))}" if "description" in schema else ""
    return f"- **`{name}`**{f' ({kind})' if kind else ''}{text}"


def short_type(text: str) -> str:
    for pattern, shorter in SHORTER:
        text = re.sub(pattern, shorter, text)
    return text


def linked(text: str) -> str:
    """Replace the documents that the text names by links from this page, with the anchor or else
    the file name as text.
    """

    def link(match: re.Match[str]) -> str:
        label = re.sub("[_-]", " ", match[3] or match[2])
        return f"[{label}](../{match[1]}.md{'#' * bool(match[3])}{match[3] or ''})"

    return re.sub(r"\bdocs/([\w/]*?(\w+))\.md(?:#([\w-]+))?", link, " ".join(text.split()))


def wrapped(text: str, indent: str = "") -> str:
    """Wrap the text in lines, and escape an operator at the beginning of a later line, which would
    begin a list.
    """
    lines = textwrap.wrap(
        text, WIDTH - 1, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return re.sub(r"(?<=\n)( *)(?=[*+>#-] )", r"\1\\", "\n".join(lines))


def main() -> int:
    PAGE.write_text(page())
    print(PAGE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
