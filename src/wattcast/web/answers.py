"""Answer requests: bytes in, bytes out, in a process that may be ended at any time.

Nothing here opens a file that a request names. A few parsed uploads and whole answers are kept.
"""

from __future__ import annotations

import csv
import hashlib
import io
import sys
import traceback
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import PurePath

import msgspec
import numpy as np

from wattcast import __version__, hardware
from wattcast.core.errors import BadInput, WattcastError, bad_value, clip_text
from wattcast.hardware import Gpu
from wattcast.predictor.bundle import bundle_for
from wattcast.predictor.bundle.bundle_file import Bundle
from wattcast.predictor.prediction_json import (
    IntervalOut,
    ProvenanceOut,
    SupportOut,
    interval_to_output,
    predictions_to_output,
    provenance_to_output,
    support_to_output,
)
from wattcast.report.configuration_view import (
    ConfigurationView,
    MemoryRoom,
    PowerTrace,
    RunSettings,
    compute_memory_room,
    find_clock_span,
    view_configuration,
)
from wattcast.report.figure_style import encode_figure
from wattcast.report.html_report import build_report_page
from wattcast.report.prediction_figures import draw_clock_curves, draw_figure
from wattcast.web.request_schema import Configuration, ConfigurationList, FigureRequest, check_nesting, read_request
from wattcast.workload import model_catalogue
from wattcast.workload.graph import Graph
from wattcast.workload.model_catalogue import ModelSpec
from wattcast.workload.model_options import ModelOptions
from wattcast.workload.readers import from_huggingface, from_json, from_profiler

BINS = 240
CLOSE = 80  # launches and gaps shown closely
MOST_OPS = 40


class GpuOut(msgspec.Struct):
    name: str
    title: str
    coefficients: str  # measured | calibrated | forecast
    memory_byte: float
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


class CatalogueOut(msgspec.Struct):
    wattcast: str
    gpus: list[GpuOut]
    models: list[ModelOut]


class OpOut(msgspec.Struct):
    operator: str
    count: int
    latency_s: float
    power_w: float
    energy_j: float
    part_w: list[float]  # in the order of ``parts``


class TraceOut(msgspec.Struct):
    """Mean watts by part in steps that follow one another."""

    edge_s: list[float]  # one more than steps
    part_w: list[list[float]]  # [part][step]
    waiting: list[float]  # share of each step the device waits
    whole: bool  # False: stretches of the issue order are drawn at their mean


class ClocksOut(msgspec.Struct):
    asked_hz: list[float]
    clock_hz: list[float]
    latency_s: list[float]
    power_w: list[float]
    energy_j: list[float]


class ViewOut(msgspec.Struct):
    wattcast: str
    name: str
    gpu: str
    latency_s: float
    power_w: float
    energy_j: float
    clock_hz: float
    effective_clock_hz: float
    capped: bool
    busy_s: float
    peak_power_w: float
    memory_byte: float | None
    capacity_byte: float
    fits: bool | None
    interval: IntervalOut
    support: SupportOut
    parts: list[str]
    part_w: list[float]
    utilisation: list[float | None]
    ops: list[OpOut]  # those of most energy
    more_ops: int
    trace: TraceOut
    close: TraceOut | None
    clocks: ClocksOut
    assumptions: list[str]
    provenance: ProvenanceOut


class RoomOut(msgspec.Struct):
    """Bytes by purpose, and the largest batch that fits; null where a list of operators does not say."""

    capacity_byte: float
    held: dict[str, float] | None
    total_byte: float | None
    fits: bool | None
    largest_batch: int | None


class ErrorOut(msgspec.Struct):
    error: str


def list_catalogue() -> CatalogueOut:
    """Return every GPU and model by name, with the range of its sliders."""
    return CatalogueOut(
        __version__, [_gpu(name) for name in hardware.gpu_names()], [_model(n) for n in model_catalogue.list_models()]
    )


