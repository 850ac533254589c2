"""Checks that servers sample from the distribution whose log-probs the trainer computes.

That is softmax(logits / temperature) over the entire vocabulary, or over the kept set of each token
(rollout.top_p, top_k, min_p), which the server must return.  With a penalty in mu, pi/mu would be
wrong.  Every request states everything that shapes the distribution (in SGLang a request's value
overrides the server's).  A server is refused that adds what a request does not state, or that
reports log-probs of another temperature than it samples at.
"""

from __future__ import annotations

from collections.abc import Sequence

import httpx

from megatron_rl.config import RolloutConfig
from megatron_rl.config.device_limits import Device
from megatron_rl.config.sections.rollout import Truncation
from megatron_rl.rollout.server.server_info import (
    Json,
    ServerError,
    ask,
    auth_headers,
    sample_one_token,
)

FULL_SOFTMAX = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "min_new_tokens": 0,
    "ignore_eos": False,
}
"""Parameters with which /generate samples from the full softmax."""

STATED = {*FULL_SOFTMAX, "n", "temperature", "max_new_tokens", "stop_token_ids"}
"""Sampling parameters that every request states."""
TEXT_ONLY = {
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "no_stop_trim",
    "stream_interval",
}
"""Sampling parameters that change only the text, which is not used: tokens are."""
PROBE_TOKENS = 16
"""Number of tokens whose log-probs are compared between two temperatures."""


def check_sampling(
    url: str, rollout: RolloutConfig, *, vocab_size: int, device: Device = "cpu"
) -> None:
    """Probe the server at `url`, which must not be paused.

    device: the run's, which determines rollout.probe_timeout_seconds.

    Raises ServerError when mu would not be the trainer's softmax.
    """
    with httpx.Client(
        base_url=url,
        headers=auth_headers(rollout),
        timeout=rollout.probe_seconds(device),
        trust_env=False,
    ) as http:
        check_preferred(url, ask(http, "GET", "/model_info").get("preferred_sampling_params"))
        if rollout.truncation is not None:
            check_masks(http, rollout.truncation)
        if rollout.temperature == 1.0:  # both kinds of log-probs are the same
            return
        plain, scaled = (
            probe_logprobs(http, temperature, vocab_size=vocab_size)
            for temperature in (1.0, rollout.temperature)
        )
    if not is_scaled(plain, scaled, rollout.temperature):
        raise ServerError(
            f"SGLang server {url} reports log-probs of temperature 1 for tokens sampled at"
            f" rollout.temperature = {rollout.temperature:g}: they must be those of the sampled"
            " distribution; start it without SGLANG_RETURN_ORIGINAL_LOGPROB, or set"
            " rollout.temperature = 1"
        )


def check_masks(http: httpx.Client, truncation: Truncation) -> None:
    """Raise ServerError unless the server returns the kept set of a token sampled with
    `truncation`.

    The server itself refuses what it cannot do, with the reason: a larger top_k than
    --sampling-mask-max-tokens, speculative decoding, the ascend sampling backend.  A version that
    does not know the request answers without a set.
    """
    needs = (
        f"rollout.top_p = {truncation.top_p:g}, top_k = {truncation.top_k}, min_p ="
        f" {truncation.min_p:g} need the kept set of every token from the server"
        " (return_sampling_mask)"
    )
    fix = "change the server's options, or remove the three keys"
    try:
        meta = sample_one_token(
            http, {**FULL_SOFTMAX, **truncation._asdict()}, return_sampling_mask=True
        )
    except ServerError as error:
        raise ServerError(f"{error}; {needs}: {fix}") from error
    sets = meta.get("output_token_sampling_mask")
    logprobs = meta.get("output_token_sampling_logprobs")
    if not all(isinstance(values, list) and len(values) == 1 for values in (sets, logprobs)):
        reason = meta.get("finish_reason")
        raise ServerError(
            f"SGLang server {http.base_url} returned no kept set ({reason}): {needs}; upgrade it to"
            " SGLang 0.5.16 or newer, or remove the three keys"
        )


def check_preferred(url: str, preferred: Json | None) -> None:
    """Raise ServerError for a preferred sampling parameter of the server that applies to our
    requests and changes the distribution.
    """
    added = {
        key: value
        for key, value in (preferred or {}).items()
        if key not in STATED | TEXT_ONLY and value is not None
    }
    if added:
        raise ServerError(
            f"SGLang server {url} adds {added} to every request (--preferred-sampling-params): the"
            " trainer computes log-probs of softmax(logits / temperature) over the entire"
            " vocabulary; start the server without it"
        )


def probe_logprobs(http: httpx.Client, temperature: float, *, vocab_size: int) -> list[float]:
    """Return log-probs of PROBE_TOKENS tokens, spread over the vocabulary, after a one-token
    prompt.
    """
    # not the sampled token, which differs between temperatures
    ids = sorted({index * vocab_size // PROBE_TOKENS for index in range(PROBE_TOKENS)})
    params = {**FULL_SOFTMAX, "temperature": temperature}
    meta = sample_one_token(http, params, return_logprob=True, token_ids_logprob=ids)
    try:
        return [float(entry[0]) for entry in meta["output_token_ids_logprobs"][0]]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ServerError(
            f"{http.base_url}generate returned no log-probs of the tokens in token_ids_logprob:"
            f" {error!r}"
        ) from error


def is_scaled(plain: Sequence[float], scaled: Sequence[float], temperature: float) -> bool:
    """Return True if differences of log-probs are divided by the temperature:
    log p_T(a) - log p_T(b) = (log p(a) - log p(b)) / T.

    The nearer of two hypotheses decides, scaled or equal: servers have the noise of their
    precision.
    """
    differences = [(a - plain[0], b - scaled[0]) for a, b in zip(plain, scaled, strict=True)]
    if_scaled = sum(abs(a / temperature - b) for a, b in differences)
    if_equal = sum(abs(a - b) for a, b in differences)
    return if_scaled <= if_equal
