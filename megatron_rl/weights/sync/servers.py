"""The control endpoints of the SGLang servers for a push of weights.

They are called on all servers in parallel, each with a deadline.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_all
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx

from megatron_rl.config.sglang_settings import (
    KEEPALIVE_SECONDS,
    Values,
    broadcast_problem,
    differences,
    read_settings,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")
Json = dict[str, Any]
Calls = list[Future[Json]]
"""One call for each server, in progress."""
FLUSH_RETRY_SECONDS = 0.02
CONNECT_TIMEOUT_SECONDS = 10.0
TO_LOAD, TO_SERVE = ("weights",), ("cuda_graph", "kv_cache")
"""SGLang's kinds of GPU memory (srt/constants.py) that a server needs to load weights, and only to
serve them."""


class WeightPushError(RuntimeError):
    """New weights did not reach every server, which stay paused.

    The message names server, call and answer.
    """


@dataclass(frozen=True)
class ServerAccess:
    """The servers that a WeightPusher sends to, and how it reaches them."""

    urls: Sequence[str]
    timeout_seconds: float
    """Limit of one call."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """HTTP headers of every call, such as the servers' API key."""
    settings: Mapping[str, Values] | None = None
    """URL -> the server's settings when it was checked, which must not have changed at a later
    push; None: they are not compared."""


