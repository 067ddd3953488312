"""``wattcast simulate`` (serving under traffic), ``plan`` (how many GPUs serve it), ``check``
(whether it runs as planned) and ``train``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from wattcast.cli.command_builder import PLOT, command
from wattcast.cli.command_output import CommandOutput, Environment
from wattcast.cli.common_options import GPU, MODEL
from wattcast.cli.explore_commands import count_cores
from wattcast.core import bad_value
from wattcast.core.errors import ExitCode
from wattcast.core.option_declaration import Option
from wattcast.core.units import parse_seconds
from wattcast.core.whole_files import check_new_file
from wattcast.options.power_series_options import PowerOutput
from wattcast.options.serving_options import PLAN, SIMULATE
from wattcast.options.training_options import TRAIN


@command("simulate", SIMULATE, PLOT)
def simulate(
    env: Environment,
    model: Annotated[str, MODEL],
    gpu: Annotated[str, GPU],
    series: PowerOutput,
    out: Annotated[Path | None, Option("Save every request and step (.parquet).")] = None,
    **options: Any,
) -> CommandOutput:
    """Say how long requests take in an engine under load, and what they draw.

    Example: wattcast simulate llama3-8b --gpu h200 --rate 8/s --seconds 60
    """
    from wattcast.serving.serving_report import draw_serving, print_serving
    from wattcast.serving.serving_result import ServingResult
    from wattcast.serving.simulate_serving import simulate as simulate_serving

    if series.power_out is not None:
        from wattcast.timeseries.power_series import check_series_path

        check_series_path(series.power_out)
    if out is not None:
        check_new_file(out)
    result = simulate_serving(model, gpu, **options)
    if series.power_out is not None:
        from wattcast.timeseries.engine_power import split_engine_power, trace_serving
        from wattcast.timeseries.series_files import write_as_asked

        curves = trace_serving(result, split_engine_power(result, model, gpu, options))
        env.say(write_as_asked(curves, series, gpu, result.length_s))
    if out is not None:
        for path in result.write_requests_and_steps(out):
            env.say(f"written: {path}")
    return CommandOutput.of(result, ServingResult.summarise, print_serving, draw_serving)


@command("plan", PLAN, PLOT)
def plan(
    env: Environment,
    model: Annotated[str, MODEL],
    gpu: Annotated[str, Option("GPU names or YAML files, commas between.")],
    workers: Annotated[
        int | None,
        Option(
            "Processes that search kinds of GPU; default: one per core.",
            panel="The search",
            least=1,
        ),
    ] = None,
    write: Annotated[Path | None, Option("Folder for files that run and check it.")] = None,
    **options: Any,
) -> CommandOutput:
    """Find how many GPUs serve a rate, and how. Several models: explore fleet.

    Example: wattcast plan llama3-8b --rate 20/s --ttft p99:500ms --tpot p90:40ms
    --gpu h100-sxm,h200 --minimise cost --price h100-sxm=2.5,h200=3.5
    """
    from wattcast.serving import capacity_plan
    from wattcast.serving import plan_report as report

    try:
        count = count_cores() if workers is None else workers
        plan_result = capacity_plan.plan(
            model,
            gpu,
            progress=env.tell_progress,
            workers=count,
            **options,
        )
    except capacity_plan.PlanInterrupted as error:
        plan_result = error.result
    if write is not None:
        from wattcast.serving.deployment.write_deployment import write_deployment

        paths, notes = write_deployment(plan_result.best, model, write)
        for path in paths:
            env.say(f"written: {path}")
        for note in notes:
            env.say(f"note: {note}")
    output = CommandOutput.of(
        plan_result, type(plan_result).to_dict, report.print_plan, report.draw_plan
    )
    return replace(output, exit_code=0 if plan_result.is_complete else ExitCode.INTERRUPTED)


@dataclass(frozen=True)
class MetricsSource:
    """Where a check takes the metrics of a service from."""

    metrics: Annotated[
        list[str] | None,
        Option("Address of the engine's /metrics, or files of it in order; may be repeated."),
    ] = None
    prometheus: Annotated[
        str | None, Option("Prometheus server: http://localhost:9090, instead of --metrics.")
    ] = None
    window_s: Annotated[
        float,
        Option(
            "Time to look back, with --prometheus: 1h.",
            unit="s",
            above=0,
            parse=parse_seconds,
        ),
    ] = 3600.0
    slice_s: Annotated[
        float,
        Option(
            "Length of the parts of the window, which tell loads apart.",
            unit="s",
            above=0,
            parse=parse_seconds,
        ),
    ] = 300.0
    selector: Annotated[str, Option('Labels of the engine, such as job="vllm".')] = ""
    seconds: Annotated[
        float | None,
        Option(
            "Time between two readings, with --metrics.",
            unit="s",
            above=0,
            parse=parse_seconds,
        ),
    ] = None
    log: Annotated[
        list[Path] | None,
        Option("Log of a training job: trainer_state.json, W&B, MLflow; may be repeated."),
    ] = None


@command("check")
def check(
    env: Environment,
    expected: Annotated[
        Path, Option("The file of `plan --write` or of `train --write`.", positional=True)
    ],
    source: MetricsSource,
    gpu: Annotated[str | None, Option("The card's YAML file, if it is your own.")] = None,
    adopt: Annotated[bool, Option("From now on, expect what ran.")] = False,
    rows: Annotated[Path | None, Option("Write a CSV of rows for `calibrate`.")] = None,
) -> CommandOutput:
    """Compare a service or a training job that ran with its plan, and say what would explain
    differences.

    Example: wattcast check service/expected.json --prometheus http://localhost:9090

    Example: wattcast check service/expected.json --metrics before.txt --metrics after.txt --seconds
    600 --adopt

    Example: wattcast check job.json --log trainer_state.json --log system-metrics.jsonl
    """
    from wattcast.core.strict_files import read_bytes
    from wattcast.core.whole_files import write_whole
    from wattcast.serving.checking import check_report, metrics_window
    from wattcast.serving.checking.promised_replica import PromisedReplica
    from wattcast.serving.checking.service_check import check_service
    from wattcast.serving.deployment.expected_service import read_expected
    from wattcast.serving.deployment.write_deployment import write_expected

    if _is_training_job(read_bytes(expected), expected.name):
        return _check_training(env, expected, source, gpu, adopt, rows)
    if source.log is not None:
        raise bad_value("--log", "the file of `train --write`", str(expected))
    plan_of_service = read_expected(expected)
    if (source.metrics is None) == (source.prometheus is None):
        raise bad_value("check", "one of --metrics and --prometheus", "none or both")
    if source.prometheus is not None:
        windows = metrics_window.read_prometheus(
            source.prometheus, source.window_s, source.slice_s, source.selector
        )
    else:
        windows = metrics_window.read_scrapes(source.metrics or [], source.seconds)
    promised = PromisedReplica(plan_of_service, gpu)
    result = check_service(plan_of_service, windows, replica=promised, tell=env.tell_progress)
    if adopt:
        write_whole(expected, write_expected(result.adopt()).encode())
        env.say(f"adopted: later checks compare with this service ({expected})")
    if rows is not None:
        write_whole(rows, check_report.write_calibration_rows(result, promised).encode())
        env.say(f"written: {rows}; wattcast calibrate --gpu {plan_of_service.replica.gpu} {rows}")
    output = CommandOutput.of(result, check_report.summarise_check, check_report.print_check)
    has_alarm = result.has_alarm and not adopt
    return replace(output, exit_code=ExitCode.REFUSED if has_alarm else 0)


def _is_training_job(data: bytes, where: str) -> bool:
    """Tell whether a file of expectations is that of a training job."""
    from wattcast.training.checking.expected_job import is_training_job

    return is_training_job(data, where)


def _check_training(
    env: Environment,
    expected: Path,
    source: MetricsSource,
    gpu: str | None,
    adopt: bool,
    rows: Path | None,
) -> CommandOutput:
    """Compare a training job with its prediction."""
    from wattcast.core.whole_files import write_whole
    from wattcast.training.checking import expected_job, job_check, job_check_report
    from wattcast.training.checking.job_logs import read_job_logs

    if not source.log or source.metrics is not None or source.prometheus is not None:
        raise bad_value("check", "--log, and neither --metrics nor --prometheus", "other sources")
    job = expected_job.parse_expected_job(expected.read_bytes(), expected.name)
    if gpu is not None:
        job = replace(job, gpu=gpu)
    result = job_check.check_job(job, read_job_logs(source.log))
    if adopt:
        write_whole(expected, expected_job.write_expected_job(result.adopt()))
        env.say(f"adopted: later checks compare with this job ({expected})")
    if rows is not None:
        write_whole(rows, job_check_report.write_job_rows(result))
        env.say(f"written: {rows}; wattcast calibrate --gpu {job.gpu} {rows}")
    output = CommandOutput.of(
        result, job_check_report.summarise_job_check, job_check_report.print_job_check
    )
    has_alarm = result.has_alarm and not adopt
    return replace(output, exit_code=ExitCode.REFUSED if has_alarm else 0)


@command("train", TRAIN, PLOT)
def train(
    env: Environment,
    model: Annotated[str, MODEL],
    gpu: Annotated[str, GPU],
    series: PowerOutput,
    search: Annotated[bool, Option("Show all layouts that were compared.")] = False,
    write: Annotated[Path | None, Option("File for `wattcast check`.")] = None,
    details: Annotated[bool, Option("Print every assumption.")] = False,
    **options: Any,
) -> CommandOutput:
    """Say how long a training job takes, how many kWh, what it costs and how to share it over GPUs.

    Example: wattcast train llama3-8b --gpu h100-sxm --gpus 8 --tokens 1B --price 2.50/h --carbon
    germany"""
    from wattcast.training.train_job import train as train_job
    from wattcast.training.training_report import (
        draw_training,
        print_training,
        summarise_training,
    )

    if series.power_out is not None:
        from wattcast.timeseries.power_series import check_series_path

        check_series_path(series.power_out)
    result = train_job(model, gpu, progress=env.tell_progress, **options)
    if series.power_out is not None:
        from wattcast.timeseries.job_power import trace_training
        from wattcast.timeseries.series_files import write_as_asked

        curve = trace_training(result)
        env.say(write_as_asked([curve], series, gpu, curve.length_s))
    if write is not None:
        from wattcast.core.whole_files import write_whole
        from wattcast.training.checking import expected_job

        names = expected_job.name_files_absolutely(model, gpu)
        job = expected_job.expect_job(*names, options, result)
        write_whole(write, expected_job.write_expected_job(job))
        env.say(f"written: {write}; wattcast check {write} --log LOG")
    text = partial(print_training, details=details, search=search)
    return CommandOutput.of(result, summarise_training, text, draw_training)
