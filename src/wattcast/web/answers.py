"""Answer requests: bytes in, bytes out, in a process that may be ended at any time.

Nothing here opens a file that a request names. A few parsed uploads are kept.
"""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import count
from pathlib import PurePath
from typing import Any

import msgspec
import numpy as np

from wattcast import __version__, hardware
from wattcast.core import (
    BadInput,
    Dtype,
    bad_value,
    clip_text,
)
from wattcast.core.errors import WattcastError
from wattcast.core.strict_files import decode_json, encode_csv
from wattcast.hardware import Gpu, OperatingPoint
from wattcast.hardware.gpu import CardUse, list_published_numbers
from wattcast.predictor.answer_lines import rank_assumptions
from wattcast.predictor.bundle import bundle_for, fit_status
from wattcast.predictor.bundle.bundle_file import Bundle
from wattcast.predictor.prediction import Prediction
from wattcast.predictor.prediction_json import (
    PredictionOut,
    predictions_to_output,
    take_fields,
)
from wattcast.predictor.prediction_values import OperatorShare
from wattcast.predictor.prices import parse_prices
from wattcast.predictor.runnable_checks import check_power_limit
from wattcast.report import configuration_view
from wattcast.report.comparison import compare_runs, summarise_prediction
from wattcast.report.comparison_report import comparison_to_plain, write_sentence
from wattcast.report.figure_style import check_figure_format, encode_figure
from wattcast.report.html_report import build_report_page
from wattcast.report.kernel_report import kernel_to_plain, view_numbered_kernel
from wattcast.report.prediction_figures import (
    draw_clock_curves,
    draw_figure,
    find_roofs,
)
from wattcast.serving.capacity_plan import plan
from wattcast.serving.engine_simulator import limit_events
from wattcast.serving.simulate_serving import simulate
from wattcast.serving.trace_files import parse_trace
from wattcast.timeseries.power_curve import STATES
from wattcast.timeseries.power_series import sample_curves
from wattcast.timeseries.step_power import trace_prediction
from wattcast.training.train_job import train
from wattcast.training.training_report import summarise_training
from wattcast.web import request_schema
from wattcast.web.hall_answer import answer_hall
from wattcast.workload import model_catalogue
from wattcast.workload.build_model import count_parameters
from wattcast.workload.graph import Graph
from wattcast.workload.model_catalogue import ModelSpec
from wattcast.workload.model_options import ModelOptions
from wattcast.workload.readers import (
    from_huggingface,
    from_json,
    from_profiler,
)

MOST_OPS = 24
MOST_POINTS = 240  # of a curve over time
MOST_CAUSES = 8  # operators that explain a difference


class GpuOut(msgspec.Struct):
    name: str
    title: str
    use: str  # data-centre | workstation | museum
    architecture: str
    coefficients: str  # measured | calibrated | forecast
    memory_byte: float
    memory_kind: str
    byte_per_s: float
    flop_per_s: float | None  # dense, of the tensor cores in 16-bit formats at the boost clock
    min_clock_hz: float
    max_clock_hz: float
    step_clock_hz: float | None
    min_limit_w: float
    max_limit_w: float
    limit_w: float
    dtypes: list[str]  # of its tensor cores


class ModelOut(msgspec.Struct):
    name: str
    title: str
    kind: str
    parameters: int
    context: int | None  # tokens it was made for


class CatalogueOut(msgspec.Struct):
    wattcast: str
    gpus: list[GpuOut]
    models: list[ModelOut]


class GpuDetailOut(msgspec.Struct):
    """Every number of a GPU with its source, and why the others are unknown."""

    name: str
    title: str
    process: str
    numbers: list[dict[str, Any]]
    unknown: dict[str, str]


class OpGroupOut(msgspec.Struct):
    """Operators of one kind at one place in the model, and of as many rows where they are
    products.
    """

    name: str
    kernel: int  # number of its operator of most energy, as `predict --kernel` takes it
    count: int
    latency_s: float
    energy_j: float
    part_j: list[float]  # in the order of the prediction's modules
    flop_per_byte: float | None  # None: no arithmetic
    flop_per_s: float


