"""The server's half: what it reports about itself, what it samples, and the same tokens again in
one forward.

Everything goes through SGLang's HTTP API.  Nothing on the server is changed, and no cache flushed.
Shapes: S tokens of a sequence, R sampled, L MoE layers, K top-k, H hidden.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import numpy as np

from megatron_rl.config import RolloutConfig
from megatron_rl.config.sglang_settings import reason, unusual, verdict
from megatron_rl.models.spec import ModelSpec
from megatron_rl.records import Rollout
from megatron_rl.rollout.client.response import parse_routes
from megatron_rl.rollout.client.sample_fields import SampleDropped, parse_logprobs, parse_tokens
from megatron_rl.rollout.server.sampling_defaults import FULL_SOFTMAX
from megatron_rl.rollout.server.server_info import (
    Json,
    ServerError,
    ServerInfo,
    ask,
    auth_headers,
    check_server,
    read_served_config,
    server_info,
)

REQUEST_SECONDS = 600.0


@dataclass(frozen=True)
class ServerFacts:
    """A server's report about itself."""

    info: ServerInfo
    device: str
    config: Json
    """The config.json that it computes, with its overrides; {} if its checkpoint is not here."""
    weights_path: Path | None
    """The checkpoint that it loaded last; None if that cannot be read here."""
    page_size: int
    """Tokens of a page of the KV cache."""
    chunk_size: int | None
    """Tokens of a prefill chunk; None for prefill in one piece."""
    returns_hidden: bool
    unusual: tuple[str, ...]
    """Its refused and unproven settings, as text."""


@dataclass(frozen=True)
class Fresh:
    """The server's values of the same tokens in one forward, without the prefix cache."""

    logprobs: np.ndarray
    """Log-probs of the sampled tokens at temperature 1, float32 [R]."""
    routes: np.ndarray | None
    """Expert ids, uint8 | int16 [S - 1, L, K]."""
    missing_routes: np.ndarray | None
    """bool [S - 1], the rows without a route; None where every row has one."""
    hidden: np.ndarray | None
    """Hidden states after the last norm, float32 [S, H]; None if the server returns none."""


