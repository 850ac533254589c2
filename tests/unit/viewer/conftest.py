"""One made-up run for all tests that only read, and a client that has the token."""

import pytest
from fastapi.testclient import TestClient

from megatron_rl_viewer.app import create_app
from megatron_rl_viewer.run_folder import Runs
from tests.viewer_run import write_run

TOKEN = "the-token"


@pytest.fixture(scope="session")
def run_dir(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("viewer") / "demo", steps=6, replicas=2)


@pytest.fixture
def open_runs(tmp_path):
    """open_runs(FOLDER, ...): the runs, read once."""

    def opened(*folders):
        runs = Runs(list(folders), tmp_path / "cache")
        for run in runs.runs:
            run.update()
        return runs

    return opened


@pytest.fixture
def static(tmp_path):
    folder = tmp_path / "static"
    folder.mkdir()
    (folder / "index.html").write_text('<!doctype html><script src="static/app.js"></script>')
    (folder / "app.js").write_text("'use strict'")
    return folder


@pytest.fixture
def client_of(static):
    """client_of(RUNS): a client after its first request, which returns JSON of a path below
    /api/.
    """

    def made(runs):
        client = TestClient(create_app(runs, TOKEN, static=static, follow=False))
        assert client.get(f"/?token={TOKEN}").status_code == 200
        return client

    return made


@pytest.fixture
def client(run_dir, open_runs, client_of):
    return client_of(open_runs(run_dir))
