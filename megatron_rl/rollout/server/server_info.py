"""The report of a running SGLang server about itself, and checks that this run can use it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from packaging.version import InvalidVersion, Version

from megatron_rl.config import RolloutConfig
from megatron_rl.config.device_limits import PROBE_SECONDS
from megatron_rl.config.sglang_settings import accepted, broadcast_problem, problems, read_settings
from megatron_rl.config.versions import least
from megatron_rl.models.spec import ModelSizes

Json = dict[str, Any]
"""A JSON object: a server's answer, or a checkpoint's config.json."""

OLDEST_WITH_ROUTES = least("sglang")
"""The oldest usable version: older servers return physical expert ids (up to 0.5.9), or do not
encode them without a tokenizer (0.5.10)."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")
ROUTER_PATHS = ("/workers", "/list_workers")
IF_PAUSED = (
    "a run that ended during a weight sync leaves a server paused: POST /continue_generation to it,"
    " or start the next run"
)


class ServerError(RuntimeError):
    """An SGLang server cannot be started, reached or used; the message names it."""


class AdapterSlots(NamedTuple):
    """Settings of a server about low-rank adapters, under SGLang's names."""

    enable_lora: bool | None = None
    max_lora_rank: int | None = None
    lora_target_modules: Sequence[str] | None = None
    max_loras_per_batch: int | None = None
    max_loaded_loras: int | None = None


@dataclass(frozen=True)
class ServerInfo:
    """Report of one server about itself.

    Values of its checkpoint come from the files at its model path and are None where this machine
    cannot read them.
    """

    url: str
    version: str
    model_path: str
    dtype: str
    weight_version: str
    routed_experts: bool
    """It was started with --enable-return-routed-experts."""
    route_width: int | None
    """Layers x top-k in its answer to a one-token prompt; None without routed_experts."""
    num_layers: int | None
    """From config.json, as are the next three."""
    num_experts: int | None
    top_k: int | None
    vocab_size: int | None
    tokenizer: str | None = None
    """tokenizer_digest() of the model path."""
    settings: Mapping[str, object] = field(default_factory=dict)
    """Its settings that have a verdict in config/sglang_settings.toml."""
    max_input_tokens: int | None = None
    """Its max_req_input_len: longer inputs exceed its context or its KV cache."""
    token_versions: bool = False
    """Its answers name the weight version of every token."""
    slots: AdapterSlots = field(default_factory=AdapterSlots)


def server_info(
    url: str,
    headers: dict[str, str] | None = None,
    *,
    timeout: float = PROBE_SECONDS["cpu"],
    resume: bool = False,
) -> ServerInfo:
    """Ask the server at `url`, which must not be paused, about itself.

    timeout: seconds of each request.
    resume: first resume a server that a run paused and that ended during a weight sync.  Its
    weights may be half-updated, so only a caller that sends all weights before it samples may do
    this.

    Raises ServerError when the server does not answer as SGLang does.
    """
    with httpx.Client(base_url=url, headers=headers, timeout=timeout, trust_env=False) as http:
        check_no_router(http)
        if resume:  # without effect on a server that is not paused
            ask(http, "POST", "/continue_generation", {})
        model = ask(http, "GET", "/model_info")
        server = ask(http, "GET", "/server_info")
        routed = bool(server.get("enable_return_routed_experts"))
        meta = sample_one_token(http, {"temperature": 0.0}, return_routed_experts=routed)
    # the path that the server was started on: /model_info's changes with every weight sync through
    # the disk
    model_path = str(server.get("model_path"))
    config = read_served_config(Path(model_path))
    return ServerInfo(
        url=url,
        version=str(server.get("version")),
        model_path=model_path,
        dtype=resolved_dtype(str(server.get("dtype")), config),
        weight_version=str(model.get("weight_version")),
        routed_experts=routed,
        route_width=route_width(meta) if routed else None,
        num_layers=config.get("num_hidden_layers"),
        # the key depends on the family: Qwen, Mixtral, DeepSeek
        num_experts=config.get("num_experts")
        or config.get("num_local_experts")
        or config.get("n_routed_experts"),
        top_k=config.get("num_experts_per_tok"),
        vocab_size=config.get("vocab_size"),
        tokenizer=tokenizer_digest(Path(model_path)),
        settings=read_settings(server),
        max_input_tokens=server.get("max_req_input_len"),
        token_versions="weight_versions" in meta,
        slots=AdapterSlots(*(server.get(name) for name in AdapterSlots._fields)),
    )


def longest_input(infos: Sequence[ServerInfo]) -> int | None:
    """Return the number of tokens that every server takes as input, None where none tells."""
    reported = (info.max_input_tokens for info in infos)
    return min((tokens for tokens in reported if tokens is not None), default=None)


