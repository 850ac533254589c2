"""A run's status as lines and tables for the terminal."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from megatron_rl.launch.status import STATUS_SECONDS, RankStatus, Status, names
from megatron_rl.metrics.console import clock
from megatron_rl.metrics.step_line import short
from megatron_rl_tools.top.server_loads import Load

DEAD_SECONDS = 5 * STATUS_SECONDS
"""Age of status.json at which a run that has not ended counts as dead."""
SHOWN_RANKS = 16
"""More ranks than these are shown in groups that do the same."""
GIB = 2**30
COLORS = {
    "running": "green",
    "finished": "blue",
    "stopped": "yellow",
    "failed": "red",
    "no heartbeat": "red",
}


def render(
    name: str, status: Status, loads: Sequence[Load], now: float, *, every_rank: bool
) -> RenderableType:
    """Render the status at `now`, in Unix seconds.

    every_rank: whether to show a row for each rank, however many there are.
    """
    age = max(0.0, now - status.time)
    parts: list[RenderableType] = [top_headline(name, status, age), *map(Text, details(status))]
    if status.ranks:
        parts += [Text(), rank_table(status, age if is_live(status, age) else 0.0, every_rank)]
    if loads:
        parts += [Text(), server_table([load for load in loads if not load.problem])]
        parts += [Text(f"{load.url} {load.problem}") for load in loads if load.problem]
    return Group(*parts)


def is_live(status: Status, age: float) -> bool:
    return status.state == "running" and age <= DEAD_SECONDS


def top_headline(name: str, status: Status, age: float) -> Text:
    """Return a line such as `demo  running  step 12/60 ...`, or the time of the last heartbeat."""
    is_dead = status.state == "running" and age > DEAD_SECONDS
    state: str = "no heartbeat" if is_dead else status.state
    since = f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(status.time))} ({clock(age)} ago)"
    line = Text.assemble(
        name, "  ", (state, COLORS[state]), f"  step {status.step}/{status.num_steps}"
    )
    if state == "running":
        line.append(f"  for {clock(status.time - status.started)}")
        if status.step_seconds:
            left = (status.num_steps - status.step) * status.step_seconds
            line.append(f"  {short(status.step_seconds)}s a step, about {clock(left)} left")
    else:
        line.append(f"  since {since}" if state == "no heartbeat" else f"  {since}")
    return line


def details(status: Status) -> Iterator[str]:
    """Yield the last step's metrics, and why the run ended."""
    forms = {
        "rollout/reward_mean": "reward {:.3f}",
        "rollout/tokens_per_second": "rollout {:,.0f} tokens/s",
        "perf/train_tokens_per_second": "train {:,.0f} tokens/s",
        "train/kl_mu_pi": "KL {:+.1e}",
        "routing/router_mismatch": "router_mismatch {:.1%}",
    }
    shown = [
        form.format(status.metrics[name])
        for name, form in forms.items()
        if status.metrics.get(name) is not None
    ]
    if shown:
        yield "  ".join(shown)
    if status.text:
        yield status.text


def rank_table(status: Status, age: float, every_rank: bool) -> Table:
    """Return the table of ranks.

    age: seconds since status.json was written, which a live rank has spent in its stage too.
    """
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("rank", no_wrap=True)
    table.add_column("host", overflow="ellipsis", no_wrap=True, max_width=24)
    table.add_column("stage", overflow="fold")
    for title in ("seconds", "memory"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("waits for", overflow="fold")
    groups = [[rank] for rank in status.ranks]
    if len(groups) > SHOWN_RANKS and not every_rank:
        groups = by_stage(status.ranks)
    for ranks in groups:
        hosts = sorted({rank.host for rank in ranks})
        add_texts(
            table,
            names([rank.rank for rank in ranks]).partition(" ")[2],
            hosts[0] if len(hosts) == 1 else f"{len(hosts)} hosts",
            ranks[0].where,
            short(max(rank.seconds + rank.silent for rank in ranks) + age),
            f"{max(rank.memory for rank in ranks) / GIB:.1f} GiB",
            waits_of(ranks),
        )
    return table


def by_stage(ranks: Sequence[RankStatus]) -> list[list[RankStatus]]:
    """Group the ranks that do the same, the smallest groups first: others may wait for these.

    Silent ranks are in groups of their own.
    """
    groups: dict[tuple[str, bool], list[RankStatus]] = {}
    for rank in ranks:
        groups.setdefault((rank.where, rank.silent > DEAD_SECONDS), []).append(rank)
    return sorted(groups.values(), key=len)


def add_texts(table: Table, *cells: str) -> None:
    """Add a row of plain texts: what ranks say is no markup."""
    table.add_row(*(Text(cell) for cell in cells))


def waits_of(ranks: Sequence[RankStatus]) -> str:
    silent = max(rank.silent for rank in ranks)
    text = next((rank.waits_for for rank in ranks if rank.waits_for), "").replace("http://", "")
    return f"no heartbeat for {clock(silent)}" if silent > DEAD_SECONDS else text


def server_table(loads: Sequence[Load]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("server", overflow="fold")
    for title in ("weights", "tokens/s", "running", "queued", "KV used", "memory"):
        table.add_column(title, justify="right", no_wrap=True)
    for load in loads:
        add_texts(
            table,
            load.url,
            name_of(load.version),
            f"{load.tokens_per_second or 0:,.0f}",
            str(load.running),
            str(load.waiting),
            f"{load.kv_used or 0:.0%}",
            f"{load.memory or 0:.1f} GB",
        )
    return table


def name_of(version: str) -> str:
    """Return a server's version without the run's name: "v4", and "to v5" during a sync."""
    name = version.partition("@")[0]
    number = name.removeprefix("updating to ")
    return f"v{number}" if number == name else f"to v{number}"
