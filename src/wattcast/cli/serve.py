"""``wattcast serve``: the page in the browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from wattcast.cli.environment import Environment

app = typer.Typer(help="A page in the browser, and the same over HTTP.")


@app.command()
def serve(
    ctx: typer.Context,
    host: Annotated[str, typer.Option(help="Address to listen on; the default is this machine only.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.", min=0, max=65535)] = 8080,
    allow_host: Annotated[
        list[str] | None, typer.Option(help="A further name the server answers to; may be repeated.")
    ] = None,
    workers: Annotated[int, typer.Option(help="Processes that predict.", min=1, max=64)] = 2,
    limit: Annotated[str, typer.Option(help="Longest time one request may take.")] = "15s",
    live: Annotated[str, typer.Option(help="auto|gpu|replay: what the live view shows.")] = "auto",
    replay: Annotated[
        Path | None, typer.Option(help="A recording of `wattcast measure run --save`, for the live view.")
    ] = None,
    device: Annotated[int, typer.Option(help="Which device, counted from 0.")] = 0,
) -> None:
    """Choose a model and a GPU, move clock and power limit, and see time, power and energy change.

    Example: wattcast serve --port 8080
    """
    from wattcast.errors import unknown_name
    from wattcast.units import parse
    from wattcast.web.live import choose
    from wattcast.web.serve import serve as run

    env: Environment = ctx.obj
    if live not in ("auto", "gpu", "replay"):
        raise unknown_name("live view", live, ("auto", "gpu", "replay"), "Known: auto, gpu, replay.")
    feed = choose(live, replay, index=device)
    run(host, port, feed, allow_host or [], workers, parse(limit, "s", "--limit"), env.say)
