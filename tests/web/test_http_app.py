"""The server over HTTP: whom it answers, how much it reads, what it says of itself, and how it
ends.
"""

from __future__ import annotations

import asyncio
import gzip
import http.client
import json
import socket
import sys
import time
from contextlib import closing
from importlib.resources import files

import pytest
from starlette.exceptions import HTTPException
from starlette.requests import Request

from serving import Server
from wattcast.core.errors import BadInput, ExitCode, Refused
from wattcast.web.answers import Answer
from wattcast.web.client_limits import open_socket
from wattcast.web.http_app import HEADERS, make_app, read_body, serve_page
from wattcast.web.live_stream import recorded_feed
from wattcast.web.request_schema import MOST_BYTE
from wattcast.web.worker_pool import WorkerPool

CASE = {"gpu": "h200", "model": "gpt2", "seq": 128}
JSON = {"content-type": "application/json"}
VERBS = ("/api/compare", "/api/plan", "/api/simulate", "/api/train")


def ask(server: Server, method: str, path: str, body: bytes | None = None, **headers: str):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, body, named)
    answer = connection.getresponse()
    data = answer.read()
    connection.close()
    return answer, data


def post(server: Server, path: str, plain: object, **headers: str):
    return ask(
        server,
        "POST",
        path,
        json.dumps(plain).encode(),
        **({"content_type": "application/json"} | headers),
    )


def test_the_page_and_its_files_come_with_every_header(server: Server) -> None:
    names = [file.name for file in files("wattcast.web").joinpath("assets").iterdir()]
    for path in [
        "/",
        "/openapi.json",
        "/api/health",
        "/nothing",
        *(f"/assets/{name}" for name in names),
    ]:
        answer, data = ask(server, "GET", path)
        assert answer.status == (404 if path == "/nothing" else 200), path
        assert data
        for name, value in HEADERS.items():
            assert answer.headers[name] == value
        assert "server" not in {name.lower() for name in answer.headers}
    policy = HEADERS["content-security-policy"]
    assert "unsafe" not in policy
    assert "default-src 'none'" in policy


def test_files_come_packed_to_who_unpacks_them(server: Server) -> None:
    plain, data = ask(server, "GET", "/assets/app.js")
    packed, less = ask(server, "GET", "/assets/app.js", accept_encoding="gzip, br")
    assert "content-encoding" not in plain.headers
    assert packed.headers["content-encoding"] == "gzip"
    assert packed.headers["vary"] == plain.headers["vary"] == "accept-encoding"
    assert gzip.decompress(less) == data
    assert len(less) < 0.5 * len(data)


def test_the_page_asks_nobody_else(server: Server) -> None:
    for file in files("wattcast.web").joinpath("assets").iterdir():
        _, data = ask(server, "GET", f"/assets/{file.name}")
        text = data.decode().replace("http://www.w3.org/2000/svg", "")
        assert "http://" not in text
        assert "https://" not in text
        assert "innerHTML" not in text
        assert "eval(" not in text


@pytest.mark.parametrize(
    "path", ["/assets/../app.py", "/assets/%2e%2e/app.py", "/assets/..%2fapp.py", "/../etc/passwd"]
)
def test_no_path_leaves_the_table_of_files(server: Server, path: str) -> None:
    answer, data = ask(server, "GET", path)
    assert answer.status == 404
    assert b"import" not in data


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8080", "127.0.0.1.evil.example", "localhost.evil", ""]
)
def test_a_foreign_host_is_not_answered(server: Server, host: str) -> None:
    """A page of evil.example that points its own name to loopback sends its own name as Host (DNS
    rebinding).
    """
    answer, data = ask(server, "GET", "/api/catalogue", Host=host)
    assert answer.status == 421
    assert b"h200" not in data
    for mine in ("localhost:1", "127.0.0.1", "[::1]:80", "LOCALHOST"):
        assert ask(server, "GET", "/api/health", Host=mine)[0].status == 200