def _gpu(name: str) -> GpuOut:
    gpu = hardware.load_gpu(name)
    low_hz, high_hz = find_clock_span(gpu)
    limit_w = float(np.mean(gpu.power.limit_w))
    least, most, step = gpu.power.min_limit_w, gpu.power.max_limit_w, gpu.clocks.step_hz
    return GpuOut(
        name=gpu.name,
        title=gpu.title,
        coefficients=str(bundle_for(gpu).status),
        memory_byte=float(np.mean(gpu.memory.capacity_byte)),
        min_clock_hz=low_hz,
        max_clock_hz=high_hz,
        step_clock_hz=None if step is None else float(np.mean(step)),
        min_limit_w=0.3 * limit_w if least is None else float(np.mean(least)),
        max_limit_w=limit_w if most is None else float(np.mean(most)),
        limit_w=limit_w,
        dtypes=[str(dtype) for dtype in gpu.pipes.tensor_flop_per_cycle],
    )


def _model(name: str) -> ModelOut:
    model = model_catalogue.load_model(name)
    return ModelOut(model.name, model.title, str(model.kind))


def view_to_output(seen: ConfigurationView) -> ViewOut:
    """Convert one configuration, short enough to be sent at every move of a slider."""
    p = seen.prediction
    ranked = sorted(p.ops, key=lambda o: -float(o.energy_j))
    middle = len(seen.trace.start_s) // 2
    close = len(seen.trace.start_s) > 2 * CLOSE and seen.trace.whole
    return ViewOut(
        wattcast=__version__,
        name=p.name,
        gpu=p.gpu,
        latency_s=float(p.latency_s),
        power_w=float(p.power_w),
        energy_j=float(p.energy_j),
        clock_hz=float(p.clock_hz),
        effective_clock_hz=float(p.effective_clock_hz),
        capped=bool(p.capped),
        busy_s=float(p.busy_s),
        peak_power_w=float(p.peak_power_w),
        memory_byte=p.memory_byte,
        capacity_byte=float(np.mean(seen.gpu.memory.capacity_byte)),
        fits=p.fits,
        interval=interval_to_output(p),
        support=support_to_output(p),
        parts=[m.name for m in p.modules],
        part_w=[float(m.power_w) for m in p.modules],
        utilisation=[None if m.utilisation is None else float(m.utilisation) for m in p.modules],
        ops=[
            OpOut(
                str(o.op),
                o.count,
                float(o.latency_s),
                float(o.power_w),
                float(o.energy_j),
                _short(np.array([float(m.power_w) for m in o.modules])),
            )
            for o in ranked[:MOST_OPS]
        ],
        more_ops=max(len(ranked) - MOST_OPS, 0),
        trace=_trace(seen.trace, BINS),
        close=_trace(seen.trace.part(middle, middle + CLOSE), CLOSE) if close else None,
        clocks=ClocksOut(**{name: values.tolist() for name, values in seen.clocks.items()}),
        assumptions=list(p.assumptions),
        provenance=provenance_to_output(p),
    )


def _trace(trace: PowerTrace, bins: int) -> TraceOut:
    shown = trace.binned(bins)
    edges = np.append(shown.start_s, shown.end_s[-1])
    known = np.append(trace.start_s, trace.end_s[-1])
    waited_s = np.concatenate([[0.0], np.cumsum((trace.end_s - trace.start_s) * trace.idle)])
    share = np.diff(np.interp(edges, known, waited_s)) / np.diff(edges)
    return TraceOut(
        edges.tolist(), [_short(part) for part in shown.part_w.T], np.round(share, 3).tolist(), trace.whole
    )


def _short(watts: np.ndarray) -> list[float]:
    """Round to a tenth of a watt, which is finer than any screen."""
    rounded: list[float] = np.round(watts, 1).tolist()
    return rounded


def room_to_output(found: MemoryRoom) -> RoomOut:
    """Convert what a run holds in memory."""
    if found.footprint is None:
        return RoomOut(found.capacity_byte, None, None, None, None)
    held = {name.removesuffix("_byte"): float(value) for name, value in vars(found.footprint).items()}
    total = float(found.footprint.total_byte)
    return RoomOut(found.capacity_byte, held, total, found.footprint.fits(found.capacity_byte), found.largest_batch)


