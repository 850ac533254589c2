"""NCCL's environment, in which ranks and servers of one communicator must have the same settings.

rollout.weight_sync = distributed makes a communicator of a rank and the servers.  With NVLink SHARP
(NVLS) its members on one node make a multicast group, and each waits for all others (NCCL's
transport/nvls.cc): a member without NVLS would stop them.  SGLang sets these variables to 0 in its
own process where they are unset (entrypoints/engine.py, 0.5.21); NCCL itself uses NVLS where the
GPUs have it.  A process has one value for all its communicators, so ranks that broadcast to servers
give NVLS up in training, too.  A value that the user sets is used on both sides, and keeps it.

Ranks without such a communicator (disk, colocated, saved rollouts) keep NCCL's own values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence

CUMEM, NVLS = "NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE"
DEFAULTS = {CUMEM: "0", NVLS: "0"}
"""Values that SGLang sets without the options below."""
SET_BY_OPTIONS = {
    "--enable-symm-mem": {CUMEM: "1", NVLS: "1"},
    "--enable-nccl-nvls": {NVLS: "1"},
    "deepep_v2": {CUMEM: "1"},  # of --moe-a2a-backend
}
"""Values that SGLang uses, or needs, with an option."""


def set_defaults(environ: MutableMapping[str, str], server_args: Sequence[str] = ()) -> None:
    """Set what is unset, for a rank that broadcasts to servers or for a server with these options.

    NCCL reads the variables when it first starts.
    """
    for name, value in (DEFAULTS | needed_by(server_args)).items():
        environ.setdefault(name, value)


def needed_by(server_args: Sequence[str]) -> dict[str, str]:
    """Return the variables and values that these options of SGLang set or need."""
    parts = [part for arg in server_args for part in arg.split("=", 1)]
    return {name: value for part in parts for name, value in SET_BY_OPTIONS.get(part, {}).items()}


def check_nccl_of_servers(server_args: Sequence[str], environ: Mapping[str, str]) -> None:
    """Raise ValueError where a server with these options would use other values than a rank.

    `environ` is the environment of the training ranks.
    """
    for name, value in needed_by(server_args).items():
        if (ours := environ.get(name, DEFAULTS[name])) != value:
            raise ValueError(
                f"rollout.server_args = {list(server_args)}: SGLang needs {name} = {value} for"
                f" them, the training ranks have {ours}: must be equal, as both form one NCCL"
                f" communicator; export {name}={value} for the run, or remove the option"
            )


def user_settings(environ: Mapping[str, str]) -> Iterator[str]:
    """Yield one line for each variable that the user has set to another value than the default."""
    for name, value in DEFAULTS.items():
        if (ours := environ.get(name, value)) != value:
            yield (
                f"{name} = {ours}, set by the user (default {value}): servers need the same value;"
                " those of this run get it"
            )
