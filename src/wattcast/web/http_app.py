"""The HTTP interface: what every request must pass, routes with their OpenAPI schema, and the
server.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import logging
from collections.abc import (
    AsyncIterator,
    Callable,
    Coroutine,
    Iterable,
    Sequence,
)
from typing import Annotated, Any

import msgspec
import uvicorn
from fastapi import (
    FastAPI,
    Query,
    Request,
    Response,
)
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.responses import StreamingResponse
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import (
    ASGIApp,
    Message,
    Receive,
    Scope,
    Send,
)

from wattcast import __version__
from wattcast.core import files
from wattcast.predictor.prediction_json import PredictOut
from wattcast.web import (
    answers,
    client_limits,
    worker_pool,
)
from wattcast.web.live_stream import (
    Feed,
    FeedInfo,
    FeedWatchers,
    TooManyStreams,
    recorded_feed,
)
from wattcast.web.request_schema import MOST_BYTE

ARRIVE_S = 20.0  # for a body of at most 2 MiB: that is 840 kbit/s
MOST_ENTRIES = 40_000  # objects of a request; a distinct operator takes a worker some 0.25 ms
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; "
    "connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
}
CLOSING = {"connection": "close"}  # of an answer to a request that was not read to its end


class RequestGuard:
    """ASGI middleware that answers our own hosts and origins alone, and adds our headers to every
    response.
    """

    def __init__(
        self,
        app: ASGIApp,
        hosts: Iterable[str] = client_limits.LOOPBACK,
        proxies: client_limits.TrustedProxies | None = None,
    ) -> None:
        self._app = app
        self._hosts = frozenset(hosts)
        self._proxies = proxies or client_limits.TrustedProxies()

    async def __call__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            headers = Headers(scope=scope)
            scope = self._name_client(scope, headers)
            why = self._find_refusal(headers)
            if why is not None:
                await JSONResponse({"error": why[1]}, why[0], CLOSING)(
                    scope, receive, send_with_headers
                )
            elif scope["method"] == "HEAD":
                await answer_head(self._app, scope, receive, send_with_headers)
            else:
                await self._app(scope, receive, send_with_headers)

    def _name_client(
        self,
        scope: Scope,
        headers: Headers,
    ) -> Scope:
        """Put the client in the place of a proxy that we trust."""
        peer = scope.get("client")
        if not peer or not self._proxies.trusts(peer[0]):
            return scope
        host = self._proxies.find_client(peer[0], headers.getlist("x-forwarded-for"))
        return {**scope, "client": (host, peer[1])}

    def _find_refusal(self, headers: Headers) -> tuple[int, str] | None:
        if not client_limits.is_known_host(headers.getlist("host"), self._hosts):
            do = "Start it with --allow-host NAME to allow one."
            return 421, f"this server does not answer to that Host. {do}"
        for origin in headers.getlist("origin"):
            if client_limits.host_name(origin.partition("://")[2]) not in self._hosts:
                return 403, "requests from other sites are not answered."
        if "transfer-encoding" in headers and "content-length" in headers:
            # two servers in a row may each believe another one of them (RFC 9112, section 6.1)
            return 400, "request: expected Content-Length or Transfer-Encoding, got both."
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > MOST_BYTE:
            return 413, f"request: expected at most {MOST_BYTE} bytes, got {int(length)}."
        return None


async def answer_head(
    app: ASGIApp,
    scope: Scope,
    receive: Receive,
    send: Send,
) -> None:
    """Answer HEAD with the headers that GET would have, and end the work there."""
    begun = asyncio.Event()

    async def send_start(message: Message) -> None:
        if message["type"] == "http.response.start":
            await send(message)
            await send(
                {
                    "type": "http.response.body",
                    "body": b"",
                    "more_body": False,
                }
            )
            begun.set()

    working = asyncio.ensure_future(app({**scope, "method": "GET"}, receive, send_start))
    starting = asyncio.ensure_future(begun.wait())
    try:
        await asyncio.wait({working, starting}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
    finally:
        for task in (working, starting):
            task.cancel()
        await asyncio.gather(working, starting, return_exceptions=True)


async def read_body(request: Request, arrive_s: float = ARRIVE_S) -> bytes:
    """Read the body of a request; HTTPException where it is too large, takes too long or breaks
    off.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(arrive_s):
            async for chunk in request.stream():
                body += chunk
                if len(body) > MOST_BYTE:
                    why = f"request: expected at most {MOST_BYTE} bytes, got more."
                    raise HTTPException(413, why, CLOSING)
    except TimeoutError:
        why = f"the request's body did not arrive within {arrive_s:g} s."
        raise HTTPException(408, why, CLOSING) from None
    except ClientDisconnect:
        raise HTTPException(400, "the request ended before its body did.", CLOSING) from None
    return bytes(body)