class ClocksOut(msgspec.Struct):
    asked_hz: list[float]
    clock_hz: list[float]
    latency_s: list[float]
    power_w: list[float]
    energy_j: list[float]


class ViewOut(msgspec.Struct):
    wattcast: str
    prediction: PredictionOut  # with the operators of most energy
    more_ops: int
    phase: str  # of a model; empty for a whole picture
    item: str  # what is counted where it is not tokens
    capacity_byte: float
    roofs: dict[str, float]  # peak FLOP/s by pipe
    byte_per_s: dict[str, float]  # by memory
    groups: list[OpGroupOut]  # those of most energy first
    clocks: ClocksOut


class PowerOut(msgspec.Struct):
    """Power of all GPUs over one run, by part; the means of equal intervals."""

    start_s: list[float]
    length_s: float
    part_w: dict[str, list[float]]
    state: list[str]  # what the GPUs did most in each interval


class RoomOut(msgspec.Struct):
    """Bytes by purpose, and the largest batch that fits; null where a list of operators does not
    say.
    """

    capacity_byte: float
    held: dict[str, float] | None
    total_byte: float | None
    fits: bool | None
    largest_batch: int | None


class ErrorOut(msgspec.Struct):
    error: str


def list_catalogue() -> CatalogueOut:
    """Return every GPU and model with its key facts; cards in data centres come first, those of
    museums last.
    """
    gpus = sorted(
        map(hardware.load_gpu, hardware.gpu_names()), key=lambda gpu: list(CardUse).index(gpu.use)
    )
    models = [
        ModelOut(
            m.name,
            m.title,
            str(m.kind),
            count_parameters(m),
            getattr(m.dims, "max_positions", None),
        )
        for m in model_catalogue.models()
    ]
    return CatalogueOut(__version__, list(map(_gpu_to_output, gpus)), models)


def _gpu_to_output(gpu: Gpu) -> GpuOut:
    low_hz, high_hz = configuration_view.find_clock_span(gpu)
    limit_w = float(np.mean(gpu.power.limit_w))
    least = gpu.power.min_limit_w
    most = gpu.power.max_limit_w
    step = gpu.clocks.step_hz
    tensor = gpu.pipes.tensor_flop_per_cycle
    rate = tensor.get(Dtype.BF16, tensor.get(Dtype.FP16))
    cycles = float(np.mean(gpu.sm_count)) * float(np.mean(gpu.clocks.boost_hz))
    return GpuOut(
        **take_fields(gpu, "name", "title", "architecture"),
        use=str(gpu.use),
        coefficients=str(fit_status(gpu.name)),
        memory_byte=float(np.mean(gpu.memory.capacity_byte)),
        memory_kind=gpu.memory.kind,
        byte_per_s=float(np.mean(gpu.memory.byte_per_s)),
        flop_per_s=None if rate is None else float(np.mean(rate)) * cycles,
        min_clock_hz=low_hz,
        max_clock_hz=high_hz,
        step_clock_hz=None if step is None else float(np.mean(step)),
        min_limit_w=0.3 * limit_w if least is None else float(np.mean(least)),
        max_limit_w=limit_w if most is None else float(np.mean(most)),
        limit_w=limit_w,
        dtypes=[str(dtype) for dtype in tensor],
    )


def view_to_output(seen: configuration_view.ConfigurationView) -> ViewOut:
    """Convert one configuration, short enough to be sent at every move of a slider."""
    p = seen.prediction
    shown = predictions_to_output([p], MOST_OPS).predictions[0]
    shown.assumptions = rank_assumptions(p)
    memory_byte_per_s = {"DRAM": float(np.mean(seen.gpu.memory.byte_per_s))}
    if seen.gpu.l2.byte_per_cycle is not None:
        memory_byte_per_s["L2"] = float(np.mean(seen.gpu.l2.byte_per_cycle)) * float(
            p.effective_clock_hz
        )
    return ViewOut(
        wattcast=__version__,
        prediction=shown,
        more_ops=len(p.basis.timeline.calls) - len(shown.ops),
        phase="" if p.parts else str(p.basis.graph.phase),
        item=p.basis.graph.item,
        capacity_byte=float(np.mean(seen.gpu.memory.capacity_byte)),
        roofs=find_roofs(p, seen.gpu),
        byte_per_s=memory_byte_per_s,
        groups=_group_operators(p),
        clocks=ClocksOut(**{name: values.tolist() for name, values in seen.clocks.items()}),
    )


