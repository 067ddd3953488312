"""``wattcast serve`` and ``wattcast export``."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
)

import typer

from wattcast.cli.command_builder import command
from wattcast.cli.command_output import CommandOutput, Environment
from wattcast.cli.common_options import HOST
from wattcast.core import files
from wattcast.core.errors import (
    MissingTool,
    bad_value,
    check_names,
    import_extra,
)
from wattcast.core.option_declaration import Option
from wattcast.core.units import parse, parse_amount
from wattcast.core.whole_files import check_new_file, write_whole
from wattcast.options.run_options import ModelOptions
from wattcast.options.verb_options import part_of

if TYPE_CHECKING:
    from wattcast.web.metrics_exporter import WatchedCard


@dataclass(frozen=True)
class ServerOptions:
    """How the page is served."""

    host: Annotated[str, HOST] = "127.0.0.1"
    port: Annotated[int, Option("Port; 0 takes a free one.", least=0, most=65535)] = 8080
    allow_host: Annotated[
        list[str] | None, Option("A further name the server answers to; may be repeated.")
    ] = None
    trust_proxy: Annotated[
        list[str] | None,
        Option(
            "An address or network of a proxy whose X-Forwarded-For names the client; may "
            "be repeated."
        ),
    ] = None
    workers: Annotated[int, Option("Processes that predict.", least=1, most=64)] = 2
    limit: Annotated[str, Option("Longest time one request may take.")] = "15s"
    mcp: Annotated[
        bool, Option("Serve an assistant over stdin and stdout (Model Context Protocol).")
    ] = False
    live: Annotated[str, Option("auto|gpu|replay: what the live view shows.")] = "auto"
    replay: Annotated[
        Path | None, Option("A recording of `wattcast measure run --save`, for the live view.")
    ] = None
    device: Annotated[
        int | None,
        Option("Which device, counted from 0; default: the first that CUDA_VISIBLE_DEVICES shows."),
    ] = None


@command("serve")
def serve(
    env: Environment,
    server_options: ServerOptions,
) -> None:
    """Choose a model and a GPU, move clock and power limit, and see time, power and energy change.

    Example: wattcast serve --port 8080

    Example: wattcast serve --mcp
    """
    if server_options.mcp:
        serve_tools = import_extra(
            "wattcast.web.assistant_tools", "an assistant needs the library mcp", "mcp"
        )
        serve_tools.serve_assistant()
        return
    try:
        from wattcast.web.http_app import serve_page
        from wattcast.web.live_stream import choose_feed
    except ModuleNotFoundError as error:
        raise MissingTool(
            f"the page needs {error.name}. Install it: pip install 'wattcast[serve]'."
        ) from None

    check_names("live view", server_options.live, ("auto", "gpu", "replay"))
    feed = choose_feed(server_options.live, server_options.replay, index=server_options.device)
    limit_s = parse(server_options.limit, "s", "--limit")
    serve_page(
        server_options.host,
        server_options.port,
        feed,
        server_options.allow_host or [],
        server_options.workers,
        limit_s,
        env.say,
        server_options.trust_proxy or [],
    )


SHOWN_OPTIONS = ("batch", "seq", "tokens", "phase", "dtype", "attention", "stack")


@dataclass(frozen=True)
class ExporterOptions:
    """What is exported, and how often it is read."""

    gpu: Annotated[
        str | None, Option("With --workload: the GPU in the catalogue, or your YAML.")
    ] = None
    slowdown: Annotated[str, Option("Slowdown allowed for the predicted saving.")] = "5%"
    host: Annotated[str, HOST] = "127.0.0.1"
    port: Annotated[int, Option("Port that Prometheus reads.", least=0, most=65535)] = 9835
    interval: Annotated[str, Option("Shortest time between two readings of a busy card.")] = "5s"
    idle_interval: Annotated[str, Option("Time that an idle card is left alone.")] = "60s"
    source: Annotated[str, Option("auto|nvml|amd|rapl|none: where readings come from.")] = "auto"
    allow_host: Annotated[
        list[str] | None, Option("A further name the exporter answers to; may be repeated.")
    ] = None
    once: Annotated[bool, Option("Print the metrics and end (textfile collector).")] = False
    pods: Annotated[
        Path | None,
        Option(
            "Socket of the kubelet, for labels of pods: "
            "/var/lib/kubelet/pod-resources/kubelet.sock."
        ),
    ] = None
    jobs: Annotated[
        Path | None,
        Option("Folder of the Slurm prolog, for labels of jobs: /var/spool/wattcast."),
    ] = None


@command("export prometheus", part_of(ModelOptions, *SHOWN_OPTIONS))
def prometheus(
    env: Environment,
    exporter: ExporterOptions,
    workload: Annotated[
        list[str] | None,
        Option("A model or workload file to show the prediction of; may be repeated."),
    ] = None,
    **options: Any,
) -> None:
    """Serve measured and modelled power, energy, clock and the predicted saving, for Prometheus to
    scrape.

    Example: wattcast export prometheus --workload llama3-8b --gpu h200 --batch 8 --seq 1024
    """
    from wattcast.predictor import api
    from wattcast.web import metrics_exporter
    from wattcast.web.card_holders import HolderSources

    parse_amount(exporter.slowdown, "", "--slowdown")
    models = []
    for work in workload or []:
        if exporter.gpu is None:
            raise bad_value("--workload", "a --gpu as well", "none")
        chip = api.find_gpu(exporter.gpu)
        prediction = api.predict(work, chip, **options)
        models.append(
            metrics_exporter.model_workload(
                work,
                chip,
                prediction,
                exporter.slowdown,
                **options,
            )
        )
    cards = _find_cards(
        env,
        exporter.source,
        exporter.interval,
        exporter.idle_interval,
        bool(models),
    )
    holders = HolderSources(exporter.pods, exporter.jobs)
    if exporter.once:
        env.stdout.write(metrics_exporter.write_metrics(cards, models, holders).decode())
        return
    server, thread = metrics_exporter.serve_metrics(
        exporter.host,
        exporter.port,
        cards,
        models,
        exporter.allow_host or [],
        holders,
    )
    env.say(
        f"wattcast is scraped at http://{exporter.host}:{server.server_port}/metrics (stop "
        "it with Ctrl-C)"
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


@command("export dynamo")
def dynamo(
    env: Environment,
    file: Annotated[
        Path, Option("Manifest with a DynamoGraphDeployment (v1beta1).", positional=True)
    ],
    limits: Annotated[
        str, Option("Limit of each GPU by component or type: decode=350W,prefill=500W.")
    ],
    out: Annotated[Path | None, Option("Manifest to write; default: print it.")] = None,
) -> None:
    """Write the annotation by which Dynamo's power agent is told the limit of each GPU.

    Example: wattcast export dynamo graph.yaml --limits decode=350W,prefill=500W
    """
    from wattcast.core.strict_files import read_bytes
    from wattcast.serving.deployment import dynamo_limits

    limits_w = {}
    for name, limit in dynamo_limits.parse_limits(limits).items():
        limits_w[name] = parse_amount(limit, "W", "--limits", least=1.0)
    text = read_bytes(file).decode(errors="replace")
    annotated = dynamo_limits.annotate_deployment(text, file.name, limits_w)
    if out is None:
        env.stdout.write(annotated)
        return
    check_new_file(out)
    write_whole(out, annotated.encode())
    env.say(f"manifest saved: {out}")


@dataclass(frozen=True)
class CollectorOptions:
    """Where metrics are sent, and how often."""

    endpoint: Annotated[str, Option("Address of the collector, OTLP over HTTP.")] = (
        "http://localhost:4318"
    )
    source: Annotated[str, Option("auto|nvml|amd|rapl: where readings come from.")] = "auto"
    interval: Annotated[str, Option("Time between two sendings.")] = "15s"
    count: Annotated[int, Option("Number of sendings; 0: until interrupted.", least=0)] = 0
    metrics: Annotated[
        str | None,
        Option("Metrics of an engine (vLLM, SGLang), for the tokens of its requests."),
    ] = None
    model: Annotated[str | None, Option("With --metrics: the model that the engine serves.")] = None


@command("export otel")
def otel(env: Environment, options: CollectorOptions) -> None:
    """Send power and energy of the cards, and the tokens of an engine, to an OpenTelemetry
    collector.

    Example: wattcast export otel --endpoint http://localhost:4318
    """
    from wattcast.core.errors import ExitCode
    from wattcast.web import metrics_exporter, otlp_metrics

    if (options.metrics is None) != (options.model is None):
        raise bad_value("--metrics and --model", "both", "one of them")
    otlp_metrics.check_address(options.endpoint, "--endpoint")
    engine = None
    if options.metrics is not None and options.model is not None:
        otlp_metrics.check_address(options.metrics, "--metrics")
        engine = otlp_metrics.EngineTokens(options.metrics, options.model)
    interval_s = parse_amount(options.interval, "s", "--interval", inclusive=False)
    cards = metrics_exporter.find_cards(options.source)
    sent = otlp_metrics.push_metrics(
        options.endpoint,
        cards,
        interval_s,
        env.say,
        options.count,
        engine,
    )
    if not sent:
        raise typer.Exit(ExitCode.MISSING)


def _find_cards(
    env: Environment,
    source: str,
    interval: str,
    idle_interval: str,
    enough: bool,
) -> list[WatchedCard]:
    """Return the machine's cards; where there is a prediction to show, none is needed."""
    from wattcast.web.metrics_exporter import find_cards

    if source == "none":
        if not enough:
            raise bad_value("--source", "cards, or a --workload to predict", "none")
        return []
    try:
        cards = find_cards(
            source, parse(interval, "s", "--interval"), parse(idle_interval, "s", "--idle-interval")
        )
        if not cards:
            env.say("the driver does not answer; cards are shown as soon as it does.")
        return cards
    except MissingTool as error:
        if not enough or source != "auto":
            raise
        env.say(f"no card is measured, only the prediction is shown: {error}")
        return []


@command("export grafana")
def grafana(
    env: Environment,
    out: Annotated[Path, Option("The dashboard file to write, to be imported in Grafana.")],
) -> CommandOutput:
    """Write a Grafana dashboard of these metrics.

    Example: wattcast export grafana --out wattcast-dashboard.json
    """
    check_new_file(out)
    data = files("wattcast.web").joinpath("grafana.json").read_bytes()
    write_whole(out, data)
    env.say(f"dashboard saved: {out}")
    return CommandOutput({"file": str(out), "byte": len(data)}, "")
