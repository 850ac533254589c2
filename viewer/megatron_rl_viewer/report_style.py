"""CSS of report.html, in the viewer's colours, light and dark (viewer/web/src/colors.json)."""

from __future__ import annotations

import json
from pathlib import Path

COLORS = json.loads((Path(__file__).parent / "static/colors.json").read_text())


def variables(mode: str) -> str:
    colors = {name: color for name, color in COLORS[mode].items() if isinstance(color, str)}
    return " ".join(f"--{name}: {color};" for name, color in colors.items())


STYLE = f"""
:root {{ color-scheme: light dark; {variables("light")} }}
@media (prefers-color-scheme: dark) {{ :root {{ {variables("dark")} }} }}
body {{ font: 14px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; color: var(--text); \
background: var(--bg);
       margin: 0 auto; max-width: 1100px; padding: 18px 24px 40px; overflow-wrap: anywhere; }}
h1 {{ font-size: 20px; font-weight: 600; margin: 0; }} \
h2 {{ font-size: 15px; font-weight: 600; margin: 28px 0 10px; }}
a {{ color: var(--accent); }} .note {{ color: var(--muted); }} .big {{ font-size: 18px; }} \
.big b {{ color: var(--accent); }}
table {{ border-collapse: collapse; width: 100%; display: block; overflow-x: auto; }}
th {{ text-align: left; color: var(--muted); font-weight: 500; }}
td, th {{ padding: .35em .7em; border-bottom: 1px solid var(--line); vertical-align: top; \
min-width: 3em; }}
td.number, th.number {{ text-align: right; font-variant-numeric: tabular-nums; \
white-space: nowrap; overflow-wrap: normal; }}
code, pre {{ font: 13px/1.4 ui-monospace, "SF Mono", Menlo, Consolas, monospace; }}
pre {{ margin: 0; white-space: pre-wrap; min-width: 12em; }} \
details pre {{ background: var(--panel); padding: 1em; }}
.curves {{ overflow-x: auto; }} .curves img {{ width: 100%; min-width: 680px; }}
.finding {{ background: var(--panel); border-left: 3px solid var(--good); \
border-radius: 0 6px 6px 0; padding: 10px 14px;
           margin: 8px 0; }}
.finding.watch {{ border-color: var(--watch); }} .finding.bad {{ border-color: var(--bad); }} \
.finding p {{ margin: 2px 0 0; }}
.good {{ color: var(--good); }} .bad {{ color: var(--bad); }}
@media (prefers-color-scheme: dark) {{ .curves img {{ filter: invert(.91) hue-rotate(180deg); }} }}
@media (max-width: 600px) {{ body {{ padding: 12px 12px 32px; }} \
td, th {{ padding: .35em .4em; }} }}
"""