def _group_operators(p: Prediction) -> list[OpGroupOut]:
    members: dict[str, list[tuple[int, OperatorShare]]] = {}
    for number, share in enumerate(p.ops, start=1):
        rows = getattr(share.op, "m", None)
        place = share.op.label.removeprefix("layers.").replace(".", " ")
        kind = share.op.name.removeprefix("engine_").replace("_", " ")
        words = kind if kind in place else f"{place} {kind}"
        members.setdefault(words.strip() + ("" if rows is None else f", {rows} rows"), []).append(
            (number, share)
        )
    groups = [_add_up_group(name, numbered, p) for name, numbered in members.items()]
    return sorted(groups, key=lambda group: -group.energy_j)[:MOST_OPS]


def _add_up_group(
    name: str,
    numbered: Sequence[tuple[int, OperatorShare]],
    p: Prediction,
) -> OpGroupOut:
    """Return what the operators of a group take together, and the number of the largest."""
    flop = 0.0
    byte = 0.0
    seconds = 0.0
    joules = 0.0
    for _, share in numbered:
        flop += float(share.op.flop) * share.count
        byte += float(share.op.read_byte + share.op.write_byte) * share.count
        seconds += float(share.latency_s)
        joules += float(share.energy_j)
    latency_s = np.array([share.latency_s for _, share in numbered])
    rows = [share.row for _, share in numbered]
    part_j = latency_s @ p.basis.detail.kernel_part_w[rows]
    largest = max(numbered, key=lambda one: float(one[1].energy_j))
    return OpGroupOut(
        name=name,
        kernel=largest[0],
        count=sum(share.count for _, share in numbered),
        latency_s=seconds,
        energy_j=joules,
        part_j=part_j.tolist(),
        flop_per_byte=flop / byte if flop > 0 and byte > 0 else None,
        flop_per_s=flop / max(seconds, 1e-12),
    )


def operators_to_csv(seen: Sequence[configuration_view.ConfigurationView]) -> bytes:
    """Write a line for each operator of each configuration, with SI units in the head."""
    parts = list(dict.fromkeys(m.name for look in seen for m in look.prediction.modules))
    fixed = [
        "configuration",
        "workload",
        "gpu",
        "operator",
        "label",
        "count",
        "latency_s",
        "power_w",
        "energy_j",
    ]
    lines: list[list[object]] = [[*fixed, *(f"{part}_w" for part in parts)]]
    for index, look in enumerate(seen, start=1):
        p = look.prediction
        for share in p.ops:
            watts = {m.name: float(m.power_w) for m in share.modules}
            words = [p.name, p.gpu, str(share.op), share.op.label]
            # a spreadsheet would take such text for a formula (OWASP, CSV injection)
            words = [f"'{word}" if word[:1] in tuple("=+-@\t\r") else word for word in words]
            numbers = [
                share.count,
                float(share.latency_s),
                float(share.power_w),
                float(share.energy_j),
            ]
            lines.append([index, *words, *numbers, *(watts.get(part, "") for part in parts)])
    return encode_csv(lines)


JSON = "application/json"
CSV = "text/csv; charset=utf-8"
HTML = "text/html; charset=utf-8"
TYPES = {
    "svg": "image/svg+xml",
    "png": "image/png",
    "pdf": "application/pdf",
}
MOST_OPERATORS = 20_000  # entries of an uploaded list, repeats not counted
MOST_EVENTS = 100_000  # of all simulations of a request, some five seconds


@dataclass(frozen=True)
class Answer:
    """One response."""

    status: int
    type: str
    body: bytes = b""


