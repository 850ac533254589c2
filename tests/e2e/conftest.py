"""One real SGLang server on a tiny float32 checkpoint, shared by the end-to-end tests: it takes
15-40 s to start.
"""

from pathlib import Path

import pytest

from megatron_rl.config import RolloutConfig
from megatron_rl.rollout.server.process import Server, launch_server
from tests.e2e import runs
from tests.tiny import random_checkpoint


@pytest.fixture(autouse=True)
def no_run_is_left():
    """A test that fails leaves no run of 10,000 steps."""
    yield
    runs.end_all()


@pytest.fixture(scope="session")
def rollout_config() -> RolloutConfig:
    return RolloutConfig(
        dtype="float32",
        max_total_tokens=8192,
        max_running_requests=16,
        request_timeout_seconds=60.0,
        max_retries=2,
    )


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint the shared server starts on (weight version 0)."""
    return random_checkpoint(tmp_path_factory.mktemp("checkpoints") / "tiny")


@pytest.fixture(scope="session")
def sglang_server(
    tiny_checkpoint: Path, rollout_config: RolloutConfig, tmp_path_factory: pytest.TempPathFactory
):
    """Tests may push weights; whoever does takes the version from /model_info and pushes a higher
    one.
    """
    log_path = tmp_path_factory.mktemp("server") / "sglang.log"
    with launch_server(
        tiny_checkpoint, rollout_config, device="cpu", log_path=log_path, seed=0
    ) as server:
        assert isinstance(server, Server)
        yield server
