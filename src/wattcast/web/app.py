"""The HTTP interface: routes, their OpenAPI schema, and the page's files."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterable
from importlib.resources import files
from typing import Annotated, Any

import msgspec
from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.responses import StreamingResponse
from starlette.exceptions import HTTPException

from wattcast import __version__
from wattcast.report.plain import PredictOut
from wattcast.web import ask, tell
from wattcast.web.guard import Guard
from wattcast.web.live import About, Feed, Watchers, recorded
from wattcast.web.pool import Pool, refusal, running

ASSETS = {
    "app.css": "text/css; charset=utf-8",
    "app.js": "text/javascript; charset=utf-8",
    "charts.js": "text/javascript; charset=utf-8",
    "format.js": "text/javascript; charset=utf-8",
    "live.js": "text/javascript; charset=utf-8",
    "state.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
POSTS: dict[str, tuple[str, type, type | str, str]] = {
    "/api/predict": ("predict", ask.Several, PredictOut, "Predictions, as `wattcast predict --json` prints them"),
    "/api/view": ("view", ask.Configuration, tell.ViewOut, "One configuration seen from all sides"),
    "/api/room": ("room", ask.Configuration, tell.RoomOut, "What it holds in memory, and the largest batch"),
    "/api/csv": ("csv", ask.Several, "text/csv", "Operators as a table"),
    "/api/figure": ("figure", ask.Figure, "image/svg+xml image/png application/pdf", "A figure as a file"),
    "/api/report": ("report", ask.Several, "text/html", "A self-contained report"),
}
GETS: dict[str, type] = {"/api/catalogue": tell.CatalogueOut, "/api/live/about": About}
FILES = {"csv": "wattcast.csv", "report": "wattcast-report.html"}
_REFUSED = {
    400: "The body ended early",
    403: "From another site",
    408: "The body took too long",
    413: "Too large",
    415: "Not JSON",
    421: "Not this server's name",
    422: "A value is wrong; the error names it",
    500: "Our mistake",
    503: "Busy, or stopped at the time limit",
}


def make_app(pool: Pool, feed: Feed, hosts: Iterable[str] = ()) -> Guard:
    """The whole application behind its guard; the pool starts and stops with it."""

    @contextlib.asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        async with running(pool):
            yield

    app = FastAPI(title="Wattcast", version=__version__, lifespan=life, docs_url=None, redoc_url=None)
    _errors(app)
    _pages(app)
    _questions(app, pool)
    _live(app, Watchers(feed))
    app.openapi = lambda: _schema(app)  # type: ignore[method-assign]
    return Guard(app, hosts)


def schema() -> dict[str, Any]:
    """The OpenAPI schema, without a server."""
    app = FastAPI(title="Wattcast", version=__version__)
    _questions(app, Pool())
    _live(app, Watchers(recorded()))
    return _schema(app)


def _errors(app: FastAPI) -> None:
    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        return _plain(error.status_code, str(error.detail), dict(error.headers or {}))

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        return _plain(422, f"{'.'.join(str(part) for part in first['loc'][1:])}: {first['msg']}.")


def _plain(status: int, text: str, headers: dict[str, str] | None = None) -> Response:
    return Response(refusal(status, text).body, status, headers, media_type="application/json")


def _pages(app: FastAPI) -> None:
    folder = files("wattcast.web").joinpath("assets")
    held = {name: folder.joinpath(name).read_bytes() for name in (*ASSETS, "index.html")}
    fresh = {"cache-control": "no-cache"}

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return Response(held["index.html"], headers=fresh, media_type="text/html; charset=utf-8")

    @app.get("/assets/{name}", include_in_schema=False)
    async def asset(name: str) -> Response:
        if name not in ASSETS:  # a table of names, not a folder
            return _plain(404, "there is no such file.")
        return Response(held[name], headers=fresh, media_type=ASSETS[name])

    @app.get("/favicon.ico", include_in_schema=False)
    async def icon() -> Response:
        return Response(held["icon.svg"], media_type=ASSETS["icon.svg"])


def _questions(app: FastAPI, pool: Pool) -> None:
    def endpoint(kind: str) -> Any:
        async def post(request: Request) -> Response:
            said = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            if said != "application/json":
                return _plain(415, "request: expected content-type application/json.")
            return await _asked(pool, kind, await request.body())

        return post

    for path, (kind, takes, gives, summary) in POSTS.items():
        app.add_api_route(
            path,
            endpoint(kind),
            methods=["POST"],
            summary=summary,
            operation_id=kind,
            responses=_responses(gives),
            openapi_extra={"requestBody": {"required": True, "content": {"application/json": _of(takes)}}},
        )

    @app.get("/api/catalogue", summary="GPUs and models", responses=_responses(tell.CatalogueOut))
    async def catalogue() -> Response:
        return await _asked(pool, "catalogue", b"")

    @app.get("/api/health", summary="Whether the server lives")
    async def health() -> dict[str, str]:
        return {"wattcast": __version__}


async def _asked(pool: Pool, kind: str, body: bytes) -> Response:
    reply = await pool.ask(kind, body)
    headers = {"cache-control": "no-store"}
    if kind in FILES and reply.status == 200:
        headers["content-disposition"] = f'attachment; filename="{FILES[kind]}"'
    if kind == "report" and reply.status == 200:
        headers["content-security-policy"] = "sandbox; default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    return Response(reply.body, reply.status, headers, media_type=reply.type)


def _live(app: FastAPI, watchers: Watchers) -> None:
    @app.get("/api/live/about", summary="What the live view shows", responses=_responses(About))
    async def about() -> Response:
        return Response(msgspec.json.encode(watchers.feed.about), media_type="application/json")

    @app.get(
        "/api/live",
        summary="Measured points as server-sent events",
        responses=_responses("text/event-stream"),
        response_class=StreamingResponse,
    )
    async def live(request: Request, speed: Annotated[float, Query(ge=0.1, le=100.0)] = 1.0) -> Response:
        if watchers.full:
            return _plain(503, "as many are watching as may; try again later.")
        return StreamingResponse(
            watchers.events(speed, request.is_disconnected),
            media_type="text/event-stream",
            headers={"cache-control": "no-store"},
        )


def _of(kind: type) -> dict[str, Any]:
    return {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}}


def _responses(gives: type | str) -> dict[int | str, dict[str, Any]]:
    text = {"schema": {"type": "string"}}
    content = {kind: text for kind in gives.split()} if isinstance(gives, str) else {"application/json": _of(gives)}  # noqa: C420
    found: dict[int | str, dict[str, Any]] = {200: {"description": "Done", "content": content}}
    for status, said in _REFUSED.items():
        found[status] = {"description": said, "content": {"application/json": _of(tell.ErrorOut)}}
    return found


def _schema(app: FastAPI) -> dict[str, Any]:
    if app.openapi_schema is None:
        plain = get_openapi(title=app.title, version=app.version, routes=app.routes, summary="GPU time and power")
        kinds = [tell.ErrorOut, *(takes for _, takes, _, _ in POSTS.values()), *GETS.values()]
        kinds += [gives for _, _, gives, _ in POSTS.values() if not isinstance(gives, str)]
        _, found = msgspec.json.schema_components(
            list(dict.fromkeys(kinds)), ref_template="#/components/schemas/{name}"
        )
        _say_model_or_file(found["Configuration"])
        plain.setdefault("components", {}).setdefault("schemas", {}).update(found)
        app.openapi_schema = plain
    return app.openapi_schema


def _say_model_or_file(configuration: dict[str, Any]) -> None:
    """What the struct's types cannot say: one of the two is needed, and not the other."""
    for name in ("model", "file"):
        inside = configuration["properties"][name]
        configuration["properties"][name] = next(one for one in inside["anyOf"] if one != {"type": "null"})
    configuration["oneOf"] = [{"required": ["model"]}, {"required": ["file"]}]