class ServerSide:
    """A client of one server.

    Raises ServerError, which names the server, for answers that it cannot use.
    """

    def __init__(
        self, url: str, rollout: RolloutConfig, spec: ModelSpec, *, want_routes: bool
    ) -> None:
        self.url, self.rollout, self.spec = url, rollout, spec
        headers = auth_headers(rollout)
        info = server_info(url, headers, timeout=rollout.probe_seconds("cpu"))
        if want_routes and not info.route_width:
            raise ServerError(
                f"SGLang server {url} returns no expert ids (enable_return_routed_experts ="
                f" {info.routed_experts}): they must come back to be compared; restart it with"
                " --enable-return-routed-experts, name its own address, not a router's, or compare"
                " without them: --no-routes"
            )
        check_server(replace(info, route_width=info.route_width or None), spec, want_routes=False)
        self.want_routes = want_routes
        self.http = httpx.Client(
            base_url=url, headers=headers, timeout=REQUEST_SECONDS, trust_env=False
        )
        self.facts = self._read_facts(info)

    def close(self) -> None:
        self.http.close()

    def sample(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, *, per_prompt: int = 2
    ) -> list[Rollout]:
        """Sample `per_prompt` responses to each prompt.

        All but the first find the prompt in the prefix cache, as in training.
        """
        rollouts = []
        for number, prompt in enumerate(prompts):
            for copy in range(per_prompt):
                rollouts.append(self._sample(f"p{number}/{copy}", prompt, max_tokens))
        return rollouts

    def fresh(self, rollout: Rollout) -> Fresh:
        """Compute all tokens in one forward.

        A server that returns log-probs of input tokens computes them all, cached or not.
        """
        tokens = rollout.tokens.tolist()
        body: Json = {
            "input_ids": tokens,
            "sampling_params": {
                **FULL_SOFTMAX,
                "temperature": 1.0,
                "max_new_tokens": 1,
                "ignore_eos": True,
            },
            "return_logprob": True,
            "logprob_start_len": 0,
            "return_routed_experts": self.want_routes,
            "return_hidden_states": self.facts.returns_hidden,
        }
        meta = ask(self.http, "POST", "/generate", body).get("meta_info", {})
        entries = meta.get("input_token_logprobs")
        if not isinstance(entries, list) or len(entries) != len(tokens):
            raise ServerError(
                f"SGLang server {self.url}: input_token_logprobs must have {len(tokens)} entries,"
                " one for each token that was sent; is something in front of the server that drops"
                " logprob_start_len?"
            )
        logprobs = np.array([entries[place][0] for place in rollout.sampled], np.float32)
        routes, missing = None, None
        if self.want_routes:
            try:
                routes, missing = parse_routes(meta, rollout.id, len(tokens) + 1, self.spec)
            except SampleDropped as error:
                raise ServerError(f"SGLang server {self.url}: {error}") from error
            rows = len(tokens) - 1  # without the row of the token sampled here
            routes, missing = routes[:rows], None if missing is None else missing[:rows]
        return Fresh(logprobs, routes, missing, self._hidden(meta, len(tokens)))

    def checksums(self) -> list[dict[str, str]]:
        """Return name -> checksum of a tensor for every rank; [] if the server has none that
        compare with ours.
        """
        if self.facts.device != "cpu":
            return []  # a GPU hashes in another way: weights/sync/checksums.py
        body = {"action": "checksum", "selector": "target"}
        answer = self.http.post("/weights_checker", json=body)
        if answer.status_code != 200:
            return []
        return [rank["checksums"] for rank in answer.json().get("ranks") or []]

    def _read_facts(self, info: ServerInfo) -> ServerFacts:
        server = ask(self.http, "GET", "/server_info")
        model = ask(self.http, "GET", "/model_info")
        config = read_served_config(Path(info.model_path))
        if config:
            config = config | json.loads(server.get("json_model_override_args") or "{}")
        loaded = Path(str(model.get("model_path") or info.model_path))
        marked = [
            f"{setting.name} = {value} ({verdict(setting, value)}: {reason(setting, value)})"
            for setting, value in unusual(info.settings, needs_routes=True)
            if verdict(setting, value) != "proven"
        ]
        chunk = server.get("chunked_prefill_size")
        return ServerFacts(
            info=info,
            device=str(server.get("device")),
            config=config,
            weights_path=loaded if any(loaded.glob("*.safetensors")) else None,
            page_size=int(server.get("page_size") or 1),
            chunk_size=chunk if isinstance(chunk, int) and chunk > 0 else None,
            returns_hidden=bool(server.get("enable_return_hidden_states")),
            unusual=tuple(marked),
        )

    def _sample(self, name: str, prompt: Sequence[int], max_tokens: int) -> Rollout:
        params = {
            **FULL_SOFTMAX,
            "temperature": self.rollout.temperature,
            "max_new_tokens": max_tokens,
            "ignore_eos": True,
        }
        body: Json = {
            "input_ids": list(prompt),
            "sampling_params": params,
            "return_logprob": True,
            "return_routed_experts": self.want_routes,
        }
        answer = ask(self.http, "POST", "/generate", body)
        meta = answer.get("meta_info", {})
        try:
            response = parse_tokens(answer, meta, self.spec.vocab_size, max_tokens)
            logprobs = parse_logprobs(meta, response)
            routes, missing = None, None
            if self.want_routes:
                routes, missing = parse_routes(meta, name, len(prompt) + len(response), self.spec)
        except SampleDropped as error:
            raise ServerError(
                f"SGLang server {self.url}: its answer cannot be used: {error}"
            ) from error
        rollout = Rollout(
            id=name,
            tokens=np.concatenate([np.array(prompt, np.int64), response]),
            prompt_length=len(prompt),
            rollout_logprobs=logprobs,
            routed_experts=routes,
            finish_reason="length",
            policy_versions=np.zeros(len(response), np.int32),
        )
        return replace(rollout, missing_routes=missing)

    def _hidden(self, meta: Json, length: int) -> np.ndarray | None:
        """Return the rows of the prompt's forward, float32 [S, H].

        SGLang returns a list of rows for each forward; the prompt's is the first.
        """
        states = meta.get("hidden_states")
        if not isinstance(states, list) or not states:
            return None
        rows = np.array(states[0], np.float32)
        return rows[:length] if rows.ndim == 2 and len(rows) >= length else None


def connect_to_server(
    url: str, rollout: RolloutConfig, spec: ModelSpec, *, want_routes: bool
) -> ServerSide:
    """Connect, or raise ServerError with what to do if no server of this model answers at `url`."""
    try:
        return ServerSide(url, rollout, spec, want_routes=want_routes)
    except ServerError as error:
        raise ServerError(
            f"--url {url}: {error}\nMust be a running SGLang server of the model in --model"
        ) from error
    except httpx.InvalidURL as error:
        raise ServerError(f"--url {url}: {error}; must be such as http://HOST:PORT") from error