def check_server(
    info: ServerInfo,
    spec: ModelSizes,
    *,
    want_routes: bool,
    dtype: str | None = None,
    tokenizer: str | None = None,
) -> None:
    """Raise ServerError unless the server has the model of `spec`, and the `dtype` and `tokenizer`
    digest unless they are None.
    """
    if want_routes:
        check_returned_routes(info, spec)
    expected = {
        "layers": (info.num_layers, spec.num_layers),
        "experts": (info.num_experts, spec.num_experts),
        "experts per token": (info.top_k, spec.top_k),
        "vocabulary size": (info.vocab_size, spec.vocab_size),
        "layers x experts per token": (info.route_width, spec.num_layers * spec.top_k),
        "dtype": (info.dtype, dtype),
        "tokenizer digest": (info.tokenizer, tokenizer),
    }
    # None: this machine cannot read the server's value, or the caller does not ask for it
    for what, (theirs, ours) in expected.items():
        if theirs is not None and ours is not None and theirs != ours:
            raise ServerError(
                f"SGLang server {info.url} (model {info.model_path}) has {what} = {theirs}, this"
                f" run needs {ours}: start the server with the checkpoint and dtype of this run"
            )


def check_settings(
    info: ServerInfo, rollout: RolloutConfig, *, want_routes: bool, gets_weights: bool = True
) -> None:
    """Raise ServerError for a setting that may make expert ids, log-probs or weights wrong.

    gets_weights: this run sends weights to the server.
    """
    allowed = rollout.allow_unproven
    if gets_weights and rollout.weight_sync == "adapter":
        allowed = (*allowed, "enable_lora")  # adapter_slots.py checks what this run needs of it
    wrong = list(problems(info.settings, allowed, needs_routes=want_routes))
    is_broadcast = gets_weights and rollout.weight_sync != "disk"
    if is_broadcast and (problem := broadcast_problem(info.settings)):
        wrong.append(problem)
    if wrong:
        raise ServerError("\n".join(f"SGLang server {info.url} has {text}" for text in wrong))


def check_in_place(info: ServerInfo, rollout: RolloutConfig) -> None:
    """Raise ServerError if rollout.weight_update = in_place and the server's requests must not
    continue under other weights.
    """
    if rollout.weight_update != "in_place":
        return
    fix = "or set rollout.weight_update = abort"
    if not info.token_versions:
        raise ServerError(
            f"SGLang server {info.url} is version {info.version}, whose answers have no"
            " weight_versions: rollout.weight_update = in_place needs the weight version of every"
            f" token; upgrade it to SGLang 0.5.19 or newer, {fix}"
        )
    is_disabled = info.settings.get("disable_overlap_schedule")
    if is_disabled is not True:
        raise ServerError(
            f"SGLang server {info.url} has disable_overlap_schedule = {json.dumps(is_disabled)}:"
            " must be true with rollout.weight_update = in_place, as a token that the old weights"
            " sampled just before the server pauses is otherwise reported as the new weights';"
            f" start it with --disable-overlap-schedule, {fix}"
        )


def accepted_lines(
    infos: Sequence[ServerInfo], rollout: RolloutConfig, *, want_routes: bool
) -> list[str]:
    """Return one line for each unproven setting that rollout.allow_unproven accepts, with the
    servers that have it.
    """
    urls: dict[str, list[str]] = {}
    for info in infos:
        for line in accepted(info.settings, rollout.allow_unproven, needs_routes=want_routes):
            urls.setdefault(line, []).append(info.url)
    return [f"{line} ({', '.join(servers)})" for line, servers in urls.items()]


def check_returned_routes(info: ServerInfo, spec: ModelSizes) -> None:
    """Raise ServerError unless the server returns expert ids in a form that this run can read."""
    if not info.routed_experts:
        raise ServerError(
            f"SGLang server {info.url} was started without --enable-return-routed-experts and would"
            " leave the expert ids out without an error: restart it with that option, or set"
            " replay.mode = none or R2 and replay.measure = false"
        )
    if info.route_width == 0:  # the server returns ids, but not to this client
        raise ServerError(
            f"SGLang server {info.url} runs with --enable-return-routed-experts, but its answer to"
            " a request for expert ids has none, and this run needs"
            f" {spec.num_layers * spec.top_k} per token: something in front of the server drops"
            " return_routed_experts, as sglang-router does; put the servers' own URLs into"
            " rollout.urls"
        )
    try:
        too_old = Version(info.version) < OLDEST_WITH_ROUTES
    except InvalidVersion:  # a private build, which the checks of its answers have to judge
        return
    if too_old:
        raise ServerError(
            f"SGLang server {info.url} is version {info.version}, expert ids need"
            f" {OLDEST_WITH_ROUTES} or newer: older ones return physical ids, or do not encode"
            " them; upgrade it"
        )


def check_identical(infos: Sequence[ServerInfo]) -> None:
    """Raise ServerError unless all servers have the same version and precision: mu must be one
    distribution.
    """
    for info in infos[1:]:
        for what in ("version", "dtype"):
            ours, theirs = getattr(infos[0], what), getattr(info, what)
            if ours != theirs:
                raise ServerError(
                    f"SGLang server {info.url} has {what} = {theirs}, {infos[0].url} has {ours}:"
                    " they must be the same in a run; start both with one SGLang and one --dtype"
                )


