"""Run the server: loopback unless asked otherwise, no server header, no access log."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import sys
from collections.abc import Callable, Sequence

from wattcast.errors import MissingTool, Refused, bad_value
from wattcast.web.live import Feed
from wattcast.web.pool import LIMIT_S, Pool


def serve(
    host: str,
    port: int,
    feed: Feed,
    hosts: Sequence[str] = (),
    workers: int = 2,
    limit_s: float = LIMIT_S,
    say: Callable[[str], None] = lambda text: None,
) -> None:
    """Serve until interrupted. ``hosts`` are names, besides loopback's, that the server answers to."""
    try:
        import uvicorn

        from wattcast.web.app import make_app
    except ImportError:
        raise MissingTool(
            "the page needs FastAPI and uvicorn. Install them: pip install 'wattcast[serve]'."
        ) from None
    if not is_loopback(host) and not hosts:
        raise bad_value(
            "--allow-host", "the name others will type, beside a --host that others reach", "none",
            "The server answers only to names it knows.",
        )  # fmt: skip
    listening = listen(host, port)
    name = f"[{host}]" if ":" in host else host
    app = make_app(Pool(workers, limit_s), feed, [name, *hosts])
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        limit_concurrency=256,
        timeout_keep_alive=10,
        timeout_graceful_shutdown=2,
        ws="none",
    )
    say(f"wattcast serves http://{name}:{listening.getsockname()[1]}/ (stop it with Ctrl-C)")
    if not is_loopback(host):
        say("note: everyone who reaches this address may use it; there is no password and no encryption.")
    asyncio.run(uvicorn.Server(config).serve(sockets=[listening]))


def listen(host: str, port: int) -> socket.socket:
    """A bound socket, or an error that says what is in the way; port 0 takes a free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        if sys.platform != "win32":
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
        bound.listen(512)  # whoever comes before the workers are ready waits, and is not refused
    except (OSError, OverflowError) as error:
        bound.close()
        raise Refused(f"{host}:{port} cannot be served on ({error}). Choose another --port.") from None
    return bound


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address.

    >>> is_loopback("127.0.0.1"), is_loopback("::1"), is_loopback("0.0.0.0"), is_loopback("localhost")
    (True, True, False, True)
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
