"""The HTTP application: the answer of each path, and access.

Every request needs the token that the command printed: once as ?token=, then as a cookie.  Only GET
is answered, no other site can read an answer or frame the page, and a model's response is sent as
JSON, never as HTML.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from sqlite3 import Connection
from typing import Annotated
from urllib.parse import unquote

from fastapi import Depends, FastAPI, HTTPException, Request, Response
from fastapi import Query as Argument
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, PlainTextResponse, RedirectResponse

from megatron_rl_viewer import expert_loads, token_data
from megatron_rl_viewer.answer import answer_json
from megatron_rl_viewer.prompts import common_prompts, prompt_of_run
from megatron_rl_viewer.query import (
    MAX_LIMIT,
    MAX_OFFSET,
    Query,
    QueryError,
    groups_page,
    parse_filters,
    rollouts_page,
)
from megatron_rl_viewer.run_folder import Run, Runs, setting_differences
from megatron_rl_viewer.story import story

STATIC = Path(__file__).parent / "static"
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'; "
        "form-action 'none'; object-src 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def create_app(
    runs: Runs, token: str, *, port: int = 0, static: Path = STATIC, follow: bool = True
) -> FastAPI:
    """Make the application; without `follow` the caller reads new lines itself (tests)."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        if follow:
            runs.start()
        yield
        if follow:
            runs.stop()

    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    # browsers send a cookie to all ports: two viewers must not share its name
    guard(app, token, cookie=f"megatron_rl_view_{port}")
    add_run_routes(app, runs)
    add_rollout_routes(app, runs)
    add_prompt_routes(app, runs)
    add_static_routes(app, static)
    return app


def guard(app: FastAPI, token: str, cookie: str) -> None:
    """Refuse requests without the token with 401, set HEADERS on every answer, and answer errors as
    JSON.
    """

    @app.middleware("http")
    async def check(
        request: Request, call_next: Callable[[Request], Awaitable[Response]]
    ) -> Response:
        sent = request.query_params.get("token")
        if is_token(sent, token):
            # a path that begins with "//host" would redirect to another host
            place = "/" + request.scope["raw_path"].decode().lstrip("/")
            query = request.url.remove_query_params("token").query
            url = f"{place}?{query}" if query else place
            response: Response = RedirectResponse(url, status_code=303)
            # lax: a link to the viewer works on another page; that page can send only GET, and
            # read nothing
            response.set_cookie(cookie, token, httponly=True, samesite="lax")
        elif is_token(request.cookies.get(cookie), token):
            response = await call_next(request)
        else:
            text = "401: open the URL that `megatron-rl view` printed, with its token\n"
            response = PlainTextResponse(text, status_code=401)
        response.headers.update(HEADERS)
        return response

    @app.exception_handler(QueryError)
    async def refused(_: Request, error: QueryError) -> Response:
        return answer({"detail": str(error)}, status=400)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        problems = [
            f"{problem['loc'][-1]} = {problem.get('input')}: {problem['msg']}"
            for problem in error.errors()
        ]
        return answer({"detail": "; ".join(problems)}, status=400)


def is_token(sent: str | None, token: str) -> bool:
    return sent is not None and secrets.compare_digest(sent.encode(), token.encode())


def answer(value: object, status: int = 200) -> Response:
    return Response(answer_json(value), status, media_type="application/json")


def find(runs: Runs, number: int) -> Run:
    if not 0 <= number < len(runs.runs):
        raise HTTPException(404, f"no run {number}: there are {len(runs.runs)}")
    return runs.runs[number]


def reload_later(run: Run) -> str:
    """Return the end of a message about what a run lacks; "" once the run is read."""
    indexing = run.indexing()
    return f": {indexing}; reload the page later" if indexing else ""


def add_run_routes(app: FastAPI, runs: Runs) -> None:
    """Add the paths of runs: their story, curves, events, settings and health."""

    @app.get("/api/runs")
    def all_runs() -> Response:
        return answer([run.summary(number) for number, run in enumerate(runs.runs)])

    @app.get("/api/runs/{number}/metrics")
    def metrics(number: int, after: int = -1, names: str = "") -> Response:
        run = find(runs, number)
        run.read_small()
        return answer(run.metrics.table(after, [name for name in names.split(",") if name]))

    @app.get("/api/runs/{number}/events")
    def events(number: int, after: int = -1) -> Response:
        run = find(runs, number)
        run.read_small()
        return answer(run.events.since(after))

    @app.get("/api/runs/{number}/config")
    def config(number: int) -> Response:
        run = find(runs, number)
        return answer({"text": run.config_text, "values": run.config()[0]})

    @app.get("/api/diff")
    def diff(a: int, b: int) -> Response:
        return answer(setting_differences(find(runs, a).config()[0], find(runs, b).config()[0]))

    @app.get("/api/runs/{number}/story")
    def run_story(number: int) -> Response:
        run = find(runs, number)
        run.read_small()
        return answer(story(run))

    @app.get("/api/runs/{number}/health")
    def health(number: int) -> Response:
        run = find(runs, number)
        run.read_small()
        return answer(run.health())