def operators_to_csv(seen: Sequence[ConfigurationView]) -> bytes:
    """Write a line for each operator of each configuration, with SI units in the head."""
    parts = list(dict.fromkeys(m.name for look in seen for m in look.prediction.modules))
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    fixed = ["configuration", "workload", "gpu", "operator", "label", "count", "latency_s", "power_w", "energy_j"]
    writer.writerow([*fixed, *(f"{part}_w" for part in parts)])
    for index, look in enumerate(seen, start=1):
        p = look.prediction
        for share in p.ops:
            watts = {m.name: float(m.power_w) for m in share.modules}
            words = [_inert(p.name), _inert(p.gpu), _inert(str(share.op)), _inert(share.op.label)]
            numbers = [share.count, float(share.latency_s), float(share.power_w), float(share.energy_j)]
            writer.writerow([index, *words, *numbers, *(watts.get(part, "") for part in parts)])
    return out.getvalue().encode()


def _inert(cell: str) -> str:
    """Quote text that a spreadsheet would take for a formula (OWASP, CSV injection)."""
    return f"'{cell}" if cell[:1] in "=+-@\t\r" and cell else cell


JSON, CSV, HTML = "application/json", "text/csv; charset=utf-8", "text/html; charset=utf-8"
TYPES = {"svg": "image/svg+xml", "png": "image/png", "pdf": "application/pdf"}
MOST_OPERATORS = 20_000  # entries of an uploaded list, repeats not counted
REMEMBERED, REMEMBERED_BYTE = 256, 64 << 20


@dataclass(frozen=True)
class Answer:
    """One response."""

    status: int
    type: str
    body: bytes


def answer_request(kind: str, body: bytes) -> Answer:
    """Answer a request; this never raises, and never tells about the inside."""
    try:
        return REQUEST_KINDS[kind](body)
    except WattcastError as error:
        return _refusal(422, str(error))
    except (RecursionError, MemoryError):
        return _refusal(422, "the request asks for more than this server gives one request.")
    except Exception:
        traceback.print_exc(file=sys.stderr)
        return _refusal(500, "internal error; the server's log says more.")


def _refusal(status: int, text: str) -> Answer:
    return Answer(status, JSON, msgspec.json.encode(ErrorOut(clip_text(text, 2000))))


def _answer_catalogue(body: bytes) -> Answer:
    return Answer(200, JSON, msgspec.json.encode(list_catalogue()))


def _answer_predict(body: bytes) -> Answer:
    asked: ConfigurationList = read_request(body, ConfigurationList)
    seen = [_view_of(c) for c in asked.configurations]
    return Answer(200, JSON, msgspec.json.encode(predictions_to_output([look.prediction for look in seen])))


def _answer_view(body: bytes) -> Answer:
    return Answer(200, JSON, msgspec.json.encode(view_to_output(_view_of(read_request(body, Configuration)))))


def _answer_room(body: bytes) -> Answer:
    asked: Configuration = read_request(body, Configuration)
    return Answer(200, JSON, msgspec.json.encode(room_to_output(_room_of(asked))))


def _answer_csv(body: bytes) -> Answer:
    asked: ConfigurationList = read_request(body, ConfigurationList)
    return Answer(200, CSV, operators_to_csv([_view_of(c) for c in asked.configurations]))


def _answer_figure(body: bytes) -> Answer:
    asked: FigureRequest = read_request(body, FigureRequest)
    if asked.format not in TYPES:
        raise bad_value("format", f"one of {', '.join(TYPES)}", asked.format)
    if asked.figure == "clocks":
        drawn = draw_clock_curves([_view_of(c) for c in asked.configurations])
    else:
        drawn = draw_figure(asked.figure, _view_of(asked.configurations[0]))
    return Answer(200, TYPES[asked.format], encode_figure(drawn, asked.format))


