"""The name of a weight version, as servers report it with every token: the version, and its run.

Versions count the updates of a run, so two runs have the same ones.  If both pushed to the same
servers, by the number alone each run would take tokens that the other's weights sampled for its
own.
"""

import secrets


def new_run_name() -> str:
    """Return a new name for every start of a run."""
    return secrets.token_hex(4)


def version_name(version: int, run: str) -> str:
    """Return "VERSION@RUN", or "VERSION" where `run` is "".

    Weights that a server was started with belong to no run.
    """
    return f"{version}@{run}" if run else str(version)


def updating(name: str) -> str:
    """Return what a server reports from the start of a weight sync to its end.

    No sample can have it, should the sync fail.
    """
    return f"updating to {name}"


def read_version_name(name: str) -> tuple[int, str]:
    """Return (version, run).  Raises ValueError for text that is no version's name."""
    version, _, run = name.partition("@")
    if not version.isdecimal() or version_name(int(version), run) != name:
        raise ValueError(f"weight version {name!r}: must be an integer, or INTEGER@RUN")
    return int(version), run
