"""Says what is installed on this machine, what is missing for which use, and what to do about it.

    python -m tools.doctor [--config FILE.toml] [--url http://HOST:PORT ...]

One line per check: OK, WARN (works, with a limit that the line names) or FAIL (does not), with a remedy under it.
Exit status 1 when anything is FAIL.  Nothing is started and nothing is written.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Literal

import psutil
from packaging.version import InvalidVersion, Version
from rich.console import Console
from rich.text import Text

from megatron_rl.config import Config, ConfigError, load_config

Status = Literal["OK", "WARN", "FAIL"]
STYLES = {"OK": "bold green", "WARN": "bold yellow", "FAIL": "bold red"}
TESTED = {  # what the test suite runs with, per Python version
    (3, 11): {"megatron-core": "0.16.1", "sglang": "0.5.21", "torch": "2.13.0", "transformers": "5.12.1"},
    (3, 12): {"megatron-core": "0.19.2", "sglang": "0.5.21", "torch": "2.13.0", "transformers": "5.12.1"},
}
LEAST_SGLANG = Version("0.5.21")
SERVER_FLAGS = ("enable_return_routed_experts", "sleep_on_idle")
OPTIONAL = (  # package, module, what happens without it
    ("transformer-engine", "transformer_engine", "layers run on plain torch (model.layer_spec = local)"),
    ("apex", "apex", "the optimizer runs on torch's Adam"),
)
LEAST_MEMORY_GB = 6.0  # the demo: two ranks and three server processes


@dataclass(frozen=True)
class Check:
    """One line of the report; `remedy` is empty for OK."""

    status: Status
    name: str
    found: str
    remedy: str = ""


def diagnose(config: Path | None, urls: Sequence[str], api_key_env: str | None) -> Iterator[tuple[str, list[Check]]]:
    """Yield (section title, checks), cheap ones first."""
    yield "Machine", [*check_platform(), check_memory(), check_shared_memory(), check_hostname(), check_loopback_port()]
    yield "Packages", [*check_packages(), *check_accelerators()]
    yield "SGLang options", check_server_flags()
    cfg: Config | None = None
    if config is not None:
        cfg, checks = check_config(config)
        yield f"Configuration {config}", checks
    key_name = api_key_env or (cfg.rollout.api_key_env if cfg else None)
    for url in dict.fromkeys([*urls, *(cfg.rollout.urls if cfg else ())]):
        yield f"Server {url}", check_url(url, key_name, wants_routes=cfg is None or cfg.needs_routes)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tools.doctor", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--config", type=Path, help="also check that this configuration can run here")
    parser.add_argument("--url", action="append", default=[], help="also ask this SGLang server; may be repeated")
    parser.add_argument("--api-key-env", help="environment variable with the servers' API key")
    arguments = parser.parse_args(argv)
    console = Console(highlight=False, soft_wrap=True)
    counts = dict.fromkeys(STYLES, 0)
    for title, checks in diagnose(arguments.config, arguments.url, arguments.api_key_env):
        console.print(Text(f"\n{title}", style="bold"))
        for check in checks:
            counts[check.status] += 1
            console.print(line(check))
    console.print(f"\n{counts['OK']} OK, {counts['WARN']} WARN, {counts['FAIL']} FAIL")
    return 1 if counts["FAIL"] else 0


def line(check: Check) -> Text:
    text = Text.assemble("  ", (f"{check.status:<5}", STYLES[check.status]), f"{check.name:<31}", check.found)
    if check.remedy:
        text.append(f"\n         -> {check.remedy}", style="dim" if check.status == "WARN" else "")
    return text


# Machine ------------------------------------------------------------------------------------------------------------


def check_platform() -> list[Check]:
    found = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    system = (
        Check("OK", "system", found)
        if platform.system() == "Linux"
        else Check("FAIL", "system", found, "SGLang and triton need Linux: use a container or a virtual machine")
    )
    if sys.version_info[:2] in TESTED:
        python = Check("OK", "python", platform.python_version())
    else:
        remedy = "use Python 3.11 or 3.12: make install PYTHON=python3.11"
        python = Check("FAIL", "python", platform.python_version(), remedy)
    return [system, python]


def check_memory() -> Check:
    memory = psutil.virtual_memory()
    found = f"{memory.available / 2**30:.1f} GiB free of {memory.total / 2**30:.1f}"
    if memory.available >= LEAST_MEMORY_GB * 2**30:
        return Check("OK", "memory", found)
    return Check("WARN", "memory", found, f"the demo wants about {LEAST_MEMORY_GB:g} GiB: stop other programs first")


def check_shared_memory() -> Check:
    """NCCL and worker processes exchange data through /dev/shm; containers get 64 MB of it by default."""
    try:
        total = shutil.disk_usage("/dev/shm").total
    except OSError as error:
        return Check("WARN", "/dev/shm", str(error), "mount it: NCCL and SGLang use it")
    found = f"{total / 2**30:.2f} GiB"
    if total >= 2**30:
        return Check("OK", "/dev/shm", found)
    return Check("WARN", "/dev/shm", found, "too small for NCCL: start the container with --ipc=host or --shm-size=16g")


def check_hostname() -> Check:
    """gloo binds to the address that this host's name resolves to unless GLOO_SOCKET_IFNAME names an interface."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    if interface:
        found, known = f"GLOO_SOCKET_IFNAME = {interface}", psutil.net_if_addrs()
        if interface in known:
            return Check("OK", "gloo interface", found)
        return Check("FAIL", "gloo interface", f"{found}: no such interface", f"use one of {', '.join(known)}")
    name = socket.gethostname()
    try:
        return Check("OK", "host name", f"{name} = {socket.gethostbyname(name)}")
    except OSError:
        return Check("WARN", "host name", f"{name} does not resolve", "set GLOO_SOCKET_IFNAME (lo on a single machine)")