def _answer_report(body: bytes) -> Answer:
    asked: ConfigurationList = read_request(body, ConfigurationList)
    first = asked.configurations[0]
    main = _view_of(first)
    others: dict[str, ConfigurationView | str] = {
        f"{index}: {c.gpu}": _view_of(c) for index, c in enumerate(asked.configurations[1:], start=2)
    }
    page = build_report_page(main, others, "wattcast serve", datetime.now(UTC))
    return Answer(200, HTML, page.encode())


def _view_of(asked: Configuration) -> ConfigurationView:
    work = _workload(asked)
    options = ModelOptions() if isinstance(work, Graph) else asked.options()
    gpu, bundle = _card(asked.gpu)
    settings = RunSettings(
        asked.clock_hz,
        asked.power_limit_w,
        asked.host_launch_s,
        asked.temperature_c,
        asked.duration_s,
        data=asked.data,
        bundle=bundle,
        force=True,  # the page says itself what does not fit
    )
    return view_configuration(work, gpu, options, settings)


def _room_of(asked: Configuration) -> MemoryRoom:
    work = _workload(asked)
    return compute_memory_room(work if isinstance(work, ModelSpec) else None, _card(asked.gpu)[0], asked.options())


@lru_cache(maxsize=64)
def _card(name: str) -> tuple[Gpu, Bundle]:
    """Return a catalogue GPU, never a file, and its coefficients."""
    gpu = hardware.load_gpu(name)
    return gpu, bundle_for(gpu)


def _workload(asked: Configuration) -> ModelSpec | Graph:
    if (asked.model is None) == (asked.file is None):
        raise bad_value("request", "either a model or a file", "both" if asked.model else "neither")
    if asked.model is not None:
        return model_catalogue.load_model(asked.model)
    assert asked.file is not None
    content = bytes(asked.file.content)
    label = clip_text(PurePath(asked.file.name.replace("\\", "/")).name or "upload", 60)
    return _uploaded(hashlib.sha256(content).digest(), label, content)


_uploads: OrderedDict[tuple[bytes, str], ModelSpec | Graph] = OrderedDict()


def _uploaded(digest: bytes, label: str, content: bytes) -> ModelSpec | Graph:
    """Return an upload, parsed once."""
    key = (digest, label)
    if key not in _uploads:
        _uploads[key] = parse_upload(label, content)
        while len(_uploads) > 16:
            _uploads.popitem(last=False)
    _uploads.move_to_end(key)
    return _uploads[key]


def parse_upload(label: str, content: bytes) -> ModelSpec | Graph:
    """Parse JSON that a user dropped on the page: a Hugging Face configuration, a trace or a list of operators."""
    check_nesting(content, label)
    plain = msgspec.json.decode(content)
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
        raise BadInput(f"{label}: {count:,} operators; over HTTP at most {MOST_OPERATORS:,}. Use the command line.")
    return graph


REQUEST_KINDS: dict[str, Callable[[bytes], Answer]] = {
    "catalogue": _answer_catalogue,
    "predict": _answer_predict,
    "view": _answer_view,
    "room": _answer_room,
    "csv": _answer_csv,
    "figure": _answer_figure,
    "report": _answer_report,
}


class AnswerCache:
    """Keeps answers by request within a number of bytes, so that the same question costs nothing the second time."""

    def __init__(self, most: int = REMEMBERED, most_byte: int = REMEMBERED_BYTE) -> None:
        self._most, self._most_byte = most, most_byte
        self._kept: OrderedDict[bytes, Answer] = OrderedDict()
        self._byte = 0

    def __call__(self, kind: str, body: bytes) -> Answer:
        key = hashlib.sha256(kind.encode() + b"\0" + body).digest()
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        found = answer_request(kind, body)
        if found.status == 200 and kind != "report":  # a report carries the time it was written
            self._kept[key] = found
            self._byte += len(found.body)
            while self._kept and (len(self._kept) > self._most or self._byte > self._most_byte):
                _, dropped = self._kept.popitem(last=False)
                self._byte -= len(dropped.body)
        return found


def warm_up(names: Sequence[str] = ("h200",)) -> None:
    """Make the first request as quick as later ones."""
    for name in names:
        answer_request("view", msgspec.json.encode({"gpu": name, "model": "gpt2", "seq": 128}))
