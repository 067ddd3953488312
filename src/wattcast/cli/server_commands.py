"""``wattcast serve`` and ``wattcast export``."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wattcast.cli.shared_options import CommandOutput, Environment, command
from wattcast.core import files
from wattcast.core.errors import MissingTool, bad_value, check_names
from wattcast.core.units import parse, parse_amount
from wattcast.core.whole_files import write_whole

if TYPE_CHECKING:
    from wattcast.web.metrics_exporter import WatchedCard


@command("serve")
def serve(
    env: Environment,
    host: str = "127.0.0.1",
    port: int = 8080,
    allow_host: list[str] | None = None,
    trust_proxy: list[str] | None = None,
    workers: int = 2,
    limit: str = "15s",
    live: str = "auto",
    replay: Path | None = None,
    device: int | None = None,
) -> None:
    """Choose a model and a GPU, move clock and power limit, and see time, power and energy change.

    Example: wattcast serve --port 8080
    """
    try:
        from wattcast.web.http_app import serve_page
        from wattcast.web.live_stream import choose_feed
    except ModuleNotFoundError as error:
        raise MissingTool(
            f"the page needs {error.name}. Install it: pip install 'wattcast[serve]'."
        ) from None

    check_names("live view", live, ("auto", "gpu", "replay"))
    feed = choose_feed(live, replay, index=device)
    limit_s = parse(limit, "s", "--limit")
    serve_page(host, port, feed, allow_host or [], workers, limit_s, env.say, trust_proxy or [])


@command("export prometheus", "batch", "seq", "tokens", "phase", "dtype", "attention", "stack")
def prometheus(
    env: Environment,
    workload: list[str] | None = None,
    gpu: str | None = None,
    slowdown: str = "5%",
    host: str = "127.0.0.1",
    port: int = 9835,
    interval: str = "5s",
    idle_interval: str = "60s",
    source: str = "auto",
    allow_host: list[str] | None = None,
    once: bool = False,
    **options: Any,
) -> None:
    """Serve measured and modelled power, energy, clock and the predicted saving, for Prometheus to
    scrape.

    Example: wattcast export prometheus --workload llama3-8b --gpu h200 --batch 8 --seq 1024
    """
    from wattcast.predictor import api
    from wattcast.web import metrics_exporter

    parse_amount(slowdown, "", "--slowdown")
    models = []
    for work in workload or []:
        if gpu is None:
            raise bad_value("--workload", "a --gpu beside it", "none")
        chip = api.find_gpu(gpu)
        found = api.predict(work, chip, **options)
        models.append(metrics_exporter.model_workload(work, chip, found, slowdown, **options))
    cards = _find_cards(env, source, interval, idle_interval, bool(models))
    if once:
        env.stdout.write(metrics_exporter.write_metrics(cards, models).decode())
        return
    server, thread = metrics_exporter.serve_metrics(host, port, cards, models, allow_host or [])
    env.say(
        f"wattcast is scraped at http://{host}:{server.server_port}/metrics (stop it with Ctrl-C)"
    )
    try:
        thread.join()
    finally:
        server.shutdown()
        server.server_close()
        for card in cards:
            closing = threading.Thread(target=card.source.close, daemon=True)
            closing.start()
            closing.join(1.0)  # a driver that hangs closes with the process


def _find_cards(
    env: Environment, source: str, interval: str, idle_interval: str, enough: bool
) -> list[WatchedCard]:
    """Return the machine's cards; where there is a prediction to show, none is needed."""
    from wattcast.web.metrics_exporter import find_cards

    if source == "none":
        if not enough:
            raise bad_value("--source", "cards, or a --workload to predict", "none")
        return []
    try:
        found = find_cards(
            source, parse(interval, "s", "--interval"), parse(idle_interval, "s", "--idle-interval")
        )
        if not found:
            env.say("the driver does not answer; cards are shown as soon as it does.")
        return found
    except MissingTool as error:
        if not enough or source != "auto":
            raise
        env.say(f"no card is measured, only the prediction is shown: {error}")
        return []


@command("export grafana")
def grafana(env: Environment, out: Path) -> CommandOutput:
    """Write a Grafana dashboard of these metrics.

    Example: wattcast export grafana --out wattcast-dashboard.json
    """
    data = files("wattcast.web").joinpath("grafana.json").read_bytes()
    write_whole(out, data)
    env.say(f"dashboard saved: {out}")
    return CommandOutput({"file": str(out), "byte": len(data)}, "")