def answer_request(kind: str, body: bytes) -> Answer:
    """Answer a request; this never raises, and never tells about the inside."""
    try:
        takes, make = REQUEST_KINDS[kind]
        request = (
            body.decode("utf-8", "replace")
            if takes is str
            else request_schema.read_request(body, takes)
        )
        with limit_events(MOST_EVENTS):
            answer = make(request)
        return (
            answer if isinstance(answer, Answer) else Answer(200, JSON, msgspec.json.encode(answer))
        )
    except WattcastError as error:
        return make_refusal(422, str(error))
    except (RecursionError, MemoryError):
        return make_refusal(422, "the request asks for more than this server gives one request.")
    except Exception:
        _print_traceback()
        return make_refusal(500, "internal error; the server's log says more.")


MOST_TRACEBACKS = 20  # that one worker writes: who finds one request that fails can send it all day
_tracebacks = count()


def _print_traceback() -> None:
    written = next(_tracebacks)
    if written < MOST_TRACEBACKS:
        traceback.print_exc(file=sys.stderr)
    elif written == MOST_TRACEBACKS:
        print("wattcast: further internal errors of this worker are not written.", file=sys.stderr)


def make_refusal(status: int, text: str) -> Answer:
    """Make an error in the JSON form that all errors have."""
    return Answer(status, JSON, msgspec.json.encode(ErrorOut(clip_text(text, 2000))))


def _answer_gpu(name: str) -> GpuDetailOut:
    gpu = hardware.load_gpu(name)
    return GpuDetailOut(
        gpu.name,
        gpu.title,
        gpu.process,
        list_published_numbers(gpu),
        dict(gpu.unknown),
    )


def _answer_compare(asked: request_schema.ConfigurationList) -> dict[str, Any]:
    first, *other_runs = (summarise_prediction(view.prediction) for view in _views_of(asked))
    if not other_runs:
        raise bad_value("configurations", "two to four to compare", "one")
    pairs = []
    for other_run in other_runs:
        comparison = compare_runs(first, other_run)
        plain = comparison_to_plain(comparison) | {"sentence": write_sentence(comparison)}
        plain["operators"].sort(key=lambda pair: -abs(pair["total_energy_j"] or 0.0))
        del plain["operators"][MOST_CAUSES:]
        pairs.append(plain)
    return {"against_first": pairs}


_UNIT = re.compile(r"_(per_s|hz|w|s|c)$")
_NOT_SENT = {
    "model",
    "file",
    "price_per_h",
    "electricity_per_kwh",
    "gpu",
    "percentile",
    "trace_name",
    "precision",
}


# Fields whose default stands in the library: null over HTTP
_LEFT_OUT = ("pools", "concurrency")


def _library_keywords(asked: request_schema.Workload) -> dict[str, Any]:
    """Return the fields of a question as the library takes them: ``clock_hz`` is ``clock``, and
    numbers are SI.
    """
    keywords = {
        name: value
        for name, value in msgspec.structs.asdict(asked).items()
        if name not in _NOT_SENT
    }
    left_out = [name for name in _LEFT_OUT if keywords.get(name) is None]
    keywords = {name: value for name, value in keywords.items() if name not in left_out}
    return {_UNIT.sub("", name): value for name, value in keywords.items()} | dict(asked.prices())


def _answer_plan(asked: request_schema.PlanRequest) -> dict[str, Any]:
    keywords = _library_keywords(asked)
    cards = [_load_card(name)[0] for name in keywords.pop("gpus")]
    for name in ("ttft", "tpot"):
        keywords[name] = (
            None if keywords[name] is None else f"p{asked.percentile:g}:{keywords[name]}s"
        )
    return plan(
        _model_of(asked), cards, **keywords, requests=request_schema.PLAN_REQUESTS
    ).to_dict()