def page_query(
    offset: int = 0,
    limit: int = 100,
    sort: str = "step",
    order: str = "desc",
    q: str = "",
    filters: Annotated[str, Argument(alias="filter")] = "",
) -> Query:
    return Query(offset, limit, sort, order, q, parse_filters(filters))


PageQuery = Annotated[Query, Depends(page_query)]


def add_rollout_routes(app: FastAPI, runs: Runs) -> None:
    """Add the paths of rollouts: tables of them and of groups, one rollout, experts."""

    def table(number: int, query: Query, page: Callable[[Connection, Query], dict]) -> Response:
        run = find(runs, number)
        with closing(run.index.connect()) as connection:
            columns_and_rows = page(connection, query)
        return answer(columns_and_rows | {"indexing": run.index.progress})

    @app.get("/api/runs/{number}/rollouts")
    def rollouts(number: int, query: PageQuery) -> Response:
        return table(number, query, rollouts_page)

    @app.get("/api/runs/{number}/groups")
    def groups(number: int, query: PageQuery) -> Response:
        return table(number, query, groups_page)

    @app.get("/api/runs/{number}/rollout/{key:path}")
    def rollout(request: Request, number: int, key: str) -> Response:
        run = find(runs, number)
        # `key` is decoded, and the id is decoded again where it is looked up
        sent = request.scope["raw_path"].decode().partition("/rollout/")[2]
        # a client may have encoded the key as a whole, with its slashes
        key = sent if "/" in sent else unquote(sent)
        tokens = token_data.rollout(run, key)
        if tokens is None:
            raise HTTPException(404, f"no rollout {key}{reload_later(run)}")
        return answer(tokens)

    @app.get("/api/runs/{number}/experts")
    def experts_of(number: int, step: str = "") -> Response:
        run = find(runs, number)
        run.read_small()
        return answer(expert_loads.loads_of_steps(run, step))

    @app.get("/api/runs/{number}/expert")
    def expert(
        number: int, layer: Annotated[int, Argument(ge=0)], expert: Annotated[int, Argument(ge=0)]
    ) -> Response:
        run = find(runs, number)
        run.read_small()
        return answer(expert_loads.over_steps(run, layer, expert))


def add_prompt_routes(app: FastAPI, runs: Runs) -> None:
    """Add the paths that compare runs on the same prompts."""

    @app.get("/api/runs/{number}/prompt")
    def prompt(
        number: int, key: str, after: Annotated[int, Argument(ge=-1, le=MAX_OFFSET)] = -1
    ) -> Response:
        run = find(runs, number)
        steps = prompt_of_run(run, key, after)
        if steps is None:
            raise HTTPException(404, f"no prompt {key}{reload_later(run)}")
        return answer(steps)

    @app.get("/api/prompts")
    def prompts(
        numbers: Annotated[list[int], Argument(alias="run")],
        offset: Annotated[int, Argument(ge=0, le=MAX_OFFSET)] = 0,
        limit: Annotated[int, Argument(ge=1, le=MAX_LIMIT)] = 20,
    ) -> Response:
        chosen = [find(runs, number) for number in dict.fromkeys(numbers)]
        return answer(common_prompts(chosen, offset, limit))


def add_static_routes(app: FastAPI, static: Path) -> None:
    """Add the page and its files: those in `static`, none below or beside it."""

    @app.get("/")
    def index() -> Response:
        if not (static / "index.html").is_file():
            raise HTTPException(503, f"{static}: the page is not built; in a checkout: make viewer")
        return FileResponse(static / "index.html")

    @app.get("/static/{name}")
    def file(name: str) -> Response:
        files = static.iterdir() if static.is_dir() else ()
        known = {path.name: path for path in files if path.is_file()}
        if name not in known:
            raise HTTPException(404, f"no file {name}")
        return FileResponse(known[name])
