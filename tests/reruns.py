"""Hooks of pytest: a test that waits for processes, servers or sockets is run a second time when it
fails, no other test is.

A second run is listed as RERUN, and means a race, in the test or in the code.  The last lines say
how many tests had one; a session with more than MOST of them fails.
"""

import pytest

MOST = 2
FOLDER = "tests/e2e/"  # all of them start servers
FILES = {
    "tests/unit/launch/test_signals.py", "tests/unit/launch/test_torchrun.py",
    "tests/unit/launch/test_watchdog.py", "tests/unit/reward/test_episodes.py",
    "tests/unit/reward/test_hostile.py", "tests/unit/reward/test_pool.py",
    "tests/unit/rollout/test_agents.py", "tests/unit/rollout/test_branches.py",
    "tests/unit/rollout/test_client.py", "tests/unit/rollout/test_client_state.py",
    "tests/unit/rollout/test_connections.py", "tests/unit/rollout/test_counters.py",
    "tests/unit/rollout/test_endpoint.py", "tests/unit/rollout/test_environment_process.py",
    "tests/unit/rollout/test_environment_worker.py", "tests/unit/rollout/test_unread_answers.py",
    "tests/unit/rollout/test_episode_ends.py", "tests/unit/rollout/test_in_place.py",
    "tests/unit/rollout/test_lengths.py", "tests/unit/rollout/test_open_call.py",
    "tests/unit/rollout/test_over_sample.py", "tests/unit/rollout/test_partial.py",
    "tests/unit/rollout/test_request.py", "tests/unit/rollout/test_request_trace.py",
    "tests/unit/rollout/test_sampling_defaults.py",
    "tests/unit/rollout/test_sampling_masks.py", "tests/unit/rollout/test_scheduler.py",
    "tests/unit/rollout/test_scheduler_resume.py", "tests/unit/rollout/test_server.py",
    "tests/unit/rollout/test_server_info.py", "tests/unit/rollout/test_server_pool.py",
    "tests/unit/rollout/test_server_waits.py", "tests/unit/rollout/test_stop_sampling.py",
    "tests/unit/rollout/test_unfinished_chats.py",
    "tests/unit/rollout/test_unfinished_episodes.py", "tests/unit/test_evaluate.py",
    "tests/unit/viewer/test_viewer_app.py",
}  # fmt: skip


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        name = item.nodeid.partition("::")[0]
        if name.startswith(FOLDER) or name in FILES:
            item.add_marker(pytest.mark.flaky(reruns=1))


def repeated(config: pytest.Config) -> set[str]:
    """Tests that were run a second time; none in a worker of xdist, whose controller counts."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    return {report.nodeid for report in reporter.stats.get("rerun", ())} if reporter else set()


def pytest_sessionfinish(session: pytest.Session) -> None:
    if len(repeated(session.config)) > MOST and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    count = len(repeated(config))
    failure = f": more than {MOST}, so the session fails" if count > MOST else ""
    terminalreporter.write_line(f"tests run a second time: {count}{failure}", red=bool(failure))