class Servers:
    """The control endpoints of all servers."""

    def __init__(
        self, urls: Sequence[str], headers: dict[str, str], timeout_seconds: float
    ) -> None:
        if not urls:
            raise ValueError("at least one server URL is needed")
        self.urls = [url.rstrip("/") for url in urls]
        self.headers = headers
        self.timeout = timeout_seconds
        deadlines = httpx.Timeout(timeout_seconds, connect=CONNECT_TIMEOUT_SECONDS)
        # trust_env: a proxy from the environment must not see the weights
        # one client for all threads: it keeps connections
        # no limit of connections: servers answer some calls only once all of them have theirs
        limits = httpx.Limits(
            max_connections=None,
            max_keepalive_connections=None,
            keepalive_expiry=KEEPALIVE_SECONDS,
        )
        self.http = httpx.Client(headers=headers, timeout=deadlines, limits=limits, trust_env=False)
        # one more than servers: the one that waits for their calls
        self.threads = ThreadPoolExecutor(len(self.urls) + 1, thread_name_prefix="push")
        self.unanswered: set[str] = set()
        """URL and path of each call in progress; reported when a run hangs."""

    def post(self, path: str, body: Json) -> None:
        """Call every server in the same way, and wait until all calls have ended."""
        self.wait(self.start_posts(path, [body] * len(self.urls)))

    def start_posts(self, path: str, bodies: Sequence[Json]) -> Calls:
        """Start one call for each server, each with its own body."""
        calls = zip(self.urls, bodies, strict=True)
        return [self.threads.submit(self.call, "POST", url, path, body) for url, body in calls]

    def each(self, function: Callable[[str], T]) -> list[T]:
        """Return function(url) for every server, in the order of `urls`; called in parallel."""
        return self.wait([self.threads.submit(function, url) for url in self.urls])

    def wait(self, futures: Iterable[Future[T]]) -> list[T]:
        """Return the results once all calls have ended, even where one of them fails."""
        futures = list(futures)
        wait_for_all(futures)
        return [future.result() for future in futures]

    def call(self, method: str, url: str, path: str, body: Json | None = None) -> Json:
        """Return the JSON object of one call, or {}.

        Raises WeightPushError unless its status is 200.
        """
        response = self.request(method, url, path, body)
        if response.status_code != 200:
            raise WeightPushError(
                f"server {url}{path} answered {response.status_code}: {response.text[:500]}"
            )
        try:
            answer = response.json()
        except ValueError:
            return {}
        return answer if isinstance(answer, dict) else {}

    def request(self, method: str, url: str, path: str, body: Json | None = None) -> httpx.Response:
        """Return the response of one call, whatever its status.

        Raises WeightPushError where none comes.
        """
        self.unanswered.add(url + path)
        try:
            return self.http.request(method, url + path, json=body)
        except httpx.TimeoutException as error:
            raise WeightPushError(
                f"server {url}{path} did not answer within {self.timeout:g} s"
            ) from error
        except httpx.TransportError as error:
            raise WeightPushError(f"server {url}{path} cannot be reached: {error!r}") from error
        finally:
            self.unanswered.discard(url + path)

    def pause(self) -> int:
        """Abort all requests and empty the caches; return how often a flush was refused."""
        self.post("/pause_generation", {"mode": "abort"})
        return sum(self.each(self.flush_until_accepted))

    def release_memory(self) -> None:
        """Let the servers free their GPU memory, after a pause that `continue_serving` ends.

        They need --enable-memory-saver.  Their weights are lost, unless they keep a copy on the
        host (--enable-weights-cpu-backup).
        """
        self.pause()
        self.post("/release_memory_occupation", {"tags": [*TO_LOAD, *TO_SERVE]})

    def continue_serving(self) -> None:
        """End a pause."""
        self.post("/continue_generation", {})

    def flush_until_accepted(self, url: str) -> int:
        """Empty the prefix cache; return how often the server refused before."""
        deadline = time.monotonic() + self.timeout
        refused = 0
        while (response := self.request("POST", url, "/flush_cache")).status_code != 200:
            if response.status_code != 400 or time.monotonic() > deadline:
                tries = f"{response.status_code} ({refused + 1} times)"
                raise WeightPushError(
                    f"server {url}/flush_cache answered {tries}: {response.text[:500]}"
                )
            refused += 1  # 400: a finished request still counts as running
            time.sleep(FLUSH_RETRY_SECONDS)
        return refused

    def begin_update(self, url: str) -> bool:
        """Open a weight-update session; return False where the server has none.

        A session that a failed push left open is closed before.
        """
        response = self.request("POST", url, "/begin_weight_update", {"selector": "all"})
        if response.status_code == 404:  # SGLang before 0.5.21
            return False
        # a push that failed has left its session open
        if response.status_code == 400 and "already open" in response.text:
            self.call("POST", url, "/end_weight_update", {})
            self.call("POST", url, "/begin_weight_update", {"selector": "all"})
        elif response.status_code != 200:
            raise WeightPushError(
                f"server {url}/begin_weight_update answered {response.status_code}:"
                f" {response.text[:500]}"
            )
        return True

    def set_version(self, version: str) -> None:
        """Set the weight version of every server; on return all have confirmed it."""
        self.post("/update_weight_version", {"new_version": version, "abort_all_requests": False})
        self.confirm_version(version)

    def confirm_version(self, version: str) -> None:
        """Raise WeightPushError unless every server reports this version."""
        infos = self.each(lambda url: self.call("GET", url, "/model_info"))
        for url, info in zip(self.urls, infos, strict=True):
            if (reported := info.get("weight_version")) != version:
                # a version names its run at the end (weights/version.py); "" where it names none
                run = str(reported).partition("@")[2]
                hint = ": it was restarted, or did not take the version; look at its log"
                if not version.endswith(run):
                    hint = ": another run pushes to it; give each run its own rollout.urls"
                raise WeightPushError(
                    f"server {url} reports weight version {reported!r} after it was set to"
                    f" {version!r}{hint}"
                )

    def info(self, url: str) -> Json:
        """Return the server's settings and state."""
        return self.call("GET", url, "/server_info")

    def num_ranks(self, url: str) -> int:
        """Return the number of ranks of the server that join the broadcast."""
        info = self.info(url)
        if problem := broadcast_problem(info):
            raise WeightPushError(f"server {url} runs with {problem}")
        return int(info["tp_size"])

    def resume_memory(self, tags: Sequence[str], urls: Sequence[str]) -> None:
        """Let the servers at `urls` allocate these kinds of memory again: graphs with what they had
        (SGLang keeps a copy on the host), the others with any content.

        SGLang 0.5.21 dies of a resume without a release.
        """
        path, body = "/resume_memory_occupation", {"tags": list(tags)}
        self.wait([self.threads.submit(self.call, "POST", url, path, body) for url in urls])

    def running(self, urls: Sequence[str]) -> list[str]:
        """Return those of `urls` whose process still runs, paused or not."""
        answers = self.wait([self.threads.submit(self._answers, url) for url in urls])
        return [url for url, answer in zip(urls, answers, strict=True) if answer]

    def _answers(self, url: str) -> bool:
        try:
            self.http.get(f"{url}/model_info", timeout=CONNECT_TIMEOUT_SECONDS)
        except httpx.TransportError:
            return False
        return True

    def start_leaving(self, group_name: str, urls: Sequence[str]) -> Calls:
        """Let the servers start to free the group's memory.

        A server that is gone causes only a warning.
        """
        return [self.threads.submit(self._leave_group, group_name, url) for url in urls]

    def _leave_group(self, group_name: str, url: str) -> Json:
        try:
            body = {"group_name": group_name}
            self.http.post(
                f"{url}/destroy_weights_update_group", json=body, timeout=CONNECT_TIMEOUT_SECONDS
            )
        except httpx.TransportError as error:
            logger.warning("server %s did not leave the weight-update group: %r", url, error)
        return {}

    def close(self) -> None:
        self.threads.shutdown(wait=False, cancel_futures=True)
        self.http.close()


def check_unchanged(url: str, info: Json, settings: dict[str, Values]) -> None:
    """Raise WeightPushError where a setting that is checked differs from settings[url].

    Then somebody restarted the server.  A server that is not in `settings` is added: it is one of
    ours that replaces a dead one.
    """
    now = read_settings(info)
    if changes := "; ".join(differences(now, settings.setdefault(url, now))):
        raise WeightPushError(
            f"server {url} was restarted with other settings: {changes}; start it as before, or"
            " restart the run, which checks them"
        )


def start_of(info: Json) -> Json:
    """Return the values by which two starts of a server differ.

    SGLang measures the seconds of a start, and draws a seed where none is set.
    """
    return {name: info.get(name) for name in ("startup_time", "random_seed")}


def keeps_unsent(info: Json) -> bool:
    """Return True for a server whose weights stay right when a push does not send them all.

    At the end of a push SGLang processes every module again (source of 0.5.21).  On GPUs some
    backends of experts permute weights then, and would permute those twice that were not sent;
    `auto` may be one of them.  A server on the CPU may pack weights; its checksums show it.
    """
    if info.get("quantization"):
        return False
    return info.get("device") == "cpu" or info.get("moe_runner_backend") == "triton"
