"""The name of a weight version, as servers report it with every token: of the run that pushed it.

Versions of a run count its updates, so two runs have the same ones: by the number alone each would
take tokens that the other's weights sampled for its own, should both push to the same servers.
"""

import secrets


def new_run_name() -> str:
    """Another one for every start of a run."""
    return secrets.token_hex(4)


def version_name(version: int, run: str) -> str:
    """run: "" for weights of no run, such as those that a server was started with."""
    return f"{version}@{run}" if run else str(version)


def updating(name: str) -> str:
    """What a server reports from the start of a weight sync to its end: no sample can have it,
    should the sync fail.
    """
    return f"updating to {name}"


def read_version_name(name: str) -> tuple[int, str]:
    """(version, run).  Raises ValueError for a name that is none."""
    version, _, run = name.partition("@")
    if not version.isdecimal() or version_name(int(version), run) != name:
        raise ValueError(f"weight version {name!r}: must be an integer, or INTEGER@RUN")
    return int(version), run
