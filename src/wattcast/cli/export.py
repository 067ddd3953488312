"""``wattcast export prometheus|grafana``: metrics for operators."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wattcast.cli.environment import Environment
from wattcast.cli.options import AttentionName, Batch, DtypeName, PhaseName, Seq, StackName, Tokens

if TYPE_CHECKING:
    from wattcast.web.exporter import Modelled
    from wattcast.web.readings import Card

app = typer.Typer(help="Metrics for operators: Prometheus and Grafana.", no_args_is_help=True)

OPTIONS = "batch seq tokens phase dtype attention stack".split()


@app.command()
def prometheus(
    ctx: typer.Context,
    workload: Annotated[
        list[str] | None, typer.Option(help="A model or workload file to show the prediction of; may be repeated.")
    ] = None,
    gpu: Annotated[str | None, typer.Option(help="With --workload: the GPU in the catalogue, or your YAML.")] = None,
    batch: Batch = 1,
    seq: Seq = None,
    tokens: Tokens = None,
    phase: PhaseName = None,
    dtype: DtypeName = "bf16",
    attention: AttentionName = "flash",
    stack: StackName = "eager",
    slowdown: Annotated[str, typer.Option(help="Slowdown allowed for the predicted saving.")] = "5%",
    host: Annotated[str, typer.Option(help="Address to listen on; the default is this machine only.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to be scraped on.", min=0, max=65535)] = 9835,
    interval: Annotated[str, typer.Option(help="A busy card is read at most this often.")] = "5s",
    idle_interval: Annotated[str, typer.Option(help="An idle card is left alone this long.")] = "60s",
    source: Annotated[str, typer.Option(help="auto|nvml|amd|rapl|none: where readings come from.")] = "auto",
    once: Annotated[bool, typer.Option("--once", help="Print the metrics and end (textfile collector).")] = False,
) -> None:
    """Measured and modelled power, energy, clock and the predicted saving, for Prometheus to scrape.

    Example: wattcast export prometheus --workload llama3-8b --gpu h200 --batch 8 --seq 1024
    """
    from wattcast.web import exporter

    env: Environment = ctx.obj
    given = {key: ctx.params[key] for key in OPTIONS}
    models = _models(workload or [], gpu, slowdown, given)
    cards = _cards(env, source, interval, idle_interval, bool(models))
    if once:
        env.stdout.write(exporter.exposition(cards, models).decode())
        return
    server, thread = exporter.serve(host, port, cards, models)
    env.say(f"wattcast is scraped at http://{host}:{server.server_port}/metrics (stop it with Ctrl-C)")
    try:
        thread.join()
    finally:
        server.shutdown()
        for card in cards:
            card.source.close()


def _models(workloads: list[str], gpu: str | None, slowdown: str, options: dict[str, Any]) -> list[Modelled]:
    from wattcast import api
    from wattcast.errors import bad_value
    from wattcast.web.exporter import modelled

    if not workloads:
        return []
    if gpu is None:
        raise bad_value("--workload", "a --gpu beside it", "none")
    chip = api.find_gpu(gpu)
    return [modelled(work, chip, api.predict(work, chip, **options), slowdown, **options) for work in workloads]


def _cards(env: Environment, source: str, interval: str, idle_interval: str, enough: bool) -> list[Card]:
    """The machine's cards; with a prediction to show, a machine without any will do."""
    from wattcast.errors import MissingTool, bad_value
    from wattcast.units import parse
    from wattcast.web.readings import find_cards

    if source == "none":
        if not enough:
            raise bad_value("--source", "cards, or a --workload to predict", "none")
        return []
    try:
        return find_cards(source, parse(interval, "s", "--interval"), parse(idle_interval, "s", "--idle-interval"))
    except MissingTool as error:
        if not enough or source != "auto":
            raise
        env.say(f"no card is measured, only the prediction is shown: {error}")
        return []


@app.command()
def grafana(
    ctx: typer.Context,
    out: Annotated[Path, typer.Option(help="The dashboard file to write, to be imported in Grafana.")],
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """A Grafana dashboard of these metrics.

    Example: wattcast export grafana --out wattcast-dashboard.json
    """
    from importlib.resources import files

    from wattcast.files import write_whole

    env: Environment = ctx.obj
    data = files("wattcast.web").joinpath("grafana.json").read_bytes()
    write_whole(out, data)
    if json:
        env.json({"file": str(out), "byte": len(data)})
    else:
        env.say(f"dashboard saved: {out}")
