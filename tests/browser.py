"""A real browser without a window, and the viewer's server beside it in a thread: for tests and for
the pictures of the docs.
"""

import contextlib
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
TOKEN = "token-of-the-tests"


def why_no_browser() -> str | None:
    """What to install; None where everything is there."""
    try:
        import playwright.sync_api  # noqa: F401
    except ImportError:
        return "no playwright: pip install playwright (part of requirements-cpu.txt)"
    return None if find_browser() else "no chromium: apt-get install chromium"


def find_browser() -> str | None:
    return next(filter(None, map(shutil.which, BROWSERS)), None)


@contextlib.contextmanager
def open_browser() -> Iterator:
    """playwright's Browser on the machine's own Chromium: nothing is downloaded."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # root, as in a container, has no sandbox
        browser = playwright.chromium.launch(executable_path=find_browser(), args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


@contextlib.contextmanager
def serve_runs(folders: list[Path], cache: Path) -> Iterator[str]:
    """Address of the viewer of these runs, without the token."""
    import uvicorn

    from megatron_rl_viewer.app import create_app
    from megatron_rl_viewer.run_folder import Runs

    listener = socket.create_server(("127.0.0.1", 0))
    app = create_app(Runs(folders, cache), TOKEN, port=listener.getsockname()[1])
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive(), "the server did not start"
            time.sleep(0.02)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