def check_loopback_port() -> Check:
    try:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            return Check("OK", "loopback", f"can listen (tried port {probe.getsockname()[1]})")
    except OSError as error:
        return Check("FAIL", "loopback", str(error), "the server and torchrun must be able to listen on 127.0.0.1")


# Packages -----------------------------------------------------------------------------------------------------------


def version_of(package: str) -> str | None:
    """Installed version without importing the package."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def check_packages() -> list[Check]:
    tested = TESTED.get((sys.version_info.major, sys.version_info.minor), TESTED[3, 11])
    checks = [compare_package(package, wanted) for package, wanted in tested.items()]
    names = ", ".join(f"{package} {wanted}" for package, wanted in tested.items())
    if all(check.status == "OK" for check in checks):
        return [*checks, Check("OK", "combination", "the one the test suite runs with")]
    if any(check.status == "FAIL" for check in checks):
        return checks
    return [*checks, Check("WARN", "combination", "not tested", f"tested with this Python: {names}")]


def compare_package(package: str, tested: str) -> Check:
    found = version_of(package)
    if found is None:
        if package == "sglang":
            remedy = "make install, or run servers elsewhere and name them in rollout.urls"
            return Check("WARN", package, "not installed", remedy)
        remedy = f"make install (CPU) or pip install -r requirements.txt (GPU); tested: {tested}"
        return Check("FAIL", package, "not installed", remedy)
    if package == "sglang" and Version(found) < LEAST_SGLANG:
        return Check("FAIL", package, found, f"{LEAST_SGLANG} is the first with begin/end_weight_update: upgrade")
    if Version(found).public == Version(tested).public:
        return Check("OK", package, found)
    return Check("WARN", package, found, f"tested with {tested}")


def check_accelerators() -> list[Check]:
    """The GPU, and what only helps with one: without transformer-engine and apex, torch does their work."""
    try:
        import torch
    except (ImportError, OSError) as error:
        remedy = "make install, or repair the container's torch"
        return [Check("FAIL", "GPU", f"torch cannot be imported: {error}", remedy)]
    if not torch.cuda.is_available():
        return [Check("OK", "GPU", "none: trains and serves on the CPU (run.device = auto or cpu)")]
    devices = ", ".join(sorted({torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}))
    gpu = Check("OK", "GPU", f"{torch.cuda.device_count()} x {devices}, CUDA {torch.version.cuda}")
    return [gpu, *(check_optional(*names) for names in OPTIONAL)]


def check_optional(package: str, module: str, without: str) -> Check:
    found = version_of(package)
    if found is None and util.find_spec(module) is None:
        return Check("WARN", package, "not installed", f"{without}; it comes with the NGC PyTorch container")
    return Check("OK", package, found or "present, version unknown")


def check_server_flags() -> list[Check]:
    """Read SGLang's argument definitions as text: importing them needs a GPU or the CPU launcher's preparations."""
    spec = util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        return [Check("WARN", "sglang", "not installed here", "check the servers themselves with --url")]
    root = Path(next(iter(spec.submodule_search_locations))) / "srt"
    sources = [*root.glob("arg_groups/**/*.py"), root / "server_args.py"]
    text = "\n".join(path.read_text(errors="replace") for path in sources if path.is_file())
    return [check_flag(flag, text) for flag in SERVER_FLAGS]


def check_flag(flag: str, definitions: str) -> Check:
    option = f"--{flag.replace('_', '-')}"
    if f"{flag}:" in definitions or option in definitions:
        return Check("OK", option, "known to the installed SGLang")
    return Check("FAIL", option, "unknown to the installed SGLang", f"install sglang {LEAST_SGLANG} or later")


# Configuration and servers ------------------------------------------------------------------------------------------


def check_config(path: Path) -> tuple[Config | None, list[Check]]:
    """Whether `path` parses, what it names exists, and what it needs can be had here."""
    try:
        cfg = load_config(path, [])
    except ConfigError as error:
        return None, [Check("FAIL", "parse", "refused", str(error))]
    dense = cfg.parallel.tp * cfg.parallel.pp * cfg.parallel.cp
    expert = cfg.parallel.expert_tp * cfg.parallel.ep * cfg.parallel.pp
    checks = [
        Check("OK", "parse", f"{cfg.loss.name}, replay {cfg.replay.mode}, N = {cfg.run.num_mini_batches}"),
        Check("OK", "ranks", f"start a multiple of tp x pp x cp = {dense} and of etp x ep x pp = {expert}"),
        check_file("model.path", cfg.model.path / "config.json"),
        check_file("data.train", cfg.data.train),
        *(check_file(f"eval.sets.{name}", file) for name, file in cfg.eval.sets.items()),
        check_writable(cfg.run_dir),
    ]
    if cfg.rollout.port and not cfg.rollout.urls:
        checks.append(check_port(cfg.rollout.host, cfg.rollout.port))
    key = cfg.rollout.api_key_env
    if key is not None and not os.environ.get(key):
        checks.append(Check("FAIL", "rollout.api_key_env", f"{key} is unset or empty", f"export {key}=..."))
    return cfg, checks


def check_file(key: str, path: Path) -> Check:
    if path.is_file():
        return Check("OK", key, str(path))
    return Check("FAIL", key, f"{path}: no such file", f"set {key}; paths are relative to {Path.cwd()}")


def check_writable(folder: Path) -> Check:
    existing = next(parent for parent in [folder, *folder.absolute().parents] if parent.exists())
    free = f"{shutil.disk_usage(existing).free / 2**30:.1f} GiB free"
    if os.access(existing, os.W_OK):
        return Check("OK", "run directory", f"{folder}, {free}")
    return Check("FAIL", "run directory", f"{existing} is not writable", "choose another run.dir")


def check_port(host: str, port: int) -> Check:
    try:
        with socket.create_server((host, port)):
            return Check("OK", "rollout.port", f"{host}:{port} is free")
    except OSError as error:
        found = f"{host}:{port}: {error.strerror}"
        return Check("FAIL", "rollout.port", found, "use another port, or 0 for a free one")


def check_url(url: str, api_key_env: str | None, *, wants_routes: bool) -> list[Check]:
    from megatron_rl.rollout.handshake import ServerError, server_info  # torch comes with it

    key = os.environ.get(api_key_env, "") if api_key_env else ""
    try:
        info = server_info(url, {"Authorization": f"Bearer {key}"} if key else None)
    except ServerError as error:
        return [Check("FAIL", "answer", str(error), "is the address right, the server up and not paused, the key set?")]
    checks = [
        compare_package_of_server(info.version),
        Check("OK", "model", f"{info.model_path} in {info.dtype}, weight version {info.weight_version}"),
    ]
    if info.routed_experts:
        checks.append(Check("OK", "routed experts", f"{info.route_width} ids a token (layers x experts per token)"))
    else:
        remedy = "restart it with --enable-return-routed-experts: R3 and replay.measure need expert ids"
        checks.append(Check("FAIL" if wants_routes else "WARN", "routed experts", "not returned", remedy))
    return checks


def compare_package_of_server(version: str) -> Check:
    try:
        is_old = Version(version) < LEAST_SGLANG
    except InvalidVersion:
        return Check("WARN", "version", version, f"not a version number; {LEAST_SGLANG} or later is needed")
    if is_old:
        return Check("FAIL", "version", version, f"{LEAST_SGLANG} or later: the weight-update protocol starts there")
    return Check("OK", "version", f"SGLang {version}")


if __name__ == "__main__":
    sys.exit(main())
