"""Write docs/reference/settings.md from the config classes:  python -m megatron_rl_tools.settings_reference

Types, defaults and meanings are those that `megatron-rl settings` prints.  A test checks that the page is current.
"""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from pathlib import Path

from megatron_rl.config.schema import SECTIONS, schemas
from megatron_rl.config.settings import default_text, meaning, summary, type_text

PAGE = Path(__file__).resolve().parents[2] / "docs/reference/settings.md"
WIDTH = 100
HEAD = """# Settings

Every setting of a configuration, by section. In a TOML file:

```toml
[run]
num_steps = 100
```

On the command line, where it overrides the file: `--run.num_steps 100`. `megatron-rl settings
run.num_steps` prints the same as this page. An unknown key is refused with the nearest one, a
renamed key with its new name.

Generated from `megatron_rl/config` by `python -m megatron_rl_tools.settings_reference`.
"""


def page() -> str:
    """The whole page."""
    return "\n".join([HEAD, *map(section_text, SECTIONS)])


def section_text(section: str) -> str:
    """One section: its summary, then each setting with type, default and meaning."""
    fields = SECTIONS[section].model_fields
    blocks = [f"## {section}", linked(summary(section))]
    if not fields:  # an open section: its docstring says which names it takes
        blocks += [linked(text) for text in (inspect.getdoc(SECTIONS[section]) or "").split("\n\n")[1:]]
    for key, field in fields.items():
        default = default_text(field)
        rule = "required" if field.is_required() else f"default `{default}`"
        kind = type_text(schemas(section)[key])
        blocks += [f"### {section}.{key}", f"*{kind[0].upper()}{kind[1:]}*; {rule}", linked(meaning(section, key))]
    return (
        "\n\n".join(
            "\n".join(textwrap.wrap(block, WIDTH, break_long_words=False, break_on_hyphens=False)) for block in blocks
        )
        + "\n"
    )


def linked(text: str) -> str:
    """Documents that the text names, as links from this page."""
    text = " ".join(text.split())
    return re.sub(
        r"\bdocs/([\w/]*?(\w+))\.md\b", lambda match: f"[{match[2].replace('_', ' ')}](../{match[1]}.md)", text
    )


def main() -> int:
    PAGE.write_text(page())
    print(PAGE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