def _answer_simulate(asked: request_schema.SimulationRequest) -> dict[str, Any]:
    trace = (
        None
        if asked.trace is None
        else parse_trace(asked.trace.encode(), _clip_label(asked.trace_name))
    )
    count = len(trace) if trace is not None else (asked.rate_per_s or 0.0) * asked.seconds
    if count > request_schema.MOST_SIMULATED:
        most = f"over HTTP at most {request_schema.MOST_SIMULATED:,}"
        raise BadInput(f"{count:,.0f} requests; {most}. Use the command line.")
    # by its name alone: a path would name a file of the server
    draft = None if asked.draft is None else model_catalogue.load_model(asked.draft)
    keywords = _library_keywords(asked) | {"trace": trace, "draft": draft}
    result = simulate(_model_of(asked), _load_card(asked.gpu)[0], **keywords)
    start_s, power_w = result.power_over_time(result.length_s / MOST_POINTS)
    columns = {
        name: result.mean_over_time(name, start_s) for name in ("waiting", "decodes", "cache_use")
    }
    over_time = {
        "start_s": start_s,
        "power_w": power_w,
        **columns,
    }
    return result.summarise() | {
        "over_time": {name: values.tolist() for name, values in over_time.items()}
    }


def _answer_train(asked: request_schema.TrainingRequest) -> dict[str, Any]:
    keywords = _library_keywords(asked)
    return summarise_training(
        train(_model_of(asked), _load_card(asked.gpu)[0], dtype=asked.precision, **keywords)
    )


def _answer_figure(asked: request_schema.FigureRequest) -> Answer:
    check_figure_format(asked.format)
    seen = _views_of(asked)  # all of them, so that a wrong one is told even if not drawn
    drawn = (
        draw_clock_curves(seen) if asked.figure == "clocks" else draw_figure(asked.figure, seen[0])
    )
    return Answer(200, TYPES[asked.format], encode_figure(drawn, asked.format))


def _answer_report(asked: request_schema.ConfigurationList) -> Answer:
    main, *more = _views_of(asked)
    other_views = {f"{index}: {view.gpu.name}": view for index, view in enumerate(more, start=2)}
    page = build_report_page(main, other_views, "wattcast serve")
    return Answer(200, HTML, page.encode())


def _views_of(
    asked: request_schema.ConfigurationList,
) -> list[configuration_view.ConfigurationView]:
    return [_view_of(configuration) for configuration in asked.configurations]


def _view_of(asked: request_schema.Configuration) -> configuration_view.ConfigurationView:
    work = _load_workload(asked)
    options = ModelOptions() if isinstance(work, Graph) else asked.options()
    gpu, bundle = _load_card(asked.gpu)
    # ``force`` below lets through what does not fit; no card takes a limit that is not its own
    check_power_limit(gpu, OperatingPoint(power_limit_w=asked.power_limit_w), "")
    names = ("clock", "power_limit", "host_launch", "temperature", "duration", "data")
    keywords: Any = {
        name: value for name, value in _library_keywords(asked).items() if name in names
    }
    # ``force``: the page says what does not fit
    seen = configuration_view.view_configuration(
        work,
        gpu,
        options,
        **keywords,
        bundle=bundle,
        force=True,
    )
    prices = parse_prices(**asked.prices())
    assumptions = (*seen.prediction.assumptions, *prices.notes)
    priced = replace(seen.prediction, prices=prices, assumptions=assumptions)
    return replace(seen, prediction=priced)


def _answer_power(asked: request_schema.Configuration) -> PowerOut:
    curve = trace_prediction(_view_of(asked).prediction)
    series = sample_curves([curve], curve.length_s / MOST_POINTS, curve.length_s)
    part_w = series.part_j / series.duration_s[:, np.newaxis]
    return PowerOut(
        start_s=series.start_s.tolist(),
        length_s=curve.length_s,
        part_w=dict(zip(series.parts, part_w.T.tolist(), strict=True)),
        state=np.array(STATES)[series.state_s.argmax(axis=-1)].tolist(),
    )


def _answer_kernel(asked: request_schema.KernelRequest) -> dict[str, Any]:
    prediction = _view_of(asked).prediction
    return kernel_to_plain(view_numbered_kernel(prediction, asked.kernel))


def _answer_room(asked: request_schema.Configuration) -> RoomOut:
    work = _load_workload(asked)
    model = work if isinstance(work, ModelSpec) else None
    room = configuration_view.compute_memory_room(model, _load_card(asked.gpu)[0], asked.options())
    if room.footprint is None:
        return RoomOut(
            room.capacity_byte,
            None,
            None,
            None,
            None,
        )
    held_byte = {
        name.removesuffix("_byte"): float(value) for name, value in vars(room.footprint).items()
    }
    total = float(room.footprint.total_byte)
    return RoomOut(
        room.capacity_byte,
        held_byte,
        total,
        room.footprint.fits(room.capacity_byte),
        room.largest_batch,
    )