def test_a_foreign_origin_and_a_form_are_refused(server: Server) -> None:
    assert post(server, "/api/view", CASE, Origin="https://evil.example")[0].status == 403
    assert post(server, "/api/view", CASE, Origin="null")[0].status == 403
    assert post(server, "/api/view", CASE, Origin=server.url)[0].status == 200
    form = post(server, "/api/view", CASE, content_type="text/plain")
    assert form[0].status == 415


def test_bodies_are_bounded(server: Server) -> None:
    """By the length it announces, before any of it is read; and by what comes where it announces
    none.
    """
    with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)) as connection:
        connection.putrequest("POST", "/api/view")
        for name, value in (JSON | {"Content-Length": str(3 << 20)}).items():
            connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        assert answer.status == 413
        assert b"at most" in answer.read()
    with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)) as connection:
        # one byte too much: the server reads it all, and does not hang up on a client that is still
        # sending
        connection.request(
            "POST", "/api/view", iter([b" " * (MOST_BYTE + 1)]), JSON, encode_chunked=True
        )
        assert connection.getresponse().status == 413


def test_errors_tell_nothing_of_the_inside(server: Server) -> None:
    for body in (
        b"",
        b"{",
        b"[" * 5000,
        b"\x00\xff",
        b'{"gpu": "h200", "model": "gpt2", "batch": 1e999}',
    ):
        for path in (
            "/api/view",
            "/api/predict",
            "/api/figure",
            "/api/csv",
            "/api/report",
            "/api/room",
            *VERBS,
        ):
            answer, data = ask(server, "POST", path, body, content_type="application/json")
            assert answer.status == 422, (path, body[:20])
            assert set(json.loads(data)) == {"error"}
            assert b"Traceback" not in data
            assert b".py" not in data
    answer, data = ask(server, "GET", "/api/live?speed=fast")
    assert answer.status == 422
    assert "speed" in json.loads(data)["error"]
    answer, data = ask(server, "DELETE", "/api/view")
    assert answer.status == 405
    assert set(json.loads(data)) == {"error"}


def test_a_recorded_run_is_streamed_in_order(server: Server) -> None:
    answer, data = ask(server, "GET", "/api/live?speed=100")
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = [block.split("\n") for block in data.decode().strip().split("\n\n")]
    names = [event[0].removeprefix("event: ") for event in events]
    assert (names[0], names[-1]) == ("about", "end")
    points = [p for event in events[1:-1] for p in json.loads(event[1].removeprefix("data: "))]
    assert points == recorded_feed().found
    times = [p["time_s"] for p in points]
    assert times == sorted(times)
    watts = [p["power_w"] for p in points if "power_w" in p]
    assert max(watts) == pytest.approx(
        734.0, abs=1.0
    )  # the governor lets so much pass before it cuts
    energy_j = [p["energy_j"] for p in points if "energy_j" in p]
    assert energy_j == sorted(energy_j)
    about = json.loads(ask(server, "GET", "/api/live/about")[1])
    assert about["recorded"]
    assert about["gpu"] == "h200"


def test_a_slow_body_is_given_up() -> None:
    """A request whose body trickles in must not hold anything for long."""

    async def receive():
        await asyncio.sleep(0.01)
        return {"type": "http.request", "body": b"x", "more_body": True}

    scope = {"type": "http", "method": "POST", "headers": [(b"host", b"localhost")]}
    with pytest.raises(HTTPException, match="did not arrive within") as refused:
        asyncio.run(read_body(Request(scope, receive), arrive_s=0.1))
    assert refused.value.status_code == 408


