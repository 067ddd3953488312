"""``wattcast serve`` and ``wattcast export``."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wattcast.cli.shared_options import Environment, Json, option, takes_options
from wattcast.core.errors import MissingTool, bad_value, check_names
from wattcast.core.units import parse, parse_amount
from wattcast.core.whole_files import write_whole

if TYPE_CHECKING:
    from wattcast.web.metrics_exporter import ModelledWorkload, WatchedCard


def serve(
    ctx: typer.Context,
    host: Annotated[str, option("Address to listen on; the default is this machine only.")] = "127.0.0.1",
    port: Annotated[int, option("Port; 0 takes a free one.", min=0, max=65535)] = 8080,
    allow_host: Annotated[list[str] | None, option("A further name the server answers to; may be repeated.")] = None,
    workers: Annotated[int, option("Processes that predict.", min=1, max=64)] = 2,
    limit: Annotated[str, option("Longest time one request may take.")] = "15s",
    live: Annotated[str, option("auto|gpu|replay: what the live view shows.")] = "auto",
    replay: Annotated[Path | None, option("A recording of `wattcast measure run --save`, for the live view.")] = None,
    device: Annotated[int, option("Which device, counted from 0.")] = 0,
) -> None:
    """Choose a model and a GPU, move clock and power limit, and see time, power and energy change.

    Example: wattcast serve --port 8080
    """
    try:
        from wattcast.web.http_app import serve_page
        from wattcast.web.live_stream import choose_feed
    except ModuleNotFoundError as error:
        raise MissingTool(f"the page needs {error.name}. Install it: pip install 'wattcast[serve]'.") from None

    env: Environment = ctx.obj
    check_names("live view", live, ("auto", "gpu", "replay"))
    feed = choose_feed(live, replay, index=device)
    serve_page(host, port, feed, allow_host or [], workers, parse(limit, "s", "--limit"), env.say)


export_app = typer.Typer(
    add_completion=False, help="Metrics for operators: Prometheus and Grafana.", no_args_is_help=True
)


@export_app.command()
@takes_options("batch", "seq", "tokens", "phase", "dtype", "attention", "stack")
def prometheus(
    ctx: typer.Context,
    workload: Annotated[
        list[str] | None, option("A model or workload file to show the prediction of; may be repeated.")
    ] = None,
    gpu: Annotated[str | None, option("With --workload: the GPU in the catalogue, or your YAML.")] = None,
    slowdown: Annotated[str, option("Slowdown allowed for the predicted saving.")] = "5%",
    host: Annotated[str, option("Address to listen on; the default is this machine only.")] = "127.0.0.1",
    port: Annotated[int, option("Port to be scraped on.", min=0, max=65535)] = 9835,
    interval: Annotated[str, option("A busy card is read at most this often.")] = "5s",
    idle_interval: Annotated[str, option("An idle card is left alone this long.")] = "60s",
    source: Annotated[str, option("auto|nvml|amd|rapl|none: where readings come from.")] = "auto",
    allow_host: Annotated[
        list[str] | None, option("A further name the exporter answers to; may be repeated.")
    ] = None,
    once: Annotated[bool, option("Print the metrics and end (textfile collector).", "--once")] = False,
    **options: Any,
) -> None:
    """Serve measured and modelled power, energy, clock and the predicted saving, for Prometheus to scrape.

    Example: wattcast export prometheus --workload llama3-8b --gpu h200 --batch 8 --seq 1024
    """
    from wattcast.web import metrics_exporter

    env: Environment = ctx.obj
    parse_amount(slowdown, "", "--slowdown")
    models = _predict_workloads(workload or [], gpu, slowdown, options)
    cards = _find_cards(env, source, interval, idle_interval, bool(models))
    if once:
        env.stdout.write(metrics_exporter.write_metrics(cards, models).decode())
        return
    server, thread = metrics_exporter.serve_metrics(host, port, cards, models, allow_host or [])
    env.say(f"wattcast is scraped at http://{host}:{server.server_port}/metrics (stop it with Ctrl-C)")
    try:
        thread.join()
    finally:
        server.shutdown()
        server.server_close()
        for card in cards:
            closing = threading.Thread(target=card.source.close, daemon=True)
            closing.start()
            closing.join(1.0)  # a driver that hangs closes with the process


def _predict_workloads(
    workloads: list[str], gpu: str | None, slowdown: str, options: dict[str, Any]
) -> list[ModelledWorkload]:
    from wattcast.predictor import api
    from wattcast.web.metrics_exporter import model_workload

    if not workloads:
        return []
    if gpu is None:
        raise bad_value("--workload", "a --gpu beside it", "none")
    chip = api.find_gpu(gpu)
    return [model_workload(work, chip, api.predict(work, chip, **options), slowdown, **options) for work in workloads]


def _find_cards(env: Environment, source: str, interval: str, idle_interval: str, enough: bool) -> list[WatchedCard]:
    """Return the machine's cards; where there is a prediction to show, none is needed."""
    from wattcast.web.metrics_exporter import find_cards

    if source == "none":
        if not enough:
            raise bad_value("--source", "cards, or a --workload to predict", "none")
        return []
    try:
        found = find_cards(source, parse(interval, "s", "--interval"), parse(idle_interval, "s", "--idle-interval"))
        if not found:
            env.say("the driver does not answer; cards are shown as soon as it does.")
        return found
    except MissingTool as error:
        if not enough or source != "auto":
            raise
        env.say(f"no card is measured, only the prediction is shown: {error}")
        return []


@export_app.command()
def grafana(
    ctx: typer.Context,
    out: Annotated[Path, option("The dashboard file to write, to be imported in Grafana.")],
    json: Json = False,
) -> None:
    """Write a Grafana dashboard of these metrics.

    Example: wattcast export grafana --out wattcast-dashboard.json
    """
    from importlib.resources import files

    env: Environment = ctx.obj
    data = files("wattcast.web").joinpath("grafana.json").read_bytes()
    write_whole(out, data)
    if json:
        env.json({"file": str(out), "byte": len(data)})
    else:
        env.say(f"dashboard saved: {out}")