async def answer_while_connected(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """Return the response that ``work`` makes, or cancel it when the client leaves before that."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_wait_until_left(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise HTTPException(400, "the client left before the answer was ready.", CLOSING)
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _wait_until_left(request: Request) -> None:
    """Wait for the message that the client is gone; after the body there is no other, but a proxy
    may repeat it.
    """
    while (await request.receive())["type"] != "http.disconnect":
        await asyncio.sleep(0.05)


ASSET_TYPES = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
POST_ROUTES: dict[str, tuple[type | str, str]] = {  # kind of request -> what it gives, and in words
    "predict": (PredictOut, "Predictions, as `wattcast predict --json` prints them"),
    "view": (answers.ViewOut, "One configuration seen from all sides"),
    "room": (answers.RoomOut, "What it holds in memory, and the largest batch"),
    "power": (answers.PowerOut, "Power over one run, as `wattcast predict --power-out` writes it"),
    "kernel": (dict, "A look into one kernel, as `wattcast predict --kernel N --json` prints it"),
    "compare": (
        dict,
        "Differences to the first configuration, as `wattcast compare --json` prints them",
    ),
    "plan": (dict, "A plan, as `wattcast plan --json` prints it"),
    "simulate": (
        dict,
        "A simulation, as `wattcast simulate --json` prints it, and its power over time",
    ),
    "train": (dict, "A job, as `wattcast train --json` prints it"),
    "hall": (dict, "A hall over a day or a minute: its peaks, and its power by group over time"),
    "csv": ("text/csv", "Operators as a table"),
    "figure": ("image/svg+xml image/png application/pdf", "A figure as a file"),
    "report": ("text/html", "A self-contained report"),
}
GET_ANSWERS: tuple[type, ...] = (answers.CatalogueOut, answers.GpuDetailOut, FeedInfo)
TABS = ("predict", "compare", "plan", "simulate", "train", "hall", "live", "gpus")  # of the page
ATTACHMENTS = {"csv": "wattcast.csv", "report": "wattcast-report.html"}
_REFUSED = {
    400: "The body ended early",
    403: "From another site",
    408: "The body took too long",
    413: "Too large",
    415: "Not JSON",
    421: "Not this server's name",
    422: "A value is wrong; the error names it",
    429: "Too many requests of this client are running",
    500: "Our mistake",
    503: "Busy, or stopped at the time limit",
}


def make_app(
    pool: worker_pool.WorkerPool,
    feed: Feed,
    hosts: Iterable[str] = client_limits.LOOPBACK,
    proxies: client_limits.TrustedProxies | None = None,
) -> RequestGuard:
    """Make the whole application behind its guard; the pool starts and stops with it."""

    @contextlib.asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        async with pool:
            for question in answers.FIRST_QUESTIONS:
                await pool.ask(*question)
            yield

    app = FastAPI(
        title="Wattcast",
        version=__version__,
        lifespan=life,
        docs_url=None,
        redoc_url=None,
    )

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        return _plain_response(error.status_code, str(error.detail), dict(error.headers or {}))

    @app.exception_handler(client_limits.ClientBusy)
    async def busy(request: Request, error: client_limits.ClientBusy) -> Response:
        return _plain_response(429, str(error), CLOSING)

    @app.exception_handler(Exception)
    async def failed(
        request: Request, error: Exception
    ) -> Response:  # which goes to the server's log
        return _plain_response(500, "internal error; the server's log says more.")

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        return _plain_response(
            422, f"{'.'.join(str(part) for part in first['loc'][1:])}: {first['msg']}."
        )

    _add_pages(app)
    _add_questions(app, pool)
    _add_live_feed(app, FeedWatchers(feed))
    app.openapi = lambda: _make_schema(app)  # type: ignore[method-assign]
    return RequestGuard(app, hosts, proxies)


def openapi_schema() -> dict[str, Any]:
    """Return the OpenAPI schema without a server."""
    app = FastAPI(title="Wattcast", version=__version__)
    _add_questions(app, worker_pool.WorkerPool())
    _add_live_feed(app, FeedWatchers(recorded_feed()))
    return _make_schema(app)


def _plain_response(
    status: int,
    text: str,
    headers: dict[str, str] | None = None,
) -> Response:
    return Response(
        answers.make_refusal(status, text).body, status, headers, media_type="application/json"
    )


def _add_pages(app: FastAPI) -> None:
    folder = files("wattcast.web").joinpath("assets")
    content_of_file = {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}
    packed = {name: gzip.compress(data, mtime=0) for name, data in content_of_file.items()}
    fresh = {"cache-control": "no-cache", "vary": "accept-encoding"}

    @app.get("/", include_in_schema=False)
    @app.get("/favicon.ico", include_in_schema=False)
    @app.get("/assets/{name}", include_in_schema=False)
    async def asset(request: Request) -> Response:
        name = request.path_params.get(
            "name", "icon.svg" if request.url.path == "/favicon.ico" else "index.html"
        )
        if name not in content_of_file:  # a table of names, not a folder
            return _plain_response(404, "there is no such file.")
        kind = ASSET_TYPES[name.rpartition(".")[2]]
        if "gzip" in request.headers.get("accept-encoding", ""):
            return Response(
                packed[name], headers=fresh | {"content-encoding": "gzip"}, media_type=kind
            )
        return Response(content_of_file[name], headers=fresh, media_type=kind)

    for tab in TABS:  # links that one can read, such as /plan?model=llama3-8b&gpu=h200
        app.add_api_route(f"/{tab}", asset, methods=["GET"], include_in_schema=False)


def _add_questions(app: FastAPI, pool: worker_pool.WorkerPool) -> None:
    slots = client_limits.ClientSlots()

    def endpoint(kind: str) -> Any:
        async def post(request: Request) -> Response:
            media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            if media != "application/json":
                return _plain_response(415, "request: expected content-type application/json.")
            length = request.headers.get("content-length", "")
            is_long = not length.isdecimal() or int(length) > worker_pool.LARGE_BYTE
            large = kind in worker_pool.LARGE_KINDS or is_long
            async with slots.running(
                _client_host(request), large
            ):  # a body is read once the client has few enough others running
                body = await read_body(request)
                if (entries := body.count(b"{")) > MOST_ENTRIES:
                    expected = (
                        f"request: expected at most {MOST_ENTRIES:,} operators or "
                        f"events, got {entries:,}."
                    )
                    return _plain_response(413, f"{expected} Use the command line.")
                return await answer_while_connected(request, _asked(pool, kind, body))

        return post

    for kind, (gives, summary) in POST_ROUTES.items():
        takes = answers.REQUEST_KINDS[kind][0]
        app.add_api_route(
            f"/api/{kind}",
            endpoint(kind),
            methods=["POST"],
            summary=summary,
            operation_id=kind,
            responses=_describe_responses(gives),
            openapi_extra={
                "requestBody": {
                    "required": True,
                    "content": {"application/json": _refer_to_schema(takes)},
                }
            },
        )

    @app.get(
        "/api/catalogue",
        summary="GPUs and models",
        responses=_describe_responses(answers.CatalogueOut),
    )
    async def catalogue() -> Response:
        return await _asked(pool, "catalogue", b"")

    @app.get(
        "/api/gpu",
        summary="Every number of a GPU, with sources",
        responses=_describe_responses(answers.GpuDetailOut),
    )
    async def gpu(name: Annotated[str, Query(max_length=64)]) -> Response:
        return await _asked(pool, "gpu", name.encode())

    @app.get("/api/health", summary="Whether the server lives")
    async def health() -> dict[str, str]:
        return {"wattcast": __version__}


async def _asked(
    pool: worker_pool.WorkerPool,
    kind: str,
    body: bytes,
) -> Response:
    reply = await pool.ask(kind, body)
    headers = {"cache-control": "no-store"}
    if kind in ATTACHMENTS and reply.status == 200:
        headers["content-disposition"] = f'attachment; filename="{ATTACHMENTS[kind]}"'
    if kind == "report" and reply.status == 200:
        headers["content-security-policy"] = (
            "sandbox; default-src 'none'; style-src 'unsafe-inline'; img-src data:"
        )
    return Response(reply.body, reply.status, headers, media_type=reply.type)


def _add_live_feed(app: FastAPI, watchers: FeedWatchers) -> None:
    @app.get(
        "/api/live/about",
        summary="What the live view shows",
        responses=_describe_responses(FeedInfo),
    )
    async def about() -> Response:
        return Response(msgspec.json.encode(watchers.feed.about), media_type="application/json")

    @app.get(
        "/api/live",
        summary="Measured points as server-sent events",
        responses=_describe_responses("text/event-stream"),
        response_class=StreamingResponse,
    )
    async def live(
        request: Request, speed: Annotated[float, Query(ge=0.1, le=100.0)] = 1.0
    ) -> Response:
        client = client_limits.client_key(_client_host(request))
        try:
            place = watchers.begin(client)
        except TooManyStreams as error:
            return _plain_response(503, str(error))

        class Streaming(StreamingResponse):
            """Gives the place back even where the client left before the first event."""

            async def __call__(
                self,
                scope: Scope,
                receive: Receive,
                send: Send,
            ) -> None:
                try:
                    await super().__call__(scope, receive, send)
                finally:
                    watchers.finish(place)

        return Streaming(
            watchers.events(speed, request.is_disconnected, place),
            media_type="text/event-stream",
            headers={"cache-control": "no-store"},
        )


def _client_host(request: Request) -> str:
    return request.client.host if request.client else ""


def _refer_to_schema(kind: type) -> dict[str, Any]:
    if kind is dict:
        return {"schema": {"type": "object"}}
    return {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}}


def _describe_responses(gives: type | str) -> dict[int | str, dict[str, Any]]:
    if isinstance(gives, str):
        content: dict[str, Any] = {kind: {"schema": {"type": "string"}} for kind in gives.split()}
    else:
        content = {"application/json": _refer_to_schema(gives)}
    responses: dict[int | str, dict[str, Any]] = {200: {"description": "Done", "content": content}}
    for status, reason in _REFUSED.items():
        responses[status] = {
            "description": reason,
            "content": {"application/json": _refer_to_schema(answers.ErrorOut)},
        }
    return responses


def _make_schema(app: FastAPI) -> dict[str, Any]:
    if app.openapi_schema is None:
        plain = get_openapi(
            title=app.title,
            version=app.version,
            routes=app.routes,
            summary="GPU time and power",
        )
        kinds = [
            answers.ErrorOut,
            *(answers.REQUEST_KINDS[kind][0] for kind in POST_ROUTES),
            *GET_ANSWERS,
        ]
        kinds += [gives for gives, _ in POST_ROUTES.values() if not isinstance(gives, str)]
        _, components = msgspec.json.schema_components(
            [kind for kind in dict.fromkeys(kinds) if kind is not dict],
            ref_template="#/components/schemas/{name}",
        )
        for question in ("Configuration", "PlanRequest", "SimulationRequest", "TrainingRequest"):
            properties = components[question]["properties"]
            for name in (
                "model",
                "file",
            ):  # types cannot say that one of them is needed, and not both
                properties[name] = next(
                    one for one in properties[name]["anyOf"] if one != {"type": "null"}
                )
            components[question]["oneOf"] = [{"required": ["model"]}, {"required": ["file"]}]
        plain.setdefault("components", {}).setdefault("schemas", {}).update(components)
        app.openapi_schema = plain
    return app.openapi_schema


def serve_page(
    host: str,
    port: int,
    feed: Feed,
    hosts: Sequence[str] = (),
    workers: int = 2,
    limit_s: float = worker_pool.LIMIT_S,
    say: Callable[[str], None] = lambda text: None,
    trusted_proxies: Sequence[str] = (),
) -> None:
    """Serve until interrupted.

    ``hosts`` are names, besides loopback's, that the server answers to. ``trusted_proxies`` are
    addresses and networks whose ``X-Forwarded-For`` names the client."""
    proxies = client_limits.TrustedProxies(trusted_proxies)
    names = client_limits.known_hosts(host, hosts)
    listening = client_limits.open_socket(host, port)
    name = f"[{host}]" if ":" in host else host
    app = make_app(worker_pool.WorkerPool(workers, limit_s), feed, names, proxies)
    logging.getLogger("uvicorn.error").addFilter(client_limits.LogLimit())
    table = client_limits.ConnectionTable(most=client_limits.raise_file_limit(), proxies=proxies)
    config = uvicorn.Config(
        app,
        http=client_limits.make_protocol(table),
        proxy_headers=False,  # whom to believe is ours to say
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_keep_alive=10,
        timeout_graceful_shutdown=2,
        ws="none",
    )
    say(f"wattcast serves http://{name}:{listening.getsockname()[1]}/ (stop it with Ctrl-C)")
    if not client_limits.is_loopback(host):
        say(
            "note: everyone who reaches this address may use it; there is no password and "
            "no encryption."
        )
    asyncio.run(uvicorn.Server(config).serve(sockets=[listening]))