def test_who_plans_is_still_answered() -> None:
    """Two plans of a client took both of its places: its first screen stayed empty until they were
    done.
    """

    async def run() -> None:
        done, answered = asyncio.Event(), []

        class SlowPlans(WorkerPool):
            async def ask(self, kind: str, body: bytes) -> Answer:
                if kind == "plan":
                    await done.wait()
                answered.append(kind)
                done.set()
                return Answer(200, "application/json", b"{}")

        async def receive() -> dict:
            return {"type": "http.request", "body": b"{}", "more_body": False}

        async def send(message: dict) -> None:
            assert message

        guard = make_app(SlowPlans(), recorded_feed())
        headers = [
            (b"host", b"localhost"),
            (b"content-length", b"2"),
            (b"content-type", b"application/json"),
        ]
        scope = {"type": "http", "method": "POST", "headers": headers, "query_string": b""}
        paths = ("/api/plan", "/api/plan", "/api/view")
        await asyncio.wait_for(
            asyncio.gather(*(guard(scope | {"path": p}, receive, send) for p in paths)), 20.0
        )
        assert answered == ["view", "plan", "plan"]

    asyncio.run(run())


def test_a_request_that_takes_too_long_is_stopped_and_the_next_is_answered() -> None:
    ops = [{"op": "linear", "m": 16 + i, "n": 4096, "k": 4096} for i in range(15_000)]
    heavy = json.dumps(
        {"gpu": "h200", "file": {"name": "w", "content": {"name": "x", "ops": ops}}}
    ).encode()

    async def run() -> None:
        async with WorkerPool(1, limit_s=0.5) as pool:
            began_s = time.monotonic()
            stopped = await pool.ask("view", heavy)
            assert time.monotonic() - began_s < 30
            assert stopped.status == 503
            assert "took longer than 0.5 s" in json.loads(stopped.body)["error"]
            assert pool.ended == 1
            for _ in range(100):  # a busy machine may need more than half a second for the first
                again = await pool.ask("room", json.dumps(CASE).encode())
                if again.status == 200:
                    break
            assert again.status == 200

    asyncio.run(run())


def test_a_worker_that_dies_is_replaced() -> None:
    async def run() -> None:
        async with WorkerPool(1, limit_s=60) as pool:
            for process in list(pool._all):
                process.kill()
            assert (await pool.ask("view", json.dumps(CASE).encode())).status == 500
            assert (await pool.ask("view", json.dumps(CASE).encode())).status == 200

    asyncio.run(run())


def test_it_listens_on_loopback_unless_told_who_else_it_is() -> None:
    with pytest.raises(BadInput, match="--allow-host"):
        serve_page("0.0.0.0", 0, recorded_feed())
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(Refused, match="another --port"):
            open_socket("127.0.0.1", taken.getsockname()[1])


@pytest.mark.parametrize("library", ["fastapi", "uvicorn"])
def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch, call, library: str) -> None:
    """After a plain ``pip install .``, serve said "internal error" instead of what to install."""
    monkeypatch.delitem(sys.modules, "wattcast.web.http_app")
    monkeypatch.setitem(sys.modules, library, None)
    said = call("serve", "--port", "0")
    assert said.code == ExitCode.MISSING
    assert f"the page needs {library}. Install it: pip install 'wattcast[serve]'." in said.err


def test_ctrl_c_ends_it_and_its_workers() -> None:
    running_server = Server("--live", "replay", "--workers", "1")
    assert post(running_server, "/api/view", CASE)[0].status == 200
    assert running_server.stop() in (0, 130)
    assert not [line for line in running_server.said if "Traceback" in line], running_server.said


def test_the_schema_names_every_route(server: Server) -> None:
    plain = json.loads(ask(server, "GET", "/openapi.json")[1])
    assert plain["openapi"].startswith("3.1")
    wanted = {
        "/api/predict",
        "/api/view",
        "/api/room",
        "/api/power",
        "/api/kernel",
        "/api/hall",
        "/api/csv",
        "/api/figure",
        "/api/report",
        "/api/catalogue",
    }
    assert wanted | {"/api/live", "/api/live/about", "/api/health", "/api/gpu", *VERBS} == set(
        plain["paths"]
    )
    names = plain["components"]["schemas"]
    assert {
        "Configuration",
        "ConfigurationList",
        "FigureRequest",
        "ViewOut",
        "PredictOut",
        "ErrorOut",
    } <= set(names)
    assert "h200" in names["Configuration"]["properties"]["gpu"]["enum"]
