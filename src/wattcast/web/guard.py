"""What every request passes before any of our code sees it, and what every response carries.

- The Host header must name this server: a foreign page that lets its own name point to loopback (DNS rebinding)
  sends its own name. A foreign Origin is refused for the same reason.
- A body has a size and a time in which it must arrive.
- Responses forbid scripts, styles, frames and requests that are not this server's own.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

from wattcast.web.ask import MOST_BYTE

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

ARRIVE_S = 10.0
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
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


class Guard:
    """ASGI middleware: Host and Origin, size and time of bodies, headers of responses, errors without tracebacks."""

    def __init__(
        self, app: App, hosts: Iterable[str], most_byte: int = MOST_BYTE, arrive_s: float = ARRIVE_S
    ) -> None:
        self._app = app
        self._hosts = {_name(host) for host in (*LOOPBACK, *hosts)}
        self._most_byte, self._arrive_s = most_byte, arrive_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        sent = _Sent(send)
        why = self._refused(scope)
        if why is not None:
            await _say(sent, *why)
            return
        try:
            await self._pass(scope, receive, sent)
        except _TooMuch as error:
            if not sent.begun:
                await _say(sent, *error.args)
        except Exception:
            if not sent.begun:
                await _say(sent, 500, "internal error; the server's log says more.")
            raise  # to the server's log

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] in ("GET", "HEAD"):
            await self._app(scope, receive, send)
            return
        body = await self._body(receive)
        handed = False

        async def whole() -> Message:
            nonlocal handed
            if handed:
                return await receive()
            handed = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, whole, send)

    async def _body(self, receive: Receive) -> bytes:
        chunks, size = [], 0
        try:
            async with asyncio.timeout(self._arrive_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise _TooMuch(400, "the request ended before its body did.")
                    chunks.append(message.get("body", b""))
                    size += len(chunks[-1])
                    if size > self._most_byte:
                        raise _TooMuch(413, f"request: expected at most {self._most_byte} bytes, got more.")
                    if not message.get("more_body"):
                        return b"".join(chunks)
        except TimeoutError:
            raise _TooMuch(408, f"the request's body did not arrive within {self._arrive_s:g} s.") from None

    def _refused(self, scope: Scope) -> tuple[int, str] | None:
        given: dict[bytes, list[bytes]] = {}
        for name, value in scope["headers"]:
            given.setdefault(name.lower(), []).append(value)
        hosts = given.get(b"host", [])
        if len(hosts) != 1 or _name(hosts[0].decode("latin-1")) not in self._hosts:
            return 421, "this server does not answer to that Host. Start it with --allow-host NAME to allow one."
        for origin in given.get(b"origin", []):
            if _name(origin.decode("latin-1").partition("://")[2]) not in self._hosts:
                return 403, "requests from other sites are not answered."
        length = given.get(b"content-length", [b"0"])[0]
        if length.isdigit() and int(length) > self._most_byte:
            return 413, f"request: expected at most {self._most_byte} bytes, got {int(length)}."
        return None


class _TooMuch(Exception):
    """Status and text of a body that is refused while it arrives."""


class _Sent:
    """Adds the headers, and knows whether a response has begun."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.begun = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.begun = True
            named = {name.lower() for name, _ in message.get("headers", [])}
            extra = [(k.encode(), v.encode()) for k, v in HEADERS.items() if k.encode() not in named]
            message = {**message, "headers": [*message.get("headers", []), *extra]}
        await self._send(message)


def _name(host: str) -> str:
    """The host of ``host:port``, ``[::1]:port`` or ``host``, in lower case."""
    host = host.strip().lower()
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0]


async def _say(send: Send, status: int, text: str) -> None:
    body = json.dumps({"error": text}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