@lru_cache(maxsize=64)
def _load_card(name: str) -> tuple[Gpu, Bundle]:
    """Return a catalogue GPU, never a file, and its coefficients."""
    gpu = hardware.load_gpu(name)
    return gpu, bundle_for(gpu)


def _model_of(asked: request_schema.Workload) -> ModelSpec:
    work = _load_workload(asked)
    if isinstance(work, Graph):
        raise bad_value(
            "file", "a model: its name, or a Hugging Face config.json", "a list of operators"
        )
    return work


def _load_workload(asked: request_schema.Workload) -> ModelSpec | Graph:
    if (asked.model is None) == (asked.file is None):
        raise bad_value("request", "either a model or a file", "both" if asked.model else "neither")
    if asked.model is not None:
        return model_catalogue.load_model(asked.model)
    assert asked.file is not None
    return parse_upload(_clip_label(asked.file.name), bytes(asked.file.content))


def _clip_label(name: str) -> str:
    """Return the last part of a name, short enough for a sentence; it is never opened."""
    return clip_text(PurePath(name.replace("\\", "/")).name or "upload", 60)


@lru_cache(maxsize=16)
def parse_upload(label: str, content: bytes) -> ModelSpec | Graph:
    """Parse JSON that a user dropped on the page: a Hugging Face configuration, a trace or a list
    of operators.
    """
    request_schema.check_nesting(content, label)
    plain: Any = decode_json(content, object, label)
    if not isinstance(plain, (dict, list)):
        raise bad_value(label, "a JSON object or list", type(plain).__name__)
    keys = set(plain) if isinstance(plain, dict) else set()
    if keys & {"model_type", "architectures"}:
        return from_huggingface.parse_huggingface(content, label, label.removesuffix(".json"))
    graph = (
        from_profiler.parse_profile(content, label)
        if "traceEvents" in keys
        else from_json.parse_workload(content, label)
    )
    count = sum(len(block.ops) for block in graph.blocks)
    if count > MOST_OPERATORS:
        raise BadInput(
            f"{label}: {count:,} operators; over HTTP at most {MOST_OPERATORS:,}. Use the "
            "command line."
        )
    return graph


REQUEST_KINDS: dict[
    str, tuple[type, Callable[[Any], object]]
] = {  # what is read, and what answers it
    "catalogue": (str, lambda _: list_catalogue()),
    "gpu": (str, _answer_gpu),
    "predict": (
        request_schema.ConfigurationList,
        lambda asked: predictions_to_output([view.prediction for view in _views_of(asked)]),
    ),
    "view": (request_schema.Configuration, lambda asked: view_to_output(_view_of(asked))),
    "room": (request_schema.Configuration, _answer_room),
    "power": (request_schema.Configuration, _answer_power),
    "kernel": (request_schema.KernelRequest, _answer_kernel),
    "compare": (request_schema.ConfigurationList, _answer_compare),
    "plan": (request_schema.PlanRequest, _answer_plan),
    "simulate": (request_schema.SimulationRequest, _answer_simulate),
    "train": (request_schema.TrainingRequest, _answer_train),
    "hall": (request_schema.HallRequest, answer_hall),
    "csv": (
        request_schema.ConfigurationList,
        lambda asked: Answer(200, CSV, operators_to_csv(_views_of(asked))),
    ),
    "figure": (request_schema.FigureRequest, _answer_figure),
    "report": (request_schema.ConfigurationList, _answer_report),
}


FIRST_SCREEN = (
    b'{"gpu":"h200","model":"llama3-8b","batch":16,"seq":1024,"tokens":256,'
    b'"phase":"generate","stack":"engine"'
)
# what the page asks when it opens, byte by byte, so that the answers are known by then
FIRST_QUESTIONS = (
    ("catalogue", b""),
    ("view", FIRST_SCREEN + b',"price_per_h":2}'),
    ("room", FIRST_SCREEN + b"}"),
)