def check_no_router(http: httpx.Client) -> None:
    """Raise ServerError when a router answers instead of a server: it has workers, but no weights
    and versions.
    """
    try:
        if http.get("/model_info").status_code != 404:
            return
        router_paths = [path for path in ROUTER_PATHS if http.get(path).status_code == 200]
    except httpx.HTTPError as error:
        raise ServerError(
            f"SGLang server {http.base_url} did not answer /model_info: {error!r}"
        ) from error
    if router_paths:
        raise ServerError(
            f"{http.base_url} is a router in front of SGLang servers (it answers {router_paths[0]},"
            " not /model_info): weights, versions and cache flushes must reach every server, and"
            " sglang-router drops return_routed_experts; put the servers' own URLs into"
            " rollout.urls"
        )


def tokenizer_digest(path: Path) -> str | None:
    """Return the first 16 hex digits of the sha256 of the tokenizer's files in a checkpoint, or
    None where none can be read.
    """
    digest, is_read = hashlib.sha256(), False
    for name in TOKENIZER_FILES:
        try:
            content = (path / name).read_bytes()
        except OSError:
            continue
        is_read = True
        # with name and length: moving bytes between files changes the digest
        digest.update(name.encode() + len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()[:16] if is_read else None


def auth_headers(rollout: RolloutConfig, setting: str = "rollout.api_key_env") -> dict[str, str]:
    """Return the Authorization header for the servers, {} without an api_key_env.

    setting: its name in messages.  Raises ValueError if that variable is unset or empty.
    """
    if rollout.api_key_env is None:
        return {}
    key = os.environ.get(rollout.api_key_env)
    if not key:
        raise ValueError(
            f"{setting} = {rollout.api_key_env!r}: that environment variable is unset or"
            " empty; set it to the servers' API key, or remove the setting"
        )
    return {"Authorization": f"Bearer {key}"}


def ask(http: httpx.Client, method: str, path: str, body: Json | None = None) -> Json:
    """Return the answer to one request.

    Raises ServerError, without the API key, where it is not a JSON object with status 200.
    """
    try:
        response = http.request(method, path, json=body)
    except httpx.HTTPError as error:
        may_be_paused = path == "/generate" and isinstance(error, httpx.ReadTimeout)
        hint = f"; {IF_PAUSED}" if may_be_paused else ""
        raise ServerError(
            f"SGLang server {http.base_url} did not answer {path}: {error!r}{hint}"
        ) from error
    if response.status_code in (401, 403):
        raise ServerError(
            f"SGLang server {http.base_url} refused {path}: rollout.api_key_env must name its"
            " API key"
        )
    try:
        answer = response.json()
    except ValueError:
        answer = None
    if response.status_code != 200 or not isinstance(answer, dict):
        # /server_info repeats the server's arguments, key included
        key = http.headers.get("Authorization", "").removeprefix("Bearer ")
        text = response.text.replace(key, "***")[:500] if key else response.text[:500]
        raise ServerError(
            f"{http.base_url}{path} answered {response.status_code}: {text!r}; is it an SGLang"
            " server?"
        )
    return answer


def sample_one_token(http: httpx.Client, sampling_params: Json, **body: object) -> Json:
    """Sample one token after a one-token prompt and return its meta_info."""
    params = {**sampling_params, "max_new_tokens": 1, "ignore_eos": True}
    # token 0 is in every vocabulary; an end token must not leave the answer empty
    answer = ask(http, "POST", "/generate", {"input_ids": [0], "sampling_params": params, **body})
    return answer.get("meta_info", {})


def route_width(meta: Json) -> int:
    """Return layers x top-k, from the routes of the only row of a one-token prompt."""
    payload = meta.get("routed_experts") or ""
    return len(payload.rstrip("=")) * 3 // 4 // 4  # base64 characters -> bytes -> int32


def read_served_config(model_path: Path) -> Json:
    """Return config.json of a checkpoint, {} where this machine cannot read it (a remote server's
    path).
    """
    try:
        config = json.loads((model_path / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    # multimodal checkpoints nest the language model's config
    return config.get("text_config", config)


def resolved_dtype(dtype: str, config: Json) -> str:
    """Return the dtype that SGLang's --dtype resolves to; its auto serves a float32 checkpoint in
    float16.
    """
    if dtype != "auto":
        return {"half": "float16", "float": "float32"}.get(dtype, dtype)
    stored = config.get("dtype") or config.get("torch_dtype")
    return "auto" if stored is None else {"float32": "float16"}.get(stored, str(stored))


def served_dtype(dtype: str, checkpoint: Path) -> str:
    """Return the dtype that a server of `checkpoint` computes in, for the one that it reports.

    It reports auto where this machine cannot read its files: then they are those of `checkpoint`.
    """
    resolved = resolved_dtype(dtype, read_served_config(checkpoint))
    # SGLang takes a checkpoint that names no dtype for float32
    return resolved_dtype("auto", {"dtype": "float32"}) if resolved == "auto" else resolved
